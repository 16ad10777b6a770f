/*
The hand-written kernels of a GPT-2 training step, each forward next to its backward, attention
last. dev/cpu/kernels.cpp has each as a plain loop of the same name: there is what it computes, and
here how a GPU does it. train_gpt2.py compiles this file with NVRTC, and reads the kernels' names,
arguments and grids from it. A BLAS library multiplies the linear layers' matrices.

For a first evening: all kernels before attention, each beside its loop, and attention's formulas.
Skip PTX, struct Output, long runs in encoder_backward_wte, and rows that do not fit in the
classifier. Here they are in order, with their launches in a micro-batch with L layers.

                             launches  threads  bound by      on an H100, TB/s
  encoder_forward            1             256  memory        2.1
  encoder_backward_wte       1            1024  latency       1.2
  encoder_backward_wpe       1             256  memory        2.2
  residual_layernorm_forward 2L + 1        256  memory        2.9
  layernorm_backward         2L + 1        384  memory        2.7
  matmul_backward_bias       4L            256  memory
  add_partials               6L + 1        256  latency
  gelu_forward               L or 0        256  memory        (0 in bf16: a product does it)
  gelu_backward              L or 0        256  memory
  fused_classifier           1 to 4       1024  memory        2.9
  add_loss                   1            1024  latency
  global_norm                1 a step      512  memory        2.9
  judge                      1 a step        1  latency
  adamw                      1 a step      256  memory        3.0
  attention_forward          L             128  tensor cores  310 TFLOP/s
  attention_backward_q       L             128  tensor cores  343 TFLOP/s
  attention_backward_kv      L             128  tensor cores  347 TFLOP/s
Rates: 124M, bf16, B = 32 (dev/RESULTS.md). A copy has 2.99 TB/s, a large product 752 TFLOP/s.

Sizes: B sequences of T tokens, N = B*T rows; C channels, a multiple of 32; V words, padded to Vp;
NH heads of HS = C/NH channels. Arrays are row-major. Parameters, activations and their gradients
are real (fp32 or bf16); the residual stream, parameters' gradients and statistics are fp32.
-DCHANNELS=C and -DHS=HS are compiled in: a row whose length is known can stay in registers.

Rules: a kernel sets the gradient of a parameter in a step's first micro-batch, and adds to it later
(adds); encoder_backward_wte always adds. Activations and their gradients are set, but for the
residual stream, where two branches meet: residual_layernorm_forward adds to it, layernorm_backward
to its gradient. The order of a sum depends on shapes, tokens and grid, never on timing.

Words: a warp is 32 threads, its lanes, which execute together. A block has up to 1,024 threads of a
multiprocessor, which wait for each other at barriers and share its fast shared memory, up to 227
KB. The grid is all blocks of a launch; the 100 or so multiprocessors take them in any order.

Most are bound by memory: an H100 has time for 80 operations in fp32 while one float arrives. So the
32 lanes of a warp touch adjacent addresses, 16 bytes a lane where possible; many loads are in
flight at once; and what a block needs twice stays in registers, shared memory or a cache.

For dev/: GROUP is 1, RELU 0, and of struct Output only store does anything. Behind #ifdef
__CUDACC__ is PTX, for which dev/cpu has C++ of the same names.
*/

// For the host: a block's threads, and its items along x and along y (else 1). Over gelu_forward
// BLOCK(256, W * threads) says that a thread takes W of its items, numbers: 16 bytes. A launch of
// layernorm_backward or attention chooses other threads. The compiler sees nothing.
#define BLOCK(threads, ...)

// Shared memory whose size is chosen at launch. The alignment is for Hopper's swizzle.
#ifdef __CUDACC__
extern __shared__ __align__(1024) unsigned char dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(dynamic_shared)
#endif
constexpr unsigned FULL_WARP = 0xffffffff;
// In place of -infinity in a maximum: subtracted from itself, it gives no NaN.
constexpr float LOWEST = -3.402823466e38f;

