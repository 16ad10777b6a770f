"""Text to Llama 3's tokens, in llm.c's format for them, which the trainers read.

    python -m dev.llama3.tokens --tokenizer tokenizer.json    # downloads tinyshakespeare, 1.1 MB
    python -m dev.llama3.tokens --input book.txt    # data/book_llama/book_llama_{train,val}.bin
    python -m dev.llama3.tokens --input chats.jsonl --chat    # conversations: dev/data/chats.py

The tokenizer comes with Llama's weights: Hugging Face's tokenizer.json or Meta's tokenizer.model.
Without --tokenizer, the one in the current folder is used, or else GPT-2's. Tokenizers with other
words are refused, since no model here has them. --input takes the same files as that of
prepro_tinyshakespeare.py, and each document begins with <|begin_of_text|>. A file is 256 int32
(magic 20240801, version 7, count), then the tokens as uint32.
"""
import base64
import functools
import json
import os
from pathlib import Path

from dev.common.flags import parse_flags
from dev.common.program import run_main
from dev.data import chats
from dev.data.documents import FLAGS as DOCUMENTS, documents_of, input_files, name_of, said
from dev.data.text import BYTE_ORDER_MARK, call_tiktoken
from dev.data.vocabulary import interruptible, letters
from dev.features.tokenizer import words_of
from prepro_tinyshakespeare import END_OF_TEXT, write_parts
from train_gpt2 import FileKind, UserError, gpt2_encoding

LLAMA_TOKENS = FileKind("Llama 3 token file", 20240801, (7,), "dev/llama3/tokens.py writes one")
# Separates texts, as GPT-2's end-of-text does. By its id the trainer tells models with Llama 3's
# vocabulary of 128,256 words from those with GPT-2's.
BEGIN_OF_TEXT, BEGIN_ID = "<|begin_of_text|>", 128000
# How Llama 3 splits a text into pieces that are tokenized one by one; a tokenizer.json has its own
# pattern.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# A tokenizer.model does not name the 256 special tokens after its words. These are the names since
# Llama 3.1.
NAMED = ("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1",
         "finetune_right_pad_id", "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id",
         "python_tag")
SPECIAL = [f"<|{name}|>"
           for name in (*NAMED,
                        *(f"reserved_special_token_{i}" for i in range(2, 258 - len(NAMED))))]


def read_model(path):
    """(pattern, {bytes: id}, {special token: id}) of Meta's tokenizer.model: a word in Base64 and
    its id per line."""
    lines = path.read_bytes().removeprefix(BYTE_ORDER_MARK.encode()).splitlines()
    ids = {base64.b64decode(word, validate=True): int(i)
           for word, i in (line.split() for line in lines if line)}
    return PATTERN, ids, {name: len(ids) + i for i, name in enumerate(SPECIAL)}


def read_json(path):
    """The same of Hugging Face's tokenizer.json, where a word has a letter for each byte."""
    content = json.loads(path.read_bytes())
    byte_of = {letter: b for b, letter in letters().items()}
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    steps = content["pre_tokenizer"].get("pretokenizers", [content["pre_tokenizer"]])
    model, normalizer = content["model"], content.get("normalizer") or {}
    names = ", ".join(step["type"] for step in steps)
    for ok, problem in (
            (model["type"] == "BPE", f"model is of type {model['type']}, not BPE"),
            (not normalizer, f"normalizer is of type {normalizer.get('type')}, not none"),
            (names == "Split, ByteLevel",
             f"pre_tokenizer has the steps {names}, not Split, ByteLevel")):
        if not ok:
            raise UserError(f"{path}: its {problem}; expected Llama 3's tokenizer")
    pattern = steps[0]["pattern"]["Regex"]
    ids = {bytes(map(byte_of.__getitem__, word)): i for word, i in content["model"]["vocab"].items()
           if word not in special}
    return pattern, ids, special


