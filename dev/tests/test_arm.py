"""The loops of dev/cpu/kernels.cpp on ARM: every call of a training step is made again by a program
for aarch64, with the same memory before it, and leaves the same memory, up to rounding.

    apt install g++-aarch64-linux-gnu qemu-user-static   # Debian, Ubuntu
    pytest dev/tests/test_arm.py -m longest
"""
import shutil
import subprocess
from unittest import mock

import numpy as np
import pytest

from dev.cpu.device import Cpu, loops_of, read_loops
from dev.cpu.host import FLAGS
from dev.features.base import GPT2
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import check, normal, words
from train_gpt2 import BF16, pack_batch, to_float, whole_shape

COMPILER, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
# {dtype: {an array: (what it stores, the limit of errors, by the largest number written)}}. int16_t
# is the lower half of a parameter, often a tiny one, to which AdamW adds.
LIMITS = {"fp32": {}, "bf16": {"real*": (BF16, 1e-2), "int16_t*": (np.int16, 0.1)}}
OWN = "-march", "-mprefer", "-shared"  # flags for this processor, and for a library
PROGRAM = """
#include <cstdio>
static char *room = (char*)aligned_alloc(64, SIZE);
static FILE *before, *after;
static void read() { if (fread(room, 1, SIZE, before) != SIZE) abort(); }
static void write() { fwrite(room, 1, SIZE, after); }
int main(int, char** files) {
    before = fopen(files[1], "rb");
    after = fopen(files[2], "wb");
"""


class Recorded(Cpu):
    """Notes each call of a loop, and all of its memory before and after it."""

    def __init__(self, *args):
        self.room, self.used, self.calls = np.zeros(2**22, np.uint8), 0, []
        super().__init__(*args)
        self.text = "".join(path.read_text("utf-8") for path in map(loops_of, self.sources)
                            if path.exists())
        types = read_loops(self.text)
        for name, loop in self.loops.items():
            self.loops[name] = loop._replace(function=self.noting(loop.function, types[name]))
        self.multiply = self.noting(self.library.multiply, types["multiply"])

    def empty(self, nbytes):
        begin, self.used = self.used, self.used + -(-nbytes // 64) * 64
        assert self.used <= self.room.size, "make room larger"
        return self.room[begin : begin + nbytes]

    def noting(self, function, types):
        def call(*args):
            texts, arrays, before = [], [], self.room.copy()
            for kind, value in zip(types, args):
                if "*" in kind and not value:
                    texts.append("nullptr")
                elif "*" in kind:
                    kind, at = kind[: kind.rindex("*") + 1], value - self.room.ctypes.data
                    assert 0 <= at < self.used, "an array of another memory"
                    arrays.append((at, kind))
                    texts.append(f"({kind})(room + {at})")
                elif "float" in kind:
                    texts.append(f"{np.float32(value).item().hex()}f")
                else:
                    texts.append(str(int(value)))
            function(*args)
            line = f"{function.__name__}({', '.join(texts)});"
            self.calls.append((line, sorted(arrays), before, self.room.copy()))
        return call

    def matmul(self, *args, **options):
        with mock.patch.object(self, "library", mock.Mock(multiply=self.multiply)):
            super().matmul(*args, **options)


@pytest.mark.longest
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("Model, sizes", ((GPT2, {}), (Llama3, dict(NKV=2))))
def test_arm(folder, dtype, Model, sizes):
    if not (shutil.which(COMPILER) and shutil.which(QEMU)):
        pytest.skip(f"needs {COMPILER} and {QEMU}")
    c = Model.Config(L=1, maxT=32, V=91, Vp=96, NH=4, C=64, **sizes)
    device = Recorded(dtype, c)
    model = Model(c, device, 2, 29)
    model.set_parameters([(row.name, np.float32(0.2 * normal(*whole_shape(row))))
                          for row in c.parameter_table()])
    model.train_step(pack_batch(*words(c.V, 2, 2, 29)), learning_rate=1e-2, clip=1.0)

    calls = "\n".join(f"    read(); {line} write();" for line, *_ in device.calls)
    (folder / "calls.cpp").write_text(
        f"{device.text}{PROGRAM.replace('SIZE', str(device.used))}{calls}\n}}\n")
    flags = [flag for flag in FLAGS if not flag.startswith(OWN)]
    subprocess.run([COMPILER, *flags, "-static", *["-DBF16"] * (dtype == "bf16"), "calls.cpp",
                    "-o", "calls"], cwd=folder, check=True)
    np.concatenate([before[: device.used] for *_, before, _ in device.calls]).tofile(
        folder / "before")
    subprocess.run([QEMU, "calls", "before", "after"], cwd=folder, check=True)
    found = np.fromfile(folder / "after", np.uint8).reshape(len(device.calls), device.used)
    for (line, arrays, *memories), memory in zip(device.calls, found):
        for (begin, kind), (end, _) in zip(arrays, [*arrays[1:], (device.used, "")]):
            stored, limit = LIMITS[dtype].get(kind.removeprefix("const "), (np.float32, 1e-5))
            old, wish, got = (x[begin:end].view(stored) for x in (*memories, memory))
            bits = f"u{old.itemsize}"
            written = old.view(bits) != wish.view(bits)
            other = written | (got.view(bits) != wish.view(bits))
            error = np.abs(np.float64(to_float(got[other])) - to_float(wish[other])).max(initial=0)
            largest = np.abs(to_float(wish[written])).max(initial=0)
            check(f"{line} {kind}", error <= limit * largest, (error, largest))
