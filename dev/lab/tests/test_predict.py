"""Test the estimates of a kernel's time on GPUs: each part worked out by hand, how counts grow to
the lab's sizes, and the lab's own times.
"""
import re

import numpy as np
import pytest

from dev.common.nvrtc import Used, has_nvrtc, instructions_of
from dev.cpu.host import compiler_of
from dev.cpu.races import finds_races
from dev.cpu.traffic import Count, Sample, Traffic
from dev.lab import predict
from dev.lab.exercises import EXERCISES, checks_of, exercise_names, version_of
from dev.lab.ladder import LAB, Draw, find_ladder, names_of, parse_sizes
from dev.lab.submission import Submission
from dev.lab.tests.student import NUMBER, filled
from dev.tests.checks import check, fast

H100 = predict.CARDS[-1]
NOTHING = predict.Moves(*[0] * len(predict.Moves._fields))
CODE = Used(32, 0, 0, instructions=40, accesses=4, doubles=8)
CLOCKS = 132 * 1.98e9  # of all multiprocessors in a second


def near(x, y):
    return abs(x - y) <= 1e-9 * abs(y)


@fast
def test_parts():
    """Each part of an H100's time, from the numbers of its data sheet."""
    for what, moves, good, bad in (
            ("device memory", dict(fewest=1e9), 32e9 / 3.35e12, 1.15 * 32e9 / 3.35e12),
            ("sectors from L1", dict(sectors=8e9, least=8e9), 2e9 / CLOCKS, 2e9 / CLOCKS),
            # a load of 32 rows: a sector of each of 32 lines, and 4 if they lay side by side
            ("sectors from L1", dict(sectors=32e9, least=4e9), 8e9 / CLOCKS, 29e9 / CLOCKS),
            ("sectors from L1", dict(sectors=32e9, least=4e9, stored=28e9), 8e9 / CLOCKS,
             (1e9 + 28e9 * 4) / CLOCKS),
            ("banks of shared memory", dict(turns=3e9), 3e9 / CLOCKS, 3e9 / CLOCKS),
            # 10 instructions for each access, on four schedulers
            ("instructions", dict(requests=4e9), 5e9 / CLOCKS, 10e9 / CLOCKS),
            # 2 for each access, of 32 lanes, of which 64 run at a time
            ("doubles", dict(requests=4e9), 2e9 / CLOCKS, 4e9 / CLOCKS),
            ("atomics on one number", dict(alike=16e6), 2e6 / 1.98e9, 8e6 / 1.98e9),
            # 1,056 blocks of 8 warps fit; all sectors come from device memory
            ("waiting for loads", dict(waits=8448e3, sectors=4, least=4, fewest=4), 0.175e-3,
             0.7e-3)):
        found = predict.parts_of(H100, NOTHING._replace(**moves), CODE, 10**6, 256)[what]
        check(f"{what}: {moves}", near(found[0], good) and near(found[1], bad), found)
    few = predict.parts_of(H100, NOTHING._replace(waits=8448e3, sectors=4, fewest=4), CODE, 2, 256)
    check("two blocks wait longer than a GPU that is full",
          near(few["waiting for loads"][1], 528 * 0.7e-3), few)
    t4 = predict.parts_of(predict.CARDS[0], NOTHING._replace(requests=4e9), CODE, 10**6, 256)
    check("a T4's doubles", near(t4["doubles"][1], 4e9 * 2 * 16 / (40 * 1.59e9)), t4)
    check("a T4's instructions", near(t4["instructions"][1], 10 * 4e9 / 2 / (40 * 1.59e9)), t4)
    check("the range", predict.range_of({"one": (2e-3, 4e-3), "two": (1e-3, 6e-3)}) == (
        2e-3 + 1e-6, 1.1 * (6e-3 + 2e-3) + 3e-6, "two"))
    for seconds, words in ((23.4e-6, "23 us"), (456e-6, "460 us"), (1.26e-3, "1.3 ms"), (1.2,
                           "1,200 ms"), (1.4e-6, "1.4 us"), (99.7e-6, "100 us"),
                           (0.9997e-3, "1 ms"), (80e-6, "80 us")):
        check(words, predict.in_words(seconds) == words, predict.in_words(seconds))


@fast
def test_grown():
    """What the CPU counted, at the lab's size."""
    def counted(kind, each, ideal, at=range(0, 128, 4), shared=False):
        sample = Sample("out", 0, 0, 4, 4, list(at))
        return Count("my.cu", 1, kind, shared, 10, 320, 0, 10 * each, 10 * ideal, sample)

    ladder = find_ladder("residual_forward")
    sizes = dict(B=2, T=512, C=768)  # an eighth of the lab's
    traffic = Traffic([counted("load", 4, 4), counted("store", 32, 4), counted("atomic", 1, 1, [
        8] * 32), counted("atomic", 4, 4), counted("load", 2, 1, shared=True)], 40, 50)
    found = predict.moves_of(traffic, ladder, sizes)
    check("eight times as many", found == predict.Moves(
        requests=400, waits=240, sectors=3280, least=1040, stored=2240, fewest=720, turns=160,
        alike=2560), found)
    for name, small, wish in (
            ("softmax_forward", "B=1,T=1024,V=50000,Vp=50304", (8, 8)),
            ("rope_forward", "B=8,T=1024,NH=32,NKV=4,HS=64", (40 / 36, 40 / 36)),  # heads
            ("matmul_forward", "B=1,T=1024,C=96,OC=3072", (64, 16)),
            ("attention_forward", "B=8,T=1024,NH=12,HS=64", (1, 1))):
        found = predict.growth(find_ladder(name), parse_sizes(small))
        check(f"{name} beside {small}", np.allclose(found, wish, rtol=1e-3), found)
    for name in exercise_names():
        ladder = find_ladder(name)
        sizes = checks_of(EXERCISES[name], ladder)[0]
        given = ladder.problem(Draw(False), **sizes)[0]
        names = vars(names_of(sizes))
        used = set(re.findall(r"[A-Za-z]\w*", version_of(EXERCISES[name], ladder).items))
        wrong = {key for key in used if names[key] != {**sizes, **given}[key]}
        check(f"{name}: what it derives from its sizes", not wrong, wrong)


