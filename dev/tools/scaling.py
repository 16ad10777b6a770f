"""What a training step takes on N GPUs of M nodes, predicted from steps of one GPU, and what breaks first.

    python -m dev.tools.scaling                     # GPT-2 124M, B=32 a GPU, up to 1,024 GPUs
    python -m dev.tools.scaling -e d48 -b 8 -z 1    # another model, with ZeRO-1

The step is not modelled twice. The trainer's own model, with the features of a run, does one on paper: with a device
that computes nothing, sends nothing, and notes what it is asked for. Then two queues are simulated: the kernels, and
NCCL's collectives, one after the other, beside the kernels or before them, as events order them. A kernel takes the
time that its work takes on one GPU. A collective takes that of a ring: its bytes through the slowest link, and hops.
"""
import contextlib
import functools
import math
import mmap
import re
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from prepro_tinyshakespeare import UserError, run

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

from dev import features
from dev.tools.benchmark import work_of
from dev.llama3.train_llama3 import Llama3
from dev.precision.moments import SOURCE as MOMENTS
from dev.ranks.ranks import Ranks
from train_gpt2 import BF16, GPT2, Training, parse_flags, read_kernels

TOP = Path(__file__).resolve().parents[2]

# ---- What was measured, on H200s in bf16, and what was not


class Case(NamedTuple):
    """A step: of a model, of micro-batches of B sequences of T tokens a GPU, on so many GPUs, with --zero or not."""
    model: str
    B: int
    T: int
    gpus: int = 1
    zero: int = 0
    micros: int = 1
    recompute: int = 0
    moments: str = "fp32"


RESULTS, GPUS = "dev/RESULTS.md, 2026-11-21", "dev/RESULTS.md, several GPUs"
# (case, ms, where). Steps of one GPU say how fast its kernels are. The first of several GPUs says what collectives take
# from the kernels beside them, and those after it check the prediction.
MEASURED = [
    (Case("d12", 32, 1024), 53.55, GPUS),
    (Case("d12", 32, 1024, 2), 56.33, GPUS),
    (Case("d12", 32, 1024, 2, 1), 56.45, GPUS),
    (Case("d12", 32, 1024, 2, 0, 4), 219.50, GPUS),
    (Case("d12", 4, 1024), 8.48, RESULTS),
    (Case("d12", 64, 1024), 111.45, RESULTS),
    (Case("d24", 8, 1024), 40.24, RESULTS),
    (Case("d48", 8, 1024), 165.3, GPUS),
    (Case("d48", 8, 1024, 2, 1), 177.4, GPUS),
    (Case("d48", 32, 1024), 618.29, RESULTS),
    (Case("llama3:d12", 32, 1024), 52.3, RESULTS),
    (Case("llama3.2:1B", 4, 2048), 123.5, RESULTS),
]
MACHINES = 54.9, 55.0, 57.3  # ms of the same step, on three machines
# Kernels by themselves, by the tables of RESULTS: FLOP/s of products and attention, bytes/s of the others.
RATES = {"FLOP": 645e12, "B": 3.7e12, "attention_forward": 221e12, "attention_backward_q": 293e12,
         "attention_backward_kv": 263e12, "fused_classifier": 3.28e12, "encoder_backward_wte": 0.64e12}
LAUNCH, WORDS = 3e-6, 9900  # s from a kernel of a graph to the next; distinct words of a batch

PASSES = {"sum": 2, "sum pieces": 1, "sum at 0": 1, "gather": 1, "from 0": 1}  # how often bytes go round a ring
# (kind, bytes, GPUs, ms) by NVLink, whose line rate is 450 GB/s in a direction.
COLLECTIVES = [("sum", 475 * 2**20, 2, 1.60), ("sum pieces", 475 * 2**20, 2, 0.97), ("gather", 475 * 2**20, 2, 0.98)]
# Not measured. (bytes/s of a NIC in a direction, 0.9 of its line rate; NICs of a node, 0 for one a GPU; s more a hop)
NETWORKS = {"InfiniBand 400 Gb/s a GPU": (45e9, 0, 0.0), "InfiniBand 400 Gb/s a node": (45e9, 1, 0.0),
            "Ethernet 100 Gb/s a node": (11.25e9, 1, 25e-6)}
# NCCL takes the fastest protocol: (share of the bandwidth, s to begin, s a hop by NVLink, by a network), as its own
# src/graph/tuning.cc has them for rings.
PROTOCOLS = [(1.0, 8.4e-6, 3.4e-6, 14e-6), (0.92, 14e-6, 1.9e-6, 4e-6), (0.25, 6.6e-6, 0.6e-6, 2.7e-6)]
CHANNELS = 32  # rings at most, each with a block of its own
STAR = 25e-6  # s a rank that rank 0 takes for Ranks.agree, with 1,023 connections on an AMD EPYC

