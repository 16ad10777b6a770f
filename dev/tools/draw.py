"""Draw the README's pictures into dev/images/, for white and for dark pages.

    python -m dev.tools.draw memory                              # what GPT-2 124M keeps in memory
    python -m dev.tools.draw step                                # a step's time, kernel by kernel
    python -m dev.tools.draw loss --run runs/a --resumed 150     # the loss of a run
    python -m dev.tools.draw optimizers                          # AdamW's and Muon's losses

memory is drawn from the trainer's own tables, and needs no GPU; step from the table of kernels that
dev/bench/benchmark.py wrote into dev/RESULTS.md; loss from a main.log; optimizers from the results
of dev/bench/optimizers.py.
"""
import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.bench import optimizers as runs_of_optimizers
from dev.bench.step_by_kernel import PRODUCTS, read_table
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.features.seams import GPT2
from dev.tools.plot import read_run, smoothed
from train_gpt2 import BF16, HERE, UserError, replace_file

FLAGS = [
    (None, "picture", ("memory", "step", "loss", "optimizers"), None, "which one to draw"),
    ("-o", "--output", "name", None, "an .svg or a .png (default: dev/images/PICTURE.svg)"),
    (None, "--run", "name", HERE / "dev/images", "the run whose loss is drawn"),
    (None, "--resumed", "count", None, "the step after which it was resumed"),
    (None, "--results", "name", HERE / "dev/bench/optimizers.jsonl", "what optimizers is drawn "
     "from"),
]
TEXT, FAINT = "#6e7681", "#8b949e"  # greys with enough contrast on white and on GitHub's dark page
BLUE, GREEN, AMBER, RED, VIOLET = "#2f6fb5", "#2e8a57", "#b9770e", "#b5503a", "#7a58b0"
MIB = 2**20
COLUMNS = [  # of the memory picture, from the left: title, [(arena, colour), from the top]
    ("parameters", [("parameters", BLUE), ("low bits", "#5b8fc7")]),
    ("gradients", [("gradients", AMBER)]),
    ("AdamW m", [("adam m", GREEN)]), ("AdamW v", [("adam v", GREEN)]),
    ("activations", [("activations", VIOLET)]), ("backward", [("backward", RED)])]
WHAT = {"wte": ["token embeddings"], "fch": ["MLP, before GELU"], "fch_gelu": ["after GELU"],
        "qkv": ["q, k and v"], "logits": ["of all words, then", "their gradient"]}


