"""--sample: continue a prompt, and print the text as it comes. Its flags, also for the samples that
a training writes.

A token is drawn in this order. With --temperature t, words have the probabilities
softmax(logits / t): below 1, likely words become likelier still; 0 always takes the likeliest. Then
--top-k keeps the K likeliest words. Then --top-p keeps the fewest of these, the likeliest first,
that have a share P of their probability (the nucleus, Holtzman et al. 2020). Among equals, the
first count as likelier.

--samples N writes N texts, of the seeds --seed, --seed + 1, ...: each can be repeated alone. The
same seed gives the same text. (Samples during a training always have llm.c's random numbers.)
--stop ends a text before the first occurrence of other text. Without it, <|endoftext|> is a token
like any other, and the model goes on with a new text.
"""
import argparse
import codecs
import contextlib
import itertools
import secrets
import sys
from operator import itemgetter
from pathlib import Path

import numpy as np

from dev.common.flags import with_values
from dev.data.documents import cleaned, read_utf8
from dev.data.vocabulary import vocabulary_beside
from dev.features.checkpoints.run_json import read_notes
from dev.features.feature import Feature, Flag
from train_gpt2 import UserError, coins, draw_token

LONGEST = 1024  # T without -t, at most
OF_IDS = '--sample "12 7 9" goes on from ids'

# ---- Which token


def choose(logits, coin, temperature, top_k, top_p=1.0):
    """The token that a coin in [0, 1) draws from logits (V,), fp32. top_k = 0 and top_p = 1 keep
    all words; temperature = 0 takes the likeliest."""
    temperature = np.float32(temperature)
    if temperature == 0:
        return int(np.argmax(logits))
    words = np.arange(len(logits))
    if 0 < top_k < len(logits):
        words = np.sort(np.argsort(-logits, kind="stable")[:top_k])
    kept = logits[words]
    if temperature != 1:
        with np.errstate(over="ignore"):  # minus infinity is never drawn
            kept = (kept - kept.max()) / temperature
    if top_p < 1:
        inside = nucleus(kept, top_p)
        words, kept = words[inside], kept[inside]
    return int(words[draw_token(kept, coin)])


def nucleus(logits, top_p):
    """The indices, in order, of the fewest logits whose probabilities sum to at least top_p. One is
    inside if those before it have less than that."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(np.float64(logits[order]) - logits[order[0]])
    before = np.cumsum(weights) - weights
    return np.sort(order[before < top_p * weights.sum()])


def coins_of(seed):
    """Random numbers in [0, 1), of 24 bits as llm.c's."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.random(64, np.float32).tolist()


def generate(model, tokens, count, temperature, top_k, coins, top_p=1.0):
    """Yield `count` token ids that continue tokens (a list). The model sees the last T of them."""
    if hasattr(model, "continued"):  # see kv_cache.py
        [drawn] = together(model, tokens, count, temperature, top_k, [coins], top_p)
        yield from drawn
        return
    tokens = list(tokens)
    for _, coin in zip(range(count), coins):
        logits = model.next_logits(tokens[-model.T :])
        tokens.append(choose(logits, coin, temperature, top_k, top_p))
        yield tokens[-1]


def together(model, tokens, count, temperature, top_k, coins, top_p=1.0):
    """Iterators over the token ids that continue tokens (a list), one for each iterator of coins.
    A model that keeps keys and values makes them side by side: see kv_cache.py."""
    texts = [tokens] * len(coins)
    steps = model.continued(texts, count, coins, temperature, top_k, top_p)
    return [map(itemgetter(row), each) for row, each in enumerate(itertools.tee(steps, len(coins)))]


# ---- Its text


def until(parts, stop):
    """Yield parts of bytes up to the first occurrence of the bytes `stop`, which parts may cut
    anywhere. An end that could be its beginning is held back until the next part decides."""
    held = b""
    for part in parts:
        held += part
        at = held.find(stop)
        if at >= 0:
            yield held[:at]
            return
        left = max(n for n in range(len(stop)) if held.endswith(stop[:n]))
        yield held[: len(held) - left]
        held = held[len(held) - left :]
    yield held


