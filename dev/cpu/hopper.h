// What kernels.cu writes in PTX for Hopper, in C++, with the same names: products of a warp group, wgmma, and boxes that
// the copy engine brings to an mbarrier. -DHOPPER makes kernels.cu use it. For cuda.h.
#pragma once

namespace cuda_on_cpu {

// Four warps and the products that they have under way. Between wgmma_fence and wgmma_commit their threads ask for
// some: that is a group of products. A description is wgmma's, as kernels.cu explains it, and places are counted from
// the start of the dynamic shared memory, in units of 16 bytes.
struct WarpGroup {
    struct Product {
        float (*d)[4];  // of the thread that asks: what it holds of D (64,8 parts)
        int parts;      // 8, 16 or 24
        bool right;     // may it be asked for now?
        bool add, a_in_registers;
        unsigned long long a, b;      // descriptions
        unsigned registers[4];        // what the thread holds of A, if it is in registers
        bool a_of_rows, b_of_rows;    // 64 columns of 16 rows, or all columns of B, instead of 16 columns
        bool e4m3 = false;            // 32 numbers of 8 bits along the summed index, instead of 16 bf16
        size_t bytes() const { return parts * sizeof *d; }
    };
    struct Result {
        float (*d)[4];
        size_t bytes;
        float value[24][4];  // of d, when it arrives
        size_t group;        // the last that adds to it
    };
    struct Reading {
        unsigned place;
        size_t group;
        char value[16];
        races::Asked asked;
    };
    Barrier barrier;
    float (*first[128])[4] = {}, (*end[128])[4] = {};  // of each thread: of which D wgmma_fence was told
    std::vector<Product> asked[128];
    std::vector<Result> results[128];  // not yet in the thread's d
    std::vector<Reading> readings;     // of groups that some warp has not waited for
    const void* pc;                    // whence the last group was asked for
    size_t groups = 0, arrived[4] = {};  // how many have begun, and how many each warp has waited for

    // Where 16 bytes of a described matrix are: 64 bf16 of each of 8 rows are together, in the 128-byte swizzle.
    static unsigned place_of(unsigned long long description, unsigned row, unsigned piece) {
        const unsigned start = description & 0x3fff, stride = description >> 32 & 0x3fff;
        const unsigned leading = description >> 16 & 0x3fff;  // to the next 64 columns
        const unsigned place = start + row / 8 * stride + row % 8 * 8 + piece / 8 * leading + piece % 8;
        return place ^ (place / 8 & 7);
    }
    // Columns 8 piece..8 piece+7 of a row; of e4m3, 16 piece..16 piece+15.
    QUIET void read(float* to, const char* shared, unsigned long long description, unsigned row, unsigned piece,
                    bool e4m3) {
        Reading reading = {place_of(description, row, piece), groups, {}, races::asked(pc)};
        races::copy(shared + 16 * reading.place, 16, false, true, reading.asked);
        memcpy(reading.value, shared + 16 * reading.place, 16);
        unsigned short bits[8];
        memcpy(bits, reading.value, 16);
        const bool swizzled = description >> 46 == 1 << 16;  // by 128 bytes, from a multiple of 1,024, and nothing else
        for (int i = 0; i < 8 && !e4m3; i++) to[i] = __uint_as_float(unsigned(bits[i]) << 16);
        for (int i = 0; i < 16 && e4m3; i++) to[i] = from_fp8(bits[i / 2] >> i % 2 * 8);
        for (int i = 0; i < 16 && !swizzled; i++) to[i] = NAN;
        readings.push_back(reading);
    }

