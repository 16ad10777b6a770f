"""Test what several ranks compute, and the checkpoints that they leave.

    pytest dev/tests/test_ranks.py --kills 50       # more kills than the usual 2

State files are read, and the loader's way through the data is counted, by code that shares nothing
with the trainer. dev/tests/test_rank_jobs.py has how jobs begin and end, dev/tests/test_meeting.py
what needs no training.
"""
import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import time

import numpy as np
import pytest

from dev.common.bf16 import master_numbers, to_bf16
from dev.common.config import Config, draw_parameters, read_parameters
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.checkpoints.resume import load_state
from dev.features.checkpoints.state_file import state_parts
from dev.features.data_loader import FilesLoader
from dev.features.devices import address_of, make_device
from dev.features.ranks.bf16_sums import SOURCE as SUMS
from dev.features.sample import generate
from dev.features.tokenizer import decode
from dev.lab.kernels.adamw import halves
from dev.tests.checks import EXACT, FIXTURES, TINY, check
from dev.tests.jobs import (BRIEF, COUNTS, POISONED, SMALL, begin, begun, close, counts_of, curve,
                            data_files, end, one_speaks, ranks_of, train, wrapped)
from dev.tests.models import device_of, model_class
from dev.tests.states import TENSORS, Walk, place_of, read_state
from dev.tests.trainings import (LLAMA, TRAINER, check_resumed, check_same, done_steps, file_of,
                                 random_examples, without)
from train_gpt2 import BF16, coins, to_float

CASTS = "gradient_to_wire", "gradient_from_wire"
MICROS = {1: 6, 2: 3, 3: 2}  # micro-batches of a step, by the number of ranks
# ---- What ranks compute


runs_on = counts_of


@pytest.fixture
def kills(pytestconfig):
    return pytestconfig.option.kills or 2


@pytest.fixture(autouse=True)
def data(folder):
    data_files(folder)


def test_same_losses(device_name, folder):
    """Ranks and one process with as many more micro-batches have the same losses. saved_runs has
    more of this for GPT-2, rounded_moments for bf16. Only 3 ranks have tails. With --zero, a step
    reads no parameter before it is gathered."""
    most = counts_of(device_name)[-1]
    for name, model, dtype, total, *cases in (
            ("Llama", "llama_gqa.bin", "fp32", 48, (most, 1)), ("fp8", "", "fp8", 16, (2, 1)),
            ("tied Llama", "llama_tied.bin", "fp32", 48, (2, 1), (most, 0))):
        flags, kind = (*SMALL, "-d", total, "--dtype", dtype, "--shuffle", 0, "-x", 4), {}
        flags += ("--fp8", "all") * (dtype == "fp8")
        poisoned = dict(trainer=wrapped(folder, late=POISONED))
        if model:
            kind = dict(trainer=LLAMA, model=FIXTURES / model)
            poisoned = dict(trainer=wrapped(folder, late=POISONED,
                                            Model="dev.llama3.train_llama3.Llama3"))
        expected = curve(train(device_name, 1, folder, folder / f"{name} 1", *flags, **kind))
        for count, zero in cases:
            case = f"{name}, {count} ranks, -z {zero}"
            text = train(device_name, count, folder, folder / case, *flags, "-z", zero,
                         **kind | poisoned)
            close(case, curve(text), expected, *((2e-2, 3e-2) if dtype == "fp8" else ()))
            one_speaks(case, text, zero)


def test_places_of_shares(device_name, folder):
    """With --zero, the numbers that a rank has are told by places as the pieces are that it keeps
    of whole tensors."""
    place, c = device_of(device_name, "fp32", 64, 2), Config.from_file(TINY)
    for count in (2, 3, 5, 64):
        found = []
        for rank in range(count):
            Model = model_class(GPT2, "-z", 1, "--moments", "bf16", rank=rank, count=count)
            model = Model(c, place, 1, 8)
            whole = model.arenas["gradients"].view(np.float32)
            place.put(whole, np.arange(whole.size))
            model.set_tensors((), model.masters)  # keeps the share of what is staged there
            kept, starts = master_numbers(model), place.get(model.adam.starts).tolist()
            for start, stop, first, piece, stride in zip(starts, starts[1:],
                                                         *place.get(model.adam.places).tolist()):
                j = np.arange(stop - start)
                number = first + j // piece * stride + j % piece
                # 0 behind the last piece.
                found.append((kept[start:stop] == number) | (kept[start:stop] == 0))
                own = int((kept[start:stop] > 0).sum())
                assert own >= piece - 1, f"{own} numbers in a piece of {piece}"
        yield f"{count} ranks", np.concatenate(found), True, EXACT


