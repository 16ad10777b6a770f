"""out (B,T,NH,HS) = causal softmax attention of qkv (B,T,NH+2NKV,HS), NH/NKV heads to each key and
value"""
from dev.lab import heads
from dev.lab.exercises import Exercise, Repair
from dev.lab.heads import ATTENTION_LIMITS, forward_problem, pairs_seen, plain_softmax
from dev.lab.ladder import DTYPES, Ladder, Version
from dev.lab.mistakes import MODULO


def repeat_and_attend(device, a):
    device.launch("repeat_kv_forward2", (3 * a.NH * a.HS, a.N), a.repeated, a.qkv, a.N, a.NH, a.NKV,
                  a.HS)
    device.launch("attention_forward4", (a.B * a.NH, a.T), a.out, a.repeated, a.scale, a.T, a.NH,
                  shared=2 * 2 * 64 * (a.HS + 8) * a.itemsize)


def repeated(a):
    return dict(repeated=(a.B, a.T, 3, a.NH, a.HS))


LADDER = Ladder(
    forward_problem, "B=8,T=1024,NH=12,NKV=4,HS=64", heads.LONG_GROUPS,
    compiled_for="HS, GROUP, RELU", fp32="lse", sums="out lse",
    trainer_checks=(*heads.ODD_GROUPS, *(f"{sizes},with_lse=1" for sizes in heads.LONG_GROUPS),
                    *(f"{sizes},relu=1" for sizes in heads.SOME_GROUPS)),
    limits=ATTENTION_LIMITS, limits_of=dict(lse=heads.LSE_LIMITS),
    flops=lambda a: 4 * pairs_seen(a) * a.HS,
    beside=("repeat_kv_forward", "attention_forward"), versions=(
        Version("one thread per query", "gqa_forward1", "B*NH*T", threads=(64, 256),
                args="out qkv scale B T NH NKV", fits=plain_softmax),
        Version("repeat_kv, then flash on tensor cores", repeat_and_attend, threads=(),
                dtypes=DTYPES, scratch=repeated, fits=plain_softmax),
        Version("each block finds its group's keys: the trainer's", heads.trainers_forward,
                threads=(), dtypes=DTYPES, scratch=heads.lse_scratch, trainer=True,
                held_back=heads.FORWARD_GAP),
    ), torch=heads.torch_forward)


EXERCISE = Exercise(
    "gqa_forward1", "Llama's attention: query heads that share keys and values",
    "a query: one (b, h, t)",
    ("Head h reads the key head h / (NH / NKV).",
     "Keep the largest score so far, and scale down your sums when it grows."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math", axes="b t h c",
    shapes=dict(scale="1/sqrt(HS)"), note=heads.ATTEND,
    repair=Repair(1, "h / (NH / NKV)", "h % NKV",
                  "With NH = 6 and NKV = 2, which query heads share a key head?"),
    formula=heads.attend, mistakes=(
        *heads.ATTENTION_MISTAKES, (MODULO, "// (a.NH // a.NKV)", "% a.NKV")))
