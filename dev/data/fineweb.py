"""FineWeb as GPT-2 tokens: llm.c's shards, byte for byte.

    python -m dev.data.fineweb                   # FineWeb's sample of 10 billion tokens
    python -m dev.data.fineweb -t edu -v 100B    # FineWeb-Edu's of 100 billion
    python -m dev.data.fineweb --input texts     # any .parquet, .jsonl or .csv files, column text
    python -m dev.data.fineweb --vocab data/book/book_tokenizer.bin    # a vocabulary of your own

then `python train_gpt2.py -i "data/fineweb10B/fineweb_train_*.bin"`.

Each document becomes <|endoftext|> and its tokens. All documents, in the files' order, are cut into
shards of 100 million tokens. The first shard is for validation, the others are for training, and
the last one is shorter. A document may begin in one shard and end in the next. If all documents fit
into one shard, a tenth of their tokens is for validation. FineWeb's documents are tokenized as they
are; those of --input are cleaned first, as in prepro_tinyshakespeare.py: Windows' line ends become
newlines.

10B downloads 28 GB and writes 21 GB in 104 shards. 100B downloads 277 GB and writes about 200 GB.
Input files of 2 GB are downloaded when they are needed, and deleted when their tokens are written,
so at most two of them are on the disk at a time. A core makes about three million tokens a second:
10B takes an hour on one core, plus the download. All cores are used.

The program can be stopped at any moment. Started again, it continues after the last complete shard,
and the shards end up with the same bytes. The number of workers does not change them either. A file
whose download was interrupted is downloaded again.
"""
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dev.common.config import count_tokens
from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.common.time_left import TimeLeft, duration
from dev.data.documents import checked_name, cleaned
from dev.data.hub import download, library, list_files
from dev.data.tables import read_texts, table_files
from dev.data.text import call_tiktoken
from dev.data.vocabulary import Vocabulary, read_vocabulary, vocabulary_bytes, write_vocabulary
from train_gpt2 import EOT, TOKENS, UserError, gpt2_encoding, make_header, number, replace_file

DATASETS = {"classic": ("HuggingFaceFW/fineweb", "fineweb"),
            "edu": ("HuggingFaceFW/fineweb-edu", "edu_fineweb")}
BATCH = 2**22  # characters that are tokenized at a time
FLAGS = [
    ("-t", "--type", tuple(DATASETS), None, "FineWeb or FineWeb-Edu (default: classic)"),
    ("-v", "--version", ("10B", "100B"), None, "tokens of the sample (default: 10B)"),
    (None, "--input", str, None, "a .parquet, .jsonl or .csv file, or a folder of such files, "
     "instead of FineWeb"),
    (None, "--column", str, "text", "the column or field with the text"),
    (None, "--vocab", str, None, "NAME_tokenizer.bin of prepro_tinyshakespeare.py --vocab, instead "
     "of GPT-2's words"),
    (None, "--name", str, None, "writes NAME_val_000000.bin, NAME_train_000001.bin, ... (default: "
     "fineweb, edu_fineweb or the input's name)"),
    (None, "--output", str, None, "folder of the shards (default: data/NAME and the version)"),
    ("-s", "--shard-tokens", number(int, 1, 2**31), 10**8, "tokens of a shard"),
    (None, "--val-tokens", number(int, 1, 2**31), None, "tokens of the validation shard (default: "
     "as the others, or a tenth if all texts fit into one)"),
    (None, "--workers", number(int, 1, 1025), None, "threads that tokenize (default: one for "
     "each core)"),
]

# ---- Documents to tokens, on all cores


class Place(NamedTuple):
    """A place in the input: indices of a file, of a row in it, and of a token in that row's
    document."""
    file: int = 0
    row: int = 0
    token: int = 0


def read_batches(paths, column, place, clean=False):
    """Batches of documents from a place's row on: (index of the file, index of the first row,
    texts). The paths begin with the place's file, and are taken one by one as they are read. clean:
    whether texts are cleaned. Raises UserError."""
    for file, path in enumerate(paths, place.file):
        texts, size, first = [], 0, place.row if file == place.file else 0
        for row, text in enumerate(read_texts(path, column, first), first):
            texts.append(cleaned(text) if clean and text else text)
            size += 1 + len(text or "")
            if size >= BATCH:
                yield file, first, texts
                texts, size, first = [], 0, row + 1
        if texts:
            yield file, first, texts


def encoder(encoding, workers):
    """(a function from texts to lists of their tokens, which uses this many threads; the id of
    <|endoftext|>). encoding: tiktoken's, or a Vocabulary."""
    if not isinstance(encoding, Vocabulary):  # <|endoftext|> in a text is text, as in llm.c
        return functools.partial(encoding.encode_ordinary_batch, num_threads=workers), EOT
    if encoding.kind == "words":
        return functools.partial(encoding.encoding.encode_batch, allowed_special="all",
                                 num_threads=workers), encoding.eot
    return lambda texts: [*map(encoding.encode, texts)], encoding.eot