    // Computes a group of products, for all threads, and poisons their D until it arrives.
    QUIET __attribute__((noinline)) void multiply(const char* shared) {
        groups++;
        pc = __builtin_return_address(0);
        for (size_t i = 0; i < asked[0].size(); i++) {
            const Product& product = asked[0][i];
            bool right = true;
            for (auto& of_thread : asked)
                right &= i < of_thread.size() && of_thread[i].right && of_thread[i].a == product.a &&
                         of_thread[i].b == product.b && of_thread[i].add == product.add &&
                         of_thread[i].parts == product.parts && of_thread[i].a_of_rows == product.a_of_rows &&
                         of_thread[i].b_of_rows == product.b_of_rows && of_thread[i].e4m3 == product.e4m3;
            const int columns = 8 * product.parts, depth = product.e4m3 ? 32 : 16;
            static thread_local float A[64][32], B[32][192], D[64][192];  // stacks are small
            memset(D, 0, sizeof D);
            // row r of A, or column r of B, has its number k at to[r * step + k * step_of_k]
            auto fill = [&](float* to, int step, int step_of_k, int rows, unsigned long long description,
                            bool of_rows) QUIET {
                float some[16];
                const int n = depth / 2;  // numbers in 16 bytes
                const int down = of_rows ? step_of_k : step, across = of_rows ? step : step_of_k;
                for (int row = 0; row < (of_rows ? 16 : rows); row++)
                    for (int piece = 0; piece < (of_rows ? rows / 8 : 2); piece++) {
                        read(some, shared, description, row, piece, product.e4m3);
                        for (int i = 0; i < n; i++) to[row * down + (n * piece + i) * across] = some[i];
                    }
            };
            if (!product.a_in_registers) fill(A[0], 32, 1, 64, product.a, product.a_of_rows);
            fill(B[0], 1, 192, columns, product.b, product.b_of_rows);
            for (int t = 0; t < 128 && product.a_in_registers; t++)
                for (int r = 0; r < 4; r++)
                    for (int j = 0; j < 2; j++)
                        A[t / 32 * 16 + t % 32 / 4 + r % 2 * 8][t % 4 * 2 + r / 2 * 8 + j] =
                            __uint_as_float(asked[t][i].registers[r] >> 16 * j << 16);
            for (int m = 0; m < 64; m++)
                for (int k = 0; k < depth; k++)
                    OPENMP(omp simd)
                    for (int n = 0; n < columns; n++) D[m][n] += A[m][k] * B[k][n];
            for (int t = 0; t < 128 && right; t++) {
                Result& result = result_of(t, asked[t][i]);
                for (int e = 0; e < 4 * product.parts; e++)
                    result.value[e / 4][e % 4] +=
                        D[t / 32 * 16 + t % 32 / 4 + e % 4 / 2 * 8][e / 4 * 8 + t % 4 * 2 + e % 2];
            }
        }
        for (int t = 0; t < 128; t++) {
            for (Product& product : asked[t]) memset(product.d, 0xff, product.bytes());
            asked[t].clear();
            first[t] = end[t] = nullptr;
        }
    }
    // The result that a thread's product adds to or, without add, begins.
    Result& result_of(int t, const Product& product) {
        auto& all = results[t];
        auto result = std::find_if(all.begin(), all.end(), [&](Result& r) { return r.d == product.d; });
        if (result == all.end()) {
            result = all.insert(all.end(), Result{product.d, product.bytes(), {}, 0});
            memcpy(result->value, product.d, result->bytes);
        }
        if (!product.add) memset(result->value, 0, result->bytes);
        result->group = groups;
        return *result;
    }

    // Gives the lanes of one of the four warps the results in d[lane], which has so many parts, but those of the newest
    // `pending` groups. The others may be there too, but a compiler may not know that yet.
    QUIET void arrive(int warp, unsigned pending, const char* shared, float (**d)[4], int parts) {
        if (groups < pending) return;
        const size_t all = groups - pending;
        bool right = true;
        for (Reading& r : readings)
            right &= r.group > all || r.group <= arrived[warp] || !memcmp(r.value, shared + 16 * r.place, 16);
        for (int t = 32 * warp; t < 32 * warp + 32; t++)
            for (auto result = results[t].begin(); result != results[t].end();) {
                float poison[24][4];
                memset(poison, 0xff, sizeof poison);
                if (result->group <= all && (!right || memcmp(result->d, poison, result->bytes)))  // written meanwhile
                    memcpy(result->value, poison, result->bytes);
                if (result->group > all || result->d < d[t % 32] || result->d >= d[t % 32] + parts) {
                    ++result;
                    continue;
                }
                memcpy(result->d, result->value, result->bytes);
                result = results[t].erase(result);
            }
        arrived[warp] = max(arrived[warp], all);
        const size_t by_all = *std::min_element(arrived, arrived + 4);
        const auto end = std::find_if(readings.begin(), readings.end(), [&](Reading& r) { return r.group > by_all; });
        for (auto r = readings.begin(); r != end; ++r) {
            r->asked.time = races::time(), r->asked.waited = thread_number();
            races::copy(shared + 16 * r->place, 16, false, false, r->asked);
        }
        readings.erase(readings.begin(), end);
    }
};

// Counts the arrivals and the bytes that its phase still waits for. It takes the place of a kernel's mbarrier.
struct Mbarrier {
    int bytes;
    unsigned char arrivals, of_phase;  // of_phase: how many arrivals a phase has
    unsigned short phase;              // its parity
};
static_assert(sizeof(Mbarrier) == sizeof(unsigned long long));

// A copy of some rows of 64 bf16, mostly 64 of them, that has begun. Its target is poison until a thread waits for it.
struct Box {
    char* to;
    const char* from;  // the matrix: a head's tokens
    int columns, rows; // of the matrix, beyond which there are zeros
    size_t stride;     // bytes from row to row
    int column, row;   // where the box begins
    int height;        // its rows
    bool paired;       // of each 16 rows, first the even ones
    Mbarrier* mbarrier;
    races::Asked asked;

