"""norm[0] = the square root of the sum of the squares of grads (n)"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.ladder import ANY, Ladder, Version, f32
from train_gpt2 import NORM_BLOCKS

BLOCKS = (132, 264, 528, 1056)  # some for each multiprocessor of an H200


def problem(draw, n, last=0, again=0):
    """grads over nine decades. last: with 1 the last one is infinite, with 2 NaN. again=1: it is
    done twice, and the second time needs the counter that the first left in norm[1], at 0."""
    pool = draw.pool(n)
    grads = np.resize(f32(pool * 10 ** draw.rng.uniform(-6, 3, pool.size)), n)
    grads[-1] = (1, np.inf, np.nan)[last]
    room = 2 + max(*BLOCKS, NORM_BLOCKS)  # after the counter, one for each block
    return (dict(grads=grads, norm=np.zeros(room), again=again),
            dict(norm=np.r_[np.sqrt(np.square(grads).sum()), 0, np.full(room - 2, ANY)]))


def norm_with_atomics(name, items):
    """A function that launches a kernel over items(a), which adds to zero, and the root."""
    def run(device, a):
        device.zero(a.norm)
        device.launch(name, items(a), a.norm, a.grads, a.n, threads=a.threads)
        device.launch("global_norm1_root", 1, a.norm)
    return run


def trainers(device, a):
    """With the trainer's own grid, or with the blocks that were chosen."""
    blocks = a.blocks or min(NORM_BLOCKS, 8 * device.multiprocessors)
    device.launch("global_norm", blocks, a.norm, a.grads, a.n, threads=a.threads)
    if a.again:
        device.zero(a.norm[:1])
        device.launch("global_norm", blocks, a.norm, a.grads, a.n, threads=a.threads)


# Of up to two million numbers one by one; the trainer's three blocks sum 160,000 each.
LONG_SUMS = dict(fp32=2e-4)

LADDER = Ladder(
    problem, "n=124475904", ("n=32", "n=9600,last=1", "n=9600,last=2", "n=300032"),
    trainer_checks=("n=4,again=1", "n=49380,again=1"), fp32="grads norm", traffic=lambda a: 4 * a.n,
    versions=(
        Version("one thread per number, an atomic per block", norm_with_atomics(
            "global_norm1", lambda a: a.n), dtypes=("fp32",), atomics=True, limits=LONG_SUMS),
        Version("as many blocks as run at once",
                norm_with_atomics("global_norm2", lambda a: a.blocks), dtypes=("fp32",),
                threads=(256, 512), more=dict(blocks=(3, *BLOCKS)), atomics=True, limits=LONG_SUMS),
        Version("16 bytes per lane, no float atomics: the trainer's", trainers, dtypes=("fp32",),
                threads=(256, 512), more=dict(blocks=(None, 3, *BLOCKS)), limits=dict(fp32=5e-5),
                trainer=True),
    ), torch=lambda torch, x: lambda: torch.linalg.vector_norm(x.grads))


EXERCISE = Exercise(
    "global_norm2", "a sum over everything, by one block and its shared memory", "the whole sum",
    ("There is one block. Each of its threads adds every blockDim.x-th square.",
     "block_reduce adds up the sums of the threads. One of them stores the root."),
    helpers="block_sum shared math", items="1", args="norm grads n", zeroed="norm",
    checks=("n=31", "n=9601,last=1", "n=9601,last=2", "n=300032"), shapes=dict(norm="1"),
    mistakes=(
        ("this is the sum of the squares: its root is missing", "np.sqrt", ""),
        *(("only the first warp's sum is there: is block_reduce missing, or its barrier?",
           "(grads)", f"(grads[np.arange(n) % {threads} < 32])")
          for threads in (64, 128, 256, 512, 1024)),
        *((f"the last n % {width} numbers are left out: add them up behind the loop over n / "
           f"{width}", "(grads)", f"(grads[: n // {width} * {width}])") for width in (2, 4, 8)),
        ("these are no squares: the sum is of the numbers", "np.square", ""),
        ("these are no squares: the sum is of the absolute numbers", "np.square", "abs"),
        ("this is the average of the squares: do not divide by n", ".sum()", ".mean()")))
