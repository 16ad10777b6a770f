"""What the CPU counts of some kernels of the lab, beside what a GPU's own counters say, by NVIDIA's
ncu.

    python -m dev.lab.counters --out FOLDER   # needs a GPU and ncu, and keeps what ncu says
    python -m dev.lab.counters --read FOLDER  # compares again, without a GPU

Each kernel runs once, at the sizes and in the blocks of dev/lab/traffic.py, in fp32. The table has
what the CPU and ncu counted, and their difference in percent. NOTES says why some differ.
"""
import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dev.common.config import Config
from dev.common.program import run_main
from dev.features.devices import make_device
from dev.lab import traffic
from dev.lab.bench import Bench
from dev.lab.ladder import find_ladder
from dev.lab.workers import sources_of
from train_gpt2 import UserError

KERNELS = (
    ("residual_forward", 3), ("permute", 1), ("unpermute", 2), ("softmax_forward", 1),
    ("softmax_forward", 3), ("layernorm_forward", 4), ("layernorm_backward", 2),
    ("encoder_backward", 1), ("matmul_backward_bias", 2), ("matmul_forward", 2),
    ("matmul_forward", 4), ("trimat_forward", 1), ("attention_forward", 3))
DTYPE, MODEL = "fp32", Config(C=768, NH=12)


def lsu(what, *kinds):
    """The counters of requests or sectors of global memory."""
    return [f"l1tex__t_{what}_pipe_lsu_mem_global_op_{kind}.sum" for kind in kinds]


def shared(*kinds):
    return [f"smsp__inst_executed_op_shared_{kind}.sum" for kind in kinds]


