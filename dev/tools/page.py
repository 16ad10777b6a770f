"""Write a page that walks through a training step, number by number: one HTML file, which needs no
network.

    python -m dev.tools.page                          # writes step.html
    python -m dev.tools.page -o x.html -b 1 -t 16     # other sizes

The numbers are those of a real step of a tiny model, which is recorded here (dev/page/record.py).
"""
from pathlib import Path

from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.page.build import page_of, with_more
from dev.page.record import TEXT, record
from train_gpt2 import UserError, replace_file

FLAGS = [
    ("-o", "--output", "name", "step.html", "the file to write"),
    ("-b", "--batch-size", "count", 2, "B, sequences in the batch"),
    ("-t", "--seq-len", "count", 8, "T, tokens in a sequence"),
    (None, "--layers", "count", 2, "L"),
    (None, "--heads", "count", 2, "NH"),
    (None, "--channels", "count", 32, "C, a multiple of 32"),
    (None, "--after", "count", 40, "steps of training before the one that is shown"),
    ("-l", "--learning-rate", "amount", 3e-3, "learning rate"),
    ("-c", "--weight-decay", "amount", 0.1, "weight decay"),
    (None, "--seed", "count or 0", 42, "of the first parameters"),
    (None, "--text", "name", None, "what it trains on (default: a few lines of Shakespeare)"),
]
MOST = 4 * 10**6  # bytes of the page


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    sizes = dict(L=flags.layers, NH=flags.heads, C=flags.channels, B=flags.batch_size,
                 T=flags.seq_len, after=flags.after, rate=flags.learning_rate,
                 decay=flags.weight_decay, seed=flags.seed)
    page = page_of(with_more(*record(sizes, flags.text or TEXT)))
    if len(page) > MOST:
        raise UserError(f"the page has {len(page):,} bytes, and at most {MOST:,} are wanted: "
                        "choose smaller sizes")
    replace_file(Path(flags.output), [page])
    print(f"wrote {flags.output}, {len(page):,} bytes")
    return 0


if __name__ == "__main__":
    run_main(main)
