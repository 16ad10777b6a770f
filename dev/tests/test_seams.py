"""The lines that features repeat are still the trainer's.

dev/features/seams.py cuts the trainer's longer methods into parts, dev/features/fused_biases.py has
its own layer_backward, dev/features/recompute.cu and recompute_llama.cu repeat a kernel each. If a
line changes in the trainer, it has to change there too.
"""
import ast
import contextlib
import dataclasses
import functools
import io
import re
from pathlib import Path
from unittest import mock

import numpy as np

import train_gpt2
from dev.common.config import Config, read_parameters
from dev.common.flags import parse_flags
from dev.cpu.device import Cpu
from dev.cpu.emulated import Emulated
from dev.features import __main__ as features_map
from dev.features import moments, order, seams
from dev.tests.checks import TINY, TOP, check, check_refusal
from dev.tests.trainings import two_token_files
from train_gpt2 import pack_batch

SEAMS, TRAINER = "dev/features/seams.py", "train_gpt2.py"
# (the trainer's class and method; where its lines stand again; its lines that stand there in other
# words)
REPEATED = [
    ("GPT2.set_parameters", SEAMS, ["for views in self.master:"]),
    ("GPT2.layer_views", SEAMS, ["return SimpleNamespace(**{row.name: getattr(views, row.name)[l] "
                                 "for row in table if row.layers})"]),
    ("GPT2.head_forward", SEAMS, ["self.device.matmul(logits, self.acts.lnf[rows], "
                                  "self.params.wte.T)"]),
    ("GPT2.head_backward", SEAMS, ["matmul(dlnf, dlogits, self.params.wte)",
                                   "matmul(self.grads.wte, dlogits.T, self.acts.lnf[rows], "
                                   "accumulate=adds)"]),
    ("GPT2.update_pass", SEAMS, [
        "launch = self.device.launch", "gradients = arenas['gradients']",
        "launch('global_norm', blocks, adam.norm, gradients, n)",
        "launch('judge', 1, adam.verdict, adam.norm)",
        "launch('adamw', n, arenas['parameters'], arenas.get('low bits'), gradients, arenas['adam "
        "m'], arenas['adam v'], adam.starts, adam.decayed, adam.decayed.size, n, adam.settings, "
        "adam.verdict)"]),
    ("Training.train", SEAMS, [
        "for step in range(self.model.step, self.steps + 1):", "last = step == self.steps",
        "if flags.val_every and (step % flags.val_every == 0 or last):", "self.validate()",
        "if flags.sample_every and step > 0 and (step % flags.sample_every == 0 or last):",
        "if last:",
        "self.save(step)", "break", "begun = time.perf_counter()",
        "rate = self.learning_rate(step)",
        "self.model.train_step(*batches, learning_rate=rate, **adamw)",
        "verdict = self.model.verdict()",
        "self.report(step + 1, rate, verdict, time.perf_counter() - begun)"]),
    ("Training.announce", SEAMS, [
        "print(f'data         | {self.train_data} (-i), {self.val_data.path} (-j)')",
        "for arena, table in GPT2.tables(c, self.device, B, T).items():",
        "print(f'{arena:12} | {offsets(table)[-1] / 2 ** 30:6.2f} GiB in {len(table)} tensors')"]),
    ("GPT2.norm_backward", "dev/features/fused_biases.py", [
        "N, C = inp.shape", "partials = self.back.partials",
        "self.device.launch('layernorm_backward', blocks, dx, partials, dout, inp, weight, mean, "
        "rstd, N, threads=threads, shared=shared)",
        "blocks, threads, shared = layernorm_backward_launch(self.device, N)",
        "self.device.launch('add_partials', (C, 2), dweight, dbias, partials, blocks, C, "
        "self.micro > 0)"]),
]


@functools.cache
def statements(path, *names):
    """The statements of a file, of a class, or of a method, as ast writes them, each on its own: of
    an `if` or a loop the first line."""
    tree = ast.parse((TOP / path).read_text(encoding="utf-8"))
    for name in names:
        tree = next(node for node in tree.body if getattr(node, "name", None) == name)
    found = []
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and node is not tree and not is_text:
            found.append(ast.unparse(node).split("\n")[0])
    return found


