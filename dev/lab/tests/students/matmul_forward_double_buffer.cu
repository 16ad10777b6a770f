// right
BLOCK(256, 16, 16)
extern "C" __global__ void my_matmul_forward(
    real* out, const real* inp, const real* weight, const real* bias, int N, int C, int OC) {
    __shared__ float a[2][16][17], b[2][16][17];
    int x = threadIdx.x % 16, y = threadIdx.x / 16, stage = 0;
    int n = min(16 * (int)blockIdx.y + y, N - 1), oc = 16 * blockIdx.x + x;
    const real *from_a = inp + (size_t)n * C + x;
    const real *from_b = weight + (size_t)min(16 * (int)blockIdx.x + y, OC - 1) * C + x;
    float sum = 0.0f;
    a[0][y][x] = to_float(from_a[0]);
    b[0][y][x] = to_float(from_b[0]);
    __syncthreads();
    for (int k = 0; k < C; k += 16, stage ^= 1) {  // one barrier a tile: there are two buffers
        if (k + 16 < C) {
            a[!stage][y][x] = to_float(from_a[k + 16]);
            b[!stage][y][x] = to_float(from_b[k + 16]);
        }
        for (int j = 0; j < 16; j++) sum += a[stage][y][j] * b[stage][x][j];
        __syncthreads();
    }
    if (16 * blockIdx.y + y < N && oc < OC)
        from_float(out[(size_t)n * OC + oc], sum + to_float(bias[oc]));
}
