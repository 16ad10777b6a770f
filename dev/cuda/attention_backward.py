"""dqkv (B,T,3,NH,HS), from dout and out (B,T,NH,HS) and lse (B,NH,T)"""
from dev.cuda import heads
from dev.cuda.heads import pairs_seen, plain_softmax
from dev.cuda.kernel import ALL, ATTENTION_LIMITS, Kernel, Version


def problem(draw, B, T, NH, HS, relu=0):
    return heads.backward_problem(draw, B, T, NH, NH, HS, relu)


def with_atomics(device, a):
    device.zero(a.dqkv)
    device.launch("attention_backward1", a.B * a.NH * a.T, a.dqkv, a.dout, a.out, a.qkv, a.lse, a.scale, a.B, a.T, a.NH,
                  threads=a.threads)


def without_atomics(device, a):
    rows, inputs = (a.T, a.B * a.NH), (a.dqkv, a.dout, a.qkv, a.lse)
    device.launch("attention_backward2_delta", a.B * a.NH * a.T, a.delta, a.dout, a.out, a.B, a.T, a.NH,
                  threads=a.threads)
    device.launch("attention_backward2_q", rows, *inputs, a.delta, a.scale, a.T, a.NH, threads=a.threads)
    device.launch("attention_backward2_k", rows, *inputs, a.delta, a.scale, a.T, a.NH, threads=a.threads)
    device.launch("attention_backward2_v", rows, *inputs, a.scale, a.T, a.NH, threads=a.threads)


KERNEL = Kernel(
    problem, "B=8,T=1024,NH=12,HS=64", heads.LONG_HEADS, compiled_for="HS", fp32="lse delta", sums="dqkv",
    trainer_checks=(*heads.ODD_HEADS, *(f"{sizes},relu=1" for sizes in (*heads.LONG_HEADS, *heads.ODD_HEADS))),
    limits=ATTENTION_LIMITS | dict(tf32=1e-3),  # a product more than in the forward pass
    flops=lambda a: 10 * pairs_seen(a) * a.HS, versions=(
        Version("a thread a query, with atomics", with_atomics, threads=(64, 256), dtypes=("fp32",), atomics=True,
                fits=plain_softmax),
        Version("a thread a row of dq, dk or dv", without_atomics, threads=(64, 128), scratch=heads.delta_scratch,
                fits=plain_softmax),
        Version("tensor cores, by mma.sync or wgmma: the trainer's", heads.trainers_backward, threads=(), dtypes=ALL,
                scratch=heads.delta_scratch, trainer=True),
    ), torch=heads.torch_backward)
