"""Test dev/tools/plot.py: what it reads, and where the lines and ticks of its SVGs are."""
import os
import re
import sys
import warnings
import xml.etree.ElementTree as ET
from unittest import mock

import numpy as np

from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.trainings import call, check_error
from dev.tools.plot import TITLES, draw, figures, parse, read_log, read_run, short, smoothed

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
HELD = {"loss": ([0, 1, 2, 3], [11.0091, 10.5, 9.9, 9.1]),
        "val loss": ([0, 2, 4], [11.0092, 9.75, 8.5]),
        "HellaSwag": ([2, 4], [0.255, 0.26]), "norm": ([0, 1, 2, 3], [15.37, 9, 6.5, 4.25]),
        "lr": ([0, 1, 2, 3], [1e-6, 2e-6, 3e-6, 4e-6])}
# The last line is not whole, as of a run that still goes on.
PRINTED = """device       | the CPU, 2 cores, fp32 (--device, --dtype)
step    1/4 | loss 11.009100 | norm 15.3700 | lr 1.00e-06 |   206.24 ms |     1,241 tok/s | 256 tokens
val loss 9.700000
step    2/4 | loss 10.500000 | norm  9.0000 | lr 2.00e-06 |   199.18 ms | 1,234,567 tok/s | 45.1% of peak | 512 tokens
step    4/4 | loss 9.1 (+nanz)| norm 4.2 (+nanz)| lr 4.00e-06 | 300.00 ms | 30.2% bf16 MFU | 228000 tok/s
step    4/4 | loss 9.1 | norm 4.2 | lr 4.00e-06 | 300.00 ms |     9 tok/s | 1,024 tok"""  # noqa: E501
SPEEDS = {"tok/s": ([0, 1, 3], [1241, 1234567, 228000])}


def write(folder, log=LOG, **files):
    folder.mkdir(exist_ok=True)
    (folder / "main.log").write_bytes(log if isinstance(log, bytes) else log.encode())
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def run_of(folder, log, name="run"):
    return read_run(write(folder / name, log))


def of_scores(folder, scores, name="HellaSwag"):
    kind = "eval" if name == "HellaSwag" else "tel"
    return run_of(folder, "".join(f"s:{i} {kind}:{x}\n" for i, x in enumerate(scores)), "scores")


def same(series, held):
    return series.keys() == held.keys() and all(
        np.array_equal(series[name][i], np.float64(held[name][i])) for name in held for i in (0, 1))


# ---- Reading


@fast
def test_logs(folder):
    """All lines, resumed runs, and what is half written or wrong."""
    run = run_of(folder, LOG)
    check("a log", same(run.series, HELD) and
          (run.name, run.tokens, run.skipped, run.last) == ("run", None, "", 4), run)
    check("by its own name", same(read_run(folder / "run/main.log").series, HELD))
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
        said = re.search(rf"main.log: skipped {wish}, which", run.skipped) if wish else True
        check(f"{text[-40:]!r}: {wish or 'nothing is skipped'}", same(run.series, HELD) and said and
              bool(run.skipped) == bool(wish), run.skipped[:200])
    for wish, text in (("has no whole line yet; expected lines such as", ""),
                       ("has no whole line yet", "s:0 tel:3.1"),
                       ("has no whole line yet", "\n\n"),
                       ("line 2 is 'tel: 3'; expected", "\ntel: 3\nx\n")):
        path = write(folder / "run", text) / "main.log"
        check_refusal("log", f"main.log: {wish}", read_log, path)
    check_refusal("log", "absent: could not be read .*expected a folder with a main.log", read_run,
                  folder / "absent")
    (folder / "empty").mkdir()
    check_refusal("log", "empty/main.log: could not be read", read_run, folder / "empty")


