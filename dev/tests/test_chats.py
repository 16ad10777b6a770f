"""Test conversations: their JSON lines, templates, rows and files, and a fine-tuning on them with
answers at its end."""
import contextlib
import io
import json
import sys
from unittest import mock

import numpy as np
import pytest
import tiktoken

from dev.data import chats, own_text
from dev.data.chats import (Llama, Plain, conversation_of, prompt, read_conversations, rows_of,
                            template_of_encoding, tokens_of_conversation)
from dev.data.masks import read_mask, row_of
from dev.data.vocabulary import BYTES, END, PATTERN, Vocabulary, read_vocabulary
from dev.features import sample
from dev.llama3 import tokens as llama_tokens
from dev.tests.checks import check, check_refusal
from dev.tests.trainings import call, place_of
from train_gpt2 import read_tokens

BYTE_WORDS = Vocabulary([*BYTES, END], 256)
TWO_TURNS = [("system", "Be brief."), ("user", "Who?"), ("assistant", "I."), ("user", "Why?"),
             ("assistant", "So <|endoftext|> what.")]
SPECIAL = {"<|begin_of_text|>": 256, "<|start_header_id|>": 257, "<|end_header_id|>": 258,
           "<|eot_id|>": 259}


def llama_words():
    """An encoding of bytes with Llama 3's special tokens."""
    return tiktoken.Encoding("bytes", pat_str=PATTERN, special_tokens=SPECIAL,
                             mergeable_ranks={byte: i for i, byte in enumerate(BYTES)})


def spelled(parts):
    """(ids, whether each counts) of [(text or id, counts)], texts as bytes."""
    ids = []
    counts = []
    for part, counted in parts:
        own = [part] if isinstance(part, int) else [*part.encode()]
        ids += own
        counts += [counted] * len(own)
    return ids, counts


def test_templates():
    """Both templates, written out by hand: which tokens, and which of them count."""
    plain = Plain(BYTE_WORDS.encode_ordinary, BYTE_WORDS.eot)
    wish = spelled([(256, False), ("System: Be brief.\nUser: Who?\nAssistant:", False),
                    (" I.", True), (256, True), ("User: Why?\nAssistant:", False),
                    (" So <|endoftext|> what.", True), (256, True)])
    found = tokens_of_conversation(plain, TWO_TURNS)
    check("plain", found == wish, found)
    wish, _ = spelled([(256, 0), ("User: Who?\nAssistant:", 0)])
    check("plain: a prompt", prompt(plain, "Who?") == wish, prompt(plain, "Who?"))
    llama = template_of_encoding(llama_words())
    check("Llama's by its words", isinstance(llama, Llama))
    wish = spelled([
        (256, False), (257, False), ("user", False), (258, False), ("\n\nWho?", False),
        (259, False), (257, False), ("assistant", False), (258, False), ("\n\n", False),
        ("I <|eot_id|>.", True), (259, True)])
    found = tokens_of_conversation(llama, [("user", " Who?\n"), ("assistant", "I <|eot_id|>.")])
    check("Llama", found == wish, found)
    wish = wish[0][: wish[1].index(True)]
    check("Llama: a prompt", prompt(llama, "Who?") == wish, prompt(llama, "Who?"))


def test_jinja():
    """Its text has the tokens of training; what training lacks is refused."""
    from transformers.utils.chat_template_utils import render_jinja_template as rendered
    hard = [("system", "Be brief. "), ("user", "  Who?\n\n"), ("assistant", " He."),
            ("assistant", "\n I.\t"), ("user", "")]
    for words in (BYTE_WORDS.encoding, llama_words()):
        template = template_of_encoding(words)
        jinja = dict(chat_template=chats.jinja_of(template), add_generation_prompt=True)
        [text], _ = rendered([[dict(role=role, content=said) for role, said in hard]], **jinja)
        wish = tokens_of_conversation(template, hard)[0] + template.turn("assistant")
        check(words.name, words.encode(text, allowed_special="all") == wish, text)
        said = template.said("assistant", " I.")  # as a model has written it
        check("an answer's own space", said == template.said("assistant", "I."), said)
        for role, text, wish in (("tool", "", "role tool: expected a text, and one of .*'user'"),
                                 ("user", [{"text": "Who?"}], "role user: expected a text"),
                                 ("user", f"a{template.end}", "has <.e.*, a special token")):
            with pytest.raises(Exception, match=wish):
                rendered([[dict(role=role, content=text)]], **jinja)


