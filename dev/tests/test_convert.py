"""Test dev/tools/convert.py on GPT-2: folders that transformers and others wrote, and a hub on this
machine.

dev/tests/test_convert_llama3.py tests it on Llama 3, dev/tests/test_hf_tokenizer.py the tokenizer
of a folder. This needs safetensors and huggingface_hub.
"""
import functools
import json
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, read_parameters
from dev.features.base import GPT2
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import (TINY, check, check_bad_files, check_refusal, fast, header_refusal,
                              output_of, with_numbers)
from dev.tests.fake_hub import a_hub, downloaded, hub_set, serve
from dev.tests.folders import (LIBRARY, check_bad_folders, check_types, in_transformers,
                               logits_in_transformers, read_folder, write_folder)
from dev.tests.models import FIXTURES, LIMITS, device_of
from dev.tools import convert, hf_config
from train_gpt2 import BF16, to_float

C, V, L, NH, maxT = 128, 131, 3, 2, 9
CONFIG = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": V,
          "n_positions": maxT, "n_ctx": 5,
          "n_layer": L, "n_head": NH, "n_embd": C, "activation_function": "gelu_new",
          "layer_norm_epsilon": 1e-5}
# In, out.
LINEAR = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C),
          "mlp.c_proj": (4 * C, C)}
SHAPES = {"wte.weight": (V, C), "wpe.weight": (maxT, C), "ln_f.weight": (C,), "ln_f.bias": (C,)} | {
    f"h.{l}.{name}.{kind}": shape if kind == "weight" else shape[-1:] for l in range(L)
    for kind in ("weight", "bias")
    for name, shape in ({"ln_1": (C,), "ln_2": (C,)} | LINEAR).items()}
FIXTURE, LOGITS = FIXTURES / "gpt2_folder", FIXTURES / "gpt2_folder_logits.npz"


# ---- Folders and checkpoints


def random_tensors(dtype, prefix=""):
    """{name: array} of a model of these shapes."""
    rng = np.random.default_rng(7)
    found = {prefix + name: rng.standard_normal(shape, np.float32)
             for name, shape in SHAPES.items()}
    return {name: to_bf16(array) if dtype == BF16 else array.astype(dtype)
            for name, array in found.items()}


def expected_checkpoint(tensors, dtype, sizes=(maxT, V, L, NH, C), Vp=256):
    """The bytes of the checkpoint of these tensors, whose names have no prefix."""
    def layers(name):
        return [tensors[f"h.{l}.{name}"] for l in range(sizes[2])]

    def outputs_first(name):  # row o of ours is the weights of output o, column o of theirs
        return [np.stack([matrix[:, o] for o in range(matrix.shape[1])]) for matrix in layers(name)]

    first = np.zeros(256, "<i4")
    first[:8] = 20240326, 5 if dtype == BF16 else 3, *sizes, Vp
    return b"".join(array.tobytes() for array in (
        first, tensors["wte.weight"], np.zeros((Vp - sizes[1], sizes[4]), dtype),
        tensors["wpe.weight"],
        *layers("ln_1.weight"), *layers("ln_1.bias"), *outputs_first("attn.c_attn.weight"),
        *layers("attn.c_attn.bias"),
        *outputs_first("attn.c_proj.weight"), *layers("attn.c_proj.bias"), *layers("ln_2.weight"),
        *layers("ln_2.bias"), *outputs_first("mlp.c_fc.weight"), *layers("mlp.c_fc.bias"),
        *outputs_first("mlp.c_proj.weight"), *layers("mlp.c_proj.bias"), tensors["ln_f.weight"],
        tensors["ln_f.bias"]))


