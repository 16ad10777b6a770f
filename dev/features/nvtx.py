"""--nvtx 1: NVTX ranges, with which a profile by Nsight Systems shows layers and kernels.

    nsys profile -t cuda,nvtx -o step python train_gpt2.py --nvtx 1 -x 5 -v 0 -s 0
    nsys stats -r nvtx_gpu_proj_trace step.nsys-rep

Ranges are nested: "step 3", in it "backward_pass", in that "layer_backward 11", and in that "matmul
768 x 3072 x 32768" or "layernorm_backward". The kernels of a graph would run outside of their
ranges, so they are launched one by one, as with --graph 0.
"""
import functools

from dev.features.devices import one_by_one
from dev.features.replay import PARTS
from prepro_tinyshakespeare import UserError


def titled(name):
    """A function that gives the title of a method's range: its name, and its layer if any."""
    if name.startswith("layer"):
        return lambda model, l, *args, **more: f"{name} {l}"
    return lambda model, *args, **more: name


# {method: a function of the object and the arguments that gives the title of its range}
PASSES = "forward_pass", "backward_pass", "update_pass"
MODEL = {"train_step": lambda model, *batches, **adamw: f"step {model.step + 1}",
         **{name: titled(name) for name in (*PARTS, *PASSES)}}
DEVICE = {"launch": lambda device, name, *args, **more: name,
          "matmul": lambda device, out, a, *args, **more: "matmul {} x {} x {}".format(
              *out.shape, a.shape[1]),
          "zero": lambda device, array: "memset"}


def with_ranges(base, titles, nvtx):
    """A subclass of base with a range around each of these methods. nvtx: cupy.cuda.nvtx."""
    def within(name):
        method = getattr(base, name)

        @functools.wraps(method)
        def ranged(self, *args, **keywords):
            nvtx.RangePush(titles[name](self, *args, **keywords))
            try:
                return method(self, *args, **keywords)
            finally:
                nvtx.RangePop()

        return ranged

    return type(base.__name__, (base,), {name: within(name) for name in titles})


class Annotated:
    """Training whose model and device have ranges. Raises UserError on a CPU."""

    def device_class(self):
        if self.flags.device != "cuda":
            raise UserError("--nvtx 1: is for a GPU's profiler: expected --device cuda")
        from cupy.cuda import nvtx
        return with_ranges(one_by_one(super().device_class()), DEVICE, nvtx)

    def make_model(self):
        from cupy.cuda import nvtx
        self.Model = with_ranges(self.Model, MODEL, nvtx)
        model = super().make_model()
        self.say("nvtx         | a range for each pass, layer and kernel (--nvtx), and so no graph "
                 "(--graph 0)")
        return model
