"""Find good defaults: train with each row of a table of flags, and write what came of them to dev/tools/sweep.md.

    python -m dev.tools.sweep --device cuda --jobs 3    # on one GPU, three runs at a time
    python -m dev.tools.sweep --device cpu --jobs 2     # one run on each of two cores

Each run is train_gpt2.py with COMMON's flags and then its row's. It has a folder of its own in log_sweep/, with its
main.log and output.txt, what it printed. A run whose output.txt is there is done, and is not made again; what another
has left is removed, and it begins anew. So a sweep that was stopped goes on where it was, and one with new rows makes
those alone. Remove the folder to begin anew.

A run is judged by its loss on the whole validation file at its end. Runs that share a device slow each other down, so
each shape is timed by itself too: a few steps, while nothing else runs.
"""
import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from dev.tools.compare_training import read_log
from dev.features import has_gpu, table_of_flags
from prepro_tinyshakespeare import UserError, data_paths, replace_file, run
from train_gpt2 import FLAGS as PLAIN_FLAGS
from train_gpt2 import Config, number, parse_flags

TOP = Path(__file__).resolve().parents[2]

# What all rows have, unless a row says another value after it: no row depends on train_gpt2.py's defaults.
COMMON = "-k cosine -c 0 --beta1 0.9 --beta2 0.999 --eps 1e-8 --clip 1 --seed 42 -m -1 -s 1000000 -g 120"
EVERY = {"cpu": "--dtype fp32 -v 1000000", "cuda": "--dtype bf16 -v 25"}  # 1000000: before the first step, at the end
# On two cores: each some 50 s of steps, if d3 with 4 sequences of 64 takes 0.2 s.
ROWS = {
    "cpu": [
        "-e d3 -b 4 -t 64 -x 250 -l 3e-4 -q 1",
        "-e d3 -b 4 -t 64 -x 250 -l 6e-4 -u 25 -q 0.1",
        "-e d3 -b 4 -t 64 -x 250 -l 2e-3 -u 25 -q 0.1",
        "-e d3 -b 4 -t 64 -x 250 -l 1e-3 -u 25 -q 0.1 --beta2 0.95",
        "-e d3 -b 4 -t 64 -x 250 -l 2e-3 -u 25 -q 0.1 --beta2 0.95",
        "-e d3 -b 2 -t 64 -x 430 -l 1e-3 -u 43 -q 0.1 --beta2 0.95",
        "-e d3 -b 8 -t 64 -x 135 -l 1e-3 -u 13 -q 0.1 --beta2 0.95",
        "-e d3 -b 4 -t 64 -x 250 -l 1e-3 -u 25 -q 0.1 --beta2 0.95 --shuffle 1",
        "-e d4 -b 4 -t 64 -x 200 -l 1e-3 -u 20 -q 0.1 --beta2 0.95",
        "-e d2 -b 4 -t 64 -x 310 -l 1e-3 -u 31 -q 0.1 --beta2 0.95",
    ],
    "cuda": [
        "-e d12 -b 4 -t 1024 -x 74 -l 3e-4",
        "-e d12 -b 4 -t 1024 -x 300 -l 3e-4 -u 30 -q 0",
        "-e d12 -b 4 -t 1024 -x 451 -l 3e-4 -u 60 -q 0.3",
        "-e d12 -b 4 -t 1024 -x 526 -l 3e-4 -u 60",
        "-e d12 -b 4 -t 1024 -x 526 -l 3e-4 -u 60 -q 0.3",
        "-e d12 -b 4 -t 1024 -x 600 -l 3e-4 -u 60 -q 0",
        "-e d12 -b 4 -t 1024 -x 600 -l 3e-4 -u 60 -q 0.3",
        "-e d12 -b 4 -t 1024 -x 600 -l 2e-4 -u 60",
        "-e d12 -b 4 -t 1024 -x 600 -l 6e-4 -u 60",
        "-e d12 -b 4 -t 1024 -x 600 -l 6e-4 -u 60 -q 0",
        "-e d12 -b 4 -t 1024 -x 750 -l 1.5e-4 -u 60",
        "-e d12 -b 4 -t 1024 -x 900 -l 2e-4 -u 60",
        "-e d12 -b 8 -t 1024 -x 301 -l 3e-4 -u 30 -q 0.3",
        "-e d12 -b 2 -t 1024 -x 1200 -l 2e-4 -u 120 -q 0.3",
        "-e d12 -b 16 -t 1024 -x 150 -l 6e-4 -u 30 -q 0.3",
    ],
}
SHAPE = "-e", "-b", "-t", "-d"  # the flags on which the time of a step depends
TIMED = 12  # steps in which a shape is timed by itself
SUMMARY = re.compile(r"(\d+) steps in .* s, median (\S+) ms, ")  # train_gpt2.py's last line but a checkpoint's
NAMES = {"cpu": "Two shared cores of an AMD EPYC, which at times are twice as fast", "cuda": "One NVIDIA H200"}
RESULTS = TOP / "dev/tools/sweep.md"
HEAD = """# Sweeps

What `sweep.py` found, on tinyshakespeare from random weights. A validation takes the whole validation file. The
column s is the time of the steps alone, by the median step of each shape, timed by itself. The training loss is the
mean of the last ten steps.
"""
FLAGS = [
    (None, "--device", ("cpu", "cuda"), None, "whose table (default: cuda if there is a GPU)"),
    (None, "--jobs", number(int, 1), 1, "runs at a time; on a CPU they share its cores"),
    (None, "--train-data", str, None, "as train_gpt2.py's -i"),
    (None, "--folder", str, "log_sweep", "where runs are kept"),
    (None, "--results", str, str(RESULTS), "the file whose section of this device is replaced"),
]


