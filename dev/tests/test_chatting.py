"""Test that --chat remembers: a model that was fine-tuned for it answers by what an earlier turn
said, each token is passed once, and at T the oldest turns leave. Its exports answer the same."""
import io
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from dev.cpu import device
from dev.data import own_text
from dev.features.chat import Chatting
from dev.features.kv_cache import Cached
from dev.tests.checks import TOP, check
from dev.tests.test_chats import prepare
from dev.tests.test_controls import heard
from dev.tests.trainings import call
from train_gpt2 import UserError, next_logits


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


def test_between():
    """Turns have a newline between them, if the model has one."""
    for words, wish in (("AB\n", "\n"), ("AB", "")):
        class Chat(Chatting):
            def encode(self, text, words=words):
                if set(text) - set(words):
                    raise UserError(f"{text!r} is none of {words!r}")

        check(f"{words!r}", Chat().between == wish)


def test_remembers(run):
    """'Who am I?' is answered with the name of an earlier turn. What the model sees is the
    conversation as it was in training. Each token is passed once, until T; there the oldest turns
    leave, and only those that stay are passed again. What is compiled is said on stderr."""
    passed = []

    def counted(model, tokens):
        passed.append(len(tokens))
        return next_logits(model, tokens)

    def one(model):
        passed.append(1)
        return pass_of_layers(model)

    pass_of_layers, compiled = Cached.pass_of_layers, device.compiled
    lines = "I am Bob.\nWho am I?\nI am Eve.\nWho am I?\n"
    with mock.patch("train_gpt2.next_logits", counted), mock.patch.object(
            Cached, "pass_of_layers", one), heard() as calls, mock.patch.object(
                device, "compiled", lambda *args: print("compiling") or compiled(*args)):
        text, error = chat(run, lines, "--answer")
    first, second, third, fourth = (bytes(min(token, 255) for token in tokens)
                                    for tokens, _ in calls)
    asked = b"\xffUser: %s\nAssistant:"
    wish = asked % b"I am Bob." + b" Hi." + asked % b"Who am I?"
    check("the second turn sees the first", second == wish, second)
    check("at T = 72 only the third stays", third == asked % b"I am Eve.", third)
    check("which is said", re.findall(r"^\(.*", error, re.M) == [
        "(oldest turns forgotten: 2 of 3; the model sees T = 72 tokens (-t))"], error)
    check("answers", text == " Hi.\n Bob.\n Hi.\n Eve.\n", text)
    wish = [len(tokens) + len(drawn) for tokens, drawn in (calls[1], calls[3])]
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
    programs = dict(transformers="transformers", llama_cpp="xllamacpp")
    wish = [program for program, package in programs.items() if find_spec(package)]
    found = re.findall("^(.*): the same$", text, re.M)
    check("the same", found == wish, text + error)
    for wish, *arguments in (("expected turns that fit into T", "names", *"abcd"),
                             ("none: expected a run's folder", "none", "a")):
        status, _, error = export(*arguments)
        check(wish, status == 1 and "error: " in error and wish in error, error)
    modelfile = (folder / "names.Modelfile").read_text()
    check("for Ollama", modelfile.startswith('FROM ./names.gguf\nPARAMETER num_ctx 72\nPARAMETER '
          'stop "<|endoftext|>"\nTEMPLATE """<|endoftext|>{{ range .Messages }}'), modelfile)
