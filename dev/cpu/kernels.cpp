/*
The kernels of kernels.cu as plain loops, for --device cpu: under the same names, with the same
arguments, in the same order, each forward next to its backward. Read this file to see a layer and
its derivative without threads, warps and shared memory; kernels.cu says what a GPU makes of it.

Sizes as there: B sequences of T tokens, N = B*T rows; C channels; V words, padded to Vp; NH heads
of HS channels, of which GROUP share one of the NKV heads of keys and values (in GPT-2 GROUP = 1, so
NKV = NH). Arrays are row-major. What is stored as real is fp32 or bf16. Arithmetic is in fp32; a
few long sums are in double. Its rules hold too: the gradient of a parameter is set, or added to if
`adds`; and every run gives the same bits, here with any number of threads: these share the work,
and change no sum's order.

Read GELU first, then layernorm, the classifier, AdamW, attention, and matrix products last: they
are at the end.

On a GPU, C, HS and GROUP are constants of the compiled kernel, and it can ask how many blocks run.
A loop takes them as further arguments at its end: C, HS, GROUP; blocks, the number of partial sums
that it makes; heads, those of all sequences together; documents, or null: see first_key.

`omp parallel for` splits a loop over the cores. `omp simd` runs the innermost loop on vectors of 4,
8 or 16 numbers, which is right if no iteration reads what another writes. With reduction(+ : sum)
each slot of the vector adds up a part of the sum, and the parts are added at the end; so with max.
*/
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

// ---- numbers ----

template <class To, class From>
To bits_as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

#ifdef BF16
// The upper half of an fp32, rounded to nearest, ties to even. A NaN stays one.
struct real {
    uint16_t bits;
    real() = default;
    real(float x) {
        uint32_t all = bits_as<uint32_t>(x);
        bits = x != x ? 0x7fff : (all + 0x7fff + (all >> 16 & 1)) >> 16;
    }
    operator float() const { return bits_as<float>((uint32_t)bits << 16); }
};
#else
using real = float;
#endif

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// e^x, as expf, which compilers do not vectorize: skip it at first. e^x = 2^n e^f, where n is
// x/log(2), rounded, and so |f| <= log(2)/2: there a polynomial is as good as fp32 (Cephes). The
// number 1.5 * 2^23 has no bits below 1: adding it rounds, and leaves n in the lowest bits. 2^n is
// then a matter of writing n + 127 where a float keeps its exponent: 255 means infinity, from
// x = 88.4 on, and 0 makes zero. A NaN stays one.
constexpr float LOG2_E = 1.442695041f, LN_2 = 0.6931471806f;
#ifdef EXACT  // see features/exact
inline float exponential(float x) { return exact::exp(x); }
inline float power_of_2(float x) { return exact::exp2(x); }
using exact::sum_of;
#else
inline float exponential(float x) {
    x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
    float shifted = x * LOG2_E + 12582912.0f, n = shifted - 12582912.0f;
    // log(2) in two parts: the first product is exact
    float f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float square = f * f;  // in pairs, so that few steps wait for one another (Estrin)
    float high = 4.1665795894e-2f + 8.3334519073e-3f * f +
                 (1.3981999507e-3f + 1.9875691500e-4f * f) * square;
    float p = 5.0000001201e-1f + 1.6666665459e-1f * f + high * square;
    float power = bits_as<float>((bits_as<uint32_t>(shifted) << 23) + 0x3f800000u);  // 2^n
    return (p * square + (f + 1.0f)) * power;
}
inline float power_of_2(float x) { return exponential(LN_2 * x); }

// The sum of f(c) for c < C. It is in --exact that a kernel's threads matter.
template <class F>
inline float sum_of(int threads, int C, F f) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int c = 0; c < C; c++) sum += f(c);
    return sum;
}
#endif

// out (OC) = the sums of the columns of inp (N,OC); or += with adds. As on a GPU, every slots-th row
// has a sum of its own.
template <int slots, class T>
static void add_columns(float* out, const T* inp, long N, int OC, bool adds) {
    std::vector<float> sums(slots * OC), total(OC);
    for (long n = 0; n < N; n++)
#pragma omp simd
        for (int c = 0; c < OC; c++) sums[n % slots * OC + c] += inp[n * OC + c];
    for (int i = 0; i < slots; i++)
#pragma omp simd
        for (int c = 0; c < OC; c++) total[c] += sums[i * OC + c];
    for (int c = 0; c < OC; c++) out[c] = (adds ? out[c] : 0.0f) + total[c];
}

extern "C" {

// ---- encoder: token and position embeddings ----

// out (N,C) = wte (Vp,C)[token] + wpe (maxT,C)[position], the latter unless wpe is null
void encoder_forward(float* out, const int* tokens, const real* wte, const real* wpe, int N, int T,
                     int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        float* x = out + n * C;
        const real *token = wte + (long)tokens[n] * C, *position = wpe ? wpe + n % T * C : nullptr;
#pragma omp simd
        for (int c = 0; c < C; c++) x[c] = position ? token[c] + position[c] : (float)token[c];
    }
}

