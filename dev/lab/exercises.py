"""Exercises: a student writes a kernel, and it is checked, also on a laptop without a GPU.

    python -m dev.lab --exercise                        # lists the exercises, from easy to hard
    python -m dev.lab --exercise softmax_forward        # writes my_softmax_forward.cu, empty
    python -m dev.lab --exercise my_softmax_forward.cu  # checks it

kernels/softmax_forward.py, and so on, holds EXERCISE, an Exercise, with its hints, its usual
mistakes, and a bug to find. submission.py writes and reads the student's file, trial.py runs it for
grade.py, causes.py finds what is wrong with a result, and explain.py puts compiler errors, crashes
and wrong results into words.
"""
import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

from dev.lab.ladder import Version, kernel_names, parse_sizes

PREFIX = "my_"  # of a student's kernels and files


def command(what):
    """The command line for an exercise's name or file."""
    return f"python -m dev.lab --exercise {what}".rstrip()


HELPERS = {
    "to_float": "to_float(x)           the real x as a float. Compute in float.",
    "from_float": "from_float(out[i], x) stores the float x in out[i], which is a real.",
    "warp_sum": "warp_sum(x)           the sum of x over the 32 threads of a warp. All must call "
    "it, and all get it.",
    "warp_max": "warp_max(x)           the same for the maximum.",
    "block_sum": "block_reduce<warp_sum>(x, 0.0f)    the sum of x over the block. All its threads "
    "must call it.",
    "block_max": "block_reduce<warp_max>(x, LOWEST)  the same for the maximum. LOWEST is the "
    "lowest float.",
    "shuffle": "__shfl_xor_sync(FULL_WARP, x, step)  the x of lane ^ step. All 32 threads of the "
    "warp must call it.",
    "shared": "__shared__ float x[256];  memory that the threads of a block share. "
    "__syncthreads(); waits for all.",
    "dynamic": "DYNAMIC_SHARED(float, x);  more shared memory; its size in bytes: {shared}",
    "atomicAdd": "atomicAdd(p, x)       adds the float x to *p, even if other threads add to it at "
    "the same time.",
    "master": "x = load_master<1>(params, low, i)  gives number i as x[0]; store_master(params, "
    "low, i, x) stores it.",
    "trigonometry": "pow(x, y) of doubles; cosf(x), sinf(x) of floats",
    "exp2": "exp2f(x), LOG2_E      2^x, and the logarithm of e to base 2: e^x = exp2f(LOG2_E * x).",
    "math": "expf(x), logf(x), sqrtf(x), tanhf(x), fmaxf(x, y)  C's functions for float.",
}


class Repair(NamedTuple):
    """A bug to find and mend: `old`, which is once in the kernel of a version, becomes `new`."""
    version: int
    old: str
    new: str
    hint: str


class Exercise(NamedTuple):
    """A kernel to write. It has the signature of a kernel in the lab's .cu, and is launched and
    checked like the Version that launches that kernel, unless a field here says otherwise."""
    like: str  # the kernel in its .cu with the same signature
    teaches: str
    item: str  # what one item of BLOCK is
    hints: tuple
    helpers: str = "to_float from_float"  # of HELPERS
    items: str = ""  # their number, if no Version launches `like` alone
    args: str = ""  # the arguments, if not the Version's
    zeroed: str = ""  # an array that is set to zero before the launch
    plane: str = ""  # the items along x and y, for a BLOCK with both
    checks: tuple = ()  # sizes, if not the Ladder's
    note: tuple = ()  # a remark on NumPy's formula
    # For causes.py.
    # (the input whose rows count, the outputs with a number or a row for each, what rows differ in)
    rows: tuple = ()
    padded: str = ""  # the outputs whose columns from V on must be 0
    # the axes of an output of more than two; "head" of queries, keys and values side by side
    axes: str = ""
    # {argument: its shape, or what the number is}, where the checks do not say it
    shapes: dict = {}
    numpy: bool = True  # whether the file shows the formulas that the kernel's .py imports
    formula: Callable = None  # what the usual mistakes are changes of: see mistakes.py
    mistakes: tuple = ()
    repair: Repair = None
    kernel: str = ""  # of the lab: the file's name

    @property
    def alone(self):
        """Whether an item has too little work for more than a thread."""
        return self.item.startswith(("a number", "a pair"))


# From easy to hard.
ORDER = (
    "residual_forward gelu_forward softmax_forward shift row_sum transpose group_scale "
    "prefix_sum swiglu_forward encoder_forward permute unpermute repeat_kv_forward "
    "gelu_backward swiglu_backward crossentropy_softmax_backward rope_table rope_forward "
    "rope_backward adamw matmul_backward_bias rmsnorm_forward layernorm_forward "
    "fused_residual_forward crossentropy_forward classifier_fused global_norm matmul_forward "
    "gram repeat_kv_backward encoder_backward rmsnorm_backward layernorm_backward "
    "relu_attention_forward trimat_forward attention_forward gqa_forward attention_backward "
    "gqa_backward").split()


@functools.cache
def find_exercise(name):
    """The Exercise of a kernel. Raises what a wrong file raises."""
    return importlib.import_module(f"dev.lab.kernels.{name}").EXERCISE._replace(kernel=name)


def exercise_names():
    """The exercises whose kernel the lab has, from easy to hard."""
    have = kernel_names()
    return [name for name in ORDER if name in have]


def version_of(exercise, ladder):
    """The lab's Version with the exercise's signature, or a new one, with the exercise's own
    fields."""
    own = [version for version in ladder.versions if version.run == exercise.like]
    fp32 = exercise.zeroed or exercise.kernel == "global_norm"
    dtypes = ("fp32",) if fp32 else ("fp32", "bf16")
    version = own[0] if own else Version(exercise.kernel, exercise.like, dtypes=dtypes)
    args = exercise.args or version.args or ladder.args
    return version._replace(items=exercise.items or version.items, args=args, trainer=False,
                            library="")


def checks_of(exercise, ladder):
    """The sizes to check, as dicts: those that fit kernels.cu as it is compiled here."""
    checks = [parse_sizes(text) for text in exercise.checks or ladder.checks]
    # A message about many rows says more than one about one row.
    checks.sort(key=lambda sizes: sizes.get("T") == 1)
    if ladder.compiled_for.startswith("HS"):
        checks = [sizes for sizes in checks if sizes.get("HS", 64) == 64]
    return checks
