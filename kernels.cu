/*
Every hand-written kernel of a GPT-2 training step, each forward next to its backward, in the order in which a step
meets them. train_gpt2.py compiles this file with NVRTC for a GPU, or with a C++ compiler and dev/cuda_on_cpu.h for a
CPU, and reads the kernels' names and argument types from it. The linear layers' matrix products are not here: they go
to a BLAS library.

Sizes: B sequences of T tokens, N = B*T rows; C channels, a multiple of 32; V words, padded to Vp; NH heads of
HS = C/NH channels. Arrays are C-contiguous, the last index named is the fastest; parameters, activations and their
gradients are real (fp32 or bf16); the residual stream, gradients of parameters, and statistics are fp32.

Rules that hold for all of them:
  - A gradient of a parameter is added to (+=), an activation and its gradient are set (=), except that
    layernorm_forward adds to the residual stream and layernorm_backward to its gradient, where two branches meet.
  - Every sum is taken in an order that depends on the shapes and the grid alone: no float atomics, the same bits on
    every run.

Nearly all of them are bound by memory: they do a few operations for each number they move, and a GPU does some fifty
in the time that one float takes to arrive. What matters is that a warp's 32 lanes touch adjacent addresses, 16 bytes
a lane where the shapes allow, that many loads are in flight, and that nothing is read from device memory twice.
*/

#ifndef DYNAMIC_SHARED  // dev/cuda_on_cpu.h brings its own
#define DYNAMIC_SHARED(type, name)                               \
    extern __shared__ __align__(1024) unsigned char dynamic_shared[]; /* aligned for a swizzle, see at() */ \
    type* name = reinterpret_cast<type*>(dynamic_shared)
#endif

// The file is compiled for a model's channels, and those of a head: what a thread has of a row is then in registers.
#ifndef CHANNELS
#define CHANNELS 768
#endif
#ifndef HS
#define HS 64
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

// ---- numbers ----

// real is what parameters and activations are stored in, fp32 or bfloat16; all arithmetic is in fp32.
#ifdef BF16
struct real { unsigned short bits; };  // the upper half of an fp32
#else
using real = float;
#endif

#ifdef __CUDACC__  // dev/cuda_on_cpu.h brings its own of what PTX stands behind, here and below
// Two fp32 rounded to nearest, ties to even, as two bf16; low in the lower half.
__device__ __forceinline__ unsigned two_bf16(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

__device__ __forceinline__ float power_of_2(float x) {  // without exp2f's care for denormals: they become 0
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 or 4 bytes from device to shared memory that need no register and no waiting; or, if there is
// nothing to copy, zeros.
__device__ __forceinline__ void copy16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy4(void* shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global), "r"(there ? 4 : 0)
                 : "memory");
}
// A group of copies ends here; and all groups of this thread's but the last `pending` have arrived.
__device__ __forceinline__ void copies_end() { asm volatile("cp.async.commit_group;"); }
template <int pending>
__device__ __forceinline__ void copies_arrive() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void from_float(float& to, float x) { to = x; }
#ifdef BF16
__device__ __forceinline__ float to_float(real x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ void from_float(real& to, float x) { to.bits = two_bf16(x, 0.0f); }
#endif

// e^x: where results are rounded to bf16, by the hardware's 2^x alone.
constexpr float LOG2_E = 1.442695041f;
__device__ __forceinline__ float exponential(float x) { return sizeof(real) == 2 ? power_of_2(LOG2_E * x) : expf(x); }

// n neighbours in registers, as fp32. With 16 bytes a lane, a load is one transaction for each quarter of a warp, the
// widest there is; every row starts on such a boundary, since C is a multiple of 32.
template <int n>
struct Pack {
    float x[n];
    __device__ float& operator[](int i) { return x[i]; }
};

template <int n, class T>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Stored { T x[n]; };

template <int n, class T>
__device__ __forceinline__ Pack<n> load(const T* p) {
    Stored<n, T> s = *reinterpret_cast<const Stored<n, T>*>(p);
    Pack<n> x;
    for (int i = 0; i < n; i++) x[i] = to_float(s.x[i]);
    return x;
}
template <int n, class T>
__device__ __forceinline__ void store(T* p, Pack<n> x) {
    Stored<n, T> s;
    for (int i = 0; i < n; i++) from_float(s.x[i], x[i]);
    *reinterpret_cast<Stored<n, T>*>(p) = s;
}
template <int n>
__device__ __forceinline__ Pack<n> operator+(Pack<n> a, Pack<n> b) {
    for (int i = 0; i < n; i++) a[i] += b[i];
    return a;
}

constexpr int W = 16 / sizeof(real);  // numbers in 16 bytes

// Where an element-wise kernel's thread begins: each takes W numbers.
__device__ __forceinline__ size_t first_number() { return W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); }

// The row of number i, in rows of C: divided as 32 bits, which takes a fifth of the time that 64 do.
__device__ __forceinline__ int row_of(size_t i, int C) { return (unsigned)(i / W) / (C / W); }

// ---- encoder: token and position embeddings ----

// out (B,T,C), the residual stream, = wte (Vp,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]. A thread for each 4 channels,
// 16 bytes of out.
extern "C" __global__ void encoder_forward(float* __restrict__ out, const int* __restrict__ tokens,
                                           const real* __restrict__ wte, const real* __restrict__ wpe,
                                           int N, int T, int C) {
    int packs = C / 4, i = blockIdx.x * blockDim.x + threadIdx.x, row = i / packs, c = 4 * (i % packs);
    if (row >= N) return;
    store(out + (size_t)row * C + c,
          load<4>(wte + (size_t)tokens[row] * C + c) + load<4>(wpe + (size_t)(row % T) * C + c));
}

