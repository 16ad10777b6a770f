"""Test good and bad files, batches, initial parameters, schedules, samples, and the order of
tokens."""
import contextlib
import dataclasses
import io
import math
import os
import re
import resource
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.lab import gpt2_numpy
from dev.common.bf16 import master_numbers, to_bf16
from dev.common.config import Config, draw_parameters, read_parameters
from dev.common.files import FILES, check_kind, paths_of
from dev.data.vocabulary import TOKENIZER, read_vocabulary
from dev.features import order
from dev.features.base import GPT2, Training
from dev.features.data_loader import FilesLoader, check_pair
from dev.features.schedule import Scheduled
from dev.lab.kernels.adamw import halves
from dev.lab.kernels.adamw_bf16 import rounded, splitmix64
from dev.tests.checks import (EXACT, TOP, check, check_refusal, fast, header_refusal, numbers_of,
                              refusal, words)
from dev.tests.folders import byte_encoding
from dev.tests.models import (AUTOCAST_FLOOR, AUTOCAST_MARGIN, DEBUG_STATE, FIXTURES, LIMITS,
                              device_of, dtypes_of, dump_limit, read_debug_state, write_checkpoint)
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import (BF16, TOKENS, DataLoader, UserError, batch_table, carve, coins,
                        draw_token, pack_batch, read_header, read_tokens, replace_file, to_float)

# ---- Files

SMALL = Config(maxT=40, V=257, L=1, NH=2, C=64, Vp=384)
PARAMETERS = 4 * sum(row.size for row in SMALL.parameter_table())
# Bytes of a debug state before its gradients, for B = 2 and T = 8.
STATE = 4 * (2 * 16 + 16 * 257 + 1)
# Kind: (its FileKind, the header after magic and version, bytes after the header, how it is read)
GOOD_FILES = {
    "GPT-2 checkpoint": (Config.FILE, dataclasses.astuple(SMALL), PARAMETERS, Config.from_file),
    "debug state": (DEBUG_STATE[Config], (2, 8), STATE + PARAMETERS,
                    lambda path: read_debug_state(path, SMALL)),
    "token file": (TOKENS, (100,), 200,
                   lambda path: DataLoader(path, read_tokens(path, SMALL.V), 2, 8)),
    "tokenizer": (TOKENIZER, (100, 99), 100, read_vocabulary),
}
# The message has what was found and what was expected of these.
HEADER, SIZE = "its header", "its size"
# Kind, the message (a regular expression, or one of these two), {index: int32} to change, and a
# function.
BAD_FILES = [
    # from the size of a good file to the size
    *((kind, *row) for kind in GOOD_FILES for row in (
        ("could not be read", {}, lambda size: None),
        (r"its header of 0 bytes .*expected 1024", {}, lambda size: 0),
        (r"its header of 1020 bytes .*expected 1024", {}, lambda size: 1023),
        (SIZE, {}, lambda size: size - 1),
        (SIZE, {}, lambda size: size + 1),
        (HEADER, {0: 1}),
        (HEADER, {1: 0}),
        (HEADER, {1: 9}))),
    # Of bf16.
    ("GPT-2 checkpoint", f"{1024 + PARAMETERS:,} bytes; expected {1024 + PARAMETERS // 2:,}",
     {1: 5}),
    ("GPT-2 checkpoint", "maxT ?= ?0", {2: 0}),
    ("GPT-2 checkpoint", "V ?= ?-1", {3: -1}),
    ("GPT-2 checkpoint", "L ?= ?1073741824", {4: 2**30}),
    ("GPT-2 checkpoint", "NH ?= ?3.* divisible|divisible by NH ?= ?3", {5: 3}),
    ("GPT-2 checkpoint", "C ?= ?48.* multiple of 32", {6: 48}),
    ("GPT-2 checkpoint", "V ?= ?257.* not to exceed Vp", {7: 256}),
    ("GPT-2 checkpoint", "Vp ?= ?260.* multiple of 8", {7: 260}),
    ("debug state", "B = 0", {2: 0}),
    ("debug state", f"expected {1024 + 2**29 * (STATE - 4) + 4 + PARAMETERS:,}", {2: 2**30}),
    ("debug state", "T = -1", {3: -1}),
    ("debug state", "T <= maxT = 40", {3: 41}),
    ("debug state", "token 1 is -1", {257: -1}),
    ("debug state", "token 0 is 257", {256 + 16: 257}),
    # An old format without a header.
    ("token file", r"prepro_tinyshakespeare\.py", {0: 50256 + (318 << 16)}),
    ("token file", "1,224 bytes; expected 1,022", {2: -1}),
    ("token file", "1,224 bytes; expected 4,294,968,318", {2: 2**31 - 1}),
    ("token file", "token 1 is 257", {256: 5 + (257 << 16)}),
    ("token file", "16 tokens; expected 17", {2: 16}, lambda size: 1024 + 32),
    ("token file", "0 tokens; expected 17", {2: 0}, lambda size: 1024),
]


