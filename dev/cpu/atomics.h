// CUDA's atomics, for the types that they have on a GPU. For cuda.h.
#pragma once

namespace cuda_on_cpu {

// Replaces *p by after(*p). Returns what was there.
template <class T, class After> __device__ T change(T* p, After after) {
    T before = T(), now;  // the first exchange may fail, and then says what is there
    do now = after(before);
    while (!__atomic_compare_exchange(p, &before, &now, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

}  // namespace cuda_on_cpu

__device__ int atomicMax(int* p, int value) {
    int before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before < value)
        if (__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    return before;
}

// With the same for the threads of a block alone, and for several GPUs: here these are no different.
#define ATOMIC(name, T, ...)                                              \
    __device__ T name(T* p, T value) { __VA_ARGS__; }                     \
    __device__ T name##_block(T* p, T value) { return name(p, value); }   \
    __device__ T name##_system(T* p, T value) { return name(p, value); }
#define BY(builtin) return __atomic_##builtin(p, value, __ATOMIC_RELAXED)
#define AS(...) return cuda_on_cpu::change(p, [=](auto old) { return __VA_ARGS__; })
ATOMIC(atomicAdd, int, BY(fetch_add))
ATOMIC(atomicAdd, unsigned, BY(fetch_add))
ATOMIC(atomicAdd, unsigned long long, BY(fetch_add))
ATOMIC(atomicAdd, float, AS(old + value))
ATOMIC(atomicAdd, double, AS(old + value))
ATOMIC(atomicSub, int, BY(fetch_sub))
ATOMIC(atomicSub, unsigned, BY(fetch_sub))
#define OF_INTEGERS(T) \
    ATOMIC(atomicExch, T, BY(exchange_n)) ATOMIC(atomicAnd, T, BY(fetch_and)) \
    ATOMIC(atomicOr, T, BY(fetch_or)) ATOMIC(atomicXor, T, BY(fetch_xor))
OF_INTEGERS(int) OF_INTEGERS(unsigned) OF_INTEGERS(unsigned long long)
ATOMIC(atomicExch, float, AS((void(old), value)))
#define MIN_AND_MAX(T)                                 \
    ATOMIC(atomicMin, T, AS(value < old ? value : old)) \
    ATOMIC(atomicMax, T, AS(old < value ? value : old))
MIN_AND_MAX(unsigned) MIN_AND_MAX(long long) MIN_AND_MAX(unsigned long long)
ATOMIC(atomicMin, int, AS(value < old ? value : old))
ATOMIC(atomicInc, unsigned, AS(old >= value ? 0u : old + 1))
ATOMIC(atomicDec, unsigned, AS(old == 0 || old > value ? value : old - 1))
#undef ATOMIC
#undef BY
#undef AS
#undef OF_INTEGERS
#undef MIN_AND_MAX

// Stores value where *p is expected. Returns what was there.
#define COMPARE_AND_SWAP(T)                                                                                      \
    __device__ T atomicCAS(T* p, T expected, T value) {                                                          \
        cuda_on_cpu::races::verified(p, sizeof *p);                                                              \
        __atomic_compare_exchange_n(p, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);             \
        return expected;                                                                                         \
    }                                                                                                            \
    __device__ T atomicCAS_block(T* p, T expected, T value) { return atomicCAS(p, expected, value); }            \
    __device__ T atomicCAS_system(T* p, T expected, T value) { return atomicCAS(p, expected, value); }
COMPARE_AND_SWAP(int)
COMPARE_AND_SWAP(unsigned)
COMPARE_AND_SWAP(unsigned long long)
COMPARE_AND_SWAP(unsigned short)
#undef COMPARE_AND_SWAP