def tokenize(encode, eot, texts, name="", first=0):
    """([number of tokens of each document], all tokens as uint16). A text that is None has no
    tokens. name, first: the texts' file and the index of their first row. Raises UserError with the
    row."""
    try:
        found = call_tiktoken(encode, [text or "" for text in texts])
    except UserError as e:
        if len(texts) == 1:
            raise UserError(f"{name}: row {first + 1}: {e}") from None
        for row, text in enumerate(texts, first):
            tokenize(encode, eot, [text], name, row)
        raise
    documents = [np.array([] if text is None else [eot, *tokens], "<u2")
                 for text, tokens in zip(texts, found)]
    return [len(document) for document in documents], np.concatenate(documents)


# ---- Tokens to shards, and a file with the progress


def cut_shards(batches, sizes, place, show=lambda count: None):
    """(tokens, the Place where the next shard begins) of each shard; for the last, the Place is
    None. sizes: of the shards from here on; place: where the batches begin; show(count) is told how
    many tokens came."""
    size, parts, filled = next(sizes), [], 0
    for file, first, lengths, tokens in batches:
        ends, at = np.cumsum(lengths), place.token if (file, first) == place[:2] else 0
        while at < len(tokens):
            if filled == size:  # not as soon as it is full: without another token it is the last
                row = int(np.searchsorted(ends, at, "right"))
                yield np.concatenate(parts), Place(file, first + row,
                                                   at - int(ends[row - 1] if row else 0))
                size, parts, filled = next(sizes), [], 0
            parts.append(tokens[at : at + size - filled])
            at, filled = at + len(parts[-1]), filled + len(parts[-1])
            show(len(parts[-1]))
    if parts:
        yield np.concatenate(parts), None


def shard_path(folder, name, shard):
    """Shard 0 is for validation."""
    return folder / f"{name}_{'train' if shard else 'val'}_{shard:06d}.bin"


def shard_size(settings, shard):
    """The tokens of a shard, unless it is the last."""
    return settings["--shard-tokens" if shard else "--val-tokens"]


def progress_path(folder, name):
    return folder / f"{name}_progress.json"


def read_progress(path):
    """The progress file's content, or {} if there is none. Raises UserError."""
    try:
        progress = json.loads(path.read_text(encoding="utf-8"))
        Place(*progress["place"]), progress["shards"], progress["done"], progress["tokens"]
        return progress
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise UserError(f"{path}: is damaged; delete it and the shards beside it to begin anew"
                        ) from None


def begin(folder, name, settings):
    """The progress in the folder, or that of a fresh start. Raises UserError if its shards were
    made with other settings or by something else, or are damaged."""
    path = progress_path(folder, name)
    progress, begun = read_progress(path), sorted(folder.glob(f"{name}_*_*.bin"))
    if not progress and begun:
        raise UserError(f"{begun[0]}: is there already, without {path.name}, which would say how "
                        "it was made; give another --output, or delete the shards")
    if not progress.get("shards"):
        return settings | {"shards": 0, "place": Place(), "tokens": 0, "done": False}
    for key, now in settings.items():
        if progress.get(key) != now:
            what = f"{key} {progress.get(key)}, and now it is {now}"
            if key == "files":
                [was, is_now] = next(pair
                                     for pair in itertools.zip_longest(progress.get(key) or [], now)
                                     if pair[0] != pair[1])
                what = f"other input files: {was} (name, bytes), where there is now {is_now}"
            raise UserError(f"{path}: the shards were begun with {what}; give the same again, or "
                            "another --output")
    sizes = [shard_size(settings, shard) for shard in range(progress["shards"])]
    sizes[0] = progress.get("tenth") or sizes[0]
    if progress["done"]:
        sizes[-1] = progress["tokens"] - sum(sizes[:-1])
    for shard, size in enumerate(sizes):
        found = count_tokens(shard_path(folder, name, shard))[0]
        if found != size:
            raise UserError(f"{shard_path(folder, name, shard)}: {found:,} tokens; expected "
                            f"{size:,}: delete the shards and {path.name} to begin anew")
    return progress


