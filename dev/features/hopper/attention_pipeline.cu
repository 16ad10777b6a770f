// Attention's forward pass for heads of 64 channels on Hopper, in place of kernels.cu's
// attention_forward; attention_pipeline.py launches it.
//
// There each 64 queries load all keys and values that they see, and the tensor cores rest while a
// warpgroup computes exponentials, unless another has a product for them. Here four warpgroups, a
// block alone on its multiprocessor, share tiles: each has 64 of 256 queries, its slab. One thread of
// a fifth warpgroup loads tiles, as far ahead as there are stages. No barrier joins the warpgroups: a
// tile is there, or it is not.
//   - While a warpgroup makes a tile's weights, its product with the values of the tile before runs:
//
//         tensor cores    S 1   O 0   S 2   O 1   S 3   O 2
//         threads    P 0        P 1         P 2         P 3
//
//   - A maximum only keeps 2^x within bounds, so it may be too small. It grows, and what was summed
//     so far is scaled, when a score exceeds it by far: mostly once, at the first tile.
//   - A block is launched once and goes through many blocks of queries, its turns; tiles of the next
//     turn arrive while the last products of this one run.
//   - Later queries see more keys. So turns come in pairs: the last block of queries of a head and
//     its first, the last but one and the second, .. And in every other turn the slabs change
//     places: the warpgroup that had the last slab gets the first. With an even number of full
//     blocks all have the same work: for T = 1024 17 tiles in two turns.
//   - A warpgroup passes on tiles that none of its queries sees.
// hopper.cuh is compiled in front of it.
#if HOPPER && HS == 64 && !RELU

