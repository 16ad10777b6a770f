"""What a kernel's warps move, counted on the CPU, by line.

    python -m dev.lab.traffic my_softmax_forward.cu             # an exercise, beside the lab's versions
    python -m dev.lab.traffic my_softmax_forward.cu --draw 38   # what one warp touches in line 38, as text
    python -m dev.lab.traffic my_softmax_forward.cu --draw 38 --svg picture.svg
    python -m dev.lab.traffic softmax_forward 3                 # a version of the lab

dev/cpu/traffic.h says what is counted, and how. `--shape B=2,T=64` changes sizes, and `--dtype bf16` counts in bf16.
"""
import argparse
import contextlib
import functools
import hashlib
import shutil
import sys
from pathlib import Path

import numpy as np  # after prepro_tinyshakespeare, which says how its threads wait

from dev.common.cache import read_cache, write_cache
from dev.common.config import Config
from dev.cpu import device as cpu_device, traffic
from dev.cpu.races import finds_races
from dev.lab import draw_traffic
from dev.lab.bench import Bench
from dev.lab.ladder import (LAB, MODELS, asked_sizes, config_of, find_ladder, kernel_names, launched_by, model_of,
                            parse_sizes)
from dev.lab.submission import exercise_of, read_submission
from dev.lab.workers import sources_of
from prepro_tinyshakespeare import UserError, run_main
from train_gpt2 import read_kernels

# Sizes with many rows of several hundred numbers, and several blocks. Kernels of two or more rows of numbers at a time,
# such as products, get shorter rows, since the CPU takes 100 ns for each access.
SIZES = dict(B=3, T=100, C=768, V=500, Vp=512, H=512, n=2**15)
OF_PRODUCTS = dict(B=2, T=64, C=128, OC=128)
OF_HEADS = dict(B=2, T=128, NH=2, NKV=1, HS=64)
WIDTH = 100  # of the report's lines


def sizes_of(ladder):
    """{name: number}: the sizes at which a ladder's kernels are counted."""
    shape = parse_sizes(ladder.shape)
    most = SIZES | (OF_PRODUCTS if "OC" in shape and "C" in shape else {}) | (OF_HEADS if "HS" in shape else {})
    return {name: min(size, most.get(name, size)) for name, size in shape.items()}


def text_of(sizes):
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def choice_of(version, device):
    """One choice of a version: blocks of 256 threads, if it has them."""
    choices = [c for c in version.choices(device) if any(value is not None for value in c.values())] or [{}]
    return next((c for c in choices if c.get("threads") == 256), choices[0])


def last_of(ladder, dtype):
    """The number of the last version that is the lab's own, and has a dtype."""
    return max((i for i, version in enumerate(ladder.versions, 1) if dtype in version.dtypes and not version.library),
               default=1)


def together(ladder, version, dtype, known):
    """The names of the kernels to compile for a version: its own, and those that a report stands it beside."""
    runs = {one.run for one in (version, ladder.versions[0], ladder.versions[last_of(ladder, dtype) - 1])}
    return tuple(sorted(runs)) if runs <= set(known) else tuple(known)


@functools.cache
def device_of(dtype, model, sources, only, students=()):
    with contextlib.redirect_stdout(None):
        return traffic.CountingCpu(dtype, config_of(*model), sources, only=set(only), students=students)


def traffic_of(what, sizes=None, dtype="fp32"):
    """The Traffic (see dev/cpu/traffic.py) of one run of a student's file, a Path, or of a version of the lab, such as
    ("softmax_forward", 3). sizes: {name: number}, else those of sizes_of. Raises UserError."""
    compiler = cpu_device.compiler_of()
    if not (compiler and shutil.which(compiler) and finds_races(compiler)):
        raise UserError("traffic is counted with g++ 11 or later, and there is none")
    if isinstance(what, Path):
        ladder, version = read_submission(what)
        sources, only, students = (LAB / "tiles.cu", what.resolve()), (exercise_of(what)[1],), (what.resolve(),)
        model = MODELS[0]  # as exercises are compiled
    else:
        ladder = find_ladder(what[0])
        version, sources = ladder.versions[what[1] - 1], tuple(sources_of([what[0]]))
        only = together(ladder, version, dtype, launched_by([what[0]], read_kernels([*Config.SOURCES, *sources])))
        model = model_of(ladder, sizes or sizes_of(ladder))
        students = ()
    device = device_of(dtype, model, sources, only, students)
    bench = Bench(ladder._replace(compiled_for=""), device, sizes or sizes_of(ladder))
    if not bench.fits(version):
        raise UserError(f"{ladder.name}: this version does not do {text_of(sizes or sizes_of(ladder))} in {dtype}")
    choice = dict(threads=version.threads[0]) if isinstance(what, Path) else choice_of(version, device)
    work = next(bench.launches(version, choice))
    arrays = [(name, array) for table in (bench.sets[0], bench.scratch) for name, array in vars(table).items()
              if isinstance(array, np.ndarray)]
    own = what.name if isinstance(what, Path) else f"{what[0]}.cu"
    return traffic.count(device, work, arrays, own)


# ---- The table