// ---- sums over a warp and over a block ----
// Lanes at distance 16, 8, .. 1 exchange and add: all get the total, in a fixed order.
template <typename T>
__device__ T warp_sum(T x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

template <int lanes = 32>
__device__ float warp_max(float x) {
    for (int distance = 1; distance < lanes; distance *= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

__device__ float quad_sum(float x) {  // of four neighbours
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// All threads of a one-dimensional block of whole warps must call it.
template <float (*warp_reduce)(float)>
__device__ float block_reduce(float x, float neutral) {
    __shared__ float of_warp[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_reduce(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < warps ? of_warp[lane] : neutral);
    __syncthreads();  // from here on of_warp may be written again
    return x;
}

// ---- numbers ----
// Turing (7.5) has no asynchronous copies, no bf16, no TF32, and 64 KB of shared memory.
#if __CUDA_ARCH__ == 750
#define TURING 1
#elif !defined(TURING)
#define TURING 0
#endif

#ifdef __CUDACC__
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Two fp32, rounded to nearest with ties to even, as two bf16. `low` becomes the lower half.
__device__ unsigned two_bf16(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
// 2^x in one instruction. Unlike exp2f it makes denormals 0.
__device__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Start to copy 16 or 4 bytes from device to shared memory; zeros, unless `there`. wait_for_copies
// waits until at most `pending` of this thread's groups, which copies_end ends, are under way.
#if TURING  // copies at once, so there is nothing to wait for
__device__ void copy16(void* shared, const void* global, bool there) {
    *(float4*)shared = there ? *(const float4*)global : float4{};
}
__device__ void copy4(void* shared, const void* global, bool there) {
    *(float*)shared = there ? *(const float*)global : 0.0f;
}
__device__ void copies_end() {}
template <int pending>
__device__ void wait_for_copies() {}
#else
__device__ void copy16(void* shared, const void* global, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(there ? 16 : 0)
                 : "memory");
}
__device__ void copy4(void* shared, const void* global, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 ::"r"(shared_address(shared)), "l"(global), "r"(there ? 4 : 0)
                 : "memory");
}
__device__ void copies_end() { asm volatile("cp.async.commit_group;"); }
template <int pending>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif
#endif

// Parameters and activations are stored as real, which is fp32 or bfloat16. Arithmetic is in fp32.
__device__ float to_float(float x) { return x; }
__device__ void from_float(float& to, float x) { to = x; }
#ifdef BF16
struct real { unsigned short bits; };  // the upper half of an fp32
__device__ float to_float(real x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ void from_float(real& to, float x) { to.bits = two_bf16(x, 0.0f); }
#else
using real = float;
#endif

// LOG2_E * x is rounded, so only bf16, and attention with its larger errors, compute e^x by 2^x.
constexpr float LOG2_E = 1.442695041f;
// e^(x - shift): in bf16 a multiply-add and an instruction for 2^x. There LOWEST gives 0, as
// LOG2_E * LOWEST is -infinity; but for LOWEST - LOWEST, which no caller has, a NaN.
__device__ float exponential(float x, float shift = 0.0f) {
    return sizeof(real) == 2 ? power_of_2(LOG2_E * x - LOG2_E * shift) : expf(x - shift);
}

// Pack<n> is n neighbours of an array as fp32, in registers: the compiler unrolls short loops. load
// and store move up to 16 bytes at a time.
template <int n>
struct Pack {
    float x[n];
    __device__ float& operator[](int i) { return x[i]; }
};
template <int n, class T>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Stored { T x[n]; };
template <int n, class T>
__device__ Pack<n> load(const T* p) {
    Stored<n, T> s = *reinterpret_cast<const Stored<n, T>*>(p);
    Pack<n> x;
    for (int i = 0; i < n; i++) x[i] = to_float(s.x[i]);
    return x;
}
template <int n, class T>
__device__ void store(T* p, Pack<n> x) {
    Stored<n, T> s;
    for (int i = 0; i < n; i++) from_float(s.x[i], x[i]);
    *reinterpret_cast<Stored<n, T>*>(p) = s;
}
#ifdef BF16  // two numbers in one register
template <int n>
__device__ Pack<n> load(const real* p) {
    Pack<n> x;
    if constexpr (n == 1) x[0] = to_float(*p);
    else {
        auto s = *reinterpret_cast<const Stored<n / 2, unsigned>*>(p);
        for (int i = 0; i < n; i++)
            x[i] = __uint_as_float(i % 2 ? s.x[i / 2] & 0xffff0000 : s.x[i / 2] << 16);
    }
    return x;
}
template <int n>
__device__ void store(real* p, Pack<n> x) {
    if constexpr (n == 1) from_float(*p, x[0]);
    else {
        Stored<n / 2, unsigned> s;
        for (int i = 0; i < n; i += 2) s.x[i / 2] = two_bf16(x[i], x[i + 1]);
        *reinterpret_cast<Stored<n / 2, unsigned>*>(p) = s;
    }
}
#endif
template <int n>
__device__ Pack<n> operator+(Pack<n> a, Pack<n> b) {
    for (int i = 0; i < n; i++) a[i] += b[i];
    return a;
}

constexpr int W = 16 / sizeof(real);
__device__ size_t first_number() { return W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); }
// For dev/: the row of number i, of C numbers each. (A 64-bit division takes 5 times longer.)
__device__ int row_of_number(size_t i, int C) { return (unsigned)(i / W) / (C / W); }

// An array that a kernel writes and a matrix product reads; the host passes a pointer. In dev/,
// -DOUTPUT=<file> brings others, which also write 8-bit copies, sum columns or drop numbers of a
// branch: a thread calls begin first, a warp's lanes end, and sum_columns follows attention's tile.
#ifdef OUTPUT
#include OUTPUT
#else
struct Output {
    static constexpr int NORM_SUMS = 2;  // that layernorm_backward takes of each column
    real* numbers;
    __device__ void begin() {}
    template <int n>
    __device__ void store(size_t i, Pack<n> x, Pack<n> = {}) { ::store(numbers + i, x); }
    template <int n> __device__ Pack<n> drop(size_t, Pack<n> x) { return x; }
    __device__ void end() {}
    template <class... Rows>
    __device__ void sum_columns(const Rows&...) {}
};
#endif

// ---- encoder: token and position embeddings ----
// out (B,T,C), the residual stream, = wte (Vp,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1], unless wpe
// is null. A thread takes 4 channels, 16 bytes of out. Items: B*T*C numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void encoder_forward(
    float* __restrict__ out, const int* __restrict__ tokens, const real* __restrict__ wte,
    const real* __restrict__ wpe, int N, int T, int C) {
    int packs = C / 4, i = blockIdx.x * blockDim.x + threadIdx.x;
    int row = i / packs, c = 4 * (i % packs);
    if (row >= N) return;
    Pack<4> x = load<4>(wte + (size_t)tokens[row] * C + c);
    if (wpe) x = x + load<4>(wpe + (size_t)(row % T) * C + c);
    store(out + (size_t)row * C + c, x);
}

// dwte (Vp,C)[v] += the sum of the rows of dout (N,C) whose token is v. Atomics would add them in
// any order, so the host sorts the positions by token: order (N). Equal tokens are a run, and
// runs (N,2) has where in that order each begins, and its length: longest first, then zeros. Most
// words occur once, some very often: a long run gets a block, and a short one a warp.
// With lengths 900, 70, 3, 3, 1, and 32 warps in a block:
//   block 0  adds run 0 with all its warps, then with warp w run w, if that is short: 2, 3 and 4
//   block 1  adds run 1 with all its warps, then would add runs 32 to 63, which are empty
//   block 2  ends, since run 2 is short and run 64 empty: so are all behind them
// So turn i adds run i if it is long, then the short ones of runs 32i to 32i+31, a warp each. A
// grid has a warp for four positions: ample. Items: N positions along x, C channels along y.
BLOCK(1024, 128, 32 * W)
extern "C" __global__ void __launch_bounds__(1024) encoder_backward_wte(
    float* __restrict__ dwte, const real* __restrict__ dout, const int* __restrict__ tokens,
    const int* __restrict__ order, const int* __restrict__ runs, int N, int C) {
    constexpr int LONG = 64;
    __shared__ float of_warp[32][W][32];  // each lane has a bank
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    int c = W * (32 * blockIdx.y + lane);
    auto length = [&](int run) { return run < N ? runs[2 * run + 1] : 0; };
    auto sum_of = [&](int run, int from, int step) {
        Pack<W> sum = {};
        if (c < C)
#pragma unroll 4  // so that several rows are on their way
            for (int j = from; j < length(run); j += step)
                sum = sum + load<W>(dout + (size_t)order[runs[2 * run] + j] * C + c);
        return sum;
    };
    auto add = [&](int run, Pack<W> sum) {
        float* d = dwte + (size_t)tokens[order[runs[2 * run]]] * C + c;
        if (c < C) store(d, load<W>(d) + sum);
    };
    for (int i = blockIdx.x; length(i) > LONG || length(warps * i) > 0; i += gridDim.x) {
        if (length(i) > LONG) {
            Pack<W> sum = sum_of(i, warp, warps);
            for (int j = 0; j < W; j++) of_warp[warp][j][lane] = sum[j];
            __syncthreads();
            if (warp == 0) {
                sum = {};
                for (int w = 0; w < warps; w++)
                    for (int j = 0; j < W; j++) sum[j] += of_warp[w][j][lane];
                add(i, sum);
            }
            __syncthreads();
        }
        int run = warps * i + warp;
        if (0 < length(run) && length(run) <= LONG) add(run, sum_of(run, 0, 1));
    }
}

// dwpe (maxT,C)[t] = the sum over b of dout (B,T,C)[b,t], 0 beyond T; += with adds. Items: numbers.
BLOCK(256, W * threads)
extern "C" __global__ void encoder_backward_wpe(
    float* __restrict__ dwpe, const real* __restrict__ dout, int B, int T, int maxT, int C,
    int adds) {
    size_t i = first_number(), TC = (size_t)T * C;
    if (i >= (size_t)maxT * C) return;
    Pack<W> sum = {};
    if (adds) sum = load<W>(dwpe + i);
    if (i < TC)
#pragma unroll 8
        for (int b = 0; b < B; b++) sum = sum + load<W>(dout + b * TC + i);
    store(dwpe + i, sum);
}

// ---- residual stream and layernorm (Ba, Kiros and Hinton 2016, section 3) ----
// The threads of a row keep it in registers: thread i has packs i, i + threads, ... of n columns.
// f(k, c) for each of a thread's packs: pack k begins at column c.
template <int n, int threads>
constexpr int packs_of = (CHANNELS + n * threads - 1) / (n * threads);
template <int n, int threads, class F>
__device__ void each_pack(F f) {
#pragma unroll
    for (int k = 0; k < packs_of<n, threads>; k++) {
        int c = n * (threadIdx.x % threads) + n * threads * k;
        if (CHANNELS % (n * threads) == 0 || c < CHANNELS) f(k, c);
    }
}

// The output of attention or the MLP joins the residual stream; then comes a layernorm.
//   x (N,C) += branch (N,C), unless branch is null
//   out (N,C) = (x - mean) * rstd * weight + bias
//   mean (N), rstd (N) = 1/sqrt(variance + 1e-5), of each row
//   copy (N,C) = x, as a real, for the backward pass
// The variance is taken around the mean, as E[x^2] - E[x]^2 would cancel. Items: N rows.
BLOCK(256, threads / 32)
extern "C" __global__ void residual_layernorm_forward(
    Output out, float* __restrict__ mean, float* __restrict__ rstd, real* __restrict__ copy,
    float* __restrict__ x, const real* __restrict__ branch, const real* __restrict__ weight,
    const real* __restrict__ bias, int N) {
    constexpr int C = CHANNELS;
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    out.begin();
    Pack<4> v[packs_of<4, 32>];
    each_pack<4, 32>([&](int k, int c) { v[k] = load<4>(x + start + c); });
    if (branch) {
        each_pack<4, 32>([&](int k, int c) {
            v[k] = v[k] + out.drop(start + c, load<4>(branch + start + c));
        });
        each_pack<4, 32>([&](int k, int c) { store(x + start + c, v[k]); });
    }
    float sum = 0.0f;
    each_pack<4, 32>([&](int k, int c) {
        store(copy + start + c, v[k]);
        for (int i = 0; i < 4; i++) sum += v[k][i];
    });
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    each_pack<4, 32>([&](int k, int c) {
        for (int i = 0; i < 4; i++) sum += (v[k][i] - m) * (v[k][i] - m);
    });
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    each_pack<4, 32>([&](int k, int c) {
        Pack<4> w = load<4>(weight + c), b = load<4>(bias + c);
        for (int i = 0; i < 4; i++) v[k][i] = (v[k][i] - m) * s * w[i] + b[i];
        out.store(start + c, v[k]);
    });
    out.end();
    if (threadIdx.x % 32 == 0) {
        mean[row] = m;
        rstd[row] = s;
    }
}

// The gradient of a layernorm joins that of the residual stream. With norm = (inp - mean) * rstd
// and dnorm = dout * weight, for each row:
//   dresidual (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   partials (2, gridDim.x, C) = each block's sums of dout * norm, and of dout,
// for add_partials. A warp has a row, or four warps a long one, and sums up columns in registers.
// The next row is copied to shared memory (rows of a block, 2 stages, 3, C): some tens of KB are on
// their way, so a block on a multiprocessor is enough. Items: blocks.
constexpr int ROW_THREADS = CHANNELS <= 1280 ? 32 : 128;
// A thread's sums fit its registers: 48 in 168 at C = 768, 80 in 255 at 1280, 64 in 128 at 4096.
constexpr int LAYERNORM_THREADS = CHANNELS <= 768 ? 384 : CHANNELS <= 1280 ? 256 : 512;
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(LAYERNORM_THREADS, 1) layernorm_backward(
    Output dresidual, float* __restrict__ partials, const real* __restrict__ dout,
    const real* __restrict__ inp, const real* __restrict__ weight, const float* __restrict__ mean,
    const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS;
    DYNAMIC_SHARED(real, shared);
    dresidual.begin();
    int rows = blockDim.x / ROW_THREADS, slot = threadIdx.x / ROW_THREADS;  // slot: its row in turn
    real* stages = shared + slot * 2 * 3 * C;
    auto load_row = [&](int stage, int row) {
        real* to = stages + stage * 3 * C;
        size_t start = (size_t)row * C;
        // Each thread reads only what it copied, so its own wait is enough.
        each_pack<W, ROW_THREADS>([&](int k, int c) {
            copy16(to + c, inp + start + c, true);
            copy16(to + C + c, dout + start + c, true);
            copy16(to + 2 * C + c, dresidual.numbers + start + c, true);
        });
        copies_end();
    };
    int step = gridDim.x * rows, row = blockIdx.x * rows + slot;
    float next_mean = 0.0f, next_rstd = 0.0f;
    if (row < N) {
        load_row(0, row);
        next_mean = mean[row];
        next_rstd = rstd[row];
    }
    Pack<W> sums[Output::NORM_SUMS][packs_of<W, ROW_THREADS>] = {};
    // As long as any thread has a row: all reach __syncthreads.
    for (int stage = 0; row - slot < N; row += step, stage ^= 1) {
        bool has_row = row < N;
        float s = next_rstd, minus_ms = -next_mean * s;  // norm = inp * s + minus_ms
        if (row + step < N) {
            load_row(stage ^ 1, row + step);
            next_mean = mean[row + step];
            next_rstd = rstd[row + step];
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        const real *x = stages + stage * 3 * C, *dy = x + C, *dx = dy + C;
        Pack<2> total = {};  // of dnorm, and of dnorm * norm
        if (has_row) {
            each_pack<W, ROW_THREADS>([&](int k, int c) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) {
                    float dnorm = d[i] * w[i];
                    total[0] += dnorm;
                    total[1] += dnorm * (v[i] * s + minus_ms);
                }
            });
        }
        total = {warp_sum(total[0]), warp_sum(total[1])};
        if (ROW_THREADS > 32) {
            // Two, since the previous row's may still be read.
            __shared__ Pack<2> of_warp[2][LAYERNORM_THREADS / 32];
            if (threadIdx.x % 32 == 0) of_warp[stage][threadIdx.x / 32] = total;
            __syncthreads();
            total = {};
            for (int w = 0; w < ROW_THREADS / 32; w++)
                total = total + of_warp[stage][slot * ROW_THREADS / 32 + w];
        }
        float average_dnorm = total[0] / C, average_dnorm_norm = total[1] / C;
        if (has_row) {
            each_pack<W, ROW_THREADS>([&](int k, int c) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c);
                Pack<W> g = load<W>(dx + c), w = load<W>(weight + c);
                size_t at = (size_t)row * C + c;
                for (int i = 0; i < W; i++) {
                    float norm = v[i] * s + minus_ms, dnorm = d[i] * w[i];
                    g[i] += s * (dnorm - average_dnorm - norm * average_dnorm_norm);
                    float terms[] = {d[i] * norm, d[i], dresidual.drop(at, g)[i]};
                    for (int j = 0; j < Output::NORM_SUMS; j++) sums[j][k][i] += terms[j];
                }
                dresidual.store(at, g, dresidual.drop(at, g));
            });
        }
    }
    dresidual.end();
    float* of_row = reinterpret_cast<float*>(shared);  // (rows of a block, C), where the rows were
#pragma unroll
    for (int which = 0; which < Output::NORM_SUMS; which++) {
        __syncthreads();
        each_pack<W, ROW_THREADS>([&](int k, int c) {
            store(of_row + slot * C + c, sums[which][k]);
        });
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += blockDim.x) {
            float sum = 0.0f;
            for (int i = 0; i < rows; i++) sum += of_row[i * C + column];
            partials[((size_t)which * gridDim.x + blockIdx.x) * C + column] = sum;
        }
    }
}
// For the host: the threads of a block, those of a row, and a row's bytes of shared memory.
extern "C" { __constant__ int layernorm_sizes[] = {
    LAYERNORM_THREADS, ROW_THREADS, 2 * 3 * CHANNELS * (int)sizeof(real)}; }

