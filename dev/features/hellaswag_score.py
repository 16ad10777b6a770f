"""--hellaswag FILE: score the model on HellaSwag at each validation except the first.
dev/tools/score.py scores a checkpoint; dev/data/hellaswag.py makes the file.

An example of HellaSwag (Zellers et al. 2019) is a text that breaks off, and four completions, one
of which is right. The model predicts the completion whose tokens have the smallest mean loss. The
score is the share of right predictions (elsewhere called acc_norm). Guessing scores 0.25, OpenAI's
GPT-2 of 124M parameters 0.2945.
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common.files import checked_header
from dev.data.hellaswag import COMPLETIONS, EVAL_FILE, START
from dev.features.feature import Feature, Flag, Pair
from train_gpt2 import HEADER_BYTES, UserError

PARTS = "context", *(f"completion {i}" for i in range(COMPLETIONS))
PADDING = 128  # rows are padded to a multiple of this, so that batches have few shapes


class Example(NamedTuple):
    label: int  # which completion is right
    context: np.ndarray  # token ids, int32
    completions: list  # of such arrays

    @property
    def longest(self):
        """The tokens of its longest row: the context and a completion."""
        return len(self.context) + max(map(len, self.completions))


def read_examples(path, V, T=None):
    """The Examples of a file, which is checked; with T, also that each fits. Raises UserError with
    the example's index and the byte."""
    if V > 2**16:
        raise UserError(f"{path}: has GPT-2's tokens, and the model V = {V} words of another "
                        "vocabulary; expected a model of GPT-2's words")
    count, longest = checked_header(path, EVAL_FILE)[2:4]
    body = Path(path).read_bytes()[HEADER_BYTES:]
    words = np.frombuffer(body[: len(body) // 2 * 2], "<u2")
    examples, at, most = [], 0, 0

    def expect(ok, place, problem):
        if not ok:
            raise UserError(f"{path}: example {len(examples)}, byte {HEADER_BYTES + 2 * place}: "
                            f"{problem}: {EVAL_FILE.remedy}")

    if count < 1:
        raise UserError(f"{path}: its header promises {count} examples; expected at least 1: "
                        f"{EVAL_FILE.remedy}")
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
            expect(0 < n <= room, at, f"{n} tokens of {part}; expected at least 1, and "
                   f"EXAMPLE_BYTES leaves {room}")
            parts.append(words[at + 1 : at + 1 + n].astype(np.int32))
            bad = int(np.argmax(parts[-1] >= V))
            expect(parts[-1][bad] < V, at + 1 + bad,
                   f"token {parts[-1][bad]}, and the model has V = {V} words")
            at += 1 + n
        expect(at == end, at, f"{end - at} numbers follow the last completion; expected "
               "EXAMPLE_BYTES to end here")
        examples.append(Example(head[3], parts[0], parts[1:]))
    if 2 * at != len(body):
        raise UserError(f"{path}: {len(body) - 2 * at} bytes follow the {count} examples that its "
                        f"header promises; expected none: {EVAL_FILE.remedy}")
    if most != longest:
        raise UserError(f"{path}: its longest example has {most} bytes, and its header promises "
                        f"{longest}: {EVAL_FILE.remedy}")
    if T is not None:
        check_lengths(examples, T)
    return examples


def check_vocabulary(vocabulary, path):
    """Raise UserError if a model has its own vocabulary (or None), in which there are no
    questions."""
    if vocabulary:
        raise UserError(f"{path}: has GPT-2's tokens, and the model its own vocabulary, "
                        f"{vocabulary.name}: HellaSwag is for models of GPT-2's words: leave it "
                        "out")


def check_lengths(examples, T):
    """Raise UserError unless each row has fewer than T tokens, which llm.c requires."""
    lengths = ((example.longest, -i) for i, example in enumerate(examples))
    most, i = max(lengths, default=(0, 0))
    if most >= T:
        raise UserError(f"-t {T}: HellaSwag's example {-i} has {most} tokens with its longest "
                        f"completion; expected -t {most + 1} or more")


def mean_losses(model, examples, progress=None):
    """The mean loss of each completion's tokens, (examples, 4) fp32, in nats, summed in fp32 in
    order as in llm.c. A row of a batch is a context and one completion. The four rows of an example
    may be in different batches, so any B works. progress(done, total), if given, is called after
    each batch. Raises UserError."""
    B, T = model.B, model.T
    check_lengths(examples, T)
    rows = [(np.concatenate([example.context, completion]), len(completion))
            for example in examples for completion in example.completions]
    # rows of similar length together need little padding
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    means = np.zeros(len(rows), np.float32)
    for start in range(0, len(rows), B):
        batch = order[start : start + B]
        width = min(T, -(-len(rows[batch[0]][0]) // PADDING) * PADDING)
        tokens, targets = np.zeros((2, B, width), np.int32)  # no token sees the zeros after it
        for b, i in enumerate(batch):
            row, _ = rows[i]
            tokens[b, : len(row)], targets[b, : len(row) - 1] = row, row[1:]
        model.forward(tokens, targets)
        losses = model.device.get(model.acts.losses).reshape(B, width)
        for b, i in enumerate(batch):
            row, count = rows[i]
            end = len(row) - 1  # the last token has no target
            total = np.cumsum(losses[b, end - count : end], dtype=np.float32)[-1]
            means[i] = total / np.float32(count)
        if progress:
            progress(start + len(batch), len(rows))
    return means.reshape(-1, COMPLETIONS)


def count_right(model, examples, progress=None):
    """(number of right predictions, number of examples). The prediction is the completion with the
    smallest mean loss, the first of equals. progress: see mean_losses. Raises UserError."""
    predictions = [min(range(COMPLETIONS), key=means.__getitem__)
                   for means in mean_losses(model, examples, progress)]
    right = sum(found == example.label for found, example in zip(predictions, examples))
    return right, len(examples)


class Scored:
    """Training that scores its model at each validation except the first."""

    def open_data(self):
        super().open_data()
        c, flags = self.config, self.flags
        check_vocabulary(self.vocabulary, flags.hellaswag)
        self.examples = read_examples(flags.hellaswag, c.V, self.T)

    def validate(self, done):
        loss = super().validate(done)
        if done:
            correct, total = self.count_right(self.examples)
            self.say(f"HellaSwag: {correct}/{total} = {correct / total:.6f}")
            self.tell("scored", done, correct / total)
        return loss

    def count_right(self, examples):
        return count_right(self.model, examples)


class ScoredByRanks:
    """Each rank scores some of the examples."""

    def count_right(self, examples):
        own = super().count_right(examples[self.rank :: self.count])
        return tuple(map(sum, zip(*self.ranks.exchange(own, "a score"))))


FEATURE = Feature(
    "hellaswag", lambda flags, ranks: flags.hellaswag, training=Scored,
    pairs=(Pair("ranks", training=ScoredByRanks),),
    flags=(
        Flag(None, "--hellaswag", "name", None, "file of dev/data/hellaswag.py: score the model at "
             "each validation except the first", "how long, and what is shown",
             after="--sample-tokens", path=True, replayed=False, may_differ=True),),
    refuses=lambda flags: ("--hellaswag: is scored at each validation, and -v 0 makes none: "
                           "expected another -v"
                           if flags.hellaswag and flags.val_every == 0 else ""))