// dwte (Vp,C)[tokens[n]] += dout (N,C)[n], for all n. (It always adds: the head's product has set
// dwte.) Two cores must not add to the same row of dwte, so the host has sorted the positions by
// token: for tokens [7,3,7], order (N) is [1,0,2] and runs (N,2) are (1,2), (0,1), each the first
// index in order, and a length. Unused runs have length 0.
void encoder_backward_wte(float* dwte, const real* dout, const int* tokens, const int* order,
                          const int* runs, int N, int C) {
#pragma omp parallel for schedule(dynamic, 8)
    for (int i = 0; i < N; i++) {
        int length = runs[2 * i + 1];
        const int* positions = order + runs[2 * i];  // all with the same token
        float* d = dwte + (long)tokens[positions[0]] * C;
        for (int j = 0; j < length; j++) {
            const real* from = dout + (long)positions[j] * C;
#pragma omp simd
            for (int c = 0; c < C; c++) d[c] += from[c];
        }
    }
}

// dwpe (maxT,C)[t] = the sum over b of dout (B,T,C)[b,t], and 0 beyond T; or += with adds
void encoder_backward_wpe(float* dwpe, const real* dout, int B, int T, int maxT, int C, int adds) {
#pragma omp parallel for
    for (long t = 0; t < maxT; t++) {
        float* d = dwpe + t * C;
        if (!adds) std::fill(d, d + C, 0.0f);
        for (int b = 0; b < B && t < T; b++) {
            const real* from = dout + (b * (long)T + t) * C;
#pragma omp simd
            for (int c = 0; c < C; c++) d[c] += from[c];
        }
    }
}

// ---- residual stream and layernorm (Ba, Kiros and Hinton 2016, section 3) ----

// x (N,C) += branch (N,C), unless branch is null; copy (N,C) = x. Then, for each row,
//   out = (x - mean) * rstd * weight + bias, with rstd = 1/sqrt(variance + 1e-5)
void residual_layernorm_forward(real* out, float* mean, float* rstd, real* copy, float* x,
                                const real* branch, const real* weight, const real* bias, int N,
                                int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        float* row = x + n * C;
        if (branch) {
#pragma omp simd
            for (int c = 0; c < C; c++) row[c] += branch[n * C + c];
        }
        float m = sum_of(32, C, [&](int c) { return row[c]; }) / C;
        float squares = sum_of(32, C, [&](int c) { return (row[c] - m) * (row[c] - m); });
        float s = 1.0f / sqrtf(squares / C + 1e-5f);
#pragma omp simd
        for (int c = 0; c < C; c++) {
            copy[n * C + c] = row[c];
            out[n * C + c] = (row[c] - m) * s * weight[c] + bias[c];
        }
        mean[n] = m;
        rstd[n] = s;
    }
}

// out = norm * weight + bias with norm = (inp - mean) * rstd, so dnorm = dout * weight. Adding a
// constant to a row of inp, or scaling the row, (almost) does not change norm. So the gradient of
// inp has nothing along these two directions: what dnorm has there, along (1,1,..) and along norm,
// is subtracted. For each row of dresidual (N,C):
//   dresidual += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
// dweight (C) is the sum over rows of dout * norm, dbias (C) that of dout. Each of `blocks` shares
// of the rows leaves its parts of them in partials (2,blocks,C); add_partials adds these up. As on
// a GPU, a share takes some rows at a time, each of which has a sum of its own.
void layernorm_backward(real* dresidual, float* partials, const real* dout, const real* inp,
                        const real* weight, const float* mean, const float* rstd, int N, int C,
                        int blocks) {
    const int threads = C <= 1280 ? 32 : 128;  // of a row; and the rows that fit shared memory:
    const long rows = std::clamp(98 * 1024 / (2 * 3 * 4 * C), 1,
                                 (C <= 768 ? 384 : C <= 1280 ? 256 : 512) / threads);
#pragma omp parallel for
    for (long block = 0; block < blocks; block++) {
        std::vector<float> sums(2 * rows * C);
        for (long first = block * rows; first < N; first += blocks * rows)
            for (long n = first; n < std::min(first + rows, (long)N); n++) {
                const real *x = inp + n * C, *dy = dout + n * C;
                real* dx = dresidual + n * C;
                float *of_norm = &sums[(n - first) * C], *of_dout = of_norm + rows * C;
                float s = rstd[n], minus_ms = -mean[n] * s;  // copied below: half as fast by [&]
                auto norm = [=](int c) { return x[c] * s + minus_ms; };
                auto dnorm = [=](int c) { return dy[c] * weight[c]; };
                float average = sum_of(threads, C, dnorm) / C;
                float average_norm =
                    sum_of(threads, C, [=](int c) { return dnorm(c) * norm(c); }) / C;
#pragma omp simd
                for (int c = 0; c < C; c++) {
                    dx[c] = dx[c] + s * (dnorm(c) - average - norm(c) * average_norm);
                    of_norm[c] += dy[c] * norm(c);
                    of_dout[c] += dy[c];
                }
            }
        for (int which = 0; which < 2; which++)
            add_columns<1>(partials + (which * blocks + block) * C, &sums[which * rows * C], rows,
                           C, false);
    }
}