// dwte (Vp,C)[v] += the rows of dout (N,C) whose token is v.
// A common word's gradient has many contributors. Atomics would add them in any order; instead the host sorts the
// batch's positions by token: order (N) lists them, run (N) holds at the head of each run of equal tokens its length,
// and 0 elsewhere. The blocks (i, y) of a head i own 32 W of that word's channels, the others leave at once.
// The 8 warps of a block share the run, so that a word that makes up a tenth of the batch is no bottleneck.
extern "C" __global__ void encoder_backward_wte(float* __restrict__ dwte, const real* __restrict__ dout,
                                                const int* __restrict__ tokens, const int* __restrict__ order,
                                                const int* __restrict__ run, int C) {
    int head = blockIdx.x, length = run[head];
    if (length == 0) return;
    __shared__ Pack<W> of_warp[8][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = W * (32 * blockIdx.y + lane);
    Pack<W> sum = {};
    if (c < C)
#pragma unroll 8  // or a common word's sum would wait for one row after another
        for (int j = warp; j < length; j += 8) sum = sum + load<W>(dout + (size_t)order[head + j] * C + c);
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum = sum + of_warp[w][lane];
    float* d = dwte + (size_t)tokens[order[head]] * C + c;
    store(d, load<W>(d) + sum);
}

// dwpe (maxT,C)[t] += the sum over b of dout (B,T,C)[b,t]. A thread for each W channels of a position.
extern "C" __global__ void encoder_backward_wpe(float* __restrict__ dwpe, const real* __restrict__ dout,
                                                int B, int T, int C) {
    size_t i = first_number(), TC = (size_t)T * C;
    if (i >= TC) return;
    Pack<W> sum = load<W>(dwpe + i);
#pragma unroll 8
    for (int b = 0; b < B; b++) sum = sum + load<W>(dout + b * TC + i);
    store(dwpe + i, sum);
}

// ---- residual stream and layernorm (Ba, Kiros and Hinton 2016, section 3) ----

// A warp has a row, in whose sums no barrier is needed, and a lane every 32nd pack of n columns of it, in registers.
template <int n>
constexpr int lane_packs = (CHANNELS + 32 * n - 1) / (32 * n);
#define EACH_PACK(n)                                                                                           \
    _Pragma("unroll") for (int k = 0, c = n * (threadIdx.x % 32); k < lane_packs<n>; k++, c += 32 * n) \
        if (CHANNELS % (32 * n) == 0 || c < CHANNELS)

// residual (N,C) += branch (N,C), unless that is null: what a layer adds to the stream. Then
// out (N,C) = (residual - mean) * rstd * weight + bias, with mean and rstd = 1/sqrt(variance + 1e-5) of each row in
// (N), and inp (N,C) = residual as a real, for the backward pass. Together they read and write each number once. The
// variance is taken around the mean, since E[x^2] - E[x]^2 would cancel. Packs of 4, or each of two loads of 16 bytes
// from the fp32 stream would touch every sector.
extern "C" __global__ void layernorm_forward(real* __restrict__ out, float* __restrict__ mean,
                                             float* __restrict__ rstd, real* __restrict__ inp, float* residual,
                                             const real* __restrict__ branch, const real* __restrict__ weight,
                                             const real* __restrict__ bias, int N) {
    constexpr int C = CHANNELS;
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    Pack<4> x[lane_packs<4>];
    EACH_PACK(4) x[k] = load<4>(residual + start + c);
    if (branch) {
        EACH_PACK(4) x[k] = x[k] + load<4>(branch + start + c);
        EACH_PACK(4) store(residual + start + c, x[k]);
    }
    float sum = 0.0f;
    EACH_PACK(4) {
        store(inp + start + c, x[k]);
        for (int i = 0; i < 4; i++) sum += x[k][i];
    }
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    EACH_PACK(4) for (int i = 0; i < 4; i++) sum += (x[k][i] - m) * (x[k][i] - m);
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    EACH_PACK(4) {
        Pack<4> w = load<4>(weight + c), b = load<4>(bias + c);
        for (int i = 0; i < 4; i++) x[k][i] = (x[k][i] - m) * s * w[i] + b[i];
        store(out + start + c, x[k]);
    }
    if (threadIdx.x % 32 == 0) mean[row] = m, rstd[row] = s;
}

// out (N,C) = (inp - mean) * rstd * weight + bias once more, for a backward pass that has not kept it.
extern "C" __global__ void layernorm_again(real* __restrict__ out, const real* __restrict__ inp,
                                           const float* __restrict__ mean, const float* __restrict__ rstd,
                                           const real* __restrict__ weight, const real* __restrict__ bias,
                                           int N, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    int row = row_of(i, C), c = i - (size_t)row * C;
    Pack<W> v = load<W>(inp + i), w = load<W>(weight + c), b = load<W>(bias + c);
    for (int j = 0; j < W; j++) v[j] = (v[j] - mean[row]) * rstd[row] * w[j] + b[j];
    store(out + i, v);
}

// With norm = (inp - mean) * rstd and dnorm = dout * weight, of each row:
//   dresidual (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
// and partials (3, gridDim.x, C) = of the rows of each block the sums of dout * norm, of dout, and of the new
// dresidual: the gradients of weight and bias, and of the bias of the linear layer whose output was added to the stream
// before. add_partials adds them up. The sums of a warp's rows stay in its registers. Rows come into shared memory
// (warps, 2 stages, 3, C) by copies that no register waits for, the next one while one is at work, so that a
// multiprocessor always has some tens of KB on their way; one block on each is enough.
constexpr int LAYERNORM_THREADS = CHANNELS <= 768 ? 384 : 256;
extern "C" __global__ void __launch_bounds__(LAYERNORM_THREADS, 1) layernorm_backward(
    real* __restrict__ dresidual, float* __restrict__ partials, const real* __restrict__ dout,
    const real* __restrict__ inp, const real* __restrict__ weight, const float* __restrict__ mean,
    const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS;
    DYNAMIC_SHARED(real, shared);
    int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    real* rows = shared + warp * 2 * 3 * C;
    auto load_row = [&](int stage, int row) {
        real* to = rows + stage * 3 * C;
        size_t start = (size_t)row * C;
        EACH_PACK(W) {  // each lane what it will read itself
            copy16(to + c, inp + start + c, true);
            copy16(to + C + c, dout + start + c, true);
            copy16(to + 2 * C + c, dresidual + start + c, true);
        }
        copies_end();
    };
    int step = gridDim.x * warps, row = blockIdx.x * warps + warp;
    float next_mean = 0.0f, next_rstd = 0.0f;
    if (row < N) {
        load_row(0, row);
        next_mean = mean[row], next_rstd = rstd[row];
    }
    Pack<W> sums[3][lane_packs<W>] = {};
    for (int stage = 0; row < N; row += step, stage ^= 1) {
        float s = next_rstd, minus_ms = -next_mean * s;
        if (row + step < N) {
            load_row(stage ^ 1, row + step);
            next_mean = mean[row + step], next_rstd = rstd[row + step];
            copies_arrive<1>();
        } else {
            copies_arrive<0>();
        }
        const real *x = rows + stage * 3 * C, *dy = x + C, *dx = dy + C;
        float sum_dnorm = 0.0f, sum_dnorm_norm = 0.0f;
        EACH_PACK(W) {
            Pack<W> v = load<W>(x + c), d = load<W>(dy + c), w = load<W>(weight + c);
            for (int i = 0; i < W; i++) {
                float dnorm = d[i] * w[i];
                sum_dnorm += dnorm;
                sum_dnorm_norm += dnorm * (v[i] * s + minus_ms);
            }
        }
        float average_dnorm = warp_sum(sum_dnorm) / C, average_dnorm_norm = warp_sum(sum_dnorm_norm) / C;
        EACH_PACK(W) {
            Pack<W> v = load<W>(x + c), d = load<W>(dy + c), g = load<W>(dx + c), w = load<W>(weight + c);
            for (int i = 0; i < W; i++) {
                float norm = v[i] * s + minus_ms;
                g[i] += s * (d[i] * w[i] - average_dnorm - norm * average_dnorm_norm);
                sums[0][k][i] += d[i] * norm;
                sums[1][k][i] += d[i];
                sums[2][k][i] += g[i];
            }
            store(dresidual + (size_t)row * C + c, g);
        }
    }
    float* of_warp = reinterpret_cast<float*>(shared);  // (warps, C)
#pragma unroll
    for (int which = 0; which < 3; which++) {
        __syncthreads();
        EACH_PACK(W) store(of_warp + warp * C + c, sums[which][k]);
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += blockDim.x) {
            float sum = 0.0f;
            for (int w = 0; w < warps; w++) sum += of_warp[w * C + column];
            partials[((size_t)which * gridDim.x + blockIdx.x) * C + column] = sum;
        }
    }
}
// What the host has to know: the threads of a block, and the bytes of shared memory of each of its warps.
extern "C" __constant__ int layernorm_sizes[] = {LAYERNORM_THREADS, 2 * 3 * CHANNELS * (int)sizeof(real)};

