"""Draw training runs: loss, validation loss, HellaSwag, gradient norm, learning rate and
throughput.

    python -m dev.tools.plot runs/a runs/b -o training.svg    # or training.png
    python -m dev.tools.plot runs/a --watch                   # in the terminal, until Ctrl-C

A run is a folder that train_gpt2.py wrote (-o), or a main.log, also llm.c's. Its lines begin with
the step:

    s:250 tel:3.2815                            validation loss
    s:250 eval:0.2945                           HellaSwag
    s:250 trl:3.2901 lr:0.000600 norm:0.31      training loss, learning rate, norm of the gradient

If a step has several lines, as after a resume, the last one counts. Tokens per second are drawn if
the folder also has the program's output in `log` (train_gpt2.py -o runs/a | tee runs/a/log). The x
axis counts tokens if --tokens-per-step, a run_*.json in the folder, or `log` says how many a step
has.

The chart needs matplotlib (pip install -r dev/requirements.txt), --watch does not.
"""
import io
import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common.flags import parse_flags, split_names
from dev.common.program import run_main
from train_gpt2 import UserError, number, replace_file

# ---- Reading runs

LINES = [  # a line of main.log, and the series of the numbers after its step
    (re.compile(r"s:(\d+) tel:(\S+)"), ("val loss",)),
    (re.compile(r"s:(\d+) eval:(\S+)"), ("HellaSwag",)),
    (re.compile(r"s:(\d+) trl:(\S+) lr:(\S+) norm:(\S+)"), ("loss", "lr", "norm")),
]
PRINTED = re.compile(r"step +(\d+)/\d+ \|.*\| +([\d,]+) tok/s(?:.*\| ([\d,]+) tokens$)?")
SERIES = "loss", "val loss", "HellaSwag", "norm", "lr", "tok/s"
LAST = 10**12  # no run has more steps, or more tokens in a step: the line is damaged


class Run(NamedTuple):
    name: str
    series: dict  # {one of SERIES: (steps, values)}, float64 arrays in the order of steps
    tokens: int | None  # per step
    data: str | None  # which of OpenAI's figures compare with it: "fineweb", "edu"
    skipped: str  # what was left out because it was damaged, or ""

    @property
    def last(self):
        """The last step in any series."""
        return int(max(steps[-1] for steps, _ in self.series.values()))


