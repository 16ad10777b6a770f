// wrong: idle|nothing to do|too many|do nothing|threads
BLOCK(128, 1)
extern "C" __global__ void my_unpermute(
    real* out, const real* inp, int B, int T, int NH, int head) {
    size_t i = blockIdx.x;
    if (threadIdx.x == 0) {
        int c = i % head, h = i / head % NH, t = i / head / NH % T, b = i / head / NH / T;
        out[i] = inp[(((size_t)b * NH + h) * T + t) * head + c];
    }
}
