// Counts what the warps of a launch move, from the same hooks as races.h, which includes this. traffic.py reads it.
//
// On a GPU the lanes of a warp run an instruction together, and the memory answers them together. Here they run one
// after another. So the accesses of the lanes are matched: the n-th time that a lane comes by an instruction since its
// warp last met, in a barrier or a shuffle, belongs to the n-th time of each other lane. Together they are one request.
// This is what a GPU does with ifs and with loops that some lanes leave earlier. It is too kind to an if within a loop
// that lanes take in different rounds: their first times are matched, although a GPU runs them apart.
//
// A request of global memory costs sectors: the pieces of 32 bytes that its lanes touch. One of shared memory costs
// turns: there are 32 banks of 4 bytes, word i is in bank i % 32, and a bank serves one word a turn. 32 lanes get their
// turns together if each takes 4 bytes or less, 16 lanes at a time if each takes 8, and 8 lanes if each takes 16. They
// are twice as many if each lane i wants the same as lane i ^ 1, or each the same as i ^ 2. An atomic of shared memory
// serves one lane a turn and bank.
#pragma once

namespace cuda_on_cpu {
namespace traffic {

using Address = size_t;
enum Kind { LOAD, STORE, ATOMIC, COPY };  // COPY: asynchronous, from global to shared memory

struct Request {
    unsigned lanes = 0;  // a mask
    unsigned bytes = 0;  // of a lane
    unsigned when = 0;   // its place among all requests of the launch, for a trace
    Address at[32];
};

// A line of a trace: a request, or a barrier of a block or a warp, whose pc is its line. traffic.py has the same layout.
enum { BLOCK_MEETS = 4, WARP_MEETS };  // kinds, behind those of Kind
struct Traced {
    unsigned pc, block, warp, kind, space, bytes, lanes, cost, least, unused;  // space: 0, or of spaces
    Address at[32];  // addresses; in shared memory from the beginning of the variable
};

// The request of an instruction that cost most, to be drawn.
struct Sample {
    size_t cost = 0;
    unsigned block, warp;
    Request request;
    std::string name;  // of the shared variable, and where it begins
    Address begin = 0;
};

// An instruction, and what kind of access it makes. All sizes are sums over requests.
struct Site {
    const char* pc;
    Kind kind;
    bool shared;
    std::vector<Request> open;  // since the warp last met,
    unsigned done[32] = {};     // and how many of them each lane has made
    size_t requests = 0, partial = 0;  // partial: some lanes of the warp are missing
    size_t cost = 0, least = 0;  // sectors or turns; and with the same bytes side by side
    std::map<std::pair<unsigned, unsigned>, size_t> missing;  // {(warp, lanes): requests} of the running block
    Sample most;
};

static bool counting = false;
static std::unordered_map<size_t, Site> sites;
static std::vector<Site*> open_sites;  // those with requests of the running warp
static Site* latest = nullptr;
static unsigned running_warp = ~0u, awake[32];  // awake: the lanes that have done anything in this block
static std::unordered_set<Address> sectors_read, sectors_written;  // the sectors of global memory that any request touched
static Address again_at = 0;  // where the thread again_by repeats an atomic that has failed
static unsigned again_by;
static std::string report;
static bool tracing = false;
static unsigned clock_of_requests;
static std::vector<Traced> traced;
static std::vector<std::string> spaces;  // names of shared variables: number i is space i + 1

QUIET inline unsigned all_lanes(unsigned warp) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    return threads >= 32 * warp + 32 ? ~0u : (1u << threads % 32) - 1;
}

// Do lanes first..first+n-1 want the same in pairs, i and i ^ 1, or i and i ^ 2?
QUIET inline bool in_pairs(const Request& r, unsigned first, unsigned n) {
    bool pairs[3] = {false, true, true};
    for (unsigned i = first; i < first + n; i++)
        for (unsigned other : {1u, 2u})
            if (r.lanes >> i & r.lanes >> (i ^ other) & 1) pairs[other] &= r.at[i] == r.at[i ^ other];
    return pairs[1] || pairs[2];
}

QUIET inline size_t turns_of(const Request& r, bool atomic, size_t& least) {
    size_t turns = 0;
    for (unsigned first = 0, at_once; first < 32; first += at_once) {
        at_once = r.bytes <= 4 ? 32 : r.bytes <= 8 ? 16 : 8;
        if (at_once < 32 && first % (2 * at_once) == 0 && in_pairs(r, first, 2 * at_once)) at_once *= 2;
        std::vector<Address> words;
        for (unsigned lane = first; lane < first + at_once; lane++)
            if (r.lanes >> lane & 1)
                for (Address w = r.at[lane] / 4; w <= (r.at[lane] + r.bytes - 1) / 4; w++) words.push_back(w);
        if (words.empty()) continue;
        std::sort(words.begin(), words.end());
        if (!atomic) words.erase(std::unique(words.begin(), words.end()), words.end());
        unsigned in_bank[32] = {}, most = 0;
        for (Address w : words) most = max(most, ++in_bank[w % 32]);
        turns += most, least++;
    }
    return turns;
}

QUIET inline size_t sectors_of(const Request& r, bool writes, size_t& least) {
    Address begins[32];
    unsigned n = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (r.lanes >> lane & 1) begins[n++] = r.at[lane];
    std::sort(begins, begins + n);
    size_t sectors = 0, bytes = 0;
    Address next_sector = 0, next_byte = 0;
    for (unsigned i = 0; i < n; i++) {
        const Address begin = begins[i], end = begin + r.bytes;
        for (Address s = max(begin / 32, next_sector); s <= (end - 1) / 32; s++) {
            sectors++, next_sector = s + 1;
            (writes ? sectors_written : sectors_read).insert(s);
        }
        bytes += end - max(begin, min(next_byte, end)), next_byte = max(next_byte, end);
    }
    least += (bytes + 31) / 32;
    return sectors;
}

QUIET inline unsigned running_block() { return blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z); }