// ---- a linear layer: out (N,OC) = inp (N,C) weight' + bias ----

// In a textbook's loop, for all n and o:
//   out[n][o] = bias[o], then for all c: out[n][o] += inp[n][c] * weight[o][c]
// and backward, for all n, o and c:
//   dinp[n][c] += dout[n][o] * weight[o][c]
//   dweight[o][c] += dout[n][o] * inp[n][c]
//   dbias[o] += dout[n][o]
// The first three are matrix products, and most of a step's time: see multiply, at the end of this
// file. The bias, the sum of each column of dout, is a kernel of its own.

// partials (blocks,OC) = for each of `blocks` shares of the rows of dout (N,OC), the sum of each
// column
void matmul_backward_bias(float* partials, const real* dout, int N, int OC, int blocks) {
    long rows = ceil_div(N, 32 * blocks) * 32;
#pragma omp parallel for
    for (long block = 0; block < blocks; block++)
        add_columns<8>(partials + block * OC, dout + rows * block * OC,
                       std::min(rows, N - rows * block), OC, false);
}

// out1 (C), out2 (C) = the sums over the rows of partials (2,blocks,C); or += with adds. A null
// output is skipped.
void add_partials(float* out1, float* out2, const float* partials, int blocks, int C, int adds) {
    if (out1) add_columns<32>(out1, partials, blocks, C, adds);
    if (out2) add_columns<32>(out2, partials + (long)blocks * C, blocks, C, adds);
}

}  // extern "C"

// ---- GELU, in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2) ----

// gelu(x) = x/2 (1 + tanh u) = x g with u = sqrt(2/pi) (x + 0.044715 x^3) and g = 1/(1 + exp(-2u))
constexpr float SQRT_8_OVER_PI = 1.595769122f;
inline float gelu_denominator(float x) {
    return 1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x));
}
inline float gelu(float x) { return x / gelu_denominator(x); }

// d(x g)/dx = g + x g (1 - g) d(2u)/dx. Far left the exponential is infinite, and g is 0.
inline float gelu_derivative(float x) {
    float g = 1.0f / gelu_denominator(x);
    return g + x * g * (1.0f - g) * SQRT_8_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

extern "C" {

// out (N,OC) = gelu(inp (N,OC))
void gelu_forward(real* out, const real* inp, int N, int OC) {
#pragma omp parallel for simd
    for (long i = 0; i < (long)N * OC; i++) out[i] = gelu(inp[i]);
}

// dinp (N,OC), the gradient of the output, becomes that of inp (N,OC)
void gelu_backward(real* dinp, const real* inp, int N, int OC) {
#pragma omp parallel for simd
    for (long i = 0; i < (long)N * OC; i++) dinp[i] = dinp[i] * gelu_derivative(inp[i]);
}

// ---- classifier: softmax, cross-entropy and its gradient ----

// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]), which is
//   log(the sum of e^logit) - logit[target]
// so its gradient is softmax - onehot, where onehot is 1 at the target. With with_gradient, the
// logits become that times dloss, 1 / (tokens of the step), since a step's loss is a mean; the
// padding becomes zeros. room is for a GPU.
void fused_classifier(real* logits, float* losses, const int* targets, float dloss, int N, int V,
                      int Vp, int with_gradient, int room) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        real* x = logits + n * Vp;
        float largest = x[0];
        double sum = 0.0;  // a sum of 50,257 numbers in fp32 would lose digits
#pragma omp simd reduction(max : largest)
        for (int v = 0; v < V; v++) largest = x[v] > largest ? (float)x[v] : largest;
#pragma omp simd reduction(+ : sum)
        for (int v = 0; v < V; v++) sum += exponential(x[v] - largest);
        losses[n] = (float)log(sum) + largest - x[targets[n]];
        if (!with_gradient) continue;
        float target = x[targets[n]], factor = dloss / (float)sum;
#pragma omp simd
        for (int v = 0; v < V; v++) x[v] = factor * exponential(x[v] - largest);
        x[targets[n]] = factor * exponential(target - largest) - dloss;
        std::fill(x + V, x + Vp, 0.0f);
    }
}

// The outcome of a step; see kernels.cu.
struct Verdict { float norm, loss, update, stopped; };

// verdict->loss = factor times the sum of losses (N), or += with adds
void add_loss(Verdict* verdict, const float* losses, float factor, int N, int adds) {
    double sum = 0.0;
    for (int i = 0; i < N; i++) sum += losses[i];
    verdict->loss = (adds ? verdict->loss : 0.0f) + factor * (float)sum;
}

