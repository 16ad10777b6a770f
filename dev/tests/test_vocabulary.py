"""Test vocabularies of one's own: dev/data/vocabulary.py and the inputs of
prepro_tinyshakespeare.py, and how a vocabulary travels to samples, resumed runs and converted
models. No network is needed.
"""
import contextlib
import csv
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from unittest import mock

import numpy as np

from dev.data.text import both
from dev.data import first_text, vocabulary
from dev.data.tables import read_rows
from dev.data.vocabulary import (Vocabulary, read_vocabulary, vocabulary_beside,
                                 vocabulary_of_checkpoint, write_vocabulary)
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import TOP, check, check_refusal, fast, refusal, working_in
from dev.tests.documents import check_command, command, prepro_in as program
from dev.tests.test_sample import write_model
from dev.tests.trainings import LLAMA, TRAINER, call
from dev.tools import convert, score
from dev.tools.hf_tokenizer import vocabulary_in
from train_gpt2 import gpt2_encoding

END = b"<|endoftext|>"
EACH_BYTE = [bytes([b]) for b in range(256)]
HARD = ["", "a", "e\u0301 é naïve \u0308", "👩\u200d👧 🏳\ufe0f\u200d🌈 🧑🏽", "a\r\nb\rc\n\r\n\nd",
        "\x00\x01\x7f\x80\xad", "\ufeffa mark \ufeff within", "", "日本語 한국어 العربية हिन्दी",
        "one<|endoftext|>two<|endoftext|>", "<|endoftext |> <|endoftext",
        "it's IT'S we'd I\u2019ll 'twas", "  \n\n\n  a\n\n", 'tabs\t\t,"quoted",\n', "x" * 300,
        " " * 99 + "y", "\u2003x \u00a0y\u200bz\u2028w\x85", "1234567 ½ ٣ Ⅷ",
        "\U0010ffff\ud7ff\ue000"]
LETTERS = vocabulary.letters()
SPOKEN = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"


def tokens_of(folder, name):
    """All tokens of a data set, those for validation first."""
    return np.concatenate([np.fromfile(folder / f"data/{name}/{name}_{part}.bin", "<u2",
                                       offset=1024) for part in ("val", "train")]).tolist()


def file_by_hand(words, eot):
    """The content of a vocabulary's file, by llm.c's format."""
    header = np.zeros(256, "<i4")
    header[:4] = 20240328, 2, len(words), eot
    return header.tobytes() + b"".join(bytes([len(word)]) + word for word in words)


@fast
def test_contents(folder):
    """The vocabularies of a small text, and its tokens, made by hand."""
    text = "ab ab abc abc\né" + 19 * " ab"  # pairs by count: ab 23, then " ab" 22, then " abc" 2
    (folder / "small.txt").write_text(text, encoding="utf-8")
    alphabet = ["\n", " ", "a", "b", "c", "é"]
    joined = [*EACH_BYTE, b"ab", b" ab", b" abc", END]
    for choice, words, tokens in (
            ("bytes", [*EACH_BYTE, END], [256, *text.encode()]),
            ("chars", [*(x.encode() for x in alphabet), END], [6, *map(alphabet.index, text)]),
            ("260", joined, [259, 256, 257, 258, 258, 10, 0xC3, 0xA9, *19 * [257]])):
        said = program(folder, "--input", "small.txt", "--vocab", choice, "--name", choice)
        path = folder / f"data/{choice}/{choice}_tokenizer.bin"
        check(f"{choice}: the file", path.read_bytes() == file_by_hand(words, len(words) - 1),
              read_vocabulary(path).words[-6:])
        check(f"{choice}: the tokens", tokens_of(folder, choice) == tokens,
              tokens_of(folder, choice))
        check(f"{choice}: it says so", "1 document, one a file (--documents)\nwriting "
              f"{len(words)} words to data/{choice}/{choice}_tokenizer.bin\n" in said, said)
        found = vocabulary_beside(folder / f"data/{choice}/{choice}_train.bin")
        check(f"{choice}: it is beside the tokens",
              (found.words, found.eot) == (words, len(words) - 1))
        check(f"{choice}: a list of ids", found.encode("ab") == tokens_for("ab", words))
    again = program(folder, "--input", "small.txt", "--vocab", "data/260/260_tokenizer.bin",
                    "--name", "again")
    check("the words of another file", tokens_of(folder, "again") == tokens_of(folder, "260"),
          again)
    program(folder, "--input", "small.txt", "--vocab", "bytes", "--name", "260")
    check("another vocabulary in its place",
          vocabulary_beside(folder / "data/260/260_val.bin").words == [*EACH_BYTE, END])
    with mock.patch.object(vocabulary, "gpt2_vocabulary", lambda: Vocabulary([*EACH_BYTE, END],
                                                                             256)):
        program(folder, "--input", "small.txt", "--name", "260")
    check("GPT-2's words in its place", not (folder / "data/260/260_tokenizer.bin").exists())


