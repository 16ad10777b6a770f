"""inp (B,T,3,NH,HS) to out (3,B,NH,T,HS)"""
from dev.lab.heads import HEADS
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version


def problem(draw, B, T, NH, HS):
    inp = draw(B, T, 3, NH, HS)
    return dict(inp=inp), dict(out=inp.transpose(2, 0, 3, 1, 4))


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", HEADS, args="out inp B T NH HS", exact="out", versions=(
        Version("one thread per number", "permute1", "3*B*T*NH*HS"),
        Version("16 bytes per lane, 32-bit divisions", "permute2", "NH*T*HS, 3*B",
                held_back=LAUNCH_GAP),
    ), torch=lambda torch, x: lambda: x.inp.permute(2, 0, 3, 1, 4).contiguous())
