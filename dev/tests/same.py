"""Do two commits compute the same numbers, bit by bit?

    python -m dev.tests.same HEAD~1 .            # a commit and the working tree: all cases
    python -m dev.tests.same main . --only fp8   # those whose name matches this regular expression
    python -m dev.tests.same main . --code       # only the code of kernels, which NVRTC compiles

Each case trains a small model for a few steps, first with OLD, then with NEW. It compares the
printed losses and norms, main.log, samples, and every file in -o: checkpoints and state files byte
by byte, naming the first tensor and number that differ, and run_*.json field by field. NEW resumes
OLD's checkpoints, and must end with the same bytes as OLD. Other printed words may differ. Both
share compiled kernels and cuBLASLt's choices.
"""
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.bench.turns import unpack
from dev.common.config import Config, checkpoint_parts, draw_parameters
from dev.common.flags import parse_flags, split_names
from dev.common.nvrtc import BODY, NotCompiled, messages_and_ptx
from dev.common.program import run_main
from dev.features.checkpoints.state_file import State
from dev.features.order import SOURCES
from dev.llama3.train_llama3 import Config3
from dev.tests.jobs import MPI, MPIRUN
from dev.tests.trainings import file_of, random_examples, without
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import UserError, replace_file, to_float, whole_shape

# -ffp-contract=off: else the compiler may fuse a product and a sum in one tree and not in the
# other. With an order --device cpu runs kernels.cu, not its loops.
ENVIRONMENT = MPI | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                     "CXXFLAGS": "-O1 -ffp-contract=off", "CUDA_ON_CPU_ORDER": "forward",
                     "TRAIN_GPT2_WAIT": "120", "PYTHONDONTWRITEBYTECODE": "1"}
FLAGS = [(None, "--only", "name", "", "cases whose name has this, a regular expression"),
         (None, "--code", "switch", 0, "only the code of kernels"),
         (None, "--device", ("cpu", "cuda"), None, "default: cuda if there is a GPU"),
         (None, "--jobs", "count", None, "cases at a time (default: 2 on a CPU, 6 on a GPU)")]

# ---- The cases

USUAL = ("-i ../../data/part_train_*.bin -j ../../data/part_val_0.bin -b 2 -t 32 -x 4 -n 2 -v 2 -m "
         "2 -s 0 -l 1e-2 -c 0.1 -u 2 -q 0.1 --dtype fp32")


class Case(NamedTuple):
    flags: str  # besides USUAL; later ones win
    # More runs, (flags, ranks): the first resumes step 2 of the run before, the next step 4, ...
    then: tuple = ()
    model: str = "gpt2"  # a file of data_files(); its name begins with the program's
    ranks: int = 1
    needs: str = ""  # cuda, or cpu
    cxx: str = ""  # more flags of the compiler
    fails: bool = False  # it must fail

    @property
    def name(self):
        """The case in words, which are a folder's name, too."""
        runs = [(self.flags, self.ranks), *self.then]
        words = [f"{ranks}x {flags}" for flags, ranks in runs]
        text = f"{self.model} {' then '.join(words)} {self.cxx}"
        return re.sub(r"[^-+.=,\w]+", " ", text).strip()

    def last(self, flag):
        """The value of a flag, which several may give."""
        return re.findall(rf"{flag} (\S+)", f"{USUAL} {self.flags}")[-1]


AGAIN, HELP = (("", 1),), "--help"
D3 = "-d 192"  # three micro-batches
DRY_RUN = "--dry-run 1 --dtype bf16 -e d2 -b 16 -t 1024 -i ../../data/long_train.bin -v 0"
SAMPLE = ("-e ../../data/gpt2.bin --sample= --seed 1 -g 12 --temperature 0.8 --top-k 40 "
          "--dtype fp32")
HELLASWAG = "--hellaswag ../../data/hellaswag.bin -b 4"
OUTLIERS = "-b 1 -t 3 -x 131 -n 0 -v 0 -l 1e-4 -sl 0.2 -sg 0.2"
RESUMED = (
    "-s 2 -g 8", f"{D3} --shuffle 1", f"{D3} --shuffle 0", f"--dtype tf32 {D3}", "--dtype bf16",
    f"--dtype bf16 {D3}", f"--recompute 1 {D3}", f"--recompute 2 {D3}", "--attention relu",
    f"--moments bf16 {D3}", "--moments bf16 --dtype bf16 --seed 5", f"--dtype fp8 {D3}",
    f"--dtype fp8 --recompute 2 {D3}", "--dtype fp8 --moments bf16",
    # skips steps 129, 130 and 132
    "-b 1 -t 3 -x 134 -n 131 -v 0 -l 1e-4 -sl 0.2 -sg 0.4")
