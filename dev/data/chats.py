"""Conversations to train on: JSON lines become tokens, and a mask that says which of them are
answers, since only these count as targets.

    python prepro_tinyshakespeare.py --input chats.jsonl --chat            # for GPT-2
    python -m dev.llama3.tokens --input chats.jsonl --chat                 # for Llama 3

A line is a conversation, in one of two forms:

    {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}
    {"prompt": "Who?", "answer": "I."}

Roles are system, user and assistant; the second form may name its fields as in PROMPTS and ANSWERS.
What an assistant says counts, with the token that ends it: so the model learns to stop. All else
is only read. Templates:

    Plain    <|endoftext|>User: Who?
             Assistant: I.<|endoftext|>
    Llama    <|begin_of_text|><|start_header_id|>user<|end_header_id|>

             Who?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

             I.<|eot_id|>

Llama is Llama 3's, as its instruction models have it, and is used with Llama's tokenizer; Plain
takes any words. The name of a special token within a message is ordinary text.

The loader cuts a token file into rows of T tokens (-t). So conversations are put into rows of --row
T tokens, each into the one that it fills best; what is left of a row is filled with <|endoftext|>,
which does not count. A conversation does not see those before it in its row, unless a run has
--document-mask 0. With --pack 0 each has a row of its own. One that is longer than a row is cut at
the row's end, and a line says how many were.
"""
import bisect
import functools
import json
import re
import string

import numpy as np

from dev.data.documents import cleaned, read_utf8
from dev.data.masks import mask_path, write_mask
from dev.data.text import both, call_tiktoken
from prepro_tinyshakespeare import VAL_TOKENS, write_tokens
from train_gpt2 import UserError

PROMPTS = "prompt", "question", "instruction"
ANSWERS = "answer", "completion", "response", "output"
ROLES = "system", "user", "assistant"
FORMS = ('{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "answer": ...}; '
         f"a prompt may be called {' or '.join(PROMPTS[1:])}, and an answer "
         f"{' or '.join(ANSWERS[1:])}")
OPEN_ROWS = 4096  # in which conversations are still put, at most
FLAGS = [
    (None, "--chat", "switch", 0, "1: the input is .jsonl, a conversation a line; only answers "
     "count as targets: see dev/data/chats.py"),
    (None, "--row", "count", None, "for --chat: T, the -t of the training; conversations do not "
     "cross rows of T tokens (default: 1024)"),
    (None, "--pack", "switch", None, "for --chat: 0: one conversation a row, instead of as many as "
     "fit (default: 1)"),
]


def check_flags(flags):
    """Set the defaults of --row and --pack. Raises UserError if flags do not go together with
    --chat, or need it."""
    if not flags.chat:
        for name in ("row", "pack"):
            if getattr(flags, name) is not None:
                raise UserError(f"--{name}: is for conversations: expected --chat too")
        return
    if not flags.input:
        raise UserError("--chat: expected --input too, .jsonl files with a conversation a line")
    for name, default in (("documents", None), ("column", "text")):
        if getattr(flags, name) != default:
            raise UserError(f"--chat --{name} {getattr(flags, name)}: a conversation is a line, "
                            f"with fields of its own: expected no --{name}")
    flags.row = flags.row or 1024
    flags.pack = 1 if flags.pack is None else flags.pack


# ---- Reading


def conversation_of(content):
    """[(role, text)] of a line's JSON, cleaned. Raises ValueError, which says what was found."""
    if not isinstance(content, dict):
        raise ValueError(f"is a {type(content).__name__}")
    if "messages" in content:
        messages = content["messages"]
        if not isinstance(messages, list):
            raise ValueError(f"messages is a {type(messages).__name__}")
        found = []
        for number, message in enumerate(messages, 1):
            fields = message if isinstance(message, dict) else {}
            role = fields.get("role")
            text = fields.get("content")
            if role not in ROLES:
                raise ValueError(f"message {number} has the role {role!r}, none of "
                                 f"{', '.join(ROLES)}")
            if not isinstance(text, str):
                raise ValueError(f"the content of message {number} is no text")
            found.append((role, text))
    else:
        prompts = [name for name in PROMPTS if name in content]
        answers = [name for name in ANSWERS if name in content]
        if len(prompts) != 1 or len(answers) != 1:
            raise ValueError(f"has the fields {', '.join(content) or 'of none'}")
        found = [("user", content[prompts[0]]), ("assistant", content[answers[0]])]
        if not all(isinstance(text, str) for _, text in found):
            raise ValueError(f"{prompts[0]} or {answers[0]} is no text")
    if "assistant" not in dict(found):
        raise ValueError("has no message of an assistant, and so nothing to learn")
    return [(role, cleaned(text)) for role, text in found]


