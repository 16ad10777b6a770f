"""Find out what went wrong in a step: which tensor was the first with a value that is not finite, or, of an outlier,
which tensors have the largest gradients.

The trainer imports this when a step's update is skipped. It does the step once more, one kernel at a time, and looks at
what each has written. A step that is not finite is kept in the folder -o, beside the checkpoint before it, and

    python train_gpt2.py --replay out/replay_00000037.npz [--device cpu]

finds it again.
"""
import contextlib
import io
import json
import math
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np

from prepro_tinyshakespeare import UserError, replace_file, say, to_float
from train_gpt2 import batch_table, carve, make_device, pack_batch, read_parameters

PARTS = ("embedding_forward", "layer_forward", "last_norm_forward", "head_forward", "loss_forward", "mean_loss",
         "head_backward", "last_norm_backward", "layer_backward", "embedding_backward")  # methods that a report names
LARGEST = 5  # tensors of an outlier that are named


def bad_place(array):
    """The index of the first number of an array, of a device or the host, that is not finite; or None. fp32 and bf16
    that are not finite have an exponent of ones."""
    ones = {2: 0x7F80, 4: 0x7F800000}[array.itemsize]
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    for start in range(0, bits.size, 2**24):  # in parts: a GPU may have no memory for another of the size of logits
        bad = (bits[start : start + 2**24] & ones) == ones
        if bool(bad.any()):
            return np.unravel_index(start + int(bad.argmax()), array.shape)
    return None


def address(array):
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


class Found(Exception):
    """The first number that is not finite: said by whom it was written."""


class Watch:
    """While it is entered, a model's device raises Found behind the kernel or product that writes such a number."""

    def __init__(self, model):
        self.model, self.part, self.stack = model, "", contextlib.ExitStack()

    def __enter__(self):
        model, device = self.model, self.model.device
        launch, matmul = device.launch, device.matmul

        def watched_launch(name, items, *args, **keywords):
            launch(name, items, *args, **keywords)
            for arg, (*_, const) in zip(args, device.kernels[name].parameters):
                if np.ndim(arg) and not const and arg.dtype in (np.float32, device.real):
                    self.look(arg, f"kernel {name}")

        def watched_matmul(out, *args, gelu=None, **keywords):
            matmul(out, *args, gelu=gelu, **keywords)
            for array in (out, gelu):
                if array is not None:
                    self.look(array, "a matrix product")

        for name, method in (("launch", watched_launch), ("matmul", watched_matmul)):
            self.stack.enter_context(mock.patch.object(device, name, method))
        for name in PARTS:
            self.stack.enter_context(mock.patch.object(model, name, self.within(name, getattr(model, name))))
        return self

    def __exit__(self, *exception):
        self.stack.close()

    def within(self, name, method):
        """The method, which says that work is now within it."""
        def called(*args, **keywords):
            before, self.part = self.part, f"{name}, layer {args[0]}" if name.startswith("layer") else name
            result = method(*args, **keywords)
            self.part = before  # layer_backward, if it does layer_forward again
            return result
        return called

    def look(self, array, writer):
        """Raise Found if there is a number that is not finite in what was written."""
        at = bad_place(array)
        if at is None:
            return
        value = to_float(self.model.device.get(array.reshape(-1)[np.ravel_multi_index(at, array.shape) :][:1]))[0]
        T, token = self.model.shape[1], ""
        if len(array) == math.prod(self.model.shape):
            token = f" (token {at[0] % T} of sequence {at[0] // T})"
        place = ", ".join(map(str, at))
        raise Found(f"{value} in {self.name_of(array)}[{place}]{token}, which {writer} wrote in {self.part}")

    def name_of(self, array):
        """What the tensor is called whose memory an array is in."""
        model = self.model
        for prefix, views in (("", model.params), ("d", model.grads), ("", model.acts), ("", model.back),
                              ("", model.adam)):
            for name, whole in vars(views).items():
                if 0 <= address(array) - address(whole) < whole.nbytes:
                    return prefix + name
        return "a tensor without a name"


def repeat(model, batches):
    """Do the forward and backward passes of a step's micro-batches again, from the parameters as they are. Returns what
    there is to say of the first number that is not finite, or None."""
    for row in model.config.parameter_table():
        at = bad_place(getattr(model.params, row.name))
        if at is not None:
            return f"the parameter {row.name} is not finite at {[int(x) for x in at]}, before this step"
    for name in ("activations", "backward", "gradients"):
        model.device.zero(model.arenas[name])  # no number of the step that failed is left
    model.device.zero(model.adam.verdict[:4])  # but for whether updates are stopped
    model.micros = len(batches) * model.ranks.count
    try:
        for micro, batch in enumerate(batches):
            model.set_batch(batch)
            with Watch(model):
                model.forward_pass()
                model.backward_pass(micro)
    except Found as e:
        return f"the first number that is not finite is {e}; micro-batch {micro}"
    finally:
        model.micros = 1
    return None