// ---- the bias of a linear layer, backward: the sum of each column ----

// The sum of each column of inp (N,OC), over the bands of 32 rows share, share + shares, ... Eight lanes read 128
// neighbouring bytes of a row, and the 32 such groups of a block take a row each of a band. It is added to out (OC), or
// set if there are several shares.
template <class T>
__device__ __forceinline__ void add_columns(float* __restrict__ out, const T* __restrict__ inp, int N, int OC,
                                            int share, int shares) {
    constexpr int n = 16 / sizeof(T), columns = 8 * n;
    __shared__ float of_group[32][columns];
    int group = threadIdx.x / 8, o = columns * blockIdx.x + threadIdx.x % 8 * n;
    Pack<n> sum = {};
#pragma unroll 4
    for (int row = 32 * share + group; row < N; row += 32 * shares)
        if (o < OC) sum = sum + load<n>(inp + (size_t)row * OC + o);
    for (int i = 0; i < n; i++) of_group[group][threadIdx.x % 8 * n + i] = sum[i];
    __syncthreads();
    int column = columns * blockIdx.x + threadIdx.x;
    if (threadIdx.x >= columns || column >= OC) return;
    float total = 0.0f;
    for (int g = 0; g < 32; g++) total += of_group[g][threadIdx.x];
    if (shares > 1) out[(size_t)share * OC + column] = total;
    else out[column] += total;
}

// dbias (OC) += the sum over rows of dout (N,OC). A tall matrix is shared out along gridDim.y: then the sums of the
// shares are set in dbias (gridDim.y, OC), partials that add_partials adds up.
extern "C" __global__ void matmul_backward_bias(float* __restrict__ dbias, const real* __restrict__ dout,
                                                int N, int OC) {
    add_columns(dbias, dout, N, OC, blockIdx.y, gridDim.y);
}

// out1, out2 and out3 (OC), as many as gridDim.y says, += the sums over rows of partials (gridDim.y, N, OC).
extern "C" __global__ void add_partials(float* out1, float* out2, float* out3, const float* __restrict__ partials,
                                        int N, int OC) {
    float* out = blockIdx.y == 0 ? out1 : blockIdx.y == 1 ? out2 : out3;
    if (out) add_columns(out, partials + (size_t)blockIdx.y * N * OC, N, OC, 0, 1);
}

// ---- tensor cores ----

// Hopper has a second kind of tensor core instruction, which is used for bf16 and heads of 64 channels.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && defined(BF16) && HS == 64
#define HOPPER
#endif

// A tensor core multiplies small matrices that a warp holds in its registers: D (16,8) += A (16,16) B (16,8). A Pair is
// two neighbours along the summed index; with g = lane / 4 and q = lane % 4, a lane holds
//   of A: a[0] row g and a[1] row g+8, columns 2q, 2q+1;  a[2] and a[3] the same rows, columns 2q+8, 2q+9
//   of B: b[0] rows 2q, 2q+1 and b[1] rows 2q+8, 2q+9, of column g
//   of D: d[0], d[1] row g and d[2], d[3] row g+8, columns 2q, 2q+1
// So a D, taken in pairs, is the A of a next product: attention's weights never leave the registers.
#ifdef BF16
using Pair = unsigned;
__device__ __forceinline__ Pair pair(float x, float y) { return two_bf16(x, y); }
#else
struct alignas(8) Pair { float x, y; };
__device__ __forceinline__ Pair pair(float x, float y) { return {x, y}; }
#endif

#ifdef __CUDACC__
#ifdef BF16
__device__ __forceinline__ void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of bf16 from shared memory, row i % 8 of matrix i / 8 at lane i's address. A lane receives of
// each the elements 2q and 2q+1 of row g, or, transposed, of column g.
__device__ __forceinline__ void load_matrices(unsigned (&x)[4], const real* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"((unsigned)__cvta_generic_to_shared(row)));
}
__device__ __forceinline__ void load_matrices_transposed(unsigned (&x)[4], const real* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"((unsigned)__cvta_generic_to_shared(row)));
}
#else
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// TF32 has products of 8 summed columns, of which a lane holds q and q+4, not 2q and 2q+1: A and B are permuted alike,
// and the sum is the same. A tensor core reads the upper 10 bits of a mantissa, so half of the 11th, added first,
// rounds. fp32 is three products of TF32 halves, x = big + small, without the one of the small halves, which is beyond
// the last bit (Ootomo and Yokota 2022, section 3).
__device__ __forceinline__ void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x[6] = {a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b[i].x, b[i].y};
        unsigned big[6];
#pragma unroll
        for (int j = 0; j < 6; j++) big[j] = __float_as_uint(x[j]) + 0x1000;
#ifndef TF32
        unsigned small[6];
#pragma unroll
        for (int j = 0; j < 6; j++) {
            big[j] &= 0xffffe000;
            small[j] = __float_as_uint(x[j] - __uint_as_float(big[j]));
        }
        mma_tf32(d, {small[0], small[1], small[2], small[3]}, {big[4], big[5]});
        mma_tf32(d, {big[0], big[1], big[2], big[3]}, {small[4], small[5]});
