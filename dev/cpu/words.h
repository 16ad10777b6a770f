// CUDA's functions of numbers: those that C++ has not. For cuda.h.
//
// The fast functions of a GPU, such as __expf, are made of its approximations of 2^x, log2 x, sin and cos, whose arguments
// are multiplied in fp32 first: so __sinf of a large angle is off by the rounding of that product. Here that product is
// rounded alike, and the approximation has the largest error that the CUDA programming guide gives.
#pragma once

using std::max;
using std::min;
// A NaN beside a number is left out, as by fmaxf; and, as on a GPU, both need not be of one type.
#define MIN_AND_MAX(A, B, lesser, greater)                                \
    __device__ auto min(A a, B b) -> decltype(a + b) { return lesser; }   \
    __device__ auto max(A a, B b) -> decltype(a + b) { return greater; }
#define FLOATS(A, B, of) MIN_AND_MAX(A, B, fmin##of(a, b), fmax##of(a, b))
#define MIXED(A, B) MIN_AND_MAX(A, B, min<decltype(a + b)>(a, b), max<decltype(a + b)>(a, b))
FLOATS(float, float, f) FLOATS(double, double, ) FLOATS(float, double, ) FLOATS(double, float, )
MIXED(int, unsigned) MIXED(unsigned, int) MIXED(long, unsigned long) MIXED(unsigned long, long)
MIXED(long long, unsigned long long) MIXED(unsigned long long, long long)
#undef MIN_AND_MAX
#undef FLOATS
#undef MIXED
__device__ unsigned umin(unsigned a, unsigned b) { return min(a, b); }
__device__ unsigned umax(unsigned a, unsigned b) { return max(a, b); }

// ---- floats ----

__device__ float rsqrtf(float x) { return 1.0f / sqrtf(x); }
__device__ double rsqrt(double x) { return 1.0 / sqrt(x); }
__device__ float rcbrtf(float x) { return 1.0f / cbrtf(x); }
__device__ double rcbrt(double x) { return 1.0 / cbrt(x); }
__device__ float fdividef(float a, float b) { return a / b; }
__device__ float rhypotf(float a, float b) { return 1.0f / hypotf(a, b); }
__device__ float norm3df(float a, float b, float c) { return sqrtf(a * a + b * b + c * c); }
__device__ float rnorm3df(float a, float b, float c) { return 1.0f / norm3df(a, b, c); }
__device__ float normcdff(float x) { return 0.5f * erfcf(-0.70710678118654752f * x); }
__device__ double normcdf(double x) { return 0.5 * erfc(-0.70710678118654752 * x); }
// Of a multiple of pi. The remainder is exact, so the rounding of pi does not grow with x.
__device__ float sinpif(float x) { return float(sin(3.14159265358979324 * remainder(double(x), 2.0))); }
__device__ float cospif(float x) { return float(cos(3.14159265358979324 * remainder(double(x), 2.0))); }
__device__ void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
#ifdef __APPLE__
inline float exp10f(float x) { return __exp10f(x); }
inline double exp10(double x) { return __exp10(x); }
inline void sincosf(float x, float* s, float* c) { __sincosf(x, s, c); }
inline void sincos(double x, double* s, double* c) { __sincos(x, s, c); }
#endif
__device__ float __saturatef(float x) { return x > 0.0f ? fminf(x, 1.0f) : 0.0f; }  // of a NaN: 0

