// right
BLOCK(256, threads)
extern "C" __global__ void my_group_scale(real* out, const real* inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    __shared__ float s[256];
    float unread[4], m;
    int which = threadIdx.x % 32;
    if (i < n) s[threadIdx.x] = fabsf(to_float(inp[i]));
    __syncthreads();
    m = 0.0f;
    for (int j = 0; j < 32; j++)
        if (i - which + j < n) m = fmaxf(m, s[threadIdx.x - which + j]);
    if (m < 0) unread[0] = m, m = unread[0];
    if (i < n) from_float(out[i], to_float(inp[i]) / m);
}
