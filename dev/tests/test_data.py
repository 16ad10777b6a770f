"""Test the programs of dev/data/, with small files and a hub that are made here.

    python -m dev.tests.test_data

It needs pyarrow and huggingface_hub. Shards and questions are recounted here by what llm.c's formats say. The programs
run as commands, in a process of their own, where each byte of a text is a token: so GPT-2's vocabulary is not needed.
"""
import contextlib
import gzip
import hashlib
import http.server
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from unittest import mock

import numpy as np

from dev.data import fineweb, hellaswag, hub
from dev.data.parquet_jsonl import read_rows, table_files
from dev.tests.checks import check, check_refusal, header_refusal, run_program
from prepro_tinyshakespeare import PRINTING, UserError, byte_encoding, gpt2_encoding

EOT = 50256
BYTE_IDS = {b: i for i, b in enumerate(PRINTING + [b for b in range(256) if b not in PRINTING])}
HURTFUL = ["", None, "x", "<|endoftext|>", "a<|endoftext|>b\n", "é ß 漢字 🙂 \u0000\r\n", "long " * 60, " ", None, ""]


def ids(text):
    """The tokens of a text, a byte each; a half of a surrogate pair becomes U+FFFD."""
    return [BYTE_IDS[b] for b in re.sub("[\ud800-\udfff]", "\ufffd", text).encode()]


def some_texts(count, seed):
    """Hurtful texts among harmless ones."""
    draw = random.Random(seed)
    return [draw.choice(HURTFUL) if draw.random() < 0.4 else "word " * draw.randrange(20) for _ in range(count)]


def stream_of(texts):
    """What documents become: before each its border, and nothing for one that is None."""
    return [token for text in texts if text is not None for token in (EOT, *ids(text))]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, columns, group=3):
    """Columns as Parquet, with this many rows in a row group."""
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)


def write_texts(path, texts, group=3):
    if path.suffix == ".parquet":
        write_parquet(path, {"id": list(range(len(texts))), "text": texts}, group)
    else:
        write_jsonl(path, [{"id": i, "text": text} for i, text in enumerate(texts)])


# ---- The programs in processes of their own

COMMAND = """
import os, signal, sys, time
import dev.data.{program} as program
from prepro_tinyshakespeare import byte_encoding
program.gpt2_encoding, program.BATCH, replace, calls = byte_encoding, {batch}, os.replace, 0

def replace_or_die(source, target):
    global calls
    if not str(target).endswith((".bin", "_progress.json")):
        return replace(source, target)
    calls += 1
    if {die_at} in (calls - 0.5, calls):
        if {die_at} == calls:
            replace(source, target)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
    time.sleep({pause})

os.replace = replace_or_die
time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.1))  # the hub is asked again sooner
program.run(program.main)
"""


def start(program, folder, *flags, batch=200, die_at=0, pause=0):
    """A program that runs in a folder. It kills itself at its n-th file, after it has its name, or at n - 0.5 before
    that. After each file it pauses."""
    code = COMMAND.format(program=program, batch=batch, die_at=die_at, pause=pause)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, flags)], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # not as a background job


def finish(process):
    """(exit status, stdout, stderr) of a program. Its workers have the same stdout, so this waits for them, too."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def command(program, folder, *flags, **options):
    return finish(start(program, folder, *flags, **options))


def check_command(name, wish, result, status=0):
    """Check that a program has ended with this status, saying this (a regular expression): in one line if it failed."""
    code, out, err = result
    ok = code == status and (re.search(wish, out) and not err if status == 0 else re.fullmatch(
        f"error: .*{wish}.*\n", err))
    check(name, ok, "" if ok else f"{code}, {out!r}, {err!r}")


def in_process(program, *flags):
    """A program's main() in this process, as long as it needs no workers."""
    with mock.patch.object(program, "gpt2_encoding", byte_encoding), contextlib.redirect_stdout(io.StringIO()) as out:
        program.main([str(flag) for flag in flags])
    return out.getvalue()