def test_fixture(folder):
    """A folder that transformers wrote: its tensors, the logits that transformers computed, and the
    same folder again.
    """
    path, target = folder / "gpt2.bin", folder / "back"
    convert.folder_to_checkpoint(str(FIXTURE), path)
    theirs = read_folder(FIXTURE)
    tensors = {name.removeprefix("transformer."): np.frombuffer(data, np.float32).reshape(shape)
               for name, (_, shape, data) in theirs.items()}
    check("the fixture's checkpoint", path.read_bytes() == expected_checkpoint(
        tensors, np.float32, (40, 211, 3, 2, 32)), path.stat().st_size)
    c, truth = Config.from_file(path), np.load(LOGITS)
    model = GPT2(c, device_of("emulated", "fp32", c.C, c.NH), *truth["tokens"].shape)
    model.set_parameters(read_parameters(path, c))
    model.forward(truth["tokens"], truth["tokens"])
    found = model.device.get(model.acts.logits)[:, : c.V].reshape(truth["logits"].shape)
    yield "the fixture's logits", found, truth["logits"], LIMITS["fp32"]
    said = output_of(convert.checkpoint_to_folder, path, target)
    check("the fixture again: its tensors", read_folder(target) == theirs)
    wish, found = (json.loads((where / "config.json").read_text()) for where in (FIXTURE, target))
    found["dtype"] = found.pop("torch_dtype")
    ignored = {"transformers_version"} | {name for name in wish if name.startswith(
        "summary") or name in ("attn_pdrop", "embd_pdrop", "resid_pdrop", "initializer_range",
                               "use_cache", "pad_token_id")}
    defaults = {"add_cross_attention": False, "reorder_and_upcast_attn": False,
                "scale_attn_weights": True,
                "scale_attn_by_inverse_layer_idx": False}
    differ = [name for name in wish.keys() - ignored if (found | defaults)[name] != wish[name]]
    check("the fixture again: its config.json", not differ and not found.keys() - wish.keys(),
          differ)
    check("another vocabulary than GPT-2's: no tokenizer", "no tokenizer is written: GPT-2's has "
          "50257" in said and not list(target.glob("*token*")), said.strip())


@fast
def test_round_trips(folder):
    """A folder becomes a checkpoint, and that the same folder: of one file or several, with and
    without the prefix of names, with a head, and with old buffers, which are left out."""
    buffers = {f"h.{l}.attn.{name}": array for l in range(L) for name, array in (
        ("bias", np.ones((1, 1, 4, 4), np.float32)), ("masked_bias", np.float32([-1e4])))}
    for dtype, prefix, files, more in ((np.float32, "", 1, ()), (BF16, "transformer.", 3, ()),
                                       (np.float32, "transformer.", 2, ("head", "buffers")),
                                       (BF16, "", 1, ("buffers",)), (np.float32, "", 1, ("head",))):
        name = f"{LIBRARY[dtype]}, prefix '{prefix}', {files} files {' '.join(more)}"
        source, target, path = (folder / f"{which} {name}"
                                for which in ("source", "target", "checkpoint.bin"))
        tensors = random_tensors(dtype)
        extra = {"lm_head.weight": tensors["wte.weight"]} if "head" in more else {}
        extra |= ({prefix + key: array for key, array in buffers.items()}
                  if "buffers" in more else {})
        write_folder(source, {prefix + key: array for key, array in tensors.items()} | extra,
                     CONFIG, files)
        convert.folder_to_checkpoint(str(source), path)
        wish = expected_checkpoint(tensors, dtype)
        check(f"{name}: the checkpoint", path.read_bytes() == wish)
        with mock.patch.multiple(convert, SHARD_BYTES=200000 if files > 1 else 10**9, CHUNK=1000):
            output_of(convert.checkpoint_to_folder, path, target)
            made = sorted(file.name for file in target.iterdir())
            check(f"{name}: one file or several", ("model.safetensors" in made) == (files == 1),
                  made)
            found = read_folder(target)
            check(f"{name}: its tensors", found == {
                "transformer." + key: ("BF16" if dtype == BF16 else "F32", array.shape,
                                       array.tobytes()) for key, array in tensors.items()})
            said = json.loads((target / "config.json").read_text())
            differ = [key for key, value in (CONFIG | {"torch_dtype": LIBRARY[dtype]}).items()
                      if key != "n_ctx" and said[key] != value]
            check(f"{name}: its config.json", not differ, differ)
            convert.folder_to_checkpoint(str(target), path)
        check(f"{name}: the same checkpoint again", path.read_bytes() == wish)
    # As save_model writes a tied head.
    for dtype, prefix, files in ((np.float32, "transformer.", 1), (BF16, "", 3)):
        tensors, source = random_tensors(dtype), folder / f"only a head {files}"
        wish = expected_checkpoint(tensors, dtype)
        found = {prefix + key: array for key, array in tensors.items() if key != "wte.weight"}
        write_folder(source, found | {"lm_head.weight": tensors["wte.weight"]}, CONFIG, files)
        convert.folder_to_checkpoint(str(source), path)
        check(f"prefix '{prefix}', {files} files, a head alone", path.read_bytes() == wish)
    source = folder / "only a head 1"
    (source / "config.json").unlink()
    output_of(convert.folder_to_checkpoint, str(source / "model.safetensors"), path)
    check("a head alone, in one file",
          path.read_bytes() == expected_checkpoint(random_tensors(np.float32), np.float32))
    output_of(convert.checkpoint_to_folder, TINY, folder / "tiny")
    convert.folder_to_checkpoint(str(folder / "tiny"), folder / "again.bin")
    check("gpt2_tiny: the same again", (folder / "again.bin").read_bytes() == TINY.read_bytes())


