"""Test prepro_tinyshakespeare.py: a text becomes two token files, which are also made here, byte by
byte. No network is needed. Other vocabularies are tested in test_vocabulary.py.
"""
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

from dev.data.first_text import data_paths
from dev.data.text import call_tiktoken
import prepro_tinyshakespeare as prepro
from dev.data import vocabulary
from dev.tests.checks import EXACT, check, check_refusal, fast, refusal
from dev.tests.documents import prepro_in
from dev.tests.folders import byte_encoding

END = 50256  # <|endoftext|>
# Bytes, by GPT-2's id.
ORDER = [*range(33, 127), *range(161, 173), *range(174, 256), *range(33), *range(127, 161), 173]
SPEECH = "First Citizen:\nBefore we proceed é any further, <|endoftext|> hear me speak.\n\n"


def byte_vocabulary():
    """GPT-2's vocabulary without words of several bytes."""
    words = [bytes([b]) for b in ORDER] + [b"not in a text %d" % i for i in range(256, END)]
    found = vocabulary.Vocabulary([*words, b"<|endoftext|>"], END)
    found.encoding = byte_encoding()
    return found


def program(folder, *arguments, text=None):
    """Run prepro in a folder with this vocabulary. Returns the output."""
    with (mock.patch.object(prepro, "gpt2_encoding", byte_encoding),
          mock.patch.object(vocabulary, "gpt2_vocabulary", byte_vocabulary)):
        return prepro_in(folder, *arguments, text=text)


def tokens_in(path):
    """The tokens in a file, after checking that its header is llm.c's."""
    content = path.read_bytes()
    header = struct.unpack("<256i", content[:1024])
    tokens = struct.unpack(f"<{len(content) // 2 - 512}H", content[1024:])
    check(f"{path.name}: its header", header == (20240520, 1, len(tokens), *[0] * 253), header[:4])
    return list(tokens)


def counted(text, border="\n\n"):
    """The tokens of a text: a document begins at the start, and after each border, if there is one.
    <|endoftext|> in the text itself is the special token too, as in llm.c's files."""
    tokens = []
    if border:
        text = text.replace(border, f"{border}<|endoftext|>")
    for document in text.split("<|endoftext|>"):
        tokens += [END, *(ORDER.index(byte) for byte in document.encode())]
    return tokens


@fast
def test_files(folder):
    """The two files of a long text, and of a short one, whose first tenth is for validation."""
    for name, times, val in (("long", 5000, 32768), ("short", 3, None)):
        text, wish = times * SPEECH, counted(times * SPEECH)
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        said = program(folder, "--input", f"{name}.txt", "--documents", "blank-lines")
        check(f"{name}: says what a document is",
              f"{times + 1:,} documents, split at blank lines (--documents)" in said, said)
        found = [tokens_in(folder / f"data/{name}/{name}_{part}.bin") for part in ("val", "train")]
        yield f"{name}: tokens to validate on", len(found[0]), val or len(wish) // 10, EXACT
        check(f"{name}: all tokens, in order", found[0] + found[1] == wish, len(wish))
        check(f"{name}: documents", wish.count(END) == 1 + 2 * times and wish[0] == END,
              wish.count(END))
    said = program(folder, "--input", "short.txt", "--name", "my-own_1.5")
    parts = [tokens_in(folder / f"data/my-own_1.5/my-own_1.5_{part}.bin")
             for part in ("val", "train")]
    check("--name; a file is a document", parts[0] + parts[1] == counted(3 * SPEECH, None), said)
    check("and it says so", "1 document, one a file (--documents)" in said, said)
    program(folder, text=9 * SPEECH)
    parts = [tokens_in(folder / f"data/tinyshakespeare/tiny_shakespeare_{part}.bin")
             for part in ("val", "train")]
    check("tinyshakespeare is downloaded", parts[0] + parts[1] == counted(9 * SPEECH))