def tokenizer_here():
    """The name of a tokenizer in the current folder, or None."""
    return next(filter(os.path.isfile, ("tokenizer.json", "tokenizer.model")), None)


@functools.cache
def encoding(path=None):
    """tiktoken's Encoding of a tokenizer.json or tokenizer.model: without a path, the one in the
    current folder, or GPT-2's if there is none. Raises UserError."""
    path = path or tokenizer_here()
    if not path:
        return gpt2_encoding()
    path = Path(path)
    try:
        import tiktoken
        pattern, ids, special = (read_json if path.suffix == ".json" else read_model)(path)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror}); a tokenizer comes with Llama's "
                        "weights") from None
    except ImportError as e:
        raise UserError(f"{path} needs tiktoken ({e}): pip install -r requirements.txt") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: expected Llama 3's tokenizer.json or tokenizer.model") from None
    missing = [b for b in range(256) if bytes([b]) not in ids]
    if missing or BEGIN_OF_TEXT not in special:
        lack = f"token for byte {missing[0]}" if missing else BEGIN_OF_TEXT
        raise UserError(f"{path}: has no {lack}; expected a tokenizer of Llama 3")
    if special[BEGIN_OF_TEXT] != BEGIN_ID:
        raise UserError(f"{path}: its {BEGIN_OF_TEXT} is token {special[BEGIN_OF_TEXT]}, not "
                        f"{BEGIN_ID}; expected a tokenizer of Llama 3, since the trainer has "
                        "models of its words and of GPT-2's words only")
    try:
        return call_tiktoken(tiktoken.Encoding, str(path), pat_str=pattern, mergeable_ranks=ids,
                             special_tokens=special)
    # two words have an id, or the pattern is none
    except (UserError, ValueError, OverflowError, TypeError):
        raise UserError(f"{path}: tiktoken cannot use its words or its pattern; expected a "
                        "tokenizer of Llama 3"
                        ) from None


def border(encoding):
    """The special token before each document."""
    return BEGIN_OF_TEXT if BEGIN_OF_TEXT in encoding.special_tokens_set else END_OF_TEXT


def vocabulary(path=None):
    """{token id: its bytes} of encoding(path); {} without a tokenizer, which a warning says."""
    return words_of(encoding(path)) if path or tokenizer_here() else no_words()


@functools.cache
def no_words():
    print("WARNING: there is no tokenizer.json or tokenizer.model in this folder, which come with "
          "Llama's weights: samples are shown as token ids")
    return {}


FLAGS = [
    *DOCUMENTS,
    *chats.FLAGS,
    (None, "--tokenizer", "name", None, "tokenizer.json or tokenizer.model (default: the one here, "
     "else GPT-2's)"),
]


def main():
    flags = parse_flags(__doc__, FLAGS)
    chats.check_flags(flags)
    words = encoding(flags.tokenizer)
    # as for GPT-2 a name that is given has no _llama
    name = flags.name or f"{name_of(flags) or 'tinyshakespeare'}_llama"
    print(f"tokenizer    | {words.name}: {words.n_vocab:,} tokens")
    pattern = Path(f"data/{name}/{name}_{{}}.bin")
    kind = dict(magic=LLAMA_TOKENS.magic, version=LLAMA_TOKENS.versions[0], dtype="<u4")
    if flags.chat:
        conversations = chats.read_conversations(input_files(flags.input))
        template = chats.template_of_encoding(words)
        return chats.write_rows(pattern, *chats.prepare(conversations, template, flags), **kind)
    texts, units = documents_of(flags)
    print(said(units))
    [begin] = words.encode(border(words), allowed_special="all")
    tokens = interruptible(lambda: [token for text in texts for token in (
        begin, *call_tiktoken(words.encode_ordinary, text))])
    write_parts(tokens, pattern, **kind)
    chats.remove_masks(pattern)


if __name__ == "__main__":
    run_main(main)
