// right
BLOCK(256, threads)
extern "C" __global__ void my_group_scale(
    real* out, const real* inp, int n) {
    __shared__ float sizes[256];
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float x = 0.0f;
    if (i < n) x = to_float(inp[i]);
    sizes[threadIdx.x] = fabsf(x);
    __syncwarp();  // only my warp reads what my warp wrote
    float largest = 0.0f;
    int first = threadIdx.x & ~31;
#pragma unroll
    for (int lane = 0; lane < 32; ++lane) largest = fmaxf(largest, sizes[first + lane]);
    if (i < n) from_float(out[i], x / largest);
}
