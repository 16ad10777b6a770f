"""Test dev/data/fineweb.py and the tables it reads: its shards, kills, and refusals.

Shards are put together here by what llm.c's format says. This needs pyarrow. dev/tests/test_hub.py
downloads.
"""
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.data import fineweb
from dev.data.tables import read_rows, table_files
from dev.tests.checks import check, check_refusal, fast
from dev.tests.documents import (EOT, check_command, command, contents, finish, in_process,
                                 own, some_texts, start, stream_of, write_parquet, write_texts)
from dev.tests.folders import byte_encoding
from train_gpt2 import UserError, gpt2_encoding


def shards_of(stream, name, val, size):
    """{name: bytes} of the shards of a stream of tokens, by llm.c's format."""
    cuts = [0, *range(val, len(stream), size), len(stream)]
    files = {}
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, end - begin
        part = "val" if i == 0 else "train"
        files[f"{name}_{part}_{i:06d}.bin"] = (header.tobytes() +
                                               np.array(stream[begin:end], "<u2").tobytes())
    return files


# ---- Rows and shards


@fast
def test_tables(folder):
    """Tables from each row on, folders of them, and what is refused."""
    texts, path = some_texts(13, 1), folder / "a.parquet"
    for path in folder / "b.jsonl", folder / "a.parquet":
        for group in (1, 4, 50):
            write_texts(path, texts, group)
            found = [list(read_rows(path, ["text", "id"], first)) for first in range(15)]
            wish = [list(zip(texts, range(13)))[first:] for first in range(15)]
            check(f"{path.name}, {group} rows in a group", found == wish)
    write_parquet(path, {"text": ["x"] * 5000}, 4000)
    check("rows of more than a batch", [len(list(read_rows(path, [
        "text"], first))) for first in (0, 1023, 1025, 4001)] == [5000, 3977, 3975, 999])
    (folder / "deeper").mkdir()
    write_texts(folder / "deeper" / "a.jsonl", ["x"])
    (folder / "notes.txt").write_text("no table")
    names = [str(found.relative_to(folder)) for found in table_files(folder)]
    check("the tables of a folder", names == ["a.parquet", "b.jsonl", "deeper/a.jsonl"], names)
    check("one table", table_files(folder / "b.jsonl") == [folder / "b.jsonl"])
    for wish, source in (("absent: no such file",
                          "absent"), ("notes.txt: found none of these", "notes.txt")):
        check_refusal("tables", wish, table_files, folder / source)

    def all_rows(name, content, column="text"):
        if content is not None:
            (folder / name).write_bytes(content)
        return list(read_rows(folder / name, [column]))

    write_parquet(path, {"text": [str(i) * 1000 for i in range(300)]}, 100)
    whole = path.read_bytes()
    hole = whole[:1000] + b"\xff" * 3000 + whole[4000:]
    for wish, *args in (
            ("a.parquet: has no column body; expected it among .*text", "a.parquet", None, "body"),
            ("a.parquet: is no Parquet, or a part", "a.parquet", whole[: len(whole) // 2]),
            ("a.parquet: .*is the file complete", "a.parquet", hole),
            ("a.parquet: is no Parquet, or a part", "a.parquet", b""),
            ("c.parquet: could not be read", "c.parquet", None),
            ("c.jsonl: could not be read", "c.jsonl", None),
            (r"b.jsonl: line 2 has no field text; expected it in \['body'\]; --column",
             "b.jsonl",
             b'{"text": 1}\n{"body": 1}'),
            *((f"b.jsonl: line {i} is no JSON object", "b.jsonl", content) for i, content in (
                (1, b"[1]"), (2, b'{"text": "a"}\n{"text":'), (3, b'{"text": "a"}\n\n{'),
                (1, b'{"text": "\xff"}'))),
            ("b.jsonl: line 3 is JSON with too many brackets in brackets; expected an object with "
             "simple fields",
             "b.jsonl", b'{"text": "a"}\n\n{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
            ("b.jsonl: line 1 is JSON with too many brackets", "b.jsonl",
             b'{"a":' * 10**5 + b"1" + b"}" * 10**5)):
        check_refusal("table", wish, all_rows, *args)
    with mock.patch.dict(sys.modules, {"pyarrow.parquet": None}):
        check_refusal("table", r"pyarrow is missing .*pip install -r dev/requirements.txt",
                      all_rows, "a.parquet", None)


def test_lines(folder):
    """Blank lines are no rows, and a byte order mark is no part of one: the rows from each one
    on."""
    path = folder / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n \t\r\n{"text": "\\ud800b"}\r\n'
                     b'\n\xef\xbb\xbf{"text": null}\n'
                     b'\n{"text": ""}\n\n\n')
    rows = [("a",), ("\ud800b",), (None,), ("",)]
    for first in range(6):
        check(f"from row {first} on", list(read_rows(path, ["text"], first)) == rows[first:])
    os.chdir(folder)
    in_process(fineweb, "--input", path, "--output", "out", "-s", 3)
    # Newer Pythons read this.
    (folder / "deep.jsonl").write_bytes(b'{"text": ' + b"[" * 3000 + b"]" * 3000 + b"}")
    check_refusal("3,000 lists in lists", "deep.jsonl: .*(line|row) 1 .*expected", in_process,
                  fineweb, "--input", "deep.jsonl")
    stream = stream_of([text for text, in rows])
    check("their shards", contents(folder / "out") == shards_of(stream, "a", 3, 3), len(stream))


def test_not_utf8(folder):
    """A string in Parquet that is not UTF-8 is named by its row, in any batch and group, and those
    before it are read; so is one in a list. A column that is there twice is refused."""
    import pyarrow
    from pyarrow import parquet
    path = folder / "a.parquet"
    for bad, group in ((0, 3), (4, 3), (1023, 5000), (1024, 5000), (2999, 1000)):
        texts = [b"text %d" % i for i in range(3000)]
        texts[bad] = b"caf\xe9"
        column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
        parquet.write_table(pyarrow.table({"text": column, "id": range(3000)}), path,
                            row_group_size=group)
        for first in (0, bad // 2, bad):
            check_refusal(f"from row {first} on", f"a.parquet: row {bad + 1}: text is not UTF-8",
                          list, read_rows(path, ["id", "text"], first))
        after = [i for _, i in read_rows(path, ["text", "id"], bad + 1)]
        check(f"after row {bad + 1}", after == [*range(bad + 1, 3000)], len(after))
    os.chdir(folder)
    check_refusal("fineweb.py, no UTF-8", "a.parquet: row 3000: text is not UTF-8", in_process,
                  fineweb, "--input", path)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 3]), column[2997:])
    parquet.write_table(pyarrow.table({"text": lists}), path)
    check_refusal("a list", "a.parquet: row 2: text is not UTF-8", list, read_rows(path, ["text"]))
    parquet.write_table(pyarrow.Table.from_arrays([column[:2]] * 2, ["text", "text"]), path)
    check_refusal("two columns", "a.parquet: has 2 columns? text; expected it", list,
                  read_rows(path, ["text"]))


