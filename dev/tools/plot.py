"""Draw training runs: loss, validation loss, HellaSwag, gradient norm, learning rate and
throughput.

    python -m dev.tools.plot runs/a runs/b -o training.svg    # or training.png

A run is a folder that train_gpt2.py wrote (-o), or a main.log, also llm.c's. Its lines begin with
the step:

    s:250 tel:3.2815                            validation loss
    s:250 eval:0.2945                           HellaSwag
    s:250 trl:3.2901 lr:0.000600 norm:0.31      training loss, learning rate, norm of the gradient

If a step has several lines, as after a resume, the last one counts. Tokens per second are drawn if
the folder also has the program's output in `log` (train_gpt2.py -o runs/a | tee runs/a/log). The x
axis counts tokens if --tokens-per-step, a run_*.json in the folder, or `log` says how many a step
has.

The chart needs matplotlib (pip install -r dev/requirements.txt).
"""
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common.flags import parse_flags, split_names
from dev.common.program import run_main
from train_gpt2 import UserError, replace_file

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
LINES_OF = {"loss": ("loss", "val loss")}  # a panel with more lines than the one of its name
SCORES = "val loss", "HellaSwag"  # these have few values, which are drawn as dots
LONG = 500  # steps: if a run has more, the first 3% of its losses may leave the panel at its top


