"""A map of the features, from what they declare: file, what it does, flags. Then the order in which
they stack, and why.

    python -m dev.features
    python -m dev.features | grep -i checkpoint
"""
import re

from dev.common.program import run_main
from dev.features.order import DECLARED, ORDER


def first_sentence(text):
    """The first sentence of a docstring, in a line."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?!\d)", paragraph, maxsplit=1)[0]  # not behind "et al."


def rows():
    """[(file, what it does, names of flags)] of the modules that declare a feature, by file."""
    return [(file, first_sentence(module.__doc__),
             [flag.name for feature in features for flag in feature.flags])
            for file, (module, features) in DECLARED.items()]


def main():
    """Print both."""
    for path, text, flags in rows():
        print(" | ".join(filter(None, (f"{path:24}", text, " ".join(flags)))))
    print("\nThe order, the outermost first; all others stand below these, by name:")
    for name, reason in ORDER.items():
        print(f"{name:24} | {reason}")


if __name__ == "__main__":
    run_main(main)
