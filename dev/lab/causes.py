"""What is wrong with a result, and its cause, from the numbers.

An exercise's own mistakes are recognised by their numbers: see mistakes.py. For all exercises there
is a short list of causes, GENERAL, from the places and kinds of the wrong numbers.
"""
import re
from types import SimpleNamespace

import numpy as np

from dev.lab.bench import HANDFUL
from dev.lab.exercises import find_exercise
from dev.lab.ladder import ANY
from dev.lab.mistakes import mistakes_of
from dev.lab.submission import own_labels
from train_gpt2 import to_float


def wrong_number(comparison, never):
    """The sentence on the first wrong number. never: the number was never written."""
    place = ",".join(map(str, comparison.place))
    with np.errstate(over="ignore", under="ignore"):  # a number below fp32's smallest is 0
        expected = float(np.float32(comparison.expected)) + 0.0  # and -0 is 0
    if never:
        return f"{comparison.name}[{place}] was never written, expected {expected:.6g}"
    return f"{comparison.name}[{place}] is {comparison.found:.9g}, expected {expected:.9g}"


def likeness(array, truth):
    """alike(x, y): True where x and y are alike as numbers of an output, or both not finite."""
    finite = np.isfinite(truth) & (truth != ANY)
    rtol = 2**-6 if array.itemsize == 2 else 1e-3  # a mistake changes more
    atol = 1e-2 * rtol * np.sqrt(np.mean(np.where(finite, truth, 0.0) ** 2))
    return lambda x, y: np.isclose(x, y, rtol=rtol, atol=atol) | ~(np.isfinite(x) | np.isfinite(y))


def facts_of(bench, comparison, code):
    """What is known about a wrong result: GENERAL and describe_wrong read these."""
    name, exercise = comparison.name, find_exercise(bench.ladder.name)
    arrays = {each: bench.result(bench.sets[0], each) for each in bench.truth}
    array, truth = arrays[name], bench.truth[name]
    found, cared = np.float64(to_float(array)), truth != ANY
    bits = array.view(f"u{array.itemsize}")
    never = cared & (bits == 2 ** (8 * array.itemsize) - 1) & ~np.isnan(truth)
    given = {key: value for key, value in vars(bench.given).items()
             if isinstance(value, np.ndarray) and value.dtype.kind == "f"}
    before = np.zeros_like(truth) if exercise.zeroed == name else given.get(name)
    f = SimpleNamespace(
        name=name, exercise=exercise, shape=truth.shape, place=comparison.place,
        found=comparison.found, expected=comparison.expected, bf16=array.itemsize == 2,
        in_bf16=bench.device.dtype == "bf16", code=code, cares=int(cared.sum()),
        never=int(never.sum()), never_there=bool(never[comparison.place]) and not shared_in(code),
        sizes={key: value for key, value in vars(bench.given).items() if type(value) is int},
        at={key: float(value[comparison.place]) for key, value in given.items()
            if key != name and value.shape == truth.shape and exercise.item.startswith("a number")})
    with np.errstate(all="ignore"):
        wrong, alike = wrong_places(bench, comparison, found, cared), likeness(array, truth)
        f.wrong, f.axes = int(wrong.sum()), [np.flatnonzero(wrong.any(tuple(
            other for other in range(truth.ndim) if other != axis))) for axis in range(truth.ndim)]
        f.shared = shared_in(code)
        f.threads = int((re.findall(r"\bBLOCK\(\s*(\d+)", code) or [0])[0])
        half = rf"(?:blockDim\.x|{f.threads})\s*(?:/\s*2|>>\s*1)|{f.threads // 2}"  # a tree's first
        f.halved = f.threads & (f.threads - 1) and re.search(
            rf"=\s*(?:{half})\s*;.*?(?:/=?\s*2|>>=?\s*1)\b", code, re.S)
        label = own_labels(exercise, bench.ladder).get(name, name)
        f.undefined = before is None and re.search(
            rf"\b{label}\s*\[[^;=]*\]\s*[-+*/]=|\batomicAdd\(\s*&?\s*{label}\b", code)
        f.row, f.smallest = np.array([]), False
        if exercise.rows and name in exercise.rows[1].split():
            f.row, f.smallest = rows_of(given[exercise.rows[0]], f.axes[0], comparison.place[0])
        f.nan, f.infinite = bool(np.isnan(f.found)), bool(np.isinf(f.found))
        f.zero = bool((found[cared] == 0).all())
        flat = wrong[cared]
        f.tail = bool(flat[flat.size - f.wrong :].all()) and f.wrong < f.cares

        def is_now(numbers):
            return bool(alike(found, numbers)[wrong].all())

        f.as_before = before is not None and is_now(before)
        f.not_added = before is not None and is_now(truth - before)
        f.twice = before is not None and is_now(2 * truth - before)
        ratio = (found / truth)[wrong & np.isfinite(found) & (truth != 0)]
        steady = ratio.size > 3 and float(np.ptp(ratio)) < 0.02 * abs(float(np.median(ratio)))
        f.ratio = float(np.median(ratio)) if steady and abs(np.median(ratio) - 1) > 0.02 else None
        f.every = every_nth(np.flatnonzero(wrong))
        f.shifted = "" if f.wrong <= 3 else next((how for how, moved in shifts(found) if (
            alike(moved, truth)[wrong].mean() > 0.9)), "")
        f.cut = f.bf16 and np.isfinite(found).all() and bool(
            (abs(found) <= abs(truth) * (1 + 2**-9))[cared].mean() > 0.99)
        f.why = "" if f.never else own_mistake(bench, name, arrays, wrong)
    return f


