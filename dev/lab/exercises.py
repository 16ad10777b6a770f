"""The table of the lab's exercises: a student writes a kernel, and it is checked, also on a laptop
without a GPU.

    python -m dev.lab --exercise                        # lists the exercises, from easy to hard
    python -m dev.lab --exercise softmax_forward        # writes my_softmax_forward.cu, empty
    python -m dev.lab --exercise my_softmax_forward.cu  # checks it

submission.py writes and reads the file, trial.py runs it for grade.py, causes.py finds what is
wrong with a result, and explain.py puts compiler errors, crashes and wrong results into words.
"""
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
NUMBERS, WARPS, BLOCKS = "to_float from_float", "warp_sum warp_max", "block_sum block_max shared"


class Exercise(NamedTuple):
    """A kernel to write. It has the signature of a kernel in the lab's .cu, and is launched and
    checked like the Version that launches that kernel, unless a field here says otherwise."""
    kernel: str  # of the lab
    like: str  # the kernel in its .cu with the same signature
    teaches: str
    item: str  # what one item of BLOCK is
    hints: tuple
    helpers: str = NUMBERS
    items: str = ""  # their number, if no Version launches `like` alone
    args: str = ""  # the arguments, if not the Version's
    zeroed: str = ""  # an array that is set to zero before the launch
    plane: str = ""  # the items along x and y, for a BLOCK with both
    checks: tuple = ()  # sizes, if not the Ladder's
    note: tuple = ()  # a remark on NumPy's formula
    # For causes.py; the exercise's usual mistakes are in mistakes.py.
    # (the input whose rows count, the outputs with a number or a row for each, what rows differ in)
    rows: tuple = ()
    padded: str = ""  # the outputs whose columns from V on must be 0
    # the axes of an output of more than two; "head" of queries, keys and values side by side
    axes: str = ""
    # {argument: its shape, or what the number is}, where the checks do not say it
    shapes: dict = {}
    numpy: bool = True  # whether the file shows the formulas that the kernel's .py imports

    @property
    def alone(self):
        """Whether an item has too little work for more than a thread."""
        return self.item.startswith(("a number", "a pair"))


TURNS = tuple(f"B=2,T=33,NH=6,NKV=2,HS=64,theta=3,half={half}" for half in (0, 1))

ROPE = dict(qkv="B,T,NH+2*NKV,HS", dqkv="B,T,NH+2*NKV,HS", heads="NH + NKV: those that are turned",
            row="(NH + 2*NKV) * HS",
            half="1: numbers i and i + HS/2 of a head are a pair; 0: 2i and 2i + 1")
QKV = dict(qkv="B,T,3,NH,HS", dqkv="B,T,3,NH,HS", scale="1/sqrt(HS)")
# Of one head, with q, k, v (T,HS).
ONE_HEAD = "In NumPy, for the q, k and v (T,HS) of one head"
ATTEND = (ONE_HEAD, "    score = scale * q @ k.T  # (T,T), row t for query t; -inf where s > t",
          "    out = softmax(score) @ v")
GRADIENT = (ONE_HEAD + ", and its out, dout and lse (T,1)",
            "    delta = (dout * out).sum(-1)                             # (T,1)",
            "    weight = exp2(LOG2_E * scale * q @ k.T - lse)            # (T,T); 0 where s > t",
            "    dscore = scale * weight * (dout @ v.T - delta)           # (T,T)",
            "    dq, dk, dv = dscore @ k, dscore.T @ q, weight.T @ dout")
ADAMW_NOTE = (
    "For each number, with the fields of settings:",
    "    g = grads[i] * (clip / norm if 0 < clip < norm else 1)",
    "    m += rate1 * (g - m), and v += rate2 * (g * g - v)",
    "    change = m * correction1 / (sqrt(v * correction2) + eps)",
    "    params -= learning_rate * (change + weight_decay * params), the decay only if "
    "decayed[tensor]",
    "Tensor j is the numbers from starts[j] to starts[j + 1] - 1.")

