// wrong: size_t|32 bits|overflow
BLOCK(32, threads)
extern "C" __global__ void my_softmax_forward(
    real* out, const real* inp, int N, int V, int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    int start = row * Vp;  // 65,536 rows of 50,304 are more than 2^31  //!
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(inp[start + v]));
    for (int v = 0; v < V; v++) sum += expf(to_float(inp[start + v]) - top);
    for (int v = 0; v < Vp; v++)
        from_float(out[start + v], v < V ? expf(to_float(inp[start + v]) - top) / sum : 0.0f);
}
