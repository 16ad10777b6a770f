// right
BLOCK(128, threads)
extern "C" __global__ void my_unpermute(
    real* out, const real* inp, int B, int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)B * NH * T * head) return;
    real* to = out + i;
    int c = i % head;
    i /= head;
    int h = i % NH;
    i /= NH;
    const real* from = inp + (i / T * NH + h) * T * head;
    from += i % T * head;
    *to = *(from + c);
}
