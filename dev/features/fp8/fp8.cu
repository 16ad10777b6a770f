/*
FP8, for --dtype fp8: twins of weights, and of arrays whose kernel has made none; transposed twins; twins that stand for
GELU's output and gradient, and for dlogits; and the next step's scales. Compiled after kernels.cu, with
fp8_output.cuh's Output. fp8.py says when each is used, and why.
*/

namespace fp8 {

// out8 (n) = the twin of inp (n), the same as if the kernel that wrote inp had stored it. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void to_fp8(const real* __restrict__ inp, size_t n, unsigned char* __restrict__ out8,
                                  Scale* scale8) {
    size_t i = first_number();
    Output out = {nullptr, out8, scale8};
    out.begin();
    if (i < n) out.store_twin(i, load<W>(inp + i));
    out.end();
}

// Sets the scales of the next step. They map this step's largest magnitude to half of the largest FP8 number, so that a
// tensor may double in a step before it saturates. A tensor of zeros, or with an infinity, keeps its scale. So do all
// tensors of a stopped step, which will be examined. The largest magnitudes are reset; with `forget` that is all.
// Items: n tensors.
BLOCK(256, threads)
extern "C" __global__ void next_scales(Scale* __restrict__ scales, int n, int forget,
                                       const Verdict* __restrict__ verdict) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    Scale s = scales[i];
    if (!forget && !verdict->stopped && s.largest > 0.0f && s.largest <= -LOWEST) {
        s.scale = fminf(448.0f / 2 / s.largest, 1e30f);
        s.inverse = 1.0f / s.scale;
    }
    s.largest = 0.0f;
    scales[i] = s;
}

// ---- twins of transposed tensors ----

// Transposes 4 x 4 bytes: byte j of word i becomes byte i of word j.
__device__ __forceinline__ void turn(unsigned (&w)[4]) {
    unsigned a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    unsigned c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410);
    w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410);
    w[3] = __byte_perm(c, d, 0x7632);
}

// These kernels have a block for each tile of 128 rows and 128 columns, along x alone: along y a grid has at most 65,535
// blocks, too few for the rows of a large vocabulary. Of C columns, those of this block's tile begin here:
__device__ __forceinline__ int first_column(int C) { return blockIdx.x % ((C + 127) / 128) * 128; }

// Its number among the tiles of these columns: its rows begin at 128 times that.
__device__ __forceinline__ int tile_of_rows(int C) { return blockIdx.x / ((C + 127) / 128); }

// A tile on its way through shared memory: words[column][g] has rows 4 g .. 4 g + 3 of a
// column. Group g is stored at g ^ column / 16 * 4, so that a warp's words are in different banks.
struct Turned { unsigned words[128][32]; };

// Each of 256 threads puts 16 columns, from 16 p on, of four rows there, with p = threadIdx.x % 8 and
// g = threadIdx.x / 8.
__device__ __forceinline__ void put_turned(Turned& tile, const Stored<4, unsigned> (&rows)[4]) {
    int g = threadIdx.x / 8, p = threadIdx.x % 8;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned w[4] = {rows[0].x[k], rows[1].x[k], rows[2].x[k], rows[3].x[k]};
        turn(w);
        for (int i = 0; i < 4; i++) tile.words[16 * p + 4 * k + i][g ^ 4 * p] = w[i];
    }
}

// Stores the tile's columns as rows of across (C,stride), from (column,first) on. The stride is a multiple of 16.
__device__ __forceinline__ void store_turned(
    unsigned char* across, Turned& tile, int column, int first, int C, int stride) {
    __syncthreads();
    for (int i = threadIdx.x; i < 128 * 8; i += blockDim.x) {
        int c = i / 8, r = i % 8;
        if (column + c < C && first + 16 * r < stride)
            *reinterpret_cast<Stored<4, unsigned>*>(across + (size_t)(column + c) * stride + first + 16 * r) =
                *reinterpret_cast<Stored<4, unsigned>*>(&tile.words[c][4 * (r ^ c / 16)]);
    }
}

