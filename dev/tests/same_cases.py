"""The cases of same.py, and the models and data they train on, written here in llm.c's formats."""
import itertools
import re
import struct
from typing import NamedTuple

import numpy as np

USUAL = ("-i ../../data/part_train_*.bin -j ../../data/part_val_0.bin -b 2 -t 32 -x 4 -n 2 -v 2 -m "
         "2 -s 0 -l 1e-2 -c 0.1 -u 2 -q 0.1")


class Case(NamedTuple):
    name: str
    flags: str = ""  # besides USUAL; later ones win
    # More runs, (flags, ranks): the first resumes step 2 of the run before, the next step 4, ...
    then: tuple = ()
    model: str = "gpt2"  # a file of data_files(); its name begins with the program's
    ranks: int = 1
    needs: str = ""  # cuda, or cpu
    quick: bool = False
    cxx: str = ""  # more flags of the compiler
    usual: bool = True
    fails: bool = False  # it must fail

    @property
    def folder(self):
        return re.sub(r"\W+", "_", self.name)


AGAIN = (("", 1),)
QUICK = dict(quick=True)
D3 = "-d 192"  # three micro-batches
CASES = [
    Case("help", "--help", usual=False, **QUICK),
    Case("help of Llama", "--help", usual=False, model="llama_tied"),
    Case("dry run", "--dry-run 1 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0 --recompute "
         "2", **QUICK),
    Case("dry run of Llama", "--dry-run 1 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0",
         model="llama_gqa"), Case("fp32", "--dtype fp32 -s 2 -g 8", AGAIN, **QUICK),
    Case("fp32, accumulated", f"--dtype fp32 {D3} --shuffle 1", AGAIN, **QUICK),
    Case("in order", f"--dtype fp32 {D3} --shuffle 0", AGAIN),
    Case("tf32", f"--dtype tf32 {D3}", AGAIN), Case("bf16", "--dtype bf16", AGAIN, **QUICK),
    Case("bf16, accumulated", f"--dtype bf16 {D3}", AGAIN),
    Case("bf16 as on Hopper", f"--dtype bf16 {D3}", cxx="-DAS_HOPPER -DHOPPER", needs="cpu"),
    Case("from scratch", "-e d2 -t 8 -b 1 -x 1 -n 0 -v 0 --seed 7"),
    *(Case(f"recompute {n}", f"--recompute {n} --dtype fp32 {D3}", AGAIN, **QUICK) for n in (1, 2)),
    *(Case(f"recompute {n}, bf16", f"--recompute {n} --dtype bf16 {D3}") for n in (1, 2)),
    Case("relu", "--attention relu --dtype fp32", AGAIN, **QUICK),
    Case("relu, bf16, recompute 2", f"--attention relu --dtype bf16 --recompute 2 {D3}"),
    Case("relu, recompute 1", "--attention relu --dtype fp32 --recompute 1"),
    Case("moments", f"--moments bf16 --dtype fp32 {D3}", AGAIN, **QUICK),
    Case("moments, bf16", "--moments bf16 --dtype bf16 --seed 5", AGAIN),
    Case("moments, recompute 2", "--moments bf16 --dtype bf16 --recompute 2"),
    Case("fp8", f"--dtype fp8 {D3}", AGAIN, **QUICK),
    Case("fp8, recompute 1", "--dtype fp8 --recompute 1"),
    Case("fp8, recompute 2", f"--dtype fp8 --recompute 2 {D3}", AGAIN),
    Case("fp8, moments", "--dtype fp8 --moments bf16", AGAIN),
    Case("wsd", "-k wsd -x 6 -q 0 --dtype fp32 --beta1 0.8 --beta2 0.95 --eps 1e-6 --clip 0"),
    Case("linear", "-k linear -x 6 --dtype fp32 --clip 0.5"),
    Case("constant", "-k constant --dtype fp32 -n 1 -nk 1 -nm 2"),
    Case("overfit", f"-a 1 --dtype fp32 {D3}"),
    Case("HellaSwag", "--hellaswag ../../data/hellaswag.bin -b 4 --dtype fp32"),
    Case("outliers", "-b 1 -t 3 -x 134 -n 131 -v 0 -l 1e-4 -sl 0.2 -sg 0.4 --dtype fp32", AGAIN,
         **QUICK),  # skips steps 129, 130 and 132
    Case("not finite", "--dtype fp32 -l 1e30 -x 6", fails=True),
    Case("sample", "-e ../../data/gpt2.bin --sample= --seed 1 -g 12 --temperature 0.8 --top-k 40 "
         "--dtype fp32", usual=False),
    # Llama 3
    Case("Llama, tied", f"--dtype fp32 {D3}", AGAIN, "llama_tied", **QUICK),
    Case("Llama, grouped", f"--dtype fp32 {D3} -s 4 -g 6", AGAIN, "llama_gqa", **QUICK),
    Case("Llama, bf16", f"--dtype bf16 {D3}", AGAIN, "llama_gqa"),
    Case("Llama, recompute 1", f"--recompute 1 --dtype fp32 {D3}", (), "llama_gqa"),
    Case("Llama, recompute 2", f"--recompute 2 --dtype fp32 {D3}", AGAIN, "llama_tied", **QUICK),
    Case("Llama, bf16, recompute 2", "--recompute 2 --dtype bf16", (), "llama_gqa"),
    Case("Llama, moments", "--moments bf16 --dtype bf16", AGAIN, "llama_tied"),
    Case("Llama, fp8", f"--dtype fp8 {D3}", AGAIN, "llama_gqa"),
    Case("Llama, fp8, recompute 2", "--dtype fp8 --recompute 2", (), "llama_gqa"),
    Case("Llama, relu", "--attention relu --dtype fp32 --recompute 1", (), "llama_gqa"),
    Case("Llama, two ranks", "--dtype fp32 -z 1 -d 256", (("", 2),), "llama_gqa", ranks=2),
    Case("Llama, three ranks", "--dtype fp32 -z 1", (), "llama_tied", ranks=3),
    # Ranks. A run that resumes with another number of them goes on with the next data file
    Case("two ranks", "--dtype fp32 -d 256", (("", 2),), ranks=2, **QUICK),
    Case("two ranks, zero", "--dtype fp32 -d 256 -z 1", (("", 2),), ranks=2, **QUICK),
    Case("two ranks, one micro-batch", "--dtype fp32 -z 1 -s 4 -g 4 --log-ranks 1", ranks=2),
    Case("three ranks", "--dtype fp32 -d 192", ranks=3),
    Case("three ranks, zero", "--dtype fp32 -d 384 -z 1", (("", 3),), ranks=3),
    Case("two ranks, one, two", "--dtype fp32 -x 6 -d 256", (("-z 0", 1), ("-z 1", 2)), ranks=2),
    Case("one rank, two, one", "--dtype fp32 -x 6 -d 256 --shuffle 0", (("-z 1", 2), ("-z 0", 1))),
    Case("zero, without, with", "--dtype fp32 -x 6 -z 1", (("-z 0", 2), ("-z 1", 2)), ranks=2),
    Case("bf16, two ranks, zero", "--dtype bf16 -z 1 -d 256", (("", 2),), ranks=2),
    Case("fp8, two ranks", "--dtype fp8", (("", 2),), ranks=2),
    Case("fp8, two ranks, zero", "--dtype fp8 -z 1 -d 256", (("", 2),), ranks=2),
    Case("moments, two ranks", "--moments bf16 --dtype fp32", ranks=2),
    Case("moments, two ranks, zero", "--moments bf16 --dtype fp32 -z 1", (("", 1),), ranks=2),
    Case("recompute 2, two ranks", "--recompute 2 --dtype fp32 -z 1", ranks=2),
    Case("HellaSwag, two ranks", "--hellaswag ../../data/hellaswag.bin -b 4 --dtype fp32 -x 2",
         ranks=2),
    Case("outliers, two ranks", "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 -sl 0.2 -sg 0.2 --dtype fp32",
         ranks=2), Case("outliers, two ranks, zero, moments", "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 "
                        "-sl 0.2 -sg 0.2 --dtype fp32 -z 1 --moments bf16", ranks=2),
    # Only on a GPU
    *(Case(f"{dtype}, {name}", f"--dtype {dtype} {D3} {flags}", then, needs="cuda")
      for dtype in ("fp32", "tf32", "bf16", "fp8")
      for name, flags, then in (("plain", "--plain 1", AGAIN), ("no graph", "--graph 0", ()))
      if (dtype, name) != ("fp8", "plain")),
    *(Case(f"{dtype}, heads of 128{name}", f"--dtype {dtype} {flags}", AGAIN, "gpt2_128",
           needs="cuda") for dtype, name, flags in (("bf16", "", D3),
                                                    ("bf16", ", relu", "--attention relu"),
                                 ("fp8", "", D3), ("fp32", "", ""))),
    Case("Llama, bf16, plain", "--dtype bf16 --plain 1", (), "llama_tied", needs="cuda"),
    Case("Llama, bf16, no graph", f"--dtype bf16 --graph 0 {D3}", (), "llama_gqa", needs="cuda"),
]

