"""What a student has solved, and what comes next: the list of exercises, hints and solutions, and
the next goal.

What is solved is kept in my_progress.json in the folder where the commands are typed, beside the
files that they write. So it moves with these files, and two students with a folder each do not
share it. For each exercise that was right once it holds the best that was reached; editing a file
later takes nothing away.
"""
import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dev.common.config import Config
from dev.common.cuda_source import without_comments
from dev.lab.exercises import PREFIX, command, exercise_names, find_exercise
from dev.lab.ladder import find_ladder
from dev.lab.submission import DECLARATION, Submission, signature
from dev.lab.workers import sources_of
from train_gpt2 import UserError, replace_file

FILE, VERSION = Path("my_progress.json"), 1


def time_reached(card, own, slower, faster):
    """own: microseconds; slower, faster: the numbers of the lab's versions beside it, or None."""
    place = (f"between versions {slower:d} and {faster:d}" if slower and faster else
             f"slower than version {faster:d}" if faster else "faster than all versions")
    return f"{own:,.1f} us on {card}, {place}"


def reached(row):
    """A line on what was reached in an exercise."""
    loads = [] if row["sectors"] is None else [f"{row['sectors']:.1f} sectors a load"]
    times = [time_reached(card, *numbers) for card, numbers in row["times"].items()]
    return "; ".join([f"right in {', '.join(row['dtypes'])}", *loads, *times])


