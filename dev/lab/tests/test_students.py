"""Kernels as students write them, right and wrong, and what the lab's judge says of each.

    pytest dev/lab/tests/test_students.py                             # all, compiled together
    pytest dev/lab/tests/test_students.py -m longest -k softmax_tree  # one, as a student does it

They are in dev/lab/tests/students: a right one for each technique, a wrong one for each sentence,
and all that the judge once took for the other; changed_students.py makes more of these. The first
line of each says what a GPU makes of it, in three dtypes and at all sizes: `// right`, or
`// wrong: ` and a regular expression, which the judge's message must match. If lines end in `//!`,
the message must name one of them.
"""
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from dev.common.nvrtc import compile_cuda, has_nvrtc
from dev.lab import grade, on_gpus
from dev.lab.exercises import PREFIX
from dev.lab.grade import BOUNDS, GPU, RACES, Job
from dev.lab.submission import Submission
from dev.lab.tests.changed_students import texts
from dev.lab.tests.student import complaints, said
from dev.tests.checks import check
from train_gpt2 import UserError

# These never end, or only NVRTC or a branch for another GPU shows what is wrong.
ALONE = {"gqa_forward_1024_threads": Job(GPU, ["fp32"], 0),
         "residual_forward_branch_for_hopper": Job(BOUNDS, ["fp32"], 0, 900),
         "row_sum_waits_for_the_block_before": Job(BOUNDS, ["fp32"], 0),
         "softmax_forward_endless": Job(RACES, ["fp32"], 0),
         "softmax_forward_row_of_a_thread": Job(GPU, ["fp32"], 0)}
IN_BF16 = "residual_forward_nv_bfloat16", "row_sum_float_cast"


def expected(path):
    """(the words of the message or None if the kernel is right, the lines one of which it
    names)."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = re.fullmatch(r"// (right|wrong: (.+))", lines[0])
    assert found, f"{path.name}: begins with {lines[0]!r}; expected // right or // wrong: words"
    return found[2], {number for number, line in enumerate(lines, 1) if line.endswith("//!")}


def judged(path):
    """The lines that the judge says of a file, and none if it is right."""
    try:
        return grade.grade_file(Submission(path)).lines
    except UserError as e:
        return [f"error: {e}"]


def mistake(path, lines):
    """What is wrong with the judge's lines, or "" if nothing is."""
    wish, marked = expected(path)
    text = said(lines)
    if wish is None:
        return f"a right kernel is refused: {text}" if lines else ""
    if not lines:
        return f"it is accepted; expected: {wish}"
    if not re.search(wish, text):
        return f"expected {wish}: {text}"
    named = {int(number) for number in re.findall(r"line (\d+)", text)}
    if marked and not marked & named:
        return f"names lines {sorted(named)}, expected one of {sorted(marked)}: {text}"
    return ""


def renamed(text, number):
    """A file whose kernel, macros and variables of the whole GPU are its own, so that several can
    be compiled together."""
    text = re.sub(rf"\b({PREFIX}\w+)\(", rf"\1_{number}(", text)
    for name in re.findall(r"^__device__ [\w ]*?(\w+)(?:\[.*?\])?;", text, re.M):
        text = re.sub(rf"\b{name}\b", f"{name}_{number}", text)
    return text + "".join(f"#undef {name}\n" for name in re.findall(r"^#define (\w+)", text, re.M))


def test_students(folder):
    """The judge accepts right kernels, and refuses each wrong one with its reason and its line."""
    variables = {BOUNDS: grade.sanitizer_variables(), RACES: grade.race_variables()}
    if None in variables.values() or not has_nvrtc():
        pytest.skip("this compiler has no sanitizers, or NVRTC is not installed")
    paths = {name: folder / f"{name}.cu" for name in texts()}
    for number, (name, text) in enumerate(texts().items()):
        paths[name].write_text(renamed(text, number), "utf-8")
    bounds = {name: on_gpus.bound_lines(Submission(path)) for name, path in paths.items()}
    together = [path for name, path in paths.items() if not (name in ALONE or bounds[name])]
    work = [(together, Job(BOUNDS, ["fp32"], 0)), (together, Job(RACES, ["fp32"], 0)),
            ([paths[name] for name in IN_BF16], Job(BOUNDS, ["bf16"], 0)),
            *(([paths[name]], job) for name, job in ALONE.items())]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda one: complaints(*one, variables, races=True), work))
    silent = [path.name for (some, _), found in zip(work, results) for path in some
              if path not in found]
    check("each has been judged", not silent, silent)
    for name, path in paths.items():
        told = [(complaint[0], i, complaint[1]) for i, found in enumerate(results)
                if (complaint := found.get(path, [None])[0])]
        lines = bounds[name] or (grade.best(told, [job for _, job in work])[2] if told else [])
        wrong = mistake(path, lines)
        check(name, not wrong, wrong)
        if name == "row_sum_ballot_is_no_fence":
            wish = ("in this order: thread 1 of block 0 writes .*, then thread 0 of block 0 reads "
                    ".* or in the other: thread 0 of block 0 reads what nobody has set")
            check("  and what a GPU may do", re.search(wish, said(lines)), lines)
        if name == "row_sum_all_lanes_store_the_same":
            remarks = [event["text"] for event in results[1][path][1] if event["event"] == "remark"]
            wish = r"same number.*line \d+: out\[row\]"
            check("  and it is remarked", re.search(wish, said(remarks)), remarks)
    right = [Submission(path) for path in paths.values() if expected(path)[0] is None]
    _, used, _ = compile_cuda(on_gpus.program(*right), "sm_90a", on_gpus.switches("sm_90a", "bf16"))
    check("NVRTC compiles the right ones", used.keys() == {file.run for file in right}, [*used])


@pytest.mark.longest
@pytest.mark.parametrize("name, text", texts().items(), ids=texts())
def test_alone(name, text, folder):
    """The same of each file by itself, in all its dtypes, as a student does it."""
    path = folder / f"{name}.cu"
    path.write_text(text, "utf-8")
    wrong = mistake(path, judged(path))
    check(name, not wrong, wrong)