    int bytes() const { return 128 * height; }
    QUIET void tell_races(bool begins) const {
        races::copy(to, bytes(), true, begins, asked);
        for (int r = max(row, 0); r < min(row + height, rows); r++)
            races::copy(from + r * stride + 2 * column, 2 * max(min(64, columns - column), 0), false, begins, asked);
    }
    // The row of a box of 64 that stands at its place i.
    static int row_at(int i, bool paired) { return paired ? i / 16 * 16 + i % 8 * 2 + i / 8 % 2 : i; }
    QUIET void deliver() const {
        char* shared = static_cast<char*>(dynamic_shared);
        for (int i = 0; i < height * 64; i++) {
            const int r = row + row_at(i / 64, paired), c = column + i % 64;
            const size_t place = to - shared + 2 * i;
            char* at = shared + (place ^ (place / 128 & 7) * 16);  // in the 128-byte swizzle
            if (r < rows && c < columns) memcpy(at, from + r * stride + 2 * c, 2);
            else memset(at, 0, 2);
        }
        tell_races(false);
    }
};

// Bytes on their way to shared memory, which are poison until a thread waits for them.
struct Line {
    char* to;
    const char* from;
    int bytes;
    Mbarrier* mbarrier;
    races::Asked asked;

    QUIET void tell_races(bool begins) const {
        races::copy(to, bytes, true, begins, asked);
        races::copy(from, bytes, false, begins, asked);
    }
    QUIET void deliver() const {
        memcpy(to, from, bytes);
        tell_races(false);
    }
};

// Bytes on their way from shared to device memory. The thread that has sent them waits for them, once it has committed
// them to a group. Until then they are poison in device memory. If shared memory changes before they are read, they stay
// poison.
struct Sent {
    struct Piece {
        char* to;
        std::vector<char> bytes;
    };
    unsigned thread;
    const char* from;
    std::vector<char> before;   // what was in shared memory when it began
    std::vector<Piece> pieces;  // what arrives, and where
    races::Asked asked;
    bool committed, read;

    QUIET void begin() {
        races::copy(from, before.size(), false, true, asked);
        for (Piece& piece : pieces) {
            races::copy(piece.to, piece.bytes.size(), true, true, asked);
            memset(piece.to, 0xff, piece.bytes.size());
        }
    }
    QUIET void land(const void* p, size_t bytes, bool writes) {
        races::Asked now = asked;
        now.time = races::time();
        races::copy(p, bytes, writes, false, now);
    }
    QUIET void end_reading() {
        if (read) return;
        if (memcmp(before.data(), from, before.size()))
            for (Piece& piece : pieces) memset(piece.bytes.data(), 0xff, piece.bytes.size());
        land(from, before.size(), false);
        read = true;
    }
    QUIET void end() {
        end_reading();
        for (Piece& piece : pieces) {
            memcpy(piece.to, piece.bytes.data(), piece.bytes.size());
            land(piece.to, piece.bytes.size(), true);
        }
    }
};

// What the threads of a block have under way.
struct Hopper {
    size_t block = 0;  // its number
    WarpGroup groups[8];
    Barrier teams[4];
    std::vector<Box> boxes;
    std::vector<Line> lines;
    std::vector<Sent> sent;
    std::vector<std::pair<Mbarrier*, unsigned>> waiting;  // threads, and at which mbarrier

