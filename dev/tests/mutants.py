"""Do the tests of the kernels bite? Change one line of a kernel at a time, and see that its tests fail.

    python -m dev.tests.mutants                    # all mutants: prints those that survive, and the time
    python -m dev.tests.mutants adamw              # those of one kernel of the lab
    python -m dev.tests.mutants --draw 6           # so many, drawn by the commit: for CI

A mutant is a change to kernels.cu, to one of dev/'s .cu files, or to a file of the kernel lab. Each is made in a copy
of the repository, where the versions of one kernel are checked as the lab checks them, on the CPU, until the first
failure: for a file of the lab all of its versions, for the others the trainer's. Those of FP8 have to be noticed by a
test of dev/tests/test_fp8.py. A mutant that passes has survived, and calls for a better problem in dev/lab. Before its
mutants, the kernel itself must pass.

Beside the table there is a mutant for each barrier, taken out. UNSEEN lists what no order of threads can show, and why.
"""
import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dev.common.cuda_source import without_comments
from prepro_tinyshakespeare import UserError, run

TOP = Path(__file__).resolve().parents[2]
KERNELS, LLAMA, TILES = "kernels.cu", "dev/llama3/llama3.cu", "dev/lab/tiles.cu"
MOMENTS, FP8, OUTLIERS = "dev/precision/moments.cu", "dev/precision/fp8.cu", "dev/variants/outliers.cu"
FP8_OUTPUT = "dev/precision/fp8_output.cuh"


OUT_OF_BOUNDS = "out of bounds"  # the kind of a mutant that reads what it does not use: AddressSanitizer has to see it


class Mutant(NamedTuple):
    kind: str
    kernel: str  # of the lab, whose problem must notice it; in fp8, the test
    dtype: str
    where: str  # the function, by the start of its definition from its name on; "" is the whole file
    old: str  # found there exactly once
    new: str
    file: str = KERNELS
    flag: str = ""  # of the compiler


def of_lab(kernel, *rows, dtype="fp32"):
    return of(kernel, *rows, dtype=dtype, file=f"dev/lab/kernels/{kernel}.cu")


def of(kernel, *rows, dtype="fp32", file=KERNELS, flag=""):
    return [Mutant(kind, kernel, dtype, where, old, new, file, flag) for kind, where, old, new in rows]


AS_HOPPER = "-DHOPPER"
CUT_OFF = ("rounding", "from_float(real&", "two_bf16(x, 0.0f)", "__float_as_uint(x) >> 16")

