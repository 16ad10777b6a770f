"""Test dev/tools/plot.py: what it reads, and where the lines and ticks of its SVGs are."""
import os
import re
import sys
import warnings
import xml.etree.ElementTree as ET
from unittest import mock

import numpy as np

from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.trainings import call
from dev.tools.plot import (TITLES, draw, figures, parse, read_log, read_printed, read_run, short,
                            smoothed)

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


def write(folder, log=LOG, **files):
    folder.mkdir(exist_ok=True)
    (folder / "main.log").write_text(log)
    for name, text in files.items():
        (folder / name.replace("_json", ".json")).write_text(text)
    return folder


def same(series, held):
    return series.keys() == held.keys() and all(
        np.array_equal(series[name][i], np.float64(held[name][i])) for name in held for i in (0, 1))


# ---- Reading


@fast
def test_logs(folder):
    """All lines, resumed runs, and what is half written or wrong."""
    run = read_run(write(folder / "one"))
    check("a log", same(run.series, HELD) and
          (run.name, run.tokens, run.skipped) == ("one", None, ""), run.series)
    check("by its own name", same(read_run(folder / "one" / "main.log").series, HELD))
    check("its last step", run.last == 4)
    nan = read_run(write(folder / "nan", "s:0 trl:nan lr:0.1 norm:inf\ns:1 trl:-nan lr:0.1 "
                         "norm:-1.5\n")).series
    check("NaN", np.isnan(nan["loss"][1]).tolist() == [True, True], nan["loss"][1])
    yield "an infinite value", nan["norm"][1], np.array([np.inf, -1.5]), EXACT
    cut = write(folder / "cut", LOG + "s:5 tel:3.")
    check("a line without its end waits",
          same(read_run(cut).series, HELD) and not read_run(cut).skipped)
    for name, text, wish in (
            ("wrong", LOG + "s:5 tel\n", "line 12"),
            ("no number", LOG + "s:5 tel:abc\n", "line 12"),
            ("a blank one, two wrong", "\nx\n" + LOG + "s:5\n", "line 2 and 1 more"),
            ("half a line within", "s:1 trl:3.0 lr:0\n" + LOG, "line 1"),
            ("two in one", "s:0 tel:1.0 s:1 tel:2.0\n" + LOG, "line 1")):
        run = read_run(write(folder / "wrong", text))
        check(f"{name}: {wish}", same(run.series, HELD) and
              re.search(rf"main.log: skipped {wish}, which", run.skipped), run.skipped)
    for name, line in (("bytes that are no UTF-8", b"s:5 tel:\xff\xfe.1"), ("zeros", bytes(40)),
                       ("a step beyond all numbers", b"s:" + b"9" * 400 + b" tel:3.0"),
                       ("one that no int takes", b"s:" + b"9" * 5000 + b" tel:3.0"),
                       ("a step that makes the axis endless", b"s:4000000000000 tel:3.0"),
                       ("more than fp32 holds", b"s:5 trl:1.0 lr:1.0 norm:-1.7e308")):
        (folder / "wrong" / "main.log").write_bytes(LOG.encode() + line + b"\n")
        run = read_run(folder / "wrong")
        check(f"a damaged line, {name}, is skipped",
              same(run.series, HELD) and "skipped line 12," in run.skipped, run.skipped[:200])
    named = write(folder / "no \udcff UTF-8 \x1b")
    check("a name that is no text can be drawn", draw([read_run(named)], "steps"))
    crlf = write(folder / "crlf", "\ufeff" + LOG.replace("\n", "\r\n"))
    check("lines that end as Windows's do", same(read_run(crlf).series, HELD))
    for wish, text in (("has no whole line yet; expected lines such as", ""),
                       ("has no whole line yet", "s:0 tel:3.1"),
                       ("has no whole line yet", "\n\n"),
                       ("line 2 is 'tel: 3'; expected", "\ntel: 3\nx\n")):
        check_refusal("log", f"main.log: {wish}", read_log,
                      write(folder / "bad", text) / "main.log")
    check_refusal("log", "absent: could not be read .*expected a folder with a main.log", read_run,
                  folder / "absent")
    (folder / "empty").mkdir()
    check_refusal("log", "empty/main.log: could not be read", read_run, folder / "empty")


