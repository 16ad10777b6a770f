// Of each head, with q, k, v (T,HS) in the rows of qkv (B,T,3,NH,HS):  out (B,T,NH,HS) = softmax(q k' / sqrt(HS)) v,
// where a query sees the keys up to its own position. The weights are T x T numbers for each head, far more than
// everything else.

// One thread per query, as one would write it in C, with a row of weights in device memory: scores, exponentials, and
// the weighted sum of the values, channel by channel. Each of the HS channels reads the row of weights again.
BLOCK(64, threads)
extern "C" __global__ void attention_forward1(real* __restrict__ out, float* __restrict__ att,
                                              const real* __restrict__ qkv, float scale, int B, int T, int NH) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH * T) return;
    int t = i % T, h = i / T % NH, b = i / T / NH, C = NH * HS;
    const real *head = qkv + (size_t)b * T * 3 * C + h * HS, *q = head + (size_t)t * 3 * C, *k = head + C, *v = k + C;
    float *a = att + (size_t)i * T, top = LOWEST, sum = 0.0f;
    for (int s = 0; s <= t; s++) {
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(q[c]) * to_float(k[(size_t)s * 3 * C + c]);
        a[s] = scale * score;
        top = fmaxf(top, a[s]);
    }
    for (int s = 0; s <= t; s++) {
        a[s] = expf(a[s] - top);
        sum += a[s];
    }
    for (int c = 0; c < HS; c++) {
        float o = 0.0f;
        for (int s = 0; s <= t; s++) o += a[s] * to_float(v[(size_t)s * 3 * C + c]);
        from_float(out[((size_t)b * T + t) * C + h * HS + c], o / sum);
    }
}

// Three kernels, each shaped for its work: scores by tiles of 32 x 32, without those above the diagonal; softmax by one
// warp per row, which finds maximum and sum in one pass, correcting the sum whenever the maximum grows (Milakov and
// Gimelshein 2018, algorithm 3); and the product with the values, by tiles again. What remains is that the weights go
// through device memory four times: written, read, written and read. Items of the first and the last: all heads' tiles
// of keys, or of channels, along x, and T queries along y.
BLOCK(1024, 1, 32)
extern "C" __global__ void attention_forward2_scores(float* __restrict__ att, const real* __restrict__ qkv,
                                                     float scale, int T, int NH) {
    __shared__ float q[32][33], k[32][33];
    int tiles = (T + 31) / 32, head_number = blockIdx.x / tiles;
    int b = head_number / NH, h = head_number % NH, C = NH * HS;
    int key = blockIdx.x % tiles * 32, query = blockIdx.y * 32, i = threadIdx.x / 32, j = threadIdx.x % 32;
    if (key > query) return;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float sum = 0.0f;
    for (int c = 0; c < HS; c += 32) {
        q[i][j] = query + i < T && c + j < HS ? to_float(head[(size_t)(query + i) * 3 * C + c + j]) : 0.0f;
        k[i][j] = key + i < T && c + j < HS ? to_float(head[(size_t)(key + i) * 3 * C + C + c + j]) : 0.0f;
        __syncthreads();
        for (int n = 0; n < 32; n++) sum += q[i][n] * k[j][n];
        __syncthreads();
    }
    if (query + i < T && key + j <= query + i) att[((size_t)head_number * T + query + i) * T + key + j] = scale * sum;
}

BLOCK(256, threads / 32)
extern "C" __global__ void attention_forward2_softmax(float* att, int rows, int T) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    float *a = att + (size_t)row * T, top = LOWEST, sum = 0.0f;
    for (int s = lane; s <= row % T; s += 32) {
        float now = fmaxf(top, a[s]);
        sum = sum * expf(top - now) + expf(a[s] - now);
        top = now;
    }
    float largest = warp_max(top);
    sum = warp_sum(sum * expf(top - largest));
    for (int s = lane; s <= row % T; s += 32) a[s] = expf(a[s] - largest) / sum;
}

