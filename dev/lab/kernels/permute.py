"""inp (B,T,3,NH,HS) to out (3,B,NH,T,HS)"""
from dev.lab.exercises import Exercise
from dev.lab.heads import HEADS
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version
from dev.lab.mistakes import BACK, ORDER


def problem(draw, B, T, NH, HS):
    inp = draw(B, T, 3, NH, HS)
    return dict(inp=inp), dict(out=inp.transpose(2, 0, 3, 1, 4))


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", HEADS, args="out inp B T NH HS", exact="out", versions=(
        Version("one thread per number", "permute1", "3*B*T*NH*HS"),
        Version("16 bytes per lane, 32-bit divisions", "permute2", "NH*T*HS, 3*B",
                held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: x.inp.permute(2, 0, 3, 1, 4).contiguous())


EXERCISE = Exercise(
    "permute1", "an index of five dimensions, taken apart by / and %", "a number of out",
    ("Take the index of out apart, last dimension first: c = i % head, then i / head % T, and so "
     "on.",
     "Build the index of inp, first dimension first: ((b*T + t)*3 + which)*NH + h, and so on."),
    axes="which b h t c", mistakes=(
        (ORDER, ".transpose(2, 0, 3, 1, 4)", ".reshape(3, B, NH, T, HS)"),
        ("t and h are exchanged", "2, 0, 3, 1, 4)", "2, 0, 1, 3, 4).reshape(3, B, NH, T, HS)"),
        ("b and which are exchanged: out is (3,B,NH,T,HS)", "2, 0, 3, 1, 4)",
         "0, 2, 3, 1, 4).reshape(3, B, NH, T, HS)"),
        (BACK, "inp.transpose(2, 0, 3, 1, 4)",
         "inp.reshape(3, B, NH, T, HS).transpose(1, 3, 0, 2, 4).reshape(3, B, NH, T, HS)")))
