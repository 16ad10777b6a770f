"""How the runs of two trees differ. Part of same.py."""
import io
import itertools
import json
import math
import re
import struct

import numpy as np

from dev.tests.same_cases import table_of

LINE = re.compile(r"step +\d+/\d+ \| loss \S+ \| norm +\S+ \| lr \S+|val loss .*|HellaSwag: "
                  r".*|WARNING: step .*|outlier +\| z-scores: loss \S+ norm [^;]+")
SIZE = re.compile("[GM]iB")
UNSTEADY = re.compile(r"compiling|estimate|memory|wrote|\d+ steps in")


def printed(path, case):
    """What a run printed: (lines that must be the same, the words of the others without their
    numbers)."""
    kept, words, sampling = [], [], case.name == "sample"
    for line in path.read_text().splitlines():
        if case.flags == "--help":
            kept += re.findall(r"^  (-\S+)(?: .*?, (--\S+))?", line)
        elif sampling or LINE.match(line):
            kept.append((LINE.match(line) or [line])[0])
        elif "--dry-run" in case.flags and SIZE.search(line) and not UNSTEADY.match(line):
            kept.append(" ".join(re.findall(r"^\w+|[\d.]+", line)))
        elif not UNSTEADY.match(line):
            words.append(re.sub(r"[\d.,:%]+", "#", SIZE.sub("bytes", line)))
        if line == "---" and not case.name == "sample":
            sampling = not sampling
    return kept, words


def first(what, old, new):
    """Yields the first difference of two lists, if any."""
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
    """Yields where the numbers of two files differ, and by how much. table: the tensors in the
    file's order."""
    bits = [np.frombuffer(x, kind.replace("f", "u"), size_of(table)) for x in (old, new)]
    a, b = (x.view("f4") if kind == "<f4" else (x.astype("u4") << 16).view("f4") for x in bits)
    places, start, tensors = np.flatnonzero(bits[0] != bits[1]), 0, []
    for name, *shape in table:
        inside = places[(places >= start) & (places < start + math.prod(shape))] - start
        tensors += ([f"{name}{[int(i) for i in np.unravel_index(inside[0], shape)]}"]
                    if inside.size else [])
        start += math.prod(shape)
    if tensors:
        at, most = places[0], np.nanmax(np.abs(a[places].astype(float) - b[places]))
        yield (f"{what}{tensors[0]}: {a[at]:.9g} and {b[at]:.9g}; {places.size} of {a.size} "
               f"numbers differ, by up to {most:.3g}, in {len(tensors)} of {len(table)} tensors")


def of_files(name, old, new, model):
    """Yields how two files of a run differ. model: for a state file, the bytes of its
    checkpoint."""
    if old == new:
        return
    if name == "main.log":
        yield from first(name, old.decode().splitlines(), new.decode().splitlines())
    elif name == "log.jsonl":
        yield from first(name, *(re.sub(r', "(time|ms|tok_per_s)": [\d.]+', "",
                                        x.decode()).splitlines() for x in (old, new)))
    elif name.startswith("run_"):
        # Skipped where only one has them: flags, which the case "help" compares; algorithms, since
        # the file also has those of other runs; the windows of outliers, which older trees wrote in
        # every run.
        a, b = fields(json.loads(old)), fields(json.loads(new))
        pairs = {key: [x.get(key, "nothing") for x in (a, b)] for key in sorted(a.keys() | b.keys())
                 if key in a and key in b or
                 not re.match(r"\.(flags|products\.algorithms|windows|seen)\.", key)}
        pairs = {key: [re.sub(r"/(old|new)/", "/", x) if isinstance(x, str) else x for x in pair]
                 for key, pair in pairs.items()}  # paths in the folders of the two trees
        pairs = {key: (x, y) for key, (x, y) in pairs.items() if x != y}
        if pairs:
            key, (x, y) = next(iter(pairs.items()))
            yield f"{name}: {key[1:]}: {x!r} and {y!r}" + f", and {len(pairs) - 1} more fields" * (
                len(pairs) > 1)
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
                table = [(f"{each} {row}", *shape) for each in ("m", "v", "parameters")
                         for row, *shape in table]
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
    """Compare a case's runs: (differences, or None if it was skipped; lines and files compared;
    whether other words differ)."""
    sides = [side / case.folder for side in (olds, news)]
    statuses = [json.loads((side / "case.json").read_text())["statuses"] for side in sides]
    said = [(side / f"err{len(status) - 1}.txt").read_text()
            for side, status in zip(sides, statuses)]
    said = [(re.findall("^error: .*", text, re.M) or [text.strip()[-300:]])[0] for text in said]
    if statuses[0] != statuses[1]:
        unknown = "".join(f"{tree} cannot do it: " for tree, x in zip(("OLD", "NEW"), said)
                          if re.search("is no flag|unrecognized arguments", x))
        return ([f"{unknown}exit status {statuses[0]} and {statuses[1]}: {said[0]!r} and "
                 f"{said[1]!r}"], 0, False)
    if statuses[0][-1] and all(re.search("tiktoken", text) for text in said):
        return None, 0, False  # neither has GPT-2's vocabulary, which a prompt needs
    if bool(statuses[0][-1]) != case.fails:
        return [f"both end with exit status {statuses[0]}: {said[0]}"], 0, False
    found, count, reworded = [], 0, said[0] != said[1]
    for i in range(len(statuses[0])):
        (a, words), (b, others) = (printed(side / f"out{i}.txt", case) for side in sides)
        files = [{path.name: path.read_bytes() for path in side.glob(f"run{i}/*")}
                 for side in sides]
        both = sorted(files[0].keys() & files[1].keys(),
                      key=lambda name: (re.sub(r"\D", "", name)[:8], name))
        count, reworded = count + len(a) + len(both), reworded or words != others
        if case.flags == "--help":  # in whatever order
            a, b = sorted(a), sorted(b)
        differ = [*first("printed", a, b)]
        differ += [f"only {'OLD' if name in files[0] else 'NEW'} has {name}"
                   for name in sorted(files[0].keys() ^ files[1].keys())
                   if name != "log.jsonl"]  # older trees wrote none
        for name in both:
            differ += of_files(name, files[0][name], files[1][name],
                               files[0].get(f"model_{name[6:14]}.bin"))
        found += [f"run {i + 1}: {x}" for x in differ]
    return found, count, reworded
