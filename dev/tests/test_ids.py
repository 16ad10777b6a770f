"""Test tokens that stand for no text: files of ids, what is refused, and a model of them."""
import io
import re

import numpy as np

from dev.data import own_text
from dev.data.vocabulary import read_vocabulary
from dev.tests.checks import EXACT, check, check_refusal
from dev.tests.test_chats import prepare
from dev.tests.test_controls import sampled
from dev.tests.trainings import TRAINER, call
from dev.tools import convert, evaluate
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import read_tokens

IDS = np.random.default_rng(1).integers(0, 600, 500)


def test_files(folder, monkeypatch):
    """Ids of all kinds become the same tokens; several files follow each other."""
    monkeypatch.chdir(folder)
    np.save("wide.npy", IDS.astype(">i8"))
    IDS.astype("<u2").tofile("short.bin")
    IDS.astype("<u4").tofile("long.bin")
    for name, *files in (("wide", "wide.npy"), ("short", "short.bin"), ("long", "long.bin"),
                         ("two", "wide.npy", "long.bin")):
        prepare(own_text, "--input", *files, "--vocab-size", 600, "--name", name)
        found = [read_tokens(f"data/{name}/{name}_{part}.bin", 600) for part in ("val", "train")]
        wish = np.tile(IDS, len(files))
        check(f"{name}: a tenth is for validation", len(found[0]) == len(wish) // 10)
        yield name, np.concatenate(found).astype(int), wish, EXACT
    words = read_vocabulary("data/two/two_tokenizer.bin")
    text = words.decode(IDS)
    check("their text", text == "".join(f" {i}" for i in IDS), text)
    yield "and back", words.encode_array(text).astype(int), IDS, EXACT
    for bad in ("600", "-1", "1.5", "1,2", "²", END_OF_TEXT):
        check_refusal(bad, f"'{re.escape(bad)}' is no id: .* from 0 to 599, and stand for no text",
                      words.encode, f"12 {bad} 7")


def test_refusals(folder, monkeypatch):
    """Files that have no such ids, and flags that do not go with them."""
    monkeypatch.chdir(folder)
    for name, ids in (("good", IDS), ("negative", IDS - 9), ("half", IDS / 2), ("few", IDS[:19]),
                      ("rows", IDS.reshape(-1, 5)), ("none", IDS[:0]),
                      ("objects", np.array([1, None]))):
        np.save(f"{name}.npy", ids)
    (folder / "odd.bin").write_bytes(b"123")
    (folder / "book.txt").write_text("A text.")
    for wish, *arguments in (
            ("good.npy: has ids; expected --vocab-size too: .*, here 600 or more", "good.npy"),
            (r"has ids from \d to 599, the first wrong one at index \d+: 599; expected 0 to 598",
             "good.npy", "--vocab-size", 599),
            ("negative.npy: has ids from -.* to 590, .*; expected 0 to 599", "negative.npy"),
            ("half.npy: has ids of the type float64 .* expected whole numbers", "half.npy"),
            (r"rows.npy: .* and the shape \(100, 5\); expected one row", "rows.npy"),
            ("none.npy: .*; expected at least one id", "none.npy"),
            ("odd.bin: has 3 bytes; expected ids", "odd.bin"),
            ("the input has 19 tokens, and needs at least 20", "few.npy"),
            ("objects.npy: is no .npy file of numbers", "objects.npy"),
            ("book.txt: expected ids, .*, and a text has --vocab", "good.npy", "book.txt", "--name",
             "a"),
            ("--vocab chars: is for texts, and the input is ids", "good.npy", "--vocab", "chars")):
        size = () if "--vocab-size" in arguments or "too" in wish else ("--vocab-size", 600)
        check_refusal(wish, wish, prepare, own_text, "--input", *arguments, *size)
    check_refusal("no input", "--vocab-size: expected --input too", prepare, own_text,
                  "--vocab-size", 9)


def test_model(folder, monkeypatch):
    """A model of ids has as many words, begins samples with the first of its data, and goes on from
    ids; transformers takes its export; what needs a text refuses it."""
    monkeypatch.chdir(folder)
    np.save("scale.npy", np.tile(np.arange(12), 60))
    prepare(own_text, "--input", "scale.npy", "--vocab-size", 12)
    here = "--device", "cpu"
    status, text, error = call("-e", "1x2x32", "-t", 16, "-i", "data/scale/scale_train.bin", "-x",
                               60, "-l", 1e-2, "-u", 5, "-s", 60, "-v", 0, "-g", 5, "-o", "log",
                               *here)
    first = int(read_tokens("data/scale/scale_train.bin", 12)[0])
    wish = "".join(f" {i % 12}" for i in range(first + 1, first + 6))
    check("a sample goes on from the first id", not status and f"---\n{wish}\n---" in text, text)
    text, _ = sampled(TRAINER, "log", "--sample", "3 4 5", "-g", 9, "--temperature", 0)
    check("--sample", text == "3 4 5 6 7 8 9 10 11 0 1 2\n", text)
    convert.main(["log", "hf", "--dtype", "fp32"])
    from transformers import AutoModelForCausalLM
    import torch
    found = AutoModelForCausalLM.from_pretrained("hf").generate(
        torch.tensor([[3, 4, 5]]), max_new_tokens=9, do_sample=False)
    check("transformers", " ".join(map(str, found[0].tolist())) == text.strip(), found)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for wish, *arguments in (
            ("--chat needs text, and log/tokenizer.bin has ids, .*; --sample", "--chat"),
            ("--answer needs text", "--sample", "3 4", "--answer"),
            ("--stop needs text", "--sample", "3 4", "--stop", "5"),
            ("--document-mask 1 needs text", "-i", "data/scale/scale_train.bin", "--document-mask"),
            ("the model's tokens are ids, and none begins a text", "--sample", "")):
        _, _, error = call("-e", "log", *arguments, "-t", 16, *here)
        check(wish, re.search(f"^error: {wish}", error, re.M), error)
    check_refusal("--chat", "a conversation needs text", convert.main, ["log", "b.gguf", "--chat"])
    (folder / "a.txt").write_text("3 4 5")
    check_refusal("a text", "--input needs text", evaluate.main, ["-e", "log", "--input", "a.txt"])
