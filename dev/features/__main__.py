"""The map of the features, from what they declare: file, what it does, flags.

    python -m dev.features
    python -m dev.features | grep -i checkpoint
"""
import re
import sys
from pathlib import Path

from dev.common.program import run_main
from dev.features import order  # noqa: F401 (it imports all features)

HERE = Path(__file__).resolve().parent


def first_sentence(text):
    """The first sentence of a docstring, in a line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?!\d)", paragraph, maxsplit=1)[0]  # not behind "et al."


def rows():
    """[(file, what it does, names of flags)] of the modules that declare a feature, by file."""
    found = []
    for path in sorted(HERE.glob("**/*.py")):
        declared = re.findall(r"^(\w+) = Feature\(", path.read_text(encoding="utf-8"), re.M)
        if declared:
            name = ".".join(path.relative_to(HERE).with_suffix("").parts)
            module = sys.modules[f"dev.features.{name}"]
            flags = [flag.name for name in declared for flag in getattr(module, name).flags]
            found.append((str(path.relative_to(HERE)), first_sentence(module.__doc__), flags))
    return found


def main():
    """Print the map."""
    for path, text, flags in rows():
        print(" | ".join(filter(None, (f"{path:24}", text, " ".join(flags)))))


if __name__ == "__main__":
    run_main(main)