def texts(tokens, words, stop=None):
    """Yield the text of token ids in pieces of whole characters: a character of several bytes may
    be cut into several tokens. words: {id: bytes}; other ids are shown as numbers. The text ends
    before the first occurrence of the text `stop`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    parts = (words.get(token, f"<{token}>".encode()) for token in tokens)
    if stop:
        parts = until(parts, stop.encode("utf-8", "surrogateescape"))
    for part in parts:
        yield decoder.decode(part)
    yield decoder.decode(b"", final=True)


def check_words(tokens, c):
    """Raise UserError if a text has words that a model of this config does not have."""
    if max(tokens, default=0) >= c.V:
        raise UserError(f"the text to go on from has token {max(tokens)}, and the model has V = "
                        f"{c.V} words; expected a model of this vocabulary, or an empty text")


def stream(model, tokens, words, text, count, coins, temperature=1.0, top_k=0, write=None,
           top_p=1.0, stop=None, drawn=None):
    """Write a text, and then its continuation by `count` tokens as they come. tokens: the text's
    ids; words: {id: bytes}. After an empty text the model starts a new one. write(piece) takes a
    piece of text, and prints it by default. drawn: the token ids of the continuation, if they are
    drawn elsewhere. Raises UserError if the text has words that the model does not have."""
    write = write or (lambda piece: print(piece, end="", flush=True))
    tokens = beginning(model, tokens)
    write(text)
    drawn = drawn or generate(model, tokens, count, temperature, top_k, coins, top_p)
    for piece in texts(drawn, words, stop):
        if piece:
            write(piece)


def beginning(model, tokens):
    """The tokens that a model goes on from. Raises UserError if it does not have these words."""
    c = model.config
    tokens = tokens or [min(c.EOT, c.V - 1)]
    check_words(tokens, c)
    return tokens


# ---- --sample


def without_text(flags):
    """Before flags are checked: --chat is a --sample without a text of its own."""
    return with_values(flags, sample="") if flags.chat and flags.sample is None else flags


def for_samples(flags):
    """The flags of a run that samples: one text at a time, and without --seed each is another."""
    seed = secrets.randbelow(2**32) if flags.seed is None else flags.seed
    return with_values(flags, batch_size=1, seed=seed)


def read_prompt(flag, text):
    """The prompt that a flag gives: a text, or the file of "FILE:name", cleaned as texts to train
    on. Raises UserError."""
    if not text.startswith("FILE:"):
        return cleaned(text)
    return read_utf8(f"{flag} {text}", text.removeprefix("FILE:"))


class Sampling:
    """A run that continues a text, and does not train."""
    stop = property(lambda self: self.flags.stop)  # the text that ends a sample

    def run(self):
        text = read_prompt("--sample", self.flags.sample)
        self.write_samples(text, self.load(text))
        return 0

    def load(self, text):
        """Make the model, and return the tokens of a text, which may be refused before that."""
        flags, name = self.flags, "--chat" if self.flags.chat else "--sample"
        if self.count > 1:
            raise UserError(f"{name}: is for one process: expected no --gpus, and no torchrun, "
                            "srun or mpirun")
        self.choose_model()
        if not self.from_file:
            raise UserError(f"{name}: expected -e too, a checkpoint: random weights have nothing "
                            "to say")
        for flag in ("chat", "answer", "stop") if self.vocabulary else ():
            if getattr(flags, flag):
                self.vocabulary.check_text(f"--{flag}", OF_IDS)
        tokens = self.tokens_of(text)
        self.words()  # now, since it may warn
        with contextlib.redirect_stdout(sys.stderr):  # what is compiled; stdout has the text
            self.device = self.make_device()
            self.model = self.make_model()
        self.seeds = itertools.count(flags.seed)
        if flags.temperature != 0:
            print(f"seed {flags.seed} (--seed)", file=sys.stderr, flush=True)
        return tokens

    def find_length(self):
        """-t, or T of the run that trained the checkpoint, and no positions beyond; else maxT."""
        notes = Path(self.name).parent.glob("run_????????.json") if self.from_file else ()
        of_run = [read_notes(path, ())["flags"].get("seq_len") for path in notes]
        return self.flags.seq_len or max(filter(None, of_run),
                                         default=min(self.config.maxT, LONGEST))

    def tokens_of(self, text):
        """The token ids of a prompt. Raises UserError if the model lacks words for it."""
        tokens, T = self.encode(text) if text else [], self.T
        if len(tokens) > T:
            print(f"WARNING: the prompt has {len(tokens):,} tokens, and the model sees the last "
                  f"T = {T:,} (-t)", file=sys.stderr)
        if not tokens and self.vocabulary:
            if self.vocabulary.is_ids:
                raise UserError(f"the model's tokens are ids, and none begins a text: {OF_IDS}")
            tokens = [self.vocabulary.eot]
        return tokens

    def write_samples(self, text, tokens):
        """Write a text, and its continuation: --samples times."""
        flags = self.flags
        rows = getattr(self.model, "rows", 1)  # samples at a time
        for first in range(1, flags.samples + 1, rows):
            numbers = range(first, min(first + rows, flags.samples + 1))
            seeds = [next(self.seeds) for _ in numbers]
            for number, seed, drawn in zip(numbers, seeds, self.drawn(tokens, seeds)):
                if flags.samples > 1:
                    print(f"--- sample {number} of {flags.samples}, seed {seed} ---")
                stream(self.model, tokens, self.words(), text, flags.sample_tokens, coins_of(seed),
                       flags.temperature, flags.top_k, top_p=flags.top_p, stop=self.stop,
                       drawn=drawn)
                print(flush=True)

    def drawn(self, tokens, seeds):
        """For each seed the token ids of a continuation, if several are drawn at once; or None."""
        flags = self.flags
        if len(seeds) == 1:
            return [None]
        return together(self.model, beginning(self.model, tokens), flags.sample_tokens,
                        flags.temperature, flags.top_k, [*map(coins_of, seeds)], flags.top_p)


# ---- Samples while training


class Controlled:
    """Training whose samples have other settings than the trainer's, or a prompt."""

    def open_data(self):
        super().open_data()
        self.text, self.prompt = self.flags.sample_prompt, []
        if self.text:
            self.text = read_prompt("--sample-prompt", self.text)
            self.prompt = self.encode(self.text)
            check_words(self.prompt, self.config)  # now, not at the first sample

    def settled(self):
        """With the prompt's text, so that a resumed run needs no file."""
        return super().settled() | dict(sample_prompt=self.text)

    def sample(self):
        flags = self.flags
        tokens = generate(self.model, self.prompt or [self.first_token()], flags.sample_tokens,
                          flags.temperature, flags.top_k, coins(), flags.top_p)
        text = "".join([self.text or "", *texts(tokens, self.words(), flags.stop)])
        self.tell("sampled", text)

    def first_token(self):
        """What a sample goes on from: <|endoftext|>, or a newline if the data is a single text, in
        which no <|endoftext|> says what follows it; of ids, the first of the data."""
        if self.vocabulary and self.vocabulary.is_ids:
            return int(self.train_data.tokens[0])
        c, words = self.config, self.words()
        token, newline = min(c.EOT, c.V - 1), [i for i, word in words.items() if word == b"\n"]
        known = not newline or (self.train_data.tokens[: 2**20] == token).any()
        return token if known else newline[0]


