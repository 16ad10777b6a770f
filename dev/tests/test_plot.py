"""Test dev/tools/plot.py: what it reads, and where the lines and ticks of its SVGs are."""
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from unittest import mock

import numpy as np

from dev.tests.checks import EXACT, check, check_refusal, fast
from dev.tests.trainings import call
from dev.tools.plot import (apart, columns_of, draw, figures, panel, parse, read_log, read_printed,
                            read_run, short, smoothed, sparkline, thinned)

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
    check("a name that is no text can be drawn", draw([read_run(named)], "steps") and panel(
        [named, folder / "\udcff"], None, 80, 20).encode())
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
    """Smoothing, thinning, and the room between labels, each against the plainest loop."""
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

    x, y = np.arange(2500.0), rng.normal(size=2500)
    y[[0, 700, 701, 702, 703, 704]] = np.nan
    few = thinned(x[:2000], y[:2000])
    yield "2000 points are all drawn", few[1], y[:2000], EXACT
    check("of 2001 fewer are", len(thinned(x[:2001], y[:2001])[0]) <= 2000)
    found_x, found_y = thinned(x, y, 500)
    check("thinned: points of the line, in order",
          len(found_x) <= 1000 and all(np.diff(found_x) > 0) and
          np.array_equal(found_y, y[found_x.astype(int)], equal_nan=True))
    lost = [i for i in range(500) for part in [y[5 * i : 5 * i + 5]] if np.isfinite(part).any()
            and not {np.nanmin(part), np.nanmax(part)} <= set(found_y)]
    check("thinned: the ends of each bucket",
          not lost and np.isnan(found_y[found_x == 700]).sum() == 1, lost)

    check("labels far apart stay", apart([1, 5, 9], 2) == [1, 5, 9])
    check("labels at one place", apart([4, 4, 4], 2) == [2, 4, 6])
    check("a cluster and one alone", apart([1, 1, 10], 2) == [0, 2, 10])
    check("clusters that meet", apart([1, 1, 3, 3], 2) == [-1, 1, 3, 5])
    check("no label", apart([], 1) == [])
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


# ---- The terminal


@fast
def test_sparklines(folder):
    """Blocks of a few numbers, and a panel, letter by letter."""
    for means, height, wish in (
            ([1, 2, 3, 4, 5, 6, 7, 8], 1, ["▁▂▃▄▅▆▇█"]), ([8, 1], 1, ["█▁"]),
            ([3, 3, 3], 1, ["▁▁▁"]),
            ([1, np.nan, 8], 1, ["▁ █"]), ([np.nan] * 3, 2, ["   ", "   "]),
            ([0, 8, 15], 2, ["  █"[:1] + "▁█", "▁██"]),
            ([0, 23], 3, [" █", " █", "▁█"]), ([99, *[0, 7] * 5], 1, ["█" + "▁█" * 5])):
        found = sparkline(np.float64(means), height)
        check(f"sparkline of {means}", found == wish, found)
    steps = np.array([0, 1, 2, 3, 8, 9])
    values = np.array([1, 3, np.nan, 5, 7, 9.0])
    yield "columns of steps", columns_of(steps, values, 9, 5), np.array([2, 5, 5, 5, 8.0]), EXACT
    yield ("more columns than steps", columns_of(steps[:2], values[:2], 1, 4),
           np.array([1, 1, 3, 3.0]), EXACT)
    check("nothing before the first",
          np.isnan(columns_of(np.array([5]), np.ones(1), 5, 3)).tolist() == [1, 1, 0])


@fast
def test_panels(folder):
    """The text of a panel, letter by letter; and as much of it as a terminal holds."""
    one = write(folder / "one")
    (one / "log").write_text(PRINTED)
    # 19 columns for the steps 0 to 4. Step s is in column 19 s / 5, which is cut off to 0, 3, 7,
    # 11, 15.
    rows = [("loss", (11.0091, 10.5, 9.9, 9.1, 9.1), "9.1000    9.1000   11.0091"),
            ("val loss", (11.0092, 11.0092, 9.75, 9.75, 8.5), "8.5000    8.5000   11.0092"),
            ("HellaSwag", (None, None, 0.255, 0.255, 0.26), "0.2600    0.2550    0.2600"),
            ("norm", (15.37, 9, 6.5, 4.25, 4.25), "4.25      4.25     15.37"),
            ("lr", (1, 2, 3, 4, 4), "0.000004  0.000001  0.000004"),
            ("tok/s", (1241, 1234567, 1234567, 228000, 228000), "228k    1.241k    1.235M")]

    def expected(tall):
        lines = ["one: step 4, 1.024k tokens" + 10 * " " + "last       low      high"]
        for name, values, ends in rows:
            there = [value for value in values if value is not None]
            low, high = min(there), max(there)
            levels = [0
                      if value is None else 1 + round((8 * tall - 1) * (value - low) / (high - low))
                      for value, columns in zip(values, (3, 4, 4, 4, 4)) for _ in range(columns)]
            for row in range(tall - 1, -1, -1):
                blocks = "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, level - 8 * row))] for level in levels)
                lines.append(f"{name:10}{blocks}  {ends:>29}"
                             if row == 0 else f"{'':10}{blocks}".rstrip())
        return "\n".join(lines)

    for height, tall in ((7, 1), (12, 1), (13, 2), (18, 2), (19, 3), (50, 3)):
        found = panel([one], None, 60, height)
        ok = found == expected(tall)
        check(f"a panel of {height} lines", ok,
              "" if ok else f"\n{found}\nexpected\n{expected(tall)}")
    wish = "\n".join([*expected(1).split("\n")[:5], "2 lines more: they need a higher terminal"])
    check("a line too many", panel([one], None, 60, 6) == wish)
    wrong = write(folder / "wrong", LOG + "x\n")
    text = panel([wrong, folder / "absent", one], 100, 80, 23)
    lines = text.split("\n")
    check("80x24: three runs", len(lines) <= 23 and max(map(len, lines)) <= 80)
    check("and what is wrong with them", lines[0].startswith("wrong: step 4, 400 tokens") and
          "skipped line 12" in text and f"{folder / 'absent'}: could not be read"[:80] in text and
          "one: step 4, 400 tokens" in text, lines[:2])
    text = panel([one] * 6, None, 80, 23)
    check("a narrow terminal", panel([one], None, 20, 23).startswith("one: step 4"))
    check("80x24: six runs",
          text.count("\n") == 22 and text.endswith("\n20 lines more: they need a higher terminal"))
    check("none at all", panel([folder / "absent"], None, 80, 23).startswith(str(folder)[:20]))


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
        check_refusal("chart", "matplotlib is not installed.*pip install -r dev/requirements.txt; "
                      "--watch does without", draw, runs, "steps")


