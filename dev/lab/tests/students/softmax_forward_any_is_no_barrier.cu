// wrong: race.*top.*orders no memory
BLOCK(64, threads / 32)
extern "C" __global__ void my_softmax_forward(real* out, const real* inp, int N, int V, int Vp) {
    __shared__ float top[2][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = blockIdx.x * 2 + warp;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float largest = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) largest = fmaxf(largest, to_float(x[v]));
    top[warp][lane] = largest;  //!
    if (__any_sync(FULL_WARP, largest > LOWEST))
        for (int j = 0; j < 32; j++) largest = fmaxf(largest, top[warp][j]);  //!
    for (int v = lane; v < V; v += 32) sum += expf(to_float(x[v]) - largest);
    sum = warp_sum(sum);
    for (int v = lane; v < Vp; v += 32)
        from_float(out[(size_t)row * Vp + v], v < V ? expf(to_float(x[v]) - largest) / sum : 0.0f);
}
