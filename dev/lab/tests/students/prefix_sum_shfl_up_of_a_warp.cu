// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_prefix_sum(float* out, const real* inp, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float before = 0.0f;
    for (int first = 0; first < C; first += 32) {
        int c = first + lane;
        float x = c < C ? to_float(inp[(size_t)row * C + c]) : 0.0f;
        for (int step = 1; step < 32; step *= 2) {
            float left = __shfl_up_sync(FULL_WARP, x, step);
            if (lane >= step) x += left;
        }
        if (c < C) out[(size_t)row * C + c] = before + x;
        before += __shfl_sync(FULL_WARP, x, 31);
    }
}
