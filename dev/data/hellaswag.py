"""HellaSwag as GPT-2 tokens: llm.c's file of multiple-choice questions, byte for byte.

    python -m dev.data.hellaswag                           # the 10,042 questions of the validation set
    python -m dev.data.hellaswag --input hellaswag_val.jsonl

A question is the beginning of a text, the context, and four endings, of which one, the label, is the real one. The file
is 256 int32 (magic 20240522, version 1, how many questions, bytes of the longest) and a stream of uint16. Of each
question the stream has 65535; the bytes that it takes there, with these; its number, from 0; the label, from 0; 4; and
then five times a number of tokens and the tokens: of the context, and of each ending, with a space before it. There is
no <|endoftext|>.

It downloads 6 MB, which huggingface_hub keeps in its cache, and takes a few seconds.
"""
from pathlib import Path

from dev.common.file_kinds import read_header
from dev.data.hub import download, list_files
from prepro_tinyshakespeare import (UserError, gpt2_encoding, make_header, replace_file,
                                    run)
from dev.data.parquet_jsonl import read_rows, table_files
from train_gpt2 import FileKind, parse_flags

import numpy as np  # after prepro_tinyshakespeare, which has said how its threads are to wait

REPO = "Rowan/hellaswag"
QUESTIONS = FileKind("HellaSwag file", 20240522, (1,), "dev/data/hellaswag.py writes one")
START, ENDINGS = 65535, 4
FLAGS = [
    (None, "--input", str, None, "a .jsonl or .parquet file with ctx, endings and label, instead of downloading it"),
    (None, "--output", str, "data/hellaswag/hellaswag_val.bin", "the file to write"),
]


def read_questions(paths):
    """(context, endings, label) of each row of these files. Raises UserError, which names the row."""
    for path in paths:
        for row, (context, endings, label) in enumerate(read_rows(path, ["ctx", "endings", "label"]), 1):
            if not isinstance(context, str) or not isinstance(endings, list) or len(endings) != ENDINGS or not all(
                    isinstance(ending, str) for ending in endings):
                raise UserError(f"{path}: row {row}: expected ctx to be a text and endings to be {ENDINGS} texts")
            if str(label) not in map(str, range(ENDINGS)):  # a text in the hub's files; empty in its test set
                raise UserError(f"{path}: row {row}: its label is {label!r}; expected one of 0 to {ENDINGS - 1}: of "
                                "HellaSwag's files, the test set has none")
            yield context, endings, int(label)


def write_questions(path, questions, encoding):
    """Write (context, endings, label)s. Returns how many. Raises UserError if there are none, or one is too long."""
    examples = []
    for i, (context, endings, label) in enumerate(questions):
        parts = [encoding.encode_ordinary(text) for text in (context, *(" " + ending for ending in endings))]
        body = [i, label, ENDINGS, *(token for part in parts for token in (len(part), *part))]
        nbytes = 2 * (2 + len(body))
        if max(nbytes, i) > START - 1:
            raise UserError(f"question {i + 1} takes {nbytes:,} bytes; expected at most {START - 1:,} of these, and of "
                            "questions, since numbers in the file have 16 bits")
        examples.append(np.array([START, nbytes, *body], "<u2"))
    if not examples:
        raise UserError("the input has no question; expected HellaSwag's")
    longest = max(example.nbytes for example in examples)
    replace_file(path, [make_header(QUESTIONS.magic, 1, len(examples), longest), *examples])
    return len(examples)


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    path = Path(flags.output)
    if path.exists():  # whole: it has its name only since it was complete
        print(f"{path}: {read_header(path, QUESTIONS)[2]:,} questions, is there already; to make it anew, delete it")
        return
    encoding = gpt2_encoding()
    if flags.input:
        paths = table_files(flags.input)
    else:
        commit, files = list_files(REPO, "data")
        paths = [download(REPO, name, revision=commit) for name, _ in files
                 if Path(name).name.startswith("validation") and name.endswith(".parquet")]
    count = write_questions(path, read_questions(paths), encoding)
    print(f"{path}: {count:,} questions")


if __name__ == "__main__":
    run(main)