def contents(folder):
    """{name: bytes} of all files of a folder and below, but not of the progress file."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith("_progress.json")}


def shards_of(stream, name, val, size):
    """{name: bytes} of the shards that a stream of tokens makes, by what llm.c's format says."""
    cuts = [0, *range(val, len(stream), size), len(stream)]
    files = {}
    for i, (begin, end) in enumerate(itertools.pairwise(cuts)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, end - begin
        part = "val" if i == 0 else "train"
        files[f"{name}_{part}_{i:06d}.bin"] = header.tobytes() + np.array(stream[begin:end], "<u2").tobytes()
    return files


# ---- Rows and shards


def tables(folder):
    """Rows from each row on; folders; and what is damaged, or is another table."""
    texts, path = some_texts(13, 1), folder / "a.parquet"
    for path in folder / "b.jsonl", folder / "a.parquet":
        for group in (1, 4, 50):
            write_texts(path, texts, group)
            found = [list(read_rows(path, ["text", "id"], first)) for first in range(15)]
            wish = [list(zip(texts, range(13)))[first:] for first in range(15)]
            check(f"{path.name}, {group} rows in a group", found == wish)
    write_parquet(path, {"text": ["x"] * 5000}, 4000)
    check("rows of more than a batch", [len(list(read_rows(path, ["text"], first))) for first in (0, 1023, 1025, 4001)]
          == [5000, 3977, 3975, 999])
    (folder / "deeper").mkdir()
    write_texts(folder / "deeper" / "a.jsonl", ["x"])
    (folder / "notes.txt").write_text("no table")
    names = [str(found.relative_to(folder)) for found in table_files(folder)]
    check("the tables of a folder", names == ["a.parquet", "b.jsonl", "deeper/a.jsonl"], names)
    check("one table", table_files(folder / "b.jsonl") == [folder / "b.jsonl"])
    for wish, source in (("absent: no such file", "absent"), ("notes.txt: found none of these", "notes.txt")):
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
            (r"b.jsonl: line 2 has no field text; expected it in \['body'\]", "b.jsonl", b'{"text": 1}\n{"body": 1}'),
            *((f"b.jsonl: line {i} is no JSON object", "b.jsonl", content) for i, content in (
                (1, b"[1]"), (2, b'{"text": "a"}\n{"text":'), (2, b'{"text": "a"}\n\n'), (1, b'{"text": "\xff"}')))):
        check_refusal("table", wish, all_rows, *args)
    with mock.patch.dict(sys.modules, {"pyarrow.parquet": None}):
        check_refusal("table", r"pyarrow is missing .*pip install -r dev/requirements.txt", all_rows, "a.parquet", None)


def cut(paths, batch, place, sizes):
    """[(tokens, place behind them), ...] of the shards from a place on, in this process."""
    def batches():
        for file, first, texts in fineweb.read_batches(paths[place.file :], "text", place):
            yield file, first, *fineweb.tokenize(texts)

    with (mock.patch("dev.data.fineweb.BATCH", batch),
          mock.patch("dev.data.fineweb.encode", byte_encoding().encode_ordinary, create=True)):
        return [(tokens.tolist(), place) for tokens, place in fineweb.cut_shards(batches(), iter(sizes), place)]


def borders(folder):
    """Streams are cut as they should be, and what follows a border's place is the rest of the stream."""
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
        ok = [tokens for tokens, _ in found] == wish and [place for _, place in found][-1:] == [None] * bool(wish)
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
    return stream_of(itertools.chain(*files.values()))


FLAGS = "--input", "texts", "--name", "own", "-s", 1000, "--val-tokens", 333