# ---- Models and data


def gpt2_table(maxT, V, L, NH, C, Vp):
    each = [("ln1w", C), ("ln1b", C), ("qkvw", 3 * C, C), ("qkvb", 3 * C), ("attprojw", C, C),
            ("attprojb", C), ("ln2w", C), ("ln2b", C), ("fcw", 4 * C, C), ("fcb", 4 * C),
            ("fcprojw", C, 4 * C), ("fcprojb", C)]
    return [("wte", Vp, C), ("wpe", maxT, C), *((name, L, *shape) for name, *shape in each),
            ("lnfw", C), ("lnfb", C)]


def llama_table(maxT, V, L, NH, NKV, C, multiple_of):
    H, QKV = -(-int(8 * C / 3) // multiple_of) * multiple_of, (NH + 2 * NKV) * (C // NH)
    each = [("ln1", C), ("qkv", QKV, C), ("attproj", C, C), ("ln2", C), ("fc", 2 * H, C),
            ("fcproj", C, H)]
    rows = [((f"{name}w", L, *shape), (f"{name}b", L, shape[0])) for name, *shape in each]
    return [("wte", V, C), ("lm_head", V, C), *itertools.chain(*rows), ("lnfw", C), ("lnfb", C)]


def table_of(model):
    """(size of the headers, the tensors, the type of the numbers) of a checkpoint, given its
    bytes."""
    header = struct.unpack_from("<12i", model)
    kind = "<u2" if header[1] == 5 else "<f4"
    if header[0] == 20240326:
        return 1024, gpt2_table(*header[2:8]), kind
    return 2048, llama_table(*header[2:9]), kind


def data_files(folder):
    """Write models with random weights, and files of random tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    heads = {"gpt2": [20240326, 3, 64, 300, 2, 2, 128, 384],
             "gpt2_128": [20240326, 3, 64, 300, 2, 2, 256, 384],
             "llama_tied": [20240803, 3, 64, 300, 2, 2, 1, 128, 32, 0, 3, 2],
             "llama_gqa": [20240803, 3, 64, 300, 2, 4, 2, 256, 32, 1, 3, 1]}
    for name, ints in heads.items():
        header, llama = (np.array(ints + (256 - len(ints)) * [0], "<i4").tobytes(),
                         name.startswith("llama"))
        if llama:
            header += np.array([1.0, 1e-5, 500000.0] + 253 * [0], "<f4").tobytes()
        tensors = {}
        for row, *shape in table_of(header)[1]:
            x = rng.normal(row[:2] == "ln" and row.endswith("w"), 0.05, shape).astype("<f4")
            if row == "wte" and not llama:
                x[300:] = 0  # padding
            tensors[row] = x * (not (llama and row.endswith("b")))  # Llama's biases are zeros
        if name == "llama_tied":
            tensors["lm_head"] = tensors["wte"]
        (folder / f"{name}.bin").write_bytes(header + b"".join(x.tobytes()
                                                               for x in tensors.values()))
    for name, count in (("train_0", 330), ("train_1",
                                           410), ("train_2", 270), ("val_0", 400), ("long", 32768)):
        # Some are frequent, so that there is something to learn.
        tokens = rng.zipf(1.3, count) % 300
        header = np.array([20240520, 1, count] + 253 * [0], "<i4")
        name = "long_train" if name == "long" else f"part_{name}"
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    stream, longest = [], 0
    # Questions of HellaSwag: START, bytes, index, label, 4, then the context and four endings.
    for i in range(5):
        rest = [i, i % 4, 4]
        for count in rng.integers(3, 9, 5):
            rest += [count, *rng.integers(0, 300, count)]
        stream += [65535, 4 + 2 * len(rest), *rest]
        longest = max(longest, 4 + 2 * len(rest))
    header = np.array([20240522, 1, 5, longest] + 252 * [0], "<i4")
    (folder / "hellaswag.bin").write_bytes(header.tobytes() + np.array(stream, "<u2").tobytes())
