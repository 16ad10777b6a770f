// Attention's gradient with five products instead of seven, for heads of 128 channels on Hopper. It
// replaces attention_backward_q and attention_backward_kv; attention_five.py launches it.
//
// A block owns keys, as in attention_backward_kv. It has the dscores of all queries that see them,
// so dq = dscore k is one more product there, and attention_backward_q is not needed. But a query's
// dq is a sum over the keys of many blocks. They add their parts to dq in device memory, in fp32,
// one after another: first the block with the first keys. So the bits are the same on every run.
//   - A block walks over the queries from the last one up to its own keys. All blocks of a head
//     begin with the same queries, and each waits until the one before it has added its part. In
//     practice it waits only at its first tile; then it follows one tile or more behind.
//   - A block may only wait for blocks that already run. Otherwise waiting blocks could fill the
//     GPU, and the one they wait for would never start. So blocks draw tickets when they start;
//     within a head, earlier keys have lower tickets.
//   - Blocks with the first keys have the most queries. Where several heads of queries share keys,
//     and there would be too few blocks to even that out, `shares` blocks take some of these heads
//     each. One after another they sum dk and dv; the last one stores them.
//   - With RoPE, dq and dk are rotated back before they are rounded and stored.
//   - Two warpgroups multiply. In the third, one thread asks for tiles, and two take turns to add
//     parts, since an addition takes long: the copy engine takes a part from shared memory and adds
//     it in L2. Its threads keep 24 registers, the others get 240, instead of 168 each.
// hopper.cuh is compiled in front of it.
// A tile of 64 queries costs 2,560 clocks of the tensor cores and 2,944 of shared memory.
#if HOPPER && HS == 128

namespace attention_five {

#ifndef AT_ONCE
#define AT_ONCE 16  // heads of keys at a time, so that their tiles and dq stay in L2
#endif
constexpr int WORKERS = THREADS;             // two warpgroups multiply,
constexpr int FIVE_THREADS = WORKERS + 128;  // and the third adds and loads
constexpr int FIVE_STAGES = 2;
constexpr int DSCORES = B_r * B_c_BACK;         // numbers of a block's dscores with one tile
constexpr int PART = B_c_BACK * HP;              // numbers of a part of dq
static_assert(B_r == 128 && B_c_BACK == 64 && WORKERS == 256);
constexpr int KEPT = 2 * B_r * LD + 2 * FIVE_STAGES * B_c_BACK * LD + 2 * DSCORES;  // of real
static_assert(2 * KEPT + 4 * 2 * PART == 229376, "as many bytes as attention_five.py says");
struct FiveStage { float lse[B_c_BACK], delta[B_c_BACK]; };

// One number per column of this lane's results. It is loaded while products run, which hides the
// latency.
struct PerColumn {
    float x[B_c_BACK / 8][2];
    __device__ float operator[](Element e) const { return x[e.n][e.i % 2]; }
};
__device__ PerColumn of_columns(const float* row) {
    PerColumn numbers;
#pragma unroll
    for (int n = 0; n < B_c_BACK / 8; n++) {
        Pack<2> two = load<2>(row + column_of(n, 0));
        numbers.x[n][0] = two[0];
        numbers.x[n][1] = two[1];
    }
    return numbers;
}

#ifdef __CUDACC__
// Orders the copy engine's next accesses of device memory after what this thread has seen.
__device__ void global_seen() { asm volatile("fence.proxy.async;" ::: "memory"); }

// D (64,64) = A' B, or with `add` D += A' B: A and B are 64 columns of 16 rows of two tiles.
__device__ void wgmma_of_rows(float (*d)[4], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;" WGMMA "%32, %33, p, 1, 1, 1, 1;}"
                 : FLOATS32(d) : "l"(a), "l"(b), "r"((int)add));
}

// Starts to copy bytes to shared memory; the mbarrier counts them.
__device__ void copy_line(void* shared, const void* global, int bytes,
                          unsigned long long& mbarrier) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
                 ::"r"(shared_address(&mbarrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];"
                 ::"r"(shared_address(shared)), "l"(global), "r"(bytes),
                   "r"(shared_address(&mbarrier)) : "memory");
}

// Starts to add floats from shared to device memory or, without `add`, to copy them.
__device__ void add_line(float* global, const float* shared, int bytes, bool add) {
    if (add)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                     ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     ::"l"(global), "r"(shared_address(shared)), "r"(bytes) : "memory");
    stores_commit();
}
#endif