def local_shards(folder):
    """The shards of local files, whatever the number of workers and of documents that each is given."""
    stream = input_folder(folder)
    wish, total = shards_of(stream, "own", 333, 1000), len(stream)
    for workers, batch in ((1, 200), (3, 50), (2, 2**20)):
        out, name = folder / f"out_{workers}", f"fineweb.py, {workers} workers"
        result = command("fineweb", folder, *FLAGS, "--output", out, "--workers", workers, batch=batch)
        check_command(name, "own_train_000001.bin: 1,000 tokens, .* input file 1 of 4", result)
        check(f"{name}: {len(wish)} shards", contents(out) == wish)
    os.chdir(folder)
    said = in_process(fineweb, *FLAGS, "--output", out, "--workers", 7)
    check("fineweb.py, finished", f"finished before, with {total:,} tokens in {len(wish)} shards" in said, said)
    (out / list(wish)[-1]).write_bytes(wish["own_train_000001.bin"])
    check_refusal("fineweb.py", f"own_train_00000[0-9].bin: 1,000 tokens; expected {(total - 333) % 1000}: delete",
                  in_process, fineweb, *FLAGS, "--output", out)
    result = command("fineweb", folder, "--input", "texts", "-s", total - 1)
    check_command("fineweb.py, default name", f"data/texts: {total:,} tokens in 2 shards", result)
    check("fineweb.py, a last shard of one token", contents(folder / "data" / "texts") == shards_of(
        stream, "texts", total - 1, total))
    result = command("fineweb", folder, "--input", "texts", "--name", "all", "--val-tokens", total)
    check_command("fineweb.py, all for validation", f"the texts have {total:,} tokens, and all of them would be for "
                  "validation; .*--val-tokens", result, 1)
    check("fineweb.py, no shard when all would be for validation", contents(folder / "data" / "all") == {})


def kills(folder):
    """However often the program is killed, in the end the shards have the same bytes, and nothing else is left."""
    wish, flags = shards_of(input_folder(folder), "own", 333, 1000), (*FLAGS, "--workers", 2)
    out = folder / "one_by_one"
    for die_at in np.arange(0.5, 5, 0.5):  # its first file is that of the progress, then a shard and that take turns
        code, _, err = command("fineweb", folder, *flags, "--output", out, die_at=die_at)
        named = {name: content for name, content in contents(out).items() if name.endswith(".bin")}
        ok = code == -signal.SIGKILL and named.items() <= wish.items()
        check(f"killed at file {die_at}", ok, "" if ok else f"{code} {err} {sorted(named)}")
    code, _, err = command("fineweb", folder, *flags, "--output", out)
    ok = code == 0 and contents(out) == wish
    check("killed before and after each file has its name", ok, "" if ok else f"{err} {sorted(contents(out))}")
    draw, killed = random.Random(1), 0
    for pause in (0.05, 0.1, 0.15, 0):
        process = start("fineweb", folder, *flags, "--output", folder / "out", pause=pause)
        if pause:
            process.stdout.readline()  # a shard is there
            time.sleep(draw.uniform(0, 3 * pause))
            process.kill()
        code, _, err = finish(process)  # which returns only because the workers have ended, too
        killed += code == -signal.SIGKILL
    ok = code == 0 and killed == 3 and contents(folder / "out") == wish
    check(f"killed {killed} times at random moments", ok, "" if ok else err)
    process = start("fineweb", folder, *flags, "--output", folder / "again", pause=0.2)
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)  # its workers get it, too, as from a terminal
    code, _, err = finish(process)
    check("Ctrl-C", (code, err) == (1, "interrupted\n"), f"{code}, {err!r}")
    code, _, err = command("fineweb", folder, *flags, "--output", folder / "again")
    check("after Ctrl-C", code == 0 and contents(folder / "again") == wish, err)


