"""Do two commits compute the same numbers, bit by bit?

    python -m dev.tests.same HEAD~1 .            # a commit and the working tree: all cases
    python -m dev.tests.same main . --quick      # some of them, in three minutes on two cores
    python -m dev.tests.same main . --only fp8   # those whose name has this word (a regular expression)
    python -m dev.tests.same main . --code       # only the machine code of kernels

Each case is a short training of a small model by both trees, OLD first. Compared are the losses and norms that are
printed, main.log, samples, and every file in -o: checkpoints and state files by their bytes, with the tensor and the
number where they first differ, and run_*.json field by field. NEW resumes what OLD has written, and must end as OLD
does when it resumes the same. Other words that are printed may differ: the last line counts where they do.

Of the trees this uses the command line and the formats of files alone. Each tree in turn is copied to the same folder,
so that they share compiled kernels and cuBLASLt's algorithms. With --keep FOLDER the runs stay there, and those of an
OLD that is a commit are not run again.
"""
import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

TOP = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"
TREE = CACHE / "same_tree"  # where each of the two trees is while it runs; see own_tree
PROGRAMS = {"gpt2": "train_gpt2", "llama": "dev.llama3.train_llama3"}
# -ffp-contract=off: whether the compiler makes one operation of a product and a sum says nothing of the source.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CXXFLAGS": "-O1 -ffp-contract=off",
               "TRAIN_GPT2_WAIT": "120", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PYTHONDONTWRITEBYTECODE": "1",
               "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_btl": "self,sm"}
USUAL = ("-i ../../data/part_train_*.bin -j ../../data/part_val_0.bin -b 2 -t 32 -x 4 -n 2 -v 2 -m 2 -s 0 -l 1e-2 "
         "-c 0.1 -u 2 -q 0.1")

# ---- The cases


class Case(NamedTuple):
    name: str
    flags: str = ""  # besides USUAL; later ones win
    then: tuple = ()  # further runs: (flags, ranks), each resumes step 2, then 4, ... of the one before
    model: str = "gpt2"  # a file of data_files(), whose name begins with the program's
    ranks: int = 1
    needs: str = ""  # cuda, or cpu
    quick: bool = False
    cxx: str = ""  # more flags of the compiler
    usual: bool = True
    fails: bool = False  # as it should


AGAIN = (("", 1),)
QUICK = dict(quick=True)
D3 = "-d 192"  # three micro-batches
CASES = [
    Case("help", "--help", usual=False, **QUICK),
    Case("help of Llama", "--help", usual=False, model="llama_tied"),
    Case("dry run", "--dry-run 1 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0 --recompute 2", **QUICK),
    Case("dry run of Llama", "--dry-run 1 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0",
         model="llama_gqa"),
    Case("fp32", "--dtype fp32 -s 2 -g 8", AGAIN, **QUICK),
    Case("fp32, accumulated", f"--dtype fp32 {D3} --shuffle 1", AGAIN, **QUICK),
    Case("in order", f"--dtype fp32 {D3} --shuffle 0", AGAIN),
    Case("tf32", f"--dtype tf32 {D3}", AGAIN),
    Case("bf16", "--dtype bf16", AGAIN, **QUICK),
    Case("bf16, accumulated", f"--dtype bf16 {D3}", AGAIN),
    Case("bf16 as on Hopper", f"--dtype bf16 {D3}", cxx="-DAS_HOPPER -DHOPPER", needs="cpu"),
    Case("from scratch", "-e d2 -t 8 -b 1 -x 1 -n 0 -v 0 --seed 7"),
    Case("recompute 1", f"--recompute 1 --dtype fp32 {D3}", AGAIN, **QUICK),
    Case("recompute 2", f"--recompute 2 --dtype fp32 {D3}", AGAIN, **QUICK),
    Case("recompute 1, bf16", f"--recompute 1 --dtype bf16 {D3}"),
    Case("recompute 2, bf16", f"--recompute 2 --dtype bf16 {D3}"),
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
    Case("sample", "-e ../../data/gpt2.bin --sample A -g 12 --temperature 0.8 --top-k 40 --dtype fp32", usual=False),
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
    # Ranks. In a resumed run of another number of them, the data goes on with the next file
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
    Case("outliers, two ranks", "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 -sl 0.2 -sg 0.2 --dtype fp32", ranks=2),
    Case("outliers, two ranks, zero, moments", "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 -sl 0.2 -sg 0.2 --dtype fp32 -z 1 "
         "--moments bf16", ranks=2),
    # Only on a GPU
    *(Case(f"{dtype}, {name}", f"--dtype {dtype} {D3} {flags}", then, needs="cuda")
      for dtype in ("fp32", "tf32", "bf16", "fp8")
      for name, flags, then in (("plain", "--plain 1", AGAIN), ("no graph", "--graph 0", ()))
      if (dtype, name) != ("fp8", "plain")),
    *(Case(f"{dtype}, heads of 128{name}", f"--dtype {dtype} {flags}", AGAIN, "gpt2_128", needs="cuda")
      for dtype, name, flags in (("bf16", "", D3), ("bf16", ", relu", "--attention relu"),
                                 ("fp8", "", D3), ("fp32", "", ""))),
    Case("Llama, bf16, plain", "--dtype bf16 --plain 1", (), "llama_tied", needs="cuda"),
    Case("Llama, bf16, no graph", f"--dtype bf16 --graph 0 {D3}", (), "llama_gqa", needs="cuda"),
]

