/*
Every hand-written kernel of a GPT-2 training step, each forward next to its backward, in the order in which a step
meets them. train_gpt2.py compiles this file with NVRTC for a GPU, or with a C++ compiler and dev/cuda_on_cpu.h for a
CPU, and reads the kernels' names and argument types from it. Matrix products are not here: they go to a BLAS library.

Sizes: B sequences of T tokens, N = B*T rows; C channels, a multiple of 32; V words, padded to Vp; NH heads of
HS = C/NH channels. Arrays are fp32, C-contiguous, the last index named is the fastest.

Rules that hold for all of them:
  - A gradient of a parameter is added to (+=), an activation and its gradient are set (=), except that
    layernorm_backward adds to the gradient of the residual stream, where two branches meet.
  - Every sum is taken in an order that depends on the shapes alone: no float atomics, the same bits on every run.
  - The bias of a linear layer is added by the kernel that next reads the product, so no pass is spent on it.

Nearly all of them are bound by memory: they do a few operations for each number they move, and a GPU does some fifty
in the time that one float takes to arrive. What matters is that a warp's 32 lanes touch adjacent addresses, 16 bytes
a lane where the shapes allow, that many loads are in flight, and that nothing is read from device memory twice.
*/

#ifndef DYNAMIC_SHARED  // dev/cuda_on_cpu.h brings its own
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

constexpr unsigned FULL_WARP = 0xffffffff;
constexpr float LOWEST = -3.402823466e38f;  // stands for -infinity in a maximum; LOWEST - LOWEST is 0, not NaN

// ---- sums over a warp and over a block ----

// The butterfly leaves the total in every lane, always added up in the same order.
__device__ __forceinline__ float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// For one-dimensional blocks of whole warps; every thread of the block must call, and gets the result.
template <float (*warp_reduce)(float)>
__device__ __forceinline__ float block_reduce(float x, float neutral) {
    __shared__ float of_warp[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_reduce(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < warps ? of_warp[lane] : neutral);
    __syncthreads();  // of_warp may be written again from here on
    return x;
}

// ---- several numbers at a time ----

// n neighbours in registers. With 16 bytes a lane, a load is one transaction for each quarter of a warp, the widest
// there is; every row starts on such a boundary, since C is a multiple of 32.
template <int n>
struct alignas(4 * n) Pack {
    float x[n];
    __device__ float& operator[](int i) { return x[i]; }
};

template <int n>
__device__ __forceinline__ Pack<n> load(const float* p) { return *reinterpret_cast<const Pack<n>*>(p); }
template <int n>
__device__ __forceinline__ void store(float* p, Pack<n> x) { *reinterpret_cast<Pack<n>*>(p) = x; }
template <int n>
__device__ __forceinline__ Pack<n> operator+(Pack<n> a, Pack<n> b) {
    for (int i = 0; i < n; i++) a[i] += b[i];
    return a;
}

constexpr int W = 4;  // numbers in 16 bytes

// Where an element-wise kernel's thread begins: each takes W numbers.
__device__ __forceinline__ size_t first_number() { return W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); }

// ---- encoder: token and position embeddings ----

// out (B,T,C) = wte (Vp,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]. A thread for each W channels.
extern "C" __global__ void encoder_forward(float* __restrict__ out, const int* __restrict__ tokens,
                                           const float* __restrict__ wte, const float* __restrict__ wpe,
                                           int N, int T, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    int row = i / C, c = i % C;
    store(out + i, load<W>(wte + (size_t)tokens[row] * C + c) + load<W>(wpe + (size_t)(row % T) * C + c));
}

