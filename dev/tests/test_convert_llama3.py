"""Test dev/tools/convert.py: folders that the safetensors library writes, and checkpoints that are
put together here.
"""
import functools
import json
import sys
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import (
    EXACT, check, check_bad_files, check_refusal, fast, header_refusal, with_numbers)
from dev.tests.folders import (LIBRARY, check_bad_folders, check_types, in_transformers,
                               read_folder, write_folder)
from dev.tests.models import FIXTURES
from dev.tools import convert, hf_config
from train_gpt2 import BF16, HEADER_BYTES, to_float

C, H, V, L, NH, NKV, HS = 96, 112, 37, 2, 6, 2, 16
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": C,
          "intermediate_size": H,
          "vocab_size": V, "num_hidden_layers": L, "num_attention_heads": NH,
          "num_key_value_heads": NKV,
          "max_position_embeddings": 40, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
          "hidden_act": "silu",
          "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                           "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 8192}}
SHAPES = {"model.embed_tokens": (V, C), "model.norm": (C,), "lm_head": (V, C)} | {
    f"model.layers.{l}.{name}": shape for l in range(L) for name, shape in (
        ("input_layernorm", (C,)), ("self_attn.q_proj", (C, C)),
        ("self_attn.k_proj", (NKV * HS, C)),
        ("self_attn.v_proj", (NKV * HS, C)), ("self_attn.o_proj", (C, C)),
        ("post_attention_layernorm", (C,)),
        ("mlp.gate_proj", (H, C)), ("mlp.up_proj", (H, C)), ("mlp.down_proj", (C, H)))}


def random_tensors(dtype, tied=False):
    """{name: array} of a model."""
    rng = np.random.default_rng(5)
    found = {f"{name}.weight": rng.standard_normal(shape, np.float32)
             for name, shape in SHAPES.items() if not (tied and name == "lm_head")}
    return {name: to_bf16(array) if dtype == BF16 else array.astype(dtype)
            for name, array in found.items()}