def cut(paths, batch, place, sizes):
    """[(tokens, the place after them), ...] of the shards from a place on, in this process."""
    def batches():
        for file, first, texts in fineweb.read_batches(paths[place.file :], "text", place):
            yield file, first, *fineweb.tokenize(*fineweb.encoder(byte_encoding(), 1), texts)

    with mock.patch("dev.data.fineweb.BATCH", batch):
        return [(tokens.tolist(), place)
                for tokens, place in fineweb.cut_shards(batches(), iter(sizes), place)]


def test_panics():
    """A text at which tiktoken panics is named by its file and row."""
    def encode(texts):
        if "bad" in texts:
            raise PanicException("StackOverflow")
        return [[1]] * len(texts)

    PanicException = type("PanicException", (BaseException,), {})
    check("tokens", fineweb.tokenize(encode, 9, ["a", None, ""])[0] == [2, 0, 2])
    check_refusal("a panic", r"a.jsonl: row 13: tiktoken failed \(StackOverflow\)",
                  fineweb.tokenize, encode, 9, ["a", None, "bad"], "a.jsonl", 10)


def test_borders(folder):
    """Streams are cut into the right shards, also from the place where any of them begins."""
    for seed in range(60):
        draw, paths, stream = random.Random(seed), [], []
        for i in range(draw.randrange(1, 4)):
            texts = some_texts(draw.randrange(12), f"{seed} {i}")
            stream += stream_of(texts)
            paths.append(folder / f"{i}.jsonl")
            write_texts(paths[-1], texts)
        val, size = draw.randrange(1, 60), draw.randrange(1, 120)
        ends = [0, *range(val, len(stream), size), len(stream)]
        wish = [stream[begin:end] for begin, end in itertools.pairwise(ends)] if stream else []
        sizes = [val, *[size] * (len(stream) + 1)]
        found = cut(paths, seed * 5, fineweb.Place(), sizes)
        ok = ([tokens for tokens, _ in found] == wish and
              [place for _, place in found][-1:] == [None] * bool(wish))
        for n, (_, place) in enumerate(found[:-1], 1):
            ok = ok and cut(paths, seed * 3, place, sizes[n:]) == found[n:]
        if seed % 12 == 0 or not ok:
            check(f"cut {seed}: {len(stream)} tokens into {len(wish)} shards", ok)