// ---- the bias of a linear layer, backward ----
// out (OC) = the sum of each column of inp (N,OC); or += with adds. `lanes` of a block's 256
// threads share a row, 16 bytes each. A constant step: four loads are on their way.
template <int lanes, class T>
__device__ void add_columns(
    float* __restrict__ out, const T* __restrict__ inp, int N, int OC, bool adds) {
    constexpr int n = 16 / sizeof(T), columns = lanes * n, rows = 256 / lanes;
    __shared__ __align__(16) float of_row[rows][columns];
    int r = threadIdx.x / lanes, c = threadIdx.x % lanes * n, first = columns * blockIdx.x;
    Pack<n> sum = {};
    if (first + c < OC)
#pragma unroll 4
        for (int row = r; row < N; row += rows)
            sum = sum + load<n>(inp + (size_t)row * OC + first + c);
    store(of_row[r] + c, sum);
    __syncthreads();
    int column = threadIdx.x;
    if (column >= columns || first + column >= OC) return;
    float total = 0.0f;
    for (int i = 0; i < rows; i++) total += of_row[i][column];
    float& to = out[first + column];
    to = (adds ? to : 0.0f) + total;
}

// partials (gridDim.y, OC) = the sum of each column over each share of the rows of dout (N,OC), for
// add_partials. A share is a multiple of 32 rows, so that each of 8 warps has four loads of 512
// bytes on their way. On an H100: 2.6 TB/s. Items: OC columns along x, shares along y.
BLOCK(256, 32 * W)
extern "C" __global__ void __launch_bounds__(256, 4) matmul_backward_bias(
    float* __restrict__ partials, const real* __restrict__ dout, int N, int OC) {
    int shares = gridDim.y, share = blockIdx.y;
    int rows = (N + 32 * shares - 1) / (32 * shares) * 32, first = rows * share;
    add_columns<32>(partials + (size_t)share * OC, dout + (size_t)first * OC, min(rows, N - first),
                    OC, false);
}

// out1 (C), out2 (C) = the sums over the blocks of partials (2,blocks,C); or += with adds. A null
// output is skipped. Items: C columns along x, outputs along y.
BLOCK(256, 32)
extern "C" __global__ void add_partials(
    float* out1, float* out2, const float* __restrict__ partials, int blocks, int C, int adds) {
    float* out = blockIdx.y == 0 ? out1 : out2;
    if (out) add_columns<8>(out, partials + (size_t)blockIdx.y * blocks * C, blocks, C, adds);
}

// ---- GELU, in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2) ----
// gelu(x) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Since (1 + tanh u)/2 =
// 1/(1 + exp(-2u)), one exponential is enough, and nothing cancels where tanh u is near -1.
constexpr float SQRT_8_OVER_PI = 1.595769122f;

__device__ float gelu_denominator(float x) {
    return 1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x));
}
__device__ float gelu(float x) { return x / gelu_denominator(x); }
// With g = 1/(1 + exp(-2u)), d(x g)/dx = g + x g (1 - g) d(2u)/dx. Far left, exp is infinite, g 0.
__device__ float gelu_derivative(float x) {
    float g = 1.0f / gelu_denominator(x);
    return g + x * g * (1.0f - g) * SQRT_8_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

// out (N,OC) = gelu(inp (N,OC)). In bf16 this kernel and the next run only with --plain: else
// cuBLASLt's products do it. Items: N*OC numbers.
BLOCK(256, W * threads)
extern "C" __global__ void gelu_forward(Output out, const real* __restrict__ inp, int N, int OC) {
    out.begin();
    size_t i = first_number();
    if (i < (size_t)N * OC) {
        Pack<W> x = load<W>(inp + i);
        for (int j = 0; j < W; j++) x[j] = gelu(x[j]);
        out.store(i, x);
    }
    out.end();
}

// dinp (N,OC), the gradient of the output, becomes that of inp (N,OC). Items: N*OC numbers.
BLOCK(256, W * threads)
extern "C" __global__ void gelu_backward(Output dinp, const real* __restrict__ inp, int N, int OC) {
    dinp.begin();
    size_t i = first_number();
    if (i < (size_t)N * OC) {
        Pack<W> x = load<W>(inp + i), d = load<W>(dinp.numbers + i);
        for (int j = 0; j < W; j++) d[j] *= gelu_derivative(x[j]);
        dinp.store(i, d);
    }
    dinp.end();
}

// ---- classifier: softmax, cross-entropy and its gradient ----
// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]). If with_gradient, the logits
// become their gradient, dloss * (softmax - onehot), where onehot is 1 at the target; the padding
// becomes zeros. A block takes every gridDim.x-th row. Pass 1 finds its maximum and sum, pass 2 the
// gradient; in between the row, 100 KB in bf16, waits in shared memory:
//   two_rows fit   this row in one stage, while the next comes to the other
//   else           one stage has the first `kept` logits, and pass 2 starts the copies of the next
//                  row's; the others come from L2, which has room for a row of each multiprocessor
template <bool two_rows>
__device__ void classify_rows(
    real* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int N,
    int V, int Vp, int with_gradient, int kept) {
    DYNAMIC_SHARED(real, row_cache);  // (kept), or (2, Vp)
    auto load_row = [&](int stage, int row) {  // a thread reads what it copied, but for the target
        for (int v = W * threadIdx.x; v < kept; v += W * blockDim.x)
            copy16(row_cache + (size_t)stage * kept + v, logits + (size_t)row * Vp + v, true);
        copies_end();
    };
    if ((int)blockIdx.x < N) load_row(0, blockIdx.x);
    for (int row = blockIdx.x, stage = 0; row < N; row += gridDim.x, stage ^= two_rows) {
        int next = row + gridDim.x, target = targets[row];
        real *x = logits + (size_t)row * Vp, *cached = row_cache + (size_t)stage * kept;
        auto at = [&](int v) { return two_rows || v < kept ? cached + v : x + v; };
        if (two_rows && next < N) {
            load_row(stage ^ 1, next);
            wait_for_copies<1>();
        } else {
            copies_end();
            wait_for_copies<0>();
        }
        float largest = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
            Pack<W> l = load<W>(at(v));
            float before = largest;
            if (v + W > V)
                for (int i = 0; i < W; i++)
                    if (v + i >= V) l[i] = LOWEST;
            for (int i = 0; i < W; i++) largest = fmaxf(largest, l[i]);
            if (largest > before) sum *= exponential(before - largest);
            for (int i = 0; i < W; i++) sum += exponential(l[i], largest);
        }
        float top = block_reduce<warp_max>(largest, LOWEST);
        sum = block_reduce<warp_sum>(sum * exponential(largest - top), 0.0f);
        if (threadIdx.x == 0) losses[row] = logf(sum) + top - to_float(*at(target));
        __syncthreads();  // the logit of the target has been read
        if (!with_gradient) continue;
        // e^(x - shift) = dloss / sum * e^(x - top); shift's rounding scales a whole row alike.
        float shift = top + logf(sum / dloss);
#pragma unroll 4
        for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
            Pack<W> l = load<W>(at(v));
            for (int i = 0; i < W; i++) l[i] = exponential(l[i], shift);  // dloss * softmax
            if (v + W > V || (unsigned)(target - v) < W)                  // - dloss * onehot
                for (int i = 0; i < W; i++)
                    l[i] = v + i < V ? l[i] - (v + i == target ? dloss : 0.0f) : 0.0f;
            store(x + v, l);
            if (!two_rows && v < kept && next < N)
                copy16(cached + v, logits + (size_t)next * Vp + v, true);
        }
    }
}

// Shared memory has room for `room` logits, without a gradient none. Vp is a multiple of 8,
// for copies of 16 bytes. Items: blocks.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024, 1) fused_classifier(
    real* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int N,
    int V, int Vp, int with_gradient, int room) {
    if (room >= 2 * Vp)
        classify_rows<true>(logits, losses, targets, dloss, N, V, Vp, with_gradient, Vp);
    else
        classify_rows<false>(logits, losses, targets, dloss, N, V, Vp, with_gradient,
                             with_gradient ? min(room, Vp) : 0);
}

// The outcome of a step. adamw changes nothing unless update. The host reads it after it has queued
// the next step: so once a loss or norm was not finite, stopped stays 1, and no step updates.
struct Verdict { float norm, loss, update, stopped; };

// verdict->loss = factor times the sum of losses (N), in fixed order; or += with adds. One block.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) add_loss(
    Verdict* verdict, const float* __restrict__ losses, float factor, int N, int adds) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < N; i += (int)blockDim.x) sum += losses[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) verdict->loss = (adds ? verdict->loss : 0.0f) + factor * sum;
}

