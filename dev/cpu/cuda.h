// Runs kernels.cu without a GPU. Given
//
//     #include "cuda.h"
//     #include "kernels.cu"
//     CPU_KERNEL(gelu_forward)  // const char* launch_gelu_forward(grid, block, shared_bytes, args): see its definition
//
// a C++17 compiler makes a shared library with one function a kernel. OpenMP shares the blocks of a grid out over OS
// threads; a block stays on one, so __shared__ is thread_local. The threads of a block run one after another, as plain
// calls in a loop, for as long as none has to wait for another: an element-wise kernel costs no more than that loop,
// which is even vectorised, and nobody has to say which kernels synchronise. A thread that does wait, in a barrier or a
// shuffle, leaves its frames where they are, and another runs on another stack. The switch takes some 25 ns, so that is
// what a shuffle costs each lane.
//
// A wait that nothing can end is found when no thread is left to run, and is reported. Threads run in a fixed order and
// never two of a block at a time, so no bit of a result depends on the number of cores.
//
// For the same reason one order may hide a forgotten barrier, which on a GPU is a race. So set_order chooses another:
// set_order(0) is forward, -1 is reverse, and a number from 1 on shuffles the warps, and the lanes of a warp anew after
// each wait. A kernel without races gives the same bits in every order. In every order what must not be read is poison,
// bytes of 0xff, which are NaN: shared memory until it is written, and the target of a copy until it is waited for.
//
// With -DHOPPER, kernels.cu does as on a Hopper GPU, and what it has for that in PTX is here too: products of a warp
// group, wgmma, and boxes that a copy engine brings to a barrier. Results and boxes are poison until they are waited
// for, and so is what products have computed, if a tile changes before they are waited for.
//
// Flags: -fopenmp (else all runs on one core), -fno-math-errno (makes sqrtf an instruction), and -U_FORTIFY_SOURCE
// (fortified, longjmp refuses to change stacks). With -fsanitize=address,undefined, an index is checked by
// AddressSanitizer in global memory and in DYNAMIC_SHARED; in a __shared__ array by UBSan where it is indexed by name,
// and by AddressSanitizer through a pointer too, but by g++ not if the array is in an inline function or a template.
#pragma once
#ifdef __APPLE__
#define _XOPEN_SOURCE 600  // or there is no <ucontext.h>
#define _DARWIN_C_SOURCE   // or there is no MAP_ANON
#endif
#include <setjmp.h>
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
#define OPENMP(...) _Pragma(#__VA_ARGS__)
#else
#define OPENMP(...)
#endif

#if defined(__has_feature) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // as g++ says it
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
inline void __asan_unpoison_memory_region(const volatile void*, size_t) {}
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

// To the end of kernels.cu: two builds of it in one process must not share their static variables.
#pragma GCC visibility push(hidden)

// ---- the language ----

#define __device__ inline __attribute__((always_inline))  // NVRTC does so, too
#define __constant__ __attribute__((visibility("default")))
#define __forceinline__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#ifdef __SANITIZE_ADDRESS__
#define __global__
#define __shared__ static  // there are no redzones around thread_locals or in inline functions: one OS thread it is
#else
#define __global__ inline __attribute__((always_inline))  // into the loop over threads
#define __shared__ static thread_local
#endif
#define DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(cuda_on_cpu::dynamic_shared)

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

// Variables, so that a debugger can print them. Nobody takes their address, so no store of a kernel's can change them,
// and in a loop they live in registers. Not initial-exec: dlopen has less than 2 KB for a library whose thread_locals
// are, and that includes the __shared__ arrays.
static thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;
inline unsigned thread_number() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }

using std::max;
using std::min;
template <class T> T __ldcg(const T* p) { return *p; }
// Streaming loads and stores. What they move may be stored as another type.
template <class T> T __ldcs(const T* p) {
    T x;
    memcpy(&x, p, sizeof x);
    return x;
}
template <class T> void __stcs(T* p, T x) { memcpy(p, &x, sizeof x); }
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
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline int atomicAdd(int* p, int value) { return __atomic_fetch_add(p, value, __ATOMIC_RELAXED); }
inline int atomicMax(int* p, int value) {
    int before = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (before < value)
        if (__atomic_compare_exchange_n(p, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) break;
    return before;
}
inline float atomicAdd(float* p, float value) {
    float before, after;
    __atomic_load(p, &before, __ATOMIC_RELAXED);
    do after = before + value;
    while (!__atomic_compare_exchange(p, &before, &after, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return before;
}

// ---- stacks, and whose turn it is ----

namespace cuda_on_cpu {

constexpr int FORWARD = 0, REVERSE = -1;
static int order_of_launches = FORWARD;

// No powers of two, or the tops of all stacks would compete for a few sets of the caches.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 260 << 10;
#else
constexpr size_t stack_bytes = 68 << 10;
#endif
constexpr size_t guard_bytes = 64 << 10;  // below each stack; a whole number of pages, whatever the page size
constexpr size_t slot_bytes = 64;         // the most that a lane can show to its warp at a time

void fiber_main();

// A stack and, while nobody runs on it, where to go on.
struct Fiber {
    jmp_buf context;
    bool started = true;
    const char* what;              // the function in which its thread waits, if it does,
    int line;                      // and the line of that call
    char* mapping = nullptr;       // guard and stack; null for an OS thread's own stack
    const void* bottom = nullptr;  // AddressSanitizer wants to know a stack's bounds, and keeps a second stack for each
    size_t size = 0;
    void* fake_stack = nullptr;

    Fiber() = default;
    explicit Fiber(size_t number) : started(false) {
        void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        // Frames that do not fit must crash, not write on into the next stack. All threads of a kernel need about the
        // same, so it will do to guard the stacks that a launch uses first; a guard on each of 1,024 stacks for each of
        // many cores would exceed the 65,530 mappings that Linux allows a process.
        if (number < 32) mprotect(memory, guard_bytes, PROT_NONE);
        mapping = static_cast<char*>(memory);
        bottom = mapping + guard_bytes;
        size = stack_bytes - number % 16 * 256;  // nor are tops a whole number of pages apart
    }
    ~Fiber() {
        if (!mapping) return;
        __asan_unpoison_memory_region(mapping, guard_bytes + stack_bytes);
        munmap(mapping, guard_bytes + stack_bytes);
    }
    __attribute__((noinline, no_sanitize("address"))) void start() {
        started = true;
        ucontext_t fresh;
        getcontext(&fresh);
        fresh.uc_stack.ss_sp = mapping + guard_bytes;
        fresh.uc_stack.ss_size = size;
        fresh.uc_link = nullptr;
        makecontext(&fresh, fiber_main, 0);
        setcontext(&fresh);
    }
};

// Threads that must all make the same call before any of them goes on.
struct Meeting {
    const char* what;
    int line;
    unsigned arrived = 0;

    // Called on each arrival: was it the last of `all`? Who comes to another call than the first one waits forever.
    bool complete(const char* its_what, int its_line, unsigned all) {
        if (arrived == 0) what = its_what, line = its_line;
        if (what == its_what && line == its_line) arrived++;
        if (arrived < all) return false;
        arrived = 0;
        return true;
    }
};

// 32 consecutive threads, fewer in the last warp of some blocks. Bit i of a mask is lane i.
struct Warp {
    unsigned size;
    unsigned parked = 0;   // lanes that have waited and not yet gone on; fiber[i] is where lane i will
    unsigned waiting = 0;  // the parked lanes that must wait on; the others are ready
    Fiber* fiber[32];
    Meeting meeting;
    unsigned meetings = 0;           // completed
    alignas(16) char slots[2][32 * slot_bytes];  // what lanes show, by turns: one may meet while others still read

    unsigned ready() const { return parked & ~waiting; }
};

// An asynchronous copy that has begun. `group` is how many groups its thread had closed before.
struct Copy {
    void* to;
    const void* from;  // null if the bytes are not there
    size_t bytes;      // at most 16
    size_t group;
    char value[16];    // what was in `from` when the copy began
};

struct Copies {
    std::vector<Copy> begun;
    size_t closed = 0;            // groups

    __attribute__((noinline)) void begin(void* to, const void* from, size_t bytes) {
        Copy copy = {to, from, bytes, closed, {}};
        if (from) memcpy(copy.value, from, bytes);
        memset(to, 0xff, bytes);  // a GPU may write there from now on
        begun.push_back(copy);
    }
    // Completes all copies but those of the newest `pending` groups, and of the group that is not closed yet. A GPU may
    // read the source at any time until then, so if it has changed, nobody knows what arrives.
    __attribute__((noinline)) void arrive(unsigned pending) {
        auto copy = begun.begin();
        for (; copy != begun.end() && copy->group + pending < closed; ++copy) {
            if (copy->from && memcmp(copy->value, copy->from, copy->bytes)) memset(copy->to, 0xff, copy->bytes);
            else memcpy(copy->to, copy->value, copy->bytes);
        }
        begun.erase(begun.begin(), copy);
    }
};

// Four warps and the products that they have under way. Between wgmma_fence and wgmma_commit their threads ask for
// some: that is a group of products. A description is wgmma's, as kernels.cu explains it, and places are counted from
// the start of the dynamic shared memory, in units of 16 bytes.
struct WarpGroup {
    struct Product {
        float (*d)[4];  // of the thread that asks: what it holds of D (64,64), 8 parts
        bool right;     // may it be asked for now?
        bool add, a_in_registers;
        unsigned long long a, b;  // descriptions
        unsigned registers[4];    // what the thread holds of A, if it is in registers
    };
    struct Result {
        float (*d)[4];
        float value[8][4];  // of d, when it arrives
        size_t group;       // the last that adds to it
    };
    struct Reading {
        unsigned place;
        size_t group;
        char value[16];
    };
    Meeting meeting;
    float (*first[128])[4] = {}, (*end[128])[4] = {};  // of each thread: of which D wgmma_fence was told
    std::vector<Product> asked[128];
    std::vector<Result> results[128];  // not yet in the thread's d
    std::vector<Reading> readings;     // of groups that some warp has not waited for
    size_t groups = 0, arrived[4] = {};  // how many have begun, and how many each warp has waited for

    // Where 16 bytes of a described matrix are: 64 bf16 of each of 8 rows are together, in the 128-byte swizzle.
    static unsigned place_of(unsigned long long description, unsigned row, unsigned piece) {
        const unsigned start = description & 0x3fff, stride = description >> 32 & 0x3fff;
        const unsigned place = start + row / 8 * stride + row % 8 * 8 + piece;
        return place ^ (place / 8 & 7);
    }
    // Columns 8 piece..8 piece+7 of a row.
    void read(float* to, const char* shared, unsigned long long description, unsigned row, unsigned piece) {
        Reading reading = {place_of(description, row, piece), groups, {}};
        memcpy(reading.value, shared + 16 * reading.place, 16);
        unsigned short bits[8];
        memcpy(bits, reading.value, 16);
        const bool swizzled = description >> 46 == 1 << 16;  // by 128 bytes, from a multiple of 1,024, and nothing else
        for (int i = 0; i < 8; i++) to[i] = swizzled ? __uint_as_float(unsigned(bits[i]) << 16) : NAN;
        readings.push_back(reading);
    }

    // Computes a group of products, for all threads, and poisons their D until it arrives.
    void multiply(const char* shared) {
        groups++;
        for (size_t i = 0; i < asked[0].size(); i++) {
            const Product& product = asked[0][i];
            bool right = true;
            for (auto& of_thread : asked)
                right &= i < of_thread.size() && of_thread[i].right && of_thread[i].a == product.a &&
                         of_thread[i].b == product.b && of_thread[i].add == product.add;
            float A[64][16], B[64][64], D[64][64] = {};  // B has a row for each column of D, or for each of A
            for (int row = 0; row < 64; row++)
                for (int piece = 0; piece < 2 && !product.a_in_registers; piece++) {
                    read(A[row] + 8 * piece, shared, product.a, row, piece);
                    read(B[row] + 8 * piece, shared, product.b, row, piece);
                }
            for (int row = 0; row < 16 && product.a_in_registers; row++)
                for (int piece = 0; piece < 8; piece++) read(B[row] + 8 * piece, shared, product.b, row, piece);
            for (int t = 0; t < 128 && product.a_in_registers; t++)
                for (int r = 0; r < 4; r++)
                    for (int j = 0; j < 2; j++)
                        A[t / 32 * 16 + t % 32 / 4 + r % 2 * 8][t % 4 * 2 + r / 2 * 8 + j] =
                            __uint_as_float(asked[t][i].registers[r] >> 16 * j << 16);
            for (int m = 0; m < 64; m++)
                for (int k = 0; k < 16; k++)
                    for (int n = 0; n < 64; n++) D[m][n] += A[m][k] * (product.a_in_registers ? B[k][n] : B[n][k]);
            for (int t = 0; t < 128 && right; t++) {
                Result& result = result_of(t, asked[t][i]);
                for (int e = 0; e < 32; e++)
                    result.value[e / 4][e % 4] +=
                        D[t / 32 * 16 + t % 32 / 4 + e % 4 / 2 * 8][e / 4 * 8 + t % 4 * 2 + e % 2];
            }
        }
        for (int t = 0; t < 128; t++) {
            for (Product& product : asked[t]) memset(product.d, 0xff, sizeof Result::value);
            asked[t].clear();
            first[t] = end[t] = nullptr;
        }
    }
    // The result that a thread's product adds to or, without add, begins.
    Result& result_of(int t, const Product& product) {
        auto& all = results[t];
        auto result = std::find_if(all.begin(), all.end(), [&](Result& r) { return r.d == product.d; });
        if (result == all.end()) {
            result = all.insert(all.end(), Result{product.d, {}, 0});
            memcpy(result->value, product.d, sizeof result->value);
        }
        if (!product.add) memset(result->value, 0, sizeof result->value);
        result->group = groups;
        return *result;
    }

    // Gives the lanes of one of the four warps the results in d[lane], which has so many parts, but those of the newest
    // `pending` groups. The others may be there too, but a compiler may not know that yet.
    void arrive(int warp, unsigned pending, const char* shared, float (**d)[4], int parts) {
        if (groups < pending) return;
        const size_t all = groups - pending;
        bool right = true;
        for (Reading& r : readings)
            right &= r.group > all || r.group <= arrived[warp] || !memcmp(r.value, shared + 16 * r.place, 16);
        for (int t = 32 * warp; t < 32 * warp + 32; t++)
            for (auto result = results[t].begin(); result != results[t].end();) {
                float poison[8][4];
                memset(poison, 0xff, sizeof poison);
                if (result->group <= all && (!right || memcmp(result->d, poison, sizeof poison)))  // written meanwhile
                    memcpy(result->value, poison, sizeof poison);
                if (result->group > all || result->d < d[t % 32] || result->d >= d[t % 32] + parts) {
                    ++result;
                    continue;
                }
                memcpy(result->d, result->value, sizeof poison);
                result = results[t].erase(result);
            }
        arrived[warp] = max(arrived[warp], all);
        const size_t by_all = *std::min_element(arrived, arrived + 4);
        readings.erase(readings.begin(), std::find_if(readings.begin(), readings.end(),
                                                      [&](Reading& r) { return r.group > by_all; }));
    }
};

// An OS thread and the block that it runs.
struct Block {
    Warp warps[32];
    WarpGroup groups[8];
    bool multiplied = false;             // has a warp group?
    Meeting barrier;
    int order;                           // as for set_order
    unsigned long long random;           // the generator's state
    unsigned thread[1024], place[1024];  // which thread starts in which place, and the inverse
    unsigned count, next;   // the number of threads; the first place whose thread has not started yet
    unsigned parked = 0;    // lanes parked, in all warps
    size_t number = 0;      // how many blocks this OS thread has begun
    Copies copies[1024];    // of each thread
    bool copied = false;    // are there any?
    void (*run)(void**);    // Kernel<...>::run
    void** args;
    Fiber home;             // the OS thread's own stack, on which a block begins and ends
    Fiber *running, *left;  // the current fiber, and the one before it
    std::vector<std::unique_ptr<Fiber>> fibers;  // the others, kept from launch to launch,
    std::vector<Fiber*> idle;                    // and those of them that no thread is on
    jmp_buf abandon;
    std::string error;

    unsigned random_below(unsigned n) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;  // Knuth's MMIX
        return unsigned(random >> 33) % n;
    }

    void put_in_order(unsigned* begin, unsigned n) {
        if (order == REVERSE) std::reverse(begin, begin + n);
        else if (order != FORWARD)
            for (unsigned i = n; i > 1; i--) std::swap(begin[i - 1], begin[random_below(i)]);
    }

    // Decides in which order the threads start, warp by warp. A shuffle depends on the block too.
    __attribute__((noinline)) void arrange(size_t block) {
        const unsigned warp_count = (count + 31) / 32;
        unsigned warp[32], places = 0;
        random = order + block * 0x9e3779b97f4a7c15ull;
        for (unsigned i = 0; i < warp_count; i++) warp[i] = i;
        put_in_order(warp, warp_count);
        for (unsigned i = 0; i < warp_count; i++) {
            unsigned* first = thread + places;
            for (unsigned lane = 0; lane < warps[warp[i]].size; lane++) thread[places++] = 32 * warp[i] + lane;
            put_in_order(first, warps[warp[i]].size);
        }
        for (unsigned i = 0; i < count; i++) place[thread[i]] = i;
    }

    // Which of the set bits comes after bit i. After the last one comes the first one again.
    unsigned following(unsigned i, unsigned bits) {
        if (order == FORWARD) {
            const unsigned above = bits & ~1u << i;
            return __builtin_ctz(above ? above : bits);
        }
        if (order == REVERSE) {
            const unsigned below = bits & ((1u << i) - 1);
            return 31 - __builtin_clz(below ? below : bits);
        }
        for (unsigned skipped = random_below(__builtin_popcount(bits)); skipped > 0; skipped--) bits &= bits - 1;
        return __builtin_ctz(bits);
    }

    // False, with a message in `error`, if the block got stuck.
    bool run_all() {
        next = 0;
        number++;
        if (copied) for (Copies& c : copies) c.begun.clear();
        if (multiplied) for (WarpGroup& g : groups) g = WarpGroup();
        copied = multiplied = false;
        running = &home;
        if (_setjmp(abandon) == 0) {
            run(args);
            if (parked) switch_to(choose(thread_number()));
            return true;
        }
        if (left != &home) __sanitizer_finish_switch_fiber(home.fake_stack, nullptr, nullptr);
        const char* bottom = static_cast<const char*>(home.bottom);
        if (bottom) __asan_unpoison_memory_region(bottom, static_cast<char*>(__builtin_frame_address(0)) - bottom);
        idle.clear();
        fibers.clear();  // with the frames of threads that will never return
        parked = barrier.arrived = 0;
        for (Warp& w : warps) w.parked = w.waiting = w.meeting.arrived = 0;
        return false;
    }

    // Puts the running thread, number t, aside until its warp no longer has it in `waiting`; if it is ready, it only
    // lets others go first. This and its callers are inlined: after a switch the processor guesses wrong where a return
    // goes to, and each return costs 10 ns.
    __device__ void wait(unsigned t, const char* what, int line, bool ready = false) {
        const dim3 index = threadIdx;
        const unsigned bit = 1u << t % 32;
        Warp& w = warps[t / 32];
        w.fiber[t % 32] = running;
        w.parked |= bit;
        if (!ready) w.waiting |= bit;
        running->what = what;
        running->line = line;
        parked++;
        switch_to(choose(t));
        parked--;
        w.parked &= ~bit;
        threadIdx = index;
    }

    // Whom to run when thread t has returned or must wait. Lanes of its own warp come first, the next one if it is
    // ready, so warps are done with one by one and, without barriers, 32 stacks suffice. Then threads not yet started;
    // then the next warp that has ready lanes; and home in the end.
    __attribute__((noinline)) Fiber* choose(unsigned t) {
        const unsigned mine = warps[t / 32].ready(), last_lane = order == REVERSE ? 0 : 31;
        if (mine) return warps[t / 32].fiber[following(t % 32, mine)];
        if (next < count) {
            if (idle.empty()) idle.push_back(fibers.emplace_back(new Fiber(fibers.size())).get());
            Fiber* f = idle.back();
            idle.pop_back();
            return f;
        }
        if (parked == 0) return &home;
        unsigned ready_warps = 0;
        for (unsigned i = 0; 32 * i < count; i++) ready_warps |= unsigned(warps[i].ready() != 0) << i;
        if (!ready_warps) fail();
        const Warp& w = warps[following(t / 32, ready_warps)];
        return w.fiber[following(last_lane, w.ready())];
    }

    // Returns when another fiber switches back. _setjmp and _longjmp do it without a system call, where swapcontext
    // makes one to exchange signal masks; so ucontext only starts a stack.
    __attribute__((noinline, no_sanitize("address"))) void switch_to(Fiber* to) {
        Fiber* self = left = running;
        if (to == self) return;
        running = to;
        if (_setjmp(self->context) == 0) {
            __sanitizer_start_switch_fiber(&self->fake_stack, to->bottom, to->size);
            if (to->started) _longjmp(to->context, 1);
            to->start();
        }
        __sanitizer_finish_switch_fiber(self->fake_stack, &left->bottom, &left->size);
    }

    [[noreturn]] void fail() {
        error = state();
        left = running;
        if (left != &home) __sanitizer_start_switch_fiber(nullptr, home.bottom, home.size);
        _longjmp(abandon, 1);
    }

    // "threads 0-6, 8-63 wait in __syncthreads at line 89; threads 7 have returned", by their numbers in the block.
    std::string state() const {
        auto state_of = [this](unsigned t) {
            const Warp& w = warps[t / 32];
            const Fiber* f = w.fiber[t % 32];
            if (!(w.parked >> t % 32 & 1)) return std::string(" have returned");
            return std::string(" wait in ") + f->what + " at line " + std::to_string(f->line);
        };
        std::map<std::string, std::string> groups;
        for (unsigned t = 0, end; t < count; t = end) {
            const std::string s = state_of(t);
            for (end = t + 1; end < count && state_of(end) == s; end++) {}
            const std::string range = std::to_string(t) + (end > t + 1 ? "-" + std::to_string(end - 1) : "");
            std::string& who = groups[s];
            if (who.size() < 60) who += (who.empty() ? "threads " : ", ") + range;
            else if (who.back() != '.') who += ", ...";
        }
        std::string all;
        for (const auto& [s, who] : groups) all += (all.empty() ? "" : "; ") + who + s;
        return all;
    }
};

static thread_local Block* block;
static thread_local void* dynamic_shared;
static thread_local bool waited;  // some thread has, since the running fiber last looked

// Poisons a __shared__ variable if no thread of this block has come by its declaration yet. `poisoned` belongs to the
// variable, and says for which block that was done.
inline void poison(void* variable, size_t bytes, size_t& poisoned) {
    if (poisoned == block->number) return;
    poisoned = block->number;
    memset(variable, 0xff, bytes);
}

template <auto kernel> struct Kernel;
template <class... A, void (*kernel)(A...)> struct Kernel<kernel> {
    // Runs threads not yet started, one after another, on the current stack: all of them if none waits. If one did,
    // other stacks have taken over before its call returns, and this one goes on with what they have left.
    static void run_threads(A... args) {
        Block& b = *block;
        const unsigned nx = blockDim.x, ny = blockDim.y;
        do {
            const unsigned t = b.thread[b.next], first = t % nx, end = b.order == FORWARD ? nx : first + 1;
            threadIdx = {first, t / nx % ny, t / nx / ny};
            waited = false;
            for (unsigned x = first; x < end && !waited; x++) {
                threadIdx.x = x;
                kernel(args...);
            }
            if (!waited) b.next += end - first;
        } while (b.next < b.count && !b.warps[thread_number() / 32].ready());
    }
    template <size_t... i> static void unpack(void** args, std::index_sequence<i...>) {
        run_threads(*static_cast<std::remove_cv_t<A>*>(args[i])...);
    }
    static void run(void** args) { unpack(args, std::index_sequence_for<A...>()); }
};

void fiber_main() {
    Block& b = *block;
    Fiber* self = b.running;
    __sanitizer_finish_switch_fiber(nullptr, &b.left->bottom, &b.left->size);
    for (;;) {
        b.run(b.args);
        b.idle.push_back(self);
        b.switch_to(b.choose(thread_number()));
    }
}

// What all functions of a warp are made of: every lane enters with a value, and once all have, each can read the values
// of the others, until it enters the next.
template <class T> struct Exchange {
    unsigned lane, size;
    const char* slots;

    // The last lane to enter may do something for all of them, with the values of all.
    template <class Work = void (*)(T*)>
    __device__ Exchange(unsigned mask, T value, const char* what, int line, Work work = [](T*) {}) {
        static_assert(sizeof(T) <= slot_bytes, "raise slot_bytes");
        Block& b = *block;
        const unsigned t = thread_number();
        Warp& w = b.warps[t / 32];
        char* s = w.slots[w.meetings % 2];
        lane = t % 32, size = w.size, slots = s;
        memcpy(s + lane * sizeof(T), &value, sizeof(T));
        b.next = max(b.next, b.place[t] + 1);
        if (mask != ~0u) what = "a warp function whose mask is not 0xffffffff, which is not supported,";
        const bool all = mask == ~0u && w.meeting.complete(what, line, size);
        if (all) work(reinterpret_cast<T*>(s)), w.waiting = 0, w.meetings++;
        if (!all || b.order != FORWARD) b.wait(t, what, line, all);
        waited = true;
    }
    T of(unsigned i) const {
        T value;
        memset(&value, 0xff, sizeof(T));  // NaN, where there is no such lane
        if (i % 32 < size) memcpy(&value, slots + i % 32 * sizeof(T), sizeof(T));
        return value;
    }
};

const char* launch(const char* name, void (*run)(void**), const unsigned* grid, const unsigned* threads,
                   size_t shared_bytes, void** args) {
    static thread_local std::string message;
    std::string& error = message;  // this OS thread's, whoever sets it
    const size_t blocks = size_t(grid[0]) * grid[1] * grid[2];
    const size_t count = size_t(threads[0]) * threads[1] * threads[2];
    if (blocks == 0 || count == 0 || count > 1024 || shared_bytes > 227 << 10) {
        error = std::string(name) + ": no GPU runs " + std::to_string(blocks) + " blocks of " + std::to_string(count) +
                " threads with " + std::to_string(shared_bytes) + " bytes of shared memory each";
        return error.c_str();
    }
    [[maybe_unused]] size_t workers = 1;
#if defined(_OPENMP) && !defined(__SANITIZE_ADDRESS__)
    workers = min(blocks, size_t(omp_get_max_threads()));
#endif
    std::atomic<size_t> stuck{blocks};  // the first block that is
    OPENMP(omp parallel num_threads(int(workers))) {
        static thread_local std::unique_ptr<Block> owner;
        if (!owner) owner.reset(block = new Block);
        Block& b = *block;
        gridDim = {grid[0], grid[1], grid[2]};
        blockDim = {threads[0], threads[1], threads[2]};
        b.run = run, b.args = args, b.count = unsigned(count);
        for (unsigned t = 0; t < count; t += 32) b.warps[t / 32].size = min(b.count - t, 32u);
        b.order = order_of_launches;
        b.arrange(0);
        b.idle.clear();
        for (size_t n = b.fibers.size(); n-- > 0;) b.idle.push_back(b.fibers[n].get());  // to use the first ones first
        if (posix_memalign(&dynamic_shared, 1024, shared_bytes)) abort();  // AddressSanitizer knows where it ends
        // By the handful, since to fetch a block costs as much as to run a small one.
        OPENMP(omp for schedule(dynamic, int(blocks / (32 * workers) + 1)))
        for (size_t i = 0; i < blocks; i++) {
            if (i > stuck) continue;  // but those before it still run, so the report does not depend on timing
            size_t n = i;  // the block's number: blocks start in the same kind of order as threads
            if (b.order == REVERSE) n = blocks - 1 - i;
            if (b.order > 0 && blocks % 1000003 > 0) n = (i * 1000003 + b.order) % blocks;  // a prime: each once
            blockIdx = {unsigned(n % grid[0]), unsigned(n / grid[0] % grid[1]), unsigned(n / grid[0] / grid[1])};
            if (b.order > 0) b.arrange(n);
            memset(dynamic_shared, 0xff, shared_bytes);  // poison
            if (b.run_all()) continue;
            OPENMP(omp critical)
            if (i < stuck) {
                stuck = i;
                error = std::string(name) + ": block (" + std::to_string(blockIdx.x) + ", " +
                        std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + ") is stuck: " + b.error;
            }
        }
        free(dynamic_shared);
    }
    return stuck < blocks ? error.c_str() : nullptr;
}

}  // namespace cuda_on_cpu

// Runs a whole grid and returns when it is done: null, or a message that is good until this OS thread's next launch.
// args is as for cuLaunchKernel: args[i] points at the kernel's i-th argument.
#define CPU_KERNEL(name)                                                                                         \
    extern "C" __attribute__((visibility("default"))) const char* launch_##name(                                 \
        const unsigned grid[3], const unsigned block[3], size_t shared_bytes, void** args) {                     \
        return cuda_on_cpu::launch(#name, cuda_on_cpu::Kernel<name>::run, grid, block, shared_bytes, args);      \
    }

// The order of the threads in all launches from now on: FORWARD, REVERSE, or a number from 1 on, which shuffles.
extern "C" __attribute__((visibility("default"))) void set_order(int order) { cuda_on_cpu::order_of_launches = order; }

// Stands behind the declaration of each __shared__ variable, where device.py puts it. Such a variable outlives a block,
// so without this the next block, or the next launch, could read what it has not written.
#define POISON(variable)                                                 \
    {                                                                    \
        __shared__ size_t poisoned;                                      \
        cuda_on_cpu::poison(&variable, sizeof variable, poisoned);       \
    }

// ---- meeting other threads ----

__device__ void __syncthreads(int line = __builtin_LINE()) {
    cuda_on_cpu::Block& b = *cuda_on_cpu::block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    const bool all = b.barrier.complete("__syncthreads", line, b.count);
    if (all) for (auto& w : b.warps) w.waiting = 0;
    if (!all || b.order != cuda_on_cpu::FORWARD) b.wait(t, "__syncthreads", line, all);
    cuda_on_cpu::waited = true;
}
template <class T> __device__ T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
    return cuda_on_cpu::Exchange<T>(mask, value, "__shfl_sync", line).of(lane);
}
template <class T> __device__ T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
    cuda_on_cpu::Exchange<T> warp(mask, value, "__shfl_xor_sync", line);
    return warp.of(warp.lane ^ bits);
}
__device__ void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    cuda_on_cpu::Exchange<char>(mask, 0, "__syncwarp", line);
}

