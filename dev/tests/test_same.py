"""Test that same.py's comparison sees each difference and names its place."""
import json
import re

import numpy as np

from dev.tests.checks import check, fast
from dev.features.checkpoints.state_file import STATE, shuffle_record
from dev.tests.same import MODELS, Case, compare, data_files
from train_gpt2 import make_header

LINE = "step    1/4 | loss 3.1 | norm 1.0 | lr 1e-2 | {} ms\n"


@fast
def test_files(folder):
    """Two files that differ in one place, or in none."""
    data_files(folder)
    gpt2, llama = ((folder / f"{name}.bin").read_bytes() for name in ("gpt2", "llama_gqa"))
    N = sum(row.size for row in MODELS["gpt2"].parameter_table())
    log, notes = b"s:0 tel:3.1\ns:1 trl:2.5\n", {"flags": {"seed": 42}, "data": [["a", 3]],
                                                 "seen": 3}
    notes = json.dumps(notes).encode()
    times = [b'{"step": 1, "time": %d.5, "loss": 2, "ms": %d.0}' % (i, i) for i in (1, 20)]
    header = make_header(STATE.magic, 1, 1, 0, 1, 1)  # with a shuffle
    shuffle = np.array([(3, [0, 1, 2], 5, range(5), 0, 1, 1, 0, 0)], shuffle_record(3, 5))
    state = header.tobytes() + np.arange(3 * N, dtype="<f4").tobytes() + shuffle.tobytes()
    # qkvw[1, 5, 7], after wte, wpe, ln1.
    third = 4 * (384 * 128 + 64 * 128 + 4 * 128 + 3 * 128 * 128 + 5 * 128 + 7)
    for name, old, at, wish in (
            ("model_00000002.bin", gpt2, 1024 + third,
             r"qkvw\[1, 5, 7\]: .* 1 of .* numbers differ"),
            ("model_00000002.bin", llama, 2048 + 4, r"wte\[0, 1\]"),
            ("model_00000002.bin", gpt2, 8, r"header\[2\]"),
            ("state_00000002_00000.bin", state, 1024 + 4 * N + third, r"v qkvw\[1, 5, 7\]"),
            ("state_00000002_00000.bin", state, 1024 + 12 * N + 42, r"the shuffle\[10\]"),
            ("main.log", log, 22, "main.log: line 2"),
            ("log.jsonl", b'{"step": 1, "time": 1.5, "loss": 2.5}\n', 35, "log.jsonl: line 1"),
            ("run_00000002.json", notes, notes.index(b"42"), "flags.seed: 42")):
        changed = bytearray(old)
        changed[at] ^= 1
        for what, new, expected in (("the same", old, None), ("changed", bytes(changed), wish),
                                    ("shorter", old[:-2], "size|nothing")):
            runs = {"run0/model_00000002.bin": gpt2, f"run0/{name}": old}
            if what == "shorter" and not name.endswith("bin"):
                continue
            compare_runs(folder, f"{name} {wish} {what}", expected, runs,
                         {f"run0/{name}": new})
    compare_runs(folder, "log.jsonl, other times", None, *({"run0/log.jsonl": line}
                                                           for line in times))


def compare_runs(folder, name, wish, old, new, statuses=((0,), (0,))):
    """Compare two runs of a case: their files are OLD's, and NEW's, which are OLD's but for
    some."""
    both = {"out0.txt": LINE.format(7), "run0/main.log": "s:1"} | old
    sides = [folder / re.sub(r"\W+", "_", name) / side for side in ("old", "new")]
    for side, files in zip(sides, (both, both | new)):
        for path, content in files.items():
            path = side / Case("-x 1").name / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    found, _ = compare(Case("-x 1"), sides, statuses)
    check(f"{name}: {wish or 'the same'}", found == [] if wish is None else
          len(found) == 1 and re.search(wish, found[0]), found)


@fast
def test_runs(folder):
    """Two runs of a case: what they print, their files, and how they end."""
    for wish, new in ((None, {"out0.txt": LINE.format(8)}),
                      ("line 1: .*loss 3.1.*loss 3.2", {"out0.txt": LINE.replace("3.1", "3.2")}),
                      ("only NEW has run0/state", {"run0/state_00000002_00000.bin": "x"}),
                      ("main.log: line 1", {"run0/main.log": "s:0"})):
        compare_runs(folder, f"a run, {wish}", wish, {}, new)
    compare_runs(folder, "another status", r"exit status \[0\] and \[1\]: .*'error: no'", {},
                 {"out0.txt": "error: no\n"}, ([0], [1]))
