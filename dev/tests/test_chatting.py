"""Test that --chat remembers: a model that was fine-tuned for it answers by what an earlier turn
said, each token is passed once, and at T the oldest turns leave. Its exports answer the same."""
import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.data import own_text
from dev.data.chats import Llama, Plain, template_of_encoding, tokens_of_conversation
from dev.features.kv_cache import Cached
from dev.tests.checks import TOP, check
from dev.tests.test_chats import BYTE_WORDS, llama_words, prepare
from dev.tests.test_controls import heard
from dev.tests.trainings import call
from dev.tools.gguf_file import MESSAGES
from train_gpt2 import next_logits

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that has learned conversations of two turns, of which the second asks
    for what the first has said."""
    folder = tmp_path_factory.mktemp("run")
    names = np.random.default_rng(1).choice(["Ann", "Bob", "Eve", "Jim", "Kay", "Tom"], 200)
    lines = [json.dumps({"messages": [
        dict(role="user", content=f"I am {name}."), dict(role="assistant", content="Hi."),
        dict(role="user", content="Who am I?"), dict(role="assistant", content=f"{name}.")]})
        for name in names]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "names.jsonl").write_text("\n".join(lines))
        prepare(own_text, "--input", "names.jsonl", "--chat", "--vocab", "bytes", "--row", 72)
        status, text, error = call(
            "-e", "1x4x64", "-i", "data/names/names_train.bin", "-b", 8, "-x", 200, "-l", 5e-3,
            "-u", 20, "-q", 0.1, "-s", 0, "-v", 0, "-o", "log", "--seed", 1, "--shuffle", 1,
            "--device", "cpu")
        assert status == 0, error
    return folder / "log"


def chat(run, text, *more):
    """(stdout, stderr) of a chat with the model of a run, which answers greedily."""
    with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode()))):
        status, text, error = call("-e", run, "--chat", "--temperature", 0, "--device",
                                   "cpu", *more)
    assert status == 0, error
    return text, error


def test_remembers(run):
    """The answer has the name of an earlier turn; after /reset that of another one."""
    for name, other in (("Bob", "Eve"), ("Kay", "Bob")):
        text, error = chat(run, f"I am {name}.\nWho am I?\n/reset\nI am {other}.\nWho am I?",
                           "--answer")
        check(name, text == f" Hi.\n {name}.\n Hi.\n {other}.\n", text)
        check("and nothing is said but that", re.findall(r"^\(.*|^WARN.*", error, re.M) == [
            "(forgot 2 turns)"], error)


def test_passes(run):
    """Each token is passed once, until T; there the oldest turns leave, and only those that stay
    are passed again. What the model sees is the conversation as it was in training."""
    passed = []

    def counted(model, tokens):
        passed.append(len(tokens))
        return next_logits(model, tokens)

    def one(model):
        passed.append(1)
        return pass_of_token(model)

    pass_of_token = Cached.pass_of_token
    lines = "I am Bob.\nWho am I?\nI am Eve.\nWho am I?\n"
    with mock.patch("train_gpt2.next_logits", counted), mock.patch.object(
            Cached, "pass_of_token", one), heard() as calls:
        text, error = chat(run, lines, "--answer")
    first, second, third, fourth = (bytes(min(token, 255) for token in tokens)
                                    for tokens, _ in calls)
    asked = b"\xffUser: %s\nAssistant:"
    wish = asked % b"I am Bob." + b" Hi." + asked % b"Who am I?"
    check("the second turn sees the first", second == wish, second)
    check("at T = 72 only the third stays", third == asked % b"I am Eve.", third)
    check("which is said", re.findall(r"^\(.*", error, re.M) == [
        "(forgot the oldest 2 turns of 3: the model sees T = 72 tokens (-t))"], error)
    check("answers", text == " Hi.\n Bob.\n Hi.\n Eve.\n", text)
    # The last token that is drawn, <|endoftext|>, is not passed
    wish = [len(tokens) + len(drawn) - 1 for tokens, drawn in (calls[1], calls[3])]
    check("passes", sum(passed) == sum(wish), (passed, wish))


def test_exports(run, folder):
    """The recipe has transformers, and llama.cpp if it is here, answer two turns as --chat does;
    turns beyond T are refused."""
    for name in ("train_gpt2.py", "kernels.cu", "dev"):
        (folder / name).symlink_to(TOP / name)
    (folder / "names").symlink_to(run)

    def export(*arguments):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["dev/tools/recipes/export.sh", *arguments], cwd=folder, text=True,
                              capture_output=True, env=os.environ | {"PATH": path})
        return done.returncode, done.stdout, done.stderr

    status, text, error = export("names", "I am Bob.", "Who am I?")
    check("answers", not status and "--chat answers:\n Hi.\n Bob.\n" in text, text + error)
    programs = ["transformers", *["llama_cpp"] * bool(find_spec("xllamacpp"))]
    found = re.findall("^(.*): the same$", text, re.M)
    check("the same", found[:2] == programs, text + error)
    for wish, *arguments in (("the turns have more tokens than the model sees", "names", *"abcd"),
                             ("none: expected a run's folder", "none", "a")):
        status, _, error = export(*arguments)
        check(wish, status == 1 and f"error: {wish}" in error, error)
    check_ollama(folder / "names.gguf", (folder / "names.Modelfile").read_text())


def check_ollama(path, text):
    """The file has the fields that Ollama reads, and of these types; its Modelfile names what it
    needs, and has a template that makes the text that Jinja's makes."""
    from gguf import GGUFReader
    fields = GGUFReader(path).fields
    kinds = {name: fields[name].types[-1].name if name in fields else None for name in OLLAMA}
    check("its fields", kinds == OLLAMA, kinds)
    head, template = text.split('TEMPLATE """')
    check("its head", head == 'FROM ./names.gguf\nPARAMETER num_ctx 72\nPARAMETER stop '
          '"<|endoftext|>"\n', head)
    if not shutil.which("go"):
        return
    said = [dict(Role=role, Content=content) for role, content in (
        ("system", "Be brief."), ("user", "Who?\n"), ("assistant", " I. "), ("user", ""))]
    Path("render.go").write_text(RENDER)
    for kind, given in ((Plain, template.removesuffix('"""\n')), (Llama, MESSAGES[Llama])):
        if kind is Llama:  # which trims, and Go cannot
            said = [each | dict(Content=each["Content"].strip()) for each in said]
        asked = json.dumps(dict(Text=given, Messages=said))
        found = subprocess.run(["go", "run", "render.go"], input=asked, capture_output=True,
                               text=True, check=True).stdout
        words = BYTE_WORDS.encoding if kind is Plain else llama_words()
        own = template_of_encoding(words)
        wish = tokens_of_conversation(own, [(each["Role"], each["Content"]) for each in said])[0]
        wish += own.turn("assistant")
        # llama.cpp begins a text with Llama's <|begin_of_text|>
        wish = wish[1:] if kind is Llama else wish
        tokens = words.encode(found, allowed_special="all")
        check(f"{kind.__name__} in Go", tokens == wish, found)


OLLAMA = {"general.architecture": "STRING", "general.file_type": "UINT32",
          "tokenizer.ggml.model": "STRING", "tokenizer.ggml.tokens": "STRING",
          "tokenizer.ggml.eos_token_id": "UINT32"} | {f"gpt2.{name}": "UINT32" for name in (
              "block_count", "context_length", "embedding_length", "feed_forward_length",
              "attention.head_count", "attention.head_count_kv")}
RENDER = """package main

import ("encoding/json"; "os"; "text/template")

func main() {
    var given struct { Text string; Messages []struct{ Role, Content string } }
    json.NewDecoder(os.Stdin).Decode(&given)
    template.Must(template.New("").Parse(given.Text)).Execute(os.Stdout, given)
}
"""