@fast
def test_tokens_and_speed(folder):
    """Tokens in a step come from a flag, else the newest run_*.json, else what was printed; speeds
    from that alone."""
    one = write(folder / "one", log=LOG)
    (one / "log").write_text(PRINTED)
    run = read_run(one)
    check("what was printed",
          same(run.series, HELD | {"tok/s": ([0, 1, 3], [1241, 1234567, 228000])}), run.series)
    check("its tokens in a step", run.tokens == 256, run.tokens)
    speeds, tokens = read_printed(one / "log")
    check("in the printed order",
          list(speeds.items()) == [(0, 1241), (1, 1234567), (3, 228000)] and tokens == 256)
    write(one, run_00000000_json='{"flags": {"total_batch": 111, "train_data": '
          '"data/fineweb_train_*.bin"}}')
    check("a run's flags", (read_run(one).tokens, read_run(one).data) == (111, "fineweb"))
    write(one, run_00000250_json='{"flags": {"total_batch": 222, "train_data": '
          '"data/edu_fineweb_train_*.bin"}}')
    check("the newest run's flags", (read_run(one).tokens, read_run(one).data) == (222, "edu"))
    check("the flag first", read_run(one, 333).tokens == 333)
    write(one, run_00000300_json='{"flags": {"total_batch": null, "train_data": null}}')
    check("flags that say nothing", read_run(one).tokens == 256)
    check("HellaSwag alone: FineWeb", read_run(one).data == "fineweb")
    check("neither: nothing", read_run(write(folder / "two", "s:0 tel:3.0\n")).data is None)
    large = f'{{"flags": {{"total_batch": {"9" * 5000}}}}}'
    for content in ("{", "[]", '{"flags": 3}', "{}", "[" * 100000, "\0", large):
        write(one, run_00000400_json=content)
        run = read_run(one)
        wish = "run_00000400.json: ignored; expected JSON such as .*total_batch.*"
        check(f"{content[:40]} is ignored", re.search(wish, run.skipped) and run.tokens == 256,
              run.skipped)
    for content in ('"many"', "[1]", "-3", "1.5", "true", "9" * 400):
        write(one, run_00000400_json=f'{{"flags": {{"total_batch": {content}}}}}')
        run = read_run(one)
        check(f"total_batch {content[:40]} is ignored", "run_00000400.json: ignored, total_batch "
              "is " in run.skipped and run.tokens == 256, run.skipped)

# ---- Numbers


