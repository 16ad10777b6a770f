"""--optimizer muon: Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") updates the
hidden matrices, and AdamW everything else: embeddings, norms, biases.

AdamW sees a matrix as a list of numbers: it divides each number's mean gradient by that number's
own size. But a layer uses a matrix as a whole: what it does to its input is the sum of rank-1 parts
u s v', by its singular values s. Gradients of hidden matrices have nearly low rank: a few s are far
larger than the others, and AdamW's updates are no different (Jordan et al. found so). A step then
goes along a few directions, and the others, which are small but also needed, hardly move. Muon
keeps the directions and makes all singular values about 1:

    M = U S V'   ->   U V'

That is the matrix nearest to M whose rows (or columns) are orthogonal, and among all updates with
a spectral norm of 1 the one that lowers the loss most, to first order. A singular value
decomposition would be slow. Newton-Schulz needs products alone: if X is divided by its norm, so
that s <= 1, an odd polynomial of X works on each singular value by itself, and not on U and V:

    X <- a X + b (X X') X + c (X X')^2 X        s <- a s + b s^3 + c s^5

Five times Jordan's (a, b, c) = (3.4445, -4.7750, 2.0315) bring every s from 0.0016 to 1 into 0.68
.. 1.21. They trade exactness for a steep start: small singular values grow 3.4445-fold each time.
Coefficients that change from one iteration to the next start more steeply (Polar Express, Amsel et
al. 2025, arXiv 2505.16932): four iterations bring every s from 0.0011 on into 0.42 .. 1.58. That is
exact enough for an update, and so are products in bf16. So a step is:

    m += (1 - momentum) (g - m)                        as in torch.optim.Muon, momentum 0.95
    x  = g + momentum (m - g)                          Nesterov's look ahead
    x  = orthogonalize(x / norm(x))
    p -= muon_lr (scale x + weight_decay p)

m needs no correction for its start at 0, as AdamW's does: only its direction counts.

The rows and columns of x have a fixed size, whatever the gradient's, so `scale` says what a step is
for a matrix of another shape. --muon-scale has the two published ways: "original" is
max(1, rows/columns)^0.5 (Jordan), "rms" 0.2 max(rows, columns)^0.5, with which the numbers of an
update are as large as AdamW's usually are (Liu et al. 2025, arXiv 2502.16982, section 2.2).

The queries', keys' and values' matrices in qkvw are orthogonalized one by one, and so are Llama's
up and gate. Matrices of one shape are multiplied together in batches, which fill a GPU although
each is small; on Hopper dev/features/hopper/symmetric.py makes half of what is symmetric, with
fewer large products. Their workspace is the memory of the logits, which nobody reads after the
backward pass. The hidden matrices have no second moment: --optimizer muon takes 4 bytes a number
less.

The state file (state_*.bin) keeps the layout of llm.c's, with the momentum in place of m, and zeros
in place of the v that is not there. Its version is 2, so that neither llm.c nor a run with AdamW
continues from it.

Several ranks divide the matrices of a batch among them, and gather what the others made. With
--zero 1 each has whole layers of the hidden tensors, and momentum, fp32 parameters and the work for
these alone.

On text that is read once, Muon reached AdamW's best validation loss in half of the steps, of 300
and of 600: dev/RESULTS.md has the best runs, and names the commit with all. In 300 steps a momentum
of 0.85 ended lower than 0.95. What counts in an orthogonalization is how far it lifts small
singular values: four of Jordan's iterations, 141-fold, ended 0.09 higher than five, 485-fold, and
Polar Express's four, 422-fold, did not. NorMuon's second moment and cautious decay changed less
than another seed does, so they are not here.
"""
import ctypes
from typing import NamedTuple

import numpy as np

from dev.common.bf16 import to_bf16
from dev.features.feature import Feature, Flag, Pair, kernels_of, stack
from train_gpt2 import (BF16, EPILOGUES, LOW, Row, address, carve, ceil_div, offsets,
                        stride_of, to_float)

