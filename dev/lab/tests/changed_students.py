"""Students' files that differ from another in a few places: from one of those in students/."""
from pathlib import Path

STUDENTS = Path(__file__).parent / "students"
# (name, the file that it is like, its first line, [(text there, text here)], texts whose lines the
# judge's message may name: in students/ these lines end in //!)
CHANGED = (
    ("crossentropy_forward_unsigned_bytes", "crossentropy_forward_online",
     "wrong: losses.*wrapped", [("logits + (size_t)row * Vp", "(const real*)(\n        "
      "(const char*)logits + (unsigned)row * Vp * (unsigned)sizeof(real))")]),
    ("encoder_backward_half_atomic", "encoder_backward_no_atomics",
     "wrong: race.*dwpe|dwpe.*race", [("    if", "\n    if"),
      ("dwte[(size_t)tokens[row] * C + c] += d",
       "atomicAdd(&dwte[(size_t)tokens[row] * C + c], d)")], "dwpe[("),
    ("gqa_forward_1024_threads", "gqa_forward_launch_bounds",
     "wrong: registers", [("BLOCK(128", "BLOCK(1024"), (" __launch_bounds__(128)", "")]),
    ("matmul_forward_two_buffers_late_barrier", "matmul_forward_double_buffer",
     "wrong: race on b.*between line 20 and line 17 of the next turn", [
      ("        for (int j", "        __syncthreads();\n        for (int j"),
      ("b[stage][x][j];\n        __syncthreads();", "b[stage][x][j];")], "(int j", "from_b[k"),
    ("row_sum_adds_to_undefined", "row_sum_launch_bounds_by_name",
     "wrong: out starts undefined", [("blockIdx.x] = sum", "blockIdx.x] += sum")]),
    ("row_sum_without_a_column", "row_sum_launch_bounds_by_name",
     "wrong: reads inp.*45 numbers.*have no column", [("c = threadIdx.x;",
      "c = threadIdx.x + THREADS;"), ("sum = 0.0f", "sum = to_float(inp[(size_t)blockIdx.x * C + "
      "threadIdx.x])")], "float sum"),
    ("row_sum_waits_for_the_block_before", "row_sum_launch_bounds_by_name",
     "wrong: b waits for block b-1.*promises no order", [
      ("#define", "__device__ unsigned done;\n#define"),
      ("out[blockIdx.x] =", "{\n        while (atomicAdd(&done, 0u) != blockIdx.x) {}\n"
       "        __threadfence();\n        out[blockIdx.x] ="),
      ("= sum;", "= sum;\n        __threadfence();\n        atomicExch("
       "&done, blockIdx.x + 1 == gridDim.x ? 0u : blockIdx.x + 1);\n    }")], "while ("),
    ("softmax_forward_tree_of_96", "softmax_forward_tree",
     "wrong: halves 96 threads", [("BLOCK(256", "BLOCK(96"), ("part[256]", "part[96]"),
      ("v += 256) top", "v += 96) top"), ("v += 256) sum", "v += 96) sum"),
      ("Vp; v += 256", "Vp; v += 96"), ("half = 128", "half = 48")]),
    ("row_sum_launch_bounds_too_small", "row_sum_launch_bounds_by_name",
     "wrong: launch_bounds", [("BLOCK(128", "BLOCK(256"), ("(THREADS, 2)", "(128)"),
      ("c += THREADS", "c += blockDim.x")], "bounds__("),
    ("row_sum_launch_bounds_name_too_small", "row_sum_launch_bounds_by_name",
     "wrong: launch_bounds__.THREADS. promises .* 128 threads.* 256", [("BLOCK(128", "BLOCK(256")],
     "bounds__("),
    ("row_sum_volatile_sums_no_fence", "row_sum_volatile_sums_fenced",
     "wrong: sums.*__threadfence", [("        __threadfence();\n", ""),
      ("    __threadfence();\n    for", "    for")], "] = sum;", "out[n] = sums[n];"),
    ("softmax_forward_endless", "softmax_forward_fast_expf",
     "wrong: not end|no end|never ends|forever", [("v++) sum += __expf", ") sum += expf"),
      ("? __expf", "? expf")], "< V; )"),
)


def texts():
    """{name: text} of all students' files."""
    found = {path.stem: path.read_text("utf-8") for path in sorted(STUDENTS.glob("*.cu"))}
    for name, like, first, changes, *marked in CHANGED:
        text = found[like].partition("\n")[2].replace("  //!", "")
        for old, new in (*changes, *((mark, f"{mark}\0") for mark in marked)):
            assert text.count(old) == 1, f"{name}: {old!r} is there {text.count(old)} times"
            text = text.replace(old, new)
        lines = [line.replace("\0", "") + "  //!" * ("\0" in line) for line in text.split("\n")]
        found[name] = "\n".join([f"// {first}", *lines])
    return found