// ---- the functions that stand for PTX in kernels.cu ----

inline float power_of_2(float x) { return exp2f(x); }

inline unsigned two_bf16(float low, float high) {
    auto round = [](float x) {  // to nearest, ties to even; a NaN stays one
        unsigned bits = __float_as_uint(x);
        return x != x ? 0x7fffu : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return round(low) | round(high) << 16;
}

// To nearest, ties to even. e4m3 has so many bits of mantissa, an exponent whose smallest is that of subnormal numbers,
// and a largest number, which what is larger becomes.
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

// Where an address is in dynamic shared memory, in units of 16 bytes.
inline size_t place_in_shared(const void* p) {
    return (static_cast<const char*>(p) - static_cast<char*>(cuda_on_cpu::dynamic_shared)) / 16;
}

inline void copy_later(void* shared, const void* global, size_t bytes) {
    cuda_on_cpu::Block& b = *cuda_on_cpu::block;
    b.copied = true;
    b.copies[thread_number()].begin(shared, global, bytes);
}
inline void copy16(void* shared, const void* global, bool there) { copy_later(shared, there ? global : nullptr, 16); }
inline void copy4(void* shared, const void* global, bool there) { copy_later(shared, there ? global : nullptr, 4); }
inline void copies_end() { cuda_on_cpu::block->copies[thread_number()].closed++; }
template <int pending> void copies_arrive() { cuda_on_cpu::block->copies[thread_number()].arrive(pending); }

// A warp group's products: kernels.cu says what each does. It takes these only to do as Hopper.
namespace hopper {

using namespace cuda_on_cpu;

inline unsigned address16(const void* tile) { return unsigned(place_in_shared(tile)); }
inline void compute_now(unsigned (&)[4]) {}

template <int parts> void wgmma_fence(float (&d)[1][parts][4]) {
    const unsigned t = thread_number();
    WarpGroup& group = block->groups[t / 128];
    group.first[t % 128] = d[0], group.end[t % 128] = d[0] + parts;
}

// A thread asks for a product. What is asked before wgmma_fence, or of another D, is wrong.
inline void ask(WarpGroup::Product product) {
    const unsigned t = thread_number();
    WarpGroup& group = block->groups[t / 128];
    product.right = group.first[t % 128] <= product.d && product.d < group.end[t % 128];
    group.asked[t % 128].push_back(product);
}
inline void wgmma(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    ask({d, true, add, false, a, b, {}});
}
inline void wgmma_from_registers(float (*d)[4], const unsigned (&a)[4], unsigned long long b) {
    ask({d, true, true, true, b, b, {a[0], a[1], a[2], a[3]}});
}

__device__ void wgmma_commit(int line = __builtin_LINE()) {
    Block& b = *block;
    const unsigned t = thread_number();
    WarpGroup& group = b.groups[t / 128];
    b.next = max(b.next, b.place[t] + 1);
    const bool all = group.meeting.complete("wgmma_commit", line, 128);
    if (all) {
        b.multiplied = true;
        group.multiply(static_cast<char*>(dynamic_shared));
        for (int i = 0; i < 4; i++) b.warps[t / 128 * 4 + i].waiting = 0;
    }
    if (!all || b.order != FORWARD) b.wait(t, "wgmma_commit", line, all);
    waited = true;
}

template <int pending, int parts> void wgmma_wait(float (&d)[1][parts][4], int line = __builtin_LINE()) {
    using D = float (*)[4];
    Exchange<D>(~0u, d[0], "wgmma_wait", line, [](D* of_lane) {
        const unsigned t = thread_number();
        block->groups[t / 128].arrive(t / 32 % 4, pending, static_cast<char*>(dynamic_shared), of_lane, parts);
    });
}

}  // namespace hopper

// What dev/lab/kernels/matmul_gelu_forward.cu has in PTX: barriers in shared memory, bulk copies, and products of 64 x 256,
// which it says more about. A block is a cluster of its own here. The target of a copy is poison until a thread waits
// at the copy's barrier, and a product reads its operands when it is waited for: so what comes too early is seen.
namespace bulk {

using namespace cuda_on_cpu;

struct Barrier {
    unsigned short arrivals, missing;  // of a phase, and those of this one that are still to come
    int bytes : 31;                    // still to come
    unsigned phase : 1;                // its parity
};

struct Copy {
    char* to;
    const char* from;  // a matrix, or bytes that are copied as they are
    size_t bytes;
    Barrier* barrier;
    int columns = 0, rows = 0;  // of the matrix, if it is one
    size_t stride = 0;          // bytes from row to row
    int column = 0, row = 0, width = 0;  // where the box begins, and its columns
};

struct Product {
    float (*d)[4];
    unsigned long long a, b;
    bool add;
    size_t group;
};

// What the threads of a block have under way.
struct State {
    size_t block = 0;  // its number
    std::vector<std::pair<Barrier*, unsigned>> waiting;  // threads, and at which barrier
    std::vector<Copy> copies;
    std::vector<Product> products[1024];
    size_t groups[1024] = {};
};

inline State& state() {
    static thread_local std::unique_ptr<State> state;
    if (!state) state.reset(new State);
    if (state->block != block->number) *state = State(), state->block = block->number;
    return *state;
}

inline void start(Barrier& b, int arrivals) {
    b.arrivals = b.missing = (unsigned short)arrivals;
    b.bytes = 0, b.phase = 0;
}
// Has all who wait at a barrier look again.
inline void wake(Barrier& b) {
    auto& waiting = state().waiting;
    for (auto& [barrier, t] : waiting)
        if (barrier == &b) block->warps[t / 32].waiting &= ~(1u << t % 32);
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [&](auto& w) { return w.first == &b; }),
                  waiting.end());
}
inline void complete(Barrier& b) {
    if (b.missing || b.bytes) return;
    b.missing = b.arrivals, b.phase ^= 1;
    wake(b);
}
inline void expect(Barrier& b, int bytes) {
    b.bytes += bytes, b.missing--;
    complete(b);
}
inline void arrive(Barrier& b) { expect(b, 0); }
inline void arrive_at(Barrier& b, int) { arrive(b); }