# ---- fineweb.py on local files


def input_folder(folder):
    """Four tables in a folder, one of them empty, and the stream that they make."""
    files = {"a.parquet": some_texts(70, 5), "b.jsonl": some_texts(40, 6), "c.parquet": [],
             "d.parquet": some_texts(9, 7)}
    (folder / "texts").mkdir()
    for name, texts in files.items():
        write_texts(folder / "texts" / name, texts, 20)
    return stream_of(own(itertools.chain(*files.values())))


FLAGS = "--input", "texts", "--name", "own", "-s", 1000, "--val-tokens", 333


@fast
def test_local_shards(folder):
    """The shards of local files are the same with any number of workers and any size of their
    batches."""
    stream = input_folder(folder)
    wish, total = shards_of(stream, "own", 333, 1000), len(stream)
    os.chdir(folder)
    for workers, batch in ((1, 200), (3, 50), (2, 2**20)):
        out, name = folder / f"out_{workers}", f"fineweb.py, {workers} workers"
        said = in_process(fineweb, *FLAGS, "--output", out, "--workers", workers, batch=batch)
        check(name, re.search("own_train_000001.bin: 1,000 tokens, .* input file 1 of 4", said),
              said)
        check(f"{name}: {len(wish)} shards", contents(out) == wish)
    said = in_process(fineweb, *FLAGS, "--output", out, "--workers", 7)
    check("fineweb.py, finished",
          f"finished before, with {total:,} tokens in {len(wish)} shards" in said, said)
    (out / list(wish)[-1]).write_bytes(wish["own_train_000001.bin"])
    check_refusal("fineweb.py", "own_train_00000[0-9].bin: 1,000 tokens; expected "
                  f"{(total - 333) % 1000}: delete", in_process, fineweb, *FLAGS, "--output", out)
    result = command("fineweb", folder, "--input", "texts", "-s", total - 1)
    check_command("fineweb.py, default name", f"data/texts: {total:,} tokens in 2 shards", result)
    check("fineweb.py, a last shard of one token", contents(folder / "data" / "texts") == shards_of(
        stream, "texts", total - 1, total))
    check_refusal("fineweb.py, all for validation", f"the texts have {total:,} tokens, and all of "
                  "them would be for validation; .*--val-tokens", in_process, fineweb, "--input",
                  "texts", "--name", "all", "--val-tokens", total)
    check("fineweb.py, no shard when all would be for validation",
          contents(folder / "data" / "all") == {})