// dwte (Vp,C)[v] += the rows of dout (N,C) whose token is v.
// A common word's gradient has many contributors. Atomics would add them in any order; instead the host sorts the
// batch's positions by token: order (N) lists them, run (N) holds at the head of each run of equal tokens its length,
// and 0 elsewhere. The blocks (i, y) of a head i own 32 W of that word's channels, the others leave at once.
// The 8 warps of a block share the run, so that a word that makes up a tenth of the batch is no bottleneck.
extern "C" __global__ void encoder_backward_wte(float* __restrict__ dwte, const float* __restrict__ dout,
                                                const int* __restrict__ tokens, const int* __restrict__ order,
                                                const int* __restrict__ run, int C) {
    int head = blockIdx.x, length = run[head];
    if (length == 0) return;
    __shared__ Pack<W> of_warp[8][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = W * (32 * blockIdx.y + lane);
    Pack<W> sum = {};
    if (c < C)
        for (int j = warp; j < length; j += 8) sum = sum + load<W>(dout + (size_t)order[head + j] * C + c);
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum = sum + of_warp[w][lane];
    float* d = dwte + (size_t)tokens[order[head]] * C + c;
    store(d, load<W>(d) + sum);
}

// dwpe (maxT,C)[t] += the sum over b of dout (B,T,C)[b,t]. A thread for each W channels of a position.
extern "C" __global__ void encoder_backward_wpe(float* __restrict__ dwpe, const float* __restrict__ dout,
                                                int B, int T, int C) {
    size_t i = first_number(), TC = (size_t)T * C;
    if (i >= TC) return;
    Pack<W> sum = load<W>(dwpe + i);
    for (int b = 0; b < B; b++) sum = sum + load<W>(dout + b * TC + i);
    store(dwpe + i, sum);
}

// ---- layernorm (Ba, Kiros and Hinton 2016, section 3) ----

// out (N,C) = (inp - mean) * rstd * weight + bias, with mean and rstd = 1/sqrt(variance + 1e-5) of each row of inp
// kept in (N) for the backward pass. A warp a row: its sums need no barrier. The row is read three times, but only the
// first read leaves the multiprocessor; the variance is taken around the mean, since E[x^2] - E[x]^2 would cancel.
extern "C" __global__ void layernorm_forward(float* __restrict__ out, float* __restrict__ mean,
                                             float* __restrict__ rstd, const float* __restrict__ inp,
                                             const float* __restrict__ weight, const float* __restrict__ bias,
                                             int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const float* x = inp + (size_t)row * C;
    float* y = out + (size_t)row * C;

    float sum = 0.0f;
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c);
        for (int i = 0; i < W; i++) sum += v[i];
    }
    float m = warp_sum(sum) / C;

    sum = 0.0f;
    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c);
        for (int i = 0; i < W; i++) sum += (v[i] - m) * (v[i] - m);
    }
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);

    for (int c = W * lane; c < C; c += 32 * W) {
        Pack<W> v = load<W>(x + c), w = load<W>(weight + c), b = load<W>(bias + c);
        for (int i = 0; i < W; i++) v[i] = (v[i] - m) * s * w[i] + b[i];
        store(y + c, v);
    }
    if (lane == 0) mean[row] = m, rstd[row] = s;
}

// With norm = (inp - mean) * rstd and dnorm = dout * weight, of each row:
//   dinp (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   dweight (C) += the sum over rows of dout * norm,  dbias (C) += the sum over rows of dout
// The first needs sums along a row, the others along a column. So a block works on as many rows at a time as it has
// warps: first each warp reads its row for the two averages, then each thread walks down its columns, with dout and
// inp now in L1. The columns' sums wait in shared memory, 2C floats, each touched by one thread only, and end in
// partials (2, gridDim.x, C), which two launches of matmul_backward_bias add up.
extern "C" __global__ void layernorm_backward(float* __restrict__ dinp, float* __restrict__ partials,
                                              const float* __restrict__ dout, const float* __restrict__ inp,
                                              const float* __restrict__ weight, const float* __restrict__ mean,
                                              const float* __restrict__ rstd, int N, int C) {
    DYNAMIC_SHARED(float, dweight_dbias);
    __shared__ float average_dnorm[32], average_dnorm_norm[32];
    float *dweight = dweight_dbias, *dbias = dweight_dbias + C;
    int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int c = threadIdx.x; c < C; c += blockDim.x) dweight[c] = dbias[c] = 0.0f;

    for (int first = blockIdx.x * warps; first < N; first += gridDim.x * warps) {
        int rows = min(warps, N - first);
        if (warp < rows) {
            int row = first + warp;
            const float *x = inp + (size_t)row * C, *dy = dout + (size_t)row * C;
            float m = mean[row], s = rstd[row], sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
            for (int c = W * lane; c < C; c += 32 * W) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) {
                    sum_dnorm += d[i] * w[i];
                    sum_dnorm_norm += d[i] * w[i] * (v[i] - m) * s;
                }
            }
            sum_dnorm = warp_sum(sum_dnorm);
            sum_dnorm_norm = warp_sum(sum_dnorm_norm);
            if (lane == 0) average_dnorm[warp] = sum_dnorm / C, average_dnorm_norm[warp] = sum_dnorm_norm / C;
        }
        __syncthreads();
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            float w = weight[c], dw = 0.0f, db = 0.0f;
            for (int r = 0; r < rows; r++) {
                size_t i = (size_t)(first + r) * C + c;
                float s = rstd[first + r], norm = (inp[i] - mean[first + r]) * s, d = dout[i];
                dw += d * norm;
                db += d;
                dinp[i] += s * (d * w - average_dnorm[r] - norm * average_dnorm_norm[r]);
            }
            dweight[c] += dw;
            dbias[c] += db;
        }
        __syncthreads();
    }
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        partials[(size_t)blockIdx.x * C + c] = dweight[c];
        partials[(size_t)(gridDim.x + blockIdx.x) * C + c] = dbias[c];
    }
}

