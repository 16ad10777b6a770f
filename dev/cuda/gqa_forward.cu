// Grouped-query attention (Ainslie et al. 2023, section 2.2): inp (B,T,NH+2KV,HS) has the queries of NH heads, and keys
// and values of KV heads, each of which serves NH/KV neighbouring query heads. out (B,T,NH,HS).

// A thread a query walks over its keys, and keeps its output in registers; the sum and the output are scaled down when
// a larger score comes. Every number of a key or value is read for one multiplication.
BLOCK(64, threads)
extern "C" __global__ void gqa_forward1(real* __restrict__ out, const real* __restrict__ inp, float scale, int B, int T,
                                        int NH, int KV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, stride = (NH + 2 * KV) * HS;
    const real *row = inp + (size_t)b * T * stride, *q = row + (size_t)t * stride + h * HS;
    const real *k = row + (NH + h / (NH / KV)) * HS, *v = k + KV * HS;
    float o[HS] = {}, top = LOWEST, sum = 0.0f;
    for (int s = 0; s <= t; s++, k += stride, v += stride) {
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[c]);
        score *= scale;
        float now = fmaxf(top, score), factor = expf(top - now), weight = expf(score - now);
        sum = sum * factor + weight, top = now;
#pragma unroll
        for (int c = 0; c < HS; c++) o[c] = o[c] * factor + weight * to_float(v[c]);
    }
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(out[(((size_t)b * T + t) * NH + h) * HS + c], o[c] / sum);
}

// repeat_kv, and then the trainer's attention_forward for NH heads, on tensor cores: fast, but it writes and reads
// NH/KV copies of each key and value, in device memory that a grouped cache was to save.
BLOCK(256, W * threads)
extern "C" __global__ void gqa_forward2_repeat(real* __restrict__ qkv, const real* __restrict__ inp, int NH, int KV) {
    int i = first_number(), size = 3 * NH * HS;
    if (i >= size) return;
    int c = i % HS, h = i / HS % NH, which = i / HS / NH, from = which == 0 ? h : NH + (which - 1) * KV + h / (NH / KV);
    size_t row = blockIdx.y;
    store(qkv + row * size + i, load<W>(inp + (row * (NH + 2 * KV) + from) * HS + c));
}

// Flash attention on tensor cores that knows the groups. To a key head, the queries of its NH/KV heads are just NH/KV T
// rows, row r being position r / (NH/KV): a block has 64 of these rows, so that a tile of keys and values that it
// brought to shared memory serves all heads of the group at once. A warp has 16 rows, their scores for 64 keys, and
// their output, in registers; the next tile is on its way meanwhile. HS is a multiple of 16. Items: a group's rows
// along x, B*KV groups along y.
namespace gqa {

constexpr int ROWS = 64, KEYS = 64, LD = HS + 8;

// 64 rows to a tile, row(i) being where row i begins, or null for zeros.
template <class Row>
__device__ __forceinline__ void load_tile(real* tile, Row row) {
    for (int i = threadIdx.x; i < 64 * (HS / W); i += blockDim.x) {
        const real* from = row(i / (HS / W));
        int c = i % (HS / W) * W;
        copy16(tile + i / (HS / W) * LD + c, from ? from + c : tile, from != nullptr);
    }
}

// Two B side by side whose 16 columns are columns c..c+15 of a tile, summed over its rows r..r+15.
__device__ __forceinline__ void right(Pair (&b)[4], const real* tile, int r, int c) {
    int lane = threadIdx.x % 32;
#ifdef BF16
    load_matrices_transposed(b, tile + (r + lane % 16) * LD + c + lane / 16 * 8);
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const real* x = tile + (r + 2 * (lane % 4) + i % 2 * 8) * LD + c + lane / 4 + i / 2 * 8;
        b[i] = {x[0], x[LD]};
    }
#endif
}

}  // namespace gqa

