"""Files as a student hands them in, and what the lab says of them."""
import re

from dev.lab.template import template


def filled(name, body, suffix="", before="", block=""):
    """The file of an exercise with this body, for a kernel my_<name><suffix>. before: goes above the kernel."""
    text = template(name).replace(f"my_{name}(", f"my_{name}{suffix}(")
    head, tail = text[: text.index("\nBLOCK(")], text[text.index("\nBLOCK("):]
    if block:
        tail = re.sub(r"BLOCK\(.*\)\n", f"{block}\n", tail)
    assert tail.endswith("{\n\n}\n")
    tail = tail.removesuffix("{\n\n}\n")
    return f"{head}\n{before}{tail}{{{body}}}\n"


def said(lines):
    return " ".join(lines or ())