INTERRUPTED = """
import re, sys
import prepro_tinyshakespeare as prepro
from dev.data import vocabulary
vocabulary.LONG = re.compile("(?!)")  # takes minutes
sys.argv = ["prepro", "--input", "acgt.txt", "--vocab", "4096"]
prepro.run_main(prepro.main)
"""


def test_learning(folder):
    """A text without spaces is learned from in pieces of 1,000 characters, and one with spaces as a
    whole. Ctrl-C ends what cannot be told to stop."""
    draw = random.Random(1)
    text = "".join(draw.choices("ACGT", k=300_000))
    for name, given, wish in (("letters", text[:2500], [1000, 1000, 500]),
                              ("spaces", f"letters{' ' * 2400}x", [1007, 1000, 401]),
                              ("words", SPOKEN * 30, [30 * len(SPOKEN)])):
        learned = []
        with mock.patch.object(vocabulary, "interruptible",
                               lambda learn, pieces, *more, to=learned: to.extend(pieces)):
            check_refusal(name, "for 257 words only", vocabulary.joined_vocabulary, 258, [given])
        check(f"{name}: pieces", [*map(len, learned)] == wish and "".join(learned) == given,
              [*map(len, learned)])
    (folder / "acgt.txt").write_text(text)
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=folder, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda:
                               signal.signal(signal.SIGINT, signal.SIG_DFL))
    line = process.stdout.readline()
    check("it says so", line == "learning 4,096 words from 300,000 characters\n", line)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    try:
        found = process.communicate(timeout=10), process.returncode
    finally:
        process.kill()
    check("Ctrl-C", found == (("", "interrupted\n"), 130), found)
    check("Ctrl-C: no file", not (folder / "data").exists())


def tokens_for(text, words):
    """The ids of a text that is a word, or whose characters are."""
    whole = text.encode()
    return [words.index(whole)] if whole in words else [words.index(x.encode()) for x in text]


def test_places(folder):
    """Where the vocabulary of a token file, of the shards of a pattern, and of a checkpoint is."""
    (folder / "a[1]").mkdir()
    own, other = (Vocabulary([*(b"%c" % b for b in range(n)), END], n) for n in (3, 4))
    for name in ("book", "fineweb", "a_train", "val"):
        write_vocabulary(folder / f"a[1]/{name}_tokenizer.bin", own)
    for name in ("book_train.bin", "book_val.bin", "fineweb_train_000001.bin",
                 "fineweb_train_*.bin", "fineweb_val_000000.bin", "a_train_train_000001.bin",
                 "val_train.bin"):
        (folder / "a[1]" / name.replace("*", "000002")).touch()
        check(f"beside {name}", vocabulary_beside(folder / "a[1]" / name) == own)
        check("  by a text", vocabulary_beside(f"{folder}/a[1]/{name}") == own)
    for name in ("train.bin", "bookval.bin", "tokens.bin", "books_train.bin"):
        (folder / "a[1]" / name).touch()
        check(f"not beside {name}", vocabulary_beside(folder / "a[1]" / name) is None)
    write_vocabulary(folder / "tokenizer.bin", other)
    check("a plain name", vocabulary_beside(folder / "train.bin") == other)
    check("in a run's folder", vocabulary_of_checkpoint(folder / "model_00000001.bin") == other)
    write_vocabulary(folder / "small_tokenizer.bin", own)
    check("a checkpoint's own", vocabulary_of_checkpoint(folder / "small.bin") == own)
    check("none", vocabulary_of_checkpoint(folder / "a[1]/small.bin") is None)


def vocabularies(texts, count=300):
    """Vocabularies of texts, by name; also GPT-2's, if it is here."""
    choices = ["bytes", "chars", str(count)]
    if os.environ.get("TIKTOKEN_CACHE_DIR"):  # without it, tiktoken would use the network
        choices.append("gpt2")
    return {choice: vocabulary.vocabulary_of(choice, texts) for choice in choices}


@fast
def test_round_trips(folder):
    """Hard texts become tokens and texts again, also by a vocabulary that was written and read."""
    for name, own in vocabularies(HARD).items():
        write_vocabulary(folder / f"{name}.bin", own)
        read = read_vocabulary(folder / f"{name}.bin")
        for text in HARD:
            ids = own.encode(text)
            check(f"{name}: {text!r:.40}", own.decode(ids) == text, ids[:9])
            check(f"{name}: {text!r:.40}, read", read.encode(text) == ids)
            parts = text.split(END.decode())
            check(f"{name}: {text!r:.40}, ends", ids.count(own.eot) == len(parts) - 1)
        check(f"{name}: a list of numbers", own.encode("a") == [own.words.index(b"a")])
    check("halves of pairs are joined or replaced",
          own.decode(own.encode("\ud83d\ude42 \udc80")) == "🙂 \ufffd")