TABLE = [
    # ---- kernels.cu
    *of("encoder_forward",
        ("mask", "encoder_forward", "row >= N", "row > N"),
        ("index", "encoder_forward", "row % T", "row / T"),
        ("stride", "encoder_forward", "c = 4 * (i % packs)", "c = 2 * (i % packs)"),
        ("missing term", "encoder_forward", "x = x + load<4>(wpe", "x = load<4>(wpe")),
    *of("encoder_backward",
        ("bound", "encoder_backward_wte", "w < 8; w++", "w < 7; w++"),
        ("stride", "encoder_backward_wte", "j < length; j += 8", "j < length; j += 9"),
        ("missing term", "encoder_backward_wte", "load<W>(d) + sum", "sum"),
        ("index", "encoder_backward_wte", "tokens[order[begin]]", "tokens[begin]"),
        ("mask", "encoder_backward_wte", "warp > 0 || c >= C", "c >= C"),
        ("bound", "encoder_backward_wpe", "b < B", "b + 1 < B"),
        ("missing term", "encoder_backward_wpe", "Pack<W> sum = load<W>(dwpe + i)", "Pack<W> sum = {}")),
    *of("layernorm_forward",
        ("constant", "residual_layernorm_forward", " + 1e-5f", ""),
        ("constant", "residual_layernorm_forward", "warp_sum(sum) / C;", "warp_sum(sum) / (C - 1);"),
        ("missing term", "residual_layernorm_forward", " + b[i]", ""),
        ("missing term", "residual_layernorm_forward", "(x[k][i] - m) * (x[k][i] - m)", "x[k][i] * x[k][i]"),
        ("missing term", "residual_layernorm_forward", "store(copy + start + c, x[k]);", ""),
        ("index", "residual_layernorm_forward", "load<4>(bias + c)", "load<4>(weight + c)")),
    *of("fused_residual_forward",
        ("missing term", "residual_layernorm_forward", "EACH_PACK(4, 32) store(residual + start + c, x[k]);", ""),
        ("missing term", "residual_layernorm_forward", "x[k] = x[k] + load<4>(branch", "x[k] = load<4>(branch"),
        ("index", "residual_layernorm_forward", "branch ? before : residual", "residual")),
    *of("layernorm_again",
        ("missing term", "layernorm_again", " * rstd[row]", ""),
        ("index", "row_of_number", "(C / W)", "(C / W + 1)")),
    *of("layernorm_backward",
        ("missing term", "layernorm_backward", " - average_dnorm - norm", " - norm"),
        ("missing term", "layernorm_backward", "norm * average_dnorm_norm", "average_dnorm_norm"),
        ("missing term", "layernorm_backward", "g[i] += s *", "g[i] = s *"),
        ("missing term", "layernorm_backward", "sums[1][k][i] += d[i];", "sums[1][k][i] += d[i] * w[i];"),
        ("missing term", "layernorm_backward", "sums[2][k][i] += g[i];", "sums[2][k][i] += d[i];"),
        ("index", "layernorm_backward", "next_mean = mean[row + step]", "next_mean = mean[row]"),
        ("missing wait", "layernorm_backward", "copies_arrive<1>();", ""),
        ("missing wait", "layernorm_backward", "copies_arrive<0>();", ""),
        ("index", "layernorm_backward", "stage ^= 1", "stage ^= 0"),
        ("bound", "layernorm_backward", "i = 0; i < rows", "i = 1; i < rows"),
        ("index", "layernorm_backward", "own * ROW_THREADS / 32 + w]", "w]"),
        ("bound", "layernorm_backward", "bool has_row = row < N;", "bool has_row = true;")),
    *of("matmul_backward_bias",
        ("stride", "add_columns", "row += 32 * shares", "row += 32"),
        ("index", "add_columns", "32 * share + octet", "share + octet"),
        ("missing term", "add_columns", "out[column] += total", "out[column] = total"),
        ("bound", "add_columns", "i < 32", "i < 31"),
        ("index", "add_partials", "blockIdx.y == 0 ? out1", "blockIdx.y == 1 ? out1")),
    *of("gelu_forward",
        ("constant", "gelu(", "0.044715f", "0.0447f"),
        ("constant", "", "1.595769122f", "1.5957f"),
        ("mask", "gelu_forward", "out.store(i, x);",
         "out.store(i, x), out.numbers[(size_t)N * OC] = out.numbers[i];")),
    *of("gelu_forward",
        ("stride", "first_number", "W * ((size_t)", "4 * ((size_t)"),
        ("rounding", "gelu_forward", "x[j] = gelu(x[j]);", "x[j] = gelu(x[j]) * (i + j == 77 ? 1.2f : 1.0f);"),
        CUT_OFF, dtype="bf16"),
    *of("gelu_backward",
        ("constant", "gelu_derivative", "3.0f *", "2.0f *"),
        ("constant", "gelu_derivative", "(x + 0.044715f", "(x + 0.0447f"),
        ("missing term", "gelu_derivative", " * (1.0f - g)", ""),
        ("missing term", "gelu_backward", "d[j] *= gelu", "d[j] = gelu")),
    *of("classifier_fused",
        ("mask", "classify_rows", "if (v + i >= V) l[i]", "if (v + i > V) l[i]"),
        ("missing term", "classify_rows", "sum *= exponential(before - largest)", "sum *= 1.0f"),
        ("missing term", "classify_rows", "logf(sum) + top -", "logf(sum) -"),
        ("missing term", "classify_rows", "v + i == target ? dloss : 0.0f", "v + i == target ? 1.0f : 0.0f"),
        ("missing term", "classify_rows", "dloss / sum", "1.0f / sum"),
        ("bound", "classify_rows", "two_rows || v < kept ? cached", "two_rows || v <= kept ? cached"),
        ("missing wait", "classify_rows", "copies_arrive<1>()", "copies_arrive<2>()"),
        ("index", "classify_rows", "stage ^= two_rows", "stage ^= 1")),
    *of("crossentropy_forward",
        ("mask", "classify_rows", "if (!with_gradient) continue;", ""),
        ("constant", "", "LOWEST = -3.402823466e38f", "LOWEST = -30.0f"),
        ("bound", "warp_max", "distance = 16", "distance = 8"),
        ("bound", "block_reduce", "lane < warps", "lane < warps - 1")),
    *of("global_norm",
        ("missing term", "global_norm", "g[j] * g[j]", "g[j]"),
        ("missing term", "global_norm", ", norm[1] = 0.0f", ""),
        ("bound", "global_norm", "i < (int)gridDim.x;", "i + 1 < (int)gridDim.x;"),
        ("bound", "warp_sum", "distance = 16", "distance = 8")),
    *of("add_loss",
        ("missing term", "add_loss", "(accumulate ? verdict->loss : 0.0f)", "verdict->loss"),
        ("missing term", "add_loss", "share * sum", "sum")),
    *of("judge",
        ("mask", "judge", " && v.norm <= -LOWEST", ""),
        ("missing term", "judge", "fabsf(v.loss)", "v.loss"),
        ("missing term", "judge", "1.0f - v.stopped", "1.0f")),
    *of("adamw",
        ("missing term", "adamw_step", " + a.eps)", ")"),
        ("missing term", "adamw_step", "sqrtf(m2[j] * a.correction2) + a.eps", "sqrtf(m2[j] * a.correction2 + a.eps)"),
        ("mask", "adamw_step", "norm > a.clip", "norm > 0.0f"),
        ("mask", "adamw_step", "a.clip > 0.0f &&", ""),
        ("mask", "adamw_step", "decayed[tensor] ?", "decayed[0] ?"),
        ("mask", "adamw_step", "if (!verdict->update) return;", ""),
        ("bound", "adamw_step", "starts[tensor + half] <= i", "starts[tensor + half] < i"),
        ("constant", "adamw_step", "half = 16", "half = 8"),
        ("missing term", "adamw_step", " * a.correction1", ""),
        ("missing term", "adamw_step", "g[j] * g[j] - m2[j]", "g[j] - m2[j]")),
    *of("adamw",
        ("missing term", "load_master", " + __float_as_uint(rest[j])", ""),
        ("constant", "", "struct low_half { short bits", "struct low_half { unsigned short bits"),
        ("missing term", "store_master", "store(low + i, x);", ""),
        ("mask", "store_master", "if (x[j] == x[j]) ", ""),
        ("rounding", "store_master", " + 0x8000", ""),
        ("rounding", "store_master", "0x8000", "0x7fff"),
        ("rounding", "store_master", " & 0xffff0000", ""), dtype="bf16"),
    *of("residual_forward", CUT_OFF, dtype="bf16"),
    *of("swiglu_forward", CUT_OFF, dtype="bf16"),
    *of("rope_forward", CUT_OFF, dtype="bf16"),
    *of("rmsnorm_forward", CUT_OFF, dtype="bf16"),
    *of("attention_forward",
        ("mask", "hide_future", "c > r", "c >= r"),
        ("missing term", "attention_forward", "power_of_2(scale2 * (before[e] - maximum[e]))", "1.0f"),
        ("index", "quad_sum", "__shfl_xor_sync(FULL_WARP, x, 2)", "__shfl_xor_sync(FULL_WARP, x, 1)"),
        ("missing term", "attention_forward", " + log2f(sum)", ""),
        ("missing term", "attention_forward", "rescale(output, correction);", ""),
        ("bound", "load_tile", "first + row < head.T", "first + row <= head.T"),
        ("index", "attention_forward", "load_stage(stages, stage ^ 1", "load_stage(stages, stage"),
        ("missing wait", "tiles_arrive", "copies_arrive<0>();", "")),
    *of("relu_attention_forward", ("mask", "relu_of", "x <= 0.0f ? 0.0f : x", "x")),
    *of("attention_backward",
        ("mask", "hide_future", "r > c :", "r >= c :"),
        ("missing term", "dscores_from_dweights", " - delta(e)", ""),
        ("missing term", "attention_backward_q", "dq[e] *= scale;", ""),
        ("missing term", "attention_backward_kv", "dk[e] *= scale;", "dv[e] *= scale;"),
        ("index", "delta_of_rows", "sum, 16)", "sum, 8)"),
        ("index", "own_rows", "blocks - 1 - turn", "blocks - turn"),
        ("bound", "own_rows", "min(SECTION, heads - section)", "SECTION")),
    *of("attention_backward_bias",
        ("index", "store_column_sums", "threadIdx.x / HEAD_LANES * HP + c", "threadIdx.x / 32 * HP + c"),
        ("index", "store_column_sums", " + own.first / ROWS) * head.heads", ") * head.heads"),
        ("bound", "store_column_sums", "i = 0; i < shares", "i = 1; i < shares"),
        ("index", "attention_backward_kv", "store_column_sums(sums, own.values", "store_column_sums(sums, own.keys"),
        ("missing term", "store_rows", "sums.x[k] = sums.x[k] + pack", "sums.x[k] = pack")),
    *of("gqa_backward",
        ("index", "own_rows", "nth * NKV / of_sequence", "nth % NKV"),
        ("index", "attention_backward_kv", "next = own.first;", "next = own.first + TILE;"),
        ("bound", "attention_backward_kv", "head < NH / NKV", "head < 1")),
    # ---- moments.cu
    *of("adamw_bf16",
        ("constant", "random_number", "0xbf58476d1ce4e5b9", "0xbf58476d1ce4e5b8"),
        ("constant", "random_number", "x >> 27", "x >> 28"),
        ("bound", "random_number", "(i + 1)", "i"),
        ("index", "adamw_bf16", "<< 40", "<< 20"),
        ("index", "adamw_bf16", "(size_t)noise[0]", "0"),
        ("index", "adamw_bf16", "number += stride - piece", "number += stride"),
        ("index", "adamw_bf16", "j / piece * stride", "j / piece * piece"),
        ("index", "adamw_bf16", "bits >> 16 & 0xffff", "bits & 0xffff"),
        ("rounding", "plus_noise", " + parts", ""), file=MOMENTS),
    *of("adamw_bf16",
        ("missing term", "adamw_step", "add_noise(m1, m2, i, tensor);", "")),
    *of("adamw_bf16", ("rounding", "store_master", "0x8000", "0x7fff"), dtype="bf16"),
    *of("attention_forward",
        ("stride", "describe", "64ull << 32", "32ull << 32"),
        ("constant", "describe", "1ull << 62", "2ull << 62"),
        ("missing wait", "attention_forward", "products_arrive<0>(scores);", ""),
        ("missing wait", "attention_forward", "products_arrive<0>(output);", ""),
        ("missing wait", "tiles_arrive(Arrivals& arrivals) {", "mbarrier_wait(*arrivals.mbarrier, arrivals.parity);",
         ""),
        ("missing wait", "tiles_arrive(Arrivals& arrivals) {", "arrivals.parity ^= 1;", ""),
        ("index", "tiles_arrive(Arrivals& arrivals) {", "if (threadIdx.x == 0) mbarrier_arrive", "mbarrier_arrive"),
        ("index", "", "head.h * HS + c", "head.h * HS"),
        ("index", "", "first + row, head.b", "first + row, 0"),
        ("index", "", "(own.slab - own.first) * HP", "0"),
        dtype="bf16", flag=AS_HOPPER),
    *of("attention_backward",
        ("index", "", "(c % 64 ^ row % 8 * 8)", "c % 64"),
        ("missing wait", "attention_backward_q", "products_arrive<1>(scores);", ""),
        ("missing wait", "attention_backward_q", "products_arrive<0>(dweights);", ""),
        ("missing wait", "attention_backward_kv", "products_arrive<EARLY_DV>", "products_arrive<2>"),
        ("missing wait", "attention_backward_kv", "products_arrive<0>(dk);", ""),
        ("missing wait", "tiles_arrive(Arrivals& arrivals) {", "copies_arrive<0>();", ""),
        ("index", "attention_backward_kv", "own.queries, dout", "own.queries, qkv"),
        dtype="bf16", flag=AS_HOPPER),
    # ---- outliers.cu
    *of("outliers",
        ("index", "z_score", "seen % WINDOW", "(seen + 1) % WINDOW"),
        ("mask", "z_score", "seen < WINDOW", "seen <= WINDOW"),
        ("constant", "z_score", "/ deviation : 0.0", "/ deviation : 1.0"),
        ("missing term", "skip_outliers", "if (!verdict->update) return;", ""),
        ("mask", "skip_outliers", "loss_z > loss_limit", "loss_z < loss_limit"),
        ("mask", "skip_outliers", "norm_limit > 0.0f &&", ""),
        ("index", "skip_outliers", " % WINDOW)", ")"), file=OUTLIERS),
    # ---- llama3.cu
    *of("rmsnorm_forward",
        ("constant", "residual_rmsnorm_forward", " + eps", ""),
        ("index", "sum_over_row", "warp / ROW_WARPS * ROW_WARPS + w", "w"),
        ("index", "sum_over_row", "of_warp[turn % 2][warp] = x", "of_warp[0][warp] = x"),
        ("index", "residual_rmsnorm_forward", "branch ? before : residual", "residual"),
        ("missing term", "residual_rmsnorm_forward", "s * w[i]", "s"), file=LLAMA),
    *of("rmsnorm_again", ("missing term", "rmsnorm_again", "rstd[row] * w[j]", "w[j]"), file=LLAMA),
    *of("rmsnorm_backward",
        ("missing term", "rmsnorm_backward", " - norm * average", ""),
        ("missing term", "rmsnorm_backward", "g[i] += s *", "g[i] = s *"),
        ("missing wait", "rmsnorm_backward", "copies_arrive<STAGES - 1>();", ""),
        ("bound", "rmsnorm_backward", "i < ROWS_AT_ONCE", "i < 1"), file=LLAMA),
    *of("rope_table",
        ("constant", "frequency_of_pair", "(4.0f - 1.0f)", "4.0f"),
        ("mask", "frequency_of_pair", "turns >= 4.0f", "turns >= 3.0f"),
        ("stride", "rope_table", "(float)(at / pairs)", "(float)(at / HS)"), file=LLAMA),
    *of("rope_forward",
        ("index", "turn_pairs", "token % T", "token / T"),
        ("missing term", "turn_pairs", "before * sine + v[j + 1]", "v[j] * sine + v[j + 1]"),
        ("stride", "turn_pairs", "y = x + HS / 2", "y = x + HS / 2 - 1"), file=LLAMA),
    *of("rope_backward", ("constant", "rope_backward", "-1.0f", "1.0f"), file=LLAMA),
    *of("swiglu_forward",
        ("index", "swiglu_forward", " + (size_t)row_of_number(i, H) * H", ""),
        ("missing term", "swiglu_forward", "1.0f + exponential", "exponential"), file=LLAMA),
    *of("swiglu_backward",
        ("missing term", "swiglu_backward", "1.0f + gate[j] *", "gate[j] *"),
        ("index", "swiglu_backward", "store(at + H, gate)", "store(at, gate)"), file=LLAMA),
    # ---- FP8
    *of("numbers",
        ("missing term", "store_twin", "factor * x[j + 1]", "x[j + 1]"),
        ("missing term", "store_twin", "fabsf(x[j])", "x[j]"),
        ("missing term", "end", "largest = warp_max(largest);", ""), dtype="fp8", file=FP8_OUTPUT),
    *of("weights",
        ("index", "weights_to_fp8", "scale8 + layer", "scale8"),
        ("index", "weights_to_fp8", "tile[r + j][c]", "tile[r + 15 - j][c]"),
        ("bound", "weights_to_fp8", "first + r >= R || column", "first + r > R || column"), dtype="fp8", file=FP8),
    *of("next_scales",
        ("constant", "next_scales", "448.0f / 2 / s.largest", "448.0f / s.largest"),
        ("mask", "next_scales", " && s.largest <= -LOWEST", ""),
        ("mask", "next_scales", "!forget && ", ""),
        ("missing term", "next_scales", "s.largest = 0.0f;", ""), dtype="fp8", file=FP8),
    *of("twins",
        ("missing term", "layernorm_backward", "dresidual.end();", ""),
        ("missing term", "gelu_forward", "out.end();", ""),
        ("missing term", "gelu_backward", "dinp.begin();", ""), dtype="fp8"),
    *of("twins", ("missing term", "store", "if (twin) store_twin(i, x)", "if (twin && i % 2) store_twin(i, x)"),
        dtype="fp8", file=FP8_OUTPUT),
    *of("twins",
        ("missing term", "residual_rmsnorm_forward", "out.end();", ""),
        ("missing term", "rmsnorm_backward", "dresidual.end();", ""),
        ("missing term", "swiglu_forward", "out.end();", ""), dtype="fp8", file=LLAMA),
    # ---- the lab's versions
    *of_lab("layernorm_forward",
            ("constant", "layernorm_forward1", " + 1e-5f", ""),
            ("constant", "layernorm_forward2_rstd", " + 1e-5f", ""),
            ("constant", "layernorm_forward3", " + 1e-5f", ""),
            ("constant", "layernorm_forward4", " + 1e-5f", ""),
            ("missing term", "layernorm_forward5", " - m * m", ""),
            ("index", "layernorm_forward2_normalize", "i % C", "i / C")),
    *of_lab("fused_residual_forward", ("constant", "fused_residual_forward2", " + 1e-5f", "")),
    *of_lab("layernorm_backward",
            ("missing term", "layernorm_backward1", " - sum_dnorm / C", ""),
            ("missing term", "layernorm_backward2", "s * (d * to_float(weight[c])", "s * (d"),
            ("missing term", "layernorm_backward3", " - average_dnorm - norm", " - norm"),
            ("missing term", "layernorm_backward3", "sums[0][k][i] +=", "sums[0][k][i] ="),
            ("index", "layernorm_backward3", "counters + 1 + group", "counters + 1")),
    *of_lab("softmax_forward",
            ("missing term", "softmax_forward1", "top = fmaxf(top, to_float(x[v]))", "top = 0.0f"),
            ("missing term", "softmax_forward2", "top = block_reduce<warp_max>(top, LOWEST)", "top = 0.0f"),
            ("mask", "softmax_forward2", "v < V ? expf", "v <= V ? expf"),
            ("missing term", "add(", "sum *= exponential(before - top)", "sum *= 1.0f"),
            ("bound", "softmax_forward3", "v < V; v += W * 32)", "v + W < V; v += W * 32)"),
            (OUT_OF_BOUNDS, "softmax_forward5", "row + gridDim.x < (unsigned)N", "row + 1 < N"),
            ("index", "softmax_forward5", "((size_t)row + gridDim.x) * Vp", "(size_t)row * Vp"),
            ("bound", "softmax_forward5", "row + gridDim.x < (unsigned)N", "row + gridDim.x + 1 < (unsigned)N")),
    *of_lab("crossentropy_forward",
            ("missing term", "crossentropy_forward2", "logf(sum) + top", "logf(sum)")),
    *of_lab("crossentropy_softmax_backward",
            ("mask", "crossentropy_softmax_backward2", "v + i < V ?", "v + i <= V ?"),
            ("index", "crossentropy_softmax_backward1", "dlosses[row]", "dlosses[0]")),
    *of_lab("classifier_fused",
            ("missing term", "classifier_fused3", "sum *= expf(largest - now)", "sum *= 1.0f"),
            ("missing term", "classifier_fused4", "norm = dloss / sum", "norm = 1.0f / sum"),
            ("missing term", "classifier_fused1", " - (v == targets[row] ? 1.0f : 0.0f)", "")),
    *of_lab("encoder_forward", ("index", "encoder_forward1", "row % T", "row / T")),
    *of_lab("encoder_backward", ("index", "encoder_backward2", "row % T", "row / T")),
    *of_lab("residual_forward",
            ("mask", "residual_forward2", "i < (size_t)N * C", "i <= (size_t)N * C"),
            ("missing term", "residual_forward3", " + load_once(inp2 + i)", ""),
            ("missing term", "residual_forward1", " + to_float(inp2[i])", "")),
    *of_lab("gelu_forward", ("constant", "gelu(", "0.044715f", "0.0447f")),
    *of_lab("gelu_backward", ("constant", "derivative", "3.0f *", "2.9f *")),
    *of_lab("global_norm", ("bound", "global_norm2", "i < n;", "i + 1 < n;")),
    *of_lab("adamw",
            ("missing term", "adamw1_step", " + a.eps", ""),
            ("missing term", "adamw2", "sqrtf(v[i] * a.correction2) + a.eps", "sqrtf(v[i] * a.correction2 + a.eps)"),
            ("mask", "clip_factor", "norm > a.clip", "norm > 0.0f"),
            ("mask", "adamw2", "decayed[tensor] ?", "decayed[0] ?")),
    *of_lab("adamw", ("missing term", "adamw1_decay", "store_master(params, low, i, p);", "store(params + i, p);"),
            dtype="bf16"),
    *of_lab("matmul_forward",
            ("mask", "matmul_forward2", "row < N && o < OC", "row < N && o <= OC"),
            ("mask", "matmul_forward3", "row + r + i < N &&", "row + r + i <= N &&"),
            (OUT_OF_BOUNDS, "matmul_forward3", "row + i / 8 < N ?", "row + i / 8 <= N ?"),
            ("stride", "matmul_forward4", "s + j % 4;", "s + j / 4;"),
            ("missing wait", "multiply_tile", "copies_arrive<0>();", ""),
            ("missing term", "multiply_tile", " + to_float(bias[column])", "")),
    *of_lab("matmul_backward",
            ("missing term", "multiply_weight", "[(size_t)o * C + c] += sum", "[(size_t)o * C + c] = sum"),
            ("mask", "multiply(", "k0 + k < size ?", "k0 + k + 1 < size ?"),
            ("index", "matmul_backward1_weight", "row * OC + o", "row * OC"),
            ("missing term", "matmul_backward4_weight", "* C + c] += sum", "* C + c] = sum"),
            ("missing wait", "multiply_on_tensor_cores", "copies_arrive<0>();", ""),
            ("mask", "matmul_backward5_inp", "row < N && c < C", "row <= N && c < C")),
    *of_lab("matmul_backward_bias",
            ("stride", "matmul_backward_bias2", "row += gridDim.y", "row += gridDim.y + 1"),
            ("missing term", "matmul_backward_bias3", "dbias[column] += sum", "dbias[column] = sum")),
    *of("matmul_backward_bias",
        ("missing term", "last_of", "if (last) *counter = 0;", ""),
        ("bound", "last_of", "== all - 1", "== 0"), file=TILES),
    *of("attention_forward",
        (OUT_OF_BOUNDS, "load_head", "first + row < T", "first + row <= T"),
        ("stride", "right(", "tile + (r + 2 * (lane % 4) + i % 2 * 8) * LD", "tile + (r + lane % 4 + i % 2 * 8) * LD"),
        file=TILES),
    *of("matmul_forward", (OUT_OF_BOUNDS, "load(", "first + row < end", "first + row <= end"), file=TILES),
    *of_lab("attention_forward",
            ("missing term", "attention_forward1", "expf(a[s] - top)", "expf(a[s])"),
            ("mask", "attention_forward2_softmax", "s <= row % T; s += 32) {", "s < row % T; s += 32) {"),
            ("missing term", "attention_forward3", "sum *= factor, top = now;", "top = now;"),
            ("mask", "attention_forward3", "key + s > t", "key + s >= t"),
            ("mask", "attention_forward4", "if (key == first)", "if (key == 0)"),
            ("missing term", "attention_forward4", "total[half] *= shrink", "total[half] *= 1.0f"),
            ("missing wait", "attention_forward4", "copies_arrive<0>();", "")),
    *of_lab("attention_backward",
            ("missing term", "attention_backward2_q", " - my_delta", ""),
            ("bound", "attention_backward2_v", "max(0, t - query)", "0"),
            ("mask", "attention_backward3_q", "<= first + of_warp + row_of(0, i)", "< first + of_warp + row_of(0, i)"),
            ("missing term", "attention_backward3_q", " - my_delta[i / 2]", ""),
            ("index", "attention_backward3_delta", "i / NH % T] = sum", "i % T] = sum"),
            ("missing term", "attention_backward5", "*started = 0", "(void)0"),
            ("index", "backward_of_keys", "mine < last ? 1 : -mine", "1"),
            ("bound", "backward_of_keys", "if (mine > 0)", "if (mine > 1)")),
    *of_lab("relu_attention_forward",
            ("missing term", "relu_attention_forward1", "fmaxf(0.0f, scale * score)", "scale * score"),
            ("bound", "relu_attention_forward2", "t + 1 - key", "t - key")),
    *of_lab("trimat_forward",
            ("mask", "trimat_forward3", "s <= t)", "s < t)"),
            ("missing term", "trimat_forward2", "scale * sum)", "sum)")),
    *of_lab("permute", ("index", "permute2", "which = blockIdx.y % 3", "which = blockIdx.y / 3 % 3")),
    *of_lab("unpermute", ("index", "unpermute1", "i / head / NH % T", "i / head / T % T")),
    *of_lab("rmsnorm_forward",
            ("constant", "rmsnorm_forward1", " + eps", ""),
            ("constant", "rmsnorm_forward3", " + eps", "")),
    *of_lab("rmsnorm_backward",
            ("missing term", "rmsnorm_backward3", " - norm[p][i] * average", ""),
            ("bound", "rmsnorm_backward3", "w = 0; w < warps", "w = 1; w < warps")),
    *of_lab("rope_forward", ("missing term", "rope_forward2", "left * cosine - right * sine", "left * cosine")),
    *of_lab("rope_backward", ("constant", "rope_backward1", "left * cosine + right * sine",
                              "left * cosine - right * sine")),
    *of_lab("swiglu_forward", ("missing term", "swiglu_forward1", " * gate / (1.0f", " / (1.0f")),
    *of_lab("swiglu_backward", ("missing term", "swiglu_backward1", "1.0f + gate *", "gate *")),
    *of_lab("repeat_kv_forward", ("index", "repeat_kv_forward2", "h / (NH / NKV)", "h % NKV")),
    *of_lab("repeat_kv_backward", ("index", "repeat_kv_backward1", "h / (NH / NKV)", "h % NKV")),
    *of_lab("gqa_forward",
            ("index", "gqa_forward1", "h / (NH / NKV)", "h % NKV"),
            ("mask", "gqa_forward1", "s <= t;", "s < t;")),
    *of_lab("gqa_backward", ("missing term", "gqa_backward2_kv", " - delta[of_query]", "")),
]

