// wrong: race.*(sum|top)
BLOCK(128, 1)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    const real* x = inp + (size_t)blockIdx.x * Vp;
    __shared__ float top, sum;
    top = LOWEST;  //!
    sum = 0.0f;  //!
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));  //!
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);  //!
    __syncthreads();
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(out[(size_t)blockIdx.x * Vp + v],
                   v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}
