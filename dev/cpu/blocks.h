// Blocks on a CPU: the stacks of their threads, barriers and exchanges, whose turn it is, and launches. For cuda.h.
#pragma once

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

// A stack and, while no thread runs on it, the place where it goes on.
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
        // A stack that overflows must crash, and not write into the next one. All threads of a kernel need about the
        // same, so it is enough to guard the stacks that a launch uses first. Guards on 1,024 stacks for each core would
        // exceed the 65,530 mappings that Linux allows a process.
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
struct Barrier {
    const char* what;
    int line;
    unsigned arrived = 0;

    // Counts an arrival. Was it the last of `all`? A thread that arrives by another call than the first one is not
    // counted, and waits forever.
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
    Barrier barrier;
    unsigned exchanges = 0;          // completed
    alignas(16) char slots[2][32 * slot_bytes];  // what lanes show, by turns: some may still read the exchange before

    unsigned ready() const { return parked & ~waiting; }
};

// An asynchronous copy that has begun. `group` is how many groups its thread had closed before.
struct AsyncCopy {
    void* to;
    const void* from;  // null if the bytes are not there
    size_t bytes;      // at most 16
    size_t group;
    char value[16];    // what was in `from` when the copy began
    races::Asked asked;
};

struct Copies {
    std::vector<AsyncCopy> begun;
    size_t closed = 0;            // groups

    QUIET __attribute__((noinline)) void begin(void* to, const void* from, size_t bytes) {
        AsyncCopy copy = {to, from, bytes, closed, {}, races::asked(__builtin_return_address(0))};
        tell_races(copy, true);
        if (from) memcpy(copy.value, from, bytes);
        memset(to, 0xff, bytes);  // a GPU may write there from now on
        begun.push_back(copy);
    }
    static void tell_races(const AsyncCopy& copy, bool begins) {
        if (copy.from) races::copy(copy.from, copy.bytes, false, begins, copy.asked);
        races::copy(copy.to, copy.bytes, true, begins, copy.asked);
    }
    // Completes all copies but those of the newest `pending` groups, and of the group that is not closed yet. A GPU may
    // read the source at any time until then, so if it has changed, nobody knows what arrives.
    QUIET __attribute__((noinline)) void arrive(unsigned pending) {
        auto copy = begun.begin();
        for (; copy != begun.end() && copy->group + pending < closed; ++copy) {
            if (copy->from && memcmp(copy->value, copy->from, copy->bytes)) memset(copy->to, 0xff, copy->bytes);
            else memcpy(copy->to, copy->value, copy->bytes);
            copy->asked.time = races::time();
            tell_races(*copy, false);
        }
        begun.erase(begun.begin(), copy);
    }
};

// An OS thread and the block that it runs.
struct Block {
    Warp warps[32];
    Barrier barrier;
    int order;                           // as for set_order
    unsigned long long random;           // the generator's state
    unsigned thread[1024], place[1024];  // which thread starts in which place, and the inverse
    unsigned count, next;   // the number of threads; the first place whose thread has not started yet
    unsigned parked = 0;    // lanes parked, in all warps
    size_t number = 0;      // how many blocks this OS thread has begun
    Copies copies[1024];    // of each thread
    bool copied = false;    // are there any?
    void (*run)(void**);    // Threads<kernel>::run
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
        copied = false;
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
        for (Warp& w : warps) w.parked = w.waiting = w.barrier.arrived = 0;
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