# Which kernels of the lab notice that a barrier of these functions, which are not in a file of its own, is missing.
BARRIERS = {"block_reduce": "crossentropy_forward", "encoder_backward_wte": "encoder_backward",
            "layernorm_backward": "layernorm_backward", "add_columns": "matmul_backward_bias",
            "tiles_arrive": "attention_forward", "store_rows": "attention_backward_bias",
            "store_column_sums": "attention_backward_bias",
            "classify_rows": "classifier_fused", "global_norm": "global_norm", "z_score": "outliers",
            "last_of": "matmul_backward_bias", "sum_over_row": "rmsnorm_forward",
            "rmsnorm_backward": "rmsnorm_backward", "rope_table": "rope_table", "weights_to_fp8": "weights",
            "skip_outliers": "outliers", "arrivals_start": "attention_forward"}

# (function, number of the barrier in it): why no order of threads can show that it is missing. Whoever looks at each
# access can: dev/tests/test_races.py.
UNSEEN = {
    ("arrivals_start", 1): "only Hopper has it, where a barrier that is not there yet may let a thread pass or not",
    ("tiles_arrive", 2): "only Hopper has it",
    ("matmul_forward6", 1): "only Hopper has it",
    ("matmul_forward6", 2): "only Hopper has it",
    ("matmul_forward6", 3): "only Hopper has it",
    ("block_reduce", 2): "each of its kinds has an array of its own, with a barrier between two calls of a kind",
    ("skip_outliers", 1): "the sums of z_score wait for all lanes, and what a lane reads behind them it does not use",
    ("last_of", 1): "one block counts itself too early, and another must read what it has not stored yet, at that time",
    ("backward_of_keys", 3): "as in last_of: the next block must begin its turn before the block has stored its sums",
}
# __threadfence is as unseen, for the same reason: on a CPU what is stored is there. test_races.py has that, too.

