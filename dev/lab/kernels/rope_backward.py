"""dqkv (B,T,NH+2NKV,HS), in place, with queries and keys turned back"""
from dev.lab.exercises import Exercise, Repair
from dev.lab.kernels.rope_forward import (
    ODD_TURNS, SHAPES, SOME_TURNS, TURNS, formula, mistakes_of, turned)
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


EXERCISE = Exercise(
    "rope_backward1", "a rotation's gradient is the rotation back", "a pair",
    ("To turn back, turn by minus the angle: only the sign of sin changes.",
     "The rest is as in rope_forward."),
    checks=SOME_TURNS, axes="b t head c", shapes=SHAPES,
    repair=Repair(1, "right * cosine - left * sine", "right * cosine + left * sine",
                  "A rotation back and the rotation itself must give the pair that was there."),
    formula=formula, mistakes=mistakes_of("forward"))