// ---- the gradient's norm, and AdamW (Kingma and Ba 2014; Loshchilov and Hutter 2017) ----
// gradient_norm[0] = the square root of the sum of the squares of grads (n), a multiple of 4. Each
// block writes its sum to gradient_norm[2 + blockIdx.x], and counts itself in gradient_norm[1]. The
// last block to finish adds up all sums, always in the same order. Items: blocks.
BLOCK(512, 1)
extern "C" __global__ void global_norm(
    float* gradient_norm, const float* __restrict__ grads, size_t n) {
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
        gradient_norm[2 + blockIdx.x] = sum;
        __threadfence();  // others see the sum before they see that it is counted
        last = atomicAdd(reinterpret_cast<int*>(gradient_norm + 1), 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.0f;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += blockDim.x)
        sum += __ldcg(gradient_norm + 2 + i);  // from L2, where other blocks' sums are
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) {
        gradient_norm[0] = sqrtf(sum);
        gradient_norm[1] = 0.0f;
    }
}

// The settings of a step, in device memory because a recorded graph cannot change its arguments.
// rate is 1 - beta, from the host: fp32's 1 - 0.999 is wrong in its 5th digit. The corrections,
// 1 / (1 - beta^step), make up for moments that start at 0. A gradient whose norm exceeds clip is
// scaled down to it; clip = 0 turns that off.
struct AdamW {
    float learning_rate, rate1, rate2, correction1, correction2, eps, weight_decay, clip;
};

// Decides whether a step updates: verdict->loss and gradient_norm[0] must be finite. Items: one.
BLOCK(1, threads)
extern "C" __global__ void judge(Verdict* verdict, const float* __restrict__ gradient_norm) {
    Verdict v = *verdict;
    v.norm = gradient_norm[0];
    bool finite = fabsf(v.loss) <= -LOWEST && v.norm <= -LOWEST;  // false if one of them is NaN
    if (!finite) v.stopped = 1.0f;
    v.update = 1.0f - v.stopped;
    *verdict = v;
}

// AdamW works on fp32 parameters, the master. In fp32 they are params, and low is null. In bf16
// params has the upper half, rounded, which all other kernels read; low has the lower half, signed,
// since rounding may have raised the upper one. The master's bits are (param << 16) + low, which is
// exact because ties round away from zero: to even, a lower half of 0x8000 would be ambiguous.
struct low_half { short bits; };
// these floats only carry bits: see load_master
__device__ float to_float(low_half x) { return __uint_as_float(x.bits); }
__device__ void from_float(low_half& to, float x) { to.bits = __float_as_uint(x); }

template <int n>
__device__ Pack<n> load_master(const real* params, const low_half* low, size_t i) {
    Pack<n> x = load<n>(params + i), rest = sizeof(real) == 2 ? load<n>(low + i) : Pack<n>{};
    for (int j = 0; j < n; j++)
        x[j] = __uint_as_float(__float_as_uint(x[j]) + __float_as_uint(rest[j]));
    return x;
}

template <int n>
__device__ void store_master(real* params, low_half* low, size_t i, Pack<n> x) {
    if (sizeof(real) == 2) {
        store(low + i, x);
        for (int j = 0; j < n; j++)  // a NaN stays as it is, since its bits could overflow
            if (x[j] == x[j]) x[j] = __uint_as_float((__float_as_uint(x[j]) + 0x8000) & 0xffff0000);
    }
    store(params + i, x);
}

// A step for W numbers of a tensor, with g the gradient, which is scaled first:
//   m += rate1 (g - m),  v += rate2 (g^2 - v)
//   p -= learning_rate (m correction1 / (sqrt(v correction2) + eps) + weight_decay p)
__device__ void adamw_step(
    Pack<W>& p, Pack<W>& m, Pack<W>& v, Pack<W> g, AdamW a, bool decays, float norm) {
    float decay = decays ? a.weight_decay : 0.0f;
    float scale = a.clip > 0.0f && norm > a.clip ? a.clip / norm : 1.0f;
    for (int j = 0; j < W; j++) {
        g[j] *= scale;
        m[j] += a.rate1 * (g[j] - m[j]);
        v[j] += a.rate2 * (g[j] * g[j] - v[j]);
        float change = m[j] * a.correction1 / (sqrtf(v[j] * a.correction2) + a.eps);
        p[j] -= a.learning_rate * (change + decay * p[j]);
    }
}

// There are at most 32 `tensors`: tensor i lies at [starts[i], starts[i+1]) of the arenas. All have
// multiples of 32 numbers, so a thread's W numbers are in one: this finds it, by bisection.
__device__ int tensor_at(size_t i, const size_t* __restrict__ starts, int tensors) {
    int tensor = 0;
    for (int half = 16; half > 0; half /= 2)
        if (tensor + half < tensors && starts[tensor + half] <= i) tensor += half;
    return tensor;
}

// One step for all n parameters. decayed[i] says whether tensor i gets weight decay. Of a parameter
// it reads four fp32 numbers and writes three. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void adamw(
    real* __restrict__ params, low_half* __restrict__ low, const float* __restrict__ grads,
    float* __restrict__ m, float* __restrict__ v, const size_t* __restrict__ starts,
    const int* __restrict__ decayed, int tensors, size_t n, const AdamW* __restrict__ settings,
    const Verdict* __restrict__ verdict) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> g = load<W>(grads + i), p = load_master<W>(params, low, i);
    Pack<W> m1 = load<W>(m + i), m2 = load<W>(v + i);
    AdamW a = *settings;
    int tensor = tensor_at(i, starts, tensors);
    adamw_step(p, m1, m2, g, a, decayed[tensor], verdict->norm);
    if (!verdict->update) return;  // asked this late, it holds up no load
    store_master(params, low, i, p);
    store(m + i, m1);
    store(v + i, m2);
}

// ---- attention (Vaswani et al. 2017, section 3.2.1), by tiles (Dao 2023, algorithms 1 and 2) ----
// Attention is the only layer in which a token sees others: those before it. For each head, with
// q, k, v (T,HS) of qkv (B,T,NH+2NKV,HS), ' for a transpose, and scale = 1/sqrt(HS):
//   attention_forward      weight (T,T) = softmax(scale * q k') over the keys s <= t of query t
//                          out (B,T,NH,HS) = weight v
//   attention_backward_q   dscore = weight * (dout v' - delta), delta = out * dout, summed over HS
//                          dq = scale dscore k
//   attention_backward_kv  dk = scale dscore' q, dv = weight' dout
// In GPT-2 NKV = NH. That is all for a first evening; the rest is how a GPU does it.
//
// Scores and weights never go to memory. A block owns B_r rows of a head, queries or keys, and
// walks over the other side in tiles of B_c rows, which pass through shared memory: while it works
// on one, the next is on its way. Here with four blocks a head, and tiles as large as blocks:
//
//           keys  0  1  2  3
//    queries  0   \  .  .  .   last to start    #  all keys of the tile are seen
//             1   #  \  .  .                    \  the diagonal runs through the tile
//             2   #  #  \  .                    .  no key is seen: the tile is skipped
//             3   #  #  #  \   first to start
//
// A block of queries walks along its row, a block of keys down its column, and the long ones start
// first: short ones fill the gaps at the end. For T = 1024 and 384 heads, with B_r = 128 queries
// and B_c = 64 keys (bf16 on an A100):
//   blocks   0 to  63   queries 896 to 1023 of heads 0 to 63   walk over 16 tiles
//   ...
//   blocks 448 to 511   queries   0 to  127 of heads 0 to 63   walk over  2 tiles
//   blocks 512 to 575   queries 896 to 1023 of heads 64 to 127 ...
// So the keys and values of 64 heads, 16 MB, stay in L2.

#ifndef HOPPER
#define HOPPER 0
#endif
// For dev/: GROUP neighbouring heads of queries share keys and values (Ainslie et al. 2023); with
// RELU, weight = max(0, scale * score).
#ifndef GROUP
#define GROUP 1
#endif
#ifndef RELU
#define RELU 0
#endif

// ---- attention: sizes, and what a block owns ----
// The paper's names, and their values, but for Turing:
//                                        HS = 64: bf16 fp32 Hopper   HS = 128: bf16 fp32 Hopper
//   B_r       rows that a block owns              128   64     64                64   64    128
//   B_c       rows of a tile, forward              64   64     64                64   32     64
//   B_c_BACK  rows of a tile, backward             32   32     64                32   16     64
// A block of attention_backward_kv owns keys: there the paper has the two names swapped. A product
// has the rows of a slab: a warp's or, on Hopper, the 64 of a warpgroup, four warps together.
constexpr int HP_STEP = HOPPER ? 64 : 16;
constexpr int HP = (HS + HP_STEP - 1) / HP_STEP * HP_STEP;  // HS padded, with zeros
constexpr int M = !HOPPER && sizeof(real) == 2 && HP <= 64 ? 2 : 1;  // a warp has 16 M rows
constexpr int WARPS = HOPPER && HP == 128 ? 8 : 4;  // of a block
constexpr int THREADS = 32 * WARPS;
constexpr int B_r = 16 * M * WARPS;
constexpr bool SHORT_TILES = TURING || HP * sizeof(real) > 256;  // 64 rows exceed 64 or 99 KB
constexpr int B_c = SHORT_TILES ? 32 : 64;
constexpr int B_c_BACK = HOPPER ? 64 : SHORT_TILES ? 16 : 32;
constexpr int SLAB = HOPPER ? 64 : 16 * M;
constexpr bool SWIZZLED = HOPPER || HP % 128 == 0 || (HP == 64 && sizeof(real) == 2);
constexpr int LD = SWIZZLED ? HP : HP + 8;  // a tile's leading dimension: see in_tile
constexpr int SECTION = 64;  // heads at a time, so that their tiles stay in L2
constexpr int HEAD_PACK = HS % W == 0 ? W : 1;  // channels that a thread copies at once
constexpr int HEAD_LANES = HP / HEAD_PACK <= 8 ? 8 : HP / HEAD_PACK <= 16 ? 16 : 32;  // per row
// Blocks per multiprocessor, of Hopper's 227 KB and 64K registers: forward 5 of 40 KB with 96
// registers or, for HS = 128, 2 of 96 KB with 128; backward 4 of 48 KB with 128, and 3 with 168.
constexpr int FORWARD_BLOCKS = !HOPPER ? 1 : WARPS == 4 ? 5 : 2;
constexpr int BACKWARD_Q_BLOCKS = HOPPER && WARPS == 4 ? 4 : 1;
constexpr int BACKWARD_KV_BLOCKS = HOPPER && WARPS == 4 ? 3 : 1;
// A block alone on a multiprocessor overlaps products with each other: see attention_backward_kv.
constexpr bool OVERLAP = HOPPER && WARPS == 8;
constexpr int BACKWARD_STAGES = OVERLAP ? 3 : 2;