BARRIER = re.compile(r"__sync(threads|warp)\(\);")
DEFINITION = re.compile(r"^(?:extern \"C\" )?(?:__global__|__device__)[^;{]*?(\w+)\(", re.M)


def barriers(every=False):
    """A Mutant for each barrier of kernels.cu, of features and of the lab, but those that are UNSEEN, unless every. Its
    kind names the barrier by its number in its function."""
    files = [KERNELS, LLAMA, MOMENTS, OUTLIERS, FP8, FP8_OUTPUT, TILES,
             *(f"dev/lab/kernels/{path.name}" for path in sorted((TOP / "dev/lab/kernels").glob("*.cu")))]
    for file in files:
        text = code_of((TOP / file).read_text(encoding="utf-8"))
        starts = [(found.start(), found[1]) for found in DEFINITION.finditer(text)]
        counts = {}
        for found in BARRIER.finditer(text):
            function = [name for start, name in starts if start < found.start()][-1]
            counts[function] = number = counts.get(function, 0) + 1
            if every or (function, number) not in UNSEEN:
                shared = file in (KERNELS, LLAMA, TILES, OUTLIERS, FP8, FP8_OUTPUT)
                if shared and function not in BARRIERS:
                    raise UserError(f"{file}: {function} has a barrier; BARRIERS has to say which kernel notices it")
                kernel, dtype = BARRIERS[function] if shared else Path(file).stem, "fp8" if file == FP8 else "fp32"
                yield Mutant(f"barrier {number}", kernel, dtype, function, found[0], "", file)