// across (C,stride) = the transposed twin (R,C), with zeros in columns R to stride, a multiple of 16, which cuBLASLt
// needs. C is one too. Bound by memory: each byte is read and written once, 128 neighbours at a time. Items: tiles.
BLOCK(256, 1)
extern "C" __global__ void transpose_fp8(unsigned char* __restrict__ across, const unsigned char* __restrict__ twin,
                                         int R, int C, int stride) {
    __shared__ __align__(16) Turned tile;
    int column = first_column(C), first = 128 * tile_of_rows(C);
    int c = column + threadIdx.x % 8 * 16, r = first + threadIdx.x / 8 * 4;
    Stored<4, unsigned> rows[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (r + i < R && c < C)
            rows[i] = *reinterpret_cast<const Stored<4, unsigned>*>(twin + (size_t)(r + i) * C + c);
    put_turned(tile, rows);
    store_turned(across, tile, column, first, C, stride);
}

// Makes the tile from row `first` on of the transposed twin across (C,stride), and of the twin (R,C) unless that is
// null. numbers_at(i) returns the 16 numbers from number i on.
template <class NumbersAt>
__device__ __forceinline__ void store_both(
    unsigned char* twin, unsigned char* across, Scale* scale8, int first, int R, int C, int stride,
    NumbersAt numbers_at) {
    __shared__ __align__(16) Turned tile;
    int column = first_column(C);
    int c = column + threadIdx.x % 8 * 16, r = first + threadIdx.x / 8 * 4;
    Output out = {nullptr, across, scale8};
    out.begin();
    Stored<4, unsigned> rows[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (r + i >= R || c >= C) continue;
        Pack<16> x = numbers_at((size_t)(r + i) * C + c);
        for (int j = 0; j < 16; j++) out.largest = fmaxf(out.largest, fabsf(x[j]));
        show_infinities(x, out.largest);
        for (int j = 0; j < 16; j++) x[j] *= out.factor;
        for (int j = 0; j < 4; j++)
            rows[i].x[j] = two_fp8(x[4 * j], x[4 * j + 1]) | (unsigned)two_fp8(x[4 * j + 2], x[4 * j + 3]) << 16;
        if (twin) *reinterpret_cast<Stored<4, unsigned>*>(twin + (size_t)(r + i) * C + c) = rows[i];
    }
    out.end();
    put_turned(tile, rows);
    store_turned(across, tile, column, first, C, stride);
}

__device__ __forceinline__ Pack<16> load16(const real* p) {
    Pack<16> x;
    for (int k = 0; k < 16; k += W) {
        Pack<W> part = load<W>(p + k);
        for (int i = 0; i < W; i++) x[k + i] = part[i];
    }
    return x;
}

// Makes the twins of a tensor of weights (layers,R,C), with one Scale per layer: across (layers,C,R), transposed, for
// the backward pass, and out8 (layers,R,C) for the forward pass, null if that is in bf16. FP8 products need the summed
// index to be the fastest in both factors. R and C are multiples of 16. Items: tiles of all layers.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, 3) weights_to_fp8(
    unsigned char* __restrict__ across, unsigned char* __restrict__ out8, const real* __restrict__ weights,
    Scale* scale8, int R, int C) {
    int tiles = (R + 127) / 128, layer = tile_of_rows(C) / tiles;
    size_t start = (size_t)layer * R * C;
    store_both(out8 ? out8 + start : nullptr, across + start, scale8 + layer, tile_of_rows(C) % tiles * 128, R, C, R,
               [&](size_t i) { return load16(weights + start + i); });
}

// ---- norms, whose output only FP8 products read ----