def test_same_as_tokenizers():
    """A vocabulary of so many words gives the pieces that the tokenizers library gives, which
    learned it: on pages, code and hard texts."""
    import tokenizers
    from tokenizers.pre_tokenizers import ByteLevel
    pages = [(TOP / name).read_text(encoding="utf-8")
             for name in ("README.md", "dev/README.md", "kernels.cu", "train_gpt2.py")]
    texts = [text for text in (*pages, *HARD) if END.decode() not in text]
    for count in (258, 700, 3000):
        learner = tokenizers.Tokenizer(tokenizers.models.BPE())
        learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
        learner.train_from_iterator(pages[:3], tokenizers.trainers.BpeTrainer(
            vocab_size=count - 1, show_progress=False, initial_alphabet=ByteLevel.alphabet(),
            max_token_length=255))
        learner.decoder = tokenizers.decoders.ByteLevel()
        own = vocabulary.vocabulary_of(str(count), pages[:3])
        check(f"{count} words", len(own.words) == count and own.eot == count - 1)
        for text in texts:
            found, wish = own.encode(text), learner.encode(text)
            lengths = [end - start for start, end in wish.offsets] if text.isascii() else None
            check(f"{count} words: {text[:20]!r}", len(found) == len(wish.ids) and (
                lengths is None or [len(own.words[i]) for i in found] == lengths), len(found))
            check(f"{count} words: {text[:20]!r}, words", [letters_of(own.words[i]) for i in found]
                  == wish.tokens)
    long = vocabulary.vocabulary_of("600", ["x" * 5000] * 3 + pages)
    check("words of at most 255 bytes", 100 < max(map(len, long.words)) <= 255)


def letters_of(word):
    return "".join(map(LETTERS.get, word))


# ---- Inputs


def write_inputs(folder, documents):
    """The same documents as a folder of texts, and as tables. Returns five --inputs."""
    import pyarrow
    from pyarrow import parquet
    (folder / "texts/deeper").mkdir(parents=True)
    for i, text in enumerate(documents):
        deeper = "deeper/" * (i >= 9)  # which sorts after the digits
        (folder / f"texts/{deeper}{i:03d}.txt").write_bytes(text.encode())
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        for text in documents:
            file.write(json.dumps({"id": 1, "body": text}) + "\n")
    with open(folder / "a.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "body"], *([i, x] for i, x in enumerate(documents))])
    parquet.write_table(pyarrow.table({"body": [*documents, None]}), folder / "a.parquet")
    return {"a folder": ["texts"], "a pattern": ["texts/**/*.txt"], ".jsonl": ["a.jsonl"],
            ".csv": ["a.csv"], ".parquet": ["a.parquet"]}


def test_inputs(folder):
    """Five kinds of input give the same tokens for the same documents, in every vocabulary, as they
    are and split at blank lines; each document begins with <|endoftext|>."""
    documents = [text for text in HARD if "\x00" not in text or sys.version_info >= (3, 11)]
    documents = [*documents[:9], *sorted(documents[9:])]
    inputs = write_inputs(folder, documents)
    plain = [text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
             for text in documents]
    for unit in ("each", "blank-lines"):
        parts = plain if unit == "each" else [
            part for text in plain for part in text.replace("\n\n", "\n\n\0\0").split("\0\0")]
        for choice in ("bytes", "chars", "300"):
            own = vocabulary.vocabulary_of(choice, parts)
            wish = [i for part in parts for i in (own.eot, *own.encode(part))]
            for name, given in inputs.items():
                flags = ["--documents", unit] if unit != "each" else []
                said = program(folder, "--input", *given, "--name", "out", "--column", "body",
                               "--vocab", choice, *flags)
                found = tokens_of(folder, "out")
                check(f"{name}, {choice}, {unit}: the tokens", found == wish,
                      f"{len(found)}, expected {len(wish)}")
                what = "split at blank lines" if flags else (
                    "one a row" if name.startswith(".") else "one a file")
                check(f"{name}, {choice}, {unit}: said",
                      f"{len(parts)} documents, {what} (--documents)\n" in said, said)
    said = program(folder, "--input", "texts", "a.csv", "a.csv", "--name", "out", "--column",
                   "body", "--vocab", "bytes")
    n = len(documents)
    check("texts and tables", f"{n} documents, one a file; {2 * n} documents, one a row" in said
          and tokens_of(folder, "out").count(256) == 3 * (n + 2), said)
    raw = [(text,) for text in documents]
    check("a table's rows are as they are", [*read_rows(folder / "a.csv", ["body"])] == raw)
    shutil.copy(folder / "a.csv", folder / "B.CSV")
    program(folder, "--input", "B.CSV", "--column", "body", "--vocab", "bytes")
    check("its name, and a suffix in capitals", tokens_of(folder, "B")[0] == 256)


def test_shards(folder):
    """dev/data/fineweb.py writes shards in such a vocabulary, and puts it beside them, where a
    training finds it."""
    documents = [text for text in HARD if "\r" not in text and "\ufeff" not in text] * 20
    inputs = write_inputs(folder, documents)
    program(folder, "--input", *inputs[".csv"], "--name", "small", "--column", "body", "--vocab",
            "300")
    vocab = "data/small/small_tokenizer.bin"
    own = vocabulary_beside(folder / "data/small/small_train.bin")
    flags = ("--input", "a.csv", "--column", "body", "-s", 2000, "--output", "shards", "--workers",
             1)
    check_command("shards", "a_train_000002.bin", command("fineweb", folder, *flags, "--vocab",
                                                          vocab))
    paths = sorted((folder / "shards").glob("a_[vt]*0*.bin"), key=lambda path: path.stem[-6:])
    found = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths]).tolist()
    check("the tokens", found == tokens_of(folder, "small") and len(paths) > 2, len(found))
    check("the vocabulary", vocabulary_beside(folder / "shards/a_train_*.bin") == own)
    check_command("another vocabulary", "begun with tokenizer .*, and now it is gpt2_bytes",
                  command("fineweb", folder, *flags), 1)