def write_shards(folder, name, progress, paths, encoding, workers, forget=lambda file: None,
                 divides=False):
    """Write the remaining shards, and the progress file after each. Raises UserError. If the
    program is killed between the two, it writes that shard again, with the same bytes. paths: the
    input files from the place's on. forget(i) is told that files before i are not needed any more.
    divides: whether to divide a first shard that has all tokens."""
    tqdm, start, path = library("tqdm").tqdm, Place(*progress["place"]), progress_path(folder, name)
    replace_file(path, [json.dumps(progress).encode()])
    sizes = (shard_size(progress, shard) for shard in itertools.count(progress["shards"]))
    encode, names = encoder(encoding, workers), [name for name, _ in progress["files"]]
    batches = ((file, row, *tokenize(*encode, texts, names[file], row)) for file, row, texts in
               read_batches(paths, progress["--column"], start, progress["source"] == "--input"))
    time_left, nbytes, file = TimeLeft(), [size for _, size in progress["files"]], start.file
    with tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None) as bar:
        bar.reset(shard_size(progress, progress["shards"]))
        begun = time.perf_counter()
        for tokens, place in cut_shards(batches, sizes, start, bar.update):
            done, parts = progress["shards"], [tokens]
            if done == 0 and place is None:
                tenth = len(tokens) // 10
                if not divides:
                    raise UserError(f"the texts have {len(tokens):,} tokens, and all of them would "
                                    "be for validation; give more of them, or fewer --val-tokens")
                if tenth < 2:
                    raise UserError(f"the texts have {len(tokens)} tokens, and need at least 20 "
                                    "for training and validation")
                parts, progress["tenth"] = [tokens[:tenth], tokens[tenth:]], tenth
            rate = len(tokens) / (time.perf_counter() - begun)
            for shard, part in enumerate(parts, done):
                replace_file(shard_path(folder, name, shard),
                             [make_header(TOKENS.magic, 1, len(part)), part])
            progress |= {"shards": done + len(parts), "place": place or progress["place"],
                         "done": place is None, "tokens": progress["tokens"] + len(tokens)}
            replace_file(path, [json.dumps(progress).encode()])
            bar.clear()  # the next line takes its place
            before, file = file, progress["place"][0]
            left = file > before and time_left.seconds(sum(nbytes[start.file : file]),
                                                       sum(nbytes[start.file :]))
            for shard, part in enumerate(parts, done):
                print(f"{shard_path(folder, name, shard)}: {len(part):,} tokens, {rate:,.0f} "
                      f"tokens/s, input file {progress['place'][0] + 1} of "
                      f"{len(progress['files'])}" + (f", {duration(left)} left" if left else ""),
                      flush=True)
            begun = time.perf_counter()
            bar.reset(shard_size(progress, done + len(parts)))
            forget(progress["place"][0])
    if not progress["done"]:
        raise UserError("the input has no text; expected documents to tokenize")


# ---- The program


@contextlib.contextmanager
def locked(folder):
    """Make a folder, and lock it against other programs. After an error it is removed again if this
    program made it and it has no shard or downloaded file yet. Raises UserError."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(f"{folder}: another program writes shards there; wait for it, or give "
                        "another --output"
                        ) from None
    except (Exception, KeyboardInterrupt):
        if folder in made and not any(path.suffix in (".bin", ".parquet")
                                      for path in folder.rglob("*")):
            shutil.rmtree(folder)
            for path in made[1:]:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    path.rmdir()
        raise
    finally:
        os.close(handle)


def main(arguments=None):
    flags = parse_flags(__doc__, FLAGS, arguments)
    if flags.input and (flags.type or flags.version):
        raise UserError("--input takes local files, and -t or -v chooses a sample to download: "
                        "give one of them")
    version, (repo, name) = flags.version or "10B", DATASETS[flags.type or "classic"]
    sample = f"sample/{version}T"
    name = checked_name(flags.name or (Path(flags.input).stem if flags.input else name))
    folder = Path(flags.output or f"data/{name}{'' if flags.input else version}")
    vocabulary = read_vocabulary(flags.vocab) if flags.vocab else None
    encoding = vocabulary or gpt2_encoding()
    tokenizer = hashlib.sha256(vocabulary_bytes(vocabulary)).hexdigest() if vocabulary else (
        encoding.name)
    workers = flags.workers or (len(os.sched_getaffinity(0)) if sys.platform == "linux"
                                else os.cpu_count())
    with locked(folder):
        downloads, before = folder / f"{name}_download", read_progress(progress_path(folder, name))
        source, commit = ("--input",
                          None) if flags.input else (f"{repo} {sample}", before.get("commit"))
        if flags.input:
            found = table_files(flags.input)
            files = [[path.name, path.stat().st_size] for path in found]
        elif before.get("source") == source:  # the hub may have other files now
            files = before["files"]
        else:
            commit, files = list_files(repo, sample)
            files = [[path, size] for path, size in files if path.endswith(".parquet")]
        progress = begin(folder, name, {
            "source": source, "commit": commit, "files": files, "--column": flags.column,
            "--shard-tokens": flags.shard_tokens,
            "--val-tokens": flags.val_tokens or flags.shard_tokens, "tokenizer": tokenizer})
        # of a killed program
        for rest in (*folder.glob(f"{name}_*.tmp"), *downloads.rglob("*.incomplete")):
            rest.unlink()
        if progress["done"]:
            print(f"{folder}: finished before, with {progress['tokens']:,} tokens in "
                  f"{progress['shards']} shards; to make them anew, delete them and their progress "
                  "file")
            return

        if vocabulary:
            write_vocabulary(folder / f"{name}_tokenizer.bin", vocabulary)

        def forget(file):
            for path, _ in () if flags.input else files[:file]:
                (downloads / path).unlink(missing_ok=True)

        first = progress["place"][0]
        paths = found[first:] if flags.input else (
            download(repo, path, revision=commit, folder=downloads) for path, _ in files[first:])
        write_shards(folder, name, progress, paths, encoding, workers, forget,
                     flags.val_tokens is None)
        shutil.rmtree(downloads, ignore_errors=True)
        print(f"{folder}: {progress['tokens']:,} tokens in {progress['shards']} shards")


if __name__ == "__main__":
    run_main(main)
