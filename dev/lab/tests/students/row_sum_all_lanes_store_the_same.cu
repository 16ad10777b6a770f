// right
BLOCK(256, threads / 32)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float sum = 0;
    for (int c = lane; c < C; c += 32) sum += to_float(inp[(size_t)row * C + c]);
    out[row] = warp_sum(sum);
}
