"""How the runs of two trees differ, and the code of their kernels. Part of same.py."""
import concurrent.futures
import contextlib
import hashlib
import json
import re

import numpy as np

from dev.common.config import Config
from dev.common.nvrtc import BODY, NotCompiled, messages_and_ptx
from dev.features.checkpoints.state_file import State
from dev.features.order import SOURCES
from dev.llama3.train_llama3 import Config3
from train_gpt2 import UserError, to_float, whole_shape

LINE = re.compile(r"step +\d+/\d+ \| loss \S+ \| norm +\S+ \| lr \S+|val loss .*|HellaSwag: "
                  r".*|WARNING: step .*|outlier +\| z-scores: loss \S+ norm [^;]+")
HELP = re.compile(r"^  (-\S+)(?: .*?, (--\S+))?")
SIZE = re.compile("(?!estimate|memory).*[GM]iB")
TIMES = re.compile(r', "(time|ms|tok_per_s)": [\d.]+')
# Fields that only one tree may have: flags, which the case "help" compares, and algorithms, since
# the file also has those of other runs
OWN = re.compile(r"flags\.|products\.algorithms\.")


def printed(path, case):
    """{place: a line of what a run printed that must be the same}."""
    kept, sampling = [], case.name == "sample"
    for line in path.read_text().splitlines():
        found = LINE.match(line)
        if case.flags == "--help":
            kept = sorted([*kept, *HELP.findall(line)])  # they may come in any order
        elif "--dry-run" in case.flags:
            kept += [re.findall(r"^\w+|[\d.]+", line)] * bool(SIZE.match(line))
        elif found or sampling:
            kept.append(found[0] if found else line)
        sampling ^= line == "---" and case.name != "sample"
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


def parts(path, like):
    """{place: value} of what must be the same in a file. like: OLD's file of this name."""
    name, data = path.name, path.read_bytes()
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
    lines and files compared)."""
    sides = [side / case.name for side in sides]
    if statuses[0] != statuses[1] or bool(statuses[0][-1]) != case.fails:
        ends = [(side / f"out{len(status) - 1}.txt").read_text().strip().rpartition("\n")[2]
                for side, status in zip(sides, statuses)]
        return [f"exit status {statuses[0]} and {statuses[1]}: {ends[0]!r} and {ends[1]!r}"], 0
    found, count = [], 0
    for i in range(len(statuses[0])):
        lines = [printed(side / f"out{i}.txt", case) for side in sides]
        names = [{path.name for path in side.glob(f"run{i}/*")} for side in sides]
        both = sorted(names[0] & names[1], key=lambda name: (re.sub(r"\D", "", name)[:8], name))
        count += len(lines[0]) + len(both)
        differ = first("printed", *lines)
        differ += [f"only {'OLD' if name in names[0] else 'NEW'} has {name}"
                   for name in sorted(names[0] ^ names[1])]
        for name in both:
            paths = [side / f"run{i}" / name for side in sides]
            if not name.startswith("rank_") and len({path.read_bytes() for path in paths}) > 1:
                differ += first(name, *(parts(path, paths[0]) for path in paths))
        found += [f"run {i + 1}: {x}" for x in differ]
    return found, count


# ---- The code of kernels

OF_ALL = ["kernels.cu", "llama3.cu", *(path.name for path in SOURCES
                                       if path.parent.name not in ("fp8", "hopper"))]
TURNS = ["hopper.cuh", "turns.cuh"]
FP8_GELU = ["kernels.cu", "fused_biases.cu", "fp8.cu", *TURNS, "fp8_gelu.cu"]
FP8 = "BF16 -DHOPPER -DOUTPUT=<fp8_output.cuh>"
# (GPU, -D switches, channels, channels of a head, files). A tree may lack some of the files.
CODE = [("sm_80", "BF16", 768, 64, OF_ALL), ("sm_80", "FP32", 768, 64, OF_ALL),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, OF_ALL), ("sm_90a", "FP32", 768, 64, OF_ALL),
        ("sm_90a", FP8, 768, 64, [*OF_ALL, "fp8.cu"]),
        ("sm_90a", FP8, 768, 64, FP8_GELU),
        ("sm_90a", "BF16 -DHOPPER", 1024, 128, [*OF_ALL[:2], "hopper.cuh", "attention_five.cu"]),
        ("sm_90a", "BF16 -DHOPPER", 768, 64, ["kernels.cu", *TURNS, "gelu_products.cu",
                                              "swiglu_products.cu", "symmetric.cu"])]


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
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:
        sides = [pool.map(code_of, [tree] * len(CODE), CODE) for tree in (old, new)]
        for row, a, b in zip(CODE, *sides):
            differ = [f"{key} ({'both' if key in a and key in b else 'OLD' if key in a else 'NEW'})"
                      for key in sorted(a.keys() | b.keys())
                      if a.get(key) != b.get(key) or key.startswith("NVRTC")]
            yield f"code, {' '.join(map(str, row[:4]))}", differ, len(a)
