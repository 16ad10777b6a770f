"""Test training beside other programs: each flag beside PyTorch (dev/bench/torch_training.py),
where PyTorch is installed; validations of several ranks beside one; the share of peak;
dev/bench/turns.py.
"""
import os
import re
import subprocess
import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.features import order
import train_gpt2
from dev.bench import turns
from dev.common.config import Config
from dev.common.flags import parse_flags
from dev.features.base import GPT2, Training
from dev.features.order import attach, table_of_flags, with_defaults
from dev.features.peak import flops_per_token, peak_flops
from dev.tests.checks import EXACT, TINY, check, check_refusal, output_of
from prepro_tinyshakespeare import write_tokens

FLAGS, _ = table_of_flags(train_gpt2.FLAGS, Config)  # all of the trainer's


# ---- PyTorch's twin, where PyTorch is

LOSS_LIMIT, NORM_LIMIT = 5e-6, 1e-4  # relative, in the first 8 steps of a tiny model in fp32
COMMON = f"-e {TINY} -b 2 -t 16 -x 8 -v 4 -m 2 -l 1e-2 --device cpu"
TWINS = [  # further flags, each a branch of the loop
    "", "-d 96", "-d 64 --clip 0.5", "--clip 0", "--clip 100", "-u 3 -q 0.1", "-k linear -u 2 -q 0",
           "-k constant -u 3",
    "-k wsd -q 0.2", "-c 0.3", "--beta1 0.8 --beta2 0.95 --eps 1e-4", "--shuffle 1", "-m -1 -v 3",
           "-a 1 -d 64",
    "-b 3 -t 33",
    "-e d1 --seed 7 -l 1e-3 -x 3",
]


def step_losses(text):
    """(training losses and norms, validation losses) that a run printed."""
    steps = re.findall(r"\| loss (\S+) \| norm +(\S+)", text)
    return np.float64(steps), np.float64(re.findall(r"val loss (\S+)", text))


def test_twins(folder):
    """Both trainers have the same losses and norms, with each flag that changes a step."""
    from dev.bench.torch_training import losses_of

    for part in range(3):
        tokens = np.random.default_rng(part).integers(257, size=400 + 40 * part)
        write_tokens(folder / f"t_train_{part}.bin", tokens)
    write_tokens(folder / "t_val.bin", np.random.default_rng(9).integers(257, size=300))
    one, three = folder / "t_train_1.bin", folder / "t_train_*.bin"
    cases = [*((flags, one) for flags in TWINS), ("-d 64", three), ("--shuffle 0", three)]
    for flags, data in cases:
        arguments = f"{COMMON} -i {data} -j {folder / 't_val.bin'} {flags} -s 0".split()
        name = f"{flags or 'defaults'}{' of three files' * (data == three)}"
        ours, val = step_losses(output_of(order.main, arguments))
        parsed, _ = with_defaults(parse_flags("", FLAGS, arguments, defaults=False), FLAGS, Config)
        own = parsed.model.endswith(".bin")
        c = Config.from_file(parsed.model) if own else Config.from_descriptor(parsed.model)
        other, other_val = map(np.float64, losses_of(c, parsed, own))
        yield f"{name}: losses", other[:, 0], ours[:, 0], LOSS_LIMIT
        yield f"{name}: norms", other[:, 1], ours[:, 1], NORM_LIMIT
        yield f"{name}: validation", other_val, val, LOSS_LIMIT


class Ranks:
    """A rank that is a thread of this process. Its ranks share a list of what each gives."""
    here = 1

    def __init__(self, rank, count, given, barrier):
        self.rank, self.count, self.given, self.barrier = rank, count, given, barrier

    def exchange(self, value, about):
        self.barrier.wait(20)  # all have taken what was given before
        self.given[self.rank] = value
        self.barrier.wait(20)
        return [*self.given]

    def agree(self, stop, pauses):
        return False

    def in_turn(self, work):
        return work()


class OneToken(GPT2):
    """A model whose loss on a batch is the mean of its tokens. seen: the first tokens of all
    sequences it was given."""
    step, seen = 0, []
    memory = classmethod(lambda cls, *sizes: (0, 0, 0))

    def __init__(self, config, device, B, T):
        self.config, self.device, self.B, self.T = config, device, B, T

    def set_parameters(self, tensors):
        pass

    def forward(self, tokens, targets):
        self.seen.extend(tokens[:, 0].tolist())
        return float(np.float32(tokens.mean() / 3))