def refusals(folder):
    """What fineweb.py refuses, each in one line."""
    input_folder(folder)
    os.chdir(folder)
    own, progress = (*FLAGS, "--output", "out"), folder / "out" / "own_progress.json"

    code, out, _ = command("fineweb", folder, *own, die_at=5)
    check("fineweb.py, which will be changed", code == -signal.SIGKILL and "own_val" in out)
    for wish, *flags in (
            ("--nonsense; --help", "--nonsense"), ("--type: .*classic", "-t", "best"),
            ("--version: .*10B", "-v", "1B"), ("--shard-tokens: 0: expected at least 1", "-s", 0),
            ("--workers: 0: expected", "--workers", 0), ("--val-tokens: 0: expected", "--val-tokens", 0),
            ("--input takes local files, and -t or -v", "--input", "texts", "-t", "edu"),
            ("--input takes local files, and -t or -v", "--input", "texts", "-v", "10B"),
            ("--name a/b: expected letters", "--name", "a/b"), ("none: no such file or folder", "--input", "none"),
            ("begun with --shard-tokens 1000, and now it is 999; give the same", *own, "-s", 999),
            ("begun with --val-tokens 333, and now it is 334", *own, "--val-tokens", 334),
            ("begun with --column text, and now it is id", *own, "--column", "id"),
            (r"begun with other input files: \['a.parquet', \d+\] .*, where there is now \['b.jsonl'", *own, "--input",
             "texts/b.jsonl"),
            ("a.parquet: has no column body", "--input", "texts", "--column", "body"),
            ("b.jsonl: id of row 1 is of type int; expected a text", "--input", "texts/b.jsonl", "--column", "id"),
            ("the input has no text", "--input", "texts/c.parquet")):
        check_refusal("fineweb.py", wish, in_process, fineweb, *flags)
    with mock.patch("dev.data.fineweb.ProcessPoolExecutor",
                    **{"return_value.submit.side_effect": BrokenProcessPool("ended")}):
        check_refusal("fineweb.py", "a worker died, .*: give fewer --workers", in_process, fineweb, "--input", "texts",
                      "--name", "fewer")
    with fineweb.locked(folder / "out"):
        check_refusal("fineweb.py", "out: another program writes shards there", in_process, fineweb, *own)
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
    check_refusal("fineweb.py", r"begun with other input files: \['d.parquet', \d+\]", in_process, fineweb, *own)
    for content in (b"{", b"[]", b"{}", b'{"place": [0, 0, 0, 0], "shards": 1, "done": false, "tokens": 1}', b"\xff",
                    b"{\"place\": [0, 0, 0]}"):
        progress.write_bytes(content)
        check_refusal("fineweb.py", "own_progress.json: is damaged; delete it and the", in_process, fineweb, *own)
    progress.unlink()
    check_refusal("fineweb.py", "own_.*.bin: is there already, without own_progress.json", in_process, fineweb, *own)
    Path("file").write_text("")
    code, _, err = command("fineweb", folder, *FLAGS, "--output", "file")
    check("fineweb.py, --output is a file", code == 1 and re.fullmatch("error: .*file.*\n", err), err)


# ---- The hub


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub as huggingface_hub needs: of repositories {name: {commit: {path: bytes}}} the last commit, the
    files of a commit, and each file. `trouble` is what goes wrong."""
    repos, asked, trouble = {}, [], None

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self):
        path = self.path.split("?")[0].replace("%2F", "/")
        self.asked.append((self.command, path))
        if self.trouble in ("404", "401", "403", "429", "500"):
            return self.answer(int(self.trouble), **({"X_Error_Code": "RepoNotFound"} if self.trouble == "404" else {}))
        info = re.fullmatch("/api/datasets/([^/]+/[^/]+)", path)
        tree = re.fullmatch("/api/datasets/([^/]+/[^/]+)/tree/([^/]+)/(.+)", path)
        file = re.fullmatch("/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if info or tree:
            found = {"id": info[1], "sha": list(self.repos[info[1]])[-1]} if info else [
                {"type": "directory", "path": f"{tree[3]}/deeper", "oid": "0"},
                *({"type": "file", "path": file, "size": len(content), "oid": "0"}
                  for file, content in reversed(self.repos[tree[1]][tree[2]].items()) if file.startswith(tree[3]))]
            return self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
        if self.trouble == "500 for a file":
            return self.answer(500)
        content = file and self.repos[file[1]][file[2]].get(file[3])
        if content is None or self.trouble == "no file":
            return self.answer(404, X_Error_Code="EntryNotFound")
        headers = {"ETag": f'"{file[2]}-{file[3].replace("/", "-")}"', "X_Repo_Commit": file[2]}
        half = content[: len(content) // 2]
        if self.trouble == "half" and self.command == "GET":  # and says that this is all
            self.answer(200, half, **headers)
        elif self.trouble == "stops" or self.trouble == "stumbles" and len(downloaded()) == 1:
            self.answer(200, half, len(content), **headers)
        else:
            self.answer(200, content, **headers)

    do_HEAD = do_GET


@contextlib.contextmanager
def a_hub():
    """Serve a hub on this machine, which this process and its children ask from now on."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": cache, "HF_TOKEN": "",
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}):
        yield
    server.shutdown()
    server.server_close()


