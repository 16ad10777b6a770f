// wrong: cannot be launched.*201,\d+ bytes.*of its own.*221,184 threads.*45 GB on an A100
BLOCK(32, threads)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float e[50304], top = LOWEST, sum = 0.0f;  //!
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));
    for (int v = 0; v < V; v++) sum += e[v] = expf(to_float(x[v]) - top);
    for (int v = 0; v < Vp; v++) from_float(out[(size_t)row * Vp + v], v < V ? e[v] / sum : 0.0f);
}
