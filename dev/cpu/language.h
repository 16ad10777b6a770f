// CUDA's language for a C++ compiler: keywords, vectors, what a thread knows of itself, loads and stores. For cuda.h.
#pragma once

#ifdef WITH_CALLS
#define __device__ inline  // which compiles in two thirds of the time
#else
#define __device__ inline __attribute__((always_inline))  // NVRTC does so, too
#endif
#define __host__
#define __managed__
#define __noinline__
#define __constant__ __attribute__((visibility("default")))
#define __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#ifdef __SANITIZE_ADDRESS__
#define PER_OS_THREAD  // libasan replaces the search for a thread_local by a slow one
#define __global__
#define __shared__ static  // there are no redzones around thread_locals or in inline functions: one OS thread it is
#elif defined(__SANITIZE_THREAD__)
#define PER_OS_THREAD thread_local  // or races.h would take it for a variable of the kernel
#define __global__ __attribute__((noipa))  // in a loop over threads, several stores would become one
#define __shared__ static
#else
#define PER_OS_THREAD thread_local
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
// emulated.py puts these in place of extern __shared__ type name[], in a function and outside of all.
#define EXTERN_SHARED(type, name) DYNAMIC_SHARED(type, name); cuda_on_cpu::expect_shared(#name, __LINE__)
#define GLOBAL_SHARED(type, name) static_cast<type*>(cuda_on_cpu::expect_shared(#name, __LINE__))

// float4 and its kin. Those of 2 and 4 are aligned as a whole, so that one instruction moves them; up to 16 bytes.
#define VECTORS(T, name)                                                                                           \
    struct name##1 { T x; };                                                                                       \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                                             \
    struct name##3 { T x, y, z; };                                                                                 \
    struct alignas(sizeof(T) < 8 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; };                                  \
    __device__ name##1 make_##name##1(T x) { return {x}; }                                                         \
    __device__ name##2 make_##name##2(T x, T y) { return {x, y}; }                                                 \
    __device__ name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                         \
    __device__ name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char) VECTORS(unsigned char, uchar) VECTORS(short, short) VECTORS(unsigned short, ushort)
VECTORS(int, int) VECTORS(unsigned, uint) VECTORS(long, long) VECTORS(unsigned long, ulong)
VECTORS(long long, longlong) VECTORS(unsigned long long, ulonglong) VECTORS(float, float) VECTORS(double, double)
#undef VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// Variables, so that a debugger can print them. Nobody takes their address, so no store of a kernel's can change them,
// and in a loop they live in registers. Not initial-exec: dlopen has less than 2 KB for a library whose thread_locals
// are, and that includes the __shared__ arrays.
#ifdef __SANITIZE_THREAD__
inline thread_local uint3 threadIdx, blockIdx;  // the race finder's, too
inline thread_local dim3 blockDim, gridDim;
#else
static PER_OS_THREAD uint3 threadIdx, blockIdx;
static PER_OS_THREAD dim3 blockDim, gridDim;
#endif
constexpr int warpSize = 32;
QUIET inline unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