// For the host: a block's rows, its threads, its bytes of shared memory, forward and backward.
extern "C" { __constant__ int attention_sizes[] = {
    B_r, THREADS, (B_r + 4 * B_c) * LD * (int)sizeof(real),
    (2 * B_r + 2 * BACKWARD_STAGES * B_c_BACK) * LD * (int)sizeof(real)}; }

// Head h of sequence b, in an array (B,T,heads,HS). Row t is at at(t), and in lse at stat_at(t).
struct Head {
    int b, h, heads, T;
    __device__ size_t at(int t) const { return (((size_t)b * T + t) * heads + h) * HS; }
    __device__ size_t stat_at(int t) const { return ((size_t)b * heads + h) * T + t; }
};

// What a block owns: B_r queries or B_r keys. With GROUP, `queries` is the first head of a group.
struct Own {
    int first, slab_first, warp_first;  // rows: of the block, of this slab, of this warp
    Head queries, keys, values, out;  // in GPT-2 heads h, NH + h and 2 NH + h of qkv, and h of out
};

// GPUs start blocks in order: section by section of heads, and in each the longest blocks first.
template <bool rows_are_keys>
__device__ Own own_rows(int T, int NH) {
    int blocks = (T + B_r - 1) / B_r, heads = gridDim.x / blocks;  // of a head; of all sequences
    int section = blockIdx.x / (SECTION * blocks) * SECTION, i = blockIdx.x - section * blocks;
    int heads_here = min(SECTION, heads - section);  // fewer in the last section
    int head = section + i % heads_here, turn = i / heads_here;
    int first = (rows_are_keys ? turn : blocks - 1 - turn) * B_r;
    int warp_row = threadIdx.x / 32 * 16 * M, slab_row = 0;  // in the block
    if (B_r > SLAB)  // a shuffle tells the compiler that all lanes have the same
        slab_row = __shfl_sync(FULL_WARP, warp_row / SLAB * SLAB, 0);

    int NKV = NH / GROUP, of_sequence = rows_are_keys ? NKV : NH, qkv_heads = NH + 2 * NKV;
    int b = head / of_sequence, nth = head % of_sequence;
    int h = rows_are_keys ? nth * GROUP : nth, kv = rows_are_keys ? nth : nth / GROUP;
    Head queries = {b, h, qkv_heads, T}, keys = {b, NH + kv, qkv_heads, T};
    Head values = {b, NH + NKV + kv, qkv_heads, T}, out = {b, h, NH, T};
    return {first, first + slab_row, first + warp_row, queries, keys, values, out};
}

template <int rows>
struct Stages {
    real* tiles;  // (stages, 2, rows, LD)
    __device__ real* left(int stage) { return tiles + 2 * stage * rows * LD; }
    __device__ real* right(int stage) { return left(stage) + rows * LD; }
};

// A block of the backward pass is at row `row` of head `head`, whose tile is in `stage`. It walks
// over rows first..end-1 of `heads` heads, in GPT-2 one.
struct Walk {
    int first, end, heads;
    int row, head, stage;
    __device__ bool next() {  // goes to the next tile, if there is one
        stage = (stage + 1) % BACKWARD_STAGES;
        row += B_c_BACK;
        if (row >= end) {
            row = first;
            head++;
        }
        return head < heads;
    }
};
__device__ Walk walk_of(int first, int end, int heads) { return {first, end, heads, first, 0, 0}; }

// ---- attention: six functions, written after the kernels ----
//                        portable                   Hopper                     Turing
//   in_tile              rows padded or packs moved boxes, with packs moved    portable
//   load_tile            threads start copies       thread 0 asks for boxes    copies at once
//   wait_for_tiles       own copies, then the block mbarrier, then the block   the block
//   multiply_transposed  done when it returns       starts: the tensor cores   portable, without
//   multiply             done when it returns       go on by themselves        tensor cores
//   wait_for_products    nothing                    for the tensor cores       nothing

// TileMap describes an array (B,T,heads,HS), to copy tiles from. Arrivals: how to wait for them.
#if HOPPER
struct alignas(64) TileMap { unsigned char map[128]; };  // a CUtensorMap
struct Arrivals { unsigned long long* mbarrier; int parity; };
#else
struct TileMap { const real* numbers; };
struct Arrivals {};
#endif

// in_tile is the index of (row, c). All threads call the others: load_tile starts to copy rows
// first..first+rows-1 of a head, zeros beyond T and HS; wait_for_tiles waits for all tiles and
// threads.
__device__ int in_tile(int row, int c);
template <int rows>
__device__ void load_tile(
    real* tile, const TileMap& array, Head head, int first, Arrivals& arrivals);
__device__ Arrivals arrivals_start();
__device__ void wait_for_tiles(Arrivals& arrivals);

// A tensor core multiplies small matrices in a warp's registers: D (16,8) += A (16,16) B (16,8).
// The numbers in the picture are lanes: lane 4g + q has rows g and g+8, and column g of B.
//
//   A  columns 0,1 2,3 4,5 6,7  8,9 .. 14,15   B  column  0  1 ..  7    D  columns 0,1 2,3 4,5 6,7
//   row  0       0   1   2   3    0  ..  3     rows  0,1  0  4 .. 28    row  0       0   1   2   3
//        1       4   5   6   7    4  ..  7           2,3  1  5 .. 29         1       4   5   6   7
//       ...         a[0]            a[2]       b[0]  4,5  2  6 .. 30        ...     d[0] and d[1]
//        7      28  29  30  31   28  .. 31           6,7  3  7 .. 31         7      28  29  30  31
//        8       0   1   2   3    0  ..  3           8,9  0  4 .. 28         8       0   1   2   3
//       ...         a[1]            a[3]       b[1]  ...                    ...     d[2] and d[3]
//       15      28  29  30  31   28  .. 31         14,15  3  7 .. 31        15      28  29  30  31
//
// Two D side by side, taken in pairs, are the A of a next product: weights stay in registers. A
// Result (16 M, columns) is many D. This lane's x[e] is in row e.row() and column e.column().
__device__ int row_of(int m, int i) { return 16 * m + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ int column_of(int n, int i) { return 8 * n + 2 * (threadIdx.x % 4) + i % 2; }
struct Element {
    int m, n, i;
    __device__ int row() { return row_of(m, i); }
    __device__ int column() { return column_of(n, i); }
};
template <int columns>
struct Result {
    float x[M][columns / 8][4];
    __device__ float& operator[](Element e) { return x[e.m][e.n][e.i]; }
};
struct PerRow {  // a number for each row of these
    float x[M][2];
    __device__ float& operator[](Element e) { return x[e.m][e.i / 2]; }
};

// f(e) for each of a lane's elements; each_row: for the first in each of its rows.
template <int columns, class F>
__device__ void each(F f) {
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < columns / 8; n++)
            for (int i = 0; i < 4; i++) f(Element{m, n, i});
}
template <class F>
__device__ void each_row(F f) {
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) f(Element{m, 0, 2 * half});
}

// x = the slab's rows of `tile`, which the block owns, times the transpose of one it walks over.
template <int columns>
__device__ void multiply_transposed(
    Result<columns>& x, const Own& own, const real* tile, const real* other);
// sum += x times a tile.
template <int columns>
__device__ void multiply(Result<HP>& sum, Result<columns>& x, const real* tile);
// On Hopper both only start: the result (x, or multiply's sum) and the tiles must be left alone
// until this has waited for all products but the last `pending` that were started.
template <int pending, int columns>
__device__ void wait_for_products(Result<columns>& x);

// ---- attention: the kernels, after what they do to rows ----
#ifdef SIGHT  // for dev/: a query sees fewer keys
#include SIGHT
#else
__device__ int first_key(const Own& own) { return 0; }  // that the block's queries see
__device__ int end_of_queries(const Own& own) { return own.out.T; }  // that see its keys
// The causal mask: x = value where a query would see a later key. Column 0 of x is token `column`.
// Off the diagonal all are seen: the kernels skip tiles of which none is.
template <bool rows_are_keys, int columns>
__device__ void hide_future(Result<columns>& x, float value, const Own& own, int column) {
    if (column >= own.slab_first + SLAB || column + columns <= own.slab_first) return;
    each<columns>([&](Element e) {
        int r = own.warp_first + e.row(), c = column + e.column();
        if (rows_are_keys ? r > c : c > r) x[e] = value;
    });
}
#endif

__device__ float relu_of(float x) { return x <= 0.0f ? 0.0f : x; }  // a NaN stays
// Weights from scores, in place: 2^(scale * log2(e) * score - shift(e)), or ReLU's.
template <int columns, class F>
__device__ void weights_from_scores(Result<columns>& x, float scale, F shift) {
    if (RELU) each<columns>([&](Element e) { x[e] = relu_of(scale * x[e]); });
    else each<columns>([&](Element e) { x[e] = power_of_2(scale * LOG2_E * x[e] - shift(e)); });
}

// dscores from dweights, in place, or ReLU's. The factor scale comes at the end.
template <int columns, class F>
__device__ void dscores_from_dweights(Result<columns>& x, Result<columns>& weights, F delta) {
    if (RELU) each<columns>([&](Element e) { x[e] = weights[e] <= 0.0f ? 0.0f : x[e]; });
    else each<columns>([&](Element e) { x[e] = weights[e] * (x[e] - delta(e)); });
}

