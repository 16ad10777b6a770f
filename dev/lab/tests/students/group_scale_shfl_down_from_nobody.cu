// wrong: lane
BLOCK(128, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned mask = __ballot_sync(FULL_WARP, i < n);
    if (i >= n) return;
    float x = to_float(inp[i]), m = fabsf(x);
    for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_down_sync(mask, m, step));  //!
    m = __shfl_sync(mask, m, 0);
    from_float(out[i], x / m);
}
