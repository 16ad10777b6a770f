// Runs kernels.cu without a GPU: an ordinary C++17 compiler, given this header in front of it, makes a shared library
// in which every kernel is a function that runs the whole grid.
//
//     #include "cuda_on_cpu.h"
//     #include "kernels.cu"
//     CPU_KERNEL(gelu_forward)      // const char* launch_gelu_forward(grid, block, shared_bytes, args)
//
// Blocks are independent, so OpenMP shares them out over OS threads; a block stays on one of them, and __shared__ is
// thread_local. The threads of a block run one after another, each a plain call in a loop, for as long as none has to
// wait for another. So an element-wise kernel costs no more than the loop, and nobody has to say which kernels
// synchronise. A thread that does wait, at a barrier or in a warp shuffle, leaves its stack as it is, and the loop goes
// on with the next thread on another stack: a fiber. A wait that can never end is found when no thread is left to run,
// and is reported by kernel, block, threads and source lines.
//
// Compile with -fopenmp (or without: one OS thread), -fno-math-errno, and -U_FORTIFY_SOURCE, whose longjmp forbids
// changing stacks.
#pragma once
#if defined(__APPLE__) && !defined(_XOPEN_SOURCE)
#define _XOPEN_SOURCE 600  // or <ucontext.h> refuses
#define _DARWIN_C_SOURCE
#endif
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

// ---- The language -------------------------------------------------------------------------------------------------

// Hidden, so that two builds of kernels.cu in one process never share a symbol.
#define CPU_HIDDEN __attribute__((visibility("hidden")))

#define __host__
#define __device__ CPU_HIDDEN
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer puts redzones around plain statics of plain functions only, so it gets one OS thread and those.
#define __global__ CPU_HIDDEN
#define __shared__ static
#else
#define __global__ CPU_HIDDEN inline __attribute__((always_inline))
#define __shared__ static thread_local
#endif
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cuda_on_cpu::dynamic_shared)

