// For --recompute 2 of Llama 3: llama3.cu's residual_rmsnorm_forward with another place for the sum.

// As residual_rmsnorm_forward, but x (N,C) = before (N,C) + branch (N,C), and before stays. If branch
// is null, x is there already. x and before may not overlap, unless they are the same. Items: N rows.
BLOCK(256, threads / 32)
extern "C" __global__ void __launch_bounds__(256, 4) residual_rmsnorm_into(
    Output out, float* __restrict__ rstd, real* __restrict__ copy, float* x, const float* before,
    const real* __restrict__ branch, const real* __restrict__ weight, float eps, int N) {
    constexpr int C = CHANNELS;
    out.begin();
#pragma unroll 1
    for (int turn = 0; turn < ROW_WARPS; turn++) {
        int row = (blockIdx.x * ROW_WARPS + turn) * ROWS_AT_ONCE + threadIdx.x / ROW_LANES;
        size_t start = (size_t)row * C;
        Pack<4> v[row_packs<4>];
        float sum = 0.0f;
        if (row < N) {
            each_row_pack<4>([&](int k, int c) { v[k] = load<4>((branch ? before : x) + start + c); });
            if (branch) {
                each_row_pack<4>([&](int k, int c) {
                    v[k] = v[k] + out.drop(start + c, load<4>(branch + start + c));
                });
                each_row_pack<4>([&](int k, int c) { store(x + start + c, v[k]); });
            }
            each_row_pack<4>([&](int k, int c) {
                store(copy + start + c, v[k]);
                for (int i = 0; i < 4; i++) sum += v[k][i] * v[k][i];
            });
        }
        float s = 1.0f / sqrtf(sum_over_row(sum, turn) / C + eps);
        if (row >= N) continue;  // not earlier: all threads need the barrier
        each_row_pack<4>([&](int k, int c) {
            Pack<4> w = load<4>(weight + c);
            for (int i = 0; i < 4; i++) v[k][i] *= s * w[i];
            out.store(start + c, v[k]);
        });
        if (threadIdx.x % ROW_LANES == 0) rstd[row] = s;
    }
    out.end();
}
