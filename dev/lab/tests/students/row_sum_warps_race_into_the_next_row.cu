// wrong: race on parts\[0\].*between line 12 and line 10 of the next turn
BLOCK(256, 4)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    __shared__ float parts[8];
    for (int row = 4 * blockIdx.x; row < 4 * blockIdx.x + 4; row++) {
        float sum = 0.0f, total = 0.0f;
        for (int c = threadIdx.x; row < N && c < C; c += 256)
            sum += to_float(inp[(size_t)row * C + c]);
        for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
        if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;  //!
        __syncthreads();
        for (int i = 0; i < 8; i++) total += parts[i];  //!
        if (threadIdx.x == 0 && row < N) out[row] = total;
    }
}
