"""Test llama3.cu and train_llama3.py against formulas in NumPy and tensors dumped from PyTorch.

    pytest dev/tests/test_llama3.py  # on the CPU, and on a GPU if there is one
    pytest dev/tests/test_llama3.py -k bf16                       # in one dtype
    pytest dev/tests/test_llama3.py -k model --checkpoint FILE --state FILE  # of torch_reference.py
    python -m dev.lab rope_forward --check                        # only one kernel, for a debugger

The limits, and the way that kernels are tested, are those of test_trainer.py, which tests those of
kernels.cu.
"""
import dataclasses
import functools
import os

import numpy as np
import pytest

from dev.common.config import Config, draw_parameters, read_parameters
from dev.lab.formulas import drmsnorm, dswiglu, rmsnorm, swiglu
from dev.lab.ladder import stored
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests.checks import (EXACT, TINY, check, check_refusal, fast, finite_difference,
                              header_refusal, normal)
from dev.tests.models import (FIXTURES, LIMITS, check_dump, check_kernels, check_launched,
                              device_of, dtypes_of, write_checkpoint)
from dev.tests.steps import check_steps
from dev.tests.trainings import (LLAMA, WAYS, check_error, place_of, ran, same_bits,
                                 two_token_files)
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import BF16, to_float

# ---- Gradients and kernels


@fast
def test_finite_differences():
    yield finite_difference("rmsnorm", *(functools.partial(f, 0.1) for f in (rmsnorm, drmsnorm)),
                            normal(5, 32), normal(32))
    yield finite_difference("swiglu", swiglu, dswiglu, 3 * normal(5, 64))


# The kernels of llama3.cu. Grouped-query attention is in kernels.cu, and test_trainer.py tests it.
KERNELS = ("rmsnorm_forward", "rmsnorm_again", "rmsnorm_backward", "rope_table", "rope_forward",
           "rope_backward",
           "swiglu_forward", "swiglu_backward")
# C and NH: rows of every length, and heads of 32, 2, 6, 64, 128 and 80 channels. The first are
# SMALL_MODEL's.
COMPILED_FOR = ((64, 2), (32, 16), (96, 16), (768, 24), (1600, 25), (2112, 33), (4096, 32),
                (8192, 64), (160, 2))


# ---- The whole model against dumps, and its steps

GQA, TIED = FIXTURES / "llama_gqa.bin", FIXTURES / "llama_tied.bin"


@pytest.mark.parametrize("dtype", LIMITS)
def test_model(device_name, dtype, pytestconfig):
    """Each kernel, the dumps that are here, and steps of a small model."""
    if dtype not in dtypes_of(device_name):
        pytest.skip(f"this GPU has no {dtype}")
    state = pytestconfig.option.state
    if not state:
        check_kernels(device_name, dtype, KERNELS, COMPILED_FOR, architecture=Llama3)
    for plain in (1, 0) if device_name == "cuda" else (1,):
        where = device_name, dtype, plain, Llama3
        if state:
            check_dump(where, pytestconfig.option.checkpoint, state)
            continue
        for checkpoint in (GQA, TIED):
            check_dump(where, checkpoint,
                       checkpoint.with_name(f"{checkpoint.stem}_debug_state.bin"), fp32_bound=1e-5)
        check_steps(*where)
    if not state and dtype != "tf32":  # whose kernels are fp32's: only products differ
        check_launched(Config3.SOURCES[1:])


# ---- Sizes, files, refusals, the command line


@fast
def test_sizes(device_name, folder):
    """The numbers of parameters are Meta's or, for small models, were counted by hand."""
    for name, H, count in (("llama3.1:8B", 14336, 8030261248), ("llama3.2:3B", 8192, 3212749824),
                           ("llama3.2:1B", 8192, 1235814400), ("llama3:d12", 2048, 114150144),
                           ("d1", 256, 64 * (50304 + 2 + 192 + 64 + 512 + 256 + 1))):
        c = Config3.from_descriptor(name)
        c.check(name)
        check(f"H of {name}", c.H == H, f"{c.H}")
        found = sum(row.size for row in c.parameter_table())
        check(f"parameters of {name}", found == count, f"{found:,}")
    heads = [Config3.from_descriptor(f"llama3:d{L}").NKV for L in (1, 2, 3, 6, 12, 24, 36, 48)]
    check("key-value heads of d1 to d48", heads == [1, 1, 1, 2, 4, 4, 5, 5], f"{heads}")


