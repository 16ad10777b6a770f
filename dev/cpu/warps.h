// What threads call to wait for others: barriers, shuffles, votes. For cuda.h.
#pragma once

namespace cuda_on_cpu {

// All functions of a warp are exchanges: each lane brings a value, and when all that the mask names have arrived, each
// lane can read the values of the others until it enters the next exchange. Shuffles and votes move these values and
// order no memory: "These intrinsics do not imply a memory barrier" (CUDA programming guide). __syncwarp orders it, and
// so do instructions that touch memory for the whole warp, such as ldmatrix.
template <class T> struct Exchange {
    unsigned lane, mask;  // mask: without lanes that this warp has not
    const char* slots;

    UNWATCHED Exchange(unsigned named, T value, const char* what, int line) {
        meet(named, value, what, line, [](T*) {}, CALLER, !strcmp(what, "__syncwarp"));
    }
    // The last lane to arrive does work for all of them, with the values of all. It touches a kernel's memory.
    template <class Work>
    __device__ Exchange(unsigned named, T value, const char* what, int line, Work work) {
        meet(named, value, what, line, work, nullptr, true);
    }
    template <class Work>
    __device__ void meet(unsigned named, T value, const char* what, int line, Work work, const void* pc, bool orders) {
        static_assert(sizeof(T) <= slot_bytes, "raise slot_bytes");
        Block& b = *block;
        const unsigned t = thread_number();
        Warp& w = b.warps[t / 32];
        lane = t % 32, mask = named & w.lanes;
        const bool whole = mask == w.lanes;
        char* s = whole ? w.slots[w.exchanges % 2] : w.slots_of(lane);
        slots = s;
        memcpy(s + lane * sizeof(T), &value, sizeof(T));
        b.next = max(b.next, b.place[t] + 1);
        const bool all = whole ? w.barrier.complete(what, line, w.size)
                               : b.arrives_apart(t, mask, sizeof(T), what, line, orders);
        if (whole && all) {
            races::works_for_warp(true), work(reinterpret_cast<T*>(s)), races::works_for_warp(false);
            races::warp_meets(t / 32, line, orders);
            w.waiting = 0, w.exchanges++;
        }
        if (!all || b.order != FORWARD) b.wait(t, what, line, all, whole ? w.lanes : mask, pc);
        waited = true;
    }
    // For a shuffle: what comes from a lane that does not take part is any number.
    UNWATCHED T shown(unsigned i, int line, const char* file) const {
        T value;
        if (mask >> i % 32 & 1) memcpy(&value, slots + i % 32 * sizeof(T), sizeof(T));
        else {
            fill_with_poison(&value, sizeof(T), OF_LANES);
            if (!missing.file) missing = {file, unsigned(line), thread_number(), i % 32};
        }
        return value;
    }
    UNWATCHED T of(unsigned i) const {
        T value;
        memset(static_cast<void*>(&value), 0xff, sizeof(T));  // NaN, where there is no such lane, or it is not here
        if (mask >> i % 32 & 1) memcpy(&value, slots + i % 32 * sizeof(T), sizeof(T));
        return value;
    }
};

// The shuffles' types: numbers of 4 and 8 bytes. Smaller integers become int.
template <class T> constexpr bool shuffles = std::is_arithmetic_v<T>;
template <class T>
using Shuffled = std::enable_if_t<shuffles<T>, std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, int, T>>;

// All threads of the block meet. How many of them have voted?
UNWATCHED int all_meet(int vote, const char* what, int line, const char* file) {
    races::arrives_in(file);
    Block& b = *block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    int& votes = b.votes[b.rounds % 2];
    votes += vote;
    const bool all = b.barrier.complete(what, line, b.count);
    if (all) {
        races::all_wait(line);
        for (auto& w : b.warps) w.waiting = 0;
        b.votes[++b.rounds % 2] = 0;
    }
    if (!all || b.order != FORWARD) b.wait(t, what, line, all, 0, CALLER);
    waited = true;
    return votes;
}

}  // namespace cuda_on_cpu

// After the mask, all these take what the programmer does not write: the line of the call.
#define LINE int line = __builtin_LINE()
#define FILE_AND_LINE LINE, const char* file = __builtin_FILE()
__device__ void __syncthreads(FILE_AND_LINE) { cuda_on_cpu::all_meet(0, "__syncthreads", line, file); }
__device__ int __syncthreads_count(int vote, FILE_AND_LINE) {
    return cuda_on_cpu::all_meet(vote != 0, "__syncthreads_count", line, file);
}
__device__ int __syncthreads_or(int vote, FILE_AND_LINE) {
    return cuda_on_cpu::all_meet(vote != 0, "__syncthreads_or", line, file) > 0;
}
__device__ int __syncthreads_and(int vote, FILE_AND_LINE) {
    return cuda_on_cpu::all_meet(vote == 0, "__syncthreads_and", line, file) == 0;
}
__device__ void __syncwarp(unsigned mask = ~0u, FILE_AND_LINE) {
    cuda_on_cpu::races::arrives_in(file);
    cuda_on_cpu::Exchange<char>(mask, 0, "__syncwarp", line);
}

