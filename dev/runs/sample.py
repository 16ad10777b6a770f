"""--sample: text from a model after a prompt, written as it comes.

A token is drawn by the probabilities softmax(logits / temperature), among the top_k likeliest words
alone. Below 1, a temperature makes likely words likelier; at 0 it is always the likeliest. The
coins are those of the trainer's samples, the same in each run: at temperature 1, without top_k,
tokens are drawn as there.
"""
import codecs

import numpy as np

from dev.runs.tokenizer import words_of
from prepro_tinyshakespeare import UserError
from train_gpt2 import coins, draw_token


def choose(logits, coin, temperature, top_k):
    """The token that a coin in [0, 1) draws from logits (V,), fp32. Of equal logits the first come
    first. top_k = 0 leaves all words in; temperature = 0 takes the likeliest."""
    temperature = np.float32(temperature)
    if temperature == 0:
        return int(np.argmax(logits))
    words = np.arange(len(logits))
    if 0 < top_k < len(logits):
        words = np.sort(np.argsort(-logits, kind="stable")[:top_k])  # no other can be drawn
    kept = logits[words]
    if temperature != 1:
        with np.errstate(over="ignore"):  # to minus infinity, which is never drawn
            kept = (kept - kept.max()) / temperature
    return int(words[draw_token(kept, coin)])


def generate(model, tokens, count, temperature, top_k):
    """Yield `count` token ids, each drawn from what the model expects after the tokens (a list) and
    those before it: of them all, after the last T."""
    tokens = list(tokens)
    for _, coin in zip(range(count), coins()):
        tokens.append(choose(model.next_logits(tokens[-model.T :]), coin, temperature, top_k))
        yield tokens[-1]


def texts(tokens, words):
    """Yield the text of token ids, piece by piece, each as soon as its characters are whole: a
    character of several bytes may be cut into several tokens. words: {id: bytes}; an id without
    bytes is shown as a number."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for token in tokens:
        yield decoder.decode(words.get(token, f"<{token}>".encode()))
    yield decoder.decode(b"", final=True)


def stream(model, encode, words, text, count, temperature=1.0, top_k=0, write=None):
    """Write a text, and what the model makes of it in `count` more tokens, as they come.

    encode(text) gives token ids, and words is {id: bytes}, of the model's own vocabulary. After an
    empty text the model begins a new one. write(piece) takes each piece of text; by default it is
    printed at once. Raises UserError if the text has words that the model does not.
    """
    write = write or (lambda piece: print(piece, end="", flush=True))
    c = model.config
    tokens = encode(text) or [min(c.EOT, c.V - 1)]
    if max(tokens) >= c.V:
        raise UserError(f"the text to go on from has token {max(tokens)}, and the model has V = "
                        f"{c.V} words; expected a model of this vocabulary, or an empty text")
    write(text)
    for piece in texts(generate(model, tokens, count, temperature, top_k), words):
        if piece:
            write(piece)


class Sampling:
    """A run that goes on with a text, and does not train."""

    def run(self):
        flags = self.flags
        flags.batch_size = 1
        self.choose_model()
        if not self.from_file:
            raise UserError("--sample: expected -e too, a checkpoint: random weights have nothing "
                            "to say")
        self.device = self.make_device()
        self.model, encoding = self.make_model(), self.config.encoding()
        stream(self.model, encoding.encode_ordinary, words_of(encoding), flags.sample,
               flags.sample_tokens, flags.temperature, flags.top_k)
        print()
        return 0
