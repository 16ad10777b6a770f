// right
BLOCK(128, threads)
extern "C" __global__ void my_unpermute(
    real* out, const real* inp, int B, int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T * head) return;
    int shift = 31 - __clz(head);  // head's logarithm, if it is a power of 2
    bool power = (head & (head - 1)) == 0;
    size_t c = power ? i & (head - 1) : i % head, rest = power ? i >> shift : i / head;
    size_t h = rest % NH, t = rest / NH % T, b = rest / NH / T;
    unsigned now = __activemask();
    if (now & 1u << threadIdx.x % 32) out[i] = inp[((b * NH + h) * T + t) * head + c];
}