// stats (B,NH,tiles,2,B_c_BACK): of each tile of queries lse and then delta, the sum over a head's
// channels of out * dout, with zeros beyond T. Clears turns (1 + 2*B*NH*tiles). 16 lanes
// share a row. Items: tiles of all heads.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256) attention_backward_five_delta(
    FiveStage* __restrict__ stats, int* __restrict__ turns, const float* __restrict__ lse,
    const real* __restrict__ out, const real* __restrict__ dout, int T, int NH) {
    constexpr int rows = 256 / 16, steps = B_c_BACK / rows;
    int tiles = (T + B_c_BACK - 1) / B_c_BACK, head = blockIdx.x / tiles;
    int first = blockIdx.x % tiles * B_c_BACK;
    int lane = threadIdx.x % 16;
    Head of_out = {head / NH, head % NH, NH, T};
    Pack<W> x[steps], y[steps];
#pragma unroll
    for (int i = 0; i < steps; i++) {
        size_t at = of_out.at(min(first + rows * i + (int)threadIdx.x / 16, T - 1)) + W * lane;
        x[i] = load<W>(out + at);
        y[i] = load<W>(dout + at);
    }
#pragma unroll
    for (int i = 0; i < steps; i++) {
        int row = rows * i + threadIdx.x / 16, t = first + row;
        float sum = 0.0f;
        for (int j = 0; j < W; j++) sum += x[i][j] * y[i][j];
        for (int distance = 8; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(FULL_WARP, sum, distance);
        if (lane > 0) continue;
        stats[blockIdx.x].lse[row] = t < T ? lse[of_out.stat_at(t)] : 0.0f;
        stats[blockIdx.x].delta[row] = t < T ? sum : 0.0f;
    }
    if (threadIdx.x > 0) return;
    turns[1 + blockIdx.x] = 0;
    turns[1 + gridDim.x + blockIdx.x] = 0;
    if (blockIdx.x == 0) turns[0] = 0;
}

// What this block owns, as own_rows<true>, with fewer heads at a time: dq needs room in L2, too.
// A head of keys comes `shares` times in turn, each time with the next of its heads of queries.
__device__ Own own_keys(int number, int T, int NH, int shares) {
    int blocks = (T + B_r - 1) / B_r, all_shares = gridDim.x / blocks, at_once = AT_ONCE * shares;
    int section = number / (at_once * blocks) * at_once, i = number - section * blocks;
    int shares_here = min(at_once, all_shares - section);
    int share = section + i % shares_here, head = share / shares, first = i / shares_here * B_r;
    int warp = threadIdx.x / 32 * 16, slab = __shfl_sync(FULL_WARP, warp / SLAB * SLAB, 0);
    int NKV = NH / GROUP, b = head / NKV, kv = head % NKV, all = NH + 2 * NKV;
    int query = kv * GROUP + share % shares * (GROUP / shares);
    return {first, first + slab, first + warp,
            {b, query, all, T}, {b, NH + kv, all, T}, {b, NH + NKV + kv, all, T},
            {b, query, NH, T}};
}

// Walks over the tiles of queries that see a block's keys: the last queries first, of all heads. So
// blocks with later keys, whose walks end sooner, never wait until one with earlier keys has
// finished a head.
struct WalkBack {
    int head, query, first_head, end_head, left;
    __device__ bool next() {
        if (++head == end_head) {
            head = first_head;
            query -= B_c_BACK;
        }
        return --left > 0;
    }
};

// As load_tile, by one thread.
template <int rows>
__device__ void load_boxes(
    real* tile, const TileMap& array, Head head, int first, unsigned long long& mbarrier) {
#pragma unroll
    for (int row = 0; row < rows; row += 64)
#pragma unroll
        for (int c = 0; c < HP; c += 64)
            copy_box(tile + in_tile(row, c), &array, c, head.h, first + row, head.b, mbarrier);
}

// In place of hide_future<true>: a slab also has tiles whose queries see none of its keys.
__device__ void hide_later_keys(Result<B_c_BACK>& x, const Own& own, int query) {
    if (query >= own.slab_first + SLAB) return;
    each<B_c_BACK>([&](Element e) {
        if (own.warp_first + e.row() > query + e.column()) x[e] = 0.0f;
    });
}

// Stores the workers' dscores, rounded to bf16, for dq: two boxes (B_r,B_c_BACK), swizzled.
__device__ void store_dscores(real* tile, const Own& own, Result<B_c_BACK>& x) {
#pragma unroll
    for (int n = 0; n < B_c_BACK / 8; n++)
        each_row([&](Element e) {
            int row = own.warp_first - own.first + e.row(), c = column_of(n, 0);
            store(tile + row * B_c_BACK + (c ^ (row % 8 * 8)),
                  Pack<2>{x[{0, n, e.i}], x[{0, n, e.i + 1}]});
        });
}

// Starts part (64 queries, 64 channels) = dscores' keys. A warpgroup has half of the channels.
__device__ void multiply_dq(Result<B_c_BACK>& part, const real* dscores, const real* keys) {
    auto a = describe(address16(dscores)), b = describe(address16(keys));
    wgmma_fence(part.x);
#pragma unroll
    for (int row = 0; row < B_r; row += 16)
        wgmma_of_rows(part.x[0], further(a, row * B_c_BACK / W), further(b, in_tile(row, 0) / W),
                      row > 0);
    wgmma_commit();
}

// As store_column_sums, in two parts: between them the block waits.
constexpr int SHARES = WORKERS / HEAD_LANES;  // of a column's sum
__device__ void share_column_sums(float* of_share, Pack<HEAD_PACK>& of_lane) {
    store(of_share + threadIdx.x / HEAD_LANES * HP + threadIdx.x % HEAD_LANES * HEAD_PACK, of_lane);
}
__device__ void store_shared_sums(float* sums, Head head, int block, const float* of_share) {
    int blocks = (head.T + B_r - 1) / B_r, c = threadIdx.x % HP;
    float sum = 0.0f;
    for (int i = 0; i < SHARES; i++) sum += of_share[i * HP + c];
    sums[(((size_t)head.b * blocks + block) * head.heads + head.h) * HS + c] = sum;
}

// Rotates gradients of queries or keys back by their tokens' angles, whose cosines and sines
// llama3.cu's rope_table has written to table (T,HS).
__device__ void rotate_back(Result<HP>& x, const Own& own, const float* table, int T) {
    each_row([&](Element e) {
        int t = own.warp_first + e.row();
        if (t >= T) return;
#pragma unroll
        for (int n = 0; n < HP / 8; n++) {
            Pack<2> turn = load<2>(table + (size_t)t * HS + column_of(n, 0));
            float &left = x[{0, n, e.i}], &right = x[{0, n, e.i + 1}], before = left;
            left = before * turn[0] + right * turn[1];
            right = right * turn[0] - before * turn[1];
        }
    });
}

// f(x, i) for each number of a thread's dk and dv.
template <class F>
__device__ void each_sum(Result<HP>& dk, Result<HP>& dv, F f) {
#pragma unroll
    for (int i = 0; i < HP / 2; i++) {
        f(dk.x[0][i / 4][i % 4], i);
        f(dv.x[0][i / 4][i % 4], HP / 2 + i);
    }
}

// dk and dv of a block's keys, and its parts of dq (B,NH,tiles,PART), which the next kernel scales
// and rounds. turns[0]: tickets drawn; turns[1 + tile]: blocks that have added to this tile of dq;
// behind these, of each block of keys: its shares whose dk and dv have been summed, to kept
// (blocks of keys, 2*B_r*HS). rope (T,HS): see rotate_back; or null. Items: blocks of B_r keys times
// shares, a divisor of GROUP.
BLOCK(384, 1)
extern "C" __global__ void __launch_bounds__(FIVE_THREADS, 1) attention_backward_five(
    Output dqkv, float* dq, int* turns, const FiveStage* __restrict__ stats,
    const __grid_constant__ TileMap qkv, const __grid_constant__ TileMap dout,
    const float* __restrict__ rope, float* kept, float scale, int T, int NH, int shares) {
    DYNAMIC_SHARED(real, keys);  // keys and values: (2, B_r, LD)
    real* values = keys + B_r * LD;
    Stages<B_c_BACK> stages = {values + B_r * LD};    // of queries and dout
    real* all_dscores = stages.left(FIVE_STAGES);  // (2, DSCORES), by turns
    float* parts = reinterpret_cast<float*>(all_dscores + 2 * DSCORES);  // (2, PART), by turns
    __shared__ __align__(16) FiveStage stats_of[FIVE_STAGES];
    __shared__ unsigned long long full[FIVE_STAGES],  // a stage's tile has arrived
        done[FIVE_STAGES],                            // both warpgroups have multiplied it
        part_there[2], part_read[2];                  // a part of dq can be added; overwritten
    __shared__ int number;
    if (threadIdx.x == 0) {
        for (auto& mbarrier : full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : done) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : part_there) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : part_read) mbarrier_start(mbarrier, 1);
        number = atomicAdd(turns, 1);
    }
    __syncthreads();
    Own own = own_keys(number, T, NH, shares);
    int tiles = (T + B_c_BACK - 1) / B_c_BACK, of_head = tiles - own.first / B_c_BACK;
    int heads = GROUP / shares;
    WalkBack walk = {own.queries.h, (tiles - 1) * B_c_BACK, own.queries.h, own.queries.h + heads,
                     of_head * heads};
    auto tile_of = [&](const WalkBack& w) {
        return ((size_t)own.queries.b * NH + w.head) * tiles + w.query / B_c_BACK;
    };

    if (threadIdx.x >= WORKERS) {
        keep_registers<24>();
        if (threadIdx.x % 64 == 0) {  // adds every other part of dq
            int which = (threadIdx.x - WORKERS) / 64, turn = own.first / B_r, parity = 0;
            bool more = which == 0 || walk.next();
            while (more) {
                volatile int* added = turns + 1 + tile_of(walk);
                while (*added < turn) {}
                __threadfence();
                global_seen();
                mbarrier_wait(part_there[which], parity);
                add_line(dq + tile_of(walk) * PART, parts + which * PART, PART * sizeof(float),
                         turn > 0);
                stores_read();
                mbarrier_arrive(part_read[which]);
                stores_arrive();
                __threadfence();
                *added = turn + 1;
                parity ^= 1;
                more = walk.next() && walk.next();
            }
        } else if (threadIdx.x == WORKERS + 32) {  // loads
            load_boxes<B_r>(keys, qkv, own.keys, own.first, full[0]);
            load_boxes<B_r>(values, qkv, own.values, own.first, full[0]);
            Head queries = own.queries, out = own.out;
            int n = 0;
            do {
                int stage = n % FIVE_STAGES;
                // Until no product reads this stage
                if (n >= FIVE_STAGES) mbarrier_wait(done[stage], (n / FIVE_STAGES + 1) % 2);
                queries.h = out.h = walk.head;
                load_boxes<B_c_BACK>(stages.left(stage), qkv, queries, walk.query, full[stage]);
                load_boxes<B_c_BACK>(stages.right(stage), dout, out, walk.query, full[stage]);
                copy_line(&stats_of[stage], stats + tile_of(walk), sizeof(FiveStage), full[stage]);
                mbarrier_arrive(full[stage]);
                n++;
            } while (walk.next());
        }
        return;
    }
    take_registers<240>();

    int half = (own.slab_first - own.first) / 64;  // of the channels of dq
    const real* half_keys = keys + in_tile(0, 64) * half;
    float4* my_parts = reinterpret_cast<float4*>(parts) + half * PART / 8 + threadIdx.x % 128;
    auto store_part = [&](Result<B_c_BACK>& part, int n) {  // of tile n, for a thread that adds
        if (n >= 2) mbarrier_wait(part_read[n % 2], (n / 2 + 1) % 2);
#pragma unroll
        for (int i = 0; i < B_c_BACK / 8; i++)
            my_parts[n % 2 * PART / 4 + 128 * i] = {
                part.x[0][i][0], part.x[0][i][1], part.x[0][i][2], part.x[0][i][3]};
    };

    auto tile_done = [&](int n) {
        mbarrier_wait(done[n % FIVE_STAGES], n / FIVE_STAGES % 2);
    };

    Result<HP> dk = {}, dv = {};
    int n = 0, all = walk.left;
    do {
        int stage = n % FIVE_STAGES;
        mbarrier_wait(full[stage], n / FIVE_STAGES % 2);
        const real *queries = stages.left(stage), *douts = stages.right(stage);
        Result<B_c_BACK> scores, dweights, part;
        auto &weights = scores, &dscores = dweights;               // computed in place
        multiply_transposed(scores, own, forget(keys), queries);   // S' = K Q'
        multiply_transposed(dweights, own, forget(values), douts); // dP' = V dO'
        PerColumn of_query = of_columns(stats_of[stage].lse);
        wait_for_products<1>(scores);
        weights_from_scores(scores, scale,                         // P' = e^(S' - L)
                            [&](Element e) { return of_query[e]; });
        hide_later_keys(weights, own, walk.query);
        multiply(dv, weights, douts);                              // dV = dV + P' dO
        of_query = of_columns(stats_of[stage].delta);
        wait_for_products<1>(dweights);
        dscores_from_dweights(dweights, weights,                   // dS' = P' o (dP' - D)
                              [&](Element e) { return of_query[e]; });
        if (n > 0) tile_done(n - 1);
        store_dscores(all_dscores + n % 2 * DSCORES, own, dscores);
        // dQ = dS K of the tile before, which both warpgroups are done with. For n = 0 the
        // part is garbage, and nobody stores it.
        multiply_dq(part, all_dscores + (n + 1) % 2 * DSCORES, forget(half_keys));
        multiply(dk, dscores, queries);                            // dK = dK + dS' Q
        wait_for_products<1>(part);
        if (n > 0) store_part(part, n - 1);
        shared_written();
        __syncwarp();
        if (n > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(part_there[(n - 1) % 2]);
        wait_for_products<0>(dk);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(done[stage]);
        walk.next();
    } while (++n < all);
    tile_done(n - 1);
    Result<B_c_BACK> part;
    multiply_dq(part, all_dscores + (n - 1) % 2 * DSCORES, half_keys);
    wait_for_products<0>(part);
    wait_for_products<0>(dv);
    wait_for_products<0>(dk);
    store_part(part, n - 1);
    shared_written();
    warp_arrives(part_there[(n - 1) % 2]);
    auto workers_meet = [&] {
        warp_arrives(done[n % FIVE_STAGES]);
        tile_done(n++);
    };
    workers_meet();  // no product reads a tile any more

    if (shares > 1) {  // they have neighbouring tickets, so they end at about the same time
        int blocks = (T + B_r - 1) / B_r, of_keys = gridDim.x / (blocks * shares);  // heads
        int share = own.queries.h % GROUP / heads;
        int block = (own.keys.b * (NH / GROUP) + own.queries.h / GROUP) * blocks + own.first / B_r;
        volatile int* summed = turns + 1 + of_keys * GROUP * tiles + block;
        float* sums = kept + (size_t)block * 2 * B_r * HP + threadIdx.x;
        if (share > 0) {
            if (threadIdx.x == 0) {
                while (*summed < share) {}
                __threadfence();
            }
            workers_meet();
            each_sum(dk, dv, [&](float& x, int i) { x += __ldcg(sums + i * WORKERS); });
        }
        if (share < shares - 1) {
            each_sum(dk, dv, [&](float& x, int i) { sums[i * WORKERS] = x; });
            __threadfence();
            workers_meet();
            if (threadIdx.x == 0) {
                __threadfence();
                *summed = share + 1;
            }
            return;
        }
    }
    each<HP>([&](Element e) { dk[e] *= scale; });
    if (rope) rotate_back(dk, own, rope, T);
    dqkv.begin();
    [[maybe_unused]] auto dk_sums = store_own_rows(dqkv, own.keys, own, keys, dk);
    [[maybe_unused]] auto dv_sums = store_own_rows(dqkv, own.values, own, values, dv);
#ifdef BIAS_SUMS
    float* of_share = reinterpret_cast<float*>(stages.left(0));  // (2, SHARES, HP)
    if (dqkv.sums) {
        share_column_sums(of_share, dk_sums);
        share_column_sums(of_share + SHARES * HP, dv_sums);
        workers_meet();
        store_shared_sums(dqkv.sums, threadIdx.x < HP ? own.keys : own.values, own.first / B_r,
                          of_share + threadIdx.x / HP * SHARES * HP);
    }
#endif
    dqkv.end();
}

