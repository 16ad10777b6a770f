"""The cases of same.py, and the models and data they train on."""
import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.common.config import Config, checkpoint_parts, draw_parameters
from dev.llama3.train_llama3 import Config3
from dev.tests.trainings import file_of, random_examples
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import replace_file

USUAL = ("-i ../../data/part_train_*.bin -j ../../data/part_val_0.bin -b 2 -t 32 -x 4 -n 2 -v 2 -m "
         "2 -s 0 -l 1e-2 -c 0.1 -u 2 -q 0.1 --dtype fp32")


class Case(NamedTuple):
    name: str
    flags: str = ""  # besides USUAL; later ones win
    # More runs, (flags, ranks): the first resumes step 2 of the run before, the next step 4, ...
    then: tuple = ()
    model: str = "gpt2"  # a file of data_files(); its name begins with the program's
    ranks: int = 1
    needs: str = ""  # cuda, or cpu
    cxx: str = ""  # more flags of the compiler
    usual: bool = True
    fails: bool = False  # it must fail


AGAIN = (("", 1),)
D3 = "-d 192"  # three micro-batches
DRY_RUN = "--dry-run 1 --dtype bf16 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0"
SAMPLE = ("-e ../../data/gpt2.bin --sample= --seed 1 -g 12 --temperature 0.8 --top-k 40 "
          "--dtype fp32")
OUTLIERS = "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 -sl 0.2 -sg 0.2"
CASES = [
    Case("help", "--help", usual=False),
    Case("help of Llama", "--help", usual=False, model="llama_tied"),
    Case("dry run", f"{DRY_RUN} --recompute 2"),
    Case("dry run of Llama", DRY_RUN, model="llama_gqa"),
    Case("fp32", "-s 2 -g 8", AGAIN),
    Case("fp32, accumulated", f"{D3} --shuffle 1", AGAIN),
    Case("in order", f"{D3} --shuffle 0", AGAIN),
    Case("tf32", f"--dtype tf32 {D3}", AGAIN),
    Case("bf16", "--dtype bf16", AGAIN),
    Case("bf16, accumulated", f"--dtype bf16 {D3}", AGAIN),
    Case("bf16 as on Hopper", f"--dtype bf16 {D3}", cxx="-DAS_HOPPER -DHOPPER", needs="cpu"),
    Case("from scratch", "--dtype bf16 -e d2 -t 8 -b 1 -x 1 -n 0 -v 0 --seed 7"),
    *(Case(f"recompute {n}", f"--recompute {n} {D3}", AGAIN) for n in (1, 2)),
    *(Case(f"recompute {n}, bf16", f"--recompute {n} --dtype bf16 {D3}") for n in (1, 2)),
    Case("relu", "--attention relu", AGAIN),
    Case("relu, bf16, recompute 2", f"--attention relu --dtype bf16 --recompute 2 {D3}"),
    Case("relu, recompute 1", "--attention relu --recompute 1"),
    Case("moments", f"--moments bf16 {D3}", AGAIN),
    Case("moments, bf16", "--moments bf16 --dtype bf16 --seed 5", AGAIN),
    Case("moments, recompute 2", "--moments bf16 --dtype bf16 --recompute 2"),
    Case("fp8", f"--dtype fp8 {D3}", AGAIN),
    Case("fp8, recompute 1", "--dtype fp8 --recompute 1"),
    Case("fp8, recompute 2", f"--dtype fp8 --recompute 2 {D3}", AGAIN),
    Case("fp8, moments", "--dtype fp8 --moments bf16", AGAIN),
    Case("wsd", "-k wsd -x 6 -q 0 --beta1 0.8 --beta2 0.95 --eps 1e-6 --clip 0"),
    Case("linear", "-k linear -x 6 --clip 0.5"),
    Case("constant", "-k constant -n 1 -nk 1 -nm 2"),
    Case("overfit", f"-a 1 {D3}"),
    Case("HellaSwag", "--hellaswag ../../data/hellaswag.bin -b 4"),
    # skips steps 129, 130 and 132
    Case("outliers", "-b 1 -t 3 -x 134 -n 131 -v 0 -l 1e-4 -sl 0.2 -sg 0.4", AGAIN),
    Case("not finite", "-l 1e30 -x 6", fails=True),
    Case("sample", SAMPLE, usual=False),
    # Llama 3
    Case("Llama, tied", f"{D3}", AGAIN, "llama_tied"),
    Case("Llama, grouped", f"{D3} -s 4 -g 6", AGAIN, "llama_gqa"),
    Case("Llama, bf16", f"--dtype bf16 {D3}", AGAIN, "llama_gqa"),
    Case("Llama, recompute 1", f"--recompute 1 {D3}", (), "llama_gqa"),
    Case("Llama, recompute 2", f"--recompute 2 {D3}", AGAIN, "llama_tied"),
    Case("Llama, bf16, recompute 2", "--recompute 2 --dtype bf16", (), "llama_gqa"),
    Case("Llama, moments", "--moments bf16 --dtype bf16", AGAIN, "llama_tied"),
    Case("Llama, fp8", f"--dtype fp8 {D3}", AGAIN, "llama_gqa"),
    Case("Llama, fp8, recompute 2", "--dtype fp8 --recompute 2", (), "llama_gqa"),
    Case("Llama, relu", "--attention relu --recompute 1", (), "llama_gqa"),
    Case("Llama, two ranks", "-z 1 -d 256", (("", 2),), "llama_gqa", ranks=2),
    Case("Llama, three ranks", "-z 1", (), "llama_tied", ranks=3),
    # Ranks. A run that resumes with another number of them goes on with the next data file
    Case("two ranks", "-d 256", (("", 2),), ranks=2),
    Case("two ranks, zero", "-d 256 -z 1", (("", 2),), ranks=2),
    Case("two ranks, one micro-batch", "-z 1 -s 4 -g 4 --log-ranks 1", ranks=2),
    Case("three ranks", "-d 192", ranks=3),
    Case("three ranks, zero", "-d 384 -z 1", (("", 3),), ranks=3),
    Case("two ranks, one, two", "-x 6 -d 256", (("-z 0", 1), ("-z 1", 2)), ranks=2),
    Case("one rank, two, one", "-x 6 -d 256 --shuffle 0", (("-z 1", 2), ("-z 0", 1))),
    Case("zero, without, with", "-x 6 -z 1", (("-z 0", 2), ("-z 1", 2)), ranks=2),
    Case("bf16, two ranks, zero", "--dtype bf16 -z 1 -d 256", (("", 2),), ranks=2),
    Case("fp8, two ranks", "--dtype fp8", (("", 2),), ranks=2),
    Case("fp8, two ranks, zero", "--dtype fp8 -z 1 -d 256", (("", 2),), ranks=2),
    Case("moments, two ranks", "--moments bf16", ranks=2),
    Case("moments, two ranks, zero", "--moments bf16 -z 1", (("", 1),), ranks=2),
    Case("recompute 2, two ranks", "--recompute 2 -z 1", ranks=2),
    Case("HellaSwag, two ranks", "--hellaswag ../../data/hellaswag.bin -b 4 -x 2", ranks=2),
    Case("outliers, two ranks", OUTLIERS, ranks=2),
    Case("outliers, two ranks, zero, moments", f"{OUTLIERS} -z 1 --moments bf16", ranks=2),
    # Only on a GPU
    *(Case(f"{dtype}, plain", f"--dtype {dtype} {D3} --plain 1", AGAIN, needs="cuda")
      for dtype in ("fp32", "tf32", "bf16")),
    *(Case(f"{dtype}, no graph", f"--dtype {dtype} {D3} --graph 0", needs="cuda")
      for dtype in ("fp32", "tf32", "bf16", "fp8")),
    *(Case(f"{dtype}, heads of 128 {flags}", f"--dtype {dtype} {flags}", AGAIN, "gpt2_128",
           needs="cuda")
      for dtype, flags in (("bf16", D3), ("bf16", "--attention relu"), ("fp8", D3), ("fp32", ""))),
    Case("Llama, bf16, plain", "--dtype bf16 --plain 1", (), "llama_tied", needs="cuda"),
    Case("Llama, bf16, no graph", f"--dtype bf16 --graph 0 {D3}", (), "llama_gqa", needs="cuda"),
]