def turns(*kinds):
    return [f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{kind}.sum" for kind in kinds]


# what is compared, the kinds that are counted on the CPU, in shared memory?, its field, ncu's
# counters, which add up
COMPARED = (
    ("loads", ("load",), False, "requests", lsu("requests", "ld")),
    ("their sectors", ("load",), False, "cost", lsu("sectors", "ld")),
    ("stores", ("store",), False, "requests", lsu("requests", "st")),
    ("their sectors", ("store",), False, "cost", lsu("sectors", "st")),
    ("atomics", ("atomic",), False, "requests", lsu("requests", "red", "atom")),
    ("their sectors", ("atomic",), False, "cost", lsu("sectors", "red", "atom")),
    ("loads of shared memory", ("load",), True, "requests", shared("ld")),
    ("their turns", ("load",), True, "cost", turns("ld")),
    ("stores to shared memory", ("store",), True, "requests", shared("st")),
    ("their turns", ("store",), True, "cost", turns("st")),
    ("atomics in shared memory", ("atomic",), True, "requests", shared("atom")),
    ("their turns", ("atomic",), True, "cost", turns("atom")),
)
# These are only kept, to explain differences.
MORE = [*(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{kind}.sum"
          for kind in ("ld", "st", "atom")),
        *(f"smsp__inst_executed_op_global_{kind}.sum" for kind in ("ld", "st", "red", "atom")),
        *(f"l1tex__t_requests_pipe_lsu_mem_local_op_{kind}.sum" for kind in ("ld", "st")),
        *lsu("requests", "ldgsts"), *lsu("sectors", "ldgsts"),
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
        "smsp__inst_executed_op_ldgsts.sum", "smsp__inst_executed_op_ldsm.sum",
        "smsp__inst_executed.sum",
        "smsp__thread_inst_executed.sum", "smsp__sass_branch_targets_threads_divergent.sum"]
NOTES = {  # {(kernel, version): why they differ}
    ("softmax_forward", 3):
        "NVRTC unrolls the loops by 4, and lanes with fewer than 4 rounds run them apart",
    ("layernorm_backward", 2):
        "GPUs do not add floats in shared memory: each atomic is a load, and then an exchange that "
        "takes two turns and is repeated if another lane came between",
}


# ---- On a GPU


def launch(out):
    """Run each kernel once; ncu watches only that. Writes launched.json: [[kernel, version,
    [kernels launched]]]."""
    names = list(dict.fromkeys(name for name, _ in KERNELS))
    device = make_device("cuda", DTYPE, MODEL, plain=True, beside=sources_of(names))
    runtime, launched, done = device.cupy.cuda.runtime, [], []
    own_launch = device.launch

    def noted(name, *args, **options):
        launched.append(name)
        own_launch(name, *args, **options)

    device.launch = noted
    for name, number in KERNELS:
        try:
            ladder = find_ladder(name)
            version = ladder.versions[number - 1]
            bench = Bench(ladder._replace(compiled_for=""), device, traffic.sizes_of(ladder))
            work = next(bench.launches(version, traffic.choice_of(version, device)))
            work()
            device.gpu.synchronize()
            launched.clear()
            runtime.profilerStart()
            work()
            device.gpu.synchronize()
            runtime.profilerStop()
            done.append([name, number, list(launched)])
        except Exception as e:  # the others still run
            print(f"{name} {number}: {type(e).__name__}: {e}", flush=True)
    (out / "launched.json").write_text(json.dumps(done))


def known_metrics(metrics):
    """Those that this ncu knows for this GPU. The others are printed."""
    done = subprocess.run(["ncu", "--query-metrics"], capture_output=True, text=True)
    known = set(re.findall(r"^(\w+__\w+)", done.stdout, re.M))
    if not known:
        print(f"ncu --query-metrics said nothing of use: {done.stderr.strip()[:300]}")
        return metrics
    missing = [metric for metric in metrics if metric.split(".")[0] not in known]
    if missing:
        print(f"unknown to this ncu, and left out: {', '.join(missing)}")
    return [metric for metric in metrics if metric not in missing]


def profile(out):
    """Run ncu; its CSV goes to ncu.csv. Raises UserError."""
    metrics = known_metrics(list(dict.fromkeys([*(m for *_, names in COMPARED for m in names),
                                                *MORE])))
    child = [sys.executable, "-m", "dev.lab.counters", "--launch", "--out", str(out)]
    options = ["--profile-from-start", "off", "--clock-control", "none"]
    for _ in range(4):
        done = subprocess.run(["ncu", "--csv", "--print-units", "base", *options, "--log-file",
                               str(out / "ncu.csv"),
                               "--metrics", ",".join(metrics), *child], capture_output=True,
                              text=True)
        log = (out / "ncu.csv").read_text() if (out / "ncu.csv").exists() else ""
        said = done.stdout + done.stderr + log
        print(done.stdout.strip())
        if '"Kernel Name"' in said:
            break
        named = [metric for metric in metrics if metric in said or metric.split(".")[0] in said]
        print(f"ncu said: {said.strip()[-1500:]}\n{done.stderr.strip()[-1500:]}")
        if not named or len(named) == len(metrics):
            raise UserError("ncu measured nothing")
        print(f"again, without {', '.join(named)}")
        metrics = [metric for metric in metrics if metric not in named]
    try:  # by instruction, to explain differences
        subprocess.run(["ncu", *options, "-f", "-o", str(out / "by_line"), "--section",
                        "SourceCounters", *child], capture_output=True, timeout=200)
        done = subprocess.run(["ncu", "--import", str(out / "by_line.ncu-rep"), "--page", "source",
                               "--csv"], capture_output=True, text=True, timeout=100)
        (out / "by_line.csv").write_text(done.stdout)
        print(f"by_line.csv: {len(done.stdout)} characters {done.stderr.strip()[-300:]}")
    except (OSError, subprocess.SubprocessError) as e:
        print(f"no counters by instruction: {type(e).__name__}")
    (out / "by_line.ncu-rep").unlink(missing_ok=True)


# ---- Compared


def read_ncu(text):
    """[(kernel, {counter: number})] of ncu's CSV, in the order of launches: a row for each counter,
    or one for each launch."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise UserError("ncu's output has no table: there is no line that begins with \"ID\"")
    found = {}
    for row in csv.DictReader(lines[start:]):
        if not (row["ID"] or "").isdecimal():
            continue  # units
        _, numbers = found.setdefault(int(row["ID"]),
                                      (row["Kernel Name"].split("(")[0].split()[-1], {}))
        pairs = [(row["Metric Name"], row["Metric Value"])] if "Metric Name" in row else row.items()
        for name, value in pairs:
            try:
                numbers[name] = float(value.replace(",", ""))
            except (AttributeError, ValueError):
                pass
    return list(found.values())


def of_versions(launched, rows):
    """{(kernel, version): {counter: number}}: what its launches did together."""
    found, rows = {}, list(rows)
    for name, number, kernels in launched:
        total = found[name, number] = {}
        for kernel in kernels:
            while rows and rows[0][0] != kernel:
                rows.pop(0)
            for counter, x in rows.pop(0)[1].items() if rows else ():
                total[counter] = total.get(counter, 0) + x
    return found


def on_cpu(name, number):
    """{(what, kinds, in shared memory): number} of COMPARED."""
    t = traffic.traffic_of((name, number), None, DTYPE)
    return [getattr(t.total(*kinds, shared=of_shared) or traffic.traffic.NOTHING, field)
            for _, kinds, of_shared, field, _ in COMPARED]


def compare(gpu, cpu):
    """The lines of the table. gpu: as of_versions returns; cpu: {(kernel, version): as on_cpu
    returns}."""
    notes, lines = [], [f"{'kernel':28} {'':26} {'CPU':>10} {'ncu':>10} {'difference':>11}"]
    for key in cpu:
        title = f"{key[0]} {key[1]}"
        for (what, *_, counters), mine in zip(COMPARED, cpu[key]):
            theirs = [gpu.get(key, {}).get(counter) for counter in counters]
            theirs = None if all(x is None for x in theirs) else sum(x or 0 for x in theirs)
            if not mine and not theirs:
                continue
            off = "unknown" if theirs is None else "equal" if mine == theirs else (
                f"{100 * (mine / theirs - 1):+.1f}%" if theirs else "only CPU")
            lines.append(f"{title:28} {what:26} {mine:10,} "
                         f"{'-' if theirs is None else f'{theirs:,.0f}':>10} {off:>11}")
            title = ""
            if off not in ("equal", "unknown") and key in NOTES:
                notes.append(f"{key[0]} {key[1]}: {NOTES[key]}")
    return [*lines, *dict.fromkeys(notes)]


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m dev.lab.counters", allow_abbrev=False,
                                     description="Compare the traffic that the CPU counts with "
                                     "ncu's counters.")
    parser.add_argument("--out", type=Path, metavar="FOLDER",
                        help="run on the GPU, and keep what ncu says here")
    parser.add_argument("--read", type=Path, metavar="FOLDER",
                        help="compare with what ncu has said")
    parser.add_argument("--launch", action="store_true",
                        help="only run the kernels, for ncu to watch")
    flags = parser.parse_args(arguments)
    out = flags.out or flags.read
    if not out:
        raise UserError("expected --out FOLDER, or --read FOLDER")
    if flags.out:
        out.mkdir(parents=True, exist_ok=True)
    if flags.launch:
        launch(out)
        return 0
    if flags.out:
        if not shutil.which("ncu"):
            raise UserError("ncu is not in PATH: it is part of NVIDIA Nsight Compute")
        profile(out)
    try:
        launched, said = ((out / name).read_text() for name in ("launched.json", "ncu.csv"))
    except OSError as e:
        raise UserError(
            f"{e.filename}: could not be read ({e.strerror}); --out writes it") from None
    gpu = of_versions(json.loads(launched), read_ncu(said))
    cpu = {}
    for name, number in KERNELS:
        try:
            cpu[name, number] = on_cpu(name, number)
        except UserError as e:  # no g++
            print(f"{name} {number}: not counted on the CPU: {e}")
            cpu[name, number] = [0] * len(COMPARED)
    lines = compare(gpu, cpu)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    run_main(main)
