// wrong: int overflows.*N=65536
BLOCK(256, threads / 32)
extern "C" __global__ void my_softmax_forward(real* out, const real* inp, int N, int V, int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    int at = row * Vp;  //!
    float largest = LOWEST, sum = 0.0f;
    for (int v = lane; v < V; v += 32) largest = fmaxf(largest, to_float(inp[at + v]));
    largest = warp_max(largest);
    for (int v = lane; v < V; v += 32) sum += expf(to_float(inp[at + v]) - largest);
    sum = warp_sum(sum);
    for (int v = lane; v < Vp; v += 32)
        from_float(out[at + v], v < V ? expf(to_float(inp[at + v]) - largest) / sum : 0.0f);
}