# ---- Models and data

SMALL = dict(maxT=64, V=300, L=2, NH=2)
LLAMA = SMALL | dict(multiple_of=32, eps=1e-5, theta=500000.0)
MODELS = {"gpt2": Config(**SMALL, C=128, Vp=384), "gpt2_128": Config(**SMALL, C=256, Vp=384),
          "llama_tied": Config3(**LLAMA, NKV=1, C=128, scaled=0, minor=2, tied=True),
          "llama_gqa": Config3(**LLAMA | dict(NH=4), NKV=2, C=256, scaled=1, minor=1, tied=False)}


def data_files(folder):
    """Write models with random weights, and files of random tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, c in MODELS.items():
        values = dict(draw_parameters(c, 1))
        views = SimpleNamespace(**{"lm_head": values["wte"]} | values)
        replace_file(folder / f"{name}.bin", checkpoint_parts(c, views, np.float32))
    for name, count in (("part_train_0", 330), ("part_train_1", 410), ("part_train_2", 270),
                        ("part_val_0", 400), ("long_train", 32768)):
        # Some are frequent, so that there is something to learn.
        with contextlib.redirect_stdout(None):
            tokens = np.random.default_rng(count).zipf(1.3, count) % 300
            write_tokens(folder / f"{name}.bin", tokens)
    (folder / "hellaswag.bin").write_bytes(file_of(random_examples(300, 5 * [(5, (3, 8, 4, 6))])))