def test_tinyshakespeare(folder):
    """The default text: without flags as ever, in GPT-2's tokens and a document for each speech;
    with --vocab one document, in its own folder."""
    text = 5 * SPOKEN
    program(folder, "--vocab", "bytes", text=text)
    check("bytes", tokens_of(folder, "tinyshakespeare_bytes") == [256, *text.encode()])
    before = {path.name: path.read_bytes() for path in folder.rglob("*.bin")}
    with working_in(folder):
        paths = first_text.first_text()  # which has no network here
    check("which a first run takes", {path.name: path.read_bytes()
                                      for path in folder.rglob("*.bin")} == before and paths ==
          both("data/tinyshakespeare_bytes/tinyshakespeare_bytes_{}.bin"), paths)
    shutil.rmtree(folder / "data")
    with working_in(folder), mock.patch("urllib.request.urlopen", mock.Mock(
            return_value=io.BytesIO(text.encode()))), contextlib.redirect_stdout(None):
        paths = first_text.first_text()
    check("or prepares itself", {path.name: path.read_bytes()
                                 for path in folder.rglob("*.bin")} == before, paths)
    program(folder, "--vocab", "270", "--documents", "blank-lines", text=text)
    check("words", tokens_of(folder, "tinyshakespeare_270").count(269) == 11)
    if os.environ.get("TIKTOKEN_CACHE_DIR"):
        program(folder, text=text)
        (folder / "book.txt").write_text(text)
        program(folder, "--input", "book.txt", "--documents", "blank-lines")
        program(folder, "--name", "named", text=text)
        default = [(folder / f"data/tinyshakespeare/tiny_shakespeare_{part}.bin").read_bytes()
                   for part in ("val", "train")]
        for name in ("book", "named"):
            check(f"{name}: the same tokens", default == [
                (folder / f"data/{name}/{name}_{part}.bin").read_bytes()
                for part in ("val", "train")])


