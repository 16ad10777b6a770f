"""Test train_gpt2.py as a program: what it refuses, that two runs give the same bits, and that it
needs no dev/."""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dev.common.config import Config
from dev.features.order import has_gpu
from dev.tests.checks import TINY, TOP, check, fast
from dev.tests.models import dtypes_of
from dev.tests.trainings import (LLAMA, TRAINER, WAYS, call, check_error, place_of, same_bits,
                                 two_token_files)


TINY_RUN = "-e", TINY, "-i", "tokens.bin", "-j", "tokens.bin", "-b", 2, "-t", 8, "-x", 3, "-s", 0


@fast
def test_refusals(device_name, folder):
    """A mistake is reported in one line: a flag, a value, flags that exclude each other, files,
    sizes, a folder, a loss."""
    two_token_files(folder)
    os.chdir(folder)
    Path("noise.bin").write_bytes(bytes(2000))
    Path("a.txt").write_text("A text.\n", encoding="utf-8")
    tiny = *TINY_RUN, "--dtype", "fp32"
    status, _, error = call("--device", place_of(device_name), *tiny, "-o", "out", "-n", 3)
    check("what is not refused", status == 0 and not error, error)
    for wish, *flags in [("--batch-size.* 0: ", "-b", 0), ("--nonsense; ", "--nonsense"),
                         ("1.5", "-t", 1.5),
                         ("nonsense", "-e", "nonsense"), ("short.bin", *tiny, "-i", "short.bin"),
                         ("absent.bin", *tiny, "-j", "absent.bin"),
                         ("noise.bin", *tiny, "-i", "noise.bin"),
                         ("absent.bin: could not be read .*--input", "-e", TINY, "-i",
                          "absent.bin"),
                         ("a.txt: is no token file; `.*py --input a.txt` makes", "-e", TINY, "-i",
                          "a.txt"),
                         ("--learningrate 1: did you mean --learning-rate.; --help",
                          "--learningrate", 1),
                         ("--lr 1: did you mean --learning-rate.; --help", "--lr", 1),
                         ("--max_iters=9: did you mean --steps.; --help", "--max_iters=9"),
                         ("noise.bin", *tiny, "-e", "noise.bin"), ("maxT = 40", *tiny, "-t", 41),
                         ("--clip.* -0.5: ", "--clip", -0.5),
                         *[(f"{name}.* {value}: expected at least .* and finite", name, value)
                           for name, value in (("--clip", "nan"), ("--learning-rate", "inf"),
                                               ("--eps", "inf"), ("--temperature", "nan"))],
                         *[(f"{name} 1e.39: expected at most 3.4e38", name, 1e39)
                           for name in ("--learning-rate", "--eps", "--muon-lr")],
                         ("--beta1.* nan: expected at least 0 and below 1", "--beta1", "nan"),
                         ("-q 2.0: the learning rate would rise to 2.0 times -l: expected at most "
                          "1", *tiny, "-q", 2),
                         ("-d 24: expected a multiple of .*B.T = 16", *tiny, "-d", 24),
                         ("--recompute.* 3: ", "--recompute", 3), ("--plain.* 2: ", "--plain", 2),
                         ("--moments.*'fp16'", "--moments", "fp16"),
                         ("--top-k.* -1: ", *tiny, "--top-k", -1),
                         ("--dtype fp8 --plain 1: ", *tiny, "--dtype", "fp8", "--plain", 1),
                         *[("--nvtx 1: .*expected --device cuda", *tiny, "--nvtx", 1)] *
                         (device_name != "cuda"),
                         ("holds an earlier run", *tiny, "-o", "out"),
                         ("-x 1: expected 3 or more", *tiny, "-o", "out", "-y", 1, "-x", 1),
                         ("the loss of step 2 is", *tiny, "-l", "1e30"),
                         *([] if has_gpu() else [("--device cpu", "--device", "cuda")])]:
        check_error(wish, "--device", place_of(device_name), *flags)


def test_command_line(device_name, folder):
    """Two runs of train_gpt2.py give the same bits, and other ways of computing nearly the same."""
    two_token_files(folder)
    os.chdir(folder)
    yield from same_bits(device_name, folder, TRAINER, TINY, Config, dtypes_of(device_name)[::2],
                         *WAYS, ("recompute_2", "--recompute", 2), ("moments", "--moments", "bf16"))
    lines = (folder / "fp32_1" / "main.log").read_text()
    steps = "".join(rf"s:{step} trl:\d\.\d{{4}} lr:0\.000300 norm:\d+\.\d\d\n"
                    for step in (0, 1, 2))
    ok = re.fullmatch(rf"s:0 tel:\d\.\d{{4}}\n{steps}s:3 tel:\d\.\d{{4}}\n", lines)
    check("train_gpt2.py: its log", ok, "" if ok else repr(lines))