ONCE = (
    "--dtype bf16 -e d2 -t 8 -b 1 -x 1 -n 0 -v 0 --seed 7", f"--recompute 1 --dtype bf16 {D3}",
    f"--recompute 2 --dtype bf16 {D3}", f"--attention relu --dtype bf16 --recompute 2 {D3}",
    "--attention relu --recompute 1", "--moments bf16 --dtype bf16 --recompute 2",
    "--dtype fp8 --recompute 1", "-k wsd -x 6 -q 0 --beta1 0.8 --beta2 0.95 --eps 1e-6 --clip 0",
    "-k linear -x 6 --clip 0.5", "-k constant -n 1 -nk 1 -nm 2", f"-a 1 {D3}", HELLASWAG)
LLAMAS = (  # flags, more runs, model
    (D3, AGAIN, "llama_tied"), (f"{D3} -s 4 -g 6", AGAIN, "llama_gqa"),
    (f"--dtype bf16 {D3}", AGAIN, "llama_gqa"), (f"--recompute 1 {D3}", (), "llama_gqa"),
    (f"--recompute 2 {D3}", AGAIN, "llama_tied"), ("--recompute 2 --dtype bf16", (), "llama_gqa"),
    ("--moments bf16 --dtype bf16", AGAIN, "llama_tied"), (f"--dtype fp8 {D3}", AGAIN, "llama_gqa"),
    ("--dtype fp8 --recompute 2", (), "llama_gqa"),
    ("--attention relu --recompute 1", (), "llama_gqa"))
# Flags, more runs. A run that resumes with another number of ranks goes on with the next data file
TWO_RANKS = (
    ("-d 256", (("", 2),)), ("-d 256 -z 1", (("", 2),)), ("-z 1 -s 4 -g 4 --log-ranks 1", ()),
    ("-x 6 -d 256", (("-z 0", 1), ("-z 1", 2))), ("-x 6 -z 1", (("-z 0", 2), ("-z 1", 2))),
    ("--dtype bf16 -z 1 -d 256", (("", 2),)), ("--dtype fp8", (("", 2),)),
    ("--dtype fp8 -z 1 -d 256", (("", 2),)), ("--moments bf16", ()),
    ("--moments bf16 -z 1", (("", 1),)), ("--recompute 2 -z 1", ()), (f"{HELLASWAG} -x 2", ()),
    (OUTLIERS, ()), (f"{OUTLIERS} -z 1 --moments bf16", ()))
CASES = [
    Case(HELP), Case(HELP, model="llama_tied"), Case(f"{DRY_RUN} --recompute 2"),
    Case(DRY_RUN, model="llama_gqa"), Case(SAMPLE), Case("-l 1e30 -x 6", fails=True),
    *(Case(flags, AGAIN) for flags in RESUMED), *map(Case, ONCE),
    Case(f"--dtype bf16 {D3}", cxx="-DAS_HOPPER -DHOPPER", needs="cpu"),
    *(Case(*row) for row in LLAMAS), *(Case(*row, ranks=2) for row in TWO_RANKS),
    Case("-z 1 -d 256", (("", 2),), "llama_gqa", ranks=2), Case("-d 192", ranks=3),
    Case("-z 1", (), "llama_tied", ranks=3), Case("-d 384 -z 1", (("", 3),), ranks=3),
    Case("-x 6 -d 256 --shuffle 0", (("-z 1", 2), ("-z 0", 1))),
    *(Case(f"--dtype {dtype} {D3} --plain 1", AGAIN, needs="cuda")
      for dtype in ("fp32", "tf32", "bf16")),
    *(Case(f"--dtype {dtype} {D3} --graph 0", needs="cuda")
      for dtype in ("fp32", "tf32", "bf16", "fp8")),
    *(Case(f"--dtype {flags}", AGAIN, "gpt2_128", needs="cuda")
      for flags in (f"bf16 {D3}", "bf16 --attention relu", f"fp8 {D3}", "fp32")),
    Case("--dtype bf16 --plain 1", (), "llama_tied", needs="cuda"),
    Case(f"--dtype bf16 --graph 0 {D3}", (), "llama_gqa", needs="cuda"),
]

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


