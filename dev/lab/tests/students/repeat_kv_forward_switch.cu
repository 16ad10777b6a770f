// right
BLOCK(128, threads)
extern "C" __global__ void my_repeat_kv_forward(
    real* out, const real* inp, int N, int NH, int NKV, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * 3 * NH * head) return;
    int c = i % head, h = i / head % NH, from = 0, group = NH / NKV;
    size_t row = i / head / NH / 3;
    switch (i / head / NH % 3) {
    case 0: from = h; break;
    case 1: from = NH + h / group; break;
    default: from = NH + NKV + h / group;
    }
    out[i] = inp[(row * (NH + 2 * NKV) + from) * head + c];
}