@fast
def test_other_types(folder):
    """Numbers are rounded to bf16 if asked for; fp32 keeps them as they are."""
    def main(source, target, asked):
        output_of(convert.main, [source, target, *(["--dtype", asked] if asked else [])])

    cases = (np.float32, "bf16", BF16), (BF16, "fp32", np.float32), (np.float16, None, np.float32)
    check_types(folder, cases, random_tensors, CONFIG, main, expected_checkpoint)
    one = random_tensors(BF16) | {"wpe.weight": random_tensors(np.float32)["wpe.weight"]}
    write_folder(folder / "mixed", one, CONFIG)
    convert.folder_to_checkpoint(str(folder / "mixed"), folder / "mixed.bin")
    values = {name: array if name == "wpe.weight" else to_float(array)
              for name, array in one.items()}
    check("bfloat16 beside float32",
          (folder / "mixed.bin").read_bytes() == expected_checkpoint(values, np.float32))
    output_of(convert.main, [str(folder / "0.bin"), str(folder / "back"), "--dtype", "fp32"])
    found = read_folder(folder / "back")["transformer.h.1.attn.c_proj.weight"]
    rounded = to_float(to_bf16(random_tensors(np.float32)["h.1.attn.c_proj.weight"]))
    check("bfloat16 to float32, as a folder", found == ("F32", (C, C), rounded.tobytes()))


@fast
def test_one_file(folder):
    """A single file: its sizes come from its tensors, NH from heads of 64 channels, unless a
    config.json is there."""
    wish, path = expected_checkpoint(random_tensors(np.float32), np.float32), folder / "one.bin"
    for prefix in ("", "transformer."):
        source = folder / f"{prefix}alone"
        write_folder(source, random_tensors(np.float32, prefix), CONFIG)
        (source / "config.json").unlink()
        (source / "model.safetensors").rename(source / "gpt2.safetensors")
        said = output_of(convert.folder_to_checkpoint, str(source / "gpt2.safetensors"), path)
        check(f"one file, prefix '{prefix}'", path.read_bytes() == wish)
        check("one file: what is taken for granted is said", "NH = 2 heads of 64 channels" in said,
              said.strip())
    (source / "config.json").write_text(json.dumps(CONFIG | {"n_head": 4}), encoding="utf-8-sig")
    convert.folder_to_checkpoint(str(source / "gpt2.safetensors"), path)
    check("one file: a config.json beside it", Config.from_file(path).NH == 4)
    for name, wish, shapes in (
            ("llama", "no wte.weight and wpe.weight of GPT-2, .* with their config.json",
             {"model.embed_tokens.weight": (3, 64)}),
            ("narrow", "C = 96 is no multiple", {"wte.weight": (3, 96), "wpe.weight": (3, 96)}),
            ("flat", "no wte.weight and wpe.weight", {"wte.weight": 64, "wpe.weight": (3, 64)}),
            ("hollow", "sizes from 1", {"wte.weight": (3, 64), "wpe.weight": (3, 64)}),
            ("absent", "could not be read", None)):
        if shapes:
            write_folder(folder / name,
                         {key: np.zeros(shape, np.float32) for key, shape in shapes.items()}, {})
            (folder / name / "config.json").unlink()
        check_refusal("one file", wish, convert.folder_to_checkpoint,
                      str(folder / name / "model.safetensors"), path)


