// right
BLOCK(256, 1)
extern "C" __global__ void my_row_sum(
    float* out, const real* inp, int N, int C) {
    __shared__ float of_warp[8];
    const real* x = inp + (size_t)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(x[c]);
    for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffff, sum, d);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) of_warp[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    sum = lane < 8 ? of_warp[lane] : 0.0f;
    for (int d = 4; d > 0; d >>= 1) sum += __shfl_down_sync(0xffffffff, sum, d);
    if (lane == 0) out[blockIdx.x] = sum;
}
