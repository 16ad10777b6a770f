// wrong: row\[1600\]|row\[1599\]|1600
BLOCK(64, 1)
extern "C" __global__ void my_prefix_sum(
    float* out, const real* inp, int N, int C) {
    __shared__ float row[1600];
    for (int c = threadIdx.x; c < C; c += blockDim.x) row[c] = to_float(inp[(size_t)blockIdx.x * C + c]);  //!
    __syncthreads();
    __shared__ float ends[64];
    int each = (C + 63) / 64, first = threadIdx.x * each, last = min(first + each, C);
    float sum = 0.0f;
    for (int c = first; c < last; c++) row[c] = sum += row[c];
    ends[threadIdx.x] = sum;
    __syncthreads();
    float before = 0.0f;
    for (int i = 0; i < threadIdx.x; i++) before += ends[i];
    for (int c = first; c < last; c++) out[(size_t)blockIdx.x * C + c] = before + row[c];
}