// The C library has these names too, for functions that nobody can link to.
#define __expf cuda_expf
#define __exp10f cuda_exp10f
#define __logf cuda_logf
#define __log2f cuda_log2f
#define __log10f cuda_log10f
#define __powf cuda_powf
#define __sinf cuda_sinf
#define __cosf cuda_cosf
#define __tanf cuda_tanf
#define __tanhf cuda_tanhf
#define __sincosf cuda_sincosf
#define __fdividef cuda_fdividef
// Rounded by itself: a product is never one with the sum behind it.
namespace cuda_on_cpu {
template <class T> __device__ T apart(T x) {
    asm("" : "+m"(x));
    return x;
}
template <class T> __device__ T sum(T a, T b) { return apart(apart(a) + apart(b)); }
}  // namespace cuda_on_cpu
__device__ float __fadd_rn(float a, float b) { return cuda_on_cpu::sum(a, b); }
__device__ float __fsub_rn(float a, float b) { return cuda_on_cpu::sum(a, -b); }
__device__ float __fmul_rn(float a, float b) { return cuda_on_cpu::apart(a * b); }
__device__ float __fdiv_rn(float a, float b) { return a / b; }
__device__ float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
__device__ float __frcp_rn(float x) { return 1.0f / x; }
__device__ float __fsqrt_rn(float x) { return sqrtf(x); }
__device__ float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
__device__ double __dadd_rn(double a, double b) { return cuda_on_cpu::sum(a, b); }
__device__ double __dsub_rn(double a, double b) { return cuda_on_cpu::sum(a, -b); }
__device__ double __dmul_rn(double a, double b) { return cuda_on_cpu::apart(a * b); }
__device__ double __ddiv_rn(double a, double b) { return a / b; }
__device__ double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
__device__ double __drcp_rn(double x) { return 1.0 / x; }
__device__ double __dsqrt_rn(double x) { return sqrt(x); }

// ---- the fast functions ----

namespace cuda_on_cpu {
// Numbers too small for an exponent become 0, as on a GPU.
__device__ float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? 0.0f * x : x; }
__device__ float fast_exp2(float x) { return flushed(exp2f(flushed(x)) * 1.0000001f); }
// Off by 2^-22 near 1, where the logarithm is small.
__device__ float fast_log2(float x) { return log2f(flushed(x)) + (0.5f < x && x < 2.0f ? 2.4e-7f : 0.0f); }
// Of an angle: how many turns, rounded; what is left of the last one, in radians; off by 2^-21.
__device__ double last_turn(float x) { return 6.283185307179586 * remainder(double(apart(x * 0.15915494f)), 1.0); }
}  // namespace cuda_on_cpu
__device__ float __expf(float x) { return cuda_on_cpu::fast_exp2(cuda_on_cpu::apart(x * 1.44269504f)); }
__device__ float __exp10f(float x) { return cuda_on_cpu::fast_exp2(cuda_on_cpu::apart(x * 3.32192809f)); }
__device__ float __log2f(float x) { return cuda_on_cpu::fast_log2(x); }
__device__ float __logf(float x) { return cuda_on_cpu::fast_log2(x) * 0.693147181f; }
__device__ float __log10f(float x) { return cuda_on_cpu::fast_log2(x) * 0.301029996f; }
__device__ float __powf(float x, float y) {
    return cuda_on_cpu::fast_exp2(cuda_on_cpu::apart(y * cuda_on_cpu::fast_log2(x)));
}
__device__ float __sinf(float x) { return float(sin(cuda_on_cpu::last_turn(x))) + 3.6e-7f; }
__device__ float __cosf(float x) { return float(cos(cuda_on_cpu::last_turn(x))) + 3.6e-7f; }
__device__ void __sincosf(float x, float* s, float* c) { *s = __sinf(x), *c = __cosf(x); }
__device__ float __tanf(float x) { return __sinf(x) / __cosf(x); }
__device__ float __tanhf(float x) { return tanhf(x) * 1.0005f; }  // tanh.approx has 11 bits
// A divisor beyond 2^126 gives 0.
__device__ float __fdividef(float a, float b) { return fabsf(b) > 8.507059e37f && fabsf(b) <= FLT_MAX ? 0.0f * a : a / b; }

// ---- from one type to another ----

namespace cuda_on_cpu {
// A whole number as an integer: the nearest that there is. A NaN becomes 0; a double, the highest bit alone.
template <class To, class From> __device__ To integer(From x) {
    using Limits = std::numeric_limits<To>;
    if (x != x) return sizeof(From) == 8 ? To(1ull << (8 * sizeof(To) - 1)) : 0;
    if (x <= From(Limits::min())) return Limits::min();
    return x >= From(Limits::max()) ? Limits::max() : To(x);
}
}  // namespace cuda_on_cpu
#define TO_INTEGER(from, From, name, To)                                                                             \
    __device__ To __##from##2##name##_rn(From x) { return cuda_on_cpu::integer<To>(std::rint(x)); }                  \
    __device__ To __##from##2##name##_rz(From x) { return cuda_on_cpu::integer<To>(std::trunc(x)); }                 \
    __device__ To __##from##2##name##_rd(From x) { return cuda_on_cpu::integer<To>(std::floor(x)); }                 \
    __device__ To __##from##2##name##_ru(From x) { return cuda_on_cpu::integer<To>(std::ceil(x)); }