@fast
def test_configs(folder):
    """What config.json may say."""
    for change, field, wish in (({}, "maxT", maxT), ({"n_positions": None}, "maxT", 1024),
                                ({}, "NH", NH),
                                ({"vocab_size": 50257}, "Vp", 50304),
                                ({"vocab_size": 128}, "Vp", 128),
                                ({"vocab_size": 129}, "Vp", 256), ({"n_inner": 4 * C}, "C", C),
                                ({"n_inner": None}, "L", L),
                                ({"activation_function": "gelu_pytorch_tanh"}, "C", C),
                                ({"activation_function": None, "layer_norm_epsilon": None}, "C", C),
                                ({"tie_word_embeddings": True, "scale_attn_weights": True}, "C", C),
                                ({"architectures": ["GPT2Model"]}, "V", V),
                                ({"architectures": None}, "V", V)):
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
        found = getattr(hf_config.read_config(folder), field)
        check(f"config.json with {change}: {field}", found == wish, f"{found}, expected {wish}")


# ---- Refusals


@fast
def test_refusals(folder):
    """Each in one line that says what is wrong, and nothing is written."""
    qkv, target = "h.1.attn.c_attn.weight", folder / "target.bin"
    target.write_bytes(b"an older file")
    tensors = random_tensors(np.float32)
    head = tensors["wte.weight"].copy()
    head[-1, -1] += 1
    cases = [  # what it says; what becomes of config.json; what becomes of the tensors
        ("activation_function is relu; expected gelu_new or", {"activation_function": "relu"}),
        ("activation_function is gelu;", {"activation_function": "gelu"}),  # by erf
        ("layer_norm_epsilon is 1e-06; expected 1e-05", {"layer_norm_epsilon": 1e-6}),
        *((f"{name} is {not wish}; expected {wish}", {name: not wish}) for name, wish in (
            ("scale_attn_by_inverse_layer_idx", False), ("scale_attn_weights", True),
            ("add_cross_attention", False),
            ("reorder_and_upcast_attn", False), ("tie_word_embeddings", True))),
        ("n_inner is 256; expected 512", {"n_inner": 256}),
        ("architectures is .'GPT2ForSequenceClassification'.; expected", {
            "architectures": ["GPT2ForSequenceClassification"]}),
        ("model_type is gpt_neo; expected gpt2 or llama", {"model_type": "gpt_neo"}),
        ("model_type is .'gpt2'.; expected gpt2 or llama", {"model_type": ["gpt2"]}),
        ("model_type is None", {"model_type": None}),
               ("n_embd is None; expected a size", {"n_embd": None}),
        ("n_layer is 0; expected a size", {"n_layer": 0}),
               ("vocab_size is 16777216", {"vocab_size": 2**24}),
        ("n_head is True", {"n_head": True}), ("n_positions is 9.0", {"n_positions": 9.0}),
        ("C to be divisible by NH", {"n_head": 3}), ("C to be a multiple of 32", {"n_embd": 80}),
        ("wte.weight is of shape .131, 128.; expected .130, 128.", {"vocab_size": 130}),
        ("wpe.weight is of shape .9, 128.; expected .1024, 128.", {"n_positions": None}),
        ("h.1.attn.c_attn.weight is of shape .384, 128.; expected .128, 384.", {}, {
            qkv: np.zeros((3 * C, C), np.float32)}),
        ("have no transformer.h.3.ln_1.weight", {"n_layer": L + 1}),
        ("have no transformer.h.3.ln_1.weight", {"n_layer": 2**24 - 1}),
        (f"have no transformer.{qkv}", {}, {qkv: None}),
               ("have no transformer.wte.weight", {}, {"wte.weight": None}),
        ("wte.weight is of shape .130, 128.; expected .131, 128.", {}, {
            "wte.weight": None, "lm_head.weight": head[:-1]}),
        ("h.2.* is no tensor of GPT-2", {"n_layer": L - 1}),
        ("score.weight is no tensor of GPT-2", {}, {"score.weight": np.zeros((2, C), np.float32)}),
        ("has transformer.wpe.weight twice", {}, {"transformer.wpe.weight": tensors["wpe.weight"]}),
        ("lm_head.weight differs from transformer.wte.weight; expected a head that is tied", {}, {
            "lm_head.weight": head}),
        ("lm_head.weight differs", {}, {"lm_head.weight": head[:-1]}),
        ("lm_head.weight differs", {},
         {"lm_head.weight": to_bf16(head), "wte.weight": to_bf16(head).view(np.float16)})]
    check_bad_folders(folder, tensors, CONFIG, cases,
                      convert.folder_to_checkpoint, target)
    source = folder / "good"
    write_folder(source, tensors, CONFIG, 2)
    weights, index = sorted(source.glob("model-*"))[1], source / "model.safetensors.index.json"
    content = weights.read_bytes()
    eight = lambda count: np.uint64(count).tobytes()
    reading = convert.folder_to_checkpoint, str(source), target
    check_bad_files("weights", weights, (
        ("truncated", content[:-1]),
        ("of type F64; expected BF16, F32, F16", content.replace(b'"F32"', b'"F64"')),
        *(("no safetensors file", bad) for bad in (
            content[:7], b"", b"\xff" * 100, eight(4) + b"[]  ", eight(99999) + b"[" * 99999)),
        ("could not be read", None)), *reading)
    check_bad_files("index", index, (
        *(("expected a weight_map", bad)
          for bad in (b"{}", b'{"weight_map": ["a"]}', b'{"weight_map": {"a": 1}}')),
        ("is no JSON", b"\xff"), ("is no JSON", b"[" * 99999)), *reading)
    index.unlink()
    check_refusal("weights", "has no model.safetensors, nor model.safetensors.index.json; expected",
                  *reading)
    check_refusal("folder", "there is no such folder; .* gpt2-xl", convert.folder_to_checkpoint,
                  "gpt2-tiny", target)
    check("what was there before is untouched", target.read_bytes() == b"an older file")

    good = expected_checkpoint(tensors, np.float32)
    header = functools.partial(with_numbers, good)
    check_bad_files("checkpoint", folder / "bad.bin", (
        (header_refusal((5, 3), Config.FILE, Config3.FILE), header(_0=5)),
        (header_refusal((20240326, 4), Config.FILE, Config3.FILE), header(_1=4)),
        ("2,516,991 bytes; expected 2,516,992", good[:-1]),
        ("2,516,993 bytes; expected 2,516,992", good + b"1"),
        ("its header of 1000 bytes .*expected 1024", good[:1000]),
        ("V not to exceed Vp", header(_3=257)), ("C to be divisible by NH", header(_5=3)),
        ("wte has other numbers than zeros below its V = 130 words", header(_3=V - 1)),
        (r"wte has other numbers .* V = 131", header(**{f"_{256 + V * C + 1}": 1})),
        ("could not be read", None)), convert.checkpoint_to_folder, folder / "bad.bin",
        folder / "new")
    check("no folder was written", not (folder / "new").exists())
    (folder / "good.bin").write_bytes(good)
    (source / "model.safetensors").touch()
    check_refusal("folder", "has weights in it already", convert.checkpoint_to_folder,
                  folder / "good.bin", source)
    (folder / "a file").touch()
    check_refusal("folder", "a file/model.safetensors: could not be written",
                  convert.checkpoint_to_folder, folder / "good.bin", folder / "a file")
    for wish, *flags in (("expected one of them to be a checkpoint, which ends in .bin", "gpt2",
                          "gpt2_124M"),
                         ("expected one of them to be a checkpoint", "a.bin", "b.bin"),
                         ("expected a folder, for", str(folder / "good.bin"), "gpt2.safetensors"),
                         ("SOURCE, TARGET; --help", ), ("TARGET; --help", "gpt2"),
                         ("unrecognized arguments: b; --help", "gpt2", "a.bin", "b"),
                         ("--dtype: .*fp64.*; --help", "gpt2", "a.bin", "--dtype", "fp64")):
        check_refusal("convert.py", wish, convert.main, list(flags))