def code_of(text):
    """The text with comments and launch bounds as blanks, so that every place in it stays where it is."""
    return re.sub(r"__launch_bounds__\(.*?\)", lambda found: " " * len(found[0]), without_comments(text))


def mutated(mutant):
    """The mutant's file as a text. Raises SystemExit unless the place is found exactly once."""
    text, at = place_of(mutant)
    return text[:at] + mutant.new + text[at + len(mutant.old) :]


def line_of(mutant):
    """The number of the line that a mutant changes."""
    text, at = place_of(mutant)
    return text.count("\n", 0, at) + 1


def place_of(mutant):
    """(the mutant's file as it is, where it changes). Raises SystemExit unless the place is found exactly once."""
    text = (TOP / mutant.file).read_text(encoding="utf-8")
    code, begin, end = code_of(text), 0, len(text)
    if mutant.where:
        name = mutant.where if "(" in mutant.where else f"{mutant.where}("
        begins = [found.start() for found in re.finditer(re.escape(name), code)]
        begin = next((at for at in begins if re.search("__(device|global)__", code[code.rfind("\n", 0, at) : at])
                      and re.match(r"[^;{]*\{", code[at:])), min(begins, default=-1))  # no call and no prototype
        end = code.find("\n}\n", begin)
    number = re.fullmatch(r"barrier (\d+)", mutant.kind)
    places = [begin + found.start() for found in re.finditer(re.escape(mutant.old), code[begin:end])]
    if number:
        places = [begin + found.start() for found in BARRIER.finditer(code[begin:end])][int(number[1]) - 1 :][:1]
    if begin < 0 or len(places) != 1:
        sys.exit(f"{mutant.file}, {mutant.where}: {mutant.old!r} is there {len(places)} times, and must be once")
    return text, places[0]


