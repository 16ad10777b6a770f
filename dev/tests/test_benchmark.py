"""Test dev/bench/benchmark.py without a GPU: its tables from made-up measurements against figures
worked out by hand, the order of its jobs, and the work that it counts in a step on the CPU.
"""
import contextlib
import io
from unittest import mock

import numpy as np

from dev.bench import benchmark, peers
from dev.bench.benchmark import FIRST, ROWS, THEN, Row
from dev.bench.benchmark_tables import FASTER, faster_table, kernel_table, report, step_table
from dev.bench.step_by_kernel import (Recorder, Recording, by_label, read_table, recorded_steps,
                                      work_of_step)
from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2, Training
from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.models import FIXTURES
from train_gpt2 import UserError, pack_batch

GIB = 2**30
CEILINGS = dict(copy=4e12, rates=dict(bf16=800e12, fp8=1600e12, tf32=1, fp32=1), gpu="a GPU",
                versions="CuPy 1")
BOTH, ONE, NONE, FAILED = (Row("d12", "bf16", 4, ("fast", "flash"), llmc=True),
                           Row("d48", "bf16", 8, llmc=True), Row("d12", "fp8", 32),
                           Row("llama3.2:1B", "bf16", 4, ("fast", "flash"), T=2048))
OURS = {  # 4e12 FLOPs take 5 ms, in fp8 2.5 ms; 8e9 bytes take 2 ms
    BOTH: dict(ms=10.0, memory=3.5 * GIB, flops=4e12, bytes=8e9),
    ONE: dict(ms=160.0, memory=43.06 * GIB, flops=96e12, bytes=64e9),  # 120 + 16 ms
    NONE: dict(ms=50.0, memory=12.4 * GIB, flops=4e12, bytes=8e9),
    FAILED: "failed: out of memory"}
TORCH = {BOTH: dict(ms=12.0, memory=GIB, version="2"),
         FAILED: dict(ms=129.8, memory=29 * GIB, version="2")}
LLMC = {BOTH: dict(ms=15.0, memory=None), ONE: dict(ms=176.0, memory=50 * GIB)}
HEAD = """| GPT-2 | ours, ms | tok/s | GiB | PyTorch, ms | GiB | llm.c, ms | GiB | best peer / ours | roofline, ms | roofline / ours |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
"""  # noqa: E501
BY_HAND = HEAD + """\
| 124M bf16 B=4 | 10.00 | 409,600 | 3.5 | 12.00 | 1.0 | 15.00 | - | 1.20 | 7.00 | 70% |
| 1558M bf16 B=8 | 160.00 | 51,200 | 43.1 | - | - | 176.00 | 50.0 | 1.10 | 136.00 | 85% |
| 124M fp8 B=32 | 50.00 | 655,360 | 12.4 | - | - | - | - | - | 4.50 | 9% |
| Llama 3.2 1B bf16 B=4 T=2048 | - | - | - | 129.80 | 29.0 | - | - | - | - | - |"""
PARTS = [dict(ms=ms) for ms in (10.0, 8.5)] + ["stopped"] + [dict(ms=ms)
                                                             for ms in (8.0, 8.25, 7.5, 7.5, 7.0)]
FASTER_BY_HAND = [("10.00", ""), ("8.50", "1.50"), ("-", ""), ("8.00", ""), ("8.25", "-0.25"),
                  ("7.50", "0.75"),
                  ("7.50", "0.00"), ("7.00", "0.50")]
KERNELS = [dict(label="matmul 8 x 4 x 2", unit="FLOP", launches=2, us=1500.0, ms=3.0, work=1.2e12),
           dict(label="adamw", unit="B", launches=1, us=1000.0, ms=1.0, work=3e9)]
KERNELS_BY_HAND = """\
| matmul 8 x 4 x 2 | 2 | 1500.0 | 3.000 | 75.0% | 600 GFLOP | 400.00 TFLOP/s | 50% |
| adamw | 1 | 1000.0 | 1.000 | 25.0% | 3 GB | 3.00 TB/s | 75% |
| all | 3 | | 4.000 | 100.0% | | | |"""


def same_text(name, found, wish):
    lines = zip(f"{found}\n-".splitlines(), f"{wish}\n-".splitlines())
    differ = next((pair for pair in lines if pair[0] != pair[1]), "")
    check(name, found == wish, differ)


