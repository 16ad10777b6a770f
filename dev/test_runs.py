"""Test what keeps a run: checkpoints, resuming, signals, a full disk, and steps that are not finite.

    python dev/test_runs.py                  # on the CPU, and on a GPU if there is one
    python dev/test_runs.py --device cpu     # only on this one
    python dev/test_runs.py --kills 200      # more kills than the usual 20

Trainings are small, and run in child processes that get signals. A state file is read by a parser of llm.c's format of
its own, which shares no code with the trainer's.
"""
import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from prepro_tinyshakespeare import write_tokens  # noqa: E402
from test_gpt2 import EXACT, FIXTURES, check, run, summary, words  # noqa: E402
from train_gpt2 import Config, has_gpu  # noqa: E402

TRAINER, LLAMA = HERE.parent / "train_gpt2.py", HERE / "llama3/train_llama3.py"
TINY = FIXTURES / "gpt2_tiny.bin"  # V = 331, L = 2, NH = 2, C = 64, maxT = 40


def token_files(folder):
    """Three files of training data, of which the last is the shortest, and one to validate on."""
    for i, count in enumerate((333, 300, 170)):
        write_tokens(folder / f"part_train_{i}.bin", words(257, count))
    write_tokens(folder / "part_val_0.bin", words(257, 100))


def command(device, folder, output, *flags, trainer=TRAINER, model=TINY):
    return [str(x) for x in (
        sys.executable, trainer, "--device", device, "-e", model, "-i", folder / "part_train_*.bin", "-j",
        folder / "part_val_0.bin", "-b", 2, "-t", 8, "-d", 32, "-x", 12, "-n", 3, "-v", 4, "-m", 2, "-s", 5, "-g", 3,
        "-u", 3, "-q", 0.1, "-l", 1e-2, "-c", 0.1, "-o", output, *flags)]


def train(*args, status=0, **keywords):
    """Run a training to its end. Returns what it printed; checks its exit status."""
    done = subprocess.run(command(*args, **keywords), capture_output=True, text=True)
    if status is not None and done.returncode != status:
        raise AssertionError(f"exit status {done.returncode}, expected {status}: {done.stderr.strip() or done.stdout[-500:]}")
    return done.stdout + done.stderr


def bytes_of(output, step):
    """The bytes of the files of a run that must not depend on where it stopped."""
    return {name: (output / name).read_bytes() for name in (
        f"model_{step:08d}.bin", f"state_{step:08d}_00000.bin", "main.log")}


def same(found, expected, what):
    for name, wish in expected.items():
        differ = "" if found[name] == wish else f"{len(found[name])} bytes, {len(wish)} expected, or others"
        check(f"{what}: {name} is that of a run without a stop", not differ, differ)


# ---- llm.c's state file, read by hand: see section a of its formats


def parse_state(path):
    """The fields of a state file of one process, read with struct alone."""
    data, fields, at = path.read_bytes(), {}, 1024
    ints = struct.unpack("<256i", data[:1024])
    fields["header"] = ints[:6]
    fields["step"] = ints[10]
    fields["rng"], fields["rng_before"] = struct.unpack("<2Q", data[80:96])
    fields["shard"], fields["sample"] = struct.unpack("<2Q", data[120:136])
    named = {0, 1, 2, 3, 4, 5, 10, 20, 21, 22, 23, 30, 31, 32, 33}
    fields["zeros"] = [i for i, x in enumerate(ints) if x and i not in named]
    return fields, data, at


def state_files(device, folder):
    """Every field of a state file, with and without shuffling, against what the run must have come to."""
    c, N = Config.from_file(TINY), sum(row.size for row in Config.from_file(TINY).parameter_table())
    counts = [333, 300, 170]
    for shuffle in (1, 0):
        output = folder / f"shuffle_{shuffle}"
        train(device, folder, output, "--shuffle", shuffle, "--dtype", "fp32", "-n", 7)
        for step in (7, 12):
            fields, data, at = parse_state(output / f"state_{step:08d}_00000.bin")
            name = f"shuffle {shuffle}, step {step}:"
            yield f"{name} header", fields["header"], (20240527, 1, 1, 0, 1, shuffle), EXACT
            yield f"{name} step, other fields", [fields["step"], len(fields["zeros"])], [step, 0], EXACT
            # What the loader has come to: 2 micro-batches of 16 tokens a step, by an independent walk over the shards.
            twister = np.random.RandomState(42)

            def permute(items, twister=twister):
                for i in range(len(items) - 1, 0, -1) if shuffle else ():
                    j = int(np.frombuffer(twister.bytes(4), "<u4")[0]) % (i + 1)
                    items[i], items[j] = items[j], items[i]

            shards = [0, 1, 2]
            permute(shards)
            shard, sample = 0, 0
            order = list(range((counts[shards[0]] - 1) // 16))
            permute(order)
            for _ in range(2 * step):
                if sample == len(order):
                    shard, sample = shard + 1, 0
                    if shard == 3:
                        shard = 0
                        permute(shards)
                    order = list(range((counts[shards[shard]] - 1) // 16))
                    permute(order)
                sample += 1
            yield f"{name} shard, sample", [fields["shard"], fields["sample"]], [shard, sample], EXACT
            m, v, master = np.frombuffer(data[at : at + 12 * N], "<f4").reshape(3, N)
            at += 12 * N
            model = np.frombuffer((output / f"model_{step:08d}.bin").read_bytes()[1024:], "<f4")
            yield f"{name} master weights are the model's", master, model, EXACT
            check(f"{name} m has both signs, v has one", (m < 0).any() and (m > 0).any() and (v >= 0).all() and v.any())
            if shuffle:
                yield f"{name} shards", struct.unpack_from("<Q3i", data, at), [3, *shards], EXACT
                n = struct.unpack_from("<Q", data, at + 20)[0]
                yield f"{name} samples", struct.unpack_from(f"<{n}i", data, at + 28), order, EXACT
                at += 28 + 4 * n
                seed, left, following = struct.unpack_from("<QiI", data, at)
                _, key, used, *_ = twister.get_state()
                yield f"{name} seed, left, next", [seed, left, following], [0, 625 - used, used], EXACT
                yield f"{name} twister", struct.unpack_from("<624I", data, at + 16), key, EXACT
                yield f"{name} matrix", struct.unpack_from("<2I", data, at + 2512), [0, 0x9908B0DF], EXACT
                at += 2520
            check(f"{name} size", len(data) == at, f"{len(data)} == {at}")
    check("the config is the fixture's", c.V == 331)