// Where byte i of a tile is, in the 128-byte swizzle: counted from a multiple of 1,024.
inline size_t swizzled(size_t i) { return i ^ (i / 128 & 7) * 16; }
inline unsigned place(const void* shared) { return unsigned((const char*)shared - (char*)dynamic_shared); }

inline void deliver(const Copy& c) {
    if (!c.columns) memcpy(c.to, c.from, c.bytes);
    else for (int i = 0; i < int(c.bytes / 2); i++) {
        const int row = c.row + i / c.width, column = c.column + i % c.width;
        char* to = (char*)dynamic_shared + swizzled(place(c.to) + 2 * i);
        if (row < c.rows && column < c.columns) memcpy(to, c.from + row * c.stride + 2 * column, 2);
        else memset(to, 0, 2);
    }
}
inline void begin(const Copy& copy) {
    memset(copy.to, 0xff, copy.bytes);
    state().copies.push_back(copy);
    wake(*copy.barrier);
}
inline void copy_bytes(void* shared, const void* global, int bytes, Barrier& b) {
    begin({(char*)shared, (const char*)global, size_t(bytes), &b});
}
inline void copy(void* shared, const void* map, int column, int row, Barrier& b) {
    auto* m = (const unsigned long long*)map;  // see tensor_maps.py
    begin({(char*)shared, (const char*)m[0], size_t(2 * m[4] * m[5]), &b, int(m[1]), int(m[2]), size_t(m[3]), column,
           row, int(m[4])});
}
inline void copy_to_all(void* shared, const void* map, int column, int row, Barrier& b) {
    copy(shared, map, column, row, b);
}