// ---- the gradient's norm, and AdamW ----
// (Kingma and Ba 2014, algorithm 1; Loshchilov and Hutter 2017, algorithm 2)

// gradient_norm[0] = the square root of the sum of the squares of grads (n), from the sums of
// `blocks` parts, gradient_norm[2..]
void global_norm(float* gradient_norm, const float* grads, size_t n, int blocks) {
#pragma omp parallel for
    for (long block = 0; block < blocks; block++) {
        double sum = 0.0;  // in fp32, thousands of small squares would be lost beside their sum
#pragma omp simd reduction(+ : sum)
        for (size_t i = block * n / blocks; i < (block + 1) * n / blocks; i++)
            sum += (double)grads[i] * grads[i];
        gradient_norm[2 + block] = sum;
    }
    double sum = 0.0;
    for (int block = 0; block < blocks; block++) sum += gradient_norm[2 + block];
    gradient_norm[0] = sqrt(sum);
    gradient_norm[1] = 0.0f;  // a GPU's counter
}

// The settings of a step; see kernels.cu.
struct AdamW {
    float learning_rate, rate1, rate2, correction1, correction2, eps, weight_decay, clip;
};

// A step updates the parameters if its loss and norm, and those of all earlier steps, are finite.
void judge(Verdict* verdict, const float* gradient_norm) {
    verdict->norm = gradient_norm[0];
    if (!(std::isfinite(verdict->loss) && std::isfinite(verdict->norm))) verdict->stopped = 1.0f;
    verdict->update = 1.0f - verdict->stopped;
}

}  // extern "C"

// The fp32 parameter that AdamW updates. In fp32 it is params[i], and low is null. In bf16 params
// has its upper half, rounded, and low what rounding took away, signed, so that the bits are (param
// << 16) + low.
#ifdef BF16
inline float master(const real* params, const int16_t* low, size_t i) {
    return bits_as<float>(((uint32_t)params[i].bits << 16) + (int32_t)low[i]);
}
inline void store_master(real* params, int16_t* low, size_t i, float x) {
    uint32_t bits = bits_as<uint32_t>(x);
    low[i] = bits;
    // Ties round away from zero: then `low` alone says which way. A NaN's bits could overflow, so
    // it is cut off.
    params[i].bits = (x == x ? bits + 0x8000 : bits) >> 16;
}
#else
inline float master(const real* params, const int16_t*, size_t i) { return params[i]; }
inline void store_master(real* params, int16_t*, size_t i, float x) { params[i] = x; }
#endif

extern "C" {

// One step for all n parameters, with g the scaled gradient:
//   m += rate1 (g - m),  v += rate2 (g^2 - v)
//   p -= learning_rate (m correction1 / (sqrt(v correction2) + eps) + weight_decay p)
// rate1 and rate2 are 1 - beta; the corrections, 1 / (1 - beta^step), undo the start of m and v at
// 0. If the gradient's norm exceeds clip, the gradient is scaled down to it; clip 0: never.
// Tensor i begins at starts[i] in the arenas, and decayed[i] says whether it gets weight decay.
void adamw(real* params, int16_t* low, const float* grads, float* m, float* v, const size_t* starts,
           const int* decayed, int tensors, size_t n, const AdamW* settings,
           const Verdict* verdict) {
    if (!verdict->update) return;
    AdamW a = *settings;
    float scale = a.clip > 0.0f && verdict->norm > a.clip ? a.clip / verdict->norm : 1.0f;
    for (int tensor = 0; tensor < tensors; tensor++) {
        float decay = decayed[tensor] ? a.weight_decay : 0.0f;
        size_t first = tensor ? starts[tensor] : 0;
        size_t end = tensor + 1 < tensors ? std::min(starts[tensor + 1], n) : n;
#pragma omp parallel for simd
        for (size_t i = first; i < end; i++) {
            float g = scale * grads[i], p = master(params, low, i);
            m[i] += a.rate1 * (g - m[i]);
            v[i] += a.rate2 * (g * g - v[i]);
            float change = m[i] * a.correction1 / (sqrtf(v[i] * a.correction2) + a.eps);
            p -= a.learning_rate * (change + decay * p);
            store_master(params, low, i, p);
        }
    }
}

}  // extern "C"

// ---- attention (Vaswani et al. 2017, section 3.2.1) ----

// For each head, with q, k, v (T,HS), and a prime for a transpose:
//   weights (T,T) = softmax(scale * q k'), where token t sees the tokens s <= t only
//   out (T,HS) = weights v
// In a textbook's loop, for each token t:
//   for s <= t: score[s] = scale * (the sum over c of q[t][c] * k[s][c])
//   weight = softmax(score)
//   for s <= t, for all c: out[t][c] += weight[s] * v[s][c]
// and backward, given dout:
//   dv = weights' dout        dweights = dout v'
//   dscores = weights * (dweights - delta), delta = the sum of weights * dweights in each row
//   dq = scale * dscores k    dk = scale * dscores' q
// delta is also the sum of out * dout in each row, since out = weights v: that is cheaper.
//
// Here it is done by blocks, which turn the loops over s into products of small matrices: BLOCK
// queries at a time, so that their scores (BLOCK,T) stay in a core's cache.

