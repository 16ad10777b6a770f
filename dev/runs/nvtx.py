"""NVTX ranges for those who profile a run with Nsight Systems: for which layer and kernel a GPU is at work.

    nsys profile -t cuda,nvtx -o step python train_gpt2.py --nvtx 1 -x 5 -v 0 -s 0
    nsys stats -r nvtx_gpu_proj_trace step.nsys-rep

The trainer imports this for --nvtx 1. A range holds what is launched within it: "step 3", in it "backward_pass", in
that "layer_backward 11", and in that "matmul 768 x 3072 x 32768" or "layernorm_backward". What is recorded as a graph
is launched later, without its ranges. So kernels are launched one by one, as with --graph 0.
"""
import functools

from dev.replay import PARTS
from prepro_tinyshakespeare import UserError, say


def annotate(model):
    """Put ranges around what a model does, on a GPU. Raises UserError on a CPU."""
    if model.device.name != "cuda":
        raise UserError("--nvtx 1: ranges are for a profiler of GPUs: expected --device cuda")
    from cupy.cuda import nvtx
    put_ranges(model, nvtx)
    say("nvtx         | a range for each pass, layer and kernel (--nvtx), and so no graph (--graph 0)")


def put_ranges(model, nvtx):
    """The same with any module that has CuPy's RangePush and RangePop."""
    device = model.device
    device.graph = False

    def wrap(owner, name, title):
        """owner.name(...) is from now on within a range that is called title(...)."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def within(*args, **keywords):
            nvtx.RangePush(title(*args, **keywords))
            try:
                return method(*args, **keywords)
            finally:
                nvtx.RangePop()

        setattr(owner, name, within)

    wrap(model, "train_step", lambda *batches, **adamw: f"step {model.step + 1}")
    for name in (*PARTS, "forward_pass", "backward_pass", "update_pass"):
        wrap(model, name, lambda *args, name=name, **more: f"{name} {args[0]}" if name.startswith("layer") else name)
    wrap(device, "launch", lambda name, *args, **more: name)
    wrap(device, "matmul", lambda out, a, *args, **more: "matmul {} x {} x {}".format(*out.shape, a.shape[1]))
    wrap(device, "zero", lambda array: "memset")
    for name in ("sum", "norm", "gather") if model.ranks.count > 1 else ():
        wrap(model.ranks, name, lambda model, *layer, name=name: " ".join(["ranks", name, *map(str, layer)]))