def figure_of(width, height, panels=1):
    """(figure, axes) of this many pixels; of several panels in a row, an array of axes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("matplotlib is missing: pip install -r dev/requirements.txt") from None
    matplotlib.rcParams.update({
        "svg.fonttype": "path", "svg.hashsalt": "train_gpt2", "font.sans-serif": ["DejaVu Sans"],
        "font.size": 11, "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT,
        "ytick.color": TEXT, "axes.edgecolor": FAINT, "text.parse_math": False})
    figure = Figure(figsize=(width / 100, height / 100), dpi=100)
    axes = figure.subplots(1, panels, sharey=True)
    for each in np.ravel(axes):
        each.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


def headline(axes, text):
    axes.set_title(text, loc="left", size=12.5, weight="bold", color=TEXT, pad=13)
    axes.figure.tight_layout()


# ---- Memory


def tree(sizes, x, y, width, height):
    """A treemap (Bruls et al. 2000): rectangles (x, y, width, height) with areas proportional to
    these descending sizes. They are laid along the shorter side, and each row takes the number of
    them that makes its last one closest to a square."""
    while sizes:
        side, unit = min(width, height), width * height / sum(sizes)
        # The last of `count` in a row is this many times as long as it is wide.
        ratios = side**2 * np.array(sizes) / (unit * np.cumsum(sizes) ** 2)
        count = 1 + int(np.argmin(np.maximum(ratios, 1 / ratios)))
        row, sizes = sizes[:count], sizes[count:]
        depth = unit * sum(row) / side
        edges = side * np.cumsum([0, *row]) / sum(row)
        for start, end in itertools.pairwise(edges):
            yield ((x, y + start, depth, end - start) if width >= height
                   else (x + start, y, end - start, depth))
        if width >= height:
            x, width = x + depth, width - depth
        else:
            y, height = y + depth, height - depth


def cell(axes, colour, row, x, y, wide, tall):
    """Draw a tensor's rectangle, with as many of these lines as fit: its name, its MiB, what it
    is."""
    from matplotlib.patches import Rectangle
    axes.add_patch(Rectangle((x, y), wide, tall, facecolor=colour, edgecolor="white", lw=0.7))
    lines = row.name, f"{row.nbytes / MIB:,.0f} MiB", *WHAT.get(row.name, ())
    lines = [line for line in lines if wide > 7.5 * len(line)][: int(tall / 17)]
    for i, line in enumerate(lines):
        axes.text(x + wide / 2, y + tall / 2 + 17 * (i - (len(lines) - 1) / 2), line, color="white",
                  size=9 if i else 10.5, alpha=0.85 if i else 1, ha="center", va="center")


def memory(flags):
    """Columns with widths proportional to their memory, and a rectangle for each tensor."""
    tables = GPT2.tables(Config(), SimpleNamespace(real=BF16), B=4, T=1024)
    sizes = {arena: sum(row.nbytes for row in table) for arena, table in tables.items()}
    width, height, gap, top, bottom = 860, 470, 5, 46, 436
    figure, axes = figure_of(width, height)
    axes.set(xlim=(0, width), ylim=(height, 0), position=(0, 0, 1, 1))
    axes.axis("off")
    x, total = 0.0, sum(sizes[arena] for _, arenas in COLUMNS for arena, _ in arenas)
    for title, arenas in COLUMNS:
        own, y = [sizes[arena] for arena, _ in arenas], float(top)
        wide = (width - gap * (len(COLUMNS) - 1)) * sum(own) / total
        if wide > 7.5 * len(title):
            axes.text(x, 13, title, weight="bold", size=12, color=arenas[0][1], va="center")
            shown = " + ".join(f"{size / MIB:,.0f}" for size in own)
            axes.text(x, 33, f"{shown} MiB", size=10.5, va="center")
        for (arena, colour), size in zip(arenas, own):
            rows = sorted(tables[arena], key=lambda row: -row.nbytes)
            tall, numbers = (bottom - top) * size / sum(own), [row.nbytes for row in rows]
            lengths = [tall * number / size for number in numbers]
            stacked = ((x, y + sum(lengths[:i]), wide, length) for i, length in enumerate(lengths))
            for row, place in zip(rows, tree(numbers, x, y, wide, tall) if wide > 200 else stacked):
                cell(axes, colour, row, *place)
            y += tall
        x += wide + gap
    axes.text(0, 455, f"{total / 2**30:.2f} GiB at B=4, T=1024 in bf16, to scale. Light blue: 16 "
              "more bits of each parameter, for AdamW", size=10.5, va="center")
    axes.text(width - 2, 455, f"backward: {sizes['backward'] / MIB:.0f} MiB", size=10.5, color=RED,
              ha="right", va="center")
    return figure


# ---- A step, kernel by kernel


def step(flags):
    """A bar for each kernel, as long as its time. The solid part is the time that it would take at
    the GPU's rate of large products or of copies."""
    title, kernels = read_table((HERE / "dev/RESULTS.md").read_text(encoding="utf-8"))
    total, bars = sum(ms for _, ms, _ in kernels), {}  # {label: [ms, ms at the ceiling]}
    for label, ms, share in kernels:
        name = ("matrix products" if label.startswith("matmul ") else "attention"
                if label in PRODUCTS else label if ms > 0.005 * total else "all others")
        bar = bars.setdefault(name, [0.0, 0.0])
        bar[0] += ms
        bar[1] += ms * min(1, share)
    order = sorted(bars, key=lambda name: (name == "all others", -bars[name][0]))
    figure, axes = figure_of(860, 90 + 34 * len(order))
    for y, name in enumerate(order):
        ms, least = bars[name]
        colour = {"matrix products": BLUE, "attention": AMBER}.get(name, GREEN)
        axes.barh(y, ms, color=colour, alpha=0.35, height=0.66, linewidth=0)
        axes.barh(y, least, color=colour, height=0.66, linewidth=0)
        text = f"{ms:.1f} ms, {ms / total:.0%}" if ms > 1 else f"{ms:.2f} ms"
        axes.annotate(text, (ms, y), (7, 0), textcoords="offset points", va="center")
    axes.set(ylim=(len(order) - 0.5, -0.5), xlim=(0, 1.27 * bars[order[0]][0]), xticks=[])
    axes.set_yticks(range(len(order)), order)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel("solid: the least that the rate of a large product, or of a copy, allows",
                    size=10.5, loc="left", labelpad=10)
    headline(axes, f"GPT-2 {title}: {total:.1f} ms of kernels in a step")
    return figure


# ---- The loss of a run


