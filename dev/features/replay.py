"""Find out what went wrong in a step: which tensor had the first NaN or infinity, or which tensors
of an outlier have the largest gradients.

When a step's update is skipped, the training repeats the step, one kernel at a time, and looks at
what each kernel has written. With -o, a step with a NaN or infinity is kept beside the checkpoint
before it, and can be replayed:

    python train_gpt2.py --replay out/replay_00000037.npz [--device cpu]
"""
import contextlib
import io
import json
import math
import zipfile
from pathlib import Path

import numpy as np

from dev.common.config import read_parameters
from dev.common.cuda_source import parameters_of
from dev.common.flags import with_older, with_values
from dev.features.devices import address_of
from dev.features.feature import Feature, Flag, Pair
from train_gpt2 import UserError, batch_table, carve, pack_batch, replace_file, to_float

# Methods of the model that a report names
PARTS = ("forward_pass", "embedding_forward", "layer_forward", "loss_pass", "head_forward",
         "loss_forward", "head_backward", "backward_pass", "layer_backward", "embedding_backward")
LARGEST = 5  # how many tensors a report of an outlier names
BESIDE = "--device", "--dtype", "--plain", "--graph", "--recompute"  # that --replay may have


def bad_place(array):
    """The index of the first number that is not finite in an array of a device or the host; or
    None. In fp32 and bf16 its exponent is all ones."""
    ones = {2: 0x7F80, 4: 0x7F800000}[array.itemsize]
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    for start in range(0, bits.size, 2**24):  # in parts: a GPU may have no memory for more logits
        bad = (bits[start : start + 2**24] & ones) == ones
        if bool(bad.any()):
            return np.unravel_index(start + int(bad.argmax()), array.shape)
    return None


class Found(Exception):
    """A number is not finite. The message names what wrote it."""


class Watch:
    """Context manager: the model's device raises Found after a kernel or product that writes a
    number that is not finite."""

    def __init__(self, model):
        self.model, self.part, self.stack = model, "", contextlib.ExitStack()

    def __enter__(self):
        from unittest import mock  # takes 10 ms, which a run without an error need not wait for
        model, device = self.model, self.model.device
        launch, matmul = device.launch, device.matmul

        def watched_launch(name, items, *args, **keywords):
            launch(name, items, *args, **keywords)
            for arg, (_, _, array, const) in zip(args, parameters_of(device.kernels[name])):
                written = array and not const and arg is not None
                if written and arg.dtype in (np.float32, device.real):
                    self.look(arg, f"kernel {name}")

        def watched_matmul(out, *args, gelu=None, **keywords):
            with mock.patch.object(device, "launch", launch):  # of its own kernels, if it has some
                matmul(out, *args, gelu=gelu, **keywords)
            for array in (out, gelu):
                if array is not None:
                    self.look(array, "a matrix product")

        for name, method in (("launch", watched_launch), ("matmul", watched_matmul)):
            self.stack.enter_context(mock.patch.object(device, name, method))
        for name in PARTS:
            method = self.within(name, getattr(model, name))
            self.stack.enter_context(mock.patch.object(model, name, method))
        return self

    def __exit__(self, *exception):
        self.stack.close()

    def within(self, name, method):
        """The method; while it runs, self.part names it."""
        def called(*args, **keywords):
            before = self.part
            self.part = f"{name}, layer {args[0]}" if name.startswith("layer") else name
            result = method(*args, **keywords)
            self.part = before  # a part may call another
            return result
        return called

    def look(self, array, writer):
        """Raise Found if an array that was just written has a number that is not finite."""
        at = bad_place(array)
        if at is None:
            return
        place = np.ravel_multi_index(at, array.shape)
        value = to_float(self.model.device.get(array.reshape(-1)[place:][:1]))[0]
        T, token = self.model.BT[1], ""
        if len(array) == math.prod(self.model.BT):
            token = f" (token {at[0] % T} of sequence {at[0] // T})"
        raise Found(f"{value} in {self.name_of(array)}[{', '.join(map(str, at))}]{token}, which "
                    f"{writer} wrote in {self.part}")

    def name_of(self, array):
        """The name of the tensor whose memory an array is in."""
        model = self.model
        for prefix, views in (("", model.params), ("d", model.grads), ("", model.acts),
                              ("", model.back), ("", model.adam)):
            for name, whole in vars(views).items():
                if 0 <= address_of(array) - address_of(whole) < whole.nbytes:
                    return prefix + name
        return "a tensor without a name"


