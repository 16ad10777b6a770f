/*
The hand-written kernels of a GPT-2 training step, in the order in which a step meets them, each forward next to its
backward; what a feature needs besides is in its own file under dev/. train_gpt2.py compiles this file with NVRTC for
a GPU, or with a C++ compiler and dev/cpu/cuda.h for a CPU. It reads the kernels' names, arguments and grids from this
text. A BLAS library multiplies the linear layers' matrices.

Sizes: B sequences of T tokens, N = B*T rows; C channels, a multiple of 32; V words, padded to Vp; NH heads of
HS = C/NH channels. Arrays are C-contiguous: the last index named is the fastest. Parameters, activations and their
gradients are real (fp32 or bf16). The residual stream, the gradients of parameters, and statistics are fp32. The file
is compiled for one model, with -DCHANNELS=C and -DHS=HS: so the length of a row is known, and it can lie in registers.

Rules that hold for all of them:
  - The gradient of a parameter is added to (+=), so that micro-batches add up. Before the first of them the host clears
    it, or a matrix product sets it.
  - An activation and its gradient are set (=). The residual stream is the exception, because two branches meet there:
    residual_layernorm_forward adds to it, and layernorm_backward adds to its gradient.
  - Every sum is taken in an order that depends on the shapes and the grid alone. There are no float atomics, so every
    run gives the same bits.

Nearly all of them are bound by memory: a GPU does some fifty operations in the time that one float takes to arrive. So
the 32 lanes of a warp touch adjacent addresses, 16 bytes a lane where the shapes allow it; many loads are in flight at
once; and what a block needs twice waits in registers or in shared memory, or in a cache.
*/

// BLOCK stands over each kernel, for the host to read: a block has so many threads, and covers so many items along x
// and, with a third argument, along y. The host divides the number of items by that to get the grid. The comment over
// a kernel says what its items are. W is the count of numbers of type real in 16 bytes.
#define BLOCK(threads, ...)

// The shared memory whose size is chosen at launch. The alignment is for the swizzle that at() describes.
#ifndef DYNAMIC_SHARED  // dev/cpu/cuda.h has its own
extern __shared__ __align__(1024) unsigned char dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(dynamic_shared)
#endif

constexpr unsigned FULL_WARP = 0xffffffff;
constexpr float LOWEST = -3.402823466e38f;  // stands for -infinity in a maximum: LOWEST - LOWEST is 0, not NaN

// ---- sums over a warp and over a block ----

// Each lane adds what the lane at some distance has, and so all lanes end with the total, in an order that is fixed.
template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(FULL_WARP, x, distance);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

// Every thread of a one-dimensional block of whole warps must call it, and gets the result.
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

// Parameters and activations are stored as real, which is fp32 or bfloat16. All arithmetic is in fp32.
#ifdef BF16
struct real { unsigned short bits; };  // the upper half of an fp32
#else
using real = float;
#endif

#ifdef __CUDACC__  // GPU only: what is written in PTX, here and below. dev/cpu/cuda.h has C++ of the same names.
// Two fp32, rounded to nearest with ties to even, as two bf16. `low` becomes the lower half.
__device__ __forceinline__ unsigned two_bf16(float low, float high) {
    unsigned bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}

// 2^x in one instruction. Unlike exp2f it does not care for denormals: they become 0.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Start a copy of 16 or 4 bytes from device to shared memory. The bytes pass through no register, and the thread goes
// on at once. If the bytes are not there, the copy writes zeros.
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
// copies_end closes a group of copies. copies_arrive waits until at most `pending` of a thread's groups are under way.
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

// e^x. Where results are rounded to bf16, the hardware's own 2^x is good enough.
constexpr float LOG2_E = 1.442695041f;
__device__ __forceinline__ float exponential(float x) { return sizeof(real) == 2 ? power_of_2(LOG2_E * x) : expf(x); }

// Pack<n> is n neighbours of an array, in registers, as fp32. load and store move up to 16 bytes at a time, the most
// that one instruction can. Rows of C numbers start at a multiple of 16 bytes, since C is a multiple of 32.
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

// In an element-wise kernel each thread takes W numbers. This is the first of them.
__device__ __forceinline__ size_t first_number() { return W * ((size_t)blockIdx.x * blockDim.x + threadIdx.x); }

// The row that number i is in, if rows have C numbers. It divides 32 bits, which takes a fifth of the time of 64.
__device__ __forceinline__ int row_of_number(size_t i, int C) { return (unsigned)(i / W) / (C / W); }

// An array that a kernel writes and a matrix product reads. A thread calls begin, then store as often as it likes, then
// end, which all lanes of a warp must reach. Here begin and end do nothing: -DOUTPUT=<file> may bring another Output.
#ifdef OUTPUT
#include OUTPUT
#else
struct Output {
    real* numbers;
    __device__ void begin() {}
    template <int n>
    __device__ void store(size_t i, Pack<n> x) { ::store(numbers + i, x); }  // numbers[i..i+n-1] = x
    __device__ void end() {}
};
#endif

// ---- encoder: token and position embeddings ----

// out (B,T,C) = wte (Vp,C)[tokens (B,T)] + wpe (maxT,C)[0..T-1]: what a token is, plus where it stands, unless wpe is
// null. This begins the residual stream. A thread takes 4 channels, which are 16 bytes of out. Items: B*T*C numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void encoder_forward(float* __restrict__ out, const int* __restrict__ tokens,
                                           const real* __restrict__ wte, const real* __restrict__ wpe,
                                           int N, int T, int C) {
    int packs = C / 4, i = blockIdx.x * blockDim.x + threadIdx.x, row = i / packs, c = 4 * (i % packs);
    if (row >= N) return;
    Pack<4> x = load<4>(wte + (size_t)tokens[row] * C + c);
    if (wpe) x = x + load<4>(wpe + (size_t)(row % T) * C + c);
    store(out + (size_t)row * C + c, x);
}