@fast
def test_a_run(folder):
    """A run's folder is converted as its newest complete checkpoint is."""
    run = folder / "run"
    run.mkdir()
    (run / "model_00000002.bin").write_bytes(TINY.read_bytes())
    (run / "DONE_00000002").touch()
    (run / "model_00000003.bin").touch()
    for source in TINY, run:
        convert.main([str(source), str(folder / f"of_{source.stem}")])
    ours, whole = (folder / f"of_{path.stem}/model.safetensors" for path in (run, TINY))
    check("the same weights", ours.read_bytes() == whole.read_bytes())


@fast
def test_replaced_files(folder):
    """Files of a folder are replaced whole: where the disk is full, an older one stays."""
    target = folder / "target"
    target.mkdir()
    (target / "config.json").write_text("older")
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        check_refusal("full disk", "No space left on device", convert.checkpoint_to_folder, TINY,
                      target)
    left = sorted(file.name for file in target.iterdir())
    check("full disk: what was there before", left == ["config.json"] and (
        target / "config.json").read_text() == "older", left)
    output_of(convert.checkpoint_to_folder, TINY, target)
    left = sorted(file.name for file in target.iterdir())
    check("a folder's older files are replaced", left == ["config.json", "model.safetensors"] and
          json.loads((target / "config.json").read_text())["n_head"] == 2, left)