@fast
def test_tokens_and_speed(folder):
    """Tokens in a step come from a flag, else the newest run_*.json, else what was printed; speeds
    from that alone."""
    one = write(folder / "one")
    (one / "log").write_text(PRINTED)
    run = read_run(one)
    check("what was printed", same(run.series, HELD | SPEEDS) and run.tokens == 256, run)
    for number, flags, wish in (
            (0, '"total_batch": 111, "train_data": "data/fineweb_train_*.bin"', (111, "fineweb")),
            (250, '"total_batch": 222, "train_data": "data/edu_fineweb_train_*.bin"', (222, "edu")),
            (300, '"total_batch": null, "train_data": null', (256, "fineweb"))):  # by HellaSwag
        (one / f"run_{number:08d}.json").write_text(f'{{"flags": {{{flags}}}}}')
        run = read_run(one)
        check(f"the newest run's flags, {flags}", (run.tokens, run.data) == wish, run)
    check("the flag first", read_run(one, 333).tokens == 333)
    check("no data is known", run_of(folder, "s:0 tel:3.0\n").data is None)
    flags = '{{"flags": {{"total_batch": {}}}}}'.format
    wish = "; expected JSON such as .*total_batch.*"
    for content, wish in (*((text, wish) for text in (
            "{", "[]", '{"flags": 3}', "{}", "[" * 100000, "\0", flags("9" * 5000))),
            *((flags(value), ", total_batch is ") for value in (
                '"many"', "[1]", "-3", "1.5", "true", "9" * 400))):
        (one / "run_00000400.json").write_text(content)
        run = read_run(one)
        check(f"{content[:40]} is ignored", run.tokens == 256 and re.search(
            f"run_00000400.json: ignored{wish}", run.skipped), run.skipped)


# ---- Numbers


