"""The folder of a training run, -o: its logs and its checkpoints. Read this file first.

A complete checkpoint has these files, which are written in this order and removed in reverse:

    model_00000500.bin          the parameters after 500 steps, in llm.c's format; with --ema, their
                                average in ema_00000500.bin
    state_00000500_00000.bin    llm.c's state: AdamW's moments, fp32 parameters, the position in the
                                data; one per rank
    run_00000500.json           the rest: flags, data, which algorithms multiply matrices; with -sl
                                or -sg, the last losses and norms
    DONE_00000500               empty: the others are complete

run_00000000.json is written at the start, so that a run can resume before its first checkpoint. A
run never overwrites files of an earlier one. When a run resumes, lines of main.log for steps that
it repeats move to main.log.old.

training.py says when a run saves. resume.py is -y 1. With several ranks, each writes its
own state, and rank 0 everything else.
"""
import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

from dev.common.config import checkpoint_parts
from dev.features.checkpoints.background_writer import Writer
from dev.features.checkpoints.checkpoint_files import CheckpointFiles
from dev.features.checkpoints.json_log import JsonLog
from dev.features.checkpoints.main_log import MainLog
from dev.features.checkpoints.resume import choose_checkpoint, resume
from dev.features.checkpoints.run_json import notes_of
from dev.features.checkpoints.state_file import state_parts, state_table
from dev.features.ranks.ranks import partial_hash
from dev.features.terminal import say
from train_gpt2 import UserError, replace_file