# ---- Models and data, made here in llm.c's formats


def gpt2_table(maxT, V, L, NH, C, Vp):
    each = [("ln1w", C), ("ln1b", C), ("qkvw", 3 * C, C), ("qkvb", 3 * C), ("attprojw", C, C),
            ("attprojb", C), ("ln2w", C), ("ln2b", C), ("fcw", 4 * C, C), ("fcb", 4 * C),
            ("fcprojw", C, 4 * C), ("fcprojb", C)]
    return [("wte", Vp, C), ("wpe", maxT, C), *((name, L, *shape) for name, *shape in each),
            ("lnfw", C), ("lnfb", C)]


def llama_table(maxT, V, L, NH, NKV, C, multiple_of):
    H, QKV = -(-int(8 * C / 3) // multiple_of) * multiple_of, (NH + 2 * NKV) * (C // NH)
    each = [("ln1", C), ("qkv", QKV, C), ("attproj", C, C), ("ln2", C), ("fc", 2 * H, C), ("fcproj", C, H)]
    rows = [((f"{name}w", L, *shape), (f"{name}b", L, shape[0])) for name, *shape in each]
    return [("wte", V, C), ("lm_head", V, C), *itertools.chain(*rows), ("lnfw", C), ("lnfb", C)]


def table_of(model):
    """(bytes of the headers, the tensors, the type of the numbers) of a checkpoint's bytes."""
    header = struct.unpack_from("<12i", model)
    kind = "<u2" if header[1] == 5 else "<f4"
    if header[0] == 20240326:
        return 1024, gpt2_table(*header[2:8]), kind
    return 2048, llama_table(*header[2:9]), kind


def data_files(folder):
    """Write models of random weights, and files of random tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    heads = {"gpt2": [20240326, 3, 64, 300, 2, 2, 128, 384], "gpt2_128": [20240326, 3, 64, 300, 2, 2, 256, 384],
             "llama_tied": [20240803, 3, 64, 300, 2, 2, 1, 128, 32, 0, 3, 2],
             "llama_gqa": [20240803, 3, 64, 300, 2, 4, 2, 256, 32, 1, 3, 1]}
    for name, ints in heads.items():
        header, llama = np.array(ints + (256 - len(ints)) * [0], "<i4").tobytes(), name.startswith("llama")
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
        (folder / f"{name}.bin").write_bytes(header + b"".join(x.tobytes() for x in tensors.values()))
    for name, count in (("train_0", 330), ("train_1", 410), ("train_2", 270), ("val_0", 400), ("long", 32768)):
        tokens = rng.zipf(1.3, count) % 300  # some are frequent, so that there is something to learn
        header = np.array([20240520, 1, count] + 253 * [0], "<i4")
        name = "long_train" if name == "long" else f"part_{name}"
        (folder / f"{name}.bin").write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())
    stream, longest = [], 0
    for i in range(5):  # HellaSwag's: START, bytes, index, label, 4, then the context and four endings
        rest = [i, i % 4, 4]
        for count in rng.integers(3, 9, 5):
            rest += [count, *rng.integers(0, 300, count)]
        stream += [65535, 4 + 2 * len(rest), *rest]
        longest = max(longest, 4 + 2 * len(rest))
    header = np.array([20240522, 1, 5, longest] + 252 * [0], "<i4")
    (folder / "hellaswag.bin").write_bytes(header.tobytes() + np.array(stream, "<u2").tobytes())


# ---- Running one tree


@contextlib.contextmanager
def own_tree():
    """Make TREE a folder that no other same.py uses meanwhile. The first is best: kernels are compiled for its path."""
    global TREE
    CACHE.mkdir(parents=True, exist_ok=True)
    for i in itertools.count():
        TREE = CACHE / f"same_tree{i or ''}"
        with open(CACHE / f"same_lock{i or ''}", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
            return


def place(tree):
    """Copy a tree to TREE: a folder as it is, without what git ignores; or a commit."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    if not os.path.isdir(tree):
        archive = subprocess.run(["git", "archive", tree], cwd=TOP, check=True, stdout=-1).stdout
        subprocess.run(["tar", "-x", "-C", TREE], input=archive, check=True)
        return
    listed = subprocess.run(["git", "ls-files", "-zco", "--exclude-standard"], cwd=tree, text=True,
                            capture_output=True)
    names = listed.stdout.split("\0") if not listed.returncode else [
        str(path.relative_to(tree)) for path in Path(tree).rglob("*")]
    for name in filter(lambda name: name and (Path(tree) / name).is_file(), names):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(tree) / name, TREE / name)


