"""For dev/tools/convert.py: write a checkpoint as a GGUF file, which llama.cpp reads.

GGUF (github.com/ggml-org/ggml/blob/master/docs/gguf.md) is little-endian: "GGUF", version 3, the
numbers of tensors and of fields; the fields: name, type, value; for each tensor its name, its shape
from the last axis to the first, its type, and where it begins; then the numbers, each tensor at a
multiple of 32 bytes. A text is its length in 8 bytes, and UTF-8. The gguf package, with which the
tests read, cannot write an empty list, and llama.cpp wants one of joins where words are bytes.

llama.cpp wants a linear layer's weight as (out, in), and RoPE's pairs of channels side by side, as
a checkpoint has them. Norms, biases and positions are fp32. Llama 3.1's slower RoPE is a tensor of
factors. The tokenizer is GPT-2's byte-pair encoding, or Llama 3's, with the joins in order.
"""
import math
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from dev.common.config import Config
from dev.data.chats import Llama, Plain, jinja_of
from dev.data.vocabulary import letters
from dev.features.tokenizer import GPT2_SIZES, vocabulary_of_run, words_of
from dev.llama3.train_llama3 import Config3
from dev.tools.hf_config import SCALING
from dev.tools.hf_tokenizer import merges_of
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import BF16, UserError, gpt2_encoding

VERSION = 3
ALIGNMENT = 32
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9  # types of fields
TENSOR_TYPES = {np.float32: 0, BF16: 30}
FILE_TYPES = {np.float32: 0, BF16: 32}  # general.file_type: what the matrices are
NORMAL, CONTROL, UNUSED = 1, 3, 5  # types of tokens

PARTS = {"ln1": "attn_norm", "qkv": "attn_qkv", "attproj": "attn_output", "ln2": "ffn_norm",
         "fc": "ffn_up", "fcproj": "ffn_down"}  # of a layer
ENDS = {"w": "weight", "b": "bias"}
LAYER = {f"{name}{end}": [f"blk.{{}}.{part}.{ENDS[end]}"] for name, part in PARTS.items()
         for end in ENDS}
LAST = {"lnfw": ["output_norm.weight"], "lnfb": ["output_norm.bias"]}
EMBEDDING = "token_embd.weight"
# {architecture: (its name, {a checkpoint's tensor: the tensors whose rows it holds}, as in
# hf_config.py)}
WEIGHTS = {name: names for name, names in LAYER.items() if name.endswith("w")}
ARCHITECTURES = {
    Config: ("gpt2", {"wte": [EMBEDDING, None], "wpe": ["position_embd.weight"], **LAYER, **LAST}),
    Config3: ("llama", {
        **WEIGHTS, "wte": [EMBEDDING], "lm_head": ["output.weight"], "lnfw": LAST["lnfw"],
        "qkvw": [f"blk.{{}}.attn_{part}.weight" for part in "qkv"],
        "fcw": ["blk.{}.ffn_up.weight", "blk.{}.ffn_gate.weight"], "upw": LAYER["fcw"],
        "gatew": ["blk.{}.ffn_gate.weight"]})}

# ---- Fields


def text_bytes(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value_bytes(value):
    """A field's type and value. An array is a list of texts, or of whole numbers."""
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + text_bytes(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, INT32, len(value)) + value.astype("<i4").tobytes()
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text_bytes, value))


