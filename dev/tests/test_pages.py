"""Test what the pages say: their links, the flags of their commands, and the README's figures."""
import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import train_gpt2
from dev.common.config import Config
from dev.common.flags import parse_flags, split_names
from dev.data import own_text
from dev.features.order import table_of_flags
from dev.lab.exercises import ORDER
from dev.tests.checks import TOP, check, fast, refusal

PAGES = [path for name in ("*.md", "dev/*.md", "dev/*/README.md") for path in TOP.glob(name)]
TRAINER, _ = table_of_flags(train_gpt2.FLAGS, Config)  # the trainer's flags, and its features'
TABLES = {"train_gpt2": TRAINER, "dev.llama3.train_llama3": TRAINER,
          "prepro_tinyshakespeare": own_text.FLAGS}
README = (TOP / "README.md").read_text("utf-8")


def anchors(path):
    """The headings of a page as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text):
    """(module, arguments) of each indented line of a page that starts a Python program."""
    for line in re.findall(r"^    (.*\bpython .*)$", text.replace("\\\n", ""), re.M):
        words = shlex.split(re.split(r" [<>] ", line)[0], comments=True)
        words = words[words.index("python") + 1 :]
        module = words.pop(1) if words[0] == "-m" else words[0].removesuffix(".py")
        yield module, words[1:]


@fast
def test_links():
    """Each link of a page leads to a file, and to a heading that is there."""
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)",
                                         page.read_text("utf-8")):
            path = page.parent / target if target else page
            check(f"{page.relative_to(TOP)}: {target}#{anchor}",
                  path.exists() and (not anchor or anchor in anchors(path)))


@fast
def test_commands():
    """Each command of a page starts a program that is there, with flags that it has."""
    for page in PAGES:
        for module, words in commands(page.read_text("utf-8")):
            found = find_spec(module)
            check(f"{page.relative_to(TOP)}: {module}", found)
            table = TABLES.get(module) or found and getattr(import_module(module), "FLAGS", ())
            if table:
                named = all(row[1].startswith("-") for row in table)  # names stand between flags
                words = split_names(words, table)[1] if named else words
                check(f"{module} {words}", not refusal(parse_flags, "", table, words))
    check("some", len([*commands(README)]) > 12)


@fast
def test_readme():
    """The README fits on a few screens. Its figures stand in RESULTS.md, and its ratios follow."""
    lines = README.splitlines()
    check("lines", len(lines) <= 150 and max(map(len, lines)) <= 120, len(lines))
    results = (TOP / "dev/RESULTS.md").read_text("utf-8")
    rows = [re.findall(r"[\d.]+", line.partition("|")[2].partition("|")[2])
            for line in lines if re.match(r"\| \d", line)]
    check("rows of the table", [len(row) for row in rows] == [8, 8], rows)
    for default, alone, *peers in rows:
        for time, *ratios in zip(*[iter(peers)] * 3):
            for figure in (default, alone, time):
                check(f"{figure} is in RESULTS.md", f" {figure} " in results)
            found = [f"{float(time) / float(own):.2f}" for own in (default, alone)]
            check(f"{time}: ratios", found == ratios, found)
    count = int(re.search(r"# (\d+) kernels, from easy to hard", README)[1])
    check("exercises", count == len(ORDER), len(ORDER))
