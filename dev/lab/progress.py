"""What a student has solved, and what comes next: the list of exercises, and hints one at a time.

It is kept in my_progress.json in the folder where the commands are typed, beside the files that
they write. So it moves with these files, and two students with a folder each do not share it. For
each exercise that was right once it holds the best that was reached; editing a file later takes
nothing away.
"""
import json
import os
from pathlib import Path

from dev.lab.exercises import EXERCISES, command, exercise_names
from prepro_tinyshakespeare import UserError, replace_file

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
    "hints": {exercise: how many were shown}}."""
    nothing = dict(solved={}, hints={})
    try:
        found = json.loads(FILE.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return nothing, (f"{FILE} is of version {found['version']}, and this lab reads version "
                             f"{VERSION}: it marks nothing as solved")
        for row in found["solved"].values():
            reached(row)
        hints = {name: int(count) for name, count in found["hints"].items()}
        return dict(solved=found["solved"], hints=hints), ""
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
    row = state["solved"].setdefault(name, dict(dtypes=[], sectors=None, times={}))
    row["dtypes"] += [dtype for dtype in dtypes if dtype not in row["dtypes"]]
    row["sectors"] = min((x for x in (row["sectors"], sectors) if x is not None), default=None)
    if time:
        card, numbers = time
        row["times"][card] = min(numbers, row["times"].get(card, numbers), key=lambda n: n[0])
    return [what_next(state["solved"]), write(state)]


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
        lines.append(f"{mark} {i:2}  {name:30} {EXERCISES[name].teaches}")
        lines += [f"{'':6}{reached(solved[name])}"] if name in solved else []
    return [*lines, "", *["* You have solved it."] * bool(solved), what_next(solved),
            f"{command('NAME')} writes a file to fill in, and --exercise FILE checks it."]


def hint(name):
    """The lines with the next hint of an exercise; all of them once the last was shown."""
    hints, (state, _) = EXERCISES[name].hints, read()
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