TO_INTEGER(float, float, int, int) TO_INTEGER(float, float, uint, unsigned)
TO_INTEGER(float, float, ll, long long) TO_INTEGER(float, float, ull, unsigned long long)
TO_INTEGER(double, double, int, int) TO_INTEGER(double, double, uint, unsigned)
TO_INTEGER(double, double, ll, long long) TO_INTEGER(double, double, ull, unsigned long long)
#undef TO_INTEGER
__device__ float __int2float_rn(int x) { return float(x); }
__device__ float __uint2float_rn(unsigned x) { return float(x); }
__device__ float __ll2float_rn(long long x) { return float(x); }
__device__ float __ull2float_rn(unsigned long long x) { return float(x); }
__device__ float __double2float_rn(double x) { return float(x); }
__device__ double __int2double_rn(int x) { return x; }
__device__ double __uint2double_rn(unsigned x) { return x; }
__device__ double __ll2double_rn(long long x) { return double(x); }

// ---- bits and integers ----

__device__ int __popc(unsigned x) { return __builtin_popcount(x); }
__device__ int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
__device__ int __ffs(int x) { return __builtin_ffs(x); }  // from 1 on; 0 if there is none
__device__ int __ffsll(long long x) { return __builtin_ffsll(x); }
__device__ int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
__device__ int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
__device__ unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
__device__ unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev(unsigned(x)) << 32 | __brev(unsigned(x >> 32));
}
// Four of the eight bytes of low and high, as the four lowest digits of the selector say.
__device__ unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const unsigned long long all = (unsigned long long)high << 32 | low;
    unsigned chosen = 0;
    for (int i = 0; i < 4; i++) chosen |= unsigned(all >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return chosen;
}
// The product of the lower 24 bits.
__device__ unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
__device__ int __mul24(int a, int b) {
    auto lower = [](int x) { return unsigned(int(unsigned(x) << 8) >> 8); };
    return int(lower(a) * lower(b));
}
// The upper half of a product.
__device__ int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
__device__ unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
__device__ long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
__device__ unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
__device__ unsigned __sad(int a, int b, unsigned c) {
    return c + (a < b ? unsigned(b) - unsigned(a) : unsigned(a) - unsigned(b));
}
__device__ unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a < b ? b - a : a - b); }
__device__ int __hadd(int a, int b) { return int(((long long)a + b) >> 1); }
__device__ unsigned __uhadd(unsigned a, unsigned b) { return unsigned(((unsigned long long)a + b) >> 1); }
// 64 bits, shifted; the half that moves into view.
__device__ unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
__device__ unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}

// ---- what else a thread may call ----

namespace cuda_on_cpu {
// What a kernel prints goes to stderr, a whole line at a time, and no more than a person reads.
QUIET inline void print_line(const char* line) {
    static int lines = 0;
    const int before = __atomic_fetch_add(&lines, 1, __ATOMIC_RELAXED);
    if (before < 50) fprintf(stderr, "printf: %s\n", line);
    else if (before == 50) fprintf(stderr, "printf: only the first 50 lines are shown\n");
}
inline thread_local char printed[1024];  // of a line that has not ended
QUIET inline void end_print() {
    if (*printed) print_line(printed);
    *printed = 0;
}
QUIET __attribute__((noinline, format(printf, 1, 2))) inline int print(const char* format, ...) {
    size_t begun = strlen(printed);
    va_list values;
    va_start(values, format);
    const int written = vsnprintf(printed + begun, sizeof printed - begun, format, values);
    va_end(values);
    for (char* end; (end = strchr(printed, '\n'));) {
        *end = 0;
        print_line(printed);
        memmove(printed, end + 1, strlen(end + 1) + 1);
    }
    if (strlen(printed) + 1 == sizeof printed) end_print();
    return written;
}
}  // namespace cuda_on_cpu

__device__ long long clock64() {  // it counts, but not a GPU's cycles
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}
__device__ void __nanosleep(unsigned) {}
#ifndef __clang__
#define __builtin_assume(x) ((void)0)
#endif