# ---- Flags


def is_ids(path):
    """Whether the tokens of -i stand for no text."""
    vocabulary = vocabulary_beside(path)
    return vocabulary is not None and vocabulary.is_ids


def probability(text):
    """The type of --top-p."""
    if not 0 < float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected more than 0, and at most 1")
    return float(text)


def refuses(flags):
    """Why flags do not go together, or "". A resumed run may have flags that it does not need."""
    given = flags.sample_prompt and not flags.resume
    return next((why for found, why in (
        (flags.chat and flags.sample,
         "--chat: reads its prompts from stdin: expected no --sample"),
        (flags.chat and (flags.samples or 1) > 1,
         "--chat: goes on from its answer, and several cannot all be it: expected no --samples"),
        ((flags.samples or 1) > 1 and flags.temperature == 0,
         "--samples: with --temperature 0 all would be the same: expected another "
         "--temperature"),
        (given and flags.sample is not None,
         "--sample-prompt: is for the samples of a training: expected no --sample or --chat"),
        (given and flags.sample_every == 0,
         "--sample-prompt: with -s 0 a training writes no samples: expected another -s"))
        if found), "")


GROUP = "instead of training"
SHOWN = "how long, and what is shown"
CONTROLLED = Feature("controlled samples", lambda flags, ranks: flags.sample is None and (
    flags.temperature != 1 or flags.top_k or flags.top_p < 1 or flags.stop or flags.sample_prompt or
    flags.train_data and is_ids(flags.train_data)), training=Controlled)
FEATURE = Feature(
    "sample", lambda flags, ranks: flags.sample is not None, training=Sampling, refuses=refuses,
    flags=(
        Flag(None, "--sample", str, None, "continue this text, or that of FILE:prompt.txt, by -g "
             "tokens, and do not train", GROUP, replayed=False, may_differ=True),
        Flag(None, "--samples", "count", 1, "write N continuations, of the seeds --seed, --seed + "
             "1, ...", GROUP, after="--sample", needs="sample", replayed=False, may_differ=True),
        Flag(None, "--temperature", "amount", 1.0, "of samples: below 1 makes likely tokens "
             "likelier; 0: always the likeliest; first runs have 0.8", SHOWN,
             after="--sample-tokens", may_differ=True),
        Flag(None, "--top-k", "count or 0", 0, "in samples, draw from the K likeliest tokens; "
             "0: all", SHOWN, after="--temperature", may_differ=True),
        Flag(None, "--top-p", probability, 1.0, "in samples, draw from the fewest tokens, the "
             "likeliest of --top-k's, that have a share P of the probability; 1: all", SHOWN,
             after="--top-k", may_differ=True),
        Flag(None, "--stop", str, None, "end samples before this text, such as \"<|endoftext|>\"",
             SHOWN, after="--top-p", may_differ=True),
        Flag(None, "--sample-prompt", str, None, "while training, begin samples with this text, or "
             "that of FILE:prompt.txt", SHOWN, after="--stop", may_differ=True)))