BLOCK(1024, 1, 32)
extern "C" __global__ void attention_forward2_values(real* __restrict__ out, const float* __restrict__ att,
                                                     const real* __restrict__ qkv, int T, int NH) {
    __shared__ float a[32][33], v[32][33];
    int tiles = (HS + 31) / 32, head_number = blockIdx.x / tiles;
    int b = head_number / NH, h = head_number % NH, C = NH * HS;
    int c = blockIdx.x % tiles * 32, query = blockIdx.y * 32, i = threadIdx.x / 32, j = threadIdx.x % 32;
    const real* values = qkv + (size_t)b * T * 3 * C + 2 * C + h * HS;
    float sum = 0.0f;
    for (int key = 0; key <= query; key += 32) {
        bool seen = query + i < T && key + j <= query + i;
        a[i][j] = seen ? att[((size_t)head_number * T + query + i) * T + key + j] : 0.0f;
        v[i][j] = key + i < T && c + j < HS ? to_float(values[(size_t)(key + i) * 3 * C + c + j]) : 0.0f;
        __syncthreads();
        for (int n = 0; n < 32; n++) sum += a[i][n] * v[n][j];
        __syncthreads();
    }
    if (query + i < T && c + j < HS) from_float(out[((size_t)b * T + query + i) * C + h * HS + c + j], sum);
}

// Flash attention (Dao et al. 2022, algorithm 1) in fp32: a thread keeps a query and its output in registers, and goes
// over the keys in tiles of 32 that the block shares; when the maximum of its scores grows, the sums so far are scaled
// down. The weights exist only for one tile, in registers, so only q, k, v and out go through device memory. All lanes
// read the same key at a time, 16 bytes for four multiplications each. The last queries, which see the most keys, come
// first. Items: T queries along x, B*NH heads along y.
BLOCK(256, threads)
extern "C" __global__ void __launch_bounds__(256) attention_forward3(real* __restrict__ out,
                                                                     const real* __restrict__ qkv, float scale, int T,
                                                                     int NH) {
    constexpr int KEYS = 32;
    __shared__ __align__(16) float k[KEYS][HS], v[KEYS][HS];
    int threads = blockDim.x, b = blockIdx.y / NH, h = blockIdx.y % NH, C = NH * HS;
    int first = (gridDim.x - 1 - blockIdx.x) * threads, t = first + threadIdx.x;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    float q[HS], o[HS], top = LOWEST, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < HS; c++) q[c] = t < T ? scale * to_float(head[(size_t)t * 3 * C + c]) : 0.0f, o[c] = 0.0f;
    for (int key = 0; key < min(first + threads, T); key += KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * HS; i += threads) {
            int s = key + i / HS, c = i % HS;
            k[i / HS][c] = s < T ? to_float(head[(size_t)s * 3 * C + C + c]) : 0.0f;
            v[i / HS][c] = s < T ? to_float(head[(size_t)s * 3 * C + 2 * C + c]) : 0.0f;
        }
        __syncthreads();
        if (key > t) continue;
        float score[KEYS], now = top;
#pragma unroll
        for (int s = 0; s < KEYS; s++) {
            score[s] = 0.0f;
#pragma unroll
            for (int c = 0; c < HS; c += 4) {
                Pack<4> x = load<4>(&k[s][c]);
                for (int i = 0; i < 4; i++) score[s] += q[c + i] * x[i];
            }
            if (key + s > t) score[s] = LOWEST;
            now = fmaxf(now, score[s]);
        }
        float factor = expf(top - now);
        sum *= factor, top = now;
#pragma unroll
        for (int c = 0; c < HS; c++) o[c] *= factor;
#pragma unroll
        for (int s = 0; s < KEYS; s++) {
            float weight = expf(score[s] - now);
            sum += weight;
#pragma unroll
            for (int c = 0; c < HS; c += 4) {
                Pack<4> x = load<4>(&v[s][c]);
                for (int i = 0; i < 4; i++) o[c + i] += weight * x[i];
            }
        }
    }
    if (t >= T) return;
#pragma unroll
    for (int c = 0; c < HS; c++) from_float(out[((size_t)b * T + t) * C + h * HS + c], o[c] / sum);
}