__device__ void wait(Barrier& barrier, int parity, int line = __builtin_LINE()) {
    Block& b = *block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    while (barrier.phase == unsigned(parity)) {
        auto& copies = state().copies;
        const auto arrived = std::stable_partition(copies.begin(), copies.end(),
                                                   [&](Copy& c) { return c.barrier != &barrier; });
        const std::vector<Copy> delivered(arrived, copies.end());
        copies.erase(arrived, copies.end());
        for (const Copy& c : delivered) deliver(c), barrier.bytes -= int(c.bytes);
        if (!delivered.empty()) complete(barrier);
        if (barrier.phase != unsigned(parity)) break;
        state().waiting.push_back({&barrier, t});
        b.wait(t, "a wait for a barrier", line);
    }
    waited = true;
}

inline void barriers_fence() {}
inline void map_fence(const void*) {}
inline int rank_in_cluster() { return 0; }
__device__ void cluster_barrier(int line = __builtin_LINE()) { __syncthreads(line); }
inline float reciprocal(float x) { return 1.0f / x; }

__device__ void store_matrices(void* row, const unsigned (&x)[4], int line = __builtin_LINE()) {
    struct Lane { unsigned x[4]; unsigned* row; };
    cuda_on_cpu::Exchange<Lane>(~0u, {{x[0], x[1], x[2], x[3]}, (unsigned*)row}, "stmatrix", line, [](Lane* lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) lanes[8 * i + lane / 4].row[lane % 4] = lanes[lane].x[i];
    });
}