def shared_in(code):
    """The names of the __shared__ variables and arrays of a text, and their lines. They start with
    the bits of memory that nobody wrote, as outputs do, and a sum with them keeps those bits."""
    found = re.finditer(r"__shared__\s+\w+\s+(\w+)|DYNAMIC_SHARED\(\s*\w+\s*,\s*(\w+)", code)
    return " and ".join(f"{name[1] or name[2]} (line {code[: name.start()].count(chr(10)) + 1})"
                        for name in found)


def wrong_places(bench, comparison, found, cared):
    """True where a number is wrong, by the rule of compare_output, but with the limit of the
    whole."""
    name, truth = comparison.name, bench.truth[comparison.name]
    size = np.where(cared & np.isfinite(truth), abs(truth), 0)
    terms = bench.terms.get(name, 0)
    if name in bench.ladder.sums.split() and name not in bench.terms:
        terms = np.sqrt((size**2).mean(-1, keepdims=True))
    off = ~(abs(found - truth) <= HANDFUL * comparison.limit * (size + abs(terms)) + 1e-30)
    wrong = cared & off & ~((np.isnan(found) & np.isnan(truth)) | (found == truth))
    wrong[comparison.place] = True
    return wrong


def own_mistake(bench, name, arrays, wrong):
    """The sentence of the exercise's mistake that explains an output, or "". One that explains the
    other outputs too comes first: whether only the mean is wrong says which sum was."""
    a, fits = SimpleNamespace(**vars(bench.given)), []
    a.truth, results = bench.truth, {each: np.float64(to_float(array))
                                     for each, array in arrays.items()}
    alike = {each: likeness(array, bench.truth[each]) for each, array in arrays.items()}
    for mistake in mistakes_of(find_exercise(bench.ladder.name)):
        if mistake.places:
            places = mistake.places(a, results).get(name)
            if places is not None and not (wrong & ~places).any():
                fits.append((0, mistake.why))
            continue
        numbers = {**bench.truth, **mistake.numbers(a)}
        fit = {each: alike[each](results[each], numbers[each]) | (truth == ANY)
               for each, truth in bench.truth.items()}
        shows = ~alike[name](numbers[name], bench.truth[name]) & (bench.truth[name] != ANY)
        if shows.any() and fit[name][shows].mean() > 0.95 and fit[name][wrong].mean() > 0.95:
            fits.append((sum(each.mean() < 0.95 for each in fit.values()), mistake.why))
    return min(fits, key=lambda fit: fit[0], default=(0, ""))[1]


def rows_of(x, wrong, first):
    """(the finite numbers of the first wrong row of an input, whether the wrong rows are those of
    the smallest deviations), where some rows are right; else (no numbers, False)."""
    right = np.setdiff1d(np.arange(len(x)), wrong)
    if not right.size:
        return np.array([]), False
    deviations = x.std(1)
    return x[first][np.isfinite(x[first])], bool(deviations[wrong].max() < deviations[right].min())


def every_nth(places):
    """n, if places are a number, the n-th behind it, and so on; else 0."""
    steps = set(np.diff(places).tolist())
    return steps.pop() if len(steps) == 1 and len(places) > 2 and 1 not in steps else 0


