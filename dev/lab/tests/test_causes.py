"""Test what a student is told about wrong numbers: each usual mistake gets its own sentence, others
none of them."""
import re
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from dev.common.config import Config
from dev.cpu.emulated import Emulated
from dev.lab.bench import Bench, Comparison
from dev.lab.causes import describe_wrong, facts_of, wrong_number
from dev.lab.exercises import checks_of, exercise_names, find_exercise, version_of
from dev.lab.explain import order_lines, own_names, sanitizer_lines, stuck_lines
from dev.lab.ladder import ANY, LAB, find_ladder, stored
from dev.lab.mistakes import mistakes_of
from dev.lab.submission import Submission
from dev.lab.tests.student import said, solution
from dev.tests.checks import check
from train_gpt2 import BF16


def told(bench, version, choice, code):
    """The lines on a result, or [] if it is right."""
    comparison = bench.check(version, choice)
    if comparison.place is None:
        return []
    facts = facts_of(bench, comparison, code)
    return [wrong_number(comparison, facts.never_there), *describe_wrong(facts)]


# ---- Wrong numbers, computed in NumPy


def device(dtype):
    """As much of a device as Bench needs."""
    real = np.dtype(BF16 if dtype == "bf16" else np.float32)
    return SimpleNamespace(
        name="cpu", dtype=dtype, real=real, W=16 // real.itemsize,
        empty=lambda nbytes: np.empty(nbytes, np.uint8),
        put=lambda array, values: array.__setitem__(..., values), set_order=lambda order: None)


def judged(name, results, dtype="fp32", sizes=None, code="blockIdx"):
    """What is said of results(a) {output: numbers}, at the first sizes where they are wrong; [] if
    they are right. The other outputs are right."""
    ladder, lines = find_ladder(name), []
    version = version_of(find_exercise(name), ladder)
    for each in [sizes] if sizes else checks_of(find_exercise(name), ladder):
        bench = Bench(ladder._replace(compiled_for=""), device(dtype), each)
        problem = SimpleNamespace(**{**vars(bench.given), "truth": bench.truth})
        with np.errstate(all="ignore"):
            numbers = {name: np.where(truth == ANY, np.nan,
                                      truth) for name, truth in bench.truth.items()}
            numbers |= results(problem)

        def run(_, a, numbers=numbers):
            for output in numbers.keys() & vars(a).keys():
                array = getattr(a, output)
                array[...] = stored(np.broadcast_to(numbers[output], array.shape), array.dtype)

        with np.errstate(all="ignore"):
            lines = told(bench, version._replace(run=run, scratch=None, atomics=True), {}, code)
        if lines:
            break
    return lines


# The numbers of the first sizes do not tell these from the ones before them in the table.
ALIKE = {"those tensors decay whose decayed[i] is 0": dict(n=9600, tensors=14, clip=1),
         "the sum over rows leaves out its first term. Where does the loop begin?": dict(B=3, T=9,
                                                                                         OC=288)}


def test_own_sentences():
    """Each mistake of each exercise gets its own sentence, in at most four lines."""
    for name in exercise_names():
        wrong, mistakes = [], mistakes_of(find_exercise(name))
        for mistake in mistakes:
            if mistake.numbers:
                lines = judged(name, mistake.numbers, sizes=ALIKE.get(mistake.why))
                if not lines or lines[-1] != f"why: {mistake.why}" or len(lines) > 4:
                    wrong.append([mistake.why, lines])
        check(f"{name}: {len(mistakes)} mistakes", mistakes and not wrong, wrong or "")


# ---- Kernels with a mistake in them


class Plant(NamedTuple):
    name: str
    wish: str  # what is said, a regular expression
    changes: tuple  # (old, new) pairs of texts in the lab's first version


def plant(name, wish, *texts):
    return Plant(name, wish, tuple(zip(texts[::2], texts[1::2])))