inline void products_start(float (&)[32][4]) {}
inline void products_done(float (&)[32][4]) {}
inline void products_end() { state().groups[thread_number()]++; }
inline void wgmma(float (&d)[32][4], unsigned long long a, unsigned long long b, bool add) {
    const unsigned t = thread_number();
    state().products[t].push_back({d, a, b, add, state().groups[t]});
}
// A thread computes what it holds of D: two rows, and of 8 columns two.
inline void multiply(const Product& p) {
    const unsigned t = thread_number(), row = t % 128 / 32 * 16 + t % 32 / 4, q = t % 4;
    auto number = [](size_t at) {
        unsigned short bits;
        memcpy(&bits, (const char*)dynamic_shared + swizzled(at), 2);
        return __uint_as_float(unsigned(bits) << 16);
    };
    auto field = [](unsigned long long description, int bit) { return size_t(description >> bit & 0x3fff) * 16; };
    const size_t a = field(p.a, 0), a_stride = field(p.a, 32), b = field(p.b, 0), b_stride = field(p.b, 32);
    float A[2][16];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++)
            A[half][k] = number(a + (row / 8 + half) * a_stride + row % 8 * 128 + 2 * k);
    for (int n = 0; n < 32; n++)
        for (int j = 0; j < 2; j++) {
            const size_t c = 8 * n + 2 * q + j;
            float sum[2] = {};
            for (size_t k = 0; k < 16; k++) {
                const float x = number(b + c / 8 * b_stride + c % 8 * 128 + 2 * k);
                sum[0] += A[0][k] * x, sum[1] += A[1][k] * x;
            }
            for (int half = 0; half < 2; half++) {
                float& d = p.d[n][2 * half + j];
                d = (p.add ? d : 0.0f) + sum[half];
            }
        }
}
template <int pending>
__device__ void products_arrive(int line = __builtin_LINE()) {
    const unsigned t = thread_number();
    auto& products = state().products[t];
    size_t n = 0;
    for (; n < products.size() && products[n].group + pending < state().groups[t]; n++) multiply(products[n]);
    products.erase(products.begin(), products.begin() + n);
    __syncwarp(~0u, line);
}

}  // namespace bulk

// And what kernels.cu has of them: a barrier at which one thread arrives, and boxes of 64 x 64.
namespace hopper {

inline bulk::Barrier& barrier_at(unsigned long long& mbarrier) { return reinterpret_cast<bulk::Barrier&>(mbarrier); }
inline void mbarrier_start(unsigned long long& mbarrier) { bulk::start(barrier_at(mbarrier), 1); }
inline void mbarrier_arrive(unsigned long long& mbarrier) { bulk::arrive(barrier_at(mbarrier)); }
__device__ void mbarrier_wait(unsigned long long& mbarrier, int parity, int line = __builtin_LINE()) {
    bulk::wait(barrier_at(mbarrier), parity, line);
}
inline void copy_box(void* box, const void* map, int channel, int t, int b, unsigned long long& mbarrier) {
    auto* m = (const unsigned long long*)map;  // see Cpu.tiles in device.py
    const size_t stride = 2 * m[1];
    bulk::Barrier& barrier = barrier_at(mbarrier);
    barrier.bytes += 8192;
    bulk::begin({(char*)box, (const char*)m[0] + b * m[2] * stride, 8192, &barrier, int(m[1]), int(m[2]), stride,
                 channel, t, 64});
}

}  // namespace hopper
