// right
#define AT(array, row, columns, column) (array)[(size_t)(row) * (columns) + (column)]
#define SILU(x) ((x) / (1.0f + expf(-(x))))

BLOCK(128, threads)
extern "C" __global__ void my_swiglu_forward(
    real* out, const real* inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    float gate = to_float(AT(inp, i / H, 2 * H, H + i % H));
    from_float(AT(out, i / H, H, i % H), to_float(AT(inp, i / H, 2 * H, i % H)) * SILU(gate));
}