def format_b(c, tensors, version=3):
    """The bytes of a checkpoint of llm.c's branch llama3, put together by hand. tensors: {name:
    fp32 array}."""
    ints, floats = np.zeros(256, "<i4"), np.zeros(256, "<f4")
    ints[:12] = (20240803, version, c.maxT, c.V, c.L, c.NH, c.NKV, c.C, c.multiple_of, c.scaled, 3,
                 c.minor)
    floats[:3] = c.ffn_multiplier, c.eps, c.theta
    L, C, H, QKV = c.L, c.C, c.H, (c.NH + 2 * c.NKV) * (c.C // c.NH)
    order = ("wte", "lm_head", "ln1w", (L, C), "qkvw", (L, QKV), "attprojw", (L, C), "ln2w", (L, C),
             "fcw", (L, 2 * H),
             "fcprojw", (L, C), "lnfw", (C,))
    numbers = [np.zeros(x, np.float32) if isinstance(x, tuple) else tensors[x] for x in order]
    return ints.tobytes() + floats.tobytes() + b"".join(
        (stored(x, BF16) if version == 5 else np.float32(x)).tobytes() for x in numbers)


def format_a(c, tensors):
    """The bytes of a checkpoint of llm.c's master, which keeps up and gate apart and truncates
    floats to integers."""
    ints = np.zeros(256, "<i4")
    ints[:16] = (20240803, 3, c.maxT, c.V, c.L, c.NH, c.NKV, c.C, int(c.ffn_multiplier),
                 c.multiple_of, int(c.eps), int(c.theta), c.scaled, 4, 3, c.minor)
    up, gate = tensors["fcw"][:, : c.H], tensors["fcw"][:, c.H :]
    names = "wte", "ln1w", "qkvw", "attprojw", "ln2w", up, gate, "fcprojw", "lnfw", "lm_head"
    return ints.tobytes() + b"".join(np.float32(tensors[x] if isinstance(x, str) else x).tobytes()
                                     for x in names)


def test_files(device_name, folder):
    """Tensors come back as they were written, in both formats, and memory adds nothing but the
    padding."""
    path, copy = folder / "model.bin", folder / "copy.bin"
    for tied in (False, True):
        c = Config3(maxT=40, V=257, L=2, NH=2, C=64, NKV=1, multiple_of=32, theta=10000.0,
                    minor=1 + tied, tied=tied)
        tensors = {name: np.float32(normal(*shape)) for name, *shape in (
            ("wte", 257, 64), ("lm_head", 257, 64), ("ln1w", 2, 64), ("qkvw", 2, 128, 64),
            ("attprojw", 2, 64, 64),
            ("ln2w", 2, 64), ("fcw", 2, 2 * c.H, 64), ("fcprojw", 2, 64, c.H), ("lnfw", 64))}
        if tied:
            tensors["lm_head"] = tensors["wte"]
        for dtype, version in (("fp32", 3), ("bf16", 5)):
            if dtype not in dtypes_of(device_name):
                continue
            device = device_of(device_name, dtype, 64, 2, True, Llama3, group=2)
            model, whole = Llama3(c, device, 1, 1), format_b(c, tensors, version)
            path.write_bytes(whole)
            found = Config3.from_file(path)
            check(f"{dtype} {tied=}: its config", found == c, f"{found}")
            model.set_parameters(read_parameters(path, found))
            write_checkpoint(copy, model)
            check(f"{dtype} {tied=}: what was read, written again", copy.read_bytes() == whole)
            for name, array in {"wte": model.params.wte, "lm_head": model.params.lm_head}.items():
                array = to_float(device.get(array))
                yield (f"{dtype} {tied=}: {name}", array[:257],
                       to_float(stored(tensors[name], device.real)), EXACT)
                yield (f"{dtype} {tied=}: padding of {name}", array[257:],
                       np.zeros((127, 64), np.float32), EXACT)
        path.write_bytes(format_a(c, tensors))
        model = Llama3(c, device_of(device_name, "fp32", 64, 2, True, Llama3, group=2), 1, 1)
        check(f"{tied=}: the config of format A", Config3.from_file(path) == c)
        model.set_parameters(read_parameters(path, c))
        write_checkpoint(copy, model)
        check(f"{tied=}: format A, written as format B", copy.read_bytes() == format_b(c, tensors))
        drawn = dict(draw_parameters(c, 1))
        check(f"{tied=}: what is drawn",
              drawn.keys() == tensors.keys() - ({"lm_head"} if tied else set()))
        check(f"{tied=}: its padding",
              not any(drawn[name][257:].any() for name in drawn.keys() & {"wte", "lm_head"}))
    fraction = dataclasses.replace(c, ffn_multiplier=1.3)
    tensors["fcw"], tensors["fcprojw"] = (np.zeros((2, 2 * fraction.H, 64)),
                                          np.zeros((2, 64, fraction.H)))
    path.write_bytes(format_a(fraction, tensors))
    check_refusal("format A", "ffn_dim_multiplier = 1.* cut off", Config3.from_file, path)
    check_refusal("a GPT-2's", "is a GPT-2 checkpoint, which train_gpt2.py trains .-e.; expected a "
                  "Llama 3 checkpoint: dev/tools/convert.py", Config3.from_file, TINY)
    check_refusal("for GPT-2", header_refusal((20240803, 3), Config.FILE), Config.from_file, GQA)


@fast
def test_bad_files(device_name, folder):
    """Each change to a good file is refused in one line that says what is wrong."""
    path, whole = folder / "file.bin", np.frombuffer(GQA.read_bytes(), "<i4")
    # The index of one of ln1b's numbers, from the start of the file.
    bias = 512 + 2 * 331 * 96 + 2 * 96 + 5
    ratio = np.float32([np.nan, 0, -1, 1e30, 2]).view(np.int32)
    for wish, index, number, *cut in (
            ("NH to be divisible by NKV", 6, 4), ("divisible by NKV", 6, 0),
            ("divisible by NKV", 6, -2),
            ("C to be divisible by NH", 5, 7), ("an even number of channels", 5, 32),
            ("sizes from 1", 3, -1),
            ("sizes from 1", 4, 2**30), ("multiple of 32", 7, 108), ("H, by ffn_multiplier", 8, 0),
            ("H, by ffn_multiplier", 8, 1),
            *(("H, by ffn_multiplier", 256, int(x)) for x in ratio[:4]),
            ("719,360 bytes; expected 1,647,360", 256, int(ratio[4])),
            ("eps between 0 and 1", 257, int(ratio[1])),
            ("a theta above 1", 258, int(ratio[0])), ("a scaling of RoPE", 9, -1),
            ("C of at most 8,192", 7, 96 * 96),
            ("a Llama 2.1; expected a Llama 3", 10, 2),
            ("ln1b is not zero", bias, 1), ("719,360 bytes; expected 720,128", 3, 332),
            ("truncated", 0, 20240803, 1500), ("719,360 bytes; expected 718,592", 3, 330),
            (header_refusal((20240803, 4), Config3.FILE), 1, 4)):
        changed = whole.copy()
        changed[index] = number
        path.write_bytes(changed.tobytes()[: cut[0] if cut else None])
        check_refusal(f"file with {number} at {index}", wish, Config3.from_file, path)
    check_refusal("descriptor", "llama3:d400: .* C of at most 8,192", Config3.from_descriptor,
                  "llama3:d400")
    for name in ("llama3:d0", "llama3.1:70B", "gpt2"):
        check_refusal("descriptor", f"-e {name}: expected .*llama3.2:1B.*llama3:d12",
                      Config3.from_descriptor, name)


def test_command_line(device_name, folder):
    """Two runs of train_llama3.py give the same bits, and other ways of computing nearly the same.
    A mistake is reported in one line."""
    two_token_files(folder)
    os.chdir(folder)
    write_tokens(folder / "larger.bin", [5] * 9 + [331] * 90)
    dtypes = [dtype for dtype in ("fp32", "bf16") if dtype in dtypes_of(device_name)]
    yield from same_bits(device_name, folder, LLAMA, GQA, Config3, dtypes, *WAYS)
    tiny = ("--device", place_of(device_name), "-e", GQA, "-i", "tokens.bin", "-j", "tokens.bin",
            "-b", 2, "-x", 3, "-s", 0)
    ran(*tiny, "-e", "llama3:d1", "-t", 9, program=LLAMA)
    for wish, *flags in (("is a GPT-2 checkpoint, which train_gpt2.py", "-e", TINY),
                         ("-e d1.5: expected", "-e", "d1.5"),
                         ("larger.bin: token 9 is 331; expected .* 331", "-i", "larger.bin")):
        check_error(wish, *tiny, "-t", 8, *flags, program=LLAMA)