def named(case):
    return re.sub(r"\W+", "_", case.name)


def command(case, device, flags, ranks, more):
    """The command line of a run, in a folder of the case's own."""
    words = [sys.executable, "-m", PROGRAMS[case.model.split("_")[0]], "--device", device]
    if case.usual:
        words += ["-e", f"../../data/{case.model}.bin", *USUAL.split()]
    words += [*case.flags.split(), *flags.split(), *more]
    if ranks > 1 and device == "cpu":
        mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        words = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *words]
    return words + ["--gpus", str(ranks)] * (ranks > 1 and device == "cuda")


def run_case(case, device, side, olds, known):
    """Run a case in the folder `side`, from the folders of OLD's where it resumes. If it is `known` which tree and data
    these are, a case that has been run there by the same is not run again. Returns the seconds it took."""
    folder, begun = side / named(case), time.monotonic()
    mark, key = folder / "case.json", repr((known, device, case, USUAL, ENVIRONMENT))
    if known and mark.exists() and json.loads(mark.read_text())["key"] == key:
        return 0.0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    runs = [("", case.ranks), *case.then]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(TREE)}
    environment["CXXFLAGS"] += f" {case.cxx}"
    statuses = []
    for i, (flags, ranks) in enumerate(runs):
        more = ["-o", f"run{i}"] * case.usual
        if i:
            more += ["-y", "1"]
            shutil.copytree(olds / named(case) / f"run{i - 1}", folder / f"run{i}")
            for path in (folder / f"run{i}").iterdir():  # as if it had been killed before these
                found = re.match(r"[a-zA-Z]+_(\d{8})", path.name)
                if found and int(found[1]) > resumed_step(case, i):
                    path.unlink()
        with open(folder / f"out{i}.txt", "w") as out, open(folder / f"err{i}.txt", "w") as err:
            try:
                statuses.append(subprocess.run(
                    command(case, device, flags, ranks, more), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=err, env=environment, cwd=folder, timeout=900).returncode)
            except subprocess.TimeoutExpired:
                statuses.append(124)
        if statuses[-1]:
            break
    mark.write_text(json.dumps(dict(key=key, statuses=statuses)))
    return time.monotonic() - begun