struct dim3 { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) int4 { int x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// Nobody takes the address of these, so the compiler keeps them in registers across a kernel's own stores.
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T value) { *p = value; }
inline int atomicAdd(int* p, int value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
inline unsigned atomicAdd(unsigned* p, unsigned value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }

// ---- Fibers and the scheduler -------------------------------------------------------------------------------------

namespace cuda_on_cpu {

constexpr size_t max_slot = 64;  // bytes a lane may deposit in a warp collective

#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 256 << 10;
#else
constexpr size_t stack_bytes = 64 << 10;
#endif

struct Fiber {
    jmp_buf context;
    dim3 thread;       // of the waiting thread whose stack this is
    const char* what;  // it waits in
    int line;
    Fiber* next_free;
    char* stack = nullptr;  // null: the stack of the OS thread
    const void* bottom = nullptr;
    size_t size = 0;
    void* fake_stack = nullptr;  // AddressSanitizer's
    ~Fiber() {
        if (!stack) return;
#ifdef __SANITIZE_ADDRESS__
        __asan_unpoison_memory_region(stack, stack_bytes);
#endif
        munmap(stack, stack_bytes);
    }
};

struct Warp {
    unsigned lanes;        // bit mask of the lanes that exist
    unsigned parked = 0;   // lanes that have waited, and whose stack is in fiber[]
    unsigned waiting = 0;  // those of them that must wait on; the others can be resumed
    unsigned arrived = 0;  // lanes in the collective that this warp is in
    const char* what;      // which collective that is
    int line;
    unsigned rounds = 0;   // collectives completed
    Fiber* fiber[32];
    alignas(16) char slots[2][32 * max_slot];  // by parity of rounds: a lane may write the next while others read
};

static thread_local void* dynamic_shared;
static thread_local bool waited;  // since the running fiber started its last thread

// What one OS thread needs to run a block.
struct Block {
    Warp warps[32];
    unsigned count, next;      // threads of the block, and the first of them not yet started
    unsigned parked = 0;       // threads that have a stack to return to
    unsigned arrived = 0;      // threads in __syncthreads
    int line;                  // of that __syncthreads
    void (*run)(void**);       // runs threads for as long as it makes sense on one stack
    void** args;
    Fiber home;                // the OS thread's own stack
    Fiber* running = &home;
    Fiber* left;               // the fiber that ran before
    Fiber* free = nullptr;
    std::vector<std::unique_ptr<Fiber>> fibers;
    jmp_buf abandon;           // where to go when the block cannot be finished
    std::string error;

    Fiber* spare();
    Fiber* choose();
    [[noreturn]] void fail();
    void leave(Fiber* to);
    void park(const char* what, int line);
};

static thread_local Block* block;

static unsigned linear(dim3 t) { return t.x + blockDim.x * (t.y + blockDim.y * t.z); }

static void arrived_on_stack(Fiber* self) {
    Block& b = *block;
    b.running = self;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(self->fake_stack, &b.left->bottom, &b.left->size);
#endif
}

// Switches to another stack; returns when someone switches back.
__attribute__((noinline)) void Block::leave(Fiber* to) {
    Fiber* self = left = running;
    if (to == self) return;
    if (_setjmp(self->context) == 0) {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(&self->fake_stack, to->bottom, to->size);
#endif
        _longjmp(to->context, 1);
    }
    arrived_on_stack(self);
}

static thread_local ucontext_t* creator;

static void fiber_main() {
    Block& b = *block;
    Fiber* self = b.fibers.back().get();
    if (_setjmp(self->context) == 0) setcontext(creator);
    arrived_on_stack(self);
    for (;;) {
        b.run(b.args);
        self->next_free = b.free;
        b.free = self;
        b.leave(b.choose());
    }
}

Fiber* Block::spare() {
    if (Fiber* f = free) {
        free = f->next_free;
        return f;
    }
    fibers.emplace_back(new Fiber);
    Fiber* f = fibers.back().get();
    f->stack = static_cast<char*>(mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0));
    if (f->stack == MAP_FAILED) abort();
    f->bottom = f->stack;
    // Stacks a power of two apart would all use the same few sets of the cache.
    f->size = stack_bytes - fibers.size() % 16 * 256;
    ucontext_t here, fresh;
    getcontext(&fresh);
    fresh.uc_stack.ss_sp = f->stack;
    fresh.uc_stack.ss_size = f->size;
    fresh.uc_link = nullptr;
    makecontext(&fresh, fiber_main, 0);
    creator = &here;
    swapcontext(&here, &fresh);
    return f;
}

// Whom to run when the running thread has returned or must wait. Its own warp first: then few stacks are in use at a
// time, and they stay in the cache.
Fiber* Block::choose() {
    const unsigned t = linear(threadIdx), self = t / 32;
    Warp& w = warps[self];
    if (unsigned ready = w.parked & ~w.waiting) {
        unsigned later = ready & ~((2u << t % 32) - 1);
        return w.fiber[__builtin_ctz(later ? later : ready)];
    }
    if (next < count) return spare();
    if (parked == 0) return &home;
    const unsigned n = (count + 31) / 32;
    for (unsigned i = 1; i < n; ++i) {
        Warp& other = warps[(self + i) % n];
        if (unsigned ready = other.parked & ~other.waiting) return other.fiber[__builtin_ctz(ready)];
    }
    fail();
}

void Block::fail() {
    std::map<std::pair<int, std::string>, std::string> groups;
    for (unsigned t = 0, end; t < count; t = end) {
        auto state = [&](unsigned i) {
            Warp& w = warps[i / 32];
            if (!(w.parked >> i % 32 & 1)) return std::make_pair(0, std::string());
            return std::make_pair(w.fiber[i % 32]->line, std::string(w.fiber[i % 32]->what));
        };
        auto s = state(t);
        for (end = t + 1; end < count && state(end) == s; ++end) {}
        std::string& list = groups[s];
        if (list.size() > 60) { if (list.back() != '.') list += ", ..."; continue; }
        list += (list.empty() ? "" : ", ") + std::to_string(t) + (end - t > 1 ? "-" + std::to_string(end - 1) : "");
    }
    error = "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
            std::to_string(blockIdx.z) + ") cannot go on";
    const char* separator = ": ";
    for (auto& g : groups) {
        error += separator + ("threads " + g.second) +
                 (g.first.first ? " wait in " + g.first.second + " at line " + std::to_string(g.first.first) : " have returned");
        separator = "; ";
    }
    left = running;
#ifdef __SANITIZE_ADDRESS__
    if (running != &home) __sanitizer_start_switch_fiber(nullptr, home.bottom, home.size);
#endif
    _longjmp(abandon, 1);
}

__attribute__((noinline)) void Block::park(const char* what, int line) {
    const unsigned t = linear(threadIdx), bit = 1u << t % 32;
    Warp& w = warps[t / 32];
    Fiber* self = running;
    self->thread = threadIdx;
    self->what = what;
    self->line = line;
    w.fiber[t % 32] = self;
    w.parked |= bit;
    w.waiting |= bit;
    ++parked;
    leave(choose());
    --parked;
    w.parked &= ~bit;
    threadIdx = self->thread;
    waited = true;
}

// Called by every lane of a warp, each with a value; returns when all have. Then lane i's value can be read with get(i),
// until this lane enters the next collective. All of CUDA's warp-wide functions are made of this one.
template <class T> struct Collective {
    const Warp& w;
    const char* slots;
    template <class Work = void (*)(T*)>
    Collective(T value, unsigned mask, const char* what, int line, Work together = [](T*) {}) : w(block->warps[linear(threadIdx) / 32]) {
        static_assert(sizeof(T) <= max_slot, "raise max_slot");
        Block& b = *block;
        const unsigned t = linear(threadIdx);
        Warp& w = b.warps[t / 32];
        waited = true;
        b.next = max(b.next, t + 1);
        char* s = w.slots[w.rounds % 2];
        slots = s;
        memcpy(s + t % 32 * sizeof(T), &value, sizeof(T));
        if (w.arrived == 0) { w.what = what; w.line = line; }
        if (mask == ~0u && w.what == what && w.line == line) w.arrived |= 1u << t % 32;
        if (w.arrived == w.lanes) { together(reinterpret_cast<T*>(s)); w.arrived = w.waiting = 0; ++w.rounds; }
        else b.park(what, line);
    }
    T get(unsigned lane) const {
        T value;
        if (w.lanes >> lane & 1) memcpy(&value, slots + lane * sizeof(T), sizeof(T));
        else memset(&value, 0xff, sizeof(T));
        return value;
    }
};

template <auto kernel> struct Launch;
template <class... A, void (*kernel)(A...)> struct Launch<kernel> {
    static void threads(A... args) {
        Block& b = *block;
        const unsigned nx = blockDim.x, ny = blockDim.y;
        do {
            const unsigned first = b.next % nx;
            threadIdx = {first, b.next / nx % ny, b.next / nx / ny};
            waited = false;
            for (unsigned x = first; x < nx && !waited; ++x) {
                threadIdx.x = x;
                kernel(args...);
            }
            if (!waited) b.next += nx - first;
            const Warp& w = b.warps[linear(threadIdx) / 32];
            if (w.parked & ~w.waiting) return;
        } while (b.next < b.count);
    }
    template <size_t... I> static void unpack(void** args, std::index_sequence<I...>) {
        threads(*static_cast<std::remove_cv_t<A>*>(args[I])...);
    }
    static void run(void** args) { unpack(args, std::index_sequence_for<A...>()); }
};

static void run_block(Block& b) {
    b.next = 0;
    b.running = &b.home;
    if (_setjmp(b.abandon)) {
#ifdef __SANITIZE_ADDRESS__
        if (b.left != &b.home) __sanitizer_finish_switch_fiber(b.home.fake_stack, nullptr, nullptr);
#endif
        b.fibers.clear();
        b.free = nullptr;
        b.parked = b.arrived = 0;
        for (Warp& w : b.warps) w.parked = w.waiting = w.arrived = 0;
        return;
    }
    b.run(b.args);
    if (b.parked) b.leave(b.choose());
}

static const char* launch(const char* name, void (*run)(void**), const unsigned* grid, const unsigned* dims,
                          size_t shared_bytes, void** args) {
    static thread_local std::string message;
    const size_t blocks = size_t(grid[0]) * grid[1] * grid[2], count = size_t(dims[0]) * dims[1] * dims[2];
    if (blocks == 0 || count == 0 || count > 1024 || shared_bytes > 227 << 10) {
        message = std::string(name) + ": a launch needs at least one block of 1 to 1024 threads, and at most 227 KiB of shared memory";
        return message.c_str();
    }
    int workers = 1;
#if defined(_OPENMP) && !defined(__SANITIZE_ADDRESS__)
    workers = int(std::min(blocks, size_t(omp_get_max_threads())));
#endif
    const size_t chunk = blocks / (workers * 32) + 1;
    std::atomic<size_t> failed{SIZE_MAX};
    message.clear();
    std::string& out = message;
#pragma omp parallel num_threads(workers)
    {
        static thread_local std::unique_ptr<Block> owner;
        if (!owner) owner.reset(block = new Block);
        Block& b = *block;
        gridDim = {grid[0], grid[1], grid[2]};
        blockDim = {dims[0], dims[1], dims[2]};
        b.count = unsigned(count);
        b.run = run;
        b.args = args;
        for (unsigned i = 0; i * 32 < count; ++i) b.warps[i].lanes = count - i * 32 >= 32 ? ~0u : (1u << count % 32) - 1;
        dynamic_shared = malloc(shared_bytes);
#pragma omp for schedule(dynamic, chunk)
        for (size_t i = 0; i < blocks; ++i) {
            if (i > failed.load(std::memory_order_relaxed)) continue;
            blockIdx = {unsigned(i % grid[0]), unsigned(i / grid[0] % grid[1]), unsigned(i / grid[0] / grid[1])};
            if (shared_bytes) memset(dynamic_shared, 0xff, shared_bytes);
            b.error.clear();
            run_block(b);
            if (!b.error.empty()) {
#pragma omp critical
                if (i < failed) { failed = i; out = std::string(name) + ": " + b.error; }
            }
        }
        free(dynamic_shared);
    }
    return failed == SIZE_MAX ? nullptr : message.c_str();
}

}  // namespace cuda_on_cpu