// dwte (Vp,C)[v] += the sum of the rows of dout (N,C) whose token is v. Items: N positions along x, C channels along y.
// A common word's gradient has many contributors, and atomics would add them in any order. So the host sorts the
// positions by token into order (N), which makes a run of equal tokens. run_length (N) has its length at its first
// position, and 0 at the others. Block (i, y) has work only if a run begins at i: then it owns 32 W channels of that
// word's gradient. Its 8 warps share the run, so a word that makes up a tenth of the batch is no bottleneck.
BLOCK(256, 1, 32 * W)
extern "C" __global__ void encoder_backward_wte(float* __restrict__ dwte, const real* __restrict__ dout,
                                                const int* __restrict__ tokens, const int* __restrict__ order,
                                                const int* __restrict__ run_length, int C) {
    int begin = blockIdx.x, length = run_length[begin];
    if (length == 0) return;
    __shared__ Pack<W> of_warp[8][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, c = W * (32 * blockIdx.y + lane);
    Pack<W> sum = {};
    if (c < C)
#pragma unroll 8  // so that eight rows are on their way at once
        for (int j = warp; j < length; j += 8) sum = sum + load<W>(dout + (size_t)order[begin + j] * C + c);
    of_warp[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= C) return;
    for (int w = 1; w < 8; w++) sum = sum + of_warp[w][lane];
    float* d = dwte + (size_t)tokens[order[begin]] * C + c;
    store(d, load<W>(d) + sum);
}

// dwpe (maxT,C)[t] += the sum over b of dout (B,T,C)[b,t]. Items: T*C numbers.
BLOCK(256, W * threads)
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

// What registers keep of a row is shared out like this: of its threads, thread i holds packs i, i + threads, ... of n
// columns each. EACH_PACK goes over them: pack k begins at column c. Where a row has one warp, shuffles can sum it
// without a barrier.
template <int n, int threads>
constexpr int packs_of = (CHANNELS + n * threads - 1) / (n * threads);
#define EACH_PACK(n, threads)                                                          \
    _Pragma("unroll") for (int k = 0, c = n * (threadIdx.x % threads);                 \
                           k < packs_of<n, threads>; k++, c += n * threads)            \
        if (CHANNELS % (n * threads) == 0 || c < CHANNELS)

// x = x + branch: what attention or the MLP has computed joins the residual stream. Then comes the layernorm that the
// next of them begins with:
//   residual (N,C) = before (N,C) + branch (N,C), unless branch is null, and residual is there; before may be residual
//   out (N,C) = (residual - mean) * rstd * weight + bias, with mean (N) and rstd (N) = 1/sqrt(variance + 1e-5) of a row
//   copy (N,C) = residual, as a real, for the backward pass
// The variance is taken around the mean, since E[x^2] - E[x]^2 would cancel. One kernel for both saves a read. Packs
// have 4 columns in bf16 too: a lane would load 8 of the fp32 stream in halves, and memory moves 32 bytes for each.
// Items: N rows.
BLOCK(256, threads / 32)
extern "C" __global__ void residual_layernorm_forward(
    Output out, float* __restrict__ mean, float* __restrict__ rstd, real* __restrict__ copy, float* residual,
    const float* before, const real* __restrict__ branch, const real* __restrict__ weight,
    const real* __restrict__ bias, int N) {
    constexpr int C = CHANNELS;
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    out.begin();
    Pack<4> x[packs_of<4, 32>];
    EACH_PACK(4, 32) x[k] = load<4>((branch ? before : residual) + start + c);
    if (branch) {
        EACH_PACK(4, 32) x[k] = x[k] + load<4>(branch + start + c);
        EACH_PACK(4, 32) store(residual + start + c, x[k]);
    }
    float sum = 0.0f;
    EACH_PACK(4, 32) {
        store(copy + start + c, x[k]);
        for (int i = 0; i < 4; i++) sum += x[k][i];
    }
    float m = warp_sum(sum) / C;
    sum = 0.0f;
    EACH_PACK(4, 32) for (int i = 0; i < 4; i++) sum += (x[k][i] - m) * (x[k][i] - m);
    float s = 1.0f / sqrtf(warp_sum(sum) / C + 1e-5f);
    EACH_PACK(4, 32) {
        Pack<4> w = load<4>(weight + c), b = load<4>(bias + c);
        for (int i = 0; i < 4; i++) x[k][i] = (x[k][i] - m) * s * w[i] + b[i];
        out.store(start + c, x[k]);
    }
    out.end();
    if (threadIdx.x % 32 == 0) mean[row] = m, rstd[row] = s;
}

// out (N,C) = (inp - mean) * rstd * weight + bias once more, for a backward pass that has not kept it. inp is the
// forward pass's copy. Items: N*C numbers.
BLOCK(256, W * threads)
extern "C" __global__ void layernorm_again(real* __restrict__ out, const real* __restrict__ inp,
                                           const float* __restrict__ mean, const float* __restrict__ rstd,
                                           const real* __restrict__ weight, const real* __restrict__ bias,
                                           int N, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    int row = row_of_number(i, C), c = i - (size_t)row * C;
    Pack<W> v = load<W>(inp + i), w = load<W>(weight + c), b = load<W>(bias + c);
    for (int j = 0; j < W; j++) v[j] = (v[j] - mean[row]) * rstd[row] * w[j] + b[j];
    store(out + i, v);
}

// The gradient of a layernorm joins that of the residual stream. With norm = (inp - mean) * rstd and
// dnorm = dout * weight, of each row:
//   dresidual (N,C) += rstd * (dnorm - average(dnorm) - norm * average(dnorm * norm))
//   partials (3, gridDim.x, C) = of each block's rows the sums of dout * norm, of dout, and of the new dresidual
// add_partials makes of these the gradients of weight, of bias, and of the bias of the linear layer whose output was
// added to the stream. A warp has a row, and its threads keep the sums of their columns in registers. Those of a long
// row would fill its registers or not fit there, so four warps share such a row. Copies bring the next row into shared
// memory (rows of a block, 2 stages, 3, C) while this one is worked on, so some tens of KB are always under way to each
// multiprocessor. One block on each is enough for that. Items: blocks. The host chooses their number and their threads,
// so 256 is not used: see layernorm_sizes.
constexpr int ROW_THREADS = CHANNELS <= 1280 ? 32 : 128;
constexpr int LAYERNORM_THREADS = CHANNELS <= 768 ? 384 : CHANNELS <= 1280 ? 256 : 512;
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(LAYERNORM_THREADS, 1) layernorm_backward(
    Output dresidual, float* __restrict__ partials, const real* __restrict__ dout, const real* __restrict__ inp,
    const real* __restrict__ weight, const float* __restrict__ mean, const float* __restrict__ rstd, int N) {
    constexpr int C = CHANNELS;
    DYNAMIC_SHARED(real, shared);
    dresidual.begin();
    int rows = blockDim.x / ROW_THREADS, place = threadIdx.x / ROW_THREADS;  // which of them is the thread's
    real* stages = shared + place * 2 * 3 * C;
    auto load_row = [&](int stage, int row) {
        real* to = stages + stage * 3 * C;
        size_t start = (size_t)row * C;
        EACH_PACK(W, ROW_THREADS) {  // a thread copies what it will read itself, so no barrier is needed
            copy16(to + c, inp + start + c, true);
            copy16(to + C + c, dout + start + c, true);
            copy16(to + 2 * C + c, dresidual.numbers + start + c, true);
        }
        copies_end();
    };
    int step = gridDim.x * rows, row = blockIdx.x * rows + place;
    float next_mean = 0.0f, next_rstd = 0.0f;
    if (row < N) {
        load_row(0, row);
        next_mean = mean[row], next_rstd = rstd[row];
    }
    Pack<W> sums[3][packs_of<W, ROW_THREADS>] = {};
    for (int stage = 0; row - place < N; row += step, stage ^= 1) {  // as long as any thread of the block has a row
        bool has_row = row < N;
        float s = next_rstd, minus_ms = -next_mean * s;  // norm = inp * s + minus_ms
        if (row + step < N) {
            load_row(stage ^ 1, row + step);
            next_mean = mean[row + step], next_rstd = rstd[row + step];
            copies_arrive<1>();
        } else {
            copies_arrive<0>();
        }
        const real *x = stages + stage * 3 * C, *dy = x + C, *dx = dy + C;
        Pack<2> total = {};  // of dnorm, and of dnorm * norm
        if (has_row) {
            EACH_PACK(W, ROW_THREADS) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) {
                    float dnorm = d[i] * w[i];
                    total[0] += dnorm;
                    total[1] += dnorm * (v[i] * s + minus_ms);
                }
            }
        }
        total = {warp_sum(total[0]), warp_sum(total[1])};
        if (ROW_THREADS > 32) {
            __shared__ Pack<2> of_warp[2][LAYERNORM_THREADS / 32];  // the other stage may still be read
            if (threadIdx.x % 32 == 0) of_warp[stage][threadIdx.x / 32] = total;
            __syncthreads();
            total = {};
            for (int w = 0; w < ROW_THREADS / 32; w++) total = total + of_warp[stage][place * ROW_THREADS / 32 + w];
        }
        float average_dnorm = total[0] / C, average_dnorm_norm = total[1] / C;
        if (has_row) {
            EACH_PACK(W, ROW_THREADS) {
                Pack<W> v = load<W>(x + c), d = load<W>(dy + c), g = load<W>(dx + c), w = load<W>(weight + c);
                for (int i = 0; i < W; i++) {
                    float norm = v[i] * s + minus_ms;
                    g[i] += s * (d[i] * w[i] - average_dnorm - norm * average_dnorm_norm);
                    sums[0][k][i] += d[i] * norm;
                    sums[1][k][i] += d[i];
                    sums[2][k][i] += g[i];
                }
                dresidual.store((size_t)row * C + c, g);
            }
        }
    }
    dresidual.end();
    float* of_place = reinterpret_cast<float*>(shared);  // (rows of a block, C), where the rows were
#pragma unroll
    for (int which = 0; which < 3; which++) {
        __syncthreads();
        EACH_PACK(W, ROW_THREADS) store(of_place + place * C + c, sums[which][k]);
        __syncthreads();
        for (int column = threadIdx.x; column < C; column += blockDim.x) {
            float sum = 0.0f;
            for (int i = 0; i < rows; i++) sum += of_place[i * C + column];
            partials[((size_t)which * gridDim.x + blockIdx.x) * C + column] = sum;
        }
    }
}
// What the host has to know: the threads of a block, those of a row, and a row's bytes of shared memory.
extern "C" { __constant__ int layernorm_sizes[] = {
    LAYERNORM_THREADS, ROW_THREADS, 2 * 3 * CHANNELS * (int)sizeof(real)}; }

// ---- the bias of a linear layer, backward: the sum of each column ----

// Sums each column of inp (N,OC) over every `shares`-th band of 32 rows, from band `share` on. One share is added to
// out (OC), and several are set in out (shares, OC). In a block, 8 lanes read 128 neighbouring bytes of a row, and the
// 32 such groups take one row each of a band.
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

// dbias (OC) += the sum over rows of dout (N,OC). Items: OC columns along x, shares of the rows along y. If there are
// several shares, their sums are set in dbias (gridDim.y, OC), for add_partials to add up.
BLOCK(256, 8 * W)
extern "C" __global__ void matmul_backward_bias(float* __restrict__ dbias, const real* __restrict__ dout,
                                                int N, int OC) {
    add_columns(dbias, dout, N, OC, blockIdx.y, gridDim.y);
}

