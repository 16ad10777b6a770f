// wrong: variable|value|unset|initiali
BLOCK(128, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float best[2];  //!
    best[0] = 0.0f;
    for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32 && j < n; j++)
        best[j % 2] = fmaxf(best[j % 2], fabsf(to_float(inp[j])));
    from_float(out[i], to_float(inp[i]) / fmaxf(best[0], best[1]));
}