def test_without_network(folder):
    """Without a network, and without tiktoken, the text is this repository's prose, as bytes, once
    prepared; and an unfinished one is prepared again."""
    answer = mock.Mock(side_effect=urllib.error.URLError("no network"))
    with (working_in(folder), mock.patch("urllib.request.urlopen", answer),
          mock.patch.dict(sys.modules, {"tiktoken": None}),
          contextlib.redirect_stdout(io.StringIO()) as said):
        paths = first_text.first_text()
        check("it says why", said.getvalue().startswith("WARNING: tinyshakespeare could not be "
                                                        "downloaded (no network): "), said)
        own = vocabulary_beside(paths[0])
        text = own.decode(tokens_of(folder, "repository_bytes")[1:])
        missing = [part for part in (
            "Both are written to be read from top to bottom;",
            first_text.__doc__.split("\n\n")[0].replace("\n", " "),
            "A device does the arithmetic: Cuda, below, or the CPU of dev/cpu/device.py.",
            "Arithmetic is in fp32.") if part not in text]
        check("prose of pages, docstrings and comments",
              not missing and "import numpy" not in text, missing or text[:99])
        sentence = "It is long enough to be kept, and it reads as a text of English prose does."
        others = ("It is too short.", "the 0x01 | of 0x02 | the 0x03 | and 0x04 | the 0x05",
                  "alpha beta gamma delta epsilon zeta eta theta iota kappa")
        check("what is prose", first_text.is_prose(sentence) and
              not any(map(first_text.is_prose, others)))
        check("of some length", 200_000 < len(text) < 2_000_000, len(text))
        with mock.patch.object(first_text, "repository_text", side_effect=AssertionError):
            check("once", first_text.first_text() == paths and answer.call_count == 1)
        os.remove(paths[0])
        with mock.patch.object(first_text, "repository_text", lambda: text):
            check("the trainer has the same default", first_text.data_paths(None, None) == paths)
        check("again if a file is missing", os.path.exists(paths[0]))
        check("GPT-2's vocabulary needs tiktoken", "tiktoken could not get" in refusal(
            gpt2_encoding))
        check("and --vocab is a way out", re.search("tiktoken could not get .*; or give --vocab: ",
                                                    refusal(vocabulary.gpt2_vocabulary)))
    words = vocabulary_beside(folder / paths[0])
    check("bytes need no tiktoken", words.encode("é") == [0xC3, 0xA9])


# ---- Where it travels


def train(*flags, trainer=TRAINER, **named):
    named = {"device": "cpu", "batch-size": 1, "seq-len": 16, "val-batches": 1, "sample-tokens": 30,
             **{name.replace("_", "-"): value for name, value in named.items()}}
    return call(*flags, *(x for name, value in named.items() for x in (f"--{name}", value)),
                program=trainer)


def sample_of(text):
    return text.split("generating:\n---\n", 1)[1].split("\n---", 1)[0]


def test_runs(folder):
    """A vocabulary is found by a training's samples, copied into its folder, and found there by a
    resumed run and by --sample, which encodes its text with it; for both architectures."""
    os.chdir(folder)
    (folder / "book.txt").write_text(20 * SPOKEN.upper())
    program(folder, "--input", "book.txt", "--vocab", "chars")
    own = vocabulary_beside("data/book/book_train.bin")
    V, path = len(own.words), Path("data/book/book_tokenizer.bin")
    write_model(Path("gpt2.bin"), V)
    write_model(Path("llama.bin"), V, Config3, NKV=1, multiple_of=32)
    shards = Path("shards")
    shards.mkdir()
    for name in ("train_000001", "train_000002", "val_000000"):
        shutil.copy(f"data/book/book_{name[:-7]}.bin", shards / f"web_{name}.bin")
    shutil.copy(path, shards / "web_tokenizer.bin")
    letters, asked = {word.decode() for word in own.words}, []
    for trainer, model, data in ((TRAINER, "gpt2", "data/book/book_train.bin"),
                                 (LLAMA, "llama", "shards/web_train_*.bin")):
        out = Path(f"out_{model}")
        flags = dict(trainer=trainer, train_data=data, output=out, checkpoint_every=1)
        status, text, error = train(model=f"{model}.bin", steps=2, val_every=0, sample_every=2,
                                    **flags)
        check(f"{model}: trained", status == 0 and "WARNING" not in text, error or text)
        shown = sample_of(text).replace("<|endoftext|>", "")
        check(f"{model}: a sample in its characters", {*shown} <= letters and len(shown) > 5, shown)
        check(f"{model}: a copy", (out / "tokenizer.bin").read_bytes() == path.read_bytes())
        os.remove(out / "tokenizer.bin")  # a run of before, or a kill
        (out / "tokenizer.bin.12ab.tmp").touch()
        status, text, error = train("-y", 1, steps=3, sample_every=1, trainer=trainer, output=out)
        check(f"{model}: resumed", status == 0 and "resumed      | after step 2" in text, error)
        check(f"{model}: a sample after that", {*sample_of(text).replace("<|endoftext|>", "")} <=
              letters, text)
        check(f"{model}: the copy is made again", sorted(x.name for x in out.glob("tok*")) ==
              ["tokenizer.bin"] and (out / "tokenizer.bin").read_bytes() == path.read_bytes())
        with mock.patch("dev.features.sample.stream", lambda model, tokens, words, *more, **named:
                        asked.append((tokens, words))):
            for given in ("SPEAK\n<|endoftext|>ALL", ""):
                for source in (("-e", out / "model_00000003.bin"), ("-o", out, "-y", 1)):
                    asked.clear()
                    _, _, error = call("--device", "cpu", *source, "--sample", given,
                                       program=trainer)
                    check(f"{model}: --sample {given!r} {source[0]}", asked == [
                        (own.encode(given) or [own.eot], dict(enumerate(own.words)))],
                        asked[:1] or error)
        status, text, error = call("--device", "cpu", "-e", out / "model_00000003.bin", "--sample",
                                   "SPEAK", "-g", 9, program=trainer)
        check(f"{model}: --sample writes", status == 0 and text.startswith("SPEAK") and
              {*text.replace("<|endoftext|>", "")} <= letters | {"\n"}, error or text)
        for given, wish in (("SPEAKER ß", r"'ß' \(U\+00DF\) is none of the \d+ characters of "
                             f"{out}/tokenizer.bin: leave it out"),
                            ("\udcff", r"'\ufffd' \(U\+FFFD\) is none of")):
            check_line(f"{model}: --sample {given!r}", wish, call(
                "--device", "cpu", "-e", out / "model_00000003.bin", "--sample", given,
                program=trainer))


