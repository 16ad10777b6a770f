"""Does a change of precision change how a model learns? Train with it, and beside it four times in
bf16, each of which rounds otherwise.

    python -m dev.bench.roundings fp8 "fp8 --fp8 all" -- -e d12 -i TOKENS
    python -m dev.bench.roundings "fp8 --fp8 all" --steps 100 -- -e d24 -i TOKENS

Sums in another order round otherwise, so two right programs have different losses after some
hundred steps. The four runs in bf16 show by how much: they split the same batches otherwise, or
multiply with another library. A version is a dtype, perhaps with more flags. It has learned as well
if the mean loss of its last steps is in their range, or below. Flags for all runs come after --;
TOKENS should be so long that the model cannot learn it by heart. Jump is the most by which the loss
of a step after the first quarter was above the mean of the 16 steps before it. The exit status is 1
if a version's loss is above the range, or if its jump is more than 0.1 and 1.5 times the largest in
bf16.
"""
import shlex
import statistics
import sys

from dev.bench.turns import TOP, steps_of
from dev.common.flags import parse_flags, split_versions
from dev.common.program import run_main
from train_gpt2 import UserError

FLAGS = [(None, "--steps", "count", 400, "steps of each run"),
         (None, "--last", "count", 50, "steps whose mean loss counts")]
COMMON = "-b 16 -t 1024 -d 16384 -l 6e-4 -u 40 -c 0.1 --beta2 0.95 -v 0 -s 0 --shuffle 0"
ROUNDINGS = ("", "-b 8", "-b 4", "--plain 1")  # of the runs in bf16
BEFORE = 16  # steps whose mean a loss is compared with
SPIKE, LEAST = 1.5, 0.1  # a spike is a jump of more than LEAST, and SPIKE times bf16's largest


def losses_of(flags):
    """The losses of a run's steps. Raises UserError."""
    return [float(loss) for loss, _ in steps_of(TOP, flags)]


def jump_of(losses):
    """The most by which a loss after the first quarter is above the mean of those before it."""
    begin = max(BEFORE, len(losses) // 4)
    return max((losses[i] - statistics.mean(losses[i - BEFORE : i])
                for i in range(begin, len(losses))), default=0.0)


def main(arguments=None):
    """Everything from the flags to the table. Returns the exit status."""
    versions, own, shared = split_versions(arguments, FLAGS)
    flags = parse_flags(__doc__, FLAGS, own)
    if not versions:
        raise UserError("no version is given: expected a dtype such as fp8; --help says more")
    runs = [*((version, False) for version in versions),  # first, as a name may be wrong
            *((f"bf16 {more}".strip(), True) for more in ROUNDINGS)]
    in_bf16, found = [], []
    for name, plain in runs:
        losses = losses_of([*COMMON.split(), "-x", f"{flags.steps}", *shared, "--dtype",
                            *shlex.split(name)])
        mean, jump = statistics.mean(losses[-flags.last :]), jump_of(losses)
        (in_bf16 if plain else found).append((name, mean, jump))
        print(f"{name}: {mean:.4f}", file=sys.stderr, flush=True)
    _, means, jumps = zip(*in_bf16)
    print(f"\n| `{shlex.join(shared)}`, {flags.steps} steps | mean loss of the last {flags.last} | "
          "jump | |\n| --- | ---: | ---: | --- |")
    failed = 0
    for name, mean, jump in [*in_bf16, *found]:
        verdict = "" if (name, mean, jump) in in_bf16 else "in the range, or below"
        if mean > max(means):
            verdict = f"{mean - max(means):.4f} above"
        if jump > max(LEAST, SPIKE * max(jumps)):
            verdict = f"{verdict}; a spike"
        failed |= verdict not in ("", "in the range, or below")
        print(f"| {name} | {mean:.4f} | {jump:.3f} | {verdict} |")
    print(f"\nbf16: {min(means):.4f} to {max(means):.4f}, a range of {max(means) - min(means):.4f}")
    return int(failed)


if __name__ == "__main__":
    run_main(main)