# ---- A step on paper

PHASES = "forward", "backward", "update"


class Paper:
    """A GPU, and NCCL, that do nothing. The tape has what they were asked for: ("run", phase, seconds) of a kernel,
    ("send", phase, [(kind, bytes), ...]) of the collectives of one launch, ("wait", phase, None) for all of them."""
    name, real, W = "cuda", BF16, 8
    multiprocessors, max_shared, gpu = 132, 226 * 1024, SimpleNamespace(mem_info=(math.inf, math.inf))
    attention_sizes = SimpleNamespace(rows=64, threads=128, shared_forward=0, shared_backward=0)
    layernorm_sizes = SimpleNamespace(threads=384, row_threads=32, shared_of_row=1)
    put = lambda self, array, values: None
    repeat = lambda self, graphs, key, work: work()

    def __init__(self, case, c):
        self.case, self.c, self.kernels = case, c, read_kernels([*c.SOURCES, MOMENTS])
        self.compiled_for, self.phase, self.tape = c.switches(), "", []

    def empty(self, nbytes):
        """Addresses without memory: nobody is to read or write there."""
        return np.frombuffer(mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE, mmap.PROT_READ), np.uint8, nbytes)

    def launch(self, name, items, *arguments, **more):
        what = name, items if isinstance(items, tuple) else (items, 1), arguments
        _, unit, amount = work_of(what, self.c, self.case.B, WORDS, self.kernels, self.case.T)
        self.tape.append(("run", self.phase, LAUNCH + amount / RATES.get(name, RATES[unit])))

    matmul = lambda self, out, a, b, *arguments, **more: self.launch("matmul", 1, out, a, b)
    zero = lambda self, array: self.launch("memset", 1, array)

    @contextlib.contextmanager
    def fork(self):
        self.group = []
        yield
        self.tape.append(("send", self.phase, self.group))

    join = lambda self: self.tape.append(("wait", self.phase, None))
    sum = lambda self, array: self.group.append(("sum", array.nbytes))
    sum_pieces = lambda self, whole, piece: self.group.append(("sum pieces", whole.nbytes))
    sum_at_0 = lambda self, array, out: self.group.append(("sum at 0", array.nbytes))
    gather = lambda self, piece, whole: self.group.append(("gather", whole.nbytes))
    from_0 = lambda self, array, out: self.group.append(("from 0", out.nbytes))

    def within(self, phase, work, *arguments):
        self.phase = phase
        work(*arguments)


class PaperRanks(Ranks):
    """Rank 0 of so many, which has the most to do: it has the tails."""

    def __init__(self, count, via):
        self.rank, self.count, self.via = 0, count, via


@functools.cache
def raw_tape(case):
    """A step of a case, its kernels at RATES. See Paper."""
    architecture = Llama3 if case.model.startswith("llama3") else GPT2
    c = architecture.Config.from_descriptor(case.model)
    paper = Paper(case, c)
    flags = parse_flags("", features.FLAGS, ["-z", str(case.zero), "--recompute", str(case.recompute), "--moments",
                                             case.moments])
    ranks = PaperRanks(case.gpus, paper) if case.gpus > 1 else None
    model = features.attach(flags, Training, architecture, ranks)[1](c, paper, case.B, case.T)
    for phase in PHASES:
        setattr(model, f"{phase}_pass", functools.partial(paper.within, phase, getattr(model, f"{phase}_pass")))
    paper.tape.clear()
    model.train_step(*[(model.arenas["batch"], (case.B, case.T))] * case.micros)
    return paper.tape


def kernels(tape, phases=PHASES):
    """The seconds of a tape's kernels."""
    return sum(what for kind, phase, what in tape if kind == "run" and phase in phases)


@functools.cache
def factor_of(model, tokens):
    """A measured step of one GPU over its kernels at RATES: of this model, if there is one, and of about as many
    tokens."""
    rows = [row for row in MEASURED if row[0].gpus == 1]
    rows = [row for row in rows if row[0].model == model] or rows
    case, ms, _ = min(rows, key=lambda row: abs(math.log(row[0].B * row[0].T / tokens)))
    return 1e-3 * ms / kernels(raw_tape(case))


def tape_of(case):
    """A step of a case, its kernels as fast as in a measured step. See Paper."""
    factor = factor_of(case.model, case.B * case.T)
    return [(kind, phase, factor * what if kind == "run" else what) for kind, phase, what in raw_tape(case)]


# ---- Its time


