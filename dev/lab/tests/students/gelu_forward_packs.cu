// right
BLOCK(256, W * threads)
extern "C" __global__ void my_gelu_forward(
    real* out, const real* inp, int N, int OC) {
    size_t i = first_number(), n = (size_t)N * OC;
    if (i >= n) return;  // OC is a multiple of 32, so a pack never crosses the end
    Pack<W> x = load<W>(inp + i);
    for (int j = 0; j < W; j++)
        x[j] = x[j] / (1.0f + expf(-1.5957691f * (x[j] + 0.044715f * x[j] * x[j] * x[j])));
    store(out + i, x);
}
