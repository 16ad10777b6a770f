"""out (B,T,NH,HS) = max(0, q k' / sqrt(HS)) v, causal, from qkv (B,T,3,NH,HS)"""
from dev.lab import heads
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
