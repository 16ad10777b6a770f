// wrong: [Ee](ach|very) thread|loop|work
BLOCK(256, threads)
extern "C" __global__ void my_residual_forward(
    real* out, const real* inp1, const real* inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;

    for (size_t j = 0; j < (size_t)N * C; j++)
        if (j == i) from_float(out[j], to_float(inp1[j]) + to_float(inp2[j]));
}