#endif
        mma_tf32(d, {big[0], big[1], big[2], big[3]}, {big[4], big[5]});
    }
}
#endif

// The same with two B side by side, b[0], b[1] and b[2], b[3], and with two D.
__device__ __forceinline__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4], const Pair (&b)[4]) {
    mma(left, a, {b[0], b[1]});
    mma(right, a, {b[2], b[3]});
}
#endif

#ifndef HOPPER
__device__ __forceinline__ void async_fence() {}
template <int pending, class D>
__device__ __forceinline__ void products_arrive(D&) {}  // mma.sync is done when it returns
#else
__device__ __forceinline__ void async_fence() {  // what was written before it can be read by wgmma
    asm volatile("fence.proxy.async.shared::cta;");
}

// Hopper's tensor cores read tiles from shared memory by themselves, while the threads go on: a warp group of 4 warps
// starts a product of its 64 rows, D (64,64) += A (64,16) B (16,64), of which each warp holds 16 rows of D, and of A if
// that comes from registers, as for mma. What describes a tile to them: where it begins, in units of 16 bytes; that its
// groups of 8 rows are 1,024 bytes apart; and that its rows of 128 bytes are swizzled (see at()).
#define FLOATS4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define FLOATS32(x) FLOATS4(x[0]), FLOATS4(x[1]), FLOATS4(x[2]), FLOATS4(x[3]), FLOATS4(x[4]), FLOATS4(x[5]), \
                    FLOATS4(x[6]), FLOATS4(x[7])
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
              "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "

__device__ __forceinline__ unsigned long long describe(const real* tile) {
    return (unsigned)__cvta_generic_to_shared(tile) >> 4 | 1ull << 16 | 1024ull >> 4 << 32 | 1ull << 62;
}

// D = A B, or D += A B with `add`, where A and B' are 16 channels of the rows of two tiles.
__device__ __forceinline__ void wgmma(float (&d)[8][4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;" WGMMA "%32, %33, p, 1, 1, 0, 0;}"
                 : FLOATS32(d) : "l"(a), "l"(b), "r"((int)add));
}
// D += A B, where A is in registers and B 16 rows of a tile.
__device__ __forceinline__ void wgmma_transposed(float (&d)[8][4], const Pair (&a)[4], unsigned long long b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;" WGMMA "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : FLOATS32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// Before products, and after all but the last `pending` groups of them are done. That D goes in and out keeps the
// compiler from moving what it does with D across.
__device__ __forceinline__ void products_start(float (&d)[8][4]) {
    asm volatile("wgmma.fence.sync.aligned;" : FLOATS32(d)::"memory");
}
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void products_arrive(float (&d)[1][8][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : FLOATS32(d[0]) : "n"(pending) : "memory");
}
#endif

// ---- attention (Vaswani et al. 2017, section 3.2.1), by tiles (Dao 2023, algorithms 1 and 2) ----

// Of each head, with q, k, v (T,HS) in the rows of qkv (B,T,3,NH,HS):  score = q k', weight = softmax(score / sqrt(HS))
// over s <= t, or max(0, score / sqrt(HS)) there for ReLU attention, and out (B,T,NH,HS) = weight v. The weights (T,T)
// are never stored: a block takes ROWS rows of one head and walks over the other side in tiles that pass through shared
// memory; while it works on one tile, the next is on its way. A tile's scores live in the registers of the warps that
// have their rows. What bounds it is that each product waits for the one before: several blocks on a multiprocessor
// fill each other's gaps, as far as their registers allow. (A prime is a transpose, t the position of a query, s that
// of a key, scale = 1 / sqrt(HS).)
constexpr int HP = (HS + 15) / 16 * 16;  // a head's channels, padded with zeros to whole products
constexpr int THREADS = 128;
// A warp has M times 16 rows. What it reads of a tile serves all its rows: 32 of them halve the traffic of shared
// memory, where the registers can hold their results. On Hopper the tensor cores do the reading, for GROUP rows, a warp
// group's. TILE is the rows of the other side in a tile of the backward passes, KEYS those of the forward pass, LD the
// length of a row in shared memory.
#ifdef HOPPER
constexpr int M = 1, GROUP = 64, TILE = 64, LD = HP;
#else
constexpr int M = sizeof(real) == 2 && HP <= 64 ? 2 : 1, GROUP = 16 * M, TILE = 32, LD = HP + 8;
#endif
constexpr int ROWS = 64 * M;  // of a block
constexpr int KEYS = 64;
// What the host has to know: rows of a block, and its bytes of shared memory, forward and backward.
extern "C" __constant__ int attention_sizes[] = {
    ROWS, (ROWS + 4 * KEYS) * LD * (int)sizeof(real), (2 * ROWS + 4 * TILE) * LD * (int)sizeof(real)};
static_assert(KEYS % 16 == 0 && TILE % 16 == 0, "tiles of whole products");
static_assert(4 * TILE >= ROWS, "tiles whose place holds the rows that are loaded first");

// Where a number of a tile lies. The same columns of 8 neighbouring rows are in different banks: by padding, or, for
// Hopper's tensor cores, by the permutation of a row's 8 pieces of 16 bytes that they know as a swizzle of 128 bytes.
__device__ __forceinline__ int at(int row, int c) { return row * LD + (LD == HP ? c ^ row % 8 * 8 : c); }

// Rows first..first+rows-1 of a head, whose rows are stride numbers apart, into a tile; zeros beyond T and HS.
template <int rows>
__device__ __forceinline__ void load_tile(real* tile, const real* head, size_t stride, int first, int T) {
    constexpr int n = HS % W == 0 ? W : 1, per_row = HP / n;
#pragma unroll
    for (int start = 0; start < rows * per_row; start += THREADS) {
        int i = start + threadIdx.x, row = i / per_row, c = i % per_row * n;
        if (rows * per_row % THREADS > 0 && i >= rows * per_row) break;
        bool there = first + row < T && c < HS;
        real* to = tile + at(row, c);
        const real* from = there ? head + (first + row) * stride + c : head;
        if (n == W) copy16(to, from, there);
        else if (there) *to = *from;
        else from_float(*to, 0.0f);
    }
}

// All tiles that this thread has a part in are there, once a barrier has joined it with the others.
__device__ __forceinline__ void tiles_arrive() {
    copies_end();
    copies_arrive<0>();
    async_fence();
}

// A from rows r..r+15 and channels c..c+15 of a tile.
__device__ __forceinline__ void load_a(Pair (&a)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices(a, tile + at(r + lane % 16, c + lane / 16 * 8));
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        a[i] = *reinterpret_cast<const Pair*>(tile + (r + lane / 4 + i % 2 * 8) * LD + c + 2 * (lane % 4) + i / 2 * 8);
#endif
}

// Two B side by side whose 16 columns are rows r..r+15 of a tile, summed over channels c..c+15: for a product with the
// tile's transpose.
__device__ __forceinline__ void load_b_transposed(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices(b, tile + at(r + lane % 8 + lane / 16 * 8, c + lane / 8 % 2 * 8));
#else
#pragma unroll
    for (int i = 0; i < 4; i++)
        b[i] = *reinterpret_cast<const Pair*>(tile + (r + lane / 4 + i / 2 * 8) * LD + c + 2 * (lane % 4) + i % 2 * 8);
#endif
}

// The same with channels c..c+15 of a tile as the 16 columns, summed over its rows r..r+15.
__device__ __forceinline__ void load_b(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices_transposed(b, tile + at(r + lane % 16, c + lane / 16 * 8));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const real* x = tile + (r + 2 * (lane % 4) + i % 2 * 8) * LD + c + lane / 4 + i / 2 * 8;
        b[i] = {x[0], x[LD]};
    }
#endif
}

