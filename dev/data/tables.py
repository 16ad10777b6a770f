"""Reads rows of .parquet, .jsonl and .csv files, a few at a time, so that a file may be larger than
memory."""
import csv
import itertools
import json
from pathlib import Path

from dev.data.hub import library
from train_gpt2 import UserError

KINDS = ".parquet", ".jsonl", ".csv"
CHAT = "conversations need prepro_tinyshakespeare.py --chat"


def table_files(source):
    """The files of KINDS at a path, sorted: itself, or all in and below a folder. Raises UserError
    if there are none."""
    source = Path(source)
    found = [source] if source.is_file() else sorted(source.rglob("*"))
    found = [path for path in found if path.suffix.lower() in KINDS and path.is_file()]
    if not found:
        what = "no such file or folder" if not source.exists() else "found none of these"
        raise UserError(f"{source}: {what}; expected {' or '.join(KINDS)}, or a folder of such "
                        "files")
    return found


def values_of(path, batch, name, before):
    """A column of a batch, a list. before: how many rows of the file come before the batch. Raises
    UserError with the row of a text that is not UTF-8."""
    column = batch.column(name)
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for row, value in enumerate(column, before + 1):
            try:
                value.as_py()
            except UnicodeDecodeError:
                raise UserError(f"{path}: row {row}: {name} is not UTF-8") from None
        raise


def read_parquet(path, columns, first):
    """Rows of Parquet from row `first` on, tuples. One row group is in memory at a time; earlier
    ones are skipped."""
    parquet, before = library("pyarrow.parquet"), 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for name in columns:
                if names.count(name) != 1:
                    raise UserError(f"{path}: has {names.count(name) or 'no'} column {name}; "
                                    f"expected it among {names}")
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if before + count <= first:
                    before += count
                    continue
                for batch in file.iter_batches(1024, [group], columns=columns):
                    skipped = min(max(0, first - before), batch.num_rows)
                    rows, before = batch.slice(skipped), before + batch.num_rows
                    yield from zip(*(values_of(path, rows, name, before - rows.num_rows)
                                     for name in columns))
    except OSError as e:  # damage within a column is one too, without a strerror
        raise UserError(f"{path}: could not be read ({e.strerror or 'damaged'}); is the file "
                        "complete?") from None
    except (library("pyarrow").ArrowException, UnicodeDecodeError):
        raise UserError(f"{path}: is no Parquet, or a part of one; is the file complete?") from None


def read_jsonl(path, columns, first):
    """Rows of JSON from row `first` on, tuples. Each line is a row, except blank ones. A missing
    field is an error."""
    try:
        with open(path, "rb") as file:
            rows = ((number, line) for number, line in enumerate(file, 1) if line.strip())
            for number, line in itertools.islice(rows, first, None):
                try:
                    fields = json.loads(line)
                    yield tuple(fields[name] for name in columns)
                except KeyError as e:
                    chats = {"messages", "prompt"} & fields.keys()
                    remedy = CHAT if chats else "--column takes another name"
                    raise UserError(f"{path}: line {number} has no field {e.args[0]}; expected it "
                                    f"in {list(fields)}; {remedy}") from None
                except RecursionError:
                    raise UserError(f"{path}: line {number} is JSON with too many brackets in "
                                    "brackets; expected an object with simple fields") from None
                except (ValueError, TypeError):
                    raise UserError(f"{path}: line {number} is no JSON object in UTF-8; expected "
                                    "one in each line"
                                    ) from None
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror})") from None


def read_csv(path, columns, first):
    """Rows of CSV from row `first` on, tuples. The first line has the columns' names."""
    csv.field_size_limit(2**31 - 1)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = filter(None, csv.reader(file, strict=True))  # blank lines are none
            names = next(rows, [])
            for name in columns:
                if names.count(name) != 1:
                    raise UserError(f"{path}: has {names.count(name) or 'no'} column {name}; "
                                    f"expected it among {names}")
            at = [names.index(name) for name in columns]
            for number, row in enumerate(rows, 1):
                if len(row) != len(names):
                    raise UserError(f"{path}: row {number} has {len(row)} fields; expected "
                                    f"{len(names)}, as the first line: quote a text that has "
                                    "commas or newlines")
                if number > first:
                    yield tuple(row[i] for i in at)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror})") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: is not UTF-8 ({e.reason}); expected a table in UTF-8") from None
    except csv.Error as e:
        raise UserError(f"{path}: is no CSV ({e}); expected rows of fields with commas between "
                        "them") from None


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".csv": read_csv}


def read_rows(path, columns, first=0):
    """Rows of a file of KINDS from row `first` on, each a tuple of these columns. Raises UserError,
    also if a column is missing or the file is damaged."""
    return READERS[Path(path).suffix.lower()](path, columns, first)


def read_texts(path, column, first=0):
    """The texts in a column from row `first` on, or None where a row has none. Raises UserError."""
    for row, (text,) in enumerate(read_rows(path, [column], first), first + 1):
        if text is not None and not isinstance(text, str):
            raise UserError(f"{path}: {column} of row {row} is of type {type(text).__name__}; "
                            "expected a text")
        yield text
