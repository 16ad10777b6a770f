"""Students' files that differ from another in a few places: from one of those in students/."""
from pathlib import Path

STUDENTS = Path(__file__).parent / "students"
# (name, the file that it is like, its first line, [(text there, text here)], texts whose lines the
# judge's message may name: in students/ these lines end in //!)
CHANGED = (
    ("adamw_decay_of_all", "adamw_clipped",
     "wrong: params|decay", [("if (decayed[tensor]) step", "step")]),
    ("attention_backward_values_without_atomics", "attention_backward_atomics",
     "wrong: race.*dqkv", [
      ("atomicAdd(&dqkv[v + c], p * to_float(dy[c])", "dqkv[v + c] += p * to_float(dy[c]")],
     "dqkv[v"),
    ("attention_forward_array_130", "attention_forward_scale_forgotten",
     "wrong: index \\d+ is|out of bounds|a\\[\\d+\\]|larger", [
      ("*a = att + (size_t)i * T", "a[130]"), ("a[s] = score", "a[s] = scale * score")], "score;"),
    ("attention_forward_heads_share_scores", "attention_forward_scale_forgotten",
     "wrong: race.*att", [("(size_t)i *", "((size_t)b * T + t) *"),
      ("a[s] = score", "a[s] = scale * score")], "score;", "fmaxf(", "= expf", "sum +=", "s++) o"),
    ("attention_forward_s_less_than_t", "attention_forward_scale_forgotten",
     "wrong: itself|s <= t|<= t|own key|diagonal|last key", [
      ("0.0f;\n    for (int s = 0; s <= t;", "0.0f;\n    for (int s = 0; s < t;"),
      ("a[s] = score", "a[s] = scale * score"),
      ("}\n    for (int s = 0; s <= t;", "}\n    for (int s = 0; s < t;"),
      ("s <= t; s++) o +=", "s < t; s++) o +=")]),
    ("classifier_fused_logit_read_late", "classifier_fused_warp_a_row",
     "wrong: race|target|loss", [("0f, wanted = to_float(x[target])", "0f"),
      ("    __syncwarp();  // all lanes have read the target's logit\n", ""),
      (" wanted;", " to_float(x[target]);")]),
    ("crossentropy_forward_unsigned_bytes", "crossentropy_forward_online",
     "wrong: losses.*wrapped", [("logits + (size_t)row * Vp", "(const real*)(\n        "
      "(const char*)logits + (unsigned)row * Vp * (unsigned)sizeof(real))")]),
    ("encoder_backward_half_atomic", "encoder_backward_no_atomics",
     "wrong: race.*dwpe|dwpe.*race", [("    if", "\n    if"),
      ("dwte[(size_t)tokens[row] * C + c] += d",
       "atomicAdd(&dwte[(size_t)tokens[row] * C + c], d)")], "dwpe[("),
    ("encoder_backward_int_atomics", "encoder_backward_no_atomics",
     "wrong: dwte|dwpe|atomicAdd", [
      ("dwte[(size_t)tokens[row] * C + c] += d;\n    dwpe[(size_t)(row % T) * C + c] += d",
       "atomicAdd((int*)&dwte[(size_t)tokens[row] * C + c], (int)d);\n"
       "    atomicAdd((int*)&dwpe[(size_t)(row % T) * C + c], (int)d)")]),
    ("gelu_forward_undefined_function", "gelu_forward_host_helper",
     "wrong: cube.*(defin|body)|(defin|body).*cube", [
      ("float cube(float x) { return x * x * x; }", "__device__ float cube(float x);")],
     "float x)", "out[i]"),
    ("global_norm_eight_without_a_bound", "global_norm_first_warp_only",
     "wrong: reads grads.31", [("i = threadIdx.x; i < n; i += blockDim.x) sum += grads[i] * "
      "grads[i]", "i = 8 * threadIdx.x; i < n; i += 8 * blockDim.x)\n"
      "        for (int k = 0; k < 8; k++) sum += grads[i + k] * grads[i + k]"),
      ("warp_sum(sum)", "block_reduce<warp_sum>(sum, 0.0f)")], "k < 8"),
    ("global_norm_float4_without_a_tail", "global_norm_first_warp_only",
     "wrong: norm.*last n % 4 numbers", [("i < n; i += blockDim.x) sum += grads[i] * grads[i]",
      "i < n / 4; i += blockDim.x) {\n        float4 v = ((const float4*)grads)[i];\n"
      "        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;\n    }"),
      ("warp_sum(sum)", "block_reduce<warp_sum>(sum, 0.0f)")]),
    ("global_norm_shared_not_cleared", "global_norm_first_warp_only",
     "wrong: total|shared", [("    float sum", "    __shared__ float total;\n    float sum"),
      ("== 0) norm[0] = sqrtf(sum",
       "% 32 == 0) atomicAdd(&total, sum);\n"
       "    __syncthreads();\n"
       "    if (threadIdx.x == 0) norm[0] = sqrtf(total")], "total;", "x % 32"),
    ("global_norm_total_set_back", "global_norm_total_not_reset",
     "right", [("    float sum", "    if (threadIdx.x == 0) total = 0.0f;\n    __syncthreads();\n"
      "    float sum"), ("    __threadfence_block();\n", "")]),
    ("gqa_forward_1024_threads", "gqa_forward_launch_bounds",
     "wrong: registers", [("BLOCK(128", "BLOCK(1024"), (" __launch_bounds__(128)", "")]),
    ("gqa_forward_last_key_group", "gqa_forward_launch_bounds",
     "wrong: reads inp", [("BLOCK(128", "BLOCK(64"), (" __launch_bounds__(128)", ""),
      ("h / (NH / NKV)", "h")]),
    ("layernorm_backward_last_row_forgotten", "layernorm_backward_half_atomic",
     "wrong: [Rr]ow|last|dresidual", [("row >= N)", "row >= N - 1)"),
      ("dbias[c] = dbias[c] + d", "atomicAdd(&dbias[c], d)")]),
    ("layernorm_backward_no_blockIdx", "layernorm_backward_half_atomic",
     "wrong: blockIdx", [("blockIdx.x * blockDim.x + threadIdx", "threadIdx"),
      ("dbias[c] = dbias[c] + d", "atomicAdd(&dbias[c], d)")], "int row", "*dx) +", "*dx, g"),
    ("layernorm_forward_array_1600", "layernorm_forward_no_blockIdx",
     "wrong: index \\d+ is|out of bounds|mine\\[\\d+\\]|larger", [
      ("row = threadIdx.x", "row = blockIdx.x * blockDim.x + threadIdx.x"),
      ("float m = 0.0f, var", "float mine[1600], m = 0.0f, var"),
      ("m += x[c]", "m += mine[c] = x[c]"),
      ("(x[c] - m) * (x[c] - m)", "(mine[c] - m) * (mine[c] - m)"),
      ("c], x[c]);", "c], mine[c]);"), ("norm = (x[c]", "norm = (mine[c]")], "c++) m"),
    ("layernorm_forward_sums_reused_too_early", "layernorm_forward_block_a_row",
     "wrong: race.*part", [("    __syncthreads();  // all have read the first sums\n", "")],
     ") / C;", "= var;"),
    ("layernorm_forward_race_between_warps", "layernorm_forward_block_a_row",
     "wrong: race.*part", [("    __syncthreads();\n    m =", "    __syncwarp();\n    m =")],
     "warp] = m", ") / C;"),
    ("layernorm_forward_last_block_no_fence", "layernorm_forward_last_block",
     "wrong: race.*(mean|rstd)", [
      ("    __threadfence();  // the row's numbers are seen before the count\n", "")], "mean[row",
     "= 1.0f", "norm ="),
    ("layernorm_forward_no_syncwarp", "layernorm_forward_volatile_syncwarp",
     "wrong: race.*part", [("        __syncwarp();\n", "")], "lane] = m;", "lane <"),
    ("matmul_backward_bias_counted_twice_at_edges", "matmul_backward_bias_set",
     "wrong: dbias", [
      ("n = 0; n < N; n++) sum += to_float(dout[(size_t)n * OC + oc]);\n    dbias[oc] ",
       "first = 0; first < N; first += 8)  // eight rows at a time\n"
       "        for (int n = first; n <= first + 8 && n < N; n++)\n"
       "            sum += to_float(dout[(size_t)n * OC + oc]);\n"
       "    dbias[oc] +")]),
    ("matmul_backward_bias_sum_in_bf16", "matmul_backward_bias_set",
     "wrong: bf16", [("float sum = 0.0f;", "real sum;\n    from_float(sum, 0.0f);"),
      ("sum += to_float(dout[(size_t)n * OC + oc])",
       "from_float(sum, to_float(sum) + to_float(dout[(size_t)n * OC + oc]))"),
      ("= sum;", "+= to_float(sum);")]),
    ("matmul_forward_one_buffer_one_barrier", "matmul_forward_double_buffer",
     "wrong: race", [("2][16][17], b[2", "1][16][17], b[1"),
      (", stage ^= 1) {  // one barrier a tile: there are two buffers", ") {"),
      ("a[!stage][y][x] = to_float(from_a[k", "a[stage][y][x] = to_float(from_a[k"),
      ("b[!stage][y][x] = to_float(from_b[k", "b[stage][y][x] = to_float(from_b[k")], "from_a[k",
     "from_b[k", "(int j"),
    ("matmul_forward_two_buffers_late_barrier", "matmul_forward_double_buffer",
     "wrong: race on b.*between line 20 and line 17 of the next turn", [
      ("        for (int j", "        __syncthreads();\n        for (int j"),
      ("b[stage][x][j];\n        __syncthreads();", "b[stage][x][j];")], "(int j", "from_b[k"),
    ("matmul_forward_unsigned_bytes", "matmul_forward_long_long",
     "wrong: out.*(wrapped|never written)", [("from_float(out[i], sum)", "from_float(*(real*)("
      "(char*)out + (unsigned)i * (unsigned)sizeof(real)), sum)")]),
    ("matmul_forward_second_barrier", "matmul_forward_tiles",
     "wrong: race", [("b[x][j];\n        __syncthreads();", "b[x][j];")], "a[y][x", "b[y][x",
     "(int j"),
    ("matmul_forward_uninitialised_sum", "matmul_forward_column_and_row_swapped",
     "wrong: initiali[sz]ed|no (first |start )?value|given a value|before it gets a value|never "
     "set", [("sum = to_float(bias[oc])", "sum"), ("c * OC + oc", "oc * C + c"),
      ("], sum)", "], sum + to_float(bias[oc]))")], "float sum", "c++)"),
    ("matmul_forward_int_number", "matmul_forward_long_long",
     "wrong: int overflows|never written|address", [("long long i = blockIdx.x * (long long)",
      "unsigned i = blockIdx.x * "), ("long long n", "int n"), ("out[i]", "out[n * OC + oc]")],
     "out["),
    ("matmul_forward_tile_edge", "matmul_forward_tiles",
     "wrong: out|weight|bias", [("other < OC && k", "k"), ("N && oc < OC", "N")]),
    ("rmsnorm_backward_dinp_set", "rmsnorm_backward_half_atomic",
     "wrong: \\+=|added", [("to_float(dx[c]) + s", "s"),
      ("if (row == 0)\n"
       "            dweight[c] += to_float(dy[c]) * xc * s;\n"
       "        else\n"
       "            ",
       "")]),
    ("rmsnorm_backward_no_blockIdx", "rmsnorm_backward_half_atomic",
     "wrong: blockIdx", [("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
      ("if (row == 0)\n"
       "            dweight[c] += to_float(dy[c]) * xc * s;\n"
       "        else\n"
       "            ",
       "")], "int row", "dx[c],"),
    ("rmsnorm_forward_no_blockIdx", "rmsnorm_forward_rsqrtf_fdividef",
     "wrong: blockIdx", [("blockIdx.x * blockDim.x + threadIdx", "threadIdx"),
      ("rsqrtf(__fdividef(sum, (float)C)", "1.0f / sqrtf(sum / C")], "int row", "x[c] +",
     "copy[(", "c] * s"),
    ("rope_table_sincosf_fast", "rope_table_fast_sin",
     "wrong: table", [("float angle = t * (1.0f / power);\n"
       "    table[2 * i] = __cosf(angle);\n"
       "    table[2 * i + 1] = __sinf(angle);",
       "__sincosf(t * (1.0f / power), &table[2 * i + 1], &table[2 * i]);")]),
    ("row_sum_adds_to_undefined", "row_sum_launch_bounds_by_name",
     "wrong: out starts undefined", [("blockIdx.x] = sum", "blockIdx.x] += sum")]),
    ("row_sum_without_a_column", "row_sum_launch_bounds_by_name",
     "wrong: reads inp.*45 numbers.*have no column", [("c = threadIdx.x;",
      "c = threadIdx.x + THREADS;"), ("sum = 0.0f", "sum = to_float(inp[(size_t)blockIdx.x * C + "
      "threadIdx.x])")], "float sum"),
    ("row_sum_waits_for_all_blocks", "row_sum_launch_bounds_by_name",
     "wrong: promises no order", [("#define", "__device__ volatile int done;\n#define"),
      ("out[blockIdx.x]", "{\n        atomicAdd((int*)&done, 1);\n"
       "        while (done < gridDim.x) {}\n        out[blockIdx.x]"),
      ("= sum;", "= sum;\n    }")], "while ("),
    ("row_sum_waits_for_the_block_before", "row_sum_launch_bounds_by_name",
     "wrong: b waits for block b-1.*promises no order", [
      ("#define", "__device__ unsigned done;\n#define"),
      ("out[blockIdx.x] =", "{\n        while (atomicAdd(&done, 0u) != blockIdx.x) {}\n"
       "        __threadfence();\n        out[blockIdx.x] ="),
      ("= sum;", "= sum;\n        __threadfence();\n        atomicExch("
       "&done, blockIdx.x + 1 == gridDim.x ? 0u : blockIdx.x + 1);\n    }")], "while ("),
    ("residual_forward_stores_a_float", "residual_forward_linear_thread_number",
     "wrong: write from_float.out.i.*in bf16|in bf16.*write from_float.out.i", [
      ("from_float(out[i], ", "out[i] = (")], "out[i]"),
    ("softmax_forward_tree_of_96", "softmax_forward_tree",
     "wrong: halves 96 threads", [("BLOCK(256", "BLOCK(96"), ("part[256]", "part[96]"),
      ("v += 256) top", "v += 96) top"), ("v += 256) sum", "v += 96) sum"),
      ("Vp; v += 256", "Vp; v += 96"), ("half = 128", "half = 48")]),
    ("row_sum_launch_bounds_too_small", "row_sum_launch_bounds_by_name",
     "wrong: launch_bounds", [("BLOCK(128", "BLOCK(256"), ("(THREADS, 2)", "(128)"),
      ("c += THREADS", "c += blockDim.x")], "bounds__("),
    ("row_sum_volatile_sums_no_fence", "row_sum_volatile_sums_fenced",
     "wrong: sums.*__threadfence", [("        __threadfence();\n", ""),
      ("    __threadfence();\n    for", "    for")], "] = sum;", "out[n] = sums[n];"),
    ("shift_maximum_of_output", "shift_float_cast",
     "wrong: reads an output", [("((const float*)inp)[i - 1]", "to_float(inp[i - 1])"),
      ("i], left", "i], fminf(left, to_float(out[i]))")]),
    ("softmax_forward_endless", "softmax_forward_fast_expf",
     "wrong: not end|no end|never ends|forever", [("v++) sum += __expf", ") sum += expf"),
      ("? __expf", "? expf")], "< V; )"),
    ("softmax_forward_no_blockIdx", "softmax_forward_fast_expf",
     "wrong: blockIdx", [("blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
      ("+= __expf", "+= expf"), ("? __expf", "? expf")], "int row", "+) top", "* Vp +"),
    ("softmax_forward_uninitialised_sum", "softmax_forward_fast_expf",
     "wrong: initiali[sz]ed|no (first |start )?value|given a value|before it gets|never set", [
      ("sum = 0.0f;", "sum;"), ("+= __expf", "+= expf"), ("? __expf", "? expf")], "LOWEST"),
    ("softmax_forward_include_vector", "softmax_forward_vector",
     "wrong: vector", [("BLOCK", "#include <vector>\n\nBLOCK")], "include"),
    ("softmax_forward_row_of_a_thread", "softmax_forward_vector",
     "wrong: cannot be launched.*of its own", [
      ("std::vector<float> e(V);\n    float top", "float e[50304], top")], "float e"),
    ("softmax_forward_top_unset", "softmax_forward_fast_expf",
     "wrong: top|value|unset|initiali", [("top = LOWEST, sum", "top, sum"), ("fmaxf(top, to_float("
      "x[v]))", "v ? fmaxf(top, to_float(x[v])) : fmaxf(to_float(x[0]), top)"),
      ("+= __expf", "+= expf"), ("? __expf", "? expf")], "float top"),
    ("softmax_forward_runtime_array", "softmax_forward_vector",
     "wrong: constant|length|array", [("std::vector<float> e(V);\n    float", "float e[V],"),
      ("sum += e[v] = expf(to_float(x[v]) - top);",
       "{\n        e[v] = expf(to_float(x[v]) - top);\n        sum += e[v];\n    }")], "LOWEST"),
    ("softmax_forward_tree_barrier_in_if", "softmax_forward_tree",
     "wrong: __syncthreads", [
      ("part[threadIdx.x] += part[threadIdx.x + half];\n        __syncthreads();",
       "{\n"
       "            part[threadIdx.x] += part[threadIdx.x + half];\n"
       "            __syncthreads();\n"
       "        }")], "f];\n            __syncthreads();"),
    ("softmax_forward_tree_barrier_missing", "softmax_forward_tree",
     "wrong: race.*part", [("+ half];\n        __syncthreads();", "+ half];")], "< half",
     "? expf"),
    ("softmax_forward_shared_past_the_end", "softmax_forward_tree",
     "wrong: part|bounds|index", [("part[256]", "part[128]"), ("half = 128", "half = 64")],
     "= sum;"),
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
