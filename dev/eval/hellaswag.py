"""Score a model on HellaSwag: which of four endings does it find likeliest?

    python dev/eval/hellaswag.py -e gpt2_124M.bin --data data/hellaswag/hellaswag_val.bin

An example of HellaSwag (Zellers et al. 2019) is a text that breaks off, and four ways to go on, of which one is right.
The model predicts the one whose tokens have the smallest mean loss. The score is the share of right predictions, which
others call acc_norm. To guess would score 0.25; OpenAI's GPT-2 of 124M parameters scores 0.2945.

dev/data/hellaswag.py writes the file, in llm.c's format: a header of 256 int32 (magic 20240522, version 1, how many
examples, the bytes of the longest), then uint16:

    65535, bytes of this example, its index, label, 4        the bytes are of all that follows, too, and of these five
    n, n tokens                                              the context
    n, n tokens   four times                                 the completions

Tokens are GPT-2's. train_gpt2.py takes `read_examples` and `score` from here.
"""
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from prepro_tinyshakespeare import HEADER_BYTES, FileKind, UserError, has_gpu, number, parse_flags, read_header, run

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

EVAL_FILE = FileKind("file of HellaSwag's examples", 20240522, (1,), "dev/data/hellaswag.py writes one")
START, COMPLETIONS = 65535, 4
PARTS = "context", *(f"completion {i}" for i in range(COMPLETIONS))
PADDING = 128  # rows are padded to a multiple of it, so that batches have few shapes


class Example(NamedTuple):
    label: int  # which completion is right
    context: np.ndarray  # token ids, int32
    completions: list  # of such arrays

    @property
    def longest(self):
        """The tokens of its longest row: the context, and a completion behind it."""
        return len(self.context) + max(map(len, self.completions))