# ---- The hub


def test_hub(folder):
    """A model by its name: from the hub, from the cache, and what is said if the hub fails.
    dev/tests/test_hub.py has what else can go wrong there."""
    for count in (1, 3):
        write_folder(folder / str(count), random_tensors(np.float32), CONFIG, count)
    model, shards = ({path.name: path.read_bytes() for path in (folder / count).iterdir()}
                     for count in "13")
    more = {"pytorch_model.bin": b"too large", "README.md": b"words",
            "model.fp16.safetensors": b"another"}
    wish, out = expected_checkpoint(random_tensors(np.float32), np.float32), folder / "model.bin"
    troubles = {"o/absent": "404", "o/private": "401", "o/gated": "403 for a file",
                "o/half": "half",
                "o/stops": "stops"}
    with a_hub() as cache:
        serve({name: {"a" * 40: files} for name, files in {
            "openai-community/gpt2": model | more, "o/model": model, "o/shards": shards, "o/old": {
                "config.json": model["config.json"], "pytorch_model.bin": b"too large"},
            **dict.fromkeys(troubles, model)}.items()}, troubles)
        closed, offline, empty = ({"ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": True},
                                  f"{cache}/empty")
        for name, settings, says in (
                ("gpt2", {}, None), ("o/model", {"HF_HUB_CACHE": empty}, None),
                ("o/shards", {}, None),
                ("gpt2", offline, None), ("gpt2", closed, None),
                ("o/model", offline, "HF_HUB_OFFLINE forbids"),
                ("gpt2", closed | {"HF_HUB_CACHE": f"{cache}/none"},
                 "could not be reached .*connect to the network"),
                ("o/absent", {}, r"no such thing \(404\)"),
                ("o/private", {}, r"\(401\).*`hf auth login`"),
                ("o/gated", {}, r"\(403\).*ask for access on its page"),
                ("o/half", {}, "a part of it and then stopped"),
                ("o/stops", {}, "the hub .* again")):
            title, arguments = (f"the hub: {name} {' '.join(settings)}",
                                (convert.folder_to_checkpoint, name, out))
            with hub_set(**{"HF_HUB_CACHE": f"{cache}/hub"} | settings):
                if says:
                    check_refusal(title, f"{name}: there is no such folder, and .*{says}",
                                  *arguments)
                    check(f"{title}: nothing is written", not out.exists())
                else:
                    output_of(*arguments)
                    check(title, out.read_bytes() == wish)
                    out.unlink()
        check_refusal("the hub", "has no model.safetensors, nor", convert.folder_to_checkpoint,
                      "o/old", out)
    got = {path.split("/")[-1] for path in downloaded() if "gpt2" in path}
    check("the hub: only the files that are needed", got == {"config.json", "model.safetensors"},
          sorted(got))


# ---- With transformers


def test_transformers_loads(folder):
    """transformers loads a converted checkpoint, and computes its own logits again and those of a
    dump."""
    truth = np.load(LOGITS)
    convert.folder_to_checkpoint(str(FIXTURE), folder / "fixture.bin")
    output_of(convert.checkpoint_to_folder, folder / "fixture.bin", folder / "fixture")
    found, _ = logits_in_transformers(folder / "fixture", truth["tokens"])
    yield "the fixture's logits", found, truth["logits"], 2e-6
    output_of(convert.checkpoint_to_folder, folder / "fixture.bin", folder / "fixture in bf16",
              BF16)
    found, model = logits_in_transformers(folder / "fixture in bf16", truth["tokens"])
    check("bf16: the type of the weights", str(model.dtype) == "torch.bfloat16", model.dtype)
    yield "bf16: the fixture's logits", found, truth["logits"], LIMITS["bf16"]
    with mock.patch.object(convert, "SHARD_BYTES", 100000):
        yield in_transformers(folder, "gpt2_tiny")
