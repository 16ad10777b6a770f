"""Test dev/tools/scaling.py: against sums by hand, against the bytes of a model's gradients, and at its limits.

    python -m dev.tests.test_scaling
"""
import contextlib
import io
import math
import sys
from unittest import mock

from dev.tests.checks import check, check_refusal, run, summary
from dev.tools import scaling
from dev.tools.scaling import PASSES, Case, Ring, kernels, raw_tape, ring_of, simulate, tape_of

MODELS = {"d12": 124_475_904, "llama3:d12": 114_150_144, "d3": 11_189_952}  # parameters
CASES = [Case(model, B, 64, gpus, zero) for model in MODELS for B, gpus in ((4, 2), (32, 3), (3, 8), (1, 1024))
         for zero in (0, 1)]
CLOSE = 1e-12
IDEAL = [(1.0, 0.0, 0.0, 0.0)]  # a protocol that takes no time


def sent(tape, *kinds):
    """The bytes of the collectives of these kinds on a tape."""
    return sum(size for kind, _, group in tape if kind == "send" for name, size in group if name in kinds)


def rings():
    """What a ring of 8 takes by hand: 2 * 7/8 of the bytes for a sum, 7/8 of them else, and 7 hops, for a sum twice."""
    rates = dict.fromkeys(PASSES, 100e9)
    ring = Ring(8, 1, rates, [(1.0, 1e-5, 2e-6, 5e-6)], 0.0)
    yield "a sum of 700 MB over 8", ring.seconds([("sum", 700e6)]), 1e-5 + 12.25e-3 + 14 * 2e-6, CLOSE
    yield "a gather of 700 MB over 8", ring.seconds([("gather", 700e6)]), 1e-5 + 6.125e-3 + 7 * 2e-6, CLOSE
    yield "over 2", ring._replace(gpus=2).seconds([("sum", 700e6)]), 1e-5 + 7e-3 + 2 * 2e-6, CLOSE
    far = ring._replace(nodes=2).seconds([("sum", 700e6)])
    yield "over 8 of 2 nodes: 6 hops near and 1 far", far, 1e-5 + 12.25e-3 + 2 * (6 * 2e-6 + 5e-6), CLOSE
    yield "33 sums on 32 channels", ring.seconds([("sum", 1e6)] * 33), 1e-5 + 33 * 1.75e-5 + 2 * 14 * 2e-6, CLOSE
    faster = ring._replace(protocols=[*ring.protocols, (0.5, 0.0, 1e-6, 1e-6)])
    yield "the faster protocol of a little", faster.seconds([("sum", 100)]), 14e-6 + 2 * 1.75e-9, CLOSE
    for name, rate in (("InfiniBand 400 Gb/s a node", 45e9), ("Ethernet 100 Gb/s a node", 11.25e9)):
        yield f"{name}, the slowest link", ring_of(16, name).rates["sum"], rate, CLOSE
    yield "NVLink, as measured", ring_of(2, taken=0.0).seconds([("sum", 475 * 2**20)]), 1.6e-3, 0.01


def queues():
    """What two queues take by hand: a collective begins after the kernels and the collectives before it."""
    ring = mock.Mock(seconds=sum, taken=0.5)
    tapes = {"a sum is shorter than the kernels beside it": ([2], 3, 1 + 2 + 2, 0),  # in 2 s they do the work of 1
             "a sum is longer": ([10], 3, 11, 4), "two, one after the other": ([1, 3], 3, 1 + 4 + 1, 0)}
    for name, (sums, work, whole, waited) in tapes.items():
        tape = [("run", "forward", 1), *(("send", "backward", [size]) for size in sums), ("run", "backward", work),
                ("wait", "backward", None)]
        yield f"{name}: s", simulate(tape, ring)[0], whole, CLOSE
        yield f"{name}: waits", simulate(tape, ring)[1]["backward"], waited, CLOSE