# ---- In a copy: check one kernel until its first failure


def check_kernel(name, dtype, trainer_only):
    """Check the versions of a kernel, or only the trainer's. Returns None, or a line that says what is wrong."""
    from dev.lab.bench import Bench
    from dev.lab.ladder import describe_choice, find_ladder, model_of, parse_sizes
    from dev.lab.workers import device_of
    ladder = find_ladder(name)
    versions = [version for version in ladder.versions if version.trainer and trainer_only] or ladder.versions
    checks = 0
    for text in (*ladder.checks, *(ladder.trainer_checks if trainer_only else ())):
        sizes = parse_sizes(text)
        if AS_HOPPER in os.environ.get("CXXFLAGS", "") and sizes.get("HS") not in (64, 128):
            continue  # as everywhere
        device = device_of("cpu", dtype, *model_of(ladder, sizes), (name,))
        bench = Bench(ladder, device, sizes)
        for version in versions:
            for choice in version.choices(device, few=True) if bench.fits(version) else ():
                checks += 1
                try:
                    comparison = bench.check(version, choice)
                except Exception as e:
                    return f"{version.what}, {text} {describe_choice(choice)}: {' '.join(str(e).split())}"
                if comparison.place is not None:
                    return f"{version.what}, {text} {describe_choice(choice)}: {comparison}"
    return None if checks else "nothing was checked"


