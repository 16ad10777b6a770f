"""Measure Llama 3 on a GPU beside PyTorch: training steps, attention alone, gradients, and the loss of 300 steps.

    pip install -r requirements.txt -r dev/requirements.txt
    python -m dev.tools.benchmark_llama3                        # all of it, in about nine minutes on an H200
    python -m dev.tools.benchmark_llama3 --only 8B,attention    # some of it

Each job is a process of its own, as in dev/tools/benchmark.py: one that fails is a line and not the end. The peer is
transformers' LlamaForCausalLM, compiled, in autocast to bf16 and with fused AdamW, and without what would slow it down:
its attention has no mask in memory, its vocabulary is padded as ours is, it does not clip the gradient, as ours does,
and its loss is not read. The tokens of the steps are random, distributed as words are.
"""
import argparse
import dataclasses
import datetime
import itertools
import json
import math
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.tools.benchmark import run_job
from dev.common.bf16 import to_bf16
from dev.common.devices import make_device
from dev.features import has_gpu
from dev.llama3.train_llama3 import Config3, Llama3
from dev.memory.recompute import LlamaInside, RecomputeInside
from dev.memory.fit import Fitting
from prepro_tinyshakespeare import UserError, run
from train_gpt2 import BF16, draw_parameters, kept_as, pack_batch

TOP = Path(__file__).resolve().parents[2]
PLACE, WARM_UP, STEPS, TIMEOUT, GIB = "cuda", 5, 20, 200, 2**30  # TIMEOUT: seconds, for one process
RATE, CLIP = 3e-4, 1.0  # the learning rate, and the largest norm of a gradient


class Row(NamedTuple):
    """A configuration whose steps are timed, in bf16."""
    model: str
    B: int
    T: int
    recompute: bool
    must: str  # PyTorch's time in ours


ROWS = {"1B": Row("llama3.2:1B", 4, 2048, False, "1.10, aim 1.20"),
        "d12": Row("llama3:d12", 32, 1024, False, "1.15, aim 1.25"),
        "8B": Row("llama3.1:8B", 1, 2048, True, "a step runs")}
FEWER = 28  # layers of 8B, where all do not fit
MODES = ("cudnn", "logits"), ("flash", "logits"), ("cudnn", "labels"), ("cudnn repeated", "logits")  # see torch_step
HEADS = {"HS=128": "llama3.1:8B", "HS=64": "llama3.2:1B"}  # attention alone: both have 32 heads, 8 key-value heads
ALONE, CURVE, CURVE_STEPS = (4, 2048), (4, 256), 300  # (B,T)
BOUNDS = {"fp32": "2e-5", "tf32": "3e-3", "bf16": "a ratio of 1.6"}  # of the errors of gradients


def random_batches(V, B, T, count=4):
    """Batches (tokens, targets), each (B,T). The probability of a word is inversely proportional to its rank."""
    flat = (V ** np.random.default_rng(42).random(count * B * T + 1)).astype(np.int32)
    return list(zip(flat[:-1].reshape(count, B, T), flat[1:].reshape(count, B, T)))


def text_batches():
    """The batches of the curve: this program's own text, whose bytes are the tokens."""
    names = "README.md", "train_gpt2.py", "kernels.cu", "test_gpt2.py"
    text = np.frombuffer(b"".join((TOP / name).read_bytes() for name in names), np.uint8).astype(np.int32)
    flat = np.resize(text, CURVE_STEPS * math.prod(CURVE) + 1)
    return list(zip(flat[:-1].reshape(-1, *CURVE), flat[1:].reshape(-1, *CURVE)))


def time_steps(queue, batches):
    """ms of the median step. queue(batch) queues a step and returns a function that waits for it. As in the trainer,
    one step is always under way, so that the GPU need not wait for the host."""
    wait, times = queue(batches[0]), [time.perf_counter()]
    for i in range(1, WARM_UP + STEPS):
        before, wait = wait, queue(batches[i % len(batches)])
        before()
        times.append(time.perf_counter())
    wait()
    return 1e3 * float(np.median(np.diff(times[WARM_UP:])))


def time_kernels(work, record, between):
    """ms of the median call of work, which queues it: from the event behind one call to that behind the next."""
    events = [record()]
    for _ in range(WARM_UP + STEPS):
        work()
        events.append(record())
    events[-1].synchronize()
    return float(np.median([between(*pair) for pair in itertools.pairwise(events[WARM_UP:])]))


# ---- Ours


