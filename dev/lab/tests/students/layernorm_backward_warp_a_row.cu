// right
BLOCK(128, threads / 32)
extern "C" __global__ void my_layernorm_backward(
    real* dresidual, float* dweight, float* dbias, float* before, const real* dout,
    const real* inp, const real* weight, const float* mean, const float* rstd, int N, int C) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    size_t start = (size_t)row * C;
    float m = mean[row], s = rstd[row], a = 0.0f, b = 0.0f;
    for (int c = lane; c < C; c += 32) {
        float dnorm = to_float(dout[start + c]) * to_float(weight[c]);
        a += dnorm;
        b += dnorm * (to_float(inp[start + c]) - m) * s;
    }
    a = warp_sum(a) / C;
    b = warp_sum(b) / C;
    for (int c = lane; c < C; c += 32) {
        float norm = (to_float(inp[start + c]) - m) * s, d = to_float(dout[start + c]);
        float g = to_float(dresidual[start + c]) + s * (d * to_float(weight[c]) - a - norm * b);
        from_float(dresidual[start + c], g);
        atomicAdd(dweight + c, d * norm);
        atomicAdd(dbias + c, d);
        atomicAdd(before + c, g);
    }
}
