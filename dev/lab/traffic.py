"""What a kernel's warps move, counted on the CPU, by line.

    python -m dev.lab.traffic my_softmax_forward.cu             # beside the lab's versions
    python -m dev.lab.traffic my_softmax_forward.cu --draw 38   # what one warp touches in line 38
    python -m dev.lab.traffic my_softmax_forward.cu --draw 38 --svg picture.svg
    python -m dev.lab.traffic softmax_forward 3                 # a version of the lab

dev/cpu/traffic.h says what is counted, and how. `--shape B=2,T=64` changes sizes, and `--dtype
bf16` counts in bf16.
"""
import argparse
import contextlib
import functools
import hashlib
import sys
from pathlib import Path

import numpy as np

from dev.common.cache import read_cache, write_cache
from dev.common.compiler import compiler_of, missing
from dev.common.config import Config
from dev.common.program import run_main
from dev.cpu import emulated, traffic
from dev.cpu.races import finds_races
from dev.cpu.traffic import BANKS, LANES, SECTOR
from dev.lab.bench import Bench
from dev.lab.ladder import (
    LAB, MODELS, asked_sizes, config_of, find_ladder, kernel_names, launched_by, model_of,
    parse_sizes, text_of)
from dev.lab.submission import Submission
from dev.lab.workers import sources_of
from train_gpt2 import UserError, read_kernels, replace_file

# Sizes with many rows of several hundred numbers, and several blocks. Kernels of two or more rows
# of numbers at a time, such as products, get shorter rows, since the CPU takes 100 ns for each
# access.
SIZES = dict(B=3, T=100, C=768, V=500, Vp=512, H=512, n=2**15)
OF_PRODUCTS = dict(B=2, T=64, C=128, OC=128)
OF_HEADS = dict(B=2, T=128, NH=2, NKV=1, HS=64)
WIDTH = 100  # of the report's lines
PER_BYTE = "bytes that {} move for each one wanted"


def sizes_of(ladder):
    """{name: number}: the sizes at which a ladder's kernels are counted."""
    shape = parse_sizes(ladder.shape)
    most = SIZES | (OF_PRODUCTS if "OC" in shape and "C" in shape else {}) | (
        OF_HEADS if "HS" in shape else {})
    return {name: min(size, most.get(name, size)) for name, size in shape.items()}


def choice_of(version, device):
    """One choice of a version: blocks of 256 threads, if it has them."""
    choices = [c for c in version.choices(device)
               if any(value is not None for value in c.values())] or [{}]
    return next((c for c in choices if c.get("threads") == 256), choices[0])


def last_of(ladder, dtype):
    """The number of the last version that is the lab's own, and has a dtype."""
    return max((i for i, version in enumerate(ladder.versions, 1)
                if dtype in version.dtypes and not version.library), default=1)


def together(ladder, version, dtype, known):
    """The names of the kernels to compile for a version: its own, and those that a report stands it
    beside."""
    runs = {one.run for one in (version, ladder.versions[0],
                                ladder.versions[last_of(ladder, dtype) - 1])}
    return tuple(sorted(runs)) if runs <= set(known) else tuple(known)


@functools.cache
def device_of(dtype, model, sources, only, students=()):
    with contextlib.redirect_stdout(None):
        return traffic.CountingCpu(dtype, config_of(*model), sources, only=set(only),
                                   students=students)


def benched(what, sizes=None, dtype="fp32"):
    """(Bench, version, choice) of a Submission or a version of the lab, on a device that counts: as
    for traffic_of. Raises UserError."""
    compiler = compiler_of()
    if missing(compiler) or not finds_races(compiler):
        raise UserError("traffic is counted with g++ 11 or later, and there is none")
    students, own = (), isinstance(what, Submission)
    if own:
        ladder, version = what.ladder, what.version
        sources, only, students = (LAB / "tiles.cu", what.path), (what.run,), (what.path,)
        model = MODELS[0]  # as exercises are compiled
    else:
        ladder = find_ladder(what[0])
        version, sources = ladder.versions[what[1] - 1], tuple(sources_of([what[0]]))
        only = together(ladder, version, dtype,
                        launched_by([what[0]], read_kernels([*Config.SOURCES, *sources])))
        model = model_of(ladder, sizes or sizes_of(ladder))
    device = device_of(dtype, model, sources, only, students)
    bench = Bench(ladder._replace(compiled_for=""), device, sizes or sizes_of(ladder))
    if not bench.fits(version):
        raise UserError(f"{ladder.name}: this version does not do "
                        f"{text_of(sizes or sizes_of(ladder))} in {dtype}")
    return bench, version, (dict(threads=version.threads[0]) if own
                            else choice_of(version, device))