def flags_of(row, device):
    """The flags of train_gpt2.py that a row stands for, parsed. Raises UserError if it refuses one."""
    return parse_flags("", table_of_flags(PLAIN_FLAGS, Config)[0], shlex.split(f"{COMMON} {EVERY[device]} {row}"))


def shape_of(row):
    """A row's flags that are SHAPE's."""
    words = shlex.split(row)
    return " ".join(f"{flag} {value}" for flag, value in zip(words[::2], words[1::2]) if flag in SHAPE)


def train(flags, folder, data, threads):
    """Run train_gpt2.py with these flags and the folder as its -o, unless it has done so before. Its output is kept,
    and its checkpoint is not. Returns None, or its error in one line."""
    output = folder / "output.txt"
    if output.exists():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():  # of a run that was stopped, or failed
        path.unlink()
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, str(TOP / "train_gpt2.py"), *shlex.split(flags), "-i", data[0], "-j",
                           data[1], "-o", str(folder)], capture_output=True, text=True,
                          env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}))
    for path in folder.iterdir():  # a checkpoint, and what a run that diverged leaves of its last step
        if path.name != "main.log":
            path.unlink()
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return textwrap.shorten(lines[0].removeprefix("error: "), 100, placeholder=" ...")
    replace_file(output, [done.stdout.encode(), f"{time.perf_counter() - begin:.1f} s in all\n".encode()])
    return None


def result_of(row, device, folder):
    """What the main.log of a done run says: (validation loss at its end, the lowest, its step, mean training loss of
    the last ten steps). Raises UserError if the log does not hold all of the steps."""
    log, steps = read_log(folder / "main.log"), flags_of(row, device).steps
    if steps not in log["tel"] or any(step not in log["trl"] for step in range(steps)):
        raise UserError(f"{folder / 'main.log'}: expected {steps} steps and a validation after them; remove {folder} "
                        "and run the sweep again")
    lowest = min(log["tel"], key=log["tel"].get)
    last = [log["trl"][step] for step in range(max(0, steps - 10), steps)]
    return log["tel"][steps], log["tel"][lowest], lowest, float(np.mean(last))