// All elements of a result: d[m][n][i].
#define EACH(d)                                                                     \
    _Pragma("unroll") for (int m = 0; m < M; m++)                                   \
        _Pragma("unroll") for (int n = 0; n < (int)(sizeof(d[0]) / sizeof(d[0][0])); n++) \
            _Pragma("unroll") for (int i = 0; i < 4; i++)

// d (16 M, columns) = a warp's rows of one tile, from r on, times the transpose of another's first `columns` rows. Here
// and below, d is there after products_arrive.
template <int columns>
__device__ __forceinline__ void multiply_transposed(float (&d)[M][columns / 8][4], const real* left, int r,
                                                    const real* right) {
#ifdef HOPPER
    products_start(d[0]);
#pragma unroll
    for (int c = 0; c < HP; c += 16)
        wgmma(d[0], describe(left + c), describe(right + c), c > 0);
    products_end();
#else
    memset(d, 0, sizeof(d));
#pragma unroll
    for (int c = 0; c < HP; c += 16) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) load_a(a[m], left, r + 16 * m, c);
#pragma unroll
        for (int n = 0; n < columns / 16; n++) {
            load_b_transposed(b, right, 16 * n, c);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
#endif
}

// d (16 M, HP) += x (16 M, columns), a result in registers, times the first `columns` rows of a tile.
template <int columns>
__device__ __forceinline__ void multiply(float (&d)[M][HP / 8][4], const float (&x)[M][columns / 8][4],
                                         const real* tile) {
    auto pairs_of = [&](Pair(&a)[4], int m, int r) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&left_right)[4] = x[m][2 * r + i / 2];
            a[i] = pair(left_right[i % 2 * 2], left_right[i % 2 * 2 + 1]);
        }
    };
#ifdef HOPPER
    Pair a[columns / 16][4];
#pragma unroll
    for (int r = 0; r < columns / 16; r++) {
        pairs_of(a[r], 0, r);
        asm volatile("" : "+r"(a[r][0]), "+r"(a[r][1]), "+r"(a[r][2]), "+r"(a[r][3]));  // not after products_start
    }
    products_start(d[0]);
#pragma unroll
    for (int r = 0; r < columns / 16; r++) wgmma_transposed(d[0], a[r], describe(tile + 16 * r * LD));
    products_end();
#else
#pragma unroll
    for (int r = 0; r < columns / 16; r++) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) pairs_of(a[m], m, r);
#pragma unroll
        for (int n = 0; n < HP / 16; n++) {
            load_b(b, tile, 16 * r, 16 * n);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
#endif
}

// Rows row+g and row+g+8 of a result (16,HP) to a head's rows, scaled each by its own factor.
__device__ __forceinline__ void store_rows(real* head, size_t stride, int row, int T, const float (&d)[HP / 8][4],
                                           float factor0 = 1.0f, float factor1 = 1.0f) {
    int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = row + g + 8 * half;
        float factor = half ? factor1 : factor0;
        if (t >= T) continue;
#pragma unroll
        for (int n = 0; n < HP / 8; n++) {
            int c = 8 * n + 2 * q;
            real* to = head + t * stride + c;
            Pack<2> x = {factor * d[n][2 * half], factor * d[n][2 * half + 1]};
            if (HS % 2 == 0 && c < HS) store(to, x);
            if (HS % 2 == 1 && c < HS) from_float(to[0], x[0]);
            if (HS % 2 == 1 && c + 1 < HS) from_float(to[1], x[1]);
        }
    }
}

