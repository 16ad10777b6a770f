/*
The Output of FP8, for --dtype fp8, in place of that of kernels.cu. A linear layer's input is stored twice: as a real,
and as its twin, which is the same number times a scale in 8 bits. Tensor cores multiply twins twice as fast.
*/

// Of a tensor: what its twin is multiplied by, the inverse of that, and the largest magnitude stored in this step.
struct alignas(16) Scale { float inverse, scale, largest; };

#ifdef __CUDACC__
// Two fp32, rounded to nearest with ties to even, as two e4m3. What is too large, also an infinity, becomes 448, the
// largest that there is, and NaN stays. `low` becomes the lower half.
__device__ __forceinline__ unsigned short two_fp8(float low, float high) {
    unsigned short bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
    return bits;
}
#endif

struct Output {
    real* numbers;
    unsigned char* twin;  // null where no product in FP8 reads the numbers
    Scale* scale;
    float factor;   // the twin's scale
    float before;   // the largest magnitude that the tensor had when this thread began
    float largest;  // that of what this thread has stored

    __device__ __forceinline__ void begin() {
        factor = twin ? scale->scale : 0.0f, before = twin ? __ldcg(&scale->largest) : 0.0f, largest = 0.0f;
    }

    template <int n>
    __device__ __forceinline__ void store(size_t i, Pack<n> x) {
        ::store(numbers + i, x);
        if (twin) store_twin(i, x);
    }

    // x is rounded to a real first, so that a twin is the same whether it is made of registers or of stored numbers.
    template <int n>
    __device__ __forceinline__ void store_twin(size_t i, Pack<n> x) {
        struct alignas(n) { unsigned char x[n]; } twins;
        for (int j = 0; j < n; j++) {
            real rounded;
            from_float(rounded, x[j]);
            x[j] = to_float(rounded);
            largest = fmaxf(largest, fabsf(x[j]));
        }
        for (int j = 0; j < n; j += 2) {
            unsigned short two = two_fp8(factor * x[j], j + 1 < n ? factor * x[j + 1] : 0.0f);
            twins.x[j] = two;
            if (j + 1 < n) twins.x[j + 1] = two >> 8;
        }
        *reinterpret_cast<decltype(twins)*>(twin + i) = twins;
    }

    // Of floats that are not negative, the larger one has the larger bits, so a maximum of ints will do. Nearly all
    // warps have nothing larger than what was there when they began, and do nothing. The others, which are many when a
    // kernel begins, look again, since thousands that write to one place wait for each other.
    __device__ __forceinline__ void end() {
        if (!twin) return;
        largest = warp_max(largest);
        if (threadIdx.x % 32 == 0 && largest > before && largest > __ldcg(&scale->largest))
            atomicMax(reinterpret_cast<int*>(&scale->largest), (int)__float_as_uint(largest));
    }
};