def test_repeated_lines():
    """Each of a method's lines stands in the file that repeats it, but for those that the table
    lists."""
    for method, path, others in REPEATED:
        own, there = statements(TRAINER, *method.split(".")), statements(path)
        missing = [line for line in own if line not in there and line not in others]
        check(f"{method} in {path}", not missing, missing)
        stale = [line for line in others if line not in own]
        check(f"{method}: the lines that differ are the trainer's", not stale, stale)


def body_of(path, kernel):
    """The lines of a kernel between its braces, without white space."""
    text = (TOP / path).read_text(encoding="utf-8")
    start = text.index("{\n", text.index(f" {kernel}("))
    body = text[start : text.index("\n}", start)]
    return [re.sub(r"\s", "", line) for line in body.splitlines() if line.strip()]


REPEATED_KERNELS = (
    ("kernels.cu", "residual_layernorm_forward", "dev/features/recompute.cu",
     "residual_layernorm_into"),
    ("dev/llama3/llama3.cu", "residual_rmsnorm_forward", "dev/features/recompute_llama.cu",
     "residual_rmsnorm_into"),
)


def test_repeated_kernels():
    """Recompute's kernels differ from the usual ones in the line that reads the stream, and in no
    other."""
    for path, kernel, path_there, kernel_there in REPEATED_KERNELS:
        own, there = body_of(path, kernel), body_of(path_there, kernel_there)
        expected = [line.replace("load<4>(x+", "load<4>((branch?before:x)+") for line in own]
        check(f"{kernel_there} differs in the line that reads", there == expected != own,
              [*zip(own, there)])


def test_plain_program(folder):
    """The trainer's own classes, which features replace, train as a run with dev/ does: the same
    lines and bits."""
    two_token_files(folder)
    flags = ["-e", str(TINY), "-b", "2", "-t", "8", "-d", "32", "-x", "3", "-v", "2", "-m", "1",
             "-s", "2", "-g", "3",
             "-u", "2", "-q", "0.1", "--dtype", "fp32", "-i", str(folder / "tokens.bin"),
             "-j", str(folder / "tokens.bin"), "-o"]
    alone, featured = io.StringIO(), io.StringIO()
    device = mock.patch.object(train_gpt2, "FastCuda",
                               lambda dtype, c: Cpu(dtype, Config(*dataclasses.astuple(c))))
    with device, contextlib.redirect_stdout(alone):
        train_gpt2.Training(train_gpt2.parse_flags([*flags, str(folder / "alone")])).run()
    with contextlib.redirect_stdout(featured):
        order.main(["--device", "cpu", *flags, str(folder / "featured")])

    def lines(printed):
        text = re.sub(r" \| lr.*", "", printed.getvalue())
        return re.findall(r"(?m)^(?:step|val loss|generating:|\[).*$", text.replace("<", "["))

    own, theirs = lines(alone), lines(featured)
    check("as many lines, and three steps",
          len(own) == len(theirs) and sum("step" in line for line in own) == 3, own)
    check("the same losses",
          [line for line in own if "loss" in line] == [line for line in theirs if "loss" in line],
          (own, theirs))
    weights = [(folder / name / "model_00000003.bin").read_bytes()
               for name in ("alone", "featured")]
    check("the same weights", weights[0] == weights[1] != Path(TINY).read_bytes())


