"""Test dev/tools/plot.py: what it reads, and the lines, ticks and words of its charts."""
import os
import re
import sys
import warnings
from unittest import mock

import numpy as np
import pytest

from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.trainings import call, check_error
from dev.tools.plot import draw, figures, image_of, parse, read_log, read_run, short, smoothed

LOG = """s:0 tel:11.0092
s:0 trl:11.0091 lr:0.000001 norm:15.37
s:1 trl:10.5000 lr:0.000002 norm:9.00
s:2 tel:9.7000
s:2 eval:0.2550
s:2 trl:9.8000 lr:0.000003 norm:nan
s:3 trl:9.1000 lr:0.000004 norm:4.25
s:2 tel:9.7500
s:2 trl:9.9000 lr:0.000003 norm:6.50
s:4 tel:8.5000
s:4 eval:0.2600
"""  # resumed at step 2: what was logged for step 3 stays
HELD = {"loss": {0: 11.0091, 1: 10.5, 2: 9.9, 3: 9.1}, "val loss": {0: 11.0092, 2: 9.75, 4: 8.5},
        "HellaSwag": {2: 0.255, 4: 0.26}, "norm": {0: 15.37, 1: 9, 2: 6.5, 3: 4.25},
        "lr": {0: 1e-6, 1: 2e-6, 2: 3e-6, 3: 4e-6}}
# The last line is not whole, as of a run that still goes on.
PRINTED = """device       | the CPU, 2 cores, fp32 (--device, --dtype)
step    1/4 | loss 11.009100 | norm 15.3700 | lr 1.00e-06 |   206.24 ms |     1,241 tok/s | 256 tokens
val loss 9.700000
step    2/4 | loss 10.500000 | norm  9.0000 | lr 2.00e-06 |   199.18 ms | 1,234,567 tok/s | 45.1% of peak | 512 tokens
step    4/4 | loss 9.1 (+nanz)| norm 4.2 (+nanz)| lr 4.00e-06 | 300.00 ms | 30.2% bf16 MFU | 228000 tok/s
step    4/4 | loss 9.1 | norm 4.2 | lr 4.00e-06 | 300.00 ms |     9 tok/s | 1,024 tok"""  # noqa: E501
SPEEDS = {"tok/s": {0: 1241, 1: 1234567, 3: 228000}}


