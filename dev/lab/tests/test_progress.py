"""Test what leads a student on: the list, goals, hints, solutions, and times on a GPU."""
import contextlib
import json
import os
import re
import stat
import sys
from unittest import mock

from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.lab import grade, on_gpus, progress
from dev.lab.bench import Bench
from dev.lab.exercises import exercise_names, find_exercise
from dev.lab.ladder import LAB, parse_sizes
from dev.lab.submission import Submission, signature, template
from dev.lab.tests.student import exercise, said
from dev.tests.checks import check, fast
from dev.tests.trainings import call

NAMES = exercise_names()
RIGHT = grade.Judgement([], {grade.BOUNDS: True, grade.RACES: True, grade.GPU: True},
                        ["fp32", "bf16"], [])
WRONG = grade.Judgement(["wrong: out[0]"], {}, [], [])
RUNGS = [[3e-4, 1, "naive"], [5e-5, 2, "better"], [2e-5, 3, "best"]]


def written(folder, name):
    """The path of an exercise's empty file in a folder, where the test goes on. It has none of the
    comments, which take a third of a second to make."""
    os.chdir(folder)
    path, (block, parameters) = folder / f"my_{name}.cu", signature(find_exercise(name))
    path.write_text(f'// mine\n\n{block}\nextern "C" __global__ void my_{name}(\n'
                    f"    {', '.join(parameters)}) {{\n\n}}\n")
    return path


def ok(name, good, said=""):
    """A check that says something only if it fails."""
    check(name, good, "" if good else said)


def rows(load=(3.7, 3.7), store=(4, 4), shared=(None, None), moved=1):
    """Rows of traffic.py's table, in which a request costs (this, and at least this)."""
    names = [name for row in progress.REQUESTS for name in row[:2]]
    return dict(zip((*names, progress.MOVED), (*load, *store, *shared, moved)))


def counts(*two):
    """What progress.counted returns, for the student's rows and those of version 5."""
    return dict(report=["a report"], **(dict(rows=two, number=5) if two else {}))


def wishes(*two, **more):
    return wishes_of(counts(*two), **more)


def wishes_of(found, **more):
    return [goal.line for goal in progress.goals_of(found, **more)]


# ---- The list


@fast
def test_lists(folder):
    """What is solved is marked, the next exercise is named, and a bad file does no harm."""
    _, text, _ = exercise(folder)
    ok("nothing is solved", "*" not in text and all(name in text for name in NAMES), text)
    ok("the first is next", re.search(f"^Next exercise: .*--exercise {NAMES[0]}$", text, re.M))
    progress.note(NAMES[2], ["fp32", "bf16"], 27.04, ("NVIDIA H200", [61.04, 2, 3]))
    _, text, _ = exercise(folder)
    ok("what was reached", re.search(
        rf"^\*  3  {NAMES[2]} .*\n +right in fp32, bf16; 27\.0 sectors a load; 61\.0 us on NVIDIA "
        r"H200, between versions 2 and 3\n", text, re.M), text)
    ok("the one after it is next", re.search(f"--exercise {NAMES[3]}$", text, re.M), text)
    for name in NAMES[3:]:
        progress.note(name, ["fp32"])
    _, text, _ = exercise(folder)
    ok("then those before it", re.search(f"--exercise {NAMES[0]}$", text, re.M), text)
    for name in NAMES:
        progress.note(name, ["fp32"])
    ok("all are solved", "You have solved all exercises." in exercise(folder)[1])

    good = json.loads(progress.FILE.read_text())
    for wish, bad in (("damaged", b"{"), ("damaged", b"\xff"), ("damaged", b"[]"),
                      ("damaged", json.dumps(good | {"solved": {NAMES[0]: {}}}).encode()),
                      ("damaged", json.dumps(good | {"solved": {NAMES[0]: {
                          "dtypes": [], "sectors": "x", "times": {}}}}).encode()),
                      ("damaged", json.dumps(good | {"hints": {"a": "b"}}).encode()),
                      ("damaged", json.dumps(good | {"failed": [1]}).encode()),
                      ("version 2, .* reads version 1", json.dumps(
                          good | {"version": 2}).encode())):
        progress.FILE.write_bytes(bad)
        status, text, error = exercise(folder)
        lines = [line for line in text.splitlines() if "my_progress.json" in line]
        ok(f"list with {bad[:20]}", status == 0 and len(lines) == 1 and re.search(wish, lines[0])
           and NAMES[-1] in text, text[:200] + error)
    progress.note(NAMES[0], ["fp32"])
    ok("it is written anew", progress.read()[0]["solved"].keys() == {NAMES[0]})
    ok("  and the other one is kept", (folder / "my_progress.json.old").read_bytes() == bad)