def test_excerpts():
    """The README's lines of code stand in the trainer or in the loops, word for word, in order."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    for language, path, count in (("python", TRAINER, 2), ("cpp", "dev/cpu/kernels.cpp", 1)):
        blocks = re.findall(rf"```{language}\n(.*?)```", readme, re.S)
        check(f"{language}: excerpts", len(blocks) == count, blocks)
        lines = [line.strip() for line in (TOP / path).read_text(encoding="utf-8").splitlines()]
        for block in blocks:
            for part in block.strip().split("\n\n") if language == "cpp" else [block]:
                part = [line.strip() for line in part.splitlines()]
                start = lines.index(part[0]) if part[0] in lines else 0
                check(f"{part[0][:30]} ...", lines[start : start + len(part)] == part, part)


def test_names_of_helpers():
    """Two features may use the same name: their functions are in namespaces, but for kernels and
    what a .cuh declares.
    """
    for path in (path for path in order.SOURCES if path.suffix == ".cu"):
        text = path.read_text("utf-8")
        outside = re.sub(r"^namespace ([\w:]+) \{.*?^\}  // namespace \1$", "", text,
                         flags=re.M | re.S)
        found = re.findall(r"^(?:template|struct|constexpr|using|__device__).*", outside, re.M)
        headers = "".join(header.read_text("utf-8") for header in path.parent.glob("*.cuh"))
        check(f"{path.name}: names",
              not [line for line in found if line.rstrip("{ ") not in headers], found)


class Noise:
    """A feature that changes all gradients."""

    def adamw(self, parameters, low, gradients, m, v):
        gradients.view(np.float32)[...] += 1
        super().adamw(parameters, low, gradients, m, v)


def test_padding_of_words():
    """Rows that pad the vocabulary stay zero, even if a feature changes their gradients."""
    for more in ([], ["--moments", "bf16"]):
        model = made_model(Noise, *more)
        before = model.params.wte.copy()
        model.train_step(pack_batch(*np.ones((2, 1, 8), np.int32)), learning_rate=0.1,
                         weight_decay=0.1)
        V = model.config.V
        check(f"padding {more}",
              not model.params.wte[V:].any() and (model.params.wte[:V] != before[:V]).all())


def test_arrays_of_other_numbers():
    """A launch refuses an array whose numbers are not those that the kernel reads."""
    device = made_model(Noise).device
    wrong = np.zeros(64), np.zeros(64, np.float16), np.zeros(64, np.int64), np.zeros(64, np.int32)
    for array in wrong:
        check_refusal("launch", rf"gelu_forward: inp is an array of {array.dtype}, and the kernel "
                      r"reads const real\*", device.launch, "gelu_forward", 64,
                      np.zeros(64, np.float32), array, 1, 64)
    device.launch("gelu_forward", 64, np.zeros(64, np.float32), np.zeros(64, np.float32), 1, 64)


def made_model(feature, *given):
    """A small model with a feature and what these flags ask for."""
    kind = order.attach(parse_flags("", order.FLAGS, given), seams.Training, seams.GPT2)[1]
    c = Config.from_file(TINY)
    sources = [moments.SOURCE]
    model = order.stack(kind, [feature])(c, Emulated("fp32", c, sources), 1, 8)
    model.set_parameters(read_parameters(TINY, c))
    return model


def test_sizes():
    """From 128 MiB on, a size is told in GiB."""
    for nbytes, wish in ((448, "  0.00 MiB"), (1_816_576, "  1.73 MiB"),
                         (2**27 - 2**20, "127.00 MiB"), (2**27, "  0.12 GiB"),
                         (73 * 2**30, " 73.00 GiB")):
        check(f"{nbytes} bytes", seams.size_of(nbytes) == wish, seams.size_of(nbytes))


def test_map():
    """`python -m dev.features` has each flag once, beside the file that declares it."""
    rows = {path: (text, flags) for path, text, flags in features_map.rows()}
    check("ema.py", rows["ema.py"] == (
        "--ema D: an exponential moving average of the weights.", ["--ema"]), rows["ema.py"])
    check("chat.py has two", rows["chat.py"][1] == ["--chat", "--answer"], rows["chat.py"])
    check("without flags", rows["fp8/fp8_all.py"][1] == [], rows["fp8/fp8_all.py"])
    found = sorted(flag for _, flags in rows.values() for flag in flags)
    wish = sorted(flag.name for flag in order.FLAGS)
    check("all flags", found == wish, {*found} ^ {*wish})
    cut = [path for path, (text, _) in rows.items() if text.endswith("et al.")]
    check("whole sentences", not cut, cut)