// Each of out1, out2 and out3 (OC), unless it is null, += the sum over its N rows of partials (gridDim.y, N, OC).
// Items: OC columns along x, outs along y.
BLOCK(256, 32)
extern "C" __global__ void add_partials(float* out1, float* out2, float* out3, const float* __restrict__ partials,
                                        int N, int OC) {
    float* out = blockIdx.y == 0 ? out1 : blockIdx.y == 1 ? out2 : out3;
    if (out) add_columns(out, partials + (size_t)blockIdx.y * N * OC, N, OC, 0, 1);
}

// ---- tensor cores ----

// A tensor core multiplies small matrices that a warp holds in its registers: D (16,8) += A (16,16) B (16,8). A Pair is
// two neighbours along the summed index. The numbers in the picture are lanes: they hold a Pair each of A and of B, and
// two neighbours of D. So lane 4g + q has rows g and g+8 of A and D, and column g of B.
//
//    A  columns 0,1 2,3 4,5 6,7  8,9 .. 14,15    B  column  0  1  2 ..  7          D  columns 0,1 2,3 4,5 6,7
//    row  0       0   1   2   3    0  ..  3      rows  0,1  0  4  8 .. 28          row  0       0   1   2   3
//         1       4   5   6   7    4  ..  7            2,3  1  5  9 .. 29  b[0]         1       4   5   6   7
//        ...         a[0]            a[2]              4,5  2  6 10 .. 30              ...     d[0] and d[1]
//         7      28  29  30  31   28  .. 31            6,7  3  7 11 .. 31               7      28  29  30  31
//         8       0   1   2   3    0  ..  3            8,9  0  4  8 .. 28               8       0   1   2   3
//        ...         a[1]            a[3]              ...                 b[1]        ...     d[2] and d[3]
//        15      28  29  30  31   28  .. 31          14,15  3  7 11 .. 31              15      28  29  30  31
//
// So two D side by side, taken in pairs, are the A of a next product: attention's weights never leave the registers.
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

// Loads four 8 x 8 matrices of bf16 from shared memory. Lane i gives the address of row i % 8 of matrix i / 8. It gets,
// of each matrix, the elements 2q and 2q+1 of row g, or, transposed, of column g.
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

// The same in TF32, as two products of 8 summed columns. There a lane holds columns q and q+4, not 2q and 2q+1. Columns
// of A and rows of B are permuted alike, so the sum is the same. A tensor core reads the upper 10 bits of a mantissa.
// Half of the last of them is added first, so that dropping the others rounds. The NaN that GPUs compute, 0x7fffffff,
// would overflow to -0 by that, and the maximum keeps it.
// fp32 is three products of TF32 halves, x = big + small. The product of the small halves is beyond the last bit and is
// left out (Ootomo and Yokota 2022, section 3). A NaN stays one in the small half.
__device__ __forceinline__ void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float x[6] = {a[2 * i].x, a[2 * i + 1].x, a[2 * i].y, a[2 * i + 1].y, b[i].x, b[i].y};
        unsigned big[6];
#pragma unroll
        for (int j = 0; j < 6; j++) big[j] = __float_as_uint(x[j]) + 0x1000;
#ifdef TF32
#pragma unroll
        for (int j = 0; j < 6; j++) big[j] = max((int)big[j], __float_as_int(x[j]));
#else
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

// The same with two B side by side, which are b[0], b[1] and b[2], b[3], and so with two D.
__device__ __forceinline__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4], const Pair (&b)[4]) {
    mma(left, a, {b[0], b[1]});
    mma(right, a, {b[2], b[3]});
}
#endif

// ---- attention (Vaswani et al. 2017, section 3.2.1), by tiles (Dao 2023, algorithms 1 and 2) ----

// Attention is the only layer in which a token sees others, those before it. A row of qkv (B,T,NH+2NKV,HS) has the
// queries of NH heads, the keys of NKV heads, and their values. NH/NKV neighbouring query heads share one head of keys
// and values (Ainslie et al. 2023, section 2.2); in GPT-2 each has its own. Of each query head, with q, k, v (T,HS), a
// prime for a transpose, and scale = 1 / sqrt(HS):
//   score (T,T) = q k'
//   weight (T,T) = softmax(scale * score) over the keys s <= t of query t, or for ReLU attention max(0, scale * score)
//   out (B,T,NH,HS) = weight v
// Scores and weights are never stored. A block takes ROWS rows of one head, queries or keys, and walks over the other
// side in tiles that pass through shared memory. While it works on one tile, the next is on its way. The scores live in
// the registers of the warps that own their rows. Here T is four blocks, and a tile is drawn with as many rows as one:
//
//                        keys  0  1  2  3
//                 queries  0   \  .  .  .   last to start       #  all keys of the tile are seen
//                          1   #  \  .  .                       \  the diagonal runs through the tile
//                          2   #  #  \  .                       .  no key is seen, and the tile is skipped
//                          3   #  #  #  \   first to start
//
// A block of queries walks along its row from the left. A block of keys walks down its column from the diagonal, and
// there column 0 is the first to start. Of SECTION heads the longest blocks come first, so that short ones fill the
// gaps at the end. What bounds attention is that each product waits for the one before. Several blocks on a
// multiprocessor, or several groups of warps of a block, fill each other's gaps, as far as their registers allow.

// With -DHOPPER attention copies and multiplies by instructions that only Hopper has. A CPU has functions for them.
#ifndef HOPPER
#define HOPPER 0
#endif
static_assert(!HOPPER || (sizeof(real) == 2 && (HS == 64 || HS == 128)), "-DHOPPER: bf16 and heads of 64 or 128 only");

constexpr int HP = (HS + 15) / 16 * 16;  // a head's channels are padded with zeros to whole products
constexpr int HEAD_PACK = HS % W == 0 ? W : 1;  // channels that a thread moves at a time: 16 bytes if HS allows it
// On Hopper four warps are a warp group. Two groups share the tiles of 128 channels, or L2 would not keep up.
constexpr int WARP_GROUPS = HOPPER && HP == 128 ? 2 : 1;
// A warp owns 16 M rows. What it reads of a tile serves all of them, so M = 2 halves the traffic of shared memory. The
// registers have room for that in bf16 if heads are short. On Hopper the tensor cores read by themselves.
constexpr int M = !HOPPER && sizeof(real) == 2 && HP <= 64 ? 2 : 1;
constexpr int ROWS = 64 * M * WARP_GROUPS;   // a block owns them
constexpr int THREADS = 128 * WARP_GROUPS;
constexpr int GROUP = HOPPER ? 64 : 16 * M;  // rows that are multiplied together: those of a warp, or of a warp group
constexpr int KEYS = 64;                     // a tile of the forward pass has so many
constexpr int TILE = HOPPER ? 64 : 32;       // a tile of the backward pass has so many rows, keys or queries
constexpr int LD = HOPPER ? HP : HP + 8;     // the rows of a tile are so many numbers long: see at()
constexpr int SECTION = 64;                  // so many heads are worked on at a time: what blocks share stays in L2
// A multiprocessor must have registers for so many blocks.
constexpr int FORWARD_BLOCKS = !HOPPER ? 1 : WARP_GROUPS == 1 ? 5 : 2;
constexpr int BACKWARD_Q_BLOCKS = HOPPER && WARP_GROUPS == 1 ? 4 : 1;
constexpr int BACKWARD_KV_BLOCKS = HOPPER && WARP_GROUPS == 1 ? 3 : 1;
constexpr bool EARLY_DV = WARP_GROUPS > 1;  // dv's product starts before dscores are computed, which takes registers

// What the host has to know: rows and threads of a block, for which it takes these in place of BLOCK's; and its bytes
// of shared memory, forward and backward.
extern "C" { __constant__ int attention_sizes[] = {
    ROWS, THREADS, (ROWS + 4 * KEYS) * LD * (int)sizeof(real), (2 * ROWS + 4 * TILE) * LD * (int)sizeof(real)}; }

// What a block owns: ROWS queries of one query head, or ROWS keys of one key head.
struct Part {
    int first;             // the block's first row, counted from the head's first
    int warp;              // its warp's first row, counted from the block's first: a row of the block's own tile
    int group;             // the first row of its warp's group, counted from the head's first
    int b, h, kv;          // its sequence, its query head, or the first that shares the keys, and its key head
    size_t queries, keys;  // where the query head and the key head begin in qkv
    size_t out, lse;       // where the query head begins in out and dout, in lse and delta
};

