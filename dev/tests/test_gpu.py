"""Test what only a GPU has, mostly without one: graphs, late reports, profiler ranges, tensor maps,
faults."""
import contextlib
import copy
import ctypes
import dataclasses
import functools
import os
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np

import train_gpt2
from dev.common import gpus
from dev.common.bf16 import master_numbers
from dev.common.config import Config
from dev.common.cuda_source import checked_kernels
from dev.common.host_memory import available_memory
from dev.data.masks import write_mask
from dev.features import devices, fit, order
from dev.features.base import GPT2, Training
from dev.features.late_reports import LateReports
from dev.features.nvtx import RangedDevice, RangedModel
from dev.llama3.train_llama3 import Llama3
from dev.tests.checks import EXACT, TINY, check, check_refusal, fast, words
from dev.tests.models import device_of, model_class, poisoned_model
from dev.tests.trainings import place_of, two_token_files
from train_gpt2 import BF16, pack_batch, read_tokens

SMALL = Config(maxT=40, V=257, L=1, NH=2, C=64, Vp=384)


@fast
def test_steps_of_a_graph(device_name, folder):
    """A step is run the first time, then recorded and launched, then only launched. It is counted
    once, before the launch, so that a Ctrl-C during the launch finds it counted."""
    done, stream = [], mock.MagicMock()
    stream.end_capture.return_value.launch = lambda: done.append("launched")
    device, graphs = mock.Mock(capturing=stream), {}
    for _ in range(4):
        train_gpt2.FastCuda.repeat(device, graphs, "shape", lambda: done.append("run"))
    check("a step is run, recorded, launched", done == ["run", "run", *["launched"] * 3], f"{done}")
    model, counted = poisoned_model(device_of(device_name, "fp32", 64, 2), 2, 20), []
    with mock.patch.object(model.device, "repeat", lambda *args: counted.append(model.step)):
        for _ in range(3):
            model.train_step(*[pack_batch(*words(257, 2, 2, 20))] * 2)
    check("steps are counted once each, before they are launched", counted == [1, 1, 2, 2, 3, 3],
          f"{counted}")


@fast
def test_late_reports(device_name, folder):
    """A step is reported after the next one has been queued, whose verdict is fetched first: a
    report may use the device."""
    done, flags = [], SimpleNamespace(val_every=0, val_batches=0, sample_tokens=0, sample_every=0)
    training = type("Late", (LateReports, Training), {})(flags)
    training.steps = 9
    training.model = SimpleNamespace(adam=SimpleNamespace(verdict="verdict"))

    def fetch(what):
        done.append(f"fetch {what}")
        return lambda: np.array([1, 2, 1, 0])

    training.device, steps = (SimpleNamespace(fetch=fetch),
                              [SimpleNamespace(number=i, begun=0.0) for i in (1, 2)])
    training.report = lambda queued, verdict: done.append((queued.number, verdict.loss))
    for queued in steps:
        training.finish(queued)
    check("reports: one step late", done == ["fetch verdict", "fetch verdict", (1, 2)], done)
    training.save = lambda *_: done.append("save")
    training.pause(3, None)
    check("reports: not for a pause without an action", done[3:] == [], done)
    training.pause(9, None)
    check("reports: before a checkpoint", done[3:] == [(2, 2), "save"], done)
    check("reports: a step's time begins when the last was reported",
          steps[1].begun > 0 == steps[0].begun, steps)


class Ranges:
    """Stands in for CuPy's nvtx, and notes every range as a tuple: the ranges around it, then its
    own name."""

    def __init__(self):
        self.open, self.all = [], []

    def RangePush(self, name):
        self.open.append(name)
        self.all.append((*self.open,))

    def RangePop(self):
        self.open.pop()


