"""The tables of dev/bench/benchmark.py, in Markdown. A measurement is a dict of numbers, or a str
that says why there is none."""
import textwrap

GIB = 2**30
# What the section Faster of train_gpt2.py adds to the plain device, and then the chapters of dev/.
FASTER = [
    "the plain device",
    "cuBLASLt, which adds the bias; Hopper's own attention",
    "GELU in the product",
    "a step as one graph: the two files alone",
    "dev/: algorithms of products chosen by timing them",
    "dev/: biases summed by the kernels that write their gradients",
    "dev/: products with GELU by kernels of our own",
    "dev/: a step reported when the next is queued: the default run",
]
TWO_FILES = 3  # the index of the last line without dev/
CHAPTERS = ["products", "fused biases", "gelu products", "late reports"]  # features of the others
STEPS_TEXT = """Whole training steps, median ms, measured one after another in one call. A step
includes the copy of its batch to the GPU and the read of the loss. The tokens are random,
distributed like words. GiB is the most that a program's allocator took; for llm.c, all that was in
use on the GPU. Ours is `python train_gpt2.py -e MODEL --dtype DTYPE -b B -x {steps} -v 0 -s 0`.
PyTorch is compiled, with fused AdamW, autocast for bf16, and the mode and attention that were
fastest when several were tried: {modes}. llm.c is f1e2ace with cuDNN's attention and `-ge 2`. The
roofline is the time of the FLOPs that a step needs at the rate of a large product ({rates}
TFLOP/s), plus that of the bytes of all kernels but products and attention at the rate of a copy
({copy:.2f} TB/s). FLOPs are 6 for each weight and token, plus attention's, half of it masked."""
FASTER_TEXT = """Each line adds one thing. The first four are the two files alone, the last is the
default run."""
KERNELS_TEXT = """Kernels launched one by one between two events, right after {before} whole steps,
so that the clock is that of a step; median of {steps} steps.{whole} A kernel's bytes are those of
its arrays, each once, twice where it is read and written; what is still in L2 comes faster than the
copy. Products (M x N x K) and attention are counted in FLOPs, attention's with the scores that it
computes again."""


def paragraph(text, **values):
    return textwrap.fill(" ".join(text.split()).format(**values), 120, break_long_words=False,
                         break_on_hyphens=False)


