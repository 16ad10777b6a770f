/*
Llama 3's own kernels: RMSNorm instead of layernorm, rotary instead of learned positions, and SwiGLU instead of GELU,
each forward next to its backward. This file is compiled after kernels.cu and uses its functions. Its rules hold here
too: what is added to and what is set, and that every run gives the same bits.

More sizes than in kernels.cu: NKV key-value heads, a divisor of NH; H hidden channels of the MLP, a multiple of 8.
C is at most 8,192, on Turing 4,096; HS is even. A row of qkv has NH query heads, NKV key heads, and NKV value heads.
*/

// ---- residual stream and RMSNorm (Zhang and Sennrich 2019, section 4) ----

// A block of 8 warps works on up to 8,192 numbers at a time, at most 32 per lane, which registers can hold; on Turing
// on half of that, which shared memory can hold. So a row of up to 1,024 channels takes one warp, and a longer one 2, 4
// or 8. Lane i of a row has packs i, i + ROW_LANES, ... of n columns each. each_row_pack calls f(k, c) for each of
// them: pack k begins at column c.
constexpr int LONGEST_ROW = TURING ? 4096 : 8192;
constexpr int EIGHTH = LONGEST_ROW / 8;
constexpr int ROW_WARPS = CHANNELS <= EIGHTH ? 1 : CHANNELS <= 2 * EIGHTH ? 2 : CHANNELS <= 4 * EIGHTH ? 4 : 8;
constexpr int ROW_LANES = 32 * ROW_WARPS, ROWS_AT_ONCE = 8 / ROW_WARPS;
static_assert(CHANNELS <= LONGEST_ROW, "C is at most 8,192, on Turing 4,096");
template <int n>
constexpr int row_packs = (CHANNELS + ROW_LANES * n - 1) / (ROW_LANES * n);
template <int n, class F>
__device__ __forceinline__ void each_row_pack(F f) {
#pragma unroll
    for (int k = 0; k < row_packs<n>; k++) {
        int c = n * (threadIdx.x % ROW_LANES) + ROW_LANES * n * k;
        if (CHANNELS % (ROW_LANES * n) == 0 || c < CHANNELS) f(k, c);
    }
}

// The sum over a row. Every thread of the block must call it; `turn` counts the calls. Two places in memory alternate,
// so nobody overwrites what others still read, and one barrier is enough.
__device__ __forceinline__ float sum_over_row(float x, int turn) {
    __shared__ float of_warp[2][8];
    int warp = threadIdx.x / 32;
    x = warp_sum(x);
    if (ROW_WARPS == 1) return x;
    if (threadIdx.x % 32 == 0) of_warp[turn % 2][warp] = x;
    __syncthreads();
    x = 0.0f;
    for (int w = 0; w < ROW_WARPS; w++) x += of_warp[turn % 2][warp / ROW_WARPS * ROW_WARPS + w];
    return x;
}

// Adds what attention or the MLP computed to the residual stream, and computes the next norm:
//   x (N,C) += branch (N,C), unless branch is null
//   out (N,C) = x * rstd * weight, with rstd (N) = 1/sqrt(average of the row's squares + eps)
//   copy (N,C) = x, as a real, for the backward pass
// Bound by memory: a row is read once and stays in registers while its sum is computed. A block has 8 rows for any C,
// and works on as many at once as its warps hold. Items: N rows.
BLOCK(256, threads / 32)
extern "C" __global__ void __launch_bounds__(256, 4) residual_rmsnorm_forward(
    Output out, float* __restrict__ rstd, real* __restrict__ copy, float* __restrict__ x,
    const real* __restrict__ branch, const real* __restrict__ weight, float eps, int N) {
    constexpr int C = CHANNELS;
    out.begin();
#pragma unroll 1
    for (int turn = 0; turn < ROW_WARPS; turn++) {
        int row = (blockIdx.x * ROW_WARPS + turn) * ROWS_AT_ONCE + threadIdx.x / ROW_LANES;
        size_t start = (size_t)row * C;
        Pack<4> v[row_packs<4>];
        float sum = 0.0f;
        if (row < N) {
            each_row_pack<4>([&](int k, int c) { v[k] = load<4>(x + start + c); });
            if (branch) {
                each_row_pack<4>([&](int k, int c) {
                    v[k] = v[k] + out.drop(start + c, load<4>(branch + start + c));
                });
                each_row_pack<4>([&](int k, int c) { store(x + start + c, v[k]); });
            }
            each_row_pack<4>([&](int k, int c) {
                store(copy + start + c, v[k]);
                for (int i = 0; i < 4; i++) sum += v[k][i] * v[k][i];
            });
        }
        float s = 1.0f / sqrtf(sum_over_row(sum, turn) / C + eps);
        if (row >= N) continue;  // not earlier: all threads need the barrier
        each_row_pack<4>([&](int k, int c) {
            Pack<4> w = load<4>(weight + c);
            for (int i = 0; i < 4; i++) v[k][i] *= s * w[i];
            out.store(start + c, v[k]);
        });
        if (threadIdx.x % ROW_LANES == 0) rstd[row] = s;
    }
    out.end();
}

