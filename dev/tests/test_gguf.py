"""Test dev/tools/gguf_file.py: files as the gguf package reads them, and a Llama 3 that is computed
from such a file as llama.cpp computes it, against PyTorch's logits."""
import json
import os
from types import SimpleNamespace
from unittest import mock

import numpy as np

from dev.common.bf16 import to_bf16
from dev.common.config import Config, checkpoint_parts, draw_parameters, read_parameters
from dev.data.vocabulary import BYTES, END, Vocabulary, write_vocabulary
from dev.llama3.train_llama3 import Config3
from dev.tests.checks import EXACT, FIXTURES, TINY, check, check_refusal, fast
from dev.tests.folders import letters
from dev.tests.models import read_debug_state
from dev.tests.test_chats import llama_words
from dev.tools.convert import TEXT_IDS, main as convert
from dev.tools.gguf_file import known_words, rope_factors, tokenizer_of
from train_gpt2 import EOT, UserError, gpt2_encoding, replace_file

GPT2_TENSORS = {
    "token_embd.weight": "wte", "position_embd.weight": "wpe", "output_norm.weight": "lnfw",
    "output_norm.bias": "lnfb", **{f"blk.{l}.{name}": f"{ours} {l}" for l in range(2)
                                   for name, ours in (
        ("attn_norm.weight", "ln1w"), ("attn_norm.bias", "ln1b"), ("attn_qkv.weight", "qkvw"),
        ("attn_qkv.bias", "qkvb"), ("attn_output.weight", "attprojw"),
        ("attn_output.bias", "attprojb"), ("ffn_norm.weight", "ln2w"), ("ffn_norm.bias", "ln2b"),
        ("ffn_up.weight", "fcw"), ("ffn_up.bias", "fcb"), ("ffn_down.weight", "fcprojw"),
        ("ffn_down.bias", "fcprojb"))}}


def converted(source, target, *flags):
    """({field: value}, {name: array}, {name: type}) of a checkpoint's GGUF file."""
    from gguf import GGUFReader
    convert([str(source), str(target), *flags])
    file = GGUFReader(target)
    tensors = {}
    for tensor in file.tensors:
        shape = tensor.shape.tolist()[::-1]
        kind = np.uint16 if tensor.tensor_type.name == "BF16" else np.float32
        tensors[tensor.name] = tensor.data.view(kind).reshape(shape)
    return ({name: field.contents() for name, field in file.fields.items()}, tensors,
            {tensor.name: tensor.tensor_type.name for tensor in file.tensors})