@fast
def test_bad_files(device_name, folder):
    """Each bad file is refused in one line that names it and says what is wrong."""
    for label, wish, change, *resize in [*((kind, None, {}) for kind in GOOD_FILES), *BAD_FILES]:
        (kind, sizes, body, read), path = GOOD_FILES[label], folder / "file.bin"
        content = np.zeros(256 + body // 4, "<i4")
        content[: 2 + len(sizes)] = kind.magic, kind.versions[0], *sizes
        for index, number in change.items():
            content[index] = number
        size = resize[0](content.nbytes) if resize else content.nbytes
        path.write_bytes(content.tobytes().ljust(size or 0, b"\0")[:size])
        if size is None:
            path.unlink()
        if wish == HEADER:
            wish = header_refusal(content[:2].tolist(), kind)
        elif wish == SIZE:
            wish = (f"promises 100 tokens, and its {size:,} bytes|{size:,} bytes; expected "
                    f"{content.nbytes:,}")
        found = refusal(read, path)
        ok = found == wish or found and wish and re.fullmatch(f"{path}: .*({wish}).*", found)
        check(f"{label}: {wish or 'a good one'}", ok, "" if ok else repr(found))


def test_other_kinds(device_name, folder):
    """For a good file of the wrong kind, the error names its kind and the program that takes it,
    for every kind that any module knows. The trainer does so for every file that it opens; without
    dev/ it gives the first numbers."""
    path, header, top = folder / "file.bin", np.zeros(256, "<i4"), TOP
    for label, magic, name, program in (
            ("GPT-2 checkpoint", 20240803, "a Llama 3 checkpoint",
             r"dev/llama3/train_llama3.py trains \(-e\)"),
            ("GPT-2 checkpoint", 20240527, "AdamW's state", "-y 1"),
            ("GPT-2 checkpoint", 20240520, "GPT-2's tokens", "-i"),
            ("GPT-2 checkpoint", 20240522, "HellaSwag's questions", "--hellaswag"),
            ("token file", 20240326, "a GPT-2 checkpoint", r"train_gpt2.py trains \(-e\)"),
            ("token file", 20240328, "a vocabulary", "--vocab"),
            ("tokenizer", 20240327, "a debug state of GPT-2", "test_gpt2.py .*--state"),
            ("debug state", 20240801, "Llama 3's tokens", r"train_llama3.py trains on \(-i\)")):
        kind, read, header[0] = GOOD_FILES[label][0], GOOD_FILES[label][-1], magic
        header.tofile(path)
        wish = f"{path}: is .*{name}, .*{program}.*; expected a {kind.name}: {kind.remedy}"
        plain = f"{path}: .*{header_refusal((magic, 0), kind)}"
        check_refusal(label, wish, check_kind, path, kind)
        check_refusal(label, plain if label in ("GPT-2 checkpoint", "token file") else wish, read,
                      path)
    for name in ("absent.bin", "", "short.bin"):  # the reader itself says what is wrong with these
        (folder / "short.bin").write_bytes(b"\1")
        check(f"no word about {name or 'a folder'}",
              refusal(check_kind, folder / name, TOKENS) is None)
    for name in ("good.bin", "part_1.bin", "part_3.bin"):
        write_tokens(folder / name, range(99))
    for name, magic in (("part_2.bin", 20240801), ("scores.bin", 20240522), ("other.bin", 1)):
        header[:2] = magic, 1
        header.tofile(folder / name)
    tiny, good, scores = (FIXTURES / "gpt2_tiny.bin",
                          *(folder / name for name in ("good.bin", "scores.bin")))
    for wish, *flags in (
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a GPT-2 checkpoint: a "
             "run", "-e", scores),
            ("scores.bin: is a file of Hella.*; expected a GPT-2 checkpoint", "-e", scores,
             "--sample", "a"),
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a token file: prepro",
             "-i", scores),
            ("scores.bin: is a file of HellaSwag's questions, .*; expected a token file: prepro",
             "-j", scores),
            ("scores.bin: is a file of Hella.*; expected a token file", "-i", scores, "--dry-run"),
            ("part_2.bin: is a file of Llama 3's tokens, .*; expected a token f", "-i",
             folder / "part_*.bin"),
            ("scores.bin: is .*; expected a token file", "-j", scores, "-i", scores, "-a"),
            ("good.bin: is a file of GPT-2's tokens, .*; expected a Hella", "--hellaswag", good,
             "-v", 1),
            (f"other.bin: .*{header_refusal((1, 1), TOKENS)}", "-i", folder / "other.bin"),
            (None, "-j", scores, "-v", 0), (None, "-i", scores, "-a")):  # these are not opened
        given = map(str, ("--device", "cpu", "-e", tiny, "-i", good, "-j", good, "-b", 1, "-t", 8,
                          "-x", 0, *flags))
        with contextlib.redirect_stdout(None):
            found = refusal(order.main, [*given])
        ok = found == wish or found and wish and re.fullmatch(f".*{wish}.*", found)
        check(f"train_gpt2.py {' '.join(getattr(flag, 'name', str(flag)) for flag in flags)}", ok,
              found)
    sources = [file.read_text(encoding="utf-8")
               for file in (*top.glob("*.py"), *(TOP / "dev").rglob("*.py"))]
    magics = {int(magic) for text in sources
              for magic in re.findall(r"FileKind\(\s*\"[^\"]+\", (\d+)", text)}
    check("all kinds of files are known", magics == FILES.keys(), magics ^ FILES.keys())
    programs = {name for text in FILES.values() for name in re.findall(r"\S+\.py", text)}
    check("their programs exist", programs and all((top / name).exists() for name in programs),
          programs)


