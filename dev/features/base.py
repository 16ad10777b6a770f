"""What a run with features has beyond the trainer's classes: other architectures, and a state that
outlasts it. features/order.py stacks features on these.
"""
from dev.data.first_text import data_paths
import train_gpt2
from dev.common.config import Config
from dev.features.devices import FastCuda
from train_gpt2 import Row


class GPT2(train_gpt2.GPT2):
    """GPT-2, and the base of other architectures."""
    Config = Config
    rank = 0  # the index of this process
    count = 1  # how many processes share each batch
    sharing = 1  # how many share the one that is computed: not a validation's
    Training = None  # a class in front of Training; what else its run needs
    state_version = 1  # of its state files; those of another optimizer than AdamW have another
    uncut = ()  # names of tensors whose layers several ranks share out whole: see ranks/zero.py

    def next_logits(self, tokens):
        """As train_gpt2.next_logits."""
        return train_gpt2.next_logits(self, tokens)


class SharedLayers:
    """A model whose layers share one tensor for each of the activations with these names: a base of
    features' classes."""
    SHARED = ()

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        return tables | {"activations": [row._replace(layers=1) if row.name in cls.SHARED else row
                                         for row in tables["activations"]]}

    def views(self, arena):
        """As GPT2.views; all layers of a shared tensor are its only one."""
        views = super().views(arena)
        for name in self.SHARED if arena == "activations" else ():
            if hasattr(views, name):
                setattr(views, name, [getattr(views, name)[0]] * self.config.L)
        return views


class Counted:
    """A model whose kernels know the seed and the step, adam.counter: a base of features' classes.
    Numbers that are passed to a launch stay as they were when a step was recorded."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        return tables | {"update": [*tables["update"], Row("counter", (2,))]}

    def start_step(self, seed=None, **settings):
        super().start_step(**settings)
        self.count_step(self.step, seed)

    def count_step(self, step, seed=None):
        """Set the step that the kernels know."""
        seed = self.flags.seed if seed is None else seed
        # fp32 has all whole numbers below 2**24
        self.device.put(self.adam.counter, [seed % 2**24, step])


class Training(train_gpt2.Training):
    """A training run of any architecture, with the state of its features."""
    layers = ()  # the declarations of this run's features, the outermost first
    Model = GPT2
    Device = FastCuda
    row = 0  # tokens of a row of conversations, if the data lies in rows: see masked.py
    rank = 0  # as GPT2's
    count = 1

    def __init__(self, flags):
        super().__init__(flags)
        self.observers = [layer.observer() for layer in self.layers if layer.observer]

    def run(self):
        super().run()
        self.tell("ended")

    def prepare(self):
        super().prepare()
        self.tell("prepared")

    def say(self, line):
        self.tell("say", line)

    def next_logits(self, tokens):
        return self.model.next_logits(tokens)

    def data_paths(self):
        """As the trainer's. Without -i named like -j, or tinyshakespeare's in any spelling, which
        is prepared if it is missing."""
        if self.flags.train_data:
            return super().data_paths()
        return data_paths(None, self.flags.val_data)

    def make_device(self):
        """The device, with the CUDA files of this run's features."""
        files = [file for feature in self.compiled() for file in feature.sources]
        return self.Device(self.flags.dtype, self.config, [*dict.fromkeys(files)])

    def compiled(self):
        """Those of this run's features whose CUDA files are compiled, if they have any."""
        return [feature for feature in self.layers if feature.compiled(self.flags, self.config)]

    def announce(self):
        super().announce()
        if self.chapters():
            print(f"chapters     | {', '.join(self.chapters())} (dev/features; --plain 1: without)")

    def chapters(self):
        """What this run has for speed alone beyond the two files."""
        return [feature.chapter for feature in reversed(self.compiled()) if feature.chapter]

    # ---- Its state

    def state(self, model):
        """What a step depends on besides parameters and batches, for run_*.json and for a step to
        replay: {name: what JSON can hold}. A feature adds to what super() returns, and declares the
        names as its state. Scales are FP8's, and the field is in every file."""
        return dict(scales=[])

    def set_state(self, model, notes):
        """Restore a state to a model that has its parameters. notes: all that run_*.json or
        replay_*.npz has, or {} if it is lost."""

    def settled(self):
        """{name: value} of all flags, with what the run has where they leave it open. A feature
        adds what it decides. run_*.json keeps this for -y 1."""
        return vars(self.flags) | dict(seq_len=self.T, total_batch=self.total_batch,
                                       steps=self.steps, dtype=self.device.dtype)