// A warp is cut into parts of `width` lanes. Who would read from beyond its part reads its own value; a lane may read
// from a lower part by __shfl_xor_sync alone.
template <class T, class S = cuda_on_cpu::Shuffled<T>>
__device__ S __shfl_sync(unsigned mask, T value, int lane, int width = 32, FILE_AND_LINE) {
    cuda_on_cpu::Exchange<S> warp(mask, value, "__shfl_sync", line);
    return warp.shown((warp.lane & -width) | (lane & (width - 1)), line, file);
}
template <class T, class S = cuda_on_cpu::Shuffled<T>>
__device__ S __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, FILE_AND_LINE) {
    cuda_on_cpu::Exchange<S> warp(mask, value, "__shfl_up_sync", line);
    const unsigned inside = warp.lane & (width - 1);
    return warp.shown(inside < delta % 32 ? warp.lane : warp.lane - delta % 32, line, file);
}
template <class T, class S = cuda_on_cpu::Shuffled<T>>
__device__ S __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, FILE_AND_LINE) {
    cuda_on_cpu::Exchange<S> warp(mask, value, "__shfl_down_sync", line);
    const unsigned inside = warp.lane & (width - 1);
    return warp.shown(inside + delta % 32 >= unsigned(width) ? warp.lane : warp.lane + delta % 32, line, file);
}
template <class T, class S = cuda_on_cpu::Shuffled<T>>
__device__ S __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, FILE_AND_LINE) {
    cuda_on_cpu::Exchange<S> warp(mask, value, "__shfl_xor_sync", line);
    const unsigned from = warp.lane ^ (bits & 31);
    return warp.shown(from > (warp.lane | unsigned(width - 1)) ? warp.lane : from, line, file);
}

__device__ unsigned __ballot_sync(unsigned mask, int vote, LINE) {
    cuda_on_cpu::Exchange<unsigned> warp(mask, vote != 0, "__ballot_sync", line);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++) bits |= unsigned(warp.of(i) == 1) << i;
    return bits;
}
__device__ int __any_sync(unsigned mask, int vote, LINE) {
    cuda_on_cpu::Exchange<unsigned> warp(mask, vote != 0, "__any_sync", line);
    bool any = false;
    for (unsigned i = 0; i < 32; i++) any |= warp.of(i) == 1;
    return any;
}
__device__ int __all_sync(unsigned mask, int vote, LINE) {
    cuda_on_cpu::Exchange<unsigned> warp(mask, vote != 0, "__all_sync", line);
    bool all = true;
    for (unsigned i = 0; i < 32; i++) all &= warp.of(i) != 0;
    return all;
}
// The lanes that run here together: those that come here before all others of the block are done or wait elsewhere.
__device__ unsigned __activemask(LINE) {
    cuda_on_cpu::Block& b = *cuda_on_cpu::block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    b.wait(t, cuda_on_cpu::activemask, line);
    cuda_on_cpu::waited = true;
    return b.running->mask;
}
// The lanes with the same value, bit by bit.
template <class T> __device__ unsigned __match_any_sync(unsigned mask, T value, LINE) {
    cuda_on_cpu::Exchange<T> warp(mask, value, "__match_any_sync", line);
    unsigned same = 0;
    for (unsigned i = 0; i < 32; i++) {
        const T other = warp.of(i);
        if (warp.mask >> i & 1 && !memcmp(&other, &value, sizeof value)) same |= 1u << i;
    }
    return same;
}
template <class T> __device__ unsigned __match_all_sync(unsigned mask, T value, int* all, LINE) {
    cuda_on_cpu::Exchange<T> warp(mask, value, "__match_all_sync", line);
    *all = 1;
    for (unsigned i = 0; i < 32; i++) {
        const T other = warp.of(i);
        if (warp.mask >> i & 1 && memcmp(&other, &value, sizeof value)) *all = 0;
    }
    return *all ? warp.mask : 0;
}

#define REDUCE(T, name, step)                                                            \
    __device__ T __reduce_##name##_sync(unsigned mask, T value, LINE) {                   \
        cuda_on_cpu::Exchange<T> warp(mask, value, "__reduce_" #name "_sync", line);      \
        for (unsigned i = 0; i < 32; i++) {                                              \
            const T other = warp.of(i);                                                  \
            if (i != warp.lane && warp.mask >> i & 1) value = step;                       \
        }                                                                                \
        return value;                                                                    \
    }
REDUCE(unsigned, add, value + other) REDUCE(int, add, int(unsigned(value) + unsigned(other)))
REDUCE(unsigned, min, min(value, other)) REDUCE(int, min, min(value, other))
REDUCE(unsigned, max, max(value, other)) REDUCE(int, max, max(value, other))
REDUCE(unsigned, and, value & other) REDUCE(unsigned, or, value | other) REDUCE(unsigned, xor, value ^ other)
#undef REDUCE
#undef LINE
#undef FILE_AND_LINE

#undef assert
#define assert(x) ((x) ? (void)0 : cuda_on_cpu::block->leave("assert(" #x ") is false", __LINE__))
#define __trap() cuda_on_cpu::block->leave("__trap() is called", __LINE__)
#define printf(...) cuda_on_cpu::print(__VA_ARGS__)
