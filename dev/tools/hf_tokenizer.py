"""For dev/tools/convert.py: write GPT-2's tokenizer as transformers reads it, from tiktoken's
vocabulary."""
import itertools
import math

from dev.data.vocabulary import letters
from dev.features.tokenizer import words_of
from dev.tools.hf_config import write_objects
from prepro_tinyshakespeare import END_OF_TEXT, UserError, replace_file


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


def write_tokenizer(folder, encoding, maxT):
    """Write the files of transformers' GPT2Tokenizer, from tiktoken's encoding. Raises
    UserError."""
    words, letter = words_of(encoding), letters()
    spelled = lambda word: "".join(letter[b] for b in word)
    merges = merges_of({word: i for i, word in words.items() if word != END_OF_TEXT.encode()})
    lines = ["#version: 0.2", *(f"{spelled(first)} {spelled(second)}" for first, second in merges)]
    replace_file(folder / "merges.txt", ["\n".join(lines).encode() + b"\n"])
    write_objects(folder, {
        "vocab.json": {spelled(word): i for i, word in sorted(words.items())},
        "tokenizer_config.json": {
            "tokenizer_class": "GPT2Tokenizer", "model_max_length": maxT, "add_prefix_space": False,
            "bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}})
