"""Draw training runs: loss, validation loss, HellaSwag, gradient norm, learning rate and throughput.

    python dev/plot.py runs/a runs/b -o training.svg    # or training.png
    python dev/plot.py runs/a --watch                   # in the terminal, while it runs; Ctrl-C leaves

A RUN is a folder of train_gpt2.py's -o, or a main.log, also one of llm.c's. Its lines have the step, from 0:

    s:250 tel:3.2815                            validation loss
    s:250 eval:0.2945                           HellaSwag
    s:250 trl:3.2901 lr:0.000600 norm:0.31      training loss, learning rate, norm of the gradient

Of several lines for one step the last counts, as after a resume. Beside main.log may lie `log`, what the program has
printed, for instance by `python train_gpt2.py -o runs/a | tee runs/a/log`: tokens a second stand only there. The x axis
counts tokens if it is known how many a step has, from --tokens-per-step, a run_*.json in the folder, or `log`.

The chart needs matplotlib (pip install -r dev/requirements.txt), --watch does not.
"""
import argparse
import io
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from prepro_tinyshakespeare import UserError, number, replace_file, run as run_main

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

# ---- Runs, as their files tell

LINES = [  # a line of main.log, and what its numbers behind the step are
    (re.compile(r"s:(\d+) tel:(\S+)"), ("val loss",)),
    (re.compile(r"s:(\d+) eval:(\S+)"), ("HellaSwag",)),
    (re.compile(r"s:(\d+) trl:(\S+) lr:(\S+) norm:(\S+)"), ("loss", "lr", "norm")),
]
PRINTED = re.compile(r"step +(\d+)/\d+ \|.*\| +([\d,]+) tok/s(?:.*\| ([\d,]+) tokens$)?")
SERIES = "loss", "val loss", "HellaSwag", "norm", "lr", "tok/s"


class Run(NamedTuple):
    name: str
    series: dict  # {one of SERIES: (steps, values)}, float64 arrays in the steps' order
    tokens: int | None  # in a step
    data: str | None  # of OpenAI's figures those that compare: "fineweb", "edu"
    skipped: str  # which lines were no lines of a main.log, or ""

    @property
    def last(self):
        """The last step that anything is known of."""
        return int(max(steps[-1] for steps, _ in self.series.values()))


def read_text(path, what):
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected {what}") from None


def read_log(path):
    """({series: {step: value}}, which lines were skipped) of a main.log. A last line without an end is still being
    written and is left for later. Raises UserError if there is no line at all, or none is as it should be."""
    *lines, _ = read_text(path, "a folder with a main.log, or a main.log").split("\n")
    found, wrong = {}, []
    for i, line in enumerate(lines, 1):
        try:
            [(step, *numbers), names] = next((match.groups(), names) for pattern, names in LINES
                                             if (match := pattern.fullmatch(line)))
            for name, value in zip(names, map(float, numbers)):
                found.setdefault(name, {})[int(step)] = value
        except (StopIteration, ValueError):  # no such line, or no number
            wrong += [i] * bool(line.strip())
    if not found:
        problem = f"line {wrong[0]} is {lines[wrong[0] - 1][:40]!r}" if wrong else "has no whole line yet"
        raise UserError(f"{path}: {problem}; expected lines such as 's:0 tel:11.0092'")
    some = f"line {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1) if wrong else ""
    return found, f"{path}: skipped {some}, which main.log does not have" if wrong else ""


def read_printed(path):
    """({step: tokens a second}, tokens in a step or None) of what the program has printed."""
    speeds, tokens = {}, None
    for match in map(PRINTED.match, read_text(path, "what the program printed").split("\n")[:-1]):
        if match:
            step, speed, total = (int(text.replace(",", "")) if text else 0 for text in match.groups())
            speeds[step - 1] = float(speed)  # the line counts steps from 1
            tokens = total // step if total else tokens
    return speeds, tokens


def read_flags(folder):
    """The flags that the newest run_*.json in a folder keeps, or none. Raises UserError."""
    path = max(folder.glob("run_*.json"), default=None)
    try:
        return dict(json.loads(read_text(path, "a run's flags"))["flags"]) if path else {}
    except (ValueError, LookupError, TypeError):
        raise UserError(f'{path}: expected JSON such as {{"flags": {{"total_batch": 524288}}}}; remove it to draw '
                        "without") from None