def test_forms(folder):
    """Both forms of a line, and all names of fields; what is none of them is refused with its
    line."""
    pair = [("user", "Who?"), ("assistant", "I.")]
    for asked in chats.PROMPTS:
        for said in chats.ANSWERS:
            found = conversation_of({asked: "Who?", said: "I.", "id": 7})
            check(f"{asked}, {said}", found == pair, found)
    asked, said = "\ufeffWho?\r\nSpeak.\r", "I.\n\r\nYes."
    for form in ({"prompt": asked, "answer": said},
                 {"messages": [{"role": "user", "content": asked},
                               {"role": "assistant", "content": said}]}):
        found = conversation_of(form)
        check("Windows' line ends", found == [("user", "Who?\nSpeak.\n"),
                                              ("assistant", "I.\n\nYes.")], found)
    path = folder / "chats.jsonl"
    first = json.dumps({"prompt": "Who?", "answer": "I."})
    second = json.dumps({"messages": [{"role": role, "content": text}
                                      for role, text in TWO_TURNS]})
    path.write_text(f"\ufeff{first}\r\n\n{second}", "utf-8")
    found = read_conversations([path])
    check("a file", found == [pair, TWO_TURNS], found)
    user = {"role": "user", "content": "Who?"}
    for line, wish in (
            ("[1]", "is a list"), ("{", "Expecting property name"),
            ('{"text": "a"}', "has the fields text"), ("{}", "has the fields of none"),
            ('{"prompt": "a"}', "has the fields prompt"),
            ('{"prompt": "a", "answer": "b", "output": "c"}', "has the fields prompt, answer"),
            ('{"prompt": "a", "answer": null}', "prompt or answer is no text"),
            ('{"messages": {}}', "messages is a dict"),
            (json.dumps({"messages": [user]}), "has no message of an assistant"),
            (json.dumps({"messages": [user, {"role": "tool", "content": ""}]}),
             "message 2 has the role 'tool', none of system, user, assistant"),
            (json.dumps({"messages": [{"role": "user", "content": [1]}]}),
             "the content of message 1 is no text")):
        path.write_text(json.dumps({"prompt": "Who?", "answer": "I."}) + "\n" + line)
        check_refusal(line, f"chats.jsonl: line 2: .*{wish}.*; expected .*messages",
                      read_conversations, [path])
    path.write_text("\n")
    check_refusal("nothing", "no conversation; expected", read_conversations, [path])
    check_refusal("a text", "book.txt: --chat takes .jsonl files", read_conversations,
                  [folder / "book.txt"])


def test_rows():
    """Conversations of 3, 4, 2, 9 and 1 tokens in rows of 7, packed and one a row: none crosses a
    row, and one that is too long is cut. Each goes into the open row that it fills best."""
    given = [([i] * n, [False] + [True] * (n - 1)) for i, n in enumerate((3, 4, 2, 9, 1), 1)]
    tokens, mask, cut = rows_of(given, 7, 0)
    wish = [[1, 1, 1, 2, 2, 2, 2], [3, 3, 5, 0, 0, 0, 0], [4] * 7]
    check("packed", tokens.tolist() == wish and cut == 1, tokens.tolist())
    wish = [[0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]]
    check("packed: what counts", mask.tolist() == np.bool_(wish).tolist(), mask.tolist())
    tokens, mask, cut = rows_of(given, 7, 0, together=False)
    check("one a row", [row[0] for row in tokens.tolist()] == [1, 2, 3, 4, 5] and cut == 1, tokens)
    check("one a row: what counts", mask.sum(1).tolist() == [2, 3, 1, 6, 0], mask.sum(1))
    given = [([i] * n, [True] * n) for i, n in enumerate((4, 5, 2, 3), 1)]
    for most, wish in ((9, [[1] * 4 + [4] * 3, [2] * 5 + [3] * 2]),
                       (1, [[1] * 4 + [3] * 2 + [0], [2] * 5 + [0] * 2, [4] * 3 + [0] * 4])):
        with mock.patch.object(chats, "OPEN_ROWS", most):
            tokens, _, _ = rows_of(given, 7, 0)
        check(f"the best of {most} open rows", tokens.tolist() == wish, tokens.tolist())


def prepare(module, *arguments):
    """Call a program that writes tokens."""
    with mock.patch.object(sys, "argv", ["prepro", *map(str, arguments)]):
        module.main()


def write_chats(path, count):
    path.write_text("\n".join(json.dumps({"prompt": f"Number {i}?", "answer": f"It is {i}."})
                              for i in range(count)))