#ifdef __SANITIZE_THREAD__
template <class T> __device__ T __ldcg(const T* p) { return *const_cast<const volatile T*>(p); }  // for races.h
#else
template <class T> __device__ T __ldcg(const T* p) { return *p; }
#endif
// What nobody has written: the bits of shared memory, of a student's variables without a first value, and of lanes that
// a shuffle reads and its mask leaves out. They are NaN, unless set_poison chooses others: fmaxf hides a NaN, and a sum
// hides a 0.
namespace cuda_on_cpu {
enum Poison { OF_SHARED, OF_VARIABLES, OF_LANES };
inline unsigned poison_bits[3] = {~0u, ~0u, ~0u};
QUIET inline void fill_with_poison(void* p, size_t bytes, Poison kind) {
    char* at = static_cast<char*>(p);
    const unsigned bits = poison_bits[kind];
    for (; bytes >= 4; at += 4, bytes -= 4) memcpy(at, &bits, 4);
    memcpy(at, &bits, bytes);
}
// By default such a variable has the compiler's own pattern, which leaves it to warn.
inline __attribute__((always_inline)) void unset(void* at, size_t bytes) {
    if (poison_bits[OF_VARIABLES] != ~0u) fill_with_poison(at, bytes, OF_VARIABLES);
}
}  // namespace cuda_on_cpu
// A GPU's heap, of which each allocation takes 16 bytes more than was asked for. Counts what each thread of a block has
// of it, and the most that one has had.
namespace cuda_on_cpu {
inline size_t heap_of_thread[1024], most_of_heap;
enum Heap { heap };
QUIET inline void takes_of_heap(size_t bytes);
QUIET inline void* take(size_t bytes) {
    takes_of_heap(bytes);
    return malloc(bytes);
}
}  // namespace cuda_on_cpu
inline void* operator new(size_t bytes, cuda_on_cpu::Heap) {
    cuda_on_cpu::takes_of_heap(bytes);
    return ::operator new(bytes);
}
inline void* operator new[](size_t bytes, cuda_on_cpu::Heap) {
    cuda_on_cpu::takes_of_heap(bytes);
    return ::operator new[](bytes);
}
// student_text.py puts this behind the declaration of a variable without a first value. Without the switch the compiler
// warns of such a variable.
#ifdef CHOSEN_POISON
#define UNSET(variable) cuda_on_cpu::unset(&variable, sizeof variable);
#else
#define UNSET(variable)
#endif

// Streaming loads and stores. What they move may be stored as another type.
template <class T> __device__ T __ldcs(const T* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
namespace cuda_on_cpu {
template <class T> struct Same { using Type = T; };  // no argument decides what this T is
}
template <class T> __device__ void __stcs(T* p, typename cuda_on_cpu::Same<T>::Type x) { memcpy(p, &x, sizeof x); }
// Of these a GPU asks different caches. Here all memory is alike.
#ifdef __SANITIZE_THREAD__
namespace cuda_on_cpu { namespace races { QUIET void read_constant(const void* p, size_t bytes); } }
template <class T> __device__ T __ldg(const T* p) {
    cuda_on_cpu::races::read_constant(p, sizeof *p);
    return *p;
}
#else
template <class T> __device__ T __ldg(const T* p) { return *p; }
#endif
template <class T> __device__ T __ldca(const T* p) { return *p; }
template <class T> __device__ T __ldlu(const T* p) { return *p; }
template <class T> __device__ T __ldcv(const T* p) { return __ldcg(p); }
template <class T> __device__ void __stwb(T* p, typename cuda_on_cpu::Same<T>::Type x) { *p = x; }
template <class T> __device__ void __stcg(T* p, typename cuda_on_cpu::Same<T>::Type x) { *p = x; }
template <class T> __device__ void __stwt(T* p, typename cuda_on_cpu::Same<T>::Type x) { *p = x; }

namespace cuda_on_cpu {
QUIET inline void takes_of_heap(size_t bytes) {
    size_t& mine = heap_of_thread[thread_number()];
    mine += (bytes + 15) / 16 * 16 + 16;
    most_of_heap = mine > most_of_heap ? mine : most_of_heap;
}
}  // namespace cuda_on_cpu

// What a float's bits are as another type, and back.
namespace cuda_on_cpu {
template <class To, class From> __device__ To with_bits_of(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To same;
    memcpy(&same, &x, sizeof x);
    return same;
}
}  // namespace cuda_on_cpu
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::with_bits_of<float>(bits); }
inline unsigned __float_as_uint(float x) { return cuda_on_cpu::with_bits_of<unsigned>(x); }
inline float __int_as_float(int bits) { return cuda_on_cpu::with_bits_of<float>(bits); }
inline int __float_as_int(float x) { return cuda_on_cpu::with_bits_of<int>(x); }
inline double __longlong_as_double(long long bits) { return cuda_on_cpu::with_bits_of<double>(bits); }
inline long long __double_as_longlong(double x) { return cuda_on_cpu::with_bits_of<long long>(x); }

// A fence for the whole GPU; one within the block, which races.h tells apart by the order.
__device__ void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
__device__ void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
__device__ void __threadfence_block() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
