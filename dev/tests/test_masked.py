"""Test targets that do not count: losses and gradients against PyTorch's ignore_index, with unequal
counts over micro-batches and ranks; masks beside token files; and runs."""
import contextlib
import functools
import json
import re
from unittest import mock

import numpy as np

from dev.lab import gpt2_numpy
from dev.common.bf16 import to_bf16
from dev.common.config import Config, draw_parameters, read_parameters
from dev.cpu.emulated import Emulated
from dev.data.masks import MASK, mask_path, read_mask, row_of, write_mask
from dev.features.base import GPT2
from dev.features.devices import device_class
from dev.features.feature import stack
from dev.features.label_smoothing import SOURCE as SMOOTHING
from dev.features.masked import SOURCE, Counting, MaskedLoader
from dev.llama3.train_llama3 import Config3, Llama3
from dev.tests.checks import EXACT, TINY, check, check_refusal, normal, words
from dev.tests.in_torch import parameters_in_torch, sum_in_torch
from dev.tests.jobs import SMALL, close, counts_of, curve, data_files
from dev.tests.jobs import train as train_on_ranks
from dev.tests.models import for_numpy, in_each_order, model_class, on_device
from dev.tests.trainings import check_error, check_resumed, place_of, ran
from dev.tools.plot import read_run
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import classifier_launch, pack_batch, read_tokens, to_float

B, T, V = 3, 7, 259
CONFIGS = {GPT2: Config(maxT=T, V=V, L=2, NH=2, C=64, Vp=320),
           Llama3: Config3(maxT=T, V=V, L=2, NH=2, C=64, NKV=1)}
KERNELS = "count_targets", "counted_classifier", "scale_by_counted", "skip_uncounted"


@functools.cache
def device_for(name, dtype, Model=GPT2):
    if name == "emulated":  # only what is tested in it compiles fast
        kind = stack(Emulated, [Counting])
        return kind(dtype, CONFIGS[Model], [SOURCE], only=KERNELS)
    return counting_device(name, dtype, Model, SMOOTHING)


def counting_device(name, dtype, Model, *more):
    return stack(device_class(name), [Counting])(dtype, CONFIGS[Model], [SOURCE, *more])


def masked_model(device_name, *flags, Model=GPT2, device=None):
    device = device or device_for(place_of(device_name), "fp32", Model)
    kind = model_class(Model, "--mask", "1", "--document-mask", "0", *flags)
    model = kind(CONFIGS[Model], device, B, T)
    model.set_parameters((name, 4 * values if values.ndim > 2 else values)
                         for name, values in draw_parameters(CONFIGS[Model], 1))
    return model


def batches(*counts):
    """Micro-batches (tokens, targets) of which so many targets count: also the first and the last
    of the batch, but for the last batch, whose first and last do not."""
    found = []
    for number, count in enumerate(counts):
        tokens = words(V, B, T)
        targets = words(V, B, T)
        order = np.random.default_rng(number).permutation(np.arange(1, B * T - 1))
        places = [0, B * T - 1, *order] if number < len(counts) - 1 else [*order, 0, B * T - 1]
        targets.reshape(-1)[places[count:]] = -1
        found.append((tokens, targets))
    return found


def step(model, *given, rate=0.0):
    """A step of these micro-batches. Returns its verdict, and the gradients that AdamW got."""
    model.train_step(*(pack_batch(*batch) for batch in given), learning_rate=rate)
    names = (row.name for row in model.config.parameter_table())
    return model.verdict(), {name: model.device.get(getattr(model.grads, name)).copy()
                             for name in names}


