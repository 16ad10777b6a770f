"""Puts the page together: the template, its style, its scripts, and what was recorded."""
import json
from pathlib import Path

from dev.common.config import Config, padded
from dev.page.differences import differences
from dev.page.formulas import exported

HERE = Path(__file__).resolve().parent
SCRIPTS = "data.js", "explain.js", "walk.js", "play.js", "model.js", "start.js"


def joined(title, body, scripts, data):
    """The bytes of a page: frame.html with a body, the style, the scripts and the data in it."""
    def read(*names):
        return "\n".join((HERE / name).read_text("utf-8") for name in names)

    # "<" would let a "</script>" in the data end it
    written_data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    text = read("frame.html")
    for mark, part in (("/*TITLE*/", title), ("/*STYLE*/", read("page.css")),
                       ("/*BODY*/", read(body)), ("/*SCRIPT*/", read(*scripts)),
                       ("/*DATA*/", written_data)):
        head, tail = text.split(mark)
        text = head + part + tail
    return text.encode()


def page_of(data):
    """The bytes of the page of a training step."""
    return joined("A step of GPT-2, number by number", "page.html", SCRIPTS, data)


def with_more(data, before, after):
    """What record() gives, with differences of losses, and the trainer's formulas."""
    more = exported() | dict(padding=padded(1), maxT=Config.maxT)
    return data | dict(models=more, differences=differences(
        before, after.batch.tokens, after.batch.targets))
