// What the libraries of all kernels share: the order of threads, what a stuck block says, launches. emulated.py compiles
// it once, and links it with each. It is no part of cuda.h, which with RUNTIME has the race finder's share of it.
#define RUNTIME
#include "cuda.h"

namespace cuda_on_cpu {

static int order_of_launches = FORWARD;
static bool only_last_block = false;  // of a grid
static bool tells_places = false;     // as for tell_places

QUIET static void tell_races(const AsyncCopy& copy, bool begins) {
    if (copy.from) races::copy(copy.from, copy.bytes, false, begins, copy.asked);
    races::copy(copy.to, copy.bytes, true, begins, copy.asked);
}

QUIET void Copies::begin(void* to, const void* from, size_t bytes) {
    AsyncCopy copy = {to, from, bytes, closed, {}, races::asked(__builtin_return_address(0))};
    tell_races(copy, true);
    if (from) memcpy(copy.value, from, bytes);
    memset(to, 0xff, bytes);  // a GPU may write there from now on
    begun.push_back(copy);
}

// Completes all copies but those of the newest `pending` groups, and of the group that is not closed yet. A GPU may
// read the source at any time until then, so if it has changed, nobody knows what arrives.
QUIET void Copies::arrive(unsigned pending) {
    auto copy = begun.begin();
    for (; copy != begun.end() && copy->group + pending < closed; ++copy) {
        if (copy->from && memcmp(copy->value, copy->from, copy->bytes)) memset(copy->to, 0xff, copy->bytes);
        else memcpy(copy->to, copy->value, copy->bytes);
        copy->asked.time = races::time();
        tell_races(*copy, false);
    }
    begun.erase(begun.begin(), copy);
}

unsigned Block::random_below(unsigned n) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;  // Knuth's MMIX
    return unsigned(random >> 33) % n;
}

void Block::put_in_order(unsigned* begin, unsigned n) {
    if (order == REVERSE) std::reverse(begin, begin + n);
    else if (order != FORWARD)
        for (unsigned i = n; i > 1; i--) std::swap(begin[i - 1], begin[random_below(i)]);
}