// GPUs start blocks in the order of their numbers, on which only speed depends: by section, then the longest first.
template <bool rows_are_keys>
__device__ __forceinline__ Part part_of_block(int T, int NH, int NKV) {
    int blocks = (T + ROWS - 1) / ROWS, heads = gridDim.x / blocks;
    int section = blockIdx.x / (SECTION * blocks) * SECTION, i = blockIdx.x - section * blocks;
    int heads_here = min(SECTION, heads - section), head = section + i % heads_here, place = i / heads_here;
    int of_sequence = rows_are_keys ? NKV : NH, own = head % of_sequence;
    int h = own * NH / of_sequence, kv = own * NKV / of_sequence;  // one is `own`, the other NH/NKV times more or less
    int first = (rows_are_keys ? place : blocks - 1 - place) * ROWS, warp = threadIdx.x / 32 * 16 * M;
    int group = ROWS == GROUP ? 0 : warp / GROUP * GROUP;
    if (HOPPER && ROWS > GROUP) group = __shfl_sync(FULL_WARP, group, 0);  // so the compiler knows that lanes agree
    size_t b = head / of_sequence, row = b * T, start = row * (NH + 2 * NKV);
    return {first, warp, first + group, (int)b, h, kv,
            (start + h) * HS, (start + NH + kv) * HS, (row * NH + h) * HS, (b * NH + h) * T};
}

// The row and the column of x[m][n][i], an element of a warp's result: see the picture of D.
__device__ __forceinline__ int row_of(int m, int i) { return 16 * m + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int column_of(int n, int i) { return 8 * n + 2 * (threadIdx.x % 4) + i % 2; }

// Loops over the elements x[m][n][i] of a result, over its rows (m, half), and over the elements of such a row.
#define EACH_ELEMENT(x)                           \
    _Pragma("unroll") for (int m = 0; m < M; m++) \
        _Pragma("unroll") for (int n = 0; n < (int)(sizeof(x[0]) / sizeof(x[0][0])); n++) \
            _Pragma("unroll") for (int i = 0; i < 4; i++)
#define EACH_ROW                                  \
    _Pragma("unroll") for (int m = 0; m < M; m++) \
        _Pragma("unroll") for (int half = 0; half < 2; half++)
#define EACH_OF_ROW(x)                                                                \
    _Pragma("unroll") for (int n = 0; n < (int)(sizeof(x[0]) / sizeof(x[0][0])); n++) \
        _Pragma("unroll") for (int i = 2 * half; i < 2 * half + 2; i++)

__device__ __forceinline__ float relu_of(float x) { return x <= 0.0f ? 0.0f : x; }  // keeps a NaN, as fmaxf does not

// The maximum, or the sum, of a row of D, which four neighbouring lanes hold.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Where a number of a tile lies. The same columns of 8 neighbouring rows must be in different banks. Padding does that,
// or, for Hopper's tensor cores, a permutation of 8 pieces of 16 bytes, which they know as a 128-byte swizzle. There a
// tile consists of boxes of 64 rows and 64 channels, row by row. The next 64 channels, if there are any, follow a box.
__device__ __forceinline__ int at(int row, int c) {
    return HOPPER ? (row / 64 * (HP / 64) + c / 64) * 4096 + row % 64 * 64 + (c % 64 ^ row % 8 * 8) : row * LD + c;
}

// Tiles is an array (B,T,heads,HS) that tiles are copied from, and a Head is one head's channels of a sequence of it.
// load_tile starts to copy rows first..first+rows-1 of a head into a tile, which has zeros beyond T and HS.
// tiles_arrive waits for all tiles. Arrivals are what a block knows of those on their way. Every thread must call each.
#if !HOPPER
struct Tiles { const real* numbers; };
struct Head {
    const real* first;  // those of token 0
    int stride, T;      // numbers from a token to the next, and tokens
};
__device__ __forceinline__ Head head_of(const Tiles& array, int T, int heads, int b, int h) {
    return {array.numbers + ((size_t)b * T * heads + h) * HS, heads * HS, T};
}

struct Arrivals {};
__device__ __forceinline__ Arrivals arrivals_start() { return {}; }
__device__ __forceinline__ void boxes_arrive(Arrivals&) {}

template <int rows>
__device__ __forceinline__ void load_tile(real* tile, const Head& head, int first, Arrivals&) {
    constexpr int per_row = HP / HEAD_PACK;
#pragma unroll
    for (int start = 0; start < rows * per_row; start += THREADS) {
        int i = start + threadIdx.x, row = i / per_row, c = i % per_row * HEAD_PACK;
        if (rows * per_row % THREADS > 0 && i >= rows * per_row) break;
        bool there = first + row < head.T && c < HS;
        real* to = tile + at(row, c);
        const real* from = there ? head.first + (size_t)(first + row) * head.stride + c : head.first;
        if (HEAD_PACK == W) copy16(to, from, there);
        else if (there) *to = *from;
        else from_float(*to, 0.0f);
    }
}
#else
// On Hopper one thread asks the copy engine for boxes, and the others have nothing to do with it: no addresses, which
// would take a fifth of attention's time and registers that another block needs. A barrier in shared memory counts the
// bytes. Its phase ends when they are all there and thread 0 has said that there are no more. Phases have parities.
// What the engine has to know of an array is a tensor map, which cuTensorMapEncodeTiled makes on the host. It is an
// argument by value, because what lies in device memory would have to be fenced.
struct alignas(64) Tiles { unsigned char map[128]; };
struct Head {
    const Tiles* array;
    int b, channel;  // the sequence, and the head's first channel
};
__device__ __forceinline__ Head head_of(const Tiles& array, int, int, int b, int h) { return {&array, b, h * HS}; }

#ifdef __CUDACC__
using Barrier = unsigned long long;
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_start(Barrier& barrier) {  // lets the copy engine see it, too
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.proxy.async.shared::cta;"
                 ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void barrier_arrive(Barrier& barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
__device__ __forceinline__ void barrier_wait(Barrier& barrier, int parity) {
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again;}"
                 ::"r"(shared_address(&barrier)), "r"(parity) : "memory");
}
// Starts to copy 8,192 bytes: of sequence b, tokens t..t+63 and 64 channels. Those that do not exist are zeros.
__device__ __forceinline__ void copy_box(real* box, const Tiles* map, int channel, int t, int b, Barrier& barrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 8192;"
                 ::"r"(shared_address(&barrier)) : "memory");
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(shared_address(box)), "l"(map), "r"(channel), "r"(t), "r"(b), "r"(shared_address(&barrier))
                 : "memory");
}
#else
using namespace hopper;  // dev/cpu/cuda.h
#endif

struct Arrivals {
    Barrier* barrier;
    int parity;
};
__device__ __forceinline__ Arrivals arrivals_start() {
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) barrier_start(barrier);
    __syncthreads();
    return {&barrier, 0};
}
__device__ __forceinline__ void boxes_arrive(Arrivals& arrivals) {
    if (threadIdx.x == 0) barrier_arrive(*arrivals.barrier);
    barrier_wait(*arrivals.barrier, arrivals.parity);
    arrivals.parity ^= 1;
}

template <int rows>
__device__ __forceinline__ void load_tile(real* tile, const Head& head, int first, Arrivals& arrivals) {
#pragma unroll
    for (int row = 0; row < rows; row += 64)
#pragma unroll
        for (int c = 0; c < HP; c += 64)
            if (threadIdx.x == 0)
                copy_box(tile + at(row, c), head.array, head.channel + c, first + row, head.b, *arrivals.barrier);
}
#endif

__device__ __forceinline__ void tiles_arrive(Arrivals& arrivals) {
    copies_end();  // on Hopper there are such copies only in attention_backward_kv, of lse and delta
    copies_arrive<0>();
    boxes_arrive(arrivals);
    __syncthreads();
}

// Loads a square of a tile, rows r..r+15 and channels c..c+15, for mma: as an A, or, as_b, as two B side by side whose
// columns are the tile's rows. Both are the same four quarters, with x[1] and x[2] exchanged.
template <bool as_b>
__device__ __forceinline__ void load_square(Pair (&x)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    int one = lane / 8 % 2 * 8, other = lane / 16 * 8;
    load_matrices(x, tile + at(r + lane % 8 + (as_b ? other : one), c + (as_b ? one : other)));
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int one = i % 2 * 8, other = i / 2 * 8, row = r + lane / 4 + (as_b ? other : one);
        x[i] = *reinterpret_cast<const Pair*>(tile + row * LD + c + 2 * (lane % 4) + (as_b ? one : other));
    }
#endif
}

// Two B side by side, for a product with a tile: their 16 columns are channels c..c+15 of its rows r..r+15.
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

// A from columns 16 j..16 j + 15 of a result.
template <int parts>
__device__ __forceinline__ void a_from_result(Pair (&a)[4], const float (&x)[parts][4], int j) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&left_right)[4] = x[2 * j + i / 2];
        a[i] = pair(left_right[i % 2 * 2], left_right[i % 2 * 2 + 1]);
    }
}

