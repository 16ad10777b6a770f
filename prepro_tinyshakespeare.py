"""Text to tokens: writes the two files that train_gpt2.py reads, the same that llm.c reads.

    python prepro_tinyshakespeare.py                          # downloads tinyshakespeare, 1.1 MB
    python prepro_tinyshakespeare.py --input book.txt --name book    # any UTF-8 text, as data/book/book_{train,val}.bin

The text becomes GPT-2 tokens, with <|endoftext|> before it and after every blank line, so that each speech of a play
is a document of its own. The first 32,768 tokens are for validation (the first tenth of a text too short for that),
the rest for training. A file is 256 int32 (magic 20240520, version 1, count), then the tokens as uint16.

It is also the module that the other programs share, since they need it anyway: one-line errors and flags, llm.c's
files, what kernels.cu says to its host, and the text of tokens. It imports none of them.
"""
import argparse
import contextlib
import ctypes
import functools
import glob
import http.client
import itertools
import json
import math
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

# How launchers tell a process which of several it is: a variable that they set in these processes alone, and those of
# its rank, of how many there are, of its rank on its machine, and of how many are there, if they say it. The first that
# is found counts, since srun may set PMI's too, but not the rank on a machine.
LAUNCHERS = {"torchrun or --gpus": ("RANK", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
             "Open MPI": ("OMPI_COMM_WORLD_RANK", *(f"OMPI_COMM_WORLD_{name}" for name in (
                 "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
             "MPICH or Intel MPI": ("MPI_LOCALRANKID", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
             "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
             "Slurm": ("SLURM_PROCID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", ""),
             "PMI": ("PMI_RANK", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")}


def launched(environment=os.environ):
    """What a launcher has told this process: (the launcher, rank, ranks, rank on this machine, ranks there). None for a
    process that is alone."""
    for name, (mark, *variables) in LAUNCHERS.items():
        if environment.get(mark, "").isdigit():
            values = [int(environment.get(variable, default)) for variable, default in zip(variables, (0, 1, 0, 1))]
            return (name, *values) if values[1] > 1 else None
    return None


# On a CPU, NumPy's threads and the kernels' take turns. One that busy-waits would block the others, so all are told to
# sleep. Several ranks share the cores. NumPy reads this when it is imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if ranks := launched():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # srun says just this
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(cores, os.cpu_count() // ranks[4]))))

import numpy as np  # noqa: E402

# ---- Programs: one-line errors, flags


class UserError(Exception):
    """Something that the user can mend. The message is one line: what was found, what was expected, what to do."""


def run(main):
    """Run a program: main() returns its exit status, and an error is one line and status 1."""
    try:
        sys.exit(main())
    except (UserError, OSError) as e:
        sys.exit(f"error: {e}")
    except ModuleNotFoundError as e:
        if not f"{e.name}.".startswith("dev."):
            raise
        sys.exit(f"error: this needs {e.name.replace('.', '/')}, which is missing beside train_gpt2.py: restore it")
    except KeyboardInterrupt:
        sys.exit("interrupted")


def number(kind, least, below=math.inf):
    """The type of a flag: text as an int or a float, at least `least` and below `below`."""
    def convert(text):
        if not least <= kind(text) < below:
            upper = f" and below {below}" if below < math.inf else ", and finite" if kind is float else ""
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}{upper}")
        return kind(text)
    convert.__name__ = kind.__name__  # as argparse calls it where text is no number at all
    return convert


def parse_flags(description, table, arguments=None, defaults=True):
    """The flags of a command line. A row of the table is a letter or None, a long name, a type or a tuple of choices, a
    default, and what it is. Without defaults, what is not given is None. Raises UserError."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, exit_on_error=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for letter, name, kind, default, text in table:
        form = dict(choices=kind) if isinstance(kind, tuple) else dict(type=kind, metavar=kind.__name__.upper())
        if kind in (SWITCH, LEVEL):  # by itself it means 1
            form |= dict(nargs="?", const=1)
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(*filter(None, (letter, name)), default=default if defaults else None, help=text + shown,
                            **form)
    given = sys.argv[1:] if arguments is None else arguments
    if any(flag == "-h" and not value.startswith("-") for flag, value in itertools.pairwise(given)):
        raise UserError("-h is help, and takes no value; HellaSwag is --hellaswag FILE")
    try:
        flags, unknown = parser.parse_known_args(given)
    except argparse.ArgumentError as e:
        raise UserError(f"{str(e).removeprefix('argument ')}; --help lists the flags") from None
    if unknown:
        pattern = "" if unknown[0].startswith("-") else "; a pattern of files goes in quotes"
        raise UserError(f"{unknown[0]} is no flag{pattern}; --help lists them")
    return flags


# The trainer's flags: letter, long name, type or choices, default (None: see DEFAULTS), what it is.
COUNT, COUNT_OR_0, SWITCH, RATE = number(int, 1), number(int, 0), number(int, 0, 2), number(float, 0)
COUNT_OR_ALL, LEVEL = number(int, -1), number(int, 0, 3)


def named(text):
    """The type of a flag that names something."""
    if not text:
        raise argparse.ArgumentTypeError("expected a name, found nothing")
    return text


named.__name__ = "name"  # as --help has it


BETA, EPS = number(float, 0, 1), number(float, 1e-37)  # the smallest numbers of fp32 would be 0 on a GPU
ADAMW_FLAGS = "beta1", "beta2", "eps", "weight_decay", "clip", "loss_limit", "norm_limit", "seed"
FLAGS = [
    ("-i", "--train-data", named, None, "token file to train on, or a pattern of several in quotes, which are shuffled "
     "(default: tinyshakespeare, prepared if it is missing)"),
    ("-j", "--val-data", named, None, "token file to validate on (default: -i's, with val for train)"),
    ("-e", "--model", named, None, "checkpoint; or, from scratch, {kind.DESCRIPTORS} (default: {kind.MODELS[0]} if it "
     "is here, else {kind.MODELS[1]} on a GPU and {kind.MODELS[2]} on a CPU)"),
    ("-o", "--output", named, None, "new folder for main.log and checkpoints; one comes at the end (default: none)"),
    ("-n", "--checkpoint-every", COUNT_OR_0, 0, "steps between checkpoints that -y 1 can go on from; 0 for none"),
    ("-nk", "--checkpoints-kept", COUNT_OR_0, 0, "the newest so many of them are kept; 0: all"),
    ("-nm", "--checkpoints-major", COUNT_OR_0, 0, "those of multiples of so many steps are kept forever; 0 for none"),
    ("-y", "--resume", SWITCH, 0, "1: go on with the run in -o, from its newest whole checkpoint or its start"),
    ("-b", "--batch-size", COUNT, None, "B, sequences in a micro-batch of a rank (default: 4)"),
    ("-d", "--total-batch", COUNT, None, "tokens in a step of all ranks, a multiple of B*T times their number "
     "(default: that)"),
    ("-t", "--seq-len", COUNT, None, "T, tokens in a sequence (default: 1024 on a GPU, 64 on a CPU)"),
    ("-l", "--learning-rate", RATE, None, "learning rate (default: 3e-4; without -e and -i see the README)"),
    ("-k", "--schedule", ("cosine", "linear", "constant", "wsd"), None, "how the learning rate falls; wsd: "
     "late (default: cosine)"),
    ("-u", "--warmup", COUNT_OR_0, None, "steps in which the rate rises, except if it is constant (default: 0)"),
    ("-q", "--final-fraction", RATE, None, "what the learning rate falls to, as a fraction of it (default: 1)"),
    ("-x", "--steps", COUNT_OR_ALL, None, "steps to train; -1: an epoch (default: -1)"),
    ("-v", "--val-every", COUNT_OR_0, None, "steps between validations, and one after the last; 0: none (default: 20)"),
    ("-m", "--val-batches", COUNT_OR_ALL, 20, "most batches of a validation, each B*T, of all ranks together; -1: all"),
    ("-s", "--sample-every", COUNT_OR_0, None, "steps between samples, and one after the last; 0: none (default: 20)"),
    ("-g", "--sample-tokens", COUNT_OR_0, 64, "tokens of a sample"),
    ("-c", "--weight-decay", RATE, 0.0, "AdamW's weight decay, of matrices and embeddings only"),
    (None, "--beta1", BETA, 0.9, "AdamW's decay of the first moment"),
    (None, "--beta2", BETA, None, "AdamW's decay of the second moment (default: 0.999)"),
    (None, "--eps", EPS, 1e-8, "AdamW's epsilon"),
    (None, "--clip", RATE, 1.0, "largest norm of a step's gradient, which is scaled down to it; 0 for none"),
    ("-sl", "--loss-limit", RATE, 0.0, "skip an update if the loss's z-score in the last 128 is above it; 0: none"),
    ("-sg", "--norm-limit", RATE, 0.0, "skip an update if the norm's is above it; 0: none"),
    ("-a", "--overfit", SWITCH, 0, "1: train on the first batch of -j alone, to see whether it can be learned"),
    (None, "--shuffle", SWITCH, None, "1: batches in llm.c's random order, 0: in the files' (default: 1 for several)"),
    (None, "--moments", ("fp32", "bf16"), "fp32", "AdamW's; bf16 takes half the memory, and is rounded at random"),
    (None, "--seed", COUNT_OR_0, 42, "of the initial parameters, and of what is rounded at random"),
    (None, "--gpus", COUNT, None, "train on so many of this machine's GPUs; 1: alone (default: alone, or as one of the "
     "ranks that torchrun, srun or mpirun has started)"),
    ("-z", "--zero", SWITCH, 0, "1: of several ranks, each has a share of AdamW's moments and fp32 parameters (ZeRO)"),
    (None, "--log-ranks", SWITCH, 0, "1: each rank but the first adds what it prints to -o/rank_*.txt"),
    (None, "--device", ("cpu", "cuda"), None, "where to compute (default: cuda if there is a GPU)"),
    (None, "--dtype", ("fp32", "tf32", "bf16", "fp8"), None, "tf32: fp32, products in TF32; fp8: bf16, "
     "the layers' products in FP8 (default: bf16; on a CPU fp32)"),
    (None, "--plain", SWITCH, 0, "1: on a GPU, without the last section of train_gpt2.py, which is there for speed"),
    (None, "--graph", SWITCH, 1, "on a GPU, launch a step's kernels as one graph (1) or one by one (0)"),
    (None, "--nvtx", SWITCH, 0, "1: on a GPU, NVTX ranges by layer and kernel, for a profiler; it implies --graph 0"),
    (None, "--recompute", LEVEL, 0, "1: compute norms and what is inside of the MLP again: less memory, slower; "
     "2: all of a layer but attention: least memory, slowest"),
    (None, "--hellaswag", named, None, "file of dev/data/hellaswag.py to score at each validation but the first"),
    (None, "--sample", str, None, "go on with this text, for -g tokens, and do not train"),
    (None, "--temperature", RATE, 1.0, "of --sample: below 1 likely tokens are likelier still; 0: only the likeliest"),
    (None, "--top-k", COUNT_OR_0, 0, "of --sample: choose among so many tokens; 0: all"),
    (None, "--dry-run", SWITCH, 0, "1: print sizes and an estimate of the time, and do not train"),
    (None, "--replay", named, None, "find what was not finite in a step, from the file that a run wrote of it"),
    (None, "--attention", ("softmax", "relu"), "softmax", "attention's weights: softmax, or max(0, q.k / sqrt(HS))"),
]

# The trainer's defaults where FLAGS has None: of any run, and of one that is not told what to train. The latter are
# what dev/sweep.py found for tinyshakespeare, from random weights: about a minute on two cores, and seconds on a GPU.
DEFAULTS = dict(batch_size=4, learning_rate=3e-4, schedule="cosine", warmup=0, final_fraction=1.0, beta2=0.999,
                val_every=20, sample_every=20)
SCRATCH = {"cpu": dict(steps=250, learning_rate=1e-3, warmup=25, final_fraction=0.1, beta2=0.95, val_every=50,
                       sample_every=125),
           "cuda": dict(batch_size=2, steps=1200, learning_rate=2e-4, warmup=120, final_fraction=0.3, val_every=100,
                        sample_every=400)}
DEFAULT_T = {"cpu": 64, "cuda": 1024}
NEEDS = {  # flags that mean nothing without another one
    "checkpoint_every": "output", "resume": "output", "checkpoints_kept": "checkpoint_every",
    "checkpoints_major": "checkpoints_kept", "temperature": "sample", "top_k": "sample", "log_ranks": "output"}


def check_needs(flags):
    """Raise UserError if one of the flags was given without the one that it needs."""
    def called(name):
        return f"--{name.replace('_', '-')}"

    for name, needed in NEEDS.items():
        known = flags.resume and needed.startswith("checkpoint")  # by the run that goes on
        if getattr(flags, name) and getattr(flags, needed) in (None, 0) and not known:
            raise UserError(f"{called(name)}: expected {called(needed)} too; --help says what they do")
    if flags.hellaswag and flags.val_every == 0:
        raise UserError("--hellaswag: is scored at each validation, and -v 0 makes none: expected another -v")


def set_defaults(flags, device, no_model):
    """Set those of the flags that are None and have a default."""
    scratch = SCRATCH[device] if no_model and (device == "cpu" or not flags.train_data) else {}
    defaults = {name.removeprefix("--").replace("-", "_"): default for _, name, _, default, _ in FLAGS}
    for name, value in (defaults | DEFAULTS | scratch).items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)


# ---- The terminal, and signals


def duration(seconds):
    """A time for a person: "3 h 20 min", "4 min 10 s" or "9 s"."""
    minutes, hours = seconds // 60, seconds // 3600
    if hours:
        return f"{hours:.0f} h {minutes % 60:.0f} min"
    return f"{minutes:.0f} min {seconds % 60:.0f} s" if minutes else f"{seconds:.0f} s"


def progress(share=None, seconds_left=0):
    """Draw a bar with the time left under what was printed; without a share, take it away. It goes to stderr, and only
    if that is a terminal, so that no log file gets it."""
    if sys.stderr.isatty():
        bar = "" if share is None else f"[{'#' * int(40 * share):40}] {share:4.0%}, {duration(seconds_left)} left"
        print(f"\r\x1b[K{bar}", end="", file=sys.stderr, flush=True)


def say(line):
    """Print a line in the place of the bar, at once."""
    progress()
    try:
        print(line, flush=True)
    except BrokenPipeError:  # `| tee` got the Ctrl-C too: nobody reads any more, but the run is still to be saved
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def stop_signals():
    """Hands out a list, which gets the number of the first Ctrl-C or SIGTERM. A second Ctrl-C ends the program."""
    came, before = [], {}

    def handler(number, frame):
        came.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which a scheduler and a launcher may both send
        with contextlib.suppress(OSError):
            os.write(2, b"\nstopping after this step; Ctrl-C once more leaves at once\n")  # print may be interrupted

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handler)
    try:
        yield came
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# ---- Files: llm.c's numbers and headers, and what is kept for later runs

HEADER_BYTES = 1024
BF16 = np.uint16  # NumPy has no bfloat16, so an array holds its bits: the upper half of an fp32's
LOW = np.int16  # the lower half of an fp32's bits, signed: see kept_as


def to_bf16(x):
    """fp32 numbers rounded to bfloat16, to nearest with ties to even, as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def kept_as(x, dtype):
    """What an array of this type keeps of fp32 numbers: fp32 all; BF16 the upper half, rounded; LOW the lower half, so
    that their bits are (upper << 16) + lower. Ties are rounded away from zero, because that has an inverse: with ties
    to even, a lower half of 0x8000 would not say whether the upper one was rounded up or down."""
    bits = x.view(np.uint32)
    if dtype == BF16:
        return np.where(x == x, (bits + 0x8000) >> 16, 0x7FFF).astype(BF16)
    return bits.astype(LOW) if dtype == LOW else x


def to_float(x, low=None):
    """An array as fp32, from bfloat16's bits, with their lower halves if they are given, or from fp32 as it is."""
    if x.dtype != BF16:
        return x
    bits = x.astype(np.uint32) << 16
    return (bits if low is None else bits + low.astype(np.uint32)).view(np.float32)


def replace_file(path, chunks):
    """Write the chunks (bytes or C-contiguous arrays) to path, whole or not at all.

    They go to a temporary file beside it, which then takes its name: an old file is there until the new one is
    complete. Raises UserError if the disk is full or the folder cannot be written.
    """
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); what was there before is untouched") from None
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass  # the folder itself is missing or read-only, which the UserError says


def cache_folder():
    """Where what took long to make is kept: $XDG_CACHE_HOME/train_gpt2, or ~/.cache/train_gpt2."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "train_gpt2"


def read_cache(name):
    """What write_cache kept under a name, a dict, or an empty one."""
    try:
        return json.loads((cache_folder() / f"{name}.json").read_text())
    except (OSError, ValueError):  # not there yet, or damaged
        return {}


def write_cache(name, values):
    """Keep a dict for later runs, together with what others have kept since; where it cannot be written, it is lost."""
    with contextlib.suppress(OSError, UserError):
        replace_file(cache_folder() / f"{name}.json", [json.dumps(read_cache(name) | values).encode()])


class FileKind(NamedTuple):
    """A kind of file: its name, what its header begins with, and how a person gets a good one."""
    name: str
    magic: int
    versions: tuple
    remedy: str


TOKEN_FILE = FileKind("token file", 20240520, (1,),
                      "prepro_tinyshakespeare.py writes one, also from a text of your own with --input")
LLAMA_TOKEN_FILE = FileKind("token file", 20240801, (7,), "dev/llama3/tokens.py writes one")
TOKEN_FILES = {TOKEN_FILE: np.dtype("<u2"), LLAMA_TOKEN_FILE: np.dtype("<u4")}  # the types of their tokens
TOKENIZER = FileKind("tokenizer", 20240328, (2,), "llm.c's train_gpt2.py writes one; without it tiktoken is used")

KINDS = {  # by the first number of a header: what the file is, and what takes it
    20240326: "a GPT-2 checkpoint, which train_gpt2.py trains (-e)",
    20240327: "a debug state of GPT-2, which test_gpt2.py compares with (--state)",
    20240328: "GPT-2's tokenizer, which decodes samples if its name is gpt2_tokenizer.bin",
    20240520: "a file of GPT-2's tokens, which train_gpt2.py trains on (-i)",
    20240522: "a file of HellaSwag's questions, which train_gpt2.py scores (--hellaswag)",
    20240527: "AdamW's state, with which a run goes on (-o FOLDER -y 1)",
    20240801: "a file of Llama 3's tokens, which dev/llama3/train_llama3.py trains on (-i)",
    20240803: "a Llama 3 checkpoint, which dev/llama3/train_llama3.py trains (-e)",  # or a debug state of Llama 3
}


def read_header(path, kind, *others):
    """The 256 ints of a file's header. Raises UserError if it is of none of these kinds, or of another version."""
    try:
        with open(path, "rb") as file:
            start = file.read(HEADER_BYTES)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); expected a {kind.name}: {kind.remedy}") from None
    header = np.frombuffer(start[: len(start) // 4 * 4], "<i4").tolist()
    kinds = {kind.magic: kind for kind in (kind, *others)}
    if header and header[0] not in kinds:
        legacy = "; a file without a header is of an old format" if kind is TOKEN_FILE else ""
        magics, names = " or ".join(map(str, kinds)), " or a ".join(dict.fromkeys(k.name for k in kinds.values()))
        if header[0] in KINDS:
            raise UserError(f"{path}: is {KINDS[header[0]]}; expected a {names}: {kind.remedy}")
        raise UserError(f"{path}: begins with {header[0]}, and a {names} with {magics}{legacy}: {kind.remedy}")
    kind = kinds[header[0]] if header else kind
    if len(header) < 256:
        raise UserError(f"{path}: truncated within its header of {HEADER_BYTES} bytes; "
                        f"expected a {kind.name}: {kind.remedy}")
    if header[1] not in kind.versions:
        old = " (an old format)" if header[1] < kind.versions[0] else ""
        expected = " or ".join(map(str, kind.versions))
        raise UserError(f"{path}: {kind.name} of version {header[1]}{old}; expected version {expected}: {kind.remedy}")
    return header


def make_header(kind, *fields):
    """The 256 ints of a header of a kind: its magic number, these fields, and zeros."""
    return np.array([kind.magic, *fields, *[0] * (255 - len(fields))], "<i4")


def check_size(path, kind, expected):
    """Raise UserError unless the file has exactly the expected number of bytes."""
    size = os.path.getsize(path)
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(f"{path}: {what}: {size:,} bytes, and the header of this {kind.name} promises {expected:,}: "
                        f"{kind.remedy}")


# ---- Kernels and the machine: what kernels.cu says to its host, and whether there is a GPU


class Kernel(NamedTuple):
    """What kernels.cu says of a kernel: BLOCK(threads, items along x, items along y), and its parameters."""
    name: str
    threads: int  # of a block
    covers: list  # functions of threads and W: the items that a block covers along x, and along y
    parameters: list  # (name, NumPy type or, of a pointer, None, whether it is const)

    def plan(self, items, args, W, threads=None):
        """(grid, block, arguments) of a launch over so many items, or (items along x, along y). Raises UserError unless
        there are as many arguments as parameters, of which the last two may be left out if they are of a twin."""
        if self.parameters[-1][0] == "scale8" and len(args) == len(self.parameters) - 2:
            args = *args, None, None  # no twin is asked for: see TwinWriter in kernels.cu
        if len(args) != len(self.parameters):
            raise UserError(f"kernels.cu: {self.name} has {len(self.parameters)} parameters, and is launched with "
                            f"{len(args)} arguments")
        threads = threads or self.threads
        sizes = [int(covers(threads, W)) for covers in self.covers]  # int, since C's / of ints is a float in Python
        sizes.append(1)  # along y, where BLOCK does not say
        counts = items if isinstance(items, tuple) else (items,)
        grid = tuple(-(-count // size) for count, size in zip(counts, sizes))  # rounded up
        return grid, (threads,), tuple(kind(arg) if kind else arg for arg, (_, kind, _) in zip(args, self.parameters))


SCALARS = {"int": np.int32, "float": np.float32, "size_t": np.uint64,
           "TensorMap": np.asarray}  # what a device makes is one already, 128 bytes


def aligned_bytes(size):
    """Zeros whose address is a multiple of 128. A TensorMap wants one of 64."""
    memory = np.zeros(size + 127, np.uint8)
    start = -memory.ctypes.data % 128
    return memory[start : start + size]


def without_comments(text):
    """CUDA text with its comments as blanks, so that every place in it stays where it is."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)


def read_kernels(sources):
    """{name: Kernel} of CUDA files. Raises UserError if a parameter is neither a pointer nor one of SCALARS."""
    declaration = (r'BLOCK\(\s*(\d+)\s*,([^()]*)\)\s*extern "C" __global__ void\s+'
                   r"(?:__launch_bounds__\(.*?\)\s*)?(\w+)\(([^)]*)\)")
    kernels, found = {}, []
    for path in sources:
        text = without_comments(path.read_text(encoding="utf-8"))
        found += [(path, *words) for words in re.findall(declaration, text)]
    for path, threads, covers, name, parameters in found:
        try:
            covers = [eval(f"lambda threads, W: {expression}") for expression in covers.split(",")]
            if min(function(int(threads), W) for function in covers for W in (4, 8)) < 1:
                raise ValueError("a block covers nothing")
        except Exception as e:  # whatever somebody wrote there
            raise UserError(f"{path.name}: BLOCK over {name}: {e}: expected arithmetic in threads and W") from None
        kernels[name] = Kernel(name, int(threads), covers, [])
        for parameter in parameters.replace("__restrict__", "").split(","):
            *_, kind, label = re.findall(r"\w+", parameter)
            pointer = "*" in parameter
            if not pointer and kind not in SCALARS:
                raise UserError(f"{path.name}: {name}: {kind} {label}: expected a pointer or {', '.join(SCALARS)}")
            kernels[name].parameters.append((label, None if pointer else SCALARS[kind], "const" in parameter))
    return kernels


# What kernels.cu, once it is compiled, says of itself in constant arrays: the rows and threads of attention's blocks,
# and their bytes of shared memory; the most threads of layernorm_backward's blocks, those of a row, and a row's bytes.
SIZES = {"attention_sizes": ("rows", "threads", "shared_forward", "shared_backward", "maps"),
         "layernorm_sizes": ("threads", "row_threads", "shared_of_row")}


def available_memory():
    """How many bytes of the host's memory can be allocated."""
    try:
        return 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[1])
    except (OSError, TypeError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_gpu():
    """Whether NVIDIA's driver reports a GPU: asked of the driver itself, since CuPy takes a second to import."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except OSError:
        return False


# ---- Text and tokens

TEXT_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
TINYSHAKESPEARE = Path("data/tinyshakespeare/tiny_shakespeare_{}.bin")  # {}: train or val
END_OF_TEXT, EOT = "<|endoftext|>", 50256
VAL_TOKENS = 32768
PRINTING = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # the bytes that print in Latin-1


def gpt2_encoding():
    """GPT-2's byte-pair encoding (50,257 tokens). tiktoken downloads it once, or takes it from TIKTOKEN_CACHE_DIR.

    Raises UserError if it is neither cached nor to be had from the network.
    """
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # whatever its HTTP library raises
        raise UserError(f"tiktoken could not get GPT-2's vocabulary ({type(e).__name__}): connect to the network once, "
                        "or set TIKTOKEN_CACHE_DIR to a folder that holds it") from None


def byte_encoding():
    """The part of GPT-2's vocabulary that needs no download: its 256 single-byte tokens, and end-of-text.

    The ids are GPT-2's own: it numbers the bytes that print in Latin-1 first, and then the others.
    """
    import tiktoken

    ranks = {bytes([b]): i for i, b in enumerate(PRINTING + [b for b in range(256) if b not in PRINTING])}
    return tiktoken.Encoding("gpt2_bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: EOT})


def download_tinyshakespeare():
    """The text of tinyshakespeare, a str of 1,115,394 characters. Raises UserError if it cannot be downloaded."""
    try:
        with urllib.request.urlopen(TEXT_URL, timeout=20) as response:
            return response.read().decode("utf-8")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as e:  # URLError and time-outs are OSErrors
        raise UserError(f"tinyshakespeare could not be downloaded ({getattr(e, 'reason', e)}): connect to the network, "
                        "or give a text of your own with prepro_tinyshakespeare.py --input FILE") from None


def write_tokens(path, tokens, kind=TOKEN_FILE):
    """Write a token file: path, tokens (a sequence of ids; GPT-2's are below 65,536)."""
    print(f"writing {len(tokens):,} tokens to {path}")
    replace_file(path, [make_header(kind, kind.versions[0], len(tokens)), np.asarray(tokens, TOKEN_FILES[kind])])


def files_of(pattern):
    """The paths of the files that a pattern such as data/fineweb_train_*.bin matches, sorted as llm.c does; or, if none
    does, that of a file of this name."""
    return sorted(glob.glob(str(pattern))) or [str(pattern)]


def count_tokens(path):
    """(how many tokens a token file has, GPT-2's or Llama's, and their NumPy type). Raises UserError."""
    header = read_header(path, *TOKEN_FILES)
    [(kind, dtype)] = [item for item in TOKEN_FILES.items() if item[0].magic == header[0]]
    check_size(path, kind, HEADER_BYTES + dtype.itemsize * header[2])
    return header[2], dtype


def read_tokens(path, V):
    """The tokens of a token file, mapped into memory. Raises UserError unless all ids are in 0..V-1."""
    count, dtype = count_tokens(path)
    tokens = np.memmap(path, dtype, "r", offset=HEADER_BYTES) if count else np.zeros(0, dtype)
    check_tokens(path, tokens, V)
    return tokens


def check_tokens(path, tokens, V):
    """Raise UserError unless all ids are in 0..V-1."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < V:
        bad = int(np.argmax((tokens < 0) | (tokens >= V)))
        raise UserError(f"{path}: token {bad} is {tokens.flat[bad]}, and the model has V = {V} words; "
                        "expected a file made with the model's own vocabulary")


def prepare(text, encoding, path, kind=TOKEN_FILE, border=END_OF_TEXT):
    """Tokenize text (str) and write the two files path.format("val") and path.format("train"). The border is a special
    token, before each document."""
    document = border + text.replace("\n\n", "\n\n" + border)
    tokens = encoding.encode(document, allowed_special={border}, disallowed_special=())
    val = min(VAL_TOKENS, len(tokens) // 10)
    if val < 2:
        raise UserError(f"the text has {len(tokens)} tokens, and needs at least 20 for training and validation")
    write_tokens(str(path).format("val"), tokens[:val], kind)
    write_tokens(str(path).format("train"), tokens[val:], kind)


def data_paths(train, val):
    """The paths of the tokens to train and to validate on. One that is None has the other's name, with val for train in
    it or the other way round. Raises UserError.

    If both are None, they are tinyshakespeare's, which is prepared if it is missing. Without a network it is another
    real text, the language reference that Python carries, so that the trainer always runs. Whatever it does
    without is said in a line that begins with WARNING.
    """
    for given, part, flag in ((train, "train", "-j"), (val, "val", "-i")):
        if given and part not in Path(given).name and not (train and val):
            raise UserError(f"{given} has no '{part}' in its name: give {flag} too")
    if train or val:
        return [train or str(Path(val).with_name(Path(val).name.replace("val", "train"))),
                val or str(Path(train).with_name(Path(train).name.replace("train", "val")))]

    def paths(pattern):
        return [str(pattern).format(part) for part in ("train", "val")]

    if all(Path(path).exists() for path in paths(TINYSHAKESPEARE)):
        return paths(TINYSHAKESPEARE)
    try:
        prepare(download_tinyshakespeare(), gpt2_encoding(), TINYSHAKESPEARE)
        return paths(TINYSHAKESPEARE)
    except UserError as e:
        print(f"WARNING: {e}. Training on Python's language reference instead.")
    try:
        encoding, name = gpt2_encoding(), "python_reference"
    except UserError as e:
        print(f"WARNING: {e}. Every byte of the text is a token of its own.")
        encoding, name = byte_encoding(), "python_reference_bytes"
    pattern = Path(f"data/{name}/{name}_{{}}.bin")
    if not all(Path(path).exists() for path in paths(pattern)):
        from pydoc_data.topics import topics
        prepare("\n\n".join(topics[key] for key in sorted(topics)), encoding, pattern)
    return paths(pattern)


def read_tokenizer(path):
    """The bytes of each token, from a gpt2_tokenizer.bin. Raises UserError."""
    count = read_header(path, TOKENIZER)[2]
    data, words, at = Path(path).read_bytes(), [], HEADER_BYTES
    while at < len(data) and len(words) < count:
        words.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    if len(words) < count or at != len(data):
        raise UserError(f"{path}: its header promises {count} tokens, and its {len(data):,} bytes are not that many; "
                        f"{TOKENIZER.remedy}")
    return words


def words_of(encoding):
    """{token id: its bytes} of an encoding, special tokens too."""
    words = *encoding.token_byte_values(), *(name.encode() for name in encoding.special_tokens_set)
    return {encoding.encode_single_token(word): word for word in words}


@functools.cache
def vocabulary():
    """{token id: its bytes}: by gpt2_tokenizer.bin if it is here, else by tiktoken, else the single bytes only."""
    if Path("gpt2_tokenizer.bin").exists():
        return dict(enumerate(read_tokenizer("gpt2_tokenizer.bin")))
    try:
        encoding = gpt2_encoding()
    except UserError as e:
        print(f"WARNING: {e}. In samples, tokens of more than one byte are shown as numbers.")
        encoding = byte_encoding()
    return words_of(encoding)


def decode(tokens, words=None):
    """The text of token ids: GPT-2's, or those of words, {id: bytes}."""
    words = vocabulary() if words is None else words
    return b"".join(words.get(t, f"<{t}>".encode()) for t in tokens).decode("utf-8", errors="replace")


# ---- The program

TEXT_FLAGS = [
    (None, "--input", str, None, "a UTF-8 text, instead of downloading tinyshakespeare"),
    (None, "--name", str, None, "writes data/NAME/NAME_{train,val}.bin (default: the input's name)"),
]


def read_text(flags):
    """(text, name) that --input and --name ask for; without them tinyshakespeare, and no name. Raises UserError."""
    if flags.input is None:
        text = download_tinyshakespeare()
    else:
        try:
            text = Path(flags.input).read_text(encoding="utf-8")
        except OSError as e:
            raise UserError(f"{flags.input}: could not be read ({e.strerror}); --input takes a text file") from None
        except UnicodeDecodeError as e:
            raise UserError(f"{flags.input}: byte {e.start} is not UTF-8, and --input takes UTF-8 text") from None
    name = flags.name or (Path(flags.input).stem if flags.input else None)
    if name and not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UserError(f"--name {name}: expected letters, digits, '-', '_' and '.'")
    return text, name


def main():
    flags = parse_flags(__doc__, TEXT_FLAGS)
    encoding = gpt2_encoding()
    text, name = read_text(flags)
    prepare(text, encoding, Path(f"data/{name}/{name}_{{}}.bin") if name else TINYSHAKESPEARE)


if __name__ == "__main__":
    run(main)