def read_examples(path, V, T=None):
    """The Examples of a file, after checking all of it; with T, also that each of them fits. Raises UserError, with the
    example's index and the byte."""
    if V > 2**16:
        raise UserError(f"{path}: has GPT-2's tokens, and the model V = {V} words of another vocabulary; expected a "
                        "model of GPT-2's words")
    count, longest = read_header(path, EVAL_FILE)[2:4]
    body = Path(path).read_bytes()[HEADER_BYTES:]
    words = np.frombuffer(body[: len(body) // 2 * 2], "<u2")
    examples, at, most = [], 0, 0

    def expect(ok, place, problem):
        if not ok:
            raise UserError(f"{path}: example {len(examples)}, byte {HEADER_BYTES + 2 * place}: {problem}: "
                            f"{EVAL_FILE.remedy}")

    if count < 1:
        raise UserError(f"{path}: its header promises {count} examples; expected at least 1: {EVAL_FILE.remedy}")
    while len(examples) < count:
        head = words[at : at + 5].tolist()
        expect(len(head) == 5, at, f"the file ends here, and its header promises {count} examples")
        least, left = 2 * (5 + 2 * len(PARTS)), 2 * (len(words) - at)
        for i, (name, ok, wish) in enumerate((
                ("START", head[0] == START, START),
                ("EXAMPLE_BYTES", head[1] % 2 == 0 and least <= head[1] <= left,
                 f"an even number from {least} to the {left} that are left"),
                ("EXAMPLE_INDEX", head[2] == len(examples), len(examples)),
                ("LABEL", head[3] < COMPLETIONS, f"0 to {COMPLETIONS - 1}"),
                ("NUM_COMPLETIONS", head[4] == COMPLETIONS, COMPLETIONS))):
            expect(ok, at + i, f"{name} is {head[i]}; expected {wish}")
        end, most, at, parts = at + head[1] // 2, max(most, head[1]), at + 5, []
        for part in PARTS:
            room = max(0, end - at - 1)
            n = int(words[at]) if room else 0
            expect(0 < n <= room, at, f"{n} tokens of {part}; expected at least 1, and EXAMPLE_BYTES leaves {room}")
            parts.append(words[at + 1 : at + 1 + n].astype(np.int32))
            bad = int(np.argmax(parts[-1] >= V))
            expect(parts[-1][bad] < V, at + 1 + bad, f"token {parts[-1][bad]}, and the model has V = {V} words")
            at += 1 + n
        expect(at == end, at, f"{end - at} numbers follow the last completion; expected EXAMPLE_BYTES to end here")
        examples.append(Example(head[3], parts[0], parts[1:]))
    if 2 * at != len(body):
        raise UserError(f"{path}: {len(body) - 2 * at} bytes follow the {count} examples that its header promises; "
                        f"expected none: {EVAL_FILE.remedy}")
    if most != longest:
        raise UserError(f"{path}: its longest example has {most} bytes, and its header promises {longest}: "
                        f"{EVAL_FILE.remedy}")
    if T is not None:
        check_lengths(examples, T)
    return examples


def check_lengths(examples, T):
    """Raise UserError unless each row has fewer than T tokens, as llm.c demands."""
    most, i = max(((example.longest, -i) for i, example in enumerate(examples)), default=(0, 0))
    if most >= T:
        raise UserError(f"-t {T}: HellaSwag's example {-i} has {most} tokens with its longest completion; expected "
                        f"-t {most + 1} or more")


def mean_losses(model, examples, progress=None):
    """The mean loss of each completion's tokens, (examples, 4) fp32, in nats: added up in fp32 in their order, as in
    llm.c. A row of a batch is a context with one completion behind it. The four rows of an example may be in different
    batches, so any B will do. progress(done, total), if given, is called after each batch. Raises UserError."""
    B, T = model.B, model.T
    check_lengths(examples, T)
    rows = [(np.concatenate([example.context, completion]), len(completion))
            for example in examples for completion in example.completions]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))  # rows of a length together need little padding
    means = np.zeros(len(rows), np.float32)
    for start in range(0, len(rows), B):
        batch = order[start : start + B]
        width = min(T, -(-len(rows[batch[0]][0]) // PADDING) * PADDING)
        tokens, targets = np.zeros((2, B, width), np.int32)  # no token sees the zeros behind it
        for b, i in enumerate(batch):
            row, _ = rows[i]
            tokens[b, : len(row)], targets[b, : len(row) - 1] = row, row[1:]
        model.forward(tokens, targets)
        losses = model.device.get(model.acts.losses).reshape(B, width)
        for b, i in enumerate(batch):
            row, count = rows[i]
            end = len(row) - 1  # the last token has no target
            means[i] = np.cumsum(losses[b, end - count : end], dtype=np.float32)[-1] / np.float32(count)
        if progress:
            progress(start + len(batch), len(rows))
    return means.reshape(-1, COMPLETIONS)


def score(model, examples, progress=None):
    """(how many predictions are right, how many examples). The prediction is the completion of the smallest mean loss,
    the first of several. For progress see mean_losses. Raises UserError."""
    predictions = [min(range(COMPLETIONS), key=means.__getitem__) for means in mean_losses(model, examples, progress)]
    return sum(found == example.label for found, example in zip(predictions, examples)), len(examples)


def score_by_ranks(model, examples):
    """The same, where each of several ranks scores some of the examples."""
    ranks = model.ranks
    scores = ranks.exchange(score(model, examples[ranks.rank :: ranks.count]), "a score")
    return tuple(map(sum, zip(*scores)))


def progress_line(done, total):
    """A progress for a terminal: a line on stderr, which goes when all is done."""
    line = f"HellaSwag: {done:,} of {total:,} completions" if done < total else ""
    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


# ---- The program

COUNT = number(int, 1)
FLAGS = [
    ("-e", "--model", str, "gpt2_124M.bin", "checkpoint of a GPT-2, or of a Llama 3 on GPT-2's words"),
    (None, "--data", str, "data/hellaswag/hellaswag_val.bin", "the examples"),
    ("-b", "--batch-size", COUNT, 16, "B, rows in a batch; an example has four"),
    ("-t", "--seq-len", COUNT, None, "T, tokens in a row (default: enough for the longest)"),
    (None, "--device", ("cpu", "cuda"), None, "where to compute (default: cuda if there is a GPU)"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "(default: bf16; on a CPU fp32)"),
    (None, "--plain", number(int, 0, 2), 0, "1: on a GPU, without the last section of train_gpt2.py"),
]


def main():
    """Everything from the flags to the score. Raises UserError."""
    from dev.llama3.train_llama3 import Llama3
    from train_gpt2 import GPT2, make_device, read_parameters

    flags = parse_flags("Score a checkpoint on HellaSwag.", FLAGS)
    architectures = {architecture.Config.FILE: architecture for architecture in (GPT2, Llama3)}
    magic = read_header(flags.model, *architectures)[0]
    [architecture] = [architecture for kind, architecture in architectures.items() if kind.magic == magic]
    c = architecture.Config.from_file(flags.model)
    examples = read_examples(flags.data, c.V, flags.seq_len)
    most = max(example.longest for example in examples)
    B, T = flags.batch_size, flags.seq_len or min(c.longest, -(-(most + 1) // PADDING) * PADDING)
    device = make_device(flags.device or ("cuda" if has_gpu() else "cpu"), flags.dtype, c, flags.plain)
    print(f"device       | {device} (--device, --dtype)")
    print(f"model        | {flags.model} (-e), {c}")
    print(f"data         | {flags.data}: {len(examples):,} examples of at most {most} tokens (--data), B={B} T={T}",
          flush=True)
    try:
        model = architecture(c, device, B, T)
        model.set_parameters(read_parameters(flags.model, c))
        correct, total = score(model, examples, progress_line if sys.stderr.isatty() else None)
    except device.Fault as e:
        raise UserError(f"the GPU stopped ({e}) at {device.launched} or a launch before it: find the fault with "
                        "--plain 1, compute-sanitizer, or --device cpu") from None
    print(f"HellaSwag: {correct}/{total} = {correct / total:.6f}")


if __name__ == "__main__":
    run(main)
