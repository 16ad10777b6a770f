/*
The pass of one token per sequence, whose keys and values are kept: see kv_cache.py. B sequences
have a row each, so products with a weight read all of the weight for a few rows: they are bound by
memory, and so is attention, which reads all kept keys and values for one query. Compiled after
kernels.cu.

Up to four sequences, where shared memory suffices: token_pass, which is all layers in one launch,
for one sequence token_pass_alone. Elsewhere token_embedding, token_linear and token_attention do
the same, each in a launch of its own: read these first. More sequences: token_embedding,
token_attention, and the device's products. Then draw_tokens; the likeliest tokens are drawn by
token_pass itself, for several passes in one launch. keep_keys is for the pass over a prompt.
*/

namespace kv_cache {

// ---- the beginning ----

// x (B,C) = wte (Vp,C)[tokens (B)] + wpe (maxT,C)[positions (B)], the latter unless wpe is null.
// Items: B*C numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void token_embedding(
    float* __restrict__ x, const int* __restrict__ tokens, const int* __restrict__ positions,
    const real* __restrict__ wte, const real* __restrict__ wpe, int B, int C) {
    int packs = C / 4, i = blockIdx.x * blockDim.x + threadIdx.x;
    int row = i / packs, c = 4 * (i % packs);
    if (row >= B) return;
    Pack<4> sum = load<4>(wte + (size_t)tokens[row] * C + c);
    if (wpe) sum = sum + load<4>(wpe + (size_t)positions[row] * C + c);
    store(x + (size_t)row * C + c, sum);
}

// ---- a linear layer of at most four rows, with the norm before it, or the addition after it ----

constexpr int GELU = 1, SWIGLU = 2;

// rows (B,C), in shared memory: inp (B,C), or unless x is null the norm of x (B,C): a layernorm, or
// without normb an RMSNorm. It is rounded as a stored norm would be.
__device__ void bring_rows(float* rows, const real* inp, const float* x,
                           const real* __restrict__ normw, const real* __restrict__ normb,
                           float eps, int B, int C) {
    for (int i = W * threadIdx.x; !x && i < B * C; i += W * blockDim.x)
        store(rows + i, load<W>(inp + i));
    // A quarter of the warps have a row: all rows are made at once, and each as it would be alone.
    int threads = blockDim.x / 4, row = threadIdx.x / threads, first = 4 * (threadIdx.x % threads);
    if (x) {
        constexpr int loads = 2;  // packs of four numbers under way at once
        int step = 4 * threads;   // columns
        __shared__ float of_warp[2][16];
        float *to = rows + row * C, sum = 0.0f, squares = 0.0f;
        Pack<4> w[loads] = {}, shift[loads] = {};  // for the first of them
#pragma unroll
        for (int i = 0; i < loads; i++)
            if (row < B && first + i * step < C) {
                w[i] = load<4>(normw + first + i * step);
                if (normb) shift[i] = load<4>(normb + first + i * step);
            }
        for (int from = first; row < B && from < C; from += loads * step) {
            Pack<4> v[loads];
#pragma unroll
            for (int i = 0; i < loads; i++)
                if (from + i * step < C) v[i] = load<4>(x + row * C + from + i * step);
#pragma unroll
            for (int i = 0; i < loads; i++)
                if (from + i * step < C) {
                    store(to + from + i * step, v[i]);  // only this thread reads it until the end
                    sum += v[i][0] + v[i][1] + v[i][2] + v[i][3];
                }
        }
        auto of_row = [&](float part, float* parts) {  // the sum over the row's warps
            part = warp_sum(part);
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
            __syncthreads();
            float all = 0.0f;
            for (int i = 0; i < threads / 32; i++) all += parts[row * (threads / 32) + i];
            return all;
        };
        float mean = normb ? of_row(sum, of_warp[0]) / C : 0.0f;
        for (int c = first; row < B && c < C; c += step)
            for (int j = 0; j < 4; j++) squares += (to[c + j] - mean) * (to[c + j] - mean);
        float rstd = 1.0f / sqrtf(of_row(squares, of_warp[1]) / C + eps);
        auto finish = [&](int c, Pack<4> w, Pack<4> shift) {
            for (int j = 0; j < 4; j++) {
                real rounded;
                from_float(rounded, (to[c + j] - mean) * rstd * w[j] + shift[j]);
                to[c + j] = to_float(rounded);
            }
        };
#pragma unroll
        for (int i = 0; i < loads; i++)
            if (row < B && first + i * step < C) finish(first + i * step, w[i], shift[i]);
        for (int c = first + loads * step; row < B && c < C; c += step)
            finish(c, load<4>(normw + c), normb ? load<4>(normb + c) : Pack<4>{});
    }
    __syncthreads();
}

// Have memory that will be read brought to L2.
#ifdef __CUDACC__
__device__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
#else
__device__ void prefetch(const void*) {}
#endif

// The products of a warp: a row of a weight with each of R rows. A lane has `depth` loads under way
// before it needs the first.
template <int R>
__device__ Pack<R> products(const real* __restrict__ weight, const float* rows, int C) {
    constexpr int depth = R == 1 ? 4 : 2;  // as registers hold, for three blocks
    Pack<R> sum = {};
    for (int c = W * (threadIdx.x % 32); c < C; c += depth * 32 * W) {
        Pack<W> w[depth];
#pragma unroll
        for (int d = 0; d < depth; d++)
            if (c + d * 32 * W < C) w[d] = load<W>(weight + c + d * 32 * W);
#pragma unroll
        for (int d = 0; d < depth; d++)
            for (int r = 0; r < R && c + d * 32 * W < C; r++) {
                Pack<W> x = load<W>(rows + r * C + c + d * 32 * W);
                for (int j = 0; j < W; j++) sum[r] += w[d][j] * x[j];
            }
    }
    for (int r = 0; r < R; r++) sum[r] = warp_sum(sum[r]);
    return sum;
}

// The rows first, first + step, .. of a weight, for B <= R rows, two at a time if `pairs` and there
// are two. of_rows(o, n) are the products with row o, then those with row o + step if n is 2. All
// lanes have them, and a lane adds the bias to one, activates and stores it:
//
//     lane       0 .. R-1                 R .. 2R-1, if n is 2      others
//     ends       number o of row `lane`   number o + step of        nothing
//                                         row `lane - R`
//
// to.put(at, o, y, to.before(at)) stores y as number o of a row, where at counts the numbers of all
// rows. Returns the first of the weight's rows that is beyond OC.
template <int R, class To, class F>
__device__ int linear(To& to, const real* __restrict__ bias, int activation, int B, int OC,
                      int first, int step, bool pairs, F of_rows) {
    int lane = threadIdx.x % 32, o = first, n;
    for (; o < OC; o += n * step) {
        n = pairs && o + step < OC ? 2 : 1;
        int second = n == 2 ? lane / R : 0;
        int own = o + second * step, r = lane - second * R;
        bool ends = lane < n * R && r < B;
        size_t at = (size_t)r * OC + own;
        real shift = {};  // this and before are on their way until they are needed
        decltype(to.before(at)) before = {};
        if (ends && bias) shift = bias[own];
        if (ends) before = to.before(at);
        decltype(of_rows(o, n)) sum = {}, gates = {};
#pragma unroll 1  // the code of of_rows is long
        for (int row = o; row < (activation == SWIGLU ? 2 : 1) * OC; row += OC) {
            auto found = of_rows(row, n);
            if (row == o) sum = found;
            else gates = found;
        }
        if (!ends) continue;
        float y = sum[0], gate = gates[0];
#pragma unroll
        for (int i = 1; i < sizeof(sum) / sizeof y; i++) {
            y = lane == i ? sum[i] : y;
            gate = lane == i ? gates[i] : gate;
        }
        y += to_float(shift);
        if (activation == GELU) y = gelu(y);
        if (activation == SWIGLU) y *= gate / (1.0f + exponential(-gate));
        to.put(at, own, y, before);
    }
    return o;
}

