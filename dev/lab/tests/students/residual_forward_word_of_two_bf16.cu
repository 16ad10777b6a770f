// wrong: race.*out
BLOCK(256, threads)
extern "C" __global__ void my_residual_forward(
    real* out, const real* inp1, const real* inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
#ifdef BF16  // a word is two numbers: its own, and the one that the neighbour writes
    unsigned* word = (unsigned*)out + i / 2;
    unsigned short mine = two_bf16(to_float(inp1[i]) + to_float(inp2[i]), 0.0f);
    *word = i % 2 ? (*word & 0xffff) | mine << 16 : (*word & 0xffff0000) | mine;  //!
#else
    out[i] = inp1[i] + inp2[i];
#endif
}
