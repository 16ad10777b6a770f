// Attention's gradient with five products instead of seven, for heads of 64 channels on Hopper. It
// replaces attention_backward_q and attention_backward_kv; attention_five64.py launches it.
// hopper.cuh and turns.cuh are compiled in front of it.
#if HOPPER && HS == 64 && !RELU

namespace attention_five64 {
using namespace turns;

#ifndef AT_ONCE
#define AT_ONCE 32  // heads of keys at a time
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef TOKEN
#define TOKEN 2
#endif
#ifndef FEW
#define FEW 40
#define MANY 232
#endif
constexpr int WORKERS = 256;                 // two warpgroups multiply,
constexpr int ALL_THREADS = WORKERS + 128;   // and the third adds and loads
constexpr int ROWS = 128;                    // keys of a block, queries of a tile
constexpr int TILE = ROWS * HP;              // numbers of a tile of keys, queries, ..
constexpr int DSCORES = ROWS * ROWS;         // numbers of a tile's dscores
constexpr int PART = 64 * HP;                // numbers of a warpgroup's part of dq
constexpr int STAGES = 2;
static_assert(2 * (4 * TILE + 2 * STAGES * TILE + 2 * DSCORES) + 4 * 2 * PART == 229376,
              "as many bytes as attention_five64.py says");

struct Stats { float lse[ROWS], delta[ROWS]; };

// Where column c of a tile is among its Stats: a lane finds the four of 16 columns side by side.
__device__ int place_of(int c) { return c / 16 * 16 + c % 8 / 2 * 4 + c / 8 % 2 * 2 + c % 2; }

// stats (B,NH,tiles): of each tile of queries lse and delta, the sum over a head's channels of
// out * dout, with zeros beyond T. Clears turns (1 + 2*B*NH*tiles). 8 lanes share a row. Items: tiles
// of all heads.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256) attention_backward_five64_delta(
    Stats* __restrict__ stats, int* __restrict__ turns, const float* __restrict__ lse,
    const real* __restrict__ out, const real* __restrict__ dout, int T, int NH) {
    constexpr int rows = 256 / 8, steps = ROWS / rows;
    int tiles = (T + ROWS - 1) / ROWS, head = blockIdx.x / tiles;
    int first = blockIdx.x % tiles * ROWS, lane = threadIdx.x % 8;
    Head of_out = {head / NH, head % NH, NH, T};
    Pack<W> x[steps], y[steps];
#pragma unroll
    for (int i = 0; i < steps; i++) {
        size_t at = of_out.at(min(first + rows * i + (int)threadIdx.x / 8, T - 1)) + W * lane;
        x[i] = load<W>(out + at);
        y[i] = load<W>(dout + at);
    }
#pragma unroll
    for (int i = 0; i < steps; i++) {
        int row = rows * i + threadIdx.x / 8, t = first + row;
        float sum = 0.0f;
        for (int j = 0; j < W; j++) sum += x[i][j] * y[i][j];
        for (int distance = 4; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        if (lane > 0) continue;
        stats[blockIdx.x].lse[place_of(row)] = t < T ? lse[of_out.stat_at(t)] : 0.0f;
        stats[blockIdx.x].delta[place_of(row)] = t < T ? sum : 0.0f;
    }
    if (threadIdx.x < 2) turns[1 + 2 * blockIdx.x + threadIdx.x] = 0;
    if (threadIdx.x == 0 && blockIdx.x == 0) turns[0] = 0;
}

// A block of keys, and its walk over the tiles of queries that see it.
struct Item {
    int b, kv, first;  // b is -1 behind the last one
    __device__ void find(int number, int T, int NKV, int heads) {
        int blocks = (T + ROWS - 1) / ROWS;
        int section = number / (AT_ONCE * blocks) * AT_ONCE, i = number - section * blocks;
        int heads_here = max(min(AT_ONCE, heads - section), 1), head = section + i % heads_here;
        b = number < heads * blocks ? head / NKV : -1;
        kv = head % NKV;
        first = (blocks - 1 - i / heads_here) * ROWS;
    }
};
struct Walk {
    int number, head, query;  // number: of items
    __device__ bool next(int T) {  // false behind the item's last tile
        if (++head == GROUP) {
            head = 0;
            query += ROWS;
        }
        return query < T;
    }
};

// x (64 keys, 128 queries) = a slab of keys or values times a transposed tile
__device__ void multiply_wide(Result<ROWS>& x, const real* slab, const real* tile) {
    auto a = describe(address16(slab)), b = describe(address16(tile));
    wgmma_fence(x.x);
#pragma unroll
    for (int c = 0; c < HP; c += 16)
        wgmma_wide<ROWS, false, false>(x.x[0], further(a, c / W), further(b, c / W), c > 0);
    wgmma_commit();
}

// Starts sum += A times a tile.
__device__ void add_packed(Result<HP>& sum, const Pair (&a)[ROWS / 16][4], const real* tile) {
    auto b = describe(address16(tile));
    wgmma_fence(sum.x);
#pragma unroll
    for (int j = 0; j < ROWS / 16; j++)
        wgmma_from_registers(sum.x[0], a[j], further(b, in_tile(16 * j, 0) / W));
    wgmma_commit();
}

// Starts part (64 queries, HP) += dscores' keys
__device__ void multiply_dq(Result<HP>& part, const real* dscores, const real* keys) {
    auto a = describe(address16(dscores)), b = describe(address16(keys));
    wgmma_fence(part.x);
#pragma unroll
    for (int row = 0; row < ROWS; row += 16)
        wgmma_of_rows(part.x[0], further(a, row * 64 / W), further(b, in_tile(row, 0) / W), true);
    wgmma_commit();
}

// f(e, its column's number in a row of Stats) for columns 16 j to 16 j + 15
template <class F>
__device__ void each_of_16(int j, const float* row, F f) {
    float4 four = *reinterpret_cast<const float4*>(row + 16 * j + threadIdx.x % 4 * 4);
    for (int i = 0; i < 4; i++) {
        f(Element{0, 2 * j, i}, i % 2 ? four.y : four.x);
        f(Element{0, 2 * j + 1, i}, i % 2 ? four.w : four.z);
    }
}

// Where 8 of a warp's columns begin: of matrix `lane / 16` of the two that are columns 16 k to
// 16 k + 15 of 16 rows. For store_matrices.
__device__ real* square_of(real* rows, int k, unsigned lane) {
    return rows + lane % 16 * 64 + ((2 * k + lane / 16) ^ lane % 8) * W;
}

// Stores x, a slab's rows from `first` on, and the sums of its columns. room: 2,048 bytes for each
// warp of the group, every `stride` numbers.
__device__ __forceinline__ void store_slab(Output& dqkv, Head head, int first, real* room, int stride,
                           Result<HP>& x, int group) {
    unsigned thread = forget(threadIdx.x) % 128, lane = thread % 32;
    real* of_warp = room + thread / 32 * stride;
#pragma unroll
    for (int k = 0; k < HP / 16; k++) {
        Pair a[4];
        a_from_result(a, x.x[0], k);
        store_matrices(square_of(of_warp, k, lane), a);
    }
    __syncwarp();
    Pack<W> sums = {};
    dqkv.begin();
#pragma unroll
    for (int r = 0; r < 16; r += 4) {
        int row = r + lane / 8, t = first + thread / 32 * 16 + row;
        Pack<W> pack = load<W>(of_warp + row * 64 + (lane % 8 ^ row % 8) * W);
        if (t >= head.T) continue;
        dqkv.store(head.at(t) + lane % 8 * W, pack);
        sums = sums + pack;
    }
    dqkv.end();
    __syncwarp();
#ifdef BIAS_SUMS
    if (!dqkv.sums) return;
    store(reinterpret_cast<float*>(of_warp) + lane * W, sums);
    warpgroup_sync(group);
    if (thread < HP && first < head.T) {
        float sum = 0.0f;
        for (int i = 0; i < 16; i++)
            sum += reinterpret_cast<const float*>(room + i / 4 * stride)[i % 4 * HP + thread];
        size_t row = ((size_t)head.b * ((head.T + 63) / 64) + first / 64) * head.heads + head.h;
        dqkv.sums[row * HS + thread] = sum;
    }
    warpgroup_sync(group);
#endif
}

// dqkv from qkv and dout. turns[0]: tickets drawn; turns[1 + 2*tile + half]: blocks that have added
// to this half of a tile of dq. Items: blocks, any number.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) attention_backward_five64(
    Output dqkv, float* dq, int* turns, const Stats* __restrict__ stats,
    const __grid_constant__ TileMap qkv, const __grid_constant__ TileMap dout, float scale, int T,
    int NH, int heads) {
    DYNAMIC_SHARED(real, all_keys);  // keys and values of two items: (2, 2, ROWS, HP)
    Stages<ROWS> stages = {all_keys + 4 * TILE};           // of queries and dout
    real* all_dscores = stages.left(STAGES);               // (2, 2, ROWS, 64), by turns
    float* parts = reinterpret_cast<float*>(all_dscores + 2 * DSCORES);  // (2, PART), by warpgroup
    __shared__ __align__(16) Stats stats_of[STAGES];
    __shared__ Item items[4];
    __shared__ unsigned long long full[STAGES], empty[STAGES], item_there[4], item_done[2], met[2];
    __shared__ unsigned long long my_turn[2];
    __shared__ unsigned long long part_there[2], part_read[2], sum_there[2];
    if (threadIdx.x == 0) {
        for (auto& mbarrier : full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : empty) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : item_there) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : item_done) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : met) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : my_turn) mbarrier_start(mbarrier, 4);
        for (auto& mbarrier : part_there) mbarrier_start(mbarrier, 4);
        for (auto& mbarrier : part_read) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : sum_there) mbarrier_start(mbarrier, 1);
    }
    __syncthreads();
    int tiles = (T + ROWS - 1) / ROWS, NKV = NH / GROUP;
    auto tile_of = [&](const Item& item, const Walk& w) {
        return (size_t)(item.b * NH + item.kv * GROUP + w.head) * tiles + w.query / ROWS;
    };

    if (threadIdx.x >= WORKERS) {
        keep_registers<FEW>();
        if (threadIdx.x == WORKERS + 32) {  // loads
            int step = 0;
            for (int number = 0;; number++) {
                int slot = number % 2;
                if (number >= 2) mbarrier_wait(item_done[slot], (number / 2 + 1) % 2);
                Item item;
                item.find(atomicAdd(turns, 1), T, NKV, heads);
                items[number % 4] = item;
                if (item.b >= 0) {
                    real* keys = all_keys + 2 * slot * TILE;
                    for (int row = 0; row < ROWS; row += 64) {
                        copy_box(keys + in_tile(row, 0), &qkv, 0, NH + item.kv, item.first + row,
                                 item.b, item_there[number % 4]);
                        copy_box(keys + TILE + in_tile(row, 0), &qkv, 0, NH + NKV + item.kv,
                                 item.first + row, item.b, item_there[number % 4]);
                    }
                }
                mbarrier_arrive(item_there[number % 4]);
                if (item.b < 0) return;
                Walk walk = {number, 0, item.first};
                do {
                    int stage = step % STAGES, h = item.kv * GROUP + walk.head;
                    if (step >= STAGES) mbarrier_wait(empty[stage], (step / STAGES + 1) % 2);
                    for (int row = 0; row < ROWS; row += 64) {
                        copy_box(stages.left(stage) + in_tile(row, 0), &qkv, 0, h, walk.query + row,
                                 item.b, full[stage]);
                        copy_box(stages.right(stage) + in_tile(row, 0), &dout, 0, h,
                                 walk.query + row, item.b, full[stage]);
                    }
                    copy_line(&stats_of[stage], stats + tile_of(item, walk), sizeof(Stats),
                              full[stage]);
                    mbarrier_arrive(full[stage]);
                    step++;
                } while (walk.next(T));
            }
        } else if (threadIdx.x % 64 == 0) {  // adds a warpgroup's parts of dq
            int which = (threadIdx.x - WORKERS) / 64, parity = 0;
            float* part = parts + which * PART;
            for (int number = 0;; number++) {
                int slot = number % 2;
                mbarrier_wait(item_there[number % 4], number / 4 % 2);
                Item item = items[number % 4];
                if (item.b < 0) return;
                Walk walk = {number, 0, item.first};
                do {
                    int turn = (walk.query - item.first) / ROWS;
                    size_t tile = 2 * tile_of(item, walk) + which;
                    volatile int* added = turns + 1 + tile;
#ifndef NO_TURNS
                    while (*added < turn) {}
#endif
                    __threadfence();
                    global_seen();
                    if (item.first == 0) {
                        if (turn > 0) {
                            copy_line(part, dq + tile * PART, PART * sizeof(float),
                                      sum_there[which]);
                            mbarrier_arrive(sum_there[which]);
                        }
                        mbarrier_wait(part_there[which], parity);
                        mbarrier_arrive(part_read[which]);
                    } else {
                        mbarrier_wait(part_there[which], parity);
                        add_line(dq + tile * PART, part, PART * sizeof(float), turn > 0);
                        stores_read();
                        mbarrier_arrive(part_read[which]);
                        stores_arrive();
                        __threadfence();
                        *added = turn + 1;
                    }
                    parity ^= 1;
                } while (walk.next(T));
            }
        }
        return;
    }
    take_registers<MANY>();

    int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    auto* my_parts = reinterpret_cast<float4*>(parts + group * PART) + threadIdx.x % 128 / 32 * 256 +
        threadIdx.x % 32;
    auto each_four = [&](Result<HP>& part, auto f) {  // f(four of part's numbers, a place for them)
#pragma unroll
        for (int i = 0; i < HP / 8; i++) f(part.x[0][i], my_parts[32 * i]);
    };
    int sums = 0;  // of dq, that have come
    Result<HP> part;
    // Starts a part of dq from dscores of step n - 1, in whose walk `to` is.
    auto start_dq = [&](const Walk& to, int n) {
        const Item& item = items[to.number % 4];
        if (n > 0 && item.first == 0 && to.query > 0) {
            mbarrier_wait(sum_there[group], sums % 2);
            sums++;
            each_four(part, [](float (&x)[4], const float4& four) {
                x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
            });
        } else part = {};
        multiply_dq(part, all_dscores + (n + 1) % 2 * DSCORES + group * ROWS * 64,
                    forget(all_keys + to.number % 2 * 2 * TILE));
    };
    // Reads where a part goes, and lets the loader have its block's keys if this was their last tile.
    auto leave_keys = [&](const Walk& to, int n) {
        Item item = items[to.number % 4];
        __syncwarp();
        if (n > 0 && to.head == GROUP - 1 && to.query + ROWS >= T && threadIdx.x % 32 == 0)
            mbarrier_arrive(item_done[to.number % 2]);
        return item;
    };
    auto finish_dq = [&](const Item& item, const Walk& to, int n) {
        if (n == 0) return;
        bool whole = item.first == 0;
        if (n >= 2) mbarrier_wait(part_read[group], n % 2);
        if (whole) {
            each<HP>([&](Element e) { part[e] *= scale; });
            store_slab(dqkv, {item.b, item.kv * GROUP + to.head, NH + 2 * NKV, T},
                       to.query + 64 * group, reinterpret_cast<real*>(parts + group * PART), 2048,
                       part, group);
        } else
            each_four(part, [](float (&x)[4], float4& four) { four = {x[0], x[1], x[2], x[3]}; });
        shared_written();
        warp_arrives(part_there[group]);
    };

    Result<ROWS> scores, dweights;
    auto &weights = scores, &dscores = dweights;  // computed in place
    Result<HP> dk = {}, dv = {};
    Pair packed[ROWS / 16][4], dpacked[ROWS / 16][4];
    mbarrier_wait(item_there[0], 0);
    if (items[0].b < 0) return;
    int n = 0, first_key = items[0].first;
    Walk walk = {0, 0, first_key}, before = walk;
    auto start_scores = [&](int n) {     // S' = K Q'
        multiply_wide(scores, all_keys + walk.number % 2 * 2 * TILE + 64 * HP * group,
                      stages.left(n % STAGES));
    };
    auto start_dweights = [&](int n) {   // dP' = V dO'
        multiply_wide(dweights, all_keys + (walk.number % 2 * 2 + 1) * TILE + 64 * HP * group,
                      stages.right(n % STAGES));
    };
    mbarrier_wait(full[0], 0);
    start_scores(0);
    start_dweights(0);
    float scale2 = scale * LOG2_E;
    for (;; n++) {
        int stage = n % STAGES;
        const Walk at = walk;
        wait_for_products<1>(scores);
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++)
            each_of_16(j, stats_of[stage].lse, [&](Element e, float lse) {
#ifdef NO_EXP
                weights[e] = scale2 * weights[e] - lse;
#else
                weights[e] = power_of_2(scale2 * weights[e] - lse);   // P' = e^(S' - L)
#endif
            });
        bool diagonal = at.query == first_key;
        if (diagonal) {
            int first = 64 * group + (int)threadIdx.x % 128 / 32 * 16;
            each<ROWS>([&](Element e) { if (first + e.row() > e.column()) weights[e] = 0.0f; });
        }
        wait_for_products<0>(dweights);
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++) {
            each_of_16(j, stats_of[stage].delta, [&](Element e, float delta) {
                dscores[e] = weights[e] * (dscores[e] - delta);   // dS' = P' o (dP' - D)
            });
            a_from_result(dpacked[j], dscores.x[0], j);
            compute_now(dpacked[j]);
            a_from_result(packed[j], weights.x[0], j);
            compute_now(packed[j]);
        }
        if (n > 0) mbarrier_wait(met[(n - 1) % 2], (n - 1) / 2 % 2);
        unsigned thread = forget(threadIdx.x), lane = thread % 32;
        real* rows = all_dscores + n % 2 * DSCORES + thread / 32 * 16 * 64;
