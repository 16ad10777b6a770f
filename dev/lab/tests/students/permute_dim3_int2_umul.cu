// right
BLOCK(128, threads)
extern "C" __global__ void my_permute(
    real* out, const real* inp, int B, int T, int NH, int head) {
    dim3 block = blockDim;
    size_t i = (size_t)blockIdx.x * block.x + threadIdx.x;
    if (i >= (size_t)3 * B * NH * T * head) return;
    int2 at = make_int2(i % head, i / head % T);
    size_t h = i / head / T % NH, b = i / head / T / NH % B, which = i / head / T / NH / B;
    out[i] = inp[(((b * T + at.y) * 3 + which) * NH + h) * head + at.x];
}
