"""The peers of dev/bench/benchmark.py: PyTorch, used as people train with it today, and llm.c. Both
are timed over whole training steps, on the same tokens as ours."""
import math
import re
import subprocess
import time
from pathlib import Path

import numpy as np

from dev.features.data_loader import FilesLoader
from train_gpt2 import UserError

WARM_UP, STEPS = 5, 20  # of PyTorch

# ---- PyTorch


def gpt2(c, backend):
    """A module that computes GPT-2's loss with dev/bench/torch_reference.py. Each layer has its own
    tensors: if they were slices of one, their gradients would have to be copied."""
    import torch

    from dev.bench.torch_reference import GPT2, attention, fused_attention
    # The head includes the padding, which is never a target: PyTorch's users do that for speed.
    shape = GPT2(c.maxT, c.Vp, c.L, c.NH, c.C, c.Vp)
    attend = attention if backend == "naive" else fused_attention

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.names = {}
            for name, dims, kind in shape.tensors():
                whole = len(dims) == 1 or name in ("wte", "wpe")
                self.names[name] = [name] if whole else [f"{name}{l}" for l in range(c.L)]
                for each in self.names[name]:
                    mean, std = {"norm": (1, 0), "bias": (0, 0)}.get(kind, (0, 0.02))
                    values = mean + std * torch.randn(dims if whole else dims[1:])
                    self.register_parameter(each, torch.nn.Parameter(values))

        def forward(self, x, y):
            weights = {name: [getattr(self, each) for each in names]
                       for name, names in self.names.items()}
            for name in ("wte", "wpe", "lnfw", "lnfb"):
                [weights[name]] = weights[name]
            return shape.forward(weights, x, y, attend)[1]

    return Model()


def llama3(c, backend):
    """A module that computes Llama 3's loss, with transformers' model."""
    import torch
    import transformers

    from dev.bench.torch_reference import Llama, fused_attention, llama_model

    def no_mask(module, q, k, v, mask, scaling, **ignored):
        q, k = q.to(v.dtype), k.to(v.dtype)  # RoPE has left them in fp32
        return fused_attention(q, k, v, scale=scaling, enable_gqa=True).transpose(1, 2), None

    transformers.AttentionInterface.register("no_mask", no_mask)  # else it would allocate a mask
    sizes = {name: getattr(c, name) for name in Llama._fields}
    inner = llama_model(Llama(**sizes | dict(V=c.Vp))).float()
    inner.set_attn_implementation("no_mask")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x, y):
            logits = self.inner(x, use_cache=False).logits
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Model()


def torch_step(row, c, tokens, device="cuda", steps=STEPS):
    """{ms, memory, loss, version} of PyTorch's step: torch.compile in the row's mode, its
    attention, autocast to bf16, fused AdamW. The copy of each batch and the read of its loss are
    included."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        mode, backend = row.mode
        kernel = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
                  "efficient": SDPBackend.EFFICIENT_ATTENTION, "naive": SDPBackend.MATH}[backend]
        torch.manual_seed(42)
        torch.set_float32_matmul_precision("highest" if row.dtype == "fp32" else "high")
        with torch.device(device):
            model = (llama3 if hasattr(c, "ffn_multiplier") else gpt2)(c, backend)
    except ImportError as e:
        raise UserError(f"{e}: pip install -r dev/requirements.txt, or give --no-torch") from None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    compiled = torch.compile(model, mode=mode, dynamic=False)
    data = FilesLoader(tokens, row.B, row.T, c)
    x, y = (torch.empty(row.B, row.T, dtype=torch.int64, device=device) for _ in range(2))
    times, batch = [], data.next_batch()
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        for to, values in zip((x, y), batch):
            to.copy_(torch.from_numpy(values))
        autocast = torch.autocast(device, torch.bfloat16, enabled=row.dtype == "bf16")
        with sdpa_kernel([kernel]), autocast:
            loss = compiled(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        batch = data.next_batch()  # while the GPU is busy with this one
        value = loss.item()  # waits for the GPU
        times.append(time.perf_counter() - start)
    if not math.isfinite(value):
        raise UserError(f"PyTorch's loss is {value}")
    return dict(ms=1e3 * float(np.median(times[WARM_UP:])), loss=value, version=torch.__version__,
                memory=torch.cuda.max_memory_allocated() if device == "cuda" else 0)


# ---- llm.c


def build_llmc(folder):
    """Start a process that builds llm.c with its folder's run.sh. The GPU is hidden from it, so
    that the run after the build fails at once."""
    hidden = ["env", "CUDA_VISIBLE_DEVICES=", "bash", "run.sh", "none.bin", "-e", "d12"]
    return subprocess.Popen(hidden, cwd=folder, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)


def llmc_step(row, tokens, folder):
    """{ms, memory} of llm.c's step, from its folder's run.sh, which prints the median of 25."""
    script = Path(folder) / "run.sh"
    if not script.exists():
        raise UserError(f"--llmc {folder}: has no run.sh; expected the folder of a script that "
                        "builds llm.c and times TOKENS.bin -e MODEL -b B -t T")
    flags = ["-e", row.model, "-b", row.B, "-t", row.T]
    done = subprocess.run(["bash", script.resolve(), tokens, *map(str, flags)], cwd=folder,
                          text=True, capture_output=True)
    found = re.search(r": ([\d.]+) ms", done.stdout)
    if done.returncode or not found:
        said = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip()]
        raise UserError(f"run.sh failed: {said[-1].strip()[:200] if said else done.returncode}")
    log = script.with_name("log")
    text = log.read_text(errors="replace") if log.exists() else ""
    used = re.search(r"device memory usage: (\d+) MiB", text)
    return dict(ms=float(found[1]), memory=2**20 * int(used[1]) if used else None)
