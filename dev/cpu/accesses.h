// What is kept of a kernel's accesses, and what orders two of them. For races.h.
#pragma once

namespace cuda_on_cpu {
namespace races {

using Address = size_t;

// `time` counts what may order accesses, in the order in which the CPU does it. Blocks run one after another here.
struct Access {
    const char* pc;
    unsigned time, block;
    unsigned before;  // the bits that were there when it began: what a read has read; for up to 4 bytes
    unsigned short thread;
    bool there : 1, writes : 1, atomic : 1;
    bool exchanges : 1;  // atomic, and it also reads
    bool by_warp : 1;    // of all lanes at once
    bool copies : 1;     // asynchronously,
    bool under_way : 1;  // and nobody has waited for it yet
    bool constant : 1;   // a read by __ldg
    bool unfenced : 1;   // a read of what another block announced without a fence
    unsigned char bytes;
};

// What atomics have handed from block to block: of each thread of a block, the time before which its accesses are seen.
using Clock = std::map<unsigned, std::vector<unsigned>>;
struct Seen {
    unsigned thread, time;
    std::shared_ptr<const Clock> clock;
};
struct Fence { unsigned time, epoch, meeting; };

static unsigned now = 1, number;            // the time; the running block
static unsigned epoch, meeting[32];         // when its last __syncthreads ended, and the last meeting of each warp
static unsigned shuffled[32];               // the last shuffle or vote of each warp, which orders nothing
static bool partly;                         // have lanes met under a mask without the others, in any launch so far?
static unsigned lanes_met[1024][32];        // of each thread: up to when it has waited so for each lane of its warp
enum Reach { BLOCK_WIDE, GPU_WIDE };        // how far a fence reaches. A fence for the GPU is one for the block, too
static Fence fences[2][1024];               // the last of each thread, of at least that reach; time 0: none
static unsigned met_at_fence[2][1024][32];  // and what lanes_met was then
static unsigned shared_fences[1024];        // the last of each thread that lets asynchronous copies see its writes
static std::vector<Seen> seen;              // by the threads of this block
static std::map<Address, std::shared_ptr<const Clock>> clocks[2];  // what an atomic access of a place hands on
static std::vector<bool> published;         // which blocks have a fence
static bool running, warp_works, fenced[2];  // fenced: this block is
static bool fences_come = false;            // some thread of this launch fences, or may,
static bool fences_sure = false;            // since races_fences was called
// Where threads tell each other what they have done: {place: {block: the time of its last atomic write there}}, and, for
// the running block, what it has read so: {block: {place: that time}}. Only if races_announced was called.
static bool announcing = false;
static std::map<Address, std::map<unsigned, unsigned>> told;
static std::map<unsigned, std::map<Address, unsigned>> heard;
static int busy = 0;                        // the finder's own accesses are none of a kernel's
static Access first, second;                // the race that was found first
static Address place;                       // of the second, if it is not 0
struct Early { Address place; Access first, second; };
static std::vector<Early> early;            // reads beside atomics, until their threads compare and swap there
static const char* ignored_file = nullptr;  // a barrier that is taken for absent, for tests
static int ignored_line;
static const char* file = nullptr;          // of the barrier that threads arrive at

struct Busy {
    QUIET Busy() { busy++; }
    QUIET ~Busy() { busy--; }
};

QUIET inline bool same_warp(const Access& a, const Access& b) { return a.thread / 32 == b.thread / 32; }

// Has a thread waited for another one of its warp since a time?
QUIET inline bool waited_since(unsigned time, unsigned thread, unsigned other) {
    return time < meeting[thread / 32] || (partly && time < lanes_met[thread][other % 32]);
}

// Is an access before another one, which happens now?
QUIET inline bool ordered(const Access& a, const Access& b) {
    if (a.block == b.block) {
        if (a.time < epoch) return true;
        if (a.thread == b.thread && !a.by_warp && !b.by_warp) return true;
        if (same_warp(a, b) && waited_since(a.time, b.thread, a.thread)) return true;
    }
    for (const Seen& s : seen) {
        const bool known = s.thread == b.thread || s.time < epoch ||
                           (s.thread / 32 == b.thread / 32u && waited_since(s.time, b.thread, s.thread));
        const auto of_block = known ? s.clock->find(a.block) : s.clock->end();
        if (of_block != s.clock->end() && a.time < of_block->second[a.thread]) return true;
    }
    return false;
}

// Accesses of one kind to a byte since its last write. A write is a race with one of all if it is one with one of these:
// of the running block two are enough, of two warps if there are, else of two lanes since their last meeting. Of an
// earlier block without a fence, which nothing orders, one is enough. Where threads fence, a fence may order these two
// and no third one: then `others` has one of each thread. So may a meeting by mask, for lanes of one warp.
struct Accesses {
    Access newest[2], unordered;
    std::vector<Access>* others;  // of blocks with a fence