SOURCE = kernels_of(__file__)
HIDDEN = ("qkvw", "attprojw", "fcw", "fcprojw")
COEFFICIENTS = {  # (a, b, c) of each iteration
    "polar-express": [(8.156555, -22.483293, 15.878770), (4.042930, -2.808917, 0.500018),
                      (3.891668, -2.772484, 0.506065), (3.285754, -2.368129, 0.464490)],
    "jordan": [(3.4445, -4.7750, 2.0315)] * 5}
SHARE = 8192  # as in muon.cu
WORKSPACE = 2**28  # bytes, for as many matrices of a shape as fit, but at least one
STATE_VERSION = 2  # of a state file that has Muon's momentum


# ---- Products of many matrices


class Orthogonal:
    """What the mixins below share: each has matmul_batch for its device."""
    coefficients = COEFFICIENTS["polar-express"]

    def normalize(self, x, squares, scales):
        """Divide each of x (n,rows,columns) by its Frobenius norm, from squares (n,shares), float64
        sums of its squares. scales (n,), fp32: what it has yet to be multiplied by, 1."""
        size, shares = x[0].size, squares.shape[1]
        self.launch("muon_normalize", (size, len(x)), x, scales, squares, size, shares, 0)

    def flops_of(self, n, rows, columns):
        """The operations in which n matrices are orthogonalized."""
        side, length = sorted((rows, columns))
        return 2 * n * side * side * (2 * length + side) * len(self.coefficients)

    def orthogonalize(self, x, y, gram, poly, scales):
        """x (n,rows,columns), each of norm 1 with scales (n,) by normalize, to matrices whose
        singular values are about 1. y, as x, and gram and poly (n,side,side): memory. Returns the
        one of x and y that has the result."""
        tall = x.shape[1] > x.shape[2]
        for a, b, c in self.coefficients:
            across = x.transpose(0, 2, 1)
            self.matmul_batch(gram, *((across, x) if tall else (x, across)))
            self.matmul_batch(poly, gram, gram, c, gram, b)
            self.matmul_batch(y, *((x, poly) if tall else (poly, x)), 1.0, x, a)
            x, y = y, x
        return x


class BatchOnCpu(Orthogonal):
    """A mixin in front of a CPU's device."""

    def matmul_batch(self, out, left, right, factor=1.0, add=None, share=0.0):
        """out[i] = factor * left[i] @ right[i] + share * add[i], for arrays of as many matrices, of
        real numbers; without add, only the product."""
        product = np.empty(out.shape[1:], np.float32)
        for i in range(len(out)):
            self.matmul(product, left[i], right[i])
            total = np.float32(factor) * product
            if add is not None:
                total += np.float32(share) * to_float(add[i])
            out[i] = to_bf16(total) if out.dtype == BF16 else total


