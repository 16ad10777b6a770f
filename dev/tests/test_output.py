"""Test programs whose stdout or stderr is full, broken, closed, or lacks letters:
dev/features/output.py, and run_main() of dev/common/program.py.
"""
import contextlib
import os
import pty
import re
import resource
import subprocess
import sys
import threading
import time

from dev.features.output import steady
from dev.tests.checks import EXACT, TINY, TOP, check
from dev.tests.trainings import two_token_files

FULL = "/dev/full"  # each write to it fails with ENOSPC
TRAIN = (sys.executable, TOP / "train_gpt2.py", "--device", "cpu", "-e", TINY, "-j", "tokens.bin",
         "-b", 2, "-t", 8,
         "-x", 3, "-s", 0)


def call(folder, program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, closed="", **settings):
    """(exit status, stdout and stderr as bytes, None unless they are pipes) of a program. closed:
    as >&- or 2>&-."""
    words = [os.fsencode(str(word)) for word in program]
    if closed:
        words = ["sh", "-c", f'exec "$@" {closed}', "sh", *words]
    # "" stands for unset: Python buffers what it prints
    environment = os.environ | {"PYTHONUNBUFFERED": ""} | settings.pop("environment", {})
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(file, "wb"))
                 if isinstance(file, (str, os.PathLike)) else file for file in (stdout, stderr)]
        child = subprocess.Popen(words, stdout=files[0], stderr=files[1], cwd=folder,
                                 env=environment, **settings)
        out, error = child.communicate(timeout=120)
    return child.returncode, out, error


@contextlib.contextmanager
def gone(kind):
    """A file number that nobody reads any more: of a pipe (EPIPE), or of a terminal (EIO)."""
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    os.close(reader)
    yield writer
    os.close(writer)


def small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))


def test_training_goes_on(folder):
    """A training ends with the status 0 and all its steps, whatever happens to stdout and stderr,
    and warns once."""
    two_token_files(folder)
    train = (*TRAIN, "-i", "tokens.bin")
    call(folder, (*train, "-o", "whole"))
    wish = (folder / "whole/main.log").read_text()
    check("the log that all must have", wish.count("trl:") == 3, wish)
    with gone("pipe") as pipe, gone("terminal") as terminal:
        for name, reason, streams in (
                ("a full disk", "No space left on device", dict(stdout=FULL)),
                ("a broken pipe", "Broken pipe", dict(stdout=pipe)),
                ("a closed terminal", "Input/output error", dict(stdout=terminal)),
                ("stdout on a full disk, stderr too", None, dict(stdout=FULL, stderr=FULL)),
                ("stdout and stderr on a closed terminal", None,
                 dict(stdout=terminal, stderr=terminal)),
                ("stderr on a full disk", "", dict(stderr=FULL)),
                ("stderr on a closed terminal", "", dict(stderr=terminal)),
                ("2>&-", "", dict(closed="2>&-")),
                (">&-", "", dict(closed=">&-")),
                (">&- 2>&- <&-", None, dict(closed=">&- 2>&- <&-"))):
            output = re.sub(r"\W+", "_", name)
            status, out, error = call(folder, (*train, "-o", output), **streams)
            yield f"{name}: exit status", status, 0, EXACT
            log = (folder / output / "main.log").read_text()
            check(f"{name}: the log", log == wish, log)
            check(f"{name}: the weights", (folder / output / "model_00000003.bin").read_bytes()
                  == (folder / "whole/model_00000003.bin").read_bytes())
            if reason:
                once = re.fullmatch(rf"WARNING: stdout could not be written \({reason}\): .*\n",
                                    error.decode())
                check(f"{name}: one warning", once, error)
            elif reason is not None and error is not None:
                check(f"{name}: no warning", error == b"", error)
            if out and ">&-" not in name:
                check(f"{name}: all of stdout", b"step    3/3" in out and b"training loss" in out,
                      out[-200:])
    status, _, error = call(folder, train, stdout=folder / "little", preexec_fn=small_files)
    yield "ulimit -f: exit status", status, 0, EXACT
    check("ulimit -f: one warning",
          error.count(b"WARNING: stdout could not be written (File too large)") == 1, error)
    check("ulimit -f: what fits", (folder / "little").stat().st_size == 1000)