def test_good_files(device_name, folder):
    """A file that was written is read back, in fp32 and in bf16, and a full disk leaves the old
    file as it was."""
    path, copy = folder / "model.bin", folder / "copy.bin"
    models = [GPT2(SMALL, device_of(device_name, dtype, 64, 2), 1, 1)
              for dtype in ("fp32", dtypes_of(device_name)[-1])]
    for model in models:
        model.set_parameters(draw_parameters(SMALL, 42))
        write_checkpoint(path, model)
        dtype, numbers = model.device.dtype, np.fromfile(path, model.device.real, offset=1024)
        found = read_header(path, Config.FILE)[1], Config.from_file(path)
        check(f"checkpoint: its version in {dtype}", found == (3 if dtype == "fp32" else 5, SMALL),
              f"{found}")
        for other in models:
            other.set_parameters(read_parameters(path, SMALL))
            write_checkpoint(copy, other)
            master, again = master_numbers(other), np.fromfile(copy, other.device.real, offset=1024)
            wish = halves(master.astype(np.float64))[0] if other.device.real == BF16 else master
            check(f"checkpoint: written in {dtype}, read and written in {other.device.dtype}",
                  np.array_equal(master, to_float(numbers)) and np.array_equal(again, wish))
    check("checkpoint: what was read, written again", path.read_bytes() == copy.read_bytes())
    models[1].set_parameters(draw_parameters(SMALL, 43))
    room, limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As if the disk were full from there on.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit))
    message = refusal(write_checkpoint, path, models[1])
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit))
    check("checkpoint: a full disk", message and re.fullmatch(f"{path}: .*", message), message)
    check("checkpoint: the old one is intact", path.read_bytes() == copy.read_bytes())
    check("checkpoint: no temporary file is left",
          {p.name for p in folder.iterdir()} == {"model.bin", "copy.bin"})

    tokens = words(257, 41)
    write_tokens(path, tokens)
    check("token file: its header", read_header(path, TOKENS) == [20240520, 1, 41] + 253 * [0])
    data = DataLoader(path, read_tokens(path, SMALL.V), 2, 8)
    for start in (0, 16, 0):
        batch = [tokens[i : i + 16].reshape(2, 8) for i in (start, start + 1)]
        check(f"token file: the batch from {start}", np.array_equal(data.next_batch(), batch))


