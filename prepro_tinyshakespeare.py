"""Text to tokens: writes the two files that train_gpt2.py reads, the same that llm.c reads.

    python prepro_tinyshakespeare.py                      # downloads tinyshakespeare, 1.1 MB
    python prepro_tinyshakespeare.py --input book.txt     # a text of your own
    python prepro_tinyshakespeare.py --help               # other files, other vocabularies

tinyshakespeare becomes GPT-2 tokens, with <|endoftext|> before it and after every blank line, so
that each speech of the plays is a document of its own. The first 32,768 tokens, or a tenth of a
shorter text, are for validation, the rest for training. A file is 256 int32 (magic 20240520,
version 1, count), then the tokens as uint16. dev/data/own_text.py does the rest.

This is the ground floor: all other programs use its errors and its way to write a file.
"""
import http.client
import os
import re
import secrets
import sys
import urllib.request
from pathlib import Path

# On a CPU, NumPy's threads and the kernels' take turns. Threads that busy-wait would slow the
# others down, so these make them sleep, g++'s after some 0.1 ms, since the next kernel often comes
# sooner. NumPy reads them when it is imported.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
try:
    import numpy as np
except KeyboardInterrupt:
    sys.exit(print("interrupted", file=sys.stderr) or 130)

# ---- Errors and files


class UserError(Exception):
    """An error that the user can fix, in one line: what was found, what was expected, what to
    do."""


def run_main(main):
    """Run a program: main() returns the exit status. An error prints one line and exits with 1,
    Ctrl-C with 130."""
    open_streams()
    try:
        status = main()
        sys.stdout.flush()
    except (UserError, OSError) as e:
        status = f"error: {e}"
    except ModuleNotFoundError as e:
        if not f"{e.name}.".startswith("dev."):
            raise
        status = (f"error: this needs {e.name.replace('.', '/')}, which is missing beside "
                  "train_gpt2.py: restore it")
    except KeyboardInterrupt:
        leave("interrupted", 130)
    except SystemExit as e:
        status = e.code
    leave(status)


def open_streams():
    """Make stdout and stderr take any text. One that is closed, as by 2>&-, is a null device:
    otherwise the next file that is opened gets its number, and what C code prints."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # for letters that its encoding lacks


def leave(status, failure=1):
    """Exit. A message is printed, and is the status `failure`."""
    for stream, line in ((sys.stdout, ""), (sys.stderr, f"{status}\n")):
        try:
            stream.write(line if isinstance(status, str) else "")
            stream.flush()
        except OSError:  # Python would try again, and exit with 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            status = status or 1
    sys.exit(failure if isinstance(status, str) else status)


def make_header(magic, *fields):
    """The 256 int32 that llm.c's files begin with: a magic number, these fields, and zeros."""
    return np.array([magic, *fields, *[0] * (255 - len(fields))], "<i4")


def replace_file(path, chunks):
    """Write the chunks (bytes or C-contiguous arrays) to path, completely or not at all: to a
    temporary file beside it, which then takes its name. Raises UserError if the disk is full or the
    folder cannot be written."""
    temporary = Path(f"{path}.{secrets.token_hex(4)}.tmp")  # two containers may share a pid
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise UserError(f"{path}: could not be written ({e.strerror}); what was there before is "
                        "untouched") from None
    finally:
        try:
            temporary.unlink(missing_ok=True)
        except OSError:
            pass  # the folder is missing or read-only, as the UserError says


# ---- Text and tokens

TEXT_URL = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
            "input.txt")
TINYSHAKESPEARE = Path("data/tinyshakespeare/tiny_shakespeare_{}.bin")  # {}: train or val
SPELLINGS = [TINYSHAKESPEARE, *(Path(f"data/{name}/{name}_{{}}.bin")  # as --name writes them
                                for name in ("tinyshakespeare", "tiny_shakespeare"))]
END_OF_TEXT, EOT = "<|endoftext|>", 50256
VAL_TOKENS = 32768
BYTE_ORDER_MARK = "\ufeff"  # some files begin with it


def gpt2_encoding():
    """GPT-2's byte-pair encoding, 50,257 tokens: downloaded once, or from TIKTOKEN_CACHE_DIR.
    Raises UserError."""
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2")
    except Exception as e:  # what its HTTP library raises
        raise UserError(f"tiktoken could not get GPT-2's vocabulary ({type(e).__name__}): connect "
                        "to the network once, or set TIKTOKEN_CACHE_DIR to a folder that holds "
                        "it") from None


