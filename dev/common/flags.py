"""Flags: what a feature says of each of its own, at the end of its file; and command lines, by
tables of such rows, or of rows as train_gpt2.FLAGS, which has the trainer's."""
import argparse
import difflib
import sys
from collections.abc import Callable
from typing import NamedTuple

from train_gpt2 import FLAG_TYPES, Parser, add_flag, number

NEAR = 0.75  # the least likeness to a flag, by difflib, of a word that may be a slip for it
# What other trainers call a flag, if it is spelled too differently
ELSEWHERE = {"--lr": "--learning-rate", "--wd": "--weight-decay", "--max-steps": "--steps",
             "--max-iters": "--steps"}
OWN = {"level": number(int, 0, 3), "names": str}  # types that the trainer's flags lack
TYPES = FLAG_TYPES | OWN


def key_of(row):
    """The name of a row's flag among the attributes of flags."""
    return row[1].removeprefix("--").replace("-", "_")


class Flag(NamedTuple):
    """A flag: the five fields of a row of train_gpt2.FLAGS, and more. It replaces a row of the same
    name there."""
    letter: str
    name: str
    kind: object
    default: object
    text: str
    group: str = ""  # its headline in --help; a row that is replaced stays where it is
    after: str = ""  # the flag that it follows there
    needs: str = ""  # the flag that it is useless without
    path: bool = False  # its value names files to read: absolute in run_*.json, needed by -y 1
    replayed: bool = True  # whether --replay takes the run's value
    # With -y 1: whether it takes the run's value if none is given, must have that value, or may
    # have another without a warning (a function of the flags: whether it may)
    restored: bool = True
    must_agree: bool = False
    may_differ: bool | Callable = False
    of_older: object = None  # the value of a run by a version that had no such flag

    key = property(key_of)
    short = property(lambda self: self.letter or self.name)


def with_older(before, table):
    """The flags of a run, {key: value}, and those that its version lacked, as it trained without
    them."""
    return {flag.key: flag.of_older for flag in table} | before


class NearParser(Parser):
    """A parser that, for a misspelled flag, names the one that is spelled most like it."""
    names = ()  # of its flags

    def error(self, message):
        kind, _, words = message.partition(": ")
        if kind == "unrecognized arguments":
            word = words.split()[0].split("=")[0].replace("_", "-")
            near = ([ELSEWHERE[word]] if ELSEWHERE.get(word) in self.names else
                    difflib.get_close_matches(word, self.names, 1, NEAR))
            message += f": did you mean {near[0]}?" if near else ""
        super().error(message)


def parse_flags(description, table, arguments=None, defaults=True, groups=()):
    """The flags of a command line, by a table of rows as train_gpt2.FLAGS; without defaults, None
    if not given. groups: {first flag: headline}, for --help."""
    parser = group = NearParser(description=description, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.names = [name for _, name, *_ in table if name.startswith("--")]
    for letter, name, kind, default, text, *_ in table:  # a feature's Flag has more
        group = parser.add_argument_group(groups[name]) if name in groups else group
        action = add_flag(group, letter, name, OWN.get(kind, kind), default, text)
        if kind == "level":
            action.nargs, action.const = "?", 1
        if kind == "names":
            action.nargs, action.metavar = "+", "NAME"
        if not defaults:
            action.default = None
    return parser.parse_args(arguments)


def with_values(flags, **values):
    """A copy of flags with other values of some. Nobody writes into flags: they stay what was asked
    for."""
    return argparse.Namespace(**(vars(flags) | values))


def argument(name):
    """The type, in a table of flags, of an argument that --help calls NAME."""
    return type(name, (str,), {})


def split_names(arguments, table):
    """([arguments that are no flags'], the others), for a program that takes any number of names.
    A switch takes what follows it only if that is 0 or 1."""
    switches = {word for letter, name, kind, *_ in table if kind == "switch"
                for word in (letter, name)}
    names, others, arguments = [], [], [*arguments]
    while arguments:
        word = arguments.pop(0)
        (others if word.startswith("-") else names).append(word)
        if word.startswith("-") and arguments and "=" not in word and word not in ("-h", "--help"):
            if word not in switches or arguments[0] in ("0", "1"):
                others.append(arguments.pop(0))
    return names, others


def split_versions(arguments, table):
    """(names, the program's own arguments, those for all that is named, which come after --)."""
    arguments, shared = sys.argv[1:] if arguments is None else arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, shared = arguments[:at], arguments[at + 1 :]
    return *split_names(arguments, table), shared
