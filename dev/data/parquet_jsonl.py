"""Reads rows of .parquet and .jsonl files, a few at a time, so that a file may be larger than memory."""
import itertools
import json
from pathlib import Path

from dev.data.hub import library
from prepro_tinyshakespeare import UserError

KINDS = ".parquet", ".jsonl"


def table_files(source):
    """The .parquet and .jsonl files at a path, sorted: itself, or all in and below a folder. Raises UserError if there
    are none."""
    source = Path(source)
    found = [source] if source.is_file() else sorted(source.rglob("*"))
    found = [path for path in found if path.suffix in KINDS and path.is_file()]
    if not found:
        what = "no such file or folder" if not source.exists() else "found none of these"
        raise UserError(f"{source}: {what}; expected {' or '.join(KINDS)}, or a folder of such files")
    return found


def read_parquet(path, columns, first):
    """Rows of Parquet from row `first` on, tuples. One row group is in memory at a time; earlier ones are skipped."""
    parquet = library("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            missing = [name for name in columns if name not in file.schema_arrow.names]
            if missing:
                raise UserError(f"{path}: has no column {missing[0]}; expected it among {file.schema_arrow.names}")
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                if first < count:
                    for batch in file.iter_batches(1024, [group], columns=columns):
                        yield from zip(*(batch.column(name)[first:].to_pylist() for name in columns))
                        first -= min(first, batch.num_rows)
                else:
                    first -= count
    except OSError as e:  # damage within a column is one too, without a strerror
        raise UserError(f"{path}: could not be read ({e.strerror or 'damaged'}); is the file complete?") from None
    except library("pyarrow").ArrowException:
        raise UserError(f"{path}: is no Parquet, or a part of one; is the file complete?") from None


def read_jsonl(path, columns, first):
    """Rows of JSON, a line each, from row `first` on, tuples. A missing field is an error."""
    try:
        with open(path, "rb") as file:
            for row, line in enumerate(itertools.islice(file, first, None), first):
                try:
                    fields = json.loads(line)
                    yield tuple(fields[name] for name in columns)
                except KeyError as e:
                    raise UserError(f"{path}: line {row + 1} has no field {e.args[0]}; expected it in {list(fields)}"
                                    ) from None
                except (ValueError, TypeError):
                    raise UserError(f"{path}: line {row + 1} is no JSON object in UTF-8; expected one in each line"
                                    ) from None
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror})") from None


def read_rows(path, columns, first=0):
    """Rows of a .parquet or .jsonl file from row `first` on, each a tuple of these columns. Raises UserError, also
    if a column is missing or the file is damaged."""
    return (read_parquet if Path(path).suffix == ".parquet" else read_jsonl)(path, columns, first)
