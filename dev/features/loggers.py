"""--log tensorboard,wandb: send what log.jsonl has to TensorBoard or Weights & Biases, too, under
the same names. Neither is needed otherwise: they are imported when a run asks for them.

    tensorboard    event files in -o; `tensorboard --logdir FOLDER` shows all runs below a folder
    wandb          a run named as -o, in the project train_gpt2. wandb's own variables work as
                   usual: WANDB_MODE=offline needs no network, and `wandb sync` sends the run
                   later; WANDB_PROJECT and WANDB_NAME rename it

A resumed run continues its curves. A kill may have lost what these logs had not yet written, so the
lines of log.jsonl up to the checkpoint are sent again. The files that they replace, event files and
folders of offline runs, get another name, with "old" in it, by which neither program finds them.
The id of wandb's run is in run_*.json, and the x axis is the run's step. Lines that are already on
wandb's server, which counts them, are not sent again.

Both have a queue of their own, so training does not wait for a disk or a network. A call that fails
is reported, and ends that log alone.
"""
import argparse
import contextlib
import json
import os
import secrets
import time
from importlib.util import find_spec
from pathlib import Path

from dev.features.checkpoints.json_log import FEATURE as JSON_LOG
from dev.features.checkpoints.json_log import JsonLog
from dev.features.feature import Feature, Flag
from train_gpt2 import UserError


class TensorBoard:
    """An event file in a folder."""
    HINT = ""  # the end of an error

    def __init__(self, training):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        def text(words):
            return dict(tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING,
                                                      string_val=[words.encode()]),
                        metadata=create_summary_metadata(display_name="", description=""))

        def summary(values):
            return summary_pb2.Summary(value=[
                summary_pb2.Summary.Value(tag=tag, **(text(value) if isinstance(value, str) else
                                                      dict(simple_value=value)))
                for tag, value in values.items()])

        self.event, self.summary = event_pb2.Event, summary
        found = training.folder.path.glob("*tfevents*") if training.flags.resume else ()
        self.replaced = {path: path.with_name(path.name.replace("tfevents", "old"))
                         for path in found}
        self.file = EventFileWriter(str(training.folder.path), flush_secs=10)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # has a TensorBoard that is open drop this step and later ones: all
        self.file.add_event(self.event(wall_time=time.time(), step=0, session_log=start))

    def write(self, step, at, values):
        self.file.add_event(self.event(wall_time=at, step=step, summary=self.summary(values)))

    def close(self, failed):
        self.file.close()


class Wandb:
    """A run of wandb."""
    HINT = " (WANDB_MODE=offline needs neither a login nor a network)"

    def __init__(self, training):
        import wandb
        folder, given = training.folder.path, os.environ.get
        self.run = wandb.init(
            project=given("WANDB_PROJECT", "train_gpt2"), name=given("WANDB_NAME", folder.name),
            dir=given("WANDB_DIR", str(folder)), id=training.wandb_id(), resume="allow",
            config=training.settled(), allow_val_change=True,
            settings=wandb.Settings(console="off"))
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.there = self.run.step  # how many lines the server has
        own = Path(self.run.dir).parent
        self.replaced = {path: path.with_name(path.name.replace("offline", "old"))
                         for path in own.parent.glob(f"offline-run-*-{self.run.id}")
                         if path != own}

    def write(self, step, at, values):
        if self.there:
            self.there -= 1
        else:
            self.run.log(dict(step=step) | values)

    def close(self, failed):
        self.run.finish(exit_code=int(failed))


LOGS = dict(tensorboard=TensorBoard, wandb=Wandb)


def names(text):
    """The type of --log: names of LOGS, separated by commas."""
    given = text.split(",")
    if not {*given} <= {*LOGS} or len({*given}) < len(given):
        raise argparse.ArgumentTypeError(f"{text}: expected {' or '.join(LOGS)}, or both with a "
                                         "comma between")
    return text


class Sent:
    """Sends lines of log.jsonl to a log: an observer."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def noted(self, run, line):
        def write():
            while self.log.replaced:  # now that their lines come
                os.rename(*self.log.replaced.popitem())
            values = {name: value for name, value in json.loads(line).items() if value is not None}
            self.log.write(values.pop("step"), values.pop("time", 0.0), values)

        self.call(run, write)

    def close(self, run, failed):
        self.call(run, lambda: self.log.close(failed))

    def call(self, run, function):
        """Training goes on without this log if it fails."""
        try:
            if self.log:
                function()
        except Exception as e:
            self.log, text = None, " ".join(f"{type(e).__name__}: {e}".split())
            run.say(f"WARNING: --log {self.name} ends here: {text}")


class Logged:
    """Training that opens and closes these logs."""
    id = None  # of wandb's run
    logs = ()

    def prepare(self):
        for name in self.flags.log.split(",") if self.rank == 0 else ():
            found = find_spec(name)
            if not (found and found.origin):  # wandb leaves folders of its name
                raise UserError(f"--log {name}: {name} is not installed: pip install {name}")
        super().prepare()

    def wandb_id(self):
        """The id of wandb's run, which a resumed run has from its notes."""
        self.id = self.id or (self.folder.notes or {}).get("wandb") or secrets.token_hex(4)
        return self.id

    def state(self, model):
        state = super().state(model)
        return state | dict(wandb=self.wandb_id()) if "wandb" in self.flags.log else state

    def make_model(self):
        """Open the logs first: a run that cannot is over before its folder has anything."""
        if self.rank == 0:
            self.logs = [self.open(name) for name in self.flags.log.split(",")]
        with contextlib.ExitStack() as until_made:
            until_made.push(self.close)
            model = super().make_model()
            until_made.pop_all()
        self.observers += self.logs
        if self.rank == 0:
            for line in (self.folder.path / JsonLog.NAME).read_bytes().splitlines():
                self.tell("noted", line)
        return model

    def train(self):
        with contextlib.ExitStack() as stack:
            stack.push(self.close)
            super().train()

    def open(self, name):
        try:
            return Sent(name, LOGS[name](self))
        except Exception as e:  # such as wandb's without a login
            why = f"{' '.join(str(e).split()) or type(e).__name__}{LOGS[name].HINT}"
            raise UserError(f"--log {name}: {why}") from None

    def close(self, kind, *_):
        """At the end of training; kind: of the exception that ends it, or None."""
        for log in self.logs:
            log.close(self, kind is not None)


FEATURE = Feature(
    "loggers", lambda flags, ranks: flags.log and JSON_LOG.asked(flags, ranks), training=Logged,
    flags=(
        Flag(None, "--log", names, None, "tensorboard, wandb, or both with a comma between: send "
             "-o's log.jsonl there, too", "how long, and what is shown",
             needs="output", replayed=False, may_differ=True),),
    state={"wandb": (lambda x: isinstance(x, str) and x.isalnum(), "letters and digits")})
