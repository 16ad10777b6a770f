"""The trainer alone trains as with dev/, README and features repeat its lines word for word, and
features keep to their own names.
"""
import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

import train_gpt2
from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.features import __main__ as features_map
from dev.features import order, tokenizer
from dev.tests import runs
from dev.tests.checks import TINY, TOP, check, check_refusal
from dev.tests.trainings import two_token_files


def body_of(path, kernel):
    """The lines of a kernel between its braces, without white space."""
    text = (TOP / path).read_text(encoding="utf-8")
    start = text.index("{\n", text.index(f" {kernel}("))
    body = text[start : text.index("\n}", start)]
    return [re.sub(r"\s", "", line) for line in body.splitlines() if line.strip()]


REPEATED_KERNELS = (
    ("kernels.cu", "residual_layernorm_forward", "dev/features/recompute.cu",
     "residual_layernorm_into"),
    ("dev/llama3/llama3.cu", "residual_rmsnorm_forward", "dev/features/recompute_llama.cu",
     "residual_rmsnorm_into"),
)


def test_repeated_kernels():
    """Recompute's kernels differ from the usual ones in the line that reads the stream, and in no
    other."""
    for path, kernel, path_there, kernel_there in REPEATED_KERNELS:
        own, there = body_of(path, kernel), body_of(path_there, kernel_there)
        expected = [line.replace("load<4>(x+", "load<4>((branch?before:x)+") for line in own]
        check(f"{kernel_there} differs in the line that reads", there == expected != own,
              [*zip(own, there)])


ALONE = """
import dataclasses, pathlib, sys
import train_gpt2
train_gpt2.KERNELS = pathlib.Path({top!r}, "kernels.cu")  # of which dev/cpu has the loops
from dev.common.config import Config
from dev.cpu.device import Cpu
sys.path.remove({top!r})
for name in [name for name in sys.modules if name.split(".")[0] == "dev"]:
    del sys.modules[name]
train_gpt2.FastCuda = lambda dtype, c: Cpu(dtype, Config(*dataclasses.astuple(c)))
train_gpt2.run_main(train_gpt2.main)
"""
CODE = ALONE.format(top=str(TOP))


def test_plain_program(folder):
    """train_gpt2.py and kernels.cu, copied to an empty folder, train as a run with dev/ does: the
    same lines and bits. (Here a CPU takes the place of the GPU.) Without a token file the error
    names prepro's command."""
    two_token_files(folder)
    flags = ["-e", str(TINY), "-b", "2", "-t", "8", "-d", "32", "-x", "3", "-v", "2", "-m", "1",
             "-s", "2", "-g", "3",
             "-u", "2", "-q", "0.1", "--dtype", "fp32", "-i", str(folder / "tokens.bin"),
             "-j", str(folder / "tokens.bin"), "-o"]
    copy = folder / "copy"
    copy.mkdir()
    for name in ("train_gpt2.py", "kernels.cu"):
        shutil.copy(TOP / name, copy)

    def alone(*arguments):
        return subprocess.run([sys.executable, "-c", CODE, *arguments], cwd=copy,
                              capture_output=True, text=True, env=os.environ | dict(
                                  PYTHONPATH=f"{copy}:{TOP}", CUDA_VISIBLE_DEVICES=""))

    done = alone(*flags, str(folder / "alone"))
    check("without dev/: its status", done.returncode == 0, done.stderr)
    missing = alone("-e", str(TINY), "--dtype", "fp32", "-t", "8")
    check("without a token file", missing.returncode == 1 and re.fullmatch(
        r"error: data/tinyshakespeare/.*_train.bin: could not be read .*: "
        r"prepro_tinyshakespeare.py writes one.*\n", missing.stderr), missing.stderr)
    featured = io.StringIO()
    with contextlib.redirect_stdout(featured):
        order.main(["--device", "cpu", *flags, str(folder / "featured")])

    def lines(printed):
        text = re.sub(r" \| lr.*", "", printed)
        return re.findall(r"(?m)^(?:step|val loss|generating:|\[).*$", text.replace("<", "["))

    own, theirs = lines(done.stdout), lines(featured.getvalue())
    check("as many lines, and three steps",
          len(own) == len(theirs) and sum("step" in line for line in own) == 3, own)
    check("the same losses",
          [line for line in own if "loss" in line] == [line for line in theirs if "loss" in line],
          (own, theirs))
    weights = [(folder / name / "model_00000003.bin").read_bytes()
               for name in ("alone", "featured")]
    check("the same weights", weights[0] == weights[1] != Path(TINY).read_bytes())


def test_what_runs():
    """The ordinary commands run what is read: all functions before "Faster" but those that a
    feature replaces, and 98% of their lines."""
    never, missed, lines = runs.unread("cpu")
    if len(tokenizer.vocabulary()) < train_gpt2.Config.V:  # no network: samples have numbers
        never.pop("Training.decode", None)
    check("functions", never.keys() <= runs.REPLACED.keys(), never)
    count = sum(map(len, missed.values()))
    check("lines", count <= 0.02 * lines, (count, lines, missed))
    check("no list of excuses", len(runs.REPLACED) <= 3, runs.REPLACED)