def resumed_step(case, i):
    """The step that run i of a case resumes: the i-th checkpoint."""
    return i * int(re.findall(r"-n (\d+)", f"{USUAL} {case.flags}")[-1])


# ---- Comparing

LINE = re.compile(r"step +\d+/\d+ \| loss \S+ \| norm +\S+ \| lr \S+|val loss .*|HellaSwag: .*|WARNING: step .*|"
                  r"outlier +\| z-scores: loss \S+ norm [^;]+")
UNSTEADY = re.compile(r"compiling|estimate|memory|wrote|\d+ steps in")


def printed(path, case):
    """What a run has printed: the lines that must agree, and the words of all others, without numbers."""
    kept, words, sampling = [], [], case.name == "sample"
    for line in path.read_text().splitlines():
        if case.flags == "--help":
            kept += re.findall(r"^  (-\S+)(?: .*?, (--\S+))?", line)
        elif sampling or LINE.match(line):
            kept.append((LINE.match(line) or [line])[0])
        elif "--dry-run" in case.flags and "GiB" in line and not UNSTEADY.match(line):
            kept.append(" ".join(re.findall(r"^\w+|[\d.]+", line)))
        elif not UNSTEADY.match(line):
            words.append(re.sub(r"[\d.,:%]+", "#", line))
        if line == "---" and not case.name == "sample":
            sampling = not sampling
    return kept, words


def first(what, old, new):
    """Where two lists differ first, or nothing."""
    for i, (a, b) in enumerate(itertools.zip_longest(old, new)):
        if a != b:
            yield f"{what}, line {i + 1}: {a!r} and {b!r}"
            return


