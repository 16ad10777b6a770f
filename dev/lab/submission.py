"""Reading a student's file: which exercise it solves, and how its kernel is declared."""
import difflib
import re

from dev.common.cuda_source import parameters_of, checked_kernels

from dev.common.config import Config
from dev.common.cuda_source import without_comments
from dev.lab.exercises import EXERCISES, PREFIX, command, exercise_names, version_of
from dev.lab.ladder import KERNELS, find_ladder
from prepro_tinyshakespeare import UserError

MODEL = Config(C=768, NH=12)  # kernels.cu is compiled for it, in front of a student's file: HS is 64
DECLARATION = r'(BLOCK\([^;{}]*?\))\s*extern "C" __global__ void\s+(?:__launch_bounds__\(.*?\)\s*)?%s\(([^)]*)\)'


def signature(exercise):
    """(BLOCK line, [parameter]) of the lab's kernel, from the text of its .cu."""
    text = (KERNELS / f"{exercise.kernel}.cu").read_text(encoding="utf-8")
    block, parameters = re.search(DECLARATION % exercise.like, text).groups()
    return block, [" ".join(parameter.replace("__restrict__ ", "").split()) for parameter in parameters.split(",")]


def code_of(path):
    """The text of a .cu with its comments blanked; lines keep their numbers."""
    return without_comments(path.read_text(encoding="utf-8-sig"))


def exercise_of(path):
    """(the name of the exercise, the name of the kernel) of a student's file. Raises UserError."""
    try:
        text = code_of(path)
    except OSError as e:
        raise UserError(f"{path}: could not be read ({e.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: expected text") from None
    known = sorted(exercise_names(), key=len, reverse=True)
    found = {kernel: next((name for name in known if kernel.startswith(PREFIX + name)), None)
             for kernel in re.findall(r"\b(my_\w+)\s*\(", text)}
    found = {kernel: name for kernel, name in found.items() if name}
    whole = [kernel for kernel in found if re.search(DECLARATION % kernel, text, re.S)]
    if len(whole) > 1:
        raise UserError(f"{path}: has {', '.join(whole)}; expected one kernel of an exercise")
    if whole:
        return found[whole[0]], whole[0]
    if found:
        name = next(iter(found))
        raise UserError(f"{path}: there is no kernel {name} with a BLOCK line directly over it; expected: BLOCK(256, "
                        f'threads), and on the next line: extern "C" __global__ void {name}(...)')
    names = [PREFIX + name for name in exercise_names()]
    there = [*re.findall(r"__global__\s+void\s+(?:__launch_bounds__\(.*?\)\s*)?(\w+)", text), path.stem]
    near = [name for each in there for name in difflib.get_close_matches(each, names, 1)]
    raise UserError(f"{path}: has no kernel of an exercise; expected one such as {[*near, *names][0]}; {command('')} "
                    "lists them")


def declared(path, run):
    """The train_gpt2.Kernel of a student's file. Raises UserError."""
    kernels = checked_kernels([path], types=False)  # read_submission compares its types with the exercise's
    if run in kernels:
        return kernels[run]
    text = code_of(path)
    match = re.search(DECLARATION % run, text, re.S)
    block = " ".join(match[1].split())
    hint = "without parentheses" if block.count("(") > 1 else "where the first is a number"
    raise UserError(f"{path.name}, line {text[: match.start()].count(chr(10)) + 1}: {block}: expected BLOCK(threads, "
                    f"items), {hint}, such as BLOCK(256, threads)")


def block_sizes(path, run, threads):
    """The block sizes to check: the one in BLOCK, and half of it if BLOCK counts items in threads and the code has no
    number that may stand for the block size, so that it has to work with any."""
    code = code_of(path)
    block = re.search(DECLARATION % run, code, re.S)[1]
    numbers = {int(number, 0) for number in re.findall(r"\b(?:0[xX][0-9a-fA-F]+|[1-9]\d*)\b", code.replace(block, ""))}
    own = {threads // part - less for part in (1, 2, 32) for less in (0, 1)}
    if threads % 64 or "threads" not in block or "<<" in code or (own - {0, 1}) & numbers:
        return (threads,)
    return threads, threads // 2


def read_submission(path):
    """(Ladder, Version) of a student's file. Raises UserError."""
    name, run = exercise_of(path)
    exercise, ladder, mine = EXERCISES[name], find_ladder(name), declared(path, run)
    _, expected = signature(exercise)
    shape = [(None if "*" in text else text.split()[0], "const" in text) for text in expected]
    given = [None if array else kind for _, kind, array, _ in parameters_of(mine)]
    if [kind for kind, _ in shape] != given:
        found = ", ".join(" ".join(text.replace("__restrict__", "").split()) for text in mine.parameters)
        raise UserError(f"{path}: {run} has the wrong parameters, ({found}); expected ({', '.join(expected)})")
    if not 1 <= mine.threads <= 1024:
        raise UserError(f"{path}: BLOCK({mine.threads}, ...): a block has at least one thread, and at most 1024")
    version = version_of(exercise, ladder)
    items = exercise.plane if len(mine.covers) == 2 and exercise.plane else version.items
    if len(mine.covers) != len(items.split(",")):
        raise UserError(f"{path}: BLOCK over {run}: expected BLOCK(threads, items that a block covers"
                        f"{', and how many along y' if ',' in items else ''})")

    def zero_and_run(device, a):
        device.zero(getattr(a, exercise.zeroed))
        version._replace(run=run).launch(device, a, ladder)

    version = version._replace(run=run, items=items, threads=block_sizes(path, run, mine.threads),
                               atomics=bool(re.search(r"\batomic[A-Z]", code_of(path))))
    return ladder, version._replace(run=zero_and_run) if exercise.zeroed else version