def fill(model):
    """Random parameters on the device: a few numbers over and over, since to draw all of 8B's would take minutes."""
    device, drawn = model.device, np.random.default_rng(42).standard_normal(2**22 - 3, dtype=np.float32)
    for row in model.config.parameter_table():
        values = drawn * np.float32(row.std) + np.float32(row.mean)
        for views in model.master:
            flat = getattr(views, row.name).reshape(-1)
            block = device.empty(values.size * flat.itemsize).view(flat.dtype)
            device.put(block, kept_as(values, flat.dtype))
            for start in range(0, flat.size, block.size):
                part = flat[start : start + block.size]
                part[...] = block[: part.size]


class FittingLlama3(Fitting, Llama3):
    """One that knows how much memory it takes."""


class RecomputingLlama3(LlamaInside, RecomputeInside, FittingLlama3):
    """As with --recompute 1."""


def ours_step(name, layers):
    """{ms, bytes of memory, loss} of a training step, with so many layers or, if that is 0, all."""
    row = ROWS[name]
    c = Config3.from_descriptor(row.model)
    c = dataclasses.replace(c, L=layers or c.L)
    device = make_device(PLACE, "bf16", c)
    Model = RecomputingLlama3 if row.recompute else FittingLlama3
    asked, free, _ = Model.memory(c, device, row.B, row.T)
    if asked > free:
        raise UserError(f"the tables ask for {asked / GIB:.2f} GiB, and {free / GIB:.2f} are free: "
                        f"{(asked - free) / GIB:.2f} are missing, {asked / free - 1:.1%}")
    model = Model(c, device, row.B, row.T)
    fill(model)

    def queue(batch):
        model.train_step(pack_batch(*batch), learning_rate=RATE, clip=CLIP)
        return device.fetch(model.adam.verdict)

    ms = time_steps(queue, random_batches(c.V, row.B, row.T))
    return dict(ms=ms, memory=device.cupy.get_default_memory_pool().total_bytes(), loss=model.report().loss)


def ours_attention(c):
    """ms of attention's forward pass, and of its backward pass."""
    device, (B, T) = make_device(PLACE, "bf16", c), ALONE
    model = Llama3(c, device, B, T)
    model.set_batch(pack_batch(np.zeros((B, T), np.int32)))
    (_, _, a), d = model.layers[0], model.back
    for array in a.qkv, d.dinp:  # dinp is dout here
        values = np.random.default_rng(42).standard_normal(array.shape, dtype=np.float32)
        device.put(array, to_bf16(values) if device.real == BF16 else values)

    events = device.cupy.cuda.get_current_stream().record, device.cupy.cuda.get_elapsed_time
    forward = partial(model.attention_forward, a.atty, a.lse, a.qkv)
    backward = partial(model.attention_backward, a.qkv, a.lse, a.atty, None)
    return time_kernels(forward, *events), time_kernels(backward, *events)


def d12(dtype, parameters):
    c = Config3.from_descriptor("llama3:d12")
    model = Llama3(c, make_device(PLACE, dtype, c), *CURVE)
    model.set_parameters(parameters.items())
    return model


# ---- PyTorch's, which is imported only behind what is ours


def shape_of(c, **others):
    """A config, as dev/tools/torch_reference.py has it."""
    from dev.tools.torch_reference import LlamaShape
    return LlamaShape(*(getattr(c, name) for name in LlamaShape._fields))._replace(**others)


def tensor(values):
    import torch
    return torch.from_numpy(values).to(PLACE, torch.int64 if values.dtype == np.int32 else None)


def fused(q, k, v, scale=None):
    from torch.nn.functional import scaled_dot_product_attention
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