@fast
def test_what_is_kept(folder):
    """The best is kept, and stays when the file is edited."""
    path = written(folder, "gelu_forward")
    for judged, two, wish in (
            (RIGHT, (rows((27, 3.7)), rows()), "right in fp32, bf16; 27.0 sectors a load"),
            (RIGHT, (rows(), rows()), "right in fp32, bf16; 3.7 sectors a load"),
            (RIGHT, (rows((27, 3.7)), rows()), "right in fp32, bf16; 3.7 sectors a load"),
            (RIGHT, (), "right in fp32, bf16; 3.7 sectors a load"),
            (WRONG, (), "right in fp32, bf16; 3.7 sectors a load")):
        with mock.patch("dev.lab.grade.grade_file", return_value=judged), \
                mock.patch("dev.lab.progress.counted", return_value=counts(*two)):
            status, text, _ = exercise(folder, path.name)
        ok("status", status == (judged is WRONG), text)
        goal = "Next goal: at most 4.1 sectors a load" in text
        ok("the goal", goal == (bool(two) and two[0]["sectors a load"] == 27), text)
        ok("the report", ("a report" in text) == (judged is RIGHT), text)
        ok("the next one", judged is WRONG or "Next exercise: " in text, text)
        text = exercise(folder)[1]
        ok(wish, f"{wish}\n" in text, text)
    progress.note("gelu_forward", ["fp32"], None, ("H200", [60, 1, 2]))
    progress.note("gelu_forward", ["fp32"], None, ("H200", [70, None, 2]))
    progress.note("gelu_forward", ["fp32"], None, ("H100", [70, None, 1]))
    progress.note("gelu_forward", ["fp32"], None, ("A100", [7, 3, None]))
    wish = ("60.0 us on H200, between versions 1 and 2; 70.0 us on H100, slower than version 1; "
            "7.0 us on A100, faster than all versions")
    ok("times", wish in exercise(folder)[1])
    with mock.patch("builtins.open", side_effect=PermissionError(13, "Permission denied")):
        lines = progress.note("gelu_forward", ["fp32"])
    ok("a folder that cannot be written", re.match("your progress is not kept: .*denied", lines[1]),
       lines)


# ---- Goals


@fast
def test_goals_of_figures():
    """A goal is asked for what the lab's version does, and for nothing that is reached."""
    for name, wish, lines in (
            ("nothing is counted", [], wishes()),
            ("all is reached", [], wishes(rows(), rows())),
            ("loads", ["at most 4.1 sectors a load. Yours takes 27.0; .* version 5, .* 3.7"],
             wishes(rows((27, 3.7)), rows())),
            ("within 10%", [], wishes(rows((4.05, 3.7)), rows())),
            ("wider loads cost more", [], wishes(rows((4, 4)), rows((16, 16)))),
            ("  also for the student", [], wishes(rows((16, 16)), rows((4, 4)))),
            ("the lab's are no better", [], wishes(rows((27, 4)), rows((100, 4)))),
            ("stores", ["at most 4.4 sectors a store. Yours takes 32.0"],
             wishes(rows(store=(32, 4)), rows())),
            ("banks", ["at most 1.1 turns a request of shared memory, .*. Yours takes 32.0"],
             wishes(rows(shared=(32, 1)), rows(shared=(1, 1)))),
            ("no shared memory", [], wishes(rows(), rows(shared=(1, 1)))),
            ("passes", ["one pass, .* once. Yours moves 2.0 times .*, and version 5 1.0 times"],
             wishes(rows(moved=2), rows())),
            ("more passes", ["at most 8.8 times the fewest .* 128.0 times .* 8.0 times"],
             wishes(rows(moved=128), rows(moved=8))),
            ("no loads", [], wishes(rows((None, None)), rows((None, None)))),
            ("no spills", ["no spills. .* 48 bytes"],
             wishes(facts=[dict(spilled=0), dict(spilled=48)])),
            ("spills first", ["no spills", "sectors a load", "one pass"],
             wishes(rows((27, 4), moved=3), rows(), facts=[dict(spilled=8)])),
            ("the next version", ["within 10% of version 2: at most 55.0 us. Yours takes 61.0, .* "
                                  "50.0: better"],
             wishes(times=on_gpus.Times("H200", 6.1e-5, RUNGS))),
            ("the one after", ["within 10% of version 3: at most 22.0 us"],
             wishes(times=on_gpus.Times("H200", 5.4e-5, RUNGS))),
            ("the best", [], wishes(times=on_gpus.Times("H200", 2.1e-5, RUNGS)))):
        ok(f"goal: {name}", len(lines) == len(wish) and all(map(re.search, wish, lines)), lines)