def printable(text):
    """Text that is safe for a chart or a terminal: a folder's name may have control characters, or
    not be UTF-8."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def read_text(path, what):
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected {what}") from None


def read_log(path):
    """({series: {step: value}}, which lines were skipped) of a main.log. A last line without a
    newline is still being written, and is ignored. Raises UserError if no line is as expected."""
    *lines, _ = read_text(path, "a folder with a main.log, or a main.log").split("\n")
    found, wrong = {}, []
    for i, line in enumerate(lines, 1):
        try:
            [(step, *numbers), names] = next((match.groups(), names) for pattern, names in LINES
                                             if (match := pattern.fullmatch(line)))
            step, numbers = int(step), [float(number) for number in numbers]
            # more than fp32 holds
            if step > LAST or any(3.5e38 < abs(number) < math.inf for number in numbers):
                raise ValueError
            for name, number in zip(names, numbers):
                # a step without targets: its gradient is 0, and it has no loss
                if not (math.isnan(number) and numbers[-1] == 0):
                    found.setdefault(name, {})[step] = number
        except (StopIteration, ValueError):  # no such line, or no number
            wrong += [i] * bool(line.strip())
    if not found:
        problem = "has no whole line yet"
        if wrong:
            problem = f"line {wrong[0]} is {lines[wrong[0] - 1][:40]!r}"
        raise UserError(f"{path}: {problem}; expected lines such as 's:0 tel:11.0092'")
    some = f"line {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1) if wrong else ""
    return found, f"{path}: skipped {some}, which main.log does not have" if wrong else ""


def read_printed(path):
    """({step: tokens per second}, tokens per step or None) from what the program printed."""
    speeds, tokens = {}, None
    for match in map(PRINTED.match, read_text(path, "what the program printed").split("\n")[:-1]):
        try:
            step, speed, total = (int(text.replace(",", "")) if text else 0
                                  for text in match.groups())
        except (AttributeError, ValueError):  # another line, or a damaged one
            continue
        if 1 <= step <= LAST and 1 <= speed <= LAST:
            speeds[step - 1] = float(speed)  # the line counts steps from 1
            tokens = total // step if total and total // step <= LAST else tokens
    return speeds, tokens


def read_flags(folder):
    """(the flags in the newest run_*.json of a folder, "") or ({}, what is wrong with that
    file)."""
    path = max(folder.glob("run_*.json"), default=None)
    if path is None:
        return {}, ""
    try:
        flags = dict(json.loads(path.read_bytes())["flags"])
        if not (tokens := flags.get("total_batch")) or type(tokens) is int and 1 <= tokens <= LAST:
            return flags, ""
        return {}, f"{path}: ignored, total_batch is {tokens!r:.40}; expected a number of tokens"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}, f'{path}: ignored; expected JSON such as {{"flags": {{"total_batch": 524288}}}}'


def read_run(argument, tokens=None):
    """The Run of a folder or a main.log. tokens: per step, if given. Raises UserError."""
    path = Path(argument)
    log = path / "main.log" if path.is_dir() else path
    found, skipped = read_log(log)
    flags, ignored = read_flags(log.parent)
    output = log.parent / "log"
    speeds, printed = read_printed(output) if output.is_file() else ({}, None)
    if speeds:
        found["tok/s"] = speeds
    series = {}
    for name in SERIES:
        if name in found:
            steps = np.array(sorted(found[name]), float)
            series[name] = steps, np.array([found[name][step] for step in steps])
    files = str(flags.get("train_data"))
    data = "fineweb" if "fineweb" in files or "HellaSwag" in series else None
    data = "edu" if "edu_fineweb" in files else data
    name = log.resolve().parent.name if log.name == "main.log" else log.name
    return Run(printable(name), series, tokens or flags.get("total_batch") or printed, data,
               "; ".join(filter(None, (skipped, ignored))))


# ---- What to compare with

SIZES = "124M", "350M", "774M", "1558M"
FIGURES = [  # series, the data it was measured on ("" for any), the model's size, value, whose
    *(("val loss", "fineweb", size, loss, "OpenAI's") for size, loss in zip(
        SIZES, (3.424958, 3.083089, 3.000580, 2.831273))),
    ("val loss", "fineweb", "124M", 3.2722, "llm.c's"),  # over 10 billion tokens
    ("val loss", "edu", "124M", 3.2924, "OpenAI's"),
    *(("HellaSwag", "", size, share, "OpenAI's") for size, share in zip(
        SIZES, (0.2945, 0.3752, 0.4320, 0.4889))),
]
# the next figure gets a line if it is no further than this
REACH = {"val loss": 1.0, "HellaSwag": 0.1}


def figures(series, runs, data, sizes):
    """[(value, label)] of the figures to draw in a panel: those of these sizes or, without sizes,
    those that the best run has passed, and the next one if it is near. data: "fineweb", "edu",
    "none", or None for the runs' own."""
    data = data or next((run.data for run in runs if run.data), "")
    rows = [(value, size, f"{who} {size}, {value:.4f}") for name, place, size, value, who in FIGURES
            if name == series and data != "none" and place in ("", data)]
    if sizes:
        return [(value, label) for value, size, label in rows if size in sizes]
    sign = 1 if series == "HellaSwag" else -1  # larger is better, or smaller
    scores = [sign * value for run in runs
              for value in run.series[series][1] if math.isfinite(value)]
    best = max(scores, default=-math.inf)
    ahead = min((sign * value - best for value, *_ in rows if sign * value > best), default=0)
    return [(value, label) for value, _, label in rows
            if sign * value - best <= (ahead if ahead <= REACH[series] else 0)]


