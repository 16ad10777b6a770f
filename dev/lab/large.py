"""A student's kernel at the trainer's own sizes, where some indices exceed 2^31: of the grid only
the last block runs, on arrays that have addresses and, until they are written, no memory. What it
writes in the last row is compared: an index that wraps reads another row.
"""
import mmap

import numpy as np

from dev.lab.bench import compare_output
from dev.lab.ladder import Draw
from dev.lab.submission import signature

# -b 64 -t 1024, GPT-2's vocabulary: the logits have 3.3e9 numbers.
SIZES = dict(N=64 * 1024, V=50257, Vp=50304, C=768, OC=50304)
LOGITS = dict.fromkeys(("out", "inp", "logits", "dlogits", "probs"), ("N", "Vp"))
ROWS = dict.fromkeys(("losses", "dlosses", "targets"), ("N",))
HEAD = dict(out=("N", "OC"), inp=("N", "C"), weight=("OC", "C"), bias=("OC",))
SHAPES = {"softmax_forward": LOGITS, "crossentropy_forward": LOGITS | ROWS,
          "crossentropy_softmax_backward": LOGITS | ROWS, "classifier_fused": LOGITS | ROWS,
          "matmul_forward": HEAD}


def reserved(nbytes):
    """Bytes that read as 0. Pages that are written get memory; the others have none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


def sizes_of(file):
    """{name: number} for a Submission, or {} if its exercise has no such sizes."""
    names = {label.split()[-1] for label in signature(file.exercise)[1]}
    return ({name: size for name, size in SIZES.items() if name in names}
            if file.names[0] in SHAPES else {})


def arrays_of(file, real):
    """{argument: array} at these sizes, zeros. Raises OSError where a process may not have so many
    addresses."""
    found = {}
    for parameter in signature(file.exercise)[1]:
        kind, name = parameter.replace("*", "").split()[-2:]
        if "*" in parameter:
            shape = tuple(SIZES[size] for size in SHAPES[file.names[0]][name])
            dtype = np.dtype(dict(real=real, float=np.float32, int=np.int32)[kind])
            nbytes = int(np.prod(shape)) * dtype.itemsize
            found[name] = reserved(nbytes).view(dtype).reshape(shape)
    return found


def launch(device, file, arrays):
    """Launch the last block of the grid, with the inputs of one row in the last row of each array.
    Returns (a Comparison of what it has written there, whether nothing was written), if that is
    wrong; or None. Raises UserError if the block is stuck."""
    names = [parameter.split()[-1].lstrip("*") for parameter in signature(file.exercise)[1]]
    small = {size: SIZES[size] for size in ("V", "Vp", "C") if size in names}
    given, truth, *terms = file.ladder.problem(
        Draw(False), B=1, T=1, **small, **({"OC": 32} if "OC" in names else {}))
    ends = {name: arrays[name][tuple(slice(-size, None) for size in values.shape)]
            for name, values in {**truth, **given}.items() if name in arrays}
    for name, end in ends.items():
        end[...] = given[name] if name in given else np.uint32(2**32 - 1).view(np.float32)
    before = {name: ends[name].copy() for name in truth}
    scalars = {**SIZES, "dloss": np.float32(given.get("dloss", 0))}
    items = eval(file.version.items, {}, SIZES)
    device.library.set_last_block(1)
    try:
        device.launch(file.run, items, *(arrays.get(name, scalars.get(name)) for name in names),
                      threads=file.kernel.threads)
    finally:
        device.library.set_last_block(0)
    for name, wish in truth.items():
        same = ends[name].view(np.uint32) == before[name].view(np.uint32)  # by other blocks, or not
        found = compare_output(np, name, np.where(same, np.float32(wish), ends[name]), wish, 1e-3,
                               "sums", *(each[name] for each in terms if name in each))
        never = not found.place and bool(same.flat[-1])
        if found.place or never:
            place = found.place or tuple(size - 1 for size in wish.shape)
            return found._replace(expected=wish[place], place=tuple(int(i) - size + whole for (
                i, size, whole) in zip(place, wish.shape, arrays[name].shape))), never
    return None
