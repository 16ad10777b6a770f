"""Test the kernel lab: how outputs are compared, how a mistake is reported, and what is written.

Mistakes are made in a copy of the lab with two kernels, on the CPU. `python -m dev.lab --check`
tests that the lab's kernels are right, and dev/tests/mutants.py that its checks notice a wrong one.
"""
import os
import re
import subprocess
import sys
from unittest import mock

import numpy as np

from dev.lab import timing as results
from dev.lab.bench import BF16_LIMIT, KERNEL_LIMIT, compare_output
from dev.lab.ladder import ANY, Draw, as_stored, bf16, f32, find_ladder, stored
from dev.lab.timing import Timing
from dev.lab.workers import Failure, Report
from dev.tests.checks import TOP, check, check_refusal, fast
from dev.tests.mutants import Copy
from train_gpt2 import BF16


@fast
def test_judging():
    """A correct output passes. One with a single wrong element does not, however large the others
    are."""
    truth = np.random.default_rng(1).standard_normal((7, 33)) * 10.0 ** np.arange(7)[:, None]
    truth[2, 5], truth[3, 4], truth[3, 5], truth[6, 32] = ANY, np.nan, np.inf, -np.inf
    right = np.where(truth == ANY, 12345.0, truth)

    def verdict(dtype, change=None, kind=None, terms=None, limit=KERNEL_LIMIT):
        found = right.copy()
        if change:
            place, factor = change
            found[place] = factor(found[place]) if callable(factor) else factor
        return compare_output(np, "out", stored(np.float32(found), dtype), truth, limit, kind,
                              terms)

    for dtype in (np.dtype(np.float32), BF16):
        check(f"{dtype}: right", verdict(dtype).place is None, f"{verdict(dtype)}")
        exact = compare_output(np, "out", stored(np.float32(right), dtype), as_stored(truth, dtype),
                               1e-5, "exact")
        check(f"{dtype}: the same bits", exact.place is None and exact.limit == 0, f"{exact}")
        for name, place, factor in (
                ("off by 20%", (0, 3), lambda x: 1.2 * x), ("another sign", (0, 1), lambda x: -x),
                ("a NaN", (5, 5), np.nan), ("no NaN", (3, 4), 1.0), ("not infinite", (3, 5), 1e30),
                ("infinite the other way", (6, 32), np.inf), ("zero", (1, 1), 0.0)):
            found = verdict(dtype, (place, factor))
            check(f"{dtype}: {name}", found.place == place, f"{found}")
    check("any value will do", verdict(np.dtype(np.float32), ((2, 5), np.nan)).place is None)
    cut = stored(np.float32(right), BF16)
    cut.view(np.uint16)[...] = np.float32(right).view(np.uint32) >> 16
    found = compare_output(np, "out", cut, truth, KERNEL_LIMIT)
    check("bf16 that is cut off", found.place is not None, f"{found}")
    small = ((0, 3), lambda x: x + 1e-3)
    check("own size", verdict(np.dtype(np.float32), small).place == (0, 3))
    wide = np.full(truth.shape, 100.0)
    for kind, terms, wish in (("sums", None, (0, 3)), ("sums", wide, None), (None, wide, (0, 3))):
        found = verdict(np.dtype(np.float32), small, kind, terms)
        check(f"{kind}, terms {terms is not None}", found.place == wish, f"{found}")
    ones = np.ones((4, 1000))
    found = compare_output(np, "out", np.float32(ones * (1 + 3e-5)), ones, KERNEL_LIMIT)
    check("all a little off", found.place == (0, 0) and 2.9e-5 < found.error < 3.1e-5, f"{found}")
    found = compare_output(np, "out", stored(np.float32(ones * 1.003), BF16), ones, KERNEL_LIMIT)
    check("limit of what is stored in bf16", found.limit == BF16_LIMIT, f"{found}")
    off = compare_output(np, "out", np.float32(ones) + np.float32(2**-23), ones, KERNEL_LIMIT,
                         "exact")
    check("one bit off", off.place == (0, 0), f"{off}")