class BatchOnGpu(Orthogonal):
    """A mixin in front of FastCuda: a batch is one product of cuBLASLt."""
    BATCH = {"BATCH_COUNT": (5, ctypes.c_int32), "STRIDED_BATCH_OFFSET": (6, ctypes.c_int64)}

    def matmul_batch(self, out, left, right, factor=1.0, add=None, share=0.0):
        """As BatchOnCpu's. cuBLASLt reads add where it lies, and writes out."""
        key = "batch", out.shape, left.shape, left.strides, right.strides, out.itemsize
        if key not in self.products:
            plan = self.describe(out[0], left[0], right[0], dict(EPILOGUE=EPILOGUES["DEFAULT"]))
            for layout, x in zip(plan[1:], (right, left, out)):
                self.set_batch(layout, x)
            timed = hasattr(self, "choose")
            self.products[key] = plan, (self.choose(key, plan, False, out, left, right) if timed
                                     else self.algorithm(plan))
        (description, *layouts), algorithm = self.products[key]
        of_right, of_left, of_out = layouts
        stream = self.cupy.cuda.get_current_stream()
        self.call("Matmul", self.handle, description, ctypes.byref(ctypes.c_float(factor)),
                  address(right), of_right, address(left), of_left,
                  ctypes.byref(ctypes.c_float(share)), address(out if add is None else add), of_out,
                  address(out), of_out, ctypes.c_void_p(algorithm.ctypes.data),
                  address(self.workspace), ctypes.c_size_t(self.WORKSPACE),
                  ctypes.c_void_p(stream.ptr))

    def set_batch(self, layout, x):
        """Say in the layout of x[0] how many matrices x has, and how far apart they are."""
        values = dict(BATCH_COUNT=len(x), STRIDED_BATCH_OFFSET=x.strides[0] // x.itemsize)
        for name, (attribute, kind) in self.BATCH.items():
            value = kind(values[name])
            self.call("MatrixLayoutSetAttribute", layout, attribute, ctypes.byref(value),
                      ctypes.c_size_t(ctypes.sizeof(value)))


class BatchOnPlainGpu(Orthogonal):
    """A mixin in front of Cuda: a batch is one product of CuPy's cuBLAS, which adds in place."""

    def matmul_batch(self, out, left, right, factor=1.0, add=None, share=0.0):
        """As BatchOnCpu's."""
        if add is not None:
            out[...] = add
        I, J = out.shape[1:]
        transposed_l, stride_l = stride_of(left[0])
        transposed_r, stride_r = stride_of(right[0])
        kind = self.CUDA_TYPES[out.dtype.str[1:]]
        alpha, beta = np.float32([factor]), np.float32([share])
        between = [x.strides[0] // x.itemsize for x in (right, left, out)]
        self.cublas.gemmStridedBatchedEx(
            self.gpu.cublas_handle, transposed_r, transposed_l, J, I, right.shape[1],
            alpha.ctypes.data, right.data.ptr, kind, stride_r, between[0], left.data.ptr, kind,
            stride_l, between[1], beta.ctypes.data, out.data.ptr, kind, J, between[2], len(out),
            self.compute, self.cublas.CUBLAS_GEMM_DEFAULT)


def batch_class(flags):
    """The mixin for the device of these flags."""
    on_gpu = BatchOnPlainGpu if flags.plain else BatchOnGpu
    return stack(on_gpu if flags.device == "cuda" else BatchOnCpu, (),
                 dict(coefficients=COEFFICIENTS[flags.muon_coefficients]))


# ---- The hidden matrices


class Part(NamedTuple):
    """Matrices (rows,columns) of a tensor: in each of its layers `per` of them, one below another
    from row `first` on. stride: the numbers of a layer."""
    name: str
    first: int
    rows: int
    columns: int
    per: int
    layers: int
    stride: int

    @property
    def count(self):
        return self.layers * self.per


def parts_of(c):
    """[Part] of all hidden matrices."""
    table = {row.name: row for row in c.parameter_table()}
    found = []

    def add(name, first, rows, per):
        if per and rows:
            height, columns = table[name].shape
            found.append(Part(name, first, rows, columns, per, c.L, height * columns))

    of_keys = c.NKV * (c.C // c.NH)  # rows; as many as of the queries, without grouped queries
    if of_keys == c.C:
        add("qkvw", 0, c.C, 3)
    else:
        add("qkvw", 0, c.C, 1)
        add("qkvw", c.C, of_keys, 2)
    add("attprojw", 0, c.C, 1)
    hidden = table["fcprojw"].shape[1]
    add("fcw", 0, hidden, table["fcw"].shape[0] // hidden)  # Llama's has up and gate
    add("fcprojw", 0, c.C, 1)
    return found


def parts_of_share(c, ranks):
    """[Part] of the layers that a rank has with --zero 1."""
    found, (each, left) = [], divmod(c.L, ranks.count)
    for part in parts_of(c):
        for name, layers in ((part.name, each), (f"{part.name}_tail", int(ranks.rank < left))):
            if layers:
                found.append(part._replace(name=name, layers=layers))
    return found


def groups_of(parts):
    """{(rows, columns): [Part]}: the matrices of a shape are multiplied together."""
    groups = {}
    for part in parts:
        groups.setdefault((part.rows, part.columns), []).append(part)
    return groups


def workspace_table(rows, columns, matrices, real):
    """What some matrices (rows,columns) need while they are orthogonalized."""
    side = min(rows, columns)
    return [Row("x", (matrices, rows, columns), real),
            Row("y", (matrices, rows, columns), real),  # the next x
            Row("gram", (matrices, side, side), real),  # X X', or X' X if X has more rows
            Row("poly", (matrices, side, side), real),  # b gram + c gram gram
            Row("squares", (matrices, ceil_div(rows * columns, SHARE)), np.float64),
            Row("scales", (matrices,))]  # 1, or 1 / the norms of x


def batches_of(groups, real):
    """(rows, columns, the first matrix, how many) of each batch of matrices that are orthogonalized
    at a time: of each shape even parts, as WORKSPACE allows."""
    for (rows, columns), parts in groups.items():
        count = sum(part.count for part in parts)
        one = offsets(workspace_table(rows, columns, 1, real))[-1]
        size = ceil_div(count, ceil_div(count, max(1, WORKSPACE // one)))
        for start in range(0, count, size):
            yield rows, columns, start, min(size, count - start)


def pieces_of(parts, start, matrices):
    """(Part, its first matrix, how many, where they go in x) of some matrices of a shape, from
    `start` on."""
    before = 0  # matrices of the parts so far
    for part in parts:
        first, last = max(start, before), min(start + matrices, before + part.count)
        if first < last:
            yield part, first - before, last - first, first - start
        before += part.count


def scale_of(rows, columns, convention):
    """How large an update is for a matrix of this shape: see the top."""
    if convention == "rms":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1, rows / columns) ** 0.5


def flops_of(c, device):
    """The operations of a step's products here, as many as this device does."""
    return sum(device.flops_of(matrices, rows, columns)
               for rows, columns, _, matrices in batches_of(groups_of(parts_of(c)), device.real))


class Muon:
    """A model whose hidden matrices Muon updates."""
    state_version = STATE_VERSION
    uncut = HIDDEN

    @classmethod
    def groups(cls, c):
        """groups_of the matrices that this process has."""
        return groups_of(parts_of(c))

    @classmethod
    def tables(cls, c, device, B, T):
        """As GPT2.tables: v of the hidden matrices is not there. If the logits are too small for
        the workspace, it has memory of its own."""
        tables = super().tables(c, device, B, T)
        tables["adam v"] = [row for row in tables["adam v"] if row.name not in HIDDEN]
        tensors = len(tables["adam m"])
        tables["update"] = [*tables["update"], Row("muon", (3,)),
                            Row("rest_starts", (tensors + 1,), np.uint64)]
        needed = max((offsets(cls.workspace_of(rows, columns, matrices, device.real))[-1]
                      for rows, columns, _, matrices in batches_of(cls.groups(c), device.real)),
                     default=0)
        logits = next(row for row in tables["activations"] if row.name == "logits")
        if needed > logits.nbytes:
            tables["muon"] = [Row("workspace", (needed,), np.uint8)]
        return tables

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        tables = self.tables(self.config, self.device, self.B, self.T)
        table = tables["adam m"]
        self.numbers = [start // 4 for start in offsets(table)]  # where each tensor begins
        self.runs = []  # (first tensor, tensor behind the last) of neighbours that AdamW updates
        for i, row in enumerate(table):
            if row.name.removesuffix("_tail") in HIDDEN:
                continue
            if self.runs and self.runs[-1][1] == i:
                self.runs[-1] = self.runs[-1][0], i + 1
            else:
                self.runs.append((i, i + 1))
        starts = np.zeros(len(table) + 1, np.uint64)  # of each tensor, in its run
        for first, end in self.runs:
            starts[first:end] = np.subtract(self.numbers[first:end], self.numbers[first])
        self.device.put(self.adam.rest_starts, starts)
        if "muon" in self.arenas:
            self.room = self.arenas["muon"]
        else:
            views = carve(self.arenas["activations"], tables["activations"])
            self.room = views.logits.reshape(-1).view(np.uint8)
        self.places = {row.name: start for row, start in zip(table, self.numbers)}

    @classmethod
    def workspace_of(cls, rows, columns, matrices, real):
        """The table of some matrices' workspace. Several ranks have equal shares of it."""
        count = cls.ranks.count if cls.ranks else 1
        return workspace_table(rows, columns, ceil_div(matrices, count) * count, real)

    def workspace(self, rows, columns, matrices):
        return carve(self.room, self.workspace_of(rows, columns, matrices, self.device.real))

    def start_step(self, learning_rate=3e-4, **more):
        """Begin a step. Muon's rate follows the same schedule."""
        super().start_step(learning_rate=learning_rate, **more)
        flags = self.flags
        rate = flags.muon_lr * learning_rate / flags.learning_rate
        momentum = flags.muon_momentum
        self.device.put(self.adam.muon, [rate, momentum, 1 - momentum])

    def set_tensors(self, tensors, kept):
        """As GPT2.set_tensors. Skips the v of a file that is not kept."""
        super().set_tensors((pair for pair in tensors if hasattr(kept[0], pair[0])), kept)

    def adamw(self, parameters, low, gradients, m, v):
        """Muon on the hidden matrices, AdamW on the rest."""
        params = parameters.view(self.device.real)
        low = None if low is None else low.view(LOW)
        grads, m, v = gradients.view(np.float32), m.view(np.float32), v.view(np.float32)
        self.update_rest(params, low, grads, m, v)
        groups = self.groups(self.config)
        for rows, columns, start, matrices in batches_of(groups, self.device.real):
            pieces = [*pieces_of(groups[rows, columns], start, matrices)]
            self.update_hidden(rows, columns, matrices, pieces, params, low, grads, m)

    def update_rest(self, params, low, grads, m, v):
        """AdamW on what is not a hidden matrix, a run of neighbours at a time. They have no gaps in
        v."""
        adam, done = self.adam, 0
        for first, end in self.runs:
            start, stop = self.numbers[first], self.numbers[end]
            n = stop - start
            self.device.launch(
                "adamw", n, params[start:stop], None if low is None else low[start:stop],
                grads[start:stop], m[start:stop], v[done : done + n], adam.rest_starts[first:end],
                adam.decayed[first:end], end - first, n, adam.settings, adam.verdict)
            done += n

    def update_hidden(self, rows, columns, matrices, pieces, params, low, grads, m):
        """Muon on some matrices of one shape."""
        device, adam = self.device, self.adam
        size = rows * columns
        work = self.workspace(rows, columns, matrices)
        shares = work.squares.shape[1]
        for part, first, count, at in pieces:
            begin, end = self.place_of(part)
            device.launch("muon_momentum", (size, count), work.x[at:], work.squares[at:],
                          m[begin:end], grads[begin:end], first, part.per, part.stride, size,
                          shares, adam.settings, adam.muon, adam.verdict)
        device.normalize(work.x, work.squares, work.scales)
        made = self.orthogonalize(work)
        scale = scale_of(rows, columns, self.flags.muon_scale)
        for part, first, count, at in reversed(pieces):
            begin, end = self.place_of(part)
            device.launch("muon_update", (size, count), params[begin:end],
                          None if low is None else low[begin:end], made[at:], first, part.per,
                          part.stride, size, scale, adam.settings, adam.muon, adam.verdict)

    def place_of(self, part):
        """(where a part's first matrix begins among all parameters, where its tensor ends)."""
        begin = self.places[part.name]
        return begin + part.first * part.columns, begin + part.layers * part.stride

    def orthogonalize(self, work):
        """The orthogonalized matrices of a workspace's x."""
        return self.device.orthogonalize(work.x, work.y, work.gram, work.poly, work.scales)


class SharedMuon:
    """The model of one of several ranks. All have the momentum, and each orthogonalizes its share
    of the matrices. Shares are equal: if the ranks do not divide the matrices, the last rank's
    share ends with some that nobody reads."""

    def orthogonalize(self, work):
        x, *memory = self.share_of(work)
        piece = self.device.orthogonalize(x, *memory)
        # into the other array: MPI forbids that the pieces lie in what they are gathered to
        via, whole = self.ranks.via, work.y if piece is x else work.x
        with via.fork():
            via.gather(piece.reshape(-1), whole.reshape(-1))
        via.join()
        return whole

    def share_of(self, work):
        """This rank's part of a workspace's arrays."""
        own = len(work.x) // self.count
        return [array[self.rank * own :][:own]
                for array in (work.x, work.y, work.gram, work.poly, work.scales)]

    def try_products(self, B, backward):
        """As Ranked.try_products, with those of the update."""
        super().try_products(B, backward)
        if backward:
            groups, real = self.groups(self.config), self.device.real
            for rows, columns, _, matrices in batches_of(groups, real):
                work = self.workspace(rows, columns, matrices)
                self.device.orthogonalize(*self.share_of(work))


class ShardedMuon:
    """The model of a rank with --zero 1, a mixin in front of SharedMuon and Sharded: it has whole
    matrices, and nothing to gather but the parameters."""

    @classmethod
    def groups(cls, c):
        return groups_of(parts_of_share(c, cls.ranks))

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        starts = Row("rest_starts", (len(tables["adam m"]) + 1,), np.uint64)
        tables["update"] = [starts if row.name == starts.name else row for row in tables["update"]]
        return tables

    @classmethod
    def workspace_of(cls, rows, columns, matrices, real):
        return workspace_table(rows, columns, matrices, real)

    def orthogonalize(self, work):
        return self.device.orthogonalize(*self.share_of(work))

    def share_of(self, work):
        return work.x, work.y, work.gram, work.poly, work.scales


def refused(flags):
    """Why --optimizer muon does not go with other flags, or ""."""
    if flags.optimizer != "muon":
        if flags.resume:  # the run's own: resume.py says what is wrong
            return ""
        useless = next((flag.name for flag in OF_MUON
                        if getattr(flags, flag.key) not in (None, flag.default)), None)
        return useless and f"{useless}: is for Muon: expected --optimizer muon too"
    if flags.moments == "bf16":
        return ("--moments bf16 --optimizer muon: rounds AdamW's moments, of which Muon has no "
                "second: expected --moments fp32")
    if flags.learning_rate == 0:
        return ("-l 0 --optimizer muon: Muon's rate follows the schedule of -l, as a multiple of "
                "it: expected -l above 0")
    return ""


OF_MUON = (
    Flag(None, "--muon-lr", "amount", 0.03, "Muon's learning rate, which follows the schedule of "
         "-l", "the update", after="--optimizer"),
    Flag(None, "--muon-momentum", "fraction", 0.95, "Muon's momentum; 0.85 is better in a "
         "run of some hundred steps", "the update",
         after="--muon-lr"),
    Flag(None, "--muon-coefficients", (*COEFFICIENTS,), "polar-express", "polar-express: "
         "orthogonalize an update in four iterations; jordan: in five, as torch.optim.Muon",
         "the update", after="--muon-momentum"),
    Flag(None, "--muon-scale", ("original", "rms"), "original", "an update's size for a matrix: "
         "original: max(1, rows/columns)^0.5; rms: 0.2 max(rows, columns)^0.5, which takes a "
         "--muon-lr like AdamW's", "the update", after="--muon-coefficients"))
FEATURE = Feature(
    "muon", lambda flags, ranks: flags.optimizer == "muon", Muon, device=batch_class,
    sources=(SOURCE,), refuses=refused,
    pairs=(Pair("zero", ShardedMuon), Pair("ranks", SharedMuon)), flags=(
        Flag(None, "--optimizer", ("adamw", "muon"), "adamw", "muon: orthogonalize the updates of "
             "the hidden matrices; AdamW updates the rest, with -l, which may be larger (8e-3)",
             "the update", must_agree=True),
        *OF_MUON))