def read():
    """(the state, a line if the file could not be read, or ""). The state is {"solved": {exercise:
    {"dtypes", "sectors": a load, "times": {card: [microseconds, slower, faster version]}}},
    "hints": {exercise: how many were shown}, "mended": [exercises whose repair is done],
    "failed": {exercise: what its last check said, until a hint was given on it}}."""
    nothing = dict(solved={}, hints={}, mended=[], failed={})
    try:
        found = json.loads(FILE.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return nothing, (f"{FILE} is of version {found['version']}, and this lab reads version "
                             f"{VERSION}: it marks nothing as solved")
        for row in found["solved"].values():
            reached(row)
        hints = {name: int(count) for name, count in found["hints"].items()}
        mended = [str(name) for name in found.get("mended", ())]
        failed = {name: str(text) for name, text in found.get("failed", {}).items()}
        return dict(solved=found["solved"], hints=hints, mended=mended, failed=failed), ""
    except FileNotFoundError:
        return nothing, ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return nothing, f"{FILE} is damaged. Check your files again to mark what you solved"


def write(state):
    """Returns a line if the file could not be written, or "". A file that could not be read is kept
    as my_progress.json.old."""
    try:
        if read()[1]:
            os.replace(FILE, f"{FILE}.old")
        replace_file(FILE, [json.dumps(dict(state, version=VERSION), indent=1).encode()])
    except (OSError, UserError) as e:
        return f"your progress is not kept: {e}"
    return ""


def note(name, dtypes, sectors=None, time=None):
    """Mark an exercise as solved, and keep the best of what was reached. time: (card,
    [microseconds, slower, faster version]). Returns lines: the next exercise, and any trouble."""
    state, _ = read()
    state["failed"].pop(name, None)
    row = state["solved"].setdefault(name, dict(dtypes=[], sectors=None, times={}))
    row["dtypes"] += [dtype for dtype in dtypes if dtype not in row["dtypes"]]
    row["sectors"] = min((x for x in (row["sectors"], sectors) if x is not None), default=None)
    if time:
        card, numbers = time
        row["times"][card] = min(numbers, row["times"].get(card, numbers), key=lambda n: n[0])
    return [what_next(state["solved"]), write(state)]


def failed(name, lines):
    """Keep what was said of a wrong kernel, for the next hint. Returns a line on any trouble, or
    ""."""
    state, _ = read()
    state["failed"][name] = " ".join(lines)[:1000]
    return write(state)


def mended(name):
    """Mark the repair of an exercise as done. Returns a line on any trouble, or ""."""
    state, _ = read()
    state["mended"] = sorted({*state["mended"], name})
    return write(state)


def what_next(solved):
    """A line that names the first unsolved exercise after the last solved one, or else before it.
    """
    names = exercise_names()
    last = max((i for i, name in enumerate(names) if name in solved), default=-1)
    after = next((name for name in names[last + 1 :] + names if name not in solved), None)
    return f"Next exercise: {command(after)}" if after else "You have solved all exercises."


def listed():
    """The lines of the list of exercises."""
    state, trouble = read()
    solved, lines = state["solved"], [trouble] * bool(trouble)
    for i, name in enumerate(exercise_names(), 1):
        mark = "*" if name in solved else " "
        lines.append(f"{mark} {i:2}  {name:30} {find_exercise(name).teaches}")
        lines += [f"{'':6}{reached(solved[name])}"] if name in solved else []
    return [*lines, "", *["* You have solved it."] * bool(solved), what_next(solved),
            f"{command('NAME')} writes a file to fill in, and --exercise FILE checks it.",
            f"{command('repair')} lists kernels with a bug, to find and mend."]


# (what a check has said, a hint on it): the first row that fits counts
ON_ERRORS = (
    ("does not compile in bf16", "A real is a float in fp32 alone. Which names of that line are "
     "real? Read them with to_float, and store with from_float."),
    ("does not compile", "Mend the first error alone, and check again: others often come of it."),
    ("one-dimensional", "Number the threads of a block from 0 on, and work out the row and the "
     "column of each from its number, by / and %."),
    ("a race .*(Blocks run|leaves out blockIdx)", "Two blocks have the same place. Compute the "
     "index for thread 0 of block 0 and for thread 0 of block 1. If both must add to one place, "
     "use atomicAdd."),
    ("a race |depends on the order", "All threads of the block must meet between the store and the "
     "read, in a line that none of them skips. In a loop there are two such places: after the "
     "stores of a round, and before those of the next one."),
    ("stuck", "Find the threads that do not come, and the if, return or loop by which they leave. "
     "Let them go on with a neutral number, such as 0 in a sum, and skip only the store."),
    ("leaves out blockIdx", "Thread 0 of block 1 must not have the number of thread 0 of block 0. "
     "How many items are before it?"),
    (r"(reads|writes) \w+\[|out of bounds|outside|does not exist", "Compute the index by hand for "
     "the last thread of the last block, and for the last turn of the loop. Is it tested before "
     "the access?"),
    ("warp_(sum|max) missing", "After a loop over every 32nd number each lane has a part. Which "
     "lines need the whole, and in which lane?"),
    ("no thread of the block has written|before it gets a value", "Which value leaves a sum, or a "
     "maximum, as it is? Set that first, also in threads without an item."),
    ("never written", "See who writes what, above. Which thread should have written the first "
     "number that nobody has? Follow its index, and each if on its way."),
    ("is -?(nan|inf)", "Follow the largest number of the row through each line. Which one makes it "
     "infinite?"),
    ("slow", "Count for one item how often each of its inputs is read, and by how many threads."),
    ("(first|last) (term|columns)", "Go through the loop by hand for a row of three numbers: which "
     "of them does each thread take, and when does it stop?"),
    ("in bf16", "It is right in fp32. Where is a number of 16 bits rounded, or taken for one of "
     "32?"),
    ("", "Take the first wrong number of the message, find the thread that writes it, and compute "
     "the line by hand with the inputs there."))


def hint_on(text):
    """The hint on what a check has said."""
    return next(words for pattern, words in ON_ERRORS if re.search(pattern, text))


def hint(name):
    """The lines with the next hint of an exercise: on the error of the last check, if there was
    one, else the exercise's; all of these once the last was shown."""
    hints, (state, _) = find_exercise(name).hints, read()
    if text := state["failed"].pop(name, ""):
        return [f"On your last check: {hint_on(text)}", *filter(None, [write(state)])]
    shown = max(state["hints"].get(name, 0), 0)
    lines = [f"Hint {i} of {len(hints)}: {text}" for i, text in enumerate(hints, 1)]
    if shown < len(hints):
        state["hints"][name] = shown + 1
        trouble, lines = write(state), lines[shown : shown + 1]
    else:
        trouble = ""
    if shown + 1 >= len(hints):
        lines.append(f"There are no more. {command(name)} --solution shows a solution.")
    return [*lines, *[trouble] * bool(trouble)]


# ---- Solutions: the difference between a student's file and a version of the lab


def lines_of_kernel(text, run):
    """(a kernel's first line, BLOCK's; the line behind its last; its parameters), or None. Where a
    brace is missing it reaches to the end."""
    code = without_comments(text)
    match = re.search(DECLARATION % run, code, re.S)
    if not match:
        return None
    first, depth = code[: match.start()].count("\n"), 0
    for i, line in enumerate(code.splitlines()[first:], first + 1):
        depth += line.count("{") - line.count("}")
        if depth == 0 and "}" in line:
            return first, i, match[2]
    return first, len(text.splitlines()), match[2]


def version_text(name, number, own):
    """(The lines of a version's helpers and comment; those of its kernel, which gets the name
    `own`; its parameters). Raises UserError."""
    run = find_ladder(name).versions[number - 1].run
    run = f"{name}{number}" if callable(run) else run
    for path in (*sources_of([name]), *Config.SOURCES):
        text = path.read_text(encoding="utf-8")
        found = lines_of_kernel(text, run)
        if found:
            break
    else:
        raise UserError(f"--solution {number}: version {number} has several kernels; read them in "
                        f"dev/lab/kernels/{name}.cu")
    lines, (first, end, parameters) = text.splitlines(), found
    above = first
    while above and lines[above - 1].startswith("//"):
        above -= 1
    before, kernel = "\n".join(lines[above:first]), "\n".join(lines[first:end])
    if path not in Config.SOURCES:  # those are compiled before a student's file
        helpers = re.findall(r"^(namespace (\w+) \{\n.*?^\}  // namespace \2\n)",
                             "\n".join(lines[:above]), re.M | re.S)
        used = [(whole, name) for whole, name in helpers if re.search(rf"\b{name}\b", kernel)]
        before = "\n".join([*(whole for whole, _ in used), before])
        for _, name in used:  # on a GPU the lab's .cu is compiled beside it
            before, kernel = (re.sub(rf"\b{name}\b", PREFIX + name, text)
                              for text in (before, kernel))
    kernel = re.sub(rf"\b{run}\b", own, kernel)
    return before.splitlines(), kernel.splitlines(), parameters


def types_of(parameters):
    return [re.findall(r"\w+", text.replace("__restrict__", "").replace("*", " pointer "))[:-1]
            for text in parameters]


def solution(file, number=0):
    """The lines of --solution: a diff from a student's file to a version of the lab; 0: the one
    that the exercise has its parameters from. Raises UserError."""
    exercise, name, versions = file.exercise, file.exercise.kernel, file.ladder.versions
    like = int(re.search(r"\d+$", exercise.like)[0])
    number = number or like
    if not 1 <= number <= len(versions):
        raise UserError(f"--solution {number}: {name} has versions 1 to {len(versions)}")
    before, kernel, parameters = version_text(name, number, file.run)
    old, (first, end, _) = file.lines, lines_of_kernel(file.text, file.run)
    if old[:first][-len(before) :] == before:  # it is there already
        before = []
    diff = [*difflib.unified_diff(old, [*old[:first], *before, *kernel, *old[end:]], str(file),
                                  f"version {number}", n=2, lineterm="")]
    if not diff:
        return [f"{file} is version {number} of the lab."]
    same = types_of(parameters.split(",")) == types_of(signature(exercise)[1])
    alone = any(version.run == exercise.like for version in versions) or (
        exercise.zeroed and exercise.items != "1")  # one block does all of it only in the exercise
    return [f"This is a solution: version {number} of the lab. - is a line of yours, + one of it.",
            *["Its parameters are not those of the exercise. Keep yours."] * (not same),
            *["The lab launches it together with other kernels: see "
              f"dev/lab/kernels/{name}.py. Yours has to do all of it."] * (not alone), "", *diff]


def file_of(name):
    """The Submission for the name of an exercise. Raises UserError."""
    path = Path(f"{PREFIX}{name}.cu")
    if not path.exists():
        raise UserError(f"--solution compares with your file, and there is no {path}; "
                        f"{command(name)} writes it")
    return Submission(path)


# ---- Goals: what to reach after "right", one at a time. A goal asks for what the lab's best
# version of the kernel does, within 10%. It is computed from that version's own figures: sectors
# and passes as traffic.py counts them on the CPU, and on a GPU times.

NEAR = 1.1  # times the version's figure is near enough


class Goal(NamedTuple):
    """A goal that is not reached yet."""
    wish: str
    why: str  # what was measured, and what the version does

    @property
    def line(self):
        return f"Next goal: {self.wish}. {self.why}."


def of_registers(facts):
    """facts: what NVRTC says for each GPU and dtype, {"spilled": bytes, ...}."""
    spilled = max((each["spilled"] for each in facts), default=0)
    if spilled:
        yield Goal("no spills", "A thread has more variables than registers, so "
                   f"{spilled} bytes go to memory. Keep fewer at a time, or take smaller blocks")


NEIGHBOURS = "neighbouring lanes at neighbouring numbers"
# Rows of traffic.py's table: what a request costs, the least that it could cost, and how.
REQUESTS = (
    ("sectors a load", "sectors a load, if side by side", NEIGHBOURS),
    ("sectors a store", "sectors a store, if side by side", NEIGHBOURS),
    ("turns a request of shared memory, at worst", "the same without bank conflicts",
     "no two lanes in one bank"),
)
MOVED = "sectors moved, times the fewest possible"


def of_lanes(mine, best, number):
    """Where lanes should touch neighbouring memory. mine, best: {row of the table: number}. Wider
    loads cost more each, so versions are compared by how many times the least they cost."""
    for row, least, advice in REQUESTS:
        if mine[row]:
            there = mine[least] * max(1, best[row] / best[least] if best[row] else 1)
            if mine[row] > NEAR * there:
                yield Goal(f"at most {NEAR * there:.1f} {row}",
                           f"Yours takes {mine[row]:.1f}; with {advice}, as in version {number}, "
                           f"it takes {there:.1f}")


def of_passes(mine, best, number):
    """Where numbers should be moved less often."""
    there = max(1, best[MOVED])
    if mine[MOVED] > NEAR * there:
        wish = ("one pass, in which each number is read once" if there < NEAR else
                f"at most {NEAR * there:.1f} times the fewest sectors possible")
        yield Goal(wish, f"Yours moves {mine[MOVED]:.1f} times the fewest sectors possible, and "
                   f"version {number} {there:.1f} times")


def of_time(times):
    """The next version that is more than 10% faster. times: a Times of on_gpus.py."""
    ahead = max((rung for rung in times.rungs if times.own > NEAR * rung[0]), default=None)
    if ahead:
        seconds, number, what = ahead
        yield Goal(f"within 10% of version {number}: at most {1e6 * NEAR * seconds:,.1f} us",
                   f"Yours takes {1e6 * times.own:,.1f}, and version {number} "
                   f"{1e6 * seconds:,.1f}: {what}")


def count(file):
    """{"report": lines, "rows": [those of the student's file, those of the lab's best version],
    "number": the version's}. Without "rows" they cannot be counted. Raises UserError."""
    from dev.lab.traffic import figures_of, figures_of_version, report, sizes_of, traffic_of
    ladder, mine = file.ladder, traffic_of(file)
    found = dict(report=report(file, mine=mine))
    for number in range(len(ladder.versions), 0, -1):
        best = figures_of_version(ladder.name, number, sizes_of(ladder), "fp32")
        if best:
            return found | dict(rows=[figures_of(mine), best], number=number)
    return found


def counted(file):
    """The same, in a process of its own, since at these sizes the kernel runs for the first time.
    """
    done = subprocess.run([sys.executable, "-m", "dev.lab.progress", str(file)], text=True,
                          capture_output=True, errors="replace")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return found[0] if found else dict(report=[f"memory traffic was not counted: {last}"])


def goals_of(counts, facts=(), times=None):
    """[Goal] that a right file has not reached, the first to try first. counts: what counted()
    returns."""
    traffic = (*counts["rows"], counts["number"]) if "rows" in counts else ()
    return [*of_registers(facts), *(of_lanes(*traffic) if traffic else ()),
            *(of_passes(*traffic) if traffic else ()), *(of_time(times) if times else ())]


def sectors_of(counts):
    """The sectors of a load, or None."""
    return counts["rows"][0]["sectors a load"] if "rows" in counts else None


if __name__ == "__main__":
    try:
        print(json.dumps(count(Submission(sys.argv[1]))))
    except UserError as e:
        sys.exit(str(e))
