// The functions that kernels.cu writes in PTX, in C++, with the same names: for every GPU; hopper.h has Hopper's own.
// For cuda.h.
#pragma once

inline float power_of_2(float x) { return exp2f(x); }

inline unsigned two_bf16(float low, float high) {
    auto round = [](float x) {  // to nearest, ties to even; a NaN stays one
        unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}

// To e4m3, to nearest, ties to even: 3 bits of mantissa, exponents from -6 on, below which numbers are subnormal, and
// 448 as the largest number, to which larger ones are cut.
inline unsigned short two_fp8(float low, float high) {
    static constexpr int mantissa = 3, smallest = -6;
    static constexpr float largest = 448.0f;
    auto round = [](float x) {
        const unsigned sign = __float_as_uint(x) >> 31 << 7;
        if (x != x) return 0x7fu;
        x = min(fabsf(x), largest);
        int exponent = x > 0.0f ? max(ilogbf(x), smallest) : smallest;
        const int units = int(rintf(scalbnf(x, mantissa - exponent)));  // of the last bit
        return sign | unsigned(units + ((exponent - smallest) << mantissa));  // a carry goes into the exponent
    };
    return round(low) | round(high) << 8;
}

inline float from_fp8(unsigned bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if (exponent == 15 && mantissa == 7) return NAN;
    const float size = exponent ? scalbnf(8 + mantissa, exponent - 10) : scalbnf(mantissa, -9);
    return bits >> 7 & 1 ? -size : size;
}

// The element i = 0, 1 of a pair along the summed index, as the tensor cores see it.
template <class Pair> float element(const Pair& pair, int i) {
    if constexpr (sizeof(Pair) == 4) return __uint_as_float(i ? pair & 0xffff0000 : pair << 16);
    else {
        const float x = i ? pair.y : pair.x;
#ifdef TF32  // rounded half away from zero to ten bits of mantissa
        return x != x ? x : __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
#else
        return x;
#endif
    }
}

// Two D (16,8) side by side += A (16,16) times two B (16,8); kernels.cu says which lane holds what. The last lane to
// arrive computes for all.
template <class Pair>
void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4], const Pair (&b)[4],
              int line = __builtin_LINE()) {
    struct Lane { float* d[2]; const Pair *a, *b; };
    cuda_on_cpu::Exchange<Lane>(~0u, {{left, right}, a, b}, "mma", line, [](Lane* lanes) {
        float A[16][16], B[16][16], D[16][16] = {};
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, q = lane % 4;
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) {
                    A[g + i % 2 * 8][2 * q + i / 2 * 8 + j] = element(lanes[lane].a[i], j);
                    B[2 * q + i % 2 * 8 + j][g + i / 2 * 8] = element(lanes[lane].b[i], j);
                }
        }
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++)
                OPENMP(omp simd)
                for (int n = 0; n < 16; n++) D[m][n] += A[m][k] * B[k][n];
        for (int lane = 0; lane < 32; lane++)
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 4; i++)
                    lanes[lane].d[half][i] += D[lane / 4 + i / 2 * 8][8 * half + 2 * (lane % 4) + i % 2];
    });
}

template <bool transposed>
void load_8x8(unsigned (&x)[4], const void* row, int line) {
    struct Lane { unsigned* x; const unsigned short* row; };
    cuda_on_cpu::traffic::matrix_row(row);
    cuda_on_cpu::Exchange<Lane>(~0u, {x, static_cast<const unsigned short*>(row)}, "ldmatrix", line, [](Lane* lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int g = lane / 4, q = lane % 4;
                auto at = [&](int r, int c) { return unsigned(lanes[8 * i + r].row[c]); };
                lanes[lane].x[i] = transposed ? at(2 * q, g) | at(2 * q + 1, g) << 16
                                              : at(g, 2 * q) | at(g, 2 * q + 1) << 16;
            }
    });
}
inline void load_matrices(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) {
    load_8x8<false>(x, row, line);
}
inline void load_matrices_transposed(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) {
    load_8x8<true>(x, row, line);
}

__device__ void copy_later(void* shared, const void* global, size_t bytes) {
    cuda_on_cpu::Block& b = *cuda_on_cpu::block;
    b.copied = true;
    b.copies[thread_number()].begin(shared, global, bytes);
}
__device__ void copy16(void* shared, const void* global, bool there) {
    copy_later(shared, there ? global : nullptr, 16);
}
__device__ void copy4(void* shared, const void* global, bool there) { copy_later(shared, there ? global : nullptr, 4); }
inline void copies_end() { cuda_on_cpu::block->copies[thread_number()].closed++; }
template <int pending> void wait_for_copies() { cuda_on_cpu::block->copies[thread_number()].arrive(pending); }
