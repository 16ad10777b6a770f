"""A student's kernel on a GPU: its time beside the lab's versions, and what compute-sanitizer says.

    python -m dev.lab.card time FILE  # checks and times it; prints a line of JSON
    python -m dev.lab.card once FILE  # launches it once at a small size, for compute-sanitizer
"""
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from dev.common.config import Config
from dev.common.nvrtc import include_flags
from dev.common.student_text import for_gpu
from dev.features.devices import device_class
from dev.lab import timing
from dev.lab.bench import Bench
from dev.lab.causes import wrong_number
from dev.lab.exercises import EXERCISES, checks_of
from dev.lab.explain import quoted
from dev.lab.ladder import LAB, config_of, model_of, parse_sizes
from dev.lab.submission import read_submission
from dev.lab.workers import sources_of
from prepro_tinyshakespeare import UserError


class Times(NamedTuple):
    """How long a student's kernel takes, in fp32 at the sizes of the ladder."""
    card: str  # the GPU's name
    own: float  # seconds
    rungs: list  # [seconds, number, what it is] of each version of the lab

    @property
    def slower(self):
        """The rung that is next slower, or None."""
        return min((rung for rung in self.rungs if rung[0] >= self.own), default=None)

    @property
    def faster(self):
        """The rung that is next faster, or None."""
        return max((rung for rung in self.rungs if rung[0] < self.own), default=None)

    @property
    def noted(self):
        """(card, [microseconds, the number of the slower and of the faster version])."""
        beside = self.slower, self.faster
        return self.card, [1e6 * self.own, *(rung and rung[1] for rung in beside)]


# ---- In a process of its own, since a wrong kernel may spoil the GPU for the process


def compiled(Cuda, c, sources, path):
    """A device with these files and a student's, made ready for NVRTC, with the numbers of its
    lines."""
    options = *Cuda.OPTIONS, "-lineinfo", *include_flags()
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / path.name
        ready.write_text(for_gpu(path.read_text(encoding="utf-8-sig")), encoding="utf-8")
        return type("Compiled", (Cuda,), dict(OPTIONS=options))("fp32", c, [*sources, ready])


def time_file(path):
    """Check a student's kernel on the GPU, and time it beside the lab's versions. Returns its
    Times. Raises UserError."""
    ladder, mine = read_submission(path)
    sizes = parse_sizes(ladder.shape)
    c = config_of(*model_of(ladder, sizes))
    device = compiled(device_class("cuda"), c, sources_of([ladder.name]), path)
    with device.cupy.cuda.Stream(non_blocking=True):
        bench = Bench(ladder, device, sizes, timing.cold(device))

        def seconds(version, choice):
            return timing.time_rounds(device, list(bench.launches(version, choice)))

        choice = dict(threads=mine.threads[0])
        comparison = bench.check(mine, choice, loose=8)  # the limits are those of small sizes
        if comparison.place is not None:
            raise UserError(f"wrong on the GPU: {wrong_number(comparison, False)}")
        own = seconds(mine, choice)
        rungs = [(min(seconds(version, choice) for choice in version.choices(device)), number,
                  version.what)
                 for number, version in enumerate(ladder.versions, 1) if bench.fits(version)]
    return Times(str(device).split(",")[0], own, rungs)


def launch_once(path):
    """Launch a student's kernel once, at the check with most items."""
    ladder, mine = read_submission(path)
    device = compiled(device_class("cuda", plain=True), Config(C=768, NH=12), [LAB / "tiles.cu"], path)
    device.cupy.cuda.set_allocator(None)  # each array by itself, so that memcheck sees its end
    benches = [Bench(ladder._replace(compiled_for=""), device, sizes, lambda nbytes: 2)
               for sizes in checks_of(EXERCISES[ladder.name], ladder)]
    bench = max((bench for bench in benches if bench.fits(mine)),
                key=lambda bench: eval(mine.items.split(",")[0], {}, vars(bench.given)))
    [*bench.launches(mine, dict(threads=mine.threads[0]))][1]()  # the first set has guards
    bench.wait()