def repeat(model, batches):
    """Repeat the forward and backward passes of a step's micro-batches with the present parameters.
    Returns a report of the first number that is not finite, or None."""
    for row in model.config.parameter_table():
        at = bad_place(getattr(model.params, row.name))
        if at is not None:
            return (f"the parameter {row.name} is not finite at {[int(x) for x in at]}, before "
                    "this step")
    for name in ("activations", "backward", "gradients"):
        model.device.zero(model.arenas[name])  # nothing is left of the failed step
    model.device.zero(model.adam.verdict[:2])  # except whether updates are stopped
    model.micros = len(batches)
    model.sharing = model.count
    try:
        for model.micro, batch in enumerate(batches):
            model.set_batch(batch)
            with Watch(model):
                model.forward_pass()
                model.loss_pass(with_gradient=True)
                model.backward_pass()
    except Found as e:
        return f"the first number that is not finite is {e}; micro-batch {model.micro}"
    finally:
        model.micro, model.micros, model.sharing = 0, 1, 1
    return None


def largest_gradients(model):
    """[(norm, name)] of all parameters' gradients, layer by layer, the largest first; norms are
    float64."""
    norms = []
    for row in model.config.parameter_table():
        gradient = getattr(model.grads, row.name)
        for l in range(max(1, row.layers)):
            part = model.device.get(gradient[l] if row.layers else gradient)
            norms.append((float(np.linalg.norm(part.reshape(-1).astype(np.float64))),
                          f"d{row.name}" + f" of layer {l}" * (row.layers > 0)))
    return sorted(norms, reverse=True)


def describe(model, packed, places, stopped):
    """(a line that says why a step is not finite, or what is large in an outlier; whether a place
    was found)."""
    bad = repeat(model, packed)
    if bad:
        return f"{bad}; batches: {'; '.join(places)}", True
    norms = largest_gradients(model)
    total = math.sqrt(sum(norm**2 for norm, _ in norms))
    text = ", ".join(f"{name} {norm:.3g}" for norm, name in norms[:LARGEST])
    finite = "repeated, every number of the step is finite, and " if stopped else ""
    overflows = total > math.sqrt(np.finfo(np.float32).max)
    large = ", whose square overflows fp32" if overflows else ""
    return (f"{finite}the gradient's norm is {total:.4g}{large}, of which {text}; batches: "
            f"{'; '.join(places)}"), False


class Explained:
    """Training that says why a step was not finite, or what is large in an outlier.
    dev/features/outliers.py calls explain_outlier."""
    share = ""  # which part of an outlier's batch is examined, if not all

    def make_model(self):
        for name, values in read_parameters(self.name, self.config) if self.from_file else ():
            at = bad_place(values)
            if at is not None:
                self.say(f"WARNING: {self.name}: the parameter {name} is not finite at "
                         f"{[int(x) for x in at]}: no step will make an update")
        return super().make_model()

    def explain_outlier(self, queued, scores):
        """Say what is large in a step whose update was skipped. scores: its z-scores, as text."""
        step, batches = self.model.step, queued.batches  # the next step may be done already
        try:
            text, _ = describe(self.model, batches.packed, batches.places, False)
            self.say(f"outlier      | {scores}; repeated with the weights after step {step}"
                     f"{self.share}: {text}")
        except (MemoryError, *self.device.Fault) as e:  # no reason to end a run
            self.say(f"WARNING: no look at the outlier ({type(e).__name__}); batches: "
                     f"{'; '.join(batches.places)}")

    def give_up(self, queued, verdict):
        self.model.step = queued.number - 1  # later steps have made no update
        reports = self.reports(queued)
        speaker = next((rank for rank, (_, found) in enumerate(reports) if found), 0)
        raise UserError(f"the loss of step {queued.number} is {verdict.loss} and the norm of its "
                        f"gradient {verdict.norm}: {self.said_by(speaker)}{reports[speaker][0]}; "
                        f"{self.advice(queued, speaker)}")

    def reports(self, queued):
        """[what describe() returns for the step], for each rank."""
        return [describe(self.model, queued.batches.packed, queued.batches.places, True)]

    def said_by(self, speaker):
        """How a rank's report begins; with several ranks, "on rank 1, "."""
        return ""

    def advice(self, queued, speaker):
        """What to do, after the report of the rank `speaker`. All ranks call this."""
        return "try a smaller -l, or look at the data"