// The two products that attention is made of. Their results are valid only after products_arrive.
#if !HOPPER
// d (16 M, columns) = a warp's rows of a block's own tile, times the transpose of another's first `columns` rows.
template <int columns>
__device__ __forceinline__ void multiply_transposed(float (&d)[M][columns / 8][4], const real* own, const Part& part,
                                                    const real* right) {
    memset(d, 0, sizeof(d));
#pragma unroll
    for (int c = 0; c < HP; c += 16) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) load_square<false>(a[m], own, part.warp + 16 * m, c);
#pragma unroll
        for (int n = 0; n < columns / 16; n++) {
            load_square<true>(b, right, 16 * n, c);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
}

// d (16 M, HP) += x (16 M, columns), a result in registers, times the first `columns` rows of a tile.
template <int columns>
__device__ __forceinline__ void multiply(float (&d)[M][HP / 8][4], const float (&x)[M][columns / 8][4],
                                         const real* tile) {
#pragma unroll
    for (int j = 0; j < columns / 16; j++) {
        Pair a[M][4], b[4];
#pragma unroll
        for (int m = 0; m < M; m++) a_from_result(a[m], x[m], j);
#pragma unroll
        for (int n = 0; n < HP / 16; n++) {
            load_b(b, tile, 16 * j, 16 * n);
#pragma unroll
            for (int m = 0; m < M; m++) mma_pair(d[m][2 * n], d[m][2 * n + 1], a[m], b);
        }
    }
}

// mma.sync is done when it returns.
template <int pending, class D>
__device__ __forceinline__ void products_arrive(D&) {}
#else
// The same on Hopper, whose tensor cores read tiles from shared memory by themselves while the threads go on. The four
// warps of a group start one product together, D (64,64) += A (64,16) B (16,64). Each warp holds 16 rows of D, and of A
// if that comes from registers, as it does for mma. A wider result is several D of 8 parts.

// wgmma's description of a matrix in a tile. In units of 16 bytes: its place; the leading offset, from 64 channels to
// the next 64, which no A or B reaches; the stride offset, from 8 rows to the next 8. Then the 128-byte swizzle. So it
// is both for sums over channels, in which A and B have 16 of them, and for sums over 16 rows of B.
__device__ __forceinline__ unsigned long long describe(unsigned place) {
    return place | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

#ifdef __CUDACC__
__device__ __forceinline__ unsigned place_of(const real* tile) { return shared_address(tile) / 16; }

#define FLOATS4(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define FLOATS32(x) FLOATS4(x[0]), FLOATS4(x[1]), FLOATS4(x[2]), FLOATS4(x[3]), FLOATS4(x[4]), FLOATS4(x[5]), \
                    FLOATS4(x[6]), FLOATS4(x[7])
#define WGMMA "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
              "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "

// D = A B, or with `add` D += A B, where A and B' are 16 channels of the rows of two tiles.
__device__ __forceinline__ void wgmma(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;" WGMMA "%32, %33, p, 1, 1, 0, 0;}"
                 : FLOATS32(d) : "l"(a), "l"(b), "r"((int)add));
}
// D += A B, where A is in registers and B is 64 channels of 16 rows of a tile.
__device__ __forceinline__ void wgmma_from_registers(float (*d)[4], const Pair (&a)[4], unsigned long long b) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;" WGMMA "{%32,%33,%34,%35}, %36, p, 1, 1, 1;}"
                 : FLOATS32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
// Has A computed here, and not after products_start.
__device__ __forceinline__ void compute_now(Pair (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]));
}

// products_start goes before a group of products, products_end after it. products_arrive waits until at most `pending`
// groups are under way. D goes in and out of the first and the last, so that the compiler moves no use of it across.
template <int parts>
__device__ __forceinline__ void products_start(float (&d)[1][parts][4]) {
#pragma unroll
    for (int n = 8; n < parts; n += 8) asm volatile("" : FLOATS32((d[0] + n)));
    asm volatile("wgmma.fence.sync.aligned;" : FLOATS32(d[0])::"memory");
}
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending, int parts>
__device__ __forceinline__ void products_arrive(float (&d)[1][parts][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %32;" : FLOATS32(d[0]) : "n"(pending) : "memory");
#pragma unroll
    for (int n = 8; n < parts; n += 8) asm volatile("" : FLOATS32((d[0] + n)));
}
#endif

template <int columns>
__device__ __forceinline__ void multiply_transposed(float (&d)[1][columns / 8][4], const real* own, const Part& part,
                                                    const real* right) {
    static_assert(columns == 64, "one wgmma has 64 columns");
    unsigned a = place_of(own + (part.group - part.first) * HP), b = place_of(right);
    products_start(d);
#pragma unroll
    for (int c = 0; c < HP; c += 16) wgmma(d[0], describe(a + at(0, c) / W), describe(b + at(0, c) / W), c > 0);
    products_end();
}

template <int columns>
__device__ __forceinline__ void multiply(float (&d)[1][HP / 8][4], const float (&x)[1][columns / 8][4],
                                         const real* tile) {
    unsigned b = place_of(tile);
    Pair a[columns / 16][4];
#pragma unroll
    for (int j = 0; j < columns / 16; j++) {
        a_from_result(a[j], x[0], j);
        compute_now(a[j]);
    }
    products_start(d);
#pragma unroll
    for (int j = 0; j < columns / 16; j++)
#pragma unroll
        for (int c = 0; c < HP; c += 64) wgmma_from_registers(d[0] + c / 8, a[j], describe(b + at(16 * j, c) / W));
    products_end();
}
#endif

// The causal mask: a query does not see the keys after it. x has scores or weights, of a warp's rows and a tile whose
// columns begin at `column`. Those not seen, of which only tiles on the diagonal have any, become `value`.
template <bool rows_are_keys, int parts>
__device__ __forceinline__ void hide_future(float (&x)[M][parts][4], float value, const Part& part, int column) {
    if (column >= part.group + GROUP || column + 8 * parts <= part.group) return;
    EACH_ELEMENT(x) {
        int r = part.first + part.warp + row_of(m, i), c = column + column_of(n, i);
        if (rows_are_keys ? r > c : c > r) x[m][n][i] = value;
    }
}

// Stores the rows of a result (16 M, HP), each times its factor(m, half), as a warp's rows of a head, which begins at
// `start` in out and has a row every `stride` numbers. They pass through the warp's rows of the block's own tile. When
// all threads are here, nobody needs that or another tile any more. HEAD_LANES neighbouring lanes store a row together,
// HEAD_PACK numbers each. A lane keeps to its columns, and leaves the sums of its rows in of_lanes
// (THREADS / HEAD_LANES, HP), unless that is null. The place of the other tiles is large enough for two of these.
constexpr int HEAD_LANES = HP / HEAD_PACK <= 8 ? 8 : HP / HEAD_PACK <= 16 ? 16 : 32;
template <class F>
__device__ __forceinline__ void store_rows(Output& out, size_t start, size_t stride, int T, const Part& part,
                                           real* own, const float (&x)[M][HP / 8][4], F factor, float* of_lanes) {
    __syncthreads();
    EACH_ROW
#pragma unroll
        for (int n = 0; n < HP / 8; n++) {
            Pack<2> two = {factor(m, half) * x[m][n][2 * half], factor(m, half) * x[m][n][2 * half + 1]};
            store(own + at(part.warp + row_of(m, 2 * half), column_of(n, 0)), two);
        }
    __syncwarp();
#pragma unroll
    for (int begin = 0; begin < HS; begin += HEAD_LANES * HEAD_PACK) {
        int c = begin + threadIdx.x % HEAD_LANES * HEAD_PACK;
        if (c >= HS) break;
        Pack<HEAD_PACK> sum = {};
#pragma unroll
        for (int r = 0; r < 16 * M; r += 32 / HEAD_LANES) {
            int row = part.warp + r + threadIdx.x % 32 / HEAD_LANES, t = part.first + row;
            Pack<HEAD_PACK> pack = load<HEAD_PACK>(own + at(row, c));
            if (t >= T) continue;
            out.store(start + t * stride + c, pack);
            sum = sum + pack;
        }
        if (of_lanes) store(of_lanes + threadIdx.x / HEAD_LANES * HP + c, sum);
    }
}

// Adds up what store_rows has left in of_lanes: the block's part of the gradient of a bias, a row of
// sums (B, blocks of rows, NH+2NKV, HS). A barrier goes before.
__device__ __forceinline__ void store_sums(float* sums, const float* of_lanes, int head, int heads, int T,
                                           const Part& part) {
    float* to = sums + (((size_t)part.b * ((T + ROWS - 1) / ROWS) + part.first / ROWS) * heads + head) * HS;
    for (int c = threadIdx.x; c < HS; c += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < THREADS / HEAD_LANES; i++) sum += of_lanes[i * HP + c];
        to[c] = sum;
    }
}