    QUIET void add(const Access& x) {
        Access &a = newest[0], &b = newest[1];
        if (a.there && a.block != x.block) {
            for (Access* old : {&a, &b}) {
                if (!old->there) continue;
                if (!published[old->block]) unordered = *old;
                else {
                    if (!others) others = new std::vector<Access>;
                    others->push_back(*old);
                }
                old->there = false;
            }
        }
        if (b.there && b.time < epoch) b.there = false;
        if (a.there && a.time < epoch) a = b, b.there = false;
        const unsigned met = meeting[x.thread / 32];
        if (!a.there || (a.thread == x.thread)) a = x;
        else if (b.there && b.thread == x.thread) b = x;
        else if (!b.there) (same_warp(a, x) && a.time < met ? a : b) = x;
        else if (same_warp(a, b)) {
            if (!same_warp(a, x)) keep(b), b = x;
            else if (a.time < met) a = x;
            else if (b.time < met) b = x;
            else keep(x);
        } else keep(x);
    }
    QUIET void keep(const Access& x) {
        if (!fences_come && !(partly && same_warp(newest[0], newest[1]))) return;
        if (!others) others = new std::vector<Access>;
        Access* old = others->data();  // a vector's own functions are watched, and slow
        for (size_t i = others->size(); i-- > 0; old++)
            if (old->block == x.block && old->thread == x.thread) {
                *old = x;
                return;
            }
        others->push_back(x);
    }
    QUIET const Access* clash(const Access& x) const {
        for (const Access* old : {&newest[0], &newest[1], &unordered})
            if (old->there && !ordered(*old, x)) return old;
        const Access* old = others ? others->data() : nullptr;
        for (size_t i = others ? others->size() : 0; i-- > 0; old++)
            if (!ordered(*old, x)) return old;
        return nullptr;
    }
    // Does the thread that makes x know of one of these only by an atomic at another place, with no fence between?
    QUIET const Access* announced(const Access& x, Address at) const {
        auto unfenced = [&](const Access& w) QUIET {
            if (!w.there || w.block == x.block || ordered(w, x)) return false;
            for (const auto& [from, time] : heard[w.block])
                if (from != at && w.time < time) return true;
            return false;
        };
        for (const Access* w : {&newest[0], &newest[1], &unordered})
            if (unfenced(*w)) return w;
        for (size_t i = 0; others && i < others->size(); i++)
            if (unfenced((*others)[i])) return &(*others)[i];
        return nullptr;
    }
    // What the running thread has read before.
    QUIET void forget(unsigned thread) {
        for (Access* old : {&newest[0], &newest[1]})
            if (old->block == number && old->thread == thread) old->there = false;
        for (size_t i = others ? others->size() : 0; i-- > 0;)
            if ((*others)[i].block == number && (*others)[i].thread == thread) others->erase(others->begin() + i);
    }
    QUIET void clear() {
        newest[0].there = newest[1].there = unordered.there = false;
        if (others) others->clear();
    }
};

struct Rare {
    Accesses atomic_writes, atomic_reads;
    Access last_exchange;
    Access constant;              // by which this launch reads it as what nobody writes
    std::vector<Access> sources;  // of copies under way

    QUIET void clear() { atomic_writes.clear(), atomic_reads.clear(), last_exchange.there = false; }
};

// What has happened to a byte, or to four.
struct Cell {
    Access write;  // the last that is not atomic
    Accesses reads;
    Rare* rare;

    QUIET void clear() {
        write.there = false;
        reads.clear();
        if (rare) rare->clear(), rare->sources.clear(), rare->constant.there = false;
    }
    QUIET void free() {
        delete reads.others;
        if (rare) delete rare->atomic_writes.others, delete rare->atomic_reads.others;
        delete rare;
    }
    QUIET const Access* clash(const Access& x) const {
        if (write.there && (write.under_way || !ordered(write, x))) return &write;
        const Access* old = x.writes ? reads.clash(x) : nullptr;
        if (old || !rare) return old;
        // Whoever was the last to add to a counter comes after all that it has counted, and may set it to 0.
        const Access& last = rare->last_exchange;
        if (!x.atomic && !(last.there && last.block == x.block && ordered(last, x))) old = rare->atomic_writes.clash(x);
        if (!old && x.writes && !x.atomic) old = rare->atomic_reads.clash(x);
        if (!old && x.writes)
            for (const Access& source : rare->sources)
                if (source.block == x.block || !ordered(source, x)) return &source;
        return old;
    }
    // Any write by this launch, or null.
    QUIET const Access* any_write() const {
        if (write.there) return &write;
        return rare && rare->atomic_writes.newest[0].there ? &rare->atomic_writes.newest[0] : nullptr;
    }
    QUIET Rare& with_rare() {
        if (!rare) rare = new Rare{};
        return *rare;
    }
    QUIET void access(const Access& x) {
        if (const Access* old = clash(x)) first = *old, second = x;
        if (x.writes && rare && rare->constant.there) first = rare->constant, second = x;
        if (x.atomic) {
            (x.writes ? with_rare().atomic_writes : with_rare().atomic_reads).add(x);
            if (x.exchanges) rare->last_exchange = x;
        } else if (!x.writes) {
            reads.add(x);
            if (x.under_way) with_rare().sources.push_back(x);
        } else {  // whoever comes after it comes after all before it
            write = x;
            reads.clear();
            if (rare) rare->clear();
        }
    }
    // The copy whose beginning was x is complete, for the thread that waited as the last.
    QUIET void land(Access x, unsigned waited) {
        if (x.writes && write.there && write.under_way) write.time = x.time, write.under_way = false;
        if (x.writes || !rare) return;
        for (auto source = rare->sources.begin(); source != rare->sources.end(); ++source)
            if (source->thread == x.thread && source->pc == x.pc) {
                rare->sources.erase(source);
                break;
            }
        x.thread = static_cast<unsigned short>(waited);
        reads.add(x);
    }
};

}  // namespace races
}  // namespace cuda_on_cpu
