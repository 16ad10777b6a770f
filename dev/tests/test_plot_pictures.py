"""Test that a person can read the charts of dev/tools/plot.py: words do not overlap, axes have
numbers, and equal runs can be told apart.
"""
import re
import warnings
import xml.etree.ElementTree as ET

import numpy as np

from dev.tests.checks import check
from dev.tools.plot import TITLES, draw, read_run


def write(folder, log, flags=None):
    """A run's folder."""
    folder.mkdir(exist_ok=True)
    (folder / "main.log").write_text(log)
    if flags:
        (folder / "run_00000000.json").write_text(flags)
    return folder


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
    """What a person has to be able to see: numbers on each x axis, words apart, each of two runs
    that are the same."""
    steps = "".join(f"s:{s} trl:{3 + 8 / (s / 9 + 1):.4f} lr:0.000{s % 7} "
                    f"norm:{1 + 40 * (s < 5):.2f}\n" + (
        f"s:{s} tel:{3.2 + 8 / (s / 9 + 1):.4f}\ns:{s} eval:{0.25 + s / 50000:.4f}\n"
        if s % 50 == 0 else "")
        for s in range(601))
    flags = '{"flags": {"total_batch": 524288, "train_data": "fineweb"}}'
    letters = "a run with many settings in its name " * 7
    few = [read_run(write(folder / "run", steps, flags))]
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

    def dashes(runs, name):
        root = ET.fromstring(draw(runs, "steps"))
        styles = [root.find(f".//{{*}}g[@id='run{i}-{name}']/{{*}}path").get("style")
                  for i in range(len(runs))]
        pattern = re.compile(r"stroke-dasharray: ([\d.]+),([\d.]+); stroke-dashoffset: ([\d.]+)")
        found = [pattern.search(style) for style in styles]
        return [match and tuple(map(float, match.groups())) for match in found]

    for name in ("loss-smoothed", "norm-smoothed", "lr", "HellaSwag"):
        first, *others = dashes([run._replace(name=str(i)) for i, run in enumerate(few * 3)], name)
        seen = [next(k for k in range(3) if abs((k * on + offset) % (on + off)) < 1e-3 or abs(
            (k * on + offset) % (on + off) - on - off) < 1e-3) for on, off, offset in others]
        check(f"three identical runs: each {name} has a third", first is None and sorted(seen) ==
              [1, 2] and all(abs(off - 2 * on) < 1e-3 for on, off, _ in others), (first, others))
    cut = read_run(write(folder / "cut", steps[: len(steps) // 2]))
    check("one that was resumed from another is dashed", dashes([few[0], cut], "lr")[1] is not None)
    other = read_run(write(folder / "other",
                           re.sub(r"trl:(\d)", lambda match: f"trl:{int(match[1]) + 1}", steps)))
    check("one that is elsewhere is not", dashes([few[0], other], "loss-smoothed") == [None, None])
    svg = draw(two, "steps")
    sizes = [np.ptp(np.float64(re.findall(r"-?[\d.]+", path.get("d")))) for i in (0, 1) for path in
             [ET.fromstring(svg).find(f".//{{*}}g[@id='run{i}-val-loss']//{{*}}defs/{{*}}path")]]
    check("dots of a run lie in rings of the same run", sizes[0] > sizes[1] + 2, sizes)
    check("and it says so",
          any("(same losses as 0 a run with" in word[0] for word in words_of(svg)))
    colours = re.findall(r"<g id=\"run\d+-lr\">\s*<path[^>]*stroke: (#\w+)",
                         draw(many, "steps").decode())
    check("twelve runs have twelve colours", len(set(colours)) == len(colours) == 12, colours)