def check_line(name, wish, result):
    """Check that a program ended with one line of an error."""
    status, text, error = result
    check(name, status == 1 and re.fullmatch(f"error: .*{wish}.*\n", error), error or text[-300:])


def test_refused_runs(folder):
    """What a run with another vocabulary than its model's, its folder's or its tokens' says."""
    os.chdir(folder)
    (folder / "book.txt").write_text(20 * SPOKEN)
    for choice in ("bytes", "chars", "300"):
        program(folder, "--input", "book.txt", "--vocab", choice, "--name", choice)
    write_model(Path("model.bin"), 257)
    data = {name: f"data/{name}/{name}_train.bin" for name in ("bytes", "chars", "300")}
    flags = dict(steps=1, val_every=0, sample_every=0, output="out")
    status, text, error = train(model="model.bin", train_data=data["bytes"], **flags)
    check("a run", status == 0, error)
    again = "out/model_00000001.bin"
    small = len(vocabulary_beside(data["chars"]).words)
    shutil.copy("data/bytes/bytes_val.bin", "other_val.bin")
    for name, wish, more in (
            ("fewer words than the model", f"chars_tokenizer.bin: has {small} words, and the model "
             "V = 257; expected as many",
             dict(model="model.bin", train_data=data["chars"])),
            ("more", "300_tokenizer.bin: has 300 words, and the model V = 257",
             dict(model="model.bin", train_data=data["300"])),
            ("another than the checkpoint's", f"chars_train.bin: its tokens have the {small} words "
             "of .*chars_tokenizer.bin, and out/model_00000001.bin the 257 of out/tokenizer.bin: "
             "expected the same; prepro_tinyshakespeare.py --vocab out/tokenizer.bin makes",
             dict(model=again, train_data=data["chars"])),
            ("others to validate", "chars_val.bin: its tokens have the words of "
             ".*chars_tokenizer.bin, and those of .*bytes_train.bin the words of "
             ".*bytes_tokenizer.bin: expected the same",
             dict(model="model.bin", train_data=data["bytes"],
                  val_data="data/chars/chars_val.bin", val_every=1)),
            ("GPT-2's to validate", "other_val.bin: its tokens have GPT-2's words, and",
             dict(model="model.bin", train_data=data["bytes"], val_data="other_val.bin")),
            ("HellaSwag", "questions.bin: has GPT-2's tokens, and the model its own vocabulary, ",
             dict(model="model.bin", train_data=data["bytes"], hellaswag="questions.bin",
                  val_every=1))):
        check_line(name, wish, train(**flags | {"output": "new"} | more))
        check(f"{name}: nothing is written", not list(Path().glob("new/*_*")))
    check_refusal("score.py", "questions.bin: has GPT-2's tokens, and the model its own",
                  score.main, ["-e", again, "--data", "questions.bin"])
    shutil.copy("data/chars/chars_tokenizer.bin", "data/bytes/bytes_tokenizer.bin")
    check_line("a vocabulary that is too small for its tokens",
               f"bytes_train.bin: token \\d+ is \\d+; expected ids below V = {small}, ",
               train(**flags | dict(output="new", model="d1", train_data=data["bytes"])))
    Path("new").mkdir(exist_ok=True)
    shutil.copy("data/300/300_tokenizer.bin", "new/tokenizer.bin")
    check_line("another one in the run's folder", "new/tokenizer.bin: has other words than the "
               "tokens of -i, data/chars/chars_tokenizer.bin: remove it, or give another -o",
               train(**flags | dict(output="new", model="d1", train_data=data["chars"])))
    check("  which stays", Path("new/tokenizer.bin").stat().st_size ==
          Path("data/300/300_tokenizer.bin").stat().st_size and
          len(list(Path("new").iterdir())) == 1)
    Path("tokenizer.bin").write_bytes(b"llama2.c has another file of this name" + bytes(1024))
    check_line("a file of another kind", "tokenizer.bin: its header of 1024 bytes begins with",
               call("--device", "cpu", "-e", "model.bin", "--sample", "a"))