def run_case(case, device, tree, side, olds):
    """Run a case with a tree. Its runs are written under `side`, and resume those under `olds`.
    Returns (exit statuses, the seconds it took)."""
    folder, begun, statuses = side / case.name, time.monotonic(), []
    folder.mkdir(parents=True)
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(tree)}
    environment["CXXFLAGS"] += f" {case.cxx}"
    program = "dev.llama3.train_llama3" if case.model.startswith("llama") else "train_gpt2"
    usual = case.flags not in (HELP, SAMPLE)
    model = f"-e ../../data/{case.model}.bin {USUAL}" * usual
    for i, (flags, ranks) in enumerate([("", case.ranks), *case.then]):
        words = f"--device {device} {model} {case.flags} {flags}" + f" -o run{i}" * usual
        words += f" --gpus {ranks}" * (ranks > 1 and device == "cuda") + " -y 1" * (i > 0)
        command = [sys.executable, "-m", program, *words.split()]
        if ranks > 1 and device == "cpu":
            command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *command]
        if i:  # as if it had been killed before later steps
            without(olds / case.name / f"run{i - 1}", folder / f"run{i}",
                    *range(i * int(case.last("-n")) + 1, 150))
        with open(folder / f"out{i}.txt", "w") as out:
            statuses.append(subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=environment, cwd=folder).returncode)
        if statuses[-1]:
            break
    return statuses, time.monotonic() - begun


# ---- How two runs differ

LINE = re.compile(r"step +\d+/\d+ \| loss \S+ \| norm +\S+ \| lr \S+|val loss .*|HellaSwag: "
                  r".*|WARNING: step .*|outlier +\| z-scores: loss \S+ norm [^;]+")
FLAG = re.compile(r"^  (-\S+)(?: .*?, (--\S+))?")
SIZE = re.compile("(?!estimate|memory).*[GM]iB")
TIMES = re.compile(r', "(time|ms|tok_per_s)": [\d.]+')
# Fields that only one tree may have: flags, which the case "help" compares, and algorithms, since
# the file also has those of other runs
OWN = re.compile(r"flags\.|products\.algorithms\.")


def printed(lines, case):
    """{place: a line of what a run printed that must be the same}."""
    kept, sampling = [], case.flags == SAMPLE
    for line in lines:
        found = LINE.match(line)
        if case.flags == HELP:
            kept = sorted([*kept, *FLAG.findall(line)])  # they may come in any order
        elif "--dry-run" in case.flags:
            kept += [re.findall(r"^\w+|[\d.]+", line)] * bool(SIZE.match(line))
        elif found or sampling and not line.startswith("compiling "):
            kept.append(found[0] if found else line)
        sampling ^= line == "---" and case.flags != SAMPLE
    return {f"line {i}": line for i, line in enumerate(kept, 1)}


def fields(x, path=""):
    """{path of a field: value} of nested dicts and lists."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else None
    return {path: x} if items is None else {
        key: value for name, y in items for key, value in fields(y, f"{path}{name}.").items()}


def tensors(path, like):
    """{name: array} of a checkpoint or state file, laid out as the file `like`."""
    model = like.with_name(f"model_{like.name[6:14]}.bin")
    magic, version = np.fromfile(model, "<i4", 2)
    c = (Config if magic == Config.FILE.magic else Config3).from_file(model)
    if like == model:
        headers, kind = len(c.headers(version)), c.STORED[version]
        rows = [(row.name, kind, whole_shape(row)) for row in c.file_table()]
    else:
        headers, state = 1, State(like, c)
        rows = [(f"{each} {row.name}", "<f4", whole_shape(row))
                for each in ("m", "v", "parameters")[: state.sets] for row in state.table]
    layout = [("header", "<i4", 256 * headers), *rows]
    rest = (path.stat().st_size - np.dtype(layout).itemsize) // 4
    [found] = np.fromfile(path, [*layout, ("the shuffle", "<i4", rest)])
    return {name: found[name] for name in found.dtype.names}


def parts(path, like, case):
    """{place: value} of what must be the same in a file. like: OLD's file of this name."""
    name, data = path.name, path.read_bytes()
    if name.startswith("out"):
        return printed(data.decode().splitlines(), case)
    if name.startswith("run_"):  # without the paths in the folders of the two trees
        return fields(json.loads(re.sub(rb"/(old|new)/", b"/", data)))
    if name.endswith(".npz"):
        return fields({key: json.loads(str(x)) if key == "notes" else x.tobytes()
                       for key, x in np.load(path).items()})
    if name.endswith((".log", ".jsonl")):
        lines = TIMES.sub("", data.decode()).splitlines()
        return {f"line {i}": line for i, line in enumerate(lines, 1)}
    with contextlib.suppress(UserError):  # damaged, or of a format that this tree does not know
        if name.startswith(("model_", "state_")) and len(data) == like.stat().st_size:
            return tensors(path, like)
    return {"size": len(data), "digest": hashlib.sha256(data).hexdigest()}


