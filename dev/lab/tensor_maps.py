"""How the copy engine of a Hopper GPU sees matrices: what cuTensorMapEncodeTiled makes of them."""
import ctypes

import numpy as np

from dev.common.devices import address_of
from prepro_tinyshakespeare import UserError

BYTES = 128  # of a map
COLUMNS = 64  # of a box: 128 bytes of bf16, which is what the swizzle is for
BFLOAT16, NO_INTERLEAVE, SWIZZLE_128, PROMOTE_256, ZEROS_BEYOND = 9, 0, 3, 3, 0  # cuda.h's numbers


def encode(device, matrix, rows):
    """A map, 128 bytes, of a matrix of bf16 whose boxes have 64 columns and so many rows."""
    (height, width), (stride, _) = matrix.shape, matrix.strides
    if device.name == "cpu":  # what dev/cpu/cuda.h reads
        return np.array([address_of(matrix), width, height, stride, COLUMNS, rows, *[0] * 10], np.uint64).view(np.uint8)
    memory = np.zeros(2 * BYTES - 1, np.uint8)
    start = -memory.ctypes.data % BYTES  # it has to be aligned
    sizes, strides = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(stride)
    box, steps = (ctypes.c_uint32 * 2)(COLUMNS, rows), (ctypes.c_uint32 * 2)(1, 1)
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(memory.ctypes.data + start), BFLOAT16, 2, ctypes.c_void_p(address_of(matrix)), sizes, strides,
        box, steps, NO_INTERLEAVE, SWIZZLE_128, PROMOTE_256, ZEROS_BEYOND)
    if status:
        raise UserError(f"cuTensorMapEncodeTiled failed with status {status} on a matrix {matrix.shape} of strides "
                        f"{matrix.strides}")
    return memory[start : start + BYTES]


def tensor_maps(device, *matrices):
    """An array on the device with the maps of these (matrix, rows of a box), one after the other. It is made when it is
    first asked for, on a stream of its own, since the current one may be recording."""
    known = vars(device).setdefault("tensor_maps", {})
    key = tuple((address_of(matrix), matrix.shape, matrix.strides, rows) for matrix, rows in matrices)
    made = known.get(key)
    if made is None:
        maps = np.concatenate([encode(device, matrix, rows) for matrix, rows in matrices])
        if device.name == "cuda":
            stream = device.cupy.cuda.Stream(non_blocking=True)
            with stream:
                made = device.cupy.asarray(maps)
            stream.synchronize()
        else:
            made = maps
        known[key] = made
    return made
