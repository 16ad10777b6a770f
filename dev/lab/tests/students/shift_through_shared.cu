// right
BLOCK(256, threads)
extern "C" __global__ void my_shift(
    real* out, const real* inp, int N, int C) {
    __shared__ real seen[257];  // mine is at threadIdx.x + 1, my left neighbour's at threadIdx.x
    const size_t all = (size_t)N * C;
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < all) {
        seen[threadIdx.x + 1] = inp[i];
        if (threadIdx.x == 0 && i > 0) seen[0] = inp[i - 1];
    }
    __syncthreads();
    if (i >= all) return;
    if (i % C == 0)
        from_float(out[i], 0.0f);
    else
        out[i] = seen[threadIdx.x];
}
