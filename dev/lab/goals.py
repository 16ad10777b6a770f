"""What to reach after "right": a goal at a time, which a student's kernel is measured against.

A goal asks for what the lab's best version of the kernel does, within 10%. It is computed from that
version's own figures: sectors and passes as traffic.py counts them on the CPU, and on a GPU times.
"""
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
# Requests that are counted together: their kinds in traffic.py, whether of shared memory, their
# name, what they cost, and how they cost less.
REQUESTS = (
    (("load", "copy"), False, "load", "sectors of 32 bytes", NEIGHBOURS),
    (("store",), False, "store", "sectors of 32 bytes", NEIGHBOURS),
    ((), True, "request of shared memory", "turns", "no two lanes in one bank"),
)


def of_lanes(mine, best, number):
    """Where lanes should touch neighbouring memory. mine, best: their Traffic. A request of wider
    loads costs more, so what is compared is how many times the least possible a request costs."""
    for kinds, shared, name, unit, advice in REQUESTS:
        own, other = (traffic.total(*kinds, shared=shared) for traffic in (mine, best))
        if own:
            there = own.ideal * max(1, other.each / other.ideal if other else 1)
            limit = round(NEAR * there, 1)
            if own.each > limit:
                yield Goal(f"at most {limit:.1f} {unit} a {name}", f"Yours takes {own.each:.1f}; "
                           f"with {advice}, as in version {number}, it takes {there:.1f}")


def of_passes(mine, best, number):
    """Where the inputs should be read less often."""
    def passes(traffic):
        loads = traffic.total("load", "copy")
        return loads.least / traffic.read if loads and traffic.read else 0

    own, there = passes(mine), max(1, passes(best))
    if own > round(NEAR * there, 1):
        once = there < NEAR
        yield Goal("one pass" if once else f"read the inputs at most {NEAR * there:.1f} times",
                   f"Yours reads its inputs {own:.1f} times, and version {number} "
                   f"{'once' if once else f'{there:.1f} times'}")


def of_time(times):
    """The next version that is more than 10% faster. times: a Times of card.py."""
    ahead = max((rung for rung in times.rungs if times.own > NEAR * rung[0]), default=None)
    if ahead:
        seconds, number, what = ahead
        yield Goal(f"within 10% of version {number}: at most {1e6 * NEAR * seconds:,.1f} us",
                   f"Yours takes {1e6 * times.own:,.1f}, and version {number} "
                   f"{1e6 * seconds:,.1f}: {what}")


def counted(path):
    """(Traffic of a student's file, that of the lab's best version, its number), or () where they
    cannot be counted."""
    try:
        from dev.lab.traffic import traffic_of
        mine, name = traffic_of(path), exercise_of(path)[0]
    except (ImportError, UserError):
        return ()
    for number, version in reversed([*enumerate(find_ladder(name).versions, 1)]):
        if not version.library and "fp32" in version.dtypes:
            try:
                return mine, traffic_of((name, number)), number
            except UserError:  # it does not do these sizes
                continue
    return ()


def goals_of(path, facts=(), times=None):
    """([Goal] that a right file has not reached, the first to try first; the sectors of a load, or
    None)."""
    both = counted(path)
    goals = [*of_registers(facts), *(of_lanes(*both) if both else ()),
             *(of_passes(*both) if both else ()), *(of_time(times) if times else ())]
    loads = both and both[0].total("load", "copy")
    return goals, loads.each if loads else None