def short(number, _=None):
    """A count in short form: 524k, 2.5B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{number / unit:.4g}{letter}"
    return f"{number:.4g}"


def draw(runs, x, data=None, sizes=()):
    """The chart of runs, a figure of matplotlib's. x: "steps" or "tokens". Each line has an id,
    such as run0-loss. Raises UserError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is not installed, and the chart needs it: pip install -r "
                        "dev/requirements.txt") from None
    matplotlib.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "train_gpt2", "font.sans-serif": ["DejaVu Sans"],
        "font.size": 10, "text.parse_math": False, "axes.spines.top": False,
        "axes.spines.right": False, "axes.edgecolor": "#a0a0a0", "axes.grid": True,
        "axes.grid.axis": "y", "grid.color": "#e8e8e8", "xtick.color": "#404040",
        "ytick.color": "#404040", "axes.titlesize": 11, "axes.titlelocation": "left",
        "axes.axisbelow": True, "axes.formatter.useoffset": False})
    from matplotlib import lines, ticker
    from matplotlib.figure import Figure

    colours = COLOURS
    if len(runs) > len(COLOURS):
        colours = matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, len(runs)))
    panels = [name for name in TITLES if any(key in run.series for run in runs
                                             for key in LINES_OF.get(name, (name,)))]
    heights = [3.8 if name == "loss" else 1.6 for name in panels]  # in inches
    labels = [label_of(run, runs[:i]) for i, run in enumerate(runs)]
    ncols = max(1, min(4, 120 // (max(map(len, labels)) + 8)))
    figure = Figure((9.6, 0.4 + sum(heights) + 0.19 * math.ceil(len(runs) / ncols)),
                    layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)
    figure.legend([lines.Line2D([], [], color=colour, linewidth=2)
                   for _, colour in zip(runs, colours)], labels, loc="outside upper left",
                  ncols=ncols, frameon=False, fontsize=9, labelspacing=0.3)
    for panel, ax in zip(panels, axes[:, 0]):
        draw_panel(ax, panel, runs, colours, x, data, sizes)
    ax.margins(x=0.015)
    ax.xaxis.set_major_locator(ticker.MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    ax.xaxis.set_major_formatter(short)  # of all panels
    for ax in axes[[0, -1], 0]:
        ax.set_xlabel(x)
    return figure


def image_of(figure, form):
    """The bytes of a figure's SVG or PNG: the same for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=150,
                   metadata={"Date": None} if form == "svg" else {"Software": None})
    return out.getvalue()


def draw_panel(ax, panel, runs, colours, x, data, sizes):
    """The lines of all runs in one panel, and the figures to compare them with."""
    names, widths, late = set(), set(), []
    for i, run in enumerate(runs):
        for name in filter(run.series.get, LINES_OF.get(panel, (panel,))):
            steps, values = run.series[name]
            places = steps * (run.tokens if x == "tokens" else 1)
            gid, width = f"run{i}-{name.replace(' ', '-')}", 2 * (len(values) // 100) + 1
            look = dict(color=colours[i], linewidth=1.4)
            late.append(values[steps >= 0.03 * run.last] if run.last >= LONG else values)
            names.add(name)
            if name in SCORES or len(values) == 1:
                look |= dict(marker="o", markersize=4 if len(values) < 50 else 3,
                             markeredgecolor="white", markeredgewidth=0.6, zorder=3)
            if name == "val loss" and "loss" in run.series:
                look |= dict(linestyle="none")
            if name not in SCORES and name != "lr" and width > 1:
                ax.plot(places, values, linewidth=0.7, alpha=0.35, gid=gid, color=colours[i])
                # A rate is averaged over times: 1 / rate is the time of a token.
                rate = name == "tok/s"
                values = 1 / smoothed(1 / values, width) if rate else smoothed(values, width)
                gid += "-smoothed"
                widths.add(width)
            ax.plot(places, values, gid=gid, **look)
    ax.set_title(TITLES[panel])
    ax.set_title(note_of(names, widths), loc="right", color=GREY, fontsize=9)
    ax.tick_params(labelbottom=True)
    late = np.concatenate(late)
    low, high = (each(late[np.isfinite(late)], initial=start)
                 for each, start in ((np.min, math.inf), (np.max, -math.inf)))
    score = "val loss" if panel == "loss" else panel
    if score in names & {*SCORES}:
        others = figures(score, [run for run in runs if score in run.series], data, sizes)
        drawn = [ax.axhline(value, color=GREY, linewidth=0.8, linestyle=":", zorder=2.5,
                            label=label, gid=f"figure-{label}")
                 for value, label in sorted(others, reverse=True)]
        if drawn:
            ax.legend(handles=drawn, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False,
                      fontsize=8.5, labelcolor=GREY, handlelength=0)
        high = max([high, *(value for value, _ in others)])
    else:
        ax.yaxis.set_major_formatter(short)
    if panel == "norm" and 0 < 20 * low < high:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(short)
        ax.yaxis.set_minor_formatter(lambda number, _: "")
    elif panel in ("lr", "tok/s"):
        ax.set_ylim(bottom=0)
    elif panel == "loss" and low < high:  # its beginning may leave the panel
        ax.set_ylim(top=high + 0.12 * (high - low))


def label_of(run, others):
    """A run's line in the legend: a loss that is not finite if there is one, else its last
    validation loss or another value; its name; and another run with the same losses."""
    last = {name: values[-1] for name, (_, values) in run.series.items()}
    broken = [name for name in ("loss", "val loss") if not math.isfinite(last.get(name, 0))]
    key = next(name for name in (*broken, "val loss", *SERIES) if name in last)
    same = [f" (same losses as {other.name:.15})" for other in others if all(
        np.array_equal(run.series.get(name, ()), other.series.get(name, ()), equal_nan=True)
        for name in ("loss", "val loss"))]
    name = run.name if len(run.name) <= 70 else f"{run.name[:35]}…{run.name[-34:]}"
    digits = {"lr": 6, "norm": 2}.get(key, 4)
    value = short(last[key]) if key == "tok/s" else f"{last[key]:.{digits}f}"
    return f"{key} {value}  {name}{''.join(same[:1])}"


def note_of(names, widths):
    """The note beside a panel's title, which says what its lines are."""
    mean = [f"mean of {' to '.join(map(str, sorted({min(widths), max(widths)})))} steps"
            for _ in widths][:1]
    if "loss" not in names:
        return "".join(mean or ["validation"] * ("val loss" in names))
    return "; ".join([", ".join(["line: training", *mean]),
                      *["dots: validation"] * ("val loss" in names)])


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
    runs = [read_run(argument, flags.tokens_per_step) for argument in flags.runs]
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
    figure = draw(runs, x, flags.reference, flags.model)
    replace_file(flags.output, [image_of(figure, Path(flags.output).suffix[1:])])
    print(f"wrote {flags.output}")


if __name__ == "__main__":
    run_main(main)