@fast
def test_numbers(folder):
    """Smoothing, against the plainest loop; and counts for people."""
    values = np.random.default_rng(5).normal(size=40)
    values[[3, 4, 5, 20, 39]] = np.nan, np.nan, np.nan, np.inf, np.nan
    for width in (1, 3, 7):
        wish = []
        for i in range(40):
            reach = min(i, width // 2)  # as many before as after, where the line begins
            near = values[i - reach : i + reach + 1]
            near = near[np.isfinite(near)]
            wish.append(sum(near) / len(near) if len(near) else np.nan)
        found = smoothed(values, width)
        yield f"smoothed by {width}: NaN", np.isnan(found), np.isnan(wish), EXACT
        yield f"smoothed by {width}", np.nan_to_num(found), np.nan_to_num(wish), 1e-14
    for number, wish in ((0, "0"), (999, "999"), (1000, "1k"), (524288, "524.3k"), (2.5e9, "2.5B"),
                         (-3e6, "-3M"), (1.5e12, "1.5T"), (0.25, "0.25")):
        check(f"{number} for people", short(number) == wish, short(number))


@fast
def test_reference_lines(folder):
    """Those that a run has passed, and the next; by flags, by the data."""
    for name, scores, data, sizes, wish in (
            ("HellaSwag", (0.25, 0.26), None, None, [0.2945]),
            ("HellaSwag", (0.25, 0.30), None, None, [0.2945, 0.3752]),
            ("HellaSwag", (0.31, 0.19), "none", None, []),
            ("HellaSwag", (0.31,), "edu", None, [0.2945, 0.3752]),
            ("HellaSwag", (0.5,), None, None, [0.2945, 0.3752, 0.4320, 0.4889]),
            ("HellaSwag", (0.1,), None, None, []),
            ("HellaSwag", (0.25,), None, ["774M"], [0.4320]),
            ("HellaSwag", ("nan", 0.28), None, None, [0.2945]),
            ("val loss", (9.0, 4.0), None, None, []),
            ("val loss", (9.0, 4.0), "none", ["124M"], []),
            ("val loss", (9.0, 4.5), "fineweb", None, []),
            ("val loss", (3.25, 3.9), "fineweb", None, [3.424958, 3.083089, 3.2722]),
            ("val loss", (2.0,), "fineweb", None, [3.424958, 3.083089, 3.000580, 2.831273, 3.2722]),
            ("val loss", (4.0,), "edu", None, [3.2924]),
            ("val loss", ("nan",), "fineweb", None, []),
            ("val loss", (9.0,), "fineweb", ["350M", "124M"], [3.424958, 3.083089, 3.2722])):
        found = figures(name, [of_scores(folder, scores, name)], data, sizes)
        check(f"{name} {scores}, {data}, {sizes}", [value for value, _ in found] == wish, found)
    runs = [of_scores(folder, (score,)) for score in (0.29, 0.4)]
    check("of several runs the best", len(figures("HellaSwag", runs, None, None)) == 3)
    loss = of_scores(folder, (3.3,), "val loss")._replace(data="edu")
    found = figures("val loss", [loss], None, None)
    check("by what a run was trained on", found == [(3.2924, "OpenAI's 124M, 3.2924")], found)


# ---- The chart


def lines_of(svg):
    """{id: points (n,2), y upwards} of the lines of an SVG."""
    found = {}
    for g in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        if g.get("id", "").startswith(("run", "figure-")):
            path = g.find("{*}path")
            dots = [(dot.get("x"), dot.get("y")) for dot in g.iterfind(".//{*}use")]
            drawn = re.findall(r"[ML] (\S+) (\S+)", "" if path is None else path.get("d", ""))
            found[g.get("id")] = np.float64(dots or drawn).reshape(-1, 2) * (1, -1)
    return found


def words_of(svg):
    """[(text, x, left, top, right, bottom)] of all that is written, with letters as wide as they
    are on average."""
    found = []
    for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        style, x, y = text.get("style"), float(text.get("x")), float(text.get("y"))
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        width = 0.58 * size * len(text.text)
        anchor = re.search(r"text-anchor: (\w+)", style)[1]
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        found.append((text.text, x, left, y - 0.8 * size, left + width, y + 0.1 * size))
    return found


def texts_of(svg):
    return {text for text, *_ in words_of(svg)}


def misfit(found, wish):
    """How far, in units of the drawing, numbers are from the best straight-line function of what
    was found."""
    if np.ptp(wish) == 0:
        return np.ptp(found)
    a, b = np.polyfit(wish, found, 1)
    return np.abs(a * np.float64(wish) + b - found).max() + (a <= 0) * 1e9


def test_charts(folder):
    """Each line has its points where the data are, in steps and in tokens; and the same bytes
    again."""
    one = write(folder / "one")
    (one / "log").write_text(PRINTED)
    runs = [read_run(one), run_of(folder, LOG.replace("s:4", "s:8"), "two $x_1$ <&>")]
    svg = draw(runs, "steps", "fineweb", ["124M"])
    found = lines_of(svg)
    wish = {f"run{i}-{name.replace(' ', '-')}": run.series[name] for i, run in enumerate(runs)
            for name in run.series}
    drawn = {name for name in found if name.startswith("run")}
    check("the lines of both runs", drawn == wish.keys(), sorted(drawn ^ wish.keys()))
    for name, (steps, values) in wish.items():
        points = found[name]
        off = max(misfit(points[:, 0], steps), misfit(points[:, 1], values))
        check(f"{name}: {len(steps)} points in their places", off < 1e-3, f"off by {off:.0e}")
    losses = [f"run{i}-{name}" for name in ("loss", "val-loss") for i in (0, 1)]
    everything = np.concatenate([wish[name][1] for name in losses])
    order = np.concatenate([found[name][:, 1] for name in losses])
    check("one axis for losses of all runs", misfit(order, everything) < 1e-3)
    level = found["figure-OpenAI's 124M, 3.4250"][:, 1]
    a, b = np.polyfit(everything, order, 1)
    check("OpenAI's loss", np.abs(a * 3.424958 + b - level).max() < 1e-2, level)
    named = {"val loss 8.5000  one", "val loss 8.5000  two $x_1$ <&>", "OpenAI's 124M, 3.4250",
             "llm.c's 124M, 3.2722", "OpenAI's 124M, 0.2945"}
    check("the runs' names and last values", named <= texts_of(svg), texts_of(svg))
    for x, scale in (("steps", 1), ("tokens", 256000)):
        svg = draw([read_run(one, 256000)], x)
        a, b = np.polyfit(np.arange(4) * scale, lines_of(svg)["run0-lr"][:, 0], 1)
        ticks = [(float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1), at)
                 for text, at, *_ in words_of(svg) if re.fullmatch(r"[\d.]+[kM]?", text)]
        hits = {value for value, at in ticks if value and abs(a * value + b - at) < 0.6}
        check(f"ticks in {x}", len(hits) >= 3 and max(hits) >= 3 * scale, hits)
        check(f"the axis counts {x}", x in texts_of(svg))
    inside = []  # points of each line in the rectangle of its panel
    root = ET.fromstring(draw(runs, "steps", "fineweb", ["124M"]))
    for path in root.iterfind(".//{*}path[@clip-path]"):
        rect = root.find(f".//{{*}}clipPath[@id='{path.get('clip-path')[5:-1]}']/{{*}}rect")
        left, top, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        points = np.float64(re.findall(r"[ML] (\S+) (\S+)", path.get("d"))) - (left, top)
        inside.append(bool(((points >= -1e-3) & (points <= (width + 1e-3, height + 1e-3))).all()))
    check("nothing leaves its panel", len(inside) > 10 and all(inside), inside)
    for form, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        one, two = (draw(runs, "steps", form=form) for _ in range(2))
        check(f"{form}: the same bytes again, without a date",
              one == two and one.startswith(start) and b"dc:date" not in one)
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        check_refusal("chart", "matplotlib is not installed.*pip install -r dev/requirements.txt",
                      draw, runs, "steps")