def test_pairs(folder):
    """A file's other part has its name, with one train or val in it replaced."""
    for train, val in (("constraint_train.bin", "constraint_val.bin"),
                       ("train_train.bin", "train_val.bin"),
                       ("train_val_train.bin", "train_val_val.bin"),
                       ("val_train_000001.bin", "val_val_000001.bin"),
                       ("trains/a_train_*.bin", "trains/a_val_*.bin"), ("mytrain.bin", "myval.bin"),
                       ("train_constraint.bin", "val_constraint.bin"),
                       ("interval_train2.bin", "interval_val2.bin")):
        check(f"the pair of {train}", data_paths(train, None) == [train, val],
              data_paths(train, None))
        check(f"the pair of {val}", data_paths(None, val) == [train, val],
              data_paths(None, val))
    check("both are given", data_paths("a", "b") == ["a", "b"])
    check_refusal("a name without train", "train/a.bin has no 'train' in its name: give -j",
                  data_paths,
                  "train/a.bin", None)
    (folder / "train.txt").write_text(9 * SPEECH, encoding="utf-8")
    program(folder, "--input", "train.txt")
    os.chdir(folder)
    found = [tokens_in(Path(path))
             for path in data_paths("data/train/train_train.bin", None)]
    check("--input train.txt: both parts", found[1] + found[0] == counted(9 * SPEECH, None))


def test_spellings(folder):
    """The trainer's default text is found however its name was spelled; of several the last that
    was written."""
    name = "tinyshakespeare"
    for place, (*flags, wish) in enumerate((
            ("--input", "own.txt", "--name", name, f"{name}/{name}"),
            ("--input", f"{name}.txt", f"{name}/{name}"),
            ("--input", "own.txt", "--name", "tiny_shakespeare",
             "tiny_shakespeare/tiny_shakespeare"),
            (f"{name}/tiny_shakespeare",))):
        here = folder / str(place)
        here.mkdir()
        for each in ("own", name):
            (here / f"{each}.txt").write_text(9 * SPEECH, encoding="utf-8")
        program(here, *flags, text=9 * SPEECH)
        os.chdir(here)
        with mock.patch("dev.data.first_text.prepare_tinyshakespeare",
                               side_effect=AssertionError("prepared again")):
            found = data_paths(None, None)
        check(f"found after {' '.join(flags) or 'prepro'}",
              found == [f"data/{wish}_{part}.bin" for part in ("train", "val")], found)
    program(here, "--input", "own.txt", "--name", name)
    for path in (here / f"data/{name}").glob("tiny_*"):
        os.utime(path, ns=(0, 0))
    found = data_paths(None, None)
    check("the one that was written last", found[0] == f"data/{name}/{name}_train.bin", found)


def test_byte_order_marks(folder):
    """A mark at the start of a text is not a part of it, and one within stays; Windows' line ends
    become newlines."""
    text = 3 * SPEECH + "a mark \ufeff within\n"
    (folder / "marked.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    for name, *arguments in (("marked/marked", "--input", "marked.txt"),
                             ("tinyshakespeare/tiny_shakespeare",)):
        program(folder, *arguments, text="\ufeff" + text)
        val, train = (tokens_in(folder / f"data/{name}_{part}.bin") for part in ("val", "train"))
        border = None if arguments else "\n\n"
        check(f"{name}: its tokens", val + train == counted(text, border), (val + train)[:5])


def test_tables(folder):
    """Rows with fields are refused in files that are not named as tables; a text that has braces is
    none."""
    row = b'{"text": "Before we proceed any further, hear me speak."}\n'
    others = {"a.json": b"[" + row + b"]", "A.TSV": b"1\tSpeak.\n",
              "rows.txt": 9 * row, "rows": b"\n" + 9 * row, "marked": b"\xef\xbb\xbf" + row,
              "b.txt": row + b"\n" + row,
              "c.ndjson": b"\n\n"}
    for name, content in others.items():
        (folder / name).write_bytes(content)
        wish = f"{name}: .*: give the text alone, or rows in one of .parquet, .jsonl, .csv"
        check_refusal("prepro", wish, program, folder, "--input", name)
    check("nothing is written", not (folder / "data").exists())
    for name, content in (("code.txt", b"{\n} {}\n" * 9),
                          ("one.txt", row + b"is how a row looks.\n"),
                          ("list.txt", b"[1]\n[2]\n" * 9), ("numbers.txt", b"12\n" * 20)):
        (folder / name).write_bytes(content)
        program(folder, "--input", name)
        parts = [tokens_in(folder / f"data/{name[:-4]}/{name[:-4]}_{part}.bin")
                 for part in ("val", "train")]
        check(f"{name} is a text", parts[0] + parts[1] == counted(content.decode(), None))
    (folder / "empty.txt").touch()
    check_refusal("prepro", "the input has 1 tokens, and needs", program, folder, "--input",
                  "empty.txt")


