"""Test runs that end early, by a kill, a signal or a full disk: each leaves a checkpoint that
resumes.

    pytest dev/tests/test_kills.py --kills 200      # more kills than the usual 8
"""
import contextlib
import io
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from dev.features import order
from dev.features.base import GPT2, Training
from dev.features.checkpoints import background_writer
from dev.features.checkpoints.main_log import MainLog
from dev.features.late_reports import LateReports
from dev.tests.checks import EXACT, TINY, TOP, check
from dev.tests.jobs import at_call, wrapped
from dev.tests.trainings import (TRAINER, call, check_same, command, train, whole_ones, without)

pytestmark = pytest.mark.usefixtures("token_data")


@pytest.fixture
def kills(pytestconfig):
    return pytestconfig.option.kills or 8


class Late(LateReports, Training):
    """Training that reports late, as on a GPU, with any device that can fetch."""


def start(*args, trainer=TRAINER, **more):
    """A training in a process of its own."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen(command(*args, trainer=trainer), **pipes | more)


def wait_for(lines, begin):
    """Read lines until one begins like this."""
    return next((line for line in lines if line.startswith(begin)), None)


def test_killed_runs(device_name, folder, kills):
    """A run that is killed at random moments, and resumed each time, ends with the same bytes."""
    flags, steps = ("-x", 40, "-n", 1, "-nk", 2, "--dtype", "fp32"), 40
    whole, output, chance = folder / "whole", folder / "killed", random.Random(1)
    begun = time.perf_counter()
    # A process, whose start takes time, too.
    start(device_name, folder, whole, *flags).communicate()
    seconds, killed, writing = time.perf_counter() - begun, 0, 0
    while killed < kills:
        child = start(device_name, folder, output, *flags, "-y", 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(chance.uniform(0.2, 1) * seconds)
        while killed % 2 and child.poll() is None and not any(output.glob("*.tmp")):
            time.sleep(1e-4)  # every second kill hits a file that is being written
        child.kill()
        _, error = child.communicate()
        if child.returncode == 0:
            check_same(f"after {killed} kills", output, whole, steps)
            shutil.rmtree(output)
        else:
            assert child.returncode == -signal.SIGKILL, error
            killed += 1
            writing += any(output.glob("*.tmp"))
            whole_ones(output)
    train(device_name, folder, output, *flags, "-y", 1)
    check_same(f"after {killed} kills", output, whole, steps)
    check("no temporary file is left", not [*output.glob("*.tmp")])
    check("the newest two are left", whole_ones(output) == [39, 40], whole_ones(output))
    check("a fourth of the kills came while a file was being written", writing >= kills // 4,
          f"{writing} of {killed}")


def test_signals(device_name, folder):
    """SIGTERM, Ctrl-C and a terminal that closes end a run after its step, with a checkpoint that
    resumes. A second Ctrl-C ends it at once. With nohup, it goes on without its terminal."""
    flags, whole = ("-x", 60, "-v", 0, "-s", 0, "-n", 60), folder / "whole"
    train(device_name, folder, whole, *flags)
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)):
        output = folder / signal.Signals(number).name
        child = start(device_name, folder, output, *flags, "-n", 0)
        wait_for(child.stdout, "step    5/")
        child.send_signal(number)
        child.communicate()
        yield f"{output.name}: exit status", child.returncode, status, EXACT
        stopped = whole_ones(output)
        check(f"{output.name}: a whole checkpoint", len(stopped) == 1 and 5 <= stopped[0] < 60,
              f"{stopped}")
        train(device_name, folder, output, *flags, "-y", 1)
        check_same(f"{output.name} resumed", output, whole, 60)

    for name, status, prepare in (
            ("nohup, and tee", 130, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)),
            ("a terminal", 129, lambda: os.open(os.ttyname(0), os.O_RDWR))):
        ours, its = os.pipe() if "tee" in name else pty.openpty()
        child = start(device_name, folder, folder / name, *flags, "-x", 2000, stdin=its, stdout=its,
                      stderr=its, start_new_session=True, preexec_fn=prepare)
        os.close(its)
        with open(ours) as lines:
            next(line for line in lines if "step    5/" in line)
        for number in (1, 2) if "tee" in name else ():  # a terminal that closes sends one itself
            child.send_signal(number)
        yield f"{name}: exit status", child.wait(60), status, EXACT
        check(f"{name}: a whole checkpoint", len(whole_ones(folder / name)) == 1)

    output = folder / "twice"
    slow = wrapped(folder, late=at_call("train_gpt2.GPT2.train_step", 4, "time.sleep(60)", -1))
    child = start(device_name, folder, output, *flags, "-n", 0, trainer=slow)
    wait_for(child.stdout, "step    2/")
    text = train(device_name, folder, output, status=1)
    refused = re.search("error: .*another run is writing to this folder", text)
    check("a second run in the folder is refused", refused, text)
    child.send_signal(signal.SIGINT)
    next(line for line in child.stderr if "once more leaves at once" in line)
    child.send_signal(signal.SIGINT)
    yield "Ctrl-C twice: the signal ends it", child.wait(20), -signal.SIGINT, EXACT
    check("Ctrl-C twice: no checkpoint", whole_ones(output) == [])


def test_slow_first_steps(device_name, folder):
    """Before the first step is finished, a run says what takes long, and a signal ends it at once,
    even within a kernel: there is nothing to save."""
    for number, where, said in ((signal.SIGTERM, "train_step", "it computes 32 tokens (-d)"),
                                (signal.SIGINT, "forward", "it validates (-v 0: never)")):
        slow = wrapped(folder, late="dev.features.signals.PATIENCE = 0.1\nimport hashlib" + at_call(
            f"train_gpt2.GPT2.{where}", 1, "hashlib.pbkdf2_hmac('md5', b'', b'', 10**8)", -1))
        child = start(device_name, folder, folder / where, trainer=slow)
        line = wait_for(child.stdout, f"no step is finished yet: {said}")
        child.send_signal(number)
        _, error = child.communicate(timeout=20)
        found = len(error.split("\n")), whole_ones(folder / where), child.returncode
        check(f"{number}: a line and its status", line and found == (3, [], 128 + number), found)


def test_interrupted_starts(folder):
    """Ctrl-C while a program imports, compiles or gets its vocabulary: one line, and 130."""
    wait = "import os, time; os.mkdir(__file__ + '.here'); time.sleep(60)"
    for what, content, program, *more in (
            ("tiktoken.py", wait, "prepro_tinyshakespeare"),
            ("g++", 'mkdir "$0.here"; sleep 60', TRAINER, "--device", "cpu", "-e", str(TINY), "-t",
             "8", "-i", str(folder / "part_train_0.bin"), "-j", str(folder / "part_val_0.bin"))):
        here = folder / what[:3]
        here.mkdir()
        (here / what).write_text(content)
        own = dict(CXX=f"sh {here / what}", XDG_CACHE_HOME=str(here), PYTHONPATH=f"{here}:{TOP}")
        child = subprocess.Popen([sys.executable, "-m", program, *more], env=os.environ | own,
                                 cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                 text=True, start_new_session=True)
        while not (here / f"{what}.here").exists() and child.poll() is None:
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        _, error = child.communicate(timeout=20)
        check(f"{what}", (child.returncode, error) == (130, "interrupted\n"), error)


def test_full_disks(device_name, folder):
    """A full disk is reported, leaves the last complete checkpoint, and does not end the
    training."""
    output, enough = folder / "full", folder / "enough"
    train(device_name, folder, enough)

    def train_with(limit, output, *flags):
        """Train on where no file may be larger than a limit, from step 6."""
        def little_room():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        child = start(device_name, folder, without(enough, output, 9, 12), *flags, "-y", 1,
                      preexec_fn=little_room)
        return *child.communicate(timeout=60), child.returncode

    # Room for parameters, and not for a state
    text, error, status = train_with((enough / "state_00000006_00000.bin").stat().st_size - 1000,
                                     output)
    ok = status == 1 and re.fullmatch("error: no checkpoint of step 12: .*\n", error)
    check("full disk: the end says so", ok, f"{status}, {error}")
    warnings = re.findall(r"WARNING: no checkpoint of step (\d+): .*state.*newest whole one is of "
                          r"step 6", text)
    check("full disk: each checkpoint that fails is reported", warnings == ["9", "12"],
          f"{warnings}")
    check("full disk: the training went on", "step   12/12" in text)
    yield "full disk: whole checkpoints", whole_ones(output), [3, 6], EXACT
    rest = sorted(path.name for path in output.iterdir()
                  if not re.search("0000000[36]|main.log|log.jsonl|run_00000000", path.name))
    check("full disk: nothing else is left", rest == [], f"{rest}")
    train(device_name, folder, output, "-y", 1)
    check_same("after a full disk", output, enough, 12)
    # Not even for parameters: each checkpoint fails, and the writer's memory must not run out
    text, *_ = train_with(50_000, folder / "fuller", "-n", 1)
    yield "fuller disk: failures", text.count("WARNING: no checkpoint of step"), 6, EXACT
    yield "fuller disk: whole checkpoints", whole_ones(folder / "fuller"), [3, 6], EXACT

    lines, room = [], iter((0, 5, None, 100, 100))  # bytes that can be written, time after time

    def write(data):
        count = next(room)
        if count is None:
            raise OSError(28, "No space left on device")
        lines.append(data[:count])
        return len(data[:count])

    log = MainLog(folder, 0, False)
    log.file = SimpleNamespace(write=write)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        for i in range(5):
            log.write(f"line {i}")
    check("lines of the log wait for room",
          b"".join(lines) == b"line 0\nline 1\nline 2\nline 3\nline 4\n", lines)
    yield ("which is said once", said.getvalue().count("WARNING: main.log could not be written"), 1,
           EXACT)


def test_writer_that_fails(device_name, folder):
    """An exception in the writer's thread is reported like a full disk, and the training goes
    on."""
    real = background_writer.replace_file

    def broken(path, chunks):
        if "00000000" not in path.name:
            raise ZeroDivisionError("a crash")
        real(path, chunks)

    with mock.patch.object(background_writer, "replace_file", broken):
        status, text, error = call(*command(device_name, folder, folder / "crash")[3:])
    ok = (status == 1 and "WARNING: no checkpoint of step 3: a crash" in text and
          "step   12/12" in text)
    check("a crash of the writer is seen", ok, text[-300:] + error)


def test_stopped_at_once(folder):
    """A signal ends a run after its step, whenever it comes from the second on: without another
    validation or sample, with a checkpoint that has this step's weights, and after the lines of all
    steps. So it does where lines are late, as on a GPU."""
    flags, handlers = (("-x", 6, "-n", 0, "-s", 1, "-g", 2, "-v", 1),
                       [signal.getsignal(n) for n in (2, 15)])

    def fetch(device_name, array):
        values = array.copy()
        return lambda: values

    def told_in(cls, name, when):
        method = getattr(cls, name)

        def told(first, *args, **keywords):
            if when(first, *args):
                os.kill(os.getpid(), number)
            return method(first, *args, **keywords)
        return mock.patch.object(cls, name, told)

    with mock.patch("dev.cpu.device.Cpu.fetch", fetch, create=True):
        train("cpu", folder, folder / "whole", *flags)
        weights = (folder / "whole/model_00000006.bin").read_bytes()
        for base, number in ((Training, signal.SIGTERM), (Late, signal.SIGINT)):
            for step, end, *told in (
                    (3, "", GPT2, "train_step", lambda model, *args: model.step == 2),
                    (6, "", GPT2, "train_step", lambda model, *args: model.step == 5),
                    (6, "val loss, generating, ", Training, "validate",
                     lambda run, done: done == 6)):
                output = folder / f"{base.__name__}, {told[1]}, {step}"
                with told_in(*told), mock.patch.object(order, "Training", base):
                    text = train("cpu", folder, output, *flags, status=128 + number)
                said = ", ".join(re.findall(
                    r"^(step +\d+/6|val loss|generating|\d steps in|interrupted after \d of "
                    r"6|wrote .*model_\d+\.bin(?: and its state)?)", text, re.M))
                wish = "".join(f"val loss, {'generating, ' * (i > 0)}step    {i + 1}/6, "
                               for i in range(step))
                wish += (f"{end}interrupted after {step} of 6, wrote "
                         f"{output / f'model_{step:08d}.bin'}")
                # Else the run was done.
                wish += " and its state" * (not end) + f", {step} steps in" * (step > 0)
                check(f"{output.name}: what is said", said == wish,
                      f"{said!r}, expected {wish!r}" * (said != wish))
                if not end:
                    train("cpu", folder, output, *flags, "-y", 1)
                check(f"{output.name}: its end",
                      (output / "model_00000006.bin").read_bytes() == weights)
                check(f"{output.name}: handlers",
                      [signal.getsignal(n) for n in (2, 15)] == handlers)