def test_traffic_of_softmax(folder):
    """The same from the program's own counts: a block for each row reads 32 numbers side by side,
    that is 4 sectors, but all three times."""
    path = written(folder, "softmax_forward")
    path.write_text(applied(path.read_text(), progress.solution(Submission(path), 2)[2:]))
    found = progress.counted(Submission(path))
    if "rows" in found:
        lines = wishes_of(found)
        ok("three passes", len(lines) == 1 and "one pass" in lines[0], lines)
        ok("  the sectors of a load", abs(progress.sectors_of(found) - 4) < 0.2, found)
    path.write_text("int main() {}\n")
    ok("what cannot be counted",
       "was not counted: " in said(progress.counted(Submission(path))["report"]))


# ---- Hints and solutions


@fast
def test_hints(folder):
    """One at a time, by name or file; the exercise's file gives none away."""
    for name in NAMES[:4]:
        text = " ".join(template(name).replace("//", "").split())
        given = [hint for hint in find_exercise(name).hints if " ".join(hint.split()) in text]
        ok(f"{name}: no hint in its file", not given and f"{name} --hint" in text, given)
    first, second = find_exercise("softmax_forward").hints
    written(folder, "softmax_forward")
    for what, wish, other in (("softmax_forward", first, second),
                              ("my_softmax_forward.cu", second, first)):
        status, text, _ = exercise(folder, what, "--hint")
        ok(f"a hint by {what}", status == 0 and wish in text and other not in text, text)
    ok("  and then there are no more", "--exercise softmax_forward --solution" in text, text)
    _, text, _ = exercise(folder, "softmax_forward", "--hint")
    ok("  and all again", f"Hint 1 of 2: {first}\nHint 2 of 2: {second}\n" in text, text)
    _, text, _ = exercise(folder, "gelu_forward", "--hint")
    ok("another exercise's", find_exercise("gelu_forward").hints[0] in text, text)


SAID = (  # what a check says, and a word of the hint on it
    ("it does not compile in bf16: cannot convert real to float", "from_float"),
    ("it does not compile: expected ;", "first error alone"),
    ("wrong: out[1,0] was never written. blocks are one-dimensional here", "by / and %"),
    ("it has a race on dwpe[0]: thread 0 writes it. Blocks run in any order", "atomicAdd"),
    ("it has a race on part[32]: no __syncthreads() comes between", "two such places"),
    ("its result depends on the order in which threads run", "two such places"),
    ("it is stuck in __syncthreads: 40 of the 64 threads", "neutral number"),
    ("wrong: out[2,64] was never written usually: The index leaves out blockIdx.x", "not have the"),
    ("it reads inp1[2592], and the last is inp1[2591]", "last thread of the last block"),
    ("index 64 is out of bounds: the array is float [64]", "last thread of the last block"),
    ("wrong: out[0,0] is 1, expected 2 why: is warp_sum missing?", "has a part"),
    ("a number of shared memory is read that no thread of the block has written", "as it is"),
    ("wrong: out[0,0] was never written", "who writes what"),
    ("wrong: out[0,0] is nan, expected 1", "infinite"), ("wrong: out[0] is -inf, ", "infinite"),
    ("it is slow: it reads each number of its inputs 90 times", "by how many threads"),
    ("wrong: why: the sum leaves out its last term", "row of three numbers"),
    ("wrong: out[0] is 1, expected 2 at the sizes B=3, in bf16", "It is right in fp32"),
    ("wrong: out[0] is 1, expected 2 at the sizes B=3, in fp32", "find the thread"),
)