// out (N,C) = inp * rstd * weight again, for a backward pass that did not keep it. inp is the forward pass's copy.
// Items: N*C numbers.
BLOCK(256, W * threads)
extern "C" __global__ void rmsnorm_again(real* __restrict__ out, const real* __restrict__ inp,
                                         const float* __restrict__ rstd, const real* __restrict__ weight,
                                         int N, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    int row = row_of_number(i, C), c = i - (size_t)row * C;
    Pack<W> v = load<W>(inp + i), w = load<W>(weight + c);
    for (int j = 0; j < W; j++) v[j] *= rstd[row] * w[j];
    store(out + i, v);
}

// Adds the gradient of a norm to that of the residual stream. With norm = inp * rstd and dnorm = dout * weight, for
// each row:
//   dresidual (N,C) += rstd * (dnorm - norm * average(dnorm * norm))
//   partials (gridDim.x, C) = each block's sum of dout * norm, from which add_partials makes dweight
// As in layernorm_backward, a lane keeps the sums of its columns in registers, and its next row is copied into shared
// memory (rows at once, STAGES, 3, C). In bf16 the copy runs while the block works on a row. In fp32 there is only room
// for one row; where two blocks fit a multiprocessor, the other works while this one waits. Items: blocks, two for each
// multiprocessor. A block needs up to 96 KiB of shared memory, on Turing 48 KiB.
constexpr int STAGES = sizeof(real) == 2 ? 2 : 1;
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, 2) rmsnorm_backward(
    Output dresidual, float* __restrict__ partials, const real* __restrict__ dout, const real* __restrict__ inp,
    const real* __restrict__ weight, const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS;
    DYNAMIC_SHARED(real, shared);
    dresidual.begin();
    int own = threadIdx.x / ROW_LANES;  // of the rows at once
    real* rows = shared + own * STAGES * 3 * C;
    auto load_row = [&](int stage, int row) {
        real* to = rows + stage * 3 * C;
        size_t start = (size_t)row * C;
        if (row < N)
            each_row_pack<W>([&](int k, int c) {  // a lane copies only what it reads itself, so no barrier is needed
                copy16(to + c, inp + start + c, true);
                copy16(to + C + c, dout + start + c, true);
                copy16(to + 2 * C + c, dresidual.numbers + start + c, true);
            });
        copies_end();
    };
    int step = gridDim.x * ROWS_AT_ONCE, first = blockIdx.x * ROWS_AT_ONCE;
    load_row(0, first + own);
    float next_rstd = first + own < N ? rstd[first + own] : 0.0f;
    Pack<W> sums[row_packs<W>] = {};
    for (int turn = 0; first < N; first += step, turn++) {
        int row = first + own, next = row + step;
        float s = next_rstd, sum = 0.0f;
        if (next < N) next_rstd = rstd[next];
        if (STAGES == 2) load_row((turn + 1) % 2, next);
        wait_for_copies<STAGES - 1>();
        const real *x = rows + turn % STAGES * 3 * C, *dy = x + C, *dx = dy + C;
        if (row < N)
            each_row_pack<W>([&](int k, int c) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) sum += d[i] * w[i] * (v[i] * s);
            });
        float average = sum_over_row(sum, turn) / C;
        if (row < N)
            each_row_pack<W>([&](int k, int c) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), g = load<W>(dx + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) {
                    float norm = v[i] * s;
                    g[i] += s * (d[i] * w[i] - norm * average);
                    sums[k][i] += d[i] * norm;
                }
                size_t at = (size_t)row * C + c;
                dresidual.store(at, g, dresidual.drop(at, g));
            });
        if (STAGES == 1) load_row(0, next);
    }
    dresidual.end();
    __syncthreads();
    float* of_row = reinterpret_cast<float*>(shared);  // (rows at once, C), where the rows were
    each_row_pack<W>([&](int k, int c) { store(of_row + own * C + c, sums[k]); });
    __syncthreads();
    for (int column = threadIdx.x; column < C; column += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < ROWS_AT_ONCE; i++) sum += of_row[i * C + column];
        partials[(size_t)blockIdx.x * C + column] = sum;
    }
}