def test_validations(folder):
    """A validation takes the same sequences, each once, and prints the same loss on any number of
    ranks: where they do not divide its batches, where some ranks have none, and where -b shrinks to
    fit the file."""
    T, longer, shorter = 8, 31, 6  # sequences of the files
    first = np.random.default_rng(3).permutation(200)[:longer]  # tokens of the sequences
    for name, count in (("val", longer), ("short_val", shorter), ("train", longer)):
        write_tokens(folder / f"{name}.bin", np.append(np.repeat(first[:count], T), 1))
    for name, batches, sequences in (("val", 5, 20), ("val", 2,
                                                      8), ("val", -1, 28), ("short_val", -1, 4)):
        arguments = (f"--device cpu --dtype fp32 -e {TINY} -b 4 -t {T} -x 0 -s 0 -i "
                     f"{folder / 'train.bin'} -j {folder / name}.bin -m {batches}").split()
        for count in (1, 2, 3, 4):
            given, barrier, OneToken.seen = [None] * count, threading.Barrier(count), []

            def work(rank, count=count, given=given, barrier=barrier, arguments=arguments):
                ranks = Ranks(rank, count, given, barrier) if count > 1 else None
                flags = parse_flags("", FLAGS, arguments, defaults=False)
                flags, _ = with_defaults(flags, FLAGS, Config)
                Run, _ = attach(flags, Training, OneToken, ranks)
                Run.Model = OneToken  # as it is, without the classes of features
                Run(flags).run()

            jobs = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
            with mock.patch("dev.features.ranks.ranks.RankedTraining.check_same",
                            lambda *args: None):
                text = output_of(lambda jobs=jobs: [*(job.start() for job in jobs),
                                                    *(job.join() for job in jobs)])
            what, wish = f"{name}, -m {batches}, {count} ranks", first[:sequences].tolist()
            check(f"{what}: its sequences", sorted(OneToken.seen) == sorted(wish), OneToken.seen)
            losses = re.findall(r"^val loss (\S+)$", text, re.MULTILINE)
            check(f"{what}: its loss", losses == [f"{np.mean(wish) / 3:.6f}"] * count, losses)


def test_share_of_peak(folder):
    """NVIDIA's data sheets have these peaks; a step's line has the share, and the device's line the
    peak."""
    for name, capability, count, clock, peaks in (  # the clock that the data sheet is for, in MHz
            ("A100", 80, 108, 1410, dict(fp32=19.5, tf32=156, bf16=312)),
            ("RTX 3090", 86, 82, 1695, dict(fp32=35.6, tf32=35.6, bf16=71)),
            ("RTX 4090", 89, 128, 2520, dict(fp32=82.6, tf32=82.6, bf16=165.2, fp8=330.3)),
            ("H100 SXM", 90, 132, 1830, dict(tf32=494.7, bf16=989.4, fp8=1978.9)),
            ("another", 70, 80, 1380, dict(bf16=0))):
        for dtype, peak in peaks.items():
            device = SimpleNamespace(name="cuda", capability=capability, dtype=dtype,
                                     multiprocessors=count,
                                     gpu=SimpleNamespace(attributes={"ClockRate": 1000 * clock}))
            yield f"peak of {name} in {dtype}", peak_flops(device) / 1e12, peak, 5e-3
    check("a CPU has none", peak_flops(SimpleNamespace(name="cpu")) == 0)
    products = 12 * 12 * 768**2 + 768 * 50304  # 12 C^2 in each layer, and the head
    pairs = 2 * 2 * 12 * 768 * 1024 / 2  # q.k and weights @ v, with half of 1,024 tokens
    yield ("FLOPs of a token of GPT-2", flops_per_token(Config(), 1024), 3 * (2 * products + pairs),
           EXACT)

    write_tokens(folder / "tokens.bin", range(100))
    arguments = (f"--device cpu -e {TINY} -b 2 -t 8 -d 32 -x 3 -v 0 -s 0 -i "
                 f"{folder / 'tokens.bin'} -j {folder / 'tokens.bin'}").split()
    with mock.patch("dev.features.peak.peak_flops", lambda device: 25e7):
        text = output_of(order.main, arguments)
    line = re.search(r"^device .*, fp32, plain loops, peak 0 TFLOP/s \(", text, re.M)
    check("the device's line", line, text[:99])
    found = re.findall(r"([\d,]+) tok/s \| +([\d.]+)% of peak \| \d+ tokens$", text, re.M)
    speeds, shares = ([float(x.replace(",", "")) for x in column] for column in zip(*found))
    yield "steps with a share", len(shares), 3, EXACT
    for speed, share in zip(speeds, shares):
        yield ("the share of peak, in %", share,
               100 * speed * flops_per_token(Config.from_file(TINY), 8) / 25e7, 5e-2)
    text = output_of(order.main, arguments)
    check("without a peak", re.search(r" tok/s \| 96 tokens$", text, re.M) and "peak" not in text,
          text)