    // Lets all threads that wait at an mbarrier look again.
    QUIET void wake(Mbarrier& mbarrier) {
        for (auto& [at, t] : waiting)
            if (at == &mbarrier) cuda_on_cpu::block->warps[t / 32].waiting &= ~(1u << t % 32);
        waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [&](auto& w) { return w.first == &mbarrier; }),
                      waiting.end());
    }
    QUIET void complete(Mbarrier& mbarrier) {
        if (mbarrier.arrivals || mbarrier.bytes) return;
        mbarrier.arrivals = mbarrier.of_phase, mbarrier.phase ^= 1;
        wake(mbarrier);
    }
    // Delivers the boxes and lines that have begun.
    QUIET void deliver(Mbarrier& mbarrier) {
        auto there = [&](auto& copy) { return copy.mbarrier != &mbarrier; };
        const auto box = std::stable_partition(boxes.begin(), boxes.end(), there);
        const auto line = std::stable_partition(lines.begin(), lines.end(), there);
        if (box == boxes.end() && line == lines.end()) return;
        for (auto it = box; it != boxes.end(); ++it) it->deliver(), mbarrier.bytes -= it->bytes();
        for (auto it = line; it != lines.end(); ++it) it->deliver(), mbarrier.bytes -= it->bytes;
        boxes.erase(box, boxes.end());
        lines.erase(line, lines.end());
        complete(mbarrier);
    }
};

inline Hopper& state() {
    static thread_local std::unique_ptr<Hopper> state;
    if (!state || state->block != block->number) {
        state.reset(new Hopper);
        state->block = block->number;
    }
    return *state;
}

}  // namespace cuda_on_cpu