@fast
def test_inputs():
    """Inputs are the same each time, their rows are hard, and bf16 inputs are what devices
    store."""
    for in_bf16, rounded in ((False, f32), (True, bf16)):
        one, two = (Draw(in_bf16)(300, 7) for _ in range(2))
        check(f"the same again, bf16 {in_bf16}", (one == two).all())
        check(f"rounded, bf16 {in_bf16}", (rounded(one) == one).all())
    rows = Draw(False).rows(30, 96)
    check("rows of deviation 10 to 0.001",
          abs(rows[1].std() - 10 ** (1 - 4 / 29)) < 2 and rows[-1].std() < 2e-3)
    check("every third has a large mean",
          (abs(rows.mean(1) / rows.std(1)) > 30).tolist() == [True, False, False] * 10)


# ---- What the lab says, in a copy of it with two kernels


def small_copy(folder):
    copy = Copy(folder)
    for path in (copy.top / "dev/lab/kernels").glob("*"):
        if path.is_file() and path.stem not in ("gelu_forward", "residual_forward"):
            path.unlink()
    return copy


def lab(copy, *arguments):
    return subprocess.run([sys.executable, "-m", "dev.lab", "--device", "cpu", *arguments],
                          text=True, capture_output=True, cwd=copy.top,  # -O0 compiles fastest
                          env={**os.environ, "PYTHONPATH": str(copy.top), "CXXFLAGS": "-O0"})


FAULTS = [  # file, the text there, the mistake, and what the error line must say
    ("gelu_forward.cu", "OC) return;\n    Pack<W> x", "OC) return\n    Pack<W> x",
     r"gelu_forward\.cu:\d+:\d+: error:"),
    ("gelu_forward.cu", "store(out + i, x);", "store((real*)(i + 16), x);",
     "gelu_forward 2, .*fp32.*SIGSEGV"),
    ("gelu_forward.cu", "= gelu_forward_::gelu(x[j]);",
     "= gelu_forward_::gelu(x[j]) * (j ? 1.0f : 1.001f);",
     r"gelu_forward 2: B=3,T=9,C=96 fp32 threads=64: out\[0,\d+\] is \S+, expected \S+ "),
    ("gelu_forward.cu", "store(out + i, x);", "out[i] = out[i];",
     r"gelu_forward 2: .*out\[0,0\] is nan, expected "),
    ("gelu_forward.cu", "store(out + i, x);", "store(out + i, x), store(out + i + W, x);",
     r"gelu_forward 2: .*race: out\[0, \d+\] is \S+ "),
    ("gelu_forward.cu", "store(out + i, x);",
     "store(out + i, x), from_float(out[(size_t)N * OC], 1.0f);",
     "gelu_forward 2: .*outside of out"),
    ("gelu_forward.cu", "store(out + i, x);",
     "store(out + i, x), from_float(*(real*)inp, x[0] - x[0]);",
     "gelu_forward 2: .*(changed inp|race: out)"),
    ("gelu_forward.py", '"gelu_forward2"', '"gelu_forward_2"',
     r"gelu_forward 2: .*gelu_forward_2 .*gelu_forward\.py"),
    ("gelu_forward.py", 'args="out inp N OC"', 'args="out inp N O"',
     r"gelu_forward 1: gelu_forward\.py .* O .*ward1"),
    ("gelu_forward.py", "from dev.lab.formulas import gelu", "from dev.lab.formulas import gelo",
     r"gelu_forward\.py: ImportError: .*gelo"),
    ("gelu_forward.py", "N, OC = B * T, 4 * C", "N, OC = B * T, 4 * C / 0",
     "gelu_forward, .*fp32: ZeroDivisionError"),
]


