"""Puts the page together: the template, its style, its scripts, and what was recorded."""
import json
from pathlib import Path

from dev.common.config import Config, padded
from dev.page.differences import differences
from dev.page.formulas import exported
from dev.page.record import TEXT, record

HERE = Path(__file__).resolve().parent
SCRIPTS = "data.js", "explain.js", "walk.js", "model.js", "start.js"


def joined(template, scripts, data):
    """The bytes of a page: its template with the style, the scripts and the data in it."""
    text = (HERE / template).read_text("utf-8")
    script = "\n".join((HERE / name).read_text("utf-8") for name in scripts)
    # "<" would let a "</script>" in the data end it
    written_data = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    for mark, part in (("/*STYLE*/", (HERE / "page.css").read_text("utf-8")),
                       ("/*SCRIPT*/", script), ("/*DATA*/", written_data)):
        head, tail = text.split(mark)
        text = head + part + tail
    return text.encode()


def with_more(data, before, after):
    """What record() gives, with differences of losses, and the trainer's formulas."""
    more = exported() | dict(padding=padded(1), maxT=Config.maxT)
    return data | dict(models=more, differences=differences(
        before, after.batch.tokens, after.batch.targets))


def page_of(sizes, text=None):
    """The bytes of the page of a step of these sizes: see record.record."""
    return joined("page.html", SCRIPTS, with_more(*record(sizes, text or TEXT)))
