// The gradient dqkv (B,T,3,NH,HS) of attention, from dout and out (B,T,NH,HS) and lse (B,NH,T), log2 of the sum that
// normalised a row: with weight = 2^(log2(e) scale q k' - lse), delta = the sum over a head's channels of out * dout,
//   dscore = scale * weight * (dout v' - delta),  dq = dscore k,  dk = dscore' q,  dv = weight' dout.
// A query's gradient is a sum over keys, a key's and a value's are sums over queries.

// A thread a query walks over its keys, computes each weight once, and has all three gradients' terms at hand: its own
// goes to its own row, those of the key and the value to theirs, by 2 HS atomics for each pair, queries waiting for
// each other.
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
// shared memory. The price is that the weights are computed three times, once for dq, dk and dv each: all three
// together, with what they read, would need 5 HS registers a thread. Items: T queries, or keys, along x, B*NH heads
// along y.
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

// attention_backward_q and attention_backward_kv in kernels.cu: the same ownership on tensor cores, in two kernels,
// with a tile's scores spread over the registers of a warp, so that dk and dv fit next to each other. On Hopper by
// wgmma, in bf16: both score products are started before the first is used, and the tensor cores read shared memory
// by themselves.