# ---- The program


def test_command_line(folder):
    """Charts, panels, and one line for each mistake."""
    one, wrong = write(folder / "one"), write(folder / "wrong", LOG + "x\n")
    write(folder / "more").joinpath("one").mkdir()
    write(folder / "more" / "one")
    os.chdir(folder)
    terminal = {"COLUMNS": "60", "LINES": "8"}

    def plot(*arguments):
        with mock.patch.dict(os.environ, terminal):
            return call(*arguments, program="dev.tools.plot")

    def words():
        return {text for text, _ in lines_of((folder / "a.svg").read_bytes())[1]}

    found = plot("one", "-o", "a.svg", "more/one", "--tokens-per-step", "1000", wrong.name)
    check("plot.py: three runs", found == (
        0, "wrote a.svg\n",
        "WARNING: wrong/main.log: skipped line 12, which main.log does not have\n"), found)
    wish = {"val loss 8.5000  one", "val loss 8.5000  more/one (same losses as one)", "tokens"}
    check("plot.py: runs of one name have their paths'", wish <= words(), words())
    plot("one", "-o", "a.svg", "--tokens-per-step", "1000", "--x", "steps")
    check("plot.py: --x steps", "steps" in words() and "tokens" not in words())
    found = plot("one", "--once")
    check("plot.py: --once", found == (0, panel([one], None, 60, 7) + "\n", ""), found)
    for wish, *arguments in (
            ("absent: could not be read", "absent"),
            ("absent: could not be read", "absent", "--once"),
            ("-o a.pdf: expected .*.svg or .png", "one", "-o", "a.pdf"),
            ("--x tokens: .*give --tokens-per-step", "one", "--x", "tokens"),
            ("--nonsense", "one", "--nonsense"),
            ("no RUN is given", "--once"), ("--x: invalid choice", "one", "--x", "hours"),
            ("--model 3B: expected some of", "one", "--model", "3B"),
            ("--tokens-per-step: 0: expected at least 1", "one", "--tokens-per-step", "0"),
            ("a.svg", "one", "-o", "a.svg/a.svg")):
        found = plot(*arguments)
        check(f"plot.py: {wish}",
              found[:2] == (1, "") and re.fullmatch(f"error: .*{wish}.*\n", found[2]), found)
    flags = parse(["one", "--model", "124M,350M", "two", "--watch", "-o", "a.svg", "three"])
    found = flags.runs, flags.model, flags.watch
    check("flags between runs", found == (["one", "two", "three"], ["124M", "350M"], 1), flags)

    # --watch waits for a run, follows it, and ends by Ctrl-C, which a background job would ignore.
    shown = folder / "shown"
    with open(shown, "wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "dev.tools.plot", "later", "--watch",
                                    "--every", "0.1"],
                                   env=os.environ | terminal | {"PYTHONIOENCODING": "utf-8"},
                                   stdout=file, stderr=subprocess.STDOUT,
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        try:
            for text, log in (("could not be read",
                               LOG), ("step 4", LOG + "s:5 tel:8.0\ns:6 te"), ("step 5", None)):
                until = time.monotonic() + 30
                while (f"later: {text}" not in shown.read_text(encoding="utf-8") and
                       time.monotonic() < until):
                    time.sleep(0.1)
                check(f"--watch shows {text}",
                      f"later: {text}" in shown.read_text(encoding="utf-8"))
                if log:
                    write(folder / "later", log)
            process.send_signal(signal.SIGINT)
            check("--watch leaves by Ctrl-C",
                  process.wait(20) == 0 and "Traceback" not in shown.read_text())
        finally:
            process.kill()
