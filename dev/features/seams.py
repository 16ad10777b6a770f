"""The trainer's classes with finer seams.

train_gpt2.py is written for its reader: a method is there because the plain program has that step.
Features override smaller steps, and work for other architectures. So these subclasses cut the
trainer's longer methods into parts, in the trainer's own lines; dev/tests/test_seams.py holds the
lines equal. features/order.py stacks features on them.
"""
import os
import time
from pathlib import Path
from types import SimpleNamespace

import train_gpt2
from dev.common.config import Config, checkpoint_parts, draw_parameters, read_parameters
from dev.features.devices import FastCuda
from prepro_tinyshakespeare import UserError, replace_file
from train_gpt2 import (ADAMW_FLAGS, NORM_BLOCKS, DataLoader, Row, generate, kept_as, matrices,
                        offsets, pack_batch, to_float)


def size_of(nbytes):
    """A number of bytes as text, so that a laptop's model does not take 0.00 GiB."""
    return f"{nbytes / 2**30:6.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:6.2f} MiB"


class GPT2(train_gpt2.GPT2):
    """GPT-2 with the seams of features, and the base of other architectures."""
    Config = Config
    state_version = 1  # of its state files; those of another optimizer than AdamW have another
    uncut = ()  # names of tensors whose layers several ranks share out whole: see ranks/zero.py

    def __init__(self, config, device, B, T):
        self.check(config, device, B, T)
        super().__init__(config, device, B, T)
        self.padding = [*self.padding_of_gradients()]

    def padding_of_gradients(self):
        """The gradients, as AdamW gets them, of rows that pad the vocabulary."""
        for name in self.config.PADDED:
            if hasattr(self.grads, name) and self.config.V < self.config.Vp:
                yield getattr(self.grads, name)[self.config.V :]

    def check(self, config, device, B, T):
        """Raise UserError unless the model can have such batches on this device."""
        if T > config.maxT:
            raise UserError(f"-t {T}: expected at most maxT = {config.maxT}: wpe has no more "
                            "positions")

    def layer_views(self, views, table, l):
        """As the trainer's. A row may have fewer layers, used in turn."""
        return SimpleNamespace(**{row.name: getattr(views, row.name)[l % row.layers]
                                  for row in table if row.layers})

    def set_parameters(self, tensors):
        self.set_tensors(tensors, self.master)

    def set_tensors(self, tensors, kept):
        """Set tensors from (name, values) pairs. kept: views of fp32, or two views of its halves.
        Rows beyond a shorter vocabulary keep their values."""
        for name, values in tensors:
            for views in kept:
                for to, part in zip(matrices(getattr(views, name)), matrices(values)):
                    part = to_float(part)
                    self.device.put(to.reshape(-1)[: part.size], kept_as(part, to.dtype))

    # ---- The update

    def update_pass(self):
        arenas = self.arenas
        self.adamw(arenas["parameters"], arenas.get("low bits"), arenas["gradients"],
                   arenas["adam m"], arenas["adam v"])

    def adamw(self, parameters, low, gradients, m, v):
        """AdamW on arenas, which hold all tensors one after another."""
        n = gradients.nbytes // 4
        self.norm_of(gradients, n)
        self.judge()
        adam = self.adam
        self.device.launch("adamw", n, parameters, low, gradients, m, v, adam.starts, adam.decayed,
                           adam.decayed.size, n, adam.settings, adam.verdict)

    def norm_of(self, gradients, n):
        """adam.norm[0] = the norm of n gradients. Those of words that pad the vocabulary become
        zero first, whatever a feature has done to them: so their parameters stay zero."""
        for padding in self.padding:
            self.device.zero(padding)
        blocks = min(NORM_BLOCKS, 8 * self.device.multiprocessors)
        self.device.launch("global_norm", blocks, self.adam.norm, gradients, n)

    def judge(self):
        """Decide whether this step updates the parameters: its loss and norm have to be finite."""
        self.device.launch("judge", 1, self.adam.verdict, self.adam.norm)


