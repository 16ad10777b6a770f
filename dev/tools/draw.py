"""Draw the README's pictures into dev/images/, for white and for dark pages.

    python -m dev.tools.draw memory                              # what GPT-2 124M keeps in memory
    python -m dev.tools.draw step                                # a step's time, kernel by kernel

memory is drawn from the trainer's own tables, and needs no GPU; step from the table of kernels that
dev/bench/benchmark.py wrote into dev/RESULTS.md.
"""
import io
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.bench.step_by_kernel import PRODUCTS, read_table
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.features.base import GPT2
from train_gpt2 import BF16, HERE, UserError, replace_file

FLAGS = [
    (None, "picture", ("memory", "step"), None, "which one to draw"),
    ("-o", "--output", "name", None, "an .svg or a .png (default: dev/images/PICTURE.svg)"),
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


def figure_of(width, height):
    """(figure, axes) of this many pixels."""
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
    axes = figure.subplots()
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, axes


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


def memory():
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


def step():
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
    axes.set_title(f"GPT-2 {title}: {total:.1f} ms of kernels in a step", loc="left", size=12.5,
                   weight="bold", color=TEXT, pad=13)
    figure.tight_layout()
    return figure


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    path = Path(flags.output or HERE / f"dev/images/{flags.picture}.svg")
    if path.suffix not in (".svg", ".png"):
        raise UserError(f"-o {path}: expected a name that ends in .svg or .png")
    out = io.BytesIO()
    figure = {"memory": memory, "step": step}[flags.picture]()
    figure.savefig(out, format=path.suffix[1:], transparent=True, dpi=200,
                   metadata={"Date": None} if path.suffix == ".svg" else None)
    picture = out.getvalue()
    replace_file(path, [b" ".join(picture.split()) + b"\n" if path.suffix == ".svg" else picture])
    print(f"wrote {path}")


if __name__ == "__main__":
    run_main(main)
