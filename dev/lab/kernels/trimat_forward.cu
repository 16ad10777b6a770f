// att (B,NH,T,T)[t,s] = scale * q k' for s <= t, from qkv (B,T,3,NH,HS): attention's scores, of which only the lower
// triangle is needed. Numbers above it are not written.

// One thread per element: HS multiplications, and twice as many loads. Half of the threads have nothing to do.
BLOCK(1024, threads)
extern "C" __global__ void trimat_forward1(real* __restrict__ att, const real* __restrict__ qkv, float scale, int B,
                                           int T, int NH) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T * T) return;
    int s = i % T, t = i / T % T, h = i / T / T % NH, b = i / T / T / NH, C = NH * HS;
    if (s > t) return;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    const real *q = head + (size_t)t * 3 * C, *k = head + (size_t)s * 3 * C + C;
    float sum = 0.0f;
    for (int c = 0; c < HS; c++) sum += to_float(q[c]) * to_float(k[c]);
    from_float(att[i], scale * sum);
}

// Tiles of 32 x 32 in shared memory. A block above the diagonal returns at once. Items, here and below: all heads'
// tiles of keys along x, T queries along y.
BLOCK(1024, 1, 32)
extern "C" __global__ void trimat_forward2(real* __restrict__ att, const real* __restrict__ qkv, float scale, int T,
                                           int NH) {
    __shared__ float q[32][33], k[32][33];
    int tiles = (T + 31) / 32, head_number = blockIdx.x / tiles;
    int b = head_number / NH, h = head_number % NH, C = NH * HS;
    int key = blockIdx.x % tiles * 32, query = blockIdx.y * 32, i = threadIdx.x / 32, j = threadIdx.x % 32;
    if (key > query) return;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float sum = 0.0f;
    for (int c = 0; c < HS; c += 32) {
        q[i][j] = query + i < T && c + j < HS ? to_float(head[(size_t)(query + i) * 3 * C + c + j]) : 0.0f;
        k[i][j] = key + i < T && c + j < HS ? to_float(head[(size_t)(key + i) * 3 * C + C + c + j]) : 0.0f;
        __syncthreads();
        for (int n = 0; n < 32; n++) sum += q[i][n] * k[j][n];
        __syncthreads();
    }
    if (query + i < T && key + j <= query + i)
        from_float(att[((size_t)head_number * T + query + i) * T + key + j], scale * sum);
}

// 128 x 128 elements a block, 8 x 8 a thread in registers: four multiplications for a load from shared memory instead
// of a half. A thread's columns are 16 apart, so that a warp stores whole lines.
BLOCK(256, 1, 128)
extern "C" __global__ void __launch_bounds__(256) trimat_forward3(real* __restrict__ att,
                                                                  const real* __restrict__ qkv, float scale, int T,
                                                                  int NH) {
    __shared__ float q[16][129], k[16][129];
    int tiles = (T + 127) / 128, head_number = blockIdx.x / tiles;
    int b = head_number / NH, h = head_number % NH, C = NH * HS;
    int key = blockIdx.x % tiles * 128, query = blockIdx.y * 128, r = threadIdx.x / 16 * 8, j0 = threadIdx.x % 16;
    if (key > query) return;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float sum[8][8] = {};
    for (int c = 0; c < HS; c += 16) {
        for (int i = threadIdx.x; i < 128 * 16; i += 256) {
            int row = i / 16, n = c + i % 16;
            q[i % 16][row] = query + row < T && n < HS ? to_float(head[(size_t)(query + row) * 3 * C + n]) : 0.0f;
            k[i % 16][row] = key + row < T && n < HS ? to_float(head[(size_t)(key + row) * 3 * C + C + n]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += q[n][r + i] * k[n][16 * j + j0];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int t = query + r + i, s = key + 16 * j + j0;
            if (t < T && s <= t) from_float(att[((size_t)head_number * T + t) * T + s], scale * sum[i][j]);
        }
}

// Tensor cores: now the time is that of writing T x T numbers, no longer that of the arithmetic. All channels of the
// 128 queries and keys are brought to shared memory at once.
BLOCK(256, 1, 128)
extern "C" __global__ void __launch_bounds__(256) trimat_forward4(real* __restrict__ att,
                                                                  const real* __restrict__ qkv, float scale, int T,
                                                                  int NH) {
    DYNAMIC_SHARED(real, shared);  // (steps, 2, 128, tiles::LD): queries and keys
    int blocks = (T + 127) / 128, head_number = blockIdx.x / blocks, b = head_number / NH, h = head_number % NH;
    int C = NH * HS, key = blockIdx.x % blocks * 128, query = blockIdx.y * 128, warp = threadIdx.x / 32;
    int r = warp / 4 * 64, s0 = warp % 4 * 32, g = threadIdx.x % 32 / 4, pair = threadIdx.x % 4;
    if (key > query) return;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    auto tile = [&](int c, int which) { return shared + (c / tiles::STEP * 2 + which) * 128 * tiles::LD; };
    for (int c = 0; c < HS; c += tiles::STEP) {
        tiles::load<128>(tile(c, 0), head, 3 * C, query, T, c, HS);
        tiles::load<128>(tile(c, 1), head + C, 3 * C, key, T, c, HS);
    }
    copies_end();
    wait_for_copies<0>();
    __syncthreads();
    float d[4][4][4] = {};
    for (int c = 0; c < HS; c += tiles::STEP) tiles::multiply_transposed(d, tile(c, 0), r, tile(c, 1), s0);
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                int t = query + r + 16 * m + g + 8 * half, s = key + s0 + 8 * n + 2 * pair;
                real* to = att + ((size_t)head_number * T + t) * T + s;
                float x = scale * d[m][n][2 * half], y = scale * d[m][n][2 * half + 1];
                if (t >= T || s > t) continue;
                if (s + 1 <= t && T % 2 == 0) {
                    store(to, Pack<2>{x, y});
                } else {
                    from_float(to[0], x);
                    if (s + 1 <= t) from_float(to[1], y);
                }
            }
}
