"""Test that --chat remembers: a model that was fine-tuned for it answers by what an earlier turn
said, each token is passed once, and at T the oldest turns leave."""
import io
import json
import re
from unittest import mock

import numpy as np
import pytest

from dev.data import own_text
from dev.features.kv_cache import Cached
from dev.tests.checks import check
from dev.tests.test_chats import prepare
from dev.tests.test_controls import heard
from dev.tests.trainings import call
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
