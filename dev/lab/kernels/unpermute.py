"""inp (B,NH,T,HS) to out (B,T,NH,HS)"""
from dev.lab.exercises import Exercise
from dev.lab.heads import HEADS
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version
from dev.lab.mistakes import BACK, ORDER


def problem(draw, B, T, NH, HS):
    inp = draw(B, NH, T, HS)
    return dict(inp=inp), dict(out=inp.swapaxes(1, 2))


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", HEADS, args="out inp B T NH HS", exact="out", versions=(
        Version("one thread per number", "unpermute1", "B*NH*T*HS"),
        Version("16 bytes per lane, 32-bit divisions", "unpermute2", "NH*T*HS, B",
                held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: x.inp.transpose(1, 2).contiguous())


EXERCISE = Exercise(
    "unpermute1", "the way back: which of the two sides should be contiguous?", "a number of out",
    ("Number i of out is at (b, t, h, c). Where is it in inp (B,NH,T,head)?",
     "Neighbouring threads should write neighbouring numbers."),
    axes="b t h c", mistakes=(
        (ORDER, "swapaxes(1, 2)", "reshape(B, T, NH, HS)"),
        (BACK, "swapaxes(1, 2)", "reshape(B, T, NH, HS).swapaxes(1, 2).reshape(B, T, NH, HS)")))