class ExplainedAndKept:
    """Writes the step to the folder, for --replay."""

    def advice(self, queued, speaker):
        folder, step, batches = self.folder, self.model.step, queued.batches
        path = folder.path / f"replay_{step:08d}.npz"
        if self.rank == speaker:
            notes = dict(model=folder.file("model", step).name, step=step, places=batches.places,
                         flags=self.settled(), **self.state(self.model))
            file, table = io.BytesIO(), batch_table(*batches.packed[0][1])
            views = [carve(data, table) for data, _ in batches.packed]
            tokens, targets = ([getattr(view, name) for view in views]
                               for name in ("tokens", "targets"))
            np.savez(file, notes=json.dumps(notes), tokens=np.stack(tokens),
                     targets=np.stack(targets))
            replace_file(path, [file.getvalue()])
        return f"{super().advice(queued, speaker)}; --replay {path} shows this again"


class RanksExplained:
    """With several ranks, each looks at its own batches, and the first that finds something reports
    it."""
    share = ", in rank 0's part of the batch"

    def give_up(self, queued, verdict):
        self.ranks.exchange(None, "a look at the step")  # from here on it may take longer
        super().give_up(queued, verdict)

    def explain_outlier(self, queued, scores):
        self.ranks.exchange(None, "a look at the step")
        super().explain_outlier(queued, scores)

    def reports(self, queued):
        return self.ranks.exchange(*super().reports(queued), "a look at the step")

    def said_by(self, speaker):
        return f"on rank {speaker}, "

    def advice(self, queued, speaker):
        advice = super().advice(queued, speaker)
        self.ranks.exchange(None, "its file")  # which the speaker has written by now
        return advice


def replay(flags, table, attach):
    """--replay: repeat the step of a file, and say what is wrong. table: all Flags; attach(flags)
    gives the classes of the training and the model. Returns the exit status."""
    for flag in table:
        if getattr(flags, flag.key) is not None and flag.name not in (*BESIDE, "--replay"):
            raise UserError(f"--replay: the step has its run's {flag.name}: expected none beside, "
                            f"only {', '.join(BESIDE)}")
    try:
        with np.load(flags.replay) as file:
            notes = json.loads(str(file["notes"]))
            tokens, targets = file["tokens"], file["targets"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        what = getattr(e, "strerror", None) or "it is no such file"
        raise UserError(f"--replay {flags.replay}: could not be read ({what}); expected a "
                        "replay_*.npz, of a run with -o whose loss was no longer a "
                        "number") from None
    # earlier versions kept four of them, among the notes
    before = with_older(notes.get("flags", notes), table)
    own = dict(model=str(Path(flags.replay).parent / notes["model"]),
               batch_size=tokens.shape[1], seq_len=tokens.shape[2])
    own |= {flag.key: None for flag in table if not flag.replayed}
    left_open = {name for name, value in vars(flags).items() if value is None}
    restored = {name: before[name] for name in left_open & before.keys()}
    Training, Model = attach(with_values(flags, **(restored | own)))
    training = Training(Model.flags)
    training.choose_model()
    training.device = training.make_device()
    model = training.make_model()
    training.set_state(model, notes)
    packed = [pack_batch(*pair) for pair in zip(tokens, targets)]
    text, _ = describe(model, packed, notes["places"], True)
    print(f"step {notes['step'] + 1}: {text}")
    return 0


FEATURE = Feature("explain", training=Explained, flags=(
    Flag(None, "--replay", "name", None, "replay a step that gave a NaN or infinity, from a run's "
         "replay_*.npz", "instead of training", after="--dry-run", may_differ=True),),
    pairs=(Pair("runs", training=ExplainedAndKept), Pair("ranks", training=RanksExplained)),
    saved=("replay",))
