// The gradient dqkv (B,T,3,NH,HS) of attention, from dout and out (B,T,NH,HS) and lse (B,NH,T), log2 of the sum that
// normalised a row: with weight = 2^(log2(e) scale q k' - lse), delta = the sum over a head's channels of out * dout,
//   dscore = scale * weight * (dout v' - delta),  dq = dscore k,  dk = dscore' q,  dv = weight' dout.
// A query's gradient is a sum over keys, a key's and a value's are sums over queries.

// One thread per query goes over its keys and computes each weight once, and with it the terms of all three gradients.
// It adds its own term to its own row, and those of the key and the value to theirs by 2 HS atomics for each pair, at
// which the queries wait for each other.
BLOCK(64, threads)
extern "C" __global__ void attention_backward1(float* dqkv, const real* __restrict__ dout,
                                               const real* __restrict__ out, const real* __restrict__ qkv,
                                               const float* __restrict__ lse, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    size_t head = (size_t)b * T * 3 * C + h * HS, mine = ((size_t)b * T + t) * C + h * HS;
    const real *q = qkv + head + (size_t)t * 3 * C, *dy = dout + mine;
    float *dq = dqkv + head + (size_t)t * 3 * C, delta = 0.0f;
    for (int c = 0; c < HS; c++) delta += to_float(out[mine + c]) * to_float(dy[c]);
    for (int s = 0; s <= t; s++) {
        size_t at_k = head + (size_t)s * 3 * C + C, at_v = at_k + C;
        float score = 0.0f, dweight = 0.0f;
        for (int c = 0; c < HS; c++) {
            score += to_float(q[c]) * to_float(qkv[at_k + c]);
            dweight += to_float(dy[c]) * to_float(qkv[at_v + c]);
        }
        float weight = exp2f(LOG2_E * scale * score - lse[i]), dscore = scale * weight * (dweight - delta);
        for (int c = 0; c < HS; c++) {
            dq[c] += dscore * to_float(qkv[at_k + c]);
            atomicAdd(dqkv + at_k + c, dscore * to_float(q[c]));
            atomicAdd(dqkv + at_v + c, weight * to_float(dy[c]));
        }
    }
}

namespace attention_backward_ {

constexpr int SHARED_ROWS = 32;  // of the other side at a time

__device__ __forceinline__ float dot(const float (&x)[HS], const float* y) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < HS; c += 4) {
        Pack<4> four = load<4>(y + c);
        for (int i = 0; i < 4; i++) sum += x[c + i] * four[i];
    }
    return sum;
}

__device__ __forceinline__ void add(float (&sum)[HS], float factor, const float* y) {
#pragma unroll
    for (int c = 0; c < HS; c += 4) {
        Pack<4> four = load<4>(y + c);
        for (int i = 0; i < 4; i++) sum[c + i] += factor * four[i];
    }
}

__device__ __forceinline__ void read(float (&x)[HS], const real* row, bool there) {
#pragma unroll
    for (int c = 0; c < HS; c++) x[c] = there ? to_float(row[c]) : 0.0f;
}

__device__ __forceinline__ void write(real* row, const float (&x)[HS]) {
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(row[c], x[c]);
}

// Rows first.. of a head to shared memory, by the whole block; zeros beyond T.
__device__ __forceinline__ void fill(float (*tile)[HS], const real* head, size_t stride, int first, int T) {
    for (int i = threadIdx.x; i < SHARED_ROWS * HS; i += blockDim.x)
        tile[i / HS][i % HS] = first + i / HS < T ? to_float(head[(first + i / HS) * stride + i % HS]) : 0.0f;
}

}  // namespace attention_backward_

// No atomics: each gradient is summed by a thread that owns its row, in registers, over tiles of the other side in
// shared memory. The price is that the weights are computed three times, for dq, dk and dv: all three together, with
// their inputs, would need 5 HS registers per thread. Items: T queries, or keys, along x, B*NH heads along y.
BLOCK(128, threads)
extern "C" __global__ void attention_backward2_delta(float* __restrict__ delta, const real* __restrict__ dout,
                                                     const real* __restrict__ out, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    size_t at = (((size_t)(i / T / NH) * T + i % T) * NH + i / T % NH) * HS;
    float sum = 0.0f;
    for (int c = 0; c < HS; c++) sum += to_float(out[at + c]) * to_float(dout[at + c]);
    delta[i] = sum;
}

