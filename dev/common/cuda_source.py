"""Reads CUDA source: the parameters of kernels, and what BLOCK over them says, with checks."""
import re
from typing import NamedTuple

import numpy as np

import train_gpt2
from train_gpt2 import UserError

# Structs with an array: does the kernel only read it?
STRUCTS = {"Output": False, "TileMap": True, "TokenPass": False}


class Parameter(NamedTuple):
    name: str
    kind: str  # int, float, size_t; for an array real, float, Output, ...
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


# What arrays of these parameters may have: numbers of this kind, or their bits, unsigned
NUMBERS = {"float": "f4 u4", "double": "f8 u8", "int": "i4 u4", "short": "i2 u2", "char": "i1",
           "size_t": "i8 u8"}
known = {}  # {(a Kernel's id, real): the Kernel, and (index, types) of its arrays}


def check_arrays(kernel, args, real):
    """Raise UserError if an array of a launch has other numbers than its parameter."""
    key = id(kernel), real
    if key not in known:
        types = NUMBERS | {"real": f"{np.dtype(real).str} u{np.dtype(real).itemsize}"}
        known[key] = kernel, [
            (i, {*map(np.dtype, f"{types[parameter.kind]} u1".split())})
            for i, parameter in enumerate(parameters_of(kernel))
            if parameter.array and parameter.kind in types]
    for i, types in known[key][1]:
        if args[i] is not None and args[i].dtype not in types:
            raise UserError(f"{kernel.name}: {parameters_of(kernel)[i].name} is an array of "
                            f"{args[i].dtype}, and the kernel reads {kernel.parameters[i].strip()}")


def checked_kernels(sources, types=True):
    """As train_gpt2.read_kernels. Raises UserError unless each kernel has a good BLOCK over it and,
    with types, only parameters whose types a launch knows."""
    kernels = {}
    for path in sources:
        name = "a kernel"
        try:
            found = train_gpt2.read_kernels([path])
            for kernel in found.values():
                name = kernel.name
                if min(covers(kernel.threads, W) for covers in kernel.covers for W in (4, 8)) < 1:
                    raise ValueError("a block covers nothing")
                for parameter in parameters_of(kernel) if types else ():
                    if not parameter.array and parameter.kind not in train_gpt2.SCALARS:
                        raise UserError(f"{path.name}: {name}: {parameter.kind} {parameter.name}: "
                                        "expected a pointer, a struct that has one, or "
                                        f"{', '.join(train_gpt2.SCALARS)}")
        except (ArithmeticError, NameError, SyntaxError, TypeError, ValueError) as e:
            raise UserError(f"{path.name}: BLOCK over {name}: {e}: expected arithmetic in threads "
                            "and W") from None
        kernels |= found
    return kernels


def without_comments(text):
    """CUDA source with its comments blanked, so that offsets stay."""
    def blank(found):
        return found[0] if found[0][0] == '"' else re.sub(r"[^\n]", " ", found[0])
    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.S)
