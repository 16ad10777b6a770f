/*
FP8, for --dtype fp8: twins of weights, and of arrays whose kernel has made none; and the next step's scales. Compiled
after kernels.cu, with fp8_output.cuh's Output. fp8.py says when each is used, and why.
*/

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

// Makes the twins of a tensor of weights (layers,R,C), with one Scale per layer: out8 (layers,R,C) for the forward
// pass, and transposed (layers,C,R) for the backward pass, since FP8 products need the summed index to be the fastest
// in both factors. R and C are multiples of 16. A block transposes 64 x 64 weights in shared memory. Items: C columns
// along x, layers * ceil(R/64) tiles of rows along y.
BLOCK(256, 64, 1)
extern "C" __global__ void weights_to_fp8(unsigned char* __restrict__ out8, unsigned char* __restrict__ transposed,
                                          const real* __restrict__ weights, Scale* scale8, int R, int C) {
    __shared__ __align__(16) unsigned char tile[64][64 + 16];
    int tiles = (R + 63) / 64, layer = blockIdx.y / tiles, first = blockIdx.y % tiles * 64, column = 64 * blockIdx.x;
    size_t start = (size_t)layer * R * C;
    Output out = {nullptr, &tile[0][0], scale8 + layer};
    out.begin();
    for (int i = threadIdx.x; i < 64 * 64 / W; i += blockDim.x) {
        int r = i / (64 / W), c = i % (64 / W) * W;
        if (first + r >= R || column + c >= C) continue;
        out.store_twin(r * sizeof(tile[0]) + c, load<W>(weights + start + (size_t)(first + r) * C + column + c));
        *reinterpret_cast<Stored<W, unsigned char>*>(out8 + start + (size_t)(first + r) * C + column + c) =
            *reinterpret_cast<Stored<W, unsigned char>*>(&tile[r][c]);
    }
    out.end();
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 4; i += blockDim.x) {
        int c = i / 4, r = i % 4 * 16;
        if (column + c >= C || first + r >= R) continue;
        Stored<16, unsigned char> part;
        for (int j = 0; j < 16; j++) part.x[j] = tile[r + j][c];
        *reinterpret_cast<Stored<16, unsigned char>*>(transposed + start + (size_t)(column + c) * R + first + r) = part;
    }
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
