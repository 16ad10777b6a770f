// right
#include <cuda_runtime.h>
#include <stdint.h>
#define PER_THREAD 4
#define AT(k) (first + (size_t)(k) * blockDim.x)
enum class What : uint8_t { ADD, NOTHING };
struct Number {
    float x;
    __device__ __forceinline__ Number operator+(const Number& other) const { return {x + other.x}; }
};
template <int n, class F> __device__ __forceinline__ void repeat(F&& f) {
#pragma unroll
    for (int k = 0; k < n; ++k) f(k);
}
template <class... T> __device__ constexpr auto all_of(T... x) { return (x + ...); }
__constant__ float zero_table[2] = {0.0f, 0.0f};
static __device__ constexpr size_t tile = 4;
BLOCK(128, 4*threads)
extern "C" __global__ void __launch_bounds__(128) my_residual_forward(
    real* __restrict__ out, const real* __restrict__ inp1, const real* __restrict__ inp2, int N, int C) {
    const size_t n = static_cast<size_t>(N) * C;
    for (size_t block = blockIdx.x; block * PER_THREAD * blockDim.x < n; block += gridDim.x) {
        const size_t first = block * PER_THREAD * blockDim.x + threadIdx.x;
        repeat<PER_THREAD>([&, what = What::ADD](int k) {
            size_t i = AT(k);
            if (i >= n) goto end;
            switch (what) {
                case What::ADD: {
                    auto [sum] = Number{to_float(inp1[i])} + Number{to_float(inp2[i])};
                    if constexpr (tile == PER_THREAD) from_float(out[i], all_of(sum, zero_table[k % 2]));
                    break;
                }
                default: __trap();
            }
        end:;
        });
    }
}