def serve(trouble=None, **repos):
    """From now on the hub has these repositories, and this trouble."""
    Hub.repos, Hub.trouble = repos, trouble
    Hub.asked.clear()


def downloaded():
    """The files that the hub has sent."""
    return [path for method, path in Hub.asked if method == "GET" and "/resolve/" in path]


def hub_shards(folder):
    """Both datasets by way of a hub, which has other files later, and with a program that is killed again and again."""
    for kind, repo, name in (("edu", "HuggingFaceFW/fineweb-edu", "edu_fineweb"),
                             ("classic", "HuggingFaceFW/fineweb", "fineweb")):
        files, texts, most, runs = {}, [], 0, 0
        for i in range(3):
            texts += some_texts(60, i)
            write_texts(folder / "file.parquet", texts[-60:], 7)
            files[f"sample/10BT/{i:03d}_00000.parquet"] = (folder / "file.parquet").read_bytes()
        files |= {"sample/10BT/README.md": b"no table", "sample/100BT/000_00000.parquet": b"another sample"}
        wish, out = shards_of(stream_of(texts), name, 1500, 1500), folder / "data" / f"{name}10B"
        flags = "-s", 1500, "--workers", 1, *(("-t", kind, "-v", "10B") if kind == "edu" else ())
        serve(**{repo: {"a" * 40: files}})
        for die_at in itertools.cycle((0,) if kind == "edu" else (3, 2.5, 5)):
            code, _, err = command("fineweb", folder, *flags, die_at=die_at)
            most, runs = max(most, len(list(out.rglob("*.parquet")))), runs + 1
            Hub.repos[repo]["b" * 40] = {path: b"another" for path in files}
            if code != -signal.SIGKILL:
                break
        ok = code == 0 and contents(out) == wish
        check(f"{kind}: by the hub, in {runs} runs", ok, "" if ok else f"{err} {sorted(contents(out))}")
        listed = sum("/tree/" in path for _, path in Hub.asked)
        check(f"{kind}: the files are those of the first time", listed == 1, listed)
        check(f"{kind}: no file is downloaded twice", len(set(downloaded())) == len(downloaded()) == 3, downloaded())
    check("classic: in several runs", runs > 3, runs)
    check("at most two of the hub's files lie here", most in (1, 2), most)