// out = y; or unless it is null, stream += y.
struct ToArrays {
    real* out;
    float* stream;
    __device__ float before(size_t at) { return stream ? stream[at] : 0.0f; }
    __device__ void put(size_t at, int, float y, float before) {
        if (stream) stream[at] = before + y;
        else from_float(out[at], y);
    }
};

// For B <= 4 rows: y (B,OC) = rows (B,C) weight' + bias (OC), the latter unless null. The rows are
// inp, or norm(x) unless x is null. Then stream (B,OC) += y, unless null; else out (B,OC) =
// y, GELU(y) with activation 1; with 2, y * silu(gate), and weight (2*OC,C) has rows for y and then
// for the gate. A warp has a row of the weight at a time, 16 bytes a lane, and the B rows are in
// shared memory: each block makes their norm anew, which costs less than a launch. Meanwhile L2
// gets the first row of the weight of each warp. Bound by memory: the weight is read once. Items:
// blocks.
BLOCK(256, 1)
extern "C" __global__ void __launch_bounds__(256, 3) token_linear(
    real* __restrict__ out, float* __restrict__ stream, const real* __restrict__ inp,
    const float* __restrict__ x, const real* __restrict__ normw, const real* __restrict__ normb,
    const real* __restrict__ weight, const real* __restrict__ bias, float eps, int activation,
    int B, int C, int OC) {
    DYNAMIC_SHARED(float, rows);
    int o = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;  // the first row of this warp
    for (int c = W * (threadIdx.x % 32); o < OC && c < C; c += 32 * W)
        prefetch(weight + (size_t)o * C + c);
    bring_rows(rows, inp, x, normw, normb, eps, B, C);
    ToArrays to{out, stream};
    auto multiply = [&](auto zeros) {
        constexpr int R = sizeof(zeros) / sizeof(float);
        linear<R>(to, bias, activation, B, OC, o, gridDim.x * (blockDim.x / 32), false,
                  [&](int row, int) { return products<R>(weight + (size_t)row * C, rows, C); });
    };
    if (B == 1) multiply(Pack<1>{});
    if (B == 2) multiply(Pack<2>{});
    if (B == 3) multiply(Pack<3>{});
    if (B == 4) multiply(Pack<4>{});
}

using Total = unsigned long long;

// What blocks tell each other. count_in_order adds 1 to a count, which becomes 0 after `last`, and
// returns what was there. Who counts later also sees what this thread's block wrote before. send
// and receive are for 8 bytes that arrive together, and that need no such order. Who must receive
// them again calls wait_for_block: an error on a CPU, where a block runs alone.
#ifdef __CUDACC__
__device__ int count_in_order(int* p, int last) {
    int before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before) : "l"(p), "r"(last) : "memory");
    return before;
}
__device__ void send(Total* p, Total x) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ Total receive(const Total* p) {
    Total x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}
__device__ void receive(const Total* p, Total& x, Total& y) {  // neighbours, the first at 16 bytes
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(x), "=l"(y) : "l"(p) : "memory");
}
__device__ void wait_for_block() {}
#else
__device__ int count_in_order(int* p, int last) {
    __threadfence();
    int before = atomicInc((unsigned*)p, last);
    __threadfence();
    return before;
}
__device__ void send(Total* p, Total x) { *p = x; }
__device__ Total receive(const Total* p) { return *p; }
__device__ void receive(const Total* p, Total& x, Total& y) { x = p[0], y = p[1]; }
__device__ void wait_for_block() { __trap(); }
#endif

// ---- attention for one query a head ----

constexpr int CHUNK = 256;  // the keys of a block: kv_cache.py's
constexpr int LANES = 8;  // share a key or a value
constexpr int PACK = HS % W == 0 ? W : HS % 2 == 0 ? 2 : 1;  // channels that a lane loads at once
constexpr int PACKS = (HS + PACK * LANES - 1) / (PACK * LANES);  // how often
constexpr int AT_ONCE = GROUP < 4 ? GROUP : 4;  // heads of queries whose output is in registers

// Number i of neighbouring heads at `head`. With `turn`, a position's row of RoPE's table, it is
// rotated together with its neighbour: see turn_pairs in llama3.cu.
__device__ float turned(const float* head, int i, const float* __restrict__ turn) {
    if (!turn) return head[i];
    float x = head[i & ~1], y = head[i | 1];
    float cosine = turn[i % HS & ~1], sine = turn[i % HS | 1];
    return i % 2 ? x * sine + y * cosine : x * cosine - y * sine;
}

// f(c) for each pack of PACK channels of a head that this lane has
template <class F>
__device__ void each_pack_of_head(F f) {
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int c = PACK * (threadIdx.x % LANES + LANES * p);
        if (HS % (PACK * LANES) == 0 || c < HS) f(p, c);
    }
}

