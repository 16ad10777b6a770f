// wrong: out|weight|bias
BLOCK(256, 16, 16)
extern "C" __global__ void my_matmul_forward(
    real* out, const real* inp, const real* weight, const real* bias, int N, int C, int OC) {
    __shared__ float a[16][17], b[16][17];
    int x = threadIdx.x % 16, y = threadIdx.x / 16;
    int n = 16 * blockIdx.y + y, oc = 16 * blockIdx.x + x, other = 16 * blockIdx.x + y;
    float sum = 0.0f;
    for (int k = 0; k < C; k += 16) {
        a[y][x] = n < N && k + x < C ? to_float(inp[(size_t)n * C + k + x]) : 0.0f;
        b[y][x] = k + x < C ? to_float(weight[(size_t)other * C + k + x]) : 0.0f;
        __syncthreads();
        for (int j = 0; j < 16; j++) sum += a[y][j] * b[x][j];
        __syncthreads();
    }
    if (n < N) from_float(out[(size_t)n * OC + oc], sum + to_float(bias[oc]));
}
