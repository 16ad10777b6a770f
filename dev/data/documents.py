"""Documents of any input: texts, tables, folders of them, and quoted patterns.

A text file is one document, or with `--documents blank-lines` another one begins after each blank
line. A row of a table is one document. <|endoftext|> in a text ends a document, too: some data sets
have it between the texts of a file. cleaned() is for all text that becomes tokens: documents,
messages, prompts, and what a model is evaluated on.
"""
import glob
import re
from pathlib import Path

from dev.data.tables import KINDS as TABLES, read_texts
from dev.data.text import BYTE_ORDER_MARK
from dev.data.vocabulary import whole
from prepro_tinyshakespeare import download_tinyshakespeare
from train_gpt2 import UserError

KINDS = ".txt", *TABLES
OTHERS = ".json", ".ndjson", ".tsv"  # rows in a syntax that is not read here
JSON_LINES = re.compile(r'\ufeff?\s*\{\s*".*\}\s*(\Z|\n\s*\{\s*".*\}\s*$)', re.M)  # two, or one
UNITS = {"files": "one a file", "blank-lines": "split at blank lines", "rows": "one a row"}
FLAGS = [
    (None, "--input", "names", None, ".txt, .jsonl, .csv or .parquet files, folders of them, or "
     "quoted patterns, instead of downloading tinyshakespeare"),
    (None, "--column", "name", "text", "the column or field with the text, in files with rows"),
    (None, "--documents", tuple(UNITS), None, "what a document is: a text file, the text between "
     "two blank lines, or a row of a table (default: files, and rows of tables)"),
    (None, "--name", "name", None, "writes data/NAME/NAME_{train,val}.bin (default: the input's)"),
]


def input_files(inputs):
    """The files that --input names: each itself, those of KINDS in and below a folder, or those
    that match a pattern. A file is named twice if two inputs have it. Raises UserError."""
    files = []
    for name in inputs:
        paths = [Path(name)] if Path(name).exists() else sorted(map(Path, glob.glob(
            name, recursive=True)))
        if not paths:
            raise UserError(f"{name}: could not be read (no such file or folder, and no file "
                            "matches such a pattern); --input takes files, folders and quoted "
                            "patterns")
        for path in paths:
            found = [path] if path.is_file() else sorted(
                each for each in path.rglob("*") if each.suffix.lower() in KINDS and each.is_file())
            if not found:
                raise UserError(f"{path}: has none of {', '.join(KINDS)}; expected a folder of "
                                "such files, or a quoted pattern for text files with other names")
            files += found
    return files


def read_utf8(called, path):
    """The text of a file, cleaned. called: the flag and what it was given. Raises UserError."""
    try:
        return cleaned(Path(path).read_bytes().decode())
    except OSError as e:
        raise UserError(f"{called}: could not be read ({e.strerror}); expected a text "
                        "file") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{called}: byte {e.start} is not UTF-8; expected UTF-8 text") from None


def read_text(path):
    """The text of a file. Raises UserError."""
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); --input takes a text "
                        "file") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: byte {e.start} is not UTF-8, and --input takes UTF-8 text, or "
                        f"files with rows: {', '.join(TABLES)}") from None
    if path.suffix.lower() in OTHERS or JSON_LINES.match(text):
        raise UserError(f"{path}: has rows with fields, whose syntax is no text: give the text "
                        f"alone, or rows in one of {', '.join(TABLES)}, named so")
    return text


def cleaned(text):
    """A text as it is tokenized: without a byte order mark before it, and Windows' line ends are
    newlines."""
    text = whole(text).removeprefix(BYTE_ORDER_MARK)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def split_at_blank_lines(text):
    """The documents of a text, of which all but the last end with a blank line."""
    *parts, last = text.split("\n\n")
    return [*(part + "\n\n" for part in parts), last]


def documents_of(flags):
    """([the documents' texts], {what is a document: how many}) of what the flags ask for. Raises
    UserError."""
    unit, found, units = flags.documents, [], {}
    if not flags.input and unit == "rows":
        raise UserError("--documents rows: tinyshakespeare is a text; expected files or "
                        "blank-lines")
    for path in input_files(flags.input) if flags.input else [None]:
        is_table = path is not None and path.suffix.lower() in TABLES
        if unit and (unit == "rows") != is_table and not (unit == "blank-lines" and is_table):
            raise UserError(f"{path}: --documents {unit}, and it is a "
                            f"{'table' if is_table else 'text'}; expected "
                            f"{'rows' if is_table else 'files'} or blank-lines")
        if is_table:
            texts = [text for text in read_texts(path, flags.column) if text is not None]
        else:
            texts = [read_text(path) if path else download_tinyshakespeare()]
        texts = map(cleaned, texts)
        if unit == "blank-lines":
            texts = [part for text in texts for part in split_at_blank_lines(text)]
        before = len(found)
        found += texts
        kind = unit or ("rows" if is_table else "files")
        units[kind] = units.get(kind, 0) + len(found) - before
    return found, units


def said(units):
    """How many documents there are, in words. units: {what is one: how many}."""
    parts = [f"{count:,} {'document' if count == 1 else 'documents'}, {UNITS[unit]}"
             for unit, count in units.items()]
    return f"{'; '.join(parts)} (--documents)"


def checked_name(name):
    """A data set's name. Raises UserError."""
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise UserError(f"--name {name}: expected letters, digits, '-', '_' and '.'")
    return name


def name_of(flags):
    """The name of the data set, or None for tinyshakespeare. Raises UserError."""
    name, inputs = flags.name, flags.input or ()
    if not name and inputs:
        path, _ = Path(inputs[0]), input_files(inputs)
        if len(inputs) > 1 or not path.exists():
            raise UserError(f"--input {' '.join(inputs)}: is no single file or folder, whose name "
                            "the tokens would have; expected --name too")
        name = path.resolve().stem if path.is_file() else path.resolve().name
    return name and checked_name(name)
