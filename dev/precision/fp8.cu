/*
FP8, for --dtype fp8: what a TwinWriter does, which kernels.cu declares and its kernels use; the twins of what those do
not write, and of the weights; and the scales of the next step. This is compiled behind kernels.cu. dev/fp8.py says when
each is used, and why.
*/

#ifdef __CUDACC__
// Two fp32, rounded to nearest with ties to even, as two e4m3. What is too large, also an infinity, becomes 448, the
// largest that there is, and NaN stays. `low` becomes the lower half.
__device__ __forceinline__ unsigned short two_fp8(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

__device__ __forceinline__ TwinWriter::TwinWriter(unsigned char* out8, Scale* scale8)
    : out8(out8), scale8(scale8), scale(out8 ? scale8->scale : 0.0f), before(out8 ? __ldcg(&scale8->largest) : 0.0f),
      largest(0.0f) {}

// x is rounded to a real first, so that a twin is the same whether it is made of registers, as here, or of out.
template <int n>
__device__ __forceinline__ void TwinWriter::store(size_t i, Pack<n> x) {
    if (!out8) return;
    struct alignas(n) { unsigned char x[n]; } twins;
    for (int j = 0; j < n; j++) {
        real rounded;
        from_float(rounded, x[j]);
        x[j] = to_float(rounded);
        largest = fmaxf(largest, fabsf(x[j]));
    }
    for (int j = 0; j < n; j += 2) {
        unsigned short two = two_fp8(scale * x[j], j + 1 < n ? scale * x[j + 1] : 0.0f);
        twins.x[j] = two;
        if (j + 1 < n) twins.x[j + 1] = two >> 8;
    }
    *reinterpret_cast<decltype(twins)*>(out8 + i) = twins;
}

// Of floats that are not negative, the larger one has the larger bits, so a maximum of ints will do. A warp that has
// nothing larger than what was there when it began, as nearly all, does nothing. The others, which are many when a
// kernel begins, look again, since thousands that write to one place wait for each other.
__device__ __forceinline__ void TwinWriter::end() {
    if (!out8) return;
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0 && largest > before && largest > __ldcg(&scale8->largest))
        atomicMax(reinterpret_cast<int*>(&scale8->largest), (int)__float_as_uint(largest));
}

// out8 (n) = the twin of inp (n), as if the kernel that wrote inp had stored it. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void to_fp8(const real* __restrict__ inp, size_t n, unsigned char* __restrict__ out8,
                                  Scale* scale8) {
    size_t i = first_number();
    TwinWriter twin(out8, scale8);
    if (i < n) twin.store(i, load<W>(inp + i));
    twin.end();
}

// Makes the twins of a tensor of weights (layers,R,C), each layer with a Scale of its own: out8 (layers,R,C) for the
// forward pass, and transposed (layers,C,R) for the backward pass. Products of FP8 want both factors with the summed
// index as the fastest. R and C are multiples of 16. A block has 64 x 64 weights, which it transposes in shared memory.
// Items: C columns along x, layers * ceil(R/64) tiles of rows along y.
BLOCK(256, 64, 1)
extern "C" __global__ void weights_to_fp8(unsigned char* __restrict__ out8, unsigned char* __restrict__ transposed,
                                          const real* __restrict__ weights, Scale* scale8, int R, int C) {
    __shared__ __align__(16) unsigned char tile[64][64 + 16];
    int tiles = (R + 63) / 64, layer = blockIdx.y / tiles, first = blockIdx.y % tiles * 64, column = 64 * blockIdx.x;
    size_t start = (size_t)layer * R * C;
    TwinWriter twin(&tile[0][0], scale8 + layer);
    for (int i = threadIdx.x; i < 64 * 64 / W; i += blockDim.x) {
        int r = i / (64 / W), c = i % (64 / W) * W;
        if (first + r >= R || column + c >= C) continue;
        twin.store(r * sizeof(tile[0]) + c, load<W>(weights + start + (size_t)(first + r) * C + column + c));
        *reinterpret_cast<Stored<W, unsigned char>*>(out8 + start + (size_t)(first + r) * C + column + c) =
            *reinterpret_cast<Stored<W, unsigned char>*>(&tile[r][c]);
    }
    twin.end();
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 4; i += blockDim.x) {
        int c = i / 4, r = i % 4 * 16;
        if (column + c >= C || first + r >= R) continue;
        Stored<16, unsigned char> part;
        for (int j = 0; j < 16; j++) part.x[j] = tile[r + j][c];
        *reinterpret_cast<Stored<16, unsigned char>*>(transposed + start + (size_t)(column + c) * R + first + r) = part;
    }
}

// Sets the scales of the next step. The largest magnitude of this one comes to half of the largest FP8, so that a
// tensor may grow to twice that in a step before it is cut off. A tensor of zeros, or one with an infinity, keeps its
// scale, and so do all in a step that was stopped, for somebody to look at. The largest magnitudes begin anew; with
// `forget` that is all. Items: n tensors.
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