def test_rounded_moments(device_name, folder):
    """In bf16, two ranks have the losses of one process. Moments in bf16, and parameters, are
    rounded to the same bits with -z 1 as without, where the same gradients are summed. Parameters
    are the upper halves of the states'."""
    flags = (*BRIEF, "--shuffle", 0, "--dtype", "bf16", "--moments", "bf16", "--clip", 0, "-u", 0,
             "-x", 4, "-n", 4)
    expected, sets = curve(train(device_name, 1, folder, folder / "1", *flags)), []
    for zero in (0, 1):
        text = train(device_name, 2, folder, folder / f"2 {zero}", *flags, "-z", zero)
        close(f"bf16, 2 ranks, -z {zero}", curve(text), expected, 2e-2, 3e-2)
        sets.append(merged(folder / f"2 {zero}", 4, 2, zero)[0])
    for what, without_zero, with_zero in zip(("m", "v", "parameters"), *sets):
        yield f"{what} with ZeRO or without", with_zero, without_zero, EXACT
    model = np.fromfile(folder / "2 1/model_00000004.bin", "<u2", offset=1024)
    yield "parameters of the model", model, halves(sets[1][2].astype(np.float64))[0], EXACT


def test_evaluations(device_name, folder):
    """A validation's loss is the mean over the same batches, and HellaSwag's score that of all
    examples, however many ranks share them. Three ranks divide neither the five batches nor the
    seven examples; of two ranks and one example, one has none. With --zero, the parameters are
    gathered first; also before the first sample, which follows no validation."""
    c, scores = Config.from_file(TINY), []
    model = GPT2(c, device_of(device_name, "fp32", 64, 2), 10, 40)
    model.set_parameters(read_parameters(TINY, c))
    tokens = np.fromfile(folder / "part_val_0.bin", "<u2", offset=1024)[: 10 * 40 + 1].astype(
        np.int32)
    truth = model.forward(tokens[:-1].reshape(10, 40), tokens[1:].reshape(10, 40))
    greedy = decode(generate(model, [c.V - 1], 20, 0, 0, coins()), {})
    for count, examples in ((1, 7), (counts_of(device_name)[-1], 7), (2, 1)):
        (folder / "examples.bin").write_bytes(file_of(random_examples(257)[:examples]))
        text = train(device_name, count, folder, folder / f"{count} {examples}", "-i",
                     folder / "part_val_0.bin",
                     "-t", 40, "-d", 80 * count, "-v", 2, "-m", 5, "-x", 2, "-n", 0, "-s", 1, "-l",
                     0, "-z", 1,
                     "--dtype", "fp32", "--hellaswag", folder / "examples.bin",
                     "-g", 20, "--temperature", 0, trainer=wrapped(folder, late=POISONED))
        losses = np.array(re.findall(r"^val loss (\S+)$", text, re.M), float)
        yield f"validation on {count} ranks", losses, [truth, truth], 2e-6
        check(f"sample on {count} ranks", text.count(f"generating:\n---\n{greedy}\n---\n") == 2,
              greedy)
        scores += re.findall(r"^HellaSwag: (\d+/\d+)", text, re.M)
    same_scores = (len({*scores[:-1]}) == 1 and scores[0].endswith("/7") and
                   scores[-1] in ("0/1", "1/1"))
    check("HellaSwag on one rank, and on others", same_scores, f"{scores}")


def test_outlier(device_name, folder):
    """With --zero, a look at an outlier reads gathered parameters. The step changes none."""
    flags, output = (*BRIEF, "--dtype", "fp32", "-z", 1, "-n", 1), folder / "outlier"
    train(device_name, 1, folder, output, *flags, "-x", 2)
    path = output / "run_00000002.json"
    windows = np.tile(0.5 + 0.01 * (np.arange(128) % 2), (2, 1)).tolist()  # no loss is like these
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(windows=windows, seen=[128])))
    text = train(device_name, 2, folder, output, *flags, "-x", 4, "-y", 1, "-sl", 3, "-sg", 3,
                 trainer=wrapped(folder, late=POISONED))
    line = re.search(r"^outlier .*: the gradient's norm is (\S+), of which", text, re.M)
    check("an outlier: a line", line and float(line[1]) > 0, text[-300:] * (not line))
    before, after = (np.fromfile(output / f"model_0000000{step}.bin", "<u1") for step in (2, 3))
    yield "an outlier's parameters", after, before, EXACT