// As kernels.cu's residual_layernorm_forward, but of out only twins are stored: twin (N,C), and across (C,stride), the
// transposed one, with zeros in columns N to stride. A block has 32 rows, whose bytes of a column are a sector of
// memory. So it reads them back, from L2, where a pass of its own would read most of them from memory. Items: N rows.
BLOCK(256, 32)
extern "C" __global__ void __launch_bounds__(256, CHANNELS <= 1024 ? 4 : CHANNELS <= 1600 ? 3 : 1)
    residual_layernorm_to_fp8(
    unsigned char* twin, unsigned char* __restrict__ across, Scale* scale8, float* __restrict__ mean,
    float* __restrict__ rstd, real* __restrict__ copy, float* __restrict__ x, const real* __restrict__ branch,
    const real* __restrict__ weight, const real* __restrict__ bias, int N, int stride) {
    constexpr int C = CHANNELS;
    Output out = {nullptr, twin, scale8};
    out.begin();
    int begin = 32 * blockIdx.x, end = begin + 32 < N ? begin + 32 : N;
    for (int row = begin + threadIdx.x / 32; row < end; row += 8) {
        size_t start = (size_t)row * C;
        Pack<4> v[packs_of<4, 32>];
        each_pack<4, 32>([&](int k, int c) { v[k] = load<4>(x + start + c); });
        if (branch) {
            each_pack<4, 32>([&](int k, int c) { v[k] = v[k] + load<4>(branch + start + c); });
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
            out.store_twin(start + c, v[k]);
        });
        if (threadIdx.x % 32 == 0) mean[row] = m, rstd[row] = s;
    }
    out.end();
    __syncthreads();
    for (int i = threadIdx.x; i < C / 2; i += blockDim.x) {  // 4 columns of 16 rows; neighbours have the other 16
        int c = i / 2 * 4, first = begin + i % 2 * 16;
        if (first >= stride) continue;
        unsigned w[4][4];
        for (int r = 0; r < 16; r++)
            w[r / 4][r % 4] =
                first + r < N ? *reinterpret_cast<const unsigned*>(twin + (size_t)(first + r) * C + c) : 0;
        for (auto& four : w) turn(four);
        for (int j = 0; j < 4; j++)
            *reinterpret_cast<Stored<4, unsigned>*>(across + (size_t)(c + j) * stride + first) = {
                w[0][j], w[1][j], w[2][j], w[3][j]};
    }
}

// ---- GELU, whose output and gradient only FP8 products read ----

// gelu(x) is x times this: see kernels.cu. Its exact division would take half of these kernels' instructions; the
// factors of the exponent are multiplied by LOG2_E.
__device__ __forceinline__ float gelu_share(float x) {
    constexpr float first = -LOG2_E * SQRT_8_OVER_PI, third = 0.044715f * first;
    return __fdividef(1.0f, 1.0f + power_of_2(x * (first + third * (x * x))));
}

// twin (R,C) and across (C,stride) = the twin of gelu(inp (R,C)), plain and transposed. stride is R rounded up to a
// multiple of 16, and C is one. Bound by memory: it reads two bytes a number and writes two. Items: tiles.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, 3) gelu_to_fp8(
    unsigned char* __restrict__ twin, unsigned char* __restrict__ across, Scale* scale8, const real* __restrict__ inp,
    int R, int C, int stride) {
    store_both(twin, across, scale8, 128 * tile_of_rows(C), R, C, stride, [&](size_t i) {
        Pack<16> x = load16(inp + i);
        for (int j = 0; j < 16; j++) x[j] *= gelu_share(x[j]);
        return x;
    });
}

// The same of the gradient of inp, given dout (R,C), that of the GELU. sums (ceil(R/128),C) = the sums of its columns
// over a tile's rows; from these add_all_partials makes the gradient of the bias. Items: tiles.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, 3) gelu_backward_to_fp8(
    unsigned char* __restrict__ twin, unsigned char* __restrict__ across, Scale* scale8, float* __restrict__ sums,
    const real* __restrict__ dout, const real* __restrict__ inp, int R, int C, int stride) {
    __shared__ float of_warp[8][128];
    Pack<16> sum = {};
    store_both(twin, across, scale8, 128 * tile_of_rows(C), R, C, stride, [&](size_t i) {
        Pack<16> d = load16(dout + i), x = load16(inp + i);
        for (int j = 0; j < 16; j++) {
            float share = gelu_share(x[j]), slope = SQRT_8_OVER_PI * (1.0f + 3 * 0.044715f * (x[j] * x[j]));
            d[j] *= share + x[j] * share * (1.0f - share) * slope;
        }
        sum = sum + d;
        return d;
    });
    for (int j = 0; j < 16; j++) {  // lanes at distance 8 and 16 have other rows of the same columns
        sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 8);
        sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], 16);
    }
    // Lane i has the sums of columns 16 i + j. They go to 8 j + i, so that 8 lanes store to 8 banks at once.
    if (threadIdx.x % 32 < 8)
        for (int j = 0; j < 16; j++) of_warp[threadIdx.x / 32][8 * j + threadIdx.x % 8] = sum[j];
    __syncthreads();
    int column = first_column(C) + threadIdx.x % 8 * 16 + threadIdx.x / 8;
    if (threadIdx.x >= 128 || column >= C) return;
    float total = 0.0f;
    for (int w = 0; w < 8; w++) total += of_warp[w][threadIdx.x];
    sums[(size_t)tile_of_rows(C) * C + column] = total;
}

