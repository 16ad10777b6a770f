"""dwte (V,C)[tokens (B,T)] and dwpe (maxT,C)[t] += dout (B,T,C)"""
import numpy as np

from dev.lab.exercises import Exercise, Repair
from dev.lab.ladder import ODD_SHAPES, Ladder, Version
from dev.lab.mistakes import Mistake
from train_gpt2 import batch_table, carve, pack_batch


def problem(draw, B, T, C, V, share=10):
    """One word makes up `share` percent of the batch. Some words do not occur, and dwpe has rows
    beyond T."""
    N, often = B * T, draw.rng.random((B, T)) < share / 100
    tokens = np.where(often, V - 1, draw.words(V, B, T)).astype(np.int32)
    batch, dout = carve(pack_batch(tokens, tokens)[0], batch_table(B, T)), draw(B, T, C)
    dwte, dwpe = draw.fp32(V, C), draw.fp32(T + 3, C)
    order = np.argsort(tokens.reshape(-1), kind="stable")
    words, starts = np.unique(tokens.reshape(-1)[order], return_index=True)
    new_dwte, new_dwpe = dwte.copy(), dwpe.copy()
    new_dwte[words] += np.add.reduceat(dout.reshape(N, C)[order], starts)
    new_dwpe[:T] += dout.sum(0)
    inputs = dict(N=N, words=len(words), tokens=tokens, order=batch.order, runs=batch.runs,
                  dwte=dwte, dwpe=dwpe, dout=dout)
    return inputs, dict(dwte=new_dwte, dwpe=new_dwpe)


def searching(device, a):
    device.launch("encoder_backward3", (a.N, a.C), a.dwte, a.dout, a.tokens, a.N, a.C,
                  threads=a.threads)
    device.launch("encoder_backward_wpe", a.dwpe.size, a.dwpe, a.dout, a.B, a.T, len(a.dwpe), a.C,
                  True)


def trainers(device, a):
    device.launch("encoder_backward_wte", (a.N, a.C), a.dwte, a.dout, a.tokens, a.order, a.runs,
                  a.N, a.C)
    device.launch("encoder_backward_wpe", a.dwpe.size, a.dwpe, a.dout, a.B, a.T, len(a.dwpe), a.C,
                  True, threads=a.threads)


LADDER = Ladder(
    problem, "B=8,T=1024,C=768,V=50257",
    tuple(f"{rows},V=17,share=60" for rows in (*ODD_SHAPES, "B=3,T=50,C=32")), trainer_checks=(
        "B=1,T=1,C=32,V=257", "B=5,T=50,C=32,V=3,share=0", "B=3,T=30,C=160,V=257,share=0",
                    "B=3,T=300,C=96,V=257,share=60"),
    args="dwte dwpe dout tokens N T C", fp32="dwte dwpe", sums="dwte dwpe",
    traffic=lambda a: a.N * a.C * a.itemsize + 8 * (a.words + a.T) * a.C, versions=(
        Version("one thread per channel of a token, with atomics", "encoder_backward1", "N*C",
                atomics=True),
        Version("one thread per channel, all tokens in order", "encoder_backward2", "C",
                threads=(32, 64, 128)),
        Version("a block for each word, which looks for it", searching,
                threads=(128, 256, 512, 1024)),
        Version("a warp for each word, sorted by the host: the trainer's", trainers,
                threads=(64, 128, 256, 512), trainer=True, held_back="most words occur once: a "
                "warp follows three addresses, each from the one before, to add up one row"),
    ))


def of_one_position(a, found):
    """Rows that a single position wrote, whichever was the last."""
    alone = {name: np.zeros(numbers.shape, bool) for name, numbers in found.items()}
    for row, (token, dout) in enumerate(zip(a.tokens.reshape(-1), a.dout.reshape(a.N, a.C))):
        for name, place in (("dwte", token), ("dwpe", row % a.T)):
            alone[name][place] |= np.isclose(found[name][place], dout, rtol=1e-5)
    return alone


EXERCISE = Exercise(
    "encoder_backward1", "many threads that add to one place", "a number of dout",
    ("Two positions may have the same token, and then both add to the same row of dwte.",
     "atomicAdd allows that, in an order that varies."),
    helpers="to_float from_float atomicAdd", shapes=dict(dwpe="maxT,C"),
    repair=Repair(1, "atomicAdd(dwte + (size_t)tokens[row] * C + c, d);",
                  "dwte[(size_t)tokens[row] * C + c] += d;",
                  "Two positions may have the same token."),
    mistakes=(
        ("it subtracts where it should add", "new_dwte[words] +=", "new_dwte[words] -="),
        ("the row of dwpe is the position, row % T, and not row / T",
         "new_dwpe[:T] += dout.sum(0)", "np.add.at(new_dwpe, np.arange(B) % T, dout.sum(1))"),
        Mistake("each row has what one position wrote: several have the same token or the same t, "
                "so add with atomicAdd", places=of_one_position)))
