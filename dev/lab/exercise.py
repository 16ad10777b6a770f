"""The lab's kernels as exercises: a student writes one, and it is judged, on a laptop without a GPU too.

    python -m dev.lab --exercise                        # lists the exercises, from easy to hard
    python -m dev.lab --exercise softmax_forward        # writes my_softmax_forward.cu, with an empty body
    python -m dev.lab --exercise my_softmax_forward.cu  # judges it

The signature and the problem are those of the lab: see kernel.py. A file is judged in processes of its own, which it
may crash, or keep busy forever. One looks for accesses out of bounds, with the compiler's sanitizers. Another compares
the results with NumPy, with the threads in several orders. They run at the same time.
"""
import contextlib
import ctypes
import difflib
import importlib
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from prepro_tinyshakespeare import UserError  # before NumPy

import numpy as np

from dev import gpt2_numpy
from dev.lab import formulas, timing
from dev.lab.kernel import ANY, GUARD, Bench, Draw, Version, find_kernel, kernel_names, model_of, parse_sizes
from dev.common.devices import make_device
from dev.common.cuda_source import parameters_of, read_kernels, without_comments
from train_gpt2 import Config, to_float

LAB = Path(__file__).resolve().parent
KERNELS = LAB / "kernels"
PREFIX = "my_"
MODEL = Config(C=768, NH=12)  # kernels.cu is compiled for it: HS is 64
LIMIT = 60  # seconds that a kernel may take for the checks of one size

# ---------------------------------------------------------------------------------------------------------------------
# The exercises


HELPERS = {
    "to_float": "to_float(x)           the real x as a float. All arithmetic is in float.",
    "from_float": "from_float(out[i], x) stores the float x in out[i], which is a real.",
    "warp_sum": "warp_sum(x)           the sum of x over the 32 threads of a warp. All must call it, and all get it.",
    "warp_max": "warp_max(x)           the same for the largest x.",
    "block_sum": "block_reduce<warp_sum>(x, 0.0f)    the sum of x over the block. All its threads must call it.",
    "block_max": "block_reduce<warp_max>(x, LOWEST)  the same for the largest x. LOWEST is the lowest float.",
    "shared": "__shared__ float x[256];  is memory that the threads of a block share. __syncthreads(); waits for all.",
    "dynamic": "DYNAMIC_SHARED(float, x);  is more such memory, as many bytes as are said here: {shared}",
    "atomicAdd": "atomicAdd(p, x)       adds the float x to *p, also if other threads do so at the same time.",
    "master": "x = load_master<1>(params, low, i)  has number i in x[0]; store_master(params, low, i, x) stores it.",
    "math": "expf(x), logf(x), sqrtf(x), tanhf(x), fmaxf(x, y)  are the functions of C for float.",
}
NUMBERS, ROWS, BLOCKS = "to_float from_float", "warp_sum warp_max", "block_sum block_max shared"


class Exercise(NamedTuple):
    """A kernel to write. The signature is that of a kernel in the lab's .cu, and what it is launched over and judged by
    is that of the Version that launches it, unless it is said here."""
    kernel: str  # the lab's
    like: str  # the kernel whose signature it has
    teaches: str
    item: str  # what BLOCK shares out
    hints: tuple
    helpers: str = NUMBERS
    items: str = ""  # the Version's, if it launches no single kernel
    args: str = ""
    zeroed: str = ""  # an array that is filled with zeros before the launch
    plane: str = ""  # the items along x and along y, for a BLOCK that says how many of both it covers
    checks: tuple = ()  # sizes, if not the Kernel's
    note: tuple = ()  # what is to be said of NumPy's formula


TURNS = tuple(f"B=2,T=33,NH=6,NKV=2,HS=64,theta=3,half={half}" for half in (0, 1))

