// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    __shared__ float part[128];
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float sum = 0;
    for (int c = lane; c < C; c += 32) sum += to_float(inp[(size_t)row * C + c]);
    part[threadIdx.x] = sum;
    unsigned all = __ballot_sync(FULL_WARP, 1);
    __syncwarp(all);
    for (int half = 16; half > 0; half /= 2) {
        float other = lane < half ? part[threadIdx.x + half] : 0.0f;
        __syncwarp();
        part[threadIdx.x] += other;
        __syncwarp();
    }
    if (lane == 0) out[row] = part[threadIdx.x];
}
