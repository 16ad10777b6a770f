// Finds races, where the compiler calls a hook at every access: with g++ -fsanitize=thread. The hooks are in hooks.h, in
// place of libtsan's. For cuda.h. races.py puts what was found into words.
//
// Two accesses to a byte are a race if they are of two threads, one of them writes, not both are atomic, and nothing
// orders them. What orders them, whatever order the CPU runs the threads in:
//   - within a block, a __syncthreads between them;
//   - within a warp, a __syncwarp between them, for the lanes that its mask names; shuffles and votes order nothing;
//   - a __threadfence and then an atomic write by one side, and behind that an atomic read of the same place by the
//     other: a flag, or a counter of blocks. Each side may hand on by a barrier what it knows, or what it has seen.
//     __threadfence_block does so within a block.
// A plain read beside atomics is none if its thread then calls atomicCAS there, which sees if it was wrong.
// An asynchronous copy reads and writes from its beginning until its thread has waited for it: nobody else may write
// what it reads, or touch what it writes, in between. It sees what a thread wrote to shared memory only after that
// thread's fence for it (fence_shared). volatile accesses, and __ldcg, count as atomic: a GPU does them
// in L2. Of the accesses of one kind to a byte since the last write only a few are kept: enough to find a race, if not
// all of its threads. A launch that fences keeps one of each thread, from its first fence on, or from its beginning if
// races_fences was called.
#pragma once

// What blocks.h and its neighbours tell. Without hooks nobody listens.
#ifdef __SANITIZE_THREAD__
#define TELL QUIET
#define UNHEARD(...) ;
#else
#define TELL inline
#define UNHEARD(...) { __VA_ARGS__ }
#endif
namespace cuda_on_cpu {
namespace races {
// Who has asked for an asynchronous access, when, and in which line.
struct Asked {
    const void* pc;
    unsigned thread, time;
    unsigned waited;  // the thread that was the last to wait for its end
};
TELL void block_begins(unsigned n, unsigned blocks) UNHEARD()
TELL void block_ends() UNHEARD()
TELL void arrives_in(const char* name) UNHEARD()
TELL void all_wait(int line) UNHEARD()
TELL void warp_meets(unsigned warp, int line, bool orders) UNHEARD()
TELL void lanes_meet(unsigned warp, unsigned mask, bool orders) UNHEARD()
TELL void works_for_warp(bool begins) UNHEARD()
TELL void verified(const void* p, size_t bytes) UNHEARD()
TELL Asked asked(const void* pc) UNHEARD(return {};)
TELL unsigned time() UNHEARD(return 0;)
TELL void copy(const void* p, size_t bytes, bool writes, bool begins, const Asked& by) UNHEARD()
TELL void fence_shared() UNHEARD()
TELL void hand_over(const void* mbarrier) UNHEARD()
TELL void look_at(const void* mbarrier) UNHEARD()
TELL void take_over(const void* mbarrier) UNHEARD()
TELL void dynamic_name(const char* name, const void* p, size_t item) UNHEARD()
TELL void shared_variable(const char* name, const void* p, size_t bytes, size_t item, unsigned rank,
                          const size_t* sizes) UNHEARD()
template <class T> QUIET void shared_variable(const char* name, const T& variable) {
    const void* begin = const_cast<const void*>(static_cast<const volatile void*>(&variable));
    const size_t sizes[] = {std::extent_v<T>, std::extent_v<T, 1>, std::extent_v<T, 2>};
    shared_variable(name, begin, sizeof(T), sizeof(std::remove_all_extents_t<T>), unsigned(std::rank_v<T>), sizes);
}
}  // namespace races
namespace traffic {
TELL void matrix_row(const void* p) UNHEARD()
}  // namespace traffic
}  // namespace cuda_on_cpu
#undef TELL
#undef UNHEARD

#if defined(__SANITIZE_THREAD__) && defined(RUNTIME)
#include "accesses.h"

namespace cuda_on_cpu {
namespace races {

// Four bytes. They are one cell until an access takes only some of them: two bf16 are not one place.
struct Word {
    Cell all;
    Cell* each;
};

struct Region {
    Address begin, end;  // multiples of 4
    Word* words;
    std::string name, item, shape;  // of a shared variable: the bytes of an element, and its dimensions
    bool shared;