// Algorithm 1. For softmax it also keeps lse (B,NH,T) = log2 of each row's sum of 2^(score * log2(e) * scale), and from
// that the backward pass computes the weights again. Exponentials are to base 2, as in hardware. A row's maximum, its
// total and its output are those of the tiles seen so far. When the maximum grows, the other two are scaled down
// (Milakov and Gimelshein 2018, algorithm 3). Items: blocks of ROWS queries of a head.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, FORWARD_BLOCKS) attention_forward(
    Output out, float* __restrict__ lse, const __grid_constant__ Tiles qkv, float scale, int relu, int T, int NH,
    int NKV) {
    DYNAMIC_SHARED(real, queries);      // (ROWS, LD)
    real* tiles = queries + ROWS * LD;  // two stages of keys and values (2, 2, KEYS, LD)
    Arrivals arrivals = arrivals_start();
    Part part = part_of_block<false>(T, NH, NKV);
    int row = part.first + part.warp;
    auto keys = [&](int stage) { return tiles + 2 * stage * KEYS * LD; };
    auto values = [&](int stage) { return keys(stage) + KEYS * LD; };
    auto head = [&](int h) { return head_of(qkv, T, NH + 2 * NKV, part.b, h); };
    auto load_stage = [&](int stage, int key) {
        load_tile<KEYS>(keys(stage), head(NH + part.kv), key, arrivals);
        load_tile<KEYS>(values(stage), head(NH + NKV + part.kv), key, arrivals);
    };
    load_tile<ROWS>(queries, head(part.h), part.first, arrivals);
    load_stage(0, 0);

    float output[M][HP / 8][4] = {}, maximum[M][2], total[M][2] = {};  // the paper's O, m and l
    EACH_ROW maximum[m][half] = LOWEST;
    float scale2 = scale * LOG2_E;  // for 2^x instead of e^x
    int end = min(part.first + ROWS, T);
    for (int key = 0, stage = 0; key < end; key += KEYS, stage ^= 1) {
        tiles_arrive(arrivals);  // this stage is filled, and nobody reads the other any more
        if (key + KEYS < end) load_stage(stage ^ 1, key + KEYS);
        if (key >= part.group + GROUP) continue;  // no row of the group sees any of these keys

        float scores[M][KEYS / 8][4];  // the paper's S
        multiply_transposed<KEYS>(scores, queries, part, keys(stage));
        products_arrive<0>(scores);
        hide_future<false>(scores, LOWEST, part, key);
        auto& weights = scores;  // the paper's P, computed in place
        if (relu) {
            EACH_ELEMENT(weights) weights[m][n][i] = relu_of(scale * scores[m][n][i]);
        } else EACH_ROW {
            float before = maximum[m][half], now = before;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                now = fmaxf(now, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            now = row_max(now);
            float correction = power_of_2(scale2 * (before - now)), sum = 0.0f;
            EACH_OF_ROW(weights) {
                weights[m][n][i] = power_of_2(scale2 * scores[m][n][i] - scale2 * now);
                sum += weights[m][n][i];
            }
            maximum[m][half] = now;
            total[m][half] = total[m][half] * correction + sum;
            EACH_OF_ROW(output) output[m][n][i] *= correction;
        }
        multiply<KEYS>(output, weights, values(stage));
        products_arrive<0>(output);
    }
    EACH_ROW {
        int t = row + row_of(m, 2 * half);
        total[m][half] = relu ? 1.0f : row_sum(total[m][half]);
        if (column_of(0, 0) == 0 && t < T) lse[part.lse + t] = scale2 * maximum[m][half] + log2f(total[m][half]);
    }
    out.begin();
    store_rows(out, part.out, NH * HS, T, part, queries, output,
               [&](int m, int half) { return 1.0f / total[m][half]; }, nullptr);
    out.end();
}

// In the backward pass the weights are computed from the scores, and dscores from dweights, each in place. dscores
// leave out the factor scale; dq and dk are multiplied by it when they are stored. lse and delta (m, n, i) are those of
// an element's query.
template <class F>
__device__ __forceinline__ void weights_from_scores(float (&x)[M][TILE / 8][4], int relu, float scale, F lse) {
    if (relu) EACH_ELEMENT(x) x[m][n][i] = relu_of(scale * x[m][n][i]);
    else EACH_ELEMENT(x) x[m][n][i] = power_of_2(scale * LOG2_E * x[m][n][i] - lse(m, n, i));
}
template <class F>
__device__ __forceinline__ void dscores_from_dweights(float (&dx)[M][TILE / 8][4],
                                                      const float (&weights)[M][TILE / 8][4], int relu, F delta) {
    if (relu) EACH_ELEMENT(dx) dx[m][n][i] = weights[m][n][i] <= 0.0f ? 0.0f : dx[m][n][i];
    else EACH_ELEMENT(dx) dx[m][n][i] = weights[m][n][i] * (dx[m][n][i] - delta(m, n, i));
}

// Algorithm 2, as two kernels, so that each gradient is summed by one warp in one order. dqkv has the shape of qkv.
// This one has ROWS queries and walks over the keys that they see, for dq = dscore k. It also leaves
// delta (B,NH,T), the paper's D = the sum over a head's channels of out * dout. That is the sum over a query's keys of
// weight * dweight, which softmax's gradient needs. For sums, which may be null, see store_sums. Items: blocks of ROWS
// queries of a head.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_Q_BLOCKS) attention_backward_q(
    Output dqkv, float* sums, float* __restrict__ delta, const float* __restrict__ lse, const real* __restrict__ out,
    const __grid_constant__ Tiles qkv, const __grid_constant__ Tiles dout, float scale, int relu, int T, int NH,
    int NKV) {
    DYNAMIC_SHARED(real, queries);  // queries and dout (2, ROWS, LD); two stages of keys and values (2, 2, TILE, LD)
    real *douts = queries + ROWS * LD, *tiles = douts + ROWS * LD;
    Arrivals arrivals = arrivals_start();
    Part part = part_of_block<false>(T, NH, NKV);
    int stride = (NH + 2 * NKV) * HS, row = part.first + part.warp, lane = threadIdx.x % 32;
    auto keys = [&](int stage) { return tiles + 2 * stage * TILE * LD; };
    auto values = [&](int stage) { return keys(stage) + TILE * LD; };
    auto head = [&](int h) { return head_of(qkv, T, NH + 2 * NKV, part.b, h); };
    auto load_stage = [&](int stage, int key) {
        load_tile<TILE>(keys(stage), head(NH + part.kv), key, arrivals);
        load_tile<TILE>(values(stage), head(NH + NKV + part.kv), key, arrivals);
    };
    load_tile<ROWS>(queries, head(part.h), part.first, arrivals);
    load_tile<ROWS>(douts, head_of(dout, T, NH, part.b, part.h), part.first, arrivals);
    load_stage(0, 0);
    // Of row `lane % 16` of its square, a lane takes every second pack of out, while the tiles are on their way.
    constexpr int packs = (HS + 2 * HEAD_PACK - 1) / (2 * HEAD_PACK);
    Pack<HEAD_PACK> of_out[M][packs];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < packs; k++) {
            int t = min(row + 16 * m + lane % 16, T - 1), c = (2 * k + lane / 16) * HEAD_PACK;
            of_out[m][k] = {};
            if (c < HS) of_out[m][k] = load<HEAD_PACK>(out + part.out + (size_t)t * NH * HS + c);
        }
    tiles_arrive(arrivals);
    float row_lse[M][2], row_delta[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < packs; k++) {
            int c = (2 * k + lane / 16) * HEAD_PACK;  // beyond HS a tile has zeros
            Pack<HEAD_PACK> y = load<HEAD_PACK>(douts + at(part.warp + 16 * m + lane % 16, c));
            for (int j = 0; j < HEAD_PACK; j++) sum += of_out[m][k][j] * y[j];
        }
        sum += __shfl_xor_sync(FULL_WARP, sum, 16);
        int t = row + 16 * m + lane;
        if (lane < 16 && t < T) delta[part.lse + t] = sum;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            row_delta[m][half] = __shfl_sync(FULL_WARP, sum, row_of(0, 2 * half));
            row_lse[m][half] = lse[part.lse + min(row + row_of(m, 2 * half), T - 1)];
        }
    }

    float dq[M][HP / 8][4] = {};
    int end = min(part.first + ROWS, T);
    for (int key = 0, stage = 0; key < end; key += TILE, stage ^= 1) {
        tiles_arrive(arrivals);  // the first has arrived above
        if (key + TILE < end) load_stage(stage ^ 1, key + TILE);
        if (key >= part.group + GROUP) continue;
        float scores[M][TILE / 8][4], dweights[M][TILE / 8][4];  // the paper's S and dP
        auto &weights = scores, &dscores = dweights;             // and P and dS, computed in place
        multiply_transposed<TILE>(scores, queries, part, keys(stage));
        multiply_transposed<TILE>(dweights, douts, part, values(stage));
        products_arrive<1>(scores);
        weights_from_scores(scores, relu, scale, [&](int m, int, int i) { return row_lse[m][i / 2]; });
        hide_future<false>(weights, 0.0f, part, key);
        products_arrive<0>(dweights);
        dscores_from_dweights(dweights, weights, relu, [&](int m, int, int i) { return row_delta[m][i / 2]; });
        multiply<TILE>(dq, dscores, keys(stage));
        products_arrive<0>(dq);
    }
    float* of_lanes = reinterpret_cast<float*>(tiles);
    dqkv.begin();
    store_rows(dqkv, part.queries, stride, T, part, queries, dq, [&](int, int) { return scale; }, of_lanes);
    if (sums) {
        __syncthreads();
        store_sums(sums, of_lanes, part.h, NH + 2 * NKV, T, part);
    }
    dqkv.end();
}