// ---- What a kernel calls to meet other threads -----------------------------------------------------------------------

inline void __syncthreads(int line = __builtin_LINE()) {
    using namespace cuda_on_cpu;
    Block& b = *block;
    waited = true;
    b.next = max(b.next, linear(threadIdx) + 1);
    if (b.arrived == 0) b.line = line;
    if (line == b.line && ++b.arrived == b.count) {
        b.arrived = 0;
        for (Warp& w : b.warps) w.waiting = 0;
    } else {
        b.park("__syncthreads", line);
    }
}

inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    cuda_on_cpu::Collective<char>(0, mask, "__syncwarp", line);
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return cuda_on_cpu::Collective<T>(value, mask, "__shfl_sync", line).get(lane % 32);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int line = __builtin_LINE()) {
    return cuda_on_cpu::Collective<T>(value, mask, "__shfl_xor_sync", line).get((threadIdx.x ^ lanes) % 32);
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int line = __builtin_LINE()) {
    const unsigned lane = cuda_on_cpu::linear(threadIdx) % 32;
    cuda_on_cpu::Collective<T> warp(value, mask, "__shfl_down_sync", line);
    return lane + delta < 32 ? warp.get(lane + delta) : value;
}

// ---- kernels.cu's PTX wrappers ----------------------------------------------------------------------------------------

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