def shifts(found):
    """(in words, the numbers moved back) for numbers that are all a place or a row off."""
    for by, where in ((1, "behind"), (-1, "before")):
        yield (f"one place {where} where they belong",
               np.roll(found.reshape(-1), -by).reshape(found.shape))
        if found.ndim > 1:
            width = found.shape[-1]
            yield (f"one row {where} where they belong",
                   np.roll(found.reshape(-1), -by * width).reshape(found.shape))


def columns_of(f):
    return f.axes[-1].tolist() if len(f.shape) > 1 else []


def in_padding(f):
    return f.name in f.exercise.padded.split() and columns_of(f)[0] >= f.sizes["V"]


def end_of(f):
    """The name of the size at which the wrong columns end, if they are a row's last ones before it;
    or None."""
    columns = columns_of(f)
    for name, size in f.sizes.items():
        last = columns and columns == list(range(columns[0], size))
        if last and size > 2 and len(columns) <= size // 3:
            return name
    return None


def factor(f):
    """"4, which is NH": a factor, and the size that it is."""
    names = {**f.sizes, **{f"1/{name}": 1 / size for name, size in f.sizes.items() if size}}
    same = [name for name, size in names.items()
            if abs(f.ratio - size) < 0.002 * abs(size) and size not in (0, 1)]
    return f"{f.ratio:.4g}{f', which is {same[0]},' if same else ''}"


# What usually causes a wrong result in any exercise: (condition, sentence). The first whose
# condition holds is said.
GENERAL = [
    (lambda f: f.undefined and (f.never or f.nan), "{f.name} starts undefined, and += adds to what "
     "is there. Add up in a variable, and store that with =."),
    (lambda f: f.halved, "it halves {f.threads} threads, which is no power of two: an odd half "
     "leaves a number out. Take 64 or 128 threads."),
    (lambda f: f.never == f.wrong and f.shared and (f.never == f.cares or not f.tail),
     "these are the bits of memory that nobody wrote. Is {f.name} stored? Is {f.shared} set before "
     "it is read? Shared memory does not start at 0."),
    (lambda f: f.never == f.cares, "nothing was written to {f.name}. Is there a line that stores "
     "to it, and do the threads reach it?"),
    (lambda f: f.never and "blockIdx" not in f.code and f.exercise.items != "1",
     "the end of {f.name} was never written. The index leaves out blockIdx.x, so every block does "
     "the work of the first."),
    (lambda f: f.never and in_padding(f),
     "the columns from V on were never written. They must become 0."),
    (lambda f: f.never and end_of(f),
     "the last columns were never written. Does the loop over a row stop too early?"),
    (lambda f: f.never == f.wrong and f.tail, "the end of {f.name} was never written. Is the bound "
     "of the if right? Or does BLOCK claim more items for a block than its threads do?"),
    (lambda f: f.never, "these numbers were never written, or come from memory that no thread "
     "wrote. Check the index, and which threads store."),
    (lambda f: f.as_before,
     "{f.name} still has the value from before the launch. Which line should change it?"),
    (lambda f: f.not_added, "the value that {f.name} had before is lost: write += and not =."),
    (lambda f: f.twice, "each number was added twice."),
    (lambda f: f.zero and re.search(r"(?<![\w.])\d+ */ *\d+(?![\w.])", f.code), "{f.name} is 0 "
     "everywhere. In C a quotient of integers is an integer: 1/2 is 0, and 0.5f is a half."),
    (lambda f: f.zero, "{f.name} is 0 everywhere. Does each loop run, and is each factor set?"),
    (lambda f: f.ratio, "all wrong numbers are {factor} times what they should be. Is a factor "
     "missing, or one too many?"),
    (lambda f: f.shifted, "all numbers are {f.shifted}. Check the index."),
    (in_padding, "only the padding is wrong, the columns from V on. They must be 0."),
    (lambda f: 1.6e38 < abs(f.found) < 1.8e38,
     "this comes from a variable without a first value: write sum = 0.0f."),
    (lambda f: f.nan, "NaN is 0/0, infinity - infinity, infinity/infinity, the root of a negative "
     "number, or memory that no thread wrote."),
    (lambda f: f.infinite,
     "a number overflowed: e^x is infinite in fp32 from x = 89 on, and x/0 is too."),
    (lambda f: f.bf16 and abs(f.found - f.expected) <= 2**-7 * abs(f.expected) and f.cut,
     "bf16 was cut off where it should be rounded; from_float rounds."),
    (lambda f: f.in_bf16 and abs(f.found - f.expected) <= 2**-6 * abs(f.expected), "the result is "
     "right in fp32, and here off by roundings to bf16. Compute in float, and round once, at the "
     "end."),
    (end_of, "only the last columns are wrong. Does the loop over a row end right: < or <=, and "
     "{end} or another size?"),
    (lambda f: f.smallest and "deviation" in f.exercise.rows,
     "only the rows with the smallest deviations are wrong. Is it the right eps, inside the root?"),
    (lambda f: f.tail, "the beginning is right, and from some number on all are wrong. Check the "
     "number of items in BLOCK, and the index."),
    (lambda f: f.exercise.rows and f.name in f.exercise.rows[1].split(),
     "compare the sums over the row with the formula, and then the line that writes each number."),
    (lambda f: f.wrong == f.cares, "compare the line that computes it with the formula."),
    (lambda f: f.wrong == 1, "follow the thread that writes this number."),
    (lambda f: True,
     "see what these places have in common, and follow the thread that writes the first of them."),
]