def test_kernels(device_name):
    """Each kernel and its loop against NumPy, at odd sizes, in several orders of a block's
    threads."""
    devices = [device_for(device_name, "bf16"),
               *(device_for("cpu", dtype) for dtype in ("fp32", "bf16"))]
    for device in devices:
        for N in (1, 5, 1500):
            targets = words(V, N)
            targets[:: 2] = -1
            targets[-1] = 7 if N > 1 else -1

            def count(device, targets, before, adds):
                counted = on_device(device, np.float32([before]))
                device.launch("count_targets", 1, counted, on_device(device, targets), len(targets),
                              adds)
                return device.get(counted)[0]

            for adds in (False, True):
                for way, counted in in_each_order(device, count, device, targets, 11.0, adds):
                    name = f"{device.name} {device.dtype} N={N} {way} adds={adds}"
                    wish = sum(target >= 0 for target in targets) + 11 * adds
                    check(f"{name}: counted", counted == wish, f"{counted}, expected {wish}")
        for N, most, Vp in ((1, 5, 8), (6, 259, 264), (40, 8, 8)):
            targets = words(most, N)
            targets[::2] = -1
            counts = targets >= 0
            x = np.float32(normal(N, Vp))
            x[~counts] = np.nan  # which nobody reads
            x = x if device.real == np.float32 else to_bf16(x)
            softmax = np.exp(to_float(x[:, :most]).astype(np.float64))
            softmax /= softmax.sum(1, keepdims=True)
            onehot = targets[:, None] == np.arange(most)
            with np.errstate(divide="ignore"):
                losses = np.where(counts, -np.log((softmax * onehot).sum(1)), 0)
            gradient = np.where(counts[:, None], softmax - onehot, 0) / 64
            for with_gradient in (False, True):
                logits = on_device(device, x)
                kept = on_device(device, np.full(N, np.nan, np.float32))
                blocks, room, shared = classifier_launch(device, N, Vp, with_gradient)
                device.launch("fused_classifier", blocks, logits, kept, on_device(device, targets),
                              1 / 64, N, most, Vp, with_gradient, room, shared=shared)
                limit = 1e-6 if device.real == np.float32 else 1e-2
                yield f"{device.name} losses", device.get(kept), losses, limit
                found = to_float(device.get(logits))
                if with_gradient:
                    wish = np.pad(gradient, ((0, 0), (0, Vp - most)))
                    yield f"{device.name} rows", found, wish, limit
                else:
                    check(f"{device.name} rows", np.array_equal(found, to_float(x), equal_nan=True))
        for n, counted in ((4, 3.0), (1028, 7.0), (64, 0.0)):
            g = np.float32(normal(n))
            factor = 21 / counted if counted else 1.0
            for update in (1.0, 0.0):
                grads = on_device(device, g)
                verdict = on_device(device, np.float32([5, 2, update, 0]))
                of = on_device(device, np.float32([counted]))
                device.launch("scale_by_counted", n, grads, verdict, of, 21.0, n)
                device.launch("skip_uncounted", 1, verdict, of)
                yield f"{device.name} scaled", device.get(grads), g * factor, 1e-7
                wish = [5, 2 * factor, update, 0] if counted else [5, np.nan, 0, 0]
                found = device.get(verdict)
                check(f"{device.name} verdict", np.allclose(found, wish, 1e-7, equal_nan=True),
                      found)


def test_gradients(device_name):
    """Four micro-batches of which 5, no, 1 and 19 targets count: the step's loss and all gradients
    are PyTorch's over the 25; also with --label-smoothing."""
    given = batches(5, 0, 1, 19)
    for smoothing in (0.0, 0.3):
        flags = ("--label-smoothing", f"{smoothing}") if smoothing else ()
        model = masked_model(device_name, *flags)
        p = parameters_in_torch(model)
        c = CONFIGS[GPT2]
        mean = sum(sum_in_torch(p, c, *batch, smoothing=smoothing) for batch in given) / 25
        mean.backward()
        verdict, found = step(model, *given)
        name = f"smoothing {smoothing}"
        yield f"{name}: the loss", np.float32(verdict.loss), mean.item(), 1e-6
        check(f"{name}: an update", verdict.update == 1 and verdict.stopped == 0, verdict)
        for tensor, value in found.items():
            yield f"{name}: d{tensor}", value, p[tensor].grad.numpy(), 2e-5
        norm = np.sqrt(sum((value.astype(np.float64)**2).sum() for value in found.values()))
        yield f"{name}: the norm", np.float32(verdict.norm), norm, 1e-5
    full = batches(B * T, B * T)
    plain = model_class(GPT2)(CONFIGS[GPT2], model.device, B, T)
    plain.set_parameters((name, model.device.get(getattr(model.params, name)))
                         for name in vars(model.params))
    expected, wish = step(plain, *full)
    verdict, found = step(masked_model(device_name), *full)
    yield "all count: the loss", np.float32(verdict.loss), expected.loss, EXACT
    for tensor, value in found.items():
        yield f"all count: d{tensor}", value, wish[tensor], EXACT


