"""English text for training without a network: the documentation that is on every machine.

    python -m dev.data.english       # Python's and the system's, to data/english.jsonl
    python -m dev.data.english FOLDER ... --output docs.jsonl
    python -m dev.data.fineweb --input data/english.jsonl

It reads *.md, *.rst, *.txt, *.info, *.pod, *.html, man pages, and the docstrings of *.py, also
gzipped. From each file it takes the paragraphs of English prose that were in no file before, so a
licence or a text in two versions appears once. Code, tables and lists of changes are left out. The
documents are sorted by their hashes. So the order is random, which makes the first of them a fair
sample, but the same wherever the same files are.
"""
import ast
import gzip
import hashlib
import html
import json
import multiprocessing
import re
import sys
import sysconfig
import warnings
import zlib
from pathlib import Path

from dev.common.flags import parse_flags, split_names
from dev.common.program import run_main
from dev.data.documents import cleaned
from train_gpt2 import UserError, replace_file

FOLDERS = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc",
           "/usr/share/man", "/usr/lib/python3", "/usr/local/lib"]
SKIPPED = re.compile(r"(?i)licen[cs]e|copyright|copying|change|news|history|authors|credits"
                     r"|/locale/|/man/(?!man)")
FLAGS = [(None, "--output", "name", "data/english.jsonl", "the file to write")]
LARGEST = 4 * 2**20  # bytes of a file
PROSE = re.compile(r"\b(the|a|an|and|or|of|to|in|is|are|be|it|this|that|with|for|as|on|by|not|you"
                   r"|if|which)\b", re.I)


def of_python(text):
    """The docstrings."""
    with warnings.catch_warnings():  # of the files' own escapes
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    return "\n\n".join(filter(None,
                              (ast.get_docstring(node)
                               for node in ast.walk(tree) if isinstance(node, kinds))))


def of_html(text):
    """The text between tags, without scripts and preformatted text; blocks become paragraphs."""
    text = re.sub(r"(?is)<(script|style|nav|head|pre|table|svg)\b.*?</\1>|<!--.*?-->", "\n\n", text)
    text = re.sub(r"(?i)</?(p|div|li|ul|ol|h\d|dt|dd|section|details|summary|br)\b[^>]*>", "\n\n",
                  text)
    return html.unescape(re.sub(r"<[^>]*>", "", text))


def of_man(text):
    """troff without its requests and changes of font."""
    text = re.sub(r'(?m)^\.\\".*\n|^\.(?!(B|I|BR|IR|RB|RI|Nm|Fl|Ar|Xr|Pa)\b).*$|^\'.*$', "\n", text)
    text = re.sub(r"(?m)^\.\w+ ?", "", text)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[&|^%:]|\\s[-+]?\d", "", text)
    for escape, letter in ((r"\-", "-"), (r"\(aq", "'"), (r"\(cq", "'"), (r"\(oq", "'"),
                           (r"\(lq", '"'), (r"\(rq", '"'), (r"\(en", "-"), (r"\(em", " - "),
                           (r"\(bu", "*"), (r"\e", "\\"), ("\\ ", " ")):
        text = text.replace(escape, letter)
    return text


READERS = {".md": str, ".rst": str, ".txt": str, ".info": str, ".pod": str, ".html": of_html,
           ".py": of_python, **{f".{section}": of_man for section in range(1, 9)}}


def is_prose(paragraph):
    """Whether a paragraph reads as English: nearly all letters and spaces, and one word in eight is
    a common small one."""
    words = paragraph.split()
    letters = sum(letter.isascii() and (letter.isalpha() or letter.isspace())
                  for letter in paragraph)
    return (len(words) > 7 and letters > 0.88 * len(paragraph)
            and 8 * len(PROSE.findall(paragraph)) >= len(words))


def kind_of(path):
    """A file's suffix, before a .gz."""
    return Path(path.stem if path.suffix == ".gz" else path).suffix


def paragraphs(path):
    """A file's paragraphs of prose, with single spaces between words."""
    try:
        content = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
        text = cleaned(READERS[kind_of(path)](cleaned(content.decode())))
    except (OSError, EOFError, zlib.error, ValueError, SyntaxError, RecursionError, MemoryError):
        return []  # damaged, not UTF-8, Python 2 ...
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if is_prose(part)]


def main():
    folders, others = split_names(sys.argv[1:], FLAGS)
    flags = parse_flags(f"{__doc__}\nWithout FOLDER: {' '.join(FOLDERS)}", FLAGS, others)
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"{folder}: there is no such folder; expected folders with "
                            "documentation")
    paths = sorted({path for folder in folders or FOLDERS for path in Path(folder).rglob("*")
                    if kind_of(path) in READERS and not SKIPPED.search(str(path))
                    and path.is_file() and path.stat().st_size < LARGEST})
    seen, documents = set(), {}
    with multiprocessing.Pool() as pool:
        for found in pool.imap(paragraphs, paths, chunksize=32):
            new = [part for part in dict.fromkeys(found) if part not in seen]
            seen.update(new)
            text = "\n\n".join(new)
            if len(text) >= 200:
                documents[hashlib.sha256(text.encode()).digest()] = text
    if not documents:
        raise UserError(f"no English prose in {len(paths)} files; give folders with documentation")
    replace_file(flags.output,
                 (json.dumps({"text": documents[key]}).encode() + b"\n"
                  for key in sorted(documents)))
    print(f"{flags.output}: {len(documents):,} documents of {sum(map(len, documents.values())):,} "
          f"characters, from {len(paths):,} files")


if __name__ == "__main__":
    run_main(main)