@fast
def test_packed_batches(device_name, folder):
    """The host's part of encoder_backward_wte: positions sorted by token, and the runs of a token,
    longest first."""
    for V in (1, 300, 70000):  # the last does not fit into 16 bits
        tokens, targets = words(V, 2, 3, 50)
        data, shape = pack_batch(tokens, targets)
        batch = carve(data, batch_table(*shape))
        yield (f"tokens, V={V}", np.stack([batch.tokens, batch.targets]),
               np.stack([tokens, targets]), EXACT)
        order = sorted(range(150), key=tokens.ravel().tolist().__getitem__)
        yield f"order, V={V}", batch.order, np.int32(order), EXACT
        ordered = tokens.ravel()[order].tolist()
        runs = sorted((ordered.index(word), ordered.count(word)) for word in set(ordered))
        found = sorted(map(tuple, batch.runs[: len(runs)].tolist()))
        yield f"runs, V={V}", np.int32(found), np.int32(runs), EXACT
        yield (f"runs, longest first, then zeros, V={V}", batch.runs[:, 1],
               np.sort(batch.runs[:, 1])[::-1], EXACT)
        yield (f"behind the runs, V={V}", batch.runs[len(runs) :],
               np.zeros((150 - len(runs), 2), np.int32), EXACT)


@fast
def test_first_parameters(device_name, folder):
    """Parameters start as in the GPT-2 paper, each tensor with its own random numbers; the padding
    of wte is 0."""
    c, small = Config(maxT=300, V=1000, L=3, NH=2, C=64, Vp=1024), 0.02 / math.sqrt(6)
    params = dict(draw_parameters(c, 1))
    deviations = dict(wte=0.02, wpe=0.02, qkvw=0.02, fcw=0.02, attprojw=small, fcprojw=small)
    for name, array in params.items():
        values = array[: c.V].ravel()
        if name in deviations:
            yield (f"{name}, deviation", values.std(), np.float64(deviations[name]),
                   5 / math.sqrt(2 * values.size))
            yield (f"{name}, mean", 1 + values.mean(), 1,
                   5 * deviations[name] / math.sqrt(values.size))
        else:
            yield name, values, np.full(values.shape, name.endswith("w"), np.float32), EXACT
    yield "wte, padding", params["wte"][c.V :], np.zeros((24, 64), np.float32), EXACT
    different = {float(params[name].ravel()[0] / deviations[name]) for name in deviations}
    yield "tensors that differ", len(different), len(deviations), EXACT
    first, again, other = (numbers_of(draw_parameters(c, seed)) for seed in (1, 1, 2))
    yield "the same seed", again, first, EXACT
    yield "another seed is another model", np.array_equal(other, first), False, EXACT
    for name, sizes, count in (("d12", (12, 12, 768), 124475904),
                               ("d24", (24, 16, 1024), 354871296),
                               ("d36", (36, 20, 1280), 774090240),
                               ("d48", (48, 25, 1600), 1557686400),
                               ("d3", (3, 3, 192), None), ("d18", (18, 14, 896), None),
                               ("d60", (60, 30, 1920), None), ("d72", (72, 30, 2880), None),
                               ("d84", (84, 36, 3456), None)):
        c = Config.from_descriptor(name)
        yield f"sizes of {name}", np.array([c.L, c.NH, c.C]), np.array(sizes), EXACT
        if count:
            yield (f"parameters of {name}", sum(row.size for row in c.parameter_table()), count,
                   EXACT)