@fast
def test_top_level_files(device_name, folder):
    """The top-level files alone train on a GPU, with the bits of the whole program; without a GPU
    they say so."""
    two_token_files(folder)
    alone = folder / "alone"
    alone.mkdir()
    for name in ("train_gpt2.py", "kernels.cu", "prepro_tinyshakespeare.py"):
        shutil.copy(TOP / name, alone)
    arguments = ("-e", TINY, "-i", "tokens.bin", "-j", "tokens.bin", "-b", "2", "-t", "8", "-x",
                 "3", "-s", "0",
                 "--dtype", "fp32", "--plain", "1")  # --plain times no algorithms

    def train(program, *arguments):
        return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True,
                              cwd=folder, env=os.environ | {"PYTHONPATH": ""} | hidden)

    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device_name != "cuda" else {}
    if device_name != "cuda":
        done = train(alone / "train_gpt2.py", *arguments)
        ok = done.returncode == 1 and re.fullmatch("error: no GPU can be used: .*\n", done.stderr)
        check("train_gpt2.py: alone, and no GPU", ok,
              "" if ok else f"{done.returncode}, {done.stderr!r}")
    else:
        for name, program in (("few", alone), ("all", TOP)):
            done = train(program / "train_gpt2.py", *arguments, "-o", name)
            ok = done.returncode == 0 and "step    3/3" in done.stdout
            check(f"train_gpt2.py: with {name} files", ok,
                  "" if ok else f"{done.stdout[-300:]} {done.stderr!r}")
        few, whole = (folder / name / "model_00000003.bin" for name in ("few", "all"))
        check("train_gpt2.py: the same bits", few.read_bytes() == whole.read_bytes())
    done = train(alone / "train_gpt2.py", "--recompute", "1")
    ok = done.returncode == 1 and "unrecognized arguments: --recompute" in done.stderr
    check("train_gpt2.py: without features, their flags are none", ok, "" if ok else done.stderr)


def test_models_by_name(device_name, folder):
    """A folder is no checkpoint, whatever its name. What -e names and the converter takes gets the
    converter's command. A T beyond the model's positions is refused before anything else."""
    two_token_files(folder)
    os.chdir(folder)
    train = ("--device", place_of(device_name),
             "-i", "tokens.bin", "-j", "tokens.bin", "-b", 1, "-t", 8,
             "-x", 1, "-s", 0)
    for name in ("d1", "gpt2_124M.bin", "llama3:d1", "hf", "empty"):
        (folder / name).mkdir()
    (folder / "hf/config.json").touch()
    for name, flags, wish, *more in (
            ("d1", ("-e", "d1", "-o", "d1", "-n", 1), "d1 .*L=1"),
            ("d1, resumed", ("-o", "d1", "-y", 1, "-x", 2), "d1/.*L=1"),
            ("the default's name", ("-l", 1e-4),
             "d3 .*L=3" if device_name != "cuda" else "d12 .*L=12"),
            ("llama3:d1", ("-e", "llama3:d1"), "llama3:d1 .*L=1", LLAMA)):
        keywords = dict(program=more[0]) if more else {}
        status, text, error = call(*train, *flags, **keywords)
        ok = status == 0 and re.search(rf"^model +\| .*{wish}", text, re.M)
        check(f"a folder of the name of {name}", ok, "" if ok else error or text)
    check("d1 has two checkpoints", len([*(folder / "d1").glob("DONE_*")]) == 2)
    (folder / "x.safetensors").write_bytes(b"something else" * 99)
    command = "`python -m dev.tools.convert {} {}` makes a checkpoint of this model"
    for wish, *flags in (
            (command.format("gpt2", "gpt2_124M.bin"), "-e", "gpt2"),
            (command.format("gpt2-xl", "gpt2-xl.bin"), "-e", "gpt2-xl"),
            (command.format("gpt2", "gpt2_124M.bin"), "-e", "gpt2", "--sample", "A"),
            (command.format("openai-community/gpt2-medium", "gpt2-medium.bin"), "-e",
             "openai-community/gpt2-medium"),
            (command.format("hf", "hf.bin"), "-e", "hf"),
            (command.format("x.safetensors", "x.bin"), "-e", "x.safetensors"),
            ("empty is a folder, and no run's: it has no model_*.bin", "-e", "empty"),
            ("-e nonsense: expected a checkpoint, or a descriptor from d1 to d999, such as d12, or "
             "layers x heads x channels, such as 6x6x384; there is no file or folder nonsense",
             "-e", "nonsense"),
            ("-t 41: expected at most maxT = 40: wpe has no more positions", "-e", TINY, "-t", 41),
            ("-t 41: expected at most maxT = 40: wpe has no more positions", "-e", TINY, "-t", 41,
             "--dry-run"),
            ("-t 41: expected at most maxT = 40: wpe has no more positions", "-e", TINY, "-t", 41,
             "--sample", ""),
            ("-t 2000: expected at most maxT = 1024: wpe has no more positions", "-e", "d1", "-t",
             2000, "-b", 9999)):
        status, text, error = call(*train, *flags)
        ok = (status == 1 and re.fullmatch(f"error: .*{re.escape(wish)}\n", error) and
              not re.search("[GM]iB", text))
        check(f"refused: {' '.join(map(str, flags))}", ok, "" if ok else text[-300:] + error)
    status, text, error = call(*train, "-e", "llama3:d1", "-t", 90, "-x", 0, program=LLAMA)
    check("a Llama has any T", status == 0, error)
