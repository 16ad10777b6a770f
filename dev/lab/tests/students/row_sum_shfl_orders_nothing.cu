// wrong: race.*part.*__syncwarp
BLOCK(128, threads / 32)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    __shared__ float part[128];
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float sum = 0;
    for (int c = lane; c < C; c += 32) sum += to_float(inp[(size_t)row * C + c]);
    part[threadIdx.x] = sum;  //!
    for (int half = 16; half > 0; half /= 2) {
        float other = __shfl_down_sync(FULL_WARP, sum, half);  // it is no barrier
        if (lane < half) part[threadIdx.x] = sum = sum + other + 0 * part[threadIdx.x + half];  //!
    }
    if (lane == 0) out[row] = sum;
}