def figures_of(t):
    """{row of the table: number or None} of a Traffic."""
    rows, worst = {}, max((c for c in t.counts if c.shared), default=None, key=lambda c: c.each / c.ideal)
    for title, total in (("sectors a load", t.total("load", "copy")), ("sectors a store", t.total("store")),
                         ("sectors an atomic", t.total("atomic"))):
        rows[title] = total and total.each
        rows[f"{title}, if side by side"] = total and total.ideal
    return {**rows, "sectors moved, times the fewest possible": t.moved / (t.fewest or 1),
            "turns a request of shared memory, at worst": worst and worst.each,
            "the same without bank conflicts": worst and worst.ideal,
            "requests with lanes missing, in %": 100 * t.partial}


def figures_of_version(name, number, sizes, dtype):
    """The same of a version of the lab. They are cached, since the compiler takes seconds. None if it does not do these
    sizes."""
    ladder = find_ladder(name)
    headers = [*cpu_device.HEADERS, *(Path(module.__file__) for module in (traffic, sys.modules[__name__]))]
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
    line = f"{where}: {c.each:.1f} {unit}s a{'n' * (c.kind == 'atomic')} {c.kind}{enough}" + f"   {text}" * bool(text)
    return line if len(line) <= WIDTH else line[: WIDTH - 4] + " ..."


def report(path, sizes=None, dtype="fp32"):
    """The lines that say what a student's kernel moves, beside the lab's first and best version. Raises UserError."""
    name, ladder = exercise_of(path)[0], read_submission(path)[0]
    sizes = sizes or sizes_of(ladder)
    mine, source = traffic_of(path, sizes, dtype), path.read_text(encoding="utf-8-sig").splitlines()
    lines = [f"memory traffic at {text_of(sizes)} in {dtype}, in sectors of 32 bytes, and in turns of shared memory:"]
    for c in mine.counts:
        own = c.file == path.name and 0 < c.line <= len(source)
        lines.append("  " + line_of(c, source[c.line - 1].strip() if own else ""))
    columns = {"yours": figures_of(mine)}
    for number in sorted({1, last_of(ladder, dtype)}):
        figures = figures_of_version(name, number, sizes, dtype)
        if figures:
            columns[f"version {number}"] = figures
    lines += table(columns)
    worst = max((c for c in mine.counts if c.file == path.name), default=None,
                key=lambda c: (c.each / c.ideal, c.cost))
    if worst and worst.each > 1.5 * worst.ideal:
        lines.append(f"See what a warp touches in line {worst.line}: "
                     f"python -m dev.lab.traffic {path} --draw {worst.line}")
    return lines


def table(columns):
    """Lines with the figures of several kernels. columns: {title: figures}."""
    rows = [row for row in next(iter(columns.values())) if any(figures[row] for figures in columns.values())]
    lines = ["  " + " " * 42 + "".join(f"{title:>11}" for title in columns)]
    for row in rows:
        numbers = (figures[row] for figures in columns.values())
        lines.append(f"  {row:42}" + "".join(f"{'-' if x is None else f'{x:.1f}':>11}" for x in numbers))
    return lines


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m dev.lab.traffic", allow_abbrev=False,
                                     description="Count what a kernel's warps move, on the CPU.")
    parser.add_argument("what", help="a student's file, or a kernel of the lab")
    parser.add_argument("version", nargs="?", type=int, default=1, help="of the kernel (default: 1)")
    parser.add_argument("--shape", help="sizes that differ from the default, such as B=2,T=64")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--draw", type=int, metavar="LINE", help="draw what one warp touches in this line")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="with --draw: draw it into this file")
    flags = parser.parse_args(arguments)
    own = flags.what.endswith(".cu")
    if not own and flags.what not in kernel_names():
        raise UserError(f"no kernel {flags.what}; python -m dev.lab lists them")
    if flags.svg and flags.draw is None:
        raise UserError("--svg says where --draw draws: add --draw LINE")
    path = Path(flags.what)
    ladder = read_submission(path)[0] if own else find_ladder(flags.what)
    if not own and not 1 <= flags.version <= len(ladder.versions):
        raise UserError(f"{flags.what} has versions 1 to {len(ladder.versions)}, not {flags.version}")
    sizes = sizes_of(ladder) | (asked_sizes(flags.shape, ladder) if flags.shape else {})
    if own and flags.draw is None:
        print("\n".join(report(path, sizes, flags.dtype)))
        return 0
    found = traffic_of(path if own else (flags.what, flags.version), sizes, flags.dtype)
    if flags.draw is None:
        print("\n".join([*(line_of(c, "") for c in found.counts), *table({"": figures_of(found)})]))
        return 0
    name = path.name if own else f"{flags.what}.cu"
    counts = [c for c in found.counts if c.file == name and c.line == flags.draw]
    if not counts:
        lines = sorted({c.line for c in found.counts if c.file == name})
        raise UserError(f"line {flags.draw} of {name} touches no memory of several threads; these do: "
                        f"{', '.join(map(str, lines))}")
    for c in counts:
        print("\n".join(draw_traffic.as_text(c)))
    if flags.svg:
        draw_traffic.write_svg(flags.svg, counts)
        print(f"wrote {flags.svg}")
    return 0


if __name__ == "__main__":
    run_main(main)
