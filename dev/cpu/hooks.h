// The functions that g++ -fsanitize=thread calls at each access, in place of libtsan's. For races.h.
#pragma once

#define PC __builtin_return_address(0)
#define PLAIN_HOOKS(n)                                                                                          \
    extern "C" QUIET void __tsan_read##n(void* p) { cuda_on_cpu::races::touch(p, n, false, PC); }                 \
    extern "C" QUIET void __tsan_write##n(void* p) { cuda_on_cpu::races::touch(p, n, true, PC); }                 \
    extern "C" QUIET void __tsan_unaligned_read##n(void* p) { cuda_on_cpu::races::touch(p, n, false, PC); }       \
    extern "C" QUIET void __tsan_unaligned_write##n(void* p) { cuda_on_cpu::races::touch(p, n, true, PC); }       \
    extern "C" QUIET void __tsan_volatile_read##n(void* p) {                                                      \
        cuda_on_cpu::races::touch_volatile(p, n, false, PC);                                                        \
    }                                                                                                           \
    extern "C" QUIET void __tsan_volatile_write##n(void* p) {                                                     \
        cuda_on_cpu::races::touch_volatile(p, n, true, PC);                                                         \
    }
PLAIN_HOOKS(1) PLAIN_HOOKS(2) PLAIN_HOOKS(4) PLAIN_HOOKS(8) PLAIN_HOOKS(16)
extern "C" QUIET void __tsan_read_range(void* p, size_t n) { cuda_on_cpu::races::touch(p, n, false, PC); }
extern "C" QUIET void __tsan_write_range(void* p, size_t n) { cuda_on_cpu::races::touch(p, n, true, PC); }
extern "C" void __tsan_init() {}
extern "C" QUIET void __tsan_func_entry(void*) {
    using namespace cuda_on_cpu::races;
    if (!running || busy) return;
    unsigned short& now_deep = calls_deep[thread_number()];
    if (++now_deep > deepest) deepest = now_deep;
}
extern "C" QUIET void __tsan_func_exit() {
    using namespace cuda_on_cpu::races;
    if (running && !busy && calls_deep[thread_number()]) calls_deep[thread_number()]--;
}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
extern "C" QUIET void __tsan_atomic_thread_fence(int order) {
    using namespace cuda_on_cpu::races;
    fence(order == __ATOMIC_SEQ_CST ? GPU_WIDE : BLOCK_WIDE);
}
extern "C" void __tsan_atomic_signal_fence(int) {}

#define ATOMIC_HOOK(bits, T, name, after)                                                                       \
    extern "C" QUIET T __tsan_atomic##bits##_##name(volatile T* p, T x, int) {                                   \
        const T before = *p;                                                                                    \
        cuda_on_cpu::races::touch_atomic(p, sizeof(T), true, true, PC, before == static_cast<T>(after));                         \
        *p = after;                                                                                             \
        return before;                                                                                          \
    }
#define COMPARE_HOOK(bits, T, name)                                                                             \
    extern "C" QUIET bool __tsan_atomic##bits##_compare_exchange_##name(volatile T* p, T* e, T x, int, int) {    \
        const bool same = *p == *e;                                                                             \
        cuda_on_cpu::races::touch_atomic(p, sizeof(T), true, true, PC, same && *p == x);                            \
        if (same) *p = x;                                                                                       \
        else *e = *p, cuda_on_cpu::traffic::again(p);                                                           \
        return same;                                                                                            \
    }
#define ATOMIC_HOOKS(bits, T)                                                                                   \
    extern "C" QUIET T __tsan_atomic##bits##_load(const volatile T* p, int) {                                    \
        cuda_on_cpu::races::touch_atomic(p, sizeof(T), true, false, PC);                                          \
        cuda_on_cpu::traffic::again(p);                                                                         \
        return *p;                                                                                              \
    }                                                                                                           \
    extern "C" QUIET void __tsan_atomic##bits##_store(volatile T* p, T x, int) {                                 \
        cuda_on_cpu::races::touch_atomic(p, sizeof(T), false, true, PC);                                          \
        *p = x;                                                                                                 \
    }                                                                                                           \
    ATOMIC_HOOK(bits, T, exchange, x) ATOMIC_HOOK(bits, T, fetch_add, before + x)                             \
    ATOMIC_HOOK(bits, T, fetch_sub, before - x) ATOMIC_HOOK(bits, T, fetch_and, before & x)                \
    ATOMIC_HOOK(bits, T, fetch_or, before | x) ATOMIC_HOOK(bits, T, fetch_xor, before ^ x)                 \
    ATOMIC_HOOK(bits, T, fetch_nand, ~(before & x)) COMPARE_HOOK(bits, T, strong) COMPARE_HOOK(bits, T, weak) \
    extern "C" QUIET T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T e, T x, int, int) {           \
        cuda_on_cpu::races::touch_atomic(p, sizeof(T), true, true, PC);                                           \
        const T before = *p;                                                                                    \
        if (before == e) *p = x;                                                                                \
        else cuda_on_cpu::traffic::again(p);                                                                    \
        return before;                                                                                          \
    }
ATOMIC_HOOKS(8, unsigned char) ATOMIC_HOOKS(16, unsigned short) ATOMIC_HOOKS(32, unsigned)
ATOMIC_HOOKS(64, unsigned long)