QUIET inline void trace(const Site& site, const Request& r) {
    Traced x = {unsigned(Address(site.pc) - 1 - races::base), running_block(), running_warp, unsigned(site.kind), 0, r.bytes, r.lanes};
    const races::Region* region = races::region_of(r.at[__builtin_ctz(r.lanes)]);
    size_t cost = 0, least = 0;
    if (site.shared) {
        while (x.space < spaces.size() && spaces[x.space] != region->name) x.space++;
        if (x.space++ == spaces.size()) spaces.push_back(region->name);
        cost = turns_of(r, site.kind == ATOMIC, least);
    } else cost = sectors_of(r, false, least);
    x.cost = unsigned(cost), x.least = unsigned(least);
    for (unsigned lane = 0; lane < 32; lane++)
        if (r.lanes >> lane & 1) x.at[lane] = r.at[lane] - (site.shared ? region->begin : 0);
    traced.push_back(x);
}

// The requests of a warp in the order in which its lanes came to them.
QUIET inline void trace_all() {
    std::vector<std::pair<unsigned, std::pair<const Site*, const Request*>>> all;
    for (const Site* site : open_sites)
        for (const Request& r : site->open) all.push_back({r.when, {site, &r}});
    std::sort(all.begin(), all.end());
    for (const auto& [_, of] : all) trace(*of.first, *of.second);
}

QUIET inline void trace_meeting(unsigned kind, unsigned warp, int line) {
    if (!tracing) return;
    const races::Busy here;
    traced.push_back({unsigned(line), running_block(), warp, kind});
}

// The running warp meets, or another one runs: its requests are complete.
QUIET inline void close() {
    const races::Busy here;
    if (tracing) trace_all();
    for (Site* site : open_sites) {
        for (const Request& r : site->open) {
            const size_t cost = site->shared ? turns_of(r, site->kind == ATOMIC, site->least)
                                             : sectors_of(r, site->kind == STORE || site->kind == ATOMIC, site->least);
            site->requests++, site->cost += cost;
            awake[running_warp] |= r.lanes;
            if (r.lanes != ~0u) site->missing[{running_warp, r.lanes}]++;
            if (cost <= site->most.cost) continue;
            site->most.cost = cost, site->most.block = running_block(), site->most.warp = running_warp, site->most.request = r;
            const races::Region* region = races::region_of(r.at[__builtin_ctz(r.lanes)]);
            site->most.name = region ? region->name : "", site->most.begin = region ? region->begin : 0;
        }
        site->open.clear();
        std::fill_n(site->done, 32, 0);
    }
    open_sites.clear();
}

QUIET inline void block_begins() {
    running_warp = ~0u, again_at = 0;
    std::fill_n(awake, 32, 0);
}
QUIET inline void warp_meets(unsigned warp, int line) {
    close();
    trace_meeting(WARP_MEETS, warp, line);
    awake[warp] = all_lanes(warp);
}
QUIET inline void all_wait(int line) {
    close();
    trace_meeting(BLOCK_MEETS, 0, line);
    for (unsigned warp = 0; 32 * warp < blockDim.x * blockDim.y * blockDim.z; warp++) awake[warp] = all_lanes(warp);
}
QUIET inline void block_ends() {
    close();
    const races::Busy here;
    for (auto& [_, site] : sites) {
        for (const auto& [who, requests] : site.missing)
            if (who.second != awake[who.first]) site.partial += requests;
        site.missing.clear();
    }
}

