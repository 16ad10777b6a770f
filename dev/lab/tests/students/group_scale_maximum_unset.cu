// wrong: before it gets a value
BLOCK(256, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float m;  //!
    for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32 && j < n; j++) m = fmaxf(m, fabsf(to_float(inp[j])));
    from_float(out[i], to_float(inp[i]) / m);
}
