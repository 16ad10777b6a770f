"""out (B,T,NH,HS) = softmax(q k' / sqrt(HS)) v, causal, from qkv (B,T,3,NH,HS)"""
from dev.lab import heads
from dev.lab.exercises import Exercise
from dev.lab.heads import ATTENTION_LIMITS, pairs_seen, plain_softmax
from dev.lab.ladder import DTYPES, Ladder, Version


def problem(draw, B, T, NH, HS, with_lse=0):
    return heads.forward_problem(draw, B, T, NH, NH, HS, with_lse=with_lse)


def weights(a):
    return dict(att=(a.B, a.NH, a.T, a.T))


def in_three(device, a):
    heads, tiles, channel_tiles = a.B * a.NH, -(-a.T // 32), -(-a.HS // 32)
    device.launch("attention_forward2_scores", (heads * tiles, a.T), a.att, a.qkv, a.scale, a.T,
                  a.NH, threads=1024)
    device.launch("attention_forward2_softmax", heads * a.T, a.att, heads * a.T, a.T,
                  threads=a.threads)
    device.launch("attention_forward2_values", (heads * channel_tiles, a.T), a.out, a.att, a.qkv,
                  a.T, a.NH, threads=1024)


LADDER = Ladder(
    problem, "B=8,T=1024,NH=12,HS=64", heads.LONG_HEADS, compiled_for="HS", fp32="att lse",
    sums="out lse", trainer_checks=(*heads.ODD_HEADS, *(
        f"{sizes},with_lse=1" for sizes in heads.LONG_HEADS)), limits=ATTENTION_LIMITS,
    limits_of=dict(lse=heads.LSE_LIMITS), flops=lambda a: 4 * pairs_seen(a) * a.HS, versions=(
        Version("one thread per query, its weights in device memory", "attention_forward1",
                "B*NH*T", threads=(64, 256), args="out att qkv scale B T NH", scratch=weights,
                fits=plain_softmax),
        Version("three kernels: tiles, online softmax, tiles", in_three, threads=(128, 256),
                scratch=weights, fits=plain_softmax),
        Version("flash in fp32", "attention_forward3", "T, B*NH", threads=(64, 128, 256),
                args="out qkv scale T NH", fits=plain_softmax),
        Version("flash on tensor cores, by mma.sync", "attention_forward4", "B*NH, T", threads=(),
                dtypes=DTYPES, args="out qkv scale T NH", shared="2*2*64 * (HS + 8) * itemsize",
                fits=plain_softmax),
        Version("the same by mma.sync or wgmma: the trainer's", heads.trainers_forward, threads=(),
                dtypes=DTYPES, scratch=heads.lse_scratch, trainer=True,
                held_back=heads.FORWARD_GAP),
    ), torch=heads.torch_forward)


EXERCISE = Exercise(
    "attention_forward1", "attention with its softmax", "a query: one (b, h, t)",
    ("att (B,NH,T,T) is scratch memory for your weights: row i belongs to item i.",
     "Without it: keep the largest score so far, and scale down your sums when it grows."),
    helpers="to_float from_float warp_sum warp_max block_sum block_max shared math", axes="b t h c",
    shapes=heads.QKV, note=heads.ATTEND, formula=heads.attend, mistakes=heads.ATTENTION_MISTAKES)