def hub_troubles(folder):
    """What goes wrong at the hub is said in one line. A transfer that stops is tried again."""
    repo, name, content = "HuggingFaceFW/fineweb", "sample/10BT/000_00000.parquet", bytes(range(256)) * 9
    for trouble, wish in (("404", r"the hub has no such thing \(404\): see its page"),
                          ("401", r"without a login \(401\): .*`hf auth login`"),
                          ("403", r"does not give it to you \(403\)"), ("429", r"too many requests .*\(429\)"),
                          ("500", r"cannot answer now \(500\)"),
                          ("500 for a file", r"cannot answer now \(500\)"), ("no file", r"has no such thing \(404\)"),
                          ("half", "sent a part of it and then stopped: start the program again"),
                          ("stops", "sent a part of it and then stopped"), ("stumbles", None),
                          ("closed", r"could not be reached \(.*\): connect to the network"),
                          ("offline", "HF_HUB_OFFLINE forbids .*: unset it")):
        parent = folder / trouble.replace(" ", "_")
        out = parent / "shards"
        serve(trouble, **{repo: {"a" * 40: {name: content}}})
        with mock.patch("time.sleep", lambda seconds: None), mock.patch.multiple(
                "huggingface_hub.constants", HF_HUB_OFFLINE=trouble == "offline", ENDPOINT=(
                    "http://127.0.0.1:9" if trouble == "closed" else os.environ["HF_ENDPOINT"])):
            check_refusal(f"the hub, {trouble}", f"fineweb, sample/10BT.*: .*{wish}.*; or give local files" if wish else
                          "is no Parquet", in_process, fineweb, "-s", 10, "--output", out)
        left = {path.name: path.read_bytes() for path in out.rglob("*") if path.suffix in (".parquet", ".incomplete")}
        whole = [] if wish else [content]  # which is no Parquet, as the program says of it
        check(f"the hub, {trouble}: no part of a file is left", list(left.values()) == whole, sorted(left))
        check(f"the hub, {trouble}: a folder is left only for a file", parent.exists() == (wish is None))
    serve("404", **{repo: {"a" * 40: {name: content}}})
    for i, found in enumerate(((), ("own_val_000000.bin",), ("notes.txt",))):  # folders that were there before
        out = folder / f"before{i}"
        out.mkdir()
        for file in found:
            (out / file).touch()
        check_refusal("the hub, a folder that was there", "no such thing", in_process, fineweb, "--output", out)
        check("the hub, a folder that was there: as it was", {p.name for p in out.iterdir()} == {*found})
    with mock.patch.dict(sys.modules, {"huggingface_hub": None}):
        check_refusal("the hub", "huggingface_hub is missing .*pip install", hub.download, repo, name)


# ---- hellaswag.py


def questions_in(content):
    """([magic, version, questions], [(context, endings, label), ...]) of a file, by what llm.c's format says."""
    header, stream = np.frombuffer(content[:1024], "<i4").tolist(), np.frombuffer(content[1024:], "<u2").tolist()
    at, found, sizes = 0, [], []
    while at < len(stream):
        begin, (mark, nbytes, index, label, count) = at, stream[at : at + 5]
        at, parts = at + 5, []
        for _ in range(1 + count):
            parts.append(stream[at + 1 : at + 1 + stream[at]])
            at += 1 + stream[at]
        assert (mark, nbytes, index, count) == (65535, 2 * (at - begin), len(found), 4), stream[begin : begin + 5]
        found.append((parts[0], parts[1:], label))
        sizes.append(nbytes)
    assert header[3] == max(sizes) and not any(header[4:]), header[:9]
    return header[:3], found


def some_questions(folder):
    """Write val.parquet, as the hub has it, and val.jsonl, as its authors do. Returns how a file should have them."""
    rows = [{"ind": i, "ctx": f"A man é {'is ' * (7 * i % 5)}sitting.", "label": i * 5 % 4,
             "endings": [f"{'he ' * (i * k % 7)}sleeps" for k in range(4)]} for i in range(9)]
    rows[0]["endings"] = ["", "<|endoftext|>", "b", " c"]
    write_jsonl(folder / "val.jsonl", rows)
    columns = {name: [row[name] for row in rows] for name in ("ctx", "endings")}
    write_parquet(folder / "val.parquet", columns | {"label": [str(row["label"]) for row in rows]})
    return [(ids(row["ctx"]), [ids(" " + ending) for ending in row["endings"]], row["label"]) for row in rows]