// ---- the bias of a linear layer, backward: the sum of each column ----

// dbias (OC) += the sum over rows of dout (N,OC). A warp reads 32 neighbouring columns of a row; the 8 warps of a
// block take every eighth row of the block's share. A tall matrix is shared out along gridDim.y: then the sums of the
// shares are set in dbias (gridDim.y, OC), and a second launch with gridDim.y = 1 adds those to the true dbias.
extern "C" __global__ void matmul_backward_bias(float* __restrict__ dbias, const float* __restrict__ dout,
                                                int N, int OC) {
    __shared__ float of_warp[8][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, o = 32 * blockIdx.x + lane;
    float sum = 0.0f;
    for (int row = 8 * blockIdx.y + warp; row < N; row += 8 * gridDim.y) sum += dout[(size_t)row * OC + o];
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0) return;
    for (int w = 1; w < 8; w++) sum += of_warp[w][lane];
    if (gridDim.y > 1) dbias[(size_t)blockIdx.y * OC + o] = sum;
    else dbias[o] += sum;
}

// ---- attention: the two changes of layout around it ----

// Between layers a token's row holds S tensors (q, k, v: S = 3; the output: S = 1) of NH heads of HS channels; the
// batched matrix products of attention want, for each tensor and head, T rows of HS.
//   split_heads:  out (S,B,NH,T,HS) = inp (B,T,S,NH,HS) + bias (S,NH,HS), which may be null
//   merge_heads:  out (B,T,S,NH,HS) = inp (S,B,NH,T,HS)
// Each is the other's backward. A block a token: it reads or writes one whole row, and HS neighbours on the other side,
// n channels a thread: W if they divide a head, as in every GPT-2.
__device__ __forceinline__ size_t head_layout(int row, int j, int B, int T, int NH, int HS) {
    int d = j % HS, head = j / HS, h = head % NH, s = head / NH, b = row / T, t = row % T;
    return ((((size_t)s * B + b) * NH + h) * T + t) * HS + d;
}

template <int n>
__device__ __forceinline__ void split_row(float* __restrict__ out, const float* __restrict__ inp,
                                          const float* __restrict__ bias, int B, int T, int S, int NH, int HS) {
    int row = blockIdx.x, SC = S * NH * HS;
    for (int j = n * threadIdx.x; j < SC; j += n * blockDim.x) {
        Pack<n> x = load<n>(inp + (size_t)row * SC + j);
        if (bias) {
            Pack<n> b = load<n>(bias + j);
            for (int i = 0; i < n; i++) x[i] += b[i];
        }
        store(out + head_layout(row, j, B, T, NH, HS), x);
    }
}

extern "C" __global__ void split_heads(float* __restrict__ out, const float* __restrict__ inp,
                                       const float* __restrict__ bias, int B, int T, int S, int NH, int HS) {
    if (HS % W == 0) split_row<W>(out, inp, bias, B, T, S, NH, HS);
    else split_row<1>(out, inp, bias, B, T, S, NH, HS);
}

template <int n>
__device__ __forceinline__ void merge_row(float* __restrict__ out, const float* __restrict__ inp,
                                          int B, int T, int S, int NH, int HS) {
    int row = blockIdx.x, SC = S * NH * HS;
    for (int j = n * threadIdx.x; j < SC; j += n * blockDim.x)
        store(out + (size_t)row * SC + j, load<n>(inp + head_layout(row, j, B, T, NH, HS)));
}

extern "C" __global__ void merge_heads(float* __restrict__ out, const float* __restrict__ inp,
                                       int B, int T, int S, int NH, int HS) {
    if (HS % W == 0) merge_row<W>(out, inp, B, T, S, NH, HS);
    else merge_row<1>(out, inp, B, T, S, NH, HS);
}

// ---- attention: from scores to weights ----

// The scores q.k of all heads are materialised in att (B,NH,T,T), `strip` rows at a time and no further to the right
// than the strip's last token can see. These kernels turn scores into weights in place: row t keeps its columns
// s <= t, gets zeros in the rest of its strip, and is not touched beyond, where nothing is read either.
// A warp a row, rows = B*NH*T; bound by reading and writing the lower half of att once.
__device__ __forceinline__ int strip_end(int t, int T, int strip) { return min(T, (t / strip + 1) * strip); }