@fast
def test_hints_on_errors(folder):
    """After a check that found something, the next hint is on that; then the exercise's follow."""
    for text, word in SAID:
        ok(f"on {text[:50]}", word in progress.hint_on(text), progress.hint_on(text))
    written(folder, "softmax_forward")
    first = find_exercise("softmax_forward").hints[0]
    with mock.patch.object(grade, "grade_file", return_value=WRONG._replace(
            lines=["wrong: out[0,0] is nan"])):
        exercise(folder, "my_softmax_forward.cu")
    _, text, _ = exercise(folder, "gelu_forward", "--hint")
    ok("another exercise's hint", "On your last check" not in text, text)
    _, text, _ = exercise(folder, "softmax_forward", "--hint")
    ok("a hint on the error",
       re.fullmatch("On your last check: Follow the largest .*\n", text), text)
    _, text, _ = exercise(folder, "softmax_forward", "--hint")
    ok("  and once", text.startswith(f"Hint 1 of 2: {first}"), text)
    progress.failed("softmax_forward", ["wrong"])
    progress.note("softmax_forward", ["fp32"])
    ok("  and none after it was right", "Hint 2" in said(progress.hint("softmax_forward")))


def applied(old, diff):
    """A text after a unified diff, applied by its line numbers alone."""
    old, new, at = old.splitlines(), [], 0
    for line in diff:
        if match := re.match(r"@@ -(\d+)", line):
            new += old[at : int(match[1]) - 1]
            at = int(match[1]) - 1
        elif not line.startswith(("---", "+++")):
            if line[:1] in " -":
                assert line[1:] == old[at], (line, old[at])
                at += 1
            new += [line[1:]] * (line[:1] in " +")
    return "\n".join([*new, *old[at:]]) + "\n"


def test_solutions(folder):
    """A diff turns any exercise's file into the lab's version, which is right."""
    for name in NAMES:
        path = written(folder, name)
        lines = progress.solution(Submission(path))
        path.write_text(applied(path.read_text(), lines[lines.index("") + 1 :]))
        _ = Submission(path).version
        own, lab = (re.sub(r"\s+", "", text[text.index("{") :]) for text in (
            path.read_text().split("extern")[-1].replace(f"my_{name}_", f"{name}_"),
            (LAB / f"kernels/{name}.cu").read_text().split(f"{find_exercise(name).like}(")[1]))
        ok(f"{name}: the lab's kernel", lab.startswith(own) and
           own.count("{") == own.count("}") > 0, own)
        ok(f"{name}: your own lines stay", path.read_text().startswith("// mine\n\n"))
        lines = progress.solution(Submission(path))
        ok(f"{name}: and then nothing differs", "is version" in lines[0], lines)
    ok("a kernel of several", "together with other kernels" in said(progress.solution(
        Submission(written(folder, "global_norm")))))
    for name, number, wish in (("residual_forward", 3, True), ("softmax_forward", 1, False),
                               ("softmax_forward", 3, True)):
        text = "".join(progress.solution(Submission(written(folder, name)), number))
        ok(f"{name} {number}: its helpers", (f"namespace my_{name}_ {{" in text) == wish, text)
    path = written(folder, "encoder_forward")
    ok("the same parameters",
       "parameters are not" not in said(progress.solution(Submission(path), 1)))
    path = written(folder, "rope_forward")
    ok("other parameters", "parameters are not" in said(progress.solution(Submission(path), 1)))
    for name, number, change in (("softmax_forward", 3, ""), ("rmsnorm_forward", 1, "_again")):
        path = written(folder, name)
        path.write_text(path.read_text().replace(f"my_{name}(", f"my_{name}{change}("))
        path.write_text(applied(path.read_text(), progress.solution(Submission(path), number)[2:]))
        file = Submission(path)
        run, ladder, version = file.run, file.ladder, file.version
        device = Emulated("fp32", Config(C=768, NH=12), [LAB / "tiles.cu", path], {run})
        bench = Bench(ladder, device, parse_sizes(ladder.checks[1]))
        comparison = bench.check(version, dict(threads=version.threads[0]))
        ok(f"{name} {number} is right", comparison.place is None and run.endswith(change),
           comparison)
    broken = written(folder, "gelu_forward")
    broken.write_text(broken.read_text().replace("{\n\n}", "{\n    if (N) {\n"))
    lines = progress.solution(Submission(broken))
    ok("a missing brace", "-    if (N) {" in lines and lines[-1] == "+}", lines)
    status, text, _ = exercise(folder, "gelu_forward", "--solution", "1")
    ok("the command", status == 0 and text.startswith("This is a solution: version 1"), text)