def read_run(argument, tokens=None):
    """The Run of a folder or a main.log, with so many tokens in a step if that is given. Raises UserError."""
    path = Path(argument)
    log = path / "main.log" if path.is_dir() else path
    found, skipped = read_log(log)
    flags = read_flags(log.parent)
    speeds, printed = read_printed(log.parent / "log") if (log.parent / "log").is_file() else ({}, None)
    if speeds:
        found["tok/s"] = speeds
    series = {}
    for name in SERIES:
        if name in found:
            steps = np.array(sorted(found[name]), float)
            series[name] = steps, np.array([found[name][step] for step in steps])
    files = str(flags.get("train_data"))
    data = "edu" if "edu_fineweb" in files else "fineweb" if "fineweb" in files or "HellaSwag" in series else None
    name = log.resolve().parent.name if log.name == "main.log" else log.name
    return Run(name, series, tokens or flags.get("total_batch") or printed, data, skipped)


# ---- What to compare with

SIZES = "124M", "350M", "774M", "1558M"
FIGURES = [  # series, the data that it was measured on ("" for any), the model's size, value, whose
    *(("val loss", "fineweb", size, loss, "OpenAI's") for size, loss in zip(
        SIZES, (3.424958, 3.083089, 3.000580, 2.831273))),
    ("val loss", "fineweb", "124M", 3.2722, "llm.c's"),  # over 10 billion tokens
    ("val loss", "edu", "124M", 3.2924, "OpenAI's"),
    *(("HellaSwag", "", size, share, "OpenAI's") for size, share in zip(SIZES, (0.2945, 0.3752, 0.4320, 0.4889))),
]
REACH = {"val loss": 1.0, "HellaSwag": 0.1}  # how far away the next figure is worth a line


def figures(series, runs, data, sizes):
    """[(value, label)] of the figures to draw into a panel: those of these sizes; without sizes, those that the best
    run has passed, and the next one, if it is near. data: "fineweb", "edu", "none", or None for what the runs were
    trained on."""
    data = data or next((run.data for run in runs if run.data), "")
    rows = [(value, size, f"{who} {size}, {value:.4f}") for name, place, size, value, who in FIGURES
            if name == series and data != "none" and place in ("", data)]
    if sizes:
        return [(value, label) for value, size, label in rows if size in sizes]
    sign = 1 if series == "HellaSwag" else -1  # the larger the better, or the smaller
    scores = [sign * value for run in runs for value in run.series[series][1] if math.isfinite(value)]
    best = max(scores, default=-math.inf)
    ahead = min((sign * value - best for value, *_ in rows if sign * value > best), default=0)
    return [(value, label) for value, _, label in rows
            if sign * value - best <= (ahead if ahead <= REACH[series] else 0)]


def smoothed(values, width):
    """The mean of the `width` values around each, an odd number; at the ends of those that are there. Values that are
    no numbers are left out."""
    there, window = np.isfinite(values), np.ones(width)
    with np.errstate(invalid="ignore"):
        return np.convolve(np.where(there, values, 0), window, "same") / np.convolve(there, window, "same")


# ---- The chart

COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"  # Okabe and Ito (2008)
GREY = "#707070"
TITLES = {"loss": "Loss, nats a token", "HellaSwag": "HellaSwag, share of right answers",
          "norm": "Norm of the gradient", "lr": "Learning rate", "tok/s": "Tokens a second"}  # of the panels
LONG = 500  # steps: the beginning of a longer run, its first 3%, may leave the panel at its top


