"""--chat: load the model once, and continue one prompt after another, each a line of stdin.

Every prompt stands on its own: the model does not see those before it. Answer number i, counted
from 0, has the seed --seed + i, so that --sample with that seed repeats it. An empty line is
skipped. A line that cannot be a prompt is reported on stderr, and the exit status is then 1. In a
terminal, Ctrl-C ends an answer, and Ctrl-D the program.

--answer: the text of --sample, and each line of --chat, is what a user says: it is put into the
template of dev/data/chats.py that the model was fine-tuned with, and an answer ends where the
template says.
"""
import functools
import sys

from dev.data import chats
from dev.data.documents import cleaned
from dev.features.feature import Feature, Flag
from dev.features.sample import GROUP
from dev.features.tokenizer import encoding_of_model
from train_gpt2 import UserError


class Chatting:
    """A run that samples, and takes its prompts from stdin."""

    def run(self):
        self.load("")
        self.terminal, status = sys.stdin is not None and sys.stdin.isatty(), 0
        self.ask()
        for number, line in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
            try:
                self.answer(cleaned(line.decode()).rstrip("\n"))
            except UnicodeDecodeError as e:
                status = refused(number, f"byte {e.start} is not UTF-8")
            except UserError as e:
                status = refused(number, e)
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                print()
            self.ask()
        return status

    def ask(self):
        """In a terminal, say that a prompt is expected."""
        if self.terminal:
            print("> ", end="", file=sys.stderr, flush=True)

    def answer(self, text):
        """Write the continuation of a prompt, without the prompt."""
        if text:
            self.write_samples("", self.tokens_of(text))


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


def template_of_model(c, vocabulary):
    """The template for a model's words. vocabulary: its own, or None. Raises UserError."""
    if vocabulary:
        return chats.template_of_vocabulary(vocabulary)
    return chats.template_of_encoding(c.encoding() if hasattr(c, "words")
                                      else encoding_of_model(c.V))


def refused(number, why):
    print(f"error: line {number}: {why}; it is skipped", file=sys.stderr, flush=True)
    return 1


FEATURE = Feature("chat", lambda flags, ranks: flags.chat, training=Chatting, flags=(
    Flag(None, "--chat", "switch", 0, "1: continue each line of stdin by -g tokens, and do not "
         "train", GROUP, after="--samples", replayed=False, may_differ=True),))
ANSWERS = Feature(
    "answers", lambda flags, ranks: flags.answer and flags.sample is not None, training=Answering,
    flags=(
        Flag(None, "--answer", "switch", 0, "1: answer the text of --sample or --chat as a "
             "message, in the template of prepro_tinyshakespeare.py --chat", GROUP,
             after="--chat", needs="sample", replayed=False, may_differ=True),))
