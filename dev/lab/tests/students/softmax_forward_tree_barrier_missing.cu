// wrong: race.*part
BLOCK(256, 1)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    __shared__ float part[256];
    const real* x = inp + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += 256) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += 256) sum += expf(to_float(x[v]) - top);
    part[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];  //!
    }
    for (int v = threadIdx.x; v < Vp; v += 256) {
        float p = v < V ? expf(to_float(x[v]) - top) / part[0] : 0.0f;  //!
        from_float(out[(size_t)blockIdx.x * Vp + v], p);
    }
}