def short(number, _=None):
    """A count as people write it: 524k, 2.5B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.4g}{letter}"
    return f"{number:.4g}"


def figure_of(name, value):
    """A value of a series, with the digits that count."""
    return short(value) if name == "tok/s" else f"{value:.{ {'lr': 6, 'norm': 2}.get(name, 4)}f}"


def apart(places, least):
    """Places in ascending order, moved as little as can be (by the sum of squares) so that neighbours are at least so
    far apart: those that are too close are spread evenly around their mean."""
    groups = []  # [mean of place - i * least, how many]: these means have to ascend
    for i, place in enumerate(places):
        groups.append([place - i * least, 1])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (one, m), (two, n) = groups[-2:]
            groups[-2:] = [[(m * one + n * two) / (m + n), m + n]]
    return [mean + i * least for i, mean in enumerate(mean for mean, count in groups for _ in range(count))]


def thinned(x, y, buckets=1000):
    """The points of a line; of a long one, the lowest and the highest of each bucket of points, which look the same."""
    if len(x) <= 2 * buckets:
        return x, y
    kept = set()
    for part in np.array_split(np.arange(len(x)), buckets):
        there = part[np.isfinite(y[part])]
        kept.update(there[[np.argmin(y[there]), np.argmax(y[there])]] if there.size else part[:1])
    kept = sorted(kept)
    return x[kept], y[kept]


def draw(runs, x, data=None, sizes=(), form="svg"):
    """The chart of runs, bytes of an SVG or a PNG; x: "steps" or "tokens". Each line of an SVG has an id, such as
    run0-loss. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed, and the chart needs it: pip install -r dev/requirements.txt; "
                        "--watch does without") from None
    matplotlib.use("agg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "train_gpt2", "font.family": "sans-serif", "font.size": 10,
        "text.parse_math": False, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#a0a0a0",
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e8e8e8", "xtick.color": "#404040",
        "ytick.color": "#404040", "axes.titlesize": 11, "axes.titlelocation": "left", "axes.axisbelow": True})
    from matplotlib import pyplot, ticker

    contents = {name: ("loss", "val loss") if name == "loss" else (name,) for name in TITLES}  # of each panel
    panels = [name for name in TITLES if any(key in run.series for run in runs for key in contents[name])]
    small = [name for name in panels if name != "loss"]
    across = 3 if len(small) == 3 else 2
    rows = [["loss"] * 6] * 2 * ("loss" in panels) + [
        [name for name in small[i : i + across] for _ in range(6 // len(small[i : i + across]))]
        for i in range(0, len(small), across)]
    figure, axes = pyplot.subplot_mosaic(rows, figsize=(9.6, 0.6 + 2.1 * len(rows)), sharex=True, layout="constrained")
    marker = dict(marker="o", markersize=4, markeredgecolor="white", markeredgewidth=0.6, zorder=3)

    for panel in panels:
        ax, bounds = axes[panel], []
        for i, run in enumerate(runs):
            for name in filter(run.series.get, contents[panel]):
                steps, values = run.series[name]
                places, look = steps * (run.tokens if x == "tokens" else 1), dict(color=COLOURS[i % len(COLOURS)])
                gid, width = f"run{i}-{name.replace(' ', '-')}", 2 * (len(values) // 100) + 1
                if name in ("loss", "norm", "tok/s") and width > 1:  # as it is thin and pale, and smoothed over that
                    ax.plot(*thinned(places, values), linewidth=0.7, alpha=0.35, gid=gid, **look)
                    # Of a rate it is the mean of times that says how many tokens some steps together did a second.
                    mean = 1 / smoothed(1 / values, width) if name == "tok/s" else smoothed(values, width)
                    ax.plot(*thinned(places, mean), linewidth=1.4, gid=f"{gid}-smoothed", **look)
                else:
                    dots = marker if name in ("val loss", "HellaSwag") or len(values) == 1 else {}
                    line = "none" if name == "val loss" and "loss" in run.series else "-"
                    ax.plot(*thinned(places, values), linestyle=line, linewidth=1.4, gid=gid, **dots, **look)
                late = values[steps >= 0.03 * run.last] if panel == "loss" and run.last >= LONG else values
                bounds += [values[np.isfinite(values)].min(initial=math.inf), late[np.isfinite(late)].max(initial=0)]
        key = contents[panel][-1]
        those = [run for run in runs if key in run.series]
        lines = figures(key, those, data, sizes) if those and key in REACH else []
        for value, label in lines:
            ax.axhline(value, color=GREY, linewidth=0.8, linestyle=":", zorder=1, gid=f"figure-{label}")
            if panel != panels[0]:
                ax.annotate(label, (0, value), (4, 2), xycoords=("axes fraction", "data"), color=GREY, fontsize=8.5,
                            textcoords="offset points")
        ax.set_title(TITLES[panel])
        for axis in (ax.xaxis, ax.yaxis) if panel in ("norm", "tok/s") else (ax.xaxis,):
            axis.set_major_formatter(short)
        bounds = [bound for bound in bounds if math.isfinite(bound)] + [value for value, _ in lines]
        low, high = min(bounds, default=0), max(bounds, default=0)
        if panel == "norm" and 0 < 20 * low < high:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(short)
            ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        elif low < high or panel in ("lr", "tok/s") and high:
            low = 0 if panel in ("lr", "tok/s") else low
            ax.set_ylim(low - 0.05 * (high - low) * (low != 0), high + 0.12 * (high - low))
        if panel == panels[0]:
            name_ends(ax, runs, contents[panel], lines)
    if "loss" in panels:
        axes["loss"].set_title("line: training, smoothed; dots: validation", loc="right", color=GREY, fontsize=9)
    for name in set(rows[-1]):
        axes[name].set_xlabel(x)
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150, metadata={"Date": None} if form == "svg" else {"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def name_ends(ax, runs, names, lines):
    """Beside a panel stand the names of its lines, as high as they end: each run's, with its last value of the last of
    the names that it has, and those of the figures."""
    low, high = ax.get_ylim()
    ends = [(value, label, GREY) for value, label in lines]
    for i, run in enumerate(runs):
        for name in [name for name in names if name in run.series][-1:]:
            value = run.series[name][1][-1]
            place = value if math.isfinite(value) else high
            label = f"{run.name}, {figure_of(name, value)}"
            ends.append((min(max(place, low), high), label, COLOURS[i % len(COLOURS)]))
    ends.sort()
    least = (high - low) * min(0.055, 0.9 / max(1, len(ends)))
    for place, (_, label, colour) in zip(apart([place for place, *_ in ends], least), ends):
        ax.annotate(label, (1.005, place), xycoords=("axes fraction", "data"), va="center", fontsize=9, color=colour,
                    annotation_clip=False)


# ---- The terminal

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns_of(steps, values, last, width):
    """The mean of the values of each of `width` columns, which share the steps 0..last; one without takes that of the
    column before it. NaN before the first."""
    column = np.minimum((steps * width / (last + 1)).astype(int), width - 1)
    there, means = np.isfinite(values), np.full(width, np.nan)
    for i in range(width):
        mine = values[(column == i) & there]
        means[i] = mine.mean() if mine.size else means[i - 1] if i else np.nan
    return means


def sparkline(means, height):
    """`height` lines of text, a column of blocks for each mean, from the lowest of all means to the highest after the
    first tenth: there a loss falls so far that all else would be flat beside it."""
    there, late = (part[np.isfinite(part)] for part in (means, means[len(means) // 10 :]))
    if not there.size:
        return [" " * len(means)] * height
    low, high = there.min(), (late if late.size else there).max()
    levels = [0 if math.isnan(mean) else 1 + round((8 * height - 1) * (mean - low) / ((high - low) or 1))
              for mean in means]
    return ["".join(BLOCKS[min(max(level - 8 * row, 0), 8)] for level in levels) for row in reversed(range(height))]


def panel(arguments, tokens, width, height):
    """The text of all runs, at most so wide and high: a line that cannot be drawn yet says why."""
    runs = []
    for argument in arguments:
        try:
            runs.append(read_run(argument, tokens))
        except UserError as e:
            runs.append(str(e))
    drawn = [run for run in runs if isinstance(run, Run)]
    wanted = sum(len(run.series) for run in drawn)
    room = height - len(runs) - sum(bool(run.skipped) for run in drawn)
    tall = min(3, max(1, room // wanted)) if wanted else 1
    lines = []
    for run in runs:
        if isinstance(run, str):
            lines.append(run)
            continue
        total = f", {short(run.last * run.tokens)} tokens" if run.tokens else ""
        head = f"{run.name}: step {run.last:,}{total}"
        lines.append(f"{head[: width - 30]:{width - 30}} {'last':>9} {'low':>9} {'high':>9}")
        lines += [run.skipped] * bool(run.skipped)
        for name, (steps, values) in run.series.items():
            there = values[np.isfinite(values)]
            ends = [values[-1], *((there.min(), there.max()) if there.size else (math.nan,) * 2)]
            *above, bottom = sparkline(columns_of(steps, values, run.last, width - 41), tall)
            lines += [f"{'':10}{part}".rstrip() for part in above]
            lines.append(f"{name:10}{bottom} " + "".join(f" {figure_of(name, value):>9}" for value in ends))
    if len(lines) > height:
        lines[height - 1 :] = [f"{len(lines) - height + 1} lines more: they need a higher terminal"]
    return "\n".join(line[:width] for line in lines)


def watch(arguments, tokens, seconds):
    """Draw panels until Ctrl-C, which ends it."""
    terminal = sys.stdout.isatty()
    try:
        while True:
            size = shutil.get_terminal_size()  # 80x24 if it is not known
            text = panel(arguments, tokens, size.columns, size.lines - 1)
            print("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J" if terminal else text, flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()


# ---- The program


def parse(arguments=None):
    """The flags of the command line. Raises UserError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, exit_on_error=False)
    parser.add_argument("runs", metavar="RUN", nargs="*", help="a folder with a main.log, or a main.log")
    parser.add_argument("-o", "--output", metavar="FILE", default="training.svg", help="an .svg or a .png (default: "
                        "training.svg)")
    parser.add_argument("--x", choices=("steps", "tokens"), help="(default: tokens if they are known of all runs)")
    parser.add_argument("--tokens-per-step", metavar="N", type=number(int, 1), help="of all runs")
    parser.add_argument("--reference", choices=("fineweb", "edu", "none"), help="OpenAI's losses on FineWeb, or on "
                        "FineWeb-Edu, as lines (default: on what a run was trained on; one with HellaSwag: FineWeb)")
    parser.add_argument("--model", choices=SIZES, action="append", help="lines of this size; can be given several "
                        "times (default: those that a run has passed, and the next)")
    parser.add_argument("--watch", action="store_true", help="draw in the terminal, again and again")
    parser.add_argument("--once", action="store_true", help="draw in the terminal once")
    parser.add_argument("--every", metavar="SECONDS", type=number(float, 0.1), default=2.0, help="of --watch "
                        "(default: 2)")
    try:
        flags, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as e:
        raise UserError(f"{str(e).removeprefix('argument ')}; --help lists the flags") from None
    if unknown:
        raise UserError(f"{unknown[0]} is no flag; --help lists them")
    if not flags.runs:
        raise UserError("no RUN is given: expected the folder of a run, or a main.log")
    if Path(flags.output).suffix not in (".svg", ".png"):
        raise UserError(f"-o {flags.output}: expected a name that ends in .svg or .png")
    return flags


def main():
    """Everything from the flags to the chart. Raises UserError."""
    flags = parse()
    if flags.watch and not flags.once:
        return watch(flags.runs, flags.tokens_per_step, flags.every)
    runs = [read_run(argument, flags.tokens_per_step) for argument in flags.runs]
    if flags.once:
        size = shutil.get_terminal_size()
        print(panel(flags.runs, flags.tokens_per_step, size.columns, size.lines - 1))
        return
    names = [run.name for run in runs]
    runs = [run._replace(name=argument) if names.count(run.name) > 1 else run
            for run, argument in zip(runs, flags.runs)]
    for run in runs:
        if run.skipped:
            print(f"WARNING: {run.skipped}", file=sys.stderr)
    unknown = [run.name for run in runs if not run.tokens]
    if flags.x == "tokens" and unknown:
        raise UserError(f"--x tokens: nothing says how many tokens a step of {unknown[0]} has; give --tokens-per-step")
    x = flags.x or ("steps" if unknown else "tokens")
    form = Path(flags.output).suffix[1:]
    replace_file(flags.output, [draw(runs, x, flags.reference, flags.model, form)])
    print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_main(main)
