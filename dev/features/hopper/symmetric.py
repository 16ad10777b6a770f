"""Muon's orthogonalization with products of our own, symmetric.cu, on Hopper in bf16.

Most of its products, see dev/features/muon.py, have a result that is symmetric: X X' (or X' X),
polynomials of that, and products of such polynomials, since these commute. The kernels here compute
what is above the diagonal, and store it twice. Of 36 tiles of a matrix of 768 x 768 that is 21.

So products of small matrices are cheap, and iterations of a matrix that is not square can share the
large ones. With G = X X' and P = a I + b G + c G G, an iteration makes P X of X, and so P G P of G:

    G = X X'    P1 from G    G = P1 G P1    P2 from G    ..    X <- .. P2 P1 X

P has a I in it, so that P X has nothing to add. Each P G P makes the rounding errors of G up to
twelve times larger (a a), where singular values are small. Hence CHAINS: three iterations, and then
two with a new G. The result is as near to that of exact products as without chains, since X is
rounded less often.

dev/bench/time_kernels.py checks the kernels and times them beside cuBLASLt.
"""
from pathlib import Path

from dev.common import gpus
from dev.features.declare import Feature, is_fast
from dev.features.hopper.gelu_products import HEIGHT, STAGES, THREADS, WIDTH
from dev.features.muon import COEFFICIENTS
from train_gpt2 import BF16, ceil_div

SOURCE = Path(__file__).resolve().with_suffix(".cu")
SOURCES = (SOURCE.with_name("hopper.cuh"), SOURCE.with_name("turns.cuh"), SOURCE)
CHAINS = (3, 2)  # iterations for which X is multiplied once, if one side is twice the other
SINGLY = (1,) * len(COEFFICIENTS)
DTYPES = "bf16", "fp8"  # FP8 is for layers' products: the optimizer's are in bf16


def fits(*arrays):
    """Whether the kernels can multiply these, each several matrices: bf16, one matrix after
    another, and rows that TMA can address."""
    return all(x.dtype == BF16 and x.flags.c_contiguous and x.shape[-1] % 8 == 0 for x in arrays)


def pairs_of_tiles(matrices, side):
    """How many pairs of tiles are computed, one for each of two blocks: as in symmetric.cu."""
    panels = ceil_div(side, HEIGHT)
    bands = panels // 2
    return matrices * bands * (panels - bands) + ceil_div(matrices * (panels - bands), 2)


def multiply(device, out, left, right=None, factor=1.0, add=None, share=0.0, diagonal=0.0,
             backwards=False):
    """out[i] = factor * left[i] @ right[i].T + share * add[i] + diagonal * I, for arrays of as many
    matrices. right is left, or each is symmetric and they commute; add, if there is one, is
    symmetric. If left has more rows than columns, it is left[i].T @ right[i] instead. backwards:
    whether to begin with the last matrix."""
    right = left if right is None else right
    n, rows, columns = left.shape
    arrays = out, left, right, out if add is None else add
    maps = [device.tensor_map(x.reshape(-1, x.shape[2]), *x.shape[1:]) for x in arrays]
    device.launch("matmul_symmetric_of_columns" if rows > columns else "matmul_symmetric",
                  2 * min(device.multiprocessors // 2, pairs_of_tiles(n, min(rows, columns))),
                  *maps, factor, share, diagonal, int(add is not None), int(right is left),
                  int(backwards), n, *sorted((rows, columns)), threads=THREADS,
                  shared=2 * (STAGES * (HEIGHT + WIDTH) * 64 + 2 * HEIGHT * WIDTH))


class OwnSymmetric:
    """A mixin in front of muon.BatchOnGpu: matrices that fit are multiplied by our kernels."""
    smallest = 512  # side; launches of smaller products take longer than cuBLASLt's

    def orthogonalize(self, x, y, gram, poly):
        """As muon.Orthogonal's."""
        side, length = sorted(x.shape[1:])
        if not (self.hopper and side >= self.smallest and fits(x, gram)):
            return super().orthogonalize(x, y, gram, poly)
        coefficients = iter(COEFFICIENTS)
        for iterations in CHAINS if length >= 2 * side else SINGLY:
            multiply(self, gram, x, backwards=True)  # the last x may still be in L2
            some = [next(coefficients) for _ in range(iterations)]
            by = self.polynomials(some, gram, poly, y.reshape(-1))
            self.matmul_batch(y, *((x, by) if x.shape[1] > side else (by, x)))
            x, y = y, x
        return x

    def polynomials(self, coefficients, gram, poly, memory):
        """The product of the polynomials of successive iterations, one for each of the
        coefficients: gram or poly, both (n,side,side). memory: two more of these, flat, if there
        are several coefficients."""
        size, shape = gram.size, gram.shape
        free = [poly] if len(coefficients) == 1 else [
            memory[size : 2 * size].reshape(shape), memory[:size].reshape(shape), poly]
        whole = p = free.pop()
        for i, (a, b, c) in enumerate(coefficients):
            if i > 0:
                half = free.pop()
                multiply(self, half, p, gram)
                multiply(self, gram, half, p)
                if p is not whole:
                    free.append(p)
                p = half
            multiply(self, p, gram, None, c, gram, b, a)
            if i > 0:
                last = i == len(coefficients) - 1
                product = gram if last else free.pop()
                multiply(self, product, p, whole)
                free.append(whole)
                whole = product
        return whole


FEATURE = Feature(
    "symmetric products",
    lambda flags, ranks: flags.optimizer == "muon" and is_fast(flags) and flags.dtype in DTYPES,
    device=OwnSymmetric, sources=SOURCES,
    compiled=lambda flags, c: gpus.capability() == 90 and c.C // c.NH in range(64, 129, 8),
    chapter="symmetric products")