    Region(Address first, size_t bytes) : begin(first & ~Address(3)), end((first + bytes + 3) & ~Address(3)) {
        words = static_cast<Word*>(calloc((end - begin) / 4 + 1, sizeof(Word)));
        if (!words) abort();
        shared = false;
    }
    ~Region() {
        for (Word* w = words; w < words + (end - begin) / 4; w++) {
            w->all.free();
            for (int i = 0; w->each && i < 4; i++) w->each[i].free();
            delete[] w->each;
        }
        ::free(words);
    }
    void clear() {
        for (Word* w = words; w < words + (end - begin) / 4; w++) {
            w->all.clear();
            for (int i = 0; w->each && i < 4; i++) w->each[i].clear();
        }
    }
};

static Address base;  // where this library lies
static Region* regions[4096];  // by their beginnings
static int region_count = 0;
static Region *latest = nullptr, *variables = nullptr;  // variables: all that the library itself has
static Address elsewhere[512];  // pages without any of them, such as stacks

QUIET inline Region* region_of(Address p) {
    if (latest && p - latest->begin < latest->end - latest->begin) return latest;
    const Address page = p / 4096;
    if (elsewhere[page % 512] == page) return nullptr;
    int low = 0, high = region_count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (regions[middle]->end <= p) low = middle + 1;
        else high = middle;
    }
    if (low < region_count && regions[low]->begin <= p) return latest = regions[low];
    if (!variables) return nullptr;
    if (p - variables->begin < variables->end - variables->begin) return variables;
    auto apart = [page](const Region* r) QUIET { return r->end <= page * 4096 || r->begin >= (page + 1) * 4096; };
    if ((low == 0 || apart(regions[low - 1])) && (low == region_count || apart(regions[low])) && apart(variables))
        elsewhere[page % 512] = page;
    return nullptr;
}

}  // namespace races
}  // namespace cuda_on_cpu
#include "traffic.h"
#include "work.h"
namespace cuda_on_cpu {
namespace races {

// Does something to the cells of an access.
template <class Do> QUIET inline void each_cell(Region& region, Address p, size_t bytes, Do&& act) {
    for (const Address end = p + bytes < region.end ? p + bytes : region.end; p < end;) {
        Word& word = region.words[(p - region.begin) / 4];
        if (!word.each && p % 4 == 0 && end - p >= 4) {
            act(word.all, p);
            p += 4;
            continue;
        }
        if (!word.each) {
            word.each = new Cell[4]();
            for (int i = 0; i < 4; i++) {
                word.each[i] = word.all;
                Cell& cell = word.each[i];
                if (cell.reads.others) cell.reads.others = new std::vector<Access>(*cell.reads.others);
                if (!cell.rare) continue;
                cell.rare = new Rare(*cell.rare);
                for (Accesses* all : {&cell.rare->atomic_writes, &cell.rare->atomic_reads})
                    if (all->others) all->others = new std::vector<Access>(*all->others);
            }
        }
        act(word.each[p % 4], p);
        p++;
    }
}

QUIET inline Access access_of(const void* pc, size_t bytes, bool writes, bool atomic) {
    Access x = {};
    x.pc = static_cast<const char*>(pc) - 1, x.time = now, x.block = number;
    x.thread = static_cast<unsigned short>(thread_number()), x.there = true, x.writes = writes, x.atomic = atomic;
    x.by_warp = warp_works, x.bytes = static_cast<unsigned char>(bytes);
    return x;
}

static unsigned short calls_deep[1024], deepest;  // of each thread the calls that have not returned, if hooks tell them

// Two lanes of a warp write one place in the same line. If they write the same number, no GPU can tell which of them it
// was. The hook comes before the second number is there, so it is looked at when the next one comes.
static struct { Address place; size_t bytes; char value[16]; Access first, second; } pending;
static const char* alike_pc = nullptr;  // where all lanes of a warp wrote the same

// The best race so far of the block that runs: threads of two warps, and numbers that differ, say most.
static struct { int worth; Address place; Access first, second; unsigned after; bool after_is_known; } best;

static const char* barrier_file = "";  // of the last __syncthreads of the block
static int barrier_line = 0;
static unsigned after;       // the bits that the second access of the race has left there, if it writes
static bool after_is_known, chosen;

QUIET inline void settle() {
    if (pending.place) {
        if (!memcmp(pending.value, reinterpret_cast<const void*>(pending.place), pending.bytes)) alike_pc = pending.first.pc;
        else if (!place) first = pending.first, second = pending.second, place = pending.place;
        pending.place = 0;
    }
    if (!place || after_is_known || chosen) return;
    if (second.bytes <= sizeof after) after_is_known = true, memcpy(&after, reinterpret_cast<const void*>(place), second.bytes);
    const bool plain = !first.atomic && !second.atomic && !first.copies && !second.copies && !second.constant && !first.constant;
    if (!running || !plain || second.unfenced || first.block != second.block) return;
    const bool differ = !after_is_known || (second.writes ? second.before != after : first.before != second.before);
    const int worth = 1 + differ + 2 * !same_warp(first, second);
    if (worth > best.worth) best = {worth, place, first, second, after, after_is_known};
    if (worth == 4) return;
    place = 0, after_is_known = false, first.there = second.there = false;  // a better one may come in this block
}

QUIET inline bool access(Address p, size_t bytes, const Access& x) {
    Region* region = region_of(p);
    if (!region) return false;
    each_cell(*region, p, bytes, [&](Cell& cell, Address at) QUIET {
        if (place) return;  // one race is enough
        cell.access(x);
        if (!second.there) return;
        const bool both_write = first.writes && x.writes && !first.atomic && !x.atomic && !first.copies && !x.copies;
        if (both_write && first.pc == x.pc && first.block == x.block && same_warp(first, x) && bytes <= 16) {
            if (!pending.place) {
                pending.place = p, pending.bytes = bytes, pending.first = first, pending.second = second;
                memcpy(pending.value, reinterpret_cast<const void*>(p), bytes);
            }
            first.there = second.there = false;
            return;
        }
        if (first.atomic && !x.atomic && !x.writes && early.size() < 4096) {
            early.push_back({at, first, second});
            first.there = second.there = false;
        } else place = at;
    });
    return true;
}

// Who was the last to write each item of some arrays, for drawings: 1024 * block + thread, or -1. Blocks 0 and 1 are
// drawn, so what they have written stays theirs.
struct Drawn { Address begin, end; size_t item; std::vector<int> who; };
static std::vector<Drawn> drawn;
static bool drawing = false;

QUIET inline void draw(Address p, size_t bytes) {
    const Busy here;
    for (Drawn& array : drawn)
        for (Address at = p; at < p + bytes; at += array.item) {
            if (at < array.begin || at >= array.end) continue;
            int& who = array.who[(at - array.begin) / array.item];
            if (number < 2 || who < 0 || who >= 2048) who = 1024 * number + thread_number();
        }
}

QUIET inline void touch(const volatile void* p, size_t bytes, bool writes, const void* pc) {
    if (traffic::counting) return traffic::touch(p, bytes, writes ? traffic::STORE : traffic::LOAD, pc, thread_number());
    settle();
    if (drawing && writes && running && !busy) draw(Address(p), bytes);
    if (!running || busy || place || !region_of(Address(p))) return;
    if (!counted(region_of(Address(p)), bytes, !writes, writes)) return;
    const Busy here;
    Access x = access_of(pc, bytes, writes, false);
    if (bytes <= sizeof x.before) memcpy(&x.before, const_cast<const void*>(p), bytes);
    access(Address(p), bytes, x);
}

// A thread fences: what it and the threads that it has waited for did before is handed on by later atomics.
QUIET inline void fence(Reach reach) {
    if (!running || busy) return;
    const unsigned t = thread_number();
    const Busy here;
    ++now;
    for (int r = BLOCK_WIDE; r <= reach; r++) {
        fences[r][t] = {now, epoch, meeting[t / 32]};
        if (partly) memcpy(met_at_fence[r][t], lanes_met[t], sizeof lanes_met[t]);
        fenced[r] = true;
    }
    fences_come = true;
    if (reach == GPU_WIDE) published[number] = true;
}

QUIET inline void join(Clock& into, const Clock& from) {
    for (const auto& [of_block, times] : from) {
        auto& mine = into[of_block];
        mine.resize(times.size());
        for (size_t i = 0; i < times.size(); i++) mine[i] = max(mine[i], times[i]);
    }
}

// What an atomic access of a place by this thread learns, and what it hands on.
QUIET inline void hand_on(Reach reach, Address p, bool reads, bool writes) {
    auto& known = clocks[reach];
    if (!fenced[reach] && known.empty()) return;
    const unsigned t = thread_number(), threads = blockDim.x * blockDim.y * blockDim.z;
    const auto before = known.find(p);
    if (reads && before != known.end() &&
        !(seen.size() && seen.back().thread == t && seen.back().clock == before->second))
        seen.push_back({t, now, before->second});
    if (!writes) return;
    auto clock = std::make_shared<Clock>();
    if (reads && before != known.end()) join(*clock, *before->second);
    if (fenced[reach]) {
        std::vector<unsigned> until(threads), of_warp(32);
        unsigned of_all = 0;
        for (unsigned i = 0; i < threads; i++) {
            const Fence& f = fences[reach][i];
            if (!f.time || !(i == t || f.time < epoch || (i / 32 == t / 32 && waited_since(f.time, t, i)))) continue;
            until[i] = max(until[i], f.time);
            for (unsigned j = i / 32 * 32; partly && j < min(threads, i / 32 * 32 + 32); j++)
                until[j] = max(until[j], met_at_fence[reach][i][j % 32]);
            of_all = max(of_all, f.epoch), of_warp[i / 32] = max(of_warp[i / 32], f.meeting);
            for (const Seen& s : seen)
                if (s.time < f.epoch || (s.thread == i && s.time < f.time)) join(*clock, *s.clock);
        }
        for (unsigned i = 0; i < threads; i++) until[i] = max(until[i], max(of_all, of_warp[i / 32]));
        if (of_all) join(*clock, {{number, until}});
    }
    if (clock->empty()) known.erase(p);
    else known[p] = clock;
}

// keeps: an atomic access leaves what is there, so its thread only wants to know it.
QUIET inline void announce(Address p, size_t bytes, Access x, bool reads, bool writes, bool keeps) {
    if (keeps)
        each_cell(*region_of(p), p, bytes, [&](Cell& cell, Address at) QUIET {
            const Access* w = place || !cell.rare ? nullptr : cell.rare->atomic_writes.announced(x, p);
            if (w) x.unfenced = true, first = *w, second = x, place = at;
        });
    if (reads)
        for (const auto& [from, time] : told[p])
            if (from != number) heard[from][p] = time;
    if (writes && !keeps) told[p][number] = ++now;
}

QUIET inline void touch_atomic(const volatile void* p, size_t bytes, bool reads, bool writes, const void* pc,
                               bool keeps = false) {
    if (traffic::counting) return traffic::touch_atomic(p, bytes, pc);
    settle();
    if (drawing && writes && running && !busy) draw(Address(p), bytes);
    if (!running || busy || place) return;
    if (!counted(region_of(Address(p)), bytes, reads, writes)) return;
    const Busy here;
    Access x = access_of(pc, bytes, writes, true);
    x.exchanges = reads && writes;
    if (!access(Address(p), bytes, x)) return;
    if (announcing && !place) announce(Address(p), bytes, x, reads, writes, keeps);
    for (Reach reach : {BLOCK_WIDE, GPU_WIDE}) hand_on(reach, Address(p), reads, writes);
}

// A thread reads by __ldg, through a cache that does not see what this launch writes.
QUIET __attribute__((noinline)) void read_constant(const void* p, size_t bytes) {
    if (traffic::counting || !running || busy || place) return;
    const Busy here;
    Region* region = region_of(Address(p));
    if (!region) return;
    Access x = access_of(__builtin_return_address(0), bytes, false, false);
    x.constant = true;
    each_cell(*region, Address(p), bytes, [&](Cell& cell, Address at) QUIET {
        if (place) return;
        if (const Access* written = cell.any_write()) first = *written, second = x, place = at;
        else if (!cell.rare || !cell.rare->constant.there) cell.with_rare().constant = x;
    });
}

// A thread compares and swaps. What it read there before, with a plain access, was a guess: it harms nobody, whatever
// was read.
QUIET void verified(const void* p, size_t bytes) {
    if (!running || busy || place) return;
    const Busy here;
    const unsigned t = thread_number();
    for (size_t i = early.size(); i-- > 0;)
        if (early[i].second.thread == t && early[i].place - Address(p) < bytes) early.erase(early.begin() + i);
    if (Region* region = region_of(Address(p)))
        each_cell(*region, Address(p), bytes, [t](Cell& cell, Address) QUIET { cell.reads.forget(t); });
}

QUIET inline void touch_volatile(const volatile void* p, size_t bytes, bool writes, const void* pc) {
    const Region* region = region_of(Address(p));  // in shared memory, volatile is no way to wait
    if (traffic::counting || (region && region->shared)) touch(p, bytes, writes, pc);
    else touch_atomic(p, bytes, !writes, writes, pc, !writes);
}

// ---- what blocks.h and its neighbours tell ----

QUIET void block_begins(unsigned n, unsigned blocks) {
    const Busy here;
    number = n, running = true;
    if (!place) barrier_file = "", barrier_line = 0;
    memset(calls_deep, 0, sizeof calls_deep);
    epoch = ++now;
    for (unsigned& m : meeting) m = now;
    for (auto& of_reach : fences)
        for (Fence& f : of_reach) f.time = 0;
    fenced[BLOCK_WIDE] = fenced[GPU_WIDE] = false;
    clocks[BLOCK_WIDE].clear();
    seen.clear(), heard.clear();
    if (partly) memset(lanes_met, 0, sizeof lanes_met);
    published.resize(max(size_t(blocks), published.size()));
    if (traffic::counting) traffic::block_begins();
}
QUIET void block_ends() {
    const Busy here;
    settle();
    if (traffic::counting) traffic::block_ends();
    if (!place && best.worth) {
        place = best.place, first = best.first, second = best.second, after = best.after;
        after_is_known = best.after_is_known, chosen = true;
    }
    if (early.size() && !place) place = early[0].place, first = early[0].first, second = early[0].second;
    early.clear();
    running = false;
}

QUIET inline bool ignored(int line) {
    const char* where = file;
    file = nullptr;
    if (!ignored_file || !where || line != ignored_line) return false;
    const size_t all = strlen(where), end = strlen(ignored_file);
    return all >= end && !strcmp(where + all - end, ignored_file);
}
QUIET void arrives_in(const char* name) { file = name; }
QUIET void all_wait(int line) {
    settle();
    if (traffic::counting) traffic::all_wait(line);
    if (!place) barrier_file = file ? file : "", barrier_line = line;
    if (!ignored(line)) epoch = ++now;
}
// orders: it is a __syncwarp or touches memory for all lanes, and no mere shuffle or vote.
QUIET void warp_meets(unsigned warp, int line, bool orders) {
    settle();
    if (traffic::counting) traffic::warp_meets(warp, line);
    if (!orders) shuffled[warp] = ++now;
    else if (!ignored(line)) meeting[warp] = ++now;
}
// The same for the lanes of a mask alone, who also learn what each of them knew of other lanes. Before the first time,
// too few accesses of a warp are kept: what this misses in one block, it finds in the next.
QUIET void lanes_meet(unsigned warp, unsigned mask, bool orders) {
    settle();
    if (!orders) {
        shuffled[warp] = ++now;
        return;
    }
    partly = true;
    unsigned all[32] = {};
    ++now;
    for (unsigned lane = 0; lane < 32; lane++)
        for (unsigned i = 0; i < 32 && mask >> lane & 1; i++)
            all[i] = mask >> i & 1 ? now : max(all[i], lanes_met[32 * warp + lane][i]);
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) memcpy(lanes_met[32 * warp + lane], all, sizeof all);
}
QUIET void works_for_warp(bool begins) { warp_works = begins; }

QUIET Asked asked(const void* pc) { return {pc, thread_number(), now, thread_number()}; }
QUIET unsigned time() { return now; }
QUIET void copy(const void* p, size_t bytes, bool writes, bool begins, const Asked& by) {
    if (traffic::counting) {
        if (begins && bytes <= 16) traffic::touch(p, bytes, traffic::COPY, by.pc, by.thread);
        return;
    }
    const Busy here;
    Region* region = running && !place ? region_of(Address(p)) : nullptr;
    if (!region) return;
    Access x = access_of(by.pc, bytes, writes, false);
    x.copies = true, x.under_way = begins, x.thread = static_cast<unsigned short>(by.thread), x.time = by.time;
    if (begins && !writes && region->shared)
        each_cell(*region, Address(p), bytes, [&](Cell& cell, Address at) QUIET {
            const Access& w = cell.write;
            if (place || !w.there || w.copies || w.time < shared_fences[w.thread]) return;
            first = w, second = x, place = at;
        });
    if (begins) access(Address(p), bytes, x);
    else each_cell(*region, Address(p), bytes, [&](Cell& cell, Address) QUIET { cell.land(x, by.waited); });
}

// Asynchronous copies from shared memory, and wgmma, see what a thread has written there before this fence.
QUIET void fence_shared() { shared_fences[thread_number()] = ++now; }

// A thread arrives at an mbarrier, and others wait there: what it did before, it has done.
QUIET void hand_over(const void* mbarrier) {
    const Busy here;
    const unsigned t = thread_number();
    std::vector<unsigned> until(1024, epoch);
    std::fill_n(until.begin() + t / 32 * 32, 32, meeting[t / 32]);
    until[t] = ++now;
    auto& known = clocks[GPU_WIDE][Address(mbarrier)];
    auto clock = std::make_shared<Clock>(Clock{{number, until}});
    if (known && known->count(number)) join(*clock, *known);  // several threads arrive
    for (const Seen& s : seen)  // and what it has learned of other blocks
        if (s.thread == t && s.clock->size() > s.clock->count(number)) join(*clock, *s.clock);
    known = clock;
    if (!place) access(Address(mbarrier), 8, access_of(__builtin_return_address(0), 8, true, true));
}
QUIET void look_at(const void* mbarrier) {
    const Busy here;
    if (!place) access(Address(mbarrier), 8, access_of(__builtin_return_address(0), 8, false, true));
}
QUIET void take_over(const void* mbarrier) {
    const Busy here;
    const auto& known = clocks[GPU_WIDE][Address(mbarrier)];  // null if nobody has arrived yet
    if (known) seen.push_back({thread_number(), now, known});
}

// A shared variable of the block that begins, or all of its dynamic shared memory. What earlier blocks did is gone.
QUIET void shared_variable(const char* name, const void* p, size_t bytes, size_t item, unsigned rank, const size_t* sizes) {
    if (!bytes) return;
    const Busy here;
    int i = 0;
    while (i < region_count && regions[i]->begin < (Address(p) & ~Address(3))) i++;
    if (i == region_count || regions[i]->begin != (Address(p) & ~Address(3))) {
        if (region_count == 4096) abort();
        std::fill_n(elsewhere, 512, 0);
        std::copy_backward(regions + i, regions + region_count, regions + region_count + 1);
        regions[i] = new Region(Address(p), bytes);
        region_count++;
    } else regions[i]->clear();
    regions[i]->shared = true;
    regions[i]->name = name, regions[i]->item = std::to_string(item), regions[i]->shape = "";
    for (unsigned k = 0; k < min(rank, 3u); k++) regions[i]->shape += (k ? "," : "") + std::to_string(sizes[k]);
}

// A kernel has a name for its dynamic shared memory. It stays the first one's.
QUIET void dynamic_name(const char* name, const void* p, size_t item) {
    const Busy here;
    Region* region = region_of(Address(p));
    if (region && region->name.empty()) region->name = name, region->item = std::to_string(item);
}

static std::string report;

// Where this library lies, and its variables.
inline int find_library(dl_phdr_info* info, size_t, void*) {
    Address low = 0, high = 0;
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& part = info->dlpi_phdr[i];
        const Address begin = info->dlpi_addr + part.p_vaddr, end = begin + part.p_memsz;
        if (part.p_type != PT_LOAD) continue;
        ours |= begin <= Address(&report) && Address(&report) < end;
        if (part.p_flags & PF_W) low = low ? min(low, begin) : begin, high = max(high, end);
    }
    if (!ours) return 0;
    base = info->dlpi_addr;
    variables = new Region(low, high - low);
    return 1;
}

}  // namespace races
}  // namespace cuda_on_cpu

