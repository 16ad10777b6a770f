"""Limits of seven GPUs, for programs that run without one: shared memory, threads, blocks; and
which GPU is here."""
import contextlib
import ctypes
from typing import NamedTuple

KB, MB, GB = 2**10, 2**20, 2**30
REGISTERS = 65536  # of a multiprocessor, and so the most that a block can have
STATIC = 48 * KB  # bytes of shared memory that a block may declare


class Gpu(NamedTuple):
    """A GPU. NVIDIA's CUDA programming guide lists these figures for each compute capability,
    except the last three, which are the GPU's own."""
    name: str
    of_block: int  # bytes of shared memory that a block may ask for
    of_multiprocessor: int  # bytes of shared memory
    reserved: int  # bytes of these that the driver takes for each block
    threads: int  # of a multiprocessor
    blocks: int  # that a multiprocessor can hold
    multiprocessors: int
    l2: int  # bytes
    memory: int  # bytes


GPUS = {  # by compute capability
    "7.5": Gpu("T4", 64 * KB, 64 * KB, 0, 1024, 16, 40, 4 * MB, 15 * GB),
    "8.0": Gpu("A100", 163 * KB, 164 * KB, KB, 2048, 32, 108, 40 * MB, 40 * GB),
    "8.6": Gpu("RTX 3060", 99 * KB, 100 * KB, KB, 1536, 16, 28, 3 * MB, 12 * GB),
    "8.9": Gpu("RTX 4060", 99 * KB, 100 * KB, KB, 1536, 24, 24, 24 * MB, 8 * GB),
    "9.0": Gpu("H100", 227 * KB, 228 * KB, KB, 2048, 32, 132, 50 * MB, 80 * GB),
    "10.0": Gpu("B200", 227 * KB, 228 * KB, KB, 2048, 32, 148, 126 * MB, 180 * GB),
    "12.0": Gpu("RTX 5070", 99 * KB, 100 * KB, KB, 1536, 24, 48, 48 * MB, 12 * GB),
}


def digits(capability):
    """"86" for "8.6", as CuPy and NVRTC write it."""
    return capability.replace(".", "")


def attributes_of(gpu):
    """A GPU's figures by the names that CuPy gives them."""
    return {"MaxSharedMemoryPerBlockOptin": gpu.of_block,
            "MaxSharedMemoryPerMultiprocessor": gpu.of_multiprocessor,
            "ReservedSharedMemoryPerBlock": gpu.reserved,
            "MaxThreadsPerMultiProcessor": gpu.threads,
            "MaxBlocksPerMultiprocessor": gpu.blocks,
            "MultiProcessorCount": gpu.multiprocessors, "L2CacheSize": gpu.l2}


def registers_of_block(used, threads):
    """The registers of a block: a warp gets them in steps of 256, and four warps at a time."""
    warps = -(-threads // 128) * 4
    return warps * -(-32 * used.registers // 256) * 256


def blocks_that_fit(gpu, used, threads, dynamic=0):
    """How many blocks fit on a multiprocessor at the same time; 0: a launch fails. used: a kernel's
    registers and static shared memory (see nvrtc.py)."""
    warps, shared = -(-threads // 32), used.shared + dynamic
    if (registers_of_block(used, threads) > REGISTERS or used.shared > STATIC
            or shared > gpu.of_block or threads > 1024):
        return 0
    of_warp = -(-32 * max(used.registers, 1) // 256) * 256
    by_registers = REGISTERS // 4 // of_warp * 4 // warps  # a quarter has a quarter of them
    by_shared = gpu.of_multiprocessor // (-(-shared // 128) * 128 + gpu.reserved or 1)
    return min(gpu.blocks, gpu.threads // 32 // warps, by_registers, by_shared)


def capability():
    """The first GPU's compute capability as NVIDIA's driver reports it, 75 for 7.5; 0 without a
    GPU. Importing CuPy would take a second."""
    found = {75: ctypes.c_int(), 76: ctypes.c_int()}  # the driver's numbers for 7 and 5 of 7.5
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        for attribute, value in found.items():
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
    return 10 * found[75].value + found[76].value


def has_gpu():
    return capability() > 0