// The largest, or the sum, of a row of D, which four neighbouring lanes hold.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Computes out as above, and for softmax keeps lse (B,NH,T) = log2 of each row's sum of 2^(score * log2(e) * scale),
// from which the backward pass makes the weights again; exponentials are to base 2, as in hardware. The maximum and the
// sum of a row are those of the tiles seen so far, and out is rescaled when the maximum grows (Milakov and Gimelshein
// 2018, algorithm 3). The blocks of a head, which share its keys in L2, are neighbours; the last rows, which see the
// most keys, come first.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward(
    real* __restrict__ out, float* __restrict__ lse, const real* __restrict__ qkv, float scale, int relu, int T,
    int NH) {
    DYNAMIC_SHARED(real, shared);  // queries (ROWS, LD); two stages of keys and values (2, 2, KEYS, LD)
    int blocks = (T + ROWS - 1) / ROWS, head_number = blockIdx.x / blocks, b = head_number / NH, h = head_number % NH;
    int first = (blocks - 1 - blockIdx.x % blocks) * ROWS, C = NH * HS;
    int r = threadIdx.x / 32 * 16 * M, g = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    int row = first + r, group = first + r / GROUP * GROUP;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float scale2 = scale * LOG2_E;
    real *queries = shared, *tiles = shared + ROWS * LD;
    auto tile = [&](int stage, int which) { return tiles + (2 * stage + which) * KEYS * LD; };
    auto load_stage = [&](int stage, int key) {
        load_tile<KEYS>(tile(stage, 0), head + C, 3 * C, key, T);
        load_tile<KEYS>(tile(stage, 1), head + 2 * C, 3 * C, key, T);
    };
    load_tile<ROWS>(queries, head, 3 * C, first, T);
    load_stage(0, 0);

    float o[M][HP / 8][4] = {}, top[M][2], sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++) top[m][0] = top[m][1] = LOWEST;
    int end = min(first + ROWS, T);
    for (int key = 0, stage = 0; key < end; key += KEYS, stage ^= 1) {
        tiles_arrive();
        __syncthreads();  // this stage is filled, and nobody reads the other any more
        if (key + KEYS < end) load_stage(stage ^ 1, key + KEYS);
        if (key >= group + GROUP) continue;  // all of it lies beyond this group's rows

        float s[M][KEYS / 8][4];
        multiply_transposed<KEYS>(s, queries, r, tile(stage, 0));
        products_arrive<0>(s);
        if (key + KEYS > row)  // the diagonal runs through it
            EACH(s) if (key + 8 * n + column + i % 2 > row + 16 * m + g + i / 2 * 8) s[m][n][i] = LOWEST;
        if (relu) {
            EACH(s) s[m][n][i] = fmaxf(0.0f, scale * s[m][n][i]);
        } else {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    float before = top[m][half], now = before;
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
                        now = fmaxf(now, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    now = row_max(now);
                    float factor = power_of_2(scale2 * (before - now)), total = 0.0f;
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                        for (int i = 2 * half; i < 2 * half + 2; i++) {
                            s[m][n][i] = power_of_2(scale2 * s[m][n][i] - scale2 * now);
                            total += s[m][n][i];
                        }
                    sum[m][half] = sum[m][half] * factor + total;
                    top[m][half] = now;
#pragma unroll
                    for (int n = 0; n < HP / 8; n++) o[m][n][2 * half] *= factor, o[m][n][2 * half + 1] *= factor;
                }
        }
        multiply<KEYS>(o, s, tile(stage, 1));
        products_arrive<0>(o);
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int t = row + 16 * m + g + 8 * half;
            sum[m][half] = relu ? 1.0f : row_sum(sum[m][half]);
            if (column == 0 && t < T) lse[(size_t)head_number * T + t] = scale2 * top[m][half] + log2f(sum[m][half]);
        }
        store_rows(out + (size_t)b * T * C + h * HS, C, row + 16 * m, T, o[m], 1.0f / sum[m][0], 1.0f / sum[m][1]);
    }
}

// The backward pass's weights from scores, in place, and then the gradients of the scores from those of the weights,
// but for the factor scale, which is left to the results. lse_of and delta_of (m, n, i) are of an element's query.
template <class F>
__device__ __forceinline__ void make_weights(float (&s)[M][TILE / 8][4], int relu, float scale, F lse_of) {
    if (relu) {
        EACH(s) s[m][n][i] = fmaxf(0.0f, scale * s[m][n][i]);
    } else {
        EACH(s) s[m][n][i] = power_of_2(scale * LOG2_E * s[m][n][i] - lse_of(m, n, i));
    }
}
template <class F>
__device__ __forceinline__ void make_dscores(float (&d)[M][TILE / 8][4], const float (&s)[M][TILE / 8][4], int relu,
                                             F delta_of) {
    if (relu) {
        EACH(d) d[m][n][i] = s[m][n][i] > 0.0f ? d[m][n][i] : 0.0f;
    } else {
        EACH(d) d[m][n][i] = s[m][n][i] * (d[m][n][i] - delta_of(m, n, i));
    }
}

