// CUDA's language for a C++ compiler: keywords, what a thread knows of itself, loads and stores, atomics. For cuda.h.
#pragma once

#define __device__ inline __attribute__((always_inline))  // NVRTC does so, too
#define __constant__ __attribute__((visibility("default")))
#define __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#ifdef __SANITIZE_ADDRESS__
#define __global__
#define __shared__ static  // there are no redzones around thread_locals or in inline functions: one OS thread it is
#elif defined(__SANITIZE_THREAD__)
#define __global__ __attribute__((noipa))  // in a loop over threads, several stores would become one
#define __shared__ static
#else
#define __global__ inline __attribute__((always_inline))  // into the loop over threads
#define __shared__ static thread_local
#endif
#ifdef __SANITIZE_THREAD__
#define DYNAMIC_SHARED(type, name)                                  \
    type* name = static_cast<type*>(cuda_on_cpu::dynamic_shared); \
    cuda_on_cpu::races::dynamic_name(#name, name, sizeof(type))
#else
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cuda_on_cpu::dynamic_shared)
#endif

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

// Variables, so that a debugger can print them. Nobody takes their address, so no store of a kernel's can change them,
// and in a loop they live in registers. Not initial-exec: dlopen has less than 2 KB for a library whose thread_locals
// are, and that includes the __shared__ arrays.
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
QUIET inline unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

using std::max;
using std::min;
#ifdef __SANITIZE_THREAD__
template <class T> __device__ T __ldcg(const T* p) { return *const_cast<const volatile T*>(p); }  // for races.h
#else
template <class T> __device__ T __ldcg(const T* p) { return *p; }
#endif
// Streaming loads and stores. What they move may be stored as another type.
template <class T> __device__ T __ldcs(const T* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class T> __device__ void __stcs(T* p, T x) { memcpy(p, &x, sizeof x); }
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
__device__ void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
__device__ int atomicAdd(int* p, int value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
__device__ int atomicMax(int* p, int value) {
    int before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before < value)
        if (__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    return before;
}
__device__ float atomicAdd(float* p, float value) {
    float before = 0.0f, after;  // the first exchange fails, and says what is there
    do after = before + value;
    while (!__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}
