// wrong: race.*part.*__syncwarp
BLOCK(256, threads / 32)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    __shared__ float part[256];
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    float sum = 0;
    for (int c = lane; c < C; c += 32) sum += to_float(inp[(size_t)row * C + c]);
    part[threadIdx.x] = sum;  //!
    __ballot_sync(0xffffffff, 1);  // no __syncwarp
    if (lane == 0) {
        float all = 0;
        for (int j = 0; j < 32; j++) all += part[threadIdx.x + j];  //!
        out[row] = all;
    }
}