#pragma unroll
        for (int j = 0; j < ROWS / 16; j++)
#ifdef NO_DS
            if (T < 0)
#endif
            store_matrices(square_of(rows + j / 4 * ROWS * 64, j % 4, lane), dpacked[j]);
        shared_written();
#if TOKEN
        mbarrier_wait(my_turn[group], (n + (group == 0)) % 2);
#endif
        add_packed(dv, packed, stages.right(stage));              // dV = dV + P' dO
        add_packed(dk, dpacked, stages.left(stage));              // dK = dK + dS' Q
        bool ends = !walk.next(T);
#ifndef NO_DQ
        start_dq(before, n);                                      // dQ = dQ + dS K
#else
        wgmma_commit();
#endif
        wait_for_products<1>(dv);
        wait_for_products<1>(dk);
        warp_arrives(empty[stage]);
        wait_for_products<0>(part);
#if TOKEN
        if (TOKEN == 2 || ends) warp_arrives(my_turn[group ^ 1]);
#endif
        warp_arrives(met[n % 2]);
        Walk done = before;
        Item of_done = leave_keys(done, n);
#if LATE == 0
        finish_dq(of_done, done, n);
#endif
        before = at;
        if (ends) {
            warpgroup_sync(group);  // no product reads the values any more
            each<HP>([&](Element e) { dk[e] *= scale; });
            Item old = items[at.number % 4];
            int first = old.first + 64 * group;
            real* room = all_keys + (at.number % 2 * 2 + 1) * TILE + 64 * HP * group;
            store_slab(dqkv, {old.b, NH + old.kv, NH + 2 * NKV, T}, first, room, 16 * HP, dk, group);
            store_slab(dqkv, {old.b, NH + NKV + old.kv, NH + 2 * NKV, T}, first, room, 16 * HP, dv,
                       group);
            shared_written();
            dk = {}, dv = {};
            int number = at.number + 1;
            mbarrier_wait(item_there[number % 4], number / 4 % 2);
            if (items[number % 4].b < 0) {
#if LATE
                finish_dq(of_done, done, n);
#endif
                break;
            }
            first_key = items[number % 4].first;
            walk = {number, 0, first_key};
        }
        mbarrier_wait(full[(n + 1) % STAGES], (n + 1) / STAGES % 2);
        start_scores(n + 1);
#if LATE == 1
        finish_dq(of_done, done, n);
#endif
        start_dweights(n + 1);
#if TOKEN == 1
        if (!ends) warp_arrives(my_turn[group ^ 1]);
#endif
    }
    mbarrier_wait(met[n % 2], n / 2 % 2);
    start_dq(before, n + 1);
    wait_for_products<0>(part);
    finish_dq(leave_keys(before, n + 1), before, n + 1);
}

}  // namespace attention_five64
#endif
