"""How the runs of two trees differ. Part of same.py."""
import contextlib
import hashlib
import json
import re

import numpy as np

from dev.common.config import Config
from dev.features.checkpoints.state_file import State
from dev.llama3.train_llama3 import Config3
from train_gpt2 import UserError, whole_shape

LINE = re.compile(r"step +\d+/\d+ \| loss \S+ \| norm +\S+ \| lr \S+|val loss .*|HellaSwag: "
                  r".*|WARNING: step .*|outlier +\| z-scores: loss \S+ norm [^;]+")
SIZE = re.compile("[GM]iB")
UNSTEADY = re.compile(r"estimate|memory")
TIMES = re.compile(r', "(time|ms|tok_per_s)": [\d.]+')
# Fields that only one tree may have: flags, which the case "help" compares; algorithms, since the
# file also has those of other runs; the windows of outliers, which older trees wrote in every run
OWN = re.compile(r"flags\.|products\.algorithms\.|windows\.|seen\.")


def printed(path, case):
    """The lines of what a run printed that must be the same."""
    kept, sampling = [], case.name == "sample"
    for line in path.read_text().splitlines():
        if case.flags == "--help":
            kept += re.findall(r"^  (-\S+)(?: .*?, (--\S+))?", line)
        elif sampling or LINE.match(line):
            kept.append((LINE.match(line) or [line])[0])
        elif "--dry-run" in case.flags and SIZE.search(line) and not UNSTEADY.match(line):
            kept.append(" ".join(re.findall(r"^\w+|[\d.]+", line)))
        if line == "---" and not case.name == "sample":
            sampling = not sampling
    # Flags may come in any order.
    return sorted(kept) if case.flags == "--help" else kept


def fields(x, path=""):
    """{path of a field: value} of nested dicts and lists."""
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else None
    return {path: x} if items is None else {
        key: value for name, y in items for key, value in fields(y, f"{path}{name}.").items()}


def tensors(path, like):
    """{name: array} of a checkpoint or state file, which should be laid out as another one is: its
    header, its tensors and its shuffle."""
    model = like.with_name(f"model_{like.name[6:14]}.bin")
    magic, version = np.fromfile(model, "<i4", 2)
    c = (Config if magic == Config.FILE.magic else Config3).from_file(model)
    rows, start, kind = c.file_table(), 1024, "<f4"
    if like == model:
        start, kind = 1024 * len(c.headers(version)), "<u2" if version == 5 else "<f4"
    else:
        state = State(like, c)
        rows = [row._replace(name=f"{each} {row.name}")
                for each in ("m", "v", "parameters")[: state.sets] for row in state.table]
    found, numbers = {"header": np.fromfile(path, "<i4", start // 4)}, np.fromfile(
        path, kind, offset=start)
    if kind == "<u2":
        numbers = (numbers.astype("<u4") << 16).view("<f4")
    for row in rows:
        found[row.name] = numbers[: row.size].reshape(whole_shape(row))
        numbers = numbers[row.size :]
    return found | {"the shuffle": numbers}


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


def bits_of(x):
    return x.tobytes() if isinstance(x, np.ndarray) else x


def first(what, old, new):
    """The first difference of two dicts, and how many more there are: a list of one line, or
    none."""
    keys = [key for key in {**old, **new}
            if bits_of(old.get(key, "nothing")) != bits_of(new.get(key, "nothing"))
            and (key in old and key in new or not OWN.match(key))]
    for key in keys[:1]:
        a, b = (side.get(key, "nothing") for side in (old, new))
        said = f"{key.strip('.')}: {a!r} and {b!r}"
        if isinstance(a, np.ndarray) and np.shape(a) == np.shape(b):
            places = np.argwhere(a.view("u4") != b.view("u4"))
            at = tuple(places[0])
            said = (f"{key}{[*map(int, at)]}: {a[at]:.9g} and {b[at]:.9g}; {len(places)} of "
                    f"{a.size} numbers differ, by up to {np.nanmax(abs(a - b)):.3g}")
        return [f"{what}: {said}" + f"; and {len(keys) - 1} more" * (len(keys) > 1)]
    return []


def compare(case, olds, news):
    """Compare a case's runs: (differences, or None if it was skipped; lines and files
    compared)."""
    sides = [side / case.folder for side in (olds, news)]
    statuses = [json.loads((side / "case.json").read_text())["statuses"] for side in sides]
    said = [(side / f"err{len(status) - 1}.txt").read_text()
            for side, status in zip(sides, statuses)]
    said = [(re.findall("^error: .*", text, re.M) or [text.strip()[-300:]])[0] for text in said]
    if statuses[0] != statuses[1]:
        return [f"exit status {statuses[0]} and {statuses[1]}: {said[0]!r} and {said[1]!r}"], 0
    if statuses[0][-1] and all(re.search("tiktoken", text) for text in said):
        return None, 0  # neither has GPT-2's vocabulary, which a prompt needs
    if bool(statuses[0][-1]) != case.fails:
        return [f"both end with exit status {statuses[0]}: {said[0]}"], 0
    found, count = [], 0
    for i in range(len(statuses[0])):
        a, b = (printed(side / f"out{i}.txt", case) for side in sides)
        names = [{path.name for path in side.glob(f"run{i}/*")} for side in sides]
        both = sorted(names[0] & names[1], key=lambda name: (re.sub(r"\D", "", name)[:8], name))
        count += len(a) + len(both)
        differ = first("printed", *({f"line {at}": line for at, line in enumerate(lines, 1)}
                                    for lines in (a, b)))
        differ += [f"only {'OLD' if name in names[0] else 'NEW'} has {name}"
                   for name in sorted(names[0] ^ names[1])
                   if name != "log.jsonl"]  # older trees wrote none
        for name in both:
            paths = [side / f"run{i}" / name for side in sides]
            if not name.startswith("rank_") and len({path.read_bytes() for path in paths}) > 1:
                differ += first(name, *(parts(path, paths[0]) for path in paths))
        found += [f"run {i + 1}: {x}" for x in differ]
    return found, count