EXERCISES = {row.kernel: row for row in (
    Exercise("residual_forward", "residual_forward1", "which thread does what, and which threads have nothing to do",
             "a number of out", ("Each thread adds one pair of numbers: which one, blockIdx.x and threadIdx.x say.",
                                 "N*C is seldom a multiple of a block. What must the threads beyond the end do?")),
    Exercise("gelu_forward", "gelu_forward1", "arithmetic in float, results in real, and a function of one's own",
             "a number of out", ("The index and the bound are those of residual_forward, with OC numbers in a row.",
                                 "C has no pi: sqrt(2/pi) is 0.7978846f. And 1/2 is 0 in C, as both are whole "
                                 "numbers: write 0.5f."),
             NUMBERS + " math", note=(
                 "The formula of Hendrycks and Gimpel (2016) is",
                 "    gelu(x) = x/2 (1 + tanh(u)), with u = sqrt(2/pi) (x + 0.044715 x^3)",
                 "Both give the same, since 1 + tanh(u) = 2 sigmoid(2 u). You may write either.")),
    Exercise("swiglu_forward", "swiglu_forward1", "rows and columns from an index: two inputs from one row",
             "a number of out", ("The row of number i is i / H and its column is i % H. A row of inp has 2*H numbers.",
                                 "The first half of a row is up, the second half is gate."), NUMBERS + " math"),
    Exercise("encoder_forward", "encoder_forward2", "reading where another array says: the embedding of a token",
             "a number of out", ("The row is i / C: tokens[row] is a row of wte, and row % T is a row of wpe.",
                                 "out is fp32, so it needs no from_float.")),
    Exercise("permute", "permute1", "an index of five dimensions, taken apart by / and %", "a number of out",
             ("Take the index of out apart from its last dimension on: c = i % head, then i / head % T, and so on.",
              "Put the index of inp together from its first dimension on: ((b*T + t)*3 + which)*NH + h, and so on.")),
    Exercise("unpermute", "unpermute1", "the way back, and which side should be in order", "a number of out",
             ("Number i of out is at b, t, h, c. Where is it in inp (B,NH,T,head)?",
              "Neighbouring threads should write neighbouring numbers.")),
    Exercise("repeat_kv_forward", "repeat_kv_forward1", "Llama's groups: which head reads which", "a number of out",
             ("Of the 3*NH heads of out, the first NH are queries, then come keys and then values.",
              "NH / NKV query heads next to each other share a key head.")),
    Exercise("gelu_backward", "gelu_backward1", "a gradient in place: read before you write", "a number of dinp",
             ("With u as in gelu_forward, the derivative is (1 + tanh u)/2 + x/2 (1 - tanh(u)^2) du/dx.",
              "dinp comes in as the gradient of the output, and has to leave as that of the input."),
             NUMBERS + " math"),
    Exercise("swiglu_backward", "swiglu_backward1", "one thread, two results", "a number of dout",
             ("A thread has up, gate and dout at hand, and can write both gradients.",
              "With s = 1 / (1 + exp(-gate)), silu is gate * s, and its derivative s * (1 + gate * (1 - s))."),
             NUMBERS + " math"),
    Exercise("crossentropy_softmax_backward", "crossentropy_softmax_backward1", "padding: columns that must be zero",
             "a number of dlogits", ("The gradient is (probability - 1 at the target) * dlosses[row].",
                                     "The columns from V to Vp - 1 are padding.")),
    Exercise("rope_table", "rope_table1", "where fp32 is not enough", "a pair of channels",
             ("Thread i has position i / (HS/2) and pair i % (HS/2).",
              "The power needs double: pow((double)theta, ...), and the frequency is rounded to float again."),
             "math", checks=("T=33,HS=64", "T=5000,HS=64")),
    Exercise("rope_forward", "rope_forward2", "pairs: a thread that reads two numbers and writes two", "a pair",
             ("Turning (x, y) by an angle gives (x cos - y sin, x sin + y cos). table has cos and sin side by side.",
              "Read both numbers before you write one."),
             checks=TURNS),
    Exercise("rope_backward", "rope_backward1", "a rotation's gradient is the rotation back", "a pair",
             ("The inverse of a rotation by an angle is one by minus the angle.",
              "All else is as in rope_forward."),
             checks=TURNS),
    Exercise("adamw", "adamw2", "an update of many arrays in one pass", "a number",
             ("settings is a struct in device memory: AdamW a = *settings, then a.learning_rate, a.rate1, and so on.",
              "Look at kernels.cu for what its fields mean. A tensor i has weight decay if decayed[i]."),
             "master math"),
    Exercise("matmul_backward_bias", "matmul_backward_bias1", "a sum over a column, whose numbers lie far apart",
             "a column", ("A thread takes a column, and adds up all N rows of it in a float.",
                          "dbias is added to (+=), since micro-batches add up.")),
    Exercise("softmax_forward", "softmax_forward1", "the maximum of a row, a sum, and what overflows", "a row",
             ("exp(x) is infinite in fp32 from x = 89 on. exp(x - largest) never is, and the quotient is the same.",
              "Three loops over the row: the largest number, the sum of the exponentials, the quotients."),
             f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("rmsnorm_forward", "rmsnorm_forward1", "the sum of a row, with one thread and then with a warp", "a row",
             ("A thread can take a whole row. That is right, though slow.",
              "With a warp a row, each thread adds every 32nd number: for (int c = lane; c < C; c += 32)."),
             f"{NUMBERS} {ROWS} math"),
    Exercise("layernorm_forward", "layernorm_forward1", "two sums over a row, and a difference that may cancel",
             "a row",
             ("First the mean, then the average of (x - mean)^2: the average of x^2 minus mean^2 would cancel.",
              "With a warp a row, each thread adds every 32nd number: for (int c = lane; c < C; c += 32)."),
             f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("fused_residual_forward", "fused_residual_forward2", "two kernels in one: what is read once", "a row",
             ("residual += branch first, and the mean is that of the new residual.",
              "A thread or a warp that has written a number may read it again."), f"{NUMBERS} {ROWS} dynamic math"),
    Exercise("crossentropy_forward", "crossentropy_forward1", "a loss without overflow: log(sum(exp))", "a row",
             ("The loss is log(sum of exp(x - largest)) + largest - x[target].",
              "Only the first V columns count."), f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("classifier_fused", "classifier_fused1", "a loss and its gradient in place: nothing may be lost", "a row",
             ("The gradient is dloss * (softmax - 1 at the target), and 0 in the columns from V to Vp - 1.",
              "Read the target's logit before you overwrite it."), f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("global_norm", "global_norm2", "a sum over everything, by one block and its shared memory", "one, for all",
             ("There is one block. Each of its threads adds every blockDim.x-th square.",
              "block_reduce adds up what the threads have. One of them stores the root."),
             "block_sum shared math", items="1", args="norm grads n"),
    Exercise("matmul_forward", "matmul_forward1", "a matrix product, first naive and then in tiles of shared memory",
             "a number of out", ("A thread takes the row n = i / OC of inp and the row oc = i % OC of weight.",
                                 "For tiles write BLOCK(1024, 32, 32): then blockIdx.x counts tiles of columns, and "
                                 "blockIdx.y tiles of rows."), NUMBERS + " shared", plane="OC, N"),
    Exercise("repeat_kv_backward", "repeat_kv_backward2", "a sum over copies, without atomics", "a number of dinp",
             ("A thread takes a number of dinp, and adds up its copies in dout.",
              "A query's head has one copy, a key's or a value's NH / NKV.")),
    Exercise("encoder_backward", "encoder_backward1", "many threads that add to one place", "a number of dout",
             ("Two positions may have the same token. So both add to the same row of dwte.",
              "atomicAdd does it, in an order that changes."), NUMBERS + " atomicAdd"),
    Exercise("rmsnorm_backward", "rmsnorm_backward1", "a gradient of a row, and one of all rows", "a row",
             ("With dnorm = dout * weight, dinp += rstd * (dnorm - x * rstd^2 * average of (dnorm * x)).",
              "dweight[c] gets a term from every row: atomicAdd."), f"{NUMBERS} {ROWS} atomicAdd"),
    Exercise("layernorm_backward", "layernorm_backward1", "three gradients, of which two are sums over rows",
             "a row",
             ("With norm = (x - mean) * rstd and dnorm = dout * weight, the input's gradient is rstd * (dnorm - "
              "average of dnorm - norm * average of (dnorm * norm)).",
              "dweight, dbias and before get a term from every row: atomicAdd."), f"{NUMBERS} {ROWS} atomicAdd"),
    Exercise("relu_attention_forward", "relu_attention_forward1", "attention's two products, without the softmax",
             "a query, that is a b, h and t", ("t = i % T, h = i / T % NH, b = i / T / NH.",
                                               "Query t sees the keys 0 to t. HS, a head's channels, is a constant.")),
    Exercise("trimat_forward", "trimat_forward1", "the scores of attention: half of a matrix", "a number of att",
             ("Above the diagonal nothing has to be written.", "The numbers are T*T for each head: use size_t.")),
    Exercise("attention_forward", "attention_forward1", "attention with its softmax", "a query, that is a b, h and t",
             ("att (B,NH,T,T) is memory for the weights of your own: its row i is yours.",
              "Without it: keep the largest score so far, and scale down what you have added when it grows."),
             f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("gqa_forward", "gqa_forward1", "Llama's attention: query heads that share keys and values",
             "a query, that is a b, h and t", ("Head h reads the key head h / (NH / NKV).",
                                               "Keep the largest score so far, and scale down what you have added when "
                                               "it grows."), f"{NUMBERS} {ROWS} {BLOCKS} math"),
    Exercise("attention_backward", "attention_backward1", "attention's gradient: the hardest kernel of the trainer",
             "a query, that is a b, h and t",
             ("The weight of a pair is exp2f(LOG2_E * scale * q.k - lse): lse has the logarithm to base 2.",
              "dqkv is zero when you begin. Add what belongs to a key or a value by atomicAdd."),
             NUMBERS + " atomicAdd math", items="B*NH*T", args="dqkv dout out qkv lse scale B T NH", zeroed="dqkv"),
    Exercise("gqa_backward", "gqa_backward1", "the same, with keys and values that several heads share",
             "a query, that is a b, h and t",
             ("Begin with attention_backward. What changes is where the keys and values are.",
              "dinp is zero when you begin."), NUMBERS + " atomicAdd math", items="B*NH*T",
             args="dqkv dout out qkv lse scale B T NH NKV", zeroed="dqkv"),
)}


def exercise_names():
    """Those whose kernel the lab has, from easy to hard."""
    have = kernel_names()
    return [name for name in EXERCISES if name in have]


def version_of(exercise, kernel):
    """The Version of the lab that has the exercise's signature, as far as there is one, with what the exercise says."""
    own = [version for version in kernel.versions if version.run == exercise.like]
    version = own[0] if own else Version(exercise.kernel, exercise.like, dtypes=("fp32",) if exercise.zeroed or
                                         exercise.kernel == "global_norm" else ("fp32", "bf16"))
    return version._replace(items=exercise.items or version.items, args=exercise.args or version.args or kernel.args,
                            trainer=False, library="")


def checks_of(exercise, kernel):
    """The sizes to check, as dicts: those that fit kernels.cu as it is compiled here."""
    checks = [parse_sizes(text) for text in exercise.checks or kernel.checks]
    checks.sort(key=lambda sizes: sizes.get("T") == 1)  # a complaint about many rows says more than about one
    return [sizes for sizes in checks if sizes.get("HS", 64) == 64] if kernel.compiled_for == "HS" else checks


# ---------------------------------------------------------------------------------------------------------------------
# The file to begin with


def command(what):
    """The command line of an exercise's name or file, by the lab.py that was called."""
    called = sys.argv[0] if Path(sys.argv[0]).name == "lab.py" else "dev/lab/lab.py"
    return f"python {called} --exercise {what}".rstrip()


DECLARATION = r'(BLOCK\([^;{}]*?\))\s*extern "C" __global__ void\s+(?:__launch_bounds__\(.*?\)\s*)?%s\(([^)]*)\)'


def signature(exercise):
    """(BLOCK line, [parameter]) of the lab's kernel, from the text of its .cu."""
    text = (KERNELS / f"{exercise.kernel}.cu").read_text(encoding="utf-8")
    block, parameters = re.search(DECLARATION % exercise.like, text).groups()
    return block, [" ".join(parameter.replace("__restrict__ ", "").split()) for parameter in parameters.split(",")]


def symbols(given, checks_given, shapes):
    """The dimensions of an array in the names of the problem, for all the checks: "N,Vp" for instance."""
    names = [name for name, value in given.items() if type(value) is int and all(name in each for each in checks_given)]
    terms = [*names, *(f"{a}+1" for a in names), *(f"{a}*{b}" for a, b in itertools.product("234", names)),
             *(f"{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"3*{a}*{b}" for a, b in itertools.combinations(names, 2)),
             *(f"({a}+2*{b})" for a, b in itertools.permutations(names, 2)),
             *(f"({a}+2*{b})*{c}" for a, b, c in itertools.permutations(names, 3))]

    def symbol(sizes):
        values = [dict(each) for each in checks_given]
        if len(set(sizes)) == 1 and sizes[0] < 4:
            return str(sizes[0])
        preferred = sorted(terms, key=lambda term: (len(term) > 2, term not in ("N", "B", "T")))
        good = [term for term in preferred if [eval(term, {}, value) for value in values] == list(sizes)]
        return good[0] if good else str(sizes[0])

    return ",".join(symbol(sizes) for sizes in zip(*shapes))


def tables_of(exercise, kernel):
    """For each check of a kernel the inputs and the truths of its problem, and the exercise's memory of its own."""
    for sizes in map(parse_sizes, kernel.checks):
        given, truth, *_ = kernel.problem(Draw(False), **sizes)
        version = version_of(exercise, kernel)
        given = {**sizes, **given}
        scratch = version.scratch(SimpleNamespace(**given)) if version.scratch else {}
        yield given, truth, {name: np.empty(shape) for name, shape in scratch.items()}


def argument_lines(exercise, kernel):
    """A line for each parameter: what it is, its shape, and what is done with it."""
    _, parameters = signature(exercise)
    names, tables = version_of(exercise, kernel).args.split(), list(tables_of(exercise, kernel))
    given, truth, scratch = tables[0]
    rows = []
    for parameter, name in zip(parameters, names):
        label = re.findall(r"\w+", parameter)[-1]
        if "*" not in parameter:
            rows.append((label, "a number", "" if type(given.get(name)) is int else f"{given.get(name):.6g}"))
            continue
        arrays = [{**table[0], **table[1], **table[2]}.get(name) for table in tables]
        kind = next(kind for kind in ("real", "float", "int", "size_t", "AdamW", "low_half") if kind in parameter)
        how = ("read, and changed" if name in truth and name in given else "to be zero at first, and added to"
               if exercise.zeroed == name else "written" if name in truth else
               "memory of your own" if name in scratch else "read")
        if exercise.zeroed == name:
            how = "written; it is zero at first"
        if any(array is None for array in arrays):
            rows.append((label, kind, "null in fp32"))
        else:
            shape = symbols(given, [{k: v for k, v in table[0].items() if type(v) is int} for table in tables],
                            [array.shape for array in arrays])
            rows.append((label, f"{kind} ({shape})", how))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"{label:{widths[0]}}  {what:{widths[1]}}  {how}".rstrip() for label, what, how in rows]


def formula_lines(kernel):
    """The source of what NumPy computes: the formulas that the kernel's .py imports, and theirs."""
    wanted, queue = [], [value for value in vars(importlib.import_module(f"dev.lab.kernels.{kernel.name}")).values()
                         if getattr(value, "__module__", "") in (formulas.__name__, gpt2_numpy.__name__)]
    while queue:
        function = queue.pop()
        if function not in wanted:
            wanted.append(function)
            queue += [getattr(formulas, name) for name in function.__code__.co_names
                      if callable(getattr(formulas, name, None))]
    wanted.sort(key=lambda function: (function.__module__ == formulas.__name__, function.__code__.co_firstlineno))
    return [line for function in wanted for line in inspect.getsource(function).rstrip().splitlines()]


WAYS = (("threads", "a thread an item: its item is blockIdx.x * blockDim.x + threadIdx.x"),
        ("threads / 32", "a warp of 32 threads an item: blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32"),
        ("1", "a block an item: blockIdx.x"))


def template(name):
    """The text of my_<name>.cu."""
    exercise, kernel = EXERCISES[name], find_kernel(name)
    block, parameters = signature(exercise)
    threads = re.search(r"\d+", block)[0]
    first = importlib.import_module(f"dev.lab.kernels.{name}").__doc__.strip().splitlines()
    if "OC" in version_of(exercise, kernel).args.split():
        first = [line.replace("4C", "OC") for line in first]
    comment = [f"Exercise {name}: {exercise.teaches}", "", "Compute", *(f"    {line}" for line in first)]
    formula = formula_lines(kernel)
    if formula:
        comment += ["", "which in NumPy is", *(f"    {line}" for line in formula)]
    if exercise.note:
        comment += ["", *exercise.note]
    comment += ["", "Arguments", *(f"    {line}" for line in argument_lines(exercise, kernel)),
                "    real is float, or bf16 of 16 bits. Arrays lie row after row: the last index is the fastest."]
    items, shared = version_of(exercise, kernel).items, version_of(exercise, kernel).shared
    comment += ["", f"Items: {items}. An item is {exercise.item}.",
                "BLOCK(threads, items) says how many threads a block has, and how many items it covers. There are as",
                "many blocks as it takes to cover all items. The last one may have more threads than items are left.",
                *(f"    {f'BLOCK({threads}, {covers})':27} {text}" for covers, text in WAYS)]
    if exercise.plane:
        columns, rows = exercise.plane.split(", ")
        comment += [f"    {'BLOCK(1024, 32, 32)':27} a block has a tile of out: 32 columns (of {columns}) and 32 rows "
                    f"(of {rows}).", f"    {'':27} In it x = threadIdx.x % 32 and y = threadIdx.x / 32: it is the "
                    "number in", f"    {'':27} column blockIdx.x * 32 + x and row blockIdx.y * 32 + y."]
    comment.append("In a warp a thread's number, its lane, is threadIdx.x % 32.")
    helpers = [HELPERS[helper].replace("{shared}", shared) for helper in exercise.helpers.split()]
    comment += ["", "You may use", *(f"    {helper}" for helper in helpers)]
    comment += ["", *(f"Hint {i}: {hint}" for i, hint in enumerate(exercise.hints, 1)), "",
                f"Judge it with: {command(f'{PREFIX}{name}.cu')}"]
    wrapped = [line for text in comment for line in
               textwrap.wrap(text, 116, subsequent_indent=" " * (len(text) - len(text.lstrip()) + 4)) or [""]]
    head = "".join(f"// {line}".rstrip() + "\n" for line in wrapped)
    listed = textwrap.fill(", ".join(each.replace(" ", "\0") for each in parameters), 112, initial_indent="    ",
                           subsequent_indent="    ").replace("\0", " ")
    return f'{head}\n{block}\nextern "C" __global__ void {PREFIX}{name}(\n{listed}) {{\n\n}}\n'


def write_template(name, folder="."):
    """Writes my_<name>.cu into a folder and returns its path. Raises UserError."""
    path, text = Path(folder) / f"{PREFIX}{name}.cu", template(name)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{path} is there already, and is left as it is; to begin again, move it away, and to judge it "
                        f"type: {command(path)}") from None
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); go to a folder of your own") from None
    return path


# ---------------------------------------------------------------------------------------------------------------------
# In a process of its own: what a student's kernel does


def code_of(path):
    """The text of a .cu without its comments, line by line as it was."""
    return without_comments(path.read_text(encoding="utf-8"))


def exercise_of(path):
    """(name of the exercise, the kernel that the file has) of a student's file. Raises UserError."""
    try:
        text = code_of(path)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: expected text") from None
    known = sorted(exercise_names(), key=len, reverse=True)
    found = {kernel: next((name for name in known if kernel.startswith(PREFIX + name)), None)
             for kernel in re.findall(r"\b(my_\w+)\s*\(", text)}
    found = {kernel: name for kernel, name in found.items() if name}
    whole = [kernel for kernel in found if re.search(DECLARATION % kernel, text, re.S)]
    if len(whole) > 1:
        raise UserError(f"{path}: has {', '.join(whole)}; expected one kernel of an exercise")
    if whole:
        return found[whole[0]], whole[0]
    if found:
        name = next(iter(found))
        raise UserError(f"{path}: there is no kernel {name} with a BLOCK line directly over it; expected: BLOCK(256, "
                        f'threads), and on the next line: extern "C" __global__ void {name}(...)')
    names = [PREFIX + name for name in exercise_names()]
    there = [*re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s*)?(\w+)", text), path.stem]
    near = [name for each in there for name in difflib.get_close_matches(each, names, 1)]
    raise UserError(f"{path}: has no kernel of an exercise; expected one such as {[*near, *names][0]}, and "
                    f"{command('')} lists them")


def declared(path, run):
    """The train_gpt2.Kernel of a student's file. Raises UserError."""
    kernels = read_kernels([path], types=False)  # its signature says which they are to be
    if run in kernels:
        return kernels[run]
    text = code_of(path)
    match = re.search(DECLARATION % run, text, re.S)
    block = " ".join(match[1].split())
    what = "there are no parentheses in it" if block.count("(") > 1 else "the first is a number"
    raise UserError(f"{path.name}, line {text[: match.start()].count(chr(10)) + 1}: {block}: expected BLOCK(threads, "
                    f"items), such as BLOCK(256, threads); {what}")


def student_version(path):
    """(Kernel, Version) of a student's file. Raises UserError."""
    name, run = exercise_of(path)
    exercise, kernel, mine = EXERCISES[name], find_kernel(name), declared(path, run)
    _, expected = signature(exercise)
    shape = [(None if "*" in text else text.split()[0], "const" in text) for text in expected]
    given = [None if array else kind for _, kind, array, _ in parameters_of(mine)]
    if [kind for kind, _ in shape] != given:
        found = ", ".join(" ".join(text.replace("__restrict__", "").split()) for text in mine.parameters)
        raise UserError(f"{path}: {run} has the wrong parameters, ({found}); expected ({', '.join(expected)})")
    if not 1 <= mine.threads <= 1024:
        raise UserError(f"{path}: BLOCK({mine.threads}, ...): a block has at least one thread, and at most 1024")
    version = version_of(exercise, kernel)
    items = exercise.plane if len(mine.covers) == 2 and exercise.plane else version.items
    if len(mine.covers) != len(items.split(",")):
        raise UserError(f"{path}: BLOCK over {run}: expected BLOCK(threads, items that a block covers"
                        f"{', and how many along y' if ',' in items else ''})")

    def zero_and_run(device, a):
        device.zero(getattr(a, exercise.zeroed))
        version._replace(run=run).launch(device, a, kernel)

    version = version._replace(run=run, items=items, threads=(mine.threads,),
                               atomics="atomicAdd" in code_of(path))
    return kernel, version._replace(run=zero_and_run) if exercise.zeroed else version


def build(paths, dtype, only):
    """The CPU with these students' kernels. Raises UserError."""
    from dev.cpu.device import Cpu
    with contextlib.redirect_stdout(None):
        return Cpu(dtype, MODEL, [LAB / "tiles.cu", *paths], only)


def unreadable(bench):
    """A context in which AddressSanitizer takes the guards of what a kernel writes for out of bounds."""
    @contextlib.contextmanager
    def poisoned():
        ours = ctypes.CDLL(None)
        parts = [(memory.ctypes.data + at, GUARD) for memory in bench.guarded.values()
                 for at in (0, memory.nbytes - GUARD)]
        for address, size in parts:
            ours.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))
        try:
            yield
        finally:
            for address, size in parts:
                ours.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return poisoned()


def send(**what):
    print(json.dumps(what), flush=True)


def child(job):
    """Do a job: {"compile": paths of files to compile together, "run": those to run, "sanitize", "dtypes", "limit":
    seconds}. Prints a line of JSON for each thing that happens."""
    paths = [Path(path) for path in job["compile"]]
    only = {exercise_of(path)[1] for path in paths}
    wrong = set()
    for dtype in job["dtypes"]:
        if wrong.issuperset(job["run"]):
            return
        try:
            device = build(paths, dtype, only)
        except UserError as e:
            send(event="compiler" if "could not compile" in str(e) else "refusal", text=str(e), dtype=dtype)
            return
        for path in job["run"]:
            kernel, version = student_version(Path(path))
            if dtype not in version.dtypes or path in wrong:
                continue
            for sizes in checks_of(EXERCISES[kernel.name], kernel):
                signal.alarm(0)
                bench = Bench(kernel._replace(compiled_for=""), device, sizes)
                if not bench.fits(version):
                    continue
                where = ",".join(f"{key}={value}" for key, value in sizes.items())
                send(event="begins", file=path, sizes=where, dtype=dtype, limit=job["limit"], arrays={
                    name: [array.ctypes.data, array.nbytes, array.itemsize, array.shape]
                    for name, array in vars(bench.sets[0]).items() if isinstance(array, np.ndarray)})
                signal.alarm(job["limit"])
                complaint = sanitized(bench, version) if job["sanitize"] else judged(bench, version, Path(path))
                signal.alarm(0)
                if complaint:
                    send(event="complaint", file=path, **complaint)
                    wrong.add(path)
                    break
            else:
                send(event="right", file=path, dtype=dtype)


def sanitized(bench, version):
    """Launch once, in the sanitizers' eyes, which end this process if they find something."""
    choice = dict(threads=version.threads[0])
    work = next(bench.launches(version, choice))
    with unreadable(bench):
        try:
            work()
        except UserError as e:
            return dict(kind="stuck", text=str(e))
    return None


def judged(bench, version, path):
    """What is wrong with a version, as a dict, or None."""
    choice = dict(threads=version.threads[0])
    try:
        verdict = bench.check(version, choice)
    except UserError as e:
        return dict(kind="stuck", text=str(e))
    except AssertionError as e:
        text = str(e)
        name = re.sub(r"wrote outside of ", "", text)
        return dict(kind="outside", **outside(bench, name)) if name in bench.guarded else dict(kind="race", text=text)
    if verdict.place is None:
        return None
    facts = facts_of(bench, verdict, code_of(path))
    return dict(kind="wrong", text=wrong_number(verdict, facts.never_there), name=verdict.name, place=verdict.place,
                lines=describe(facts))


def outside(bench, name):
    """Which number outside of an array was written: {"name", "number", "shape"}."""
    memory = bench.guarded[name]
    array = getattr(bench.sets[0], name, None)
    array = getattr(bench.scratch, name) if array is None else array
    changed = np.flatnonzero(memory != 255)
    before, after = changed[changed < GUARD], changed[changed >= memory.nbytes - GUARD]
    at = after[0] - GUARD if after.size else before[-1] - GUARD
    return dict(name=name, number=int(at // array.itemsize), shape=array.shape)


# ---- A wrong number, in the problem's words


def wrong_number(verdict, never):
    """What is wrong, in words. never: the number was never written."""
    place = ",".join(map(str, verdict.place))
    if never:
        return f"{verdict.name}[{place}] was never written, expected {verdict.expected:.6g}"
    text = f"{verdict.name}[{place}] is {verdict.found:.9g}, expected {verdict.expected:.9g}"
    if not np.isfinite(verdict.error) or not verdict.limit:
        return text
    return f"{text} (relative error of all {verdict.error:.1e}, limit {verdict.limit:.1e})"


def facts_of(bench, verdict, code):
    """What is known about a wrong result: see CAUSES."""
    a, name = bench.sets[0], verdict.name
    array, truth = bench.result(a, name), bench.truth[name]
    found, cared = np.float64(to_float(array)), truth != ANY
    scale = np.sqrt(np.mean(np.where(cared & np.isfinite(truth), truth, 0) ** 2)) or 1
    loose = 2**-6 if array.itemsize == 2 else 1e-3
    with np.errstate(all="ignore"):
        close = np.isclose(found, truth, rtol=loose, atol=loose * 1e-2 * scale, equal_nan=True)
        wrong = cared & ~close
        wrong[verdict.place] = True
        never = cared & (array.view(f"u{array.itemsize}") == 2 ** (8 * array.itemsize) - 1) & ~np.isnan(truth)
        ratio = (found / truth)[wrong & np.isfinite(found) & (truth != 0)]
        steady = ratio.size > 3 and float(np.ptp(ratio)) < 0.02 * abs(float(np.median(ratio)))
    given = {key: value for key, value in vars(bench.given).items() if isinstance(value, np.ndarray)
             and value.dtype.kind == "f"}
    columns = truth.shape[-1] if truth.ndim > 1 else 0
    rows = truth.size // columns if columns else truth.size
    place = np.ravel_multi_index(verdict.place, truth.shape)
    flat, before = wrong.reshape(-1), given.get(name)
    of_rows = {key: value.reshape(rows, -1) for key, value in given.items() if value.ndim > 1 and value.size > rows and
               value.size % rows == 0} if EXERCISES[bench.kernel.name].item == "a row" else {}
    row = {key: value[place // (columns or 1)] for key, value in of_rows.items()}
    row = {key: value[np.isfinite(value)] for key, value in row.items()}
    f = SimpleNamespace(
        name=name, shape=truth.shape, place=verdict.place, found=verdict.found, expected=verdict.expected,
        error=verdict.error, never_there=bool(never[verdict.place]), zero=bool((found[cared] == 0).all()),
        dtype=bench.device.dtype, bf16=array.itemsize == 2, code=code, kernel=bench.kernel.name, cares=int(cared.sum()),
        wrong=int(wrong.sum()), never=int(never.sum()), row=row, row_number=int(place // (columns or 1)), rows=rows,
        column=int(place % columns) if columns else None, columns=columns,
        at={key: float(value[verdict.place]) for key, value in given.items() if value.shape == truth.shape},
        ratio=float(np.median(ratio)) if steady else None,
        tail=bool(wrong.any()) and bool(flat[flat.size - int(flat.sum()):].all()),
        ends={key: value for key, value in vars(bench.given).items() if type(value) is int},
        shared="__shared__" in code or "block_reduce" in code)
    f.wrong_columns = sorted({*np.flatnonzero(wrong.reshape(rows, columns).any(0)).tolist()}) if columns else []
    f.wrong_rows = np.flatnonzero(wrong.reshape(rows, columns or 1).any(1)).tolist()
    f.as_before = before is not None and bool(np.isclose(found, before, rtol=loose)[wrong].all())
    f.not_added = before is not None and bool(np.isclose(found, truth - before, rtol=loose, atol=loose)[wrong].all())
    f.nan, f.infinite = bool(np.isnan(verdict.found)), bool(np.isinf(verdict.found))
    f.largest = max((float(x.max()) for x in row.values()), default=0)
    right = np.setdiff1d(np.arange(rows), f.wrong_rows)
    f.smallest = bool(f.wrong_rows and right.size) and any(
        x[f.wrong_rows].std(1).max() < x[right].std(1).min() for x in of_rows.values())
    f.shifted = 0
    for shift in (1, -1):
        moved = np.roll(found.reshape(-1), shift)
        if f.wrong > 3 and np.isclose(moved, truth.reshape(-1), rtol=loose, atol=0)[flat].mean() > 0.9:
            f.shifted = shift
    f.reductions = reductions_missing(f)
    f.cut = f.bf16 and np.isfinite(found).all() and bool((abs(found) <= abs(truth) * (1 + 2**-9))[cared].mean() > 0.99)
    return f


def reductions_missing(f):
    """A question after warp_sum and warp_max, where lanes share a row and the code has not both; or ""."""
    lanes = re.search(r"threadIdx\.x\s*(%\s*32|&\s*31)|\blane\b", f.code)
    if not lanes or "warp_sum" not in EXERCISES[f.kernel].helpers:
        return ""
    if re.search("__shfl|__syncthreads|block_reduce|__shared__|DYNAMIC_SHARED", f.code):
        return ""
    wanted = ("warp_sum",) if "norm" in f.kernel else ("warp_sum", "warp_max")
    missing = [name for name in wanted if not re.search(rf"\b{name}\b", f.code)]
    return f"{'are' if len(missing) > 1 else 'is'} {' and '.join(missing)} missing?" if missing else ""


def end_of(f):
    """The columns that are wrong, if they are the last ones before one of the problem's sizes: its name."""
    for name, size in f.ends.items():
        if f.columns and f.wrong_columns and size > 2 and f.wrong_columns[-1] == size - 1 and (
                f.wrong_columns == list(range(f.wrong_columns[0], size)) and len(f.wrong_columns) <= size // 3):
            return name
    return None


# What usually causes a wrong result: (whether it does, what is said). The first that fits is said.
CAUSES = [
    (lambda f: f.never == f.cares, "nothing was written to {name}. Is there a line that stores to it, and do the "
     "threads get there?"),
    (lambda f: f.never and f.tail and f.never == f.wrong and "blockIdx" not in f.code, "the end of {name} was never "
     "written. The index leaves out blockIdx.x, so that each block does the work of the first."),
    (lambda f: f.never and f.tail and f.never == f.wrong, "the end of {name} was never written. Is the bound of the if "
     "right? Or does the index leave out blockIdx.x? Or does BLOCK claim more items for a block than its threads do?"),
    (lambda f: f.never and end_of(f), "the last columns were never written. Does the loop over a row stop too early?"),
    (lambda f: f.never, "these numbers were never written, or come from shared memory that was never written. Look "
     "at the index, and at which threads store."),
    (lambda f: f.zero, "{name} is 0 everywhere. A quotient of whole numbers is a whole number in C: 1/2 is 0, and "
     "0.5f is a half."),
    (lambda f: (f.nan or f.infinite or f.found == 0) and abs(f.largest) > 80 and "norm" not in f.kernel, "exp(x) is "
     "infinite in fp32 from x = 89 on, and 0 below x = -104. Subtract the row's largest number before exp."),
    (lambda f: (f.nan or f.infinite) and any(abs(x) > 15 for x in f.at.values()), "a large input overflowed on the "
     "way: exp(x) is infinite in fp32 from x = 89 on. Write the formula so that a large x does no harm."),
    (lambda f: f.nan and f.shared, "NaN is 0/0, inf - inf, a root of a negative number, or shared memory that nobody "
     "wrote."),
    (lambda f: f.nan, "NaN is 0/0, inf - inf, or the root of a negative number. If a variance is the average of x^2 "
     "minus mean^2, it cancels: take the average of (x - mean)^2."),
    (lambda f: f.reductions, "each lane has only its own numbers: {reductions}"),
    (lambda f: f.as_before, "{name} is as it was before the launch: it was never changed there."),
    (lambda f: f.not_added, "{name} has what should be added to it, but not what was there: += and not =."),
    (lambda f: f.ratio, "all wrong numbers are {ratio:.4g} times what they should be. Is a factor missing, or one too "
     "many?"),
    (lambda f: f.shifted, "numbers are one place off. Look at the index."),
    (lambda f: f.columns and f.wrong_columns and f.wrong_columns[0] >= f.ends.get("V", f.columns), "only the padding "
     "is wrong, the columns from V on. They have to be zero."),
    (lambda f: f.bf16 and abs(f.found - f.expected) <= 2**-7 * abs(f.expected) and f.cut, "bf16 was cut off where it "
     "should be rounded. from_float rounds."),
    (lambda f: f.bf16 and abs(f.found - f.expected) <= 2**-6 * abs(f.expected), "the result was right in fp32, and is "
     "off by the rounding of bf16. Compute in float, and round once, at the end."),
    (lambda f: end_of(f), "only the last columns are wrong. Look at the bound of the loop over a row: < or <=, and "
     "{end} or another size."),
    (lambda f: f.smallest and "norm" in f.kernel, "only the rows of the smallest deviations are wrong. "
     "Is eps (1e-5) there, inside of the root?"),
    (lambda f: "norm" in f.kernel and any(abs(x.mean()) > 20 * x.std() for x in f.row.values()), "a row of a large "
     "mean is wrong. Take the mean away before you square: the average of x^2 minus mean^2 cancels."),
    (lambda f: f.tail and f.wrong < f.cares, "the beginning is right, and from some number on all are wrong. Look "
     "at the number of items that BLOCK says, and at the index."),
    (lambda f: f.row and ("norm" in f.kernel or "softmax" in f.kernel) and f.error < 0.1,
     "numbers of a row are off a little: is each number of the row added once, the first and the last too?"),
    (lambda f: f.row and ("norm" in f.kernel or "softmax" in f.kernel), "numbers of a row are far off. Compare what is "
     "computed of the whole row with the formula, and then what is made of each number."),
    (lambda f: f.wrong == f.cares, "every number is wrong. Compare the line that computes it with the formula."),
    (lambda f: True, "look at what these places have in common, and follow the thread that writes the first of them."),
]


def describe(f):
    """The lines on a wrong number: where it is, how many more there are, and the usual cause."""
    said = []
    if f.columns:
        ends = [name for name, size in f.ends.items() if size == f.column + 1 > 4]
        which = f"the last before {ends[0]} = {f.column + 1}" if ends else f"of {f.columns}"
        said.append(f"row {f.row_number} of {f.rows}, column {f.column}, {which}")
    elif f.row:
        said.append(f"row {f.row_number} of {f.rows}")
    said += [f"{key} is {value:.6g} there" for key, value in f.at.items() if key != f.name]
    for key, x in f.row.items():
        mean, deviation = float(x.mean()), float(x.std())
        note = (f", so the mean is {abs(mean / deviation):.0f} deviations" if abs(mean) > 20 * deviation > 0 else
                ", and e^x of the largest is infinite in fp32" if x.max() > 88.7 else "")
        said.append(f"that row of {key} has numbers from {x.min():.4g} to {x.max():.4g}, of mean {mean:.4g} and "
                    f"deviation {deviation:.3g}{note}")
    lines = [f"{'where:' if i == 0 else '      '} {line}" for i, line in enumerate(said)]
    many = f"{f.wrong:,} of {f.cares:,} numbers are wrong"
    if f.columns and f.wrong < f.cares:
        many += f", in {len(f.wrong_rows)} of {f.rows} rows and in {len(f.wrong_columns)} of {f.columns} columns"
    cause = next(text for condition, text in CAUSES if condition(f))
    return [*lines, f"how many: {many}", "usually: " + cause.format(name=f.name, ratio=f.ratio or 0, end=end_of(f),
                                                                           reductions=f.reductions)]


# ---------------------------------------------------------------------------------------------------------------------
# In front of that process: what it said, in sentences


def sanitizer_variables():
    """The environment in which a program finds accesses out of bounds, or None where the compiler has no sanitizers."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or "g++"
    found = []
    for library in ("libasan.so", "libubsan.so"):
        with contextlib.suppress(OSError):
            done = subprocess.run([compiler, f"-print-file-name={library}"], capture_output=True, text=True)
            path = done.stdout.strip()
            if os.path.isabs(path) and os.path.exists(path):
                found.append(path)
    if len(found) < 2:
        return None
    return {"CXXFLAGS": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all", "LD_PRELOAD": " ".join(found),
            "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def run_child(job, variables=None):
    """(events, exit status, what was printed to stderr) of a job."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", **(variables or {"CXXFLAGS": os.environ.get("CXXFLAGS", "")})}
    done = subprocess.run([sys.executable, "-m", "dev.lab.exercise", json.dumps(job)],
                          capture_output=True, env=environment)
    events = [json.loads(line) for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    return events, done.returncode, done.stderr.decode(errors="replace")


def line_of(path, text):
    """"line 12: `out[i] = x;`" of the first place in a student's file that a text names, or ""."""
    match = re.search(rf"{re.escape(str(path))}:(\d+)", text)
    return quoted(path, int(match[1])) if match else ""


def quoted(path, number):
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"line {number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else f"line {number}"


def unbalanced(code):
    """What is wrong with the braces of a text without comments, or ""."""
    opened, closed = code.count("{"), code.count("}")
    if opened == closed:
        return ""
    return f"a {'{ has no }' if opened > closed else '} has no {'}: the file has {opened} of {{ and {closed} of }}"


def compiler_lines(path, text, dtype):
    """What a compiler's first error says of a student's file."""
    match = re.search(rf"{re.escape(str(path))}:(\d+):(?:\d+:)? (?:fatal )?error: (.*)", text)
    line, braces = quoted(path, int(match[1])) if match else "", unbalanced(code_of(path))
    if braces:
        return [f"it does not compile: {braces}", *([f"the compiler noticed it in {line}"] if line else [])]
    if not match:
        other = re.search(r"error: (.*)", text)
        return ["it does not compile: " + (other[1] if other else text.splitlines()[-1])]
    before = " (or at the end of the line before)" if re.search("expected .*['\u2018];['\u2019]", match[2]) else ""
    said = [f"it does not compile{' in bf16' if dtype == 'bf16' else ''}: {match[2]}{before}", line]
    if dtype == "bf16" and re.search(r"\breal\b", match[2]):
        stored = re.search(r"(\w+\[[^\[\]]*\])\s*[-+*/]?=[^=]", line)
        read = re.search(r"(?<!to_float\()\b\w+\[[^\[\]]*\]", line[stored.end(1) if stored else 0 :])
        if stored and "=" in match[2]:
            said.append(f"usually: a real of 16 bits is no float: write from_float({stored[1]}, ...)")
        else:
            said.append(f"usually: a real of 16 bits is no float: write to_float({read[0] if read else '...'})")
    return said


def beyond(verb, name, number, shape):
    """An access outside of an array, as if that had one index."""
    if number < 0:
        return f"it {verb} {name}[{number}], and the first is {name}[0]"
    rows = (f" ({shape[0]} rows of {shape[1]} numbers)" if len(shape) == 2 else
            f" ({' x '.join(map(str, shape))} numbers)" if len(shape) > 2 else "")
    return f"it {verb} {name}[{number}], and the last is {name}[{math.prod(shape) - 1}]{rows}"


def sanitizer_lines(path, begun, text):
    """What AddressSanitizer or UBSan says, in two lines; None if neither has spoken."""
    match = re.search(r"runtime error: (.*)", text)
    if match:
        said = match[1]
        bounds = re.search(r"index (-?\d+) out of bounds for type '(.*)'", said)
        what = (f"index {bounds[1]} is out of bounds: the array is {bounds[2]}" if bounds else
                f"{said.split(',')[0]}: 16 bytes at once need an address that is a multiple of 16"
                if "misaligned" in said else said)
        return [what, line_of(path, text)]
    match = re.search(r"AddressSanitizer: (\S+)", text)
    if not match:
        return None
    access = re.search(r"(READ|WRITE) of size (\d+) at (0x[0-9a-f]+)", text)
    if not access:
        at = re.search(r"unknown address (0x[0-9a-f]+)", text)
        return [f"it reads or writes at an address that does not exist{f' ({at[1]})' if at else ''}: an index that is "
                "far outside of its array, or a null pointer", line_of(path, text)]
    verb, address = ("reads" if access[1] == "READ" else "writes"), int(access[3], 16)
    near = []
    for name, (begin, nbytes, itemsize, shape) in begun["arrays"].items():
        distance = max(begin - address, address - (begin + nbytes) + 1, 0)
        if 0 < distance <= GUARD:
            near.append((distance, name, (address - begin) // itemsize, shape))
    if not near:
        if "global-buffer-overflow" in text or "stack-buffer-overflow" in text:
            return [f"it {verb} {access[2]} bytes outside of an array of its own, in shared memory or of a thread",
                    line_of(path, text)]
        return [f"it {verb} {access[2]} bytes outside of all arrays", line_of(path, text)]
    _, name, number, shape = min(near)
    return [beyond(verb, name, number, shape), line_of(path, text)]


def stuck_lines(path, text):
    """What cuda.h says of a block that is stuck, for a beginner."""
    waits = re.findall(r"threads ([-\d, .]+) wait in (.+?) at line (\d+)", text)
    if not waits:
        return [text.removeprefix("kernels.cu: ")]
    block = re.search(r"block \(\d+, \d+, \d+\)", text)[0]

    def count(ranges):
        ends = [part.split("-") for part in ranges.replace(".", "").split(", ") if part.strip()]
        return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)

    who, what, line = waits[0]
    total = declared(path, exercise_of(path)[1]).threads
    code = code_of(path).splitlines()
    inside = 0 < int(line) <= len(code) and re.search(r"__sync|__shfl", code[int(line) - 1])
    calls, where = "block_reduce", f" in {what}"
    if not inside:
        if what != "__syncthreads":
            calls = "warp_sum|warp_max|block_reduce"
        where += f", which is in {'block_reduce' if what == '__syncthreads' else 'warp_sum and the like'}"
    lines = [f"it is stuck{where}: {'some' if '...' in who else count(who)} of the {total} threads of {block} wait "
             "there for the others"]
    numbers = [int(line)] if inside else [i for i, each in enumerate(code, 1) if re.search(rf"\b({calls})\b", each)]
    lines += [quoted(path, number) for number in numbers]
    others = [f"threads {who} wait in {what} at line {line}" for who, what, line in waits[1:]]
    gone = re.search(r"threads ([-\d, .]+) have returned", text)
    if gone:
        others.append(f"threads {gone[1]} have returned")
    if others:
        lines.append("; ".join(others))
    return [*lines, "usually: it stands inside an if, behind a return, or in a loop that some threads leave earlier.",
            "         All threads of the block (of the warp, for warp_sum and the like) must come to it"]


def complaint_lines(path, events, status, stderr, sanitize):
    """The sentences about a file's run; [] if it is right, None if the run says nothing."""
    compiler = [event for event in events if event["event"] == "compiler"]
    if compiler:
        return compiler_lines(path, compiler[0]["text"], compiler[0]["dtype"])
    refusal = [event["text"] for event in events if event["event"] == "refusal"]
    if refusal:  # of this computer, as where no compiler is, or no place to keep what it makes
        raise UserError(refusal[0])
    begun = [event for event in events if event["event"] == "begins" and event["file"] == str(path)]
    at = f"at the sizes {begun[-1]['sizes']}, in {begun[-1]['dtype']}" if begun else ""
    told = [event for event in events if event["event"] == "complaint" and event["file"] == str(path)]
    if told:
        kind, text = told[0]["kind"], told[0].get("text", "")
        if kind == "stuck":
            return [*stuck_lines(path, text), at]
        if kind == "outside":
            return [beyond("writes", told[0]["name"], told[0]["number"], told[0]["shape"]), at]
        if kind == "race":
            shared = "__shared__" in code_of(path)
            cause = ("a missing __syncthreads() between a write to shared memory and another thread's read of it, or "
                     "between that read and the next write" if shared else "two threads write to one place, or one "
                     "reads what another one writes")
            return [f"it {text}" if text.startswith(("has", "changed")) else text, f"usually: {cause}", at]
        return [f"wrong: {text}", *told[0]["lines"], at]
    if status == -signal.SIGALRM:
        loops = [str(i) for i, line in enumerate(code_of(path).splitlines(), 1) if re.search(r"\b(for|while)\b", line)]
        which = f": there is one in line {' and in line '.join(loops)}" if loops else ""
        return [f"it did not end within {begun[-1]['limit']} seconds. Which loop has no end?{which}", at]
    if sanitize and begun and status:
        lines = sanitizer_lines(path, begun[-1], stderr)
        if lines:
            return [*filter(None, lines), at]
    if status < 0:
        name = signal.Signals(-status).name
        return [f"it crashed ({name}): most likely an index is far outside of its array", at]
    if any(event["event"] == "right" and event["file"] == str(path) for event in events):
        return []
    if status and begun:
        return [f"it ended its process with status {status}: {stderr.strip().splitlines()[-1:]}", at]
    return None


def judge_file(path):
    """What is to be said of a student's file: (lines of a complaint or [], whether accesses were checked). Raises
    UserError."""
    path = path.resolve()
    student_version(path)
    job = dict(compile=[str(path)], run=[str(path)], sanitize=False, limit=LIMIT)
    variables = sanitizer_variables()
    with ThreadPoolExecutor(2) as pool:
        bounds = variables and pool.submit(run_child, dict(job, sanitize=True, dtypes=["fp32"]), variables)
        result = run_child(dict(job, dtypes=["fp32", "bf16"]))
        lines = complaint_lines(path, *result, False)
        checked = complaint_lines(path, *bounds.result(), True) if bounds else None
    if checked and not (checked[0].startswith(("it is stuck", "it did not end")) and lines is not None):
        return checked, True
    if lines is None:
        raise UserError(f"{path}: could not be judged: {' '.join(result[2].split())[-300:]}")
    return lines, checked is not None


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def time_file(path):
    """Check a student's kernel on the GPU and time it and the lab's versions, in fp32. Returns lines."""
    from dev.lab.lab import files_of  # which imports this file
    kernel, mine = student_version(path)
    sizes = parse_sizes(kernel.shape)
    C, NH = model_of(kernel, sizes)
    device = make_device("cuda", "fp32", Config(C=C, NH=NH), beside=[*files_of([kernel.name]), path])
    with device.cupy.cuda.Stream(non_blocking=True):
        bench = Bench(kernel, device, sizes, timing.cold(device))

        def seconds(version, choice):
            return timing.time_rounds(device, list(bench.launches(version, choice)))

        choice = dict(threads=mine.threads[0])
        verdict = bench.check(mine, choice)
        if verdict.place is not None:
            return [f"wrong on the GPU: {wrong_number(verdict, False)}"], 1
        own = seconds(mine, choice)
        rungs = [(min(seconds(version, choice) for choice in version.choices(device)), number, version.what)
                 for number, version in enumerate(kernel.versions, 1) if bench.fits(version)]
    return standing(own, rungs), 0


def standing(own, rungs):
    """The lines that say where a time stands among (seconds, number, what) of the versions."""
    slower = max((rung for rung in rungs if rung[0] >= own), default=None, key=lambda rung: -rung[0])
    faster = max((rung for rung in rungs if rung[0] < own), default=None)
    between = [f"version {number} ({1e6 * time:.1f} us)" for time, number, _ in filter(None, (slower, faster))]
    line = f"your {1e6 * own:.1f} us "
    if not faster:
        return [line + f"are faster than all versions; the best is {between[0]}"]
    line += f"lie between {between[0]} and {between[1]}" if slower else f"are more than those of {between[0]}"
    return [line, f"what version {faster[1]} does better: {faster[2]}; the comment over it in the .cu says why"]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def list_exercises():
    for i, name in enumerate(exercise_names(), 1):
        print(f"{i:2}  {name:30} {EXERCISES[name].teaches}")
    print(f"\n{command('NAME')} writes a file to fill in, and --exercise FILE judges it.")


def main(what, device):
    """--exercise: lists, writes or judges. Returns the exit status. Raises UserError."""
    if not what:
        list_exercises()
        return 0
    if not what.endswith(".cu"):
        names = exercise_names()
        if what not in names:
            if Path(f"{what}.cu").exists():
                raise UserError(f"no exercise {what}; did you mean the file {what}.cu?")
            near = difflib.get_close_matches(what, names, 1, 0.4)
            raise UserError(f"no exercise {what}{f', but {near[0]}' if near else ''}; without a name, all are listed")
        path = write_template(what)
        print(f"wrote {path}. Fill in its body, and then judge it: {command(path)}")
        return 0
    path = Path(what)
    name, _ = exercise_of(path)
    print(f"{path}: compiled for the CPU, and compared with NumPy ...", flush=True)
    lines, checked = judge_file(path)
    if lines:
        print(textwrap.indent("\n".join(filter(None, lines)), "    "))
        return 1
    print(f"    right, at all sizes, in {' and '.join(student_version(path.resolve())[1].dtypes)}")
    print("    no access is out of bounds" if checked else
          "    accesses were not checked: this compiler has no AddressSanitizer")
    if device == "cpu":
        print("    There is no GPU here, so it is not timed.")
        return 0
    done = subprocess.run([sys.executable, "-m", "dev.lab.exercise", json.dumps(dict(time=str(path.resolve())))])
    return done.returncode


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    if "time" in task:
        try:
            said, code = time_file(Path(task["time"]))
        except Exception as e:
            said, code = [f"on the GPU: {type(e).__name__}: {' '.join(str(e).split())}"], 1
        print(textwrap.indent("\n".join(said), "    "))
        sys.exit(code)
    child(task)