// Returns and stores the paper's D, delta, of each row; fetches out while dout is on its way.
__device__ PerRow delta_of_rows(
    float* delta, const real* out, const real* douts, const Own& own, Arrivals& arrivals) {
    // Lanes l and l + 16 take the packs of row l by turns.
    constexpr int packs = (HS + 2 * HEAD_PACK - 1) / (2 * HEAD_PACK);
    int lane = threadIdx.x % 32, T = own.out.T;
    auto channel = [&](int k) { return (2 * k + lane / 16) * HEAD_PACK; };
    Pack<HEAD_PACK> outs[M][packs];
    for (int m = 0; m < M; m++)
        for (int k = 0; k < packs; k++) {
            int t = min(own.warp_first + 16 * m + lane % 16, T - 1), c = channel(k);
            outs[m][k] = {};
            if (c < HS) outs[m][k] = load<HEAD_PACK>(out + own.out.at(t) + c);
        }
    wait_for_tiles(arrivals);
    PerRow result;
    for (int m = 0; m < M; m++) {
        int row = own.warp_first + 16 * m + lane % 16;
        float sum = 0.0f;
        for (int k = 0; k < packs; k++) {
            Pack<HEAD_PACK> y = load<HEAD_PACK>(douts + in_tile(row - own.first, channel(k)));
            for (int j = 0; j < HEAD_PACK; j++) sum += outs[m][k][j] * y[j];
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        if (lane < 16 && row < T) delta[own.out.stat_at(row)] = sum;
        for (int half = 0; half < 2; half++)
            result.x[m][half] = __shfl_sync(FULL_WARP, sum, row_of(0, 2 * half));
    }
    return result;
}

// Stores x in a head's rows of an array, by way of a tile, now free; HEAD_LANES lanes a row.
__device__ void store_rows(Output& array, Head head, const Own& own, real* tile, Result<HP>& x) {
    int in_block = own.warp_first - own.first, lane = threadIdx.x % 32;
    __syncthreads();  // no product reads a tile any more
#pragma unroll
    for (int n = 0; n < HP / 8; n++)
        each_row([&](Element e) {
            Pack<2> two = {x[{e.m, n, e.i}], x[{e.m, n, e.i + 1}]};
            store(tile + in_tile(in_block + e.row(), column_of(n, 0)), two);
        });
    __syncwarp();
    for (int c = lane % HEAD_LANES * HEAD_PACK; c < HS; c += HEAD_LANES * HEAD_PACK) {
#pragma unroll
        for (int r = 0; r < 16 * M; r += 32 / HEAD_LANES) {
            int row = in_block + r + lane / HEAD_LANES, t = own.first + row;
            Pack<HEAD_PACK> pack = load<HEAD_PACK>(tile + in_tile(row, c));
            if (t < head.T) array.store(head.at(t) + c, pack);
        }
    }
    array.sum_columns(head, own, tile);
}

// A block goes through its tiles in turns. Before each, wait_for_tiles is a barrier: the tile is
// there, and nobody reads the one before any more (with OVERLAP: the one before that), whose stage
// the next tile may take. A slab that has nothing to do in a turn still meets the others there.
//
//              | turn 0          | turn 1          | turn 2          |
//     stage 0  | multiply tile 0 | tile 2 arrives  | multiply tile 2 |
//     stage 1  | tile 1 arrives  | multiply tile 1 | tile 3 arrives  |

// Algorithm 1, whose lines stand on the right, without scale, and with e^x for 2^(x log2(e)). (Its
// line 10 has a ^-1 too many.) When a maximum grows, what was summed is scaled (Milakov and
// Gimelshein 2018, algorithm 3). For the backward pass lse (B,NH,T), the paper's L, is log2 of the
// sum of 2^(scale * log2(e) * score); with RELU nothing. Items: blocks of B_r queries.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) attention_forward(
    Output out, float* __restrict__ lse, const __grid_constant__ TileMap qkv, float scale, int T,
    int NH) {
    DYNAMIC_SHARED(real, queries);  // (B_r, LD)
    Stages<B_c> stages = {queries + B_r * LD};  // of keys and values
    Arrivals arrivals = arrivals_start();
    Own own = own_rows<false>(T, NH);
    load_tile<B_r>(queries, qkv, own.queries, own.first, arrivals);
    auto load_keys = [&](int stage, int key) {
        load_tile<B_c>(stages.left(stage), qkv, own.keys, key, arrivals);
        load_tile<B_c>(stages.right(stage), qkv, own.values, key, arrivals);
    };
    load_keys(0, first_key(own));
    Result<HP> output = {};
    PerRow maximum, total = {};
    each_row([&](Element e) { maximum[e] = LOWEST; });      // O = 0, l = 0, m = -inf
    float scale2 = scale * LOG2_E;  // for 2^x instead of e^x
    int end = min(own.first + B_r, T);
    for (int key = first_key(own), stage = 0; key < end; key += B_c, stage ^= 1) {
        wait_for_tiles(arrivals);
        if (key + B_c < end) load_keys(stage ^ 1, key + B_c);
        if (key >= own.slab_first + SLAB) continue;  // no query of the slab sees these keys
        const real *keys = stages.left(stage), *values = stages.right(stage);
        Result<B_c> scores;
        auto& weights = scores;                             // computed in place
        multiply_transposed(scores, own, queries, keys);    // S = Q K'
        wait_for_products<0>(scores);
        hide_future<false>(scores, LOWEST, own, key);
        PerRow before = maximum, correction;
        if (!RELU)
            each_row([&](Element e) {                       // m = max(m, rowmax(S))
                float top = maximum[e];
#pragma unroll
                for (int n = 0; n < B_c / 8; n++)
                    top = fmaxf(top, fmaxf(scores[{e.m, n, e.i}], scores[{e.m, n, e.i + 1}]));
                maximum[e] = warp_max<4>(top);
            });
        weights_from_scores(scores, scale,                  // P = e^(S - m)
                            [&](Element e) { return scale2 * maximum[e]; });
        if (!RELU) {
            PerRow sum = {};  // this lane's part
            each<B_c>([&](Element e) { sum[e] += weights[e]; });
            each_row([&](Element e) {                       // l = e^(before - m) l + rowsum(P)
                correction[e] = power_of_2(scale2 * (before[e] - maximum[e]));
                total[e] = total[e] * correction[e] + sum[e];
            });
            each<HP>([&](Element e) { output[e] *= correction[e]; });  // O = diag(e^(before - m)) O
        }
        multiply(output, weights, values);                  // O = O + P V
        wait_for_products<0>(output);
    }

    PerRow inverse;
    each_row([&](Element e) {
        int t = own.warp_first + e.row();
        float sum = RELU ? 1.0f : quad_sum(total[e]);
        inverse[e] = 1.0f / sum;
        if (e.column() == 0 && t < T)
            lse[own.out.stat_at(t)] = scale2 * maximum[e] + log2f(sum);  // L = m + log(l)
    });
    each<HP>([&](Element e) { output[e] *= inverse[e]; });  // O = diag(l)^-1 O
    out.begin();
    store_rows(out, own.out, own, queries, output);
    out.end();
}

// Algorithm 2, as two kernels: seven products instead of five, but sums have a fixed order. A block
// owns queries, for dq, and leaves delta (B,NH,T) for the next one. Items: blocks of B_r queries.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_Q_BLOCKS) attention_backward_q(
    Output dqkv, float* __restrict__ delta, const float* __restrict__ lse,
    const real* __restrict__ out, const __grid_constant__ TileMap qkv,
    const __grid_constant__ TileMap dout, float scale, int T, int NH) {
    DYNAMIC_SHARED(real, queries);  // queries and dout: (2, B_r, LD)
    real* douts = queries + B_r * LD;
    Stages<B_c_BACK> stages = {douts + B_r * LD};  // of keys and values
    Arrivals arrivals = arrivals_start();
    Own own = own_rows<false>(T, NH);
    load_tile<B_r>(queries, qkv, own.queries, own.first, arrivals);
    load_tile<B_r>(douts, dout, own.out, own.first, arrivals);
    auto load_keys = [&](const Walk& to) {
        load_tile<B_c_BACK>(stages.left(to.stage), qkv, own.keys, to.row, arrivals);
        load_tile<B_c_BACK>(stages.right(to.stage), qkv, own.values, to.row, arrivals);
    };
    Walk walk = walk_of(first_key(own), min(own.first + B_r, T), 1);
    load_keys(walk);
    PerRow row_delta = delta_of_rows(delta, out, douts, own, arrivals), row_lse;  // D = sum dO o O
    each_row([&](Element e) {
        row_lse[e] = lse[own.out.stat_at(min(own.warp_first + e.row(), T - 1))];
    });

    Result<HP> dq = {};
    // Not a for, which may run zero times: to join that path behind the loop, ptxas would move dq's
    // registers while products run, and so serialize the products. `continue` goes to walk.next().
    do {
        wait_for_tiles(arrivals);  // at once in the first turn: delta_of_rows has waited
        Walk ahead = walk;
        if (ahead.next()) load_keys(ahead);
        if (walk.row >= own.slab_first + SLAB) continue;  // no query of the slab sees these keys
        const real *keys = stages.left(walk.stage), *values = stages.right(walk.stage);
        Result<B_c_BACK> scores, dweights;
        auto &weights = scores, &dscores = dweights;        // computed in place
        multiply_transposed(scores, own, queries, keys);    // S = Q K'
        multiply_transposed(dweights, own, douts, values);  // dP = dO V'
        wait_for_products<1>(scores);
        weights_from_scores(scores, scale,                  // P = e^(S - L)
                            [&](Element e) { return row_lse[e]; });
        hide_future<false>(weights, 0.0f, own, walk.row);
        wait_for_products<0>(dweights);
        dscores_from_dweights(dweights, weights,            // dS = P o (dP - D)
                              [&](Element e) { return row_delta[e]; });
        multiply(dq, dscores, keys);                        // dQ = dQ + dS K
        // With OVERLAP this product is done when the next tile's S is, one turn before its stage is
        // loaded again. (A slab skips only the last tile, after which nothing is loaded.)
        if (!OVERLAP) wait_for_products<0>(dq);
    } while (walk.next());
    wait_for_products<0>(dq);
    each<HP>([&](Element e) { dq[e] *= scale; });
    dqkv.begin();
    store_rows(dqkv, own.queries, own, queries, dq);
    dqkv.end();
}