@fast
def test_numbers(folder):
    """Smoothing, against the plainest loop; and counts for people."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=40)
    values[[3, 4, 5, 20, 39]] = np.nan, np.nan, np.nan, np.inf, np.nan
    for width in (1, 3, 7):
        wish = []
        for i in range(40):
            reach = min(i, width // 2)  # as many before as after, where the line begins
            near = [values[j] for j in range(i - reach, i + reach + 1) if j < 40]
            near = [x for x in near if np.isfinite(x)]
            wish.append(sum(near) / len(near) if near else np.nan)
        found = smoothed(values, width)
        check(f"smoothed by {width}: NaN", np.array_equal(np.isnan(found), np.isnan(wish)))
        yield f"smoothed by {width}", np.nan_to_num(found), np.nan_to_num(wish), 1e-14

    for number, wish in ((0, "0"), (999, "999"), (1000, "1k"), (524288, "524.3k"), (2.5e9, "2.5B"),
                         (-3e6, "-3M"),
                         (1.5e12, "1.5T"), (0.25, "0.25")):
        check(f"{number} for people", short(number) == wish, short(number))


def of_scores(folder, scores, name="HellaSwag"):
    log = "".join(f"s:{i} {'eval' if name == 'HellaSwag' else 'tel'}:{score}\n"
                  for i, score in enumerate(scores))
    return read_run(write(folder / "scores", log))


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
            ("val loss", (4.4,), "fineweb", None, [3.424958]),
            ("val loss", (3.3,), "fineweb", None, [3.424958, 3.2722]),
            ("val loss", (3.25, 3.9), "fineweb", None, [3.424958, 3.083089, 3.2722]),
            ("val loss", (2.0,), "fineweb", None, [3.424958, 3.083089, 3.000580, 2.831273, 3.2722]),
            ("val loss", (4.0,), "edu", None, [3.2924]),
            ("val loss", ("nan",), "fineweb", None, []),
            ("val loss", (9.0,), "fineweb", ["350M", "124M"], [3.424958, 3.083089, 3.2722])):
        found = figures(name, [of_scores(folder, scores, name)], data, sizes)
        check(f"{name} {scores}, {data}, {sizes}", [value for value, _ in found] == wish, found)
    run = of_scores(folder, (0.29,))
    loss = of_scores(folder, (3.3,), "val loss")
    check("of several runs the best",
          len(figures("HellaSwag", [run, of_scores(folder, (0.4,))], None, None)) == 3)
    found = figures("val loss", [loss._replace(data="edu")], None, None)
    check("by what a run was trained on", found == [(3.2924, "OpenAI's 124M, 3.2924")], found)


# ---- The chart


def lines_of(svg):
    """{id: points (n,2), y upwards} of the lines of an SVG, and (text, x) of all that is
    written."""
    root, found = ET.fromstring(svg), {}
    path, use, group, text = (f"{{http://www.w3.org/2000/svg}}{name}"
                              for name in ("path", "use", "g", "text"))
    for g in root.iter(group):
        if g.get("id", "").startswith(("run", "figure-")):
            drawn = re.findall(r"[ML] (\S+) (\S+)",
                               g.find(path).get("d", "") if g.find(path) is not None else "")
            dots = [(dot.get("x"), dot.get("y")) for dot in g.iter(use)]
            found[g.get("id")] = np.float64(dots or drawn).reshape(-1, 2) * (1, -1)
    return found, [(t.text, float(t.get("x"))) for t in root.iter(text)]


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
    two = write(folder / "two $x_1$ <&>", LOG.replace("s:4", "s:8"))
    runs = [read_run(one), read_run(two)]
    svg = draw(runs, "steps", "fineweb", ["124M"])
    found, texts = lines_of(svg)
    wish = {f"run{i}-{name.replace(' ', '-')}": run.series[name] for i, run in enumerate(runs)
            for name in run.series}
    drawn = {name for name in found if name.startswith("run")}
    check("the lines of both runs", drawn == wish.keys(), sorted(drawn ^ wish.keys()))
    for name, (steps, values) in wish.items():
        points = found[name]
        log = "norm" in name and 0 < 20 * values.min() < values.max()
        off = [misfit(points[:, 0], steps), misfit(points[:, 1], np.log(
            values) if log else values)] if len(points) == len(steps) else [np.inf]
        check(f"{name}: {len(steps)} points in their places", max(off) < 1e-3,
              f"{len(points)}, off by {max(off):.0e}")
    everything = np.concatenate([run.series[name][1] for run in runs
                                 for name in ("loss", "val loss")])
    order = np.concatenate([found[f"run{i}-{name}"][:, 1] for i in (0, 1)
                            for name in ("loss", "val-loss")])
    check("one axis for losses of all runs", misfit(order, everything) < 1e-3)
    strokes = [ET.fromstring(draw([run], "steps", data)) for run, data in (
        (runs[0], "none"), (of_scores(folder, (3.5, 3.4), "val loss"), "fineweb"))]
    dots_only, joined = (root.find(".//{*}g[@id='run0-val-loss']/{*}path") for root in strokes)
    check("validation is dots beside training, and joined alone",
          dots_only is None and joined is not None)
    check("no figures are asked for",
          not [name for name in lines_of(ET.tostring(strokes[0]))[0] if "figure" in name])
    inside = []  # points of each line in the rectangle of its panel
    root = ET.fromstring(svg)
    for path in root.iterfind(".//{*}path[@clip-path]"):
        rect = root.find(f".//{{*}}clipPath[@id='{path.get('clip-path')[5:-1]}']/{{*}}rect")
        left, top, width, height = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        points = np.float64(re.findall(r"[ML] (\S+) (\S+)", path.get("d"))) - (left, top)
        inside.append(bool(((points >= -1e-3) & (points <= (width + 1e-3, height + 1e-3))).all()))
    check("nothing leaves its panel", len(inside) > 10 and all(inside), inside)
    broken = write(folder / "broken", LOG + "s:5 trl:nan lr:1 norm:nan\n")
    for ended, name in ((of_scores(folder, (3.5, 3.4, "nan"), "val loss"), "val loss nan  scores"),
                        (read_run(broken), "loss nan  broken")):
        texts = {text for text, _ in lines_of(draw([ended], "steps"))[1]}
        check(f"a run that ends in NaN says so: {name}", name in texts, texts)
    texts = lines_of(svg)[1]
    level = found["figure-OpenAI's 124M, 3.4250"][:, 1]
    a, b = np.polyfit(everything, order, 1)
    check("OpenAI's loss", np.abs(a * 3.424958 + b - level).max() < 1e-2, level)
    wish = {"val loss 8.5000  one", "val loss 8.5000  two $x_1$ <&>", "OpenAI's 124M, 3.4250",
            "llm.c's 124M, 3.2722",
            "OpenAI's 124M, 0.2945"}
    check("the runs' names and last values", wish <= {text for text, *_ in texts}, texts)
    for x, scale in (("steps", 1), ("tokens", 256000)):
        found, texts = lines_of(draw([read_run(one, 256000)], x))
        ticks = {}
        for text, at in texts:
            if text and re.fullmatch(r"[\d.]+[kM]?", text):
                ticks.setdefault(float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(
                    text[-1], 1), []).append(at)
        points = found["run0-lr"]
        a, b = np.polyfit(np.arange(4) * scale, points[:, 0], 1)
        hits = [value for value, ats in ticks.items()
                if value and any(abs(a * value + b - at) < 0.6 for at in ats)]
        check(f"ticks in {x}", len(hits) >= 3 and max(hits) >= 3 * scale, hits)
        check(f"the axis counts {x}", x in {text for text, *_ in texts})

    for form, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        bytes_of = [draw(runs, "steps", form=form) for _ in range(2)]
        check(f"{form}: the same bytes again",
              bytes_of[0] == bytes_of[1] and bytes_of[0].startswith(start))
    check("no date", b"dc:date" not in svg)

    long = "".join(f"s:{s} trl:{3 + 8 / (s + 1):.4f} lr:0.1 norm:{1 + 40 * (s < 5):.2f}\n"
                   for s in range(600))
    run = read_run(write(folder / "long", long))
    found, texts = lines_of(draw([run], "steps"))
    check("a long run: smoothed lines over pale ones",
          {"run0-loss-smoothed", "run0-norm-smoothed"} <= found.keys() and
          "run0-lr-smoothed" not in found, sorted(found))
    norms = (50, 20, 5, 2.5, 1)
    log = "".join(f"s:{i} trl:3 lr:0 norm:{norm}\n" for i, norm in enumerate(norms))
    points = lines_of(draw([read_run(write(folder / "norm", log))], "steps"))[0]["run0-norm"]
    check("norms far apart are drawn by their logarithms",
          misfit(points[:, 1], np.log(norms)) < 1e-3)
    numbers = [float(text) for text, _ in texts if text and re.fullmatch(r"\d\.\d+", text)]
    check("a long run: its first 3% leave the panel", 3.3 < max(numbers) < 4, numbers)
    nan = "".join(f"s:{i} trl:{loss} lr:0 norm:nan\n"
                  for i, loss in enumerate(("nan", 2.5, 2.25, "inf", 2, 1.5)))
    found, _ = lines_of(draw([read_run(write(folder / "nan", nan))], "steps"))
    check("what is no finite number is left out",
          [len(found[f"run0-{name}"]) for name in ("loss", "lr", "norm")] == [4, 6, 0])
    root = ET.fromstring(draw([read_run(write(folder / "nan", "s:0 trl:3 lr:0 norm:1\n"))],
                              "steps"))
    dots = [len(root.findall(f".//{{*}}g[@id='run0-{name}']//{{*}}use"))
            for name in ("loss", "norm", "lr")]
    check("a single step is a dot", dots == [1, 1, 1], dots)
    for name, scores in (("HellaSwag", (0.3,)), ("val loss", (3.5, 3.4))):
        found, _ = lines_of(draw([of_scores(folder, scores, name)], "steps"))
        check(f"{name} alone", len(found[f"run0-{name.replace(' ', '-')}"]) == len(scores))
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        check_refusal("chart", "matplotlib is not installed.*pip install -r dev/requirements.txt",
                      draw, runs, "steps")


def words_of(svg):
    """[(text, left, top, right, bottom)] of all that is written, with letters as wide as they are
    on average."""
    found = []
    for text in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        style, x, y = text.get("style"), float(text.get("x")), float(text.get("y"))
        size = float(re.search(r"font-size: ([\d.]+)px", style)[1])
        width = 0.58 * size * len(text.text)
        left = (x - width *
                {"start": 0, "middle": 0.5, "end": 1}[re.search(r"text-anchor: (\w+)", style)[1]])
        found.append((text.text, left, y - 0.8 * size, left + width, y + 0.1 * size))
    return found


def collisions(svg):
    """Pairs of texts that overlap, and texts that leave the picture."""
    words, (*_, width, height) = words_of(svg), map(float,
                                                    ET.fromstring(svg).get("viewBox").split())
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
    (folder / "run" / "log").write_text("".join(
        f"step {i}/9 | loss 1 | norm 1 | lr 1 | 200 ms | {speed} tok/s | {256 * i} tokens\n"
        for i, speed in ((1, "1,241"), (2, "1,234,567"), (4, "228,000"))))
    with_speed = [read_run(folder / "run")]
    short_runs = [read_run(write(folder / "short", "".join(steps.splitlines(True)[:n])))
                  for n in (3, 6)]
    two = [run._replace(name=f"{i} {letters[:200]}") for i, run in enumerate(few * 2)]
    many = [run._replace(name=f"run {i}") for i, run in enumerate(few * 12)]
    for name, runs in (("one run", few), ("one with speeds", with_speed),
                       ("one step", short_runs[:1]),
                       ("three steps", short_runs[1:]), ("long names", two), ("twelve", many)):
        for x in ("steps", "tokens") if runs is few else ("steps",):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                svg = draw(runs, x)
            # not those of files that other tests have left open
            warned = [w for w in warned if issubclass(w.category, UserWarning)]
            check(f"{name}, {x}: no word on another", not collisions(svg) and not warned,
                  (collisions(svg), warned))
            words = words_of(svg)
            titles = [word for word in words if word[0] in TITLES.values()]
            # Numbers between this panel's title and the next panel's, one below the other.
            for title, *_, y in titles:
                below = min([other[4] for other in titles if other[4] > y + 1], default=1e9)
                numbers = [word for word in words
                           if re.fullmatch(r"[\d.]+[kMB]?", word[0]) and y < word[4] < below]
                lowest = max((word[4] for word in numbers), default=0)
                row = [word[0] for word in numbers if abs(word[4] - lowest) < 0.1]
                check(f"{name}, {x}: {title}: numbers on the x axis",
                      len(row) >= (1 if "step" in name else 4), row)
    ticks = [float(text) for text, *_ in words_of(draw(short_runs[1:], "steps"))
             if re.fullmatch(r"[\d.]+", text)]
    check("steps are whole numbers", not {0.5, 1.5} & set(ticks), ticks)
    notes = [" ".join(word[0] for word in words_of(draw(runs, "steps")))
             for runs in (few, short_runs)]
    check("what is smoothed says over how many steps", notes[0].count("mean of 13 steps") == 2,
          notes[0])
    check("what is not does not say it", not re.search("smoothed|mean of", notes[1]), notes[1])

    svg = draw(two, "steps")
    check("runs with the same losses are told",
          any("(same losses as 0 a run with" in word[0] for word in words_of(svg)))
    colours = re.findall(r"<g id=\"run\d+-lr\">\s*<path[^>]*stroke: (#\w+)",
                         draw(many, "steps").decode())
    check("twelve runs have twelve colours", len(set(colours)) == len(colours) == 12, colours)


# ---- The program


def test_command_line(folder):
    """Charts, and one line for each mistake."""
    write(folder / "one")
    write(folder / "wrong", LOG + "x\n")
    write(folder / "more").joinpath("one").mkdir()
    write(folder / "more" / "one")
    os.chdir(folder)

    def plot(*arguments):
        return call(*arguments, program="dev.tools.plot")

    def words():
        return {text for text, _ in lines_of((folder / "a.svg").read_bytes())[1]}

    found = plot("one", "-o", "a.svg", "more/one", "--tokens-per-step", "1000", "wrong")
    check("plot.py: three runs", found == (
        0, "wrote a.svg\n",
        "WARNING: wrong/main.log: skipped line 12, which main.log does not have\n"), found)
    wish = {"val loss 8.5000  one", "val loss 8.5000  more/one (same losses as one)", "tokens"}
    check("plot.py: runs of one name have their paths'", wish <= words(), words())
    plot("one", "-o", "a.svg", "--tokens-per-step", "1000", "--x", "steps")
    check("plot.py: --x steps", "steps" in words() and "tokens" not in words())
    for wish, *arguments in (
            ("absent: could not be read", "absent"),
            ("-o a.pdf: expected .*.svg or .png", "one", "-o", "a.pdf"),
            ("--x tokens: .*give --tokens-per-step", "one", "--x", "tokens"),
            ("--nonsense", "one", "--nonsense"),
            ("no RUN is given", "-o", "a.svg"), ("--x: invalid choice", "one", "--x", "hours"),
            ("--model 3B: expected some of", "one", "--model", "3B"),
            ("--tokens-per-step: 0: expected at least 1", "one", "--tokens-per-step", "0"),
            ("a.svg", "one", "-o", "a.svg/a.svg")):
        found = plot(*arguments)
        check(f"plot.py: {wish}",
              found[:2] == (1, "") and re.fullmatch(f"error: .*{wish}.*\n", found[2]), found)
    flags = parse(["one", "--model", "124M,350M", "two", "-o", "a.svg", "three"])
    found = flags.runs, flags.model
    check("flags between runs", found == (["one", "two", "three"], ["124M", "350M"]), flags)