class RunFolder(CheckpointFiles):
    """-o. step: of the checkpoint to resume from, then of the last one saved; or None. checkpoint:
    the path of its parameters, or None. notes: of its run, or None. ranks: None if this is the only
    process."""

    def __init__(self, flags, ranks, kind, table, features):
        super().__init__(Path(flags.output), kind, table, features)
        self.flags, self.ranks = flags, ranks
        self.rank, self.count = (ranks.rank, ranks.count) if ranks else (0, 1)
        self.step, self.checkpoint, self.notes = None, None, None
        self.ended = False  # whether the run that -y 1 resumes has made all of its steps
        self.writer, self.failed = None, None
        self.news = []  # lines that the writer's thread has for the terminal
        try:
            found = None if self.rank else self.look()
            steps, started = self.exchange(found, "the checkpoints")[0]
        except OSError as e:
            raise UserError(f"-o {self.path}: {e.strerror}; expected a folder to write "
                            "to") from None
        self.has_state = bool(steps)
        if flags.resume and (steps or started):
            choose_checkpoint(self, steps)

    def exchange(self, value, about):
        """[what each rank gives], when all have called this. about: what an error calls it."""
        return self.ranks.exchange(value, about) if self.ranks else [value]

    def look(self):
        """(the steps of complete checkpoints, whether a run has begun here). Raises UserError if
        the run may not begin here, if its newest checkpoint is damaged, or if the folder cannot be
        written to."""
        flags, path = self.flags, self.path
        there = path.exists() or flags.sample is not None
        names = sorted(entry.name for entry in path.iterdir()) if there else []
        steps, started = self.steps() if names else [], self.file("run", 0).name in names
        if flags.sample is not None:
            return steps, started
        own = [name for name in names if self.of_a_run.fullmatch(name)]
        if names:
            os.close(self.locked())
        listed = ", ".join(own[:3]) + ", ..." * (len(own) > 3)
        if own and not flags.resume:
            raise UserError(f"-o {path}: holds an earlier run ({listed}), which is never "
                            "overwritten: go on from that with -y 1, or give another folder")
        if own and not (steps or started):
            raise UserError(f"-y 1: {path} holds {listed}, and neither a whole checkpoint nor "
                            f"{self.file('run', 0).name}, which has a run's flags since its start: "
                            "there is nothing to go on from; give another -o")
        if flags.resume and not own and not (flags.model or flags.train_data):
            raise UserError(f"-y 1: {path} holds no run to go on from: expected the folder of one, "
                            "or -e or -i, to start one there")
        if steps:
            try:
                self.check(steps[-1])
            except UserError as e:
                raise UserError(f"{e}{self.older(steps[-1])}") from None
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f"main.log.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
        return steps, started

    def locked(self):
        """The folder, opened, and locked against other runs. Raises UserError if one is writing
        there."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(f"-o {self.path}: another run is writing to this folder: end it, or "
                            "give another") from None
        except OSError:  # a file system without locks
            pass
        return lock

    # ---- The start of the training

    def begin(self, training, model):
        """Resume if there is a run, and open the logs."""
        self.flags = training.flags
        self.data = [[Path(path).name, os.path.getsize(path), partial_hash(path)]
                     for path in training.train_data.inputs()]
        if self.rank:
            name, *_ = self.exchange(None, "the folder")
            if not (self.path / name).exists():
                raise UserError(f"-o {self.path}: {socket.gethostname()} does not see what rank 0 "
                                "has there: expected a folder that all ranks share")
            self.exchange(None, "a look at the folder")
            resume(self, training, model)
        else:
            self.lock, mark = self.locked(), self.path / f"main.log.{os.getpid()}.tmp"
            mark.touch()
            try:
                self.exchange(mark.name, "the folder")
                self.exchange(None, "a look at the folder")  # for the mark
                resume(self, training, model)
                self.remove_leftovers()
                if self.step is None:
                    self.write_notes(notes_of(training, model, self.data, self.table))
                finished = model.step >= training.steps
                self.main_log = MainLog(self.path, model.step, finished)
                self.json_log = JsonLog(self.path, model.step, finished)
            except BaseException:
                os.close(self.lock)
                raise
            finally:
                mark.unlink(missing_ok=True)
        if self.flags.checkpoint_every:
            self.prepare(training, model)

    def write_notes(self, notes):
        text = json.dumps(notes, indent=1)
        replace_file(self.file("run", notes["step"]), [text.encode()])

    def log(self, line):
        """Append a line to main.log."""
        if not self.rank:
            self.main_log.write(line)
        self.tell()

    def tell(self):
        """Print what the writer has done since."""
        while self.news:
            say(self.news.pop(0))

    # ---- Saving

    @property
    def shared(self):
        """Whether each of several ranks has a share of AdamW's numbers."""
        return self.count > 1 and bool(self.flags.zero)

    def prepare(self, training, model):
        """Make a writer with room for a complete checkpoint."""
        if not self.writer:
            c = model.config
            table = state_table(c, self.count if self.shared else 0, self.rank,
                                model.state_version)
            whole = [] if self.rank else [c.file_table(real)
                                          for _, real in training.weights(model).values()]
            nbytes = sum(row.nbytes for rows in (*3 * [table], *whole) for row in rows)
            self.writer = Writer(model.device, nbytes, self.ranks.here if self.ranks else 1)

    def save(self, training, position, whole=False, prunes=True):
        """Write a checkpoint, with its state if whole, unless there is one already. prunes: then
        remove old ones, which a run that failed still needs."""
        model = training.model
        self.prepare(training, model)
        self.writer.wait()
        step, begun = model.step, time.perf_counter()
        if whole and self.file("DONE", step).exists() or self.rank and not whole:
            return
        files = {} if self.rank else {
            self.path / name.format(step): checkpoint_parts(model.config, views, real)
            for name, (views, real) in training.weights(model).items()}
        if whole:
            files[self.file("state", step, self.rank)] = state_parts(model, position, self.shared)
        notes, agreed = notes_of(training, model, self.data, self.table), False

        def finish(failure):
            nonlocal agreed
            failure = failure and (str(failure) or type(failure).__name__)
            if whole and not agreed:  # whether all ranks' states are there
                agreed = True
                failures = self.exchange(failure, f"the checkpoint of step {step}")
                failure = next(filter(None, failures), None)
                if not (failure or self.rank):
                    try:
                        self.write_notes(notes)
                        replace_file(self.file("DONE", step), [])
                    except UserError as e:
                        failure = str(e)
                failure = self.exchange(failure, f"the end of the checkpoint of step {step}")[0]
            if failure:
                self.failed = f"no checkpoint of step {step}: {failure}"
                if whole and not self.rank:
                    self.remove(step)  # what there is of it; the disk may be full
                steps = self.steps()
                newest = f"; the newest whole one is of step {steps[-1]}" if steps else ""
                self.news.append(f"WARNING: {self.failed}{newest}")
                return
            self.failed = None
            seconds, waited = time.perf_counter() - begun, self.writer.waited
            state = " and its state" if whole and not self.rank else ""
            self.news.append(f"wrote {next(iter(files))}{state} in {seconds:.1f} s, for which "
                             f"training waited {waited:.2f} s")
            if whole and prunes and not self.rank:
                try:
                    self.prune()
                except OSError as e:
                    self.news.append(f"WARNING: an old checkpoint could not be removed ({e})")

        self.step = step
        self.writer.save(files, finish)

    def prune(self):
        """Remove old checkpoints, except the -nk newest and those of every -nm-th step."""
        kept, major = self.flags.checkpoints_kept, self.flags.checkpoints_major
        for step in self.steps()[:-kept] if kept else ():
            if not major or step % major:
                self.remove(step)

    def close(self):
        """Wait for the writer. Raises UserError if the last checkpoint could not be written."""
        if self.writer:
            self.writer.wait()
        self.tell()
        if not self.rank:
            os.close(self.lock)
        if self.failed and sys.exc_info()[0] is None:
            raise UserError(self.failed)
