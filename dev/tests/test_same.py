"""Test that same.py's comparison sees each difference and names its place."""
import json
import re

import numpy as np

from dev.tests.checks import check, fast
from dev.tests.same_cases import Case, data_files, table_of
from dev.tests.same_compare import compare, of_files, size_of


@fast
def test_files(folder):
    """Two files that differ in one place, or in none."""
    data_files(folder)
    gpt2, llama = ((folder / f"{name}.bin").read_bytes() for name in ("gpt2", "llama_gqa"))
    N = size_of(table_of(gpt2)[1])
    log, notes = b"s:0 tel:3.1\ns:1 trl:2.5\n", {"flags": {"seed": 42}, "data": [["a", 3]],
                                                 "seen": 3}
    notes = json.dumps(notes).encode()
    times = [b'{"step": 1, "time": %d.5, "loss": 2, "ms": %d.0}' % (i, i) for i in (1, 20)]
    check("log.jsonl: other times", not [*of_files("log.jsonl", *times, gpt2)])
    state = bytes(1024) + np.arange(3 * N, dtype="<f4").tobytes() + b"shuffle"
    # qkvw[1, 5, 7], after wte, wpe, ln1.
    third = 4 * (384 * 128 + 64 * 128 + 4 * 128 + 3 * 128 * 128 + 5 * 128 + 7)
    for name, old, at, wish in (
            ("model_00000002.bin", gpt2, 1024 + third,
             r"qkvw\[1, 5, 7\]: .* 1 of .* numbers differ"),
            ("model_00000002.bin", llama, 2048 + 4, r"wte\[0, 1\]"),
            ("model_00000002.bin", gpt2, 8, r"header\[2\]"),
            ("state_00000002_00000.bin", state, 1024 + 4 * N + third, r"v qkvw\[1, 5, 7\]"),
            ("state_00000002_00000.bin", state, 1024 + 12 * N + 2, "the shuffle, at byte 2"),
            ("main.log", log, 22, "main.log, line 2"),
            ("log.jsonl", b'{"step": 1, "time": 1.5, "loss": 2.5}\n', 35, "log.jsonl, line 1"),
            ("run_00000002.json", notes, notes.index(b"42"), "flags.seed: 42")):
        new = bytearray(old)
        new[at] ^= 1
        for what, other in (("changed", bytes(new)), ("shorter", old[:-2])):
            if what == "changed" or "bin" in name:
                found = [*of_files(name, old, other, gpt2)]
                wish = wish if what == "changed" else "bytes, and others"
                check(f"{name}, {what}: {wish}", len(found) == 1 and re.search(wish, found[0]),
                      found)
        check(f"{name}: the same", not [*of_files(name, old, bytes(old), gpt2)])


@fast
def test_runs(folder):
    """Two runs of a case: what they print, their files, and how they end."""
    line = "step    1/4 | loss 3.1 | norm 1.0 | lr 1e-2 | {} ms\n"
    for wish, old, new in (
            (None, {}, {"out0.txt": line.format(8)}), ("line 1: .*loss 3.1.*loss 3.2", {}, {
                "out0.txt": line.replace("3.1", "3.2")}),
            ("only NEW has state", {}, {"run0/state_00000002_00000.bin": "x"}),
            ("main.log, line 1", {}, {"run0/main.log": "s:0"}),
            (r"exit status \[0\] and \[1\]", {},
             {"case.json": '{"statuses": [1]}', "err0.txt": "error: no"})):
        for side, files in (("old", old), ("new", new)):
            files = {"out0.txt": line.format(7), "err0.txt": "", "case.json": '{"statuses": [0]}',
                     "run0/main.log": "s:1"} | files
            for name, text in files.items():
                path = folder / f"{wish}" / side / "a_case" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        found, *_ = compare(Case("a case"), folder / f"{wish}" / "old", folder / f"{wish}" / "new")
        check(f"a run: {wish or 'the same'}",
              found == [] if wish is None else re.search(wish, found[0]), found)