def test_files(folder, monkeypatch):
    """The token files and masks of both programs are the conversations, row by row; ordinary tokens
    of the same name remove masks."""
    monkeypatch.chdir(folder)
    write_chats(folder / "chats.jsonl", 40)
    prepare(own_text, "--input", "chats.jsonl", "--chat", "--vocab", "bytes", "--row", 80)
    words = read_vocabulary("data/chats/chats_tokenizer.bin")
    found = []
    for part, count in (("val", 2), ("train", 18)):
        path = f"data/chats/chats_{part}.bin"
        tokens = read_tokens(path, 257)
        mask = read_mask(path, tokens)
        check(f"{part}: rows", (len(tokens), row_of(path)) == (count * 80 + 1, 80), len(tokens))
        answers = "".join(words.words[token].decode() if counts else "\0"
                          for token, counts in zip(tokens, mask))
        found += [each for each in answers.split("\0") if each]
        check(f"{part}: a row begins with <|endoftext|>", (tokens[::80] == 256).all())
    check("what counts", found == [f" It is {i}.<|endoftext|>" for i in range(40)], found)
    prepare(own_text, "--input", "chats.jsonl", "--column", "answer", "--vocab", "bytes")
    check("other tokens: no mask", not [*folder.glob("data/chats/*.mask")])
    with mock.patch.object(llama_tokens, "encoding", lambda path: llama_words()):
        prepare(llama_tokens, "--input", "chats.jsonl", "--chat", "--row", 64, "--pack", 0)
    path = folder / "data/chats_llama/chats_llama_val.bin"
    data = np.fromfile(path, "<u4", offset=1024)
    mask = read_mask(path, data)
    check("Llama: a row", data[:4].tolist() == [256, 257, *b"us"] and row_of(path) == 64, data[:4])
    check("Llama: what counts", bytes(data[:64][mask[:64]][:-1].astype(np.uint8)) == b"It is 0."
          and data[:64][mask[:64]][-1] == 259, data[:64])
    check("Llama: <|begin_of_text|> fills a row", data[63] == 256 and not mask[63], data[63])
    check_lost(folder)
    for arguments, wish in ((("--chat",), "--chat: expected --input too"),
                            (("--input", "chats.jsonl", "--chat", "--documents", "rows"),
                             "a conversation is a line, .* expected no --documents"),
                            (("--input", "chats.jsonl", "--vocab", "bytes"),
                             r"no field text; .*; conversations need .*\.py --chat"),
                            (("--input", "chats.jsonl", "--row", 8), "--row: is for conversations: "
                             "expected --chat too"),
                            (("--input", "chats.jsonl", "--pack", 0), "--pack: is for conv"),
                            (("--input", "chats.jsonl", "--chat", "--column", "a"),
                             "--chat --column a: .* expected no --column"),
                            (("--input", "chats.jsonl", "--chat", "--vocab", "bytes", "--row",
                              4000), "fill 1 row of 4000 tokens; expected at least two")):
        check_refusal(wish, wish, prepare, own_text, *arguments)


def check_lost(folder):
    """Rows that cut some answers, or all of a part: nothing is written then."""
    lines = (folder / "chats.jsonl").read_text().split("\n")
    long, half = (json.dumps({"prompt": "x" * a, "answer": "y" * b}) for a, b in ((90, 2), (9, 90)))
    for name, given, row, wish in (
            ("lost", lines, 20, "training: 40 of 40 conversations lost .* 20 tokens"),
            ("first", [long, half, *lines[:16]], 80,
             "validation: 1 of 18 conversations lost .* 80 tokens")):
        (folder / f"{name}.jsonl").write_text("\n".join(given))
        check_refusal(name, f"no token counts in the rows for {wish}; expected a larger --row",
                      prepare, own_text, "--input", f"{name}.jsonl", "--chat", "--vocab", "bytes",
                      "--row", row)
        check(f"{name}: nothing is written", not (folder / "data" / name).exists())
    (folder / "some.jsonl").write_text("\n".join([*lines, long, half, long]))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        prepare(own_text, "--input", "some.jsonl", "--chat", "--vocab", "bytes", "--row", 80)
    check("some are lost", "cut at its end: 3 conversations; 2 of them lost their whole answer; "
          "expected a larger --row\n" in out.getvalue(), out.getvalue())


def test_fine_tuning(device_name, folder, monkeypatch):
    """Steps on conversations have the rows' length without -t, and --sample answers in the
    template, up to its end."""
    monkeypatch.chdir(folder)
    write_chats(folder / "chats.jsonl", 40)
    prepare(own_text, "--input", "chats.jsonl", "--chat", "--vocab", "bytes", "--row", 96)
    place = "--device", place_of(device_name)
    status, text, error = call("-e", "1x1x32", "-i", "data/chats/chats_train.bin", "-b", 1, "-x",
                               60, "-u", 3, "-l", 1e-2, "-s", 0, "-v", 0, "-o", "log", *place)
    check("trains", status == 0 and "B=1 T=96 (-b, -t)" in text and
          "\ntargets      | those that the masks" in text, text + error)
    given = []

    def generate(model, tokens, *more):
        given.append(tokens)
        return iter([*b" It is 7.", 256, *b"User: no"])

    with mock.patch.object(sample, "generate", generate):
        _, text, _ = call("-e", "log", "--sample", "\ufeffNumber\r\n7?", "--answer", "1", *place)
        wish = "Number\n7?\n It is 7.\n", [[256, *b"User: Number\n7?\nAssistant:"]]
        check("--sample", (text, given) == wish, (text, given))
    status, _, error = call("--answer", "1", *place)
    check("--answer alone", status and "--answer: expected --sample too" in error, error)