V_LOOP = "v < V; v++) sum"
PLANTS = (
    plant("residual_forward", "inp2 is subtracted", ") + to", ") - to"),
    plant("residual_forward", "10 of 2,592 numbers are wrong, every 256th", "(i < (size_t)N * C)",
          "(i < (size_t)N * C && threadIdx.x < 255)"),
    plant("residual_forward", "all 2,592 numbers.*compare the line", ") + to", ") + 1.5f * to"),
    plant("gelu_forward", "GELU by erf", "tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x))",
          "erff(x * 0.70710678f)"),
    plant("gelu_forward", "0.044715 is left out", "0.044715f * x", "x"),
    plant("gelu_forward", "times what they should be: ?|2 times", "0.5f * x", "x"),
    plant("gelu_forward", "tanhf has no such limit",
          "tanhf(SQRT_2_OVER_PI * (x + 0.044715f * x * x * x))",
          "(expf(0.7978846f * (x + 0.044715f * x * x * x)) - expf(-0.7978846f * (x + 0.044715f * "
          "x * x * x))) / (expf("
          "0.7978846f * (x + 0.044715f * x * x * x)) + expf(-0.7978846f * (x + 0.044715f * x * x "
          "* x)))"),
    plant("swiglu_forward", "halves are exchanged", "gate = to_float(up[H])",
          "gate = to_float(*up)",
          "to_float(*up) * gate /", "to_float(up[H]) * gate /"),
    plant("swiglu_forward", "gate is left out", "* gate / (1", "/ (1"),
    plant("encoder_forward", "wpe is not added", " + to_float(wpe", " + 0 * to_float(wpe"),
    plant("encoder_forward", "and not row / T", "wpe[(size_t)(row % T)", "wpe[(size_t)(row / T)"),
    plant("permute", "order of inp", "inp[(((b * T + t) * 3 + which) * NH + h) * head + c]",
          "inp[i]"),
    plant("permute", "t and h are exchanged", "t = i / head % T, h = i / head / T % NH",
          "h = i / head % NH, t = i / head / NH % T"),
    plant("permute", "the other way",
          "t = i / head % T, h = i / head / T % NH, sequence = i / head / T / NH;",
          "h = i / head % NH, which = i / head / NH % 3, t = i / head / NH / 3 % T, b = i / head "
          "/ NH / 3 / T;",
          "size_t b = sequence % B, which = sequence / B;", "",
          "((b * T + t) * 3 + which) * NH + h",
          "((which * B + b) * NH + h) * T + t"),
    plant("repeat_kv_forward", "h % NKV", "h / (NH / NKV)", "h % NKV"),
    plant("repeat_kv_forward", "values are copies of the keys", "(which - 1) * NKV + ", ""),
    plant("gelu_backward", "is not multiplied", "to_float(dinp[i]) * gelu", "gelu"),
    plant("gelu_backward", "overwritten before", "from_float(dinp[i], to_float(dinp[i])",
          "from_float(dinp[i], gelu_backward_::derivative(to_float(inp[i]))), from_float(dinp[i], "
          "to_float("
          "dinp[i])"),
    plant("gelu_backward", "the 3 is missing", "3.0f * ", ""),
    plant("swiglu_backward", "halves are exchanged", "from_float(dinp[at], d * gate",
          "from_float(dinp[at + H], d * gate",
          "from_float(dinp[at + H], d * up", "from_float(dinp[at], d * up"),
    plant("swiglu_backward", "only s is there", " * (1.0f + gate * (1.0f - s))", ""),
    plant("crossentropy_softmax_backward", "1 at the target is not subtracted", " - indicator", ""),
    plant("crossentropy_softmax_backward", "only the padding is wrong", ": 0.0f);", ": 1.0f);"),
    plant("crossentropy_softmax_backward", "columns from V on were never", "size_t)N * Vp) return",
          "size_t)N * Vp || i % Vp >= V) return"),
    plant("rope_table", "cosines and sines are exchanged", "2 * (size_t)i] = cosf",
          "2 * (size_t)i + 1] = cosf",
          "2 * (size_t)i + 1] = sinf", "2 * (size_t)i] = sinf"),
    plant("rope_table", "error grows with the position",
          "(float)pow((double)theta, (double)((float)(2 * pair) / HS))",
          "expf(logf(theta) * (2 * pair) / HS)"),
    plant("rope_table", "the 2 is left out", "(2 * pair) / HS", "pair / HS"),
    plant("rope_forward", "from the first one's new value",
          "float left = to_float(*x), right = to_float(*y);", "",
          "left * cosine - right * sine", "to_float(*x) * cosine - to_float(*y) * sine",
          "left * sine + right * cosine",
          "to_float(*x) * sine + to_float(*y) * cosine"),
    plant("rope_backward", "turned forward", "left * cosine + right", "left * cosine - right",
          "right * cosine - left",
          "right * cosine + left"),
    plant("adamw", "clip / norm", "adamw_::clip_factor(a, norm[0]) * ", ""),
    plant("adamw", "correction1 and correction2", " * a.correction1", "", " * a.correction2", ""),
    plant("adamw", "weight decay is left out",
          " + (decayed[tensor] ? a.weight_decay : 0.0f) * p[0]", ""),
    plant("matmul_backward_bias", r"\+= and not =\.", "dbias[o] += sum", "dbias[o] = sum"),
    plant("matmul_backward_bias", "over rows leaves out its last", "row < N;", "row < N - 1;"),
    plant("softmax_forward", "the row's largest", "top = fmaxf(top, to_float(x[v]))", "top = 0.0f"),
    plant("softmax_forward", "only its last term", "sum += expf", "sum = expf"),
    plant("softmax_forward", "leaves out its last term", V_LOOP, "v < V - 1; v++) sum"),
    plant("softmax_forward", "divide them by their sum", " / sum", ""),
    plant("softmax_forward", "only the padding", ": 0.0f);", ": 1.0f);"),
    plant("rmsnorm_forward", "last columns were never written",
          "int c = 0; c < C; c++) {\n        float x",
          "int c = 0; c < C - 8; c++) {\n        float x"),
    plant("rmsnorm_forward", "eps is left out", " + eps)", ")"),
    plant("rmsnorm_forward", "branch is not added", " + to_float(branch[start + c])", ""),
    plant("rmsnorm_forward", "not divided by C", "sum / C", "sum"),
    plant("layernorm_forward", "eps .1e-5. is left out", " + 1e-5f", ""),
    plant("layernorm_forward", "x.2 minus mean.2 cancels", "variance += (x[c] - m) * (x[c] - m);",
          "variance += x[c] * x[c];", "variance / C + 1e-5f",
          "fmaxf(0.0f, variance / C - m * m) + 1e-5f"),
    plant("layernorm_forward", "around 0", "variance += (x[c] - m) * (x[c] - m);",
          "variance += x[c] * x[c];"),
    plant("layernorm_forward", "bias is left out", " + to_float(bias[c])", ""),
    plant("layernorm_forward", "C - 1: divide by C", "variance / C", "variance / (C - 1)"),
    plant("fused_residual_forward", "is warp_sum missing", "warp_sum(sum) / C;", "sum / C;",
          "warp_sum(sum) / C +",
          "sum / C +"),
    plant("fused_residual_forward", "mean is each lane's own|sum for the mean",
          "warp_sum(sum) / C;", "sum / C;"),
    plant("fused_residual_forward", "not divided by C", "warp_sum(sum) / C +", "warp_sum(sum) +"),
    plant("crossentropy_forward", "not added back", " + top -", " -"),
    plant("crossentropy_forward", "target's logit is not", " - to_float(x[targets[row]])", ""),
    plant("crossentropy_forward", "largest number before exp", "top = fmaxf(top, to_float(x[v]))",
          "top = 0.0f"),
    plant("classifier_fused", "read when the gradient stood there",
          "    losses[row] = logf(sum) + top - ",
          "    float l = logf(sum) + top; //", ": 0.0f);",
          ": 0.0f);\n    losses[row] = l - to_float(x[targets[row]]);"),
    plant("classifier_fused", "dloss is left out", "dloss * (expf", "(expf"),
    plant("classifier_fused", "1 at the target is not", "v == targets[row] ? 1.0f : 0.0f", "0.0f"),
    plant("global_norm", "root is missing", "sqrtf(sum)", "sum"),
    plant("global_norm", "Is total .line 29. set before it is read.*does not start at 0",
          "sum = block_reduce<warp_sum>(sum, 0.0f);",
          "__shared__ float total;\n    atomicAdd(&total, sum);\n    __syncthreads();\n    sum = "
          "total;"),
    plant("global_norm", "only the first warp's sum", "block_reduce<warp_sum>(sum, 0.0f)",
          "warp_sum(sum)"),
    plant("matmul_forward", "bias is not added", "sum = to_float(bias[i % OC])", "sum = 0.0f"),
    plant("matmul_forward", "as if it were .C,OC.", "weight + i % OC * C", "weight + i % OC",
          "to_float(w[c])",
          "to_float(w[c * OC])"),
    plant("matmul_forward", "over c leaves out its first", "int c = 0;", "int c = 1;"),
    plant("gram", "multiplied with the first one", "(i / T / T * T + i % T) * C", "i % T * C"),
    plant("repeat_kv_backward", "only the first copy", "j < copies", "j < 1"),
    plant("repeat_kv_backward", "h % NKV", "(h - NH) % NKV * copies", "(h - NH) % NKV",
          "first + j)",
          "first + j * (h < NH ? 1 : NKV))"),
    plant("encoder_backward", "and not row / T", "(row % T)", "(row / T)"),
    plant("encoder_backward", "one position wrote",
          "atomicAdd(dwte + (size_t)tokens[row] * C + c, d)",
          "dwte[(size_t)tokens[row] * C + c] = d", "atomicAdd(dwpe + (size_t)(row % T) * C + c, d)",
          "dwpe[(size_t)(row % T) * C + c] = d"),
    plant("rmsnorm_backward", "not divided by C", "norm * sum / C", "norm * sum"),
    plant("rmsnorm_backward", r"\+= and not =", "to_float(dx[c]) + s", "s"),
    plant("layernorm_backward", "average of dnorm is not subtracted", " - sum_dnorm / C", ""),
    plant("layernorm_backward", "mean is not subtracted", "float norm = (to_float(x[c]) - m) * s",
          "float norm = to_float(x[c]) * s", "dnorm * (to_float(x[c]) - m) * s",
          "dnorm * to_float(x[c]) * s"),
    plant("layernorm_backward", "and not only what is added", "atomicAdd(before + c, g)",
          "atomicAdd(before + c, g - to_float(dx[c]))"),
    plant("relu_attention_forward", "s <= t", "s <= t", "s < t"),
    plant("relu_attention_forward", "max.0, score. is missing", "fmaxf(0.0f, scale * score)",
          "scale * score"),
    plant("trimat_forward", "scale is left out", "scale * sum", "sum"),
    plant("attention_forward", "s <= t", "s <= t; s++) {\n        float score",
          "s < t; s++) {\n        float score",
          "s <= t; s++) {\n        a[s] =", "s < t; s++) {\n        a[s] =", "s <= t; s++) o",
          "s < t; s++) o"),
    plant("attention_forward", "not divided by their sum", "o / sum", "o"),
    plant("attention_forward", "largest score", "top = fmaxf(top, a[s])", "top = 0.0f"),
    plant("attention_forward", "head 0", "*k = head + C", "*k = qkv + (size_t)b * T * 3 * C + C"),
    plant("gqa_forward", "h % NKV", "NH + h / (NH / NKV)", "NH + h % NKV"),
    plant("gqa_forward", "scale is left out", "score *= scale;", ""),
    plant("attention_backward", "delta.* is not subtracted", "(dweight - delta)", "dweight"),
    plant("attention_backward", "base 2", "exp2f(LOG2_E * scale * score - lse[i])",
          "expf(scale * score - lse[i])"),
    plant("attention_backward", "LOG2_E", "LOG2_E * ", ""),
    plant("gqa_backward", "scale is left out of dscore", "dscore = scale * weight",
          "dscore = weight"),
    plant("gqa_backward", "h % NKV", "NH + h / (NH / NKV)", "NH + h % NKV"),
)
# Mistakes that no table has. What must not be said of them.
UNUSUAL = (
    plant("encoder_backward", "padding|mean|eps",
          "atomicAdd(dwte + (size_t)tokens[row] * C + c, d)",
          "if (row % 5) atomicAdd(dwte + (size_t)tokens[row] * C + c, d)"),
    plant("layernorm_backward", "why:|deviations|padding", "atomicAdd(dweight + c, d * norm)",
          "if (row % 4) atomicAdd(dweight + c, d * norm)"),
    plant("attention_forward", "variance|why:|padding", "sum += a[s];", "sum += a[s] * a[s];"),
    plant("softmax_forward", "why:|padding", V_LOOP, "v < V; v += 2) sum"),
    plant("layernorm_forward", "why:|padding", "variance / C + 1e-5f", "variance / C + 0.01f"),
    plant("rmsnorm_forward", "why:|mean of the", "sum += x * x", "sum += x * x * x"),
    plant("matmul_forward", "why:|padding", "sum += to_float(x[c])", "sum += c * to_float(x[c])"),
)


