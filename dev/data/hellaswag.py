"""HellaSwag as GPT-2 tokens: llm.c's file of multiple-choice questions, byte for byte.

    python -m dev.data.hellaswag                # the 10,042 questions of the validation set
    python -m dev.data.hellaswag --input hellaswag_val.jsonl

A question is the beginning of a text, the context, and four endings; the label says which is real.
Endings are tokenized with a space before them, and there is no <|endoftext|>. The download is 6 MB,
which huggingface_hub keeps in its cache. It is tokenized as it is; questions of --input are cleaned
as texts to train on.

The file has llm.c's format: a header of 256 int32 (magic 20240522, version 1, number of examples,
bytes of the longest), then for each example uint16:

    65535, its bytes, its index, label, 4        its bytes include these five numbers
    n, n tokens                                  the context, in GPT-2's tokens
    n, n tokens   four times                     the completions
"""
import functools
from pathlib import Path

import numpy as np

from dev.common.files import checked_header
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft
from dev.data.documents import cleaned
from dev.data.hub import download, list_files
from dev.data.tables import read_rows, table_files
from dev.data.text import call_tiktoken
from train_gpt2 import FileKind, UserError, gpt2_encoding, make_header, replace_file

EVAL_FILE = FileKind("HellaSwag file", 20240522, (1,), "dev/data/hellaswag.py writes one")
START, COMPLETIONS = 65535, 4
REPO = "Rowan/hellaswag"
FLAGS = [
    (None, "--input", str, None, "a .jsonl or .parquet file with ctx, endings and label, instead "
     "of downloading it"),
    (None, "--output", str, "data/hellaswag/hellaswag_val.bin", "the file to write"),
]


def read_questions(paths, clean=str):
    """(context, endings, label) of each row of these files, each text as clean(text). Raises
    UserError with the row."""
    for path in paths:
        found = read_rows(path, ["ctx", "endings", "label"])
        for row, (context, endings, label) in enumerate(found, 1):
            if (not isinstance(context, str) or not isinstance(endings, list)
                    or len(endings) != COMPLETIONS
                    or not all(isinstance(ending, str) for ending in endings)):
                raise UserError(f"{path}: row {row}: expected ctx to be a text and endings to be "
                                f"{COMPLETIONS} texts")
            if not context:
                raise UserError(f"{path}: row {row}: its ctx is empty; expected the beginning of a "
                                "text")
            # a text in the hub's files; empty in its test set
            if str(label) not in map(str, range(COMPLETIONS)):
                raise UserError(f"{path}: row {row}: its label is {label!r}; expected one of 0 to "
                                f"{COMPLETIONS - 1}: of HellaSwag's files, the test set has none")
            yield clean(context), [*map(clean, endings)], int(label)


def write_questions(path, questions, encoding):
    """Write (context, endings, label)s, and return how many. Raises UserError if there are none or
    one is too long."""
    examples, encode = [], functools.partial(call_tiktoken, encoding.encode_ordinary)
    questions = [*questions]
    told = TimeLeft().over(questions, len(questions), lambda question: 1)
    for i, (context, endings, label) in enumerate(told):
        parts = [encode(text) for text in (context, *(" " + ending for ending in endings))]
        body = [i, label, COMPLETIONS, *(token for part in parts for token in (len(part), *part))]
        nbytes = 2 * (2 + len(body))
        if max(nbytes, i) > START - 1:
            raise UserError(f"question {i + 1} takes {nbytes:,} bytes; expected at most "
                            f"{START - 1:,} of these, and of questions, since numbers in the file "
                            "have 16 bits")
        examples.append(np.array([START, nbytes, *body], "<u2"))
    if not examples:
        raise UserError("the input has no question; expected HellaSwag's")
    longest = max(example.nbytes for example in examples)
    replace_file(path, [make_header(EVAL_FILE.magic, 1, len(examples), longest), *examples])
    return len(examples)


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    path = Path(flags.output)
    if path.exists():  # it is complete, since only then it gets its name
        print(f"{path}: {checked_header(path, EVAL_FILE)[2]:,} questions, is there already; to "
              "make it anew, delete it")
        return
    encoding = gpt2_encoding()
    if flags.input:
        paths = table_files(flags.input)
    else:
        commit, files = list_files(REPO, "data")
        paths = [download(REPO, name, revision=commit) for name, _ in files
                 if Path(name).name.startswith("validation") and name.endswith(".parquet")]
    questions = read_questions(paths, cleaned if flags.input else str)
    count = write_questions(path, questions, encoding)
    print(f"{path}: {count:,} questions")


if __name__ == "__main__":
    run_main(main)
