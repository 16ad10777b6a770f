"""Muon's orthogonalization with products of our own, symmetric.cu, on Hopper in bf16.

Most of its products, see dev/features/muon.py, have a result that is symmetric: X X' (or X' X),
polynomials of that, and products of such polynomials, since these commute. The kernels here compute
what is above the diagonal, 21 of 36 tiles of a matrix of 768 x 768. Each other reads no more than
that; only what cuBLASLt multiplies is stored on both sides.

So products of small matrices are cheap, and iterations of a matrix that is not square can share the
large ones. With G = X X' and P = a I + b G + c G G, an iteration makes P X of X, and so P G P of G:

    G = X X'    P1 from G    G = P1 G P1    P2 from G    ..    X <- .. P2 P1 X

P has a I in it, so that P X has nothing to add. Each P G P makes the rounding errors of G
larger where singular values are small, up to a a times: 66 and 15 with Polar Express's
coefficients, 12 with Jordan's. Hence chains of two iterations (if their number is odd, one of
three), each with a new G. The result is as near to that of exact products as without chains, since
X is rounded less often.

X is not divided by its norm, which would be a pass over memory. The first G is scaled instead, in
fp32, before it is rounded: G = X X' / norm^2, and the polynomial that multiplies X is P / norm.

dev/tests/hopper.py has what their tests check with.
"""
from dev.features.feature import Feature, is_fast, is_hopper, kernels_of
from dev.features.hopper.gelu_products import THREADS
from dev.features.muon import SHARE
from train_gpt2 import BF16, ceil_div

SOURCE = kernels_of(__file__)
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
HEIGHT = WIDTH = 128  # of a tile of the result
STAGES = 6  # of 64 of what is summed, that fit shared memory beside one result
BLOCKS_OF_NORM = 4  # of a matrix: more than one only for the few that are divided after all
DTYPES = "bf16", "fp8"  # FP8 is for layers' products: the optimizer's are in bf16


def pairs_of_tiles(matrices, side):
    """How many pairs of tiles are computed, one for each of two blocks: as in symmetric.cu."""
    panels = ceil_div(side, HEIGHT)
    bands = panels // 2
    return matrices * bands * (panels - bands) + ceil_div(matrices * (panels - bands), 2)


