"""What to reach after "right": a goal at a time, which a student's kernel is measured against.

A goal asks for what the lab's best version of the kernel does, within 10%. It is computed from that
version's own figures: sectors and passes as traffic.py counts them on the CPU, and on a GPU times.
"""
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from dev.lab.ladder import find_ladder
from dev.lab.submission import exercise_of
from prepro_tinyshakespeare import UserError

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
    """The next version that is more than 10% faster. times: a Times of card.py."""
    ahead = max((rung for rung in times.rungs if times.own > NEAR * rung[0]), default=None)
    if ahead:
        seconds, number, what = ahead
        yield Goal(f"within 10% of version {number}: at most {1e6 * NEAR * seconds:,.1f} us",
                   f"Yours takes {1e6 * times.own:,.1f}, and version {number} "
                   f"{1e6 * seconds:,.1f}: {what}")


def count(path):
    """{"report": lines, "rows": [those of the student's file, those of the lab's best version],
    "number": the version's}. Without "rows" they cannot be counted. Raises UserError."""
    from dev.lab.traffic import figures_of, figures_of_version, report, sizes_of, traffic_of
    name = exercise_of(path)[0]
    ladder = find_ladder(name)
    found = dict(report=report(path))
    for number in range(len(ladder.versions), 0, -1):
        best = figures_of_version(name, number, sizes_of(ladder), "fp32")
        if best:
            return found | dict(rows=[figures_of(traffic_of(path)), best], number=number)
    return found


def counted(path):
    """The same, in a process of its own, since at these sizes the kernel runs for the first time.
    """
    done = subprocess.run([sys.executable, "-m", "dev.lab.goals", str(path)], text=True,
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
        print(json.dumps(count(Path(sys.argv[1]))))
    except UserError as e:
        sys.exit(str(e))
