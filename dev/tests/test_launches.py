"""Test what decides whether a GPU that is not here can run a training step, and programs that run
as on such a GPU."""
import contextlib
import dataclasses
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import train_gpt2
from dev.bench import launches
from dev.bench.launches import Launch, faults_of_launches, launches_of, most_tensors
from dev.common.config import Config
from dev.common.gpus import GPUS, blocks_that_fit
from dev.common.nvrtc import NotCompiled, Used, compile_cuda, has_nvrtc
from dev.cpu.emulated import Emulated
from dev.features.base import GPT2
from dev.features.fp8.fp8 import SOURCE as FP8
from dev.features.fused_biases import OUTPUT, SOURCE, FusedBiases, output_switches
from dev.features.ranks.zero import share_of
from dev.lab.bench import Bench
from dev.lab.ladder import find_ladder, parse_sizes
from dev.llama3.train_llama3 import META, Config3, Llama3
from dev.tests import capped
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.models import device_of

# As kernels.cu has them for heads of 64 channels in bf16
ARRAYS = {"attention_sizes": [128, 128, 49152, 49152], "layernorm_sizes": [384, 32, 9216]}
MODELS = [*(Config.from_descriptor(f"d{L}") for L in (1, 12, 24, 36, 48, 60, 72, 84, 200)),
          *(Config3(**sizes) for sizes in META.values()), Config3()]


def of_step(c, capability="8.6", arrays=ARRAYS, summed=False, **sizes):
    """summed: as in the default run, with the sums of fused_biases.py."""
    if summed:
        Model, sizes = type("Summed", (FusedBiases, GPT2), {}), sizes | dict(beside=[SOURCE])
    else:
        Model = Llama3 if isinstance(c, Config3) else GPT2
    return launches_of(capability, "bf16", dataclasses.replace(c, L=1), arrays, Model, **sizes)


def test_arrays_suffice(device_name):
    """In every model kernels get arrays as large as they take for granted, with few multiprocessors
    and with many."""
    gpus = "8.9", "10.0"
    for c, summed in (*(
        (c, False) for c in MODELS), *((c, True) for c in MODELS if not isinstance(c, Config3))):
        row = 2 * 3 * 2 * c.C
        arrays = ARRAYS | {"attention_sizes": [64, 128, 49152, 49152],
                           "layernorm_sizes": [512, 128, row]}
        for capability in gpus:
            for B, T in ((1, 1), (1, 65), (16, 1024)):
                made, faults = of_step(c, capability, arrays, summed, B=B, T=T)
                if faults or len(made) < 15:
                    check(f"{type(c).__name__} C={c.C} NH={c.NH} B={B} T={T} {summed=} on "
                          f"{capability}", False, faults)
    check("arrays suffice in every model", True, f"{len(MODELS)} models, {len(gpus)} GPUs")
    for c in (Config(), Config3(), Config3(tied=False)):
        for ranks in (1, 2, 3, 7, 8, 64, 1000):
            most = max(len(share_of(c.parameter_table(), SimpleNamespace(rank=rank, count=ranks)))
                       for rank in (0, 1))
            if most > most_tensors():
                check(f"{type(c).__name__}, {ranks} ranks: tensors for adamw", False, most)
    check("adamw's bisection finds every tensor, with --zero and tails too", most_tensors() == 32,
          most_tensors())