def read_conversations(paths):
    """The conversations of .jsonl files, each a list of (role, text). Empty lines are skipped.
    Raises UserError."""
    found = []
    for path in paths:
        if path.suffix.lower() != ".jsonl":
            raise UserError(f"{path}: --chat takes .jsonl files, with a conversation a line: "
                            f"{FORMS}")
        for number, line in enumerate(read_utf8(path, path).split("\n"), 1):
            try:
                if line.strip():
                    found.append(conversation_of(json.loads(line)))
            except (ValueError, RecursionError) as e:  # json's errors are ValueErrors
                raise UserError(f"{path}: line {number}: {e}; expected {FORMS}") from None
    if not found:
        raise UserError(f"{', '.join(map(str, paths))}: no conversation; expected {FORMS}")
    return found


# ---- Templates. encode(text) gives the ids of a text, in which no special token's name is one.


class Plain:
    """For any vocabulary: the ids of texts, and `eot`, that of <|endoftext|>."""
    end = "<|endoftext|>"
    names = [end]  # of special tokens
    jinja = dict(begin=end, answer="Assistant:", turn=(
        "{{ message.role | capitalize }}:{{ '' if message.content.startswith(' ') else ' ' }}"
        "{{ message.content }}"
        "{% if message.role == 'assistant' %}<|endoftext|>{% else %}{{ '\\n' }}{% endif %}"))

    def __init__(self, encode, eot):
        self.encode = encode
        self.eot = self.end_id = eot

    def begin(self):
        return [self.eot]

    def turn(self, role):
        """The ids before what a role says."""
        return [*self.encode(f"{role.capitalize()}:")]

    def said(self, role, text):
        """The ids of what it says: behind one space, which an answer of the model brings itself."""
        return [*self.encode(f" {text.removeprefix(' ')}"),
                *([self.eot] if role == "assistant" else self.encode("\n"))]


class Llama:
    """Llama 3's. special(name) is the id of a special token, which has one of these names."""
    end = "<|eot_id|>"
    jinja = dict(
        begin="<|begin_of_text|>", turn="<|start_header_id|>{{ message.role }}<|end_header_id|>"
        "{{ '\\n\\n' ~ message.content | trim }}<|eot_id|>",
        answer="<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}")

    def __init__(self, encode, special, names):
        self.encode, self.special, self.names = encode, special, names
        self.end_id = special(self.end)

    def begin(self):
        return [self.special("<|begin_of_text|>")]

    def turn(self, role):
        return [self.special("<|start_header_id|>"), *self.encode(role),
                self.special("<|end_header_id|>"), *self.encode("\n\n")]

    def said(self, role, text):
        return [*self.encode(text.strip()), self.special(self.end)]


def template_of_encoding(encoding):
    """The template for the words of a tiktoken Encoding: Llama's or GPT-2's. Raises UserError."""
    encode = functools.partial(call_tiktoken, encoding.encode_ordinary)
    special = encoding.encode_single_token
    if "<|start_header_id|>" in encoding.special_tokens_set:
        return Llama(encode, special, encoding.special_tokens_set)
    return Plain(encode, special(Plain.end))


def template_of_vocabulary(vocabulary):
    """The template for a Vocabulary of dev/data/vocabulary.py."""
    return Plain(vocabulary.encode_ordinary, vocabulary.eot)


def tokens_of_conversation(template, messages):
    """(ids, whether each counts) of [(role, text)], lists."""
    ids = template.begin()
    counts = [False] * len(ids)
    for role, text in messages:
        before = template.turn(role)
        said = template.said(role, text)
        ids += before + said
        counts += [False] * len(before) + [role == "assistant"] * len(said)
    return ids, counts


def prompt(template, text):
    """The ids of a user's message, up to where the answer begins."""
    asked = tokens_of_conversation(template, [("user", text)])[0]
    return asked + template.turn("assistant")


# The name of a special token in a message would become that token, which training does not do
JINJA = """\
$begin{% for message in messages %}
    {%- if message.role not in $roles or message.content is not string %}
        {{- raise_exception("role " ~ message.role ~ ": expected a text, and one of $roles") }}
    {%- endif %}{% for name in $names if name in message.content %}
        {{- raise_exception("a message has " ~ name ~ ", a special token: expected none") }}
    {%- endfor %}$turn
{%- endfor %}{% if add_generation_prompt %}$answer{% endif %}"""


