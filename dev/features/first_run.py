"""What a run without -e trains, and with which settings.

GPT-2's weights, if they are here and the data has GPT-2's words. Otherwise a small model, which
learns to write in a minute on two cores, and in seconds on a GPU: on the bytes of Shakespeare, or
on the words that come with -i. (GPT-2's 50,257 words are too many for a megabyte of text: most
occur too rarely to be learned.)
"""
import os
import signal

from dev.common.config import checkpoint_parts
from dev.common.cores import processor, usable_cores
from dev.common.time_left import duration
from dev.data.vocabulary import vocabulary_beside, write_vocabulary
from dev.features.devices import ON_CPU
from dev.features.feature import Feature, trains
from train_gpt2 import replace_file

# The defaults of a small model, by device: AdamW, as train_gpt2.py has it. On the CPU fewer layers
# and more steps learn more in the same time, and none is memorized. On a GPU weight decay keeps
# the model from memorizing the text. dev/RESULTS.md has tables of both.
SMALL = dict(final_fraction=0.1, beta2=0.99, weight_decay=0.1, shuffle=1, sample_tokens=400,
             temperature=0.8)
SCRATCH = {
    "cuda": SMALL | dict(model="6x6x384", batch_size=64, seq_len=256, steps=1000, warmup=100,
                         learning_rate=1e-3, weight_decay=2.0, val_every=100, val_batches=1,
                         sample_every=500),
    "cpu": SMALL | dict(model="2x4x128", batch_size=12, seq_len=64, steps=5000, warmup=100,
                        learning_rate=6e-3, val_every=1000, val_batches=20, sample_every=2500),
    "emulated": SMALL | dict(model="2x2x64", batch_size=4, seq_len=64, steps=300, warmup=30,
                             learning_rate=6e-3, val_every=100, val_batches=20,
                             sample_every=300)}
# With --optimizer muon on a GPU: dropout keeps the held-out loss from rising at the end
MUON = dict(steps=1100, weight_decay=0.1, muon_lr=0.02, muon_coefficients="jordan",
            learning_rate=3e-3, dropout=0.3)
# Of a model of GPT-2's words on the CPU, which takes a minute on two cores
GPT2_WORDS = dict(steps=250, learning_rate=1e-3, warmup=25, final_fraction=0.1, beta2=0.95,
                  val_every=50, sample_every=125)
TEXT = "{text}"  # stands for the text's name, which depends on whether there is a network


def describe():
    """The small models, for --help."""
    return f"{SCRATCH['cuda']['model']} on a GPU, {SCRATCH['cpu']['model']} on a CPU"


def small(descriptor):
    """The descriptor of the model of GPT-2's words that is trained from scratch on a CPU."""
    return descriptor.replace("d12", "d3")


def scratch(flags):
    """The settings of a small model, for these flags."""
    with_muon = flags.optimizer == "muon" and flags.device == "cuda"
    return SCRATCH[flags.device] | (MUON if with_muon else {})


def choose(flags, kind):
    """(the defaults of flags, and why, in a line) for a model that -e does not name. kind: its
    Config."""
    if flags.model:
        return {}, ""
    file, large = kind.MODELS
    data, on_cpu = flags.train_data or flags.val_data, flags.device in ON_CPU
    own = data and vocabulary_beside(data)
    if own:
        return scratch(flags), (
            f"{data} has a vocabulary of its own, {len(own.words):,} words: a small model; "
            f"-e {large} has GPT-2's sizes")
    if os.path.isfile(file):
        return dict(model=file), ""
    if not data:
        return scratch(flags), (
            f"no {file} here: a small model on the bytes of {TEXT}; -e {large} trains "
            f"{'GPT-2 124M' if large == 'd12' else 'one like GPT-2 124M'}")
    return GPT2_WORDS | dict(model=small(large)) if on_cpu else dict(model=large), ""


class FirstRun:
    """Training that says why it has this model."""
    why = ""

    def announce(self):
        if self.why:
            text = "Shakespeare" if "shakespeare" in self.paths[0] else "this program's own text"
            print(f"first run    | {self.why.replace(TEXT, text)}")
        super().announce()


LONG = 120  # seconds: a first run that takes more says so


class Long:
    """Says how long a first run takes on this machine, if that is long: an observer."""

    def expected(self, run, seconds):
        if run.why and seconds > LONG:
            cores = usable_cores()
            machine = (f"{processor()}, {cores} core{'s'[:cores - 1]}"
                       if run.flags.device in ON_CPU else run.device)
            run.say(f"first run    | takes about {duration(seconds)} on this machine ({machine}); "
                    "--minutes 2 would end it after two")


class Interrupted:
    """Training without -o whose small model, if it chose one without -e, outlives a signal."""
    chosen = False  # whether -e was not given
    kept = ""  # the file of its weights

    def save(self, done, batches):
        super().save(done, batches)
        if self.signals and self.chosen and self.program and not (self.from_file or self.rank):
            name = f"interrupted_{done:08d}"
            while os.path.exists(f"{name}.bin"):
                name += "_again"
            if self.vocabulary:
                write_vocabulary(f"{name}_tokenizer.bin", self.vocabulary)
            parts = checkpoint_parts(self.config, self.model.params, self.device.real)
            replace_file(f"{name}.bin", map(self.device.get, parts))
            self.kept = f"{name}.bin"
            if self.signals[0] == signal.SIGINT and self.flags.sample_every:
                self.sample()

    def what_is_left(self):
        if not self.kept:
            return super().what_is_left()
        prompt = "0" if self.vocabulary and self.vocabulary.is_ids else "To be"
        return (f"its weights are in {self.kept}: the same command with -e {self.kept} goes on "
                f'from them, and with --sample "{prompt}" lets them write')


FEATURE = Feature("first run", training=FirstRun, observer=Long)
INTERRUPTED = Feature("interrupted first run", lambda flags, ranks: trains(flags) and
                      not flags.output, training=Interrupted)