def test_llama(device_name):
    """Llama's loss is the mean over those that count; what does not count has no part in the
    gradient: it is that of the micro-batches in which some do, whatever stands at the others."""
    given = batches(4, 0, 9)
    verdict, found = step(masked_model(device_name, Model=Llama3), *given)
    plain = model_class(Llama3)(CONFIGS[Llama3], device_for(place_of(device_name), "fp32", Llama3),
                                B, T)
    masked = masked_model(device_name, Model=Llama3)
    plain.set_parameters((name, masked.device.get(getattr(masked.params, name)))
                         for name in found)
    total = 0
    for tokens, targets in given:
        plain.forward(tokens, np.maximum(targets, 0))
        total += plain.device.get(plain.acts.losses)[targets.reshape(-1) >= 0].sum()
    yield "the loss", np.float32(verdict.loss), total / 13, 1e-6
    _, other = step(masked, given[0], given[2])
    for tensor, value in found.items():
        yield f"d{tensor}", value, other[tensor], 1e-6


def test_graph(device_name):
    """A step whose launches were recorded, with their arguments, counts anew what counts."""
    device = counting_device(place_of(device_name), "fp32", GPT2, SMOOTHING)

    def note(calls, call, *args, **more):
        calls.append((call, args, more))
        call(*args, **more)

    def repeat(graphs, key, work):
        if key in graphs:
            for call, args, more in graphs[key]:
                call(*args, **more)
            return
        graphs[key] = []
        with contextlib.ExitStack() as stack:
            for name in ("launch", "matmul", "zero"):
                noted = functools.partial(note, graphs[key], getattr(device, name))
                stack.enter_context(mock.patch.object(device, name, noted))
            work()

    first = batches(5, 0, 8)
    second = batches(0, 17, 3)
    alone = step(masked_model(device_name), *second)
    if device_name != "cuda":
        device.repeat = repeat
    model = masked_model(device_name, device=device)
    for _ in range(1 if device_name != "cuda" else 3):
        step(model, *first)
    verdict, found = step(model, *second)
    limit = EXACT if device_name != "cuda" else 1e-5  # another device may time other algorithms
    yield "the loss", np.float32(verdict.loss), alone[0].loss, limit
    for tensor, value in found.items():
        yield f"d{tensor}", value, alone[1][tensor], limit


def test_nothing_counts(device_name):
    """A step without a target that counts changes nothing, and the next one is an ordinary one."""
    model = masked_model(device_name)
    step(model, *batches(9), rate=1e-2)
    before = {name: model.device.get(arena).copy() for name, arena in model.arenas.items()
              if name in ("parameters", "adam m", "adam v")}
    verdict, found = step(model, *batches(0, 0), rate=1e-2)
    check("the verdict", np.isnan(verdict.loss) and
          verdict.norm == verdict.update == verdict.stopped == 0, verdict)
    check("gradients of 0", not any(value.any() for value in found.values()))
    for name, values in before.items():
        yield name, model.device.get(model.arenas[name]), values, EXACT
    verdict, _ = step(model, *batches(2), rate=1e-2)
    check("the next step", verdict.update == 1 and verdict.loss > 1, verdict)
    check("it changes parameters",
          (model.device.get(model.arenas["parameters"]) != before["parameters"]).any())


# ---- Files


def test_outliers(device_name):
    """A step in which nothing counts is not among those with which -sl and -sg compare."""
    device = counting_device(place_of(device_name), "fp32", GPT2, SOURCE.with_name("outliers.cu"))
    model = masked_model(device_name, "--norm-limit", "5", device=device)
    for counts, wish in (((5, 2), 1), ((0, 0), 1), ((1, 0), 2)):
        step(model, *batches(*counts))
        seen = device.get(model.adam.seen).item()
        check(f"steps seen after {counts}", seen == wish, seen)


