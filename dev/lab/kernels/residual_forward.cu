// out (N,C) = inp1 + inp2. Two reads and a write for an addition: nothing to compute, only bytes to keep in flight.

// One thread per number. A warp's load is 128 bytes in fp32, 64 in bf16.
BLOCK(256, threads)
extern "C" __global__ void residual_forward1(real* __restrict__ out, const real* __restrict__ inp1,
                                             const real* __restrict__ inp2, int N, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < (size_t)N * C) from_float(out[i], to_float(inp1[i]) + to_float(inp2[i]));
}

// 16 bytes per lane, 512 per warp, so that the same number of warps has four or eight times as many bytes under way.
// The trainer has no such kernel; there the addition is part of residual_layernorm_forward. See fused_residual_forward.
BLOCK(1024, W * threads)
extern "C" __global__ void residual_forward2(real* __restrict__ out, const real* __restrict__ inp1,
                                             const real* __restrict__ inp2, int N, int C) {
    size_t i = first_number();
    if (i < (size_t)N * C) store(out + i, load<W>(inp1 + i) + load<W>(inp2 + i));
}

namespace residual_forward_ {

__device__ __forceinline__ Pack<W> load_once(const real* p) {
    uint4 bits = __ldcs(reinterpret_cast<const uint4*>(p));
    Stored<W, real> numbers;
    memcpy(&numbers, &bits, sizeof bits);
    return load<W>(numbers.x);
}
__device__ __forceinline__ void store_away(real* p, Pack<W> x) {
    Stored<W, real> numbers;
    store(numbers.x, x);
    uint4 bits;
    memcpy(&bits, &numbers, sizeof bits);
    __stcs(reinterpret_cast<uint4*>(p), bits);
}

}  // namespace residual_forward_

// The same with streaming loads and stores. They tell the caches that these bytes will not be needed again soon, so
// that their lines are evicted first. In the lab nothing else needs the cache, and it is slower than version 2 by 3 to
// 5%. It pays where data that are used again, such as a weight or a table, share the cache with data that pass once,
// such as gradients on their way to AdamW. It costs time where the next kernel reads what this one writes: in training
// the 25 MB of a residual stream would be in L2, and now they may come from device memory.
BLOCK(1024, W * threads)
extern "C" __global__ void residual_forward3(real* __restrict__ out, const real* __restrict__ inp1,
                                             const real* __restrict__ inp2, int N, int C) {
    using namespace residual_forward_;
    size_t i = first_number();
    if (i < (size_t)N * C) store_away(out + i, load_once(inp1 + i) + load_once(inp2 + i));
}