BLOCK(128, 64)
extern "C" __global__ void __launch_bounds__(128, 2) gqa_forward3(real* __restrict__ out, const real* __restrict__ inp,
                                                               float scale, int T, int NH, int KV) {
    using gqa::KEYS, gqa::ROWS;
    DYNAMIC_SHARED(real, shared);  // (2, 2, KEYS, LD): two stages of keys and values
    int group = NH / KV, rows = group * T, stride = (NH + 2 * KV) * HS;
    int b = blockIdx.y / KV, kv = blockIdx.y % KV, first = (gridDim.x - 1 - blockIdx.x) * ROWS;
    int warp_row = threadIdx.x / 32 * 16, g = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    const real *queries = inp + (size_t)b * T * stride + kv * group * HS;
    const real* keys = inp + (size_t)b * T * stride + (NH + kv) * HS;
    auto tile = [&](int stage, int which) { return shared + (2 * stage + which) * KEYS * gqa::LD; };
    auto query_row = [&](int i) {
        int r = first + i;
        return r < rows ? queries + (size_t)(r / group) * stride + r % group * HS : nullptr;
    };
    auto load_stage = [&](int stage, int key) {
        auto row = [&](const real* head, int i) { return key + i < T ? head + (size_t)(key + i) * stride : nullptr; };
        gqa::load_tile(tile(stage, 0), [&](int i) { return row(keys, i); });
        gqa::load_tile(tile(stage, 1), [&](int i) { return row(keys + KV * HS, i); });
    };
    gqa::load_tile(tile(1, 0), query_row);
    load_stage(0, 0);
    copies_end();
    copies_arrive<0>();
    __syncthreads();
    Pair query[HS / 16][4];
#pragma unroll
    for (int c = 0; c < HS / 16; c++) tiles::left<gqa::LD>(query[c], tile(1, 0), warp_row, 16 * c);

    int position[2] = {(first + warp_row + g) / group, (first + warp_row + g + 8) / group};  // of rows g and g+8
    int last = min((first + ROWS - 1) / group, T - 1), warp_last = (first + warp_row + 15) / group;
    float o[HS / 8][4] = {}, top[2] = {LOWEST, LOWEST}, sum[2] = {}, scale2 = scale * LOG2_E;
    for (int key = 0, stage = 0; key <= last; key += KEYS, stage ^= 1) {
        copies_end();
        copies_arrive<0>();
        __syncthreads();  // this stage is filled, and nobody reads the other any more
        if (key + KEYS <= last) load_stage(stage ^ 1, key + KEYS);
        if (key > warp_last) continue;
        float s[KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < HS / 16; c++)
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                Pair k[4];
                tiles::right_transposed<gqa::LD>(k, tile(stage, 0), 16 * n, 16 * c);
                mma_pair(s[2 * n], s[2 * n + 1], query[c], k);
            }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float before = top[half], now = before;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    if (key + 8 * n + column + i % 2 > position[half]) s[n][i] = LOWEST;
                    now = fmaxf(now, s[n][i]);
                }
            now = row_max(now);
            float factor = power_of_2(scale2 * (before - now)), total = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[n][i] = power_of_2(scale2 * s[n][i] - scale2 * now);
                    total += s[n][i];
                }
            sum[half] = sum[half] * factor + total, top[half] = now;
#pragma unroll
            for (int n = 0; n < HS / 8; n++) o[n][2 * half] *= factor, o[n][2 * half + 1] *= factor;
        }
#pragma unroll
        for (int r = 0; r < KEYS / 16; r++) {
            Pair a[4], v[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = pair(s[2 * r + i / 2][i % 2 * 2], s[2 * r + i / 2][i % 2 * 2 + 1]);
#pragma unroll
            for (int n = 0; n < HS / 16; n++) {
                gqa::right(v, tile(stage, 1), 16 * r, 16 * n);
                mma_pair(o[2 * n], o[2 * n + 1], a, v);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = first + warp_row + g + 8 * half;
        float factor = 1.0f / row_sum(sum[half]);
        if (r >= rows) continue;
        real* to = out + (((size_t)b * T + r / group) * NH + kv * group + r % group) * HS + column;
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
            store(to + 8 * n, Pack<2>{factor * o[n][2 * half], factor * o[n][2 * half + 1]});
    }
}