BLOCK(128, threads)
extern "C" __global__ void __launch_bounds__(128) attention_backward2_q(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, const float* __restrict__ delta, float scale, int T, int NH) {
    using namespace attention_backward_;
    __shared__ __align__(16) float k[SHARED_ROWS][HS], v[SHARED_ROWS][HS];
    int threads = blockDim.x, head_number = blockIdx.y, b = head_number / NH, h = head_number % NH, C = NH * HS;
    int first = (gridDim.x - 1 - blockIdx.x) * threads, t = first + threadIdx.x;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float q[HS], dy[HS], dq[HS] = {}, my_lse = 0.0f, my_delta = 0.0f;
    read(q, head + (size_t)t * 3 * C, t < T);
    read(dy, dout + ((size_t)b * T + t) * C + h * HS, t < T);
    if (t < T) my_lse = lse[(size_t)head_number * T + t], my_delta = delta[(size_t)head_number * T + t];
    for (int key = 0; key < min(first + threads, T); key += SHARED_ROWS) {
        __syncthreads();
        fill(k, head + C, 3 * C, key, T);
        fill(v, head + 2 * C, 3 * C, key, T);
        __syncthreads();
        for (int s = 0; s < min(SHARED_ROWS, t + 1 - key); s++) {
            float weight = exp2f(LOG2_E * scale * dot(q, k[s]) - my_lse);
            add(dq, scale * weight * (dot(dy, v[s]) - my_delta), k[s]);
        }
    }
    if (t < T) write(dqkv + (size_t)(head - qkv) + (size_t)t * 3 * C, dq);
}

BLOCK(128, threads)
extern "C" __global__ void __launch_bounds__(128) attention_backward2_k(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, const float* __restrict__ delta, float scale, int T, int NH) {
    using namespace attention_backward_;
    __shared__ __align__(16) float q[SHARED_ROWS][HS], dy[SHARED_ROWS][HS];
    __shared__ float of_query[2][SHARED_ROWS];
    int threads = blockDim.x, head_number = blockIdx.y, b = head_number / NH, h = head_number % NH, C = NH * HS;
    int first = blockIdx.x * threads, t = first + threadIdx.x;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float k[HS], v[HS], dk[HS] = {};
    read(k, head + (size_t)t * 3 * C + C, t < T);
    read(v, head + (size_t)t * 3 * C + 2 * C, t < T);
    for (int query = first; query < T; query += SHARED_ROWS) {
        __syncthreads();
        fill(q, head, 3 * C, query, T);
        fill(dy, dout + (size_t)b * T * C + h * HS, C, query, T);
        for (int i = threadIdx.x; i < SHARED_ROWS; i += threads)
            if (query + i < T) {
                of_query[0][i] = lse[(size_t)head_number * T + query + i];
                of_query[1][i] = delta[(size_t)head_number * T + query + i];
            }
        __syncthreads();
        for (int s = max(0, t - query); s < min(SHARED_ROWS, T - query); s++) {
            float weight = exp2f(LOG2_E * scale * dot(k, q[s]) - of_query[0][s]);
            add(dk, scale * weight * (dot(v, dy[s]) - of_query[1][s]), q[s]);
        }
    }
    if (t < T) write(dqkv + (size_t)(head - qkv) + (size_t)t * 3 * C + C, dk);
}

