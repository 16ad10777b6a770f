// wrong: lane 12 of warp \d reads from lane 28
BLOCK(256, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned mask = __ballot_sync(0xffffffff, i < n);
    if (i >= n) return;
    float x = to_float(inp[i]), m = fabsf(x);
    for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(mask, m, step));  //!
    from_float(out[i], x / m);
}
