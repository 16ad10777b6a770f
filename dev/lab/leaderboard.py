"""A leaderboard for each card: the times of the exercises, one line for each name and exercise.

The files are in dev/lab/leaderboard. They hold the times of several people, so they belong to the
repository and not to a student's folder.
"""
import datetime
import re
from typing import NamedTuple

from dev.lab.exercises import command
from dev.lab.ladder import LAB
from prepro_tinyshakespeare import UserError, replace_file

BOARDS = LAB / "leaderboard"
HEAD = """# {card}

The times of the exercises in fp32, at the sizes of the lab. One command enters a time:
`{command} --record NAME`

| exercise | time | the lab's | card | name | date |
| --- | ---: | ---: | --- | --- | --- |
"""


class Row(NamedTuple):
    exercise: str
    time: float  # microseconds
    lab: str  # the version of the lab that is next faster, or else the best, and its time
    card: str
    name: str
    date: str

    @property
    def line(self):
        return f"| {' | '.join((self.exercise, f'{self.time:,.1f} us', *self[2:]))} |"


def known_name(name):
    """A name that fits into the table. Raises UserError."""
    if not re.fullmatch(r"(?! )[\w .+@-]{1,40}(?<! )", name):
        raise UserError(f"--record {name!r}: expected a name of at most 40 letters, digits, spaces "
                        "and . + - @ _")
    return name


def read_board(path):
    """The Rows of a leaderboard. Raises UserError."""
    rows, lines = [], path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for i, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|") or cells[0] in ("exercise", "---"):
            continue
        time = re.fullmatch(r"([\d,]+\.\d) us", cells[1]) if len(cells) == 6 else None
        if not time:
            raise UserError(f"{path}, line {i}: expected six cells, the second a time such as 61.0 "
                            "us; mend the line, or take it out")
        rows.append(Row(cells[0], float(time[1].replace(",", "")), *cells[2:]))
    return rows


def record(exercise, times, name):
    """Enter a time into its card's file, unless the name has a better one there. times: a Times of
    card.py. Returns lines on what was written."""
    path = BOARDS / f"{re.sub('[^A-Za-z0-9.]+', '_', times.card)}.md"
    rows, rung = read_board(path), times.faster or min(times.rungs)
    own = Row(exercise, round(1e6 * times.own, 1), f"version {rung[1]} {1e6 * rung[0]:,.1f} us",
              times.card.removeprefix("NVIDIA "), name, datetime.date.today().isoformat())
    before = next((row for row in rows if (row.exercise, row.name) == (exercise, name)), None)
    if before and before.time <= own.time:
        return [f"{path}: your {before.time:,.1f} us of {before.date} stay, since they are better"]
    rows = sorted([*(row for row in rows if row != before), own], key=lambda row: row[:2])
    head = HEAD.format(card=times.card, command=command("FILE"))
    replace_file(path, [(head + "".join(f"{row.line}\n" for row in rows)).encode()])
    place = [row for row in rows if row.exercise == exercise].index(own) + 1
    return [f"wrote into {path}, place {place} of {exercise}:", own.line]
