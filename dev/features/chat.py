"""--chat: load the model once, and continue one prompt after another, each a line of stdin.

Every prompt stands on its own: the model does not see those before it. Answer number i, counted
from 0, has the seed --seed + i, so that --sample with that seed repeats it. An empty line is
skipped. A line that cannot be a prompt is reported on stderr, and the exit status is then 1. In a
terminal, Ctrl-C ends an answer, and Ctrl-D the program.
"""
import sys

from dev.data.documents import cleaned
from dev.features.declare import Feature, Flag
from dev.features.sample import GROUP
from prepro_tinyshakespeare import UserError


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


def refused(number, why):
    print(f"error: line {number}: {why}; it is skipped", file=sys.stderr, flush=True)
    return 1


FEATURE = Feature("chat", lambda flags, ranks: flags.chat, training=Chatting, flags=(
    Flag(None, "--chat", "switch", 0, "1: continue each line of stdin by -g tokens, and do not "
         "train", GROUP, after="--samples", replayed=False, may_differ=True),))