def test_room_again(folder):
    """What is printed once a disk has room again is there, whole; a pipe that does not block loses
    nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    warned, got, text = [], [], "x" * 99
    stream = steady(open(writer, "w", encoding="ascii", closefd=False), warned.append)

    def read():
        while data := os.read(reader, 2**16):
            got.append(data)
            time.sleep(0.001)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(10000):
        print(text, file=stream)
    os.close(writer)
    thread.join()
    check("a pipe that does not block",
          b"".join(got) == f"{text}\n".encode() * 10000 and not warned, warned)
    os.close(reader)

    room = os.open(folder / "room", os.O_RDWR | os.O_CREAT)
    full = os.open(FULL, os.O_WRONLY)
    number = os.dup(full)
    stream = steady(open(number, "w", encoding="utf-8", closefd=False), warned.append)
    for file, line in ((full, "one"), (room, "two"), (full, "three"), (room, "four é")):
        os.dup2(file, number)
        print(line, file=stream)
    found = (folder / "room").read_text("utf-8")
    check("a disk that is full for a while", found == "two\nfour é\n", found)
    check("and one warning", warned == ["No space left on device"], warned)


def test_letters(folder):
    """Text that stdout's encoding lacks is printed with replacements, in a training and by a
    tool."""
    two_token_files(folder)
    odd = "d\udce9"  # the byte 0xE9, in a UTF-8 locale
    (folder / odd).mkdir()
    (folder / "tokens.bin").rename(folder / odd / "tokens.bin")
    (folder / "tokens.bin").symlink_to(folder / odd / "tokens.bin")
    for encoding, name, printed in (("utf-8", odd, rb"d\udce9"), ("ascii", odd, rb"d\udce9"),
                                    ("latin-1", odd, rb"d\udce9"), ("ascii", "é€", rb"\xe9\u20ac"),
                                    ("latin-1", "é€", b"\xe9\\u20ac"),
                                    ("utf-8", "é€", "é€".encode())):
        environment = {"PYTHONIOENCODING": encoding, "LC_ALL": "C.UTF-8"}
        output = f"{name}/{encoding}"
        status, out, error = call(folder, (*TRAIN, "-i", f"{odd}/tokens.bin", "-o", output),
                                  environment=environment)
        yield f"{name!a} in {encoding}: exit status", status, 0, EXACT
        check(f"{name!a} in {encoding}: printed", b"wrote " + printed + b"/" in out and not error,
              out[-300:] + error)
        check(f"{name!a} in {encoding}: written",
              os.path.exists(os.fsencode(folder / output / "model_00000003.bin")))
        status, out, error = call(folder, (sys.executable, TOP / "train_gpt2.py", "-e",
                                           f"{name}/absent.bin"), environment=environment)
        ok = status == 1 and re.fullmatch(rb"error: [^\n]*absent.bin: could not be read[^\n]*\n",
                                          error)
        check(f"{name!a} in {encoding}: in an error", ok, error)
        (folder / name).mkdir(exist_ok=True)
        out = folder / name / f"{encoding}.folder"
        status, said, error = call(folder, (sys.executable, "-m", "dev.tools.convert", TINY, out),
                                   environment=environment)
        check(f"{name!a} in {encoding}: a tool",
              status == 0 and b"wrote " in said and printed in said, said + error)


def test_other_programs(folder):
    """A program that only prints fails with one line and the status 1 if it cannot. What C code
    prints to a closed stderr is not in a file of the program's."""
    two_token_files(folder)
    for name, *program in (("--dry-run", *TRAIN, "-i", "tokens.bin", "--dry-run"),
                           ("--sample", *TRAIN, "--sample", "", "-g", 2),
                           ("a tool", sys.executable, "-m", "dev.tools.draw", "--help")):
        status, _, error = call(folder, program, stdout=FULL)
        lines = error.decode().splitlines()
        ok = [line for line in lines if not line.startswith("seed ")]
        check(f"{name}: in one line", len(ok) <= 1 and "Traceback" not in error.decode(), error)
        yield f"{name}: exit status", status, 1, EXACT
    for streams in (dict(stderr=FULL), dict(closed="2>&-"), dict(stdout=FULL, stderr=FULL)):
        status, *_ = call(folder, (*TRAIN, "-i", "absent.bin"), **streams)
        yield f"an error with {streams}", status, 1, EXACT
    program = folder / "program.py"
    program.write_text(f"import os, sys\nsys.path.insert(0, {str(TOP)!r})\n"
                       "from dev.common.program import run_main\n\ndef main():\n"
                       "    with open('file', 'wb', buffering=0) as file:\n"
                       "        os.write(2, b'from C'), os.write(1, b'from C'), "
                       "file.write(b'mine')\n        os.system('echo of a child "
                       ">&2')\n\nrun_main(main)\n")
    for closed in ("2>&-", ">&-", ">&- 2>&- <&-"):
        status, *_ = call(folder, (sys.executable, program), closed=closed)
        found = (folder / "file").read_bytes()
        check(f"a file opened with {closed}", status == 0 and found == b"mine", found)
