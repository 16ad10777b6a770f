// wrong: race|wait|order
BLOCK(256, 1)
extern "C" __global__ void my_row_sum(
    float* out, const real* inp, int N, int C) {
    __shared__ float total;
    if (threadIdx.x == 0) total = 0.0f;  //!
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)blockIdx.x * C + c]);
    atomicAdd(&total, sum);  //!
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = total;
}