def test_excerpts():
    """The README's lines of code stand in the trainer, word for word, in order."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.S)
    check("a layer, forward and backward", len(blocks) == 2, blocks)
    text = (TOP / "train_gpt2.py").read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines()]
    for block in blocks:
        part = [line.strip() for line in block.splitlines()]
        start = lines.index(part[0]) if part[0] in lines else 0
        check(f"{part[0][:30]} ...", lines[start : start + len(part)] == part, part)


def test_names_of_helpers():
    """Two features may use the same name: their functions are in namespaces, but for kernels and
    what a .cuh declares.
    """
    for path in (path for path in order.SOURCES if path.suffix == ".cu"):
        text = path.read_text("utf-8")
        outside = re.sub(r"^namespace ([\w:]+) \{.*?^\}  // namespace \1$", "", text,
                         flags=re.M | re.S)
        found = re.findall(r"^(?:template|struct|constexpr|using|__device__).*", outside, re.M)
        headers = "".join(header.read_text("utf-8") for header in path.parent.glob("*.cuh"))
        check(f"{path.name}: names",
              not [line for line in found if line.rstrip("{ ") not in headers], found)


def test_arrays_of_other_numbers():
    """A launch refuses an array whose numbers are not those that the kernel reads."""
    device = Emulated("fp32", Config.from_file(TINY))
    wrong = np.zeros(64), np.zeros(64, np.float16), np.zeros(64, np.int64), np.zeros(64, np.int32)
    for array in wrong:
        check_refusal("launch", rf"gelu_forward: inp is an array of {array.dtype}, and the kernel "
                      r"reads const real\*", device.launch, "gelu_forward", 64,
                      np.zeros(64, np.float32), array, 1, 64)
    device.launch("gelu_forward", 64, np.zeros(64, np.float32), np.zeros(64, np.float32), 1, 64)


def test_sizes():
    """From 128 MiB on, a size is told in GiB."""
    for nbytes, wish in ((448, "  0.00 MiB"), (1_816_576, "  1.73 MiB"),
                         (2**27 - 2**20, "127.00 MiB"), (2**27, "  0.12 GiB"),
                         (73 * 2**30, " 73.00 GiB")):
        check(f"{nbytes} bytes", train_gpt2.size_of(nbytes) == wish, train_gpt2.size_of(nbytes))


def test_map():
    """`python -m dev.features` has each flag once, beside the file that declares it."""
    rows = {path: (text, flags) for path, text, flags in features_map.rows()}
    check("ema.py", rows["ema.py"] == (
        "--ema D: an exponential moving average of the weights.", ["--ema"]), rows["ema.py"])
    check("chat.py has two", rows["chat.py"][1] == ["--chat", "--answer"], rows["chat.py"])
    check("without flags", rows["fp8/fp8_all.py"][1] == [], rows["fp8/fp8_all.py"])
    found = sorted(flag for _, flags in rows.values() for flag in flags)
    texts = [path.read_text("utf-8") for path in TOP.glob("dev/features/**/*.py")]
    wish = sorted(re.findall(r'Flag\((?:None|"-\w+"), "(--[\w-]+)"', "".join(texts)))
    check("all flags", found == wish == sorted(flag.name for flag in order.FLAGS),
          {*found} ^ {*wish})
    cut = [path for path, (text, _) in rows.items() if text.endswith("et al.")]
    check("whole sentences", not cut, cut)


ADDING = {"tables", "settled", "switches"}  # to what super() returns, and in any order the same
APART = [{"muon", "moments"}]  # no run has both


def changed(feature):
    """{(kind of class, name)} of what a feature's classes change."""
    return {(kind, name) for kind in ("model", "training", "device")
            for each in getattr(getattr(feature, kind), "__mro__", [object])[:-1]
            for name in vars(each).keys() - ADDING if not name.startswith("__")}


def test_order():
    """ORDER names features that are there. If two are not in it, their order does not matter: they
    change nothing that the other changes."""
    names = [feature.name for feature in order.FEATURES]
    check("each name once", len(names) == len({*names}))
    check("ORDER", order.ORDER.keys() <= {*names}, order.ORDER.keys() - {*names})
    free = [feature for feature in order.FEATURES if feature.name not in order.ORDER]
    for a, b in itertools.combinations(free, 2):
        both = changed(a) & changed(b)
        check(f"{a.name}, {b.name}: name one in ORDER", not both or {a.name, b.name} in APART, both)


def test_methods():
    """A name is a method of all features' classes of a kind, or of none: a value would hide it."""
    for kind in ("model", "training", "device"):
        classes = {each for feature in order.FEATURES
                   for each in getattr(getattr(feature, kind), "__mro__", [object])[:-1]}
        methods, values = ({name for each in classes for name, value in vars(each).items()
                            if hasattr(value, "__code__") == is_method} for is_method in (1, 0))
        check(kind, not methods & values - {"__doc__"}, methods & values)