def test_faults(folder):
    """A mistake in one kernel gives one error line that names it, and the other kernel still
    runs."""
    copy = small_copy(folder)
    done = lab(copy, "--check")
    check("nothing is wrong", done.returncode == 0 and " checks, 0 wrong" in done.stdout,
          done.stdout[-300:])
    for file, old, new, wish in FAULTS:
        path = copy.top / "dev/lab/kernels" / file
        text = path.read_text()
        assert text.count(old) >= 1, old
        path.write_text(text.replace(old, new))
        done = lab(copy, "--check", "--dtype", "fp32")
        path.write_text(text)
        errors = [line for line in done.stdout.splitlines() if line.startswith("error:")]
        said = re.match(f"error: {wish}", errors[0], re.S) if errors else None
        others = re.search(r"^residual_forward: \d+ checks, all right$", done.stdout, re.M)
        name = f"{file}: {new.splitlines()[0][:50]}"
        check(f"{name}: said", said and done.returncode == 1,
              "\n".join(errors) or done.stdout + done.stderr)
        once = 3 if "args=" in new else 1  # each of three versions has these arguments
        check(f"{name}: once", len(errors) == len(set(errors)) == once, f"{len(errors)} lines")
        check(f"{name}: the other runs", others, done.stdout[-200:])
    text = (copy.top / "dev/lab/kernels/gelu_forward.py").read_text()
    cut = re.sub(r'        Version\("16 bytes per lane".*\n', "", text)
    (copy.top / "dev/lab/kernels/gelu_forward.py").write_text(cut)
    done = lab(copy, "--check")
    check("a kernel that no version launches",
          "error: gelu_forward2 is launched by no version" in done.stdout and done.returncode == 1,
          done.stdout[-200:])
    (copy.top / "dev/lab/kernels/gelu_forward.py").write_text(text)
    lines(copy)


LINES = [  # arguments, exit status, and what is printed
    (["gelu_forward", "2", "--check", "--shape", "B=1,T=3,C=32", "--dtype", "bf16"], 0,
     r"gelu_forward 2: B=1,T=3,C=32 bf16 threads=64: right, \de-\d\d of 2e-03\n(?:.*\n)*2 checks, "
     r"0 wrong\n"),
    (["gelu_forward", "--check", "--dtype", "tf32"], 1,
     "gelu_forward has no tf32, only fp32, bf16"),
    (["--check", "4"], 1, "4 is a number.*gelu_forward 2"),
    (["gelu_forward", "0"], 1, "versions 1 to 3, not 0"),
    (["gelu_forward", "4"], 1, "versions 1 to 3, not 4"),
    (["gelu_foward"], 1, "no kernel gelu_foward.*gelu_forward"),
    (["--out", "x"], 1, "--out .*--all"),
    (["--shape", "T=4", "--check"], 1, "--shape .*name"),
    (["gelu_forward", "--shape", "H=4"], 1, "H=4: .*size H.*B, T, C"),
    (["gelu_forward", "--shape", "C=33"], 1, "C=33: .*multiple of 32"),
    (["gelu_forward", "--shape", "B=0"], 1, "B=0: .*at least 1"),
    (["gelu_forward", "--shape", "C=x"], 1, "C=x: .*T=1024"),
    (["--chek"], 1, "--chek; --help"),
    (["gelu_forward", "x"], 1, "version: .*'x'; --help"),
    (["gelu_forward", "--check", "--exercise"], 1, "--exercise .*--device"),
    (["gelu_forward"], 0,
     r"gelu_forward: out \(N,4C\) = gelu\(inp\)\nB=8,T=1024,C=768\n  1  fp32 bf16 .*\n(?:.*\n)*"),
    ([], 0, r"gelu_forward +3 versions .*\nresidual_forward +\d versions .*\n"),
]


