// CUDA's numbers of 16 bits, __half and __nv_bfloat16, for a file that includes cuda_fp16.h or cuda_bf16.h.
//
// Arithmetic is done in fp32 and rounded to nearest, ties to even. A sum or a product of two such numbers is exact
// enough in fp32 that this is what a GPU computes; __hfma is rounded once as well.
#pragma once

namespace cuda_on_cpu {

// The bits of a number with 5 or 8 bits of exponent.
template <int exponent_bits> unsigned short rounded(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    if (x != x) return 0x7fff;
    if constexpr (exponent_bits == 8) return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    const float size = fabsf(x);
    if (size >= 65520.0f) return (unsigned short)(sign | 0x7c00);                     // infinity
    if (size < 0x1p-14f) return (unsigned short)(sign | unsigned(rintf(size * 0x1p24f)));  // subnormal: units of 2^-24
    const unsigned magnitude = bits & 0x7fffffff;
    return (unsigned short)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13));
}
template <int exponent_bits> float widened(unsigned short bits) {
    if constexpr (exponent_bits == 8) return __uint_as_float(unsigned(bits) << 16);
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint(float(fraction) * 0x1p-24f));
    return __uint_as_float(sign | (exponent == 31 ? 255u : exponent + 112) << 23 | fraction << 13);
}

template <int exponent_bits> struct Half {
    unsigned short bits;

    Half() = default;
    template <class T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
    Half(T x) : bits(rounded<exponent_bits>(float(x))) {}
    operator float() const { return widened<exponent_bits>(bits); }
    static Half of(unsigned short bits) {
        Half x;
        x.bits = bits;
        return x;
    }
    Half operator-() const { return of((unsigned short)(bits ^ 0x8000)); }
    Half& operator+=(Half b) { return *this = *this + b; }
    Half& operator-=(Half b) { return *this = *this - b; }
    Half& operator*=(Half b) { return *this = *this * b; }
    Half& operator/=(Half b) { return *this = *this / b; }
    // Friends are found by arguments of this type alone, so that half * float is a float.
    friend Half operator+(Half a, Half b) { return float(a) + float(b); }
    friend Half operator-(Half a, Half b) { return float(a) - float(b); }
    friend Half operator*(Half a, Half b) { return float(a) * float(b); }
    friend Half operator/(Half a, Half b) { return float(a) / float(b); }
};
template <int e> constexpr bool shuffles<Half<e>> = true;

template <int e> struct alignas(4) Half2 {
    Half<e> x, y;

    Half2() = default;
    Half2(Half<e> x, Half<e> y) : x(x), y(y) {}
    friend Half2 operator+(Half2 a, Half2 b) { return {a.x + b.x, a.y + b.y}; }
    friend Half2 operator-(Half2 a, Half2 b) { return {a.x - b.x, a.y - b.y}; }
    friend Half2 operator*(Half2 a, Half2 b) { return {a.x * b.x, a.y * b.y}; }
    friend Half2 operator/(Half2 a, Half2 b) { return {a.x / b.x, a.y / b.y}; }
};
template <int e> constexpr bool shuffles<Half2<e>> = true;

}  // namespace cuda_on_cpu

using __half = cuda_on_cpu::Half<5>;
using __nv_bfloat16 = cuda_on_cpu::Half<8>;
using __half2 = cuda_on_cpu::Half2<5>;
using __nv_bfloat162 = cuda_on_cpu::Half2<8>;
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

