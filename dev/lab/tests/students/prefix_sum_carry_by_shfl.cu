// right
BLOCK(64, threads / 32)
extern "C" __global__ void my_prefix_sum(
    float* out, const real* inp, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = inp + (size_t)row * C;
    float* y = out + (size_t)row * C;
    float before = 0.0f;  // the sum of all chunks before this one
    for (int start = 0; start < C; start += 32) {
        int c = start + lane;
        float sum = c < C ? to_float(x[c]) : 0.0f;
        for (int d = 1; d < 32; d *= 2) {
            float left = __shfl_up_sync(0xffffffff, sum, d);
            if (lane >= d) sum += left;
        }
        sum += before;
        if (c < C) y[c] = sum;
        before = __shfl_sync(0xffffffff, sum, 31);
    }
}
