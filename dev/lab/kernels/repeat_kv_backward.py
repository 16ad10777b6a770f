"""dinp (B,T,NH+2NKV,HS) = dout (B,T,3,NH,HS), summed over the copies of a head"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.heads import GROUPS
from dev.lab.ladder import COPIED, Ladder, Version
from dev.lab.mistakes import MODULO, parts


def problem(draw, B, T, NH, NKV, HS):
    def summed(x):
        return x[:, :, 1:].reshape(B, T, 2 * NKV, NH // NKV, HS).sum(3)

    dout = draw(B, T, 3, NH, HS)
    q = dout[:, :, 0]
    return dict(N=B * T, dout=dout), dict(dinp=np.concatenate([q, summed(dout)], 2)), dict(
        dinp=np.concatenate([np.full(q.shape, COPIED), summed(abs(dout))], 2))


def with_atomics(device, a):
    device.zero(a.dinp)
    device.launch("repeat_kv_backward1", a.N * 3 * a.NH * a.HS, a.dinp, a.dout, a.N, a.NH, a.NKV,
                  a.HS, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,NKV=4,HS=64", GROUPS, args="dinp dout N NH NKV HS", sums="dinp",
    versions=(
        Version("one thread per number of dout, with atomics", with_atomics, dtypes=("fp32",),
                atomics=True),
        Version("one thread per number of dinp", "repeat_kv_backward2", "N*(NH + 2*NKV)*HS"),
        Version("16 bytes per lane", "repeat_kv_backward3", "(NH + 2*NKV)*HS, N", held_back={
                    "bf16": "a row is 160 packs of 16 bytes: 24,576 blocks of 64 threads, each "
                    "with little on its way"}),
    ))


EXERCISE = Exercise(
    "repeat_kv_backward2", "a sum over copies, without atomics", "a number of dinp",
    ("A thread takes a number of dinp and adds up its copies in dout.",
     "The head of a query has one copy, that of a key or a value NH / NKV copies."),
    axes="b t head c", mistakes=(
        (MODULO, "2 * NKV, NH // NKV, HS)",
         "2, NH // NKV, NKV, HS).swapaxes(3, 4).reshape(B, T, 2 * NKV, -1, HS)"),
        ("only the first copy is there: add up all NH / NKV of them", ".sum(3)",
         "[:, :, :, :1].sum(3)"),
        *parts(".sum(3)", "[:, :, :, {}].sum(3)", "the sum of the copies")))