// ---- rotary position embedding (Su et al. 2021, section 3.2.2) ----

// The radians by which pair i of a head turns from one token to the next, theta^(-2i/HS), rounded as in PyTorch: a
// different last bit would turn a pair by 0.0005 at token 8,000. A factor above 1 extends 8,192 tokens to 131,072, as
// in Llama 3.1: a pair that turns at least four times in 8,192 tokens keeps its speed, one that turns less than once
// becomes `factor` times slower, and in between the change is gradual.
__device__ __forceinline__ float frequency_of_pair(int i, float theta, float factor) {
    float frequency = 1.0f / (float)pow((double)theta, (double)((float)(2 * i) / HS));
    float turns = 8192.0f * frequency / 6.283185307f, kept = (turns - 1.0f) / (4.0f - 1.0f);
    if (factor == 1.0f || turns >= 4.0f) return frequency;
    return turns < 1.0f ? frequency / factor : (1.0f - kept) * frequency / factor + kept * frequency;
}

// table (T,HS) = the cosine, at 2i, and the sine, at 2i + 1, of t * frequency_of_pair(i). Powers in double precision
// are expensive, so a block computes those of all pairs once. Items: T*HS/2 pairs.
BLOCK(256, 4 * threads)
extern "C" __global__ void rope_table(float* __restrict__ table, float theta, float factor, int T) {
    constexpr int pairs = HS / 2;
    __shared__ float frequency[pairs];
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) frequency[i] = frequency_of_pair(i, theta, factor);
    __syncthreads();
    for (int j = 0; j < 4; j++) {
        int at = (blockIdx.x * 4 + j) * blockDim.x + threadIdx.x;
        if (at >= T * pairs) return;
        float angle = (float)(at / pairs) * frequency[at % pairs];
        store(table + 2 * (size_t)at, Pack<2>{cosf(angle), sinf(angle)});
    }
}