def test_few_texts(folder):
    """If all texts fit into one shard, a tenth of their tokens is for validation, unless
    --val-tokens was given."""
    os.chdir(folder)
    for name, count in (("small.jsonl", 40), ("small.parquet", 40), ("twenty.jsonl", 2)):
        texts = ["word"] * 4 if count == 2 else some_texts(count, 3)
        write_texts(folder / name, texts, 3)
        stream, out = stream_of(own(texts)), folder / f"of {name}"
        total, stem = len(stream), name.split(".")[0]
        wish = shards_of(stream, stem, total // 10, total)
        said = in_process(fineweb, "--input", name, "--output", out)
        check(name, re.search(
            f"{stem}_val_000000.bin: {total // 10:,} .*\n.*{stem}_train_000001.bin: "
            f"{total - total // 10:,} tokens,.*\n.*: {total:,} tokens in 2 shards", said), said)
        check(f"{name}: its shards", contents(out) == wish, total)
        said = in_process(fineweb, "--input", name, "--output", out)
        check(f"{name}, again", f"finished before, with {total:,} tokens in 2 shards" in said, said)
        for die_at in (1, 1.5, 2, 2.5, 3, 3.5) if name == "small.jsonl" else ():
            out = folder / f"killed at {die_at}"
            code, *_ = command("fineweb", folder, "--input", name, "--output", out, die_at=die_at)
            said = in_process(fineweb, "--input", name, "--output", out)
            check(f"{name}, killed at {die_at}: its shards",
                  code == -signal.SIGKILL and "in 2 shards" in said and contents(out) == wish, said)
    for size in (total, total + 1):  # which is the size of a shard of validation, too
        said = in_process(fineweb, "--input", name, "-s", size, "--output", f"out {size}")
        check(f"-s {size}: its shards",
              f"{total} tokens in 2" in said and contents(folder / f"out {size}") == wish, said)
    check_refusal("--val-tokens", "all of them would be for validation", in_process, fineweb,
                  "--input", name, "--output", "given", "--val-tokens", total)
    write_texts(folder / "few.jsonl", ["word"] * 3)
    check_refusal("too few", "the texts have 15 tokens, and need at least 20 for training and "
                  "validation", in_process, fineweb, "--input", "few.jsonl")
    check("too few: no file", not (folder / "data").exists())


def test_kills(folder):
    """However often the program is killed, in the end the shards have the same bytes."""
    wish, flags = shards_of(input_folder(folder), "own", 333, 1000), (*FLAGS, "--workers", 2)
    out = folder / "one_by_one"
    # Its first file is that of the progress, then a shard and that take turns.
    for die_at in np.arange(0.5, 5, 0.5):
        code, _, err = command("fineweb", folder, *flags, "--output", out, die_at=die_at)
        named = {name: content for name, content in contents(out).items() if name.endswith(".bin")}
        ok = code == -signal.SIGKILL and named.items() <= wish.items()
        check(f"killed at file {die_at}", ok, "" if ok else f"{code} {err} {sorted(named)}")
    code, _, err = command("fineweb", folder, *flags, "--output", out)
    ok = code == 0 and contents(out) == wish
    check("killed before and after each file has its name", ok,
          "" if ok else f"{err} {sorted(contents(out))}")
    process = start("fineweb", folder, *flags, "--output", folder / "again", pause=0.2)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    check("Ctrl-C", (code, err) == (130, "interrupted\n"), f"{code}, {err!r}")
    code, _, err = command("fineweb", folder, *flags, "--output", folder / "again")
    check("after Ctrl-C", code == 0 and contents(folder / "again") == wish, err)


@fast
def test_refusals(folder):
    """What fineweb.py refuses, each in one line."""
    input_folder(folder)
    os.chdir(folder)
    own, progress = (*FLAGS, "--output", "out"), folder / "out" / "own_progress.json"

    code, out, _ = command("fineweb", folder, *own, die_at=5)
    check("fineweb.py, which will be changed", code == -signal.SIGKILL and "own_val" in out)
    for wish, *flags in (
            ("--nonsense; --help", "--nonsense"), ("--type: .*classic", "-t", "best"),
            ("--version: .*10B", "-v", "1B"), ("--shard-tokens: 0: expected at least 1", "-s", 0),
            ("--workers: 0: expected", "--workers", 0),
            ("--val-tokens: 0: expected", "--val-tokens", 0),
            ("--input takes local files, and -t or -v", "--input", "texts", "-t", "edu"),
            ("--input takes local files, and -t or -v", "--input", "texts", "-v", "10B"),
            ("--name a/b: expected letters", "--name", "a/b"),
            ("none: no such file or folder", "--input", "none"),
            ("begun with --shard-tokens 1000, and now it is 999; give the same", *own, "-s", 999),
            ("begun with --val-tokens 333, and now it is 334", *own, "--val-tokens", 334),
            ("begun with --column text, and now it is id", *own, "--column", "id"),
            (r"begun with other input files: \['a.parquet', \d+\] .*, where there is now "
             r"\['b.jsonl'", *own, "--input",
             "texts/b.jsonl"),
            ("a.parquet: has no column body", "--input", "texts", "--column", "body"),
            ("b.jsonl: id of row 1 is of type int; expected a text", "--input", "texts/b.jsonl",
             "--column", "id"),
            ("the input has no text", "--input", "texts/c.parquet")):
        check_refusal("fineweb.py", wish, in_process, fineweb, *flags)
    with fineweb.locked(folder / "out"):
        check_refusal("fineweb.py", "out: another program writes shards there", in_process, fineweb,
                      *own)
    shard = folder / "out" / "own_val_000000.bin"
    whole = shard.read_bytes()
    header = np.frombuffer(whole[:1024], "<i4").copy()
    header[2] -= 1
    shorter = header.tobytes() + whole[1024:-2]
    for wish, content in ((f"{len(whole) - 1:,} bytes; expected {len(whole):,}", whole[:-1]),
                          ("332 tokens; expected 333: delete the shards", shorter),
                          ("could not be read", None)):
        shard.unlink()
        if content is not None:
            shard.write_bytes(content)
        check_refusal("fineweb.py", f"own_val_000000.bin: {wish}", in_process, fineweb, *own)
    shard.write_bytes(whole)
    with open(folder / "texts" / "d.parquet", "ab") as file:
        file.write(b"x")
    check_refusal("fineweb.py", r"begun with other input files: \['d.parquet', \d+\]", in_process,
                  fineweb, *own)
    for content in (b"{", b"[]", b"{}",
                    b'{"place": [0, 0, 0, 0], "shards": 1, "done": false, "tokens": 1}', b"\xff",
                    b"{\"place\": [0, 0, 0]}"):
        progress.write_bytes(content)
        check_refusal("fineweb.py", "own_progress.json: is damaged; delete it and the", in_process,
                      fineweb, *own)
    progress.unlink()
    check_refusal("fineweb.py", "own_.*.bin: is there already, without own_progress.json",
                  in_process, fineweb, *own)
    Path("file").write_text("")
    code, _, err = command("fineweb", folder, *FLAGS, "--output", "file")
    check("fineweb.py, --output is a file", code == 1 and re.fullmatch("error: .*file.*\n", err),
          err)


def test_vocabulary(folder):
    """The command as it is, if this machine has GPT-2's vocabulary."""
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        pytest.skip(f"GPT-2's words: {e}")
    texts = [text for text in some_texts(50, 1) if text is not None]
    write_texts(folder / "a.jsonl", texts)
    stream = [token for text in own(texts) for token in (EOT,
                                                    *encoding.encode(text, disallowed_special=()))]
    subprocess.run([sys.executable, "-m", "dev.data.fineweb", "--input", "a.jsonl", "--output",
                    "out", "-s", "200"], cwd=folder, check=True, capture_output=True)
    check("fineweb.py with GPT-2's words",
          contents(folder / "out") == shards_of(stream, "a", 200, 200))