def test_shapes(folder):
    """How lines are drawn: smoothed, as dots, by logarithms; and what is left out."""
    def drawn(run):
        svg = draw([run], "steps", "none")
        return lines_of(svg), ET.fromstring(svg), texts_of(svg)

    lines, _, texts = drawn(run_of(folder, "".join(
        f"s:{s} trl:{3 + 8 / (s + 1):.4f} lr:0.1 norm:{1 + 40 * (s < 5):.2f}\n"
        for s in range(600))))
    check("a long run: smoothed lines over pale ones",
          {"run0-loss-smoothed", "run0-norm-smoothed"} <= lines.keys() and
          "run0-lr-smoothed" not in lines, sorted(lines))
    numbers = [float(text) for text in texts if re.fullmatch(r"\d\.\d+", text)]
    check("a long run: its first 3% leave the panel", 3.3 < max(numbers) < 4, numbers)
    norms = 50, 20, 5, 2.5, 1
    log = "".join(f"s:{i} trl:3 lr:0 norm:{norm}\n" for i, norm in enumerate(norms))
    points = drawn(run_of(folder, log))[0]["run0-norm"]
    check("norms far apart are drawn by their logarithms",
          misfit(points[:, 1], np.log(norms)) < 1e-3)
    lines, *_ = drawn(run_of(folder, "".join(
        f"s:{i} trl:{loss} lr:0 norm:nan\n"
        for i, loss in enumerate(("nan", 2.5, 2.25, "inf", 2, 1.5)))))
    check("what is no finite number is left out",
          [len(lines[f"run0-{name}"]) for name in ("loss", "lr", "norm")] == [4, 6, 0])
    _, root, _ = drawn(run_of(folder, "s:0 trl:3 lr:0 norm:1\n"))
    dots = [len(root.findall(f".//{{*}}g[@id='run0-{name}']//{{*}}use"))
            for name in ("loss", "norm", "lr")]
    check("a single step is a dot", dots == [1, 1, 1], dots)
    for name, scores in (("HellaSwag", (0.3,)), ("val loss", (3.5, 3.4))):
        lines, alone, _ = drawn(of_scores(folder, scores, name))
        check(f"{name} alone", len(lines[f"run0-{name.replace(' ', '-')}"]) == len(scores))
    lines, beside, _ = drawn(run_of(folder, LOG))
    joined = [root.find(".//{*}g[@id='run0-val-loss']/{*}path") is not None
              for root in (beside, alone)]
    check("validation is dots beside training, and joined alone", joined == [False, True], joined)
    check("no figures are asked for", not [name for name in lines if "figure" in name])
    for run, name in ((of_scores(folder, (3.5, 3.4, "nan"), "val loss"), "val loss nan  scores"),
                      (run_of(folder, f"{LOG}s:5 trl:nan lr:1 norm:nan\n"), "loss nan  run")):
        texts = drawn(run)[2]
        check(f"a run that ends in NaN says so: {name}", name in texts, texts)
    named = run_of(folder, LOG, "no \udcff UTF-8 \x1b")
    check("a name that is no text can be drawn", drawn(named))


def collisions(svg):
    """Pairs of texts that overlap, and texts that leave the picture."""
    words = [(text, *box) for text, _, *box in words_of(svg)]
    *_, width, height = map(float, ET.fromstring(svg).get("viewBox").split())
    return [(a[0], b[0]) for i, a in enumerate(words) for b in words[:i]
            if a[1] < b[3] and b[1] < a[3] and a[2] < b[4] and b[2] < a[4]] + [
        word for word in words
        if word[1] < -5 or word[2] < 0 or word[3] > width + 10 or word[4] > height]