// qkv (B,NH+2NKV,HS) has the query, key and value of a token at each sequence's position (B), where
// key and value are written to keys and values (B,NKV,T,HS); rope (T,HS), unless null, turns query
// and key. out (B,NH,HS) = weights v with weights = softmax(scale * q k'), over all keys up to the
// position; with RELU, weights = max(0, scale * q k'). qkv(i) reads a number, out(i, y) writes one.
//
// A block has a head: the heads of queries that share a head of keys; and CHUNK of the keys: chunks
// beyond the position end at once. If several have keys, each leaves its sum in parts, with the
// largest score and the sum of weights; the last of them to finish adds all up, in order. arrived
// counts them: it begins as zeros and is left as zeros. Bound by memory: keys and values are read
// once. `most` is how many chunks of a head parts has room for; q is shared memory. eager: if
// registers hold all keys and values of a thread, load them before qkv is there. kept: the B
// tokens are of one text, and keys and values (NKV,T,HS) have theirs, too: see keep_keys.
template <int THREADS, bool eager, class Qkv, class Out>
__device__ void attend(Out out, real* keys, real* values, float* parts, int* arrived, Qkv qkv,
                       const float* __restrict__ rope, const int* positions, float scale, int T,
                       int NH, int head, int chunk, int most, float* q, bool kept = false) {
    constexpr int MEMBERS = THREADS / LANES, WARPS = THREADS / 32;  // MEMBERS keys are read at once
    float* weights = q + GROUP * HS;       // q is (GROUP,HS), this (GROUP,CHUNK); scores at first
    float* of_warp = weights + GROUP * CHUNK;  // (WARPS,AT_ONCE,HS)
    float* raw = of_warp + WARPS * AT_ONCE * HS;  // (GROUP+2,HS): queries, key, value
    real* newest = (real*)(raw + (GROUP + 2) * HS);  // (2,HS): key and value as they are stored
    float* tops = raw + (GROUP + 4) * HS;  // (GROUP)
    float* sums = tops + GROUP;            // (GROUP)
    int NKV = NH / GROUP, b = head / NKV, kv = head % NKV, position = positions[b];
    int first = chunk * CHUNK, count = min(CHUNK, position + 1 - first);
    if (count <= 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = threadIdx.x / LANES;
    int own = position - first;  // the newest key's place here, or beyond
    const float* turn = rope ? rope + (size_t)position * HS : nullptr;
    size_t begin = ((size_t)(kept ? kv : head) * T + first) * HS;
    real *k = keys + begin, *v = values + begin;
    constexpr int EACH = CHUNK / MEMBERS;      // keys of a member
    constexpr bool EARLY = eager && EACH * PACKS <= 4;
    struct KeyAndValue { Stored<PACK, real> key, value; } early[EACH][PACKS];
    auto load_pair = [&](int i, const real* key, const real* value) {
        each_pack_of_head([&](int p, int c) {
            early[i][p].key = *reinterpret_cast<const Stored<PACK, real>*>(key + c);
            early[i][p].value = *reinterpret_cast<const Stored<PACK, real>*>(value + c);
        });
    };
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int s = member + i * MEMBERS;
        if (EARLY && s < count && s != own) load_pair(i, k + (size_t)s * HS, v + (size_t)s * HS);
    }
    for (int i = threadIdx.x; i < (GROUP + 2) * HS; i += blockDim.x) {
        int h = i / HS < GROUP ? kv * GROUP + i / HS : NH + (i / HS - GROUP) * NKV + kv;
        raw[i] = qkv(((size_t)b * (NH + 2 * NKV) + h) * HS + i % HS);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HS; i += blockDim.x) q[i] = scale * turned(raw, i, turn);
    for (int i = threadIdx.x; own < CHUNK && i < HS; i += blockDim.x) {
        from_float(newest[i], turned(raw + GROUP * HS, i, turn));
        from_float(newest[HS + i], raw[(GROUP + 1) * HS + i]);
        if (!kept) {
            k[own * HS + i] = newest[i];
            v[own * HS + i] = newest[HS + i];
        }
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (EARLY && member + i * MEMBERS == own) load_pair(i, newest, newest + HS);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        int s = member + i * MEMBERS;
        float score[GROUP] = {};
        if (s < count)
            each_pack_of_head([&](int p, int c) {
                Pack<PACK> key = load<PACK>(EARLY ? early[i][p].key.x : k + (size_t)s * HS + c);
                for (int g = 0; g < GROUP; g++)
                    for (int j = 0; j < PACK; j++) score[g] += q[g * HS + c + j] * key[j];
            });
        for (int g = 0; g < GROUP; g++) {
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                score[g] += __shfl_xor_sync(FULL_WARP, score[g], distance);
            if (threadIdx.x % LANES == 0) weights[g * CHUNK + s] = score[g];
        }
    }
    __syncthreads();
    for (int g = warp; g < GROUP; g += WARPS) {
        float *weight = weights + g * CHUNK, x[CHUNK / 32], top = LOWEST, sum = 0.0f;
        for (int i = 0; i < CHUNK / 32; i++) {
            x[i] = lane + 32 * i < count ? weight[lane + 32 * i] : LOWEST;
            top = fmaxf(top, x[i]);
        }
        top = warp_max(top);
        for (int i = 0; i < CHUNK / 32; i++) {
            weight[lane + 32 * i] = x[i] = RELU ? fmaxf(0.0f, x[i]) : exponential(x[i], top);
            sum += x[i];
        }
        sum = warp_sum(sum);
        if (lane == 0) tops[g] = top, sums[g] = sum;
    }
    __syncthreads();

    int chunks = position / CHUNK + 1;
    // a head's part: HS numbers, the largest score, the sum of weights
    float* part = parts + ((size_t)head * most + chunk) * GROUP * (HS + 2);
    size_t result = ((size_t)b * NH + kv * GROUP) * HS;  // where out (GROUP,HS) begins
    for (int from = 0; from < GROUP; from += AT_ONCE) {
        Pack<PACK> sum[AT_ONCE][PACKS] = {};
        auto add = [&](int s, int p, int c, const real* at) {
            Pack<PACK> value = load<PACK>(at);
            for (int g = 0; g < AT_ONCE; g++) {
                float weight = weights[min(from + g, GROUP - 1) * CHUNK + s];
                for (int j = 0; j < PACK; j++) sum[g][p][j] += weight * value[j];
            }
        };
        if constexpr (EARLY) {
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (member + i * MEMBERS < count)
                    each_pack_of_head([&](int p, int c) {
                        add(member + i * MEMBERS, p, c, early[i][p].value.x);
                    });
        } else {
#pragma unroll 4
            for (int s = member; s < count; s += MEMBERS)
                each_pack_of_head([&](int p, int c) { add(s, p, c, v + (size_t)s * HS + c); });
        }
        for (int g = 0; g < AT_ONCE; g++)  // the members of a warp; all lanes must take part
            for (int p = 0; p < PACKS; p++)
                for (int j = 0; j < PACK; j++)
                    for (int distance = LANES; distance < 32; distance *= 2)
                        sum[g][p][j] += __shfl_xor_sync(FULL_WARP, sum[g][p][j], distance);
        if (lane < LANES)
            each_pack_of_head([&](int p, int c) {
                for (int g = 0; g < AT_ONCE; g++)
                    store(of_warp + (warp * AT_ONCE + g) * HS + c, sum[g][p]);
            });
        __syncthreads();
        for (int i = threadIdx.x; i < min(AT_ONCE, GROUP - from) * HS; i += blockDim.x) {
            int g = from + i / HS;
            float x = 0.0f;
            for (int w = 0; w < WARPS; w++) x += of_warp[w * AT_ONCE * HS + i];
            if (chunks == 1) out(result + from * HS + i, RELU ? x : x / sums[g]);
            else part[g * (HS + 2) + i % HS] = x;
        }
        __syncthreads();
    }
    if (chunks == 1) return;

    for (int g = threadIdx.x; g < GROUP; g += blockDim.x) {
        part[g * (HS + 2) + HS] = tops[g];
        part[g * (HS + 2) + HS + 1] = sums[g];
    }
    __syncthreads();
    __shared__ bool last;
    if (threadIdx.x == 0) last = count_in_order(arrived + head, chunks - 1) == chunks - 1;
    __syncthreads();
    if (!last) return;
    const float* all = parts + (size_t)head * most * GROUP * (HS + 2);
    for (int i = threadIdx.x; i < GROUP * HS; i += blockDim.x) {
        int g = i / HS;
        float top = LOWEST, sum = 0.0f, x = 0.0f;
        for (int c = 0; c < chunks; c++)
            top = fmaxf(top, __ldcg(all + (c * GROUP + g) * (HS + 2) + HS));
        for (int c = 0; c < chunks; c++) {
            const float* of = all + (c * GROUP + g) * (HS + 2);
            float factor = RELU ? 1.0f : exponential(__ldcg(of + HS), top);
            sum += factor * __ldcg(of + HS + 1);
            x += factor * __ldcg(of + i % HS);
        }
        out(result + i, RELU ? x : x / sum);
    }
}

