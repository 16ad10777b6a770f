/*
The Output for --dtype fp8, in place of kernels.cu's. A linear layer's input is stored twice: as a real, and as its
twin, the same number times a scale in 8 bits. Tensor cores multiply twins twice as fast.
*/

// Of a tensor: the factor of its twin, its inverse, and the largest magnitude stored in this step.
struct alignas(16) Scale { float inverse, scale, largest; };

#ifdef __CUDACC__
// Two fp32 as two e4m3, rounded to nearest with ties to even. Numbers that are too large become 448, the largest; NaN
// stays. `low` becomes the lower half.
__device__ __forceinline__ unsigned short two_fp8(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

// The instruction turns infinity into 448, too, which would hide it: many twins are all that is kept of a tensor. So an
// infinity becomes NaN, and a product with it, and the loss or the gradient's norm. `largest`: no |x| is larger.
template <int n>
__device__ __forceinline__ void show_infinities(Pack<n>& x, float largest) {
    if (largest <= -LOWEST) return;
    for (int j = 0; j < n; j++)
        if (fabsf(x[j]) > -LOWEST) x[j] -= x[j];
}

// Besides, what dev/features/fused_biases.cuh's Output has: sums of gradients' rows.
#define BIAS_SUMS  // for attention_five.cu
struct Head;
struct Own;
__device__ void store_column_sums(float* sums, Head head, const Own& own, const real* tile);

struct Output {
    static constexpr int NORM_SUMS = 3;  // of layernorm_backward: the third is of the new dresidual
    real* numbers;        // null if only FP8 products read them
    unsigned char* twin;  // null if no FP8 product reads the numbers
    Scale* scale;
    float* sums;    // see dev/features/fused_biases.cu; null if nobody needs them
    float factor;   // the twin's scale
    float before;   // the tensor's largest magnitude when this thread began
    float largest;  // the largest that this thread has stored

    __device__ __forceinline__ void begin() {
        factor = twin ? scale->scale : 0.0f;
        before = twin ? __ldcg(&scale->largest) : 0.0f;
        largest = 0.0f;
    }

    template <int n>
    __device__ __forceinline__ void store(size_t i, Pack<n> x, Pack<n> = {}) {
        if (numbers) ::store(numbers + i, x);
        if (twin) store_twin(i, x);
    }

    template <int n>
    static __device__ Pack<n> drop(size_t, Pack<n> x) { return x; }
    template <class Head, class Own>
    __device__ void sum_columns(const Head& head, const Own& own, const real* tile) {
        store_column_sums(sums, head, own, tile);
    }

    // x is rounded to a real first, so that a twin made from registers is the same as one made from stored numbers.
    template <int n>
    __device__ __forceinline__ void store_twin(size_t i, Pack<n> x) {
        struct alignas(n) { unsigned char x[n]; } twins;
        for (int j = 0; j < n; j++) {
            real rounded;
            from_float(rounded, x[j]);
            x[j] = to_float(rounded);
            largest = fmaxf(largest, fabsf(x[j]));
        }
        show_infinities(x, largest);
        for (int j = 0; j < n; j += 2) {
            unsigned short two = two_fp8(factor * x[j], j + 1 < n ? factor * x[j + 1] : 0.0f);
            twins.x[j] = two;
            if (j + 1 < n) twins.x[j + 1] = two >> 8;
        }
        *reinterpret_cast<decltype(twins)*>(twin + i) = twins;
    }

    // For nonnegative floats, a larger number has larger bits, so a maximum of ints works. Most warps have nothing
    // larger than what was there when they began, and do nothing. The others, many when a kernel begins, check again
    // first, since thousands of atomics on one address would wait for each other.
    __device__ __forceinline__ void end() {
        if (!twin) return;
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0 && largest > before && largest > __ldcg(&scale->largest))
            atomicMax(reinterpret_cast<int*>(&scale->largest), (int)__float_as_uint(largest));
    }
};
