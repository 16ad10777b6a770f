"""Arguments of dev/'s programs that are no flags, beside the trainer's table of flags."""


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