def jinja_of(template):
    """The template in Jinja, as transformers and llama.cpp read it."""
    names = {re.sub(r"\d+\|>$", "", name) for name in template.names}  # once for numbered ones
    return string.Template(JINJA).substitute(template.jinja, roles=[*ROLES], names=sorted(names))


def texts_of(conversations):
    """The texts from which --vocab learns words: the conversations in the plain template."""
    return ["".join(f"{role.capitalize()}: {text}\n" for role, text in messages)
            for messages in conversations]


# ---- Rows


def rows_of(conversations, T, filler, together=True):
    """(ids (rows,T), whether each counts (rows,T), how many conversations were cut) of
    conversations, (ids, counts) each. filler: the id that fills rows; together: a row may have
    several. A conversation goes into the open row that it fills best, the first of equals, or opens
    a new one."""
    rows = []
    open_rows = []  # (tokens that a row has room for, its index), sorted
    cut = 0
    for ids, counts in conversations:
        cut += len(ids) > T
        ids, counts = ids[:T], counts[:T]
        best = bisect.bisect_left(open_rows, (len(ids),))
        if best < len(open_rows):
            room, row = open_rows.pop(best)
        else:
            room, row = T, len(rows)
            rows.append(([], []))
        rows[row][0].extend(ids)
        rows[row][1].extend(counts)
        if together and room > len(ids):
            bisect.insort(open_rows, (room - len(ids), row))
            del open_rows[:-OPEN_ROWS]  # the fullest, if there are too many
    tokens = np.full((len(rows), T), filler, np.uint32)
    mask = np.zeros((len(rows), T), bool)
    for i, (ids, counts) in enumerate(rows):
        tokens[i, : len(ids)] = ids
        mask[i, : len(ids)] = counts
    return tokens, mask, cut


def parts_of(count, T):
    """The slices of `count` rows of T tokens for training and for validation: the latter is the
    first tenth, of at most 32,768 tokens but at least one row. Raises UserError."""
    if count < 2:
        raise UserError(f"the conversations fill {count} row of {T} tokens; expected at least two, "
                        "one of which is for validation: a smaller --row, or more conversations")
    val = max(1, min(count // 10, VAL_TOKENS // T))
    return slice(val, None), slice(val)


def write_rows(pattern, tokens, mask, dtype="<u2", **kind):
    """Write rows (rows,T) as the two token files of a pattern, each with its mask. One more token,
    the first of the file, ends a file, since the loader wants a target for the last. Raises
    UserError."""
    T = tokens.shape[1]
    for path, part in zip(both(pattern), parts_of(*tokens.shape)):
        ids = np.append(tokens[part], tokens[0, 0]).astype(dtype)
        # The mask first: if this is interrupted, it does not fit the tokens, which is an error.
        write_mask(path, ids, np.append(mask[part], False), T)
        write_tokens(path, ids, dtype=dtype, **kind)


def remove_masks(pattern):
    """Remove the masks of earlier tokens of these names."""
    for path in both(pattern):
        mask_path(path).unlink(missing_ok=True)


def prepare(conversations, template, flags):
    """(tokens (rows,T), whether each counts (rows,T)) of conversations, [(role, text)] each, as the
    flags say: a line tells how many, and how much of their tokens counts. Raises UserError, also if
    nothing counts in a part."""
    found = [tokens_of_conversation(template, messages) for messages in conversations]
    tokens, mask, cut = rows_of(found, flags.row, template.begin()[0], flags.pack)
    print(f"{len(found):,} conversations in {len(tokens):,} rows of {flags.row} tokens (--row): "
          f"{mask.mean():.0%} of the tokens count, "
          f"{1 - sum(len(ids[: flags.row]) for ids, _ in found) / tokens.size:.0%} fill rows")
    lost = sum(not any(counts[: flags.row]) for _, counts in found)
    if cut:
        print(f"WARNING: longer than a row, and cut at its end: {cut:,} conversations; {lost:,} of "
              "them lost their whole answer; expected a larger --row")
    for name, part in zip(("training", "validation"), parts_of(*tokens.shape)):
        if not mask[part].any():
            raise UserError(f"no token counts in the rows for {name}: {lost:,} of {len(found):,} "
                            f"conversations lost their whole answer at the end of a row of "
                            f"{flags.row} tokens; expected a larger --row")
    return tokens, mask
