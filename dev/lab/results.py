"""What the lab writes: a table of timings for each kernel, RESULTS.md, and a chart."""
import datetime
import hashlib
import math
import re
import subprocess

from dev.lab.ladder import DTYPES, LAB, find_ladder
from prepro_tinyshakespeare import UserError, replace_file

HEADER = ("| | dtype | what it is | launched with | time | speed-up | rate | of the ceiling | of a library |\n"
          "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |\n")
IMAGES = LAB.parent / "images"
ENOUGH = 0.85  # of the ceiling; a last version below this says why


def describe_gpu(device, ceilings):
    """{name: words} of a GPU, its driver, and its ceilings."""
    runtime = device.cupy.cuda.runtime
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                            text=True).stdout.split()
    rates = [f"copies {ceilings['copy'] / 1e12:.2f} TB/s"] if "copy" in ceilings else []
    rates += [f"products {ceilings[dtype] / 1e12:,.1f} TFLOP/s in {dtype}" for dtype in DTYPES if dtype in ceilings]
    cuda = divmod(runtime.runtimeGetVersion(), 1000)
    return {"device": str(device).split(",")[0], "driver": driver[0] if driver else "unknown",
            "cuda": f"{cuda[0]}.{cuda[1] // 10}", "rates": ", ".join(rates)}


def commit():
    """The commit that is checked out, in words."""
    git = ["git", "-C", str(LAB), "describe", "--always", "--abbrev=10", "--match=", "--dirty=, with changes"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def table(name, report):
    """The Markdown table of one kernel. The speed-up is over version 1, in the same dtype if it has that. A version
    that failed has no row."""
    timings = [t for t in report.timings if t.kernel == name]
    lines, first = [], {}
    for t in timings:
        if t.number == 1:
            first[t.dtype] = min(t.seconds, first.get(t.dtype, t.seconds))
    for t in sorted(timings, key=lambda t: (DTYPES.index(t.dtype), t.number, not t.own)):
        start = first.get(t.dtype) or next(iter(first.values()), None)
        library, seconds = report.library.get((name, t.dtype), ("", None))
        cells = (t.number, t.dtype, t.what, t.choice, f"{1e6 * t.seconds:,.1f} us",
                 f"{start / t.seconds:,.1f} x" if start else "", t.rate, f"{t.share:.1%} of {t.bound}",
                 f"{seconds / t.seconds:.0%} of {library}" if seconds else "")
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return HEADER + "".join(lines)


def held_back(name, report):
    """For each dtype in which the last version is below ENOUGH of its ceiling, a sentence with the reason from its row
    in the kernel's .py. If the trainer launches it, that launch counts. Nothing is said if the last version failed."""
    sentences = []
    for dtype in DTYPES:
        number, version = max(enumerate(find_ladder(name).versions, 1), key=lambda v: (dtype in v[1].dtypes, v[0]))
        timings = [t for t in report.timings if (t.kernel, t.dtype, t.number) == (name, dtype, number)]
        last = max(timings, key=lambda t: t.own, default=None)
        if last and last.share < ENOUGH:
            what = {"bytes": "the bytes alone take", "FLOPs": "the products alone take"}[last.bound]
            reasons = version.held_back
            reason = reasons if isinstance(reasons, str) else reasons.get(dtype, "not explained yet")
            sentences.append(f"\n{dtype}: {what} {1e6 * last.share * last.seconds:.1f} of the "
                             f"{1e6 * last.seconds:.1f} us; {reason}.\n")
    return "".join(sentences)


MARK = re.compile(r"<!-- written by dev\.lab --all, (\w+) -->\n(.*)<!-- end of what dev\.lab writes -->\n", re.S)
INTRO = """# The kernel lab's timings

Each kernel's versions, timed on a GPU by `python -m dev.lab --all`, which writes all between the two marks.
README.md in this folder says how it measures and what the ceiling is.

"""


def mark(body):
    return (f"<!-- written by dev.lab --all, {hashlib.sha256(body.encode()).hexdigest()[:16]} -->\n{body}"
            "<!-- end of what dev.lab writes -->\n")


def is_unchanged(text):
    """Whether the text between the marks is what the lab wrote there."""
    found = MARK.search(text)
    return bool(found) and mark(found[2]) == found[0]


def write(folder, names, report):
    """Put the tables of kernels between the marks of a folder's RESULTS.md, leave the rest as it is, and draw
    ladders.svg, that of dev/lab in dev/images. Without names, only check that this can be done. Raises UserError if the
    text between the marks was edited, or the folder cannot be made."""
    path = folder / "RESULTS.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"--out {folder}: no folder can be made there ({e.strerror}); choose another") from None
    text = path.read_text(encoding="utf-8") if path.exists() else f"{INTRO}{mark('')}"
    if not is_unchanged(text):
        raise UserError(f"{path}: the text between the lab's marks was edited by hand, so it is no measurement; move "
                        "the file away, or choose another --out")
    if not names:
        return
    d = report.device
    body = (f"\n{d['device']}, driver {d['driver']}, CUDA {d['cuda']}, {datetime.date.today()}, commit {commit()}. "
            f"Ceilings, measured in the same run: {d['rates']}.\n")
    for name in names:
        ladder = find_ladder(name)
        body += f"\n## {name} ({ladder.shape})\n\n{ladder.summary}\n\n{table(name, report)}{held_back(name, report)}"
    replace_file(path, [MARK.sub(lambda _: mark(f"{body}\n"), text).encode()])
    draw_chart((IMAGES if folder == LAB else folder) / "ladders.svg", names, report.timings)


def draw_chart(path, names, timings):
    """An SVG with a row for each kernel: the share of the ceiling that each version reaches, in its first dtype, on a
    logarithmic scale. The last version is black."""
    left, right, row, lowest = 240, 860, 22, 1e-4

    def x(share):
        return left + (right - left) * (1 - math.log(max(min(share, 1), lowest)) / math.log(lowest))

    drawn = []
    for name in names:
        best = {}
        for t in timings:
            if t.kernel == name:
                best.setdefault(t.number, t.share)
        if best:
            drawn.append((name, best))
    bottom = row * (len(drawn) + 1)
    svg = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right + 40} {bottom + 40}" font-family="sans-serif" '
           'font-size="12"><rect width="100%" height="100%" fill="white"/>']
    for share in (1e-4, 1e-3, 1e-2, 0.1, 0.5, 1):
        svg.append(f'<path d="M{x(share):.0f} {row / 2}V{bottom}" stroke="#ccc"/>'
                   f'<text x="{x(share):.0f}" y="{bottom + 16}" text-anchor="middle">{100 * share:g}%</text>')
    svg.append(f'<text x="{left}" y="{bottom + 34}">the least possible time as a share of the measured one</text>')
    for i, (name, best) in enumerate(drawn, 1):
        svg.append(f'<text x="{left - 14}" y="{row * i + 4}" text-anchor="end">{name}</text>')
        for number, share in best.items():
            fill, ink = ("black", "white") if number == max(best) else ("white", "black")
            svg.append(f'<circle cx="{x(share):.1f}" cy="{row * i}" r="8" fill="{fill}" stroke="black"/><text '
                       f'x="{x(share):.1f}" y="{row * i + 4}" text-anchor="middle" fill="{ink}">{number}</text>')
    replace_file(path, ["\n".join([*svg, "</svg>\n"]).encode()])
