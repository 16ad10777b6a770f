/*
Gradients in bf16, as --sums bf16 sends them. Compiled after kernels.cu.
*/

// wire = gradient in bf16, rounded to nearest, ties to even. Bound by memory, 6 bytes a number: a warp reads 128 bytes
// and writes 64, so it needs no wider loads, and a tensor's piece may begin anywhere. Items: n numbers.
BLOCK(256, threads)
extern "C" __global__ void gradient_to_wire(unsigned short* __restrict__ wire, const float* __restrict__ gradient,
                                            size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned bits = __float_as_uint(gradient[i]), nan = 0x7fff;
    wire[i] = (bits & 0x7fffffff) > 0x7f800000 ? nan : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// gradient = wire, exactly. Items: n numbers.
BLOCK(256, threads)
extern "C" __global__ void gradient_from_wire(float* __restrict__ gradient, const unsigned short* __restrict__ wire,
                                              size_t n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) gradient[i] = __uint_as_float((unsigned)wire[i] << 16);
}
