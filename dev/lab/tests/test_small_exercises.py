"""Test the five small exercises of the lab: what a student would write first, right and wrong.

test_exercise.py tests that the lab's own versions solve them.
"""
import re

from dev.lab import grade
from dev.lab.explain import complaint_lines
from dev.lab.submission import Submission
from dev.lab.tests.student import filled, said
from dev.tests.checks import check

NUMBER = """
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= COUNT) return;
"""
SHIFT = NUMBER.replace("COUNT", "(size_t)N * C") + """
    if (i % C == 0) from_float(out[i], 0.0f);
    else from_float(out[i], to_float(inp[i - 1]));
"""
ROW_SUM = """
    __shared__ float part[256];
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        sum += to_float(inp[(size_t)blockIdx.x * C + c]);
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
"""
TRANSPOSE = NUMBER.replace("COUNT", "(size_t)N * C") + """
    size_t n = i / C, c = i % C;
    out[c * N + n] = inp[i];
"""
TILE = """
    __shared__ real tile[32][33];
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    int n = blockIdx.x * 32, c = blockIdx.y * 32;
    if (n + y < N && c + x < C) tile[y][x] = inp[(size_t)(n + y) * C + c + x];
    __syncthreads();
    if (c + y < C && n + x < N) out[(size_t)(c + y) * N + n + x] = tile[x][y];
"""
GROUP = """
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float x = 0.0f;
    if (i < n) x = to_float(inp[i]);
    float most = fabsf(x);
    for (int step = 1; step < 32; step *= 2) {
        float other = __shfl_xor_sync(FULL_WARP, most, step);
        most = fmaxf(most, other);
    }
    if (i < n) from_float(out[i], x / most);
"""
PREFIX = """
    __shared__ float sums[256];
    float before = 0.0f;
    for (int first = 0; first < C; first += blockDim.x) {
        int c = first + threadIdx.x;
        size_t i = (size_t)blockIdx.x * C + c;
        sums[threadIdx.x] = c < C ? to_float(inp[i]) : 0.0f;
        __syncthreads();
        for (int step = 1; step < blockDim.x; step *= 2) {
            float left = threadIdx.x >= step ? sums[threadIdx.x - step] : 0.0f;
            __syncthreads();
            sums[threadIdx.x] += left;
            __syncthreads();
        }
        if (c < C) out[i] = before + sums[threadIdx.x];
        before += sums[blockDim.x - 1];
        __syncthreads();
    }
"""
OF_ROW, OF_TILE = "BLOCK(256, 1)", "BLOCK(1024, 32, 32)"
NUMPY, RACES, BOUNDS = None, grade.RACES, grade.BOUNDS  # who finds the mistake

# The exercise, what is tried, a right body, what is replaced in it by what, who finds it, and what
# is said (a regular expression). A right one is shown to all three.
TRIES = (
    ("shift", "right", SHIFT, "", "", None, None),
    ("shift", "only the first number is an edge", SHIFT,
     "i % C == 0", "i == 0", NUMPY, r"wrong: out\[1,0\] is"),
    ("shift", "no edge at all", SHIFT,
     "i % C == 0", "i == N * C", BOUNDS, r"reads inp\[-1\]"),
    ("row_sum", "right", ROW_SUM, "", "", None, None),
    ("row_sum", "no barrier between two steps", ROW_SUM,
     "];\n        __syncthreads();", "];", RACES,
     r"race on part\[\d+\]: .*line \d+: if .threadIdx.x < half.*line \d+: if .threadIdx.x < half"),
    ("row_sum", "one step too few", ROW_SUM, "half > 0", "half > 1", NUMPY, r"wrong: out\[0\] is"),
    ("transpose", "right", TRANSPOSE, "", "", None, None),
    ("transpose", "a row of out is taken for one of inp", TRANSPOSE,
     "c * N + n", "c * C + n", BOUNDS, r"writes out\[\d+\]"),
    ("transpose", "right with tiles", TILE, "", "", None, None),
    ("transpose", "no barrier between the tile's two uses", TILE,
     "    __syncthreads();\n", "", RACES,
     r"race on tile\[.*line \d+: .*tile\[x\]\[y\].*line \d+: .*tile\[y\]\[x\]"),
    ("transpose", "the tile is not turned", TILE,
     "tile[x][y]", "tile[y][x]", NUMPY, r"(wrong|never written)"),
    ("group_scale", "right", GROUP, "", "", None, None),
    ("group_scale", "lanes without a number return", GROUP,
     "    float most", "    else return;\n    float most", NUMPY,
     r"stuck in __shfl_xor_sync.*line \d+: float other"),
    ("group_scale", "one step too few", GROUP,
     "step < 32", "step < 16", NUMPY, r"wrong: out\[\d+\] is"),
    ("group_scale", "without a sign", GROUP, "fabsf(x)", "x", NUMPY, r"wrong: out\[\d+\] is"),
    ("prefix_sum", "right", PREFIX, "", "", None, None),
    ("prefix_sum", "one barrier a step", PREFIX,
     "left;\n            __syncthreads();", "left;", RACES,
     r"race on sums\[\d+\]: .*line \d+: .*line \d+: "),
    ("prefix_sum", "the rounds before are forgotten", PREFIX,
     "before += sums[blockDim.x - 1];", "", NUMPY, r"wrong: out\[\d+,256\] is"),
)


def test_tries(folder):
    """A right kernel is accepted by all who look, and a wrong one gets the line or the number."""
    for looks_for, variables in ((NUMPY, None), (RACES, grade.race_variables()),
                                 (BOUNDS, grade.sanitizer_variables())):
        if looks_for and variables is None:
            print(f"skipped: this compiler cannot look for {looks_for}")
            continue
        files = {}
        for number, (name, what, body, old, new, who, wish) in enumerate(TRIES):
            if wish and who != looks_for:
                continue
            assert not old or body.count(old) == 1, what
            block = OF_TILE if body is TILE else OF_ROW if body in (ROW_SUM, PREFIX) else ""
            path = folder / f"my_{name}_{number}.cu"
            body = body.replace(old, new) if old else body
            path.write_text(filled(name, body, f"_{number}", block=block))
            files[path] = f"{name}: {what}", wish
        right = [path for path, (_, wish) in files.items() if not wish]
        wrong = [path for path in files if path not in right]
        # A sanitizer ends the process at the first wrong access.
        for together in [right, *([path] for path in wrong)] if looks_for == BOUNDS else [[*files]]:
            job = dict(compile=[*map(str, files)], run=[*map(str, together)],
                       look_for=looks_for, dtypes=["fp32"], limit=60)
            result = grade.run_child(job, variables)
            for path in together:
                what, wish = files[path]
                lines = complaint_lines(Submission(path), *result, looks_for == BOUNDS)
                ok = lines is not None and re.search(wish, said(lines)) if wish else lines == []
                check(f"{what}, {looks_for or 'compared with NumPy'}", ok, "" if ok else lines)
