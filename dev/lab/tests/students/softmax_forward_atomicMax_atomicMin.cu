// right
BLOCK(256, 1)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    const real* x = inp + (size_t)blockIdx.x * Vp;
    __shared__ float top, sum;
    if (threadIdx.x == 0) top = __int_as_float(0xff800000), sum = 0.0f;  // -infinity
    __syncthreads();
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        float value = to_float(x[v]);  // bits are ordered as floats are, negative ones backwards
        if (__float_as_int(value) >= 0)
            atomicMax((int*)&top, __float_as_int(value));
        else
            atomicMin((unsigned int*)&top, __float_as_uint(value));
    }
    __syncthreads();
    float mine = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) mine += expf(to_float(x[v]) - top);
    atomicAdd(&sum, mine);
    __syncthreads();
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(out[(size_t)blockIdx.x * Vp + v],
                   v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}