// ---- the head ----

// As fused_classifier, but the logits (N,Vp) stay, and their gradient becomes a twin, out8 (N,Vp), in half of the
// bytes: LARGEST_FP8 * (softmax - 1 at the target), so that the scale needs no history. scale8 gets that of
// dloss * (softmax - 1 at the target). Vp is a multiple of 16. If shared memory has room for two rows of logits, a row
// is read once, and the next is on its way meanwhile; otherwise pass 2 reads a row again, from L2. Items: blocks.
//
// The dither keeps rare words alive. Rounded to nearest, a probability below 2e-6 would always become 0, and so its
// logit would not be pushed down any more; with a random number added, it becomes 4e-6 now and then, and the mean of
// many rows is right. Larger numbers have wider steps, beside which the dither does not matter.
constexpr float LARGEST_FP8 = 448.0f, SMALLEST_FP8 = 0x1p-9f;

template <bool cached>
__device__ void classify_to_fp8(
    unsigned char* __restrict__ out8, float* __restrict__ losses, const real* __restrict__ logits,
    const int* __restrict__ targets, int N, int V, int Vp) {
    DYNAMIC_SHARED(real, row_cache);  // (2,Vp)
    auto load_row = [&](int stage, int row) {  // a thread copies what it reads itself
        if (cached)
            for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x)
                copy16(row_cache + (size_t)stage * Vp + v, logits + (size_t)row * Vp + v, true);
        copies_end();
    };
    if ((int)blockIdx.x < N) load_row(0, blockIdx.x);
    for (int row = blockIdx.x, stage = 0; row < N; row += gridDim.x, stage ^= 1) {
        int next = row + gridDim.x, target = targets[row];
        const real* x = cached ? row_cache + (size_t)stage * Vp : logits + (size_t)row * Vp;
        if (next < N) {
            load_row(stage ^ 1, next);
            wait_for_copies<1>();
        } else {
            wait_for_copies<0>();
        }
        float largest = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = W * threadIdx.x; v < V; v += W * blockDim.x) {
            Pack<W> l = load<W>(x + v);
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
        if (threadIdx.x == 0) losses[row] = logf(sum) + top - to_float(logits[(size_t)row * Vp + target]);
        float shift = top + logf(sum / LARGEST_FP8);  // e^(x - shift) = LARGEST_FP8 * softmax
        // A row's own sum and the thread's number are random enough. In -1/2 .. 1/2 of the smallest step.
        float dither = SMALLEST_FP8 * 0x1p-32f * (int)((__float_as_uint(sum) + threadIdx.x) * 0x9E3779B9u);
#pragma unroll 4
        for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
            Pack<W> l = load<W>(x + v);
            for (int i = 0; i < W; i++) l[i] = exponential(l[i], shift) + dither;
            if (v + W > V || (unsigned)(target - v) < W)
                for (int i = 0; i < W; i++)
                    l[i] = v + i < V ? l[i] - (v + i == target ? LARGEST_FP8 : 0.0f) : 0.0f;
            Stored<W / 2, unsigned short> eight;
            for (int i = 0; i < W; i += 2) eight.x[i / 2] = two_fp8(l[i], l[i + 1]);
            *reinterpret_cast<Stored<W / 2, unsigned short>*>(out8 + (size_t)row * Vp + v) = eight;
        }
    }
}

BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024, 1) classifier_to_fp8(
    unsigned char* __restrict__ out8, Scale* __restrict__ scale8, float* __restrict__ losses,
    const real* __restrict__ logits, const int* __restrict__ targets, float dloss, int N, int V, int Vp, int room) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        scale8->scale = LARGEST_FP8 / dloss;
        scale8->inverse = dloss / LARGEST_FP8;
    }
    if (room >= 2 * Vp) classify_to_fp8<true>(out8, losses, logits, targets, N, V, Vp);
    else classify_to_fp8<false>(out8, losses, logits, targets, N, V, Vp);
}

}  // namespace fp8