// This one runs after attention_backward_q. It has ROWS keys and walks over the queries that see them, for
// dv = weight' dout and dk = dscore' q: all of one query head, then of the next that shares the keys. The rows of its
// weights are keys. Items: blocks of ROWS keys of a key head.
BLOCK(128, 1)
extern "C" __global__ void __launch_bounds__(THREADS, BACKWARD_KV_BLOCKS) attention_backward_kv(
    Output dqkv, float* sums, const float* __restrict__ delta, const float* __restrict__ lse,
    const __grid_constant__ Tiles qkv, const __grid_constant__ Tiles dout, float scale, int relu, int T, int NH,
    int NKV) {
    DYNAMIC_SHARED(real, keys);  // keys and values (2, ROWS, LD); two stages of queries and dout (2, 2, TILE, LD)
    __shared__ float of_query[2][2][TILE];  // two stages of lse and delta
    real *values = keys + ROWS * LD, *tiles = values + ROWS * LD;
    Arrivals arrivals = arrivals_start();
    Part part = part_of_block<true>(T, NH, NKV);
    int stride = (NH + 2 * NKV) * HS;
    auto queries = [&](int stage) { return tiles + 2 * stage * TILE * LD; };
    auto douts = [&](int stage) { return queries(stage) + TILE * LD; };
    auto head_of_qkv = [&](int h) { return head_of(qkv, T, NH + 2 * NKV, part.b, h); };
    auto load_stage = [&](int stage, int head, int query) {  // 0, 1, ... are the query heads that share the keys
        load_tile<TILE>(queries(stage), head_of_qkv(part.h + head), query, arrivals);
        load_tile<TILE>(douts(stage), head_of(dout, T, NH, part.b, part.h + head), query, arrivals);
        int i = threadIdx.x % TILE, which = threadIdx.x / TILE, t = query + i;  // beyond T a weight is 2^0, and dout 0
        if (which < 2)
            copy4(&of_query[stage][which][i], (which ? delta : lse) + part.lse + head * T + min(t, T - 1), t < T);
    };
    load_tile<ROWS>(keys, head_of_qkv(NH + part.kv), part.first, arrivals);
    load_tile<ROWS>(values, head_of_qkv(NH + NKV + part.kv), part.first, arrivals);
    load_stage(0, 0, part.first);

    float dk[M][HP / 8][4] = {}, dv[M][HP / 8][4] = {};
    int heads = NH / NKV;
    for (int head = 0, next = part.first, stage = 0; head < heads; stage ^= 1) {
        int query = next;
        next += TILE;
        if (next >= T) next = part.first, head++;
        tiles_arrive(arrivals);
        if (head < heads) load_stage(stage ^ 1, head, next);
        if (query + TILE <= part.group) continue;  // all of these queries come before the group's keys
        float scores[M][TILE / 8][4], dweights[M][TILE / 8][4];  // the paper's S and dP
        auto &weights = scores, &dscores = dweights;             // and P and dS, computed in place
        multiply_transposed<TILE>(scores, keys, part, queries(stage));
        multiply_transposed<TILE>(dweights, values, part, douts(stage));
        products_arrive<1>(scores);
        weights_from_scores(scores, relu, scale,
                            [&](int, int n, int i) { return of_query[stage][0][column_of(n, i)]; });
        hide_future<true>(weights, 0.0f, part, query);
        if (EARLY_DV) multiply<TILE>(dv, weights, douts(stage));
        products_arrive<EARLY_DV>(dweights);  // dv's product, if it is early, may still be under way
        dscores_from_dweights(dweights, weights, relu,
                              [&](int, int n, int i) { return of_query[stage][1][column_of(n, i)]; });
        if (!EARLY_DV) multiply<TILE>(dv, weights, douts(stage));
        multiply<TILE>(dk, dscores, queries(stage));
        products_arrive<0>(dv);
        products_arrive<0>(dk);
    }
    float *of_keys = reinterpret_cast<float*>(tiles), *of_values = of_keys + THREADS / HEAD_LANES * HP;
    dqkv.begin();
    store_rows(dqkv, part.keys, stride, T, part, keys, dk, [&](int, int) { return scale; }, of_keys);
    store_rows(dqkv, part.keys + NKV * HS, stride, T, part, values, dv, [&](int, int) { return 1.0f; }, of_values);
    if (sums) {
        __syncthreads();
        store_sums(sums, of_keys, NH + part.kv, NH + 2 * NKV, T, part);
        store_sums(sums, of_values, NH + NKV + part.kv, NH + 2 * NKV, T, part);
    }
    dqkv.end();
}

// ---- GELU, in the tanh form of GPT-2 (Hendrycks and Gimpel 2016, section 2) ----

// gelu(x) = x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3). Since (1 + tanh u)/2 = 1/(1 + exp(-2u)), it is x
// times a logistic function. That takes one exponential, and nothing cancels where tanh u is near -1.
constexpr float SQRT_8_OVER_PI = 1.595769122f;

__device__ __forceinline__ float gelu(float x) {
    return x / (1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
}

// With g = 1/(1 + exp(-2u)):  d(x g)/dx = g + x g (1 - g) d(2u)/dx. Far to the left, exp overflows to infinity and g
// becomes 0, which is its limit.
__device__ __forceinline__ float gelu_derivative(float x) {
    float g = 1.0f / (1.0f + exponential(-SQRT_8_OVER_PI * (x + 0.044715f * x * x * x)));
    return g + x * g * (1.0f - g) * SQRT_8_OVER_PI * (1.0f + 3.0f * 0.044715f * x * x);
}

// out (N,OC) = gelu(inp). Items: N*OC numbers.
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

// dinp (N,OC) holds the gradient of the output, and becomes that of the input. Items: N*OC numbers.
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

// losses (N) = -log(softmax(logits (N,Vp)[row, 0..V-1])[target]): how surprised the model is by the next token. If
// with_gradient, the logits become dloss * (softmax - 1 at the target), and zeros in the padding.
// The probabilities are never stored. A logit is read from device memory once: a row, which is 100 KB in bf16, waits in
// shared memory for the second pass. A block takes every gridDim.x-th row, and a thread n logits at a time. If two rows
// fit, the next is on its way while the block works on one. If not, the first `kept` logits of a row are there, and in
// the second pass each makes room for that of the next row. The others are read twice, the second time from L2: with a
// block for each multiprocessor, they fit there.
template <int n, bool two_rows>
__device__ __forceinline__ void classify_rows(real* logits, float* __restrict__ losses,
                                              const int* __restrict__ targets, float dloss, int N, int V, int Vp,
                                              int with_gradient, int kept) {
    DYNAMIC_SHARED(real, row_cache);  // (kept), or (2, Vp)
    auto load_row = [&](int stage, int row) {  // a thread copies what it will read itself
        for (int v = n * threadIdx.x; v < kept; v += n * blockDim.x)
            copy16(row_cache + (size_t)stage * kept + v, logits + (size_t)row * Vp + v, true);
        copies_end();
    };
    if ((int)blockIdx.x < N) load_row(0, blockIdx.x);
    for (int row = blockIdx.x, stage = 0; row < N; row += gridDim.x, stage ^= two_rows) {
        int next = row + gridDim.x, target = targets[row];
        real *x = logits + (size_t)row * Vp, *cached = row_cache + (size_t)stage * kept;
        auto at = [&](int v) { return two_rows || v < kept ? cached + v : x + v; };
        if (two_rows && next < N) load_row(stage ^ 1, next), copies_arrive<1>();
        else copies_end(), copies_arrive<0>();
        float largest = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = n * threadIdx.x; v < V; v += n * blockDim.x) {
            Pack<n> l = load<n>(at(v));
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
        if (threadIdx.x == 0) losses[row] = logf(sum) + top - to_float(*at(target));
        __syncthreads();  // the logit of the target has been read
        if (!with_gradient) continue;
        float per_sum = dloss / sum;
#pragma unroll 4
        for (int v = n * threadIdx.x; v < Vp; v += n * blockDim.x) {
            Pack<n> l = {};
            if (v < V) l = load<n>(at(v));
            for (int i = 0; i < n; i++) l[i] = exponential(l[i] - top) * per_sum;
            if (v + n > V || target / n == v / n)
                for (int i = 0; i < n; i++) l[i] = v + i < V ? l[i] - (v + i == target ? dloss : 0.0f) : 0.0f;
            store(x + v, l);
            if (!two_rows && v < kept && next < N) copy16(cached + v, logits + (size_t)next * Vp + v, true);
        }
    }
}

// classify_rows, W logits at a time if the padded rows allow it, with room for so many logits in shared memory. One
// pass alone needs none of it. Items: blocks.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int CLASSIFIER_BLOCKS = 2;  // of 1,024 threads; the multiprocessors of other GPUs have 1,536
#else
constexpr int CLASSIFIER_BLOCKS = 1;
#endif
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024, CLASSIFIER_BLOCKS) fused_classifier(
    real* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int N, int V, int Vp,
    int with_gradient, int room) {
    if (Vp % W > 0) classify_rows<1, false>(logits, losses, targets, dloss, N, V, Vp, with_gradient, 0);
    else if (room >= 2 * Vp) classify_rows<W, true>(logits, losses, targets, dloss, N, V, Vp, with_gradient, Vp);
    else classify_rows<W, false>(logits, losses, targets, dloss, N, V, Vp, with_gradient,
                                 with_gradient ? min(room, Vp) : 0);
}

