"""--ema D: an exponential moving average of the weights. After each update,

    average = D * average + (1 - D) * parameters

The last steps of a training jump around a good point, and their mean is closer to it (Polyak and
Juditsky 1992). Karras et al. (2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models", section 3) measure how long the average should be. D = 0.999 averages over about the last
1,000 steps. The average starts as the run's first parameters, and is kept in fp32, from AdamW's
fp32 parameters. Training never reads it. A step without an update does not change it.

With -o it is written beside each model_*.bin as ema_*.bin, an fp32 checkpoint that -e and --sample
take. A resumed run (-y 1) reads it from there.
"""

import numpy as np

from dev.common.config import read_parameters
from dev.features.checkpoints.state_file import finite
from dev.features.feature import Feature, Flag, Pair, kernels_of
from train_gpt2 import UserError

SOURCE = kernels_of(__file__)
FILE = "ema_{:08d}.bin"


class Averaged:
    """A model with an average of its parameters, in an arena of its own."""

    @classmethod
    def tables(cls, c, device, B, T):
        return super().tables(c, device, B, T) | {"average": c.parameter_table()}

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.average = self.views("average")

    def adamw(self, parameters, low, gradients, m, v):
        super().adamw(parameters, low, gradients, m, v)
        self.add_to_average(self.flags.ema, self.adam.verdict)

    def begin_average(self):
        """Set the average to the parameters."""
        self.add_to_average(0.0, None)

    def add_to_average(self, decay, verdict):
        average, parameters, low = map(self.arenas.get, ("average", "parameters", "low bits"))
        n = average.nbytes // 4
        self.device.launch("average_parameters", n, average, parameters, low, decay, n, verdict)


class AveragedTraining:
    """A run of such a model."""

    def make_model(self):
        model = super().make_model()
        model.begin_average()
        return model


class AveragedAndKept:
    """The average in a run's folder."""

    def weights(self, model):
        return super().weights(model) | {FILE: (model.average, np.float32)}

    def set_state(self, model, notes):
        """Restore a checkpoint's average; if its run had none, start one."""
        super().set_state(model, notes)
        path = self.folder.path / FILE.format(self.folder.step)
        before = notes.get("flags", {}).get("ema")
        if path.exists():
            c = self.Model.Config.from_file(path)
            if c != model.config:
                raise UserError(f"{path}: {c}; expected {model.config}, as the model beside it has")
            tensors = finite(path, "the average of", read_parameters(path, c))
            model.set_tensors(tensors, [model.average])
        elif before is not None:
            raise UserError(f"{path}: is not there, and the run had --ema {before}: restore it")
        else:
            model.begin_average()
            self.say(f"WARNING: the average of the weights (--ema) begins after step "
                     f"{self.folder.step}: there is no {path}")


FEATURE = Feature(
    "ema", lambda flags, ranks: flags.ema is not None, Averaged, AveragedTraining,
    sources=(SOURCE,), flags=(
        Flag(None, "--ema", "fraction", None, "D: keep a moving average of the weights, ema = "
             "D*ema + (1-D)*weights after each update, and write it to -o as ema_*.bin (default: "
             "none)", "the update", needs="output", replayed=False),),
    pairs=(Pair("runs", training=AveragedAndKept),), saved=("ema",),
    excludes={"zero": "--ema --zero 1: the average is of whole parameters, and ZeRO keeps a share "
                      "of them: expected --zero 0"})
