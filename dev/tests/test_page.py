"""The page of a training step (dev/page): what is recorded beside the trainer's own arrays and
another device's, its formulas beside --dry-run, and the page itself in a browser."""
import base64
import functools
import inspect
import math
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import train_gpt2
from dev.common.config import Config, padded
from dev.cpu import traffic
from dev.cpu.device import Cpu
from dev.cpu.traffic import KINDS
from dev.features import dry_run
from dev.lab.picture import recorded, write_page
from dev.lab.submission import Submission
from dev.lab.tests.student import solution
from dev.page import build, formulas
from dev.page.differences import COUNT
from dev.page.record import TEXT, Recorder, record, run_of, tables_of
from dev.tests.checks import check, words
from dev.tests.jobs import MPI, MPIRUN
from dev.tests.trainings import ran
from dev.tools import page as program
from prepro_tinyshakespeare import write_tokens
from train_gpt2 import GPT2, Training, offsets

SIZES = dict(L=2, NH=2, C=32, B=2, T=8, after=40, rate=3e-3, decay=0.1, seed=42)
AXE = os.environ.get("AXE")  # the path of axe-core's axe.min.js, if it is to look at the page


@functools.cache
def step():
    """(what was recorded of a step, the model before it on the CPU device, the one after it)."""
    return record(SIZES)


@functools.cache
def whole():
    """The same with all that the page has."""
    return build.with_more(*step())


@functools.cache
def values_of(text):
    return np.frombuffer(base64.b64decode(text), np.uint32)


def number_at(data, number, index, time):
    """The bits of a tensor's number behind a launch, or None if nobody wrote it: read as the page
    reads it, but in Python."""
    values, start = values_of(data["values"]), data["initial"][number]
    found = None if start is None else values[start + index]
    for launch in data["launches"][: time + 1]:
        for written, low, high, at in launch["writes"]:
            if written == number and low <= index < high:
                found = values[at + index - low]
    return found


def test_sources():
    """What the page shows of the source is the source, and shapes are those of the tables."""
    data, _, after = step()
    shown = data["functions"]
    for name in ("layer_forward", "layer_backward", "update_pass", "linear_backward", "train"):
        owner = Training if name == "train" else GPT2
        lines, first = inspect.getsourcelines(getattr(owner, name))
        check(f"{name} is the source", shown[name]["lines"] == [x.rstrip("\n") for x in lines]
              and shown[name]["first"] == first)
    source = train_gpt2.KERNELS.read_text("utf-8").splitlines()
    check("kernels.cu is the source", data["source"] == source)
    for name, kernel in data["kernels"].items():
        text = "\n".join(source[kernel["first"] - 1 : kernel["last"]])
        check(f"the lines of {name}", text.startswith("BLOCK(") and f" {name}(" in text
              and text.endswith("\n}") and text.count("__global__") == 1 and kernel["comment"])
    for arena, table in tables_of(after).items():
        rows = [t for t in data["tensors"] if data["arenas"][t["arena"]]["name"] == arena]
        check(f"shapes of {arena}", [(t["name"], tuple(t["shape"])) for t in rows] == [
            (row.name, row.shape) for row in table for _ in range(max(1, row.layers))])
    for launch in data["launches"]:
        for name, line in launch["stack"]:
            check("a launch's line is in its function", 0 < line < len(shown[name]["lines"]))
    called = {(name, line) for x in data["launches"] for name, line in x["stack"]}
    for name in ("layer_forward", "layer_backward"):
        calls = {(name, i) for i, line in enumerate(shown[name]["lines"])
                 if re.match(r" +self\.\w+(_forward|_backward)\(", line)}
        check(f"each line of {name} has launches", calls and calls <= called, calls - called)