@fast
def test_profiler_ranges(device_name, folder):
    """A step has ranges for its passes, layers, kernels and products, and they change no number."""
    device, nvtx = device_of(device_name, "fp32", 64, 2), Ranges()
    plain, batch = poisoned_model(device, 2, 20, recompute=2), pack_batch(*words(257, 2, 2, 20))
    ranged = copy.copy(device)
    # Remove the tests' own recorder, which would hide the class's method.
    vars(ranged).pop("launch", None)
    ranged.__class__ = order.stack(type(device), [RangedDevice], dict(nvtx=nvtx))
    model = order.stack(type(plain), [RangedModel], dict(nvtx=nvtx))(plain.config, ranged, 2, 20)
    model.set_parameters((name, device.get(array)) for name, array in vars(plain.params).items())
    for each in (plain, model):
        each.train_step(batch)
    step = [path for path in nvtx.all if path[0] == "step 1"]
    check("ranges: all are closed", not nvtx.open and len(step) > 80, f"{nvtx.open} {len(step)}")
    passes = [path[1] for path in step if len(path) == 2]
    check("ranges: passes", passes == [
        "forward_pass", "loss_pass", "backward_pass", "update_pass"], passes)
    for l in (0, 1):
        own = [path[3] for path in step
               if path[1:3] == ("backward_pass", f"layer_backward {l}") and len(path) == 4]
        kernels = [name for name in own if not name.startswith("matmul ")]
        linear = ["matmul_backward_bias", "add_partials"]
        norm = ["layernorm_backward", "add_partials"]
        wish = [*["residual_layernorm_into"] * 2, *linear, *linear, *norm, *linear,
                "attention_backward_q", "attention_backward_kv", *linear, *norm]
        check(f"ranges: kernels of layer {l} backward", kernels == wish, kernels)
        products = [name for name in own if name.startswith("matmul ")]
        wish = ["40 x 192 x 64", "40 x 64 x 64", "40 x 256 x 64",  # the forward pass, recomputed
                "64 x 256 x 40", "40 x 256 x 64", "256 x 64 x 40", "40 x 64 x 256", "64 x 64 x 40",
                "40 x 64 x 64",
                "192 x 64 x 40", "40 x 64 x 192"]
        check(f"ranges: products of layer {l} backward", products == [f"matmul {x}" for x in wish],
              products)
    with mock.patch.object(ranged, "kernels", {}):
        check_refusal("ranges", "no kernel encoder_forward", model.train_step, batch)
    check("ranges: closed behind an error", not nvtx.open, nvtx.open)
    yield "parameters with ranges", master_numbers(model), master_numbers(plain), EXACT

    for name, feature in (("ranges", RangedDevice), ("--graph 0", devices.NO_GRAPH.device)):
        kind, work = order.stack(train_gpt2.FastCuda, [feature]), mock.Mock()
        for _ in range(3):
            kind.repeat(mock.Mock(), {}, "shape", work)
        check(f"{name}: no graph", work.call_count == 3, work.call_count)


@fast
def test_models_too_large(device_name, folder):
    """A model that does not fit on the device is refused before anything is allocated, with the
    right advice."""
    device = device_of(device_name, "fp32", 64, 2)
    c = dataclasses.replace(SMALL, L=24)

    def allocate(nbytes):
        raise AssertionError("allocated before it was refused")

    Model, Recomputing = model_class(GPT2), model_class(GPT2, "--recompute", "2")

    def tables(Model, B):
        return Model.memory(c, device, B, 40)[0]

    sizes = device.attention_sizes
    with mock.patch.object(device, "empty", allocate):
        wider = dataclasses.replace(c, C=128)
        check_refusal("model", r"\(?.*-DCHANNELS=64.*-DCHANNELS=128", Model, wider, device, 1, 1)
        check_refusal("model", "-t 41: .* at most maxT = 40", Model, c, device, 1, 41)
        for shared in (sizes.shared_forward, sizes.shared_backward):
            with mock.patch.object(device, "max_shared", shared - 1):
                check_refusal("model", "C = 64, NH = 2: .* shared memory.*smaller heads", Model, c,
                              device, 1, 1)
        room = tables(Model, 3)
        for free, B, wish in ((room, 4, r"the largest -b that fits is 3\b.* --recompute 2"),
                              (room, 50, r"the largest -b that fits is 3\b"),
                              (tables(Model, 4) - 1, 4, r"the largest -b that fits is 3\b"),
                              (tables(Recomputing, 1) - 1, 1,
                               "(not even -b 1|is 0).* choose a smaller -t or -e")):
            with mock.patch.object(fit, "free_bytes", lambda device, free=free: free):
                check_refusal(f"model of -b {B}", wish, Model, c, device, B, 40)
    with mock.patch.object(fit, "free_bytes", lambda device: room):
        model = Model(c, device, 3, 40)
    found = sum(arena.nbytes for arena in model.arenas.values())
    yield "bytes that a model takes, as foretold", found, room, EXACT
    for moments, recompute, wish in (("fp32", 0,
                                      12.5), ("fp32", 1, 9.5), ("fp32", 2, 6.0), ("bf16", 2, 5.5)):
        bf16 = SimpleNamespace(real=BF16, name="cpu")
        Model = model_class(GPT2, "--moments", moments, "--recompute", f"{recompute}")
        found, *_ = Model.memory(Config(), bf16, 32, 1024)
        check(f"124M, B=32, --recompute {recompute}", found <= wish * 2**30,
              f"{found / 2**30:.2f} <= {wish} GiB")