// attend, of B sequences, or if `kept` of B tokens of one. Items: B*NKV heads along x; along y the
// positions, up to T, that queries may have.
BLOCK(256, 1, 256)
extern "C" __global__ void __launch_bounds__(256) token_attention(
    real* __restrict__ out, real* keys, real* values, float* parts, int* arrived,
    const real* __restrict__ qkv, const float* __restrict__ rope,
    const int* __restrict__ positions, float scale, int B, int T, int NH, int kept) {
    DYNAMIC_SHARED(float, q);
    attend<256, false>([=](size_t i, float y) { from_float(out[i], y); }, keys, values, parts,
                       arrived, [=](size_t i) { return to_float(qkv[i]); }, rope, positions, scale,
                       T, NH, blockIdx.x, blockIdx.y, gridDim.y, q, kept);
}

// ---- the likeliest token ----

// Numbers as unsigned ones of the same order, of so many bits.
constexpr int KEY_BITS = 8 * sizeof(real);
__device__ unsigned key_of(float x) {
    unsigned bits = __float_as_uint(x);
    return (bits >> 31 ? ~bits : bits | 0x80000000) >> (32 - KEY_BITS);
}
// A logit, and below it its index, from behind: the largest is the first of the largest logits.
__device__ Total candidate(unsigned i, float x) { return (Total)key_of(x) << 32 | ~i; }
__device__ Total warp_most(Total x) {
    for (int distance = 16; distance > 0; distance /= 2)
        x = max(x, __shfl_xor_sync(FULL_WARP, x, distance));
    return x;
}

// A sequence's next token stands at the next position; drawn (steps,stride) lists the tokens.
__device__ void draw(int* tokens, int* positions, int* drawn, int* at, int b, int stride,
                     int token) {
    tokens[b] = token;
    positions[b]++;
    drawn[at[b] * stride + b] = token;
    at[b]++;
}

// ---- all layers for at most four rows, in one kernel ----

// What token_pass reads and writes: kv_cache.py has the same names. Tensors that each layer has are
// stacks (L,..). H and activation are the MLP's; keys and values (L,rows,NKV,T,HS) begin at the
// first of the B rows. drawn is null unless the next tokens are drawn: see draw_tokens, which has
// tokens, positions, drawn and at, too.
struct TokenPass {
    const real *wte, *wpe, *ln1w, *ln1b, *qkvw, *qkvb, *attprojw, *attprojb, *ln2w, *ln2b, *fcw;
    const real *fcb, *fcprojw, *fcprojb, *lnfw, *lnfb, *head;
    const float* rope;
    int *tokens, *positions, *drawn, *at;
    real *logits, *keys, *values;
    float* parts;
    int* arrived;
    unsigned long long *words, *ended;
    int B, L, C, H, NH, T, V, Vp, rows, activation;
    float eps, scale;
};

constexpr int THREADS = 512;  // of token_pass
constexpr int AHEAD = 16;  // 16 bytes that each of them has on their way: kv_cache.py's
constexpr int PHASES = 5;  // of a layer: QKV to FCPROJ
constexpr int HINTS = 128;  // threads of a block that ask L2 for what will be read
constexpr int PASSES = 64;  // of a launch, at most: kv_cache.py's

// A linear layer of the pass: numbers (B,OC) from (B,C), or from their norm.
struct Product {
    const real *weight, *bias, *normw, *normb;
    int activation, C, OC;
};
constexpr int PRODUCT = 48;  // its bytes: kv_cache.py's
static_assert(sizeof(Product) == PRODUCT);

enum Part { EMBED, QKV, ATTENTION, ATTPROJ, FC, FCPROJ, HEAD };
// Phase `number` of a pass is a part of layer l. It multiplies with product i, or it embeds or
// attends, and the next phase multiplies with that.
struct Phase {
    int number, l, i;
    Part part;
    __device__ Phase(const TokenPass& p, int number)
        : number(number), l((number - 1) / PHASES) {  // 0 for the embedding
        part = number == 0 ? EMBED : l == p.L ? HEAD : Part(QKV + (number - 1) % PHASES);
        i = 4 * l + (part == HEAD ? 0 : (part > QKV) + (part > ATTPROJ) + (part > FC));
    }
    __device__ bool multiplies() const { return part != EMBED && part != ATTENTION; }
    // The phase that wrote the stream to which this one adds, or -1 if it adds to nothing.
    __device__ int stream_from() const {
        if (part == ATTPROJ) return number - 3;  // the last layer's fcproj, or the embedding
        if (part == FCPROJ) return number - 2;   // attproj
        return -1;
    }
};

// Where words begin: of the stream and attention's output (B,C), the MLP's hidden channels (B,H),
// qkv (B,NH+2NKV,HS), and the candidates of blocks (blocks,B,2).
struct Words {
    const TokenPass& p;
    __device__ Total* stream() const { return p.words; }
    __device__ Total* atty() const { return p.words + p.B * p.C; }
    __device__ Total* hidden() const { return p.words + p.B * 2 * p.C; }
    __device__ Total* qkv() const { return p.words + p.B * (2 * p.C + p.H); }
    __device__ Total* candidates() const {
        return qkv() + p.B * (p.NH + 2 * (p.NH / GROUP)) * HS;
    }
};

// Vectors that may be null stay null.
__device__ const real* of_layer(const real* stack, int l, int size) {
    return stack ? stack + (size_t)l * size : nullptr;
}

// Product i of a pass: qkv, attproj, fc and fcproj of each layer, then the head.
__device__ Product product_of(const TokenPass& p, int i) {
    int l = i / 4, C = p.C, H = p.H, QKV = (p.NH + 2 * (p.NH / GROUP)) * HS;
    int hidden = (p.activation == SWIGLU ? 2 : 1) * H;  // rows of fcw
    if (l == p.L) return {p.head, nullptr, p.lnfw, p.lnfb, 0, C, p.Vp};
    if (i % 4 == 0)
        return {p.qkvw + (size_t)l * QKV * C, of_layer(p.qkvb, l, QKV), p.ln1w + l * C,
                of_layer(p.ln1b, l, C), 0, C, QKV};
    if (i % 4 == 1)
        return {p.attprojw + (size_t)l * C * C, of_layer(p.attprojb, l, C), nullptr, nullptr, 0, C,
                C};
    if (i % 4 == 2)
        return {p.fcw + (size_t)l * hidden * C, of_layer(p.fcb, l, H), p.ln2w + l * C,
                of_layer(p.ln2b, l, C), p.activation, C, H};
    return {p.fcprojw + (size_t)l * C * H, of_layer(p.fcprojb, l, C), nullptr, nullptr, 0, H, C};
}

// The rows of all products are dealt out to the warps in turn, neighbours to different blocks, so
// that each block reads as much as the others. This is the first of a warp's rows of product i; the
// next are as many rows further as there are warps.
__device__ int first_row(const TokenPass& p, int i) {
    int C = p.C, H = p.H, QKV = (p.NH + 2 * (p.NH / GROUP)) * HS, part = i % 4;
    int before = i / 4 * (QKV + 2 * C + H) + (part > 0) * QKV + (part > 1) * C + (part > 2) * H;
    int warps = gridDim.x * (THREADS / 32), own = threadIdx.x / 32 * gridDim.x + blockIdx.x;
    return (own - before % warps + warps) % warps;
}