SCHEDULES = {  # llm.c's rates at steps 0, 699, 700, 5000, 9432, 15092, 15093 and 18864 of 18865
    "cosine": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 5.28716249e-04, 3.46356886e-04,
               1.15471652e-04, 1.15443312e-04, 6.00000021e-05),
    "linear": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 4.72171756e-04, 3.40419501e-04,
               1.72161846e-04, 1.72132131e-04, 6.00297353e-05),
    "wsd": (8.57142879e-07, 6.00000028e-04, 6.00000028e-04, 6.00000028e-04, 6.00000028e-04,
            6.00000028e-04, 5.91208809e-04, 6.00715866e-05),
    "constant": (6.00000028e-04,) * 8}


@fast
def test_schedules(device_name, folder):
    """The learning rates of llm.c, to the last digit."""
    for kind, rates in SCHEDULES.items():
        flags = SimpleNamespace(learning_rate=6e-4, warmup=700, final_fraction=0.1, schedule=kind)
        layers = (Training,) if kind == "cosine" else (Scheduled, Training)
        rates_of = type("Rates", layers, {})(flags)
        rates_of.steps = 18865
        found = [rates_of.learning_rate(step)
                 for step in (0, 699, 700, 5000, 9432, 15092, 15093, 18864)]
        yield kind, np.float32(found), np.float32(rates), EXACT
    flat = Training(SimpleNamespace(learning_rate=3e-4, warmup=0, final_fraction=1.0))
    flat.steps = 3
    rates = [flat.learning_rate(step) for step in range(3)]
    yield "by default", np.float32(rates), np.float32([3e-4] * 3), EXACT


@fast
def test_samples(device_name, folder):
    """llm.c's coins, and the tokens that they draw from its logits."""
    first = [coin for _, coin in zip(range(6), coins())]
    yield ("coins", np.float32(first), np.float32((0.230317235, 0.19051826, 0.310865164,
                                                   0.902659476, 0.684917867, 0.307830393)), EXACT)
    logits = np.float32((0.1, 2, -1, 0.5, 0))
    drawn = [draw_token(logits, coin) for _, coin in zip(range(8), coins())]
    yield "tokens", np.array(drawn), np.array([1, 1, 1, 3, 1, 1, 1, 1]), EXACT
    yield "the last token", np.array(draw_token(logits, np.float32(1))), np.array(4), EXACT
    for shift in (-1000, 1000):  # their exponentials would be 0 or infinite
        drawn = [draw_token(logits + np.float32(shift), coin) for _, coin in zip(range(8), coins())]
        yield (f"tokens of logits around {shift}", np.array(drawn),
               np.array([1, 1, 1, 3, 1, 1, 1, 1]), EXACT)