inline float power_of_2(float x) { return exp2f(x); }

inline unsigned two_bf16(float low, float high) {
    auto round = [](float x) {  // to nearest, ties to even; a NaN stays one
        unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}

// The element i = 0, 1 of a pair along the summed index, as the tensor cores see it.
template <class Pair> float element(const Pair& pair, int i) {
    if constexpr (sizeof(Pair) == 4) return __uint_as_float(i ? pair & 0xffff0000 : pair << 16);
    else {
        const float x = i ? pair.y : pair.x;
#ifdef TF32  // rounded half away from zero to ten bits of mantissa
        return __uint_as_float((__float_as_uint(x) + 0x1000) & 0xffffe000);
#else
        return x;
#endif
    }
}

// D (16,8) += A (16,16) B (16,8); kernels.cu says which lane holds what. The last lane to arrive computes for all.
template <class Pair>
void mma(float (&d)[4], const Pair (&a)[4], const Pair (&b)[2], int line = __builtin_LINE()) {
    struct Lane { float* d; const Pair *a, *b; };
    cuda_on_cpu::Collective<Lane>({d, a, b}, ~0u, "mma", line, [](Lane* lanes) {
        float A[16][16], B[16][8], D[16][8] = {};
        for (int lane = 0; lane < 32; lane++) {
            const int g = lane / 4, q = lane % 4;
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) A[g + i % 2 * 8][2 * q + i / 2 * 8 + j] = element(lanes[lane].a[i], j);
            for (int i = 0; i < 2; i++)
                for (int j = 0; j < 2; j++) B[2 * q + 8 * i + j][g] = element(lanes[lane].b[i], j);
        }
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++)
                for (int n = 0; n < 8; n++) D[m][n] += A[m][k] * B[k][n];
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) lanes[lane].d[i] += D[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    });
}

template <bool transposed>
void load_8x8(unsigned (&x)[4], const void* row, int line) {
    struct Lane { unsigned* x; const unsigned short* row; };
    cuda_on_cpu::Collective<Lane>({x, static_cast<const unsigned short*>(row)}, ~0u, "ldmatrix", line, [](Lane* lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int g = lane / 4, q = lane % 4;
                auto at = [&](int r, int c) { return unsigned(lanes[8 * i + r].row[c]); };
                lanes[lane].x[i] = transposed ? at(2 * q, g) | at(2 * q + 1, g) << 16 : at(g, 2 * q) | at(g, 2 * q + 1) << 16;
            }
    });
}
inline void load_matrices(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) { load_8x8<false>(x, row, line); }
inline void load_matrices_transposed(unsigned (&x)[4], const void* row, int line = __builtin_LINE()) {
    load_8x8<true>(x, row, line);
}

inline void copy16(void* shared, const void* global, bool there) {
    if (there) memcpy(shared, global, 16);
    else memset(shared, 0, 16);
}
inline void copies_arrive() {}

#define CPU_KERNEL(name)                                                                                             \
    extern "C" __attribute__((visibility("default"))) const char* launch_##name(                                     \
        const unsigned* grid, const unsigned* block, size_t shared_bytes, void** args) {                             \
        return cuda_on_cpu::launch(#name, cuda_on_cpu::Launch<name>::run, grid, block, shared_bytes, args);          \
    }