def loss(flags):
    """Training loss, raw and smoothed; validation loss; a dot where the run was resumed."""
    series = read_run(flags.run).series
    if not {"loss", "val loss"} <= series.keys():
        raise UserError(f"{flags.run}: expected training and validation losses in main.log")
    (steps, values), (at, found) = series["loss"], series["val loss"]
    smooth = smoothed(values, 2 * (len(values) // 100) + 1)
    figure, axes = figure_of(860, 400)
    axes.plot(steps, values, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth, color=BLUE, linewidth=2, label="training, smoothed")
    axes.plot(at, found, "o", color=AMBER, markersize=7, markeredgecolor="white",
              markeredgewidth=0.8, label="validation")
    if flags.resumed:
        axes.plot(flags.resumed, np.interp(flags.resumed, steps, smooth), "o", color=RED,
                  markersize=10, markeredgecolor="white", zorder=5, label="resumed")
    low, high = np.nanmin(np.r_[smooth, found]), values[int(0.03 * len(values))]
    axes.set(xlim=(0, 1.09 * steps[-1]), ylim=(1.06 * low - 0.06 * high, high), xlabel="step")
    best = np.nanargmin(found)
    axes.annotate(f"{found[best]:.2f}", (at[best], found[best]), (0, 11), ha="center",
                  textcoords="offset points", size=13, weight="bold", color=AMBER)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.8)
    axes.tick_params(length=0, pad=6)
    axes.legend(frameon=False, fontsize=11.5, labelcolor=TEXT, loc="upper right")
    headline(axes, "loss, nats per token")
    return figure


# ---- The losses of optimizers


def runs_by_optimizer(rows):
    """({optimizer: [rows]} of the runs with the most steps, the lowest last loss first; the rows of
    shorter runs), without runs that diverged, and those of another model than the first row's or of
    a branch ("tried")."""
    rows = [row for row in rows if np.isfinite(row["loss"]) and "tried" not in row["setting"]
            and row["setting"].get("model") == rows[0]["setting"].get("model")]
    most = max((row["setting"]["steps"] for row in rows), default=0)
    found, shorter = {}, []
    for row in sorted(rows, key=lambda row: row["loss"]):
        setting = row["setting"]
        same = found.setdefault(setting["optimizer"], []) if setting["steps"] == most else shorter
        same.append(row)
    return found, shorter


def optimizers(flags):
    """Validation losses of all runs of a number of steps, the best of each optimizer thick, against
    tokens and against seconds without validations. Steps of a run take equally long. Dots are the
    ends of shorter runs, whose rates fall to 0 earlier."""
    found, shorter = runs_by_optimizer(runs_of_optimizers.read(Path(flags.results)))
    if {*found} != {"adamw", "muon"}:
        raise UserError(f"{flags.results}: expected runs of AdamW and of Muon with as many steps, "
                        f"found {' and '.join(found) or 'none'}: dev/bench/optimizers.py makes "
                        "them")
    figure, panels = figure_of(860, 400, panels=2)
    for name, shown, colour in (("adamw", "AdamW", AMBER), ("muon", "Muon", BLUE)):
        for i, row in enumerate(found[name]):
            steps, losses = np.array(row["curve"]).T
            of_step = row["tokens"] / 1e6, row["seconds"] / row["setting"]["steps"]
            label = f"{shown}, {len(found[name])} runs" if i == 0 else None
            for axes, size in zip(panels, of_step):
                axes.plot(size * steps, losses, color=colour, alpha=0.25 if i else 1,
                          linewidth=1 if i else 2.5, label=label, zorder=2 if i else 3)
                if i == 0:
                    axes.annotate(f"{losses[-1]:.2f}", (size * steps[-1], losses[-1]), (6, -4),
                                  textcoords="offset points", weight="bold", color=colour)
    for i, row in enumerate(shorter):
        colour = BLUE if row["setting"]["optimizer"] == "muon" else AMBER
        tokens = row["tokens"] / 1e6 * row["setting"]["steps"]
        for axes, x in zip(panels, (tokens, row["seconds"])):
            axes.plot(x, row["loss"], "o", color=colour, markersize=5.5, markeredgecolor="white",
                      zorder=4, label="ends of shorter runs" if i == 0 else None)
    for axes, unit in zip(panels, ("million tokens", "seconds of training")):
        axes.set_xlim(0, 1.15 * axes.dataLim.x1)
        axes.set_xlabel(unit)
        axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.8)
        axes.tick_params(length=0, pad=6)
    panels[0].legend(frameon=False, fontsize=11.5, labelcolor=TEXT, loc="upper right")
    headline(panels[0], "validation loss, nats per token")
    return figure


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    path = Path(flags.output or HERE / f"dev/images/{flags.picture}.svg")
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"-o {path}: expected a name that ends in .svg or .png")
    out = io.BytesIO()
    pictures = {"memory": memory, "step": step, "loss": loss, "optimizers": optimizers}
    figure = pictures[flags.picture](flags)
    figure.savefig(out, format=path.suffix[1:], transparent=True, dpi=200,
                   metadata={"Date": None} if path.suffix == ".svg" else None)
    picture = out.getvalue()
    replace_file(path, [b" ".join(picture.split()) + b"\n" if path.suffix == ".svg" else picture])
    print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)
