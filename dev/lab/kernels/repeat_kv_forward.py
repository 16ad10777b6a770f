"""out (B,T,3,NH,HS) = inp (B,T,NH+2NKV,HS) with each key and value head NH/NKV times"""
import numpy as np

from dev.lab.exercises import Exercise
from dev.lab.heads import GROUPS
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version
from dev.lab.mistakes import MODULO


def problem(draw, B, T, NH, NKV, HS):
    inp = draw(B, T, NH + 2 * NKV, HS)
    kv = inp[:, :, NH:].reshape(B, T, 2, NKV, HS).repeat(NH // NKV, 3)
    return dict(N=B * T, inp=inp), dict(out=np.concatenate([inp[:, :, None, :NH], kv], 2))


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,NKV=4,HS=64", GROUPS, args="out inp N NH NKV HS", exact="out",
    versions=(
        Version("one thread per number", "repeat_kv_forward1", "N*3*NH*HS"),
        Version("16 bytes per lane", "repeat_kv_forward2", "3*NH*HS, N", held_back=LAUNCH_GAP),
    ))


EXERCISE = Exercise(
    "repeat_kv_forward1", "Llama's groups: which head reads which", "a number of out",
    ("Of the 3*NH heads of out, the first NH are queries, then come keys and then values.",
     "NH / NKV query heads next to each other share a key head."),
    axes="b t which h c", mistakes=(
        (MODULO, ".repeat(NH // NKV, 3)", "[:, :, :, np.arange(NH) % NKV]"),
        ("the values are copies of the keys: they come NKV heads later", ".repeat",
         "[:, :, [0, 0]].repeat"),
        ("keys and values are exchanged", ".repeat", "[:, :, ::-1].repeat"),
        ("all heads are copies of the first key and value head", ".repeat(NH // NKV, 3)",
         "[:, :, :, :1].repeat(NH, 3)")))
