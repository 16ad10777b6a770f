"""A drawing of a small launch: which threads of the first two blocks write which numbers.

The race finder sees each write, so it notes who has written each number of an output. A row of the
drawing is a row of the output.
"""
import contextlib
import ctypes
import itertools

import numpy as np

ROWS = 4, 2  # rows that are drawn of block 0, and of block 1
PARTS = 4  # of a row


@contextlib.contextmanager
def noted(device, array):
    """A context in which a device that finds races notes who writes an array. It gives a list, to
    which the numbers of the array's shape are added at its end, blocks times 1,024 plus threads, or
    -1."""
    library, found = device.library, []
    library.races_draw(*map(ctypes.c_size_t, (array.ctypes.data, array.nbytes, array.itemsize)))
    try:
        yield found
    finally:
        who = np.empty(array.size, np.int32)
        library.races_drawn(who.ctypes.data_as(ctypes.c_void_p))
        found.append(who.reshape(array.shape))


def lines_of(name, who, blocks, threads, sizes):
    """The lines of a drawing. name: the output's; who: as above; blocks: of the launch; threads: of
    a block; sizes: in words. [] if the first two blocks wrote nothing."""
    rows = who.reshape(-1, who.shape[-1]) if who.ndim > 1 else who.reshape(1, -1)
    chosen = {}
    for block, most in enumerate(ROWS):
        own = [i for i, row in enumerate(rows) if (row // 1024 == block).any() and i not in chosen]
        chosen.update(dict.fromkeys(own[:most]))
    if not chosen:
        return []
    labels = [f"{name}[{','.join(map(str, np.unravel_index(i, who.shape[:-1])))}]"
              if who.ndim > 1 else name for i in sorted(chosen)]
    wide, missing = max(map(len, labels)), np.argwhere(who < 0)
    of = (f"blocks 0 and 1 of {blocks}, with {threads} threads each" if blocks > 1 else
          f"the only block, of {threads} threads")
    lines = [f"who writes {name} in {of}, at the sizes {sizes}:"]
    lines += [f"  {label:{wide}}  {in_words(rows[i])}" for label, i in zip(labels, sorted(chosen))]
    if len(missing):
        lines.append(f"  nobody writes {len(missing):,} of {who.size:,} numbers; the first is "
                     f"{name}[{','.join(map(str, missing[0]))}]")
    return lines


def in_words(row):
    """Who writes a row: "block 0: threads 0-31 (3 times)"."""
    parts = [(who, len(list(same))) for who, same in itertools.groupby(row.tolist())]
    groups, i = [], 0
    while i < len(parts):
        who, each = parts[i]
        end, step = i + 1, parts[i + 1][0] - who if i + 1 < len(parts) else 0
        while (end < len(parts) and parts[end][1] == each and parts[end][0] >= 0 <= who
               and parts[end][0] - parts[end - 1][0] == step
               and parts[end][0] // 1024 == who // 1024):
            end += 1
        if end - i == 2 and step != 1:  # two threads are no series
            end = i + 1
        groups.append(group(who, parts[end - 1][0], step, each))
        i = end
    texts, last = [], None
    for (block, text), same in itertools.groupby(groups):
        count = len(list(same))
        text += f" ({count} times)" * (count > 1)
        texts.append(text if block == last else f"{block}{text}")
        last = block
    return "; ".join(texts[:PARTS]) + "; ..." * (len(texts) > PARTS)


def group(first, last, step, each):
    """(the block, the threads) in words, of a series of threads that write `each` numbers each."""
    if first < 0:
        return "", "nobody" + f", {each} numbers" * (each > 1)
    one, other = first % 1024, last % 1024
    text = (f"thread {one}" if first == last else f"threads {one}-{other}" +
            f" by {step}" * (step != 1))
    return f"block {first // 1024}: ", text + f", {each} numbers{' each' * (first != last)}" * (
        each > 1)
