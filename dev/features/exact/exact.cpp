// The loops of --exact: as those of dev/cpu/kernels.cpp, behind which this is compiled, with the order of sums that
// kernels.cu has in fp32. What a kernel's thread adds up for itself is a slot of an array here, and the array is then
// summed as the threads of a warp, or a block, sum theirs. Loops of kernels.cpp without a sum serve as they are.

namespace exact {

// The sum of 32 numbers, as of kernels.cu's warp_sum. It overwrites them.
static float warp_sum(float* x) {
    for (int half = 16; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// The sum of the numbers of all threads of a block, as of block_reduce.
static float block_sum(float* x, int threads) {
    float of_warp[32] = {};
    for (int warp = 0; warp < threads / 32; warp++) of_warp[warp] = warp_sum(x + 32 * warp);
    return warp_sum(of_warp);
}

// f(thread, column) for each column of a row, in the order in which each thread takes its own: packs of 4.
template <class F>
static void each_column(int threads, int C, F f) {
    for (int first = 0; first < C; first += 4 * threads) {
        int there = std::min(threads, (C - first) / 4);
        for (int i = 0; i < 4; i++)
#pragma omp simd
            for (int t = 0; t < there; t++) f(t, first + 4 * t + i);
    }
}

}  // namespace exact

extern "C" {

void exact_encoder_backward_wte(float* dwte, const real* dout, const int* tokens, const int* order, const int* runs,
                                int N, int C) {
    constexpr int LONG = 64, WARPS = 32;
#pragma omp parallel for schedule(dynamic, 8)
    for (int i = 0; i < N; i++) {
        int length = runs[2 * i + 1];
        const int* positions = order + runs[2 * i];
        int step = length > LONG ? WARPS : 1;  // a long run is shared by a block's warps
        std::vector<float> total(length ? C : 0);
        for (int warp = 0; warp < std::min(step, length); warp++) {
            std::vector<float> sum(C);
            for (int j = warp; j < length; j += step)
#pragma omp simd
                for (int c = 0; c < C; c++) sum[c] += dout[(long)positions[j] * C + c];
            for (int c = 0; c < C; c++) total[c] += sum[c];
        }
        for (int c = 0; length && c < C; c++) dwte[(long)tokens[positions[0]] * C + c] += total[c];
    }
}

void exact_residual_layernorm_forward(real* out, float* mean, float* rstd, real* copy, float* x, const real* branch,
                                      const real* weight, const real* bias, int N, int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        float *row = x + n * C, sums[32] = {}, squares[32] = {};
#pragma omp simd
        for (int c = 0; c < C; c++) {
            if (branch) row[c] += branch[n * C + c];
            copy[n * C + c] = row[c];
        }
        exact::each_column(32, C, [&](int t, int c) { sums[t] += row[c]; });
        float m = exact::warp_sum(sums) / C;
        exact::each_column(32, C, [&](int t, int c) { squares[t] += (row[c] - m) * (row[c] - m); });
        float s = 1.0f / sqrtf(exact::warp_sum(squares) / C + 1e-5f);
#pragma omp simd
        for (int c = 0; c < C; c++) out[n * C + c] = (row[c] - m) * s * weight[c] + bias[c];
        mean[n] = m;
        rstd[n] = s;
    }
}

void exact_layernorm_backward(real* dresidual, float* partials, const real* dout, const real* inp, const real* weight,
                              const float* mean, const float* rstd, int N, int C, int blocks) {
    const int threads = C <= 1280 ? 32 : 128;  // of a row, as exact.py has them; so has it the rows of a block:
    const int rows = std::max(1, std::min(98 * 1024 / (2 * 3 * 4 * C),
                                          (C <= 768 ? 384 : C <= 1280 ? 256 : 512) / threads));
#pragma omp parallel for
    for (int block = 0; block < blocks; block++) {
        std::vector<float> sums(2 * rows * C);  // of each of the block's rows in turn: of dout * norm, of dout
        for (int slot = 0; slot < rows; slot++)
            for (long n = (long)block * rows + slot; n < N; n += (long)blocks * rows) {
                const real *x = inp + n * C, *dy = dout + n * C;
                real* dx = dresidual + n * C;
                float *of_norm = &sums[slot * C], *of_dout = &sums[(rows + slot) * C];
                float s = rstd[n], minus_ms = -mean[n] * s, dnorms[128] = {}, products[128] = {};
                exact::each_column(threads, C, [&](int t, int c) {
                    float dnorm = dy[c] * weight[c];
                    dnorms[t] += dnorm;
                    products[t] += dnorm * (x[c] * s + minus_ms);
                });
                float total = exact::warp_sum(dnorms), total_norm = exact::warp_sum(products);
                for (int t = 32; t < threads; t += 32) {
                    total += exact::warp_sum(dnorms + t);
                    total_norm += exact::warp_sum(products + t);
                }
                float average = total / C, average_norm = total_norm / C;
#pragma omp simd
                for (int c = 0; c < C; c++) {
                    float norm = x[c] * s + minus_ms, dnorm = dy[c] * weight[c];
                    dx[c] = dx[c] + s * (dnorm - average - norm * average_norm);
                    of_norm[c] += dy[c] * norm;
                    of_dout[c] += dy[c];
                }
            }
        for (int which = 0; which < 2; which++)
            for (int c = 0; c < C; c++) {
                float sum = 0.0f;
                for (int slot = 0; slot < rows; slot++) sum += sums[(which * rows + slot) * C + c];
                partials[((long)which * blocks + block) * C + c] = sum;
            }
    }
}

}  // extern "C"

// The sums of the columns of inp (N,OC), of which `rows` threads each take a row in turn, as kernels.cu's add_columns.
static void add_columns(float* out, const float* inp, long N, int OC, int rows, bool adds) {
    std::vector<float> sums((long)rows * OC), total(OC);
    for (long n = 0; n < N; n++)
#pragma omp simd
        for (int c = 0; c < OC; c++) sums[n % rows * OC + c] += inp[n * OC + c];
    for (int i = 0; i < rows; i++)
#pragma omp simd
        for (int c = 0; c < OC; c++) total[c] += sums[(long)i * OC + c];
    for (int c = 0; c < OC; c++) out[c] = (adds ? out[c] : 0.0f) + total[c];
}

extern "C" {

void exact_matmul_backward_bias(float* partials, const real* dout, int N, int OC, int blocks) {
    long rows = (N + 32 * blocks - 1) / (32 * blocks) * 32;
#pragma omp parallel for
    for (long block = 0; block < blocks; block++)
        add_columns(partials + block * OC, dout + rows * block * OC, std::max(0L, std::min(rows, N - rows * block)), OC,
                    8, false);
}

void exact_add_partials(float* out1, float* out2, const float* partials, int blocks, int C, int adds) {
    if (out1) add_columns(out1, partials, blocks, C, 32, adds);
    if (out2) add_columns(out2, partials + (long)blocks * C, blocks, C, 32, adds);
}

void exact_fused_classifier(real* logits, float* losses, const int* targets, float dloss, int N, int V, int Vp,
                            int with_gradient, int room) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        real* x = logits + n * Vp;
        float largest[1024], sums[1024] = {}, top = -3.402823466e38f;
        std::fill(largest, largest + 1024, top);
        for (int first = 0; first < V; first += 4096) {
            int there = std::min(1024, (V - first + 3) / 4);
#pragma omp simd
            for (int t = 0; t < there; t++) {
                float l[4], before = largest[t];
                for (int i = 0; i < 4; i++) {
                    int v = first + 4 * t + i;
                    l[i] = v < V ? x[v] : -3.402823466e38f;
                    largest[t] = l[i] > largest[t] ? l[i] : largest[t];
                }
                float sum = largest[t] > before ? sums[t] * exponential(before - largest[t]) : sums[t];
                for (int i = 0; i < 4; i++) sum += exponential(l[i] - largest[t]);
                sums[t] = sum;
            }
        }
        int taken = std::min(1024, (V + 3) / 4);  // threads with numbers: the others add 0
        for (int t = 0; t < taken; t++) top = largest[t] > top ? largest[t] : top;
#pragma omp simd
        for (int t = 0; t < taken; t++) sums[t] *= exponential(largest[t] - top);
        float sum = exact::block_sum(sums, 1024), target = x[targets[n]];
        losses[n] = exact::log(sum) + top - target;
        if (!with_gradient) continue;
        float shift = top + exact::log(sum / dloss);
#pragma omp simd
        for (int v = 0; v < V; v++) x[v] = exponential(x[v] - shift);
        x[targets[n]] = x[targets[n]] - dloss;
        std::fill(x + V, x + Vp, 0.0f);
    }
}