BLOCK(128, threads)
extern "C" __global__ void __launch_bounds__(128) attention_backward2_v(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, float scale, int T, int NH) {
    using namespace attention_backward_;
    __shared__ __align__(16) float q[SHARED_ROWS][HS], dy[SHARED_ROWS][HS];
    __shared__ float of_query[SHARED_ROWS];
    int threads = blockDim.x, head_number = blockIdx.y, b = head_number / NH, h = head_number % NH, C = NH * HS;
    int first = blockIdx.x * threads, t = first + threadIdx.x;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float k[HS], dv[HS] = {};
    read(k, head + (size_t)t * 3 * C + C, t < T);
    for (int query = first; query < T; query += SHARED_ROWS) {
        __syncthreads();
        fill(q, head, 3 * C, query, T);
        fill(dy, dout + (size_t)b * T * C + h * HS, C, query, T);
        for (int i = threadIdx.x; i < SHARED_ROWS; i += threads)
            if (query + i < T) of_query[i] = lse[(size_t)head_number * T + query + i];
        __syncthreads();
        for (int s = max(0, t - query); s < min(SHARED_ROWS, T - query); s++)
            add(dv, exp2f(LOG2_E * scale * dot(k, q[s]) - of_query[s]), dy[s]);
    }
    if (t < T) write(dqkv + (size_t)(head - qkv) + (size_t)t * 3 * C + 2 * C, dv);
}

namespace attention_backward_ {

// Blocks on tensor cores own 128 rows of a head, 16 for each warp, or 64 if shared memory has no room for more. They go
// over the other side in tiles of 32 rows, and load the next tile while they work on one.
constexpr int OWN = HS * sizeof(real) <= 256 ? 128 : 64, TILE = 32, LD = tiles::HEAD_LD;
constexpr int BLOCKS = HS * sizeof(real) <= 128 ? 2 : 1;  // so many of a multiprocessor's blocks must have registers

// d (16,TILE) = the warp's 16 rows of a tile that the block owns, times the transpose of another tile.
__device__ __forceinline__ void multiply_rows(float (&d)[TILE / 8][4], const real* own, const real* other) {
    memset(d, 0, sizeof(d));
#pragma unroll
    for (int c = 0; c < HS; c += 16) {
        Pair a[4], b[4];
        tiles::left<LD>(a, own, threadIdx.x / 32 * 16, c);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
            tiles::right_transposed<LD>(b, other, 16 * n, c);
            mma_pair(d[2 * n], d[2 * n + 1], a, b);
        }
    }
}

// d (16,HS) += x (16,TILE), a result in registers, times a tile.
__device__ __forceinline__ void add_product(float (&d)[HS / 8][4], const float (&x)[TILE / 8][4], const real* tile) {
#pragma unroll
    for (int j = 0; j < TILE / 16; j++) {
        Pair a[4], b[4];
        a_from_result(a, x, j);
#pragma unroll
        for (int n = 0; n < HS / 16; n++) {
            tiles::right<LD>(b, tile, 16 * j, 16 * n);
            mma_pair(d[2 * n], d[2 * n + 1], a, b);
        }
    }
}

// The rows of d (16,HS), times a factor, to rows t.. of a head.
__device__ __forceinline__ void store_16(real* head, size_t stride, int t, int T, const float (&d)[HS / 8][4],
                                         float factor) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = t + row_of(0, 2 * half);
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
            if (row < T)
                store(head + row * stride + column_of(n, 0),
                      Pack<2>{factor * d[n][2 * half], factor * d[n][2 * half + 1]});
    }
}

// The rows that block `number` owns: from `first` on, of one head. By default blocks are numbered head by head, from
// the first rows on. With longest_first the parts of all heads that take longest come first.
struct Part { int head, first; };
template <bool rows_are_keys>
__device__ __forceinline__ Part part_of(int number, int T, int longest_first) {
    int parts = (T + OWN - 1) / OWN, heads = gridDim.x / parts;
    if (!longest_first) return {number / parts, number % parts * OWN};
    int place = number / heads;  // the last queries see the most keys, and the first keys are seen by the most queries
    return {number % heads, (rows_are_keys ? place : parts - 1 - place) * OWN};
}