def call_tiktoken(method, text, **more):
    """method(text, **more). Raises UserError if tiktoken's Rust code panics, and hides what
    that prints."""
    with open(os.devnull, "w") as hidden:  # is 2 itself if stderr is closed
        stderr = os.dup(2)
        os.dup2(hidden.fileno(), 2)
        try:
            return method(text, **more)
        except BaseException as e:  # a panic is no Exception
            if type(e).__name__ not in ("PanicException", "ValueError"):
                raise
            raise UserError(f"tiktoken failed ({e}): shorten runs of a million spaces, or update "
                            "it: pip install -r requirements.txt") from None
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def download_tinyshakespeare():
    """The text of tinyshakespeare, a str of 1,115,394 characters. Raises UserError."""
    try:
        with urllib.request.urlopen(TEXT_URL, timeout=20) as response:
            return response.read().decode("utf-8")
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as e:
        raise UserError(f"tinyshakespeare could not be downloaded ({getattr(e, 'reason', e)}): "
                        "connect to the network, or give a text of your own with "
                        "prepro_tinyshakespeare.py --input FILE") from None


def write_tokens(path, tokens, magic=20240520, version=1, dtype="<u2"):
    """Write a token file. tokens: a sequence of ids (GPT-2's are below 65,536)."""
    print(f"writing {len(tokens):,} tokens to {path}")
    replace_file(path, [make_header(magic, version, len(tokens)), np.asarray(tokens, dtype)])


def val_count(tokens):
    """How many of the tokens, the first, are for validation. Raises UserError if they are few."""
    if len(tokens) < 20:
        raise UserError(f"the text has {len(tokens)} tokens, and needs at least 20 for training "
                        "and validation")
    return min(VAL_TOKENS, len(tokens) // 10)


def write_parts(tokens, path, **kind):
    """Write the tokens for validation to path.format("val"), and the others to
    path.format("train"). kind: see write_tokens."""
    val = val_count(tokens)
    write_tokens(str(path).format("val"), tokens[:val], **kind)
    write_tokens(str(path).format("train"), tokens[val:], **kind)


def prepare_tinyshakespeare():
    """Download tinyshakespeare, tokenize it, and write its two files. Raises UserError."""
    encoding = gpt2_encoding()
    text = download_tinyshakespeare().removeprefix(BYTE_ORDER_MARK)
    documents = END_OF_TEXT + text.replace("\n\n", "\n\n" + END_OF_TEXT)
    write_parts(call_tiktoken(encoding.encode, documents, allowed_special={END_OF_TEXT}),
                TINYSHAKESPEARE)


def other_part(path, part, other):
    """The path with `other` for the last `part` in the file's name, if possible one that is a word
    by itself: constraint_train.bin's is constraint_val.bin."""
    path = Path(path)
    words = [*re.finditer(f"(?<![A-Za-z]){part}(?![A-Za-z])", path.name)]
    at = words[-1].start() if words else path.name.rindex(part)
    return str(path.with_name(path.name[:at] + other + path.name[at + len(part) :]))


def data_paths(train, val):
    """The paths of the tokens to train and to validate on. If one is None, it is named like the
    other: see other_part. If both are None, they are tinyshakespeare's, in the spelling that was
    written last. It is prepared if it is missing; without a network, but with dev/, they are the
    bytes of this program's own text. Raises UserError."""
    for given, part, flag in ((train, "train", "-j"), (val, "val", "-i")):
        if given and part not in Path(given).name and not (train and val):
            raise UserError(f"{given} has no '{part}' in its name: give {flag} too")
    if train or val:
        return [train or other_part(val, "val", "train"), val or other_part(train, "train", "val")]
    found = [paths for paths in map(both, SPELLINGS) if all(map(os.path.exists, paths))]
    if found:
        return max(found, key=lambda paths: os.path.getmtime(paths[0]))
    try:
        prepare_tinyshakespeare()
        return both(TINYSHAKESPEARE)
    except UserError as e:
        if not Path(__file__).with_name("dev").is_dir():
            raise
        print(f"WARNING: {e}. Training on the bytes of this program's own text instead.")
    from dev.data.first_text import prepare_repository
    return prepare_repository()


def both(pattern):
    return [str(pattern).format(part) for part in ("train", "val")]


# ---- The program


def main():
    if not sys.argv[1:]:
        return prepare_tinyshakespeare()
    from dev.data import own_text
    return own_text.main()


if __name__ == "__main__":
    import prepro_tinyshakespeare as this  # by its name, so that dev/'s errors are this file's
    this.run_main(this.main)