PANIC = r"""
import sys, tiktoken, prepro_tinyshakespeare as prepro
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s++$|\s+(?!\S)|\s"  # GPT-2's
from dev.data import vocabulary
from dev.tests.folders import byte_encoding
single = byte_encoding()
ranks = {single.decode_single_token_bytes(i): i for i in range(256)}
found = vocabulary.Vocabulary([*ranks, b"<|endoftext|>"], 256)
found.encoding = tiktoken.Encoding(
    "pieces", pat_str=PATTERN, special_tokens={prepro.END_OF_TEXT: 50256}, mergeable_ranks=ranks)
vocabulary.gpt2_vocabulary = lambda: found
sys.argv = ["prepro", "--input", "spaces.txt"]
prepro.run_main(prepro.main)
"""


def test_panics(folder):
    """A panic in tiktoken's Rust code, which is no Exception, becomes one line, and what Rust
    prints is hidden. GPT-2's own pattern fails at a word after a million spaces: encode raises
    ValueError, and encode_ordinary panics."""
    PanicException = type("PanicException", (BaseException,), {})
    for error, wish in ((PanicException("StackOverflow"),
                         r"tiktoken failed \(StackOverflow\): .*install -r req"),
                        (KeyboardInterrupt(), None), (SystemExit(3), None)):
        try:
            found = refusal(call_tiktoken, mock.Mock(side_effect=error), "a text")
        except BaseException as e:
            found = e
        ok = re.match(wish, found) if wish else found is error
        check(f"{type(error).__name__} in tiktoken", ok, found)
    (folder / "spaces.txt").write_text(10**6 * " " + "x")
    for redirected in ("2>said", "2>said <&-", "2>&- >said"):
        done = subprocess.run(f'"{sys.executable}" -c "$PROGRAM" {redirected}', cwd=folder,
                              shell=True, env=os.environ | {"PROGRAM": PANIC},
                              stdout=subprocess.DEVNULL)
        said = (folder / "said").read_text()
        wish = "" if "2>&-" in redirected else r"error: tiktoken failed \(.*\): .*\n"
        check(f"a million spaces, {redirected}", done.returncode == 1 and re.fullmatch(wish, said),
              said[-300:])
    check("no file is written", not (folder / "data").exists())


@fast
def test_refusals(folder):
    """Each mistake is refused in one line, and no file is written."""
    for name, content in (("tiny.txt", b"18 bytes of a text"), (
        "latin.txt", b"caf\xe9"), ("text.txt", 99 * b"x")):
        (folder / name).write_bytes(content)
    for wish, *arguments in (("19 tokens, and needs at least 20", "--input", "tiny.txt"),
                             ("latin.txt: byte 3 is not UTF-8", "--input", "latin.txt"),
                             ("absent.txt: could not be read", "--input", "absent.txt"),
                             ("--name a/b: expected letters", "--input", "text.txt", "--name",
                              "a/b"),
                             (r"\(no network\): connect to the network, or .* --input FILE",)):
        check_refusal("prepro", wish, program, folder, *arguments)
    check("nothing is written", not (folder / "data").exists())
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        check_refusal("a full disk", "No space left on device", program, folder, "--input",
                      "text.txt")
    check("nor a part", not list(folder.glob("data/**/*.*")), list(folder.glob("data/**/*.*")))
