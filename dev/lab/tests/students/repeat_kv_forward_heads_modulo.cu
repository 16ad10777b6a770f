// wrong: out
BLOCK(128, threads)
extern "C" __global__ void my_repeat_kv_forward(
    real* out, const real* inp, int N, int NH, int NKV, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * 3 * NH * head) return;
    int c = i % head, h = i / head % NH, which = i / head / NH % 3;
    size_t row = i / head / NH / 3;
    int from = which == 0 ? h : NH + (which - 1) * NKV + h % NKV;
    out[i] = inp[(row * (NH + 2 * NKV) + from) * head + c];
}