def chains_of(iterations, side, length):
    """The numbers of successive iterations for which X is multiplied once."""
    chains = max(1, iterations // 2) if length >= 2 * side else iterations
    each, more = divmod(iterations, chains)
    return [each + (i < more) for i in range(chains)]


def launch(device, name, out, arrays, *args):
    """A kernel that makes out (n,side,side), with tensor maps of out and these arrays."""
    n, side, _ = out.shape
    maps = [device.tensor_map(x.reshape(-1, x.shape[2]), *x.shape[1:]) for x in (out, *arrays)]
    device.launch(name, 2 * min(device.multiprocessors // 2, pairs_of_tiles(n, side)), *maps,
                  *args, threads=THREADS,
                  shared=2 * (STAGES * (HEIGHT + WIDTH) * 64 + HEIGHT * WIDTH))


def multiply_gram(device, out, x, scales=None):
    """out[i] = s^2 x[i] @ x[i].T, or s^2 x[i].T @ x[i] if x[i] has more rows than columns; on and
    above the diagonal. s: scales[i], in fp32, or 1. Begins with the last matrix: the last x may
    still be in L2."""
    rows, columns = x.shape[1:]
    launch(device, "matmul_gram_of_columns" if rows > columns else "matmul_gram", out, [x], scales,
           1, len(x), *sorted((rows, columns)))


def multiply(device, out, left, right=None, factor=1.0, add=None, share=0.0, diagonal=0.0,
             both_sides=False, scales=None):
    """out[i] = s (factor * left[i] @ right[i] + share * add[i] + diagonal * I), for arrays
    (n,side,side). right is left, or they commute. All are symmetric: they are read on and above the
    diagonal, and so is out stored, unless both_sides. s: scales[i], in fp32, or 1."""
    right = left if right is None else right
    launch(device, "matmul_symmetric", out, [left, right, out if add is None else add], scales,
           factor, share, diagonal, int(add is not None), int(right is left), int(both_sides),
           *out.shape[:2])


class OwnSymmetric:
    """A mixin in front of muon.BatchOnGpu: matrices that fit are multiplied by our kernels."""
    smallest = 512  # side; launches of smaller products take longer than cuBLASLt's

    def multiplies(self, rows, columns):
        """Whether our kernels multiply matrices of this shape: TMA addresses rows of X and of G."""
        return (self.hopper and self.real == BF16 and min(rows, columns) >= self.smallest
                and rows % 8 == columns % 8 == 0)

    def flops_of(self, n, rows, columns):
        """As muon.Orthogonal's: what the kernels here compute of symmetric products."""
        if not self.multiplies(rows, columns):
            return super().flops_of(n, rows, columns)
        side, length = sorted((rows, columns))
        chains = chains_of(len(self.coefficients), side, length)
        of_sides = sum(iterations + 3 * (iterations - 1) for iterations in chains)
        tiles = 2 * pairs_of_tiles(n, side) * HEIGHT * WIDTH
        return (2 * tiles * (len(chains) * length + of_sides * side)
                + 2 * n * side * side * length * len(chains))

    def normalize(self, x, squares, scales):
        """As muon.Orthogonal's, but x may stay as it is: then scales are 1 / the norms."""
        if not self.multiplies(*x.shape[1:]):
            return super().normalize(x, squares, scales)
        size = min(x[0].size, BLOCKS_OF_NORM * SHARE)
        self.launch("muon_normalize", (size, len(x)), x, scales, squares, x[0].size,
                    squares.shape[1], 1)

    def orthogonalize(self, x, y, gram, poly, scales):
        """As muon.Orthogonal's."""
        if not self.multiplies(*x.shape[1:]):
            return super().orthogonalize(x, y, gram, poly, scales)
        side, length = sorted(x.shape[1:])
        coefficients = iter(self.coefficients)
        for iterations in chains_of(len(self.coefficients), side, length):
            multiply_gram(self, gram, x, scales)
            some = [next(coefficients) for _ in range(iterations)]
            by = self.polynomials(some, gram, poly, y.reshape(-1), scales)
            self.matmul_batch(y, *((x, by) if x.shape[1] > side else (by, x)))
            x, y = y, x
            scales = None
        return x

    def polynomials(self, coefficients, gram, poly, memory, scales):
        """The product of the polynomials of successive iterations, one for each of the
        coefficients, times scales: gram or poly, both (n,side,side), the result on both sides.
        memory: two more of these, flat, if there are several coefficients."""
        size, shape = gram.size, gram.shape
        free = [poly] if len(coefficients) == 1 else [
            memory[size : 2 * size].reshape(shape), memory[:size].reshape(shape), poly]
        whole = p = free.pop()
        result = dict(both_sides=True, scales=scales)
        for i, (a, b, c) in enumerate(coefficients):
            last = i == len(coefficients) - 1
            if i > 0:
                half = free.pop()
                multiply(self, half, p, gram)
                multiply(self, gram, half, p)
                if p is not whole:
                    free.append(p)
                p = half
            multiply(self, p, gram, None, c, gram, b, a, **result if i == 0 and last else {})
            if i > 0:
                product = gram if last else free.pop()
                multiply(self, product, p, whole, **result if last else {})
                free.append(whole)
                whole = product
        return whole


FEATURE = Feature(
    "symmetric products",
    lambda flags, ranks: flags.optimizer == "muon" and is_fast(flags) and flags.dtype in DTYPES,
    device=OwnSymmetric, sources=SOURCES,
    compiled=is_hopper, chapter="symmetric products")
