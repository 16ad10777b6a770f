// wrong: race|[Ee](ach|very) thread
BLOCK(128, threads)
extern "C" __global__ void my_swiglu_forward(
    real* out, const real* inp, int N, int H) {
    for (int row = 0; row < N; row++)
        for (int h = 0; h < H; h++) {
            const real* x = inp + (size_t)row * 2 * H + h;
            float gate = to_float(x[H]);
            from_float(out[(size_t)row * H + h], to_float(x[0]) * gate / (1.0f + expf(-gate)));  //!
        }
}
