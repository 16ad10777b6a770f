"""main.log, in llm.c's form: a line for each step, validation and score.

    s:0 tel:10.8522                                   s: the step, counted from 0; tel: a validation
    s:0 trl:10.8437 lr:0.000300 norm:5.31             trl: a training loss, with learning rate and
    s:20 eval:0.2945                                  norm of the gradient; eval: HellaSwag's score
"""
import re

from dev.features.terminal import say
from train_gpt2 import replace_file


class MainLog:
    """main.log in a folder, opened to append to it from a step on. Lines that the run will log
    again, and damaged ones, move to main.log.old."""
    NAME, LINE = "main.log", "s:0 trl:10.8522"

    def step_of(self, line):
        """The step of a line: a run that resumes there logs it again. None: it is damaged."""
        match = re.match(rb"s:(\d{1,9}) [ -~]*\n", line)
        return match and int(match[1])

    def __init__(self, folder, step, finished):
        path, old = folder / self.NAME, folder / f"{self.NAME}.old"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        found = [self.step_of(line) for line in lines]
        stays = [at is not None and (finished or at < step) for at in found]
        broken = [i for i, at in enumerate(found[:-1]) if at is None]  # a kill may cut the last
        if broken:
            say(f"WARNING: {path}: line {broken[0] + 1} is {lines[broken[0]][:40]!r}; expected one "
                f"such as {self.LINE}; {len(broken)} such lines move to {old.name}")
        if not all(stays):
            gone = [line.rstrip(b"\n") + b"\n" for line, stay in zip(lines, stays) if not stay]
            with open(old, "ab") as file:
                file.write(b"".join(gone))
            replace_file(path, [line for line, stay in zip(lines, stays) if stay])
        self.file = open(path, "ab", buffering=0)
        self.unwritten, self.full = b"", False

    def write(self, line):
        """Append a line. If the disk is full, lines wait until they can be written."""
        self.unwritten += f"{line}\n".encode()
        try:
            self.unwritten = self.unwritten[self.file.write(self.unwritten) :]
            self.full = self.full and bool(self.unwritten)
        except OSError as e:
            if not self.full:
                say(f"WARNING: {self.NAME} could not be written ({e.strerror}); its lines wait "
                    "until it can")
            self.full = True


class Logged:
    """Writes main.log."""

    def stepped(self, run, step):
        verdict = step.verdict
        run.folder.log(f"s:{step.number - 1} trl:{verdict.loss:.4f} lr:{step.rate:.6f} "
                       f"norm:{verdict.norm:.2f}")

    def validated(self, run, done, loss):
        run.folder.log(f"s:{done} tel:{loss:.4f}")

    def scored(self, run, done, score):
        run.folder.log(f"s:{done} eval:{score:.4f}")