def test_numbers():
    """The numbers behind the last launch are those of the trainer's arrays, and those of a step on
    another device, within 1e-5. (The gradient of the keys' bias is 0 but for rounding, which AdamW
    makes as large as others: so parameters are within 1e-4.)"""
    data, before, after = step()
    run = run_of(Cpu("fp32", before.config), before.config, SIZES, TEXT, SIZES["after"] + 1)
    for arena in ("parameters", "adam m", "adam v"):
        run.model.arenas[arena][...] = before.arenas[arena]
    run.model.step = SIZES["after"]
    run.train_data.next = SIZES["after"] % run.train_data.per_epoch
    run.train()
    last = len(data["launches"])
    for number, tensor in enumerate(data["tensors"]):
        arena = data["arenas"][tensor["arena"]]["name"]
        own, other = (model.arenas[arena].view(np.uint32)[tensor["start"] :][: tensor["words"]]
                      for model in (after, run.model))
        written = [w for x in data["launches"] for w in x["writes"] if w[0] == number]
        if not written and data["initial"][number] is None:
            continue
        places = {0, tensor["words"] - 1, *(low for _, low, _, _ in written[-3:])}
        for index in places:
            bits = number_at(data, number, index, last)
            if bits is not None:
                check(f"{arena} {tensor['name']}[{index}]", bits == own[index])
        if tensor["kind"] == "f" and arena not in ("backward", "update"):
            yield (f"{arena} {tensor['name']} {tensor['layer']}", own.view(np.float32),
                   other.view(np.float32), 1e-4 if arena == "parameters" else 1e-5)
    check("the loss", abs(data["verdict"]["loss"] - run.model.verdict().loss) < 1e-5)
    check("it has learned", data["verdict"]["loss"] < 4, data["verdict"]["loss"])