def backend(attention):
    """The context in which PyTorch's attention is this one."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION if "cudnn" in attention else SDPBackend.FLASH_ATTENTION)


def torch_step(name, attention, loss):
    """As ours_step. The attention is a backend's, whose heads share key-value heads or have them repeated. The loss is
    transformers' own, of labels, or PyTorch's, of logits."""
    import torch
    import transformers
    from dev.tools.torch_reference import llama_model
    row = ROWS[name]
    c = Config3.from_descriptor(row.model)

    def attend(module, q, k, v, mask, scaling, **ignored):
        if "repeated" in attention:
            k, v = (x.repeat_interleave(c.NH // c.NKV, 1) for x in (k, v))
        return fused(q.to(v.dtype), k.to(v.dtype), v, scaling).transpose(1, 2), None  # RoPE has left q and k in fp32

    def loss_of(x, y):
        if loss == "labels":
            return model(x, labels=y, shift_labels=y, use_cache=False).loss
        return torch.nn.functional.cross_entropy(model(x, use_cache=False).logits.flatten(0, 1), y.flatten())

    torch.set_float32_matmul_precision("high")
    transformers.AttentionInterface.register("no_mask", attend)  # transformers makes masks only for names of its own
    with torch.device(PLACE):
        model = llama_model(shape_of(c, V=c.Vp)).float()
    model.set_attn_implementation("no_mask")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    compiled, value = torch.compile(loss_of, dynamic=False), None

    def queue(batch):
        nonlocal value
        with backend(attention), torch.autocast(PLACE, torch.bfloat16):
            value = compiled(*map(tensor, batch))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cuda.current_stream().record_event().synchronize

    ms = time_steps(queue, random_batches(c.V, row.B, row.T))
    return dict(ms=ms, memory=torch.cuda.max_memory_allocated(), loss=value.item())


def torch_attention(c, attention):
    """As ours_attention. Heads that are repeated are so before: neither that nor the sum of its gradients is timed."""
    import torch
    groups = c.NH if "repeated" in attention else c.NKV
    q, k, v, dout = (torch.randn(*ALONE, heads, c.C // c.NH, device=PLACE, dtype=torch.bfloat16).transpose(1, 2)
                     for heads in (c.NH, groups, groups, c.NH))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    events = (lambda: torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True)),
              lambda before, after: before.elapsed_time(after))
    with backend(attention):
        out, forward = fused(*inputs), time_kernels(partial(fused, *inputs), *events)
    return forward, time_kernels(partial(torch.autograd.grad, out, inputs, dout, retain_graph=True), *events)


def torch_loss(c, weights, batch, dtype):
    from dev.tools.torch_reference import llama_forward
    import torch
    with torch.autocast(PLACE, torch.bfloat16, enabled=dtype == "bf16"):
        return llama_forward(weights, shape_of(c), *map(tensor, batch), "softmax")[1]


def torch_gradients(c, parameters, batch, dtype):
    """{tensor: its gradient, in float64}. bf16 is autocast's."""
    import torch
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    weights = {name: tensor(values).to(torch.float64 if dtype == "float64" else torch.float32).requires_grad_()
               for name, values in unpadded(c, parameters).items()}
    torch_loss(c, weights, batch, dtype).backward()
    return {name: weight.grad.double() for name, weight in weights.items()}


def unpadded(c, tensors):
    return {name: values[: c.V] if name in c.PADDED else values for name, values in tensors.items()}


# ---- Jobs that compare both. Each returns rows of the table: what, ours, PyTorch's, the ratio, what it must be.


def attention(heads):
    c = dataclasses.replace(Config3.from_descriptor(HEADS[heads]), L=1, V=1024)
    ours, theirs = ours_attention(c), {}
    for name in "cudnn", "cudnn repeated", "flash", "flash repeated":
        try:
            theirs[name] = torch_attention(c, name)
        except RuntimeError as e:
            print(f"{name}: {e}", file=sys.stderr)  # there is no such kernel
    rows = []
    for mine, times, way in zip(ours, zip(*theirs.values()), ("forward", "backward")):
        least = min((ms for name, ms in zip(theirs, times) if "cudnn" in name), default=math.nan)
        rows.append((f"attention {way}, {heads}", f"{mine:.3f} ms", ", ".join(
            f"{name} {ms:.3f}" for name, ms in zip(theirs, times)), f"{mine / least:.2f} of cudnn", "1.4, aim 1.15"))
    return rows


def accuracy():
    """Relative errors of a batch's gradients against float64, by Frobenius norm."""
    c, batch, rows, ours = Config3.from_descriptor("llama3:d12"), text_batches()[0], [], {}
    parameters = dict(draw_parameters(c, 42))
    for dtype in BOUNDS:
        model = d12(dtype, parameters)
        model.set_batch(pack_batch(*batch))
        model.forward_pass()
        model.backward_pass()
        ours[dtype] = unpadded(c, {name: model.device.get(getattr(model.grads, name)) for name in parameters})
    truth = torch_gradients(c, parameters, batch, "float64")
    for dtype, must in BOUNDS.items():
        both = {name: tensor(values) for name, values in ours[dtype].items()}, torch_gradients(
            c, parameters, batch, dtype)
        errors = [{name: ((found[name] - value).norm() / value.norm()).item() for name, value in truth.items()}
                  for found in both]
        largest = [max((error, name) for name, error in some.items()) for some in errors]
        ratio, worst = max((errors[0][name] / errors[1][name], name) for name in truth)
        rows.append((f"largest error of a gradient, {dtype}", *(f"{error:.1e} ({name})" for error, name in largest),
                     f"at most {ratio:.2f} ({worst})", must))
    return rows


