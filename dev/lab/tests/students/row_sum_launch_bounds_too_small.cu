// wrong: launch_bounds
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(128) my_row_sum(float* out, const real* inp, int N, int C) {  //!
    float sum = 0;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += to_float(inp[(size_t)blockIdx.x * C + c]);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