// A register holds a Vector of LANES numbers, which may begin at any float of an array. A product
// computes a tile of ROWS x VECTORS of them at a time in registers: 16 of AVX-512's 32, 12 of AVX's
// or SSE's 16, or 24 of ARM's 32. The other registers hold what a step of k reads: ROWS + COLUMNS
// numbers, for ROWS * COLUMNS multiply-adds.
#ifdef __AVX512F__
constexpr long LANES = 16, ROWS = 8, VECTORS = 2;
#elif defined __AVX__
constexpr long LANES = 8, ROWS = 6, VECTORS = 2;
#elif defined __aarch64__
constexpr long LANES = 4, ROWS = 8, VECTORS = 3;
#else
constexpr long LANES = 4, ROWS = 6, VECTORS = 2;
#endif
constexpr long COLUMNS = VECTORS * LANES, BLOCK = 4 * ROWS;
constexpr long KEYS = std::lcm(ROWS, COLUMNS);  // whole tiles, be they rows or columns
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// Where a vector begins, so that it is read in one go.
struct alignas(64) Line { float numbers[16]; };

// A matrix in fp32, with zeros at its right and below it: to whole tiles, and to whole blocks, so
// that it is whole lines, too.
struct Matrix {
    long rows, columns;
    std::vector<Line> lines;
    Matrix(long rows, long columns)
        : rows(ceil_div(rows, BLOCK) * BLOCK),
          columns(ceil_div(columns, COLUMNS) * COLUMNS),
          lines(this->rows * this->columns / 16) {}
    float* operator[](long i) { return lines[0].numbers + i * columns; }
};

// A tile of sum (I,J) = left (I,K) right (K,J), or += if adds. The numbers from its first on, or in
// its row and column, are sum[i * ls + j], right[k * lr + j] and left[i * li + k * lk]: with
// (li,lk) = (stride,1) left is read as it is stored, and its transpose with (1,stride).
static void multiply_tile(float* sum, long ls, const float* left, long li, long lk,
                          const float* right, long lr, long K, bool adds) {
#ifdef EXACT  // one chain of fmaf for each number, however K is cut
    float tile[ROWS][COLUMNS] = {};
    for (int r = 0; adds && r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) tile[r][c] = sum[r * ls + c];
    for (long k = 0; k < K; k++)
        for (int r = 0; r < ROWS; r++)
#pragma omp simd
            for (int c = 0; c < COLUMNS; c++)
                tile[r][c] = fmaf(left[r * li + k * lk], right[k * lr + c], tile[r][c]);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) sum[r * ls + c] = tile[r][c];
#else
    Vector tile[ROWS][VECTORS] = {};
    for (long k = 0; k < K; k++) {
        Vector of_right[VECTORS];  // for all rows
        for (int v = 0; v < VECTORS; v++) of_right[v] = ((Vector*)(right + k * lr))[v];
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) tile[r][v] += left[r * li + k * lk] * of_right[v];
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) {
            Vector& to = ((Vector*)(sum + r * ls))[v];
            to = adds ? to + tile[r][v] : tile[r][v];
        }
#endif
}

// All tiles. I and J are rounded up to whole ones, for which a Matrix has its zeros.
static void multiply_tiles(float* sum, long ls, const float* left, long li, long lk,
                           const float* right, long lr, long I, long J, long K, bool adds) {
    for (long j = 0; j < J; j += COLUMNS)
        for (long i = 0; i < I; i += ROWS)
            multiply_tile(sum + i * ls + j, ls, left + i * li, li, lk, right + j, lr, K, adds);
}

// to (n/WIDTH,K,WIDTH): number k of row i of a matrix, from[i * across + k * along], becomes
// to[i/WIDTH][k][i%WIDTH], so that WIDTH rows are read together. n is rounded up, with zeros.
template <int WIDTH>
static void pack(float* __restrict to, const real* __restrict from, long across, long along, long n,
                 long K) {
    long whole = across == 1 || along == 1 ? n / WIDTH * WIDTH : 0;
    if (across == 1) {  // a case of its own, as the next one: the compiler must know the stride
        for (long first = 0; first < K; first += 16)  // few rows, which stay in the first cache
            for (long i = 0; i < whole; i += WIDTH)
                for (long k = first; k < std::min(K, first + 16); k++)
                    for (int r = 0; r < WIDTH; r++)
                        to[i * K + k * WIDTH + r] = from[i + r + k * along];
    } else {
        for (long i = 0; i < whole; i += WIDTH)
            for (long k = 0; k < K; k++)
                for (int r = 0; r < WIDTH; r++)
                    to[i * K + k * WIDTH + r] = from[(i + r) * across + k];
    }
    for (long i = whole; i < n; i += WIDTH)
        for (long k = 0; k < K; k++)
            for (int r = 0; r < WIDTH; r++)
                to[i * K + k * WIDTH + r] =
                    i + r < n ? (float)from[(i + r) * across + k * along] : 0.0f;
}