// A block owns keys and walks over the queries that see them, for dk and dv. Scores are transposed
// here: a row is a key. Items: blocks of B_r keys.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_KV_BLOCKS) attention_backward_kv(
    Output dqkv, const float* __restrict__ delta, const float* __restrict__ lse,
    const __grid_constant__ TileMap qkv, const __grid_constant__ TileMap dout, float scale, int T,
    int NH) {
    DYNAMIC_SHARED(real, keys);  // keys and values: (2, B_r, LD)
    real* values = keys + B_r * LD;
    Stages<B_c_BACK> stages = {values + B_r * LD};  // of queries and dout
    __shared__ float of_query[BACKWARD_STAGES][2][B_c_BACK];  // of each stage lse, then delta
    static_assert(THREADS >= 2 * B_c_BACK);
    Arrivals arrivals = arrivals_start();
    Own own = own_rows<true>(T, NH);
    auto load_queries = [&](const Walk& to) {
        Head query_head = own.queries, out_head = own.out;
        query_head.h += to.head;
        out_head.h += to.head;
        load_tile<B_c_BACK>(stages.left(to.stage), qkv, query_head, to.row, arrivals);
        load_tile<B_c_BACK>(stages.right(to.stage), dout, out_head, to.row, arrivals);
        int i = threadIdx.x % B_c_BACK, which = threadIdx.x / B_c_BACK, t = to.row + i;
        if (which < 2)  // beyond T a weight is 2^0, and dout is 0
            copy4(&of_query[to.stage][which][i],
                  (which ? delta : lse) + out_head.stat_at(0) + min(t, T - 1), t < T);
    };
    load_tile<B_r>(keys, qkv, own.keys, own.first, arrivals);
    load_tile<B_r>(values, qkv, own.values, own.first, arrivals);
    Walk walk = walk_of(own.first, end_of_queries(own), GROUP);
    load_queries(walk);

    // With OVERLAP, tensor cores go through these products. At a | all but the last are done:
    //     S dP | dV | dK  S dP | dV | dK  S dP | dV | dK
    //     tile 0          tile 1          tile 2
    // So when tile i begins, all of tile i-2 is done, and its stage may take tile i+1.
    Result<HP> dk = {}, dv = {};
    do {
        wait_for_tiles(arrivals);
        Walk ahead = walk;
        if (ahead.next()) load_queries(ahead);
        if (walk.row + B_c_BACK <= own.slab_first) continue;  // they see no key of the slab
        const real *queries = stages.left(walk.stage), *douts = stages.right(walk.stage);
        const float *lse_of = of_query[walk.stage][0], *delta_of = of_query[walk.stage][1];
        Result<B_c_BACK> scores, dweights;
        auto &weights = scores, &dscores = dweights;        // computed in place
        multiply_transposed(scores, own, keys, queries);    // S' = K Q'
        multiply_transposed(dweights, own, values, douts);  // dP' = V dO'
        wait_for_products<1>(scores);
        weights_from_scores(scores, scale,                  // P' = e^(S' - L)
                            [&](Element e) { return lse_of[e.column()]; });
        hide_future<true>(weights, 0.0f, own, walk.row);
        if (OVERLAP) multiply(dv, weights, douts);          // dV = dV + P' dO, here or below
        wait_for_products<OVERLAP ? 1 : 0>(dweights);
        dscores_from_dweights(dweights, weights,            // dS' = P' o (dP' - D)
                              [&](Element e) { return delta_of[e.column()]; });
        // This changes no number, as weights are 0 there. But without its branch ptxas (13.0, 13.5)
        // runs out of 168 registers for HS = 64 on Hopper, and serializes the products.
        hide_future<true>(dscores, 0.0f, own, walk.row);
        if (!OVERLAP) multiply(dv, weights, douts);
        multiply(dk, dscores, queries);                     // dK = dK + dS' Q
        // Also before a group's next head: a slab may skip the first tile, and so the wait there.
        if (!OVERLAP || (GROUP > 1 && walk.row + B_c_BACK >= walk.end)) {
            wait_for_products<0>(dv);
            wait_for_products<0>(dk);
        }
    } while (walk.next());
    wait_for_products<0>(dv);
    wait_for_products<0>(dk);
    each<HP>([&](Element e) { dk[e] *= scale; });
    dqkv.begin();
    store_rows(dqkv, own.keys, own, keys, dk);
    store_rows(dqkv, own.values, own, values, dv);
    dqkv.end();
}

// ---- attention: the six functions, portable ----
#if !HOPPER
// Loads read the same column of 8 neighbouring rows at once, which should be in different banks: LD
// exceeds HP, or packs of 8 numbers change places, in each row in another way, which takes no more
// memory: two blocks of heads of 64 fit into 100 KB. fp32's load_b conflicts two-way.
__device__ int in_tile(int row, int c) { return row * LD + (SWIZZLED ? c ^ (row % 8 * 8) : c); }

template <int rows>
__device__ void load_tile(real* tile, const TileMap& array, Head head, int first, Arrivals&) {
    constexpr int packs = HP / HEAD_PACK;  // of a row
    const real* numbers = array.numbers + head.at(first);
#pragma unroll
    for (int start = 0; start < rows * packs; start += THREADS) {
        int i = start + threadIdx.x, row = i / packs, c = i % packs * HEAD_PACK;
        if (rows * packs % THREADS > 0 && i >= rows * packs) break;
        bool there = first + row < head.T && c < HS;
        real* to = tile + in_tile(row, c);
        const real* from = there ? numbers + row * head.heads * HS + c : numbers;
        if (HEAD_PACK == W) copy16(to, from, there);
        else if (there) *to = *from;
        else from_float(*to, 0.0f);
    }
}

__device__ Arrivals arrivals_start() { return {}; }
__device__ void wait_for_tiles(Arrivals&) {
    copies_end();
    wait_for_copies<0>();
    __syncthreads();
}
#endif

// Two neighbours along the summed index, in bf16 in one register.
#ifdef BF16
using Pair = unsigned;
__device__ Pair pair(float x, float y) { return two_bf16(x, y); }
#else
struct alignas(8) Pair { float x, y; };
__device__ Pair pair(float x, float y) { return {x, y}; }
#endif

#if TURING  // has no mma for fp32: see the end
__device__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4],
                         const Pair (&b)[4]);
#elif defined(__CUDACC__)
#ifdef BF16  // one instruction
__device__ void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Loads four 8 x 8 matrices of bf16 from shared memory. Lane i gives the address of row i % 8 of
// matrix i / 8. Of each it gets elements 2q and 2q+1 of row g, or, transposed, of column g.
__device__ void load_matrices(unsigned (&x)[4], const real* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row)));
}
__device__ void load_matrices_transposed(unsigned (&x)[4], const real* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(shared_address(row)));
}
#else  // fp32 and TF32: two products of 8 summed columns
__device__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// This instruction takes a lane's two numbers for columns q and q+4. We pass 2q and 2q+1, in A and
// in B: the sum is permuted alike in both. It reads the upper 10 bits of a mantissa; half of the
// last is added first, to round.
__device__ void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2]) {
    constexpr unsigned half_of_last_bit = 0x1000;
    for (int i = 0; i < 2; i++) {
        float x[6] = {a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b[i].x, b[i].y};
        unsigned big[6];
        for (int j = 0; j < 6; j++) big[j] = __float_as_uint(x[j]) + half_of_last_bit;
#ifdef TF32  // max keeps a GPU's NaN, 0x7fffffff, which would overflow to -0
        for (int j = 0; j < 6; j++) big[j] = max((int)big[j], __float_as_int(x[j]));
#else   // x = big + small, three products. small * small is below the last bit (Ootomo and
        // Yokota 2022, section 3). A NaN stays one in small.
        unsigned small[6];
        for (int j = 0; j < 6; j++) {
            big[j] &= ~(2 * half_of_last_bit - 1);
            small[j] = __float_as_uint(x[j] - __uint_as_float(big[j]));
        }
        mma_tf32(d, {small[0], small[1], small[2], small[3]}, {big[4], big[5]});
        mma_tf32(d, {big[0], big[1], big[2], big[3]}, {small[4], small[5]});
#endif
        mma_tf32(d, {big[0], big[1], big[2], big[3]}, {big[4], big[5]});
    }
}
#endif

// mma with two B side by side, b[0..1] and b[2..3]: left and right are the two D.
__device__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4],
                         const Pair (&b)[4]) {
    mma(left, a, {b[0], b[1]});
    mma(right, a, {b[2], b[3]});
}
#endif

// A from columns 16 j..16 j + 15 of a result.
template <int n>
__device__ void a_from_result(Pair (&a)[4], const float (&x)[n][4], int j) {
    for (int i = 0; i < 4; i++) {
        const float(&d)[4] = x[2 * j + i / 2];
        a[i] = pair(d[i % 2 * 2], d[i % 2 * 2 + 1]);
    }
}

#if !HOPPER
// A square of a tile, rows r..r+15 and channels c..c+15: as an A or, as_b, as two B side by side
// whose columns are the tile's rows. Either way x[i] is a quarter of it:
//     as an A      x[0]  x[2]      as two B      x[0]  x[1]      rows r..r+7
//                  x[1]  x[3]                    x[2]  x[3]      rows r+8..r+15
template <bool as_b>
__device__ void load_square(Pair (&x)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    int odd = lane / 8 % 2 * 8, high = lane / 16 * 8;  // of quarter lane / 8
    load_matrices(x, tile + in_tile(r + lane % 8 + (as_b ? high : odd), c + (as_b ? odd : high)));
#else
    for (int i = 0; i < 4; i++) {
        int odd = i % 2 * 8, high = i / 2 * 8, row = r + lane / 4 + (as_b ? high : odd);
        int channel = c + 2 * (lane % 4) + (as_b ? odd : high);
        x[i] = *reinterpret_cast<const Pair*>(tile + in_tile(row, channel));
    }
#endif
}

// The same square as two B side by side whose rows are the tile's rows.
__device__ void load_b(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices_transposed(b, tile + in_tile(r + lane % 16, c + lane / 16 * 8));
#else
    for (int i = 0; i < 4; i++) {
        int row = r + 2 * (lane % 4) + i % 2 * 8, channel = c + lane / 4 + i / 2 * 8;
        b[i] = {tile[in_tile(row, channel)], tile[in_tile(row + 1, channel)]};
    }
#endif
}

// A B that a warp loads serves all of its 16 M rows: M = 2 almost halves the reads.
template <int columns>
__device__ void multiply_transposed(
    Result<columns>& x, const Own& own, const real* tile, const real* other) {
    x = {};
#pragma unroll
    for (int c = 0; c < HP; c += 16) {
        Pair a[M][4], b[4];
        for (int m = 0; m < M; m++)
            load_square<false>(a[m], tile, own.warp_first - own.first + 16 * m, c);
#pragma unroll
        for (int n = 0; n < columns / 16; n++) {
            load_square<true>(b, other, 16 * n, c);
            for (int m = 0; m < M; m++) mma_pair(x.x[m][2 * n], x.x[m][2 * n + 1], a[m], b);
        }
    }
}