    // Which thread runs when thread t has returned or must wait. First the lanes of its own warp, so that warps finish
    // one by one and a kernel without barriers needs 32 stacks; then threads not yet started; then the next warp that
    // has ready lanes; and in the end the home stack.
    QUIET __attribute__((noinline)) Fiber* choose(unsigned t) {
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
    QUIET __attribute__((noinline, no_sanitize("address"))) void switch_to(Fiber* to) {
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
template <class T> QUIET inline void poison(const char* name, T& variable, size_t& poisoned) {
    if (poisoned == block->number) return;
    poisoned = block->number;
    memset(static_cast<void*>(&variable), 0xff, sizeof variable);
    races::shared_variable(name, variable);
}

template <auto kernel> struct Threads;
template <class... A, void (*kernel)(A...)> struct Threads<kernel> {
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

// All functions of a warp are exchanges: each lane brings a value, and when all have arrived, each lane can read the
// values of the others until it enters the next exchange.
template <class T> struct Exchange {
    unsigned lane, size;
    const char* slots;

    // The last lane to arrive may do work for all of them, with the values of all.
    template <class Work = void (*)(T*)>
    __device__ Exchange(unsigned mask, T value, const char* what, int line, Work work = [](T*) {}) {
        static_assert(sizeof(T) <= slot_bytes, "raise slot_bytes");
        Block& b = *block;
        const unsigned t = thread_number();
        Warp& w = b.warps[t / 32];
        char* s = w.slots[w.exchanges % 2];
        lane = t % 32, size = w.size, slots = s;
        memcpy(s + lane * sizeof(T), &value, sizeof(T));
        b.next = max(b.next, b.place[t] + 1);
        if (mask != ~0u) what = "a warp function whose mask is not 0xffffffff, which is not supported,";
        const bool all = mask == ~0u && w.barrier.complete(what, line, size);
        if (all) {
            races::works_for_warp(true), work(reinterpret_cast<T*>(s)), races::works_for_warp(false);
            races::warp_meets(t / 32, line);
            w.waiting = 0, w.exchanges++;
        }
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
        // By the handful, since fetching a block costs as much as running a small one.
        OPENMP(omp for schedule(dynamic, int(blocks / (32 * workers) + 1)))
        for (size_t i = 0; i < blocks; i++) {
            if (i > stuck) continue;  // but those before it still run, so the report does not depend on timing
            size_t n = i;  // the block's number: blocks start in the same kind of order as threads
            if (b.order == REVERSE) n = blocks - 1 - i;
            if (b.order > 0 && blocks % 1000003 > 0) n = (i * 1000003 + b.order) % blocks;  // a prime: each once
            blockIdx = {unsigned(n % grid[0]), unsigned(n / grid[0] % grid[1]), unsigned(n / grid[0] / grid[1])};
            if (b.order > 0) b.arrange(n);
            memset(dynamic_shared, 0xff, shared_bytes);  // poison
            races::shared_variable("", dynamic_shared, shared_bytes, 4, "0");
            races::block_begins(unsigned(n), unsigned(blocks));
            const bool done = b.run_all();
            races::block_ends();
            if (done) continue;
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
        return cuda_on_cpu::launch(#name, cuda_on_cpu::Threads<name>::run, grid, block, shared_bytes, args);      \
    }

// The order of the threads in all launches from now on: FORWARD, REVERSE, or a number from 1 on, which shuffles.
extern "C" __attribute__((visibility("default"))) void set_order(int order) { cuda_on_cpu::order_of_launches = order; }

// device.py puts this behind the declaration of each __shared__ variable. Such a variable outlives a block, so without
// it the next block, or the next launch, could read what it has not written.
#define POISON(variable)                                   \
    {                                                      \
        __shared__ size_t poisoned;                        \
        cuda_on_cpu::poison(#variable, variable, poisoned); \
    }

// ---- what threads call to wait for others ----

__device__ void __syncthreads(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    cuda_on_cpu::races::arrives_in(file);
    cuda_on_cpu::Block& b = *cuda_on_cpu::block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    const bool all = b.barrier.complete("__syncthreads", line, b.count);
    if (all) {
        cuda_on_cpu::races::all_wait(line);
        for (auto& w : b.warps) w.waiting = 0;
    }
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
__device__ void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    cuda_on_cpu::races::arrives_in(file);
    cuda_on_cpu::Exchange<char>(mask, 0, "__syncwarp", line);
}