// The arrays of the next launch, without overlaps and in order.
extern "C" __attribute__((visibility("default"))) void races_watch(int n, const size_t* begins, const size_t* bytes) {
    using namespace cuda_on_cpu::races;
    fences_come = fences_sure;
    for (int i = 0; i < region_count; i++) delete regions[i];
    delete variables;
    latest = variables = nullptr;
    std::fill_n(elsewhere, 512, 0);
    dl_iterate_phdr(find_library, nullptr);
    for (region_count = 0; region_count < n; region_count++)
        regions[region_count] = new Region(begins[region_count], bytes[region_count]);
    now = 1, place = pending.place = after = 0, after_is_known = chosen = false, best.worth = 0, first.there = second.there = false;
    clocks[BLOCK_WIDE].clear(), clocks[GPU_WIDE].clear(), published.clear(), early.clear(), told.clear();
}

// JSON that says what race the last launch had, or null.
extern "C" __attribute__((visibility("default"))) const char* races_found() {
    using namespace cuda_on_cpu::races;
    if (!place) return nullptr;
    auto said = [](const char* name, const Access& x) {
        const unsigned b = x.block;
        char text[300];
        snprintf(text, sizeof text, "\"%s\": {\"block\": [%u, %u, %u], \"thread\": %u, \"writes\": %d, \"atomic\": %d, "
                 "\"copies\": %d, \"under_way\": %d, \"constant\": %d, \"unfenced\": %d, \"bytes\": %d, \"before\": %u, \"pc\": %zu}, ", name, b % gridDim.x,
                 b / gridDim.x % gridDim.y, b / gridDim.x / gridDim.y, unsigned(x.thread), x.writes, x.atomic,
                 x.copies, x.under_way, x.constant, x.unfenced, x.bytes, x.before, Address(x.pc) - base);
        return std::string(text);
    };
    const Region& region = *region_of(place);
    report = "{" + said("first", first) + said("second", second) + "\"address\": " + std::to_string(place) + ", \"after\": " + std::to_string(after) +
             ", \"shuffled\": " + std::to_string(first.time <= shuffled[first.thread / 32]) + ", \"in_library\": " + std::to_string(&region == variables ? place - base : 0);
    if (region.shared) report += ", \"name\": \"" + region.name + "\", \"at\": " +
        std::to_string(place - region.begin) + ", \"item\": " + region.item + ", \"shape\": [" + region.shape + "]";
    report += ", \"file\": \"" + std::string(barrier_file) + "\", \"line\": " + std::to_string(barrier_line);
    return (report += "}").c_str();
}

