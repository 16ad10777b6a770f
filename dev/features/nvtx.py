"""--nvtx 1: NVTX ranges, with which a profile by Nsight Systems shows layers and kernels.

    nsys profile -t cuda,nvtx -o step python train_gpt2.py --nvtx 1 -x 5 -v 0 -s 0
    nsys stats -r nvtx_gpu_proj_trace step.nsys-rep

Ranges are nested: "step 3", in it "backward_pass", in that "layer_backward 11", and in that "matmul
768 x 3072 x 32768" or "layernorm_backward". The kernels of a graph would run outside of their
ranges, so they are launched one by one, as with --graph 0.
"""
import functools

from dev.features.devices import WithoutGraphs
from dev.features.feature import Feature, Flag
from dev.features.replay import PARTS


def titled(name):
    """A function that gives the title of a method's range: its name, and its layer if any."""
    if name.startswith("layer"):
        return lambda model, l, *args, **more: f"{name} {l}"
    return lambda model, *args, **more: name


# {method: a function of the object and the arguments that gives the title of its range}
MODEL = {"train_step": lambda model, *batches, **adamw: f"step {model.step + 1}",
         **{name: titled(name) for name in (*PARTS, "update_pass")}}
DEVICE = {"launch": lambda device, name, *args, **more: name,
          "matmul": lambda device, out, a, *args, **more: "matmul {} x {} x {}".format(
              *out.shape, a.shape[1]),
          "zero": lambda device, array: "memset"}


class Ranges:
    """Mixins with a range around each of some methods are subclasses of this."""
    titles = {}

    @functools.cached_property
    def nvtx(self):
        from cupy.cuda import nvtx
        return nvtx

    def __init_subclass__(cls):
        def within(name):
            def ranged(self, *args, **keywords):
                self.nvtx.RangePush(cls.titles[name](self, *args, **keywords))
                try:
                    return getattr(super(cls, self), name)(*args, **keywords)
                finally:
                    self.nvtx.RangePop()
            return ranged

        for name in vars(cls).get("titles", ()):
            setattr(cls, name, within(name))


class RangedModel(Ranges):
    titles = MODEL


class RangedDevice(Ranges, WithoutGraphs):
    titles = DEVICE


class Annotated:
    """Training whose model and device have ranges."""

    def make_model(self):
        model = super().make_model()
        self.say("nvtx         | a range for each pass, layer and kernel (--nvtx), and so no graph "
                 "(--graph 0)")
        return model


FEATURE = Feature(
    "nvtx", lambda flags, ranks: flags.nvtx, RangedModel, Annotated, RangedDevice, flags=(
        Flag(None, "--nvtx", "switch", 0, "1: on a GPU, NVTX ranges by layer and kernel, for a "
             "profiler; implies --graph 0", "how long, and what is shown", after="--hellaswag",
             replayed=False, may_differ=True),),
    refuses=lambda flags: ("--nvtx 1: is for a GPU's profiler: expected --device cuda"
                           if flags.nvtx and flags.device != "cuda" else ""))