def build(folder, plants):
    """(the CPU with all plants, their files)."""
    paths = [folder / f"{i}.cu" for i in range(len(plants))]
    for i, (path, each) in enumerate(zip(paths, plants)):
        path.write_text(solution(each.name, f"_{i}", *each.changes))
    only = {Submission(path).run for path in paths}
    return Emulated("fp32", Config(C=768, NH=12), [LAB / "tiles.cu", *paths], only), paths


def test_planted(folder):
    """Kernels with the usual mistakes, and with others, compiled and judged."""
    cpu, paths = build(folder, PLANTS + UNUSUAL)
    for path, each in zip(paths, PLANTS + UNUSUAL):
        file = Submission(path)
        ladder, version = file.ladder, file.version
        version, lines = version._replace(atomics=True), []
        for sizes in checks_of(find_exercise(each.name), ladder):
            if not lines:
                bench = Bench(ladder._replace(compiled_for=""), cpu, sizes)
                lines = told(bench, version, dict(threads=version.threads[0]), file.code)
        found, usual = re.search(each.wish, said(lines)), each in PLANTS
        check(f"{each.name}: {'' if usual else 'not '}{each.wish}",
              lines and bool(found) == usual and len(lines) < 5,
              "" if lines and bool(found) == usual and len(lines) < 5 else lines)


