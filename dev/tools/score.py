"""Score a checkpoint on HellaSwag: see dev/features/hellaswag_score.py.

    python -m dev.tools.score -e gpt2_124M.bin --data data/hellaswag/hellaswag_val.bin
"""
from dev.common.config import read_parameters
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft
from dev.data.vocabulary import vocabulary_of_checkpoint
from dev.features.base import GPT2
from dev.features.devices import ON_CPU, make_device
from dev.features.fit import Fitting
from dev.features.hellaswag_score import PADDING, check_vocabulary, count_right, read_examples
from dev.features.order import default_dtype, has_gpu
from dev.tools.architecture import checkpoint_of, find_architecture
from train_gpt2 import UserError

FLAGS = [
    ("-e", "--model", str, "gpt2_124M.bin", "checkpoint of GPT-2, or of a Llama 3 with GPT-2's "
     "words; or a run's folder: its newest"),
    (None, "--data", str, "data/hellaswag/hellaswag_val.bin", "the examples"),
    ("-b", "--batch-size", "count", 16, "B, rows in a batch; an example has four"),
    ("-t", "--seq-len", "count", None, "T, tokens in a row (default: enough for the longest)"),
    (None, "--device", ("cuda", *ON_CPU), None, "where to compute (default: cuda if there is "
     "a GPU, else cpu)"),
    (None, "--dtype", ("fp32", "tf32", "bf16"), None, "(default: bf16; on a CPU, and a GPU before "
     "8.0, fp32)"),
    (None, "--plain", "switch", 0, "1: on a GPU, without the section Faster of train_gpt2.py"),
]


def device_of(flags, c):
    """The device that flags as above ask for."""
    place = flags.device or ("cuda" if has_gpu() else "cpu")
    return make_device(place, flags.dtype or default_dtype(place), c, flags.plain)


def compute(architecture, c, device, path, B, T, work):
    """work(the model of a checkpoint). Raises UserError also for a fault of the GPU."""
    try:
        model = type(architecture.__name__, (Fitting, architecture), {})(c, device, B, T)
        model.set_parameters(read_parameters(path, c))
        return work(model)
    except device.Fault as e:
        raise UserError(f"the GPU stopped ({e}) at {device.last_kernel} or a launch before it: "
                        "find the fault with --plain 1, compute-sanitizer, or --device "
                        "cpu") from None


def main(arguments=None):
    """Everything from the flags to the score. Raises UserError."""
    flags = parse_flags(__doc__, FLAGS, arguments)
    flags.model = checkpoint_of(flags.model)
    architecture, c = find_architecture(flags.model)
    check_vocabulary(vocabulary_of_checkpoint(flags.model), flags.data)
    examples = read_examples(flags.data, c.V, flags.seq_len)
    most = max(example.longest for example in examples)
    enough = -(-(most + 1) // PADDING) * PADDING
    if architecture is GPT2:  # others need no positions
        enough = min(c.maxT, enough)
    B, T = flags.batch_size, flags.seq_len or enough
    device = device_of(flags, c)
    print(f"device       | {device} (--device, --dtype)")
    print(f"model        | {flags.model} (-e), {c}")
    print(f"data         | {flags.data}: {len(examples):,} examples of at most {most} tokens "
          f"(--data), B={B} T={T}", flush=True)
    correct, total = compute(architecture, c, device, flags.model, B, T,
                             lambda model: count_right(model, examples, TimeLeft()))
    print(f"HellaSwag: {correct}/{total} = {correct / total:.6f}")


if __name__ == "__main__":
    run_main(main)