def smoothed(values, width):
    """The mean of the finite values in a window of `width` (odd) around each value. Near the first
    value, where a loss falls fast, the window shrinks on both sides; near the last, only on one."""
    there, at = np.isfinite(values), np.arange(len(values))
    reach = np.minimum(at, width // 2)
    first, end = at - reach, np.minimum(at + reach + 1, len(values))
    sums, counts = (np.concatenate([[0], np.cumsum(x)])
                    for x in (np.where(there, values, 0), there))
    with np.errstate(invalid="ignore"):
        return (sums[end] - sums[first]) / (counts[end] - counts[first])


# ---- The chart

# Okabe and Ito (2008)
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"
GREY = "#707070"
TITLES = {"loss": "Loss, nats per token", "HellaSwag": "HellaSwag accuracy",  # of the panels
          "norm": "Gradient norm", "lr": "Learning rate", "tok/s": "Tokens per second"}
SCORES = "val loss", "HellaSwag"  # these have few values, which are drawn as dots
# steps: if a run is longer, the first 3% of its losses may be cut off at the panel's top
LONG = 500


def short(number, _=None):
    """A count in short form: 524k, 2.5B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.4g}{letter}"
    return f"{number:.4g}"


def figure_of(name, value):
    """A value of a series, with the digits that matter."""
    return short(value) if name == "tok/s" else f"{value:.{ {'lr': 6, 'norm': 2}.get(name, 4)}f}"


def apart(places, least):
    """Move ascending places as little as possible (by the sum of squares) so that neighbours are at
    least this far apart: those that are too close are spread evenly around their mean."""
    groups = []  # [mean of place - i * least, count]: these means must ascend
    for i, place in enumerate(places):
        groups.append([place - i * least, 1])
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (one, m), (two, n) = groups[-2:]
            groups[-2:] = [[(m * one + n * two) / (m + n), m + n]]
    return [mean + i * least
            for i, mean in enumerate(mean for mean, count in groups for _ in range(count))]


def thinned(x, y, buckets=1000):
    """The points of a line. A long line keeps only the lowest and the highest point of each bucket,
    which looks the same."""
    if len(x) <= 2 * buckets:
        return x, y
    kept = set()
    for part in np.array_split(np.arange(len(x)), buckets):
        there = part[np.isfinite(y[part])]
        kept.update(there[[np.argmin(y[there]), np.argmax(y[there])]] if there.size else part[:1])
    kept = sorted(kept)
    return x[kept], y[kept]


def draw(runs, x, data=None, sizes=(), form="svg"):
    """The chart of runs, as the bytes of an SVG or a PNG. x: "steps" or "tokens". Each line of an
    SVG has an id, such as run0-loss. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed, and the chart needs it: pip install -r "
                        "dev/requirements.txt; --watch does without") from None
    matplotlib.use("agg")
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "train_gpt2", "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10, "text.parse_math": False, "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": "#a0a0a0", "axes.grid": True,
        "axes.grid.axis": "y", "grid.color": "#e8e8e8", "xtick.color": "#404040",
        "ytick.color": "#404040", "axes.titlesize": 11, "axes.titlelocation": "left",
        "axes.axisbelow": True, "axes.formatter.useoffset": False})
    from matplotlib import lines, pyplot, ticker

    colours = COLOURS
    if len(runs) > len(COLOURS):
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    # of each panel
    contents = {name: ("loss", "val loss") if name == "loss" else (name,) for name in TITLES}
    panels = [name for name in TITLES if any(key in run.series for run in runs
                                             for key in contents[name])]
    heights = [3.8 if name == "loss" else 1.6 for name in panels]  # in inches
    labels = [label_of(run, runs[:i]) for i, run in enumerate(runs)]
    ncols = max(1, min(4, 120 // (max(map(len, labels)) + 8)))
    figure, axes = pyplot.subplots(
        len(panels), sharex=True, squeeze=False, height_ratios=heights, layout="constrained",
        figsize=(9.6, 0.4 + sum(heights) + 0.19 * math.ceil(len(runs) / ncols)))
    figure.legend([lines.Line2D([], [], color=colour, linewidth=2)
                   for _, colour in zip(runs, colours)], labels, loc="outside upper left",
                  ncols=ncols, frameon=False, fontsize=9, labelspacing=0.3)

    end = max(max(run.last, 1) * (run.tokens if x == "tokens" else 1) for run in runs)
    for panel, height, ax in zip(panels, heights, axes[:, 0]):
        bounds, drawn, widths = [], {}, set()
        for i, run in enumerate(runs):
            for name in filter(run.series.get, contents[panel]):
                steps, values = run.series[name]
                places, look = steps * (run.tokens if x == "tokens" else 1), dict(color=colours[i])
                gid, width = f"run{i}-{name.replace(' ', '-')}", 2 * (len(values) // 100) + 1
                dots = dict(marker="o", markersize=4 if len(values) < 50 else 3,
                            markeredgecolor="white", markeredgewidth=0.6,
                            zorder=3) if name in SCORES or len(values) == 1 else {}
                # raw, in a pale colour, and smoothed
                if name not in SCORES and name != "lr" and width > 1:
                    ax.plot(*thinned(places, values), linewidth=0.7, alpha=0.35, gid=gid, **look)
                    # A rate is averaged over times: 1 / rate is the time of a token.
                    values = 1 / smoothed(1 / values,
                                          width) if name == "tok/s" else smoothed(values, width)
                    gid += "-smoothed"
                    widths.add(width)
                line = "none" if name == "val loss" and "loss" in run.series else "-"
                drawn.setdefault(name, []).extend(
                    ax.plot(*thinned(places, values), linestyle=line, linewidth=1.4, gid=gid,
                            **dots, **look))
                if name != "tok/s":  # the time of a single step is noisy: only the mean must fit
                    values = run.series[name][1]
                cut = panel == "loss" and "loss" in run.series and run.last >= LONG
                late = values[steps >= 0.03 * run.last] if cut else values
                bounds += [values[np.isfinite(values)].min(initial=math.inf),
                           late[np.isfinite(late)].max(initial=0)]
        key = contents[panel][-1]
        those = [run for run in runs if key in run.series]
        others = figures(key, those, data, sizes) if those and key in REACH else []
        for value, label in others:
            ax.axhline(value, color=GREY, linewidth=0.8, linestyle=":", zorder=2.5,
                       gid=f"figure-{label}")
        ax.set_title(TITLES[panel])
        ax.set_title(note_of(drawn, widths), loc="right", color=GREY, fontsize=9)
        ax.tick_params(labelbottom=True)
        if panel in ("norm", "lr", "tok/s"):
            ax.yaxis.set_major_formatter(short)
        bounds = list(filter(math.isfinite, bounds)) + [value for value, _ in others]
        low, high = min(bounds, default=0), max(bounds, default=0)
        if panel == "norm" and 0 < 20 * low < high:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(short)
            ax.yaxis.set_minor_formatter(ticker.NullFormatter())
        elif low < high or panel in ("lr", "tok/s") and high:
            low = 0 if panel in ("lr", "tok/s") else low
            ax.set_ylim(low - 0.05 * (high - low) * (low != 0), high + 0.12 * (high - low))
        for line in drawn.values():
            tell_apart(line)
        others.sort()
        least = np.ptp(ax.get_ylim()) * 0.2 / height
        for place, (_, label) in zip(apart([value for value, _ in others], least), others):
            ax.annotate(label, (1.005, place), xycoords=("axes fraction", "data"), va="center",
                        fontsize=8.5, color=GREY, annotation_clip=False)
    ax.set_xlim(-0.015 * end, 1.015 * end)
    ax.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(short)  # of all panels
    for ax in axes[[0, -1], 0]:
        ax.set_xlabel(x)
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150,
                   metadata={"Date": None} if form == "svg" else {"Software": None})
    pyplot.close(figure)
    return out.getvalue()


def label_of(run, others):
    """A run's line in the legend: a loss that is not finite if there is one, else its last
    validation loss or another value; its name; and another run with the same losses."""
    last = {name: values[-1] for name, (_, values) in run.series.items()}
    broken = [name for name in ("loss", "val loss") if not math.isfinite(last.get(name, 0))]
    key = next(name for name in (*broken, "val loss", *SERIES) if name in last)
    losses = [name for name in ("loss", "val loss") if name in last]
    same = [other.name for other in others if losses and all(
        np.array_equal(other.series.get(name, ()), run.series[name], equal_nan=True)
        for name in losses)]
    name, most = run.name, 70 if same else 100  # letters that fit into the chart's width
    name = name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most // 2 :]}"
    twin = f" (same losses as {same[0]:.15})" if same else ""
    return f"{key} {figure_of(key, last[key])}  {name}{twin}"


def note_of(names, widths):
    """The note beside a panel's title, which says what its lines are."""
    mean = ""
    if widths:
        mean = f"mean of {' to '.join(map(str, sorted({min(widths), max(widths)})))} steps"
    if "loss" not in names:
        return "validation" * ("val loss" in names) or mean
    return ("line: training" + f", {mean}"
            * bool(mean)) + "; dots: validation" * ("val loss" in names)


def tell_apart(lines):
    """Make overlapping lines visible: each gets dashes in the gaps of the others, and rings around
    dots."""
    # of (line, its points on the screen): within a group they differ by no more than a pixel or so
    groups = []
    for line in lines:
        points = line.axes.transData.transform(line.get_xydata())
        points = points[np.isfinite(points).all(1)]
        for group in groups:
            _, (xs, ys) = group[0]
            there = (points[:, 0] >= xs.min()) & (points[:, 0] <= xs.max()) if xs.size else []
            away = np.abs(np.interp(*points[there].T[:1], xs,
                                    ys) - points[there, 1]) if np.any(there) else []
            if len(away) and np.quantile(away, 0.95) < 1:
                group.append((line, points.T))
                break
        else:
            groups.append([(line, points.T)])
    for group in groups:
        for i, (line, _) in enumerate(group):
            line.set_markersize(line.get_markersize() + (len(group) - 1 - i)
                                * min(3, 9 / len(group)))
            if i and line.get_linestyle() == "-":  # the first, below them, stays whole
                line.set_linestyle((6 * (len(group) - i), (6, 6 * (len(group) - 1))))


# ---- The terminal

BLOCKS = " ▁▂▃▄▅▆▇█"


def columns_of(steps, values, last, width):
    """The mean value in each of `width` columns, over which the steps 0..last are spread. An empty
    column repeats the one before it; those before the first value are NaN."""
    column = np.minimum((steps * width / (last + 1)).astype(int), width - 1)
    there, means = np.isfinite(values), np.full(width, np.nan)
    for i in range(width):
        mine = values[(column == i) & there]
        means[i] = mine.mean() if mine.size else means[i - 1] if i else np.nan
    return means


def sparkline(means, height):
    """`height` lines of text, with a column of blocks for each mean. The scale ends at the highest
    mean after the first tenth: before that a loss falls so far that the rest would look flat."""
    there, late = (part[np.isfinite(part)] for part in (means, means[len(means) // 10 :]))
    if not there.size:
        return [" " * len(means)] * height
    low, high = there.min(), (late if late.size else there).max()
    levels = [0 if math.isnan(mean)
              else 1 + round((8 * height - 1) * (mean - low) / ((high - low) or 1))
              for mean in means]
    return ["".join(BLOCKS[min(max(level - 8 * row, 0), 8)] for level in levels)
            for row in reversed(range(height))]


def panel(arguments, tokens, width, height):
    """The text of all runs, within this size. For a run that cannot be drawn yet, a line says
    why."""
    runs, width = [], max(width, 42)  # in a narrower terminal the lines wrap
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
            numbers = "".join(f" {figure_of(name, value):>9}" for value in ends)
            lines.append(f"{name:10}{bottom} {numbers}")
    if len(lines) > height:
        lines[height - 1 :] = [f"{len(lines) - height + 1} lines more: they need a higher terminal"]
    return "\n".join(printable(line[:width]) for line in lines)


def watch(arguments, tokens, seconds):
    """Draw panels until Ctrl-C."""
    terminal = sys.stdout.isatty()
    try:
        while True:
            size = shutil.get_terminal_size()  # 80x24 if it is not known
            text = panel(arguments, tokens, size.columns, size.lines - 1)
            print("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J" if terminal else text,
                  flush=True)
            time.sleep(seconds)
    except KeyboardInterrupt:
        print()


# ---- The program


FLAGS = [
    ("-o", "--output", "name", "training.svg", "an .svg or a .png"),
    (None, "--x", ("steps", "tokens"), None, "what to count (default: tokens, if they are known of "
     "all runs)"),
    (None, "--tokens-per-step", "count", None, "of all runs"),
    (None, "--reference", ("fineweb", "edu", "none"), None, "OpenAI's losses on FineWeb or "
     "FineWeb-Edu, as lines (default: on what a run was trained on; FineWeb, if it has HellaSwag)"),
    (None, "--model", "name", None, f"lines of these sizes, of {','.join(SIZES)} (default: those "
     "that a run has passed, and the next)"),
    (None, "--watch", "switch", 0, "1: draw in the terminal, again and again"),
    (None, "--once", "switch", 0, "1: draw in the terminal, once"),
    (None, "--every", number(float, 0.1), 2.0, "seconds between the drawings of --watch"),
]


def parse(arguments=None):
    """The flags of the command line, and the runs as flags.runs. Raises UserError."""
    runs, others = split_names(sys.argv[1:] if arguments is None else arguments, FLAGS)
    flags = parse_flags(__doc__, FLAGS, others)
    flags.runs, flags.model = runs, flags.model.split(",") if flags.model else []
    if not runs:
        raise UserError("no RUN is given: expected the folder of a run, or a main.log")
    if not {*flags.model} <= {*SIZES}:
        raise UserError(f"--model {','.join(flags.model)}: expected some of {','.join(SIZES)}")
    if Path(flags.output).suffix not in (".svg", ".png"):
        raise UserError(f"-o {flags.output}: expected a name that ends in .svg or .png")
    return flags


def main(arguments=None):
    """Everything from the flags to the chart. Raises UserError."""
    flags = parse(arguments)
    if flags.watch and not flags.once:
        return watch(flags.runs, flags.tokens_per_step, flags.every)
    runs = [read_run(argument, flags.tokens_per_step) for argument in flags.runs]
    if flags.once:
        size = shutil.get_terminal_size()
        print(panel(flags.runs, flags.tokens_per_step, size.columns, size.lines - 1))
        return
    names = [run.name for run in runs]
    runs = [run._replace(name=printable(argument)) if names.count(run.name) > 1 else run
            for run, argument in zip(runs, flags.runs)]
    for run in runs:
        if run.skipped:
            print(f"WARNING: {run.skipped}", file=sys.stderr)
    unknown = [run.name for run in runs if not run.tokens]
    if flags.x == "tokens" and unknown:
        raise UserError(f"--x tokens: nothing says how many tokens a step of {unknown[0]} has; "
                        "give --tokens-per-step")
    x = flags.x or ("steps" if unknown else "tokens")
    form = Path(flags.output).suffix[1:]
    replace_file(flags.output, [draw(runs, x, flags.reference, flags.model, form)])
    print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_main(main)