def test_converted(folder):
    """A folder of Hugging Face's gets the vocabulary as tokenizer.json, which gives the same ids,
    and a checkpoint of that gets it back; for both architectures."""
    import tokenizers
    os.chdir(folder)
    texts = [text for text in HARD if "\ud7ff" not in text]
    for choice, own in vocabularies(texts).items():
        if choice == "gpt2":
            continue
        kind, more = (Config3, dict(NKV=1, multiple_of=32)) if choice == "chars" else (None, {})
        write_model(Path("a.bin"), len(own.words), *filter(None, [kind]), **more)
        write_vocabulary("tokenizer.bin", own)
        out = Path(f"hf_{choice}")
        with contextlib.redirect_stdout(io.StringIO()) as said:
            convert.main(["a.bin", str(out)])
        check(f"{choice}: written", "no tokenizer" not in said.getvalue(), said.getvalue())
        other = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
        for text in texts:
            found = other.encode(text).ids
            check(f"{choice}: {text!r:.30}", found == own.encode(text), found[:9])
            check(f"{choice}: {text!r:.30}, decoded",
                  other.decode(found, skip_special_tokens=False) == text)
        config = json.loads((out / "config.json").read_text())
        check(f"{choice}: config.json", (config["bos_token_id"], config["eos_token_id"]) ==
              (own.eot, own.eot) and config["vocab_size"] == len(own.words))
        convert.main([str(out), f"back_{choice}.bin"])
        check(f"{choice}: back", vocabulary_of_checkpoint(f"back_{choice}.bin") == own and
              Path(f"back_{choice}_tokenizer.bin").exists())
        check(f"{choice}: back, the weights",
              Path(f"back_{choice}.bin").read_bytes()[2048:] == Path("a.bin").read_bytes()[2048:])
        content = json.loads((out / "tokenizer.json").read_text())
        content["model"]["vocab"].pop("a")
        (out / "tokenizer.json").write_text(json.dumps(content))
        check(f"{choice}: another tokenizer is none", vocabulary_in(out / "tokenizer.json") is None)
    # dev/lab/gpt2_numpy.py, and the ids of a prompt
    write_vocabulary("back_bytes_tokenizer.bin", vocabulary.vocabulary_of("bytes", []))
    from dev.lab import gpt2_numpy
    with (mock.patch.object(sys, "argv", ["gpt2_numpy.py", "back_bytes.bin", "é!"]),
          contextlib.redirect_stdout(io.StringIO()) as said):
        gpt2_numpy.main()
    check("gpt2_numpy.py", "over 3 tokens" in said.getvalue(), said.getvalue())


def test_transformers(folder):
    """transformers loads such a folder's tokenizer, and its ids are the same, also after it has
    saved it itself."""
    from transformers import AutoTokenizer
    os.chdir(folder)
    texts = [text for text in HARD if "\ud7ff" not in text]
    for choice in ("chars", "300"):
        own = vocabulary.vocabulary_of(choice, texts)
        write_model(Path("a.bin"), len(own.words))
        write_vocabulary("a_tokenizer.bin", own)
        convert.main(["a.bin", f"hf_{choice}"])
        found = AutoTokenizer.from_pretrained(f"hf_{choice}")
        for text in texts:
            ids = found(text)["input_ids"]
            check(f"{choice}: {text!r:.30}", ids == own.encode(text), ids[:9])
            check(f"{choice}: {text!r:.30}, decoded", found.decode(ids) == text)
        check(f"{choice}: <|endoftext|>", found.eos_token_id == found.bos_token_id == own.eot)
        found.save_pretrained("saved")
        check(f"{choice}: saved and read", vocabulary_in(Path("saved/tokenizer.json")) == own)


# ---- Refusals