def place_of(f):
    """Where the first wrong number is: "row 3 of 27, column 5 of 96", or the exercise's own
    axes."""
    axes = f.exercise.axes.split()
    if len(axes) == len(f.place):
        return ", ".join(head_of(f, index) if axis == "head" else f"{axis} = {index}"
                         for axis, index in zip(axes, f.place))
    row = f"row {f.place[0]} of {f.shape[0]}"
    if len(f.place) == 1:
        return row if f.row.size else ""
    column = f.place[1]
    ends = [name for name, size in f.sizes.items() if size == column + 1 > 4]
    return f"{row}, column {column}" + (f", the last before {ends[0]} = {column + 1}"
                                        if ends else f" of {f.shape[1]}")


def head_of(f, index):
    """A head of queries, keys and values side by side."""
    NH, NKV = f.sizes["NH"], f.sizes.get("NKV", f.sizes["NH"])
    if index < NH:
        return f"head {index} of the queries"
    return f"head {(index - NH) % NKV} of the {'keys' if index < NH + NKV else 'values'}"


def note_on(f):
    """What is special about the row, where others are right; or the inputs at the place, where they
    may say more."""
    if f.row.size:
        mean, deviation = float(f.row.mean()), float(f.row.std())
        name, _, kind = f.exercise.rows
        if kind == "range" and (f.row.max() > 88.7 or f.row.max() < -103):
            return f"that row of {name} has numbers from {f.row.min():.4g} to {f.row.max():.4g}"
        if kind == "deviation" and abs(mean) > 20 * deviation > 0:
            return f"that row of {name} has a mean of {abs(mean / deviation):.0f} deviations"
        if kind == "deviation" and deviation < 0.02:
            return f"that row of {name} has a deviation of {deviation:.2g}"
    known = [f"{key} is {value:.6g}" for key, value in f.at.items() if np.isfinite(value)]
    return "" if f.why and np.isfinite(f.found) or not known else f"{' and '.join(known)} there"


AXES = dict(b="sequences", t="positions", h="heads", head="heads", c="channels", s="keys",
            which="parts (q, k, v)", row="rows", column="columns")


def spread(f):
    """In which rows and columns, or along which axes, the wrong numbers are, where not in all."""
    own = f.exercise.axes.split()
    names = own if len(own) == len(f.shape) else ["row", "column"] if len(f.shape) == 2 else []
    one = [f"{name} {indices[0]}" for name, indices, size in zip(names, f.axes, f.shape)
           if len(indices) == 1 < size]
    some = [f"{len(indices)} of {size} {AXES[name]}"
            for name, indices, size in zip(names, f.axes, f.shape) if 1 < len(indices) < size]
    where = f", all in {', '.join(one)}" if one else ""
    return where + (f", in {' and '.join(some)}" if some else "")


def how_many(f):
    if f.wrong == f.cares:
        return f"all {f.cares:,} numbers are wrong"
    if f.wrong == 1:
        return f"this one of {f.cares:,} numbers is wrong"
    where = f", every {f.every:,}th" if f.every and f.every not in f.shape else spread(f)
    return f"{f.wrong:,} of {f.cares:,} numbers are wrong{where}"


def describe_wrong(f):
    """The lines on a wrong number: where it is, how many there are, and the cause."""
    where = "; ".join(filter(None, (place_of(f), note_on(f))))
    lines = [f"where: {where}"] if where else []
    if f.cares > 2:
        lines.append(f"how many: {how_many(f)}")
    if f.why:
        return [*lines, f"why: {f.why}"]
    cause = next(text for condition, text in GENERAL if condition(f))
    return [*lines,
            "usually: " + cause.format(f=f, factor=factor(f) if f.ratio else "", end=end_of(f))]