// Where in the library all lanes of a warp have stored the same number in one place since the last call, or 0.
extern "C" __attribute__((visibility("default"))) size_t races_alike() {
    using namespace cuda_on_cpu::races;
    const size_t found = alike_pc ? Address(alike_pc) - base : 0;
    alike_pc = nullptr;
    return found;
}

// From now on, what one block announces to another by an atomic at another place must be fenced, even if both are atomic.
extern "C" __attribute__((visibility("default"))) void races_announced() { cuda_on_cpu::races::announcing = true; }

// From now on it is noted who writes each item of one more array. After its launches, by whom: the last array's, which is
// no longer noted.
extern "C" __attribute__((visibility("default"))) void races_draw(size_t begin, size_t bytes, size_t item) {
    using namespace cuda_on_cpu::races;
    drawn.push_back({begin, begin + bytes, item, std::vector<int>(bytes / item, -1)}), drawing = true;
}
extern "C" __attribute__((visibility("default"))) void races_drawn(int* who) {
    using namespace cuda_on_cpu::races;
    std::copy(drawn.back().who.begin(), drawn.back().who.end(), who);
    drawn.pop_back(), drawing = !drawn.empty();
}

// How many calls deep a thread was at the most since the last call, in a library with functions that call themselves.
extern "C" __attribute__((visibility("default"))) int races_deepest() {
    const int found = cuda_on_cpu::races::deepest;
    cuda_on_cpu::races::deepest = 0;
    return found;
}

// The launches from now on have fences.
extern "C" __attribute__((visibility("default"))) void races_fences() { cuda_on_cpu::races::fences_sure = true; }

// For tests: from now on the barrier at this line of this file counts for nothing. null: all count again.
extern "C" __attribute__((visibility("default"))) void races_ignore(const char* file, int line) {
    static std::string name;
    name = file ? file : "";
    cuda_on_cpu::races::ignored_file = file ? name.c_str() : nullptr, cuda_on_cpu::races::ignored_line = line;
}

#include "hooks.h"
#endif
