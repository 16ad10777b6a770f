// The Output for fused_biases.py, in place of kernels.cu's: attention's gradient also leaves sums of
// its rows, and layernorm_backward those of the new dresidual. fused_biases.cu has the functions.
#define BIAS_SUMS
struct Head;
struct Own;
__device__ void store_column_sums(float* sums, Head head, const Own& own, const real* tile);

struct Output {
    real* numbers;
    float* sums;  // see store_column_sums; null if nobody needs them
    __device__ void begin() {}
    template <int n>
    __device__ void store(size_t i, Pack<n> x) { ::store(numbers + i, x); }
    __device__ void end() {}
};