def test_traces():
    """A trace says which thread touched what: those of gelu_forward by the kernel's own rule."""
    c = Config(maxT=8, V=256, Vp=256, L=2, NH=2, C=32)
    device = Recorder("fp32", c)
    arrays = [device.empty(4 * 520).view(np.float32) for _ in range(2)]
    arrays[0][...] = np.linspace(-3, 3, 520)
    found = traffic.trace(device, lambda: device.launch("gelu_forward", 520, arrays[1], arrays[0],
                                                        1, 520))
    rows = found.rows
    check("a load and a store of each warp with a number", len(rows) == 2 * 5, len(rows))
    for kind, array in (("load", arrays[0]), ("store", arrays[1])):
        of_kind = rows[rows["kind"] == KINDS.index(kind)]
        for row in of_kind:
            lanes = [lane for lane in range(32) if int(row["lanes"]) >> lane & 1]
            first = 256 * int(row["block"]) + 32 * int(row["warp"])
            wish = [array.ctypes.data + 16 * (first + lane) for lane in lanes]
            check(f"{kind}s of warp {row['warp']}", row["at"][lanes].tolist() == wish
                  and row["bytes"] == 16 and row["cost"] == -(-len(lanes) // 2))
    lanes = sum(bin(int(row["lanes"])).count("1") for row in rows)
    check("130 threads have numbers", lanes == 2 * 130, lanes)


def test_differences():
    """The gradients of many parameters are the differences of losses, which fall with h."""
    data, _, after = step()
    rows = whole()["differences"]
    check("how many, and of each tensor", len(rows) == COUNT and
          {row["name"] for row in rows} == {row.name for row in after.config.parameter_table()})
    off = []
    for row in rows:
        gradient = getattr(after.grads, row["name"])
        gradient = gradient if row["layer"] is None else gradient[row["layer"]]
        found = [(above - below) / (2 * h) for h, above, below in row["losses"]]
        off.append([abs(x - gradient.reshape(-1)[row["index"]]) for x in found])
    largest = np.max(off, 0)
    check("within 2e-4 at the least h", largest[-1] < 2e-4, largest)
    check("a tenth of h, a fraction of the error", largest[-1] < largest[0] / 10, largest)


def value_of(text, sizes):
    """An expression of the page's formulas, which Python understands too."""
    shared = dict(floor=math.floor, max=max, min=min)
    return eval(text, {"Math": SimpleNamespace(**shared)} | sizes)


def drawn_model(pick, ranks):
    """Random choices for --dry-run, and the page's sizes for them."""
    NH, HS, T = pick.choice((1, 2, 3, 5)), pick.choice((32, 64, 96)), pick.choice((7, 64, 100))
    chosen = {name: pick.choice(values) for name, values in formulas.CHOICES.items()}
    chosen["zero"] = int(ranks > 1)
    if chosen["optimizer"] == "muon":
        chosen["moments"] = "fp32"
    return chosen, dict(L=ranks * pick.randint(1, 4), NH=NH, HS=HS, C=NH * HS, T=T, G=ranks,
                        B=pick.choice((1, 3, 16, 96)))


def test_formulas(folder):
    """50 models as --dry-run prints them, of one rank or of two: parameters, arenas and time; and
    the trainer's own words where it refuses one."""
    train = folder / "train.bin"
    write_tokens(train, words(257, 20000))
    exported, pick, rate = whole()["models"], random.Random(1), 1e12
    MPIRUN_TURNS = (13, 29, 41) if MPIRUN else ()
    for turn in range(50):
        ranks = 2 if turn in MPIRUN_TURNS else 1
        chosen, asked = drawn_model(pick, ranks)
        flags = ["-e", f"{asked['L']}x{asked['NH']}x{asked['C']}", "-b", asked["B"], "-t",
                 asked["T"], "-i", train, "-v", 0, "-s", 0, "--device", "cpu", "--dry-run",
                 *formulas.flags_of(**chosen)]
        if ranks > 1:
            flags += ["--slots", 0]
            done = subprocess.run([MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", "2",
                                   sys.executable, train_gpt2.__file__, *map(str, flags)],
                                  env=os.environ | MPI, capture_output=True, text=True)
            text = done.stdout
        else:
            with mock.patch.object(dry_run, "product_rate", lambda *_: rate):
                text = ran(*flags)
        name = f"{asked} {chosen}"
        asked |= {size: int(re.search(rf"\b{size}=(\d+)", text)[1]) for size in ("V", "maxT")}
        asked["Vp"] = padded(asked["V"])
        count = int(re.search(r"([\d,]+) parameters", text)[1].replace(",", ""))
        known = exported["formulas"]
        check(f"parameters of {name}", count == value_of(known["parameters"], asked))
        for i in known["tables"][" ".join(map(str, chosen.values()))]:
            arena, nbytes, _ = known["arenas"][i]
            if nbytes := value_of(nbytes, asked):
                line = f"{arena:12} | {train_gpt2.size_of(nbytes)} in"
                check(f"{arena} of {name}", line in text, line)
        if ranks > 1:
            continue
        flops = asked["B"] * asked["T"] * sum(
            value_of(known[each], asked)
            for each in ("flops", *["again"] * (chosen["recompute"] == 2)))
        flops += (chosen["optimizer"] == "muon") * value_of(known["muon"], asked)
        found = float(re.search(r"([\d,]+) tok/s", text)[1].replace(",", ""))
        wish = rate * dry_run.SHARE["cpu"] / flops * asked["B"] * asked["T"]
        check(f"time of {name}", abs(found - wish) <= 1 + 1e-3 * wish, f"{found} {wish}")
    refused = exported["formulas"]["tables"]["bf16 0 bf16 muon 0"]
    check("a refusal is the trainer's", "--moments bf16 --optimizer muon" in refused, refused)


def test_measured():
    """The measured step is dev/RESULTS.md's: its kernels add up to the step."""
    found = whole()["models"]["measured"]
    total = sum(row["ms"] for row in found["rows"])
    check("the kernels' times", 0.9 < total / found["step"] < 1.1, total)
    check("launches", {row["name"]: row["launches"] for row in found["rows"]}["adamw"] == 1)
    check("each row's work", all(row["work"] > 0 for row in found["rows"]))


RACE = ("__syncthreads();  // the sums of the step before are written", "")


def test_student(folder):
    """A student's launch: right answers; and with a race and a wrong number, which both show."""
    os.chdir(folder)
    right, wrong = Path("my_row_sum.cu"), Path("racing.cu")
    right.write_text(solution("row_sum"))
    wrong.write_text(solution("row_sum").replace(*RACE).replace(
        "out[row] = part[0];", "out[row] = part[0] + (row == 2);"))
    data = recorded(Submission(right))
    [answer] = data["answers"]
    check("right answers, no race", answer["right"] and not answer["wrong"] and not data["race"])
    [number] = [i for i, t in enumerate(data["tensors"]) if t["name"] == "out"]
    bits = [number_at(data, number, i, 0) for i in range(len(answer["truth"]))]
    yield "out", np.array(bits, np.uint32).view(np.float32), np.array(answer["truth"]), 1e-5
    data = recorded(Submission(wrong))
    check("a wrong answer", not data["answers"][0]["right"] and 2 in data["answers"][0]["wrong"])
    check("a race on part", data["race"] and data["race"]["what"].startswith("part["), data["race"])
    lines = data["source"]
    check("the lines of the race", all("part[" in lines[side["line"] - 1]
                                       for side in data["race"]["sides"]), data["race"])
    check("the element's three values", len(data["race"]["values"]) == 3, data["race"])
    path = write_page(Submission(wrong))
    check("the page beside the file", path == "racing.html" and Path(path).exists())


# ---- In a browser


def browser():
    """Chromium, driven by playwright; or the test is skipped."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which(
        "google-chrome")
    if not path:
        pytest.skip("there is no Chromium")
    driver = playwright.sync_playwright().start()
    return driver, driver.chromium.launch(executable_path=path, args=["--no-sandbox"])


class Visit:
    """A page in a browser, with its errors and requests."""

    def __init__(self, chromium, path, **options):
        self.page = chromium.new_page(**options)
        self.errors, self.requests = [], []
        self.page.on("console", lambda message: self.errors.append(message.text)
                     if message.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.add_init_script(SHIFTS)
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelector('#play .bar, #play p')")

    def violations(self):
        self.page.evaluate(Path(AXE).read_text())
        return self.page.evaluate(
            "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.length, v.nodes[0].html]))")

    def end(self, name):
        check(f"{name}: no error in the console", not self.errors, self.errors[:3])
        check(f"{name}: no request", len([url for url in self.requests
                                          if not url.startswith(("data:", "blob:"))]) == 1,
              self.requests)
        self.page.close()


SHIFTS = """window.shifted = 0;
new PerformanceObserver((list) => list.getEntries().forEach((each) => {
  window.shifted += each.value;
}))
  .observe({type: "layout-shift", buffered: true});"""
LINES = """[...document.querySelectorAll("#code button")].map((b) => {
  b.click();
  return [b.dataset.line, b.classList.contains("now")];
})"""
CLICK = """async ([launch, pick]) => {
  if (state.launch !== launch) goTo(launch);
  const cells = [...document.querySelectorAll("#launch .numbers td")].filter(
    (cell) => cell.textContent !== "\\u2013");
  const cell = cells[Math.floor(pick * cells.length)];
  cell.click();
  await drawStory();
  const {arena, word, time} = cell.closest("table").placeOf(cell);
  const {value, worked} = document.querySelector("#story h3").dataset;
  const tensor = tensorAt(arena, word), scale = valuesAt(tensor, time).reduce(
    (most, x) => Number.isNaN(x) ? most : Math.max(most, Math.abs(x)), 0);
  return [tensor.number, word - tensor.start, time, Number(value), Number(worked), scale,
          cell.textContent === shown(Number(value), 3)];
}"""
TOLD = """launches.flatMap((launch, i) => launch.writes.flatMap(([number, low, high]) => {
  const tensor = tensors[number], values = valuesAt(tensor, i);
  const scale = values.reduce((most, x) => Number.isNaN(x) ? most : Math.max(most, Math.abs(x)), 0);
  return [low, (low + high) >> 1, high - 1].map((index) => {
    const {value, found} = storyOf(tensor.arena, tensor.start + index, i);
    return [i, nameOf(tensor), index, value, found, Math.abs(value - found) <= 1e-5 * scale];
  });
}))"""
SLIDE = """[...document.querySelectorAll('input[type="range"]')].map((slider) => {
  const section = slider.closest("section"), before = section.innerHTML;
  slider.value = slider.value === slider.max ? slider.min : slider.max;
  slider.dispatchEvent(new Event("input"));
  slider.dispatchEvent(new Event("change"));
  return [slider.ariaLabel || slider.id, section.innerHTML !== before];
})"""


def test_in_browser(folder):
    """Every line opens, 200 numbers agree with the trainer's, every slider moves, keys walk; no
    error, no request; narrow and wide pages do not scroll sideways."""
    driver, chromium = browser()
    try:
        path = Path(folder) / "step.html"
        path.write_bytes(build.page_of(whole()))
        check("at most 4 MB", path.stat().st_size < program.MOST, path.stat().st_size)
        visit = Visit(chromium, path, viewport=dict(width=1280, height=900))
        paint = visit.page.evaluate("performance.getEntriesByName('first-paint')[0].startTime")
        check("painted, and nothing jumps", paint > 0 and visit.page.evaluate("shifted") < 0.01)
        lines = visit.page.evaluate(LINES)
        wish = {f"{name} {line}" for x in whole()["launches"] for name, line in x["stack"]}
        check("every line opens", all(now for _, now in lines) and
              {line for line, _ in lines} == wish, [line for line, now in lines if not now])
        visit.page.evaluate("goTo(5)")
        visit.page.keyboard.press("n")
        visit.page.keyboard.press("n")
        visit.page.keyboard.press("p")
        check("keys walk", visit.page.evaluate("state.launch") == 6)
        check_clicks(visit.page)
        visit.page.evaluate("goTo(3)")  # a kernel, whose requests have a slider
        visit.page.wait_for_selector("#play input")
        sliders = visit.page.evaluate(SLIDE)
        check("every slider moves", len(sliders) > 7 and all(moved for _, moved in sliders),
              sliders)
        check_models(visit.page)
        if AXE:
            for theme in ("light", "dark"):
                visit.page.evaluate(f"document.documentElement.style.colorScheme = '{theme}'")
                found = visit.violations()
                check(f"axe, {theme}", not found, found)
        visit.end("the page")
        for width in (360, 1280, 2560):
            visit = Visit(chromium, path, viewport=dict(width=width, height=900))
            wide = visit.page.evaluate("document.documentElement.scrollWidth")
            check(f"{width} px wide", wide <= width, wide)
            visit.end(f"{width} px")
        check_student(chromium, Path(folder))
    finally:
        chromium.close()
        driver.stop()


def check_clicks(page):
    """Three numbers of each output; and 200, clicked at random: the page's, those that were
    recorded, and what their stories come to."""
    told = page.evaluate(TOLD)
    check("the stories of all that each launch writes", len(told) > 500 and
          all(right for *_, right in told), [each for each in told if not each[-1]][:5])
    data, pick = whole(), random.Random(2)
    for launch in sorted(pick.choices(range(len(data["launches"])), k=200)):
        number, index, time, value, worked, scale, shown = page.evaluate(
            CLICK, [launch, pick.random()])
        tensor = data["tensors"][number]
        bits = np.array(number_at(data, number, index, time), np.uint32)
        wish = bits.view(np.float32 if tensor["kind"] == "f" else np.int32)
        check("the cell shows it", shown)
        check(f"{tensor['name']}[{index}] behind launch {time}", value == wish, f"{value} {wish}")
        check(f"the story of {tensor['name']}[{index}]", abs(worked - wish) <= 1e-5 * scale,
              f"{worked} {wish}")


def check_models(page):
    """What the page computes of 50 models is what the trainer's tables have, up to 8 GPUs; and at
    its own sizes the measured step takes as long as it was measured."""
    pick = random.Random(3)
    for _ in range(50):
        chosen, asked = drawn_model(pick, pick.choice((1, 2, 4, 8)))
        asked["V"] = pick.randint(2, 10**5)
        found = page.evaluate("(asked) => modelOf(asked)",
                              asked | {k: str(v) for k, v in chosen.items()} | dict(gpu="H200"))
        asked |= dict(Vp=padded(asked["V"]), maxT=max(asked["T"], Config.maxT))
        tables = formulas.model_class(chosen, asked["G"]).tables(
            Config(**{name: asked[name] for name in formulas.SIZES}), formulas.device_of(chosen),
            asked["B"], asked["T"])
        wish = sum(offsets(table)[-1] for table in tables.values())
        check(f"{asked} {chosen}", found["total"] == wish and found["parameters"] == sum(
            row.size for row in tables["gradients"]) and found["seconds"] > 0, (found, wish))
    step = page.evaluate("rowsAt(FIRST).reduce((sum, row) => sum + row.ms, 0)")
    check("the measured step", abs(step - sum(
        row["ms"] for row in whole()["models"]["measured"]["rows"])) < 1e-9, step)


def check_student(chromium, folder):
    """The page of a student's launch: cells tell who touched them, a race has two lanes, and a step
    goes on."""
    os.chdir(folder)
    Path("my_row_sum.cu").write_text(solution("row_sum").replace(*RACE))
    visit = Visit(chromium, folder / write_page(Submission("my_row_sum.cu")))
    visit.page.locator("#who td button").nth(1).click()
    text = visit.page.locator("#who ol").inner_text()
    check("block 1 stores the second sum", re.search("block 1, thread 0.*stores it in line", text,
                                                     re.S), text)
    lanes = visit.page.locator(".race tbody tr").all_inner_texts()
    check("each access in its lane, in turn", len(lanes) == 5 and re.search(
        "reads it|writes it", lanes[1]) and re.search("reads it|writes it", lanes[3]), lanes)
    visit.page.get_by_text("step", exact=True).click()
    check("a step", visit.page.evaluate("play.at") == 1)
    if AXE:
        check("axe, a student's page", not visit.violations(), visit.violations())
    visit.end("a student's page")
