// right
BLOCK(128, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned mask = __ballot_sync(FULL_WARP, i < n);
    if (i >= n) return;
    int count = __popc(mask), lane = threadIdx.x % 32;
    float x = to_float(inp[i]), m = fabsf(x);
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_down_sync(mask, m, step);  // of a lane that is not there: any number
        if (lane + step < count) m = fmaxf(m, other);
    }
    from_float(out[i], x / __shfl_sync(mask, m, 0));
}