def fields(x, path=""):
    """{path of a field: value} of nested dicts and lists."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else None
    return {path: x} if items is None else {
        key: value for name, y in items for key, value in fields(y, f"{path}.{name}").items()}


def size_of(table):
    return sum(math.prod(shape) for _, *shape in table)


def of_numbers(old, new, kind, table, what):
    """Where the numbers of two files differ, tensors of a table one after the other, and by how much."""
    bits = [np.frombuffer(x, kind.replace("f", "u"), size_of(table)) for x in (old, new)]
    a, b = (x.view("f4") if kind == "<f4" else (x.astype("u4") << 16).view("f4") for x in bits)
    places, start, tensors = np.flatnonzero(bits[0] != bits[1]), 0, []
    for name, *shape in table:
        inside = places[(places >= start) & (places < start + math.prod(shape))] - start
        tensors += [f"{name}{[int(i) for i in np.unravel_index(inside[0], shape)]}"] if inside.size else []
        start += math.prod(shape)
    if tensors:
        at, most = places[0], np.nanmax(np.abs(a[places].astype(float) - b[places]))
        yield (f"{what}{tensors[0]}: {a[at]:.9g} and {b[at]:.9g}; {places.size} of {a.size} numbers differ, by up to "
               f"{most:.3g}, in {len(tensors)} of {len(table)} tensors")


def of_files(name, old, new, model):
    """How two files of a run differ. model: the bytes of a state's own checkpoint."""
    if old == new:
        return
    if name == "main.log":
        yield from first(name, old.decode().splitlines(), new.decode().splitlines())
    elif name.startswith("run_"):
        # The case "help" compares the names of flags. Of algorithms, those that others chose are there, too. Windows of
        # outliers were once in all runs.
        a, b = fields(json.loads(old)), fields(json.loads(new))
        pairs = {key: [x.get(key, "nothing") for x in (a, b)] for key in sorted(a.keys() | b.keys())
                 if key in a and key in b or not re.match(r"\.(flags|products\.algorithms|windows|seen)\.", key)}
        pairs = {key: [re.sub(r"/(old|new)/", "/", x) if isinstance(x, str) else x for x in pair]
                 for key, pair in pairs.items()}  # paths in the folders of the two trees
        pairs = {key: (x, y) for key, (x, y) in pairs.items() if x != y}
        if pairs:
            key, (x, y) = next(iter(pairs.items()))
            yield f"{name}: {key[1:]}: {x!r} and {y!r}" + f", and {len(pairs) - 1} more fields" * (len(pairs) > 1)
    elif name.endswith(".npz"):
        a, b = (dict(np.load(io.BytesIO(x))) for x in (old, new))
        for x in (a, b):  # whatever the order of the flags
            x["notes"] = np.array(json.dumps(json.loads(str(x["notes"])), sort_keys=True))
        yield from (f"{name}: {key}" for key in sorted(a.keys() | b.keys())
                    if key not in a or key not in b or a[key].tobytes() != b[key].tobytes())
    elif len(old) != len(new) or not name.startswith(("model_", "state_")):
        if not name.startswith("rank_"):  # words
            yield f"{name}: {len(old)} and {len(new)} bytes, and others"
    else:
        start, table, kind = table_of(old if name.startswith("model_") else model)
        if name.startswith("state_"):
            start, kind, numbers = 1024, "<f4", (len(old) - 1024) // 4
            if numbers >= 3 * size_of(table):
                table = [(f"{each} {row}", *shape) for each in ("m", "v", "parameters") for row, *shape in table]
            else:  # a share of several ranks: its pieces have no names here
                table = [("number", numbers)]
        differ = np.flatnonzero(np.frombuffer(old, "u1") != np.frombuffer(new, "u1"))
        end = start + size_of(table) * int(kind[-1])
        if differ[0] < start:
            values = (struct.unpack_from("<i", x, differ[0] // 4 * 4)[0] for x in (old, new))
            yield f"{name}: header[{differ[0] // 4}]: {' and '.join(map(str, values))}"
        yield from of_numbers(old[start:], new[start:], kind, table, f"{name}: ")
        if differ[-1] >= end:
            yield f"{name}: the shuffle, at byte {differ[differ >= end][0] - end} of it"


def compare(case, olds, news):
    """(differences or None, lines and files compared, whether other words differ) of a case's runs."""
    sides = [side / named(case) for side in (olds, news)]
    statuses = [json.loads((side / "case.json").read_text())["statuses"] for side in sides]
    said = [(side / f"err{len(status) - 1}.txt").read_text() for side, status in zip(sides, statuses)]
    said = [(re.findall("^error: .*", text, re.M) or [text.strip()[-300:]])[0] for text in said]
    if statuses[0] != statuses[1]:
        unknown = "".join(f"{tree} cannot do it: " for tree, x in zip(("OLD", "NEW"), said)
                          if re.search("is no flag|unrecognized arguments", x))
        return [f"{unknown}exit status {statuses[0]} and {statuses[1]}: {said[0]!r} and {said[1]!r}"], 0, False
    if statuses[0][-1] and all(re.search("tiktoken", text) for text in said):
        return None, 0, False  # neither has GPT-2's vocabulary, which a prompt needs
    if bool(statuses[0][-1]) != case.fails:
        return [f"both end with exit status {statuses[0]}: {said[0]}"], 0, False
    found, count, reworded = [], 0, said[0] != said[1]
    for i in range(len(statuses[0])):
        (a, words), (b, others) = (printed(side / f"out{i}.txt", case) for side in sides)
        files = [{path.name: path.read_bytes() for path in side.glob(f"run{i}/*")} for side in sides]
        both = sorted(files[0].keys() & files[1].keys(), key=lambda name: (re.sub(r"\D", "", name)[:8], name))
        count, reworded = count + len(a) + len(both), reworded or words != others
        if case.flags == "--help":  # in whatever order
            a, b = sorted(a), sorted(b)
        differ = [*first("printed", a, b)]
        differ += [f"only {'OLD' if name in files[0] else 'NEW'} has {name}"
                   for name in sorted(files[0].keys() ^ files[1].keys())]
        for name in both:
            differ += of_files(name, files[0][name], files[1][name], files[0].get(f"model_{name[6:14]}.bin"))
        found += [f"run {i + 1}: {x}" for x in differ]
    return found, count, reworded


# ---- Machine code

KERNELS = "kernels.cu", "llama3.cu", "moments.cu", "fp8.cu"  # where a tree has them
# -DHOPPER and -DOUTPUT: what the host says since 465c5e5; before that kernels.cu knew by itself.
CODE = [("sm_80", "BF16", 768, 64, KERNELS[:3]), ("sm_80", "FP32", 768, 64, KERNELS[:3]),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, KERNELS[:3]), ("sm_90a", "FP32", 768, 64, KERNELS[:3]),
        ("sm_90a", "FP8 -DBF16 -DHOPPER -DOUTPUT=<fp8_output.cuh>", 768, 64, KERNELS),
        ("sm_90a", "BF16 -DHOPPER", 1024, 128, KERNELS[:2])]
OPTIONS = "-arch={} -std=c++17 -D{} -DCHANNELS={} -DHS={}"


def sections(elf):
    """{name: bytes} of a cubin's sections that have code, or numbers that it reads."""
    [table], [size, count, names] = struct.unpack_from("<Q", elf, 0x28), struct.unpack_from("<3H", elf, 0x3A)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    name = lambda row: elf[rows[names][4] + row[0] :].split(b"\0", 1)[0].decode()
    return {name(row): elf[row[4] : row[4] + row[5]] if row[1] != 8 else str(row[5]).encode()  # 8: zeros, no bytes
            for row in rows if re.match(r"\.text\.|\.nv\.(constant|shared|global)", name(row))}


def code_of(job):
    """{section: digest} of one row of CODE and a tree's text, or what NVRTC has to say. In a process of its own."""
    row, text, headers = job
    options = OPTIONS.format(*row).split()
    kept = CACHE / f"same_code_{hashlib.sha256(repr((text, headers, options)).encode()).hexdigest()[:20]}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    import cupy  # noqa: F401  (finds and loads NVRTC)
    from cupy_backends.cuda.libs import nvrtc
    contents, names = ([x.encode() for x in some] for some in (headers.values(), headers))
    program = nvrtc.createProgram(text, "kernels.cu", contents, names)
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError:
        return nvrtc.getProgramLog(program).strip()[:300]
    found = {name: hashlib.sha256(x).hexdigest() for name, x in sections(nvrtc.getCUBIN(program)).items()}
    kept.write_text(json.dumps(found))
    return found


def texts():
    """(text, {name: text} of headers) of each row of CODE in the tree that is at TREE: its files, as far as there are
    any."""
    paths = {name: [*TREE.rglob(name)][:1] for name in KERNELS}
    headers = {path.name: path.read_text("utf-8") for path in TREE.rglob("*.cuh")}
    return [("".join(path.read_text("utf-8") for name in row[4] for path in paths[name]), headers) for row in CODE]


def compare_code(old, new, jobs):
    """(name, differences) of each row of CODE."""
    try:
        import cupy  # noqa: F401
    except ImportError:
        print("skipped  machine code, which needs CuPy: pip install -r requirements.txt")
        return
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        pairs = [*zip(*(pool.map(code_of, [(row, *text) for row, text in zip(CODE, side)]) for side in (old, new)))]
    for row, (a, b) in zip(CODE, pairs):
        name, *broken = f"code, {' '.join(map(str, row[:4]))}", *(x for x in (a, b) if isinstance(x, str))
        if broken:
            yield name, [f"NVRTC could not compile it: {broken[0]}"], 0
            continue
        differ = sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))
        yield name, [f"{key} (only {'OLD' if key in a else 'NEW'} has it)" * ((key in a) != (key in b)) or key
                     for key in differ], len(a)