namespace attention_pipeline {

constexpr int SLABS = 4;             // warpgroups that multiply
constexpr int WORKERS = 128 * SLABS;
constexpr int ALL_THREADS = WORKERS + 128;
constexpr int ROWS = 64 * SLABS;     // queries of a turn
constexpr float FAR = 8.0f;          // a weight may be as large as 2^FAR
constexpr int TILE_SIZE = 64 * HP;   // in numbers, also of a slab's queries
constexpr int KEY_STAGES = 6;        // tiles of keys and values, arriving or being multiplied
static_assert(2 * (2 * SLABS + 2 * KEY_STAGES) * TILE_SIZE == 163840,
              "as many bytes as attention_pipeline.py says");

// Turns 0, 1, .. of a block: queries first..first+ROWS-1 of head h of sequence b, and the tiles of
// keys that these see. A pair is two turns; the second of a block in the middle has no tiles.
struct Turn {
    int b, h, first, tiles;  // b is -1 behind the last turn
    // Whether there is such a turn. As in own_rows, sections of heads one after another.
    __device__ bool find(int number, int T, int NH, int heads) {
        int blocks = (T + ROWS - 1) / ROWS, pairs = (blocks + 1) / 2;
        int pair = blockIdx.x + number / 2 * gridDim.x;
        int section = pair / (SECTION * pairs) * SECTION, i = pair - section * pairs;
        int heads_here = min(SECTION, heads - section), nth = i / heads_here;
        int head = section + i % heads_here, block = number % 2 ? nth : blocks - 1 - nth;
        b = head / NH;
        h = head % NH;
        first = block * ROWS;
        tiles = number % 2 && 2 * nth == blocks - 1 ? 0 : (min(first + ROWS, T) + 63) / 64;
        return pair < heads * pairs;
    }
};

// Starts sum += A times a tile.
__device__ void add_packed(Result<HP>& sum, const Pair (&a)[4][4], const real* tile) {
    auto b = describe(address16(tile));
    wgmma_fence(sum.x);
#pragma unroll
    for (int j = 0; j < 4; j++)
        wgmma_from_registers(sum.x[0], a[j], further(b, in_tile(16 * j, 0) / W));
    wgmma_commit();
}

// As the trainer's kernel, with whose comments it is to be read. heads: B*NH. Items: blocks, any
// number.
BLOCK(640, 1)
extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) attention_forward_pipeline(
    Output out, float* __restrict__ lse, const __grid_constant__ TileMap qkv, float scale, int T,
    int NH, int heads) {
    DYNAMIC_SHARED(real, all_queries);  // of two turns, by turns
    Stages<64> stages = {all_queries + 2 * SLABS * TILE_SIZE};  // of keys and values
    __shared__ unsigned long long full[KEY_STAGES], empty[KEY_STAGES],  // all warps are done with it
        queries_there[2], queries_done[2];
    __shared__ Turn turns[2];
    if (threadIdx.x == 0) {
        for (auto& mbarrier : full) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : empty) mbarrier_start(mbarrier, WORKERS / 32);
        for (auto& mbarrier : queries_there) mbarrier_start(mbarrier, 1);
        for (auto& mbarrier : queries_done) mbarrier_start(mbarrier, WORKERS / 32);
    }
    __syncthreads();
    unsigned step = 0;  // counts tiles of keys

    if (threadIdx.x >= WORKERS) {
        keep_registers<32>();
        if (threadIdx.x > WORKERS) return;
        int NKV = NH / GROUP;
        Turn turn;
        for (int n = 0;; n++) {
            int which = n % 2;
            if (n >= 2) mbarrier_wait(queries_done[which], (n / 2 + 1) % 2);
            bool more = turn.find(n, T, NH, heads);
            if (!more) turn.b = -1;
            turns[which] = turn;
            if (!more) {
                mbarrier_arrive(queries_there[which]);
                return;
            }
            for (int slab = 0; slab < SLABS; slab++)
                copy_box(all_queries + (which * SLABS + slab) * TILE_SIZE, &qkv, 0, turn.h,
                         turn.first + 64 * slab, turn.b, queries_there[which]);
            mbarrier_arrive(queries_there[which]);
            for (int tile = 0; tile < turn.tiles; tile++, step++) {
                int stage = step % KEY_STAGES, kv = NH + turn.h / GROUP;
                if (step >= KEY_STAGES) mbarrier_wait(empty[stage], (step / KEY_STAGES + 1) % 2);
                copy_box(stages.left(stage), &qkv, 0, kv, 64 * tile, turn.b, full[stage]);
                copy_box(stages.right(stage), &qkv, 0, kv + NKV, 64 * tile, turn.b, full[stage]);
                mbarrier_arrive(full[stage]);
            }
        }
    }
    take_registers<112>();

    int group = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0);
    float scale2 = scale * LOG2_E;  // for 2^x instead of e^x
    auto wait_for_keys = [&] { mbarrier_wait(full[step % KEY_STAGES], step / KEY_STAGES % 2); };
    for (int n = 0;; n++) {
        int which = n % 2;
        mbarrier_wait(queries_there[which], n / 2 % 2);
        Turn turn = turns[which];
        if (turn.b < 0) break;
        int slab = which ? SLABS - 1 - group : group, first = turn.first + 64 * slab;
        unsigned end = step + turn.tiles;
        Head of_out = {turn.b, turn.h, NH, T};
        Own own = {first, first, first + int(threadIdx.x) % 128 / 32 * 16, {}, {}, {}, of_out};
        real* queries = all_queries + (which * SLABS + slab) * TILE_SIZE;
        if (step < end && first < T) {
            Result<HP> output = {};
            Result<64> scores;
            auto& weights = scores;                             // computed in place
            PerRow maximum, total = {}, correction;
            Pair packed[4][4];                                  // weights as A of a product
            bool far;
            each_row([&](Element e) { maximum[e] = LOWEST; });
            auto start_scores = [&](unsigned step) {            // S = Q K'
                mbarrier_wait(full[step % KEY_STAGES], step / KEY_STAGES % 2);
                multiply_transposed(scores, own, queries, stages.left(step % KEY_STAGES));
            };
            auto make_weights = [&](int key) {
                hide_future<false>(scores, LOWEST, own, key);
                PerRow top = maximum;
                far = false;
                each<64>([&](Element e) { top[e] = fmaxf(top[e], scores[e]); });
                each_row([&](Element e) { far |= scale2 * (top[e] - maximum[e]) > FAR; });
                far = __any_sync(FULL_WARP, far);
                if (far)
                    each_row([&](Element e) {
                        float before = maximum[e];
                        maximum[e] = warp_max<4>(top[e]);
                        correction[e] = power_of_2(scale2 * (before - maximum[e]));
                        total[e] *= correction[e];
                    });
                weights_from_scores(scores, scale, [&](Element e) { return scale2 * maximum[e]; });
                each<64>([&](Element e) { total[e] += weights[e]; });
            };
            auto pack = [&] {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    a_from_result(packed[j], weights.x[0], j);
                    compute_now(packed[j]);
                }
            };
            auto add_values = [&] {                             // O = O + P V
                add_packed(output, packed, stages.right(step % KEY_STAGES));
            };
            start_scores(step);
            wait_for_products<0>(scores);
            make_weights(0);
            pack();
            for (int key = 64; key <= first; key += 64) {
                start_scores(step + 1);
                add_values();
                wait_for_products<1>(scores);
                make_weights(key);                              // while O is made
                wait_for_products<0>(output);
                pack();
                warp_arrives(empty[step++ % KEY_STAGES]);
                if (far) each<HP>([&](Element e) { output[e] *= correction[e]; });
            }
            add_values();
            wait_for_products<0>(output);
            warp_arrives(empty[step++ % KEY_STAGES]);

            PerRow inverse;
            each_row([&](Element e) {
                int t = own.warp_first + e.row();
                float sum = quad_sum(total[e]);
                inverse[e] = 1.0f / sum;
                if (e.column() == 0 && t < T)
                    lse[of_out.stat_at(t)] = scale2 * maximum[e] + log2f(sum);
            });
            each<HP>([&](Element e) { output[e] *= inverse[e]; });
            warpgroup_sync(group);  // no product reads the queries any more
            out.begin();
            store_own_rows(out, of_out, own, queries, output);
            out.end();
            shared_written();  // TMA writes there next
        }
        warp_arrives(queries_done[which]);
        for (; step < end; step++) {
            wait_for_keys();
            warp_arrives(empty[step % KEY_STAGES]);
        }
    }
}

}  // namespace attention_pipeline
#endif
