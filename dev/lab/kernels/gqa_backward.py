"""dqkv (B,T,NH+2NKV,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
from dev.lab import heads
from dev.lab.exercises import Exercise
from dev.lab.heads import ATTENTION_LIMITS, backward_problem, pairs_seen, plain_softmax
from dev.lab.ladder import DTYPES, Ladder, Version
from dev.lab.mistakes import MODULO


def with_atomics(device, a):
    device.zero(a.dqkv)
    device.launch("gqa_backward1", a.B * a.NH * a.T, a.dqkv, a.dout, a.out, a.qkv, a.lse, a.scale,
                  a.B, a.T, a.NH, a.NKV, threads=a.threads)


def by_rows(device, a):
    inputs, sizes = (a.dout, a.out, a.qkv, a.lse, a.delta), (a.scale, a.B, a.T, a.NH, a.NKV)
    device.launch("gqa_backward2_q", a.B * a.NH * a.T, a.dqkv, *inputs, *sizes, threads=a.threads)
    device.launch("gqa_backward2_kv", a.B * a.NKV * a.T, a.dqkv, *inputs, *sizes, threads=a.threads)


LADDER = Ladder(
    backward_problem, "B=8,T=1024,NH=12,NKV=4,HS=64", heads.LONG_GROUPS,
    compiled_for="HS, GROUP, RELU", fp32="lse delta", sums="dqkv",
    trainer_checks=(*heads.ODD_GROUPS, *(f"{sizes},relu=1" for sizes in heads.SOME_GROUPS)),
    limits=ATTENTION_LIMITS | dict(tf32=1e-3),  # a product more than in the forward pass
    flops=lambda a: 10 * pairs_seen(a) * a.HS, versions=(
        Version("one thread per query, with atomics", with_atomics, threads=(64, 256),
                dtypes=("fp32",), atomics=True, fits=plain_softmax),
        Version("one thread per query, or a key and a value", by_rows, threads=(64, 128),
                scratch=heads.delta_scratch, fits=plain_softmax),
        Version("a block's keys meet the queries of all heads of a group: the trainer's",
                heads.trainers_backward, threads=(), dtypes=DTYPES, scratch=heads.delta_scratch,
                trainer=True, held_back=heads.BACKWARD_GAP),
    ), torch=heads.torch_backward)


EXERCISE = Exercise(
    "gqa_backward1", "the same, where several heads share keys and values",
    "a query: one (b, h, t)",
    ("Begin with attention_backward. Only the place of the keys and values changes.",
     "dqkv is zero at the start."),
    helpers="to_float from_float atomicAdd exp2", items="B*NH*T",
    args="dqkv dout out qkv lse scale B T NH NKV", zeroed="dqkv", axes="b t head c",
    shapes=dict(scale="1/sqrt(HS)"), note=heads.GRADIENT, formula=heads.attend_backward, mistakes=(
        *heads.GRADIENT_MISTAKES, (MODULO, "// (a.NH // a.NKV)", "% a.NKV")))
