"""dqkv (B,T,3,NH,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
from functools import partial

from dev.lab import heads
from dev.lab.exercises import Exercise
from dev.lab.heads import ATTENTION_LIMITS, pairs_seen, plain_softmax
from dev.lab.ladder import DTYPES, Ladder, Version


def problem(draw, B, T, NH, HS, relu=0):
    return heads.backward_problem(draw, B, T, NH, NH, HS, relu)


def with_atomics(device, a):
    device.zero(a.dqkv)
    device.launch("attention_backward1", a.B * a.NH * a.T, a.dqkv, a.dout, a.out, a.qkv, a.lse,
                  a.scale, a.B, a.T, a.NH, threads=a.threads)


def without_atomics(device, a):
    rows, inputs = (a.T, a.B * a.NH), (a.dqkv, a.dout, a.qkv, a.lse)
    device.launch("attention_backward2_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T,
                  a.NH, threads=a.threads)
    device.launch("attention_backward2_q", rows, *inputs, a.delta, a.scale, a.T, a.NH,
                  threads=a.threads)
    device.launch("attention_backward2_k", rows, *inputs, a.delta, a.scale, a.T, a.NH,
                  threads=a.threads)
    device.launch("attention_backward2_v", rows, *inputs, a.scale, a.T, a.NH, threads=a.threads)


def sizes_of(a):
    """(the rows of a head that a block owns, the bytes of its tiles in shared memory) on tensor
    cores."""
    rows = 128 if a.HS * a.itemsize <= 256 else 64
    return rows, (2 * rows + 2 * 2 * 32) * (a.HS + 8) * a.itemsize


def on_tensor_cores(device, a, longest_first):
    (rows, shared), inputs = sizes_of(a), (a.dqkv, a.dout, a.qkv, a.lse, a.delta)
    device.launch("attention_backward3_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T,
                  a.NH)
    for kernel in ("attention_backward3_q", "attention_backward3_kv"):
        device.launch(kernel, -(-a.T // rows) * a.B * a.NH, *inputs, a.scale, longest_first, a.T,
                      a.NH, threads=2 * rows, shared=shared)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", (*heads.LONG_HEADS, "B=1,T=300,NH=3,HS=64"),
    compiled_for="HS, RELU", fp32="lse delta", sums="dqkv",
    trainer_checks=(*heads.ODD_HEADS, *(f"{sizes},relu=1" for sizes in heads.SOME_HEADS)),
    limits=ATTENTION_LIMITS | dict(tf32=1e-3),  # a product more than in the forward pass
    flops=lambda a: 10 * pairs_seen(a) * a.HS, versions=(
        Version("one thread per query, with atomics", with_atomics, threads=(64, 256),
                dtypes=("fp32",), atomics=True, fits=plain_softmax),
        Version("one thread per row of dq, dk or dv", without_atomics, threads=(64, 128),
                scratch=heads.delta_scratch, fits=plain_softmax),
        Version("tensor cores, by mma.sync", partial(on_tensor_cores, longest_first=0), threads=(),
                dtypes=DTYPES, scratch=heads.delta_scratch, fits=plain_softmax),
        Version("the longest blocks first", partial(on_tensor_cores, longest_first=1), threads=(),
                dtypes=DTYPES, scratch=heads.delta_scratch, fits=plain_softmax),
        Version("seven products, by mma.sync or wgmma: the trainer's", heads.trainers_backward,
                threads=(), dtypes=DTYPES, scratch=heads.delta_scratch, trainer=True,
                held_back=heads.BACKWARD_GAP),
    ), torch=heads.torch_backward)


EXERCISE = Exercise(
    "attention_backward1", "attention's gradient: the hardest kernel of the trainer",
    "a query: one (b, h, t)",
    ("The weight of a pair is exp2f(LOG2_E * scale * q.k - lse): lse is a logarithm to base 2.",
     "dqkv is zero at the start. Add to keys and values with atomicAdd."),
    helpers="to_float from_float atomicAdd exp2", items="B*NH*T",
    args="dqkv dout out qkv lse scale B T NH", zeroed="dqkv", axes="b t head c", shapes=heads.QKV,
    note=heads.GRADIENT, formula=heads.attend_backward, mistakes=heads.GRADIENT_MISTAKES)