// Rotates pairs of channels (x, y), in place, to (x cos - y sin, x sin + y cos), where sin is `sign` times the table's.
// A pair is two neighbours (2i, 2i+1) of a head, or with `half` (i, i + HS/2). Each of the N rows of qkv has `row`
// numbers; its first `heads` heads are rotated, the queries and keys. A thread takes W numbers: the pairs of W
// neighbours, or of twice W/2 neighbours; if W does not divide HS, one pair after the other.
__device__ __forceinline__ void turn_pairs(real* qkv, const float* __restrict__ table, int N, int T, int heads, int row,
                                           int half, float sign) {
    constexpr int n = HS % W == 0 ? W : 2;  // numbers that are rotated at a time
    for (size_t i = first_number(), end = i + W; i < end; i += n) {
        unsigned piece = i / n, per_row = heads * HS / n, token = piece / per_row, c = piece % per_row * n;
        if (token >= (unsigned)N) return;
        int of_head = c % HS;
        Pack<n> turn = load<n>(table + (size_t)(token % T) * HS + of_head);
        real *head = qkv + (size_t)token * row + (c - of_head), *x = head + of_head / 2, *y = x + HS / 2;
        Pack<n> v;
        if (half) {
            Pack<n / 2> left = load<n / 2>(x), right = load<n / 2>(y);
            for (int j = 0; j < n / 2; j++) {
                v[2 * j] = left[j];
                v[2 * j + 1] = right[j];
            }
        } else {
            v = load<n>(head + of_head);
        }
        for (int j = 0; j < n; j += 2) {
            float before = v[j], cosine = turn[j], sine = sign * turn[j + 1];
            v[j] = before * cosine - v[j + 1] * sine;
            v[j + 1] = before * sine + v[j + 1] * cosine;
        }
        if (half) {
            Pack<n / 2> left, right;
            for (int j = 0; j < n / 2; j++) {
                left[j] = v[2 * j];
                right[j] = v[2 * j + 1];
            }
            store(x, left);
            store(y, right);
        } else {
            store(head + of_head, v);
        }
    }
}

// Rotates each query and key of qkv (N,row) by its position's angles (see rope_table), so that the score of two tokens
// depends on their distance. Values stay. Bound by memory: the table is small and stays in cache. Items: N*heads*HS
// numbers.
BLOCK(256, W * threads)
extern "C" __global__ void rope_forward(real* qkv, const float* __restrict__ table, int N, int T, int heads, int row,
                                        int half) {
    turn_pairs(qkv, table, N, T, heads, row, half, 1.0f);
}

// Rotates the gradient back, since the transpose of a rotation is its inverse. dqkv (N,row) is the output's gradient,
// and becomes the input's. Items: N*heads*HS numbers.
BLOCK(256, W * threads)
extern "C" __global__ void rope_backward(real* dqkv, const float* __restrict__ table, int N, int T, int heads, int row,
                                         int half) {
    turn_pairs(dqkv, table, N, T, heads, row, half, -1.0f);
}

// ---- SwiGLU (Shazeer 2020, section 2) ----

// out (N,H) = up * silu(gate), where each row of inp (N,2H) is up, then gate, and silu(x) = x / (1 + exp(-x)). For very
// negative x, exp overflows to infinity and silu becomes 0, its limit. Items: N*H numbers.
BLOCK(256, W * threads)
extern "C" __global__ void swiglu_forward(Output out, const real* __restrict__ inp, int N, int H) {
    out.begin();
    size_t i = first_number();
    if (i < (size_t)N * H) {
        const real* up_of = inp + i + (size_t)row_of_number(i, H) * H;
        Pack<W> up = load<W>(up_of), gate = load<W>(up_of + H);
        for (int j = 0; j < W; j++) up[j] *= gate[j] / (1.0f + exponential(-gate[j]));
        out.store(i, up);
    }
    out.end();
}

// dinp (N,2H), the gradients of up and gate. With g = 1/(1 + exp(-gate)):
//   dup = dout * gate * g        dgate = dout * up * g * (1 + gate * (1 - g))
// dinp may be inp: a thread reads all it needs before it writes. Items: N*H numbers.
BLOCK(256, W * threads)
extern "C" __global__ void swiglu_backward(Output dinp, const real* __restrict__ dout, const real* inp, int N,
                                           int H) {
    dinp.begin();
    size_t i = first_number();
    if (i < (size_t)N * H) {
        size_t at = i + (size_t)row_of_number(i, H) * H;
        Pack<W> up = load<W>(inp + at), gate = load<W>(inp + at + H), d = load<W>(dout + i);
        for (int j = 0; j < W; j++) {
            float g = 1.0f / (1.0f + exponential(-gate[j])), dup = d[j] * gate[j] * g;
            gate[j] = d[j] * up[j] * g * (1.0f + gate[j] * (1.0f - g));
            up[j] = dup;
        }
        dinp.store(at, up);
        dinp.store(at + H, gate);
    }
    dinp.end();
}