class Heard:
    """Collectives that keep what they were to sum: a list of (address, bytes) for each launch."""
    join = sum_at_0 = lambda *_: None

    def __init__(self):
        self.launches = []

    @contextlib.contextmanager
    def fork(self):
        self.launches.append([])
        yield

    def sum(self, array):
        self.launches[-1].append((address_of(array), array.nbytes))


def test_sums_together(device_name):
    """Every gradient is summed once. Layers wait for each other until they have at_once bytes; the
    last go with the embeddings."""
    c, B, T = Config(maxT=8, V=61, L=3, NH=2, C=64, Vp=128), 1, 8
    tokens = np.random.default_rng(3).integers(0, c.V, (2, B, T), dtype=np.int32)
    Model = model_class(GPT2, "--device", device_name, "--dtype", "fp32", rank=0, count=2, plain=1)
    layer = 4 * (12 * c.C * c.C + 13 * c.C)  # bytes
    for at_once, wish in ((1, [3, 2, 1, 0]), (3 * layer // 2, [1, 1, 0, 0]), (2**40, [0, 0, 0, 0])):
        Model.ranks.via = heard = Heard()
        model = Model(c, make_device(device_name, "fp32", c), B, T)
        model.set_parameters(draw_parameters(c, 3))
        model.at_once, model.summing = at_once, True
        model.forward(*tokens)
        model.loss_pass(with_gradient=True)
        model.backward_pass()
        start, size = address_of(model.arenas["gradients"]), model.arenas["gradients"].nbytes
        launch_of = np.full(size, -1)
        for launch, arrays in enumerate(heard.launches):
            for at, count in arrays:
                if start <= at < start + size:  # else the loss
                    place = launch_of[at - start :][:count]
                    check("summed once", (place == -1).all(), f"{count} bytes from {at - start} on")
                    place[:] = launch
        own = [address_of(model.grads.wte) - start]
        own += [address_of(model.grads.fcw[l]) - start for l in range(c.L)]
        yield f"launches, from {at_once} bytes on", launch_of[own], np.array(wish), EXACT
        for row in c.parameter_table():
            first = address_of(getattr(model.grads, row.name)) - start
            summed = launch_of[first : first + row.nbytes]
            check(f"{row.name}: summed", (summed >= 0).all(), f"{(summed < 0).sum()} bytes are not")


def test_casts(device_name):
    """Gradients are rounded to bf16 and read back as NumPy does it, from any place in memory on."""
    c = Config(maxT=8, V=11, L=1, NH=2, C=64, Vp=32)
    on_cpu = device_name != "cuda"
    device = (Emulated("fp32", c, [SUMS], only=CASTS)
              if on_cpu else make_device("cuda", "fp32", c, beside=[SUMS]))
    bits = np.random.default_rng(2).integers(2**32, size=1037, dtype=np.uint32)
    # Ties, and what is next to one.
    bits[:6] = 0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 1, 0x80000000
    # Infinities, NaNs, the largest.
    bits[6:11] = 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF
    x, wire, back = (device.empty(4 * 1040).view(kind) for kind in (np.float32, BF16, np.float32))
    device.put(x[1:1038], bits.view(np.float32))
    device.launch("gradient_to_wire", 1037, wire[3:1040], x[1:1038], 1037)
    device.launch("gradient_from_wire", 1037, back[2:1039], wire[3:1040], 1037)
    wish = to_bf16(bits.view(np.float32))
    yield "to bf16", device.get(wire[3:1040]), wish, EXACT
    yield "back", device.get(back[2:1039]), to_float(wish), EXACT


def test_bf16_sums(device_name, folder):
    """With --sums bf16 the gradients of matrices and embeddings are bf16, and close to those of one
    process. Those of biases and norms stay fp32. After a step from zero, m is a tenth of the
    gradient."""
    matrix = np.concatenate([np.full(n * size, size > 1000) for n, size in TENSORS])
    count, found = counts_of(device_name)[-1], []
    flags = (*SMALL, "-d", 16 * count, "--shuffle", 0, "--dtype", "fp32", "--clip", 0, "-x", 1,
             "-n", 1)
    for ranks, zero in ((1, 0), (count, 0), (count, 1)):
        output = folder / f"{ranks} {zero}"
        train(device_name, ranks, folder, output, *flags, "-z", zero, "--sums", "bf16",
              trainer=wrapped(folder, late=POISONED))
        found.append(merged(output, 1, ranks, zero)[0][0])
    exact, *both = found
    for zero, rounded in enumerate(both):
        gradient = 10 * rounded[matrix]
        yield f"-z {zero}: biases and norms", rounded[~matrix], exact[~matrix], 1e-6
        error = np.linalg.norm(rounded[matrix] - exact[matrix]) / np.linalg.norm(exact[matrix])
        check(f"-z {zero}: matrices", 5e-4 < error < 4e-3, f"{error:.1e}")
        yield f"-z {zero}: numbers of bf16", gradient, to_float(to_bf16(gradient)), 1e-6


# ---- State files, and loaders


def merged(output, step, count, zero):
    """m, v and parameters (3, numbers of a file) from the state files of all ranks, and their
    fields. Without ZeRO each rank has them all."""
    states = [read_state(output / f"state_{step:08d}_{rank:05d}.bin", count, rank, zero)
              for rank in range(count)]
    sets = []
    for shares in zip(*(arrays for _, arrays in states)):
        wholes, tails = [], iter(shares[0][len(TENSORS) :])
        for i, (_, size) in enumerate(TENSORS):
            parts = [share[i] for share in shares] if zero else [shares[0][i]]
            if sum(part.shape[1] for part in parts) < size:
                parts.append(next(tails))
            wholes.append(np.concatenate(parts, axis=1).reshape(-1))
        sets.append(np.concatenate(wholes))
        if not zero:
            assert all(np.array_equal(a, b) for share in shares
                       for a, b in zip(share, shares[0])), "ranks differ"
    return np.stack(sets), [fields for fields, _ in states]


def moved(count, others):
    return (f"the run had {count} ranks until step 3, and has {others} from now on: the data goes "
            "on with the next file")


def test_slots(device_name, folder):
    """Rank r reads slot r of each batch; with shuffle, in an order of its own."""
    tokens = np.concatenate([np.fromfile(folder / f"part_train_{i}.bin", "<u2", offset=1024)
                             for i in range(3)])
    starts, c = np.cumsum((0, *COUNTS)), Config(V=257)
    for count, shuffle in ((1, 0), (2, 0), (3, 0), (2, 1), (3, 1)):
        for rank in range(count):
            data = FilesLoader(folder / "part_train_*.bin", 2, 4, c, shuffle, rank, count)
            walk, found, expected = Walk(rank, count, shuffle), [], []
            for _ in range(90 // count):
                walk.advance(1)
                start = starts[walk.shards[walk.shard]] + 8 * (
                    walk.order[walk.sample - 1] * count + rank)
                expected += [tokens[start : start + 8], tokens[start + 1 : start + 9]]
                found += [part.reshape(-1) for part in data.next_batch()]
            yield (f"of rank {rank} of {count}, --shuffle {shuffle}", np.stack(found),
                   np.stack(expected), EXACT)


def test_saved_runs(device_name, folder):
    """Ranks have the losses and AdamW's numbers of one process. State files are llm.c's, and hold
    all that a run needs to go on, on as many ranks, or on any others."""
    flags, runs, most = ((*SMALL, "--dtype", "fp32", "-x", 6, "-n", 3), {},
                         counts_of(device_name)[-1])
    flags += "-s", 2, "-g", 2  # a sample alone, a checkpoint alone, both
    for count, zero, shuffle in ((1, 0, 0), (2, 0, 0), (most, 1, 0), (2, 0, 1)):
        name, whole = (f"{count} ranks, -z {zero}, --shuffle {shuffle}",
                       folder / f"{count} {zero} {shuffle}")
        text = train(device_name, count, folder, whole, *flags, "-z", zero, "--shuffle", shuffle,
                     "--log-ranks", 1, trainer=wrapped(folder, late=POISONED) if zero else TRAINER)
        for step in (3, 6):
            sets, fields = merged(whole, step, count, zero)
            model = np.fromfile(whole / f"model_{step:08d}.bin", "<f4", offset=1024)
            yield (f"{name}, step {step}: the merged parameters are the model's", sets[2], model,
                   EXACT)
            headers = [(field["header"], field["step"], field["zeros"]) for field in fields]
            wish = [((20240527, 1, count, rank, 1, shuffle), step, []) for rank in range(count)]
            check(f"{name}, step {step}: headers", headers == wish,
                  f"{headers}" * (headers != wish))
            places = [Walk(rank, count, shuffle).advance(step * MICROS[count]).state()
                      for rank in range(count)]
            check(f"{name}, step {step}: places in the data", [*map(place_of, fields)] == places)
        runs[count, zero, shuffle] = merged(whole, 3, count, zero)[0]
        losses = [re.findall(r"step .* norm +\S+", path.read_text())
                  for path in sorted(whole.glob("rank_0000?.txt"))]
        check(f"{name}: --log-ranks",
              [*map(len, losses)] == (count - 1) * [6] and losses[1:] == losses[:-1])
        if count == 1:
            truth, numbers = curve(text), sets
        elif not shuffle:
            close(name, curve(text), truth)
            one_speaks(name, text, zero)
            for i, what in enumerate("mv"):
                yield f"{name}: {what} of one process", sets[i], numbers[i], 1e-5
        else:
            more = *flags, "-z", zero, "--shuffle", shuffle, "-y", 1
            _, text = check_resumed(
                name, whole, 6, ranks=count, go_on=lambda copy, count=count, more=more: train(
                    device_name, count, folder, copy, *more))
            warnings = [line for line in re.findall("WARNING.*", text)
                        if not re.search("tiktoken|token ids", line)]
            check(f"{name}, resumed: without a warning", not warnings, warnings)
    for (count, before, shuffle), sets in runs.items():
        for others, zero in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 1)):
            loaded(device_name, folder, folder / f"{count} {before} {shuffle}", shuffle, count,
                   sets, others, zero)
    for count, zero, other, other_zero in ((1, 0, 2, 1), (most, 1, most - 1, 0)):
        yield from went_on(device_name, folder, folder / f"{count} {zero} 0", count, zero, other,
                           other_zero)


def loaded(device_name, folder, saved, shuffle, count, sets, others, zero):
    """What each of some ranks has in memory, and writes again, when it has read the state of a run
    after 3 steps."""
    name, c = f"{saved.name} read by {others} {zero}", Config.from_file(TINY)
    place = device_of(device_name, "fp32", 64, 2)
    wrong = []
    for rank in range(others):
        model = model_class(GPT2, "-z", zero, rank=rank, count=others)(c, place, 1, 8)
        data = FilesLoader(folder / "part_train_*.bin", 1, 8, c, shuffle, rank, others)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            load_state(lambda rank: saved / f"state_00000003_{rank:05d}.bin", model, data)
        parts = [np.asarray(part if isinstance(part, np.ndarray) else place.get(part))
                 for part in state_parts(model, data.position(), bool(zero))]
        path = folder / f"state_00000099_{rank:05d}.bin"
        path.write_bytes(b"".join(part.tobytes() for part in parts))
        walk = Walk(min(rank, count - 1), count, shuffle).advance(3 * MICROS[count])
        if others != count:
            old, walk = walk, walk if rank < count else Walk(rank, others, shuffle)
            walk.shard, walk.tokens = old.shard, others * 8
            walk.next_shard()
        for what, right in (
                ("parameters",
                 place.get(model.arenas["parameters"]).tobytes() == sets[2].tobytes()),
                ("place", place_of(read_state(path, others, rank, zero)[0]) == walk.state()),
                ("line", (moved(count, others) in said.getvalue()) == (others != count)),
                ("size",
                 not zero or model.arenas["adam m"].nbytes < 1.03 * sets[0].nbytes / others)):
            wrong += [] if right else [f"{what} of rank {rank}"]
    wrong += ([]
              if np.array_equal(merged(folder, 99, others, zero)[0], sets) else ["m, v and master"])
    check(f"{name}: all tensors, and the place in the data", not wrong, ", ".join(wrong))


def went_on(device_name, folder, saved, count, zero, other, other_zero):
    """A run that goes on on other ranks, after 3 steps, does what one process does from a state
    merged by hand."""
    flags = *SMALL, "--dtype", "fp32", "--shuffle", 0, "-y", 1, "-x", 6, "-n", 6
    saved, name = (without(saved, folder / f"{saved.name} before", 6),
                   f"{saved.name} on {other} {other_zero}")
    sets, [field, *_] = merged(saved, 3, count, zero)
    ours, alone = (shutil.copytree(saved, folder / f"{name}, {what}") for what in ("ours", "alone"))
    header = np.zeros(256, "<i4")
    header[[0, 1, 2, 4, 10, 30]] = 20240527, 1, 1, 1, 3, (field["shard"] + 1) % 3  # the next file
    (alone / "state_00000003_00000.bin").write_bytes(header.tobytes() + sets.tobytes())
    truth = curve(train(device_name, 1, folder, alone, *flags))
    text = train(device_name, other, folder, ours, *flags, "-z", other_zero)
    close(name, curve(text), truth)
    for i, what in enumerate("mv"):
        yield (f"{name}: {what} later", merged(ours, 6, other, other_zero)[0][i],
               merged(alone, 6, 1, 0)[0][i], 1e-4)
    check(f"{name}: a line says what the data does", moved(count, other) in text)


# ---- Checkpoints of jobs in which something fails


def whole_ones(output, count, zero):
    """The steps of the checkpoints that DONE files promise, after reading the states of all
    ranks."""
    for step in (steps := done_steps(output)):
        merged(output, step, count, zero)
        json.loads((output / f"run_{step:08d}.json").read_text())
    return steps


def test_killed_ranks(device_name, folder, kills):
    """A job of which ranks are killed at random moments, and which goes on each time, ends with the
    same bytes."""
    flags, steps, count, chance = (("-x", 10, "-n", 1, "-nk", 2, "-z", 1, "--dtype", "fp32"), 10, 2,
                                   random.Random(1))
    output, killed = folder / "killed", 0
    text = train(device_name, count, folder, folder / "whole", *BRIEF, *flags)
    assert steps in done_steps(folder / "whole"), f"mpirun's status is 0, but: {text[-700:]}"
    output.mkdir()
    (output / "ranks_0123456789ab").touch()  # of a job that was killed before its ranks had met
    while killed < kills:
        newest = max(whole_ones(output, count, 1), default=0)  # a job that runs removes older ones
        job = begin(device_name, count, folder, output, *BRIEF, *flags, "-y", 1,
                    environment={"TRAIN_GPT2_WAIT": "5"})
        if killed % 3 == 1:  # while it starts
            time.sleep(chance.random())
        else:
            begun(job, min(steps, newest + chance.randint(1, 4)))
            while killed % 3 == 0 and job.poll() is None and not any(output.glob("*.tmp")):
                time.sleep(1e-4)  # it hits a file that is being written
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.kill(ranks_of(output)[chance.randrange(count)], signal.SIGKILL)
            killed += 1
        text = end(job, None, output)
        assert job.returncode in (0, 1), f"exit status {job.returncode}: {text[-300:]}"
        # The exit status does not say so: mpirun's is 0, too, if the other rank cannot start MPI
        # after the kill.
        if steps in whole_ones(output, count, 1):
            check_same(f"after {killed} kills", output, folder / "whole", steps, count)
            shutil.rmtree(output)
    text = train(device_name, count, folder, output, *BRIEF, *flags, "-y", 1)
    assert steps in done_steps(output), f"mpirun's status is 0, but: {text[-700:]}"
    check_same(f"after {killed} kills", output, folder / "whole", steps, count)
    check("after kills: the newest two are left",
          whole_ones(output, count, 1) == [steps - 1, steps])
    left = sorted(path.name for path in output.iterdir()
                  if not re.search(f"_000000({steps - 1:02d}|{steps})|main.log|log.jsonl|"
                                   "run_00000000", path.name))
    check("after kills: nothing else is left", not left, f"{left}")


def test_full_disk(device_name, folder):
    """A state that one rank cannot write leaves no checkpoint of its step, and does not end the
    training."""
    program, output = wrapped(folder, late="""
from dev.features.checkpoints import background_writer
real = background_writer.replace_file
def replace(path, chunks):
    if rank == 1 and "00000002" in str(path):
        raise OSError(28, "No space left on device")
    real(path, chunks)
background_writer.replace_file = replace
"""), folder / "full"
    text = train(device_name, 2, folder, output, *BRIEF, "-x", 3, "-n", 1, trainer=program)
    line = re.search("WARNING: no checkpoint of step 2: .*No space left.*; the newest whole one is "
                     "of step 1", text)
    check("a full disk of rank 1: a line", line and text.count("WARNING") == 1,
          text[-300:] * (not line))
    yield "of rank 1: whole checkpoints", whole_ones(output, 2, 0), [1, 3], EXACT
    yield "of rank 1: what is left of the others", len([*output.glob("*_00000002*")]), 0, EXACT