def first(what, old, new):
    """The first difference of two dicts, and how many more there are: a list of one line, or
    none."""
    bits = lambda x: x.tobytes() if isinstance(x, np.ndarray) else x
    keys = [key for key in {**old, **new}
            if bits(old.get(key, "nothing")) != bits(new.get(key, "nothing"))
            and (key in old and key in new or not OWN.match(key))]
    if not keys:
        return []
    key, more = keys[0], f"; and {len(keys) - 1} more" * (len(keys) > 1)
    a, b = (side.get(key, "nothing") for side in (old, new))
    if {type(a), type(b)} != {np.ndarray}:
        return [f"{what}: {key.strip('.')}: {a!r} and {b!r}{more}"]
    places = np.argwhere(a.view(f"u{a.itemsize}") != b.view(f"u{a.itemsize}"))
    a, b, at = to_float(a), to_float(b), tuple(places[0])
    return [f"{what}: {key}{[*map(int, at)]}: {a[at]:.9g} and {b[at]:.9g}; {len(places)} of "
            f"{a.size} numbers differ, by up to {np.nanmax(abs(a - b)):.3g}{more}"]


def compare(case, sides, statuses):
    """Compare a case's runs, given both folders and both lists of exit statuses: (differences,
    files compared)."""
    sides = [side / case.name for side in sides]
    if statuses[0] != statuses[1] or bool(statuses[0][-1]) != case.fails:
        ends = [(side / f"out{len(status) - 1}.txt").read_text().strip().rpartition("\n")[2]
                for side, status in zip(sides, statuses)]
        return [f"exit status {statuses[0]} and {statuses[1]}: {ends[0]!r} and {ends[1]!r}"], 0
    names = [{str(path.relative_to(side)) for path in side.rglob("*.*")} for side in sides]
    both = sorted(names[0] & names[1], key=lambda name: (re.sub(r"\D", "", name), name))
    found = [f"only {'OLD' if name in names[0] else 'NEW'} has {name}"
             for name in sorted(names[0] ^ names[1])]
    for name in both:
        paths = [side / name for side in sides]
        if "rank_" not in name and len({path.read_bytes() for path in paths}) > 1:
            found += first(name, *(parts(path, paths[0], case) for path in paths))
    return found, len(both)


# ---- The code of kernels

OF_ALL = ["kernels.cu", "llama3.cu", *(path.name for path in SOURCES
                                       if path.parent.name not in ("fp8", "hopper"))]
FP8_GELU = "kernels.cu fused_biases.cu fp8.cu hopper.cuh turns.cuh fp8_gelu.cu".split()
TURNS = "kernels.cu hopper.cuh turns.cuh gelu_products.cu swiglu_products.cu symmetric.cu".split()
FP8 = "BF16 -DHOPPER -DOUTPUT=<fp8_output.cuh>"
# (GPU, -D switches, channels, channels of a head, files). A tree may lack some of the files.
CODE = [("sm_80", "BF16", 768, 64, OF_ALL), ("sm_80", "FP32", 768, 64, OF_ALL),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, OF_ALL), ("sm_90a", "FP32", 768, 64, OF_ALL),
        ("sm_90a", FP8, 768, 64, [*OF_ALL, "fp8.cu"]), ("sm_90a", FP8, 768, 64, FP8_GELU),
        ("sm_90a", "BF16 -DHOPPER", 1024, 128, [*OF_ALL[:2], "hopper.cuh", "attention_five.cu"]),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, TURNS)]


