"""The program as a library: GPT-2 and Llama 3 in NumPy's arrays.

    from dev.tools.library import load, train
    model = load("gpt2_124M.bin")                  # or a run's folder; or random: "2x4x128", "d12"
    print(model.generate("To be, or not to be", 20))
    logits = model.logits(model.encode("To be, or"))    # of tokens (B,T) or (T,): (B,T,V)
    loss = model.loss(tokens, targets)             # (B,T) each: a mean
    gradients = model.gradients(tokens, targets)   # {"wte": (V,C), "wpe": (maxT,C), ...}
    model = train("2x4x128", steps=500, callback=lambda step: print(step.number, step.loss))

All flags of `python train_gpt2.py --help` are keywords, by their long names: load(name,
device="cpu", dtype="bf16", seq_len=256), train(name, train_data="book_train.bin", batch_size=12).
As there, the default device is a GPU if there is one, else the CPU. Errors are UserErrors of one
line, with the flags' names. dev/tools/library.ipynb shows all of it.
"""
import os
from typing import NamedTuple

import numpy as np

import train_gpt2
from dev.common.config import check_tokens
from dev.common.flags import parse_flags
from dev.data.documents import cleaned
from dev.features.base import GPT2
from dev.features.order import make_training, read_flags, table_of_flags
from dev.features.sample import Sampling, coins_of, stream
from dev.llama3.train_llama3 import META, Llama3
from dev.tools.architecture import checkpoint_of, find_architecture
from train_gpt2 import UserError

VALUES = str | int | float | np.number | os.PathLike
ELSEWHERE = "instead of training", "several GPUs"  # groups of flags that only the program has


class Step(NamedTuple):
    """What a callback gets after each step."""
    number: int  # from 1
    loss: float  # of the step's batch, before its update
    norm: float  # of the gradient
    learning_rate: float
    val_loss: float | None  # of the last validation, None without one


class Model:
    """A GPT-2 or Llama 3 on a device. Tokens and targets are integers (B,T), or (T,) for B=1; any
    number of rows, of which batch_size (load's default: 1) are computed at a time."""

    def __init__(self, training):
        self.training = training
        self.model = training.model  # a train_gpt2.GPT2
        self.config = training.config
        self.val_loss = getattr(training, "val_loss", None)  # at the end, of a train with callback

    def logits(self, tokens):
        """For each token the scores of the words that may follow it, (B,T) -> (B,T,V) fp32. Raises
        UserError."""
        model = self.model
        tokens = self.checked(tokens)
        out = np.empty((*tokens.shape, self.config.V), np.float32)
        flat = out.reshape(-1, self.config.V)
        done = 0
        for part in self.parts(tokens, np.zeros_like(tokens)):  # nobody reads the targets
            model.forward(*part)
            for rows in model.slices:  # again, since forward keeps the last rows
                found = train_gpt2.to_float(model.device.get(model.head_forward(rows)))
                flat[done : done + len(found)] = found[:, : self.config.V]
                done += len(found)
        return out

    def loss(self, tokens, targets):
        """The mean of -log(the probability of a target), in nats. Raises UserError."""
        tokens, targets = self.pair(tokens, targets)
        losses = [self.model.forward(*rows) for rows in self.parts(tokens, targets)]
        return sum(losses) / len(losses)

    def gradients(self, tokens, targets):
        """{name: the gradient of loss(tokens, targets), fp32}. The names and shapes are those of
        config.parameter_table(), without the rows that pad the vocabulary. A model that was trained
        with dropout= drops here, too, as in a step. Raises UserError."""
        model, c = self.model, self.config
        batches = self.batches(*self.pair(tokens, targets))
        model.micros = len(batches)
        for model.micro, batch in enumerate(batches):
            model.set_batch(batch)
            model.forward_pass()
            model.loss_pass(with_gradient=True)
            model.backward_pass()
        model.micro = 0
        model.micros = 1
        found = {row.name: model.device.get(getattr(model.grads, row.name))
                 for row in c.parameter_table()}
        return found | {name: found[name][: c.V] for name in c.PADDED if name in found}

    def step(self, tokens, targets, learning_rate=3e-4, **adamw):
        """Update the parameters by AdamW, and return the loss before. adamw: beta1, beta2, eps,
        weight_decay, clip, as for train_gpt2.GPT2.start_step. There is no update if the loss or the
        gradient is not finite. Raises UserError."""
        batches = self.batches(*self.pair(tokens, targets))
        flags = vars(self.flags_of(learning_rate=learning_rate, **adamw))
        self.model.train_step(*batches, **{key: flags[key] for key in ("learning_rate", *adamw)})
        return self.model.verdict().loss

    def generate(self, text, count, temperature=1.0, top_k=0, top_p=1.0, seed=42, stop=None):
        """A text and its continuation by `count` tokens, as --sample writes it. temperature=0
        always takes the likeliest token. Raises UserError, if the model's words are not known,
        too."""
        written = []
        flags = self.flags_of(sample=text, sample_tokens=count, temperature=temperature,
                              top_k=top_k, top_p=top_p, seed=seed, stop=stop or "")
        run, text = self.training, cleaned(flags.sample)
        stream(self.model, Sampling.tokens_of(run, text), run.words(), text,
               flags.sample_tokens, coins_of(flags.seed), flags.temperature, flags.top_k,
               written.append, flags.top_p, flags.stop)
        return "".join(written)

    def encode(self, text):
        """The token ids (T,) int32 of a text, cleaned as texts to train on: Windows' line ends
        become newlines. Raises UserError if the words are not known."""
        return np.array(self.training.encode(cleaned(self.flags_of(sample=text).sample)), np.int32)

    def decode(self, tokens):
        """The text of token ids; those that are no known word are shown as <id>."""
        return self.training.decode(np.asarray(tokens).ravel().tolist())

    def flags_of(self, **given):
        """Flags with these values. Raises UserError."""
        table, _ = table_of_flags(train_gpt2.FLAGS, type(self.config))
        return parse_flags("", table, arguments_of(given, kinds=VALUES), defaults=False)

    # ---- Batches

    def checked(self, tokens):
        """Tokens as (B,T) int32. Raises UserError."""
        try:
            found = np.atleast_2d(tokens)
        except ValueError as e:
            raise UserError(f"tokens: {e}: expected integers (B,T)") from None
        T = self.model.T
        if found.dtype.kind not in "iu" or found.ndim != 2 or not found.size:
            raise UserError(f"tokens of shape {found.shape} and type {found.dtype}: expected "
                            "integers (B,T)")
        if found.shape[1] > T:
            raise UserError(f"tokens of shape {found.shape}: expected at most T = {T} in a row; "
                            f"seq_len={found.shape[1]} makes room, if the model has positions")
        check_tokens("tokens", found, self.config.V)
        return found.astype(np.int32)

    def pair(self, tokens, targets):
        """The same for both. Raises UserError."""
        tokens, targets = self.checked(tokens), self.checked(targets)
        if tokens.shape != targets.shape:
            raise UserError(f"tokens of shape {tokens.shape} and targets of shape {targets.shape}: "
                            "expected the same shape")
        return tokens, targets

    def parts(self, tokens, targets):
        """Equal parts of the rows, since a mean over all is the mean of their means."""
        count = len(tokens)
        size = max(n for n in range(1, min(self.model.B, count) + 1) if count % n == 0)
        return [(tokens[at : at + size], targets[at : at + size]) for at in range(0, count, size)]

    def batches(self, tokens, targets):
        return [train_gpt2.pack_batch(*rows) for rows in self.parts(tokens, targets)]