# ---- On a GPU


@fast
def test_on_gpu(folder):
    """All files that the lab's versions need are compiled for a GPU."""
    for name, wish, C in (("gqa_forward", ["gqa_forward.cu", "repeat_kv_forward.cu",
                                           "attention_forward.cu"], None),
                          ("layernorm_forward", ["layernorm_forward.cu"], 768)):
        path = written(folder, name)
        with mock.patch("dev.lab.on_gpus.compiled", side_effect=KeyboardInterrupt) as made:
            with contextlib.suppress(KeyboardInterrupt):
                on_gpus.time_file(Submission(path))
        _, c, beside, own = made.call_args.args
        files = [file.name for file in (*beside, own.path)]
        features = ["moments.cu", "outliers.cu", "recompute.cu", "recompute_llama.cu"]
        wish = ["llama3.cu", *features, "tiles.cu", *wish, path.name]
        ok(f"on a GPU: {name}", files == wish and C in (None, c.C), files)


@fast
def test_standings():
    """How a time compares with those of the versions."""
    for own, wish, noted in (
            (4e-4, r"400.0 us .*slower.* version 1 \(300.0 us\).*version 1 .*: naive", [None, 1]),
            (4e-5, r"between version 2 \(50.0 us\) and version 3 \(20.0 us\).*version 3 .*: best",
             [2, 3]),
            (1e-5, r"faster.* version 3 \(20.0 us\)", [3, None])):
        times = on_gpus.Times("H200", own, RUNGS)
        ok(f"standing of {own}", re.search(wish, said(on_gpus.standing(times))))
        ok("  as it is noted", times.noted == ("H200", [1e6 * own, *noted]), times.noted)


END = "========= {} SUMMARY: {} errors\n"
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at my_gelu_forward+0x90 in my_gelu_forward.cu:4
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f is out of bounds
=========
"""
MISALIGNED = MEMCHECK.replace("4 bytes", "16 bytes").replace("out of bounds", "misaligned")
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at my_gelu_forward+0x90 in my_gelu_forward.cu:3
=========     and Read access at my_gelu_forward+0xf0 in my_gelu_forward.cu:4 [8 hazards]
=========
"""