def test_steps_by_turns(folder):
    """A version's time is the median of its runs, beside the first's. A run's is that of its later
    steps. A commit's files are unpacked, and flags behind those of all win."""
    times, seen = {".": iter((10.0, 30.0, 11.0)), "HEAD": iter((22.0, 5.0, 40.0, 20.0, 21.0))}, []

    def time_run(top, flags):
        version = "." if top == turns.TOP else "HEAD"
        seen.append((version, (top / "kernels.cu").exists(), flags[:6], flags[10:]))
        return next(times[version]), f"loss of {version}"

    with mock.patch.object(turns, "time_run", time_run):
        table = output_of(turns.main,
                          ["HEAD -b 8", ".", "--rounds", "3", "--", "-b", "4"]).splitlines()[-2:]
    check("two versions",
          table == ["| HEAD -b 8 | 22.000 | 1.0000 | 22.00, 5.00, 40.00 | loss of HEAD |",
                                    "| . | 11.000 | 0.5000 | 10.00, 30.00, 11.00 | loss of . |"],
          table)
    rounds = [("HEAD", True, "-x 40 -v 0 -s 0".split(), ["-b", "4", "-b", "8"]),
              (".", True, "-x 40 -v 0 -s 0".split(), ["-b", "4"])] * 3
    check("by turns", seen == rounds, seen)
    with mock.patch.object(turns, "time_run", time_run):
        table = output_of(turns.main, ["HEAD", "HEAD", "--rounds", "1"]).splitlines()[-2:]
    check("a version twice", [row.split(" | ")[1] for row in table] == ["20.000", "21.000"], table)
    flags = (f"--device cpu -e {TINY} -b 1 -t 8 -x 3 -v 0 -s 0 -i {folder / 't.bin'} -j "
             f"{folder / 't.bin'}".split())
    write_tokens(folder / "t.bin", np.arange(100, dtype=np.uint16) % 50)
    ms, loss = turns.time_run(turns.TOP, flags)
    printed = [line.split(" | ") for line in output_of(order.main, flags).splitlines()
               if line.startswith("step ")]
    check("a run of the trainer", ms > 0 and printed[-1][1] == f"loss {loss}",
          f"{ms} {loss} {printed[-1]}")
    lines = "".join(f"step {i}/6 | loss {i}.5 | norm 1 | lr 1 | {ms:8.2f} ms | 9 tok/s\n"
                    for i, ms in enumerate((900, 800, 4, 2, 30, 5), 1))
    with mock.patch.object(subprocess, "run",
                           lambda *args, **more: mock.Mock(stdout=lines, stderr="", returncode=0)):
        check("a run's time", turns.time_run(turns.TOP, []) == (4.5, "6.5"))
        lines = "tables"
        check_refusal("turns.py", "expected steps, found status 0:\ntables", turns.time_run,
                      turns.TOP, [])
    with mock.patch.dict(os.environ, PATH=str(folder)):
        check_refusal("turns.py", "HEAD: a commit needs git", turns.unpack, "HEAD", folder)
    for wish, *arguments in (("nothing: expected a commit, a folder with train_gpt2.py, or . for",
                              "nothing"),
                             (".*: expected commits, folders or ., with flags", ". -o it's"),
                             (".*: expected commits, folders or .", ""),
                             ("train_gpt2.py .* found status 1:\nerror: .*--nonsense", ".", "--",
                              "--nonsense", "1")):
        check_refusal("turns.py", wish, output_of, turns.main, arguments)
