"""Test downloads from the hub: FineWeb's shards from it, and what dev/data/hub.py says when it
fails.

The hub is on this machine: see dev/tests/fake_hub.py. This needs huggingface_hub and pyarrow.
"""
import itertools
import os
import signal
import sys
from unittest import mock

import pytest

from dev.data import fineweb, hub
from dev.tests.checks import check, check_refusal
from dev.tests.documents import command, contents, in_process, some_texts, stream_of, write_texts
from dev.tests.fake_hub import Hub, a_hub, downloaded, hub_set, serve
from dev.tests.test_fineweb import shards_of


@pytest.fixture(autouse=True, scope="module")
def a_hub_here():
    with a_hub():
        yield


def test_hub_shards(folder):
    """Both datasets from a hub, whose files change later, with a program that is killed again and
    again."""
    for kind, repo, name in (("edu", "HuggingFaceFW/fineweb-edu", "edu_fineweb"),
                             ("classic", "HuggingFaceFW/fineweb", "fineweb")):
        files, texts, most, runs = {}, [], 0, 0
        for i in range(3):
            texts += some_texts(60, i)
            write_texts(folder / "file.parquet", texts[-60:], 7)
            files[f"sample/10BT/{i:03d}_00000.parquet"] = (folder / "file.parquet").read_bytes()
        files |= {"sample/10BT/README.md": b"no table",
                  "sample/100BT/000_00000.parquet": b"another sample"}
        wish, out = shards_of(stream_of(texts), name, 1500, 1500), folder / "data" / f"{name}10B"
        flags = "-s", 1500, "--workers", 1, *(("-t", kind, "-v", "10B") if kind == "edu" else ())
        serve({repo: {"a" * 40: files}})
        for die_at in itertools.cycle((0,) if kind == "edu" else (3, 2.5, 5)):
            code, _, err = command("fineweb", folder, *flags, die_at=die_at)
            most, runs = max(most, len(list(out.rglob("*.parquet")))), runs + 1
            Hub.repos[repo]["b" * 40] = {path: b"another" for path in files}
            if code != -signal.SIGKILL:
                break
        ok = code == 0 and contents(out) == wish
        check(f"{kind}: by the hub, in {runs} runs", ok,
              "" if ok else f"{err} {sorted(contents(out))}")
        listed = sum("/tree/" in path for _, path in Hub.asked)
        check(f"{kind}: the files are those of the first time", listed == 1, listed)
        check(f"{kind}: no file is downloaded twice",
              len(set(downloaded())) == len(downloaded()) == 3, downloaded())
    check("classic: in several runs", runs > 3, runs)
    check("at most two of the hub's files lie here", most in (1, 2), most)


def test_hub_troubles(folder):
    """Each failure is reported in one line. A transfer that stops is tried again."""
    repo, name, content = ("HuggingFaceFW/fineweb", "sample/10BT/000_00000.parquet",
                           bytes(range(256)) * 9)
    for trouble, wish in (("404", r"the hub has no such thing \(404\): see its page"),
                          ("401", r"without a login \(401\): .*`hf auth login`"),
                          ("403", r"does not give it to you \(403\)"),
                          ("429", r"too many requests .*\(429\)"),
                          ("500", r"cannot answer now \(500\)"),
                          ("500 for a file", r"cannot answer now \(500\)"),
                          ("no file", r"has no such thing \(404\)"),
                          ("half", "sent a part of it and then stopped: start the program again"),
                          ("stops", "sent a part of it and then stopped"), ("stumbles", None),
                          ("closed", r"could not be reached \(.*\): connect to the network"),
                          ("offline", "HF_HUB_OFFLINE forbids .*: unset it")):
        parent = folder / trouble.replace(" ", "_")
        out = parent / "shards"
        serve({repo: {"a" * 40: {name: content}}}, {repo: trouble})
        with hub_set(HF_HUB_OFFLINE=trouble == "offline", ENDPOINT=(
                "http://127.0.0.1:9" if trouble == "closed" else os.environ["HF_ENDPOINT"])):
            check_refusal(f"the hub, {trouble}",
                          f"fineweb, sample/10BT.*: .*{wish}.*; or give local files" if wish else
                          "is no Parquet", in_process, fineweb, "-s", 10, "--output", out)
        left = {path.name: path.read_bytes() for path in out.rglob("*")
                if path.suffix in (".parquet", ".incomplete")}
        whole = [] if wish else [content]  # which is no Parquet, as the program says of it
        check(f"the hub, {trouble}: no part of a file is left", list(left.values()) == whole,
              sorted(left))
        check(f"the hub, {trouble}: a folder is left only for a file",
              parent.exists() == (wish is None))
    serve({}, {repo: "404"})
    # Folders that were there before.
    for i, found in enumerate(((), ("own_val_000000.bin",), ("notes.txt",))):
        out = folder / f"before{i}"
        out.mkdir()
        for file in found:
            (out / file).touch()
        check_refusal("the hub, a folder that was there", "no such thing", in_process, fineweb,
                      "--output", out)
        check("the hub, a folder that was there: as it was",
              {p.name for p in out.iterdir()} == {*found})
    with mock.patch.dict(sys.modules, {"huggingface_hub": None}):
        check_refusal("the hub", "huggingface_hub is missing .*pip install", hub.download, repo,
                      name)