// The rows of all weights that a warp multiplies, in its order, from a product on. A lane copies
// its part of them, 16 bytes at a time, to AHEAD places of its own in shared memory: so weights
// arrive all the time, also while a block waits for others, and no thread waits for another's copy.
// A slot is several places, of a row or a part of it. A phase lasts as long as the chain of its
// slowest warp's instructions, each of which waits four to six cycles for the one before: so they
// are few, and a pointer moves from row to row.
struct Weights {
    static constexpr int STEP = 32 * W;  // a place's numbers, of all lanes
    static constexpr int steps = (CHANNELS + STEP - 1) / STEP;
    static constexpr int PLACES = steps % 5 == 0 ? 5 : steps % 4 == 0 ? 4 : steps % 3 == 0 ? 3
                                  : steps < 4 ? steps : 4;
    static constexpr int SLOT = PLACES * STEP, SLOTS = AHEAD / PLACES, SUMS = 2;
    real* places;            // this lane's: one every W * THREADS numbers
    const Product* list;     // of all products
    int i, count;            // the one that is copied, of how many
    int passes;              // that begin with the present one
    int slot = 0;            // what is used next, and then copied to
    int used = 0;            // how many have been, from there on
    const real* from;        // this lane's next 16 bytes
    int row, left;           // copied now; numbers of it that are left
    bool gate = false;       // whether the row is one of SwiGLU's gates

    __device__ Weights(real* places, const Product* list, int i, int count, int passes,
                       int row)
        : places(places + W * threadIdx.x), list(list), i(i), count(count),
          passes(passes), row(row) {
        find_row();
        used = SLOTS;
        refill();
    }
    // Go to `row`, which may be one of a later product.
    __device__ void find_row() {
        while (i < count && row >= list[i].OC) {
            row -= list[i++].OC;
            if (i == count && --passes > 0) i = 0;
        }
        if (i < count) open(row);
    }
    __device__ void open(int row) {
        left = list[i].C;
        from = list[i].weight + (size_t)row * left + W * (threadIdx.x % 32);
    }
    __device__ real* place(int i) { return places + (slot * PLACES + i) * (W * THREADS); }
    // Start the copies to the slots that have been used, and go to the next.
    __device__ void refill() {
#pragma unroll 1
        for (; used > 0; used--) {
            if (i < count) {
#pragma unroll
                for (int k = 0; k < PLACES; k++)
                    copy16(place(k), from + k * STEP, k * STEP + W * (threadIdx.x % 32) < left);
                from += SLOT, left -= SLOT;
                if (left <= 0) next_row();
            }
            copies_end();  // also without a copy, so that there are SLOTS groups
            slot = following(slot);
        }
    }
    __device__ static int following(int slot) { return slot + 1 < SLOTS ? slot + 1 : 0; }
    __device__ void next_row() {
        gate = list[i].activation == SWIGLU && !gate;
        if (gate) open(list[i].OC + row);
        else {
            row += gridDim.x * (THREADS / 32);
            if (row < list[i].OC) open(row);
            else find_row();
        }
    }
    // Add the products of M slots of each of N rows, which have `left` more numbers, with R rows.
    // There are two sums, which are short chains. Without branches it is several times faster.
    template <int N, int M, int R>
    __device__ void add_slots(Pack<R> (*sums)[SUMS], const float* x, int left, int C) {
        wait_for_copies<SLOTS - N * M>();
        const real* at[N * M];  // the slots
        for (int k = 0, next = slot; k < N * M; k++, next = following(next))
            at[k] = places + next * PLACES * (W * THREADS);
        auto add = [&](int m, int place, int sum) {
            for (int n = 0; n < N; n++) {
                Pack<W> w = load<W>(at[n * M + m] + place * (W * THREADS));
                for (int r = 0; r < R; r++) {
                    Pack<W> values = load<W>(x + r * C + m * SLOT + place * STEP);
                    for (int j = 0; j < W; j++) sums[n][sum][r] += w[j] * values[j];
                }
            }
        };
        if (left >= M * SLOT) {
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int i = 0; i < PLACES; i++) add(m, i, i % SUMS);
        } else {
#pragma unroll 1
            for (int i = 0; i * STEP + W * (threadIdx.x % 32) < left; i++) add(0, i, 0);
        }
        used = N * M;
    }
    // The products of the next n <= N rows with R rows (R,C); n may be 2 if rows fill a slot. The
    // last slots are left for a refill when the products are on their way to other blocks.
    template <int N, int R>
    __device__ Pack<N * R> products(const float* rows, int C, int n) {
        constexpr int M = N == 2 && SLOTS >= 4 ? 4 : 1;  // GPT-2's hidden channels fill four
        Pack<R> sums[N][SUMS] = {};
        Pack<N * R> sum;
        const float* x = rows + W * (threadIdx.x % 32);
        refill();
        if (N == 2 && n == 2) add_slots<N, 1>(sums, x, C, C);
        else if (C == M * SLOT) add_slots<1, M>(sums, x, C, C);
        else
#pragma unroll 1
            for (int left = C; left > 0; left -= SLOT, x += SLOT) {
                add_slots<1, 1>(sums, x, left, C);
                if (left > SLOT) refill();
            }
#pragma unroll
        for (int k = 0; k < N * R; k++)
            sum[k] = warp_sum(sums[k / R][0][k % R] + sums[k / R][1][k % R]);
        return sum;
    }
};

// A number that a phase hands to the next is a word: fp32 and a date, which grows from phase to
// phase and from launch to launch. It has 31 bits, behind a 1, since words begin as zeros. So dates
// begin anew after 138,000 launches with 48 layers, when hardly a word is left that is so old. They
// arrive together, so a block reads the words that it needs until they have the date. If blocks
// counted who has come instead, they would wait for a fence, for the count, and only then for the
// numbers. A phase that is launched alone finds all in place.
struct Dates {
    unsigned first;  // of the phases of this pass
    unsigned mask;   // 0: do not look
    __device__ unsigned of(int phase) const { return first + phase | 1u << 31; }
    __device__ bool late(Total word, int phase) const {
        return ((unsigned)(word >> 32) ^ of(phase)) & mask;
    }
    __device__ void hand(Total* to, float x, int phase) const {
        send(to, (Total)of(phase) << 32 | __float_as_uint(x));
    }
};
__device__ float number_of(Total word) { return __uint_as_float((unsigned)word); }

// A number that a phase has handed out.
__device__ float take(const Total* from, const Dates& dates, int phase) {
    Total word;
    while (dates.late(word = receive(from), phase)) wait_for_block();
    return number_of(word);
}
// Neighbours, for `count` values of k: f(k) is where. All are asked for before the first is needed.
template <int count, class F>
__device__ void take_pairs(Pack<2>* to, const Dates& dates, int phase, F f) {
    bool late;
    do {
        late = false;
#pragma unroll
        for (int k = 0; k < count; k++)
            if (const Total* from = f(k)) {
                Total x, y;
                receive(from, x, y);
                to[k] = {number_of(x), number_of(y)};
                late |= dates.late(x, phase) || dates.late(y, phase);
            }
        if (late) wait_for_block();
    } while (late);
}

