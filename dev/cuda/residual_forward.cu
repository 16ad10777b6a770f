// out (N,C) = inp1 + inp2. Two reads and a write for an addition: nothing to compute, only bytes to keep in flight.

// A thread a number. A warp's load is 128 bytes in fp32, 64 in bf16.
BLOCK(256, threads)
extern "C" __global__ void residual_forward1(real* __restrict__ out, const real* __restrict__ inp1,
                                             const real* __restrict__ inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)N * C) from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
}

// 16 bytes a lane, 512 a warp, so that as many warps have four or eight times as many bytes on their way. The
// trainer has no such kernel: there the addition is a part of residual_layernorm_forward. See
// fused_residual_forward.
BLOCK(1024, W * threads)
extern "C" __global__ void residual_forward2(real* __restrict__ out, const real* __restrict__ inp1,
                                             const real* __restrict__ inp2, int N, int C) {
    size_t i = first_number();
    if (i < (size_t)N * C) store(out + i, load<W>(inp1 + i) + load<W>(inp2 + i));
}
