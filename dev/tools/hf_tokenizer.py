"""For dev/tools/convert.py: write tokenizers as transformers reads them: GPT-2's, from tiktoken's
vocabulary, and the vocabularies of prepro_tinyshakespeare.py, which can be read again."""
import itertools
import math

from dev.data.vocabulary import Vocabulary, letters
from dev.features.tokenizer import words_of
from dev.tools.hf_config import read_json, write_objects
from prepro_tinyshakespeare import END_OF_TEXT
from train_gpt2 import UserError, replace_file

# What comes between a text and a model's words, and back
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
              "use_regex": True}
CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated",
              "invert": False}


def merges_of(ranks):
    """The pairs that byte-pair encoding joins, in order, from {word: rank}. To find the last join
    that makes a word, we encode the word itself: the neighbours whose join has the lowest rank are
    joined first, until two parts are left. Raises UserError if there is nothing to join before
    that."""
    for word in sorted(ranks, key=ranks.get):
        parts = [word[i : i + 1] for i in range(len(word))]
        while len(parts) > 2:
            joined = [ranks.get(first + second, math.inf)
                      for first, second in itertools.pairwise(parts)]
            i = joined.index(min(joined))
            if joined[i] == math.inf:
                raise UserError(f"tiktoken's vocabulary has {word}, which no joins of its other "
                                "words make")
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield tuple(parts)


def write_tokenizer(folder, encoding, maxT, **more):
    """Write the files of transformers' GPT2Tokenizer, from tiktoken's encoding. more: fields of
    tokenizer_config.json. Raises UserError."""
    words, letter = words_of(encoding), letters()
    spelled = lambda word: "".join(letter[b] for b in word)
    merges = merges_of({word: i for i, word in words.items() if word != END_OF_TEXT.encode()})
    lines = ["#version: 0.2", *(f"{spelled(first)} {spelled(second)}" for first, second in merges)]
    replace_file(folder / "merges.txt", ["\n".join(lines).encode() + b"\n"])
    write_objects(folder, {
        "vocab.json": {spelled(word): i for i, word in sorted(words.items())},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "model_max_length": maxT, "add_prefix_space": False,
            "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT, **more}})


def tokenizer_json(vocabulary):
    """The object in a tokenizer.json, for the tokenizers library. Raises UserError."""
    ids = {word: i for i, word in enumerate(vocabulary.words) if i != vocabulary.eot}
    special = {"id": vocabulary.eot, "content": END_OF_TEXT, "single_word": False, "lstrip": False,
               "rstrip": False, "normalized": False, "special": True}
    steps = {"pre_tokenizer": CHARACTERS, "decoder": {"type": "Fuse"}, "model": {
        "type": "WordLevel", "vocab": {word.decode(errors="replace"): i for word, i in ids.items()},
        "unk_token": "<none>"}}  # no word, so that a character that is missing is refused
    if vocabulary.kind != "chars":
        letter = letters()
        spelled = lambda word: "".join(letter[b] for b in word)
        steps = {"pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL, "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": {spelled(word): i for word, i in ids.items()},
            "merges": [[*map(spelled, pair)] for pair in merges_of(ids)]}}
    steps["model"]["vocab"][END_OF_TEXT] = vocabulary.eot
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special],
            "normalizer": None, "post_processor": None, **steps}


def write_vocabulary(folder, vocabulary, maxT, **more):
    """The same for a vocabulary of prepro_tinyshakespeare.py. Raises UserError."""
    write_objects(folder, {
        "tokenizer.json": tokenizer_json(vocabulary),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": maxT,
            "clean_up_tokenization_spaces": False, "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT, **more}})


def vocabulary_in(path):
    """The Vocabulary of a tokenizer.json that write_vocabulary wrote, or None if it is another."""
    found = read_json(path)
    try:
        steps, ids = found["pre_tokenizer"], found["model"]["vocab"]
        special = {token["content"]: token["id"] for token in found["added_tokens"]}
        byte_of, eot = {letter: b for b, letter in letters().items()}, special[END_OF_TEXT]
        ids = {word: i for word, i in ids.items() if word != END_OF_TEXT}
        encode = str.encode if steps == CHARACTERS else (
            lambda word: bytes(map(byte_of.__getitem__, word)))
        words = [encode(word) for word in sorted(ids, key=ids.get)]
        vocabulary = Vocabulary([*words, END_OF_TEXT.encode()], eot, str(path))
        made = tokenizer_json(vocabulary)
    except (LookupError, TypeError, AttributeError, ValueError, UserError):
        return None
    same = all(made[name] == found.get(name) for name in ("pre_tokenizer", "normalizer", "model"))
    return vocabulary if same else None