// The backward pass is two kernels, so that each gradient is summed by one warp in one order; dqkv is (B,T,3,NH,HS), as
// qkv. This one has ROWS queries and walks over the keys that they see, for dq = dscore k. It also leaves
// delta (B,NH,T) = the sum over a head's channels of out * dout, which is the sum over s of weight * dweight that
// softmax's gradient needs.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_q(
    real* __restrict__ dqkv, float* __restrict__ delta, const real* __restrict__ dout, const real* __restrict__ out,
    const real* __restrict__ qkv, const float* __restrict__ lse, float scale, int relu, int T, int NH) {
    DYNAMIC_SHARED(real, shared);  // queries and dout (2, ROWS, LD); two stages of keys and values (2, 2, TILE, LD)
    int blocks = (T + ROWS - 1) / ROWS, head_number = blockIdx.x / blocks, b = head_number / NH, h = head_number % NH;
    int first = (blocks - 1 - blockIdx.x % blocks) * ROWS, C = NH * HS;
    int r = threadIdx.x / 32 * 16 * M, lane = threadIdx.x % 32, g = lane / 4, column = 2 * (lane % 4);
    int group = first + r / GROUP * GROUP;
    const real *head = qkv + (size_t)b * T * 3 * C + h * HS, *dhead = dout + (size_t)b * T * C + h * HS;
    real *queries = shared, *douts = shared + ROWS * LD, *tiles = douts + ROWS * LD;
    auto tile = [&](int stage, int which) { return tiles + (2 * stage + which) * TILE * LD; };
    auto load_stage = [&](int stage, int key) {
        load_tile<TILE>(tile(stage, 0), head + C, 3 * C, key, T);
        load_tile<TILE>(tile(stage, 1), head + 2 * C, 3 * C, key, T);
    };
    load_tile<ROWS>(queries, head, 3 * C, first, T);
    load_tile<ROWS>(douts, dhead, C, first, T);
    load_tile<ROWS>(tiles, out + (size_t)b * T * C + h * HS, C, first, T);  // out, where the two stages will be
    tiles_arrive();
    __syncthreads();
    float row_lse[M][2], row_delta[M][2];  // of rows g and g+8
#pragma unroll
    for (int m = 0; m < M; m++) {
        float sum = 0.0f;  // lanes i and i+16 share row i
        for (int c = lane / 16 * (HP / 2); c < (lane / 16 + 1) * (HP / 2); c += W) {
            int i = at(r + 16 * m + lane % 16, c);
            Pack<W> x = load<W>(tiles + i), y = load<W>(douts + i);
            for (int j = 0; j < W; j++) sum += x[j] * y[j];
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        int t = first + r + 16 * m + lane;
        if (lane < 16 && t < T) delta[(size_t)head_number * T + t] = sum;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_delta[m][half] = __shfl_sync(FULL_WARP, sum, g + 8 * half);
            row_lse[m][half] = lse[(size_t)head_number * T + min(first + r + 16 * m + g + 8 * half, T - 1)];
        }
    }
    __syncthreads();
    load_stage(0, 0);

    float dq[M][HP / 8][4] = {};
    int end = min(first + ROWS, T);
    for (int key = 0, stage = 0; key < end; key += TILE, stage ^= 1) {
        tiles_arrive();
        __syncthreads();
        if (key + TILE < end) load_stage(stage ^ 1, key + TILE);
        if (key >= group + GROUP) continue;
        float s[M][TILE / 8][4], d[M][TILE / 8][4];
        multiply_transposed<TILE>(s, queries, r, tile(stage, 0));
        multiply_transposed<TILE>(d, douts, r, tile(stage, 1));
        products_arrive<1>(s);
        make_weights(s, relu, scale, [&](int m, int, int i) { return row_lse[m][i / 2]; });
        if (key + TILE > group)
            EACH(s) if (key + 8 * n + column + i % 2 > first + r + 16 * m + g + i / 2 * 8) s[m][n][i] = 0.0f;
        products_arrive<0>(d);
        make_dscores(d, s, relu, [&](int m, int, int i) { return row_delta[m][i / 2]; });
        multiply<TILE>(dq, d, tile(stage, 0));
        products_arrive<0>(dq);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
        store_rows(dqkv + (size_t)b * T * 3 * C + h * HS, 3 * C, first + r + 16 * m, T, dq[m], scale, scale);
}

// This one, run after attention_backward_q, has ROWS keys and walks over the queries that see them, for
// dv = weight' dout and dk = dscore' q. It works on the transposed weights, whose rows are keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_backward_kv(
    real* __restrict__ dqkv, const real* __restrict__ dout, const real* __restrict__ qkv,
    const float* __restrict__ lse, const float* __restrict__ delta, float scale, int relu, int T, int NH) {
    DYNAMIC_SHARED(real, shared);  // keys and values (2, ROWS, LD); two stages of queries and dout (2, 2, TILE, LD)
    __shared__ float of_query[2][2][TILE];  // two stages of lse and delta
    int blocks = (T + ROWS - 1) / ROWS, head_number = blockIdx.x / blocks, b = head_number / NH, h = head_number % NH;
    int first = blockIdx.x % blocks * ROWS, C = NH * HS;
    int r = threadIdx.x / 32 * 16 * M, g = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    int group = first + r / GROUP * GROUP;
    const real *head = qkv + (size_t)b * T * 3 * C + h * HS, *dhead = dout + (size_t)b * T * C + h * HS;
    real *keys = shared, *values = shared + ROWS * LD, *tiles = values + ROWS * LD;
    lse += (size_t)head_number * T, delta += (size_t)head_number * T;
    auto tile = [&](int stage, int which) { return tiles + (2 * stage + which) * TILE * LD; };
    auto load_stage = [&](int stage, int query) {
        load_tile<TILE>(tile(stage, 0), head, 3 * C, query, T);
        load_tile<TILE>(tile(stage, 1), dhead, C, query, T);
        int t = query + threadIdx.x % TILE, which = threadIdx.x / TILE;  // beyond T, a weight of 1 meets zeros
        if (which < 2) copy4(&of_query[stage][which][threadIdx.x % TILE], (which ? delta : lse) + min(t, T - 1), t < T);
    };
    load_tile<ROWS>(keys, head + C, 3 * C, first, T);
    load_tile<ROWS>(values, head + 2 * C, 3 * C, first, T);
    load_stage(0, first);

    float dk[M][HP / 8][4] = {}, dv[M][HP / 8][4] = {};
    for (int query = first, stage = 0; query < T; query += TILE, stage ^= 1) {
        tiles_arrive();
        __syncthreads();
        if (query + TILE < T) load_stage(stage ^ 1, query + TILE);
        if (query + TILE <= group) continue;  // before all of this group's keys
        float s[M][TILE / 8][4], d[M][TILE / 8][4];
        multiply_transposed<TILE>(s, keys, r, tile(stage, 0));
        multiply_transposed<TILE>(d, values, r, tile(stage, 1));
        products_arrive<1>(s);
        make_weights(s, relu, scale, [&](int, int n, int i) { return of_query[stage][0][8 * n + column + i % 2]; });
        if (group + GROUP > query)
            EACH(s) if (first + r + 16 * m + g + i / 2 * 8 > query + 8 * n + column + i % 2) s[m][n][i] = 0.0f;
        products_arrive<0>(d);
        make_dscores(d, s, relu, [&](int, int n, int i) { return of_query[stage][1][8 * n + column + i % 2]; });
        multiply<TILE>(dv, s, tile(stage, 1));
        multiply<TILE>(dk, d, tile(stage, 0));
        products_arrive<0>(dv);
        products_arrive<0>(dk);
    }
    real* dqkv_head = dqkv + (head - qkv);
#pragma unroll
    for (int m = 0; m < M; m++) {
        store_rows(dqkv_head + C, 3 * C, first + r + 16 * m, T, dk[m], scale, scale);
        store_rows(dqkv_head + 2 * C, 3 * C, first + r + 16 * m, T, dv[m]);
    }
}

// ---- GELU, in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2) ----

// gelu(x) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Since (1 + tanh u)/2 = 1/(1 + exp(-2u)), it is
// x times a logistic function: one exponential, and no cancellation where tanh u is near -1.
constexpr float SQRT_8_OVER_PI = 1.595769122f;