class Ring(NamedTuple):
    """A ring through all GPUs of all nodes."""
    gpus: int
    nodes: int
    rates: dict  # {kind of collective: bytes/s in a direction through the slowest link}
    protocols: list  # see PROTOCOLS
    taken: float  # the share of a kernel's speed that collectives beside it take

    def seconds(self, group):
        """Of the collectives of one launch, [(kind, bytes), ...]. Each of NCCL's channels does some of them, one after
        the other, and all channels are at work: the hops count once for as many collectives as there are channels."""
        traffic = sum(PASSES[kind] * size / self.rates[kind] for kind, size in group) * (self.gpus - 1) / self.gpus
        rounds = -(-len(group) // CHANNELS) * max(PASSES[kind] for kind, _ in group)
        return min(begin + traffic / share + rounds * ((self.gpus - self.nodes) * near + (self.nodes - 1) * far)
                   for share, begin, near, far in self.protocols)


def ring_of(gpus, network=None, gpus_a_node=8, taken=None):
    """The ring of so many GPUs, by NVLink within a node, and between nodes by one of NETWORKS."""
    taken, nodes = fitted() if taken is None else taken, -(-gpus // gpus_a_node)
    rates = {kind: PASSES[kind] * size * (n - 1) / n / (1e-3 * ms) for kind, size, n, ms in COLLECTIVES}
    rates = {kind: rates.get(kind, rates["gather"]) for kind in PASSES}
    if nodes == 1:
        return Ring(gpus, 1, rates, PROTOCOLS, taken)
    nic, nics, more = NETWORKS[network]
    slowest = {kind: min(rate, nic * (nics or gpus_a_node)) for kind, rate in rates.items()}
    taken *= slowest["sum"] / rates["sum"]  # NCCL has fewer blocks at work for a slower link
    return Ring(gpus, nodes, slowest, [(*row[:3], row[3] + more) for row in PROTOCOLS], taken)


def simulate(tape, ring):
    """(seconds of a step, {phase: those of them in which kernels have waited for collectives})."""
    now, sent, waited = 0.0, 0.0, dict.fromkeys(PHASES, 0.0)  # sent: when all collectives so far will be done
    for kind, phase, what in tape:
        if kind == "run":
            beside = min(what, max(0.0, sent - now) * (1 - ring.taken))
            now += what + beside * ring.taken / (1 - ring.taken)
        elif kind == "send":
            sent = max(sent, now) + ring.seconds(what)
        else:
            waited[phase] += max(0.0, sent - now)
            now = max(now, sent)
    return now, waited


@functools.cache
def fitted():
    """What collectives take from kernels, so that the first measured step of several GPUs is the predicted one; at most
    0.99."""
    case, ms, _ = next(row for row in MEASURED if row[0].gpus > 1)
    low, high = 0.0, 0.99
    for _ in range(30):
        middle = (low + high) / 2
        below = simulate(tape_of(case), ring_of(case.gpus, taken=middle))[0] < 1e-3 * ms
        low, high = (middle, high) if below else (low, middle)
    return low


def losses(case, ring):
    """{cause: how many seconds shorter a step would be without it}."""
    tape, slowest = tape_of(case), statistics.stdev(MACHINES) / statistics.mean(MACHINES)
    ideal = Ring(case.gpus, 1, dict.fromkeys(PASSES, math.inf), [(1.0, 0.0, 0.0, 0.0)], 0.0)
    step, alone = simulate(tape, ring)[0], kernels(tape_of(case._replace(gpus=1)))
    without = {"bandwidth": ring._replace(rates=ideal.rates), "hops": ring._replace(protocols=ideal.protocols),
               "kernels slower beside sums": ring._replace(taken=0.0)}
    return {**{cause: step - simulate(tape, better)[0] for cause, better in without.items()},
            "other kernels than alone": simulate(tape, ideal)[0] - alone,
            "messages to and from rank 0": max(0.0, STAR * case.gpus - step),  # go while the step before is at work
            "the slowest GPU, in every other cluster": step * statistics.NormalDist(0, slowest).inv_cdf(
                0.5 ** (1 / case.gpus))}


# ---- The tables


def recipe_batch(model):
    """The tokens of a step in the recipe of a model, or None."""
    texts = [path.read_text(encoding="utf-8") for path in (TOP / "dev/recipes").glob("*.sh")]
    return next((int(found[1]) for text in texts if (found := re.search(rf" -e {model} .* -d (\d+)", text))), None)


def table(title, head, rows):
    """Print a table, in Markdown."""
    print(f"\n{title}\n\n| {' | '.join(head)} |\n| {' | '.join(['---'] + ['---:'] * (len(head) - 1))} |")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def ms(seconds):
    return f"{1e3 * seconds:,.2f}"


def compared():
    """Rows of measured steps, and what is predicted for them."""
    for case, found, where in MEASURED:
        step, _ = simulate(tape_of(case), ring_of(case.gpus, gpus_a_node=case.gpus))
        factor = factor_of(case.model, case.B * case.T)
        told = f"{1e3 * step / found - 1:+.1%}" if case.gpus > 1 else f"its kernels, x {factor:.2f}"
        yield f"{case.model} B={case.B} T={case.T}", case.gpus, case.zero, f"{found:.2f}", ms(step), told, where


COLUMNS = ["GPUs", "the slowest link", "B", "micro-batches", "tokens a step", "ms", "waits for gradients",
           "for parameters", "tokens/s", "of N times one"]


def predicted(cases, networks, gpus_a_node, one):
    """Rows of COLUMNS; one: tokens/s of one GPU."""
    for case in cases:
        for network in networks if case.gpus > gpus_a_node else ["NVLink"]:
            step, waited = simulate(tape_of(case), ring_of(case.gpus, network, gpus_a_node))
            tokens = case.gpus * case.micros * case.B * case.T
            yield (f"{case.gpus:,}", network, case.B, case.micros, f"{tokens:,}", ms(step), ms(waited["backward"]),
                   ms(waited["update"]), f"{tokens / step:,.0f}", f"{tokens / step / one / case.gpus:.1%}")


FLAGS = [("-e", "--model", "name", "d12", "descriptor: d12, d48, llama3:d12, llama3.2:1B and the like"),
         ("-b", "--batch-size", "count", 32, "B, sequences in a micro-batch of a GPU"),
         ("-t", "--seq-len", "count", 1024, "T, tokens in a sequence"),
         ("-d", "--total-batch", "count", None, "tokens in a step where they stay the same (default: the recipe's)"),
         ("-z", "--zero", "switch", 0, "1: ZeRO-1"),
         (None, "--recompute", "level", 0, "1 or 2, as train_gpt2.py has it"),
         (None, "--moments", ("fp32", "bf16"), "fp32", "AdamW's"),
         (None, "--gpus-per-node", "count", 8, "GPUs that NVLink connects")]
FEW, MANY, LIMIT = (1, 2, 4, 8, 64, 1024), [2**i for i in range(1, 15)], 0.05


def main(arguments=None):
    flags = parse_flags("Predict training steps on many GPUs.", FLAGS, arguments)
    a_node, T, d = flags.gpus_per_node, flags.seq_len, flags.total_batch or recipe_batch(flags.model)
    if d and d < T:
        raise UserError(f"-d {d}: expected a sequence at least, T = {T}")
    case = Case(flags.model, flags.batch_size, T, 1, flags.zero, recompute=flags.recompute, moments=flags.moments)
    ways = f"-z {case.zero} --recompute {case.recompute} --moments {case.moments}"
    tape, sent = tape_of(case), [what for kind, phase, what in raw_tape(case._replace(gpus=2)) if kind == "send"]
    sizes = [sum(size for _, size in group) / 1e6 for group in sent]
    one = case.B * T / kernels(tape)
    print(f"One GPU: {', '.join(f'{phase} {ms(kernels(tape, phase))}' for phase in PHASES)} ms. Two GPUs send "
          f"{sum(sizes):,.0f} MB in {len(sizes)} parts, which take {fitted():.0%} of the speed of kernels beside them.")
    table("Measured and predicted", ["", "GPUs", "-z", "ms", "predicted", "", "where"], compared())
    table(f"{case.model} with B={case.B} a GPU and {ways}, predicted", COLUMNS,
          predicted([case._replace(gpus=n) for n in FEW], NETWORKS, a_node, one))
    if d:
        shares = [(n, min(case.B, d // T // n)) for n in (1, *MANY) if n <= d // T]
        table(f"The same with -d {d}, until a GPU has one sequence; {FEW[-1]:,} GPUs above have "
              f"{FEW[-1] * case.B * T / d:.0f} times as many tokens", COLUMNS,
              predicted([case._replace(gpus=n, B=B, micros=d // T // n // B) for n, B in shares], [*NETWORKS][:1],
                        a_node, one))
    for network in NETWORKS:
        lost = {n: losses(case._replace(gpus=n), ring_of(n, network, a_node)) for n in MANY}
        most = LIMIT * kernels(tape)
        first = {cause: next((n for n in MANY if lost[n][cause] > most), math.inf) for cause in lost[MANY[0]]}
        table(f"What each costs, ms, with {network}, and from how many GPUs on it is {LIMIT:.0%} of one GPU's step",
              ["", *(f"{n:,}" for n in FEW[1:]), "from"],
              [(cause, *(ms(lost[n][cause]) for n in FEW[1:]), f"{n:,}" if n < math.inf else "")
               for cause, n in sorted(first.items(), key=lambda item: item[1])])
    return 0


if __name__ == "__main__":
    run(main)
