"""--chat: load the model once, and talk with it, a line of stdin at a time.

The model sees the whole chat: the lines, each after a newline, and its own answers. Answer number
i, from 0, has the seed --seed + i, so --sample with that seed and the text before repeats it. The
keys and values of earlier turns are kept (see kv_cache.py), so a turn costs only its own tokens.
When the turns exceed T tokens (-t), the oldest are dropped until half of T is free: that costs one
pass over the others, and stderr says so. A single turn that is longer than T goes on like a long
--sample: the model sees its last T tokens.

A line /reset begins anew. A blank line is skipped. A line that cannot be a prompt is reported on
stderr, and the exit status is then 1. In a terminal, Ctrl-C ends an answer, and the model sees as
much of it as was written; Ctrl-D ends the program.

--answer: the text of --sample, and each line of --chat, is what a user says: it is put into the
template of dev/data/chats.py that the model was fine-tuned with, and an answer ends where the
template says.
"""
import functools
import itertools
import re
import sys

from dev.data import chats
from dev.data.documents import cleaned
from dev.features import sample
from dev.features.feature import Feature, Flag
from dev.features.tokenizer import encoding_of_model
from train_gpt2 import UserError

HELP = ("a line is a turn, and the model sees the turns before it; /reset forgets them, Ctrl-C "
        "ends an answer, Ctrl-D the chat")


class Chatting:
    """A run that samples, and takes its prompts from stdin."""

    def run(self):
        self.load("")
        self.model.remembers = True
        self.turns = []  # that the model sees: the tokens of a line and of its answer
        self.terminal, status = sys.stdin is not None and sys.stdin.isatty(), 0
        if self.terminal:
            note(HELP)
        self.ask()
        for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
            try:
                self.take(cleaned(line.decode()).rstrip("\n"))
            except UnicodeDecodeError as e:
                status = refused(number, f"byte {e.start} is not UTF-8")
            except UserError as e:
                status = refused(number, e)
            self.ask()
        return status

    def ask(self):
        """In a terminal, ask for a prompt. Meanwhile the model passes the end of its answer."""
        if self.terminal:
            print("> ", end="", file=sys.stderr, flush=True)
        tokens = self.said()
        if hasattr(self.model, "fill") and len(tokens) < self.T:
            self.model.fill(0, tokens)

    def take(self, line):
        """Do what a line says. Raises UserError."""
        word = line.strip()
        if word == "/reset":
            note(f"turns forgotten: {len(self.turns)}")
            self.turns = []
        elif re.match(r"/\w+$|/reset\s", word):
            raise UserError(f"{word} is no command; expected /reset, or a text; Ctrl-D ends the "
                            "chat")
        elif word:
            self.answer(line)

    def answer(self, text):
        """Write the model's answer to a line. Raises UserError."""
        turn = sample.beginning(self.model, self.turn_of(text))
        begin = len(turn)
        self.turns.append(turn)
        count = len(self.turns)
        try:
            sample.stream(self.model, turn, self.words(), "", 0, (), stop=self.stop,
                          drawn=self.drawn_behind(turn))
        except KeyboardInterrupt:
            if not self.terminal:
                raise
        print(flush=True)
        turn[begin:] = self.ended(turn[begin:])
        if len(self.turns) < count:
            note(f"oldest turns forgotten: {count - len(self.turns)} of {count}; the model sees "
                 f"T = {self.T:,} tokens (-t)")

    def drawn_behind(self, turn):
        """Yield the tokens of an answer, and append each to the newest turn."""
        flags = self.flags
        coins, left = sample.coins_of(next(self.seeds)), flags.sample_tokens
        while left:
            tokens = self.seen()
            # Up to T; further only if there is no older turn that could leave
            count = left if len(self.turns) == 1 else min(left, self.T + 1 - len(tokens))
            left -= count
            for token in sample.generate(self.model, tokens, count, flags.temperature, flags.top_k,
                                         coins, flags.top_p):
                turn.append(token)
                yield token

    def said(self):
        """The tokens of all turns."""
        return [*self.opening(), *itertools.chain(*self.turns)]

    def seen(self):
        """As said. If they are more than T, the oldest turns are dropped."""
        if len(self.said()) > self.T and len(self.turns) > 1:
            while len(self.said()) > self.T // 2 and len(self.turns) > 1:
                del self.turns[0]
            getattr(self.model, "forget", list)()  # positions shift; list: nothing is kept
        return self.said()

    def opening(self):
        """The tokens before the first turn."""
        return []

    @functools.cached_property
    def between(self):
        """What stands between turns: a newline, or nothing if that is none of the characters."""
        try:
            self.encode("\n")
        except UserError:
            return ""
        return "\n"

    def turn_of(self, text):
        """The tokens of a line: behind a newline, if there are turns before it."""
        return self.tokens_of(self.between + text if self.turns else text)

    def ended(self, tokens):
        """The tokens of an answer, up to the text that ends it."""
        words, stop = self.words(), (self.stop or "").encode("utf-8", "surrogateescape")
        parts = [words.get(token, b"") for token in tokens]
        at = b"".join(parts).find(stop) if stop else -1
        ends = itertools.accumulate(map(len, parts))
        return [token for token, end in zip(tokens, ends) if at < 0 or end <= at]


class Answering:
    """A run that samples answers to messages."""

    stop = property(lambda self: self.flags.stop or self.template.end)
    template = functools.cached_property(
        lambda self: template_of_model(self.config, self.vocabulary))

    def encode(self, text):
        """The tokens of a message, up to where the answer begins."""
        return chats.prompt(self.template, text)

    def write_samples(self, text, tokens):
        """As Sampling's; the answer has a line of its own."""
        super().write_samples(f"{text}\n" if text else "", tokens)

    # ---- In a chat

    def opening(self):
        return self.template.begin()

    def turn_of(self, text):
        return self.tokens_of(text)[len(self.opening()) :]

    def ended(self, tokens):
        return [*super().ended(tokens), self.template.end_id]


def template_of_model(c, vocabulary):
    """The template for a model's words. vocabulary: its own, or None. Raises UserError."""
    if vocabulary:
        vocabulary.check_text("a conversation", "leave out --chat")
        return chats.template_of_vocabulary(vocabulary)
    return chats.template_of_encoding(c.encoding() if hasattr(c, "words")
                                      else encoding_of_model(c.V))


def note(text):
    print(f"({text})", file=sys.stderr, flush=True)


def refused(number, why):
    print(f"error: line {number}: {why}; it is skipped", file=sys.stderr, flush=True)
    return 1


FEATURE = Feature("chat", lambda flags, ranks: flags.chat, training=Chatting, flags=(
    Flag(None, "--chat", "switch", 0, "1: read turns from stdin, a line each, answer each by up to "
         "-g tokens, and do not train", sample.GROUP, after="--samples", replayed=False,
         may_differ=True),))
ANSWERS = Feature(
    "answers", lambda flags, ranks: flags.answer and flags.sample is not None, training=Answering,
    flags=(
        Flag(None, "--answer", "switch", 0, "1: answer the text of --sample or --chat as a "
             "message, in the template of prepro_tinyshakespeare.py --chat",
             sample.GROUP, after="--chat", needs="sample", replayed=False, may_differ=True),))