def arrays_of(bench):
    """{name: array} of all that a Bench's launches use."""
    return {name: array for table in (bench.sets[0], bench.scratch)
            for name, array in vars(table).items() if isinstance(array, np.ndarray)}


def traffic_of(what, sizes=None, dtype="fp32"):
    """The Traffic (see dev/cpu/traffic.py) of one run of a Submission, or of a version of the lab,
    such as ("softmax_forward", 3). sizes: {name: number}, else those of sizes_of. Raises
    UserError."""
    bench, version, choice = benched(what, sizes, dtype)
    work = next(bench.launches(version, choice))
    own = what.path.name if isinstance(what, Submission) else f"{what[0]}.cu"
    return traffic.count(bench.device, work, [*arrays_of(bench).items()], own)


# ---- The table


def figures_of(t):
    """{row of the table: number or None} of a Traffic."""
    rows, worst = {}, max((c for c in t.counts if c.shared), default=None,
                          key=lambda c: c.each / c.ideal)
    for title, total in (("sectors a load", t.total("load", "copy")),
                         ("sectors a store", t.total("store")),
                         ("sectors an atomic", t.total("atomic"))):
        rows[title] = total and total.each
        rows[f"{title}, if side by side"] = total and total.ideal
    for kind, kinds in (("loads", ("load", "copy")), ("stores", ("store",))):
        total = t.total(*kinds)
        rows[PER_BYTE.format(kind)] = total and total.cost / total.least
    return {**rows, "sectors moved, times the fewest possible": t.moved / (t.fewest or 1),
            "turns a request of shared memory, at worst": worst and worst.each,
            "the same without bank conflicts": worst and worst.ideal,
            "requests with lanes missing, in %": 100 * t.partial}


def figures_of_version(name, number, sizes, dtype):
    """The same of a version of the lab. They are cached, since the compiler takes seconds. None if
    it does not do these sizes."""
    ladder = find_ladder(name)
    headers = [*emulated.HEADERS,
               *(Path(module.__file__) for module in (traffic, sys.modules[__name__]))]
    text = b"\0".join(path.read_bytes() for path in [
        *Config.SOURCES, *sources_of([name]), LAB / f"kernels/{name}.py", *headers])
    key = f"{name} {number} {text_of(sizes)} {dtype} {hashlib.sha256(text).hexdigest()[:16]}"
    found = read_cache("traffic").get(key)
    if found is None:
        version = ladder.versions[number - 1]
        if version.library or dtype not in version.dtypes:
            return None
        try:
            found = figures_of(traffic_of((name, number), sizes, dtype))
        except UserError:
            return None
        write_cache("traffic", {key: found})
    return found


def line_of(c, text):
    """A line of the report."""
    unit = "turn" if c.shared else "sector"
    where = f"line {c.line}" if text else f"{c.file}:{c.line}"
    enough = "" if c.each < 1.05 * c.ideal else f" ({c.ideal:.1f} would do)"
    line = (f"{where}: {c.each:.1f} {unit}s a{'n' * (c.kind == 'atomic')} {c.kind}{enough}" +
            f"   {text}" * bool(text))
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def report(file, sizes=None, dtype="fp32", mine=None):
    """The lines that say what a student's kernel moves, beside the lab's first and best version.
    mine: its Traffic at these sizes, if it is known. Raises UserError."""
    ladder, name = file.ladder, file.path.name
    sizes = sizes or sizes_of(ladder)
    mine = mine or traffic_of(file, sizes, dtype)
    lines = [f"memory traffic at {text_of(sizes)} in {dtype}, in sectors of 32 bytes, and in turns "
             "of shared memory:"]
    for c in mine.counts:
        own = c.file == name and 0 < c.line <= len(file.lines)
        lines.append("  " + line_of(c, file.lines[c.line - 1].strip() if own else ""))
    columns = {"yours": figures_of(mine)}
    for number in sorted({1, last_of(ladder, dtype)}):
        figures = figures_of_version(ladder.name, number, sizes, dtype)
        if figures:
            columns[f"version {number}"] = figures
    lines += table(columns)
    worst = max((c for c in mine.counts if c.file == name), default=None,
                key=lambda c: (c.each / c.ideal, c.cost))
    if worst and worst.each > 1.5 * worst.ideal:
        lines.append(f"See what a warp touches in line {worst.line}: "
                     f"python -m dev.lab.traffic {file} --draw {worst.line}")
    return lines