// rows, in shared memory, are `count` numbers.
__device__ void take_rows(float* rows, const Total* from, const Dates& dates, int phase,
                          int count) {
    constexpr int loads = 4;
    for (int start = 2 * threadIdx.x; start < count; start += loads * 2 * THREADS) {
        Pack<2> v[loads];
        auto at = [&](int k) { return start + k * 2 * THREADS; };
        take_pairs<loads>(v, dates, phase,
                          [&](int k) { return at(k) < count ? from + at(k) : nullptr; });
#pragma unroll
        for (int k = 0; k < loads; k++)
            if (at(k) < count) store(rows + at(k), v[k]);
    }
    __syncthreads();
}

// rows (B,C), in shared memory, with B <= R: the norm of x (B,C), as bring_rows makes it, but for
// the order of sums. A warp has 64 columns of a row, two a lane, which stay in registers. The sums
// of 64 are added up in order: so a row has the same bits among others as alone.
template <int R>
__device__ void norm_rows(float* rows, const Total* x, const Dates& dates, int phase,
                          const real* __restrict__ normw, const real* __restrict__ normb,
                          float eps, int B) {
    constexpr int C = CHANNELS, parts = (C + 63) / 64, warps = THREADS / 32;
    constexpr int tasks = (R * parts + warps - 1) / warps;  // of a warp
    constexpr int at_once = R == 1 ? parts : 4;  // as registers hold
    __shared__ float sums[2][R * parts];
    int warp = threadIdx.x / 32, column = 2 * (threadIdx.x % 32);
    Pack<2> v[tasks] = {};
    struct Two { Stored<2, real> weight, bias; } stored[tasks] = {};  // on their way
    auto each = [&](auto f) {  // f(task, its sums' place, its row, its column)
#pragma unroll
        for (int k = 0; k < tasks; k++) {
            int part = warp + k * warps, row = part / parts, c = part % parts * 64 + column;
            if (part < B * parts) f(k, part, row, c);
        }
    };
    auto of_row = [&](const float* sums, int row) {
        float sum = 0.0f;
#pragma unroll(at_once)
        for (int i = 0; i < parts; i++) sum += sums[row * parts + i];
        return sum / C;
    };
    each([&](int k, int part, int row, int c) {
        if (c >= C) return;
        stored[k].weight = *reinterpret_cast<const Stored<2, real>*>(normw + c);
        if (normb) stored[k].bias = *reinterpret_cast<const Stored<2, real>*>(normb + c);
    });
    take_pairs<tasks>(v, dates, phase, [&](int k) -> const Total* {
        int part = warp + k * warps, c = part % parts * 64 + column;
        return part < B * parts && c < C ? x + part / parts * C + c : nullptr;
    });
    if (normb) {
        each([&](int k, int part, int row, int c) {
            float sum = warp_sum(v[k][0] + v[k][1]);
            if (column == 0) sums[0][part] = sum;
        });
        __syncthreads();
        each([&](int k, int part, int row, int c) {
            float mean = of_row(sums[0], row);
            for (int j = 0; j < 2; j++) v[k][j] -= mean;
        });
    }
    each([&](int k, int part, int row, int c) {
        float sum = warp_sum(c < C ? v[k][0] * v[k][0] + v[k][1] * v[k][1] : 0.0f);
        if (column == 0) sums[1][part] = sum;
    });
    __syncthreads();
    each([&](int k, int part, int row, int c) {
        float rstd = 1.0f / sqrtf(of_row(sums[1], row) + eps);
        Pack<2> w = load<2>(stored[k].weight.x), shift = load<2>(stored[k].bias.x);
        for (int j = 0; j < 2; j++) {
            real rounded;
            from_float(rounded, v[k][j] * rstd * w[j] + shift[j]);
            v[k][j] = to_float(rounded);
        }
        if (c < C) store(rows + row * C + c, v[k]);
    });
    __syncthreads();
}

// Where a product's numbers go: words that the next phase reads; or, unless null, logits.
struct ToWords {
    const Dates& dates;
    int now, old;  // this phase; and, unless negative, the one that wrote what numbers are added to
    Total* words;
    real* logits;
    int V;
    Total* best;  // of this warp and row, as likeliest has it

    __device__ Total before(size_t at) { return old < 0 ? 0 : receive(words + at); }
    __device__ void put(size_t at, int o, float y, Total before) {
        if (old >= 0) {
            for (; dates.late(before, old); before = receive(words + at)) wait_for_block();
            dates.hand(words + at, number_of(before) + y, now);
            return;
        }
        real rounded;
        from_float(rounded, y);
        if (!logits) {
            dates.hand(words + at, to_float(rounded), now);
            return;
        }
        logits[at] = rounded;
        Total found = candidate(o, to_float(rounded));
        if (o < V && found > *best) *best = found;
    }
};

// Ask L2 for `size` numbers, unless null: a thread for 128 bytes, if there are enough.
__device__ void prefetch_all(const real* numbers, int size, int thread) {
    int i = thread * (128 / (int)sizeof(real));
    if (numbers && i < size) prefetch(numbers + i);
}

// The stream's words = the embeddings of B tokens at their positions.
__device__ void embed(const TokenPass& p, const Dates& dates, Total* stream, const int* tokens,
                      const int* positions) {
    int packs = p.C / 4;
    for (int k = blockIdx.x * THREADS + threadIdx.x; k < p.B * packs; k += gridDim.x * THREADS) {
        int row = k / packs, c = 4 * (k % packs);
        Pack<4> sum = load<4>(p.wte + (size_t)tokens[row] * p.C + c);
        if (p.wpe) sum = sum + load<4>(p.wpe + (size_t)positions[row] * p.C + c);
        for (int j = 0; j < 4; j++) dates.hand(stream + 4 * k + j, sum[j], 0);
    }
}

// Ask L2 for what the next two products read besides weights, and for the keys and values of a
// layer, unless null. The last warps do so while others wait for what they normalise.
__device__ void give_hints(const TokenPass& p, const Product* products, int count, int i,
                           const real* keys, const real* values, const int* positions) {
    int thread = blockIdx.x * HINTS + threadIdx.x - (THREADS - HINTS), NKV = p.NH / GROUP;
    for (int k = i + 1; k <= i + 2; k++) {
        const Product& next = products[k % count];
        prefetch_all(next.normw, next.C, thread);
        prefetch_all(next.normb, next.C, thread);
        prefetch_all(next.bias, next.OC, thread);
    }
    for (int b = 0; keys && b < p.B; b++) {
        constexpr int line = 128 / sizeof(real);
        int lines = ((positions[b] + 1) * HS + line - 1) / line;  // of a head
        for (int k = thread; k < NKV * lines; k += gridDim.x * HINTS) {
            size_t head = b * NKV + k / lines;
            size_t at = head * p.T * HS + k % lines * line;
            prefetch(keys + at);
            prefetch(values + at);
        }
    }
}

