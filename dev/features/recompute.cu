// For --recompute: GPT-2's layernorms when a backward pass computes them again.

// For level 1: out (N,C) = (inp - mean) * rstd * weight + bias once more. inp is the forward pass's copy.
// Items: N*C numbers.
BLOCK(256, W * threads)
extern "C" __global__ void layernorm_again(
    real* __restrict__ out, const real* __restrict__ inp, const float* __restrict__ mean,
    const float* __restrict__ rstd, const real* __restrict__ weight, const real* __restrict__ bias,
    int N, int C) {
    size_t i = first_number();
    if (i >= (size_t)N * C) return;
    int row = row_of_number(i, C), c = i - (size_t)row * C;
    Pack<W> v = load<W>(inp + i), w = load<W>(weight + c), b = load<W>(bias + c);
    for (int j = 0; j < W; j++) v[j] = (v[j] - mean[row]) * rstd[row] * w[j] + b[j];
    store(out + i, v);
}

// For level 2: as kernels.cu's residual_layernorm_forward, but x (N,C) = before (N,C) + branch (N,C), and
// before stays. If branch is null, x is there already. x and before may not overlap, unless they are the
// same. Items: N rows.
BLOCK(256, threads / 32)
extern "C" __global__ void residual_layernorm_into(
    Output out, float* __restrict__ mean, float* __restrict__ rstd, real* __restrict__ copy, float* x,
    const float* before, const real* __restrict__ branch, const real* __restrict__ weight,
    const real* __restrict__ bias, int N) {
    constexpr int C = CHANNELS;
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    out.begin();
    Pack<4> v[packs_of<4, 32>];
    each_pack<4, 32>([&](int k, int c) { v[k] = load<4>((branch ? before : x) + start + c); });
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