namespace hopper {

using namespace cuda_on_cpu;

// In units of 16 bytes, from the start of the dynamic shared memory.
inline unsigned address16(const void* tile) {
    return unsigned(static_cast<const char*>(tile) - static_cast<char*>(dynamic_shared)) / 16;
}
inline void compute_now(unsigned (&)[4]) {}

template <int parts> void wgmma_fence(float (&d)[1][parts][4]) {
    const unsigned t = thread_number();
    WarpGroup& group = state().groups[t / 128];
    group.first[t % 128] = d[0], group.end[t % 128] = d[0] + parts;
}

// A thread asks for a product. What is asked before wgmma_fence, or of another D, is wrong.
inline void ask(WarpGroup::Product product) {
    const unsigned t = thread_number();
    WarpGroup& group = state().groups[t / 128];
    product.right = group.first[t % 128] <= product.d && product.d < group.end[t % 128];
    group.asked[t % 128].push_back(product);
}
inline void wgmma(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    ask({d, 8, true, add, false, a, b, {}, false, false});
}
inline void wgmma_of_rows(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    ask({d, 8, true, add, false, a, b, {}, true, true});
}
inline void wgmma_from_registers(float (*d)[4], const unsigned (&a)[4], unsigned long long b) {
    ask({d, 8, true, true, true, b, b, {a[0], a[1], a[2], a[3]}, false, true});
}
inline void wgmma_e4m3(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    ask({d, 16, true, add, false, a, b, {}, false, false, true});
}
template <int width, bool b_of_rows, bool a_of_rows>
void wgmma_wide(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    ask({d, width / 8, true, add, false, a, b, {}, a_of_rows, b_of_rows});
}

// The 128 threads of a warp group meet. The last one does something for all.
template <class Do> __device__ void group_meets(const char* what, int line, Do act) {
    Block& b = *block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    const bool all = state().groups[t / 128].barrier.complete(what, line, 128);
    if (all) {
        act();
        for (int i = 0; i < 4; i++) b.warps[t / 128 * 4 + i].waiting = 0;
    }
    if (!all || b.order != FORWARD) b.wait(t, what, line, all);
    waited = true;
}
__device__ void wgmma_commit(int line = __builtin_LINE()) {
    WarpGroup& group = state().groups[thread_number() / 128];
    group_meets("wgmma_commit", line, [&group] { group.multiply(static_cast<char*>(dynamic_shared)); });
}
__device__ void warpgroup_sync(int, int line = __builtin_LINE()) {
    const void* barrier = &state().groups[thread_number() / 128];
    races::hand_over(barrier);
    group_meets("warpgroup_sync", line, [] {});
    races::take_over(barrier);
}

// All threads of some neighbouring warpgroups wait for each other.
template <int n>
__device__ void groups_sync(int line) {
    Block& b = *block;
    const unsigned t = thread_number(), team = t / (128 * n);
    Barrier& barrier = state().teams[team];
    races::hand_over(&barrier);
    b.next = max(b.next, b.place[t] + 1);
    const bool all = barrier.complete("groups_sync", line, 128 * n);
    for (unsigned i = 0; i < 4 * n && all; i++) b.warps[team * 4 * n + i].waiting = 0;
    if (!all || b.order != FORWARD) b.wait(t, "groups_sync", line, all);
    waited = true;
    races::take_over(&barrier);
}

template <int pending, int parts> void wgmma_wait(float (&d)[1][parts][4], int line = __builtin_LINE()) {
    using D = float (*)[4];
    Exchange<D>(~0u, d[0], "wgmma_wait", line, [](D* of_lane) {
        const unsigned t = thread_number();
        state().groups[t / 128].arrive(t / 32 % 4, pending, static_cast<char*>(dynamic_shared), of_lane, parts);
    });
}

inline Mbarrier& as_mbarrier(unsigned long long& mbarrier) { return reinterpret_cast<Mbarrier&>(mbarrier); }
__device__ void mbarrier_start(unsigned long long& mbarrier, int arrivals = 1) {
    as_mbarrier(mbarrier) = {0, (unsigned char)arrivals, (unsigned char)arrivals, 0};
}
__device__ void shared_written() { races::fence_shared(); }
__device__ void global_seen() {}
template <int> void keep_registers() {}
template <int> void take_registers() {}
inline float reciprocal(float x) { return 1.0f / x; }
QUIET inline void mbarrier_arrive(unsigned long long& mbarrier) {
    races::hand_over(&mbarrier);
    as_mbarrier(mbarrier).arrivals--;
    state().complete(as_mbarrier(mbarrier));
}
// Is a phase of this parity over? If it can be over, it is from now on.
QUIET inline bool is_over(unsigned long long& mbarrier, int parity) {
    races::look_at(&mbarrier);
    if (as_mbarrier(mbarrier).phase == unsigned(parity)) state().deliver(as_mbarrier(mbarrier));
    if (as_mbarrier(mbarrier).phase == unsigned(parity)) return false;
    races::take_over(&mbarrier);
    return true;
}
__device__ void mbarrier_wait(unsigned long long& mbarrier, int parity, int line = __builtin_LINE()) {
    Block& b = *block;
    const unsigned t = thread_number();
    b.next = max(b.next, b.place[t] + 1);
    while (!is_over(mbarrier, parity)) {
        state().waiting.push_back({&as_mbarrier(mbarrier), t});
        b.wait(t, "a wait for a barrier", line);
    }
    waited = true;
}
QUIET inline __attribute__((noinline)) void copy_box(void* box, const void* map, int channel, int head, int t,
                                                     int b, unsigned long long& mbarrier, int rows = 64) {
    auto* m = static_cast<const unsigned long long*>(map);  // as Emulated.tensor_map makes it
    const size_t stride = 2 * m[1] * m[2];
    const bool paired = m[4];  // then b is the number of 16 rows
    const char* from = reinterpret_cast<const char*>(m[0]) + (paired ? 0 : b * m[3] * stride) + 2 * head * m[1];
    state().boxes.push_back({static_cast<char*>(box), from, int(m[1]), int(m[3]), stride, channel,
                             paired ? 16 * b : t, rows, paired,
                             &as_mbarrier(mbarrier), races::asked(__builtin_return_address(0))});
    state().boxes.back().tell_races(true);
    memset(box, 0xff, 128 * rows);
    as_mbarrier(mbarrier).bytes += 128 * rows;
    state().wake(as_mbarrier(mbarrier));
}
QUIET inline __attribute__((noinline)) void copy_line(void* shared, const void* global, int bytes,
                                                      unsigned long long& mbarrier) {
    state().lines.push_back({static_cast<char*>(shared), static_cast<const char*>(global), bytes,
                             &as_mbarrier(mbarrier), races::asked(__builtin_return_address(0))});
    state().lines.back().tell_races(true);
    memset(shared, 0xff, bytes);
    as_mbarrier(mbarrier).bytes += bytes;
    state().wake(as_mbarrier(mbarrier));
}

// A thread sends bytes of shared memory. A vector that copied them itself would be watched.
QUIET inline Sent sent_from(const void* shared, size_t bytes, bool committed, const void* pc) {
    std::vector<char> before(bytes);
    memcpy(before.data(), shared, bytes);
    return {thread_number(), static_cast<const char*>(shared), before, {}, races::asked(pc), committed, false};
}
QUIET inline __attribute__((noinline)) void add_line(float* global, const float* shared, int bytes, bool add) {
    Sent line = sent_from(shared, bytes, true, __builtin_return_address(0));
    line.pieces.push_back({reinterpret_cast<char*>(global), line.before});
    auto* sum = reinterpret_cast<float*>(line.pieces[0].bytes.data());
    for (int i = 0; i < bytes / 4 && add; i++) sum[i] += global[i];
    line.begin();
    state().sent.push_back(std::move(line));
}
// The opposite of copy_box, for matrices without heads, or paired: rows and columns outside of one are left out.
QUIET inline __attribute__((noinline)) void store_box(const void* map, int column, int row, const void* box,
                                                      int matrix = 0) {
    auto* m = static_cast<const unsigned long long*>(map);  // as Emulated.tensor_map makes it
    const int columns = int(m[1]), rows = int(m[3]), inside = max(min(64, columns - column), 0);
    const bool paired = m[4];
    if (paired) row = 16 * matrix, matrix = 0;
    Sent sent = sent_from(box, 8192, false, __builtin_return_address(0));
    const char* shared = static_cast<char*>(dynamic_shared);
    for (int i = 0; i < 64 && inside > 0; i++) {
        const int r = row + Box::row_at(i, paired);
        if (r >= rows) continue;
        Sent::Piece piece = {
            reinterpret_cast<char*>(m[0]) + ((size_t(matrix) * rows + r) * columns + column) * 2, {}};
        for (int j = 0; j < 2 * inside; j++) {
            const size_t place = sent.from - shared + 128 * i + j;
            piece.bytes.push_back(shared[place ^ (place / 128 & 7) * 16]);  // in the 128-byte swizzle
        }
        sent.pieces.push_back(std::move(piece));
    }
    sent.begin();
    state().sent.push_back(std::move(sent));
}
QUIET inline void stores_commit() {
    for (Sent& sent : state().sent) sent.committed |= sent.thread == thread_number();
}
QUIET inline void stores_read() {
    for (Sent& sent : state().sent)
        if (sent.committed && sent.thread == thread_number()) sent.end_reading();
}
QUIET inline void stores_arrive() {
    auto& all = state().sent;
    auto ours = [t = thread_number()](Sent& sent) { return sent.committed && sent.thread == t; };
    for (Sent& sent : all)
        if (ours(sent)) sent.end();
    all.erase(std::remove_if(all.begin(), all.end(), ours), all.end());
}

// The opposite of load_matrices in ptx.h, and of load_matrices_transposed.
template <bool transposed>
void store_8x8s(void* row, const unsigned (&x)[4], int line) {
    struct Lane { unsigned short* row; const unsigned* x; };
    Exchange<Lane>(~0u, {static_cast<unsigned short*>(row), x}, "stmatrix", line, [](Lane* lanes) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 2; j++) {
                    const int r = lane / 4, c = 2 * (lane % 4) + j;
                    const auto number = (unsigned short)(lanes[lane].x[i] >> 16 * j);
                    lanes[8 * i + (transposed ? c : r)].row[transposed ? r : c] = number;
                }
    });
}
inline void store_matrices(void* row, const unsigned (&x)[4], int line = __builtin_LINE()) {
    store_8x8s<false>(row, x, line);
}
inline void store_matrices_transposed(void* row, const unsigned (&x)[4], int line = __builtin_LINE()) {
    store_8x8s<true>(row, x, line);
}

}  // namespace hopper