// The likeliest next tokens: a block tells the others its candidates, the most of best (WARPS,R)
// in each row, and takes the most of all blocks'. tokens and positions, in shared memory, go on.
template <int R>
__device__ void draw_likeliest(const TokenPass& p, const Dates& dates, Total* candidates,
                               const Total* best, int size, int* tokens, int* positions) {
    constexpr int AFTER = -1;  // a date behind the last pass' and before this one's
    if (int b = threadIdx.x; b < p.B) {  // of this block
        Total most = 0;
        for (int i = b; i < size; i += R) most = max(most, best[i]);
        Total* to = candidates + 2 * (blockIdx.x * p.B + b);
        dates.hand(to, __uint_as_float(most >> 32), AFTER);
        dates.hand(to + 1, __uint_as_float(most), AFTER);
    }
    __syncthreads();  // for a CPU
    if (int b = threadIdx.x / 32, lane = threadIdx.x % 32; b < p.B) {  // of all
        constexpr int loads = 4;
        Total most = 0;
        for (int from = lane; from < gridDim.x; from += 32 * loads) {
            Pack<2> found[loads] = {};
            take_pairs<loads>(found, dates, AFTER, [&](int k) {
                int block = from + 32 * k;
                return block < gridDim.x ? candidates + 2 * (block * p.B + b) : nullptr;
            });
            for (Pack<2> x : found)
                most = max(most, (Total)__float_as_uint(x[0]) << 32 | __float_as_uint(x[1]));
        }
        most = warp_most(most);
        if (lane == 0) {
            tokens[b] = ~(unsigned)most;
            positions[b]++;
            if (blockIdx.x == 0) draw(p.tokens, p.positions, p.drawn, p.at, b, p.rows, tokens[b]);
        }
    }
}

// A token's pass for B <= R sequences, from tokens and positions (B) to logits (B,Vp): all that
// token_embedding, token_linear and token_attention do. Phase 0 embeds; a layer has a phase for
// qkv, attention, attproj, fc and fcproj; the last is the head. Bound by memory in the head, else
// by latency: weights are read without a break, because they do not depend on what the blocks wait
// for, and what else a phase reads is brought to L2 a phase ahead.
//
// Phases from..to-1 run: all, all but the head, or one. If the likeliest tokens are drawn, it makes
// several passes, so that the weights of the next one are on their way, too: each block tells the
// others its candidates, and each chooses. All blocks must be on the GPU at once, since they wait
// for each other: it has room for them, and a cooperative launch is an error if not. On a CPU there
// may be only one if there are several phases. No block is so far ahead that it overwrites what
// another still reads: each number of a phase depends on all of those before, and each block has
// rows of a layer's weights. But a block without a row of a product does not wait for what it
// multiplies, which may be overwritten then.
//
// ring is shared memory: places for weights on their way, the list of products, and behind it the
// rows that a product reads, or attention's numbers. Items: blocks, at most as many as the GPU has
// multiprocessors.
template <int R>
__device__ void run_phases(const TokenPass& p, int from, int to, int passes, float* ring) {
    Product* products = (Product*)(ring + AHEAD * THREADS * 4);  // all, which cost a while to find
    int count = 4 * p.L + 1;
    float* rows = (float*)(products + count);
    for (int i = threadIdx.x; i < count; i += THREADS) products[i] = product_of(p, i);
    __shared__ int tokens[R], positions[R];
    if (threadIdx.x < p.B) {
        tokens[threadIdx.x] = p.tokens[threadIdx.x];
        positions[threadIdx.x] = p.positions[threadIdx.x];
    }
    __syncthreads();
    Words words{p};
    int NKV = p.NH / GROUP, phases = 2 + PHASES * p.L, i = Phase(p, from).i;
    int first = first_row(p, i);  // of this warp, of the next product
    Weights weights((real*)ring, products, i, count, passes, first);
    // Each block counts its end, so the quotient stays the same until all have ended.
    unsigned launches = receive(p.ended) / gridDim.x;
    Dates dates{launches * PASSES * (phases + 1) + 1, to - from > 1 ? ~0u : 0};
    constexpr int N = R == 1 && CHANNELS == Weights::SLOT ? 2 : 1;  // rows at once, in registers
    constexpr int WARPS = THREADS / 32;
    __shared__ Total best[WARPS][N * R];  // candidates for the next tokens, by lanes
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    ToWords out{dates, 0, 0, nullptr, nullptr, p.V, best[warp] + lane};
    for (; passes > 0; passes--) {
        for (int number = from; number < to; number++) {
            Phase phase(p, number);
            const Product& now = products[phase.i];
            size_t layer = (size_t)phase.l * p.rows * NKV * p.T * HS;  // where its keys begin
            // shared memory is free from here on
            bool any = __syncthreads_or(phase.multiplies() && first < now.OC);
            if (phase.part == EMBED) {
                if (lane < N * R) *out.best = 0;
                embed(p, dates, words.stream(), tokens, positions);
            } else if (phase.part == ATTENTION) {
                int heads = p.B * NKV, chunks = (p.T + CHUNK - 1) / CHUNK;
                // In each pass the same block has a chunk of a head: so it may read keys that it
                // stored in an earlier one without asking others.
                for (int k = blockIdx.x; k < heads * chunks; k += gridDim.x) {
                    auto write = [&](size_t i, float y) {
                        real rounded;
                        from_float(rounded, y);
                        dates.hand(words.atty() + i, to_float(rounded), number);
                    };
                    auto read = [&](size_t i) { return take(words.qkv() + i, dates, number - 1); };
                    attend<THREADS, R == 1>(write, p.keys + layer, p.values + layer, p.parts,
                                            p.arrived, read, p.rope, positions, p.scale, p.T, p.NH,
                                            k % heads, k / heads, chunks, rows);
                    __syncthreads();  // the next reuses shared memory
                }
            } else if (any) {
                out.now = number, out.old = phase.stream_from();
                out.words = phase.part == QKV  ? words.qkv()
                            : phase.part == FC ? words.hidden()
                                               : words.stream();
                out.logits = phase.part == HEAD ? p.logits : nullptr;
                if (now.normw && threadIdx.x >= THREADS - HINTS)
                    give_hints(p, products, count, phase.i,
                               phase.part == QKV ? p.keys + layer : nullptr, p.values + layer,
                               positions);
                if (now.normw)
                    norm_rows<R>(rows, words.stream(), dates, number - 1, now.normw, now.normb, p.eps,
                                 p.B);
                else
                    take_rows(rows, phase.part == ATTPROJ ? words.atty() : words.hidden(), dates,
                              number - 1, p.B * now.C);
                bool pairs = N == 2 && now.C == CHANNELS && now.activation != SWIGLU;
                first = linear<R>(out, now.bias, now.activation, p.B, now.OC, first,
                                  gridDim.x * WARPS, pairs, [&](int, int n) {
                                      return weights.products<N, R>(rows, now.C, n);
                                  });
                weights.refill();
            }
            if (phase.multiplies()) first -= now.OC;
        }
        dates.first += phases + 1;
        if (!p.drawn) continue;
        __syncthreads();
        draw_likeliest<R>(p, dates, words.candidates(), best[0], WARPS * N * R, tokens, positions);
    }
    if (threadIdx.x == 0) atomicAdd(p.ended, Total(1));
}

// Turing has too little shared memory for it.
BLOCK(512, 1)
extern "C" __global__ void __launch_bounds__(512, 1) token_pass(TokenPass p, int from, int to,
                                                                int passes) {
    DYNAMIC_SHARED(float, ring);
    if (!TURING) run_phases<4>(p, from, to, passes, ring);
}