@fast
def test_launches(folder):
    """How many blocks a launch has at the lab's sizes: 8,192 rows."""
    for name, block, wish in (("residual_forward", "BLOCK(256, threads)", 24576),
                              ("residual_forward", "BLOCK(256, W * threads)", 6144),
                              ("row_sum", "BLOCK(256, threads / 32)", 1024),
                              ("transpose", "BLOCK(1024, 32, 32)", 256 * 24),
                              ("global_norm", "BLOCK(512, 1)", 1)):
        path = folder / f"my_{name}.cu"
        path.write_text(filled(name, "\n", block=block))
        file = Submission(path)
        found = predict.blocks_of(file.kernel, file.ladder, file.version.items, file.kernel.threads)
        check(f"{name}, {block}", found == wish, found)
    found = predict.blocks_of(file.kernel, find_ladder("softmax_forward"), "threads * Vp, N", 2)
    check("two axes, of which BLOCK has one", found == 2 * 50304 * 8192, found)
    check("NVRTC is not there", predict.lines_of(file, NOTHING, []) == [])
    body = NUMBER + "    if (i < (size_t)N * C) out[i] = inp1[i];\n"
    path = folder / "my_residual_forward.cu"
    path.write_text(filled("residual_forward", body))
    facts = [dict(CODE._asdict(), gpu=gpu, dtype="fp32", dynamic=0) for gpu in ("sm_80", "sm_90a")]
    lines = predict.lines_of(Submission(path), NOTHING._replace(fewest=1e6), facts)
    check("a line for each GPU", [line.split()[0] for line in lines[1:]] == ["T4", "RTX", "H100"]
          and re.fullmatch(r"  H100      11 us to 15 us, most of it for device memory", lines[3]),
          lines)
    more = [dict(each, dynamic=80 * 1024) for each in facts]
    lines = predict.lines_of(Submission(path), NOTHING._replace(fewest=1e6), more)
    check("80 KB of shared memory do not fit into a T4",
          "a block does not fit" in lines[1] and "us to" in lines[2] and "us to" in lines[3], lines)
    path.write_text(filled("residual_forward", body + "    // mma\n    mma_tf32;\n"))
    check("none on tensor cores", not predict.lines_of(Submission(path), NOTHING, facts))


PTX = """.visible .entry sum(
    .param .u64 sum_param_0
)
{
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [sum_param_0];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    rem.s64 %rd3, %rd2, %rd1;
    div.u32 %r2, %r1, 7;
$L__BB0_1:
    ld.global.f32 %f1, [%rd2+4];
    fma.rn.f32 %f2, %f1, %f1, %f3;
    sqrt.rn.f32 %f3, %f2;
    @%p1 bra $L__BB0_1;
    @!%p2 st.global.f32 [%rd2], %f3;
    ret;
}
"""


@fast
def test_instructions():
    """How many instructions PTX has: a division of 64 bits is some 30, one of 32 bits 15, a root
    8."""
    found = instructions_of(PTX)
    check("instructions, and accesses", found == (30 + 15 + 1 + 1 + 8 + 1 + 1, 2), found)


def test_times():
    """The table's rows are found, and a version's time is within its estimate."""
    rows = {(name, number): (threads, seconds)
            for name, number, threads, seconds in predict.measured()}
    check("versions that were timed", len(rows) > 70 and not {
        ("matmul_backward", 1), ("layernorm_forward", 2), ("attention_forward", 2)} & rows.keys(),
          len(rows))
    check("the fastest row", near(rows["adamw", 3][1], 817.2e-6) and rows["adamw", 3][0] == 128,
          rows["adamw", 3])
    if not (has_nvrtc() and finds_races(compiler_of())):
        pytest.skip("it needs NVRTC, and g++ 11")
    threads, seconds = rows["residual_forward", 1]
    low, high, worst = predict.estimated("residual_forward", 1, threads)
    check("residual_forward 1", low < seconds < high < 4 * low, (low, high, worst))


@pytest.mark.longest
def test_share(capsys):
    """The lab's README says how many times are within the range."""
    predict.main()
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.match(r"(\d+) of (\d+) times.* ([\d.]+) times the lower", last).groups()
    text = " ".join((LAB / "README.md").read_text("utf-8").split())
    check(last, "For {} of {} versions".format(*found[:2]) in text and
          f"upper end is {found[2]} times" in text)