QUIET inline void touch_16(Address p, unsigned bytes, Kind kind, const void* pc, unsigned t) {
    const races::Region* region = races::region_of(p);
    if (!region) return;
    again_at = 0;
    if (t / 32 != running_warp) close(), running_warp = t / 32;
    const size_t key = Address(pc) * 8 + kind * 2 + region->shared;
    if (!latest || Address(latest->pc) * 8 + latest->kind * 2 + latest->shared != key) {
        latest = &sites[key];
        latest->pc = static_cast<const char*>(pc), latest->kind = kind, latest->shared = region->shared;
    }
    Site& site = *latest;
    if (site.open.empty()) open_sites.push_back(&site);
    const unsigned n = site.done[t % 32]++;
    if (n == site.open.size()) site.open.emplace_back(), site.open.back().when = ++clock_of_requests;
    Request& r = site.open[n];
    r.lanes |= 1u << t % 32, r.at[t % 32] = p, r.bytes = max(r.bytes, bytes);
}

// An access of a thread. One of more than 16 bytes is several, as on a GPU.
QUIET inline void touch(const volatile void* p, size_t bytes, Kind kind, const void* pc, unsigned t) {
    if (!races::running || races::busy || races::warp_works) return;
    const races::Busy here;
    for (size_t i = 0; i < bytes; i += 16) touch_16(Address(p) + i, unsigned(min(bytes - i, size_t(16))), kind, pc, t);
}

// The CPU has no atomic addition of floats, so cuda.h compares and exchanges until nobody came
// between. It is counted as one, as in a GPU's global memory; in shared memory a GPU makes a loop of
// it, too, of more turns than are counted here.
QUIET inline void touch_atomic(const volatile void* p, size_t bytes, const void* pc) {
    const unsigned t = thread_number();
    if (again_at != Address(p) || again_by != t) touch(p, bytes, ATOMIC, pc, t);
    again_at = 0;
}
QUIET inline void again(const volatile void* p) { again_at = Address(p), again_by = thread_number(); }

// Each lane reads a row of 16 bytes of a matrix, by ldmatrix.
QUIET __attribute__((noinline)) void matrix_row(const void* p) {
    if (counting) touch(p, 16, LOAD, __builtin_return_address(0), thread_number());
}

}  // namespace traffic
}  // namespace cuda_on_cpu

// Count from now on, and from 0.
extern "C" __attribute__((visibility("default"))) void traffic_begin() {
    using namespace cuda_on_cpu::traffic;
    sites.clear(), open_sites.clear(), sectors_read.clear(), sectors_written.clear();
    latest = nullptr, counting = true;
}

// The same, and keep every request and barrier. After traffic_end, traffic_trace gives how many, and where they are;
// traffic_space the names of shared variables.
extern "C" __attribute__((visibility("default"))) void traffic_begin_trace() {
    using namespace cuda_on_cpu::traffic;
    traffic_begin();
    traced.clear(), spaces.clear(), clock_of_requests = 0, tracing = true;
}
extern "C" __attribute__((visibility("default"))) size_t traffic_trace(const void** at) {
    using namespace cuda_on_cpu::traffic;
    *at = traced.data();
    return traced.size();
}
extern "C" __attribute__((visibility("default"))) const char* traffic_space(unsigned number) {
    using namespace cuda_on_cpu::traffic;
    return number < spaces.size() ? spaces[number].c_str() : nullptr;
}

// Count no more. JSON: how many sectors were read, how many were written, and a list for each site.
extern "C" QUIET __attribute__((visibility("default"))) const char* traffic_end() {
    using namespace cuda_on_cpu::traffic;
    counting = tracing = false;
    report = "[" + std::to_string(sectors_read.size()) + ", " + std::to_string(sectors_written.size());
    for (const auto& [_, site] : sites) {
        if (!site.requests) continue;
        const Sample& most = site.most;
        report += ", [\"" + most.name + "\"";
        for (size_t x : {size_t(site.pc - 1 - cuda_on_cpu::races::base), size_t(site.kind), size_t(site.shared),
                         site.requests, site.partial, site.cost, site.least, size_t(most.block),
                         size_t(most.warp), size_t(most.request.bytes), most.begin})
            report += ", " + std::to_string(x);
        for (unsigned lane = 0; lane < 32; lane++)
            report += ", " + (most.request.lanes >> lane & 1 ? std::to_string(most.request.at[lane]) : "null");
        report += "]";
    }
    return (report += "]").c_str();
}