// A block owns keys and values, and its warps 16 of each. It walks over the queries that see them, and sums dk and dv.
__device__ __forceinline__ void backward_of_keys(real* __restrict__ dqkv, const real* __restrict__ dout,
                                                 const real* __restrict__ qkv, const float* __restrict__ lse,
                                                 const float* __restrict__ delta, float scale, int T, int NH,
                                                 Part part) {
    DYNAMIC_SHARED(real, keys);  // keys, values (2, OWN, LD); two stages of queries, dout (2, 2, TILE, LD)
    __shared__ float of_query[2][2][TILE];  // two stages of lse and delta
    real *values = keys + OWN * LD, *stages = values + OWN * LD;
    int first = part.first, of_warp = threadIdx.x / 32 * 16, b = part.head / NH, h = part.head % NH, C = NH * HS;
    const real *head = qkv + (size_t)b * T * 3 * C + h * HS, *dout_head = dout + (size_t)b * T * C + h * HS;
    real* dhead = dqkv + (head - qkv);
    auto load_stage = [&](int stage, int query) {
        tiles::load_head<TILE>(stages + stage * 2 * TILE * LD, head, 3 * C, query, T);
        tiles::load_head<TILE>(stages + (stage * 2 + 1) * TILE * LD, dout_head, C, query, T);
        int i = threadIdx.x % TILE, which = threadIdx.x / TILE, t = query + i;
        if (which < 2)  // beyond T both are 0, and so is dout: such a query changes nothing
            copy4(&of_query[stage][which][i], (which ? delta : lse) + (size_t)part.head * T + min(t, T - 1), t < T);
        copies_end();
    };
    tiles::load_head<OWN>(keys, head + C, 3 * C, first, T);
    tiles::load_head<OWN>(values, head + 2 * C, 3 * C, first, T);
    load_stage(0, first);

    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    for (int query = first, stage = 0; query < T; query += TILE, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // all copies are here, and no thread reads the other stage any more
        if (query + TILE < T) load_stage(stage ^ 1, query + TILE);
        if (query + TILE <= first + of_warp) continue;  // these queries are before all of the warp's keys
        const real *queries = stages + stage * 2 * TILE * LD, *douts = queries + TILE * LD;
        float weights[TILE / 8][4], dscores[TILE / 8][4];  // of 16 keys, and TILE queries
        multiply_rows(weights, keys, queries);
        multiply_rows(dscores, values, douts);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int q = column_of(n, i);
                bool seen = first + of_warp + row_of(0, i) <= query + q;
                weights[n][i] = seen ? power_of_2(scale * LOG2_E * weights[n][i] - of_query[stage][0][q]) : 0.0f;
                dscores[n][i] = weights[n][i] * (dscores[n][i] - of_query[stage][1][q]);
            }
        add_product(dv, weights, douts);
        add_product(dk, dscores, queries);
    }
    store_16(dhead + C, 3 * C, first + of_warp, T, dk, scale);
    store_16(dhead + 2 * C, 3 * C, first + of_warp, T, dv, 1.0f);
}

}  // namespace attention_backward_

// Tensor cores, by mma.sync, in two kernels: one owns queries and sums dq, the other owns keys and sums dk and dv. A
// warp has 16 rows, and their scores with a tile are spread over its registers. So dk and dv fit side by side, and the
// scores are computed twice, not three times: 3 products for dq and 4 for dk and dv, 7 in all. delta is computed first,
// by 8 lanes for each row. With longest_first = 0 blocks are numbered head by head. Items: the rows of all heads, for
// delta; OWN rows of a head, for the others.
BLOCK(256, threads / 8)
extern "C" __global__ void attention_backward3_delta(float* __restrict__ delta, const real* __restrict__ dout,
                                                     const real* __restrict__ out, int B, int T, int NH) {
    int i = blockIdx.x * (blockDim.x / 8) + threadIdx.x / 8;  // in the order of dout: (B,T,NH)
    bool there = i < B * T * NH;
    float sum = 0.0f;
    for (int c = threadIdx.x % 8 * W; there && c < HS; c += 8 * W) {
        Pack<W> x = load<W>(out + (size_t)i * HS + c), y = load<W>(dout + (size_t)i * HS + c);
        for (int j = 0; j < W; j++) sum += x[j] * y[j];
    }
    for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, distance);
    if (there && threadIdx.x % 8 == 0) delta[((size_t)(i / NH / T) * NH + i % NH) * T + i / NH % T] = sum;
}

BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, attention_backward_::BLOCKS) attention_backward3_q(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, const float* __restrict__ delta, float scale, int longest_first, int T, int NH) {
    using namespace attention_backward_;
    constexpr int LD = attention_backward_::LD, TILE = attention_backward_::TILE;  // not those of kernels.cu
    DYNAMIC_SHARED(real, queries);  // queries and dout (2, OWN, LD); two stages of keys and values (2, 2, TILE, LD)
    real *douts = queries + OWN * LD, *stages = douts + OWN * LD;
    auto [head_number, first] = part_of<false>(blockIdx.x, T, longest_first);
    int of_warp = threadIdx.x / 32 * 16, b = head_number / NH, h = head_number % NH, C = NH * HS;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    auto load_stage = [&](int stage, int key) {
        tiles::load_head<TILE>(stages + stage * 2 * TILE * LD, head + C, 3 * C, key, T);
        tiles::load_head<TILE>(stages + (stage * 2 + 1) * TILE * LD, head + 2 * C, 3 * C, key, T);
        copies_end();
    };
    tiles::load_head<OWN>(queries, head, 3 * C, first, T);
    tiles::load_head<OWN>(douts, dout + (size_t)b * T * C + h * HS, C, first, T);
    load_stage(0, 0);

    float dq[HS / 8][4] = {}, my_lse[2], my_delta[2];
    for (int half = 0; half < 2; half++) {
        size_t row = (size_t)head_number * T + min(first + of_warp + row_of(0, 2 * half), T - 1);
        my_lse[half] = lse[row], my_delta[half] = delta[row];
    }
    int end = min(first + OWN, T);
    for (int key = 0, stage = 0; key < end; key += TILE, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        if (key + TILE < end) load_stage(stage ^ 1, key + TILE);
        if (key >= first + of_warp + 16) continue;  // all of these keys come after the warp's queries
        const real *keys = stages + stage * 2 * TILE * LD, *values = keys + TILE * LD;
        float weights[TILE / 8][4], dscores[TILE / 8][4];  // of 16 queries, and TILE keys
        multiply_rows(weights, queries, keys);
        multiply_rows(dscores, douts, values);
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = key + column_of(n, i) <= first + of_warp + row_of(0, i);
                float weight = seen ? power_of_2(scale * LOG2_E * weights[n][i] - my_lse[i / 2]) : 0.0f;
                dscores[n][i] = weight * (dscores[n][i] - my_delta[i / 2]);
            }
        add_product(dq, dscores, keys);
    }
    store_16(dqkv + (head - qkv), 3 * C, first + of_warp, T, dq, scale);
}

BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, attention_backward_::BLOCKS) attention_backward3_kv(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, const float* __restrict__ delta, float scale, int longest_first, int T, int NH) {
    using namespace attention_backward_;
    backward_of_keys(dqkv, dout, qkv, lse, delta, scale, T, NH, part_of<true>(blockIdx.x, T, longest_first));
}

// Version 4 is the same kernels with longest_first = 1. A block of the last queries has T / OWN times the work of a
// block of the first ones. GPUs start blocks in the order of their numbers, when others end. In version 3 the last
// blocks to start are the last queries of the last head, the longest of all, and most multiprocessors are idle while
// they run. If the longest start first, the short ones fill the gaps, and all end at nearly the same time. The keys of
// many heads are now in use at once, and they have to fit into L2. Pairs would be another solution: all blocks that
// take part i and then part n - 1 - i have the same work.

// attention_backward_q and attention_backward_kv in kernels.cu: version 4 once more, for any head, for groups of heads
// that share keys, and for ReLU attention, with delta computed by the first of the two. By mma.sync a warp has 32 rows
// if possible, which halves its reads from shared memory. On Hopper, in bf16, it is wgmma: both score products are
// started before the first is used, and the tensor cores read shared memory themselves.
