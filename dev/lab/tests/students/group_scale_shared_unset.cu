// wrong: shared memory is read that no thread
BLOCK(256, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    __shared__ float s[256];  //!
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) s[threadIdx.x] = fabsf(to_float(inp[i]));
    __syncthreads();
    float m = 0;
    for (int j = 0; j < 32; j++) m = fmaxf(m, s[threadIdx.x / 32 * 32 + j]);
    if (i < n) from_float(out[i], to_float(inp[i]) / m);
}