def test_pictures(folder):
    """What a person has to be able to see: numbers on each x axis, and words apart."""
    steps = "".join(f"s:{s} trl:{3 + 8 / (s / 9 + 1):.4f} lr:0.000{s % 7} "
                    f"norm:{1 + 40 * (s < 5):.2f}\n" + (
        f"s:{s} tel:{3.2 + 8 / (s / 9 + 1):.4f}\ns:{s} eval:{0.25 + s / 50000:.4f}\n"
        if s % 50 == 0 else "")
        for s in range(601))
    flags = '{"flags": {"total_batch": 524288, "train_data": "fineweb"}}'
    letters = "a run with many settings in its name " * 7
    few = [read_run(write(folder / "run", steps, run_00000000_json=flags))]
    (folder / "run" / "log").write_text(PRINTED)
    with_speed = [read_run(folder / "run")]
    short_runs = [run_of(folder, "".join(steps.splitlines(True)[:n]), "short") for n in (3, 6)]
    two = [run._replace(name=f"{i} {letters[:200]}") for i, run in enumerate(few * 2)]
    many = [run._replace(name=f"run {i}") for i, run in enumerate(few * 12)]
    pictures = {}
    for name, runs, x in (("one run", few, "steps"), ("tokens", few, "tokens"),
                          ("with speeds", with_speed, "steps"),
                          ("one step", short_runs[:1], "steps"),
                          ("three steps", short_runs[1:], "steps"), ("long names", two, "steps"),
                          ("twelve", many, "steps")):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            svg = pictures[name] = draw(runs, x)
        # not those of files that other tests have left open
        warned = [w for w in warned if issubclass(w.category, UserWarning)]
        check(f"{name}: no word on another", not collisions(svg) and not warned,
              (collisions(svg), warned))
        words = words_of(svg)
        titles = [word[-1] for word in words if word[0] in TITLES.values()]
        # Numbers between this panel's title and the next panel's, one below the other.
        for y in titles:
            below = min([other for other in titles if other > y + 1], default=1e9)
            rows = [word[-1] for word in words
                    if re.fullmatch(r"[\d.]+[kMB]?", word[0]) and y < word[-1] < below]
            count = sum(abs(row - max(rows)) < 0.1 for row in rows)
            check(f"{name}: numbers on the x axis", count >= (1 if "step" in name else 4), count)
    check("steps are whole numbers", not {"0.5", "1.5"} & texts_of(pictures["three steps"]))
    notes = [" ".join(sorted(texts_of(pictures[name]))) for name in ("one run", "three steps")]
    found = [note.count("mean of 13 steps") for note in notes]
    check("what is smoothed says over how many steps", found == [2, 0], notes)
    check("runs with the same losses are told",
          any("(same losses as 0 a run with" in text for text in texts_of(pictures["long names"])))
    colours = re.findall(r"<g id=\"run\d+-lr\">\s*<path[^>]*stroke: (#\w+)",
                         pictures["twelve"].decode())
    check("twelve runs have twelve colours", len(set(colours)) == len(colours) == 12, colours)


# ---- The program


def test_command_line(folder):
    """Charts, and one line for each mistake."""
    write(folder / "one")
    write(folder / "wrong", LOG + "x\n")
    (folder / "more").mkdir()
    write(folder / "more" / "one")
    os.chdir(folder)

    def plot(*arguments):
        return call(*arguments, program="dev.tools.plot")

    def texts():
        return texts_of((folder / "a.svg").read_bytes())

    found = plot("one", "-o", "a.svg", "more/one", "--tokens-per-step", "1000", "wrong")
    check("three runs", found == (
        0, "wrote a.svg\n",
        "WARNING: wrong/main.log: skipped line 12, which main.log does not have\n"), found)
    wish = {"val loss 8.5000  one", "val loss 8.5000  more/one (same losses as one)", "tokens"}
    check("runs of one name have their paths'", wish <= texts(), texts())
    plot("one", "-o", "a.svg", "--tokens-per-step", "1000", "--x", "steps")
    check("--x steps", "steps" in texts() and "tokens" not in texts())
    for wish, *arguments in (
            ("absent: could not be read", "absent"),
            ("-o a.pdf: expected .*.svg or .png", "one", "-o", "a.pdf"),
            ("--x tokens: .*give --tokens-per-step", "one", "--x", "tokens"),
            ("--nonsense", "one", "--nonsense"),
            ("no RUN is given", "-o", "a.svg"), ("--x: invalid choice", "one", "--x", "hours"),
            ("--model 3B: expected some of", "one", "--model", "3B"),
            ("--tokens-per-step: 0: expected at least 1", "one", "--tokens-per-step", "0"),
            ("a.svg", "one", "-o", "a.svg/a.svg")):
        check_error(wish, *arguments, early=True, program="dev.tools.plot")
    flags = parse(["one", "--model", "124M,350M", "two", "-o", "a.svg", "three"])
    found = flags.runs, flags.model
    check("flags between runs", found == (["one", "two", "three"], ["124M", "350M"]), flags)