def curve():
    """The loss of each step, with the gradient clipped: ours in fp32 and bf16, PyTorch's in fp32 and in float64. Runs
    drift apart whatever their arithmetic, so what PyTorch's fp32 is from its float64 is the measure."""
    c, ours, theirs = Config3.from_descriptor("llama3:d12"), {"fp32": [], "bf16": []}, {"fp32": [], "float64": []}
    parameters = dict(draw_parameters(c, 42))
    for dtype, losses in ours.items():
        model = d12(dtype, parameters)
        for batch in text_batches():
            model.train_step(pack_batch(*batch), learning_rate=RATE, clip=CLIP)
            losses.append(model.report().loss)
    import torch
    for dtype, losses in theirs.items():
        weights = {name: tensor(values).to(getattr(torch, dtype.replace("fp", "float"))).requires_grad_()
                   for name, values in unpadded(c, parameters).items()}
        optimizer = torch.optim.AdamW(weights.values(), lr=RATE, weight_decay=0.0, fused=True)
        for batch in text_batches():
            optimizer.zero_grad()
            loss = torch_loss(c, weights, batch, dtype)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), CLIP)
            optimizer.step()
            losses.append(loss.item())

    def cell(losses):
        apart = np.abs(np.subtract(losses, theirs["float64"]))
        return (f"{np.mean(losses[-50:]):.4f}; from float64 {apart[:100].max():.1e} at most in 100 steps, "
                f"{apart.max():.1e} in all")

    last = {dtype: np.mean(losses[-50:]) for dtype, losses in theirs.items()}
    title = f"mean loss of the last 50 of {CURVE_STEPS} steps, in float64 {last['float64']:.4f}, in"
    return [(f"{title} {dtype}", cell(losses), cell(theirs["fp32"]), f"{np.mean(losses[-50:]) - last['fp32']:+.4f}",
             "0.01") for dtype, losses in ours.items()]


def step_row(name, layers, ours, theirs):
    """The row of results, or of lines that say why there are none. theirs: {mode: result}."""
    row = ROWS[name]
    cell = lambda result: result if isinstance(result, str) else (
        f"{result['ms']:.2f} ms, {1e3 * row.B * row.T / result['ms']:,.0f} tok/s, {result['memory'] / GIB:.1f} GiB")
    times = {mode: result["ms"] for mode, result in theirs.items() if not isinstance(result, str)}
    best = min(times, key=times.get, default=None)
    ratio = f"{times[best] / ours['ms']:.2f}" if best and not isinstance(ours, str) else ""
    return (f"{row.model}, {f'{layers} layers, ' * (layers > 0)}a step of B={row.B} T={row.T}", cell(ours),
            f"{cell(theirs[best])} ({', '.join(best)})" if best else "; ".join(set(theirs.values())), ratio, row.must)


def main():
    """Everything from the flags to the table. Raises UserError."""
    jobs = {job.__name__: job for job in (ours_step, torch_step, attention, accuracy, curve)}
    sections = {*ROWS, "attention", "accuracy", "curve"}
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", metavar="SECTIONS", help=f"some of {','.join(sorted(sections))} (default: all)")
    flags.add_argument("--minutes", type=float, default=9.5, help="stop a job beyond as many (default: 9.5); PyTorch's "
                       "steps come last, the first mode of each row before any second")
    flags.add_argument("--job", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if not has_gpu():
        raise UserError("NVIDIA's driver reports no GPU, and only a GPU is measured here: check nvidia-smi")
    if given.job:
        name, *arguments = json.loads(given.job)
        print(json.dumps(jobs[name](*arguments)))
        return
    only = set(given.only.split(",")) if given.only else sections
    if only - sections:
        raise UserError(f"--only {given.only}: expected some of {','.join(sorted(sections))}")
    end, rows = time.perf_counter() + 60 * given.minutes, []

    def measure(*job):
        return run_job(*job, timeout=min(TIMEOUT, end - time.perf_counter()), program=__spec__.name)

    steps = {(name, 0): measure("ours_step", name, 0) for name in ROWS if name in only}
    if isinstance(steps.get(("8B", 0)), str):
        steps["8B", FEWER] = measure("ours_step", "8B", FEWER)
    for job in [("attention", heads) for heads in HEADS] + [("accuracy",), ("curve",)]:
        if job[0] in only:
            result = measure(*job)
            rows += [(" ".join(job), result, "", "", "")] if isinstance(result, str) else result
    peers = {name: {} for name in ("1B", "d12") if name in only}
    for mode in MODES:
        for name in peers:
            peers[name][mode] = measure("torch_step", name, *mode)
    rows = [step_row(*key, ours, peers.get(key[0], {})) for key, ours in steps.items()] + rows
    gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], text=True,
                         capture_output=True).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"\n{datetime.date.today()}, {gpu}, {versions}\n")
    for row in [("", "ours", "PyTorch", "ratio", "must"), ["---"] * 5, *rows]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    run(main)