// att[t,s] = exp(scale * att[t,s]) / sum over s <= t. The maximum and the sum come out of a single pass, the sum
// rescaled whenever a lane meets a new maximum (Milakov and Gimelshein 2018, algorithm 3); the second read hits L1.
extern "C" __global__ void softmax_forward(float* att, float scale, int rows, int T, int strip) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    int t = row % T, end = strip_end(t, T, strip);
    float* x = att + (size_t)row * T;
    float largest = LOWEST, sum = 0.0f;
    for (int s = lane; s <= t; s += 32) {
        float v = x[s];
        if (v > largest) {
            sum *= expf(scale * (largest - v));
            largest = v;
        }
        sum += expf(scale * (v - largest));
    }
    float top = warp_max(largest);
    sum = warp_sum(sum * expf(scale * (largest - top)));
    float norm = 1.0f / sum;
    for (int s = lane; s < end; s += 32) x[s] = s <= t ? expf(scale * (x[s] - top)) * norm : 0.0f;
}

// datt becomes the gradient of the scores: scale * att * (datt - sum over s of att * datt).
extern "C" __global__ void softmax_backward(float* __restrict__ datt, const float* __restrict__ att, float scale,
                                            int rows, int T, int strip) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    int t = row % T, end = strip_end(t, T, strip);
    const float* p = att + (size_t)row * T;
    float* d = datt + (size_t)row * T;
    float sum = 0.0f;
    for (int s = lane; s <= t; s += 32) sum += p[s] * d[s];
    sum = warp_sum(sum);
    for (int s = lane; s < end; s += 32) d[s] = s <= t ? scale * p[s] * (d[s] - sum) : 0.0f;
}

// att[t,s] = max(0, scale * att[t,s]), not normalised.
extern "C" __global__ void relu_forward(float* att, float scale, int rows, int T, int strip) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    int t = row % T, end = strip_end(t, T, strip);
    float* x = att + (size_t)row * T;
    for (int s = lane; s < end; s += 32) x[s] = s <= t ? fmaxf(0.0f, scale * x[s]) : 0.0f;
}

// Where the weight is positive the score was, and its gradient passes; elsewhere it is zero.
extern "C" __global__ void relu_backward(float* __restrict__ datt, const float* __restrict__ att, float scale,
                                         int rows, int T, int strip) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    int t = row % T, end = strip_end(t, T, strip);
    const float* p = att + (size_t)row * T;
    float* d = datt + (size_t)row * T;
    for (int s = lane; s < end; s += 32) d[s] = s <= t && p[s] > 0.0f ? scale * d[s] : 0.0f;
}

// ---- residual ----

// out (N,C) = inp1 + (inp2 + bias): the stream, and a branch with the bias of its last linear layer.
// Backward needs no kernel: the gradient of the stream is that of the branch, and the bias's is its column sum.
extern "C" __global__ void residual_forward(float* __restrict__ out, const float* __restrict__ inp1,
                                            const float* __restrict__ inp2, const float* __restrict__ bias,
                                            int N, int C) {
    size_t i = first_number();
    if (i < (size_t)N * C) store(out + i, load<W>(inp1 + i) + (load<W>(inp2 + i) + load<W>(bias + i % C)));
}

// ---- GELU, in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2) ----

// gelu(x) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Since (1 + tanh u)/2 = 1/(1 + exp(-2u)), it is
// x times a logistic function: one exponential, and no cancellation where tanh u is near -1.
constexpr float SQRT_8_OVER_PI = 1.595769122f;