def test_refusals(folder):
    """Each mistake is refused in one line, and nothing is written."""
    (folder / "book.txt").write_text(9 * SPOKEN)
    (folder / "texts").mkdir()
    (folder / "none").mkdir()
    (folder / "none/notes.pdf").touch()
    for name, content in (("texts/a.txt", b"a"),
                          ("texts/b.txt", b"caf\xe9"),
                          ("half.csv", b"a,b\n1\n"), ("open.csv", b'text\n"never closed\n'),
                          ("latin.csv", b"text\ncaf\xe9\n"), ("twice.csv", b"text,text\n1,2\n"),
                          ("empty.csv", b""), ("number.jsonl", b'{"text": 3}\n')):
        (folder / name).write_bytes(content)
    for wish, *arguments in (
            (r"--vocab 257: expected bytes, chars, gpt2, a number of words from 258 to 50,257, or "
             r"the NAME_tokenizer.bin", "--input", "book.txt", "--vocab", 257),
            ("--vocab 50258: expected", "--input", "book.txt", "--vocab", 50258),
            ("--vocab words: expected", "--vocab", "words"),
            ("--vocab: expected one argument", "--vocab"),
            ("none_tokenizer.bin: .*No such file|none_tokenizer.bin: .*expected", "--input",
             "book.txt", "--vocab", "none_tokenizer.bin"),
            (r"--vocab 9999: the text has pairs to join for \d+ words only", "--input", "book.txt",
             "--vocab", 9999),
            ("--input book.txt texts: is no single file or folder", "--input", "book.txt", "texts",
             "--vocab", "bytes"),
            (r"--input \*.txt: is no single file or folder", "--input", "*.txt", "--vocab",
             "bytes"),
            (r"\*.md: could not be read \(no such file or folder, and no file matches", "--input",
             "*.md"),
            ("none: has none of .txt, .parquet, .jsonl, .csv; expected a folder", "--input",
             "none"),
            ("texts/b.txt: byte 3 is not UTF-8", "--input", "texts"),
            ("half.csv: row 1 has 1 fields; expected 2", "--input", "half.csv", "--column", "a"),
            ("half.csv: has no column text; expected it among .'a', 'b'.", "--input", "half.csv"),
            ("empty.csv: has no column text", "--input", "empty.csv"),
            ("twice.csv: has 2 column text", "--input", "twice.csv"),
            ("open.csv: is no CSV", "--input", "open.csv"),
            ("latin.csv: is not UTF-8", "--input", "latin.csv"),
            ("number.jsonl: text of row 1 is of type int; expected a text", "--input",
             "number.jsonl"),
            ("book.txt: --documents rows, and it is a text; expected files or blank-lines",
             "--input", "book.txt", "--documents", "rows"),
            ("number.jsonl: --documents files, and it is a table; expected rows or blank-lines",
             "--input", "number.jsonl", "--documents", "files"),
            ("--documents rows: tinyshakespeare is a text", "--documents", "rows")):
        check_refusal(" ".join(map(str, arguments)), wish, program, folder, *arguments)
    with mock.patch.dict(sys.modules, {"tokenizers": None}):
        check_refusal("without tokenizers", r"tokenizers is missing .*dev/requirements.txt",
                      program, folder, "--input", "book.txt", "--vocab", 300)
    with mock.patch.dict(sys.modules, {"tiktoken": None}):
        own = Vocabulary([*EACH_BYTE, b"ab", END], 257, "a.bin")
        check_refusal("without tiktoken", "a.bin: needs tiktoken .*requirements.txt", own.encode,
                      "ab")
    chinese = "".join(map(chr, range(0x4E00, 0x4E00 + 50257 - 20000))) + "".join(
        map(chr, range(0x20000, 0x20000 + 20000)))
    check_refusal("chars", "50,257 different characters; expected at most 50,256: give --vocab",
                  vocabulary.vocabulary_of, "chars", [chinese])
    check_refusal("words of another kind", "x.bin: its words are neither single characters, nor "
                  "have they all 256 bytes", Vocabulary([b"ab", b"c", END], 2, "x.bin").encode, "c")
    for eot in (-1, 3):
        (folder / "bad.bin").write_bytes(file_by_hand([b"a", b"b", END], eot))
        check_refusal("an end that is no word", f"bad.bin: its <.endoftext.> is token {eot}; "
                      "expected one of its 3", read_vocabulary, folder / "bad.bin")
    check("nothing is written", not (folder / "data").exists())
    for name in ("train_gpt2.py", "prepro_tinyshakespeare.py"):
        shutil.copy(TOP / name, folder)
    done = subprocess.run([sys.executable, "prepro_tinyshakespeare.py", "--input", "book.txt"],
                          cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""})
    check("without dev/", (done.returncode, done.stderr) == (
        1, "error: flags need dev/, which is missing beside this file: restore it\n"), done)
    done = subprocess.run([sys.executable, "-c", "import prepro_tinyshakespeare as prepro\n"
                           "prepro.TEXT_URL = 'http://localhost:9'\n"
                           "prepro.run_main(prepro.main)"],
                          cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""})
    check("without dev/, the default text", done.returncode == 1 and
          re.fullmatch("error: tinyshakespeare could not be downloaded.*\n|error: tiktoken could "
                       "not get.*\n", done.stderr) and not done.stdout, done)
    with working_in(folder):
        done = subprocess.run([sys.executable, TOP / "prepro_tinyshakespeare.py", "--vocab", "x"],
                              capture_output=True, text=True)
    check("as a program", done.returncode == 1 and done.stderr.startswith("error: --vocab x: "),
          done)