@fast
def test_numpy_program(device_name, folder):
    """gpt2_numpy.py prints a loss and five tokens, from a checkpoint of either dtype; and what
    it refuses."""
    c, said = Config(maxT=12, L=1, NH=1, C=32), []
    for version, stored_as in ((3, np.float32), (5, to_bf16)):
        tensors = [stored_as(values) for _, values in draw_parameters(c, 1)]
        replace_file(folder / f"{version}.bin", [*c.headers(version), *tensors])
    for *arguments, wish in ((folder / "3.bin", "O Romeo", "loss"),
                             (folder / "5.bin", "O Romeo", "loss"),
                             (folder / "3.bin", "", "are 1 tokens"),
                             (folder / "3.bin", 12 * "x", "are 13 tokens"),
                             (FIXTURES / "gpt2_tiny.bin", "x", "V = 331 words, and GPT-2 50,257"),
                             (folder / "absent.bin", "x", "dev/tools/convert.py")):
        with (mock.patch.object(sys, "argv", ["gpt2_numpy.py", *map(str, arguments)]),
              mock.patch("dev.features.tokenizer.gpt2_encoding", byte_encoding),
              contextlib.redirect_stdout(io.StringIO()) as output):
            try:
                gpt2_numpy.main()
            except UserError as e:
                output.write(f"{e}")
        said.append(output.getvalue())
        check(f"it says {wish}", wish in said[-1], said[-1].splitlines()[0])
    losses = [float(text.split()[1]) for text in said[:2]]
    yield "a new model's loss", losses, np.full(2, np.log(c.V)), 0.01
    yield ("five tokens", [len(re.findall(r"^ +0\.\d\d%  '.+'$", text, re.M)) for text in said[:2]],
           [5, 5])


@fast
def test_random_numbers(device_name, folder):
    """SplitMix64 in the NumPy formula of dev/lab/kernels/adamw_bf16.py: its published numbers for
    the seed 1234567."""
    wish = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
            16408922859458223821)
    yield "SplitMix64", splitmix64(1234567, range(5)), np.uint64(wish), EXACT
    [x, half] = np.float64([3.0, 3.0 + 2**-7])  # halfway between 3 and the next bf16
    rises = [rounded(np.float64([half]), np.float64(parts), 1)[0] > x
             for parts in (2**15 - 100, 2**15 + 100)]
    check("half way: up with one half of the random numbers", rises == [False, True], rises)