__device__ __forceinline__ float gelu(float x) {
    return x / (1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
}

// With g = 1/(1 + exp(-2u)):  d(x g)/dx = g + x g (1 - g) d(2u)/dx. Far to the left, exp overflows to infinity and g
// to 0, the right limits.
__device__ __forceinline__ float gelu_derivative(float x) {
    float g = 1.0f / (1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
    return g + x * g * (1.0f - g) * SQRT_8_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

// out (N,OC) = gelu(inp).
extern "C" __global__ void gelu_forward(real* __restrict__ out, const real* __restrict__ inp, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i);
    for (int j = 0; j < W; j++) x[j] = gelu(x[j]);
    store(out + i, x);
}

// dinp (N,OC) holds the gradient of the output and becomes, in place, that of the input.
extern "C" __global__ void gelu_backward(real* __restrict__ dinp, const real* __restrict__ inp, int N, int OC) {
    size_t i = first_number();
    if (i >= (size_t)N * OC) return;
    Pack<W> x = load<W>(inp + i), d = load<W>(dinp + i);
    for (int j = 0; j < W; j++) d[j] *= gelu_derivative(x[j]);
    store(dinp + i, d);
}

// ---- classifier: softmax, cross-entropy and its gradient ----

// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]). If with_gradient, the logits are overwritten with
// dloss * (softmax - 1 at the target), zeros in the padding; else they are left as they are.
// The probabilities are never stored, and a logit is read from device memory once: a row, 100 KB in bf16, waits in
// shared memory for the second pass. A block takes every gridDim.x-th row, n logits a thread at a time: W if the padded
// rows allow it. With stages = 2 the next row is on its way to shared memory while one is at work; with 0, for rows
// that are too long for that, the second pass relies on the caches.
template <int n>
__device__ __forceinline__ void classify_rows(real* logits, float* __restrict__ losses,
                                              const int* __restrict__ targets, float dloss, int N, int V, int Vp,
                                              int with_gradient, int stages) {
    DYNAMIC_SHARED(real, row_cache);  // (stages, Vp)
    auto load_row = [&](int stage, int row) {  // each thread what it will read itself
        for (int v = n * threadIdx.x; v < Vp; v += n * blockDim.x)
            copy16(row_cache + (size_t)stage * Vp + v, logits + (size_t)row * Vp + v, true);
        copies_end();
    };
    if (stages && blockIdx.x < N) load_row(0, blockIdx.x);
    for (int row = blockIdx.x, stage = 0; row < N; row += gridDim.x, stage ^= 1) {
        int next = row + gridDim.x, target = targets[row];
        real *x = logits + (size_t)row * Vp, *kept = stages ? row_cache + (size_t)stage * Vp : x;
        if (stages && next < N) load_row(stage ^ 1, next), copies_arrive<1>();
        else copies_arrive<0>();
        float largest = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = n * threadIdx.x; v < V; v += n * blockDim.x) {
            Pack<n> l = load<n>(kept + v);
            float before = largest;
            if (v + n > V)
                for (int i = 0; i < n; i++)
                    if (v + i >= V) l[i] = LOWEST;
            for (int i = 0; i < n; i++) largest = fmaxf(largest, l[i]);
            if (largest > before) sum *= exponential(before - largest);
            for (int i = 0; i < n; i++) sum += exponential(l[i] - largest);
        }
        float top = block_reduce<warp_max>(largest, LOWEST);
        sum = block_reduce<warp_sum>(sum * exponential(largest - top), 0.0f);
        if (threadIdx.x == 0) losses[row] = logf(sum) + top - to_float(kept[target]);
        __syncthreads();  // the logit of the target has been read
        if (!with_gradient) continue;
        float norm = dloss / sum;
#pragma unroll 4
        for (int v = n * threadIdx.x; v < Vp; v += n * blockDim.x) {
            Pack<n> l = {};
            if (v < V) l = load<n>(kept + v);
            for (int i = 0; i < n; i++) l[i] = exponential(l[i] - top) * norm;
            if (v + n > V || target / n == v / n)
                for (int i = 0; i < n; i++) l[i] = v + i < V ? l[i] - (v + i == target ? dloss : 0.0f) : 0.0f;
            store(x + v, l);
        }
    }
}

extern "C" __global__ void fused_classifier(real* logits, float* __restrict__ losses, const int* __restrict__ targets,
                                            float dloss, int N, int V, int Vp, int with_gradient, int stages) {
    if (Vp % W == 0) classify_rows<W>(logits, losses, targets, dloss, N, V, Vp, with_gradient, stages);
    else classify_rows<1>(logits, losses, targets, dloss, N, V, Vp, with_gradient, 0);
}

// ---- the gradient's norm, and AdamW (Kingma and Ba 2014, algorithm 1; Loshchilov and Hutter 2017, algorithm 2) ----

// norm[0] = the square root of the sum of the squares of grads (n). Each block leaves the sum of its share in
// norm[2 + blockIdx.x]; the last one to finish, which norm[1] counts, adds those up, and so always in the same order.
extern "C" __global__ void global_norm(float* norm, const float* __restrict__ grads, size_t n) {
    float sum = 0.0f;
    size_t stride = 4 * (size_t)gridDim.x * blockDim.x;
#pragma unroll 4
    for (size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); i < n; i += stride) {
        Pack<4> g = load<4>(grads + i);
        for (int j = 0; j < 4; j++) sum += g[j] * g[j];
    }
    sum = block_reduce<warp_sum>(sum, 0.0f);
    __shared__ int last;
    if (threadIdx.x == 0) {
        norm[2 + blockIdx.x] = sum;
        __threadfence();  // the sum is there before it is counted
        last = atomicAdd(reinterpret_cast<int*>(norm + 1), 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.0f;
    for (int i = threadIdx.x; i < gridDim.x; i += blockDim.x) sum += __ldcg(norm + 2 + i);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) norm[0] = sqrtf(sum), norm[1] = 0.0f;
}

// What changes from step to step is in device memory, so that a graph can hold the launch; rate is 1 - beta, computed
// by the host, since 1 - 0.999 in fp32 would be wrong by 1e-5 of itself; correction = 1/(1 - beta^step) undoes the
// moments' start at zero; clip is the largest norm of a gradient, which is scaled down to it, or 0.
struct AdamW { float learning_rate, rate1, rate2, correction1, correction2, eps, weight_decay, clip; };

// All n parameters in one launch: tensor i of `tensors`, at most 32, lies at [starts[i], starts[i+1]) of the arenas. A
// thread for each W numbers, which are of one tensor; it finds which by bisection. decayed[i] says if weight decay is
// for it, and added_to[i] if the next backward pass will add to its gradient, which must then be zero, or set it. The
// update is made to fp32 master parameters, of which params are the rounded copy that the other kernels read, or, in
// fp32, themselves. With a gradient that is not finite no parameter changes. Bound by four reads and three writes of
// the arena, in bf16 a half write more.
extern "C" __global__ void adamw(real* params, float* master, float* __restrict__ grads, float* __restrict__ m,
                                 float* __restrict__ v, const size_t* __restrict__ starts,
                                 const int* __restrict__ decayed, const int* __restrict__ added_to, int tensors,
                                 size_t n, const AdamW* __restrict__ settings, const float* __restrict__ norm) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> g = load<W>(grads + i), p = load<W>(master + i), m1 = load<W>(m + i), m2 = load<W>(v + i);
    AdamW a = *settings;
    int tensor = 0;
    for (int half = 16; half > 0; half /= 2)
        if (tensor + half < tensors && starts[tensor + half] <= i) tensor += half;
    float decay = decayed[tensor] ? a.weight_decay : 0.0f;
    float scale = a.clip > 0.0f && norm[0] > a.clip ? a.clip / norm[0] : 1.0f;
    for (int j = 0; j < W; j++) {
        g[j] *= scale;
        m1[j] += a.rate1 * (g[j] - m1[j]);
        m2[j] += a.rate2 * (g[j] * g[j] - m2[j]);
        float change = m1[j] * a.correction1 / (sqrtf(m2[j] * a.correction2) + a.eps);
        p[j] -= a.learning_rate * (change + decay * p[j]);
    }
    if (added_to[tensor]) store(grads + i, Pack<W>{});
    if (!(norm[0] <= -LOWEST)) return;
    store(master + i, p);
    if (sizeof(real) < sizeof(float)) store(params + i, p);
    store(m + i, m1);
    store(v + i, m2);
}
