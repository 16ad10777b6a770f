"""Test what a student is told about wrong numbers: each usual mistake gets its own sentence, others none of them.

    python -m dev.tests.test_causes
"""
from types import SimpleNamespace

import numpy as np

from dev.cpu.device import Cpu
from dev.lab.bench import Bench
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import EXERCISES, checks_of, version_of
from dev.lab.inputs import ANY, stored
from dev.lab.ladder import LAB, find_ladder
from dev.lab.mistakes import MISTAKES
from dev.lab.submission import code_of, exercise_of, read_submission
from dev.tests.checks import check, run_program
from dev.tests.student import said, solution
from train_gpt2 import BF16, Config


def told(bench, version, choice, code):
    """The lines on a result, or [] if it is right."""
    comparison = bench.check(version, choice)
    if comparison.place is None:
        return []
    facts = facts_of(bench, comparison, code)
    return [wrong_number(comparison, facts.never_there), *describe_wrong(facts)]


# ---- Wrong numbers, computed in NumPy


def device(dtype):
    """As much of a device as Bench needs."""
    real = BF16 if dtype == "bf16" else np.dtype(np.float32)
    return SimpleNamespace(
        name="cpu", dtype=dtype, real=real, W=16 // real.itemsize, empty=lambda nbytes: np.empty(nbytes, np.uint8),
        put=lambda array, values: array.__setitem__(..., values), set_order=lambda order: None)


def judged(name, results, dtype="fp32", sizes=None):
    """What is said of results(a) {output: numbers}, at the first sizes where they are wrong; [] if they are right.
    The other outputs are right."""
    ladder, lines = find_ladder(name), []
    version = version_of(EXERCISES[name], ladder)
    for each in [sizes] if sizes else checks_of(EXERCISES[name], ladder):
        bench = Bench(ladder._replace(compiled_for=""), device(dtype), each)
        problem = SimpleNamespace(**{**vars(bench.given), "truth": bench.truth})
        with np.errstate(all="ignore"):
            numbers = {name: np.where(truth == ANY, np.nan, truth) for name, truth in bench.truth.items()}
            numbers |= results(problem)

        def run(_, a, numbers=numbers):
            for output in numbers.keys() & vars(a).keys():
                array = getattr(a, output)
                array[...] = stored(np.broadcast_to(numbers[output], array.shape), array.dtype)

        with np.errstate(all="ignore"):
            lines = told(bench, version._replace(run=run, scratch=None, atomics=True), {}, "blockIdx")
        if lines:
            break
    return lines


# The numbers of the first sizes do not tell these from the ones before them in the table.
ALIKE = {"those tensors decay whose decayed[i] is 0": dict(n=9600, tensors=14, clip=1),
         "the sum over rows leaves out its first term. Where does the loop begin?": dict(B=3, T=9, OC=288)}


def own_sentences():
    """Each mistake of each exercise gets its own sentence, in at most four lines."""
    for name in EXERCISES.keys() & MISTAKES.keys():
        wrong = []
        for mistake in MISTAKES[name]:
            if mistake.numbers:
                lines = judged(name, mistake.numbers, sizes=ALIKE.get(mistake.why))
                if not lines or lines[-1] != f"why: {mistake.why}" or len(lines) > 4:
                    wrong.append([mistake.why, lines])
        check(f"{name}: {len(MISTAKES[name])} mistakes", not wrong, wrong or "")


if __name__ == "__main__":
    run_program((own_sentences,))
