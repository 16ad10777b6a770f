// right
__device__ void add(float* p, float x) {
    unsigned int* bits = (unsigned int*)p;
    unsigned int seen = *bits, before;
    do {
        before = seen;
        seen = atomicCAS(bits, before, __float_as_uint(__uint_as_float(before) + x));
    } while (seen != before);
}

BLOCK(256, threads)
extern "C" __global__ void my_encoder_backward(
    float* dwte, float* dwpe, const real* dout, const int* tokens, int N, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    int row = i / C, c = i % C;
    add(&dwte[(size_t)tokens[row] * C + c], to_float(dout[i]));
    add(&dwpe[(size_t)(row % T) * C + c], to_float(dout[i]));
}