def limits(case):
    """What is sent is what the model has. Without time to send there are N times as many tokens, without kernels there
    is only the time to send, and a faster network is never slower."""
    tape, parameters = raw_tape(case), MODELS[case.model]
    yield f"{case}: gradients and the loss", sent(tape, "sum", "sum pieces", "sum at 0"), 4 * parameters + 4, CLOSE
    wish = case.zero * (2 * parameters + 4 * case.gpus)  # in bf16, and the norms of the shares
    yield f"{case}: parameters and norms", sent(tape, "gather", "from 0"), wish, CLOSE
    accumulated = raw_tape(case._replace(micros=3))
    check(f"{case}: only the last micro-batch sends", sent(accumulated, *PASSES) == sent(tape, *PASSES))

    real = ring_of(case.gpus, "InfiniBand 400 Gb/s a GPU", taken=0.3)
    ideal = Ring(case.gpus, 1, dict.fromkeys(PASSES, math.inf), IDEAL, 0.0)
    yield f"{case}: a step without time to send", simulate(tape, ideal)[0], kernels(tape), CLOSE
    if not case.zero:
        yield f"{case}: N times one", kernels(tape), kernels(raw_tape(case._replace(gpus=1))), CLOSE
    alone = [step for step in tape if step[0] != "run"]
    one_by_one = [real.seconds(group) for kind, _, group in alone if kind == "send"]
    yield f"{case}: a step without kernels", simulate(alone, real)[0], sum(one_by_one), CLOSE
    times = [simulate(tape, real._replace(rates={kind: rate * fast for kind, rate in real.rates.items()}))[0]
             for fast in (0.01, 0.1, 1, 10, math.inf)]
    check(f"{case}: a faster network", times == sorted(times, reverse=True) and times[0] > times[-1], times)


def measured():
    """One GPU is exactly as fast as measured. What collectives take is found again. ZeRO-1 shares the update."""
    for case, ms, _ in scaling.MEASURED:
        if case.gpus == 1:
            yield f"{case}", simulate(tape_of(case), ring_of(1))[0], 1e-3 * ms, CLOSE
    four = Case("d12", 32, 1024, 4)
    slower = simulate(tape_of(four), ring_of(4, taken=0.3))[0]
    with mock.patch.object(scaling, "MEASURED", [*scaling.MEASURED[:1], (four, 1e3 * slower, "")]):
        yield "what collectives take", scaling.fitted.__wrapped__(), 0.3, 1e-6
    updates = [kernels(raw_tape(four._replace(zero=zero)), ["update"]) for zero in (0, 1)]
    yield "the update of four with ZeRO-1", updates[1] * 4, updates[0], 0.05
    once, again = (raw_tape(four._replace(recompute=recompute)) for recompute in (0, 2))
    check("--recompute 2: 2 norms and 3 products more a layer", len(again) - len(once) == 12 * 5, len(again))
    N, C = 32 * 1024, 768  # products of 3, 1 and 4 C^2 weights; 8 and 14 bytes of a norm for each number
    wish = 12 * (2 * N * 8 * C**2 / scaling.RATES["FLOP"] + N * C * (8 + 14) / scaling.RATES["B"] + 5 * scaling.LAUNCH)
    yield "what --recompute 2 takes", kernels(again, ["backward"]) - kernels(once, ["backward"]), wish, 0.1
    order = "".join(kind[0] for kind, phase, _ in raw_tape(four) if phase == "backward").split("s")
    check("a sum for each of 12 layers, then the last, and a wait", len(order) == 14 and order[-1] == "w", order)
    check("the embeddings alone come behind layer 0's sum", order[-2] == "rr", order[-2])


def program():
    """It prints all of its tables, and refuses in a line."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        scaling.main(["-e", "d3", "-b", "2", "-d", "8192"])
    text = out.getvalue()
    check("its tables", (text.count("| --- |"), text.count("\n| 1,024 | ")) == (3 + 3, 3), text[:60])
    for wish, *arguments in (("-d 1000: expected a sequence at least, T = 1024", "-d", "1000"),
                             ("-e tiny: expected", "-e", "tiny"),
                             ("-t 1025: expected at most maxT = 1024", "-t", "1025")):
        check_refusal("scaling.py", wish, scaling.main, arguments)


if __name__ == "__main__":
    for test, *args in ((rings,), (queues,), *((limits, case) for case in CASES), (measured,), (program,)):
        run("scaling:", test, *args)
    sys.exit(summary())
