"""--sample: continue a prompt, and print the text as it comes.

A token is drawn with the probabilities softmax(logits / temperature), from the top_k likeliest
words only. A temperature below 1 makes likely words likelier still; 0 always takes the likeliest.
The same --seed gives the same text. (Samples during a training have the same temperature and top_k,
but always llm.c's random numbers.)
"""
import codecs
import secrets
import sys

import numpy as np

from dev.features.declare import Feature, Flag
from prepro_tinyshakespeare import UserError
from train_gpt2 import coins, draw_token


def choose(logits, coin, temperature, top_k):
    """The token that a coin in [0, 1) draws from logits (V,), fp32. Among equal logits the first
    count as likelier. top_k = 0 keeps all words; temperature = 0 takes the likeliest."""
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
    return int(words[draw_token(kept, coin)])


def coins_of(seed):
    """Random numbers in [0, 1), of 24 bits as llm.c's."""
    rng = np.random.default_rng(seed)
    while True:
        yield rng.random(dtype=np.float32)


def generate(model, tokens, count, temperature, top_k, coins):
    """Yield `count` token ids that continue tokens (a list). The model sees the last T of them."""
    tokens = list(tokens)
    for _, coin in zip(range(count), coins):
        tokens.append(choose(model.next_logits(tokens[-model.T :]), coin, temperature, top_k))
        yield tokens[-1]


def texts(tokens, words):
    """Yield the text of token ids in pieces of whole characters: a character of several bytes may
    be cut into several tokens. words: {id: bytes}; other ids are shown as numbers."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(words.get(token, f"<{token}>".encode()))
    yield decoder.decode(b"", final=True)


def stream(model, tokens, words, text, count, coins, temperature=1.0, top_k=0, write=None):
    """Write a text, and then its continuation by `count` tokens as they come. tokens: the text's
    ids; words: {id: bytes}. After an empty text the model starts a new one. write(piece) takes a
    piece of text, and prints it by default. Raises UserError if the text has words that the model
    does not have."""
    write = write or (lambda piece: print(piece, end="", flush=True))
    c = model.config
    tokens = tokens or [min(c.EOT, c.V - 1)]
    if max(tokens) >= c.V:
        raise UserError(f"the text to go on from has token {max(tokens)}, and the model has V = "
                        f"{c.V} words; expected a model of this vocabulary, or an empty text")
    write(text)
    for piece in texts(generate(model, tokens, count, temperature, top_k, coins), words):
        if piece:
            write(piece)


def draw_seed(flags):
    """Without --seed, each sample is another one."""
    if flags.seed is None:
        flags.seed = secrets.randbelow(2**32)


class Sampling:
    """A run that continues a text, and does not train."""

    def run(self):
        flags = self.flags
        flags.batch_size = 1
        self.choose_model()
        if not self.from_file:
            raise UserError("--sample: expected -e too, a checkpoint: random weights have nothing "
                            "to say")
        tokens, words = self.encode(flags.sample) if flags.sample else [], self.words()
        if not tokens and self.vocabulary:
            tokens = [self.vocabulary.eot]
        self.device = self.make_device()
        self.model = self.make_model()
        if flags.temperature != 0:
            print(f"seed {flags.seed} (--seed)", file=sys.stderr, flush=True)  # stdout has the text
        stream(self.model, tokens, words, flags.sample, flags.sample_tokens, coins_of(flags.seed),
               flags.temperature, flags.top_k)
        print()
        return 0


class Tempered:
    """Training whose samples have a temperature or top_k other than the trainer's, 1 and 0."""

    def sample(self):
        flags = self.flags
        tokens = generate(self.model, [self.first_token()], flags.sample_tokens, flags.temperature,
                          flags.top_k, coins())
        self.say(f"generating:\n---\n{self.decode([*tokens])}\n---")

    def first_token(self):
        """What a sample goes on from: <|endoftext|>, or a newline if the data is a single text, in
        which no <|endoftext|> says what follows it."""
        c, words = self.config, self.words()
        token, newline = min(c.EOT, c.V - 1), [i for i, word in words.items() if word == b"\n"]
        known = not newline or (self.train_data.tokens[: 2**20] == token).any()
        return token if known else newline[0]


GROUP = "instead of training"
SHOWN = "how long, and what is shown"
TEMPERED = Feature("temperature", lambda flags, ranks: flags.sample is None and (
    flags.temperature != 1 or flags.top_k), training=Tempered)
FEATURE = Feature(
    "sample", lambda flags, ranks: flags.sample is not None, training=Sampling, flags=(
        Flag(None, "--sample", str, None, "continue this text by -g tokens, and do not train",
             GROUP, replayed=False, may_differ=True),
        Flag(None, "--temperature", "rate", 1.0, "of samples: below 1 makes likely tokens "
             "likelier; 0: always the likeliest; first runs have 0.8", SHOWN,
             after="--sample-tokens", may_differ=True),
        Flag(None, "--top-k", "count or 0", 0, "in samples, draw from the K likeliest tokens; "
             "0: all", SHOWN, after="--temperature", may_differ=True)))
