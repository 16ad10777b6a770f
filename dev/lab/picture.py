"""A page that plays one launch of a student's kernel: python -m dev.lab --exercise my_x.cu --page.

It has what the page of a training step has of each launch (dev/page): each request of each warp,
and the numbers. Here, too: which thread touched which element, in which order, a race as two lanes
on one element, and which answers are right.
"""
from pathlib import Path

import numpy as np

from dev.cpu.races import Race
from dev.lab.bench import HANDFUL, KERNEL_LIMIT, compare_output
from dev.lab.explain import values_of
from dev.lab.ladder import ANY, parse_sizes, text_of
from dev.lab.traffic import arrays_of, benched
from dev.page.build import joined
from dev.page.record import WORD, Recording, site_of
from train_gpt2 import UserError, replace_file

SCRIPTS = "data.js", "walk.js", "play.js", "lab.js"
MOST_WORK = 3 * 10**5  # numbers of all arrays: more are too many to look at


def small_sizes(file):
    """The sizes of a launch to draw: the exercise's smallest."""
    return min(map(parse_sizes, file.ladder.checks), key=lambda sizes: np.prod([*sizes.values()]))


def bytes_of(array):
    return array.reshape(-1).view(np.uint8)


def recorded(file, sizes=None):
    """What the page of a Submission shows, a dict. Raises UserError."""
    sizes = sizes or small_sizes(file)
    bench, version, choice = benched(file, sizes)
    device = bench.device
    work = next(bench.launches(version, choice))
    arrays = {name: array for name, array in arrays_of(bench).items() if array.nbytes % WORD == 0}
    if sum(array.size for array in arrays.values()) > MOST_WORK:
        raise UserError(f"{file}: at {text_of(sizes)} there are too many numbers to draw")
    tensors = [dict(name=name, arena=i, layer=None, start=0, words=array.nbytes // WORD,
                    shape=[*array.shape] if array.itemsize == WORD else [array.nbytes // WORD],
                    kind="f" if array.dtype == np.float32 else "i")
               for i, (name, array) in enumerate(arrays.items())]
    recording = Recording(device, {name: bytes_of(x) for name, x in arrays.items()}, tensors)
    launch = device.launch
    device.launch = lambda name, items, *args, **more: recording.launch(
        lambda: launch(name, items, *args, **more), name, items, args, **more)
    try:
        work()
    finally:
        device.launch = launch
    answers = [answer_of(bench, name) for name in bench.truth if name in arrays]
    bench.fill(bench.sets[0], bench.shapes)
    return recording.data() | dict(
        file=file.path.name, kernel=file.run, sizes=sizes, sourceName=file.path.name,
        source=file.lines, answers=answers, race=race_of(work, file), shape=text_of(sizes))


def answer_of(bench, name):
    """{name, right, says, truth, wrong: indices} of an output."""
    array, truth = getattr(bench.sets[0], name), np.asarray(bench.truth[name])
    verdict = compare_output(np, name, array, truth, KERNEL_LIMIT,
                             "sums" if name in bench.ladder.sums.split() else None,
                             bench.terms.get(name))
    cared = truth != ANY
    size = np.where(np.isfinite(truth) & cared, np.abs(truth), 0)
    row = np.sqrt((size**2).mean(-1, keepdims=True)) if truth.ndim else size
    with np.errstate(invalid="ignore"):
        close = np.abs(array - truth) <= HANDFUL * KERNEL_LIMIT * (size + row) + 1e-30
    same = close | (np.isnan(array) & np.isnan(truth)) | (array == truth) | ~cared
    return dict(name=name, right=verdict.place is None, says=str(verdict),
                truth=[float(f"{x:.6g}") for x in np.where(cared & np.isfinite(truth), truth, 0)
                       .reshape(-1)],
                wrong=np.flatnonzero(~same.reshape(-1)).tolist())


def race_of(work, file):
    """What the page draws of the race that a launch has, or None: {what, why, barrier (a line, or
    0), values of the element before, between and behind the two accesses, or None each, and sides:
    [{who, does, line, code}] in the order of time}."""
    try:
        work()
    except Race as race:
        sides = []
        for side in (race.first, race.second):
            line = site_of(side.places)[1]
            who, does = side.told(False).split(f" {side.what} ")
            sides.append(dict(who=who, does=f"{side.what} {does}", line=line,
                              code=file.lines[line - 1].strip() if line else ""))
        return dict(what=race.what, why=race.why, sides=sides, barrier=race.barrier[1],
                    values=values_of(dict(what=race.what, bits=race.bits), file))
    return None


def write_page(file, sizes=None):
    """Write the page of a Submission beside it; its path. Raises UserError."""
    path = Path(file.path).with_suffix(".html").name
    replace_file(Path(path), [joined("A launch of your kernel", "lab.html", SCRIPTS,
                                     recorded(file, sizes))])
    return path
