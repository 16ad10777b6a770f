"""out (B,T,NH,HS) = max(0, q k' / sqrt(HS)) v, causal, from qkv (B,T,3,NH,HS)"""
import numpy as np

from dev.lab import heads
from dev.lab.exercises import Exercise
from dev.lab.heads import ATTENTION_LIMITS, pairs_seen
from dev.lab.ladder import DTYPES, Ladder, Version


def problem(draw, B, T, NH, HS, relu=1):
    return heads.forward_problem(draw, B, T, NH, NH, HS, relu)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", heads.LONG_HEADS, trainer_checks=heads.ODD_HEADS,
    compiled_for="HS, RELU", fp32="lse", sums="out", limits=ATTENTION_LIMITS,
    flops=lambda a: 4 * pairs_seen(a) * a.HS, versions=(
        Version("one thread per query", "relu_attention_forward1", "B*NH*T", threads=(64, 256),
                args="out qkv scale B T NH"),
        Version("tiles of keys in shared memory", "relu_attention_forward2", "T, B*NH",
                threads=(64, 128, 256), args="out qkv scale T NH"),
        Version("tensor cores, by mma.sync or wgmma: the trainer's", heads.trainers_forward,
                threads=(), dtypes=DTYPES, scratch=heads.lse_scratch, trainer=True,
                held_back=heads.FORWARD_GAP | {
                    "bf16": "each product waits for the one before, with weights and masks "
                    "between, and tiles on the diagonal are computed whole"}),
    ))


def formula(a):
    q, k, v = heads.split(a.qkv, a.NH, a.NKV)
    head = np.arange(a.NH) // (a.NH // a.NKV)
    score = a.scale * q @ k[:, head].swapaxes(2, 3)
    weight = np.where(np.tri(a.T) > 0, np.maximum(score, 0), 0)
    return dict(out=heads.join(weight @ v[:, head]))


EXERCISE = Exercise(
    "relu_attention_forward1", "attention's two products, without the softmax",
    "a query: one (b, h, t)",
    ("t = i % T, h = i / T % NH, b = i / T / NH.",
     "Query t sees the keys 0 to t. HS, a head's channels, is a constant."),
    axes="b t h c", shapes=heads.QKV,
    note=(heads.ONE_HEAD,
          "    weight = maximum(0, scale * q @ k.T)  # (T,T); 0 where s > t",
          "    out = weight @ v"),
    formula=formula, mistakes=(
        *heads.CAUSAL,
        ("max(0, score) is missing", "np.maximum(score, 0)", "score"),
        ("this is softmax: here a weight is max(0, score)",
         "np.where(np.tri(a.T) > 0, np.maximum(score, 0), 0)",
         'heads.attention_weights("softmax", score)')))