def code_of(tree, row):
    """{kernel: PTX} of a row of CODE from a tree's files, or {NVRTC's message: ""}."""
    gpu, switches, channels, HS, names = row
    files = {path.name: path for path in (*(tree / "dev").rglob("*.cu*"), *tree.glob("*.cu"))}
    text = "".join(files[name].read_text("utf-8") for name in names if name in files)
    headers = {f"-I{path.parent}" for path in files.values() if path.suffix == ".cuh"}
    options = f"-std=c++17 -D{switches} -DCHANNELS={channels} -DHS={HS}".split()
    try:
        _, ptx = messages_and_ptx(text, gpu, [*options, *sorted(headers)])
    except NotCompiled as e:
        return {f"NVRTC could not compile it: {str(e).strip()[:300]}": ""}
    ptx = re.sub(r"\$L__BB\d+|__local_depot\d+", "", ptx)  # numbered by the order of kernels
    return {"the rest": BODY.sub("", ptx)} | {body[1]: body[0] for body in BODY.finditer(ptx)}


def compare_code(old, new, jobs):
    """Yields (name, the kernels that differ, how many were compared) for each row of CODE."""
    with ProcessPoolExecutor(jobs) as pool:
        sides = [pool.map(code_of, [tree] * len(CODE), CODE) for tree in (old, new)]
        for row, a, b in zip(CODE, *sides):
            differ = [f"{key} ({'both' if key in a and key in b else 'OLD' if key in a else 'NEW'})"
                      for key in sorted(a.keys() | b.keys())
                      if a.get(key) != b.get(key) or key.startswith("NVRTC")]
            yield f"code, {' '.join(map(str, row[:4]))}", differ, len(a)


def report(name, found, count, seconds=0.0):
    """Print the line of a case. Returns whether it differs."""
    rest = f"{count:4} compared {seconds:6.1f} s"
    if found:
        rest = "; ".join(found[:4]) + f"; and {len(found) - 4} more" * (len(found) > 4)
    print(f"{'DIFFERS' if found else 'same   '}  {name:60} {rest}", flush=True)
    return bool(found)


def main(arguments=None):
    names, own = split_names(sys.argv[1:] if arguments is None else arguments, FLAGS)
    flags, begun, results = parse_flags(__doc__, FLAGS, own), time.monotonic(), []
    if len(names) != 2:
        raise UserError(f"{' '.join(names) or 'nothing'}: expected OLD and NEW, each a commit, a "
                        "folder, or . for the working tree")
    listed = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    gpus = listed.count("UUID: GPU")
    device = flags.device or ("cuda" if gpus else "cpu")
    jobs = flags.jobs or (2 if device == "cpu" else 6)
    cases = [case for case in CASES if not flags.code
             and re.search(flags.only, case.name) and case.needs in ("", device)
             and max(case.ranks, *(ranks for _, ranks in case.then), 1) <=
             (gpus if device == "cuda" else 3)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        old, new = (unpack(name, folder) for name in names)
        olds, news = (Path(folder) / side for side in ("old", "new"))
        data_files(Path(folder) / "data")
        # Of a dtype one at a time, since the first compiles what the next ones use, and on a GPU
        # chooses their algorithms
        of_dtype = lambda dtype: {case.name: run_case(case, device, old, olds, olds)
                                  for case in cases if case.last("--dtype") == dtype}
        dtypes = {case.last("--dtype") for case in cases}
        before = {name: ran for some in pool.map(of_dtype, dtypes) for name, ran in some.items()}
        print(f"OLD took {time.monotonic() - begun:.0f} s for {len(cases)} cases", flush=True)
        again = pool.map(lambda case: run_case(case, device, new, news, olds), cases)
        for case, (ended, seconds) in zip(cases, again):
            found = compare(case, (olds, news), (before[case.name][0], ended))
            results.append(report(case.name, *found, seconds))
        if flags.code or not flags.only:
            results += [report(*row) for row in compare_code(old, new, jobs)]
    passed, failed = (results.count(kind) for kind in (False, True))
    print(f"{passed} passed, {failed} failed, in {time.monotonic() - begun:.0f} s")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    run_main(main)
