"""out (B,NH,HS) = attention of one query each to kept keys and values (B,NKV,T,HS)"""
import numpy as np

from dev.features.kv_cache import shared_of_attention
from dev.lab.formulas import softmax
from dev.lab.heads import ATTENTION_LIMITS
from dev.lab.ladder import LAUNCH_GAP, Ladder, Version


def problem(draw, B, T, NH, NKV, HS, newest=0):
    """qkv (B,NH+2NKV,HS) has the query, key and value of the newest tokens. They are at position
    T - 1 - newest, the first sequence's at 0."""
    qkv = draw(B, NH + 2 * NKV, HS)
    keys, values = draw(B, NKV, T, HS), draw(B, NKV, T, HS)
    positions = np.full(B, T - 1 - newest, np.int32)
    positions[0] = 0 if B > 1 else positions[0]
    after = dict(keys=keys.copy(), values=values.copy())
    out = np.zeros((B, NH, HS))
    for b, position in enumerate(positions):
        after["keys"][b, :, position] = qkv[b, NH : NH + NKV]
        after["values"][b, :, position] = qkv[b, NH + NKV :]
        for h in range(NH):
            k, v = (after[name][b, h * NKV // NH, : position + 1] for name in after)
            out[b, h] = softmax(k @ qkv[b, h] / np.sqrt(HS)) @ v
    inputs = dict(qkv=qkv, keys=keys, values=values, positions=positions, scale=HS**-0.5,
                  arrived=np.zeros(B * NKV, np.int32))
    return inputs, dict(out=out, **after)


def scratch(a):
    chunks = -(-a.T // 256)
    return dict(parts=(a.B * a.NH * chunks * (a.HS + 2),))


def trainers(device, a):
    """That of dev/features/kv_cache.cu, for models without RoPE."""
    device.launch("token_attention", (a.B * a.NKV, a.T), a.out, a.keys, a.values, a.parts,
                  a.arrived, a.qkv, None, a.positions, a.scale, a.B, a.T, a.NH,
                  shared=shared_of_attention(a.NH // a.NKV, a.HS))


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,NKV=12,HS=64",
    ("B=3,T=9,NH=3,NKV=3,HS=32", "B=2,T=70,NH=6,NKV=2,HS=32",
     "B=1,T=300,NH=3,NKV=3,HS=32,newest=5"),
    compiled_for="HS, GROUP", trainer_checks=("B=3,T=600,NH=3,NKV=3,HS=32,newest=80",),
    args="out keys values qkv positions scale B T NH NKV", fp32="parts", sums="out",
    limits=ATTENTION_LIMITS, flops=lambda a: 4 * a.B * a.NH * a.T * a.HS, versions=(
        Version("one thread per query", "token_attention1", "B*NH", threads=(32, 64)),
        Version("one block per query", "token_attention2", "B*NH", threads=(128, 256),
                shared="4 * T"),
        Version("blocks share the keys of a query: the samples'", trainers, threads=(),
                scratch=scratch, trainer=True, held_back=LAUNCH_GAP),
    ))