def markdown(head, right, rows):
    """A table. Columns from number `right` on are aligned to the right."""
    lines = [head, ["---" if i < right else "---:" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def ms_of(result):
    return f"{result['ms']:.2f}" if isinstance(result, dict) else "-"


def gib_of(result):
    return f"{result['memory'] / GIB:.1f}" if isinstance(result, dict) and result["memory"] else "-"


def step_table(rows, ours, torch, llmc, ceilings):
    """Ours beside the peers. Each is {row: measurement}; a peer may lack rows."""
    head = ["GPT-2", "ours, ms", "tok/s", "GiB", "PyTorch, ms", "GiB", "llm.c, ms", "GiB",
            "best peer / ours", "roofline, ms", "roofline / ours"]
    lines = []
    for row in rows:
        mine, ratio, least, share = ours[row], "-", "-", "-"
        peers = [some.get(row) for some in (torch, llmc)]
        speed = "-"
        if isinstance(mine, dict):
            speed = f"{1e3 * row.B * row.T / mine['ms']:,.0f}"
            times = [peer["ms"] for peer in peers if isinstance(peer, dict)]
            ratio = f"{min(times) / mine['ms']:.2f}" if times else "-"
            if mine["bytes"] is not None:
                roofline = 1e3 * (mine["flops"] / ceilings["rates"][row.dtype]
                                  + mine["bytes"] / ceilings["copy"])
                least, share = f"{roofline:.2f}", f"{roofline / mine['ms']:.0%}"
        lines.append([str(row), ms_of(mine), speed, gib_of(mine), *(
            text for peer in peers for text in (ms_of(peer), gib_of(peer))), ratio, least, share])
    return markdown(head, 1, lines)


def missing(rows, **programs):
    """A line for each missing measurement, with the reason."""
    return [f"- {row}, {name}: {of[row]}" for name, of in programs.items() for row in rows
            if isinstance(of.get(row), str)]


def faster_table(faster):
    """What each of FASTER saves. faster: {row: [a measurement for each]}."""
    lines = []
    for i, added in enumerate(FASTER):
        cells = [added]
        for results in faster.values():
            both = results[max(0, i - 1) : i + 1]
            saves = both[0]["ms"] - both[1]["ms"] if i and all(
                isinstance(result, dict) for result in both) else None
            cells += [ms_of(results[i]), "" if saves is None else f"{saves:.2f}"]
        lines.append(cells)
    head = ["added", *(text for row in faster for text in (f"{row}, ms", "saves"))]
    return markdown(head, 1, lines)


def kernel_table(dtype, kernels, ceilings):
    """The table of a step's kernels in this dtype. kernels: from step_by_kernel.by_label."""
    total, lines = sum(kernel["ms"] for kernel in kernels), []
    for kernel in kernels:
        rate, unit = kernel["work"] / (1e-3 * kernel["ms"]), kernel["unit"]
        ceiling = ceilings["copy"] if unit == "B" else ceilings["rates"][dtype]
        lines.append([kernel["label"], str(kernel["launches"]), f"{kernel['us']:.1f}",
                      f"{kernel['ms']:.3f}", f"{kernel['ms'] / total:.1%}",
                      f"{kernel['work'] / kernel['launches'] / 1e9:,.4g} G{unit}",
                      f"{rate / 1e12:.2f} T{unit}/s", f"{rate / ceiling:.0%}"])
    lines.append(["all", str(sum(kernel["launches"] for kernel in kernels)), "", f"{total:.3f}",
                  "100.0%", "", "", ""])
    return markdown(["kernel", "launches", "us each", "ms a step", "share", "a launch", "rate",
                     "of ceiling"], 1, lines)


def report(title, rows, ours, torch, llmc, faster, profiled, kernels, ceilings, steps, before):
    """Everything between the markers of dev/RESULTS.md. profiled: the row whose kernels are timed;
    steps: how many (of ours, of the kernels); before: how many graphs run before a timed step."""
    parts = [title]
    if rows:
        modes = {}
        for row in torch:
            modes.setdefault(" ".join(row.mode), []).append(str(row))
        modes = "; ".join(f"{mode} for {', '.join(names)}" for mode, names in modes.items())
        rates = ", ".join(f"{dtype} {rate / 1e12:,.0f}"
                          for dtype, rate in ceilings["rates"].items())
        parts += [paragraph(STEPS_TEXT, steps=steps[0], modes=modes or "not run", rates=rates,
                            copy=ceilings["copy"] / 1e12),
                  step_table(rows, ours, torch, llmc, ceilings),
                  "\n".join(missing(rows, ours=ours, PyTorch=torch, **{"llm.c": llmc}))]
    faster = {row: results for row, results in faster.items()
              if any(isinstance(result, dict) for result in results)}
    if faster:
        parts += ["### What the section Faster and the chapters of dev/ add",
                  paragraph(FASTER_TEXT), faster_table(faster)]
    parts.append(f"### {profiled}, kernel by kernel")
    if isinstance(kernels, str):
        parts.append(kernels)
    else:
        whole = ours.get(profiled)
        whole = (f" As one graph the step takes {whole['ms']:.2f} ms."
                 if isinstance(whole, dict) else "")
        parts += [paragraph(KERNELS_TEXT, before=before, steps=steps[1], whole=whole),
                  kernel_table(profiled.dtype, kernels, ceilings),
                  "![A step, kernel by kernel](images/step.svg)"]
    return "\n\n".join(filter(None, parts))