def sizes_of(c):
    """The fields of a model's sizes."""
    name, _ = ARCHITECTURES[type(c)]
    is_llama = type(c) is Config3
    fields = {
        "vocab_size": c.V, "context_length": c.maxT, "embedding_length": c.C, "block_count": c.L,
        "feed_forward_length": c.H if is_llama else 4 * c.C, "attention.head_count": c.NH,
        "attention.head_count_kv": c.NKV}
    if is_llama:
        fields |= {"attention.layer_norm_rms_epsilon": c.eps, "rope.freq_base": c.theta,
                   "rope.dimension_count": c.C // c.NH}
    else:
        fields["attention.layer_norm_epsilon"] = 1e-5
    return {f"{name}.{field}": value for field, value in fields.items()}


# ---- Words


def own_words(vocabulary):
    """What a tokenizer says of a vocabulary of prepro_tinyshakespeare.py: ranks, {word: id};
    special, {special token: id}; the rule by which a text is cut first; the tokens that begin and
    end a text. Raises UserError."""
    vocabulary.check_text("it", "llama.cpp takes them as they are")
    if vocabulary.kind == "chars":
        raise UserError(f"{vocabulary.name}: its words are characters, and GGUF has no tokenizer "
                        "of these; expected bytes, or joined bytes: prepro_tinyshakespeare.py "
                        "--vocab bytes, or --vocab 1024")
    ranks = {word: i for i, word in enumerate(vocabulary.words) if i != vocabulary.eot}
    return SimpleNamespace(ranks=ranks, special={END_OF_TEXT: vocabulary.eot}, rule="gpt-2",
                           begin=vocabulary.eot, end=vocabulary.eot)


def known_words(c, ids):
    """The same for GPT-2's or Llama's words. ids: the tokens before and after a text. Raises
    UserError."""
    is_llama = type(c) is Config3 and c.has_llamas_words
    if not is_llama and c.V not in GPT2_SIZES:
        raise UserError(f"nothing says what the V = {c.V:,} words are; expected a vocabulary "
                        "beside the checkpoint, or GPT-2's")
    encoding = c.encoding() if is_llama else gpt2_encoding()
    special = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
    ranks = {word: i for i, word in words_of(encoding).items() if i not in special.values()}
    begin, end = ids.get(c.V, (c.EOT, c.EOT))
    return SimpleNamespace(ranks=ranks, special=special, rule="llama-bpe" if is_llama else "gpt-2",
                           begin=begin, end=end)


def tokenizer_of(words, V):
    """The fields of a tokenizer, for V words. Without words there is none, and llama.cpp takes
    token ids."""
    if not words:
        return {"tokenizer.ggml.model": "none"}
    letter = letters()

    def spelled(word):
        return "".join(letter[b] for b in word)

    tokens = [f"[PAD{i}]" for i in range(V)]
    kinds = np.full(V, UNUSED)
    for word, i in words.ranks.items():
        tokens[i], kinds[i] = spelled(word), NORMAL
    for name, i in words.special.items():
        tokens[i], kinds[i] = name, CONTROL
    merges = [f"{spelled(first)} {spelled(second)}" for first, second in merges_of(words.ranks)]
    fields = {"model": "gpt2", "pre": words.rule, "tokens": tokens, "token_type": kinds,
              "merges": merges, "bos_token_id": words.begin, "eos_token_id": words.end}
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


# ---- For Ollama

# Templates of conversations in Go's text/template. A message is given as the model wrote it, so it
# may begin with its space. Llama's <|begin_of_text|> is added by llama.cpp.
MESSAGES = {
    Plain: """<|endoftext|>{{ range .Messages }}
{{- if eq .Role "assistant" }}Assistant:{{ else if eq .Role "system" }}System:{{ else }}User:
{{- end }}{{ if ne (printf "%.1s" .Content) " " }} {{ end }}{{ .Content }}
{{- if eq .Role "assistant" }}<|endoftext|>{{ else }}{{ "\\n" }}{{ end }}{{ end }}Assistant:""",
    Llama: """{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

"""}


def modelfile(path, c, template):
    """The text of a Modelfile, by which Ollama imports the GGUF file of a model that answers."""
    return (f"FROM ./{Path(path).name}\nPARAMETER num_ctx {c.maxT}\nPARAMETER stop "
            f'"{template.end}"\nTEMPLATE """{MESSAGES[type(template)]}"""\n')


# ---- Tensors


def rope_factors(c):
    """By how much RoPE slows each pair of channels down in Llama 3.1 and later, (HS/2) fp32."""
    frequencies = c.theta ** -(np.arange(0, c.C // c.NH, 2) / (c.C // c.NH))
    length, low, high = (SCALING[name] for name in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / c.factor + kept)).astype(np.float32)


def type_of(name, tensor, dtype):
    """What a tensor is stored as: matrices as dtype."""
    return dtype if tensor.ndim > 1 and name != "position_embd.weight" else np.float32


def padding(size):
    return bytes(-size % ALIGNMENT)


def gguf_parts(path, c, tensors, dtype, ids, stored_as, template=None):
    """A GGUF file, part by part. tensors: {name: array} of a checkpoint at path; dtype: of its
    matrices; ids: {V: the tokens before and after a text}; stored_as: converts; template: of
    conversations (dev/data/chats.py), or None. Raises UserError."""
    own = vocabulary_of_run(path, c.V)
    try:
        words = own_words(own) if own else known_words(c, ids)
    except UserError as e:
        if own and not own.is_ids:
            raise
        print(f"no tokenizer is written: {e}")
        words = None
    name, _ = ARCHITECTURES[type(c)]
    if type(c) is Config3 and c.factor > 1:
        tensors = {"rope_freqs.weight": rope_factors(c), **tensors}
    fields = {"general.architecture": name, "general.name": Path(path).stem,
              "general.file_type": FILE_TYPES[dtype], **sizes_of(c), **tokenizer_of(words, c.V)}
    if template:
        fields |= {"tokenizer.chat_template": jinja_of(template),
                   "tokenizer.ggml.eos_token_id": template.end_id}
    yield b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(fields))
    head = b"".join(text_bytes(field) + value_bytes(value) for field, value in fields.items())
    at = 0
    for name, tensor in tensors.items():
        kind = type_of(name, tensor, dtype)
        head += text_bytes(name) + struct.pack(
            f"<I{tensor.ndim}QIQ", tensor.ndim, *tensor.shape[::-1], TENSOR_TYPES[kind], at)
        size = tensor.size * np.dtype(kind).itemsize
        at += size + len(padding(size))
    yield head + padding(4 + 20 + len(head))
    for name, tensor in tensors.items():
        kind = type_of(name, tensor, dtype)
        yield from stored_as(kind, tensor)
        yield padding(tensor.size * np.dtype(kind).itemsize)
