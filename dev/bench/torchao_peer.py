"""How fast does PyTorch train in FP8? Time steps with torchao's float8 training, and beside them
PyTorch in bf16 and ours in FP8, on one GPU.

    python -m dev.bench.torchao_peer                    # 124M at B=32, and 1558M at B=8
    python -m dev.bench.torchao_peer --rows 1558M --recipes rowwise

Needs torchao: pip install -r dev/requirements.txt. Without a network, unpack its wheel, and name
that folder in PYTHONPATH; the wheel's libraries (.so) are not needed.

PyTorch's step is the one of dev/bench/benchmark.py: the same model, tokens, autocast to bf16,
torch.compile and fused AdamW. convert_to_float8_training then takes the place of all four linear
layers of each block, with one of torchao's recipes:

    rowwise      a scale for each row of a factor
    tensorwise   a scale for each tensor

Both find scales from the tensor itself, and do all three products of a layer in FP8. The head stays
in bf16, as torchao recommends. Each run is a process of its own, in this order; its time is the
median of its steps.
"""
import importlib.util
import tempfile
import time

from dev.bench.benchmark import FIRST, check_gpu, chosen, run_job, tokens_of
from dev.common.flags import parse_flags
from prepro_tinyshakespeare import UserError, run_main

ROWS = [row for row in FIRST if row[:3] in (("d12", "bf16", 32), ("d48", "bf16", 8))]
RECIPES = "rowwise", "tensorwise"
TIMEOUT = 300  # seconds, for one process

FLAGS = [
    (None, "--rows", str, "", "only rows whose name matches this regular expression, of "
     f"{'; '.join(map(str, ROWS))}"),
    (None, "--recipes", ("rowwise", "tensorwise", "both"), "both", "torchao's recipes to time: 48 "
     "layers take PyTorch minutes to compile"),
    (None, "--minutes", "rate", 9.0, "start nothing after this many, and stop what runs"),
]


def runs_of(row, folder, recipes):
    """(what is timed, the arguments of its job) of a row."""
    ours = row._replace(dtype="fp8", mode=())
    yield "ours, --dtype fp8", ("time_ours", ours, folder)
    yield "PyTorch, bf16", ("time_torch", row, folder)
    for recipe in RECIPES if recipes == "both" else [recipes]:
        yield f"PyTorch, float8 {recipe}", ("time_torch", row, folder, recipe)


def table(row, results):
    """The lines of a table of a row's results: {what is timed: measurement, or why not}."""
    size, in_bf16 = str(row).split()[0], results["PyTorch, bf16"]
    yield f"| {size} B={row.B} | ms | of PyTorch's bf16 | GiB | last loss | converted |"
    yield "| --- " * 6 + "|"
    for name, result in results.items():
        if isinstance(result, str):
            yield f"| {name} | - | - | - | - | {result} |"
            continue
        share = f"{result['ms'] / in_bf16['ms']:.2f}" if isinstance(in_bf16, dict) else "-"
        loss = f"{result['loss']:.3f}" if "loss" in result else "-"
        yield (f"| {name} | {result['ms']:.2f} | {share} | {result['memory'] / 2**30:.1f} | {loss} "
               f"| {result.get('converted') or '-'} |")


def main(arguments=None):
    """Everything from the flags to the tables. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    rows = chosen(ROWS, flags.rows)
    for package in ("torch", "torchao"):
        if not importlib.util.find_spec(package):
            raise UserError(f"{package} is not installed, and it is what this program times: "
                            "pip install -r dev/requirements.txt")
    check_gpu()
    end, tables = time.perf_counter() + 60 * flags.minutes, []
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            tokens_of(row, folder)
            results = {}
            for name, job in runs_of(row, folder, flags.recipes):
                print(f"{name}: ", end="")
                results[name] = run_job(end, *job, timeout=TIMEOUT)
            tables += ["", *table(row, results)]
    print(*tables, sep="\n")


if __name__ == "__main__":
    run_main(main)