# ---- The program


def run_tree(tree, cases, device, side, olds, jobs):
    """Run the cases by the tree that is at TREE. Yields the seconds of each."""
    locks, warm = {}, set()
    data = hashlib.sha256(b"".join(path.read_bytes() for path in sorted((olds.parent / "data").iterdir()))).hexdigest()
    known = "" if side != olds or os.path.isdir(tree) else f"{tree} {data}"

    def work(case):
        """A case; alone where it compiles what others use, and on a GPU while a dtype's algorithms are chosen."""
        dtype, moments = (re.findall(rf"{flag} (\S+)", case.flags)[-1:] for flag in ("--dtype", "--moments"))
        kind = (*dtype,) if device == "cuda" else (case.model.split("_")[0], *dtype, *moments, case.cxx)
        alone = kind not in warm or device == "cuda" and side == olds
        with locks.setdefault(kind, threading.Lock()) if alone else contextlib.nullcontext():
            seconds = run_case(case, device, side, olds, known)
        warm.add(kind)
        return seconds

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(work, cases)


def report(name, found, count, words=False, seconds=0.0):
    """Print the line of a case. Returns (name, whether it differs, whether other words do)."""
    if found:
        rest = "; ".join(found[:4]) + f"; and {len(found) - 4} more" * (len(found) > 4)
    else:
        rest = f"{count:4} compared {seconds:6.1f} s" if found == [] else "set TIKTOKEN_CACHE_DIR: see the README"
    print(f"{'DIFFERS' if found else 'skipped' if found is None else 'same   '}  {name:28} {rest}", flush=True)
    return name, None if found is None else bool(found), words


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="a commit, or a folder: . for the working tree")
    parser.add_argument("new")
    parser.add_argument("--quick", action="store_true", help="only some of the cases")
    parser.add_argument("--only", default="", help="cases whose name has this, a regular expression")
    parser.add_argument("--code", action="store_true", help="only the machine code")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU")
    parser.add_argument("--jobs", type=int, help="cases at a time (default: 2 on a CPU, 6 on a GPU)")
    parser.add_argument("--keep", type=Path, help="folder for the runs")
    flags = parser.parse_args()
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    gpus = listed.count("UUID: GPU")
    device = flags.device or ("cuda" if gpus else "cpu")
    cases = [case for case in CASES if (case.quick or not flags.quick) and not flags.code
             and re.search(flags.only, case.name) and case.needs in ("", device)
             and max(case.ranks, *(ranks for _, ranks in case.then), 1) <= (gpus if device == "cuda" else 3)]
    trees = [x if os.path.isdir(x) else subprocess.run(
        ["git", "rev-parse", "--verify", f"{x}^{{commit}}"], cwd=TOP, check=True, stdout=-1, text=True
        ).stdout.strip() for x in (flags.old, flags.new)]
    results, jobs = [], flags.jobs or (2 if device == "cpu" else 6)
    begun = time.monotonic()
    with own_tree(), tempfile.TemporaryDirectory() as temporary:
        work = (flags.keep or Path(temporary)).resolve()
        olds, news = work / "old", work / "new"
        data_files(work / "data")
        place(trees[0])
        old_texts, _ = texts(), [*run_tree(trees[0], cases, device, olds, olds, jobs)]
        print(f"OLD took {time.monotonic() - begun:.0f} s for {len(cases)} cases", flush=True)
        place(trees[1])
        new_texts = texts()
        for case, seconds in zip(cases, run_tree(trees[1], cases, device, news, olds, jobs)):
            results.append(report(case.name, *compare(case, olds, news), seconds))
    if flags.code or not (flags.only or flags.quick):
        results += [report(*row) for row in compare_code(old_texts, new_texts, jobs)]
    reworded = [name for name, _, words in results if words]
    passed, failed = (sum(differs is kind for _, differs, _ in results) for kind in (False, True))
    if reworded:
        print(f"other words are printed by {len(reworded)}: {', '.join(reworded)}")
    print(f"{passed} passed, {failed} failed, in {time.monotonic() - begun:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