// ---- the gradient's norm, and AdamW ----
// (Kingma and Ba 2014, algorithm 1; Loshchilov and Hutter 2017, algorithm 2)

// norm[0] = the square root of the sum of the squares of grads (n). Each block writes the sum of
// its share to norm[2 + blockIdx.x], and counts itself in norm[1]. The last block to finish adds up
// all the sums, always in the same order. Items: blocks.
BLOCK(512, 1)
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
        __threadfence();  // others see the sum before they see that it is counted
        last = atomicAdd(reinterpret_cast<int*>(norm + 1), 1) == (int)gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.0f;
    for (int i = threadIdx.x; i < (int)gridDim.x; i += blockDim.x) sum += __ldcg(norm + 2 + i);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) norm[0] = sqrtf(sum), norm[1] = 0.0f;
}

// The settings of a step. They are in device memory because a recorded graph cannot change its
// arguments. rate is 1 - beta: the host computes it, since 1 - 0.999 in fp32 has a relative error
// of 1e-5. correction = 1 / (1 - beta^step) makes up for moments that start at zero. If the
// gradient's norm is above clip, the gradient is scaled down to it; clip = 0 turns that off.
struct AdamW {
    float learning_rate, rate1, rate2, correction1, correction2, eps, weight_decay, clip;
};

// What the device says about a step. adamw changes nothing without update. The host reads it later,
// perhaps when the next step is already queued: so stopped stays 1 once the loss or the norm of a
// step was not finite, and no step after it makes an update either.
struct Verdict { float norm, loss, update, stopped; };

// verdict->loss = share times the sum of losses (N); with accumulate that is added to it instead.
// There is one block, so that the order of the sum is fixed. Items: blocks.
BLOCK(1024, 1)
extern "C" __global__ void add_loss(Verdict* verdict, const float* __restrict__ losses, float share,
                                    int N, int accumulate) {
    float sum = 0.0f;
#pragma unroll 8
    for (int i = threadIdx.x; i < N; i += blockDim.x) sum += losses[i];
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) verdict->loss = (accumulate ? verdict->loss : 0.0f) + share * sum;
}

// Decides whether a step updates the parameters, by its loss, which is in the verdict already, and
// norm[0]. Items: threads; there is one.
BLOCK(1, threads)
extern "C" __global__ void judge(Verdict* verdict, const float* __restrict__ norm) {
    Verdict v = *verdict;
    v.norm = norm[0];
    bool finite = fabsf(v.loss) <= -LOWEST && v.norm <= -LOWEST;  // false if one of them is NaN
    if (!finite) v.stopped = 1.0f;
    v.update = 1.0f - v.stopped;
    *verdict = v;
}

// AdamW works on fp32 parameters, the master. In fp32 they are params, and low is null. In bf16 a
// parameter is stored in halves: params has the upper half, rounded, which all other kernels read;
// low has the lower half, signed, since rounding may have raised the upper one. The master's bits
// are (param << 16) + low. That is exact because ties round away from zero. If they rounded to
// even, a lower half of 0x8000 would not say whether the upper one was rounded up or down.
struct low_half { short bits; };
// load_master takes the bits of these floats
__device__ __forceinline__ float to_float(low_half x) { return __uint_as_float(x.bits); }
__device__ __forceinline__ void from_float(low_half& to, float x) { to.bits = __float_as_uint(x); }

template <int n>
__device__ __forceinline__ Pack<n> load_master(const real* params, const low_half* low, size_t i) {
    Pack<n> x = load<n>(params + i), rest = sizeof(real) == 2 ? load<n>(low + i) : Pack<n>{};
    for (int j = 0; j < n; j++)
        x[j] = __uint_as_float(__float_as_uint(x[j]) + __float_as_uint(rest[j]));
    return x;
}

template <int n>
__device__ __forceinline__ void store_master(real* params, low_half* low, size_t i, Pack<n> x) {
    if (sizeof(real) == 2) {
        store(low + i, x);
        for (int j = 0; j < n; j++)  // a NaN stays as it is, since its bits could overflow
            if (x[j] == x[j]) x[j] = __uint_as_float((__float_as_uint(x[j]) + 0x8000) & 0xffff0000);
    }
    store(params + i, x);
}

// One step for all n parameters. There are at most 32 `tensors`: number i lies at [starts[i],
// starts[i+1]) of the arenas, and decayed[i] says whether it gets weight decay. A thread's W
// numbers are in one tensor, found by bisection. Without verdict->update nothing changes.
// add_noise(m1, m2, i, tensor) may change moments before they are stored.
template <class moment, class AddNoise>
__device__ __forceinline__ void adamw_step(
    real* __restrict__ params, low_half* __restrict__ low, const float* __restrict__ grads,
    moment* __restrict__ m, moment* __restrict__ v, const size_t* __restrict__ starts,
    const int* __restrict__ decayed, int tensors, size_t n, const AdamW* __restrict__ settings,
    const Verdict* __restrict__ verdict, AddNoise add_noise) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> g = load<W>(grads + i), p = load_master<W>(params, low, i);
    Pack<W> m1 = load<W>(m + i), m2 = load<W>(v + i);
    AdamW a = *settings;
    int tensor = 0;
    for (int half = 16; half > 0; half /= 2)
        if (tensor + half < tensors && starts[tensor + half] <= i) tensor += half;
    float decay = decayed[tensor] ? a.weight_decay : 0.0f;
    float norm = verdict->norm, scale = a.clip > 0.0f && norm > a.clip ? a.clip / norm : 1.0f;
    for (int j = 0; j < W; j++) {
        g[j] *= scale;
        m1[j] += a.rate1 * (g[j] - m1[j]);
        m2[j] += a.rate2 * (g[j] * g[j] - m2[j]);
        float change = m1[j] * a.correction1 / (sqrtf(m2[j] * a.correction2) + a.eps);
        p[j] -= a.learning_rate * (change + decay * p[j]);
    }
    if (!verdict->update) return;  // asked this late, it holds up no load
    store_master(params, low, i, p);
    add_noise(m1, m2, i, tensor);
    store(m + i, m1);
    store(v + i, m2);
}

// Bound by memory: it reads four fp32 numbers a parameter and writes three, in bf16 too. Items: n
// numbers.
BLOCK(256, W * threads)
extern "C" __global__ void adamw(
    real* __restrict__ params, low_half* __restrict__ low, const float* __restrict__ grads,
    float* __restrict__ m, float* __restrict__ v, const size_t* __restrict__ starts,
    const int* __restrict__ decayed, int tensors, size_t n, const AdamW* __restrict__ settings,
    const Verdict* __restrict__ verdict) {
    auto none = [](Pack<W>&, Pack<W>&, size_t, int) {};
    adamw_step(params, low, grads, m, v, starts, decayed, tensors, n, settings, verdict, none);
}