def lines(copy):
    """What the lab prints for a command line."""
    for arguments, status, wish in LINES:
        done = lab(copy, *arguments)
        said = done.stderr.strip() if status else done.stdout
        said = re.sub("compiling kernels.cu with .*, once\n", "", said)
        right = re.fullmatch(f"error: .*{wish}.*" if status else wish, said)  # an error is one line
        check(f"dev.lab {' '.join(arguments)}", done.returncode == status and right, said[-300:])


# ---- The results file


@fast
def test_written(folder):
    """A table from made-up timings. A file that somebody has edited does not pass for
    measured."""
    name = "gelu_forward"
    last = len(find_ladder(name).versions)

    def timing(number, dtype, seconds, share, own=False, choice="threads=256", bound="bytes"):
        return Timing(name, number, dtype, f"what {number} is", choice, own, seconds, "1,234 GB/s",
                      bound, share)

    device = {"device": "NVIDIA X", "driver": "1.2", "cuda": "13.0", "rates": "copies 4.00 TB/s"}
    timings = [timing(1, "fp32", 40e-6, 0.2), timing(
        last, "fp32", 10e-6, 0.8, True, "as the trainer does"), timing(last, "fp32", 8e-6, 0.9),
               timing(last, "bf16", 9e-6, 0.86, True, "as the trainer does"),
               timing(1, "tf32", 9e-6, 0.2, bound="FLOPs")]
    failure = Failure(name, 2, "fp32", "gelu_forward 2: KeyError: 4")
    report = Report(1, [failure], timings, {(name, "fp32"): ("PyTorch", 20e-6)}, set(), device)
    *others, version = find_ladder(name).versions
    for held_back, reason in (({"fp32": "of this"}, "of this"), ("of that", "of that"),
                              ({}, "not explained yet")):
        ladder = find_ladder(name)._replace(versions=(*others,
                                                      version._replace(held_back=held_back)))
        with mock.patch.object(results, "find_ladder", return_value=ladder):
            rows = [[cell.strip() for cell in line.strip("|\n").split("|")]
                    for line in results.table(name, report).splitlines()]
        check(f"rows, held back in fp32, {held_back}", rows == [
            [name, "1: what 1 is", "40.0 us, 20.0% of bytes, 50% of PyTorch, threads=256",
             "9.0 us, 20.0% of FLOPs, threads=256", "", ""],
            ["", f"{last}: what {last} is",
             "10.0 us, 80.0% of bytes, 200% of PyTorch, as the trainer does; "
             "8.0 us, 90.0% of bytes, 250% of PyTorch, threads=256", "",
             "9.0 us, 86.0% of bytes, as the trainer does", f"fp32: {reason}"]], rows)
    check("nothing is said where the last version failed", not results.held_back(
        name, report._replace(timings=[t for t in timings if t.number == 1])))
    out = folder / "out"
    results.write(out, [name], report)
    text = (out / "RESULTS.md").read_text()
    check("says where and when", re.search(
        r"\nNVIDIA X, driver 1\.2, CUDA 13\.0, \d{4}-\d\d-\d\d, commit .+\. Ceilings, measured in "
        r"the same run: copies 4\.00 TB/s\.\n", text), text[:300])
    check("unchanged", results.is_unchanged(text))
    (out / "RESULTS.md").write_text("A word before.\n" + text + "A word behind.\n")
    results.write(out, [name], report)
    text = (out / "RESULTS.md").read_text()
    check("what stands around it stays",
          text.startswith("A word before.\n") and text.endswith("A word behind.\n"))
    check("a chart", "<svg" in (out / "ladders.svg").read_text())
    (out / "RESULTS.md").write_text(text.replace("10.0 us", "5.0 us"))
    check("edited by hand", not results.is_unchanged((out / "RESULTS.md").read_text()))
    check_refusal("results edited by hand", "RESULTS.md: .*edited by hand",
                  results.write, out, [name], report)
    check("dev/lab/RESULTS.md is as the lab wrote it",
          results.is_unchanged((TOP / "dev/lab/RESULTS.md").read_text(encoding="utf-8")))