def expected_checkpoint(tensors, dtype, scaled=1, tied=False, multiple_of=16, multiplier=0.4):
    """The bytes of the checkpoint of these tensors, in which RoPE's pairs are moved row by row."""
    def neighbours(rows):
        """Row i of a head moves to 2i, and row i + HS/2 to 2i + 1."""
        moved = np.empty_like(rows)
        for head in range(0, len(rows), HS):
            for i in range(HS // 2):
                moved[head + 2 * i], moved[head + 2 * i + 1] = (rows[head + i],
                                                                rows[head + i + HS // 2])
        return moved

    def layers(*names):
        return [tensors[f"model.layers.{l}.{name}.weight"] for l in range(L) for name in names]

    qkv = layers("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv = [part if i % 3 == 2 else neighbours(part) for i, part in enumerate(qkv)]
    zeros = lambda count: [np.zeros(L * count, dtype)]
    wte = tensors["model.embed_tokens.weight"]
    first, second = np.zeros(256, "<i4"), np.zeros(256, "<f4")
    first[:12] = (20240803, 5 if dtype == BF16 else 3, 40, V, L, NH, NKV, C, multiple_of, scaled, 3,
                  2 if tied else 1)
    second[:3] = multiplier, 1e-5, 500000
    return b"".join(array.tobytes() for array in (
        first, second, wte, tensors.get("lm_head.weight", wte), *layers("input_layernorm"),
        *zeros(C),
        *qkv, *zeros((NH + 2 * NKV) * HS), *layers("self_attn.o_proj"), *zeros(C),
        *layers("post_attention_layernorm"), *zeros(C), *layers("mlp.up_proj", "mlp.gate_proj"),
        *zeros(2 * H),
        *layers("mlp.down_proj"), *zeros(C), tensors["model.norm.weight"], np.zeros(C, dtype)))


@fast
def test_round_trips(folder):
    """A folder becomes the checkpoint that it should, and that becomes the same folder, in one file
    or in several."""
    for dtype, tied, files, config in ((np.float32, False, 1, {}), (BF16, False, 3, {}),
                                       (BF16, True, 1, {"tie_word_embeddings": True}),
                                       (np.float32, True, 2,
                                        {"tie_word_embeddings": True, "rope_scaling": None})):
        name = f"{LIBRARY[dtype]}, {'tied' if tied else 'untied'}, {files} files"
        source, target, path = (folder / f"{which} {name}"
                                for which in ("source", "target", "checkpoint.bin"))
        tensors = random_tensors(dtype, tied)
        write_folder(source, tensors, CONFIG | config, files)
        convert.folder_to_checkpoint(str(source), path)
        wish = expected_checkpoint(tensors, dtype, int("rope_scaling" not in config), tied)
        check(f"{name}: the checkpoint", path.read_bytes() == wish)
        with mock.patch.multiple(convert, SHARD_BYTES=50000 if files > 1 else 10**9, CHUNK=1000):
            convert.checkpoint_to_folder(path, target)
            made = sorted(file.name for file in target.iterdir())
            sizes = [file.stat().st_size for file in target.glob("*.safetensors")]
            ok = ("model.safetensors" in made
                  if files == 1 else "model.safetensors.index.json" in made and
                  (max(sizes) < 55000 and sum(sizes) > 35000 * len(sizes)))  # with their headers
            check(f"{name}: the folder's files", ok, sizes)
            check(f"{name}: its tensors", read_folder(target) == read_folder(source))
            wish_of_config = CONFIG | config | {"head_dim": HS, "torch_dtype": LIBRARY[dtype]}
            found = json.loads((target / "config.json").read_text())
            differ = [key for key, value in wish_of_config.items() if found[key] != value]
            check(f"{name}: its config.json", not differ, differ)
            convert.folder_to_checkpoint(str(target), path)
        check(f"{name}: the same checkpoint again", path.read_bytes() == wish)
    # As safetensors.torch.save_model writes a tied head.
    for dtype, files in ((np.float32, 1), (BF16, 2)):
        tensors, source, path = (random_tensors(dtype, True), folder / f"a head {files}",
                                 folder / f"head {files}.bin")
        wish = expected_checkpoint(tensors, dtype, 1, True)
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        write_folder(source, tensors, CONFIG | {"tie_word_embeddings": True}, files)
        convert.folder_to_checkpoint(str(source), path)
        check(f"tied, {files} files, a head alone", path.read_bytes() == wish)
        (source / "config.json").write_text(json.dumps(CONFIG))
        check_refusal("untied, a head alone", "have no model.embed_tokens.weight",
                      convert.folder_to_checkpoint, str(source), path)
    tensors, path = random_tensors(np.float32), folder / "checkpoint.bin"
    tensors["lm_head.weight"][:-1] = tensors["model.embed_tokens.weight"][:-1]
    path.write_bytes(expected_checkpoint(tensors, np.float32))
    check("an lm_head that differs from wte in its last row is its own",
          not Config3.from_file(path).tied)
    for path in (FIXTURES / "llama_gqa.bin", FIXTURES / "llama_tied.bin"):
        convert.checkpoint_to_folder(path, folder / path.stem)
        convert.folder_to_checkpoint(str(folder / path.stem), folder / "again.bin")
        check(f"{path.stem}: the same again",
              (folder / "again.bin").read_bytes() == path.read_bytes())


def test_same_bytes(folder):
    """A checkpoint becomes a folder and the same bytes again, also where config.json has no word
    for what its header says. A config.json with other sizes than that is refused, and one without
    it, as others write them, is not."""
    good, path, again = ((FIXTURES / "llama_gqa.bin").read_bytes(), folder / "one.bin",
                         folder / "again.bin")
    c = Config3.from_file(FIXTURES / "llama_gqa.bin")
    for i, (ints, floats) in enumerate((
            ({8: 1}, {0: 112.5 / 256}), ({8: 112}, {0: 0.125}), ({8: 56}, {0: 0.3}), ({8: 14}, {}),
            ({9: 0}, {}),
            ({9: 1}, {}), ({9: 8}, {}), ({9: 32}, {}), ({9: 3000}, {}), ({11: 0}, {}),
            ({11: 3}, {}),
            ({2: 131072}, {}), ({}, {1: 1e-6, 2: 10000.0}))):
        content = np.frombuffer(good, "<i4").copy()
        for index, number in ints.items():
            content[index] = number
        for index, number in floats.items():
            content.view("<f4")[256 + index] = number
        path.write_bytes(content.tobytes())
        convert.checkpoint_to_folder(path, folder / f"{i}")
        convert.folder_to_checkpoint(str(folder / f"{i}"), again)
        check(f"a header with {ints} {floats}: the same again",
              again.read_bytes() == path.read_bytes())
    path = folder / "0" / "config.json"
    whole = json.loads(path.read_text())
    for wish, change in (("expected .* intermediate_size", {"multiple_of": 1024}),
                         ("expected", {"multiple_of": "1"}),
                         ("expected", {"multiple_of": 0}), ("expected", {"ffn_multiplier": None}),
                         ("expected", {"ffn_multiplier": float("inf")}),
                         ("expected", {"minor": 1.5}),
                         ("expected", {"minor": 2**31}), ("expected", {"scaled": 32}),
                         ("expected", {"scaled": True}),
                         ("expected", {"more": 1})):
        path.write_text(json.dumps(whole | {"llm_c": whole["llm_c"] | change}))
        check_refusal("kept", f"config.json: llm_c is .*{wish}.*, or no llm_c",
                      hf_config.read_config, path.parent)
    for kept in ([1], "x", {}):
        path.write_text(json.dumps(whole | {"llm_c": kept}))
        check_refusal("kept", "config.json: llm_c is .*expected .*or no llm_c",
                      hf_config.read_config, path.parent)
    path.write_text(json.dumps(whole | {"llm_c": None}))
    check("without it, numbers that make the same sizes",
          hf_config.read_config(path.parent).H == c.H)


@fast
def test_other_types(folder):
    """Numbers are rounded to bf16 where it is asked for, and become fp32 as they are."""
    cases = ((np.float32, BF16, BF16), (BF16, np.float32, np.float32),
             (np.float16, None, np.float32), (np.float16, BF16, BF16))
    check_types(folder, cases, random_tensors, CONFIG, convert.folder_to_checkpoint,
                expected_checkpoint)
    convert.checkpoint_to_folder(folder / "0.bin", folder / "back", np.float32)
    found = read_folder(folder / "back")["model.norm.weight"]
    rounded = to_float(to_bf16(random_tensors(np.float32)["model.norm.weight"]))
    check("bfloat16 to float32, as a folder", found == ("F32", (C,), rounded.tobytes()))


@fast
def test_configs(folder):
    """What config.json may say, and the sizes that a checkpoint can express."""
    rope5 = {"rope_parameters": CONFIG["rope_scaling"] | {"rope_theta": 10000.0},
             "rope_scaling": None}
    llama32 = {"rope_scaling": CONFIG["rope_scaling"] | {"factor": 32.0}}  # Meta's 1B and 3B
    for change, field, wish in (({}, "scaled", 1), ({}, "factor", 8), (llama32, "scaled", 32),
                                (llama32, "factor", 32),
                                ({"rope_scaling": None}, "scaled", 0), (rope5, "scaled", 1),
                                (rope5, "theta", 10000.0), ({"rope_theta": None}, "theta", 10000.0),
                                ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
                                 "theta", 5.0),
                                ({"rms_norm_eps": None}, "eps", 1e-6),
                                ({"num_key_value_heads": None}, "NKV", NH),
                                ({"head_dim": HS}, "NH", NH),
                                ({"tie_word_embeddings": True}, "tied", True),
                                ({"tie_word_embeddings": True}, "minor", 2), ({}, "minor", 1),
                                ({}, "maxT", 40)):
        (folder / "config.json").write_text(json.dumps(CONFIG | change))
        found = getattr(hf_config.read_config(folder), field)
        check(f"config.json with {change}: {field}", found == wish, f"{found}, expected {wish}")
    for channels, hidden, wish in ((4096, 14336, (1024, 1.3)), (3072, 8192, (1024, 1)),
                                   (2048, 8192, (1024, 1.4)),
                                   (8192, 28672, (1024, 1.3)), (4096, 11008, (256, 1)),
                                   (96, 175, (1, None)),
                                   (3808, 15745, (1, None)), (3 * 2**22, 2**26 + 1, None)):
        found = hf_config.mlp_numbers(channels, hidden)
        ok = (found == wish
              if not wish else found[0] == wish[0] and (not wish[1] or wish[1] == found[1]))
        check(f"MLP of {hidden} channels, C={channels}", ok, found)
        if found:
            c = Config3(C=channels, multiple_of=found[0],
                        ffn_multiplier=np.float32(found[1]).item())
            yield f"MLP of {hidden} channels, H", c.H, hidden, EXACT


@fast
def test_refusals(folder):
    """Each in one line that says what is wrong, and nothing is written."""
    q, target = "model.layers.0.self_attn.q_proj.weight", folder / "target.bin"
    target.write_bytes(b"an older file")
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    factor = {"rope_scaling": CONFIG["rope_scaling"] | {"factor": 8.5}}
    cases = [  # what it says; what becomes of config.json; what becomes of the tensors
        ("attention_bias is True; expected False", {"attention_bias": True}),
               ("mlp_bias is True", {"mlp_bias": True}),
        ("model_type is mistral; expected gpt2 or llama", {"model_type": "mistral"}),
        ("architectures is .'LlamaForSequenceClassification'",
         {"architectures": ["LlamaForSequenceClassification"]}),
        ("hidden_act is gelu", {"hidden_act": "gelu"}),
               ("head_dim is 32; expected 16", {"head_dim": 32}),
        ("RoPE is of type yarn", yarn),
               ("with factor 8.5.* expected default, or llama3 with a whole factor", factor),
        ("rope_scaling is llama3; expected an object", {"rope_scaling": "llama3"}),
        ("rope_parameters is .1.; expected an object", {"rope_parameters": [1]}),
        ("hidden_size is None; expected a size", {"hidden_size": None}),
               ("vocab_size is -1", {"vocab_size": -1}),
        ("vocab_size is 37.5", {"vocab_size": 37.5}),
               ("rms_norm_eps is 0.1x", {"rms_norm_eps": "0.1x"}),
        ("NH to be divisible by NKV", {"num_key_value_heads": 4}),
               ("C to be a multiple of 32", {"hidden_size": 102}),
        ("q_proj.weight is of shape .96, 96.; expected .128, 128.", {"hidden_size": 128,
         "num_attention_heads": 8, "vocab_size": V},
         {"model.embed_tokens.weight": np.zeros((V, 128), np.float32),
         "lm_head.weight": np.zeros((V, 128), np.float32), "model.layers.0.input_layernorm.weight":
         np.zeros(128, np.float32),
          "model.layers.1.input_layernorm.weight": np.zeros(128, np.float32)}),
        ("have no model.layers.2.input_layernorm.weight", {"num_hidden_layers": 3}),
        (f"have no {q}", {}, {q: None}), ("have no lm_head.weight", {}, {"lm_head.weight": None}),
        ("q_proj.bias is no tensor of Llama 3", {},
         {q.replace("weight", "bias"): np.zeros(C, np.float32)})]
    check_bad_folders(folder, random_tensors(np.float32), CONFIG, cases,
                      convert.folder_to_checkpoint, target)
    source = folder / "good"
    write_folder(source, random_tensors(np.float32), CONFIG, 2)
    weights = sorted(source.glob("model-*"))[1]
    content = weights.read_bytes()
    reading = convert.folder_to_checkpoint, str(source), target
    check_bad_files("weights", weights, (
        ("truncated", content[:-1]), ("no safetensors file", content[:7]),
        ("no safetensors file", b""), ("no safetensors file", b"\xff" * 100),
        ("of type F64; expected BF16, F32, F16", content.replace(b'"F32"', b'"F64"')),
        ("could not be read", None)), *reading)
    check_bad_files("config.json", source / "config.json", (
        ("is no JSON", b"{"), ("expected an object, found a list", b"[]"),
        ("could not be read", None)), *reading)
    check("what was there before is untouched", target.read_bytes() == b"an older file")
    check_refusal("folder", "there is no such folder; expected one", convert.folder_to_checkpoint,
                  "absent", target)

    with mock.patch.dict(sys.modules, {"huggingface_hub": None}):
        check_refusal("hub", "pip install -r dev/requirements.txt", convert.folder_to_checkpoint,
                      "meta-llama/Llama", target)

    good = (FIXTURES / "llama_gqa.bin").read_bytes()
    header = functools.partial(with_numbers, good)
    check_bad_files("checkpoint", folder / "bad.bin", (
        ("is a debug state of GPT-2, .*; expected a GPT-2 checkpoint or a Llama 3 checkpoint: ",
         (FIXTURES / "gpt2_tiny_debug_state.bin").read_bytes()),
        ("sizes from 1", (FIXTURES / "llama_gqa_debug_state.bin").read_bytes()),
        ("719,359 bytes; expected 719,360", good[:-1]),
        ("719,361 bytes; expected 719,360", good + b"1"),
        ("719,360 bytes; expected 360,704", header(_1=5)),
        ("truncated within its second header", good[:HEADER_BYTES + 11]),
        ("NH to be divisible by NKV", header(_6=4)), ("C to be divisible by NH", header(_7=80)),
        ("H, by ffn", header(_8=0)), ("H, by ffn", header(_256=0)),
        ("719,360 bytes; expected 720,128", header(_3=332)),
        (header_refusal((20240803, 9), Config.FILE, Config3.FILE), header(_1=9))),
        convert.checkpoint_to_folder, folder / "bad.bin", folder / "new")
    check("no folder was written", not (folder / "new").exists())
    check_refusal("folder", "has weights in it already", convert.checkpoint_to_folder,
                  FIXTURES / "llama_gqa.bin", source)


def test_transformers_logits(folder):
    """transformers loads a converted fixture and computes the logits of its debug state, and what
    it saves becomes the fixture again."""
    for fixture in ("llama_gqa", "llama_tied"):
        yield in_transformers(folder, fixture)