// Decides in which order the threads start, warp by warp. A shuffle depends on the block too.
void Block::arrange(size_t block) {
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
unsigned Block::following(unsigned i, unsigned bits) {
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
bool Block::run_all() {
    next = 0;
    rounds = votes[0] = votes[1] = 0;
    declared = 0;
    number++;
    if (copied) for (Copies& c : copies) c.begun.clear();
    copied = false;
    running = &home;
    if (_setjmp(abandon) == 0) {
        const unsigned t = run(args);
        if (parked) switch_to(choose(t));
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

// Which thread runs when thread t has returned or must wait. First the lanes of its own warp, so that warps finish
// one by one and a kernel without barriers needs 32 stacks; then threads not yet started; then the next warp that
// has ready lanes; and in the end the home stack.
QUIET Fiber* Block::choose(unsigned t, const void* pc) {
    running->pc = pc ? pc : __builtin_return_address(0);
    const unsigned mine = warps[t / 32].ready(), last_lane = order == REVERSE ? 0 : 31;
    if (mine) return warps[t / 32].fiber[following(t % 32, mine)];
    if (next < count) {
        if (idle.empty()) idle.push_back(fibers.emplace_back(new Fiber(fibers.size())).get());
        Fiber* f = idle.back();
        idle.pop_back();
        return f;
    }
    if (parked == 0) return &home;
    unsigned ready = ready_warps();
    if (!ready && release_active()) ready = ready_warps();
    if (!ready) leave(" is stuck: " + state());
    const Warp& w = warps[following(t / 32, ready)];
    return w.fiber[following(last_lane, w.ready())];
}
QUIET unsigned Block::ready_warps() const {
    unsigned found = 0;
    for (unsigned i = 0; 32 * i < count; i++) found |= unsigned(warps[i].ready() != 0) << i;
    return found;
}

// Nobody else can go on: the lanes that wait in an __activemask are those that run there together. Were there any?
QUIET bool Block::release_active() {
    bool any = false;
    for (Warp* w = warps; w < warps + (count + 31) / 32; w++) {
        auto line = [w](unsigned lane) {
            return w->waiting >> lane & 1 && w->fiber[lane]->what == activemask ? w->fiber[lane]->line : 0;
        };
        for (unsigned lane = 0; lane < 32; lane++) {
            unsigned together = 0;
            for (unsigned i = lane; i < 32 && line(lane); i++) together |= unsigned(line(i) == line(lane)) << i;
            for (unsigned i = lane; i < 32; i++)
                if (together >> i & 1) w->fiber[i]->mask = together;
            w->waiting &= ~together;
            any |= together != 0;
        }
    }
    return any;
}

// Thread t arrives where only the lanes of a mask meet, and has put `bytes` in a slot of its own. Was it the last?
// Then each of them gets the slots of all. Who is not in its own mask waits forever.
QUIET bool Block::arrives_apart(unsigned t, unsigned mask, size_t bytes, const char* what, int line, bool orders) {
    Warp& w = warps[t / 32];
    unsigned here = mask & 1u << t % 32;
    for (unsigned i = 0; i < 32; i++)
        if ((mask & w.waiting) >> i & 1 && w.fiber[i]->mask == mask && w.fiber[i]->what == what &&
            w.fiber[i]->line == line)
            here |= 1u << i;
    if (here != mask || mask == 0) return false;
    for (unsigned to = 0; to < 32; to++)
        for (unsigned from = 0; from < 32; from++)
            if (mask >> to & 1 && mask >> from & 1 && from != to)
                memcpy(w.slots_of(to) + from * bytes, w.slots_of(from) + from * bytes, bytes);
    w.waiting &= ~mask;
    races::lanes_meet(t / 32, mask, orders);
    return true;
}

// Returns when another fiber switches back. _setjmp and _longjmp do it without a system call, where swapcontext
// makes one to exchange signal masks; so ucontext only starts a stack.
QUIET __attribute__((no_sanitize("address"))) void Block::switch_to(Fiber* to) {
    Fiber* self = left = running;
    if (to == self) return;
    running = to;
    if (MARK_PLACE(self->context) == 0) {
        __sanitizer_start_switch_fiber(&self->fake_stack, to->bottom, to->size);
        if (to->started) GO_TO_PLACE(to->context);
        to->start();
    }
    __sanitizer_finish_switch_fiber(self->fake_stack, &left->bottom, &left->size);
}

// Abandons the block. why: goes behind its name.
[[noreturn]] QUIET void Block::leave(const std::string& why) {
    error = why;
    left = running;
    if (left != &home) __sanitizer_start_switch_fiber(nullptr, home.bottom, home.size);
    _longjmp(abandon, 1);
}
[[noreturn]] QUIET void Block::leave(const char* why, int line, unsigned t) {
    leave(", thread " + std::to_string(t) + ": " + why + " at line " + std::to_string(line));
}

// How thread t waits, such as " wait in __shfl_sync with the mask 0x000000ff at line 89".
QUIET std::string Block::state_of(unsigned t) const {
    const Warp& w = warps[t / 32];
    const Fiber* f = w.fiber[t % 32];
    if (!(w.parked >> t % 32 & 1)) return " have returned";
    std::string said = std::string(" wait in ") + f->what;
    char text[100];
    snprintf(text, sizeof text, " with the mask 0x%08x", f->mask);
    if (w.apart && f->mask) said += text;
    if (f->mask && !(f->mask >> t % 32 & 1)) said += ", which leaves out the lane that calls,";
    else
        for (unsigned i = 0; i < 32; i++) {
            const Fiber* other = w.parked >> i & 1 ? w.fiber[i] : f;
            if (!f->mask || other->what != f->what || other->line != f->line || other->mask == f->mask) continue;
            if (!(f->mask >> i & 1) || !(other->mask >> t % 32 & 1)) continue;
            snprintf(text, sizeof text, ", where thread %u has the mask 0x%08x,", t / 32 * 32 + i, other->mask);
            said += text;
            break;
        }
    said += " at line " + std::to_string(f->line);
    Dl_info library;
    if (tells_places && dladdr(f->pc, &library)) {  // emulated.py finds out by which calls they came there
        snprintf(text, sizeof text, " (0x%zx)", size_t(f->pc) - size_t(library.dli_fbase) - 1);
        said += text;
    }
    return said;
}

// "threads 0-6, 8-63 wait in __syncthreads at line 89; threads 7 have returned", by their numbers in the block.
QUIET std::string Block::state() const {
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

// Counts a __shared__ variable of so many bytes.
QUIET void declare(size_t bytes, int line, unsigned t) {
    const size_t all = block->declared += bytes;
    if (all <= most_static && all + block->shared_bytes <= most_shared) return;
    std::string said = "its __shared__ variables have " + std::to_string(all) + " bytes, and a block may declare ";
    said += std::to_string(min(most_static, most_shared - block->shared_bytes));
    block->leave(said.c_str(), line, t);
}

void fiber_main() {
    Block& b = *block;
    Fiber* self = b.running;
    __sanitizer_finish_switch_fiber(nullptr, &b.left->bottom, &b.left->size);
    for (;;) {
        const unsigned t = b.run(b.args);
        b.idle.push_back(self);
        b.switch_to(b.choose(t));
    }
}

const char* launch(const char* name, unsigned (*run)(void**), const unsigned* grid, const unsigned* threads,
                   size_t shared_bytes, void** args) {
    static thread_local std::string message;
    std::string& error = message;  // this OS thread's, whoever sets it
    const size_t blocks = size_t(grid[0]) * grid[1] * grid[2];
    const size_t count = size_t(threads[0]) * threads[1] * threads[2];
    if (blocks == 0 || count == 0 || count > 1024 || shared_bytes > most_shared) {
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
        static PER_OS_THREAD std::unique_ptr<Block> owner;
        if (!owner) owner.reset(block = new Block);
        Block& b = *block;
        b.grid = {grid[0], grid[1], grid[2]};
        b.threads = {threads[0], threads[1], threads[2]};
        b.run = run, b.args = args, b.count = unsigned(count), b.shared_bytes = shared_bytes;
        for (unsigned t = 0; t < count; t += 32) {
            const unsigned size = b.warps[t / 32].size = min(b.count - t, 32u);
            b.warps[t / 32].lanes = ~0u >> (32 - size);
            b.warps[t / 32].apart.reset();
        }
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
            if (only_last_block && i != blocks - 1) continue;
            if (b.order == REVERSE) n = blocks - 1 - i;
            if (b.order > 0 && blocks % 1000003 > 0) n = (i * 1000003 + b.order) % blocks;  // a prime: each once
            b.index = {unsigned(n % grid[0]), unsigned(n / grid[0] % grid[1]), unsigned(n / grid[0] / grid[1])};
            if (b.order > 0) b.arrange(n);
            fill_with_poison(dynamic_shared, shared_bytes, OF_SHARED);
            const size_t unknown = 0;
            races::shared_variable("", dynamic_shared, shared_bytes, 4, 1, &unknown);
            if (most_of_heap) memset(heap_of_thread, 0, sizeof heap_of_thread);
            races::block_begins(unsigned(n), unsigned(blocks));
            const bool done = b.run_all();
            races::block_ends();
            if (done) continue;
            OPENMP(omp critical)
            if (i < stuck) {
                stuck = i;
                error = std::string(name) + ": block (" + std::to_string(b.index.x) + ", " +
                        std::to_string(b.index.y) + ", " + std::to_string(b.index.z) + ")" + b.error;
            }
        }
        end_print();
        free(dynamic_shared);
    }
    return stuck < blocks ? error.c_str() : nullptr;
}

}  // namespace cuda_on_cpu

// The order of the threads in all launches from now on: FORWARD, REVERSE, or a number from 1 on, which shuffles.
extern "C" __attribute__((visibility("default"))) void set_order(int order) { cuda_on_cpu::order_of_launches = order; }

// From now on what a stuck block says has the place in the code where each thread waits.
extern "C" __attribute__((visibility("default"))) void tell_places() { cuda_on_cpu::tells_places = true; }

// The most bytes that a thread has taken of the heap since the last call.
extern "C" __attribute__((visibility("default"))) size_t heap_most() {
    const size_t most = cuda_on_cpu::most_of_heap;
    cuda_on_cpu::most_of_heap = 0;
    std::fill_n(cuda_on_cpu::heap_of_thread, 1024, 0);
    return most;
}

// Do launches run only the last block of their grid from now on?
extern "C" __attribute__((visibility("default"))) void set_last_block(int only) { cuda_on_cpu::only_last_block = only; }

// The bits of what nobody has written: of shared memory, of variables, and of lanes outside of a shuffle's mask.
extern "C" __attribute__((visibility("default"))) void set_poison(unsigned shared, unsigned variables, unsigned lanes) {
    using namespace cuda_on_cpu;
    poison_bits[OF_SHARED] = shared, poison_bits[OF_VARIABLES] = variables, poison_bits[OF_LANES] = lanes;
}

// The first shuffle since the last call that has read from a lane outside of its mask: its file, and {its line, the thread
// that reads, the lane that it reads from}. Null if there was none.
extern "C" __attribute__((visibility("default"))) const char* missing_lane(unsigned of[3]) {
    using namespace cuda_on_cpu;
    const MissingLane found = missing;
    missing = {};
    of[0] = found.line, of[1] = found.thread, of[2] = found.lane;
    return found.file;
}