# ---- In front of these processes


def run_self(what, path, before=()):
    """(stdout, stderr, exit status) of `python -m dev.lab.card what path`; before: the words of a
    program that runs it."""
    command = [*before, sys.executable, "-m", "dev.lab.card", what, str(path.resolve())]
    done = subprocess.run(command, cwd=LAB.parents[1], capture_output=True, text=True,
                          errors="replace")
    return done.stdout, done.stderr, done.returncode


def measure(path):
    """The Times of a student's file. Raises UserError if it is wrong on the GPU, or fails there."""
    out, err, _ = run_self("time", path)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    if not found:
        last = (err.strip().splitlines() or ["it ended without a word"])[-1]
        raise UserError(f"{path}, on the GPU: {last}")
    return Times(*found[0])


def standing(times):
    """The lines that compare a time with those of the versions."""
    slower, faster = times.slower, times.faster
    between = [f"version {number} ({1e6 * time:.1f} us)"
               for time, number, _ in filter(None, (slower, faster))]
    line = f"your {1e6 * times.own:.1f} us "
    if not faster:
        return [line + f"are faster than all versions; the best is {between[0]}"]
    line += (f"are between {between[0]} and {between[1]}" if slower else
             f"are slower than {between[0]}")
    return [line, f"what version {faster[1]} does better: {faster[2]}; the comment above it in the "
            ".cu says why"]


# What compute-sanitizer prints, and the same in words; {0} is the pattern's first group.
SAID = (
    (r"Race reported between (read|write) access.*?and (read|write) access",
     "a race in shared memory: a thread {0}s and another one {1}s, with no barrier between them"),
    (r"Invalid __(\w+)__ (read|write|atomic) of size (\d+) bytes\n(?s:.*)misaligned",
     "a thread {1}s {2} bytes of {0} memory at an address that is not a multiple of {2}"),
    (r"Invalid __(\w+)__ (read|write|atomic) of size (\d+)",
     "a thread {1}s {2} bytes of {0} memory where there is no array"),
    (r"Error: (.*)", "{0}"),
)


def complaint(path, tool, text):
    """The lines on the first error that compute-sanitizer prints, with the student's own lines; []
    if there is none."""
    for part in re.split(r"\n\s*\n", re.sub(r"^=+ ?", "", text, flags=re.M)):
        for pattern, words in SAID:
            if match := re.search(pattern, part, re.I | re.S if "access" in pattern else re.I):
                said = words.format(*(group.lower() for group in match.groups()))
                numbers = re.findall(rf"{re.escape(path.name)}:(\d+)", part)
                return [f"compute-sanitizer ({tool}): {said}",
                        *(quoted(path, int(number)) for number in dict.fromkeys(numbers))]
    return []


def sanitize(path):
    """(the lines on what compute-sanitizer finds in a student's kernel, or []; what to say if it
    finds nothing)."""
    program = shutil.which("compute-sanitizer")
    if not program:
        return [], "compute-sanitizer is not in PATH, so it was not asked"
    for tool in ("memcheck", "racecheck"):
        out, err, status = run_self("once", path, (program, "--tool", tool))
        if lines := complaint(path, tool, out):
            return lines, ""
        if status or "SUMMARY" not in out:
            last = [line.strip("= ") for line in (out + err).splitlines() if line.strip("= ")][-1:]
            return [], f"compute-sanitizer ({tool}) did not get to its end: {' '.join(last)}"
    return [], "compute-sanitizer: memcheck and racecheck find nothing"


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    try:
        print(json.dumps(time_file(path))) if what == "time" else launch_once(path)
    except Exception as e:
        kind = "" if isinstance(e, UserError) else f"{type(e).__name__}: "
        sys.exit(f"{kind}{' '.join(str(e).split())}")