// One head of an array (B,T,heads,HS), as a matrix (T,HS). `at` is its first number, `width` a
// row's numbers.
static Matrix head_of(const real* at, long width, int T, int HS) {
    Matrix x(T, HS);
    for (long t = 0; t < T; t++)
#pragma omp simd
        for (int c = 0; c < HS; c++) x[t][c] = at[t * width + c];
    return x;
}

static void store_head(real* at, long width, int T, int HS, float factor, Matrix& x) {
    for (long t = 0; t < T; t++)
#pragma omp simd
        for (int c = 0; c < HS; c++) at[t * width + c] = factor * x[t][c];
}

// Its transpose, packed
static Matrix transposed_head_of(const real* at, long width, int T, int HS) {
    Matrix x(HS, T);
    pack<COLUMNS>(x[0], at, width, 1, T, HS);
    return x;
}

// The first key that query t of sequence b sees: 0, or that of its document, if documents (B,2,T)
// has it: see features/documents.cu.
static long first_key(const int* documents, long b, long T, long t) {
    return documents ? documents[2 * b * T + t] : 0;
}

// to = x y', for the `rows` rows of x from `first` on, and the rows of y from a whole tile on up to
// `keys`: no query sees later ones. y' is given packed.
static void multiply_block(Matrix& to, Matrix& x, Matrix& y_transposed, long first, long rows,
                           long tile, long keys, int HS) {
    for (long j = tile; j < keys; j += COLUMNS)
        multiply_tiles(to[0] + j, to.columns, x[first], x.columns, 1, y_transposed[0] + j * HS,
                       COLUMNS, rows, COLUMNS, HS, false);
}

// y = softmax(scale q k') v, for a block of queries from q[first] on, whose own keys begin at `own`.
// lse, unless null, and documents are attention_forward's.
static void attend_block(Matrix& y, float* lse, Matrix& scores, Matrix& q, Matrix& k_transposed,
                         Matrix& v, float scale, long first, long rows, long own, int HS,
                         const int* documents, long b, long T) {
    long keys = own + rows;
    long tile = first_key(documents, b, T, first) / KEYS * KEYS;  // where seen ones begin
    multiply_block(scores, q, k_transposed, first, rows, tile, keys, HS);
    float inverse[BLOCK];
    for (long i = 0; i < rows; i++) {
        long begin = first_key(documents, b, T, first + i);
        float *score = scores[i], *weight = score, largest = score[begin], sum = 0.0f;
        std::fill(score + tile, score + begin, -INFINITY);        // another document's
        std::fill(score + own + i + 1, score + keys, -INFINITY);  // the future is not seen
#pragma omp simd reduction(max : largest)
        for (long s = tile; s < keys; s++) largest = score[s] > largest ? score[s] : largest;
#pragma omp simd reduction(+ : sum)
        for (long s = tile; s < keys; s++) {
            weight[s] = exponential(scale * (score[s] - largest));
            sum += weight[s];
        }
        inverse[i] = 1.0f / sum;
        if (lse) lse[i] = scale * LOG2_E * largest + log2f(sum);
    }
    multiply_tiles(y[first], y.columns, scores[0] + tile, scores.columns, 1, v[tile], v.columns,
                   rows, HS, keys - tile, false);
    for (long i = 0; i < rows; i++)
        for (int c = 0; c < HS; c++) y[first + i][c] *= inverse[i];
}

extern "C" {

// qkv (B,T,NH+2NKV,HS) has queries, keys, values; NH/NKV heads of queries share one of keys and
// values. out (B,T,NH,HS). For the backward pass, lse (B,NH,T) = log2 of the sum over keys of
// 2^(scale * log2(e) * score).
void attention_forward(real* out, float* lse, const real* qkv, float scale, int T, int NH, int HS,
                       int GROUP, int heads, const int* documents) {
#pragma omp parallel for
    for (long head = 0; head < heads; head++) {
        long b = head / NH, h = head % NH, kv = h / GROUP, NKV = NH / GROUP,
            width = (NH + 2 * NKV) * HS;
        const real* sequence = qkv + b * T * width;
        Matrix q = head_of(sequence + h * HS, width, T, HS);
        Matrix k_transposed = transposed_head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix v = head_of(sequence + (NH + NKV + kv) * HS, width, T, HS);
        Matrix scores(BLOCK, T), y(T, HS);
        for (long first = 0; first < T; first += BLOCK)
            attend_block(y, lse + head * T + first, scores, q, k_transposed, v, scale, first,
                         std::min(BLOCK, T - first), first, HS, documents, b, T);
        store_head(out + (b * T * NH + h) * HS, (long)NH * HS, T, HS, 1.0f, y);
    }
}

}  // extern "C"

