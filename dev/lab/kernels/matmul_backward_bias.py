"""dbias (OC) += the sum over rows of dout (N,OC)"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
from dev.lab.ladder import Ladder, Version
from dev.lab.mistakes import parts


def bias_shares(N):
    return max(1, min(128, N // 32))


def problem(draw, B, T, OC):
    """Columns of sizes from 1000 to 0.001."""
    N, size = B * T, np.logspace(3, -3, OC)
    dout, dbias = draw.real(size * draw.normal(N, OC)), draw.fp32(OC)
    counters = np.zeros(-(-OC // 32), np.int32)  # which must be 0 again at the end
    inputs = dict(N=N, dout=dout, dbias=dbias, counters=counters)
    truth = dict(dbias=dbias + dout.sum(0), counters=counters)
    return inputs, truth, dict(dbias=abs(dbias) + np.sqrt(N) * size)


def shares_of(a):
    """The number of shares that the rows are divided into, by default as in
    GPT2.linear_backward."""
    return a.shares or bias_shares(a.N)


def trainers(device, a):
    shares = shares_of(a)
    device.launch("matmul_backward_bias", (a.OC, shares), a.partials, a.dout, a.N, a.OC)
    device.launch("add_partials", (a.OC, 1), a.dbias, None, a.partials, shares, a.OC, True)


LADDER = Ladder(
    problem, "B=8,T=1024,OC=3072", ("B=1,T=2,OC=32", "B=3,T=9,OC=288", "B=1,T=140,OC=1600"),
    trainer_checks=("B=1,T=1,OC=2304", "B=1,T=256,OC=768", "B=2,T=300,OC=96", "B=1,T=2100,OC=32"),
    args="dbias dout N OC", fp32="dbias partials", sums="dbias", versions=(
        Version("one thread per column", "matmul_backward_bias1", "OC", threads=(32, 64, 128)),
        Version("the rows shared out, with atomics", "matmul_backward_bias2", "OC, shares",
                threads=(128, 256), more=dict(shares=(16, 64, 256)), atomics=True),
        Version("16 bytes per lane, and the last block adds up the shares", "matmul_backward_bias3",
                "OC, shares", threads=(), args="dbias partials counters dout N OC",
                more=dict(shares=(16, 32, 64)), scratch=lambda a: dict(partials=(a.shares, a.OC))),
        Version("512 neighbouring bytes of a row, no atomics: the trainer's", trainers, threads=(),
                trainer=True, more=dict(shares=(None, 1, 3, 16, 32, 64, 128)),
                scratch=lambda a: dict(partials=(shares_of(a), a.OC)), held_back="the rest is the "
                "start of the first kernel, and the second kernel, which adds up the shares"),
    ), torch=lambda torch, x: lambda: x.dout.sum(0))


EXERCISE = Exercise(
    "matmul_backward_bias1", "a sum over a column, whose numbers are far apart", "a column",
    ("A thread takes a column and adds up its N numbers in a float.",
     "Use +=: dbias already holds the gradient of earlier batches."),
    repair=Repair(1, "] += sum", "] = sum", "What does dbias hold before the launch?"),
    mistakes=parts("dout.sum", "dout[{}].sum", "the sum over rows"))
