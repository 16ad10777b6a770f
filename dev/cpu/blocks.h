// Blocks on a CPU: what keeps their threads waiting, and how these run. launch.h has the rest. For cuda.h.
#pragma once

namespace cuda_on_cpu {

constexpr int FORWARD = 0, REVERSE = -1;
constexpr size_t slot_bytes = 64;  // the most that a lane can show to its warp at a time

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
    unsigned size, lanes;  // how many, and which
    unsigned parked = 0;   // lanes that have waited and not yet gone on; fiber[i] is where lane i will
    unsigned waiting = 0;  // the parked lanes that must wait on; the others are ready
    Fiber* fiber[32];
    Barrier barrier;
    unsigned exchanges = 0;          // completed
    alignas(16) char slots[2][32 * slot_bytes];  // what lanes show, by turns: some may still read the exchange before

    std::unique_ptr<char[]> apart;   // the same for exchanges of a part of the lanes: each lane has 32 slots of its own

    unsigned ready() const { return parked & ~waiting; }
    QUIET char* slots_of(unsigned lane) {
        if (!apart) apart.reset(new char[32 * 32 * slot_bytes]);
        return apart.get() + lane * 32 * slot_bytes;
    }
};

inline const char activemask[] = "__activemask";

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

    void begin(void* to, const void* from, size_t bytes);
    void arrive(unsigned pending);
};

// Said of each thread_local: by the pragma in cuda.h alone g++ looks each of them up anew, and a step takes a quarter more.
#define OF_LIBRARY __attribute__((visibility("hidden")))

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
    unsigned (*run)(void**);  // Threads<kernel>::run
    void** args;
    uint3 index;            // of the block, and the sizes of its grid and of itself, of which
    dim3 grid, threads;     // a kernel has copies
    Fiber home;             // the OS thread's own stack, on which a block begins and ends
    Fiber *running, *left;  // the current fiber, and the one before it
    std::vector<std::unique_ptr<Fiber>> fibers;  // the others, kept from launch to launch,
    std::vector<Fiber*> idle;                    // and those of them that no thread is on
    jmp_buf abandon;
    std::string error;      // why the block cannot go on
    size_t shared_bytes;    // of dynamic shared memory
    size_t declared = 0;    // bytes of the __shared__ variables that threads have come by
    unsigned rounds;        // how many __syncthreads are complete,
    int votes[2];           // and by turns what __syncthreads_count has counted

    void arrange(size_t block);
    bool run_all();
    Fiber* choose(unsigned t, const void* pc = nullptr);
    bool arrives_apart(unsigned t, unsigned mask, size_t bytes, const char* what, int line, bool orders);
    void switch_to(Fiber* to);
    [[noreturn]] void leave(const std::string& why);
    [[noreturn]] void leave(const char* why, int line, unsigned t = thread_number());
    unsigned random_below(unsigned n);
    void put_in_order(unsigned* begin, unsigned n);
    unsigned following(unsigned i, unsigned bits);
    unsigned ready_warps() const;
    bool release_active();
    std::string state_of(unsigned t) const;
    std::string state() const;

    // Puts the running thread, number t, aside until its warp no longer has it in `waiting`; if it is ready, it only
    // lets others go first. pc: where its kernel goes on, if that is not here.
    __device__ void wait(unsigned t, const char* what, int line, bool ready = false, unsigned mask = 0,
                         const void* pc = nullptr) {
        const uint3 index = threadIdx;
        const unsigned bit = 1u << t % 32;
        Warp& w = warps[t / 32];
        w.fiber[t % 32] = running;
        w.parked |= bit;
        if (!ready) w.waiting |= bit;
        running->what = what;
        running->line = line;
        running->mask = mask;
        parked++;
        switch_to(choose(t, pc));
        parked--;
        w.parked &= ~bit;
        threadIdx = index;
    }
};

OF_LIBRARY inline PER_OS_THREAD Block* block;
inline struct MissingLane {
    const char* file;
    unsigned line, thread, lane;
} missing;
OF_LIBRARY inline PER_OS_THREAD void* dynamic_shared;
static PER_OS_THREAD bool waited;  // some thread has, since the running fiber last looked

constexpr size_t most_static = 48 << 10, most_shared = 227 << 10;  // bytes of a block: declared, and all, on any GPU

// Counts a __shared__ variable of so many bytes.
void declare(size_t bytes, int line, unsigned t = thread_number());

// Poisons a __shared__ variable if no thread of this block has come by its declaration yet. `poisoned` belongs to the
// variable, and says for which block that was done.
template <class T> QUIET inline void poison(const char* name, T& variable, size_t& poisoned, int line) {
    if (poisoned == block->number) return;
    poisoned = block->number;
    declare(sizeof variable, line);
    fill_with_poison(const_cast<void*>(static_cast<const volatile void*>(&variable)), sizeof variable, OF_SHARED);
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
    // Returns the number of the thread that was the last to run here.
    QUIET static unsigned run(void** args) {
        gridDim = block->grid, blockDim = block->threads, blockIdx = block->index;
        unpack(args, std::index_sequence_for<A...>());
        return thread_number();
    }
};

// Where dynamic shared memory begins, if the launch has given any.
QUIET inline void* expect_shared(const char* name, int line) {
    const std::string said = std::string("extern __shared__ ") + name + "[] has no bytes: this launch gives none";
    if (block->shared_bytes == 0) block->leave(said.c_str(), line);
    return dynamic_shared;
}

const char* launch(const char* name, unsigned (*run)(void**), const unsigned* grid, const unsigned* threads,
                   size_t shared_bytes, void** args);

}  // namespace cuda_on_cpu

// Runs a whole grid and returns when it is done: null, or a message that is good until this OS thread's next launch.
// args is as for cuLaunchKernel: args[i] points at the kernel's i-th argument.
#define CPU_KERNEL(name)                                                                                         \
    extern "C" __attribute__((visibility("default"))) const char* launch_##name(                                 \
        const unsigned grid[3], const unsigned block[3], size_t shared_bytes, void** args) {                     \
        return cuda_on_cpu::launch(#name, cuda_on_cpu::Threads<name>::run, grid, block, shared_bytes, args);      \
    }

// emulated.py puts this behind the declaration of each __shared__ variable. Such a variable outlives a block, so without
// it the next block, or the next launch, could read what it has not written.
#define POISON(variable)                                             \
    {                                                                \
        __shared__ size_t poisoned;                                  \
        cuda_on_cpu::poison(#variable, variable, poisoned, __LINE__); \
    }