def test_sanitizer(folder):
    """What compute-sanitizer prints is told with the student's lines."""
    path, program = folder / "my_gelu_forward.cu", folder / "bin/compute-sanitizer"
    path.write_text("one\ntwo\n  sum = x;\n  y = sum;\n")
    program.parent.mkdir()

    def said_of(memcheck, racecheck, status=0):
        texts = dict(memcheck=memcheck, racecheck=racecheck)
        wish = [sys.executable, "-m", "dev.lab.on_gpus", "once", str(path)]
        program.write_text(f"#!{sys.executable}\nimport sys\nassert sys.argv[3:] == {wish}\nprint("
                           f"dict({texts})[sys.argv[sys.argv.index('--tool') + 1]])\n"
                           f"sys.exit({status})\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        with mock.patch.dict(os.environ, PATH=f"{program.parent}:{os.environ['PATH']}"):
            return on_gpus.sanitize(Submission(path))

    none = END.format("ERROR", 0)
    for name, found, wish in (
            ("right", said_of(none, none), (0, "memcheck and racecheck find nothing")),
            ("memcheck", said_of(MEMCHECK + END, none), (
                2, r"\(memcheck\): a thread writes 4 bytes of global memory .* line 4: y = sum;")),
            ("misaligned", said_of(MISALIGNED + END, none), (
                2, "writes 16 bytes .* multiple of 16")),
            ("racecheck", said_of(none, RACECHECK + END), (
                3, r"\(racecheck\): a race .* a thread writes and another one reads.* line 3: "
                   "sum = x; line 4: y = sum;")),
            ("refused", said_of("========= Error: Device not supported\n", none),
             (1, "device not supported")),
            ("broken", said_of("no driver", none, 1), (0, "did not get to its end: no driver"))):
        lines, remark = found
        ok(f"compute-sanitizer: {name}",
           len(lines) == wish[0] and re.search(wish[1], said(lines) + remark), found)
    with mock.patch.dict(os.environ, PATH=""):
        lines, remark = on_gpus.sanitize(Submission(path))
    ok("compute-sanitizer is absent", lines == [] and "not in PATH" in remark, remark)


def test_measured(folder):
    """A time goes from the GPU's process to the list."""
    path, times = written(folder, "gelu_forward"), on_gpus.Times("NVIDIA H200", 6.1e-5, RUNGS)

    def graded(sanitized, out):
        with mock.patch("dev.lab.grade.grade_file", return_value=RIGHT), \
                mock.patch("dev.lab.on_gpus.sanitize", return_value=sanitized), \
                mock.patch("dev.lab.on_gpus.run_self", return_value=out), \
                mock.patch("dev.lab.progress.counted", return_value=counts()):
            return exercise(folder, path.name, device="cuda")

    good = (json.dumps(times) + "\n", "", 0)
    status, text, _ = graded((["a race"], ""), good)
    ok("a race", status == 1 and "a race" in text and not progress.read()[0]["solved"], text)
    status, text, error = graded(([], "all is well"), ("", "x\nwrong on the GPU: out[0]\n", 1))
    ok("wrong", status == 1 and re.fullmatch("error: .*cu, on the GPU: wrong on the GPU: out.0.\n",
                                                error) and not progress.read()[0]["solved"], error)
    status, text, _ = graded(([], "all is well"), good)
    ok("right", status == 0 and re.search(
        r"all is well\n +your 61.0 us are between .*\n.*\n +Next goal: within 10% of version 2.*\n"
        r" +Next exercise: ", text), text)
    ok("the list", "61.0 us on NVIDIA H200, between versions 1 and 2" in exercise(folder)[1])


@fast
def test_refusals(folder):
    """A wrong combination of flags is refused by one line."""
    written(folder, "gelu_forward"), written(folder, "adamw")

    def refused(wish, *arguments):
        os.chdir(folder)
        status, _, error = call(*arguments, program="dev.lab.__main__")
        ok(f"refused: {' '.join(arguments)}",
           status == 1 and re.fullmatch(f"error: .*{wish}.*\n", error), error)

    ours = "--exercise", "my_gelu_forward.cu"
    refused("--hint needs the name", "--hint")
    refused("--hint needs the name", "--exercise", "--hint")
    refused("--solution needs the name", "--exercise", "--solution", "1")
    refused("--hint and --solution: expected one", *ours, "--hint", "--solution")
    refused("did you mean gelu_forward", "--exercise", "gelu_forwrd", "--hint")
    refused("has versions 1 to ", *ours, "--solution", "99")
    refused("has versions 1 to ", *ours, "--solution", "-1")
    refused("is no my_permute.cu; .* permute writes it", "--exercise", "permute", "--solution")
    refused("version 1 has several kernels", "--exercise", "my_adamw.cu", "--solution", "1")