# What Linux says in a container with a limit of 3,000 MB, of which 1,000 are used, 400 of these by
# files that it can drop: with cgroup v2, then v1. {path: text}
MACHINE = {"proc/meminfo": "MemTotal: 64000000 kB\nMemAvailable: 48828125 kB\n"}  # 50,000 MB
STAT = "anon 600000000\ninactive_file 300000000\nactive_file 100000000\n" \
       "total_inactive_file 300000000\n" \
    "total_active_file 100000000\nfile 900000000\n"
UNLIMITED = f"{2**63 - 4096}\n"


def group(version, folder, limit, used, stat=STAT):
    """The files of a control group."""
    top, names = {2: ("sys/fs/cgroup", ("memory.max", "memory.current")),
                  1: ("sys/fs/cgroup/memory",
                      ("memory.limit_in_bytes", "memory.usage_in_bytes"))}[version]
    values = zip((*names, "memory.stat"), (limit, used, stat))
    return {f"{top}{folder}/{name}": f"{value}\n" for name, value in values}


def test_memory_of_a_container(device_name, folder):
    """The limit of a container, of a job within a group, and of `ulimit -v` count as the machine's
    memory does."""
    here_2, here_1 = ({"proc/self/cgroup": "0::/\n"},
                      {"proc/self/cgroup": "5:cpu:/x\n4:memory,hugetlb:/docker/ab:c\n"})
    inner = {"proc/self/cgroup": "1:name=systemd:/job\n0::/job/step\n"}
    MB = 10**6
    for i, (what, files, wish) in enumerate((
            ("no control groups", {}, 50000),
            ("v2", here_2 | group(2, "", 3000 * MB, 1000 * MB), 2400),
            ("v2, no limit", here_2 | group(2, "", "max", 1000 * MB), 50000),
            ("v2, the machine has less", here_2 | group(2, "", 90000 * MB, 1000 * MB), 50000),
            ("v2, all of it used", here_2 | group(2, "", 3000 * MB, 3500 * MB), 0),
            ("v2, nothing to drop", here_2 | group(2, "", 3000 * MB, 1000 * MB, "anon 1"), 2000),
            ("v2, a job's step", inner | group(2, "/job", 3000 * MB, 1000 * MB)
             | group(2, "/job/step", 2000 * MB, 800 * MB), 1600),
            ("v2, the step has no limit", inner | group(2, "/job", 3000 * MB, 1000 * MB)
             | group(2, "/job/step", "max", 800 * MB), 2400),
            ("v1", here_1 | group(1, "/docker/ab:c", 3000 * MB, 1000 * MB) |
             group(1, "", UNLIMITED, 9000 * MB), 2400),
            ("v1, the host's names", here_1 | group(1, "", 3000 * MB, 1000 * MB), 2400),
            ("v1, no limit", here_1 | group(1, "", UNLIMITED, 1000 * MB), 50000),
            ("v1 and v2", {"proc/self/cgroup": "4:memory:/a\n0::/b\n"} |
             group(1, "/a", 3000 * MB, 1000 * MB), 2400))):
        root = folder / f"{i}"
        for path, text in (MACHINE | files).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        yield what, available_memory(root), wish * MB, EXACT
    (root / "proc/self/statm").write_text("1000 5 5 5 0 5 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    with mock.patch("resource.getrlimit", return_value=(2**29 + 2000 * page, 2**30)), \
            mock.patch("os.cpu_count", return_value=2):
        yield "ulimit -v", available_memory(root), 1000 * page, EXACT

    cpu = SimpleNamespace(name="cpu")
    with mock.patch.object(fit, "available_memory", lambda: available_memory(folder / "1")):
        yield "what a model's tables may have", fit.free_bytes(cpu), 2400 * MB - 2**28, EXACT
    script = "from dev.common.host_memory import available_memory; print(available_memory())"
    limit = 2**20 + os.cpu_count() * 2**18  # in KiB
    done = subprocess.run(["sh", "-c", f"ulimit -v {limit}; {shlex.quote(sys.executable)} -c "
                           f"'{script}'"], capture_output=True, text=True)
    check(f"a process with ulimit -v {limit}", 2**29 < int(done.stdout or 0) < 2**30,
          done.stdout + done.stderr)


@fast
def test_tensor_maps_of_a_gpu(device_name, folder):
    """cuTensorMapEncodeTiled gets the arguments that its documentation asks for, and its result
    goes to a kernel by value, which in CuPy is an array of one number. It is made once, and only
    where kernels.cu uses it."""
    asked = []

    class Driver:
        def cuTensorMapEncodeTiled(self, at, *arguments):
            asked.append([*(x.value if hasattr(x, "value") else list(x)
                            if hasattr(x, "__len__") else x for x in arguments)])
            ctypes.memset(at, 7, 128)
            asked[-1].append(at.value % 64)
            return status

    B, T, HS, heads, status = 3, 5, 80, 9, 0
    array = SimpleNamespace(data=SimpleNamespace(ptr=4096), shape=(B * T, heads * HS))
    device = mock.Mock(maps={}, hopper=False, HS=HS, kernels=checked_kernels(Config.SOURCES),
                       AVOID="")
    device.tensor_map = functools.partial(train_gpt2.FastCuda.tensor_map, device)
    arguments = "atty", "lse", array, 0.1, T, 3  # for attention_forward
    given = train_gpt2.FastCuda.with_tensor_maps(device, "attention_forward", arguments)
    check("without a use, the array itself", given is arguments and not asked)
    device.hopper = True
    with mock.patch("ctypes.CDLL", return_value=Driver()):
        made, others = [], []
        for _ in range(2):
            *before, one, scale, same_T, NH = train_gpt2.FastCuda.with_tensor_maps(
                device, "attention_forward", arguments)
            made.append(one)
            others.append((*before, array, scale, same_T, NH))
    check("other arguments stay", others == [arguments] * 2)
    yield "one number", [made[0].size, made[0].nbytes, made[0].ctypes.data % 64], [1, 128, 0], EXACT
    yield "the same again", made[1].ctypes.data, made[0].ctypes.data, EXACT
    yield "its bytes", made[0].view(np.uint8), 7, EXACT
    # bf16, 4 dimensions, address; sizes; strides in bytes; a box of 64 x 64; every element; swizzle
    # 3 of 128 bytes
    wish = [9, 4, 4096, [80, 9, 5, 3], [160, 1440, 7200], [64, 1, 64, 1], [1, 1, 1, 1], 0, 3, 2, 0,
            0]
    check("asked once, for a box of 64 tokens and channels", asked == [wish], asked)
    device.maps, status = {}, 1
    with mock.patch("ctypes.CDLL", return_value=Driver()):
        check_refusal("GPU", r"cuTensorMapEncodeTiled failed with status 1: T=5, \(15, 720\)",
                      device.tensor_map, array, T, 64)


class Compiled(Exception):
    """Instead of compiling: (files, flags)."""


@fast
def test_files_of_a_run(device_name, folder):
    """A run asks the compiled module for every kernel of its files by name, so each has to be there
    after the preprocessor, on whatever GPU, with whatever heads."""
    def begin(self, dtype, c, beside=()):
        self.capability, self.dtype, self.compiled_for = gpu, dtype or "bf16", c.switches()
        self.HS = c.C // c.NH
        self.real = np.float32 if dtype in ("fp32", "tf32") else BF16
        self.sources = [*c.SOURCES, *beside]
        self.all_sources = [*self.sources]  # samples' kernels, too, which are compiled later
        self.compile([train_gpt2.KERNELS])

    def compile(self, sources):
        raise Compiled(self.all_sources, self.switches())

    gpt2, llama = (GPT2, "d12"), (Llama3, "llama3.2:3B")  # heads of 64, and of 128
    runs = [(*of, gpu, dtype, more) for of in (gpt2, llama) for gpu in (80, 90)
            for dtype in ("fp32", "bf16", "fp8") for more in ([], [
                "--moments", "bf16", "--ema", "0.9", "-sl", "5"], ["--label-smoothing", "0.1"], [
                    "--dropout", "0.1", "--mask", "1"])]
    runs += [(*of, 90, dtype, ["--optimizer", "muon"])
             for of, dtype in ((gpt2, "bf16"), (llama, "fp8"))]
    tokens = f"{folder}/tokens.bin"
    two_token_files(folder)
    write_mask(tokens, np.array(read_tokens(tokens, 257)), np.ones(200))
    files = set()
    for Model, model, gpu, dtype, more in runs:
        with mock.patch.multiple(devices.Beside, __init__=begin, compile=compile), \
                mock.patch.object(gpus, "capability", return_value=gpu):
            try:
                order.main(["--device", "cuda", "-e", model, "--dtype", dtype, *more,
                            *["-o", f"{folder}/run"] * ("--ema" in more),
                            *["-i", tokens, "-j", tokens] * ("--mask" in more)], Model)
            except Compiled as e:
                sources, flags = e.args
        code = "".join(path.read_text("utf-8") for path in sources)
        flags = [flag for flag in flags if flag[:2] in ("-D", "-I")]
        done = subprocess.run(["g++", "-E", "-P", "-x", "c++", *flags, "-"], input=code,
                              capture_output=True, text=True, check=True)
        found = re.findall(r"__global__ void\s+(?:__launch_bounds__\(.*?\)\s*)?(\w+)\(",
                           done.stdout)
        missing = {*checked_kernels(sources)} - {*found}
        check(f"each kernel is compiled: {model} {gpu} {dtype} {' '.join(more)}",
              found and not missing, missing)
        files |= {path.name for path in sources}
    wish = {"kernels.cu", "llama3.cu", "hopper.cuh", "attention_five.cu",
            "attention_pipeline.cu", "gelu_products.cu", "fp8.cu", "fp8_gelu.cu", "moments.cu",
            "ema.cu", "outliers.cu", "label_smoothing.cu", "fused_biases.cu", "dropout.cu",
            "masked.cu", "kv_cache.cu", "turns.cuh", "muon.cu", "symmetric.cu",
            "swiglu_products.cu", "documents.cu"}
    check("all files were there", files == wish, files ^ wish)


@fast
def test_faults_of_a_gpu(device_name, folder):
    """The error after a fault on the GPU names the kernel."""
    device = device_of(device_name, "fp32", 64, 2)
    two_token_files(folder)

    class Broken(Exception):
        pass

    def launch(name, *args, **keywords):
        type(device).launch(device, name, *args, **keywords)
        device.last_kernel = name
        if name == "global_norm":
            raise Broken("an illegal address")

    arguments = ["--device", place_of(device_name), "--plain", "1", "-e", TINY, "-b", "2",
                 "-t", "8", "-x", "3",
                 "-v", "0", "-s", "0", "-i", folder / "tokens.bin", "-j", folder / "tokens.bin",
                 "-o", folder / "fault"]
    with (contextlib.redirect_stdout(None), mock.patch.object(Training, "make_device",
                                                              return_value=device),
          mock.patch.multiple(device, create=True, launch=launch, last_kernel=None, Fault=Broken)):
        check_refusal("GPU", r"the GPU stopped \(an illegal address\) at global_norm or before",
                      order.main, [str(argument) for argument in arguments])
