"""Where a run without -i finds its tokens: tinyshakespeare's; and the text that a first run trains
on, as bytes: the same, or, without a network, the prose of this repository, which is its own
documentation.

Both are one document, so that the loss is comparable with that of other trainings on characters.
"""
import ast
import io
import os
import re
import tokenize
from pathlib import Path

from dev.data.documents import cleaned
from dev.data.own_text import tokens_of, write_set
from dev.data.text import both
from dev.data.vocabulary import tokenizer_path, vocabulary_of
from prepro_tinyshakespeare import download_tinyshakespeare, prepare_tinyshakespeare
from train_gpt2 import DATA, UserError, other_part

TOP = Path(__file__).resolve().parents[2]
TINYSHAKESPEARE = Path("data/tinyshakespeare_bytes/tinyshakespeare_bytes_{}.bin")
REPOSITORY = Path("data/repository_bytes/repository_bytes_{}.bin")
SPELLINGS = [DATA, *(f"data/{name}/{name}_{{}}.bin"  # as prepro's --name writes them
                     for name in ("tinyshakespeare", "tiny_shakespeare"))]
PROSE = re.compile(r"\b(the|a|an|and|or|of|to|in|is|are|be|it|this|that|with|for|as|on|by|not|you"
                   r"|if|which)\b", re.I)


def is_prose(paragraph):
    """Whether a paragraph reads as English: nearly all letters and spaces, and one word in eight is
    a common small one."""
    words = paragraph.split()
    letters = sum(letter.isascii() and (letter.isalpha() or letter.isspace())
                  for letter in paragraph)
    return (len(words) > 7 and letters > 0.88 * len(paragraph)
            and 8 * len(PROSE.findall(paragraph)) >= len(words))


def docstrings_of(text):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return "\n\n".join(filter(None, (ast.get_docstring(node) for node in ast.walk(ast.parse(text))
                                     if isinstance(node, kinds))))


def comments_of_python(text):
    """The comments, with a blank line where code is between them."""
    lines = {token.start[0]: token.string for token in
             tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT}
    return "\n".join("\n" * (number - 1 not in lines) + line.lstrip("# ")
                     for number, line in lines.items())


def comments_of_cuda(text):
    """Those that have a line to themselves, likewise."""
    return re.sub(r"(?m)^[ \t]*(//[/ ]*)?|^.*[;{}].*$", "", "\n".join(
        line if line.lstrip().startswith("//") else "" for line in text.split("\n")))


READERS = {".md": [str], ".py": [docstrings_of, comments_of_python], ".cu": [comments_of_cuda],
           ".cuh": [comments_of_cuda], ".h": [comments_of_cuda]}


def repository_text():
    """The paragraphs of English in this repository's pages, docstrings and comments."""
    files = sorted(TOP.glob("*.*")) + sorted(TOP.glob("dev/**/*.*"))
    paragraphs = {}
    for path in files:
        for reader in READERS.get(path.suffix, ()):
            parts = re.split(r"\n\s*\n", reader(path.read_text("utf-8")))
            paragraphs |= {" ".join(part.split()): 0 for part in parts if is_prose(part)}
    return "\n\n".join(paragraphs)


def is_prepared(pattern):
    """Whether the files of a pattern, and the vocabulary beside them, are there."""
    paths = both(pattern)
    return all(map(os.path.exists, [*paths, tokenizer_path(paths[0])]))


def prepare_bytes(text, pattern):
    """Write a text's bytes. Returns the paths to train and to validate on."""
    vocabulary = vocabulary_of("bytes", [])
    write_set(pattern, tokens_of([cleaned(text)], vocabulary), vocabulary)
    return both(pattern)


def prepare_repository():
    """The paths of this repository's text, prepared if it is missing. Raises UserError."""
    if is_prepared(REPOSITORY):
        return both(REPOSITORY)
    return prepare_bytes(repository_text(), REPOSITORY)


def first_text():
    """The paths of what a first run trains and validates on: what an earlier one prepared, or else
    tinyshakespeare, if there is a network. Raises UserError."""
    for pattern in (TINYSHAKESPEARE, REPOSITORY):
        if is_prepared(pattern):
            return both(pattern)
    try:
        return prepare_bytes(download_tinyshakespeare(), TINYSHAKESPEARE)
    except UserError as e:
        print(f"WARNING: {e}. Training on the text of this program's own files instead.")
        return prepare_repository()


def data_paths(train, val):
    """The paths of the tokens to train and to validate on. If one is None, it is named like the
    other: see other_part. If both are None, they are tinyshakespeare's, in the spelling that was
    written last. It is prepared if it is missing; without a network they are the bytes of this
    program's own text. Raises UserError."""
    if train or val:
        return [train or other_part(val, "val", "train"), val or other_part(train, "train", "val")]
    found = [paths for paths in map(both, SPELLINGS) if all(map(os.path.exists, paths))]
    if found:
        return max(found, key=lambda paths: os.path.getmtime(paths[0]))
    try:
        prepare_tinyshakespeare()
        return both(DATA)
    except UserError as e:
        print(f"WARNING: {e}. Training on the bytes of this program's own text instead.")
    return prepare_repository()