@fast
def test_token_order(device_name, folder):
    """Files and their batches come in llm.c's order: an epoch has each batch of each file once,
    without the tails. The permutations are those that llm.c's own program made with its Mersenne
    Twister."""
    sizes = (12 * 16 + 1, 5 * 16 + 9, 16 + 1)  # of 12, 5 and 1 batches of (2,8)
    WORDS, fewer = (dataclasses.replace(SMALL, V=V, Vp=5056) for V in (5000, 1000))
    for i, size in enumerate(sizes):
        write_tokens(folder / f"part_{i}.bin", np.arange(size) + 1000 * i)

    def starts(data, count):
        return [int(data.next_batch()[0][0, 0]) for _ in range(count)]

    in_order = [0 + 16 * i for i in range(12)] + [1000 + 16 * i for i in range(5)] + [2000]
    one, several = str(folder / "part_0.bin"), str(folder / "part_*.bin")
    for data in (DataLoader(one, read_tokens(one, WORDS.V), 2, 8), FilesLoader(one, 2, 8, WORDS)):
        yield (f"one file, in order, {type(data).__name__}", np.array(starts(data, 13)),
               np.array([*in_order[:12], 0]), EXACT)
    shuffled = [16 * i for i in (1, 0, 9, 10, 5, 8, 3, 2, 4, 11, 7, 6)]
    yield ("one file, shuffled", np.array(starts(FilesLoader(one, 2, 8, WORDS, True), 12)),
           np.array(shuffled), EXACT)
    data = FilesLoader(several, 2, 8, WORDS, False)
    yield "several files, in order", np.array(starts(data, 19)), np.array([*in_order, 0]), EXACT
    data.next_batch()
    data.open(0)
    yield "and from the first again", np.array(starts(data, 18)), np.array(in_order), EXACT
    data, epochs = FilesLoader(several, 2, 8, WORDS), []
    for _ in range(3):
        epochs.append(starts(data, 18))
        yield "an epoch of several files", np.sort(epochs[-1]), np.array(in_order), EXACT
        files = [start // 1000 for start in epochs[-1]]
        yield "files one after the other", np.count_nonzero(np.diff(files)), 2, EXACT
    check("epochs differ", epochs[0] != epochs[1] != epochs[2] != in_order)
    data.files, data.rng = None, np.random.RandomState(42)
    items = data.permuted(range(10))
    found = [items, data.permuted(items), data.permuted(range(12))]
    wish = [[1, 3, 9, 7, 6, 0, 8, 4, 5, 2], [2, 5, 9, 0, 3, 1, 4, 8, 6, 7],
            [2, 4, 0, 7, 6, 5, 11, 1, 8, 10, 9, 3]]
    check("llm.c's permutations", found == wish, f"{found}")
    check_refusal("pattern", r"none_\*.bin: could not be read .*expected a token file", FilesLoader,
                  str(folder / "none_*.bin"), 2, 8, WORDS)
    check_refusal("pattern", "part_2.bin: 17 tokens; expected 33", FilesLoader, several, 4, 8,
                  WORDS)
    check_refusal("pattern", "part_1.bin: token 0 is 1000; expected .* 1000", lambda: starts(
        FilesLoader(several, 2, 8, fewer, False), 13))


def test_patterns(device_name, folder):
    """A path or a folder that exists is meant as it is written; only the rest of a pattern
    matches."""
    names = ("q[12]/t_train.bin", "q1/t_train.bin", "q1/t_val.bin", "q2/t_train.bin",
             "x[1]_train.bin",
             "x1_val.bin", "a*_train.bin", "ab_train.bin", "[r]/deep?/0_val.bin",
             "r/deep1/0_val.bin",
             "[r]/deep?/1_val.bin")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    os.chdir(folder)
    for pattern, *wish in (
            ("q[12]/t_train.bin",) * 2, ("x[1]_train.bin",) * 2, ("a*_train.bin",) * 2,
            ("q[12]/t_*.bin", "q[12]/t_train.bin"), ("q[12]/t_val.bin",) * 2,
            ("[r]/deep?/*_val.bin", "[r]/deep?/0_val.bin", "[r]/deep?/1_val.bin"),
            ("q[1-2]/t_*.bin", "q1/t_train.bin", "q1/t_val.bin", "q2/t_train.bin"),
            ("a?_train.bin", "a*_train.bin", "ab_train.bin"), ("[x]1_*.bin", "x1_val.bin"),
            ("no*",) * 2):
        for before in ("", f"{folder}/"):
            found = paths_of(before + pattern)
            check(f"{before and '/'}{pattern}", found == [before + name for name in wish], found)
    write_tokens("q[12]/t_train.bin", np.arange(17))
    check("the tokens of q[12]",
          FilesLoader("q[12]/t_train.bin", 2, 8, SMALL).next_batch()[0][1, 7] == 15)
    for wish, *given in ((r"x\[1\]_val.bin: does not exist; .* beside x.*n.bin, or give -j",
                          "x[1]_train.bin", None),
                         (r"a\?_train.bin: does not exist; .* or give -i", None, "a*_train.bin")):
        pair = [given[0] or "a?_train.bin", given[1] or "x[1]_val.bin"]
        check_refusal("a pair", wish, check_pair, given, pair)
        check("a pair of which both were given", refusal(check_pair, pair, pair) is None)


@fast
def test_limits(device_name, folder):
    """If a dump has autocast's error of a tensor, the limit follows from it, but only in bf16."""
    report = {"autocast_errors": {"wte": 0.02, "logits": 1e-4}}
    for dtype, tensor, wish in (("bf16", "wte", 0.02 * AUTOCAST_MARGIN),
                                ("bf16", "logits", AUTOCAST_FLOOR),
                                ("bf16", "loss", LIMITS["bf16"]), ("fp32", "wte", LIMITS["fp32"])):
        check(f"limit of {tensor} in {dtype}", dump_limit(dtype, report, tensor) == wish)
    check("limit without a report", dump_limit("bf16", {}, "wte", 0.1) == LIMITS["bf16"] + 0.1)