void exact_add_loss(Verdict* verdict, const float* losses, float factor, int N, int adds) {
    float sums[1024] = {};
    for (int i = 0; i < N; i++) sums[i % 1024] += losses[i];
    verdict->loss = (adds ? verdict->loss : 0.0f) + factor * exact::block_sum(sums, 1024);
}

void exact_global_norm(float* gradient_norm, const float* grads, size_t n, int blocks) {
    constexpr long THREADS = 512;
#pragma omp parallel for
    for (long block = 0; block < blocks; block++) {
        float sums[THREADS] = {};
        for (size_t first = 4 * THREADS * block; first < n; first += 4 * THREADS * blocks)
            exact::each_column(THREADS, std::min<size_t>(n - first, 4 * THREADS), [&](int t, int c) {
                sums[t] += grads[first + c] * grads[first + c];
            });
        gradient_norm[2 + block] = exact::block_sum(sums, THREADS);
    }
    float sums[THREADS] = {};
    for (long block = 0; block < blocks; block++) sums[block % THREADS] += gradient_norm[2 + block];
    gradient_norm[0] = sqrtf(exact::block_sum(sums, THREADS));
    gradient_norm[1] = 0.0f;
}

// A tile of keys at a time, as kernels.cu. Each row's sum is kept by four lanes, whose columns are 2q and 2q + 1 of 8.
void exact_attention_forward(real* out, float* lse, const real* qkv, float scale, int T, int NH, int HS, int GROUP,
                             int heads) {
    const long TILE = (HS + 15) / 16 * 16 > 64 ? 32 : 64;
    const float scale2 = scale * LOG2_E;
#pragma omp parallel for
    for (long head = 0; head < heads; head++) {
        long b = head / NH, h = head % NH, kv = h / GROUP, NKV = NH / GROUP, width = (NH + 2 * NKV) * HS;
        const real* sequence = qkv + b * T * width;
        Matrix q = head_of(sequence + h * HS, width, T, HS);
        Matrix k = head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix v = head_of(sequence + (NH + NKV + kv) * HS, width, T, HS);
        Matrix k_transposed(HS, T + COLUMNS), scores(TILE, TILE);  // the last keys may end within a tile
        for (long t = 0; t < T; t++)
            for (int c = 0; c < HS; c++) k_transposed[c][t] = k[t][c];
        for (long first = 0; first < T; first += TILE) {
            long rows = std::min(TILE, T - first);
            Matrix y(TILE, HS);
            float largest[64], totals[64][4] = {};
            std::fill(largest, largest + rows, -3.402823466e38f);
            for (long key = 0; key <= first; key += TILE) {
                long keys = std::min(TILE, T - key);  // beyond these are zeros
                multiply_tiles(scores[0], scores.columns, q[first], q.columns, 1, k_transposed[0] + key,
                               k_transposed.columns, rows, keys, HS, false);
                for (long i = 0; i < rows; i++) {
                    float *weight = scores[i], top = largest[i], sums[4] = {};
                    std::fill(weight + std::min(TILE, first + i + 1 - key), weight + TILE, -3.402823466e38f);
#pragma omp simd reduction(max : top)
                    for (long s = 0; s < TILE; s++) top = weight[s] > top ? weight[s] : top;
                    float shift = scale2 * top, correction = exact::exp2(scale2 * (largest[i] - top));
#pragma omp simd
                    for (long s = 0; s < TILE; s++) weight[s] = exact::exp2(scale2 * weight[s] - shift);
                    for (long s = 0; s < TILE; s++) sums[s % 8 / 2] += weight[s];
                    for (int lane = 0; lane < 4; lane++) totals[i][lane] = totals[i][lane] * correction + sums[lane];
                    for (int c = 0; c < HS; c++) y[i][c] *= correction;
                    largest[i] = top;
                }
                multiply_tiles(y[0], y.columns, scores[0], scores.columns, 1, v[key], v.columns, rows, HS, keys, true);
            }
            for (long i = 0; i < rows; i++) {
                float sum = (totals[i][0] + totals[i][1]) + (totals[i][2] + totals[i][3]), inverse = 1.0f / sum;
                lse[head * T + first + i] = scale2 * largest[i] + exact::log2(sum);
                for (int c = 0; c < HS; c++) y[i][c] *= inverse;
            }
            store_head(out + ((b * T + first) * NH + h) * HS, (long)NH * HS, rows, HS, 1.0f, y);
        }
    }
}

void fingerprints(size_t* sums, const float* numbers, const size_t* starts, int blocks) {
#pragma omp parallel for schedule(dynamic)
    for (int piece = 0; piece < blocks; piece++) {
        size_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = starts[piece]; i < starts[piece + 1]; i++) {
            uint64_t x = (uint64_t)i << 32 | bits_as<uint32_t>(numbers[i]);
            x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
            x = (x ^ x >> 27) * 0x94d049bb133111eb;
            sum += x ^ x >> 31;
        }
        sums[piece] += sum;
    }
}

}  // extern "C"
