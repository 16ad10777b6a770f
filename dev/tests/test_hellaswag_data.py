"""Test dev/data/hellaswag.py: the file of questions that it writes, and what it refuses.

This needs huggingface_hub and pyarrow.
"""
import signal
import subprocess
import sys

import pytest

from dev.data import hellaswag
from dev.features.hellaswag_score import Example, read_examples
from dev.tests.checks import check, check_refusal, header_refusal
from dev.tests.documents import (byte_ids, check_command, command, in_process, write_jsonl,
                                 write_parquet)
from dev.tests.fake_hub import a_hub, downloaded, serve
from dev.tests.trainings import file_of
from train_gpt2 import UserError, gpt2_encoding


def example_of(row, encode=byte_ids):
    return Example(row["label"], encode(row["ctx"]),
                   [encode(" " + ending) for ending in row["endings"]])


def some_rows(folder):
    """Write val.parquet as the hub has it, and val.jsonl as its authors do. Returns its rows."""
    rows = [{"ind": i, "ctx": f"A man é {'is ' * (7 * i % 5)}sitting.", "label": i * 5 % 4,
             "endings": [f"{'he ' * (i * k % 7)}sleeps" for k in range(4)]} for i in range(9)]
    rows[0]["endings"] = ["", "<|endoftext|>", "b", " c"]
    write_jsonl(folder / "val.jsonl", rows)
    columns = {name: [row[name] for row in rows] for name in ("ctx", "endings")}
    write_parquet(folder / "val.parquet", columns | {"label": [str(row["label"]) for row in rows]})
    return rows


def test_questions(folder):
    """The same file from the hub and from local files of both kinds."""
    wish, out = (file_of([*map(example_of, some_rows(folder))]),
                 folder / "data" / "hellaswag" / "hellaswag_val.bin")
    with a_hub():
        serve({"Rowan/hellaswag": {"c" * 40: {
            "data/test-00000-of-00001.parquet": b"",
            "data/validation-00000-of-00001.parquet": (folder / "val.parquet").read_bytes()}}})
        result = command("hellaswag", folder, die_at=0.5)
        ok = result[0] == -signal.SIGKILL and not out.exists() and len(downloaded()) == 1
        check("hellaswag.py, killed", ok, "" if ok else result)
        check_command("hellaswag.py, again", "hellaswag_val.bin: 9 questions\n",
                      command("hellaswag", folder))
        check("hellaswag.py, again: the download is kept", len(downloaded()) == 1, downloaded())
        said = in_process(hellaswag, "--output", out)
        check("hellaswag.py, once more", "hellaswag_val.bin: 9 questions, is there already" in said,
              said)
        serve({}, {"Rowan/hellaswag": "404"})
        check_refusal("hellaswag.py", r"Rowan/hellaswag, data: the hub has no such thing \(404\)",
                      in_process, hellaswag, "--output", folder / "other.bin")
    check(f"{out.name}", out.read_bytes() == wish)
    rows = some_rows(folder)
    write_jsonl(folder / "crlf.jsonl", [row | {"ctx": f"\ufeff{row['ctx']}\r\n"} for row in rows])
    in_process(hellaswag, "--input", folder / "crlf.jsonl", "--output", folder / "crlf.bin")
    check("Windows' line ends", (folder / "crlf.bin").read_bytes() == file_of(
        [example_of(row | {"ctx": f"{row['ctx']}\n"}) for row in rows]))
    for name in ("val.jsonl", "val.parquet"):
        in_process(hellaswag, "--input", folder / name, "--output", folder / f"{name}.bin")
        check(name, (folder / f"{name}.bin").read_bytes() == wish)


def test_refusals(folder):
    """Bad rows, questions that are too long, and files that are none of questions."""
    good, *_ = some_rows(folder)
    long = good | {"ctx": "x" * (32767 - 10 - len(b"".join(b" " + ending.encode()
                                                           for ending in good["endings"])))}
    path = folder / "bad.bin"

    def write(*rows):
        write_jsonl(folder / "bad.jsonl", rows)
        path.unlink(missing_ok=True)
        in_process(hellaswag, "--input", folder / "bad.jsonl", "--output", path)

    write(good | {"ctx": " ", "endings": ["", " ", "\ud800", "\n"]})
    check("the smallest question is read", len(read_examples(path, 50257)) == 1)
    write(good, long)
    check("the longest question",
          path.read_bytes() == file_of([example_of(good), example_of(long)]))
    for wish, *changes in (
            (r"bad.jsonl: row 2: its label is .*; expected one of 0 to 3",
             *({"label": label} for label in ("", 4, -1, "x", None, True))),
            ("bad.jsonl: row 2: expected ctx to be a text and endings to be 4 texts", {"ctx": None},
             *({"endings": endings} for endings in ("abcd", ["a"] * 3, ["a"] * 5,
                                                    ["a", "b", "c", 4]))),
            ("bad.jsonl: row 2: its ctx is empty; expected the beginning of a text", {"ctx": ""}),
            ("question 2 takes 65,536 bytes; expected at most 65,534", {"ctx": long["ctx"] + "x"}),
            ("the input has no question", None)):
        for change in changes:
            check_refusal("hellaswag.py", wish, write, *((good, good | change) if change else ()))
            check("hellaswag.py writes nothing then", not path.exists())
    path.write_bytes(b"\1\0\0\0" * 256)
    check_refusal("hellaswag.py", f"bad.bin: .*{header_refusal((1, 1), hellaswag.EVAL_FILE)}",
                  in_process, hellaswag,
                  "--output", path)


def test_vocabulary(folder):
    """The command as it is, if this machine has GPT-2's vocabulary."""
    try:
        encode = gpt2_encoding().encode_ordinary
    except UserError as e:
        pytest.skip(f"GPT-2's words: {e}")
    rows = some_rows(folder)
    subprocess.run([sys.executable, "-m", "dev.data.hellaswag", "--input", "val.jsonl", "--output",
                    "questions.bin"], cwd=folder, check=True, capture_output=True)
    wish = file_of([example_of(row, encode) for row in rows])
    check("hellaswag.py with GPT-2's words", (folder / "questions.bin").read_bytes() == wish)