template <int columns>
__device__ void multiply(Result<HP>& sum, Result<columns>& x, const real* tile) {
#pragma unroll
    for (int j = 0; j < columns / 16; j++) {
        Pair a[M][4], b[4];
        for (int m = 0; m < M; m++) a_from_result(a[m], x.x[m], j);
#pragma unroll
        for (int n = 0; n < HP / 16; n++) {
            load_b(b, tile, 16 * j, 16 * n);
            for (int m = 0; m < M; m++) mma_pair(sum.x[m][2 * n], sum.x[m][2 * n + 1], a[m], b);
        }
    }
}

template <int pending, int columns>
__device__ void wait_for_products(Result<columns>&) {}
#endif

// ---- Faster on Hopper: attention's products by wgmma, its tiles by TMA ----
// Here the tensor cores read tiles from shared memory while the threads go on, and TMA, an engine
// for copies, brings them. Two warpgroups share tiles of 128 channels, or L2 would not keep up.
#if HOPPER
static_assert(sizeof(real) == 2 && HS % 8 == 0 && HS >= 64 && HS <= 128, "bf16, HS 64 to 128");

// A tile consists of boxes of 64 rows and 64 channels; the next 64 channels follow a box. Packs
// change places as in the portable in_tile: the manual calls it the 128-byte swizzle.
__device__ int in_tile(int row, int c) {
    constexpr int box = 64 * 64;
    return (row / 64 * (HP / 64) + c / 64) * box + row % 64 * 64 + (c % 64 ^ (row % 8 * 8));
}

#ifdef __CUDACC__
// An mbarrier counts bytes on their way, phase after phase. A phase ends when no byte is missing
// and thread 0 has arrived, which it does when it has started all of the phase's copies: else the
// phase could end between two of them. Threads wait for a phase by its parity: 0, 1, 0, 1 ..
__device__ void mbarrier_start(unsigned long long& mbarrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.proxy.async.shared::cta;"
                 ::"r"(shared_address(&mbarrier)) : "memory");  // TMA sees it, too
}
__device__ void mbarrier_arrive(unsigned long long& mbarrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
                 ::"r"(shared_address(&mbarrier)) : "memory");
}
__device__ void mbarrier_wait(unsigned long long& mbarrier, int parity) {
    asm volatile("{.reg .pred done; again: "
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 ::"r"(shared_address(&mbarrier)), "r"(parity) : "memory");
}
// Starts to copy a box, 8,192 bytes: tokens t..t+63 of a head, with zeros beyond T and HS.
__device__ void copy_box(real* box, const TileMap* map, int channel, int head, int t, int b,
                         unsigned long long& mbarrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 8192;"
                 ::"r"(shared_address(&mbarrier)) : "memory");
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(shared_address(box)), "l"(map), "r"(channel), "r"(head), "r"(t), "r"(b),
                   "r"(shared_address(&mbarrier))
                 : "memory");
}

// An address in shared memory, in units of 16 bytes.
__device__ unsigned address16(const real* tile) { return shared_address(tile) / 16; }
#define FLOATS4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define FLOATS32(x) FLOATS4(x[0]), FLOATS4(x[1]), FLOATS4(x[2]), FLOATS4(x[3]), \
                    FLOATS4(x[4]), FLOATS4(x[5]), FLOATS4(x[6]), FLOATS4(x[7])
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " \
              "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
              "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "

// D (64,64) = A (64,16) B (16,64), or with `add` D += A B. Each warp has 16 rows of D, in eight d
// as for mma. a and b describe A and B': 16 channels of the rows of two tiles. The operands behind
// them: p, whether D is added; 1, 1, the signs of A and B; 0, 0, neither is stored transposed.
__device__ void wgmma(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;" WGMMA "%32, %33, p, 1, 1, 0, 0;}"
                 : FLOATS32(d) : "l"(a), "l"(b), "r"((int)add));
}
// D += A B. A is in registers as for mma. B (16,64) is 16 rows of a tile, 64 channels: the summed
// index goes down its rows, not along them, and so the last operand, 1, says transposed.
__device__ void wgmma_from_registers(float (*d)[4], const Pair (&a)[4], unsigned long long b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;"
                 WGMMA "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : FLOATS32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
// Makes the compiler compute A here, not where it is used, behind wgmma_fence.
__device__ void compute_now(Pair (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

// wgmma_fence goes before a group of products, which see the registers as they are then;
// wgmma_commit after it. Until wgmma_wait leaves at most `pending` groups under way, d (n8 =
// columns / 8) and A's registers are the tensor cores'. d is an operand of fence and wait, so that
// the compiler moves no use across; A's registers ptxas keeps itself.
template <int n8>
__device__ void wgmma_fence(float (&d)[1][n8][4]) {
#pragma unroll
    for (int n = 8; n < n8; n += 8) asm volatile("" : FLOATS32((d[0] + n)));
    asm volatile("wgmma.fence.sync.aligned;" : FLOATS32(d[0])::"memory");
}
__device__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending, int n8>
__device__ void wgmma_wait(float (&d)[1][n8][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : FLOATS32(d[0]) : "n"(pending) : "memory");
#pragma unroll
    for (int n = 8; n < n8; n += 8) asm volatile("" : FLOATS32((d[0] + n)));
}
#else
using namespace hopper;  // of dev/cpu
#endif

__device__ Arrivals arrivals_start() {
    __shared__ unsigned long long mbarrier;
    if (threadIdx.x == 0) mbarrier_start(mbarrier);
    __syncthreads();
    return {&mbarrier, 0};
}

// Thread 0 asks for boxes. If threads computed addresses, that would cost registers and a fifth of
// attention's time. The host describes an array by a tensor map, from cuTensorMapEncodeTiled, and
// passes it by value: in device memory it would need a fence.
template <int rows>
__device__ void load_tile(
    real* tile, const TileMap& array, Head head, int first, Arrivals& arrivals) {
#pragma unroll
    for (int row = 0; row < rows; row += 64)
#pragma unroll
        for (int c = 0; c < HP; c += 64)
            if (threadIdx.x == 0)
                copy_box(tile + in_tile(row, c), &array, c, head.h, first + row, head.b,
                         *arrivals.mbarrier);
}

__device__ void wait_for_tiles(Arrivals& arrivals) {
    copies_end();  // attention_backward_kv copies lse and delta without TMA
    wait_for_copies<0>();
    if (threadIdx.x == 0) mbarrier_arrive(*arrivals.mbarrier);
    mbarrier_wait(*arrivals.mbarrier, arrivals.parity);
    arrivals.parity ^= 1;
    __syncthreads();
}

// How wgmma finds a matrix in a tile. Bits 0 to 13 are its address, in units of 16 bytes; from bit
// 16 the leading byte offset, to a next box, which 64 columns do not need: a 1; from bit 32 the
// stride byte offset, 64 units from 8 rows of 128 bytes to the next; from bit 62 a 1: swizzled.
__device__ unsigned long long describe(unsigned address) {
    return address | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
// `by` units further on: other channels, or a multiple of 8 rows. One adds as if packs had not
// changed places, since the hardware does that itself with the sum: it exclusive-ors its bits 4 to
// 6 with bits 7 to 9, row % 8. So tiles begin at multiples of 1,024 bytes.
__device__ unsigned long long further(unsigned long long d, unsigned by) {
    return (d & 0xffffffff00000000) | ((unsigned)d + by);
}

template <int columns>
__device__ void multiply_transposed(
    Result<columns>& x, const Own& own, const real* tile, const real* other) {
    static_assert(columns == 64, "one wgmma has 64 columns");
    auto a = describe(address16(tile + (own.slab_first - own.first) * HP));
    auto b = describe(address16(other));
    wgmma_fence(x.x);
#pragma unroll
    for (int c = 0; c < HS; c += 16) {  // beyond HS are zeros
        int channels = in_tile(0, c) / W;
        wgmma(x.x[0], further(a, channels), further(b, channels), c > 0);
    }
    wgmma_commit();
}

template <int columns>
__device__ void multiply(Result<HP>& sum, Result<columns>& x, const real* tile) {
    auto b = describe(address16(tile));
    Pair a[columns / 16][4];
#pragma unroll
    for (int j = 0; j < columns / 16; j++) {
        a_from_result(a[j], x.x[0], j);
        compute_now(a[j]);
    }
    wgmma_fence(sum.x);
#pragma unroll
    for (int j = 0; j < columns / 16; j++)
#pragma unroll
        for (int c = 0; c < HP; c += 64)
            wgmma_from_registers(sum.x[0] + c / 8, a[j], further(b, in_tile(16 * j, c) / W));
    wgmma_commit();
}

template <int pending, int columns>
__device__ void wait_for_products(Result<columns>& x) { wgmma_wait<pending>(x.x); }
#endif

// ---- On Turing, without tensor cores for fp32 ----
#if TURING
// mma for two B side by side; the picture above Result shows who holds what. This lane, 4g + q,
// makes rows g and g+8 of D, in columns 2q and 2q+1. For each summed index it asks lane 4g + p for
// two numbers of A, and lanes 8q + p and 8q + 4 + p for those of B's two columns.
__device__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4],
                         const Pair (&b)[4]) {
    auto from = [](int lane, Pair x, int i) { return __shfl_sync(FULL_WARP, i ? x.y : x.x, lane); };
    int q = threadIdx.x % 4, row = threadIdx.x % 32 - q;
#pragma unroll 1
    for (int p = 0; p < 4; p++)
        for (int k = 0; k < 4; k++) {
            float upper = from(row + p, a[k & 2], k % 2), lower = from(row + p, a[k | 1], k % 2);
            for (int n = 0; n < 4; n++) {
                float column = from(8 * q + n % 2 * 4 + p, b[n / 2 * 2 + k / 2], k % 2);
                float(&d)[4] = n < 2 ? left : right;
                d[n % 2] = fmaf(upper, column, d[n % 2]);
                d[n % 2 + 2] = fmaf(lower, column, d[n % 2 + 2]);
            }
        }
}
#endif