// The same for B = 1.
BLOCK(512, 1)
extern "C" __global__ void __launch_bounds__(512, 1) token_pass_alone(TokenPass p, int from, int to,
                                                                      int passes) {
    DYNAMIC_SHARED(float, ring);
    if (!TURING) run_phases<1>(p, from, to, passes, ring);
}

// keys and values (NKV,T,HS) of tokens 0..N-1 = those of qkv (N,NH+2NKV,HS), which a full pass of
// one sequence has left. Items: N*NKV*HS numbers.
BLOCK(256, threads)
extern "C" __global__ void keep_keys(real* __restrict__ keys, real* __restrict__ values,
                                     const real* __restrict__ qkv, int N, int T, int NH) {
    int NKV = NH / GROUP, i = blockIdx.x * blockDim.x + threadIdx.x, width = NKV * HS;
    if (i >= N * width) return;
    int t = i / width, head = i % width / HS, c = i % HS;
    const real* k = qkv + (size_t)t * (NH + 2 * NKV) * HS + (size_t)NH * HS + i % width;
    size_t at = ((size_t)head * T + t) * HS + c;
    keys[at] = k[0];
    values[at] = k[width];
}

// ---- the next token ----

// A row of V logits.
struct Logits {
    const real* x;
    int V;
    bool aligned;  // to 16 bytes

    // f(i, x[i]) for from <= i < to, by some threads. from is a multiple of W.
    template <class F>
    __device__ void each(int from, int to, int thread, int threads, F f) const {
        int packs = aligned ? (to - from) / W : 0;
        for (int k = thread; k < packs; k += threads) {
            Pack<W> pack = load<W>(x + from + W * k);
            for (int j = 0; j < W; j++) f(from + W * k + j, pack[j]);
        }
        for (int i = from + W * packs + thread; i < to; i += threads) f(i, to_float(x[i]));
    }
};

// The sum of f(i, x[i]) over all logits, in all threads.
template <class F>
__device__ Total total(const Logits& logits, F f) {
    __shared__ Total of_warp[32];
    Total sum = 0;
    logits.each(0, logits.V, threadIdx.x, blockDim.x, [&](int i, float x) { sum += f(i, x); });
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0);
    __syncthreads();  // from here on of_warp may be written again
    return sum;
}

// The first i at which logits are largest, in all threads.
__device__ int likeliest(const Logits& logits) {
    __shared__ Total of_warp[32];
    Total best = 0;
    logits.each(0, logits.V, threadIdx.x, blockDim.x,
                [&](int i, float x) { best = max(best, candidate(i, x)); });
    best = warp_most(best);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) best = max(best, of_warp[warp]);
    return ~(unsigned)best;
}

// The first lane at which before plus the sum of x up to this lane exceeds a target, or 32. before
// becomes the sum of all in front of that lane.
__device__ int lane_beyond(Total target, Total x, Total& before) {
    Total sum = x;  // of the lanes up to this one
    for (int distance = 1; distance < 32; distance *= 2) {
        Total other = __shfl_up_sync(FULL_WARP, sum, distance);
        if (threadIdx.x % 32 >= distance) sum += other;
    }
    unsigned beyond = __ballot_sync(FULL_WARP, before + sum > target);
    int lane = beyond ? __ffs(beyond) - 1 : 32;
    before += __shfl_sync(FULL_WARP, beyond ? sum - x : sum, min(lane, 31));
    return lane;
}

// The first i at which f(0, x[0]) + .. + f(i, x[i]) exceeds a target; V - 1 if none does. A thread
// adds up neighbours; then one warp searches the warps, the threads of a warp, and numbers.
template <class F>
__device__ int first_beyond(Total target, const Logits& logits, F f) {
    __shared__ Total of_thread[1024], of_warp[32];
    __shared__ int found;
    int threads = blockDim.x, lane = threadIdx.x % 32, V = logits.V;
    int each = ((V + threads - 1) / threads + W - 1) / W * W;
    int from = min(each * (int)threadIdx.x, V);
    Total sum = 0;
    logits.each(from, min(from + each, V), 0, 1, [&](int i, float x) { sum += f(i, x); });
    of_thread[threadIdx.x] = sum;
    sum = warp_sum(sum);
    if (lane == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        Total before = 0;
        int warp = lane_beyond(target, lane < threads / 32 ? of_warp[lane] : 0, before), i = V - 1;
        if (warp < 32) {
            warp *= 32;
            int thread = warp + lane_beyond(target, of_thread[warp + lane], before), at = 32;
            for (from = each * thread; at == 32; from += 32) {
                i = from + lane;
                at = lane_beyond(target, i < V ? f(i, to_float(logits.x[i])) : 0, before);
                i = from + at;
            }
        }
        if (lane == 0) found = i;
    }
    __syncthreads();
    int i = found;
    __syncthreads();
    return i;
}

// For each of some rows of logits (B,Vp), the token that a coin in [0,1) draws: see sample.py, of
// which this is choose. It becomes the row's next token, at the next position, and drawn[at], where
// coin at of coins is used; both are (steps,stride). Weights are whole numbers, 2^40 times
// e^((x - max) / temperature): so their sums are exact, in any order. The k likeliest words, and
// the likeliest that have a share p, are those above a logit that is found bit by bit, and the
// first of those that equal it. One block has a row, which stays in L2. Items: rows.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) draw_tokens(
    int* tokens, int* positions, int* drawn, int* at, const float* __restrict__ coins,
    const real* __restrict__ logits, float temperature, int top_k, float top_p, int V, int Vp,
    int stride) {
    int b = blockIdx.x;
    Logits row{logits + (size_t)b * Vp, V, Vp % W == 0};
    int token = likeliest(row);
    if (temperature != 0.0f) {
        float top = to_float(row.x[token]);
        unsigned least = 0;  // words above this are kept, and the first that equal it
        int last = V;
        auto weight = [&](int i, float x) -> Total {
            if (key_of(x) < least || key_of(x) == least && i > last) return 0;
            return expf((x - top) / temperature) * 1099511627776.0f;
        };
        // Keep the fewest words, the likeliest first, of which f adds up to `wanted`.
        auto keep = [&](Total wanted, auto f) {
            unsigned found = 0;
            for (int bit = KEY_BITS - 1; bit >= 0; bit--) {
                unsigned tried = found | 1u << bit;
                Total sum = total(row, [&](int i, float x) -> Total {
                    return key_of(x) >= tried ? f(i, x) : 0;
                });
                if (sum >= wanted) found = tried;
            }
            Total above = total(row, [&](int i, float x) -> Total {
                return key_of(x) > found ? f(i, x) : 0;
            });
            int end = first_beyond(wanted - above - 1, row, [&](int i, float x) -> Total {
                return key_of(x) == found ? f(i, x) : 0;
            });
            least = found, last = end;
        };
        if (0 < top_k && top_k < V) keep(top_k, [](int, float) -> Total { return 1; });
        if (top_p < 1.0f) {
            Total all = total(row, weight), wanted = ceil((double)top_p * all);
            keep(wanted > 0 ? wanted : 1, weight);
        }
        Total target = (double)coins[at[b] * stride + b] * total(row, weight);
        token = first_beyond(target, row, weight);
    }
    if (threadIdx.x == 0) draw(tokens, positions, drawn, at, b, stride, token);
}

}  // namespace kv_cache