EXERCISES = {row.kernel: row for row in (
    Exercise("residual_forward", "residual_forward1",
             "which thread does what, and which threads have nothing to do", "a number of out",
             ("Each thread adds one pair of numbers, found by blockIdx.x and threadIdx.x.",
              "N*C is rarely a multiple of the block size. What must the threads beyond it do?")),
    Exercise("gelu_forward", "gelu_forward1",
             "arithmetic in float, results in real, and a function of one's own",
             "a number of out",
             ("The index and the bound are those of residual_forward, with OC numbers in a row.",
              "C has no pi: sqrt(2/pi) is 0.7978846f. And 1/2 is 0 in C, as both are whole "
              "numbers: write 0.5f."), NUMBERS + " math",
             note=("The formula of Hendrycks and Gimpel (2016) is",
                   "    gelu(x) = x/2 (1 + tanh(u)), with u = sqrt(2/pi) (x + 0.044715 x^3)",
                   "Both are equal, since 1 + tanh(u) = 2 sigmoid(2 u). You may write either.")),
    Exercise("softmax_forward", "softmax_forward1", "the maximum of a row, a sum, and how exp "
             "overflows", "a row",
             ("exp(x) is infinite in fp32 from x = 89 on. exp(x - largest) never is, and the "
              "quotient is the same.",
              "Three loops over the row: the largest number, the sum of the exponentials, the "
              "quotients."),
             f"{NUMBERS} {WARPS} {BLOCKS} math", rows=("inp", "out", "range"), padded="out"),
    Exercise("shift", "shift1", "a neighbour's number, and an edge where there is no neighbour",
             "a number of out",
             ("Column c of number i is i % C. Column 0 has no left neighbour: what lies before it "
              "in memory is the end of another row.",
              "Why is out not inp? A thread would overwrite a number that its neighbour still has "
              "to read: a race.")),
    Exercise("row_sum", "row_sum3", "a tree in shared memory: where the barrier belongs", "a row",
             ("A block takes a row. Each thread adds up its own numbers (c = threadIdx.x, then c "
              "+= blockDim.x) and stores the sum in part[threadIdx.x], which is __shared__.",
              "Then begin with half = blockDim.x / 2, and halve it until it was 1: the threads "
              "below half add part[threadIdx.x + half] to their own sum. Between two steps all "
              "threads wait, also those that do not add."), "to_float shared"),
    Exercise("transpose", "transpose1", "which side is contiguous, and the banks of shared memory",
             "a number of inp",
             ("Number i of inp is in row i / C and column i % C. In out, column c begins at c * N.",
              "To read neighbours and write neighbours, turn a tile in shared memory: "
              "BLOCK(1024, 32, 32) and __shared__ real tile[32][33]. In fp32 the 33rd number of "
              "each row puts the 32 numbers of a column into 32 banks."),
             "shared", plane="N, C"),
    Exercise("group_scale", "group_scale1", "a shuffle: lanes of a warp exchange numbers",
             "a number of out",
             ("First let each thread look at all numbers of its group, from i / 32 * 32 on. "
              "fabsf(x) is |x|.",
              "Then use shuffles: swap with the lane 16 away and keep the larger number, then 8, "
              "4, 2 and 1 away. Now every lane knows the largest of 32.",
              "The last warp may have lanes without a number. They must not return before the "
              "shuffles."), NUMBERS + " shuffle math"),
    Exercise("prefix_sum", "prefix_sum1", "running sums: many threads do what looks serial",
             "a row",
             ("One thread per row is right, and slow. With a block per row, each thread first adds "
              "the number one to its left, then the sum two to the left, then four, and so on.",
              "In shared memory each of these steps needs two barriers: one after reading, because "
              "another thread then overwrites the number, and one after writing, because another "
              "one then reads it."),
             "to_float shared shuffle"),
    Exercise("swiglu_forward", "swiglu_forward1",
             "rows and columns from an index: two inputs from one row", "a number of out",
             ("The row of number i is i / H and its column is i % H. A row of inp has 2*H "
              "numbers.",
              "The first half of a row is up, the second half is gate."), NUMBERS + " math"),
    Exercise("encoder_forward", "encoder_forward2",
             "an index from another array: the embedding of a token", "a number of out",
             ("The row is i / C: tokens[row] is a row of wte, and row % T is a row of wpe.",
              "out is fp32, so it needs no from_float."), axes="b t c", shapes=dict(wpe="maxT,C")),
    Exercise("permute", "permute1", "an index of five dimensions, taken apart by / and %",
             "a number of out",
             ("Take the index of out apart, last dimension first: c = i % head, then i / head % "
              "T, and so on.",
              "Build the index of inp, first dimension first: ((b*T + t)*3 + which)*NH + h, and "
              "so on."), axes="which b h t c"),
    Exercise("unpermute", "unpermute1", "the way back: which of the two sides should be "
             "contiguous?", "a number of out",
             ("Number i of out is at (b, t, h, c). Where is it in inp (B,NH,T,head)?",
              "Neighbouring threads should write neighbouring numbers."), axes="b t h c"),
    Exercise("repeat_kv_forward", "repeat_kv_forward1", "Llama's groups: which head reads which",
             "a number of out",
             ("Of the 3*NH heads of out, the first NH are queries, then come keys and then values.",
              "NH / NKV query heads next to each other share a key head."), axes="b t which h c"),
    Exercise("gelu_backward", "gelu_backward1", "a gradient in place: read before you write",
             "a number of dinp",
             ("With u as in gelu_forward, the derivative is (1 + tanh u)/2 + x/2 (1 - tanh(u)^2) "
              "du/dx.",
              "dinp holds the gradient of the output, and must become the gradient of the input."),
             NUMBERS + " math"),
    Exercise("swiglu_backward", "swiglu_backward1", "one thread, two results", "a number of dout",
             ("A thread reads up, gate and dout once, and can write both gradients.",
              "With s = 1 / (1 + exp(-gate)), silu is gate * s, and its derivative s * (1 + gate "
              "* (1 - s))."), NUMBERS + " math"),
    Exercise("crossentropy_softmax_backward", "crossentropy_softmax_backward1",
             "padding: columns that must be zero", "a number of dlogits",
             ("The gradient is (probability - 1 at the target) * dlosses[row].",
              "The columns from V to Vp - 1 are padding."), padded="dlogits"),
    Exercise("rope_table", "rope_table1", "where fp32 is not enough", "a pair of numbers of table",
             ("Thread i has position i / (HS/2) and pair i % (HS/2).",
              "The power needs double: pow((double)theta, ...). Round it to float, and divide "
              "1.0f by it."), "trigonometry", checks=("T=33,HS=64", "T=5000,HS=64"), numpy=False,
             note=("Row t has the cosine and the sine of the angle of each pair i, side by side:",
                   "    power = theta^(2i/HS) in double, rounded to float",
                   "    angle = t * (1 / power) in float",
                   "    table[t, 2i] = cos(angle) and table[t, 2i + 1] = sin(angle)")),
    Exercise("rope_forward", "rope_forward2", "pairs: a thread reads two numbers and writes two",
             "a pair",
             ("Turning (x, y) by an angle gives (x cos - y sin, x sin + y cos). table has cos and "
              "sin side by side.",
              "Read both numbers before you write one."),
             checks=TURNS, axes="b t head c", shapes=ROPE),
    Exercise("rope_backward", "rope_backward1", "a rotation's gradient is the rotation back",
             "a pair",
             ("To turn back, turn by minus the angle: only the sign of sin changes.",
              "The rest is as in rope_forward."), checks=TURNS, axes="b t head c", shapes=ROPE),
    Exercise("adamw", "adamw2", "an update of many arrays in one pass", "a number",
             ("settings is a struct in device memory: AdamW a = *settings, then a.learning_rate, "
              "a.rate1, and so on.",
              "Which tensor has number i? starts is sorted: go through it, or bisect it."),
             "master math", note=ADAMW_NOTE, shapes=dict(settings="1", norm="1")),
    Exercise("matmul_backward_bias", "matmul_backward_bias1", "a sum over a column, whose numbers "
             "are far apart",
             "a column", ("A thread takes a column and adds up its N numbers in a float.",
                          "Use +=: dbias already holds the gradient of earlier batches.")),
    Exercise("rmsnorm_forward", "rmsnorm_forward1", "the sum of a row, with one thread and then "
             "with a warp", "a row",
             ("A thread can take a whole row. That is correct but slow.",
              "With one warp per row, each thread adds every 32nd number: for (int c = lane; c < "
              "C; c += 32)."),
             f"{NUMBERS} {WARPS} math", rows=("residual", "out rstd", "deviation")),
    Exercise("layernorm_forward", "layernorm_forward1",
             "two sums over a row, and a difference that may cancel", "a row",
             ("First the mean, then the average of (x - mean)^2: the average of x^2 minus mean^2 "
              "would cancel.",
              "With one warp per row, each thread adds every 32nd number: for (int c = lane; c < "
              "C; c += 32)."), f"{NUMBERS} {WARPS} {BLOCKS} math",
             rows=("residual", "out mean rstd copy", "deviation")),
    Exercise("fused_residual_forward", "fused_residual_forward2", "two kernels in one: the row is "
             "read once", "a row",
             ("residual += branch first, and the mean is that of the new residual.",
              "A thread or a warp that has written a number may read it again."),
             f"{NUMBERS} {WARPS} dynamic math",
             rows=("residual", "out mean rstd copy", "deviation")),
    Exercise("crossentropy_forward", "crossentropy_forward1", "a loss without overflow: "
             "log(sum(exp))", "a row",
             ("The loss is log(sum of exp(x - largest)) + largest - x[target].",
              "Only the first V columns count."), f"{NUMBERS} {WARPS} {BLOCKS} math",
             rows=("logits", "losses", "range")),
    Exercise("classifier_fused", "classifier_fused1", "a loss and its gradient in place: what to "
             "read first", "a row",
             ("The gradient is dloss * (softmax - 1 at the target), and 0 in the columns from V to "
              "Vp - 1.",
              "Read the target's logit before you overwrite it."), f"{NUMBERS} {WARPS} {BLOCKS} "
             "math",
             rows=("logits", "logits losses", "range"), padded="logits"),
    Exercise("global_norm", "global_norm2",
             "a sum over everything, by one block and its shared memory", "the whole sum",
             ("There is one block. Each of its threads adds every blockDim.x-th square.",
              "block_reduce adds up the sums of the threads. One of them stores the root."),
             "block_sum shared math", items="1", args="norm grads n", zeroed="norm",
             checks=("n=31", "n=9601,last=1", "n=9601,last=2", "n=300032"), shapes=dict(norm="1")),
    Exercise("matmul_forward", "matmul_forward1",
             "a matrix product, first naive and then in tiles of shared memory", "a number of out",
             ("A thread takes the row n = i / OC of inp and the row oc = i % OC of weight.",
              "For tiles write BLOCK(1024, 32, 32): then blockIdx.x counts tiles of columns, and "
              "blockIdx.y tiles of rows."), NUMBERS + " shared", plane="OC, N"),
    Exercise("gram", "gram1", "a symmetric product: half of the numbers are enough",
             "a number of out",
             ("Number i of out is in matrix i / T / T, row i / T % T and column i % T.",
              "A thread below the diagonal returns at once. The others store their number twice: "
              "the second time in row i % T and column i / T % T."),
             axes="b t s"),
    Exercise("repeat_kv_backward", "repeat_kv_backward2", "a sum over copies, without atomics",
             "a number of dinp",
             ("A thread takes a number of dinp and adds up its copies in dout.",
              "The head of a query has one copy, that of a key or a value NH / NKV copies."),
             axes="b t head c"),
    Exercise("encoder_backward", "encoder_backward1", "many threads that add to one place",
             "a number of dout",
             ("Two positions may have the same token, and then both add to the same row of dwte.",
              "atomicAdd allows that, in an order that varies."), NUMBERS + " atomicAdd",
             shapes=dict(dwpe="maxT,C")),
    Exercise("rmsnorm_backward", "rmsnorm_backward1", "a gradient of a row, and one of all rows",
             "a row",
             ("With dnorm = dout * weight, dinp += rstd * (dnorm - x * rstd^2 * average of (dnorm "
              "* x)).",
              "Every row adds a term to dweight[c]: atomicAdd."), f"{NUMBERS} {WARPS} atomicAdd",
             rows=("inp", "dinp", "deviation")),
    Exercise("layernorm_backward", "layernorm_backward1",
             "three gradients, of which two are sums over rows", "a row",
             ("With norm = (x - mean) * rstd and dnorm = dout * weight, the input's gradient is "
              "rstd * (dnorm - average of dnorm - norm * average of (dnorm * norm)).",
              "Every row adds a term to dweight, dbias and before: atomicAdd. before gets the "
              "new dresidual."), f"{NUMBERS} {WARPS} atomicAdd",
             rows=("inp", "dresidual", "deviation")),
    Exercise("relu_attention_forward", "relu_attention_forward1", "attention's two products, "
             "without the softmax",
             "a query: one (b, h, t)", ("t = i % T, h = i / T % NH, b = i / T / NH.",
                                               "Query t sees the keys 0 to t. HS, a head's "
                                        "channels, is a constant."),
             axes="b t h c", note=(ONE_HEAD, "    weight = maximum(0, scale * q @ k.T)  # (T,T); 0 "
                                   "where s > t",
                                   "    out = weight @ v"), shapes=QKV),
    Exercise("trimat_forward", "trimat_forward1", "the scores of attention: half of a matrix",
             "a number of att",
             ("Nothing has to be written above the diagonal.", "There are T*T numbers for each "
              "head: use size_t."), axes="b h t s", numpy=False,
             note=(ONE_HEAD, "    att = scale * q @ k.T  # (T,T), row t for query t"), shapes=QKV),
    Exercise("attention_forward", "attention_forward1", "attention with its softmax",
             "a query: one (b, h, t)",
             ("att (B,NH,T,T) is scratch memory for your weights: row i belongs to item i.",
              "Without it: keep the largest score so far, and scale down your sums when it grows."),
             f"{NUMBERS} {WARPS} {BLOCKS} math", axes="b t h c", note=ATTEND, shapes=QKV),
    Exercise("gqa_forward", "gqa_forward1",
             "Llama's attention: query heads that share keys and values", "a query: one (b, h, t)",
             ("Head h reads the key head h / (NH / NKV).",
              "Keep the largest score so far, and scale down your sums when it grows."),
             f"{NUMBERS} {WARPS} {BLOCKS} math", axes="b t h c", note=ATTEND,
             shapes=dict(scale="1/sqrt(HS)")),
    Exercise("attention_backward", "attention_backward1", "attention's gradient: the hardest "
             "kernel of the trainer",
             "a query: one (b, h, t)",
             ("The weight of a pair is exp2f(LOG2_E * scale * q.k - lse): lse is a logarithm to "
              "base 2.",
              "dqkv is zero at the start. Add to keys and values with atomicAdd."),
             NUMBERS + " atomicAdd exp2", items="B*NH*T", args="dqkv dout out qkv lse scale B T NH",
             zeroed="dqkv", axes="b t head c", note=GRADIENT, shapes=QKV),
    Exercise("gqa_backward", "gqa_backward1", "the same, where several heads share keys and values",
             "a query: one (b, h, t)",
             ("Begin with attention_backward. Only the place of the keys and values changes.",
              "dqkv is zero at the start."), NUMBERS + " atomicAdd exp2", items="B*NH*T",
             args="dqkv dout out qkv lse scale B T NH NKV", zeroed="dqkv", axes="b t head c",
             note=GRADIENT, shapes=dict(scale="1/sqrt(HS)")),
)}


def exercise_names():
    """The exercises whose kernel the lab has, from easy to hard."""
    have = kernel_names()
    return [name for name in EXERCISES if name in have]


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