# ---- Load and train


class Loaded:
    """A run that makes its model, and does nothing with it."""

    def run(self):
        self.choose_model()
        self.device = self.make_device()
        self.model = self.make_model()


class Calling:
    """Calls callback(Step), until that returns something true."""

    def validated(self, run, done, loss):
        run.val_loss = loss

    def stepped(self, run, step):
        said = run.callback(Step(step.number, step.verdict.loss, step.verdict.norm,
                                 float(step.rate), run.val_loss))
        run.enough = bool(said) or run.enough


def architecture_of(name):
    """The class of the model that a checkpoint, a folder or a descriptor names. Raises
    UserError."""
    if name in META or name.startswith("llama3:"):
        return Llama3
    path = checkpoint_of(name)
    return find_architecture(path)[0] if path.endswith(".bin") else GPT2


def arguments_of(given, kinds=VALUES | None):
    """{key: value} as a command line; None is not given. Raises UserError."""
    for key, value in given.items():
        if not isinstance(value, kinds):
            raise UserError(f"{key}={value!r}: expected a number, a text or a path")
    return [f"--{key.replace('_', '-')}={+value if isinstance(value, bool) else value}"
            for key, value in given.items() if value is not None]


def training_of(name, given, front=(), **more):
    """A Training that has not begun. given: flags, by their keys; more: likewise, of our own;
    front: the outermost classes. Raises UserError."""
    arguments = arguments_of({"model": name, **given, **more})
    architecture = architecture_of(str(name or ""))
    flags, table = read_flags(arguments, architecture)
    for flag in table:
        if flag.group in ELSEWHERE and flag.key in given:
            raise UserError(f"{flag.key}={given[flag.key]}: a library call is one process that "
                            f"loads or trains; expected `python train_gpt2.py {flag.name}`")
    return make_training(flags, table, architecture, front=front)


def load(name, **flags):
    """The Model of a checkpoint, of the newest one in a run's folder, or of random parameters:
    "2x4x128" (layers x heads x channels), "d12", "llama3:2x4x128". Random models have GPT-2's
    words, and always the same parameters for the same seed=. T is seq_len=, or that of the
    checkpoint's run, or maxT, at most 1,024. Raises UserError."""
    training = training_of(name, {"seed": 42, "batch_size": 1} | flags, [Loaded], sample="")
    training.run()
    return Model(training)


def train(name=None, callback=None, **flags):
    """Train as `python train_gpt2.py -e name` does with these flags, and return the Model.
    callback(Step) is called after each step, and no lines are printed; if it returns something
    true, the training ends (on a GPU one step later, since the next one is queued by then). Without
    output= nothing is kept in files. Ctrl-C is KeyboardInterrupt after the step, and a second one
    at once; the exception has the Model so far as `.model`. Raises UserError."""
    unseen = {"sample_every": 0} if callback else {}
    training = training_of(name, unseen | flags)
    training.program, training.callback = False, callback
    if callback:  # in place of the first, which prints
        training.observers = [*training.observers[1:], Calling()]
        training.announce, training.val_loss = lambda: None, None
    try:
        training.run()
        if training.signals:
            raise KeyboardInterrupt(f"after {training.model.step} of {training.steps} steps")
    except KeyboardInterrupt as e:
        e.model = training.model and Model(training)
        raise
    return Model(training)