@fast
def test_tables():
    """Each table, character by character: ratios, shares of ceilings, and dashes for what is
    missing."""
    rows = [BOTH, ONE, NONE, FAILED]
    same_text("steps", step_table(rows, OURS, TORCH, LLMC, CEILINGS), BY_HAND)
    slow = step_table([BOTH], {BOTH: OURS[BOTH] | dict(ms=20.0)}, TORCH, LLMC, CEILINGS)
    check("a peer that is faster: a ratio below 1", slow.endswith("| 0.60 | 7.00 | 35% |"),
          slow.splitlines()[-1])
    lines = [f"| {added} | {ms} | {saves} |" for added, (ms, saves) in zip(FASTER, FASTER_BY_HAND)]
    wish = "\n".join([f"| added | {BOTH}, ms | saves |", "| --- | ---: | ---: |", *lines])
    same_text("the section Faster", faster_table({BOTH: PARTS}), wish)
    found = kernel_table("bf16", KERNELS, CEILINGS)
    same_text("kernels", found.split("\n", 2)[2],
              KERNELS_BY_HAND.replace("| |", "|  |").replace("| |", "|  |"))

    text = report("## today", rows, OURS, TORCH, LLMC | {ONE: "failed: no nvcc"},
                  {BOTH: PARTS, ONE: ["late"] * 8}, BOTH, KERNELS, CEILINGS, (30, 6), 4)
    for line in (f"- {FAILED}, ours: failed: out of memory", f"- {ONE}, llm.c: failed: no nvcc"):
        check(f"why there is a dash: {line[2:40]}", line in text.splitlines())
    check("no column of Faster without a figure", f"{ONE}, ms" not in text)
    title, kernels = read_table(text)
    check("the table of kernels, read again", (title, kernels) == (str(BOTH), [
        ("matmul 8 x 4 x 2", 3.0, 0.5), ("adamw", 1.0, 0.75)]), kernels)
    text = report("## today", [], {}, {}, {}, {}, NONE, "stopped, it took too long", CEILINGS,
                  (30, 6), 4)
    check("kernels that could not be timed",
          text.endswith("kernel by kernel\n\nstopped, it took too long"))
    check_refusal("a chart of that", "has no table of kernels", read_table, text)


@fast
def test_jobs(folder):
    """The most important rows come first, each with its peers, and then the rest. A job that fails
    or takes too long costs only its own line. The new report replaces the old one."""
    done = []

    def job(end, name, row, *more):
        done.append((name, str(row), *more[1:]))
        found = dict(ms=1.0, memory=GIB, version="2", flops=1, bytes=1)
        return CEILINGS if name == "find_ceilings" else KERNELS if name == "time_kernels" else found

    results = folder / "RESULTS.md"
    results.write_text("above\n<!-- benchmark: begin -->\nold\n<!-- benchmark: end -->\nbelow\n")
    (folder / "run.sh").write_text("exit 1")
    said = io.StringIO()
    with mock.patch.multiple(benchmark, run_job=job, has_gpu=lambda: True, RESULTS=results), \
            contextlib.redirect_stdout(said):
        benchmark.main(["--rows", "B=(4|32)$|355M", "--llmc", str(folder), "--commit", "abc1234"])
    first, then = [str(row) for row in FIRST if str(row).endswith(("B=4", "B=32"))], [str(THEN[0])]
    order = [row for name, row, *_ in done if name == "time_ours"]
    check("rows, in the order of ROWS", order == first + then, order)
    names = [name for name, row, *_ in done if row == str(ROWS[0])]
    check("a row beside its peers",
          names == ["time_ours", "time_torch", "time_llmc"] + 8 * ["time_faster"], names)
    last = max(i for i, (name, *_) in enumerate(done) if name == "time_faster")
    check("Faster, before the rows that can wait",
          done[last + 1][:2] == ("time_ours", str(THEN[0])), done)
    text = results.read_text()
    check("the report takes the old one's place",
          text.startswith("above\n<!-- benchmark: begin -->\n## 20") and
          text.endswith("<!-- benchmark: end -->\nbelow\n") and "\nold\n" not in text and
          "commit abc1234" in text and f"| {ROWS[0]} | 1.00 |" in text, text[:80])

    folder = str(folder)
    check("no time left", "minutes were over" in benchmark.run_job(0, "time_ours", ROWS[0], folder))
    with contextlib.redirect_stdout(said):
        found = benchmark.run_job(np.inf, "time_ours", ROWS[0], folder)
    if not benchmark.has_gpu():
        check("a job that fails says why", "no GPU" in found, found)
    check("names of rows", str(ROWS[-1]) == "124M bf16 B=32 --recompute 2", ROWS[-1])
    results.write_text("")
    with mock.patch.multiple(benchmark, has_gpu=lambda: True, RESULTS=results):
        check_refusal("markers", "RESULTS.md: expected <!-- benchmark: begin -->", benchmark.main,
                      [])