// For a block of queries, in the backward pass: weights (rows,keys), computed again from lse, and
// dscores, without their factor scale: dq and dk are multiplied by it once, when they are stored.
// Returns the first key of a whole tile, before which none is seen.
static long weights_and_dscores(Matrix& weights, Matrix& dscores, Matrix& q, Matrix& k_transposed,
                                Matrix& dout, Matrix& v_transposed, const float* lse,
                                const float* delta, float scale, long first, long rows, int HS,
                                const int* documents, long b, long T) {
    long tile = first_key(documents, b, T, first) / KEYS * KEYS;
    long keys = first + rows;
    multiply_block(weights, q, k_transposed, first, rows, tile, keys, HS);  // the scores, at first
    multiply_block(dscores, dout, v_transposed, first, rows, tile, keys, HS);  // dweights
    for (long i = 0; i < rows; i++) {
        long t = first + i, begin = first_key(documents, b, T, t);
        float *weight = weights[i], *dscore = dscores[i], l = lse[t], d = delta[t];
#pragma omp simd
        for (long s = tile; s < keys; s++) {  // of all keys of whole tiles: whole vectors
            weight[s] = power_of_2(scale * LOG2_E * weight[s] - l);
            dscore[s] = weight[s] * (dscore[s] - d);
        }
        for (float* x : {weight, dscore}) {
            std::fill(x + tile, x + begin, 0.0f);
            std::fill(x + t + 1, x + keys, 0.0f);
        }
    }
    return tile;
}

extern "C" {

// dq (T,HS) = scale * dscores k, in dqkv, which has qkv's shape. Leaves delta (B,NH,T) for the next
// one.
void attention_backward_q(real* dqkv, float* delta, const float* lse, const real* out,
                          const real* qkv, const real* dout, float scale, int T, int NH, int HS,
                          int GROUP, int heads, const int* documents) {
#pragma omp parallel for
    for (long head = 0; head < heads; head++) {
        long b = head / NH, h = head % NH, kv = h / GROUP, NKV = NH / GROUP,
            width = (NH + 2 * NKV) * HS;
        const real* sequence = qkv + b * T * width;
        Matrix q = head_of(sequence + h * HS, width, T, HS);
        Matrix k = head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix k_transposed = transposed_head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix v_transposed = transposed_head_of(sequence + (NH + NKV + kv) * HS, width, T, HS);
        Matrix y = head_of(out + (b * T * NH + h) * HS, (long)NH * HS, T, HS);
        Matrix dy = head_of(dout + (b * T * NH + h) * HS, (long)NH * HS, T, HS);
        for (long t = 0; t < T; t++)
            delta[head * T + t] = sum_of(2, HS, [&](int c) { return y[t][c] * dy[t][c]; });
        Matrix weights(BLOCK, T), dscores(BLOCK, T), dq(T, HS);
        for (long first = 0; first < T; first += BLOCK) {
            long rows = std::min(BLOCK, T - first);
            long tile = weights_and_dscores(
                weights, dscores, q, k_transposed, dy, v_transposed, lse + head * T,
                delta + head * T, scale, first, rows, HS, documents, b, T);
            multiply_tiles(dq[first], dq.columns, dscores[0] + tile, dscores.columns, 1, k[tile],
                           k.columns, rows, HS, first + rows - tile, false);
        }
        store_head(dqkv + b * T * width + h * HS, width, T, HS, scale, dq);
    }
}

// dk (T,HS) = scale * dscores' q and dv (T,HS) = weights' dout, summed over the heads of queries
// that share k and v
void attention_backward_kv(real* dqkv, const float* delta, const float* lse, const real* qkv,
                           const real* dout, float scale, int T, int NH, int HS, int GROUP,
                           int heads, const int* documents) {
#pragma omp parallel for
    for (long head = 0; head < heads; head++) {
        long NKV = NH / GROUP, b = head / NKV, kv = head % NKV, width = (NH + 2 * NKV) * HS;
        const real* sequence = qkv + b * T * width;
        Matrix k_transposed = transposed_head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix v_transposed = transposed_head_of(sequence + (NH + NKV + kv) * HS, width, T, HS);
        Matrix weights(BLOCK, T), dscores(BLOCK, T), dk(T, HS), dv(T, HS);
        for (long h = kv * GROUP; h < (kv + 1) * GROUP; h++) {
            long of_head = (b * NH + h) * T;
            Matrix q = head_of(sequence + h * HS, width, T, HS);
            Matrix dy = head_of(dout + (b * T * NH + h) * HS, (long)NH * HS, T, HS);
            for (long first = 0; first < T; first += BLOCK) {
                long rows = std::min(BLOCK, T - first);
                long tile = weights_and_dscores(
                    weights, dscores, q, k_transposed, dy, v_transposed, lse + of_head,
                    delta + of_head, scale, first, rows, HS, documents, b, T);
                long keys = first + rows - tile;
                multiply_tiles(dv[tile], dv.columns, weights[0] + tile, 1, weights.columns,
                               dy[first], dy.columns, keys, HS, rows, true);
                multiply_tiles(dk[tile], dk.columns, dscores[0] + tile, 1, dscores.columns,
                               q[first], q.columns, keys, HS, rows, true);
            }
        }
        store_head(dqkv + b * T * width + (NH + kv) * HS, width, T, HS, scale, dk);
        store_head(dqkv + b * T * width + (NH + NKV + kv) * HS, width, T, HS, 1.0f, dv);
    }
}

}  // extern "C"