# ---- The program


class Copy:
    """A copy of the repository's code, to mutate."""

    def __init__(self, folder):
        self.top = Path(folder)
        names = ("train_gpt2.py", "prepro_tinyshakespeare.py", "test_gpt2.py", "kernels.cu",
                 *(f"dev/{path.name}" for path in TOP.glob("dev/*")
                   if path.suffix == ".py" or path.is_dir() and path.name != "__pycache__"))
        for name in names:
            (self.top / name).parent.mkdir(parents=True, exist_ok=True)
            if (TOP / name).is_dir():
                shutil.copytree(TOP / name, self.top / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(TOP / name, self.top / name)

    def check(self, kernel, dtype, file, flag="", kind="", seconds=600):
        """None if the kernel passes in the copy; or what is wrong, in a line."""
        environment = {**os.environ, "PYTHONPATH": str(self.top), "XDG_CACHE_HOME": str(self.top / "cache"),
                       "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1", "CXXFLAGS": f"-O1 {flag}"}  # compiled in half of the time
        if kind == OUT_OF_BOUNDS:
            library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout
            environment |= {"CXXFLAGS": "-O1 -fsanitize=address", "LD_PRELOAD": library.strip(),
                            "ASAN_OPTIONS": "detect_leaks=0"}
        whose = "trainer" if file in (KERNELS, LLAMA, MOMENTS, OUTLIERS) else "all"
        command = [sys.executable, "-m", "dev.tests.mutants", kernel, "--check-here", dtype, whose]
        if dtype == "fp8":
            command = [sys.executable, "-m", "dev.tests.test_fp8", "--device", "cpu", "--only", kernel]
        try:
            done = subprocess.run(command, env=environment, cwd=self.top, capture_output=True, text=True,
                                  timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"did not end within {seconds} s"
        finally:
            shutil.rmtree(self.top / "cache", ignore_errors=True)
        if "could not compile" in done.stdout + done.stderr:
            sys.exit(f"a mutant of {kernel} does not compile:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        if done.returncode < 0:
            return f"ended by signal {-done.returncode}"
        if "ERROR: AddressSanitizer" in done.stderr:
            return re.search("ERROR: AddressSanitizer.*", done.stderr)[0]
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return None if done.returncode == 0 else last[0] if last else "failed"

    def try_mutant(self, mutant):
        path = self.top / mutant.file
        original = path.read_text(encoding="utf-8")
        path.write_text(mutated(mutant), encoding="utf-8")
        try:
            return self.check(mutant.kernel, mutant.dtype, mutant.file, mutant.flag, mutant.kind)
        finally:
            path.write_text(original, encoding="utf-8")


def title(mutant):
    change = f"{mutant.old} -> {mutant.new or 'nothing'}"
    where = f"{Path(mutant.file).name}{' ' * bool(mutant.flag)}{mutant.flag}, {mutant.where}"
    return f"{mutant.kernel:28} {mutant.dtype} {mutant.kind:13} {where}: {change}"


def main():
    parser = argparse.ArgumentParser(description="Change kernels, and see that their tests fail.")
    parser.add_argument("kernel", nargs="?", help="only the mutants of this kernel of the lab")
    parser.add_argument("--draw", type=int, metavar="N", help="only so many, drawn by the commit")
    parser.add_argument("--list", action="store_true", help="print them and do nothing")
    parser.add_argument("--check-here", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.check_here:
        wrong = check_kernel(flags.kernel, flags.check_here[0], flags.check_here[1] == "trainer")
        print(wrong or "right")
        return 1 if wrong else 0
    mutants = [*TABLE, *barriers()]
    for mutant in mutants:
        mutated(mutant)
    if flags.kernel:
        mutants = [mutant for mutant in mutants if mutant.kernel == flags.kernel]
        if not mutants:
            raise UserError(f"there is no mutant of a kernel {flags.kernel}; --list lists them all")
    if flags.draw:
        commit = subprocess.run(["git", "-C", TOP, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        print(f"{flags.draw} of {len(mutants)} mutants, drawn by the commit {commit[:10]}")
        mutants = random.Random(commit).sample(mutants, min(flags.draw, len(mutants)))
    if flags.list:
        print("\n".join(map(title, mutants)))
        return 0
    began, survivors, cores = time.monotonic(), [], os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(cores) as pool:
        copies = [Copy(Path(folder) / str(i)) for i in range(cores)]

        def with_copy(work):
            copy = copies.pop()
            try:
                return work(copy)
            finally:
                copies.append(copy)

        keys = sorted({(mutant.kernel, mutant.dtype, mutant.file, mutant.flag,
                        mutant.kind * (mutant.kind == OUT_OF_BOUNDS)) for mutant in mutants})
        for key, wrong in zip(keys, pool.map(lambda key: with_copy(lambda copy: copy.check(*key)), keys)):
            if wrong:
                sys.exit(f"{' '.join(key)} fails as it is, so its mutants say nothing: {wrong}")
        found = pool.map(lambda mutant: with_copy(lambda copy: copy.try_mutant(mutant)), mutants)
        for mutant, wrong in zip(mutants, found):
            print(f"{'killed  ' if wrong else 'SURVIVED'} {title(mutant)}\n         {wrong or ''}".rstrip(), flush=True)
            survivors += [mutant] * (not wrong)
    print(f"{len(mutants)} mutants, {len(survivors)} survived, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    run(main)
