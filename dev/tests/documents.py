"""Texts in tables, and the programs of dev/data/, which run here as commands in processes of their
own.

Each byte of a text is a token, so GPT-2's vocabulary is not needed.
"""
import contextlib
import io
import json
import random
import re
import signal
import subprocess
import sys
import urllib.error
from unittest import mock

from dev.data import own_text
import prepro_tinyshakespeare as prepro
from dev.data.vocabulary import PRINTING
from dev.tests.checks import check, output_of, working_in
from dev.tests.folders import byte_encoding

EOT = 50256
BYTE_IDS = {b: i for i, b in enumerate(PRINTING + [b for b in range(256) if b not in PRINTING])}
HURTFUL = ["", None, "x", "<|endoftext|>", "a<|endoftext|>b\n", "é ß 漢字 🙂 \u0000\r\n",
            "long " * 60,
           " ", None, ""]


def byte_ids(text):
    """The tokens of a text, one for each byte; half of a surrogate pair becomes U+FFFD."""
    return [BYTE_IDS[b] for b in re.sub("[\ud800-\udfff]", "\ufffd", text).encode()]


def some_texts(count, seed):
    """Hurtful texts among harmless ones."""
    draw = random.Random(seed)
    return [draw.choice(HURTFUL) if draw.random() < 0.4 else "word " * draw.randrange(20)
            for _ in range(count)]


def stream_of(texts):
    """The tokens of documents, each after <|endoftext|>. One that is None has none."""
    return [token for text in texts if text is not None for token in (EOT, *byte_ids(text))]


def own(texts):
    """Texts as they are cleaned, of which none begins with a byte order mark."""
    return [text and text.replace("\r\n", "\n") for text in texts]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, columns, group=3):
    """Write columns as Parquet, with this many rows in a row group."""
    import pyarrow
    from pyarrow import parquet
    parquet.write_table(pyarrow.table(columns), path, row_group_size=group)


def write_texts(path, texts, group=3):
    if path.suffix == ".parquet":
        write_parquet(path, {"id": list(range(len(texts))), "text": texts}, group)
    else:
        write_jsonl(path, [{"id": i, "text": text} for i, text in enumerate(texts)])


COMMAND = """
import os, signal, sys, time
import dev.data.{program} as program
from dev.tests.folders import byte_encoding
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
# the hub is asked again sooner
time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.1))
program.run_main(program.main)
"""


def start(program, folder, *flags, batch=200, die_at=0, pause=0):
    """Start a program in a folder. It kills itself after its n-th file has its name (die_at=n), or
    before (die_at=n-0.5). It pauses after each file."""
    code = COMMAND.format(program=program, batch=batch, die_at=die_at, pause=pause)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, flags)], cwd=folder, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            # Not as a background job.
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))


def finish(process):
    """(exit status, stdout, stderr) of a program. Its workers have the same stdout, so this waits
    for them, too."""
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


def command(program, folder, *flags, **options):
    return finish(start(program, folder, *flags, **options))


def check_command(name, wish, result, status=0):
    """Check a program's exit status and what it said (a regular expression): one line if it
    failed."""
    code, out, err = result
    ok = code == status and (re.search(wish, out) and not err if status == 0 else re.fullmatch(
        f"error: .*{wish}.*\n", err))
    check(name, ok, "" if ok else f"{code}, {out!r}, {err!r}")


def in_process(program, *flags, batch=200):
    """Run a program's main() in this process. Returns what it printed."""
    with mock.patch.multiple(program, create=True, gpt2_encoding=byte_encoding, BATCH=batch
                             ), contextlib.redirect_stdout(io.StringIO()) as out:
        program.main([str(flag) for flag in flags])
    return out.getvalue()


def prepro_in(folder, *arguments, text=None):
    """Run prepro in a folder. A download gives this text, or fails if there is none. Returns the
    output."""
    answer = mock.Mock(side_effect=urllib.error.URLError("no network"))
    if text is not None:
        answer = mock.Mock(side_effect=lambda *args, **more: io.BytesIO(text.encode()))
    with (working_in(folder), mock.patch("urllib.request.urlopen", answer),
          mock.patch.object(sys, "argv", ["prepro", *map(str, arguments)]),
          mock.patch.object(own_text, "run_main", lambda main: main())):
        return output_of(prepro.main)


def contents(folder):
    """{name: bytes} of all files in and below a folder, without the progress file."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.endswith("_progress.json")}
