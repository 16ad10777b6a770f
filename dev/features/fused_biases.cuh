// The Output for fused_biases.py, in place of kernels.cu's: attention's gradient also leaves sums of
// its rows, and layernorm_backward those of the new dresidual. fused_biases.cu has the functions.
#define BIAS_SUMS  // for attention_five.cu
struct Head;
struct Own;
__device__ void store_column_sums(float* sums, Head head, const Own& own, const real* tile);

struct Output {
    static constexpr int NORM_SUMS = 3;  // of layernorm_backward: the third is of the new dresidual
    real* numbers;
    float* sums;  // see store_column_sums; null if nobody needs them
    __device__ void begin() {}
    template <int n>
    __device__ void store(size_t i, Pack<n> x, Pack<n> = {}) { ::store(numbers + i, x); }
    __device__ void end() {}
    template <int n>
    __device__ Pack<n> drop(size_t, Pack<n> x) { return x; }
    template <class Head, class Own>
    __device__ void sum_columns(const Head& head, const Own& own, const real* tile) {
        store_column_sums(sums, head, own, tile);
    }
};
