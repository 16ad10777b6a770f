"""Files as a student hands them in, and what the lab says of them."""
import os
import re
from pathlib import Path

from dev.lab import grade
from dev.lab.exercises import find_exercise
from dev.lab.ladder import KERNELS
from dev.lab.submission import Submission, template
from dev.tests.trainings import call

# One block adds everything up; the lab's version has many blocks, atomics, and a second kernel for
# the root.
OWN = {"global_norm": """
    float sum = 0.0f;
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) sum += grads[i] * grads[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) norm[0] = sqrtf(sum);
"""}

NUMBER = """
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
"""


def body_of(path, kernel):
    """What stands between the braces of a kernel in a file."""
    text = path.read_text("utf-8")
    start = re.search(rf"\b{kernel}\([^)]*\) \{{", text).end()
    return text[start : text.index("\n}", start) + 1]


SOFTMAX = body_of(KERNELS / "softmax_forward.cu", "softmax_forward1")
LAYERNORM = body_of(KERNELS / "layernorm_forward.cu", "layernorm_forward1")


def filled(name, body, suffix="", before="", block=""):
    """The file of an exercise with this body, for a kernel my_<name><suffix>. before: goes above
    the kernel."""
    text = template(name).replace(f"my_{name}(", f"my_{name}{suffix}(")
    head, tail = text[: text.index("\nBLOCK(")], text[text.index("\nBLOCK("):]
    if block:
        tail = re.sub(r"BLOCK\(.*\)\n", f"{block}\n", tail)
    assert tail.endswith("{\n\n}\n")
    tail = tail.removesuffix("{\n\n}\n")
    return f"{head}\n{before}{tail}{{{body}}}\n"


def exercise(folder, *arguments, device="cpu"):
    """(exit status, what is printed, the line of an error) of `python -m dev.lab --exercise` in a
    folder."""
    os.chdir(folder)
    return call("--exercise", *arguments, "--device", device, program="dev.lab.__main__")


def run_child(job, variables=None):
    """(events, exit status, stderr) of a job of trial.py in a process of its own."""
    return grade.Processes().run(job, variables)


def complaints(paths, job, variables=None, **more):
    """{path: (its complaint, (kind, lines), or None if a Job of the judge finds the file right;
    the events of its run)} of those files that run; all are compiled together. If a kernel ends its
    process, the next one begins with the file behind it. more: of trial.py's JOB."""
    found, left = {}, [str(path) for path in paths]
    while left:
        events, status, stderr = run_child(dict(
            compile=[str(path) for path in paths], run=left, look_for=job.look_for,
            dtypes=job.dtypes, **dict(limit=60) | more), grade.variables_of(job, variables or {}))
        ran = [event["file"] for event in events if "file" in event]
        if any(event["event"] == "compiler" for event in events):
            ran = left
        if not ran:  # they do not have this dtype
            break
        for path in dict.fromkeys(ran):
            own = [event for event in events if event.get("file", path) == path]
            ends = next((event["event"] for event in own[::-1] if "file" in event), "")
            complaint, ended = grade.complaint_of(Submission(path), (
                own, 0 if ends in ("right", "complaint") else status, stderr), job)
            assert complaint or ended, f"{path}: {stderr[-3000:]}"
            found[Path(path)] = complaint, own
        left = left[left.index(path) + 1:]
    return found


def said(lines):
    return " ".join(lines or ())


def solution(name, suffix="", *changes):
    """An exercise solved with the lab's version of the same signature. changes: (old, new) texts,
    each there once."""
    path = KERNELS / f"{name}.cu"
    text, body = path.read_text(), OWN.get(name) or body_of(path, find_exercise(name).like)
    helpers = re.finditer(r"^namespace (\w+) \{\n.*?^\}  // namespace \1\n", text, re.M | re.S)
    used = {helper[1]: helper[0] for helper in helpers if helper[1] in body}
    whole = "".join(used.values()) + "\0" + body
    for old, new in changes:
        assert whole.count(old) == 1, f"{name}: {old!r} is there {whole.count(old)} times"
        whole = whole.replace(old, new)
    for helper in used:
        whole = whole.replace(helper, f"{helper}{suffix}")
    before, body = whole.split("\0")
    return filled(name, body, suffix, before)