class Counted:
    """A model whose kernels know the seed and the step, adam.counter: a base of features' classes.
    Numbers that are passed to a launch stay as they were when a step was recorded."""

    @classmethod
    def tables(cls, c, device, B, T):
        tables = super().tables(c, device, B, T)
        return tables | {"update": [*tables["update"], Row("counter", (2,))]}

    def set_adamw(self, seed=None, **settings):
        super().set_adamw(**settings)
        self.count_step(self.step, seed)

    def count_step(self, step, seed=None):
        """Set the step that the kernels know."""
        seed = self.flags.seed if seed is None else seed
        # fp32 has all whole numbers below 2**24
        self.device.put(self.adam.counter, [seed % 2**24, step])


class Training(train_gpt2.Training):
    """A training run with the seams of features. flags stay what was asked for; what a run makes of
    them are attributes, such as T and steps, and settled()."""
    layers = ()  # the declarations of this run's features, the outermost first
    Device = FastCuda
    rank = 0  # as GPT2's
    count = 1
    longest = 1024  # T without -t, at most

    def __init__(self, flags, Model=GPT2):
        super().__init__(flags)
        self.Model = Model

    # ---- The loop

    def train(self):
        """Run the remaining steps."""
        flags, steps = self.flags, self.steps
        adamw = {name: getattr(flags, name) for name in ADAMW_FLAGS}
        batches = self.next_batches()
        for done in range(self.model.step, steps):
            self.pause(done, batches)
            rate, begun = self.learning_rate(done), time.perf_counter()
            self.model.train_step(*batches.packed, learning_rate=rate, **adamw)
            queued = SimpleNamespace(number=done + 1, rate=rate, begun=begun, batches=batches)
            batches = self.next_batches()  # while the device works
            self.finish(queued)
        self.pause(steps, batches)

    def pause(self, done, batches):
        """Once in a while: validate, sample, save."""
        if self.validates(done):
            self.validate(done)
        if self.samples(done):
            self.sample()
        if self.saves(done):
            self.save(done, batches)

    def validates(self, done):
        return self.flags.val_batches != 0 and self.due(done, self.flags.val_every)

    def samples(self, done):
        flags = self.flags
        return done > 0 and flags.sample_tokens > 0 and self.due(done, flags.sample_every)

    def saves(self, done):
        return done == self.steps

    def due(self, done, every):
        """Whether something that is done every so many steps, and at the end, is due."""
        return every > 0 and (done % every == 0 or done == self.steps)

    def next_batches(self):
        """The micro-batches of a step, packed, and where in the data each is."""
        batches = SimpleNamespace(packed=[], places=[])
        for _ in range(self.grad_accum):
            batches.packed.append(pack_batch(*self.train_data.next_batch()))
            batches.places.append(self.train_data.where)
        return batches

    def finish(self, queued):
        """Wait for a step that was queued, and report it."""
        self.report(queued, self.model.verdict())

    def report(self, queued, verdict):
        if verdict.stopped:
            self.give_up(queued, verdict)
        step, seconds = queued.number, time.perf_counter() - queued.begun
        self.say(f"step {step:4d}/{self.steps} | loss {self.loss_text(verdict.loss)} | "
                 f"norm {verdict.norm:7.4f} | lr {queued.rate:.2e} | {self.speed(seconds)} | "
                 f"{step * self.total_batch:,} tokens")

    def loss_text(self, loss):
        return f"{loss:.6f}"

    def speed(self, seconds):
        return f"{1e3 * seconds:8.2f} ms | {self.total_batch / seconds:9,.0f} tok/s"

    def give_up(self, queued, verdict):
        raise UserError(f"the loss of step {queued.number} is {verdict.loss} and the norm of its "
                        f"gradient {verdict.norm}: try a smaller -l, or look at the data: "
                        f"{'; '.join(queued.batches.places)}")

    def validate(self, done):
        """Print the mean loss over -m validation batches, and return it."""
        data, most = self.val_data, self.flags.val_batches
        data.restart()
        count = data.per_epoch if most < 0 else min(most, data.per_epoch)
        loss = self.total_loss(data.next_batch() for _ in range(count)) / count
        self.say(f"val loss {loss:.6f}")
        return loss

    def total_loss(self, batches):
        return sum(self.model.forward(*batch) for batch in batches)

    def sample(self):
        text = self.decode(generate(self.model, self.flags.sample_tokens))
        self.say(f"generating:\n---\n{text}\n---")

    def decode(self, tokens):
        if self.config.V != Config.V:
            return str(tokens)  # not of GPT-2's vocabulary
        return self.config.encoding().decode(tokens)

    def save(self, done, batches):
        """With -o: write the weights, in llm.c's format."""
        if self.flags.output:
            path = Path(self.flags.output) / f"model_{done:08d}.bin"
            parts = checkpoint_parts(self.config, self.model.params, self.device.real)
            replace_file(path, map(self.device.get, parts))
            self.say(f"wrote {path}")

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

    def say(self, line):
        print(line, flush=True)

    # ---- Before the first step

    def prepare(self):
        self.choose_model()
        self.device = self.make_device()
        self.open_data()
        self.announce()

    def choose_model(self):
        """Find the model's config, in a checkpoint or by descriptor."""
        kind = self.Model.Config
        file, descriptor = kind.MODELS
        self.name = self.model_given() or (file if os.path.isfile(file) else descriptor)
        self.from_file = os.path.isfile(self.name) or self.name.endswith(".bin")
        make = kind.from_file if self.from_file else kind.from_descriptor
        self.config = make(self.name)
        self.T = self.length_given() or min(self.config.maxT, self.longest)

    def model_given(self):
        """The checkpoint or descriptor to start from, or None."""
        return self.flags.model

    def length_given(self):
        """T, or None if it follows from the model."""
        return self.flags.seq_len

    def make_device(self):
        """The device, with the CUDA files of this run's features."""
        files = [file for feature in self.compiled() for file in feature.sources]
        return self.Device(self.flags.dtype, self.config, [*dict.fromkeys(files)])

    def compiled(self):
        """Those of this run's features whose CUDA files are compiled, if they have any."""
        return [feature for feature in self.layers if feature.compiled(self.flags, self.config)]

    def open_data(self):
        flags = self.flags
        B, T = flags.batch_size, self.T
        self.train_path, self.val_path = self.data_paths()
        self.train_data = self.loader(self.train_path, B, T, self.rank, self.count)
        if flags.val_every:
            self.val_data = self.loader(self.val_path, B, T)
        size = self.train_data.size
        self.total_batch = flags.total_batch or size
        if self.total_batch % size:
            raise UserError(f"-d {self.total_batch}: expected a multiple of ranks*B*T = {size}")
        self.grad_accum = self.total_batch // size  # of each rank
        self.epoch = max(1, self.train_data.total // self.total_batch)
        self.steps = self.epoch if flags.steps == -1 else flags.steps

    def loader(self, path, B, T, *ranks):
        """Batches of a token file. ranks: rank and count, in training."""
        return DataLoader(path, B, T, self.config.V, *ranks)

    def data_paths(self):
        return self.config.data_paths(self.flags.train_data, self.flags.val_data)

    def announce(self):
        """Print the sizes, and how large the arenas are."""
        c = self.config
        B, T = self.flags.batch_size, self.T
        numbers = sum(row.size for row in c.parameter_table())
        print(f"device       | {self.device} (--dtype)")
        print(f"model        | {self.name} (-e): {numbers:,} parameters, {c}")
        print(f"data         | {self.train_data} (-i), {self.val_path} (-j)")
        print(f"run          | B={B} T={T} (-b, -t), {self.total_batch:,} tokens a step (-d), "
              f"{self.steps} steps (-x), an epoch has {self.epoch}")
        if self.chapters():
            print(f"chapters     | {', '.join(self.chapters())} (dev/features; --plain 1: without)")
        for arena, table in self.Model.tables(c, self.device, B, T).items():
            print(f"{arena:12} | {size_of(offsets(table)[-1])} in {len(table)} tensors")

    def chapters(self):
        """What this run has for speed alone beyond the two files."""
        return [feature.chapter for feature in reversed(self.compiled()) if feature.chapter]

    def make_model(self):
        """The model, with the parameters that it starts from."""
        c, flags = self.config, self.flags
        model = self.Model(c, self.device, flags.batch_size, self.T)
        model.set_parameters(read_parameters(self.name, c) if self.from_file
                             else draw_parameters(c, flags.seed))
        return model