def questions(folder):
    """The questions of a hub's file and of local ones; and those that are refused."""
    wish, out = some_questions(folder), folder / "data" / "hellaswag" / "hellaswag_val.bin"
    serve(**{"Rowan/hellaswag": {"c" * 40: {
        "data/test-00000-of-00001.parquet": b"",
        "data/validation-00000-of-00001.parquet": (folder / "val.parquet").read_bytes()}}})
    result = command("hellaswag", folder, die_at=0.5)
    ok = result[0] == -signal.SIGKILL and not out.exists() and len(downloaded()) == 1
    check("hellaswag.py, killed", ok, "" if ok else result)
    check_command("hellaswag.py, again", "hellaswag_val.bin: 9 questions\n", command("hellaswag", folder))
    check("hellaswag.py, again: the download is kept", len(downloaded()) == 1, downloaded())
    said = in_process(hellaswag, "--output", out)
    check("hellaswag.py, once more", "hellaswag_val.bin: 9 questions, is there already" in said, said)
    serve("404")
    check_refusal("hellaswag.py", r"Rowan/hellaswag, data: the hub has no such thing \(404\)", in_process, hellaswag,
                  "--output", folder / "other.bin")
    files = [out]
    for name in ("val.jsonl", "val.parquet"):
        files.append(folder / f"{name}.bin")
        in_process(hellaswag, "--input", folder / name, "--output", files[-1])
    for path in files:
        header, found = questions_in(path.read_bytes())
        check(f"{path.name}: its header", header == [20240522, 1, 9], header)
        check(f"{path.name}: its questions", found == wish)
    good = json.loads((folder / "val.jsonl").read_text().split("\n")[0])
    longest = "x" * (32767 - 10 - sum(map(len, wish[0][1])))  # of a context, where the example has 65,534 bytes

    def write(change):
        write_jsonl(folder / "bad.jsonl", [good, good | change] if change is not None else [])
        (folder / "bad.bin").unlink(missing_ok=True)
        in_process(hellaswag, "--input", folder / "bad.jsonl", "--output", folder / "bad.bin")

    write({"ctx": longest})
    check("the longest question", questions_in((folder / "bad.bin").read_bytes())[0] == [20240522, 1, 2])
    for wish, change in (
            *((r"bad.jsonl: row 2: its label is .*; expected one of 0 to 3", {"label": label}) for label in (
                "", 4, -1, "x", None, True)),
            *(("bad.jsonl: row 2: expected ctx to be a text and endings to be 4 texts", change) for change in (
                {"ctx": None}, {"endings": "abcd"}, {"endings": ["a"] * 3}, {"endings": ["a"] * 5},
                {"endings": ["a", "b", "c", 4]})),
            ("question 2 takes 65,536 bytes; expected at most 65,534", {"ctx": longest + "x"}),
            ("the input has no question", None)):
        check_refusal("hellaswag.py", wish, write, change)
        check("hellaswag.py writes nothing then", not (folder / "bad.bin").exists())
    (folder / "other.bin").write_bytes(b"\1\0\0\0" * 256)
    check_refusal("hellaswag.py", f"other.bin: .*{header_refusal((1, 1), hellaswag.EVAL_FILE)}",
                  in_process, hellaswag, "--output", folder / "other.bin")


def vocabulary(folder):
    """Where this machine has GPT-2's vocabulary, the commands as they are, with GPT-2's words."""
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"     not tested with GPT-2's words: {e}")
        return
    texts = [text for text in some_texts(50, 1) if text is not None]
    write_texts(folder / "a.jsonl", texts)
    stream = [token for text in texts for token in (EOT, *encoding.encode(text, disallowed_special=()))]
    some_questions(folder)
    for program, *flags in (("fineweb", "--input", "a.jsonl", "--output", "out", "-s", "200"),
                            ("hellaswag", "--input", "val.jsonl", "--output", "questions.bin")):
        subprocess.run([sys.executable, "-m", f"dev.data.{program}", *flags], cwd=folder, check=True,
                       capture_output=True)
    check("fineweb.py with GPT-2's words", contents(folder / "out") == shards_of(stream, "a", 200, 200))
    rows, encode = map(json.loads, (folder / "val.jsonl").read_text().splitlines()), encoding.encode_ordinary
    check("hellaswag.py with GPT-2's words", questions_in((folder / "questions.bin").read_bytes())[1] == [
        (encode(row["ctx"]), [encode(" " + ending) for ending in row["endings"]], row["label"]) for row in rows])


