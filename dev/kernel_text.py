"""What tools read in the text of CUDA files."""
import re
from typing import NamedTuple

STRUCTS = {"Output": False, "Tiles": True}  # of an array: whether the kernel only reads it


class Parameter(NamedTuple):
    name: str
    kind: str  # int, float, size_t, or of an array real, float, Output, ...
    array: bool
    const: bool  # an array that the kernel only reads


def parameters_of(kernel):
    """The Parameters of a train_gpt2.Kernel."""
    found = []
    for text in kernel.parameters:
        *_, kind, name = re.findall(r"\w+", text.replace("__restrict__", ""))
        array = "*" in text or kind in STRUCTS
        found.append(Parameter(name, kind, array, array and STRUCTS.get(kind, "const" in text)))
    return found


def without_comments(text):
    """CUDA text with its comments blanked, every offset kept."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), text,
                  flags=re.S)
