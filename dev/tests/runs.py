"""Which functions of train_gpt2.py, and which of their lines, run in the ordinary commands?

    python -m dev.tests.runs [--device cuda]

runs three of them, in a folder of their own: the first run without a flag, GPT-2's words from
scratch with -o, and the same from the checkpoint that this wrote; each with four steps, and
validations and samples in between. It lists what stands before "Faster" and none of them ran. Lines
that raise an error do not count, and on a CPU class Cuda does not.
"""
import argparse
import ast
import os
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import numpy as np

import train_gpt2
from train_gpt2 import make_header, replace_file

TRAINER = Path(train_gpt2.__file__).resolve()
STEPS = ["-x", "4", "-v", "2", "-s", "2"]
# What the ordinary commands replace, and by what
REPLACED = {
    "Training.make_device": "--device: features/base.py makes any device, with features' kernels",
    "Training.next_logits": "keys and values that are kept: features/kv_cache.py",
    "parse_flags": "the flags of features: features/order.py, by the same add_flag"}
# What only a GPU's ordinary commands replace besides; --plain 1 runs all but the last
REPLACED_ON_GPU = {
    "Cuda.matmul": "cuBLASLt: class FastCuda", "Cuda.repeat": "graphs: class FastCuda",
    "GPT2.norm_backward": "it sums the product's bias, too: features/fused_biases.py",
    "GPT2.bias_backward": "in most layers nothing is left for it: features/fused_biases.py",
    "Training.finish": "a step is queued before the last is reported: features/late_reports.py"}
OF_CUDA = "Cuda.", "Kernel.", "source_of", "stride_of"  # not on a CPU


def commands(folder, device):
    """The arguments of the three commands. The tokens have GPT-2's ids, a run of which repeats."""
    ids = np.random.default_rng(1).integers(0, 50257, 400).astype("<u2")
    for part in ("train", "val"):
        replace_file(folder / f"tokens_{part}.bin",
                     [make_header(train_gpt2.TOKENS.magic, 1, 4000), np.resize(ids, 4000)])
    own = ["-i", str(folder / "tokens_train.bin"), "-b", "2", "-t", "64", "-m", "2", "-g", "8"]
    return [[*STEPS, "--device", device],
            ["-e", "d1", "-o", str(folder / "out"), *own, *STEPS, "--device", device],
            ["-e", str(folder / "out/model_00000004.bin"), *own, *STEPS, "--device", device]]


def functions(tree, classes=()):
    """{qualified name: node} of all functions and methods."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[".".join((*classes, node.name))] = node
        elif isinstance(node, ast.ClassDef):
            found |= functions(node, (*classes, node.name))
    return found


def counted(node):
    """The lines on which statements of a function begin, without texts and what ends in raise."""
    lines = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.ExceptHandler):
            continue
        for body in (getattr(inner, name, None) for name in ("body", "orelse", "finalbody")):
            if not isinstance(body, list) or any(isinstance(each, ast.Raise) for each in body):
                continue
            lines |= {each.lineno for each in body if isinstance(each, ast.stmt) and not (
                isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))}
    return lines


def lines_run(work):
    """The lines of train_gpt2.py that work() runs, in any thread."""
    seen = set()

    def within(frame, event, arg):
        seen.add(frame.f_lineno)
        return within

    def called(frame, event, arg):
        return within if frame.f_code.co_filename == str(TRAINER) else None

    threading.settrace(called)
    sys.settrace(called)
    try:
        work()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return seen


def command(arguments):
    """python train_gpt2.py with these arguments, in this process."""
    with mock.patch("sys.argv", ["train_gpt2.py", *arguments]):
        try:
            train_gpt2.run_main(train_gpt2.main)
        except SystemExit as e:
            assert not e.code, e.code


def unread(device):
    """({function that none of the commands called: its number of lines}, {function: lines that none
    ran}, how many lines there are) of the file before "Faster"."""
    whole = TRAINER.read_text(encoding="utf-8")
    text = whole.split("\n# ---- Faster")[0]
    wanted = {name: counted(node) for name, node in functions(ast.parse(text)).items()
              if device == "cuda" or not name.startswith(OF_CUDA)}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        os.chdir(folder)
        try:
            again = dict(__name__="again", __file__=str(TRAINER))
            seen = lines_run(lambda: exec(compile(whole, str(TRAINER), "exec"), again))  # an import
            for arguments in commands(folder, device):
                seen |= lines_run(lambda given=arguments: command(given))
        finally:
            os.chdir(before)
    called = {name: lines for name, lines in wanted.items() if lines & seen}
    never = {name: len(lines) for name, lines in wanted.items() if lines and name not in called}
    missed = {name: sorted(lines - seen) for name, lines in called.items() if lines - seen}
    return never, missed, sum(map(len, wanted.values()))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    device = parser.parse_args(arguments).device
    never, missed, lines = unread(device)
    print(f"\nfunctions that none of the commands called: {len(never)}")
    for name, count in never.items():
        print(f"    {name}, {count} lines: {(REPLACED | REPLACED_ON_GPU).get(name, 'WHY?')}")
    count = sum(map(len, missed.values()))
    print(f"lines of the others that none ran: {count} of {lines}, {count / lines:.1%}")
    for name, numbers in missed.items():
        print(f"    {name}: {', '.join(map(str, numbers))}")


if __name__ == "__main__":
    main()
