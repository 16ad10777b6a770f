"""out (B,T,NH,HS) = causal softmax attention of qkv (B,T,NH+2NKV,HS), NH/NKV heads to each key and value"""
from types import SimpleNamespace

from dev.lab import heads
from dev.lab.heads import ATTENTION_LIMITS, forward_problem, pairs_seen, plain_softmax
from dev.lab.ladder import DTYPES, Ladder, Version


def repeat_and_attend(device, a):
    device.launch("repeat_kv_forward2", (3 * a.NH * a.HS, a.N), a.repeated, a.qkv, a.N, a.NH, a.NKV, a.HS)
    heads.trainers_forward(device, SimpleNamespace(**{**vars(a), "qkv": a.repeated, "NKV": a.NH}))


def repeated_and_lse(a):
    return dict(repeated=(a.B, a.T, 3, a.NH, a.HS), **heads.lse_scratch(a))


LADDER = Ladder(
    forward_problem, "B=8,T=1024,NH=12,NKV=4,HS=64", heads.LONG_GROUPS, compiled_for="HS", fp32="lse", sums="out lse",
    trainer_checks=(*heads.ODD_GROUPS, *(f"{sizes},with_lse=1" for sizes in heads.LONG_GROUPS),
                    *(f"{sizes},relu=1" for sizes in (*heads.LONG_GROUPS, *heads.ODD_GROUPS))),
    limits=ATTENTION_LIMITS, limits_of=dict(lse=heads.LSE_LIMITS), flops=lambda a: 4 * pairs_seen(a) * a.HS,
    beside=("repeat_kv_forward",), versions=(
        Version("one thread per query", "gqa_forward1", "B*NH*T", threads=(64, 256), args="out qkv scale B T NH NKV",
                fits=plain_softmax),
        Version("repeat_kv, then the trainer's attention", repeat_and_attend, threads=(), dtypes=DTYPES,
                scratch=repeated_and_lse),
        Version("each block finds its group's keys: the trainer's", heads.trainers_forward, threads=(), dtypes=DTYPES,
                scratch=heads.lse_scratch, trainer=True, held_back=heads.FORWARD_GAP),
    ), torch=heads.torch_forward)