// ---- products: what a device's matmul does; no kernel of kernels.cu ----

extern "C" {

// A product of left (I,K) and right (K,J), whose numbers are left[i * li + k * lk] and
// right[k * rk + j * rj]. sums (I,J) = the product, or += with accumulate; or if sums is null,
// out (I,J) = the product + bias (J), times GELU's derivative at dgelu_at (I,J), and gelu_of (I,J)
// = GELU(out), each only if it is not null.
//
// A core multiplies much faster than it reads memory, so it must use often what it has read (Goto
// and van de Geijn 2008). A thread computes a block of the result, whose sums stay in its second
// cache, from DEPTH numbers k at a time. It packs these: left's for the whole block, and right's
// for COLUMNS columns at a time, which stay in the first cache while all rows use them. So
// multiply_tile reads both in the order in which they lie.
//
// Each result is the sum of DEPTH products, plus the sum of the next DEPTH, and so on, in whichever
// block it is: so blocks may depend on the number of threads.
void multiply(real* out, float* sums, const real* left, long li, long lk, const real* right,
              long rk, long rj, long I, long J, long K, int accumulate, const real* bias,
              const real* dgelu_at, real* gelu_of) {
    constexpr long HEIGHT = 240, WIDTH = 768, DEPTH = 256;  // at most: sums of 720 KiB
    long threads = 1, up = ceil_div(I, HEIGHT), across = ceil_div(J, WIDTH), height, width;
#ifdef _OPENMP
    threads = omp_get_max_threads();
#endif
    // Cut smaller blocks until each thread has the same number of them, or many.
    for (;; ++(height > width ? up : across)) {
        height = ceil_div(ceil_div(I, up), ROWS) * ROWS;
        width = ceil_div(ceil_div(J, across), COLUMNS) * COLUMNS;
        long blocks = up * across;
        if (blocks % threads == 0 || blocks > 8 * threads || height * width < 4096) break;
    }
    up = ceil_div(I, height);
    across = ceil_div(J, width);
    long next = rk == 1 ? rj : rk;  // from a stored row of right to the next
#pragma omp parallel if (I * J * K > 100000)
    {
        std::unique_ptr<Line[]> lines(new Line[(height * (std::min(K, DEPTH) + width)) / 16 + 1]);
        float *sum = lines[0].numbers, *packed_left = sum + height * width;
        alignas(64) float packed_right[DEPTH * COLUMNS];
#pragma omp for schedule(dynamic)
        for (long block = 0; block < up * across; block++) {
            long i = block % up * height, j = block / up * width;
            long rows = std::min(height, I - i), columns = std::min(width, J - j);
            for (long k = 0; k < K; k += DEPTH) {
                long depth = std::min(DEPTH, K - k);
                pack<ROWS>(packed_left, left + i * li + k * lk, li, lk, rows, depth);
                for (long c = 0; c < columns; c += COLUMNS) {
                    const real* from = right + k * rk + (j + c) * rj;
                    pack<COLUMNS>(packed_right, from, rj, rk, std::min(COLUMNS, columns - c),
                                  depth);
                    for (long r = 0; r < rows; r += ROWS) {
                        // fetch what is packed next, a row after the other, as it is stored
                        for (long n = 0; n < depth && r < ROWS * COLUMNS; n += 16)
                            __builtin_prefetch(from + COLUMNS * rj + r / ROWS * next + n * rk);
                        multiply_tile(sum + r * width + c, width, packed_left + r * depth, 1, ROWS,
                                      packed_right, COLUMNS, depth, k > 0);
                    }
                }
            }
            for (long r = 0; r < rows; r++) {
                long at = (i + r) * J + j;  // of the block's row
                float* x = sum + r * width;
                if (sums) {
#pragma omp simd
                    for (long c = 0; c < columns; c++)
                        sums[at + c] = accumulate ? sums[at + c] + x[c] : x[c];
                    continue;
                }
                if (bias) {
#pragma omp simd
                    for (long c = 0; c < columns; c++) x[c] += bias[j + c];
                }
                if (dgelu_at) {
#pragma omp simd
                    for (long c = 0; c < columns; c++) x[c] *= gelu_derivative(dgelu_at[at + c]);
                }
#pragma omp simd
                for (long c = 0; c < columns; c++) out[at + c] = x[c];
                if (gelu_of) {
#pragma omp simd
                    for (long c = 0; c < columns; c++) gelu_of[at + c] = gelu(out[at + c]);
                }
            }
        }
    }
}

}  // extern "C"