__device__ __forceinline__ float gelu(float x) {
    return x / (1.0f + expf(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
}

// With g = 1/(1 + exp(-2u)):  d(x g)/dx = g + x g (1 - g) d(2u)/dx. Far to the left, exp overflows to infinity and g
// to 0, the right limits.
__device__ __forceinline__ float gelu_derivative(float x) {
    float g = 1.0f / (1.0f + expf(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
    return g + x * g * (1.0f - g) * SQRT_8_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

// out (N,OC) = gelu(inp + bias).
extern "C" __global__ void gelu_forward(float* __restrict__ out, const float* __restrict__ inp,
                                        const float* __restrict__ bias, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i) + load<W>(bias + i % OC);
    for (int j = 0; j < W; j++) x[j] = gelu(x[j]);
    store(out + i, x);
}

// dinp (N,OC) holds the gradient of the output and becomes, in place, that of the input.
extern "C" __global__ void gelu_backward(float* __restrict__ dinp, const float* __restrict__ inp,
                                         const float* __restrict__ bias, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i) + load<W>(bias + i % OC), d = load<W>(dinp + i);
    for (int j = 0; j < W; j++) d[j] *= gelu_derivative(x[j]);
    store(dinp + i, d);
}

// ---- classifier: softmax, cross-entropy and its gradient ----

// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]). If with_gradient, the logits are overwritten with
// dloss * (softmax - 1 at the target), zeros in the padding; else they are left as they are.
// The probabilities are never stored. A block of 1,024 threads a row: 200 KB a row is far more than a warp could hold
// in flight. The second pass runs backwards, over what the first one left in the caches. n logits at a time: W if the
// padded rows allow it.
template <int n>
__device__ __forceinline__ void classify_row(float* __restrict__ logits, float* __restrict__ losses,
                                             const int* __restrict__ targets, float dloss, int V, int Vp,
                                             int with_gradient) {
    int row = blockIdx.x, target = targets[row];
    float* x = logits + (size_t)row * Vp;
    float largest = LOWEST, sum = 0.0f;
    for (int v = n * threadIdx.x; v < V; v += n * blockDim.x) {
        Pack<n> l = load<n>(x + v);
        float before = largest;
        for (int i = 0; i < n; i++) {
            if (v + i >= V) l[i] = LOWEST;
            largest = fmaxf(largest, l[i]);
        }
        if (largest > before) sum *= expf(before - largest);
        for (int i = 0; i < n; i++) sum += expf(l[i] - largest);
    }
    float top = block_reduce<warp_max>(largest, LOWEST);
    sum = block_reduce<warp_sum>(sum * expf(largest - top), 0.0f);
    if (threadIdx.x == 0) losses[row] = logf(sum) + top - x[target];
    if (!with_gradient) return;
    __syncthreads();  // the logit of the target has been read
    float norm = dloss / sum;
    int step = n * blockDim.x;
    for (int v = (Vp - 1) / step * step + n * threadIdx.x; v >= 0; v -= step) {
        if (v >= Vp) continue;
        Pack<n> l = load<n>(x + v);
        for (int i = 0; i < n; i++)
            l[i] = v + i < V ? expf(l[i] - top) * norm - (v + i == target ? dloss : 0.0f) : 0.0f;
        store(x + v, l);
    }
}

extern "C" __global__ void fused_classifier(float* __restrict__ logits, float* __restrict__ losses,
                                            const int* __restrict__ targets, float dloss, int V, int Vp,
                                            int with_gradient) {
    if (Vp % W == 0) classify_row<W>(logits, losses, targets, dloss, V, Vp, with_gradient);
    else classify_row<1>(logits, losses, targets, dloss, V, Vp, with_gradient);
}

// ---- AdamW (Kingma and Ba 2014, algorithm 1; Loshchilov and Hutter 2017, algorithm 2) ----

// All parameters in one launch: blockIdx.y names the tensor, which lies at [starts[y], starts[y+1]) of the four arenas
// and is decayed (1) or not (0); the blocks (x, y) stride over it. correction = 1/(1 - beta^step), which undoes the
// moments' start at zero. Bound by seven passes over the arena: four reads, three writes.
extern "C" __global__ void adamw(float* __restrict__ params, const float* __restrict__ grads, float* __restrict__ m,
                                 float* __restrict__ v, const size_t* __restrict__ starts,
                                 const float* __restrict__ decayed, float learning_rate, float beta1, float beta2,
                                 float correction1, float correction2, float eps, float weight_decay) {
    float decay = weight_decay * decayed[blockIdx.y];
    size_t end = starts[blockIdx.y + 1];
    for (size_t i = starts[blockIdx.y] + first_number(); i < end; i += (size_t)W * gridDim.x * blockDim.x) {
        Pack<W> p = load<W>(params + i), g = load<W>(grads + i), m1 = load<W>(m + i), m2 = load<W>(v + i);
        for (int j = 0; j < W; j++) {
            m1[j] = beta1 * m1[j] + (1.0f - beta1) * g[j];
            m2[j] = beta2 * m2[j] + (1.0f - beta2) * g[j] * g[j];
            float change = m1[j] * correction1 / (sqrtf(m2[j] * correction2) + eps);
            p[j] -= learning_rate * (change + decay * p[j]);
        }
        store(params + i, p);
        store(m + i, m1);
        store(v + i, m2);
    }
}
