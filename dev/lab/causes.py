"""What is wrong with a result, and its usual cause, from the numbers and the student's text."""
import re
from types import SimpleNamespace

import numpy as np

from dev.lab.exercises import EXERCISES
from dev.lab.inputs import ANY
from train_gpt2 import to_float


def wrong_number(comparison, never):
    """The sentence on the first wrong number. never: the number was never written."""
    place = ",".join(map(str, comparison.place))
    if never:
        return f"{comparison.name}[{place}] was never written, expected {comparison.expected:.6g}"
    text = f"{comparison.name}[{place}] is {comparison.found:.9g}, expected {comparison.expected:.9g}"
    if not np.isfinite(comparison.error) or not comparison.limit:
        return text
    return f"{text} (relative error of all {comparison.error:.1e}, limit {comparison.limit:.1e})"


def facts_of(bench, comparison, code):
    """What is known about a wrong result: CAUSES reads these."""
    a, name = bench.sets[0], comparison.name
    array, truth = bench.result(a, name), bench.truth[name]
    found, cared = np.float64(to_float(array)), truth != ANY
    scale = np.sqrt(np.mean(np.where(cared & np.isfinite(truth), truth, 0) ** 2)) or 1
    loose = 2**-6 if array.itemsize == 2 else 1e-3
    with np.errstate(all="ignore"):
        close = np.isclose(found, truth, rtol=loose, atol=loose * 1e-2 * scale, equal_nan=True)
        wrong = cared & ~close
        wrong[comparison.place] = True
        never = cared & (array.view(f"u{array.itemsize}") == 2 ** (8 * array.itemsize) - 1) & ~np.isnan(truth)
        ratio = (found / truth)[wrong & np.isfinite(found) & (truth != 0)]
        steady = ratio.size > 3 and float(np.ptp(ratio)) < 0.02 * abs(float(np.median(ratio)))
    given = {key: value for key, value in vars(bench.given).items() if isinstance(value, np.ndarray)
             and value.dtype.kind == "f"}
    columns = truth.shape[-1] if truth.ndim > 1 else 0
    rows = truth.size // columns if columns else truth.size
    place = np.ravel_multi_index(comparison.place, truth.shape)
    flat, before = wrong.reshape(-1), given.get(name)
    of_rows = {key: value.reshape(rows, -1) for key, value in given.items() if value.ndim > 1 and value.size > rows and
               value.size % rows == 0} if EXERCISES[bench.ladder.name].item == "a row" else {}
    row = {key: value[place // (columns or 1)] for key, value in of_rows.items()}
    row = {key: value[np.isfinite(value)] for key, value in row.items()}
    f = SimpleNamespace(
        name=name, shape=truth.shape, place=comparison.place, found=comparison.found, expected=comparison.expected,
        error=comparison.error, never_there=bool(never[comparison.place]), zero=bool((found[cared] == 0).all()),
        dtype=bench.device.dtype, bf16=array.itemsize == 2, code=code, kernel=bench.ladder.name, cares=int(cared.sum()),
        wrong=int(wrong.sum()), never=int(never.sum()), row=row, row_number=int(place // (columns or 1)), rows=rows,
        column=int(place % columns) if columns else None, columns=columns,
        at={key: float(value[comparison.place]) for key, value in given.items() if value.shape == truth.shape},
        ratio=float(np.median(ratio)) if steady else None,
        tail=bool(wrong.any()) and bool(flat[flat.size - int(flat.sum()):].all()),
        ends={key: value for key, value in vars(bench.given).items() if type(value) is int},
        shared="__shared__" in code or "block_reduce" in code)
    f.wrong_columns = sorted({*np.flatnonzero(wrong.reshape(rows, columns).any(0)).tolist()}) if columns else []
    f.wrong_rows = np.flatnonzero(wrong.reshape(rows, columns or 1).any(1)).tolist()
    f.as_before = before is not None and bool(np.isclose(found, before, rtol=loose)[wrong].all())
    f.not_added = before is not None and bool(np.isclose(found, truth - before, rtol=loose, atol=loose)[wrong].all())
    f.nan, f.infinite = bool(np.isnan(comparison.found)), bool(np.isinf(comparison.found))
    f.largest = max((float(x.max()) for x in row.values()), default=0)
    right = np.setdiff1d(np.arange(rows), f.wrong_rows)
    f.smallest = bool(f.wrong_rows and right.size) and any(
        x[f.wrong_rows].std(1).max() < x[right].std(1).min() for x in of_rows.values())
    f.shifted = 0
    for shift in (1, -1):
        moved = np.roll(found.reshape(-1), shift)
        if f.wrong > 3 and np.isclose(moved, truth.reshape(-1), rtol=loose, atol=0)[flat].mean() > 0.9:
            f.shifted = shift
    f.reductions = reductions_missing(f)
    f.cut = f.bf16 and np.isfinite(found).all() and bool((abs(found) <= abs(truth) * (1 + 2**-9))[cared].mean() > 0.99)
    return f


def reductions_missing(f):
    """"is warp_sum missing?", where the lanes of a warp share a row and the code lacks a reduction; or ""."""
    lanes = re.search(r"threadIdx\.x\s*(%\s*32|&\s*31)|\blane\b", f.code)
    if not lanes or "warp_sum" not in EXERCISES[f.kernel].helpers:
        return ""
    if re.search("__shfl|__syncthreads|block_reduce|__shared__|DYNAMIC_SHARED", f.code):
        return ""
    wanted = ("warp_sum",) if "norm" in f.kernel else ("warp_sum", "warp_max")
    missing = [name for name in wanted if not re.search(rf"\b{name}\b", f.code)]
    return f"{'are' if len(missing) > 1 else 'is'} {' and '.join(missing)} missing?" if missing else ""


def end_of(f):
    """The name of the size at which the wrong columns end, if they are a row's last ones before it; or None."""
    for name, size in f.ends.items():
        if f.columns and f.wrong_columns and size > 2 and f.wrong_columns[-1] == size - 1 and (
                f.wrong_columns == list(range(f.wrong_columns[0], size)) and len(f.wrong_columns) <= size // 3):
            return name
    return None


# What usually causes a wrong result: (condition, sentence). The first whose condition holds is printed.
CAUSES = [
    (lambda f: f.never == f.cares, "nothing was written to {name}. Is there a line that stores to it, and do the "
     "threads reach it?"),
    (lambda f: f.never and "blockIdx" not in f.code, "the end of {name} was never written. The index leaves out "
     "blockIdx.x, so every block does the work of the first."),
    (lambda f: f.never and f.tail and f.never == f.wrong, "the end of {name} was never written. Is the bound of the if "
     "right? Or does the index leave out blockIdx.x? Or does BLOCK claim more items for a block than its threads do?"),
    (lambda f: f.never and end_of(f), "the last columns were never written. Does the loop over a row stop too early?"),
    (lambda f: f.never, "these numbers were never written, or come from shared memory that was never written. Check "
     "the index, and which threads store."),
    (lambda f: f.zero, "{name} is 0 everywhere. In C a quotient of integers is an integer: 1/2 is 0, and 0.5f is "
     "a half."),
    (lambda f: (f.nan or f.infinite or f.found == 0) and abs(f.largest) > 80 and "norm" not in f.kernel, "exp(x) is "
     "infinite in fp32 from x = 89 on, and 0 below x = -104. Subtract the row's largest number before exp."),
    (lambda f: (f.nan or f.infinite) and any(abs(x) > 15 for x in f.at.values()), "a large input overflowed on the "
     "way: exp(x) is infinite in fp32 from x = 89 on. Write the formula so that it works for a large x."),
    (lambda f: f.nan and f.shared, "NaN is 0/0, inf - inf, the root of a negative number, or shared memory that no "
     "thread wrote."),
    (lambda f: f.nan, "NaN is 0/0, inf - inf, or the root of a negative number. If a variance is the average of x^2 "
     "minus mean^2, it cancels: take the average of (x - mean)^2."),
    (lambda f: f.reductions, "each lane has only its own numbers: {reductions}"),
    (lambda f: f.as_before, "{name} has its value from before the launch: it was never changed there."),
    (lambda f: f.not_added, "{name} has the sum, but not the value that was there before: write += and not =."),
    (lambda f: f.ratio, "all wrong numbers are {ratio:.4g} times what they should be. Is there a factor missing, or "
     "one too many?"),
    (lambda f: f.shifted, "all numbers are one place off. Check the index."),
    (lambda f: f.columns and f.wrong_columns and f.wrong_columns[0] >= f.ends.get("V", f.columns), "only the padding "
     "is wrong, the columns from V on. They must be zero."),
    (lambda f: f.bf16 and abs(f.found - f.expected) <= 2**-7 * abs(f.expected) and f.cut, "bf16 was cut off where it "
     "should be rounded; from_float rounds."),
    (lambda f: f.bf16 and abs(f.found - f.expected) <= 2**-6 * abs(f.expected), "the result is right in fp32, and here "
     "off by roundings to bf16. Compute in float, and round once, at the end."),
    (lambda f: end_of(f), "only the last columns are wrong. Check the bound of the loop over a row: < or <=, and "
     "{end} or another size?"),
    (lambda f: f.smallest and "norm" in f.kernel, "only the rows with the smallest deviations are wrong. "
     "Is eps (1e-5) there, inside the root?"),
    (lambda f: "norm" in f.kernel and any(abs(x.mean()) > 20 * x.std() for x in f.row.values()), "a row with a large "
     "mean is wrong. Subtract the mean before you square: the average of x^2 minus mean^2 cancels."),
    (lambda f: f.tail and f.wrong < f.cares, "the beginning is right, and from some number on all are wrong. Check "
     "the number of items in BLOCK, and the index."),
    (lambda f: f.row and ("norm" in f.kernel or "softmax" in f.kernel) and f.error < 0.1,
     "a row is a little off: is each number of the row added once, the first and the last too?"),
    (lambda f: f.row and ("norm" in f.kernel or "softmax" in f.kernel), "a row is far off. Compare the sums "
     "over the row with the formula, and then the line that writes each number."),
    (lambda f: f.wrong == f.cares, "every number is wrong. Compare the line that computes it with the formula."),
    (lambda f: True, "see what these places have in common, and follow the thread that writes the first of them."),
]


def describe_wrong(f):
    """The lines on a wrong number: where it is, how many there are, and the usual cause."""
    said = []
    if f.columns:
        ends = [name for name, size in f.ends.items() if size == f.column + 1 > 4]
        which = f"the last before {ends[0]} = {f.column + 1}" if ends else f"of {f.columns}"
        said.append(f"row {f.row_number} of {f.rows}, column {f.column}, {which}")
    elif f.row:
        said.append(f"row {f.row_number} of {f.rows}")
    said += [f"{key} is {value:.6g} there" for key, value in f.at.items() if key != f.name]
    for key, x in f.row.items():
        mean, deviation = float(x.mean()), float(x.std())
        note = (f", so the mean is {abs(mean / deviation):.0f} deviations" if abs(mean) > 20 * deviation > 0 else
                ", and e^x of the largest is infinite in fp32" if x.max() > 88.7 else "")
        said.append(f"that row of {key} has numbers from {x.min():.4g} to {x.max():.4g}, mean {mean:.4g}, "
                    f"deviation {deviation:.3g}{note}")
    lines = [f"{'where:' if i == 0 else '      '} {line}" for i, line in enumerate(said)]
    many = f"{f.wrong:,} of {f.cares:,} numbers are wrong"
    if f.columns and f.wrong < f.cares:
        many += f", in {len(f.wrong_rows)} of {f.rows} rows and in {len(f.wrong_columns)} of {f.columns} columns"
    cause = next(text for condition, text in CAUSES if condition(f))
    return [*lines, f"how many: {many}", "usually: " + cause.format(name=f.name, ratio=f.ratio or 0, end=end_of(f),
                                                                           reductions=f.reductions)]
