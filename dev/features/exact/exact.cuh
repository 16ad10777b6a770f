/*
--exact: arithmetic whose bits do not depend on the machine. This file stands ahead of kernels.cu for a GPU and for the
emulator, and ahead of the CPU's loops. IEEE 754 says what the nearest result of + - * / sqrt and fmaf is, so these are
alike everywhere, if no compiler makes an fmaf of a product and a sum: it is told not to. All else is made of them here.
*/
#ifdef __CUDACC__  // kernels.cu then leaves out its PTX, for which this file has C++ of the same names
#undef __CUDACC__
#define EXACT_ON_GPU
extern __shared__ __align__(1024) unsigned char dynamic_shared[];
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(dynamic_shared)
#elif !defined(__launch_bounds__)
#define EXACT  // the CPU's loops
#include <cmath>
#include <cstring>
#define __device__ inline
#endif

namespace exact {
template <class To, class From>
__device__ To with_bits_of(From x) {
    To same;
    memcpy(&same, &x, sizeof x);
    return same;
}
// e^f * 2^n for |f| <= log(2)/2, by Cephes's polynomial. shifted = 1.5 * 2^23 + n, a float whose lowest bits are n. As
// in dev/cpu/kernels.cpp: n = 128 makes infinity, n = -127 zero.
__device__ float power(float f, float shifted) {
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    return (p * f * f + f + 1.0f) * with_bits_of<float>((with_bits_of<unsigned>(shifted) << 23) + 0x3f800000u);
}
__device__ float exp(float x) {
    x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
    float shifted = x * 1.442695041f + 12582912.0f, n = shifted - 12582912.0f;
    return power((x - n * 0.693359375f) + n * 2.12194440e-4f, shifted);
}
__device__ float exp2(float x) {
    x = x < -127.0f ? -127.0f : x > 128.0f ? 128.0f : x;
    float shifted = x + 12582912.0f;
    return power((x - (shifted - 12582912.0f)) * 0.6931471806f, shifted);
}
// log(x) = e log(2) + log(1 + f), by Cephes's polynomial, for x that are not denormal. x = 2^e (1 + f), and 1 + f lies
// between the roots of 1/2 and 2.
__device__ float log(float x) {
    if (!(x > 0.0f && x <= 3.402823466e38f))
        return x == 0.0f ? -1.0f / (x * x) : x > 0.0f ? x : (x - x) / (x - x);
    unsigned bits = with_bits_of<unsigned>(x) - 0x3f3504f3u;  // the root of 1/2
    float e = (float)((int)bits >> 23), f = with_bits_of<float>((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    return (f + ((p * f * z - e * 2.12194440e-4f) - 0.5f * z)) + e * 0.693359375f;
}
__device__ float log2(float x) { return log(x) * 1.442695041f; }

#ifdef EXACT
// What a kernel's thread adds up for itself is a slot of an array in loops, and these sum up the slots: of a warp, as
// kernels.cu's warp_sum, overwriting them,
inline float warp_sum(float* x, int lanes = 32) {
    for (int half = lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
inline float block_sum(float* x, int threads) {  // of a block, as block_reduce
    float of_warp[32] = {};
    for (int warp = 0; warp < threads / 32; warp++) of_warp[warp] = warp_sum(x + 32 * warp);
    return warp_sum(of_warp);
}
// sums (threads) += f(c) for c < C: each thread takes packs of 4 columns, or of 1, by turns.
template <class F>
inline void add_slots(float* sums, int threads, int C, F f) {
    for (int first = 0, pack = C % 4 ? 1 : 4; first < C; first += pack * threads) {
        int rest = (C - first) / pack, there = rest < threads ? rest : threads;
        for (int i = 0; i < pack; i++)
#pragma omp simd
            for (int t = 0; t < there; t++) sums[t] += f(first + pack * t + i);
    }
}
// The sum of f(c) for c < C, as a row's threads have it: of a warp, or less, or of several, one after the other
template <class F>
float sum_of(int threads, int C, F f) {
    float sums[128] = {};
    add_slots(sums, threads, C, f);
    float total = warp_sum(sums, threads < 32 ? threads : 32);
    for (int t = 32; t < threads; t += 32) total += warp_sum(sums + t);
    return total;
}
#else
// In place of the tensor cores: each number is a chain of fmaf along the summed index k, which begins with what D was.
// kernels.cu says which lane holds what.
template <class Pair>
__device__ void mma_pair(float (&left)[4], float (&right)[4], const Pair (&a)[4], const Pair (&b)[4]) {
    // lane 4g + q asks lane 4g + p for A's columns, and lanes 8q + p and 8q + 4 + p for B's rows
    int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll 1
        for (int p = 0; p < 4; p++)
#pragma unroll
            for (int i = 0; i < 2; i++) {  // k = 8 half + 2p + i
                auto from = [&](int lane, Pair x) { return __shfl_sync(0xffffffff, i ? x.y : x.x, lane); };
                float upper = from(lane - q + p, a[2 * half]), lower = from(lane - q + p, a[2 * half + 1]);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    float column = from(8 * q + n % 2 * 4 + p, b[n / 2 * 2 + half]);
                    float(&d)[4] = n < 2 ? left : right;
                    d[n % 2] = fmaf(upper, column, d[n % 2]);
                    d[n % 2 + 2] = fmaf(lower, column, d[n % 2 + 2]);
                }
            }
}
#endif
}  // namespace exact

#ifdef EXACT_ON_GPU
__device__ void copy16(void* shared, const void* global, bool there) {
    *(float4*)shared = there ? *(const float4*)global : float4{};
}
__device__ void copy4(void* shared, const void* global, bool there) {
    *(float*)shared = there ? *(const float*)global : 0.0f;
}
__device__ void copies_end() {}
template <int pending>
__device__ void wait_for_copies() {}
#endif
#ifndef EXACT
#define expf exact::exp
#define logf exact::log
#define log2f exact::log2
#define power_of_2 exact::exp2
#define mma_pair exact::mma_pair
#endif