// Flash attention on tensor cores, by mma.sync. The loop is that of version 3, but a warp takes 16 queries together,
// and a block 64. A tile of 64 keys gives each warp scores (16,64), which lie in its registers: the D of one product is
// the A of the next, so they need not go anywhere else. For each query the warp keeps the largest score so far and the
// sums below it (Milakov and Gimelshein 2018, algorithm 3; Dao et al. 2022, algorithm 1). With a new tile of scores s:
//   now = max(maximum, max(s))            shrink = e^(maximum - now)
//   total = total * shrink + sum(e^(s - now))
//   output = output * shrink + sum(e^(s - now) * value)
// In the end out = output / total. That is softmax exactly, because e^(s - now) * e^(now - later) = e^(s - later).
//   - The scale and log2(e) are one factor, since the hardware's exponential is 2^x.
//   - A query's row of scores lies in four neighbouring lanes. They agree on its maximum in every tile, but add up
//     their totals only once, at the end.
//   - The queries stay in registers. The next tile is on its way by asynchronous copies while this one is worked on.
//   - Tiles have as many keys as the block has queries. So each is seen as a whole, but for the last, which the
//     diagonal runs through: only there is anything to hide.
//   - The blocks of the last queries, which see the most keys, start first, those of all heads. Short ones fill the
//     gaps at the end.
// Items: B*NH heads along x, T queries along y.
BLOCK(128, 1, 64)
extern "C" __global__ void __launch_bounds__(128) attention_forward4(real* __restrict__ out,
                                                                     const real* __restrict__ qkv, float scale, int T,
                                                                     int NH) {
    constexpr int TILE = 64, LD = tiles::HEAD_LD;
    DYNAMIC_SHARED(real, shared);  // two stages of keys and values (2, 2, TILE, LD)
    int b = blockIdx.x / NH, h = blockIdx.x % NH, C = NH * HS;
    int first = (gridDim.y - 1 - blockIdx.y) * TILE, of_warp = threadIdx.x / 32 * 16;
    const real* head = qkv + (size_t)b * T * 3 * C + h * HS;
    auto load_stage = [&](int stage, int key) {
        real* keys = shared + stage * 2 * TILE * LD;
        tiles::load_head<TILE>(keys, head + C, 3 * C, key, T);
        tiles::load_head<TILE>(keys + TILE * LD, head + 2 * C, 3 * C, key, T);
        copies_end();
    };
    load_stage(0, 0);

    Pair queries[HS / 16][4];  // as A: kernels.cu draws which lane has which rows and columns
#pragma unroll
    for (int c = 0; c < HS / 16; c++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = first + of_warp + row_of(0, 2 * (i % 2));
            Pack<2> two = {};
            if (t < T) two = load<2>(head + (size_t)t * 3 * C + 16 * c + column_of(i / 2, 0));
            queries[c][i] = pair(two[0], two[1]);
        }
    float output[HS / 8][4] = {}, maximum[2] = {LOWEST, LOWEST}, total[2] = {};  // a lane has elements of two rows
    float scale2 = scale * LOG2_E;
    for (int key = 0, stage = 0; key <= first; key += TILE, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();  // all copies are here, and no thread reads the other stage any more
        if (key < first) load_stage(stage ^ 1, key + TILE);
        const real *keys = shared + stage * 2 * TILE * LD, *values = keys + TILE * LD;

        float scores[TILE / 8][4] = {};
        Pair two_b[4];
#pragma unroll
        for (int c = 0; c < HS / 16; c++)
#pragma unroll
            for (int n = 0; n < TILE / 16; n++) {
                tiles::right_transposed<LD>(two_b, keys, 16 * n, 16 * c);
                mma_pair(scores[2 * n], scores[2 * n + 1], queries[c], two_b);
            }
        if (key == first)
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (column_of(n, i) > of_warp + row_of(0, i)) scores[n][i] = LOWEST;

#pragma unroll
        for (int half = 0; half < 2; half++) {
            float now = maximum[half];
#pragma unroll
            for (int n = 0; n < TILE / 8; n++) now = fmaxf(now, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            now = warp_max<4>(now);
            float shrink = power_of_2(scale2 * (maximum[half] - now));
            maximum[half] = now, total[half] *= shrink;
#pragma unroll
            for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[n][i] = power_of_2(scale2 * scores[n][i] - scale2 * now);
                    total[half] += scores[n][i];
                }
#pragma unroll
            for (int n = 0; n < HS / 8; n++) output[n][2 * half] *= shrink, output[n][2 * half + 1] *= shrink;
        }
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            Pair weights[4];
            a_from_result(weights, scores, j);
#pragma unroll
            for (int n = 0; n < HS / 16; n++) {
                tiles::right<LD>(two_b, values, 16 * j, 16 * n);
                mma_pair(output[2 * n], output[2 * n + 1], weights, two_b);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int t = first + of_warp + row_of(0, 2 * half);
        float factor = 1.0f / quad_sum(total[half]);
        real* to = out + ((size_t)b * T + t) * C + h * HS;
#pragma unroll
        for (int n = 0; n < HS / 8; n++)
            if (t < T)
                store(to + column_of(n, 0),
                      Pack<2>{factor * output[n][2 * half], factor * output[n][2 * half + 1]});
    }
}

// attention_forward in kernels.cu: the same loop, for any head, for groups of heads that share keys, and for ReLU
// attention. By mma.sync, warps fetch their operands from shared memory, which limits them. Two sets of 16 queries per
// warp halve that traffic, and Hopper's wgmma, for bf16, removes it: the tensor cores read a swizzled tile themselves,
// once for the 64 rows of four warps.