def run_of(folder, text=LOG, name="run", printed=""):
    """The Run of a folder with this main.log and, if something was printed, with this log."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "main.log").write_bytes(text if isinstance(text, bytes) else text.encode())
    if printed:
        (folder / name / "log").write_text(printed)
    return read_run(folder / name)


def log_of(*values, line="s:{} tel:{}\n"):
    return "".join(map(line.format, range(len(values)), values))


def held(run):
    return {name: dict(zip(*points)) for name, points in run.series.items()}


@fast
def test_logs(folder):
    """All lines, resumed runs, and what is half written or wrong."""
    run = run_of(folder)
    check("a log", held(run) == HELD and (run.name, run.skipped, run.last) == ("run", "", 4), run)
    check("by its own name", held(read_run(folder / "run/main.log")) == HELD)
    nan = run_of(folder, "s:0 trl:nan lr:0.1 norm:inf\ns:1 trl:-nan lr:0.1 norm:-1.5\n"
                 "s:2 trl:nan lr:0.1 norm:0.00\n").series  # the last is a step without targets
    yield "NaN", np.isnan(nan["loss"][1]), [True, True], EXACT
    yield "an infinite value", nan["norm"][1], np.array([np.inf, -1.5, 0]), EXACT
    for text, wish in (
            (f"{LOG}s:5 tel:3.", ""), ("\ufeff" + LOG.replace("\n", "\r\n"), ""),
            (f"{LOG}s:5 tel\n", "line 12"), (f"{LOG}s:5 tel:abc\n", "line 12"),
            (f"\nx\n{LOG}s:5\n", "line 2 and 1 more"), (f"s:1 trl:3.0 lr:0\n{LOG}", "line 1"),
            (f"s:0 tel:1.0 s:1 tel:2.0\n{LOG}", "line 1"),
            (LOG.encode() + b"s:5 tel:\xff\xfe.1\n", "line 12"),
            (f"{LOG}{40 * chr(0)}\n", "line 12"), (f"{LOG}s:{'9' * 400} tel:3.0\n", "line 12"),
            (f"{LOG}s:{'9' * 5000} tel:3.0\n", "line 12"),  # which no int takes
            (f"{LOG}s:4000000000000 tel:3.0\n", "line 12"),  # the axis would be endless
            (f"{LOG}s:5 trl:1.0 lr:1.0 norm:-1.7e308\n", "line 12")):  # more than fp32 holds
        run = run_of(folder, text)
        wish = f".*main.log: skipped {wish}, which main.log does not have" if wish else ""
        check(f"{text[-40:]!r}: {wish or 'nothing is skipped'}", held(run) == HELD and re.fullmatch(
            wish, run.skipped), run.skipped[:200])
    for wish, text in (("has no whole line yet; expected lines such as", ""),
                       ("has no whole line yet", "s:0 tel:3.1"),
                       ("has no whole line yet", "\n\n"),
                       ("line 2 is 'tel: 3'; expected", "\ntel: 3\nx\n")):
        (folder / "run/main.log").write_text(text)
        check_refusal("log", f"main.log: {wish}", read_log, folder / "run/main.log")
    check_refusal("log", "absent: could not be read .*expected a folder with a main.log", read_run,
                  folder / "absent")


@fast
def test_tokens_and_speed(folder):
    """Tokens in a step come from a flag, else the newest run_*.json, else what was printed; speeds
    from that alone."""
    run, path = run_of(folder, printed=PRINTED), folder / "run"
    check("what was printed", held(run) == HELD | SPEEDS and run.tokens == 256, run)
    flags = '{{"flags": {{"total_batch": {}, "train_data": {}}}}}'.format
    for number, tokens, data, wish in (
            (0, 111, '"data/fineweb_train_*.bin"', (111, "fineweb")),
            (250, 222, '"data/edu_fineweb_train_*.bin"', (222, "edu")),
            (300, "null", "null", (256, "fineweb"))):  # by HellaSwag
        (path / f"run_{number:08d}.json").write_text(flags(tokens, data))
        run = read_run(path)
        check(f"the newest run's flags, {data}", (run.tokens, run.data) == wish, run)
    check("the flag first", read_run(path, 333).tokens == 333)
    check("no data is known", run_of(folder, "s:0 tel:3.0\n", "bare").data is None)
    wish = "; expected JSON such as .*total_batch.*"
    for content, wish in (
            *((text, wish) for text in ("{", "[]", '{"flags": 3}', "{}", "[" * 100000, "\0",
                                        flags("9" * 5000, 0))),
            *((flags(value, 0), ", total_batch is ") for value in (
                '"many"', "[1]", "-3", "1.5", "true", "9" * 400))):
        (path / "run_00000400.json").write_text(content)
        run = read_run(path)
        check(f"{content[:40]} is ignored", run.tokens == 256 and re.search(
            f"run_00000400.json: ignored{wish}", run.skipped), run.skipped)


@fast
def test_numbers(folder):
    """Smoothing, against the plainest loop; and counts for people."""
    values = np.random.default_rng(5).normal(size=40)
    values[[3, 4, 5, 20, 39]] = np.nan, np.nan, np.nan, np.inf, np.nan
    for width in (1, 3, 7):
        for i, found in enumerate(smoothed(values, width)):
            reach = min(i, width // 2)  # as many before as after, where the line begins
            near = values[i - reach : i + reach + 1]
            near = near[np.isfinite(near)]
            wish = sum(near) / len(near) if len(near) else np.nan
            check(f"smoothed by {width}: {i}", np.isclose(found, wish, 1e-14, 1e-14, True), found)
    for number, wish in ((0, "0"), (999, "999"), (1000, "1k"), (524288, "524.3k"), (2.5e9, "2.5B"),
                         (-3e6, "-3M"), (1.5e12, "1.5T"), (0.25, "0.25")):
        check(f"{number} for people", short(number) == wish, short(number))


@fast
def test_reference_lines(folder):
    """Those that a run has passed, and the next; by flags, by the data."""
    for name, *cases in (
            ("HellaSwag", ((0.25, 0.26), None, (), [0.2945]),
             ((0.25, 0.30), None, (), [0.2945, 0.3752]), ((0.31, 0.19), "none", (), []),
             ((0.5,), "edu", (), [0.2945, 0.3752, 0.4320, 0.4889]), ((0.1,), None, (), []),
             ((0.25,), None, ["774M"], [0.4320]), (("nan", 0.28), None, (), [0.2945])),
            ("val loss", ((9.0, 4.0), None, (), []), ((9.0, 4.0), "none", ["124M"], []),
             ((9.0, 4.5), "fineweb", (), []), (("nan",), "fineweb", (), []),
             ((3.25, 3.9), "fineweb", (), [3.424958, 3.083089, 3.2722]),
             ((4.0,), "edu", (), [3.2924]),
             ((9.0,), "fineweb", ["350M", "124M"], [3.424958, 3.083089, 3.2722]))):
        for scores, data, sizes, wish in cases:
            log = log_of(*scores)
            run = run_of(folder, log if name == "val loss" else log.replace("tel", "eval"))
            found = [value for value, _ in figures(name, [run], data, sizes)]
            check(f"{name} {scores}, {data}, {sizes}", found == wish, found)
    runs = [run_of(folder, f"s:0 eval:{score}\n") for score in (0.29, 0.4)]
    check("of several runs the best", len(figures("HellaSwag", runs, None, None)) == 3)
    found = figures("val loss", [run_of(folder, log_of(3.3))._replace(data="edu")], None, None)
    check("by what a run was trained on", found == [(3.2924, "OpenAI's 124M, 3.2924")], found)


# ---- The chart


def lines_of(figure):
    """{id: line} of the lines of all panels."""
    return {line.get_gid(): line for ax in figure.axes for line in ax.get_lines()}


def texts_of(figure):
    return {text.get_text() for text in figure.findobj(lambda part: hasattr(part, "get_text"))}


def numbers_below(ax):
    """[(number, place)] of the ticks of an x axis, within the panel."""
    low, high = ax.get_xlim()
    return [(float(text.rstrip("kMB")) * {"k": 1e3, "M": 1e6, "B": 1e9}.get(text[-1], 1), place)
            for label in ax.get_xticklabels()
            if low <= (place := label.get_position()[0]) <= high and (text := label.get_text())]


def test_charts(folder):
    """Each line has its points where the data are, in steps and in tokens; and the same bytes
    again."""
    runs = [run_of(folder, printed=PRINTED),
            run_of(folder, LOG.replace("s:4", "s:8"), "two $x_1$ <&>")]
    for x, per_step in (("steps", 1), ("tokens", 256)):
        figure = draw([run._replace(tokens=256) for run in runs], x, "fineweb", ["124M"])
        texts, lines = texts_of(figure), lines_of(figure)
        wish = {f"run{i}-{name.replace(' ', '-')}": points for i, run in enumerate(runs)
                for name, points in run.series.items()}
        drawn = {name for name in lines if name.startswith("run")}
        check("the lines of both runs", drawn == wish.keys(), sorted(drawn ^ wish.keys()))
        for name, (steps, values) in wish.items():
            found = lines[name].get_xydata()
            yield f"{name} in {x}", found, np.stack([steps * per_step, values], 1), EXACT
            pixels = lines[name].get_transform().transform(found)
            inside = lines[name].axes.transAxes.inverted().transform(pixels)
            check(f"{name}: in its panel", (abs(inside - 0.5) < 0.501).all(), inside)
        losses = {lines[f"run{i}-{name}"].axes for name in ("loss", "val-loss") for i in (0, 1)}
        level = lines["figure-OpenAI's 124M, 3.4250"]
        check("one axis for losses of all runs, and OpenAI's", losses == {level.axes})
        yield "OpenAI's loss", level.get_ydata(), np.full(2, 3.424958), EXACT
        named = {"val loss 8.5000  run", "val loss 8.5000  two $x_1$ <&>", "OpenAI's 124M, 3.4250",
                 "llm.c's 124M, 3.2722", "OpenAI's 124M, 0.2945", x}
        check("the runs' names and last values, and the axis", named <= texts, texts)
    for form, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        one, two = (image_of(draw(runs, "steps"), form) for _ in range(2))
        check(f"{form}: the same bytes again, without a date",
              one == two and one.startswith(start) and b"dc:date" not in one)
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        check_refusal("chart", "matplotlib is not installed.*pip install -r dev/requirements.txt",
                      draw, runs, "steps")


@pytest.fixture
def drawn(folder):
    """A function that draws runs of these logs (a text, or Runs) and returns the figure and its
    lines. It checks what a person has to be able to see: numbers on each x axis, which are those of
    their places, and names within the picture."""
    def drawn(what, ticks=4, x="steps"):
        runs = [run_of(folder, what)] if isinstance(what, str) else what
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", UserWarning)
            figure = draw(runs, x, "none")
            figure.draw_without_rendering()
        warned = [w for w in warned if w.category is UserWarning]
        names = figure.legends[0].get_window_extent()
        check("within the picture", 0 <= names.x0 and names.x1 <= figure.bbox.x1 and not warned,
              (names, warned))
        for ax in figure.axes:
            numbers = numbers_below(ax)
            check("numbers on each x axis", len(numbers) >= ticks and all(
                abs(number - place) <= 1e-3 * place for number, place in numbers), numbers)
        return figure, lines_of(figure)
    return drawn


def test_pictures(folder, drawn):
    """How lines are drawn: smoothed, as dots, by logarithms; and what is left out."""
    long = run_of(folder, "".join(f"s:{s} trl:{3 + 8 / (s + 1):.4f} lr:0.1 norm:1\n"
                                  for s in range(601)), printed=PRINTED)
    figure, lines = drawn([long], x="tokens")
    check("smoothed lines over pale ones, and which says over how many steps",
          {"run0-loss-smoothed", "run0-norm-smoothed"} <= lines.keys() and "run0-lr-smoothed" not in
          lines and "line: training, mean of 13 steps" in texts_of(figure), sorted(lines))
    _, top = lines["run0-loss"].axes.get_ylim()
    check("its first 3% leave the panel", 3.4 < top < 4, top)
    figure, _ = drawn([long._replace(name="many settings in its name " * 8)] * 2)
    check("runs with the same losses are told", any(
        "(same losses as many settings i)" in text for text in texts_of(figure)), texts_of(figure))
    _, lines = drawn([long._replace(name=f"run {i}") for i in range(12)])
    colours = {str(lines[f"run{i}-lr"].get_color()) for i in range(12)}
    check("twelve runs have twelve colours", len(colours) == 12, colours)
    _, lines = drawn(log_of(50, 20, 5, 2.5, 1, line="s:{} trl:3 lr:0 norm:{}\n"))
    check("norms far apart are drawn by their logarithms",
          lines["run0-norm"].axes.get_yscale() == "log")
    gaps = log_of("nan", 2.5, 2.25, "inf", 2, 1.5, line="s:{} trl:{} lr:0 norm:nan\n")
    path = re.search(rb'id="run0-loss">\s*<path d="([^"]*)', image_of(drawn(gaps)[0], "svg"))[1]
    check("what is no finite number is left out", len(re.findall(b"[ML] ", path)) == 4, path)
    _, lines = drawn("s:0 trl:3 lr:0 norm:1\n", ticks=1)
    dots = [lines[f"run0-{name}"].get_marker() for name in ("loss", "norm", "lr")]
    check("a single step is a dot", dots == ["o", "o", "o"], dots)
    figure, lines = drawn(log_of(3.5, 3.4), ticks=1)
    numbers = [number for number, _ in numbers_below(figure.axes[0])]
    check("steps are whole numbers", all(number % 1 == 0 for number in numbers), numbers)
    beside = drawn([run_of(folder, name="no \udcff UTF-8 \x1b")])[1]
    joined = [found["run0-val-loss"].get_linestyle() for found in (beside, lines)]
    check("validation is dots beside training, and joined alone", joined == ["None", "-"], joined)
    for text, name in ((log_of(3.5, "nan"), "val loss nan  run"),
                       (f"{LOG}s:5 trl:nan lr:1 norm:nan\n", "loss nan  run")):
        texts = texts_of(drawn(text, ticks=1)[0])
        check(f"a run that ends in NaN says so: {name}", name in texts, texts)


def test_command_line(folder):
    """Charts, and one line for each mistake."""
    run_of(folder, name="one")
    run_of(folder, LOG + "x\n", "wrong")
    (folder / "more").mkdir()
    run_of(folder / "more", name="one")
    os.chdir(folder)

    def plotted(*arguments):
        found = call(*arguments, "-o", "a.svg", program="dev.tools.plot")
        return found, {*re.findall("<text[^>]*>([^<]*)", (folder / "a.svg").read_text())}

    found, texts = plotted("one", "more/one", "--tokens-per-step", "1000", "wrong")
    check("three runs", found == (
        0, "wrote a.svg\n",
        "WARNING: wrong/main.log: skipped line 12, which main.log does not have\n"), found)
    wish = {"val loss 8.5000  one", "val loss 8.5000  more/one (same losses as one)", "tokens"}
    check("runs of one name have their paths'", wish <= texts, texts)
    _, texts = plotted("one", "--tokens-per-step", "1000", "--x", "steps")
    check("--x steps", "steps" in texts and "tokens" not in texts, texts)
    for wish, *arguments in (
            ("absent: could not be read", "absent"),
            ("-o a.pdf: expected .*.svg or .png", "one", "-o", "a.pdf"),
            ("--x tokens: .*give --tokens-per-step", "one", "--x", "tokens"),
            ("no RUN is given", "-o", "a.svg"),
            ("--model 3B: expected some of", "one", "--model", "3B"),
            ("a.svg", "one", "-o", "a.svg/a.svg")):
        check_error(wish, *arguments, early=True, program="dev.tools.plot")
    flags = parse(["one", "--model", "124M,350M", "two", "-o", "a.svg", "three"])
    check("flags between runs", flags.runs == ["one", "two", "three"] and
          flags.model == ["124M", "350M"], flags)
