"""out (B,T,C) = wte (V,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]"""
from dev.lab.exercises import Exercise, Repair
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


EXERCISE = Exercise(
    "encoder_forward2", "an index from another array: the embedding of a token", "a number of out",
    ("The row is i / C: tokens[row] is a row of wte, and row % T is a row of wpe.",
     "out is fp32, so it needs no from_float."),
    axes="b t c", shapes=dict(wpe="maxT,C"),
    repair=Repair(2, "row % T", "row / T",
                  "The rows of a sequence come one after the other. What is the position of row "
                  "T + 1?"),
    mistakes=(
        ("wpe is not added", "wte[tokens] + wpe", "wte[tokens]"),
        ("each sequence has its own tokens: tokens[row], and not tokens[row % T]",
         "wte[tokens] + wpe", "wte[np.tile(tokens[:1], (B, 1))] + wpe"),
        ("the row of wpe is the position, row % T, and not row / T", "wte[tokens] + wpe",
         "wte[tokens] + wpe[np.arange(B)[:, None] % T]"),
        ("this is wpe alone: wte is not added", "wte[tokens] + wpe", "0 * wte[tokens] + wpe")))