def test_arrays_too_small(device_name):
    """Each kernel that would write beyond an array, or read beyond it, is named."""
    def less(table, wanted, parts):
        """A table with a part of a row's numbers."""
        return lambda *args: [row._replace(shape=(row.size // parts,))
                              if row.name == wanted else row for row in table(*args)]

    narrow, backward = ARRAYS | {"attention_sizes": [32, 64, 1, 1]}, Config.backward_table
    tables = FusedBiases.tables.__func__

    def less_sums(parts):
        """FusedBiases.tables with a part of `sums`."""
        def smaller(cls, *args):
            found = tables(cls, *args)
            return found | {"backward": less(lambda: found["backward"], "sums", parts)()}
        return FusedBiases, "tables", classmethod(smaller)

    for what, arrays, summed, patched, wish in (
            ("tiles of 32 rows", narrow, True, (), "attention_backward_q"),
            ("tiles of 32 rows without sums", narrow, False, (), ""),
            ("a quarter of partials", ARRAYS, False,
             (Config, "backward_table", less(backward, "partials", 4)),
             "add_partials layernorm_backward matmul_backward_bias"),
            ("half of sums", ARRAYS, True, less_sums(2), ""),
            ("a quarter of sums", ARRAYS, True, less_sums(4), "attention_backward_q sum_rows"),
            ("half of gradient_norm", ARRAYS, False,
             (train_gpt2, "update_table", less(train_gpt2.update_table, "gradient_norm", 2)),
             "global_norm"),
            ("one tensor too many", ARRAYS, False, (launches, "most_tensors", lambda: 15),
             "adamw")):
        with mock.patch.object(*patched) if patched else contextlib.nullcontext():
            _, faults = of_step(Config(), "10.0", arrays, summed)
        named = sorted({fault.split(" needs ")[0] for fault in faults})
        check(f"{what}: {wish}", named == sorted(wish.split()), faults)


def test_tiles_of_32_rows(device_name):
    """kernels.cu does not compile with tiles that need more sums than the host allocates. And sizes
    that a file has for the host are read from what NVRTC makes of it."""
    text = Config.SOURCES[0].read_text("utf-8").replace("HOPPER && HP == 128 ? 8 : 4;", "2;")
    if not has_nvrtc():
        pytest.skip("tiles of 32 rows needs NVRTC, which is not installed")
    try:
        compile_cuda(text + SOURCE.read_text("utf-8"), "sm_86", [
            "-std=c++17", "-DFP32", *Config().switches(), *output_switches(OUTPUT)])
        message = ""
    except NotCompiled as e:
        message = str(e)
    check("tiles of 32 rows", "has room for the sums of blocks of at least 64 rows" in message,
          message[:200])
    _, used, arrays = compile_cuda('extern "C" { __constant__ int sizes[] = {7, 100352, -1, 0}; }\n'
                                   'extern "C" __global__ void f(int* x) { *x = '
                                   'sizes[threadIdx.x]; }', "sm_86", [])
    check("sizes for the host", (arrays, [*used]) == ({"sizes": [7, 100352, -1, 0]}, ["f"]), arrays)


# {(dtype, C, NH): the GPUs whose blocks have too little shared memory}. Of a layernorm's rows a
# block holds 6 C numbers; of wide heads, 192 rows of HS or HS + 8 numbers. A T4 has 63 KB for that,
# the others 98, 162 or 226 KB.
SMALL = {"8.6", "8.9", "12.0"}
REFUSED = {("fp32", 4160, 65): {"7.5"}, ("fp32", 5120, 40): {"7.5", *SMALL},
           ("fp32", 6944, 217): {"8.0", *SMALL},
           ("fp32", 1280, 8): SMALL, ("fp32", 2048, 8): {"8.0", *SMALL},
           ("bf16", 2048, 8): set(), ("bf16", 2560, 8): SMALL,
           ("bf16", 19328, 302): {*GPUS} - {"7.5"}}


@pytest.mark.longest
def test_wide_models(device_name):
    """A model with long rows or wide heads runs on a GPU, or is refused before anything is
    allocated, in a line that says which size and which GPU."""
    if not has_nvrtc():
        pytest.skip("wide models need NVRTC, which is not installed")
    for (dtype, C, NH), gpus in REFUSED.items():
        c, known = Config(L=1, C=C, NH=NH), {}
        for capability in [*GPUS] if "7.5" in gpus else [*GPUS][1:]:
            turing = capability == "7.5"  # whose kernels have other sizes
            if turing not in known:
                known[turing] = launches.compiled("7.5" if turing else "8.6", dtype, c)
            with mock.patch.object(launches.Noting, "empty",
                                   side_effect=lambda n: np.empty(n, np.uint8)) as allocated:
                refusal, faults = launches.verdict(capability, dtype, c, *known[turing])
            gpu = GPUS[capability].name
            name = f"{dtype} C={C} NH={NH} on the {gpu}"
            if capability in gpus:
                check(name, re.search(rf"C = {C}, NH = {NH}: .*{gpu}", refusal) and
                      not allocated.called, refusal)
            else:
                check(name, not refusal and not faults and allocated.called, refusal or faults)
    c = Config(L=1, C=5120, NH=40)
    alone = train_gpt2.Training(SimpleNamespace(plain=0, dtype="fp32"))
    alone.config, alone.choose_model = c, lambda: None
    for size, large in (("norm", {"layernorm_sizes": [512, 128, 122880]}),
                        ("forward", {"attention_sizes": [64, 128, 122880, 1024]}),
                        ("backward", {"attention_sizes": [64, 128, 1024, 122880]})):
        kind = type("Device", (launches.Noting,), dict(place="8.6", arrays=ARRAYS | large))
        with mock.patch.object(train_gpt2, "FastCuda", lambda *given, kind=kind: kind("fp32", c)):
            check_refusal(f"without dev/, {size}",
                          "C=5120.* 122,880 bytes of shared memory, and RTX 3060", alone.prepare)


def test_wide_heads(device_name):
    """Attention with heads of 256 channels, whose tiles fill a block's shared memory on an RTX
    3060, is right."""
    only = {"attention_forward", "attention_backward_q", "attention_backward_kv", "add_partials"}
    device = (Emulated("bf16", Config(C=512, NH=2), only=only)
              if device_name != "cuda" else device_of("cuda", "bf16", 512, 2))
    for name in ("attention_forward", "attention_backward"):
        ladder = find_ladder(name)
        [version] = (version for version in ladder.versions if version.trainer)
        found = Bench(ladder, device, parse_sizes("B=2,T=130,NH=2,HS=256")).check(
            version, version.choices(device)[0])
        check(f"{name}, heads of 256 channels", found.place is None, found)


def test_many_words(device_name):
    """In FP8 a vocabulary of nine million words fits the grids."""
    for c in (Config(L=1, NH=1, C=64, V=9_000_000, Vp=9_000_064), Config(L=1, NH=1, C=64)):
        sizes = dict(B=1, T=64, beside=[SOURCE, FP8])
        made, faults = launches_of("9.0", "fp8", c, ARRAYS, hopper=True, **sizes)
        names = {launch.kernel for launch in made}
        wish = {"weights_to_fp8", "transpose_fp8", "gelu_to_fp8", "gelu_backward_to_fp8",
                "classifier_to_fp8"}
        check(f"V={c.V}: FP8's kernels", names >= wish, names)
        faults += faults_of_launches("9.0", made, dict.fromkeys(names, Used(32, 0, 1024)))
        check(f"V={c.V}: grids", not faults, faults)


def test_launches_that_fail(device_name):
    """A launch is refused for its shared memory, registers, threads or grid, and passes just
    below."""
    fits, limit = Launch("f", (1,), 1024, 98 * 1024), GPUS["8.6"].of_block
    check("99 KB are there", limit == 101376)
    for what, launch, used, faults in (
            ("dynamic and static memory as large as can be", fits, Used(64, 0, 1024), 0),
            ("2,048 static bytes", fits, Used(64, 0, 2048), 1),
            ("too much dynamic memory", fits._replace(shared=limit - 1023), Used(64, 0, 1024), 1),
            ("too many registers", fits, Used(65, 0, 1024), 1),
            ("fewer threads", fits._replace(threads=512), Used(128, 0, 1024), 0),
            ("too many threads", fits._replace(threads=1056), Used(16, 0, 1024), 1),
            ("a grid too high", fits._replace(grid=(1, 65536)), Used(64, 0, 1024), 1),
            ("a grid as high as can be", fits._replace(grid=(1, 65535)), Used(64, 0, 1024), 0)):
        found = faults_of_launches("8.6", {launch}, {"f": used})
        check(what, len(found) == faults, found)
    for capability, wish in (("7.5", 1), ("8.0", 3), ("8.6",
                                                      2), ("8.9", 2), ("9.0", 4), ("12.0", 2)):
        yield f"blocks of 48 KB on {capability}", blocks_that_fit(
            GPUS[capability], Used(128, 0, 0), 128, 48 * 1024), wish, EXACT
    yield "of 1,536 threads", blocks_that_fit(GPUS["8.6"], Used(32, 0, 0), 512), 3, EXACT
    yield "16 blocks", blocks_that_fit(GPUS["8.6"], Used(32, 0, 0), 32), 16, EXACT


def test_as_on_another_gpu(device_name):
    """capped.py: the host reads the table's figures, kernels are compiled to PTX, and launches are
    checked."""
    class Device:
        compute_capability, attributes = "90", {"ClockRate": 1, "MultiProcessorCount": 132}
        mem_info = 130 * 2**30, 140 * 2**30

    device = capped.device_like(Device, "8.6")()
    found = {name: device.attributes[name] for name in ("ClockRate", "MultiProcessorCount",
                                                        "MaxSharedMemoryPerBlockOptin")}
    check("figures", (device.compute_capability, found) == ("86", {
        "ClockRate": 1, "MultiProcessorCount": 28, "MaxSharedMemoryPerBlockOptin": 101376}), found)
    check("memory", device.mem_info == (2 * 2**30, 12 * 2**30), device.mem_info)
    done = []

    class Kernel:
        shared_size_bytes, max_dynamic_shared_size_bytes = 1024, 0

        def __call__(self, *args, **options):
            done.append((args, options))

    class RawModule:
        def __init__(self, **options):
            self.options = options

        def get_function(self, name):
            from cupy.cuda import compiler
            done.append((compiler._get_arch(), compiler._get_arch_for_options_for_nvrtc("90")))
            return Kernel()

    function = capped.Module(RawModule, GPUS["8.6"], "86", code="", options=()).get_function("f")
    check("compiled to PTX", done == [("86", ("-arch=compute_86", "ptx"))], done)
    function.max_dynamic_shared_size_bytes = 100352
    check("attributes pass through", function.kernel.max_dynamic_shared_size_bytes == 100352)
    function((1,), (32,), (), shared_mem=100352)
    check("launched", done[1:] == [(((1,), (32,), ()), {"shared_mem": 100352})], done)
    check_refusal("too much", "f: a block needs 101,377 bytes of shared memory, and the RTX 3060 "
                  "has 101,376", function, (1,), (32,), (), 100353)
    check_refusal("unknown", "5.0: expected a compute capability: 7.5 .T4., 8.0", capped.capped,
                  "5.0")
