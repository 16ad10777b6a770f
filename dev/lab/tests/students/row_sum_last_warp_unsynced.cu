// wrong: race|wait|__syncwarp
BLOCK(256, 1)
extern "C" __global__ void my_row_sum(
    float* out, const real* inp, int N, int C) {
    __shared__ float part[256];
    int i = threadIdx.x;
    float sum = 0.0f;
    for (int c = i; c < C; c += 256) sum += to_float(inp[(size_t)blockIdx.x * C + c]);
    part[i] = sum;
    __syncthreads();
    if (i < 128) part[i] += part[i + 128];
    __syncthreads();
    if (i < 64) part[i] += part[i + 64];
    __syncthreads();
    if (i >= 32) return;
    part[i] += part[i + 32];  //!
    part[i] += part[i + 16];  //!
    part[i] += part[i + 8];  //!
    part[i] += part[i + 4];  //!
    part[i] += part[i + 2];  //!
    part[i] += part[i + 1];  //!
    if (i == 0) out[blockIdx.x] = part[0];
}
