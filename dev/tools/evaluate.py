"""Evaluate a checkpoint on a text: loss, perplexity, and bits per byte.

    python -m dev.tools.evaluate -e gpt2_124M.bin --input book.txt
    python -m dev.tools.evaluate -e gpt2_124M.bin --input book.txt --stride 512

A model sees at most T tokens at once, so a longer text is read in windows of T tokens that begin S
tokens apart (--stride), as in Hugging Face's guide to perplexity. Each token is counted once, in
the first window that predicts it. With S = T windows do not overlap, and the first tokens of each
have few before them. With a smaller S every token has at least T - S before it, except in the first
window: the loss is lower, and there is T/S times as much to compute.

With S = T the guide leaves out the first token of each window. Here the window before predicts it,
so that bits per byte are those of the whole text. The text's first token is not predicted.

    loss = the mean of -log(the probability of a token), in nats
    perplexity = exp(loss)
    bits per byte = the sum of the same / log(2) / bytes of the text

Perplexities compare only models of the same vocabulary; bits per byte compare all. `<|endoftext|>`
in a text is that token.
"""
import numpy as np

from dev.common.config import check_tokens
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft
from dev.data.documents import read_utf8
from dev.features.tokenizer import Tokenized
from dev.tools.architecture import checkpoint_of, find_architecture
from dev.tools.score import FLAGS as SCORE_FLAGS, compute, device_of
from train_gpt2 import UserError

OF_SCORE = {row[1]: row for row in SCORE_FLAGS}
FLAGS = [
    ("-e", "--model", str, "gpt2_124M.bin", "checkpoint of GPT-2 or Llama 3; "
     "or a run's folder: its newest"),
    (None, "--input", str, None, "the text, in UTF-8"),
    ("-b", "--batch-size", "count", 4, "B, windows in a batch"),
    ("-t", "--seq-len", "count", None, "T, tokens of a window; positions beyond the training's -t "
     "are untrained (default: the model's maxT, at most 2048)"),
    (None, "--stride", "count", None, "S, tokens from a window to the next (default: T)"),
    *(OF_SCORE[name] for name in ("--device", "--dtype", "--plain")),
]
LONGEST = 2048  # T without -t, at most: Llama's maxT may need more memory than there is


def tokens_of(path, c, text):
    """The token ids of a text in the words of a checkpoint. Raises UserError if these are not
    known."""
    words = Tokenized()
    words.name, words.from_file, words.config = path, True, c
    if words.vocabulary:
        words.vocabulary.check_text("--input", "a training validates on ids (-j)")
    return np.array(words.encode(text), np.int32)


def windows(n, T, stride):
    """Yield (start, first, end) for each window over n tokens: it reads tokens from start on, and
    the tokens first .. end - 1 are counted in it."""
    reach = T if stride == T else T - 1  # tokens that it predicts
    first = 1
    for start in range(0, n, stride):
        end = min(start + reach + 1, n)
        yield start, first, end
        if end == n:
            return
        first = end


def losses_of(model, tokens, T, stride):
    """The loss of each token but the first, (n-1) in fp32."""
    rows, done = [*windows(len(tokens), T, stride)], []
    batches = range(0, len(rows), model.B)
    for at in TimeLeft().over(batches, len(batches), lambda at: 1):
        batch = rows[at : at + model.B]
        width = max(end - 1 - start for start, _, end in batch)
        inputs, targets = np.zeros((2, len(batch), width), np.int32)  # zeros at the end: not seen
        for b, (start, _, end) in enumerate(batch):
            inputs[b, : end - 1 - start] = tokens[start : end - 1]
            targets[b, : end - 1 - start] = tokens[start + 1 : end]
        model.forward(inputs, targets)
        losses = model.device.get(model.acts.losses[: inputs.size]).reshape(inputs.shape)
        done += [losses[b, first - 1 - start : end - 1 - start]
                 for b, (start, first, end) in enumerate(batch)]
    return np.concatenate(done)


def main(arguments=None):
    """Everything from the flags to the figures. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    if flags.input is None:
        raise UserError("--input: expected a text file; --help lists the flags")
    flags.model = checkpoint_of(flags.model)
    architecture, c = find_architecture(flags.model)
    T = flags.seq_len or min(c.maxT, LONGEST)
    if architecture.__name__ == "GPT2" and T > c.maxT:
        raise UserError(f"-t {T}: expected at most maxT = {c.maxT}: wpe has no more positions")
    stride = flags.stride or T
    if stride > T:
        raise UserError(f"--stride {stride}: expected at most T = {T} (-t): tokens between two "
                        "windows would be left out")
    text = read_utf8(f"--input {flags.input}", flags.input)
    size = len(text.encode())
    tokens = tokens_of(flags.model, c, text)
    if len(tokens) < 2:
        raise UserError(f"--input {flags.input}: has {len(tokens)} tokens; expected 2 or more, "
                        "since the first is not predicted")
    check_tokens(flags.input, tokens, c.V)
    device = device_of(flags, c)
    print(f"device       | {device} (--device, --dtype)")
    print(f"model        | {flags.model} (-e), {c}")
    print(f"text         | {flags.input}: {size:,} bytes, {len(tokens):,} tokens (--input); T={T} "
          f"(-t), a window every {stride} (--stride)", flush=True)
    B = min(flags.batch_size, -(-len(tokens) // stride))
    losses = compute(architecture, c, device, flags.model, B, min(T, len(tokens) - 1),
                     lambda model: losses_of(model, tokens, T, stride))
    total = losses.sum(dtype=np.float64)
    loss = total / len(losses)
    print(f"loss {loss:.6f} nats per token, over {len(losses):,} tokens")
    print(f"perplexity {np.exp(loss):.4f}")
    print(f"bits per byte {total / np.log(2) / size:.6f}")


if __name__ == "__main__":
    run_main(main)
