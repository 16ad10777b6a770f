"""out (B,T,C) = wte (V,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]"""
from dev.lab.ladder import ODD_SHAPES, Ladder, Version


def problem(draw, B, T, C, V, positions=1):
    """Without positions, wpe is None."""
    tokens, wte, wpe = draw.words(V, B, T), draw(V, C), draw(T, C) if positions else None
    out = wte[tokens] + wpe if positions else wte[tokens]
    return dict(N=B * T, tokens=tokens, wte=wte, wpe=wpe), dict(out=out)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768,V=50257", tuple(f"{rows},V=257" for rows in ODD_SHAPES),
    trainer_checks=("B=1,T=1,C=32,V=1", "B=2,T=27,C=96,V=257,positions=0"),
    args="out tokens wte wpe N T C", fp32="out", exact="out",
    traffic=lambda a: (a.N + a.T) * a.C * a.itemsize + 4 * a.N * (a.C + 1), versions=(
        Version("one thread per token", "encoder_forward1", "N", threads=(32, 64, 128, 256)),
        Version("one thread per channel", "encoder_forward2", "N*C"),
        Version("4 channels per lane: the trainer's", "encoder_forward", "N*C", trainer=True,
                held_back={
                    "bf16": "a thread has 4 channels in either dtype, so it waits as often as in "
                    "fp32, for half the bytes"}),
    ))