def largest_gradients(model):
    """[(norm, name)] of the gradients of all parameters, layer by layer, the largest first; norms in float64."""
    norms = []
    for row in model.config.parameter_table():
        gradient = getattr(model.grads, row.name)
        for l in range(max(1, row.layers)):
            part = model.device.get(gradient[l] if row.layers else gradient)
            norms.append((float(np.linalg.norm(part.reshape(-1).astype(np.float64))),
                          f"d{row.name}" + f" of layer {l}" * (row.layers > 0)))
    return sorted(norms, reverse=True)


def describe(model, packed, places, stopped):
    """Why a step is not finite, or what is large in an outlier, in a line; and whether a place was found."""
    bad = repeat(model, packed)
    if bad:
        return f"{bad}; batches: {'; '.join(places)}", True
    norms = largest_gradients(model)
    total = math.sqrt(sum(norm**2 for norm, _ in norms))
    text = ", ".join(f"{name} {norm:.3g}" for norm, name in norms[:LARGEST])
    finite = "repeated, every number of the step is finite, and " if stopped else ""
    large = ", whose square overflows fp32" if total > math.sqrt(np.finfo(np.float32).max) else ""
    return f"{finite}the gradient's norm is {total:.4g}{large}, of which {text}; batches: {'; '.join(places)}", False


def explain(model, verdict, batches, flags, folder):
    """Say what is wrong with a step whose update was skipped. If it is not finite, keep its batches in the folder,
    beside the checkpoint before it, and raise UserError. Of several ranks each looks at its own batches, and the first
    that finds something speaks."""
    step, ranks = model.step, model.ranks
    ranks.exchange(None, "a look at the step")
    if not verdict.stopped:  # by now the device may have done the step that follows
        try:
            text, _ = describe(model, batches.packed, batches.places, False)
            part = ", in rank 0's part of the batch" * (ranks.count > 1)
            say(f"outlier      | z-scores: loss {verdict.loss_z:.2f}, norm {verdict.norm_z:.2f}; repeated with the "
                f"weights after step {step}{part}: {text}")
        except (MemoryError, *model.device.Fault) as e:  # no reason to end a run whose numbers are all finite
            say(f"WARNING: no look at the outlier ({type(e).__name__}); batches: {'; '.join(batches.places)}")
        return
    advice = "try a smaller -l, or look at the data"
    reports = ranks.exchange(describe(model, batches.packed, batches.places, True), "a look at the step")
    speaker = next((rank for rank, (_, found) in enumerate(reports) if found), 0)
    text = f"on rank {speaker}, " * (ranks.count > 1) + reports[speaker][0]
    if folder:
        path = folder.path / f"replay_{step:08d}.npz"
        notes = dict(model=folder.file(0, step).name, step=step, places=batches.places, attention=flags.attention,
                     dtype=flags.dtype, recompute=flags.recompute, moments=flags.moments,
                     scales=model.device.state())
        file, table = io.BytesIO(), batch_table(*batches.packed[0][1])
        views = [carve(data, table) for data, _ in batches.packed]
        np.savez(file, notes=json.dumps(notes), tokens=np.stack([batch.tokens for batch in views]),
                 targets=np.stack([batch.targets for batch in views]))
        if ranks.rank == speaker:
            replace_file(path, [file.getvalue()])
        ranks.exchange(None, "its file")
        advice += f"; --replay {path} shows this again"
    raise UserError(f"the loss of step {step + 1} is {verdict.loss} and the norm of its gradient {verdict.norm}: "
                    f"{text}; {advice}")


def replay(path, architecture, flags, place):
    """What --replay does: repeat the step of such a file, and say what is wrong. Returns the exit status."""
    try:
        with np.load(path) as file:
            notes, tokens, targets = json.loads(str(file["notes"])), file["tokens"], file["targets"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as e:
        what = getattr(e, "strerror", None) or "it is no such file"
        raise UserError(f"--replay {path}: could not be read ({what}); expected a replay_*.npz, of a run with -o whose "
                        "loss was no longer a number") from None
    checkpoint = Path(path).parent / notes["model"]
    c = architecture.Config.from_file(checkpoint)
    device = make_device(place, flags.dtype or notes["dtype"], c, flags.plain, flags.graph,
                         moments=flags.moments or notes.get("moments", "fp32"))  # as the run, to take no more memory
    model = architecture(c, device, *tokens.shape[1:], notes["attention"], notes["recompute"])
    model.set_parameters(read_parameters(checkpoint, c))
    device.go_on(notes.get("scales", []))
    text, _ = describe(model, [pack_batch(*pair) for pair in zip(tokens, targets)], notes["places"], True)
    print(f"step {notes['step'] + 1}: {text}")
    return 0