def masked_files(folder, *names, share=0.3):
    """Write masks beside token files of which a share counts: in the first half of a file only a
    tenth of that, so that ranks and micro-batches have unequal counts."""
    rng = np.random.default_rng(5)
    for name in names:
        tokens = read_tokens(folder / name, V)
        chance = np.where(np.arange(len(tokens)) < len(tokens) // 2, share / 10, share)
        write_mask(folder / name, tokens, rng.random(len(tokens)) < chance)


def test_loader(folder):
    """Targets are -1 exactly where the mask says so, on each rank; in a file without a mask none
    is."""
    c = CONFIGS[GPT2]
    b, t = 2, 5
    tokens = {name: words(V, count) for name, count in (("a", 97), ("b", 64))}
    for name, values in tokens.items():
        write_tokens(folder / f"{name}.bin", values)
    mask = np.random.default_rng(3).random(97) < 0.5
    write_mask(folder / "a.bin", np.uint16(tokens["a"]), mask, 5)
    check("the length of rows", (row_of(folder / "a.bin"), row_of(folder / "b.bin")) == (5, 0))
    for rank, count in ((0, 1), (0, 2), (1, 2)):
        loader = MaskedLoader(str(folder / "?.bin"), b, t, c, 0, rank, count)
        for i in range(loader.per_epoch + 1):
            inputs, targets = loader.next_batch()
            name = "a" if i < 96 // (count * b * t) or i == loader.per_epoch else "b"
            start = int(re.search(r"tokens (\d+) to", loader.where)[1])
            wish = tokens[name][start + 1 : start + 1 + b * t].copy()
            if name == "a":
                wish[~mask[start + 1 : start + 1 + b * t]] = -1
            check(f"rank {rank} of {count}: batch {i}", (targets.reshape(-1) == wish).all() and
                  (inputs.reshape(-1) == tokens[name][start : start + b * t]).all(), targets)


def test_bad_masks(folder):
    """A mask of other tokens, a damaged one, and one that is missing are refused in a line."""
    path = folder / "a.bin"
    write_tokens(path, words(V, 30))
    tokens = np.array(read_tokens(path, V))
    check("no mask", read_mask(path, tokens) is None)
    write_mask(path, tokens, np.ones(30, bool))
    check("a mask of ones", read_mask(path, tokens).all())
    check_refusal("another token", "is the mask of 30 other tokens than the 30 of .*a.bin; "
                  "expected both from one run: prepro", read_mask, path, tokens[::-1])
    check_refusal("other lengths", "is the mask of 30 other tokens", read_mask, path, tokens[:-1])
    good = mask_path(path).read_bytes()
    mask_path(path).write_bytes(good[:-1] + b"\2")
    check_refusal("a byte", "byte 29 is 2; expected 0 or 1", read_mask, path, tokens)
    mask_path(path).write_bytes(good[:-1])
    check_refusal("truncated", f"1,053 bytes; expected 1,054 by the header of this {MASK.name}",
                  read_mask, path, tokens)
    mask_path(path).write_bytes(path.read_bytes())
    check_refusal("tokens", "is a file of GPT-2's tokens.*; expected a mask", read_mask, path,
                  tokens)
    mask_path(path).unlink()
    flags = "-e", TINY, "-i", path, "-j", path, "-b", 1, "-t", 8, "-s", 0, "--device", "cpu"
    check_error("have no masks beside them; expected", *flags, "--mask", 1)
    write_mask(path, tokens, np.zeros(30, bool), 3)
    check_error("none of the 24 targets", *flags, "-x", 1)
    text = ran(*flags, "-x", 1, "-v", 0)
    check("a step without targets",
          "WARNING: step 1: no update: none of its targets counts" in text, text)
    write_mask(path, tokens, np.arange(30) > 16)  # none in the first two batches of three
    for steps, wish in ((2, "-"), (3, r"(\S+) -> \2")):
        said = ran(*flags, "-x", steps, "-v", 0, "-o", folder / f"{steps}")
        ok = re.search(rf"step +2/\d \| loss - \| norm  0(.|\n)*; training loss {wish}\n", said)
        check(f"{steps} steps, two without targets, and the summary", ok and "loss 0" not in said,
              said)
        lines = [json.loads(line) for line in (folder / f"{steps}/log.jsonl").open()]
        check("their losses are null", [line["loss"] is None for line in lines] ==
              [True, True, False][:steps], lines)
    run = read_run(folder / "3")
    check("a chart has no loss of theirs", [[*run.series[name][0]] for name in ("loss", "norm")] ==
          [[2], [0, 1, 2]], run.series)
    write_mask(path, tokens, np.ones(30, bool), 41)
    check_error("the conversations lie in rows of 41 tokens; expected .* = 40 .*--row 40 ",
                  "-e", TINY, "-i", path, "-j", path, "-b", 1, "--device", "cpu")
    check("other rows: a warning", "WARNING: -t 8: the conversations lie in rows of 3" in text,
          text)


# ---- Runs


def test_runs(device_name, folder):
    """A run finds the mask; its validation is the mean over the targets that count, as NumPy has
    it; a stop and -y 1 end with the same bytes; --mask 0 trains as without a mask."""
    data_files(folder)
    names = [f"part_train_{i}.bin" for i in range(3)] + ["part_val_0.bin"]
    flags = ("-e", TINY, "-i", folder / "part_train_*.bin", "-j", folder / "part_val_0.bin", "-b",
             2, "-t", 8, "-d", 32, "-v", 3, "-m", 3, "-s", 0, "--device", place_of(device_name),
             "--dtype", "fp32")

    def train(*more):
        return ran(*flags, *more)

    def losses(text):
        return re.findall(r"(?:step .*?|val )loss (\S+)", text)

    plain = losses(train("-x", 2))
    masked_files(folder, *names)
    whole = folder / "whole"
    text = train("-x", 4, "-o", whole, "-n", 2)
    check_resumed("masked", whole, 4, go_on=lambda copy: train("-x", 4, "-o", copy, "-y", 1))
    path = folder / names[1]
    good = mask_path(path).read_bytes()
    tokens = np.array(read_tokens(path, V))
    write_mask(path, tokens, 1 - np.frombuffer(good, np.uint8)[1024:])
    check_error("part_train_1.mask.*expected the same", *flags, "-x", 5, "-o", whole, "-y", 1)
    mask_path(path).write_bytes(good)
    check("--mask 0", losses(train("-x", 2, "--mask", 0)) == plain != losses(text)[: len(plain)],
          plain)
    c = Config.from_file(TINY)
    p = for_numpy(read_parameters(TINY, c), c.V)
    tokens = np.array(read_tokens(folder / names[-1], c.V), np.int64)
    mask = np.fromfile(mask_path(folder / names[-1]), np.uint8)[1024:]
    nats = 0
    counted = 0
    for start in range(0, 3 * 2 * 8, 8):
        logits = gpt2_numpy.forward(p, tokens[start : start + 8], c.NH)
        counts = mask[start + 1 : start + 9]
        of = gpt2_numpy.cross_entropy(tokens[start + 1 : start + 9], logits)
        nats += (of * counts).sum()
        counted += counts.sum()
    yield "the first validation", np.float64(losses(text)[0]), nats / counted, 1e-6


def test_ranks(device_name, folder):
    """Two ranks, also with ZeRO, have the losses of one process, though unequal numbers count."""
    data_files(folder)
    names = [f"part_train_{i}.bin" for i in range(3)] + ["part_val_0.bin"]
    masked_files(folder, *names)
    flags = *SMALL, "--dtype", "fp32", "--shuffle", 0, "-x", 4, "-v", 2, "-m", 5
    expected = train_on_ranks(device_name, 1, folder, folder / "1", *flags)
    for zero in (0, 1) if 2 in counts_of(device_name) else ():
        text = train_on_ranks(device_name, 2, folder, folder / f"2 {zero}", *flags, "-z", zero)
        close(f"-z {zero}", curve(text), curve(expected))
        found, wish = ([float(x) for x in re.findall(r"val loss (\S+)", each)]
                       for each in (text, expected))
        yield f"-z {zero}: validations", np.array(found), np.array(wish), 1e-5