def own_checkpoint(path, words, eot, **sizes):
    """A checkpoint of random parameters, with a vocabulary of its own."""
    c = Config(**dict(maxT=16, V=len(words), L=1, NH=1, C=32, Vp=-(-len(words) // 128) * 128)
               | sizes)
    params = SimpleNamespace(**dict(draw_parameters(c, 1)))
    replace_file(path, checkpoint_parts(c, params, np.float32))
    write_vocabulary(path.with_name(f"{path.stem}_tokenizer.bin"), Vocabulary(words, eot))
    return path


@fast
def test_gpt2(folder):
    """GPT-2's fields and tensors; in bf16 all but the matrices stay fp32."""
    c, tensors = Config.from_file(TINY), dict(read_parameters(TINY, Config.from_file(TINY)))
    for flags, kind in (((), "F32"), (("--dtype", "bf16"), "BF16")):
        fields, found, types = converted(TINY, folder / "tiny.gguf", *flags)
        wish = {"general.architecture": "gpt2", "general.name": "gpt2_tiny",
                "gpt2.vocab_size": 331, "gpt2.context_length": 40, "gpt2.embedding_length": 64,
                "gpt2.feed_forward_length": 256, "gpt2.block_count": 2,
                "gpt2.attention.head_count": 2, "gpt2.attention.head_count_kv": 2,
                "gpt2.attention.layer_norm_epsilon": float(np.float32(1e-5)),
                "general.file_type": 0 if kind == "F32" else 32, "tokenizer.ggml.model": "none",
                "GGUF.version": 3, "GGUF.tensor_count": 28, "GGUF.kv_count": 12}
        check(f"{kind}: fields", fields == wish, fields)
        check(f"{kind}: names", found.keys() == GPT2_TENSORS.keys(), found.keys())
        for name, ours in GPT2_TENSORS.items():
            ours, _, l = ours.partition(" ")
            array = tensors[ours][int(l)] if l else tensors[ours]
            array = array[: c.V] if ours == "wte" else array
            matrix = array.ndim == 2 and ours != "wpe"
            check(f"{name}: type", types[name] == (kind if matrix else "F32"), types[name])
            rounded = matrix and kind == "BF16"
            yield name, found[name], to_bf16(array) if rounded else array, EXACT


def llama_logits(fields, w, tokens):
    """Logits (T,V), from a file's fields and tensors, as llama.cpp computes them."""
    NH, NKV, L = (fields[f"llama.{name}"] for name in (
        "attention.head_count", "attention.head_count_kv", "block_count"))
    eps, base, HS = (fields[f"llama.{name}"] for name in (
        "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"))
    T = len(tokens)
    slower = w.get("rope_freqs.weight", np.ones(HS // 2))
    turns = np.outer(np.arange(T), base ** (-np.arange(0, HS, 2) / HS) / slower)  # (T,HS/2)

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def rotated(x, heads):
        pairs = x.reshape(T, heads, HS // 2, 2).astype(np.complex128)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * turns)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(T, heads, HS)

    x = np.float64(w["token_embd.weight"][tokens])
    for l in range(L):
        p = {name.removeprefix(f"blk.{l}."): array for name, array in w.items()}
        inp = norm(x, p["attn_norm.weight"])
        q, k = (rotated(inp @ p[f"attn_{part}.weight"].T, heads)
                for part, heads in (("q", NH), ("k", NKV)))
        v = (inp @ p["attn_v.weight"].T).reshape(T, NKV, HS)
        k, v = (part.repeat(NH // NKV, axis=1) for part in (k, v))
        scores = np.einsum("thc,shc->hts", q, k) / np.sqrt(HS)
        scores[:, ~np.tri(T, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shc->thc", weights, v).reshape(T, -1) @ p["attn_output.weight"].T
        inp = norm(x, p["ffn_norm.weight"])
        gate = inp @ p["ffn_gate.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (inp @ p["ffn_up.weight"].T)
        x = x + hidden @ p["ffn_down.weight"].T
    head = w.get("output.weight", w["token_embd.weight"])
    return norm(x, w["output_norm.weight"]) @ head.T


def test_llama(folder):
    """A Llama 3 has PyTorch's logits, with a head of its own and without."""
    for name in ("llama_gqa", "llama_tied"):
        path = FIXTURES / f"{name}.bin"
        c = Config3.from_file(path)
        state = read_debug_state(FIXTURES / f"{name}_debug_state.bin", c)
        fields, found, _ = converted(path, folder / f"{name}.gguf")
        logits = np.stack([llama_logits(fields, found, row) for row in state.x])
        yield f"{name}: logits", logits, state.logits, 1e-6
        check(f"{name}: hidden channels", fields["llama.feed_forward_length"] ==
              len(found["blk.0.ffn_up.weight"]), fields)
        check(f"{name}: a head", ("output.weight" in found) == (not c.tied))
        check(f"{name}: slower RoPE", ("rope_freqs.weight" in found) == (name == "llama_gqa"))


def test_chat(folder):
    """Without a run's notes, --chat asks for the template. Llama's ends with a token of its own."""
    path = str(FIXTURES / "llama_tied.bin")
    with mock.patch.object(Config3, "encoding", lambda self: llama_words()):
        fields, _, _ = converted(path, folder / "a.gguf", "--chat")
        convert([path, str(folder), "--chat"])
    check("both", fields["tokenizer.chat_template"] == (folder / "chat_template.jinja").read_text())
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    check("its end", end == fields["tokenizer.ggml.eos_token_id"] == 259, end)


def test_odd_heads(folder):
    """Heads of 6 channels have three factors, 12 bytes: what follows them is at its place."""
    c = Config3(maxT=16, V=37, L=1, NH=16, C=96, NKV=8, multiple_of=8, scaled=1)
    params = SimpleNamespace(**dict(draw_parameters(c, 1)))
    params.lm_head = params.wte
    replace_file(folder / "odd.bin", checkpoint_parts(c, params, np.float32))
    _, found, _ = converted(folder / "odd.bin", folder / "odd.gguf")
    yield "three factors", found["rope_freqs.weight"], rope_factors(c), EXACT
    yield "embeddings", found["token_embd.weight"], params.wte[:37], EXACT
    yield "the last norm", found["output_norm.weight"], params.lnfw, EXACT


def test_rope_factors():
    """Pairs of channels that turn in less than 2,048 tokens stay, those that take more than 8,192
    are slowed down by the factor, and in between the share of turns decides."""
    for scaled, factor in ((1, 8), (32, 32)):
        wish = []
        for i in range(0, 64, 2):
            wavelength = 2 * np.pi * 500000.0 ** (i / 64)
            kept = (8192 / wavelength - 1) / 3
            if wavelength < 2048:
                wish.append(1)
            else:
                wish.append(factor if wavelength > 8192 else 1 / ((1 - kept) / factor + kept))
        found = rope_factors(Config3(C=128, NH=2, scaled=scaled))
        yield f"factor {factor}", found, np.array(wish), 1e-6
        check(f"factor {factor}: some of each kind",
              1 in wish and factor in wish and len({*wish}) > 3, wish)


def read_by_tokenizers(fields):
    """The encoder of the tokenizers library of a file's words and joins."""
    import tokenizers
    from tokenizers import models, pre_tokenizers
    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    model = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: model.encode(text).ids


TEXT = "The thick quilt: 'tis the 3,000th!\n\n  na\u00efve \u65e5\u672c  the"


def test_own_words(folder):
    """Bytes, and words joined from them: the file's joins make a text's tokens. Words that are
    characters are refused, and an older file stays."""
    joined = [b"th", b"he", b" t", b"qu", b"ck", b"ick", b" th", b" the", b"th" + b"e"]
    for name, words in (("bytes", BYTES), ("words", [*BYTES, *joined])):
        eot = len(words)
        path = own_checkpoint(folder / f"{name}.bin", [*words, END], eot)
        fields, _, _ = converted(path, folder / f"{name}.gguf")
        letter = letters()
        spelled = ["".join(letter[b] for b in word) for word in words]
        found = fields["tokenizer.ggml.tokens"]
        check(f"{name}: words", found == [*spelled, "<|endoftext|>"], found)
        kinds = fields["tokenizer.ggml.token_type"]
        check(f"{name}: kinds", kinds == [1] * eot + [3], kinds)
        ids = [fields[f"tokenizer.ggml.{x}_token_id"] for x in ("bos", "eos")]
        check(f"{name}: borders", ids == [eot, eot], ids)
        check(f"{name}: rule", (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) ==
              ("gpt2", "gpt-2"))
        check(f"{name}: joins", len(fields["tokenizer.ggml.merges"]) == eot - 256)
        wish = Vocabulary([*words, END], eot).encode(TEXT)
        check(f"{name}: tokens", read_by_tokenizers(fields)(TEXT) == list(wish), wish)
    padded = own_checkpoint(folder / "padded.bin", [*BYTES, END], 256, V=260)
    fields, found, _ = converted(padded, folder / "padded.gguf")
    check("unused words", fields["tokenizer.ggml.tokens"][-3:] == ["[PAD257]", "[PAD258]",
                                                                   "[PAD259]"] and
          fields["tokenizer.ggml.token_type"][-4:] == [3, 5, 5, 5] and
          found["token_embd.weight"].shape == (260, 32))
    chars = own_checkpoint(folder / "chars.bin", [b"a", "\u00e9".encode(), END], 2)
    (folder / "chars.gguf").write_bytes(b"older")
    check_refusal("characters", "chars_tokenizer.bin: its words are characters", convert,
                  [str(chars), str(folder / "chars.gguf")])
    check("an older file stays", (folder / "chars.gguf").read_bytes() == b"older")


def test_gpt2_words(folder):
    """GPT-2's 50,257 words, and 50,000 joins, make tiktoken's tokens; without them, the file has no
    tokenizer."""
    try:
        encoding = gpt2_encoding()
    except UserError:
        return
    c = Config(maxT=16, L=1, NH=1, C=32)
    params = SimpleNamespace(**dict(draw_parameters(c, 1)))
    replace_file(folder / "gpt2.bin", checkpoint_parts(c, params, np.float32))
    fields, _, _ = converted(folder / "gpt2.bin", folder / "gpt2.gguf")
    check("joins", len(fields["tokenizer.ggml.merges"]) == 50000)
    check("the last", fields["tokenizer.ggml.tokens"][EOT] == "<|endoftext|>" and
          fields["tokenizer.ggml.token_type"][EOT - 1 :] == [1, 3] and
          fields["tokenizer.ggml.eos_token_id"] == EOT)
    check("tokens", read_by_tokenizers(fields)(TEXT) == encoding.encode(TEXT))


def test_llama_words():
    """Llama's words: its rule, its special tokens, and the tokens around a text."""
    import tiktoken
    special = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001}
    ranks = {word: i for i, word in enumerate([*BYTES, b"th", b"the"])}
    encoding = tiktoken.Encoding("few", pat_str=r"[\s\S]+", mergeable_ranks=ranks,
                                 special_tokens=special)
    c = Config3(V=128256)
    with mock.patch.object(Config3, "encoding", lambda self: encoding):
        words = known_words(c, TEXT_IDS)
    fields = {name.removeprefix("tokenizer.ggml."): value
              for name, value in tokenizer_of(words, c.V).items()}
    tokens, kinds = fields["tokens"], fields["token_type"].tolist()
    check("rule", (fields["model"], fields["pre"]) == ("gpt2", "llama-bpe"))
    check("joins", fields["merges"] == ["t h", "th e"], fields["merges"])
    check("special", tokens[128000:128003] == [*special, "[PAD128002]"], tokens[128000:128003])
    check("kinds", kinds[:258] == [1] * 258 and kinds[127999:128003] == [5, 3, 3, 5])
    check("borders", (fields["bos_token_id"], fields["eos_token_id"]) == (128000, 128001))


def test_refusals(folder):
    """What is no checkpoint is refused in one line."""
    os.chdir(folder)
    check_refusal("a folder", "expected one of them to be a checkpoint", convert, ["x", "y.gguf"])
    check_refusal("a missing file", "x.bin: could not be read", convert, ["x.bin", "y.gguf"])
    check("nothing is left", not [*folder.iterdir()])