def median_of(folder):
    """The median time of a step, in s, that a done run printed. Raises UserError."""
    found = SUMMARY.search((folder / "output.txt").read_text(encoding="utf-8"))
    if not found:
        raise UserError(f"{folder / 'output.txt'}: has no line such as 12 steps in 3.1 s, median 250.00 ms; remove "
                        f"{folder} and run the sweep again")
    return float(found[2]) / 1e3


def table(rows, failures, device, folder, epoch_tokens):
    """The section of a device, in Markdown, its rows sorted by the validation loss at their ends."""
    lines = [f"## {NAMES[device]}", "", f"All rows have `{COMMON} {EVERY[device]}`, and then their own flags.", "",
             "| flags | epochs | s | validation at the end | its lowest, after step | training |",
             "| --- | ---: | ---: | ---: | ---: | ---: |"]
    done = [(row, *result_of(row, device, folder_of(folder, row))) for row in rows if row not in failures]
    for row, final, lowest, step, training in sorted(done, key=lambda entry: entry[1]):
        flags = flags_of(row, device)
        tokens = flags.steps * (flags.total_batch or flags.batch_size * flags.seq_len)
        seconds = flags.steps * median_of(folder_of(folder, f"speed {shape_of(row)}"))
        lines.append(f"| `{row}` | {tokens / epoch_tokens:.2f} | {seconds:.0f} | {final:.4f} | {lowest:.4f}, {step} | "
                     f"{training:.4f} |")
    lines += [f"| `{row}` | | | {error} | | |" for row, error in failures.items()]
    return "\n".join(lines) + "\n"


def folder_of(folder, name):
    """The folder of a row, or of a shape's timing: its flags, in the letters of file names."""
    return folder / re.sub(r"[^\w.+-]+", "_", name).strip("_-")


def replace_section(path, device, section):
    """Put a device's section into the file, where its old one was, or behind the others."""
    text = path.read_text(encoding="utf-8") if path.exists() else HEAD
    begin, end = f"<!-- {device}: begin -->\n", f"<!-- {device}: end -->\n"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + begin + section + end + rest.split(end, 1)[1]
    else:
        text += f"\n{begin}{section}{end}"
    replace_file(path, [text.encode()])


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    device = flags.device or ("cuda" if has_gpu() else "cpu")
    rows, data, failures = ROWS[device], data_paths(flags.train_data, None), {}
    folder = Path(flags.folder) / device
    common = f"--device {device} {COMMON} {EVERY[device]}"
    threads = max(1, os.cpu_count() // flags.jobs) if device == "cpu" and flags.jobs > 1 else None
    lock, left = threading.Lock(), [row for row in rows if not (folder_of(folder, row) / "output.txt").exists()]
    print(f"{len(rows)} runs, {len(left)} of them to make, {flags.jobs} at a time", flush=True)

    def one(row):
        error = train(f"{common} {row}", folder_of(folder, row), data, threads)
        with lock:
            if error:
                failures[row] = error
            final = None if error else result_of(row, device, folder_of(folder, row))[0]
            print(f"{row} | {error or f'validation loss {final:.4f} at the end'}", flush=True)

    for shape in dict.fromkeys(map(shape_of, rows)):
        error = train(f"{common} {shape} -x {TIMED} -v 0 -s 0", folder_of(folder, f"speed {shape}"), data, None)
        if error:
            raise UserError(f"{shape}: {error}")
    with ThreadPoolExecutor(flags.jobs) as pool:
        list(pool.map(one, rows))
    epoch_tokens = os.path.getsize(data[0]) // 2
    replace_section(Path(flags.results), device, table(rows, failures, device, folder, epoch_tokens))
    print(f"wrote {flags.results}")


if __name__ == "__main__":
    run(main)