def test_device(folder):
    """The trainer that is timed runs on the device that listens, with the features' classes in
    front of it."""
    made = []

    def stop(training):
        made.append(training.Device)
        raise UserError("a device was to be made")

    with mock.patch.object(benchmark.devices,
                           "FastCuda"), mock.patch.object(Training, "make_device", stop):
        check_refusal("device", "a device was to be made", benchmark.run_trainer, ROWS[0], 1,
                      str(folder), Recorder)
    kinds = made[0].__mro__
    check("a run's device is the one that listens", Recorder in kinds and kinds.index(Recorder) > 1,
          kinds)


@fast
def test_llmc(folder):
    """llm.c's median comes from its script, and its memory from its log."""
    (folder / "run.sh").write_text('echo "device memory usage: 2048 MiB / 9 MiB" > log\n'
                                   'echo "llm.c $2 $3 $4 $5 $6 $7: 12.34 ms"\n')
    found = peers.llmc_step(BOTH, "tokens.bin", folder)
    check("ms and memory", found == dict(ms=12.34, memory=2 * GIB), found)
    (folder / "run.sh").write_text('echo "$@"; echo "nvcc: not found" >&2; exit 1')
    check_refusal("a build that fails", "run.sh failed: nvcc: not found", peers.llmc_step, BOTH,
                  "t", folder)
    check_refusal("no script", "has no run.sh", peers.llmc_step, BOTH, "t", folder / "absent")


def test_work_of_a_step():
    """FLOPs and bytes of a step of the fixture's model, against formulas."""
    c, (B, T) = Config.from_file(FIXTURES / "gpt2_tiny.bin"), (2, 16)
    model = GPT2(c, type("Cpu", (Recording, Emulated), {})("fp32", c), B, T)
    tokens = np.arange(B * T, dtype=np.int32).reshape(B, T) % 7
    Recording.steps.clear()
    model.train_step(pack_batch(tokens, tokens))
    [step] = recorded_steps()
    work = work_of_step(step, c, B, T, words=7)
    products = sum(amount for label, unit, amount in work if label.startswith("matmul "))
    linear = 12 * c.L * c.C**2 + c.Vp * c.C  # weights
    yield "FLOPs of products", products, 6 * B * T * linear, EXACT
    attention = {label: amount for label, unit, amount in work
                 if unit == "FLOP" and "attention" in label}
    yield "FLOPs of attention", sum(attention.values()), 9 * B * T * T * c.C, EXACT  # per layer
    n = sum(row.size for row in c.parameter_table())
    table = {kernel["label"]: kernel for kernel in by_label(work, range(1, 1 + len(work)))}
    yield "bytes of AdamW: 7 arrays", table["adamw"]["work"], 28 * n, 1e-3
    yield "bytes of the norm", table["global_norm"]["work"], 4 * n, 2e-2
    wish = 4 * c.C * (7 + c.maxT + B * T) + 4 * B * T  # words, positions and output; tokens
    yield "bytes of the first layer", table["encoder_forward"]["work"], wish, EXACT
    numbers = B * T * c.C  # the first norm has no branch to add
    norms = 2 * c.L + 1
    wish = 4 * (norms * (3 * numbers + 2 * B * T + 2 * c.C) + (norms - 1) * 2 * numbers)
    yield "bytes of the norms", table["residual_layernorm_forward"]["work"], wish, EXACT
    check("a launch for each layer", table["attention_forward"]["launches"] == c.L)
    kernel = by_label([("a", "B", 5), ("b", "B", 1), ("a", "B", 7)], [1.0, 9.0, 3.0])[1]
    check("launches of a label",
          kernel == dict(label="a", unit="B", launches=2, ms=4.0, us=2000.0, work=12), kernel)