// dq, scaled, with rope rotated back, and rounded, from the sums of all parts. Items: blocks of B_r
// queries.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(THREADS) attention_backward_five_dq(
    Output dqkv, const float* __restrict__ dq, const float* __restrict__ rope, float scale, int T,
    int NH) {
    DYNAMIC_SHARED(real, rows);  // (B_r, LD)
    Own own = own_rows<false>(T, NH);
    int tiles = (T + B_c_BACK - 1) / B_c_BACK, tile = own.slab_first / B_c_BACK;
    Result<HP> x = {};
    if (tile < tiles) {
        const float4* from = reinterpret_cast<const float4*>(dq) + threadIdx.x % 128 +
            (((size_t)own.queries.b * NH + own.queries.h) * tiles + tile) * (PART / 4);
#pragma unroll
        for (int n = 0; n < HP / 8; n++) {
            float4 four = from[128 * n];
            x.x[0][n][0] = scale * four.x;
            x.x[0][n][1] = scale * four.y;
            x.x[0][n][2] = scale * four.z;
            x.x[0][n][3] = scale * four.w;
        }
        if (rope) rotate_back(x, own, rope, T);
    }
    dqkv.begin();
    store_rows(dqkv, own.queries, own, rows, x);
    dqkv.end();
}

}  // namespace attention_five
#endif
