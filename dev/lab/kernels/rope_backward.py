"""dqkv (B,T,NH+2NKV,HS), in place, with queries and keys turned back"""
from dev.lab.kernels.rope_forward import ODD_TURNS, TURNS, turned
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version


def problem(draw, B, T, NH, NKV, HS, theta=500000, half=0):
    inputs, dqkv, expected, size = turned(draw, -1, B, T, NH, NKV, HS, theta, half)
    return dict(inputs, dqkv=dqkv), dict(dqkv=expected), dict(dqkv=size)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=32,NKV=8,HS=64", TURNS, trainer_checks=ODD_TURNS, compiled_for="HS",
    fp32="table", sums="dqkv", args="dqkv table N T heads row half",
    traffic=lambda a: 2 * a.N * a.heads * a.HS * a.itemsize, versions=(
        Version("one thread per pair", "rope_backward1", "N*heads*HS // 2"),
        Version("16 bytes per lane: the trainer's", "rope_backward", "N*heads*HS", trainer=True,
                held_back=LAUNCH_GAP),
    ))
