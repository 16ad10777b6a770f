// How much work a launch does, beside the race finder: bytes of arrays that it reads and writes,
// its steps, and the blocks and threads that touch an array at all. For races.h.
//
// A step is a hook's call: an access or, with -fsanitize-coverage=trace-pc, a piece of code without
// a branch. A launch may be given a limit. Beyond it nobody looks for races, and only counts; and
// at `most` the process ends, with SIGXCPU.
#pragma once

namespace cuda_on_cpu {
namespace races {

struct Work {
    unsigned long read, written, steps, blocks, threads;
    unsigned long enough, most;  // steps
};
static Work work = {0, 0, 0, 0, 0, ~0ul, ~0ul};
static unsigned busy_block;  // the last one that has touched an array, its number + 1,
static bool busy_threads[1024];  // and those of its threads that have

QUIET inline void count_step() {
    if (++work.steps >= work.most) raise(SIGXCPU);
}

// Counts an access by the running block. Is it still to be searched for races?
QUIET inline bool counted(const Region* region, size_t bytes, bool reads, bool writes) {
    count_step();
    if (region && !region->shared && region != variables) {
        if (reads) work.read += bytes;
        if (writes) work.written += bytes;
        if (busy_block != number + 1) {
            busy_block = number + 1, work.blocks++;
            memset(busy_threads, 0, sizeof busy_threads);
        }
        bool& busy_thread = busy_threads[thread_number()];
        if (!busy_thread) busy_thread = true, work.threads++;
    }
    return work.steps < work.enough;
}

}  // namespace races
}  // namespace cuda_on_cpu

extern "C" QUIET void __sanitizer_cov_trace_pc() {
    if (cuda_on_cpu::races::running && !cuda_on_cpu::races::busy) cuda_on_cpu::races::count_step();
}

// The counts of the launches since the last call, and new limits.
extern "C" __attribute__((visibility("default"))) void races_work(
    unsigned long counts[5], unsigned long enough, unsigned long most) {
    using namespace cuda_on_cpu::races;
    counts[0] = work.read, counts[1] = work.written;
    counts[2] = work.steps, counts[3] = work.blocks, counts[4] = work.threads;
    work = {0, 0, 0, 0, 0, enough, most};
    busy_block = 0;
}