def table(columns):
    """Lines with the figures of several kernels. columns: {title: figures}."""
    rows = [row for row in next(iter(columns.values()))
            # a load of 16 bytes a lane moves more sectors, and none of them for nothing
            if not row.startswith(("sectors a load", "sectors a store"))
            and any(figures[row] for figures in columns.values())]
    lines = ["  " + " " * 42 + "".join(f"{title:>11}" for title in columns)]
    for row in rows:
        numbers = (figures[row] for figures in columns.values())
        lines.append(f"  {row:42}" + "".join(f"{'-' if x is None else f'{x:.1f}':>11}"
                                             for x in numbers))
    return lines


# ---- Drawings of what the lanes of one warp touch at once

WORD = 4
VERBS = {"load": "read", "store": "write", "atomic": "change", "copy": "copy"}


def words_of(sample, lanes=range(LANES)):
    """{word: [lanes]}: who wants which 4 bytes."""
    words = {}
    for lane in lanes:
        at = sample.at[lane]
        if at is not None:
            for word in range(at // WORD, (at + sample.bytes - 1) // WORD + 1):
                words.setdefault(word, []).append(lane)
    return words


def sectors_of(sample):
    """[(sector, its cells: 8 lists of lanes)] in the order of addresses."""
    words, size = words_of(sample), SECTOR // WORD
    return [(sector, [words.get(sector * size + i, []) for i in range(size)])
            for sector in sorted({word // size for word in words})]


def turns_of(sample, atomic=False):
    """[its cells: 32 lists of lanes] of each turn."""
    turns, first, at = [], 0, sample.at
    while first < LANES:
        together = LANES if sample.bytes <= 4 else LANES // 2 if sample.bytes <= 8 else LANES // 4
        both = range(first, first + 2 * together) if first % (2 * together) == 0 else ()
        if together < LANES and both and any(all(at[i] == at[i ^ other] or None in (
            at[i], at[i ^ other]) for i in both) for other in (1, 2)):
            together *= 2
        waiting = [[] for _ in range(BANKS)]
        for word, lanes in sorted(words_of(sample, range(first, first + together)).items()):
            waiting[word % BANKS] += [[lane] for lane in lanes] if atomic else [lanes]
        for turn in range(max(map(len, waiting))):
            turns.append([bank[turn] if turn < len(bank) else [] for bank in waiting])
        first += together
    return turns


def cell(lanes):
    """"." for none, "3", "3-5" or "3.." for more."""
    if not lanes:
        return "."
    if lanes == list(range(lanes[0], lanes[-1] + 1)) and len(lanes) > 1:
        return f"{lanes[0]}-{lanes[-1]}"
    return f"{lanes[0]}" + ".." * (len(lanes) > 1)


def heading(c):
    """What one request of a Count is, in a line."""
    s = c.sample
    active = sum(at is not None for at in s.at)
    who = "one lane" if active == 1 else f"{active} lanes"
    verb = VERBS[c.kind] + "s" * (active == 1)
    each = " each" * (active > 1)
    return (f"line {c.line}: {who} of warp {s.warp} of block {s.block} {verb} {s.bytes} bytes of "
            f"{s.array}{each}")


def as_text(c):
    """Lines that draw the sample of a Count."""
    s = c.sample
    if c.shared:
        rows = turns_of(s, c.kind == "atomic")
        titles = [f"turn {i}" for i in range(1, len(rows) + 1)]
        says = [f"{len(rows)} turn{'s' * (len(rows) > 1)}. A row is a turn, a column one of the "
                f"{BANKS} banks, and the number is the lane that is served."]
    else:
        sectors = sectors_of(s)
        rows = [cells for _, cells in sectors]
        titles = [f"{s.array}[{sector * SECTOR // s.item}]" for sector, _ in sectors]
        wanted = sum(bool(lanes) for cells in rows for lanes in cells)
        says = [f"{len(rows)} sector{'s' * (len(rows) > 1)} of {SECTOR} bytes: "
                f"{len(rows) * SECTOR} bytes are moved, and {wanted * WORD} of them are wanted.",
                "A row is a sector, a column 4 bytes of it, and the number is the lane that wants "
                "them."]
    texts = [[cell(lanes) for lanes in cells] for cells in rows]
    width = max(len(text) for cells in texts for text in cells) + 1
    margin = max(map(len, titles))
    lines = ["".join(f"{text:>{width}}" for text in cells) for cells in texts]
    return [heading(c), *says,
            *(f"  {title:{margin}} {line}" for title, line in zip(titles, lines))]


def svg_of(c, top):
    """(elements, height, width) of a Count's picture: a row for each lane, along x the sectors or
    banks."""
    s, step, left, begin = c.sample, 12, 60, top + 40
    sectors = {word // 8: i
               for i, word in enumerate(sorted({word // 8 * 8 for word in words_of(s)}))}
    wide = 4 if len(sectors) > 8 else 12
    if c.shared:
        count, wide, apart = BANKS, 14, 0
        column = {word: word % BANKS for word in words_of(s)}
    else:
        count, apart = 8 * len(sectors), 3
        column = {word: 8 * sectors[word // 8] + word % 8 for word in words_of(s)}

    def x_of(i):
        return left + i * wide + i // 8 * apart

    cost = len(turns_of(s, c.kind == "atomic")) if c.shared else len(sectors)
    unit = "turn" if c.shared else "sector"
    says = "32 banks of 4 bytes; blue is what a lane wants" if c.shared else (
        "sectors of 32 bytes; blue is what a lane wants")
    out = [f'<text x="8" y="{top + 16}" font-weight="bold">{heading(c)}: {cost} '
           f'{unit}{"s" * (cost > 1)}</text>',
           f'<text x="{left}" y="{begin - 6}" fill="#8b949e">{says}</text>']
    for i in range(0, count, 8):
        out.append(f'<rect x="{x_of(i)}" y="{begin}" width="{8 * wide}" height="{LANES * step}" '
                   'fill="#8b949e" fill-opacity="0.2"/>')
    for lane in range(LANES):
        y = begin + lane * step
        if lane % 4 == 0:
            out.append(f'<text x="8" y="{y + 10}" fill="#6e7681">lane {lane}</text>')
        for word in words_of(s, [lane]):
            out.append(f'<rect x="{x_of(column[word])}" y="{y}" width="{wide}" height="{step - 1}" '
                       'fill="#2f6fb5"/>')
    return out, begin + LANES * step + 20, x_of(count) + 20


def write_svg(path, counts):
    """Draw the samples of Counts, one below the other, into a file."""
    top, width, out = 0, 640, []
    for c in counts:
        elements, top, right = svg_of(c, top)
        width = max(width, right)
        out += elements
    text = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" '
            f'height="{top}" font-family="sans-serif" font-size="11" fill="#6e7681">\n' +
            "\n".join(out) + "\n</svg>\n")
    replace_file(Path(path), [text.encode()])


# ---- The command line


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m dev.lab.traffic", allow_abbrev=False,
                                     description="Count what a kernel's warps move, on the CPU.")
    parser.add_argument("what", help="a student's file, or a kernel of the lab")
    parser.add_argument("version", nargs="?", type=int, default=1,
                        help="of the kernel (default: 1)")
    parser.add_argument("--shape", help="sizes that differ from the default, such as B=2,T=64")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--draw", type=int, metavar="LINE",
                        help="draw what one warp touches in this line")
    parser.add_argument("--svg", type=Path, metavar="FILE",
                        help="with --draw: draw it into this file")
    flags = parser.parse_args(arguments)
    own = flags.what.endswith(".cu")
    if not own and flags.what not in kernel_names():
        raise UserError(f"no kernel {flags.what}; python -m dev.lab lists them")
    if flags.svg and flags.draw is None:
        raise UserError("--svg says where --draw draws: add --draw LINE")
    file = Submission(flags.what) if own else None
    ladder = file.version and file.ladder if own else find_ladder(flags.what)
    if not own and not 1 <= flags.version <= len(ladder.versions):
        raise UserError(f"{flags.what} has versions 1 to {len(ladder.versions)}, not "
                        f"{flags.version}")
    sizes = sizes_of(ladder) | (asked_sizes(flags.shape, ladder) if flags.shape else {})
    if own and flags.draw is None:
        print("\n".join(report(file, sizes, flags.dtype)))
        return 0
    found = traffic_of(file if own else (flags.what, flags.version), sizes, flags.dtype)
    if flags.draw is None:
        print("\n".join([*(line_of(c, "") for c in found.counts), *table({"": figures_of(found)})]))
        return 0
    name = file.path.name if own else f"{flags.what}.cu"
    counts = [c for c in found.counts if c.file == name and c.line == flags.draw]
    if not counts:
        lines = sorted({c.line for c in found.counts if c.file == name})
        raise UserError(f"line {flags.draw} of {name} touches no memory of several threads; these "
                        f"do: {', '.join(map(str, lines))}")
    for c in counts:
        print("\n".join(as_text(c)))
    if flags.svg:
        write_svg(flags.svg, counts)
        print(f"wrote {flags.svg}")
    return 0


if __name__ == "__main__":
    run_main(main)
