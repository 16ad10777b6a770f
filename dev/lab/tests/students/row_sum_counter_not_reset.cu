// wrong: second launch.*next_row
__device__ unsigned next_row;  //!
BLOCK(128, 1)
extern "C" __global__ void my_row_sum(float* out, const real* inp, int N, int C) {
    __shared__ int row;
    if (threadIdx.x == 0) row = atomicAdd(&next_row, 1);
    __syncthreads();
    if (row >= N) return;
    float sum = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)row * C + c]);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) out[row] = sum;
}
