// wrong: shared.*(KB|bytes)|(KB|bytes).*shared
BLOCK(256, 1)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    __shared__ float e[50304];  //!
    const real* x = inp + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        e[v] = expf(to_float(x[v]) - top);
        sum += e[v];
    }
    sum = block_reduce<warp_sum>(sum, 0.0f);
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(out[(size_t)blockIdx.x * Vp + v], v < V ? e[v] / sum : 0.0f);
}