#define OF_BOTH(Name, H, H2, name, ushort_name)                                                                       \
    __device__ H __float2##name(float x) { return x; }                                                                \
    __device__ H __float2##name##_rn(float x) { return x; }                                                           \
    __device__ H __double2##name(double x) { return float(x); }                                                       \
    __device__ H __int2##name##_rn(int x) { return x; }                                                               \
    __device__ float __##name##2float(H x) { return x; }                                                              \
    __device__ int __##name##2int_rn(H x) { return __float2int_rn(x); }                                               \
    __device__ int __##name##2int_rz(H x) { return __float2int_rz(x); }                                               \
    __device__ H2 __float2##name##2_rn(float x) { return {x, x}; }                                                    \
    __device__ H2 __floats2##name##2_rn(float x, float y) { return {x, y}; }                                          \
    __device__ H2 __float22##name##2_rn(float2 x) { return {x.x, x.y}; }                                              \
    __device__ float2 __##name##22float2(H2 x) { return {x.x, x.y}; }                                                 \
    __device__ H2 __halves2##name##2(H x, H y) { return {x, y}; }                                                     \
    __device__ H2 __##name##2##name##2(H x) { return {x, x}; }                                                        \
    __device__ H2 make_##ushort_name##2(H x, H y) { return {x, y}; }                                                  \
    __device__ unsigned short __##ushort_name##_as_ushort(H x) { return x.bits; }                                     \
    __device__ short __##ushort_name##_as_short(H x) { return short(x.bits); }                                        \
    __device__ H __ushort_as_##ushort_name(unsigned short bits) { return H::of(bits); }                               \
    __device__ H __short_as_##ushort_name(short bits) { return H::of((unsigned short)bits); }                         \
    __device__ float __low2float(H2 x) { return x.x; }                                                                \
    __device__ float __high2float(H2 x) { return x.y; }                                                               \
    __device__ H __low2##name(H2 x) { return x.x; }                                                                   \
    __device__ H __high2##name(H2 x) { return x.y; }                                                                  \
    __device__ H __hadd(H a, H b) { return a + b; }                                                                   \
    __device__ H __hsub(H a, H b) { return a - b; }                                                                   \
    __device__ H __hmul(H a, H b) { return a * b; }                                                                   \
    __device__ H __hdiv(H a, H b) { return a / b; }                                                                   \
    __device__ H __hneg(H a) { return -a; }                                                                           \
    __device__ H __habs(H a) { return H::of(a.bits & 0x7fff); }                                                       \
    __device__ H __hfma(H a, H b, H c) { return float(double(float(a)) * float(b) + float(c)); }                      \
    __device__ H __hmax(H a, H b) { return fmaxf(a, b); }                                                             \
    __device__ H __hmin(H a, H b) { return fminf(a, b); }                                                             \
    __device__ bool __heq(H a, H b) { return float(a) == float(b); }                                                  \
    __device__ bool __hlt(H a, H b) { return float(a) < float(b); }                                                   \
    __device__ bool __hgt(H a, H b) { return float(a) > float(b); }                                                   \
    __device__ bool __hisnan(H a) { return a != a; }                                                                  \
    __device__ H hexp(H x) { return expf(x); }                                                                        \
    __device__ H hlog(H x) { return logf(x); }                                                                        \
    __device__ H hsqrt(H x) { return sqrtf(x); }                                                                      \
    __device__ H hrsqrt(H x) { return rsqrtf(x); }                                                                    \
    __device__ H2 __hadd2(H2 a, H2 b) { return a + b; }                                                               \
    __device__ H2 __hsub2(H2 a, H2 b) { return a - b; }                                                               \
    __device__ H2 __hmul2(H2 a, H2 b) { return a * b; }                                                               \
    __device__ H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }                \
    __device__ H2 __hmax2(H2 a, H2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                                \
    __device__ H2 __hmin2(H2 a, H2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                                \
    __device__ H atomicAdd(H* p, H value) {                                                                           \
        auto sum = [=](unsigned short old) { return (H::of(old) + value).bits; };                                     \
        return H::of(cuda_on_cpu::change(&p->bits, sum));                                                             \
    }
OF_BOTH(Half, __half, __half2, half, half)
OF_BOTH(Bfloat16, __nv_bfloat16, __nv_bfloat162, bfloat16, bfloat16)
#undef OF_BOTH
__device__ __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
__device__ __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