# ---- english.py

PROSE = ["This is the first paragraph of a text that reads as English prose, and it is long enough to be kept.",
         "Another one says, in other words, that a paragraph with the usual little words is what we are looking for.",
         "The third of them is here so that a document of some paragraphs has the two hundred letters it needs.",
         "It is not to be found in any other file, and so it stays where it is: in the document that has it alone."]
TABLE = "the 0x01 | of 0x02 | the 0x03 | and 0x04 | the 0x05 | of 0x06 | the 0x07 | and 0x08"
LIST = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau"


def english_text(folder):
    """Of files of each kind, what is prose and was not in another file before."""
    docs, (one, two, three, four) = folder / "docs", PROSE
    (docs / "man" / "man1").mkdir(parents=True)
    (docs / "man" / "de").mkdir()
    for name, text in {
            "a.md": f"# Title\n\n{one}\n\n{TABLE}\n\n{LIST}\n \n{two}\n\n{two}\n",
            "b.txt": f"{one}\n\n{two}\n\n{three}\n\n{four}",  # of which two are new
            "c.txt": f"{three}\n\n{four}",  # none is new
            "d.html": f"<p>{one} One &amp; two.</p><script>{four} S</script><div>{two} <b>B</b>old</div>",
            "e.py": f"def f():\n    '''{one} F.'''\n    x = '''{two} X.'''\nclass C:\n    '''{three} C.'''\n",
            "man/man1/f.1": f'.\\" {one}\n.TH F 1\n.SH NAME\n{one} \\fBM\\fR.\n.PP\n{two}\n.B M\\-n\n',
            "man/de/f.1": f"{one} D.\n\n{two} D.", "LICENSE.txt": f"{one} L.\n\n{two} L.",
            "g.py": "def f(:", "h.rst": f"{one} It is too short.", "i.cfg": f"{one} I.\n\n{two} I.",
            "latin.txt": f"{one} \xe9.\n\n{two} \xe9."}.items():
        (docs / name).write_bytes(text.encode("latin-1"))
    (docs / "j.txt.gz").write_bytes(gzip.compress(f"{one} J.\n\n{two}\n{three} J.".encode()))
    (docs / "k.txt.gz").write_bytes(b"no gzip")
    wish = {f"{one}\n\n{two}", f"{three}\n\n{four}", f"{one} One & two.\n\n{two} Bold", f"{one} F.\n\n{three} C.",
            f"{one} M.\n\n{two} M-n", f"{one} J.\n\n{two} {three} J."}

    def gather(*arguments):
        return subprocess.run([sys.executable, "-m", "dev.data.english", *arguments], cwd=folder, text=True,
                              capture_output=True)

    done = gather("docs", "--output", "1.jsonl")
    found = [json.loads(line)["text"] for line in (folder / "1.jsonl").read_text().splitlines()]
    check("english.py: its documents", set(found) == wish, set(found) ^ wish or "")
    in_order = sorted(wish, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    check("english.py: their order", found == in_order)
    line = f"1.jsonl: {len(wish)} documents of {sum(map(len, wish)):,} characters, from 11 files\n"
    check("english.py: what it says", done.stdout == line, done.stdout + done.stderr)
    gather("docs/man", "docs", "--output", "2.jsonl")
    check("english.py: the same again", (folder / "2.jsonl").read_bytes() == (folder / "1.jsonl").read_bytes())
    (folder / "empty").mkdir()
    for wish, name in (("none: there is no such folder", "none"), ("no English prose in 0 files", "empty")):
        done = gather(name)
        ok = done.returncode == 1 and re.fullmatch(f"error: {wish}.*\n", done.stderr)
        check(f"english.py: {wish}", ok, "" if ok else done.stderr)


if __name__ == "__main__":
    with a_hub():
        run_program((tables, borders, local_shards, kills, refusals, hub_shards, hub_troubles, questions, vocabulary,
                 english_text))
