"""--log tensorboard,wandb: send what log.jsonl has to TensorBoard or Weights & Biases, too, under
the same names. Neither is needed otherwise: they are imported when a run asks for them.

    tensorboard    event files in -o; `tensorboard --logdir FOLDER` shows all runs below a folder
    wandb          a run named as -o, in the project train_gpt2. wandb's own variables work as
                   usual: WANDB_MODE=offline needs no network, and `wandb sync` sends the run
                   later; WANDB_PROJECT and WANDB_NAME rename it

A resumed run continues its curves. TensorBoard is told to drop what the run does again. The id of
wandb's run is in run_*.json, and the x axis is the run's step rather than wandb's count of calls:
steps that are done again come again, with the same values.

A thread makes the calls, so training does not wait for them. One that fails is reported, and ends
that log alone.
"""
import argparse
import contextlib
import os
import queue
import secrets
import threading
import time
from importlib.util import find_spec

from dev.features.checkpoints.json_log import FEATURE as JSON_LOG
from dev.features.declare import Feature, Flag
from prepro_tinyshakespeare import UserError


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
        self.file = EventFileWriter(str(training.folder.path), flush_secs=10)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        # drops what earlier files have of this step and later ones
        self.file.add_event(self.event(wall_time=time.time(), step=1 + (training.folder.step or 0),
                                       session_log=start))

    def write(self, step, values):
        self.file.add_event(self.event(wall_time=time.time(), step=step,
                                       summary=self.summary(values)))

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

    def write(self, step, values):
        self.run.log(dict(step=step) | values)

    def close(self, failed):
        self.run.finish(exit_code=int(failed))


LOGS = dict(tensorboard=TensorBoard, wandb=Wandb)
END = None


def names(text):
    """The type of --log: names of LOGS, separated by commas."""
    given = text.split(",")
    if not {*given} <= {*LOGS} or len({*given}) < len(given):
        raise argparse.ArgumentTypeError(f"{text}: expected {' or '.join(LOGS)}, or both with a "
                                         "comma between")
    return text


class Behind:
    """Calls a log in a thread."""

    def __init__(self, name, log):
        self.name, self.log, self.failure, self.waiting = name, log, None, queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        try:
            for step, values in iter(self.waiting.get, END):
                self.log.write(step, values)
        except Exception as e:
            self.fail(e)

    def fail(self, error):
        """Keep what went wrong, for a warning: training goes on without this log."""
        text = " ".join(f"{type(error).__name__}: {error}".split())
        self.failure = self.failure or f"WARNING: --log {self.name} ends here: {text}"

    def close(self, failed):
        self.waiting.put(END)
        self.thread.join()
        try:
            self.log.close(failed)
        except Exception as e:
            self.fail(e)


class Logged:
    """Training that notes the same in these logs."""
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
        return model

    def train(self):
        with contextlib.ExitStack() as stack:
            stack.push(self.close)
            super().train()

    def open(self, name):
        try:
            return Behind(name, LOGS[name](self))
        except Exception as e:  # such as wandb's without a login
            why = f"{' '.join(str(e).split()) or type(e).__name__}{LOGS[name].HINT}"
            raise UserError(f"--log {name}: {why}") from None

    def note(self, step, **values):
        super().note(step, **values)
        shown = {name: value for name, value in values.items() if value is not None}
        for log in self.logs:
            log.waiting.put((step, shown))
        self.warn()

    def close(self, kind, *_):
        """At the end of training; kind: of the exception that ends it, or None."""
        for log in self.logs:
            log.close(kind is not None)
        self.warn()

    def warn(self):
        for log in self.logs:
            if log.failure:
                self.say(log.failure)
        self.logs = [log for log in self.logs if not log.failure]


FEATURE = Feature(
    "loggers", lambda flags, ranks: flags.log and JSON_LOG.asked(flags, ranks), training=Logged,
    flags=(
        Flag(None, "--log", names, None, "tensorboard, wandb, or both with a comma between: send "
             "-o's log.jsonl there, too", "how long, and what is shown",
             needs="output", replayed=False, may_differ=True),),
    state={"wandb": (lambda x: isinstance(x, str) and x.isalnum(), "letters and digits")})