# ---- Sentences


MISALIGNED = ("x.cu:3:5: runtime error: {} of misaligned address 0x7f for type 'const struct {}', "
              "which requires {} byte")
OUT_OF_ORDER = ("has a race: out[0, 3] is 2 when threads run in the order 1, and 3 in the order "
                "forward")


def test_sentences(folder):
    """What is said where numbers are not the matter, or say little."""
    zeros = lambda a: dict(out=np.zeros(a.truth["out"].shape))
    for name, wish, lines in (
            ("0 everywhere", "0 everywhere. Does each loop run", judged("softmax_forward", zeros)),
            ("0 everywhere, and 1 / 2", "1/2 is 0", judged("gelu_forward", zeros,
                                                           code="1 / 2 * x")),
            ("never changed", "still has the value", judged("gelu_backward",
                                                            lambda a: dict(dinp=a.dinp))),
            ("added twice", "added twice", judged("matmul_backward_bias", lambda a: dict(
                dbias=2 * a.truth["dbias"] - a.dbias))),
            ("a factor that is a size", "0.3333, which is 1/B, times",
             judged("residual_forward", lambda a: dict(
                out=a.truth["out"] / a.B))),
            ("a row off", "one row behind", judged("softmax_forward", lambda a: dict(
                out=np.roll(a.truth["out"], 1, 0)))),
            ("a place off", "one place before", judged("residual_forward", lambda a: dict(
                out=np.roll(a.truth["out"], -1)))),
            ("rounded twice", "in bf16|here off by roundings",
             judged("residual_forward", lambda a: dict(
                out=a.truth["out"] * (1 + 2**-7)), "bf16")),
            ("no first value", "without a first value", judged("matmul_forward", lambda a: dict(
                out=a.truth["out"] - 1.6947e38)))):
        check(f"sentence: {name}", re.search(wish, said(lines)) and len(lines) < 5, lines)

    tiny = Comparison("out", 1.0, 1e-5, (0, 4), found=1.0, expected=4e-303)
    check("sentence: no number that fp32 has not", wrong_number(tiny,
                                                                False) == "out[0,4] is 1, "
                                                                          "expected 0",
          wrong_number(tiny, False))
    path = folder / "my_softmax_forward.cu"
    path.write_text(solution("softmax_forward", "", (", sum = 0.0f", ", sum")))
    for n, kind in ((8, "uint2"), (16, "uint4")):
        lines = sanitizer_lines(Submission(path), {}, MISALIGNED.format("load", kind,
                                                            n) + f" alignment\n    #0 {path}:3")
        check(f"sentence: {n} bytes at once",
              f"reads {n} bytes at once, at an address that is no multiple of {n}" in
              lines[0] and lines[1].startswith("line 3"), lines)
    lines = order_lines(Submission(path), OUT_OF_ORDER)
    check("sentence: another order",
          "race" not in said(lines) and "in a random order" in lines[0] and re.match(
        r"line \d+: float top = LOWEST, sum;", lines[1]) and "gets a value" in lines[2], lines)
    path.write_text(solution("softmax_forward"))
    lines = order_lines(Submission(path), OUT_OF_ORDER)
    check("sentence: another order, and all have values",
          "no barrier" in said(lines) and len(lines) == 2, lines)
    lines = order_lines(Submission(path), "changed inp, which is only to be read")
    check("sentence: a changed input", "it changed inp" in lines[0] and "left of an =" in lines[1],
          lines)
    path = folder / "my_gqa_forward.cu"
    path.write_text(solution("gqa_forward"))
    lines = own_names(Submission(path), ["it reads qkv[9]", "line 1: qkv"])
    check("sentence: the student's names", lines == ["it reads inp[9]", "line 1: qkv"], lines)
    path.write_text(solution("gqa_forward"))
    lines = stuck_lines(Submission(path),
                        "kernels.cu: my_gqa_forward: block (0, 0, 0): threads 0-9 wait in "
                        "warp_max at line 3 of "
                        "my_gqa_forward.cu, called at line 5; threads 10-63 have returned")
    check("sentence: a stuck block", [each.split(":")[0] for each in lines[1:3]] == ["line 3",
                                                                                     "line 5"] and
          "10 of the 64" in lines[0] and "of the warp must" in lines[-1] and len(lines) == 5, lines)
