/*
The pass of one token per sequence, whose keys and values are kept: see kv_cache.py. B sequences
have a row each, so products with a weight read all of the weight for a few rows: they are bound by
memory, and so is attention, which reads all kept keys and values for one query. Compiled after
kernels.cu.
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
__device__ void bring_rows(float* rows, const real* __restrict__ inp, const float* x,
                           const real* __restrict__ normw, const real* __restrict__ normb,
                           float eps, int B, int C) {
    for (int i = W * threadIdx.x; !x && i < B * C; i += W * blockDim.x)
        store(rows + i, load<W>(inp + i));
    // Two warps have a row: so all rows are made at once, and each as it would be alone.
    int row = threadIdx.x / 64, first = 4 * (threadIdx.x % 64);
    if (x) {
        constexpr int step = 4 * 64, loads = 4;  // columns of two warps; loads under way at once
        __shared__ float of_warp[2][8];
        float *to = rows + row * C, sum = 0.0f, squares = 0.0f;
        Pack<4> w = {}, shift = {};  // for the first four columns, before they are needed
        if (row < B && first < C) w = load<4>(normw + first);
        if (row < B && first < C && normb) shift = load<4>(normb + first);
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
        auto of_row = [&](float part, float* parts) {  // the sum over both warps
            part = warp_sum(part);
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
            __syncthreads();
            return parts[2 * row] + parts[2 * row + 1];
        };
        float mean = normb ? of_row(sum, of_warp[0]) / C : 0.0f;
        for (int c = first; row < B && c < C; c += step)
            for (int j = 0; j < 4; j++) squares += (to[c + j] - mean) * (to[c + j] - mean);
        float rstd = 1.0f / sqrtf(of_row(squares, of_warp[1]) / C + eps);
        for (int c = first; row < B && c < C; c += step) {
            if (c > first) w = load<4>(normw + c);
            if (c > first && normb) shift = load<4>(normb + c);
            for (int j = 0; j < 4; j++) {
                real rounded;
                from_float(rounded, (to[c + j] - mean) * rstd * w[j] + shift[j]);
                to[c + j] = to_float(rounded);
            }
        }
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

template <int R>
__device__ void linear(real* out, float* stream, const float* rows, const real* __restrict__ weight,
                       const real* __restrict__ bias, int activation, int C, int OC) {
    int warps = blockDim.x / 32, lane = threadIdx.x % 32;  // lane r ends row r
    for (int o = blockIdx.x * warps + threadIdx.x / 32; o < OC; o += gridDim.x * warps) {
        size_t at = (size_t)lane * OC + o;
        float shift = 0.0f, before = 0.0f;  // loaded before they are needed
        if (lane < R && bias) shift = to_float(bias[o]);
        if (lane < R && stream) before = stream[at];
        Pack<R> sum = products<R>(weight + (size_t)o * C, rows, C), gates = {};
        if (activation == SWIGLU) gates = products<R>(weight + (size_t)(OC + o) * C, rows, C);
        if (lane >= R) continue;
        float y = sum[0], gate = gates[0];
        for (int r = 1; r < R; r++)
            if (lane == r) y = sum[r], gate = gates[r];
        y += shift;
        if (activation == GELU) y = gelu(y);
        if (activation == SWIGLU) y *= gate / (1.0f + exponential(-gate));
        if (stream) stream[at] = before + y;
        else from_float(out[at], y);
    }
}

// For B <= 4 rows: y (B,OC) = rows (B,C) weight' + bias (OC), the latter unless null. The rows are
// inp, or norm(x) unless x is null. Then stream (B,OC) += y, unless null; else out (B,OC) =
// y, GELU(y) with activation 1; with 2, y * silu(gate), and weight (2*OC,C) has rows for y and then
// for the gate. A warp has a row of the weight at a time, 16 bytes a lane, and the B rows are in
// shared memory: each block makes their norm anew, which costs less than a launch. Meanwhile L2 gets
// the first row of the weight of each warp. Bound by memory: the weight is read once. Items: blocks.
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
    if (B == 1) linear<1>(out, stream, rows, weight, bias, activation, C, OC);
    if (B == 2) linear<2>(out, stream, rows, weight, bias, activation, C, OC);
    if (B == 3) linear<3>(out, stream, rows, weight, bias, activation, C, OC);
    if (B == 4) linear<4>(out, stream, rows, weight, bias, activation, C, OC);
}

// ---- attention for one query a head ----

constexpr int CHUNK = 256;  // the keys of a block: kv_cache.py's
constexpr int LANES = 8;  // share a key or a value
constexpr int MEMBERS = 256 / LANES;  // keys that a block reads at once
constexpr int n = HS % W == 0 ? W : HS % 2 == 0 ? 2 : 1;  // numbers that a lane loads at once
constexpr int PACKS = (HS + n * LANES - 1) / (n * LANES);  // how often
constexpr int AT_ONCE = GROUP < 4 ? GROUP : 4;  // heads of queries whose output is in registers

// Number i of neighbouring heads at `head`. With `turn`, a position's row of RoPE's table, it is
// rotated together with its neighbour: see turn_pairs in llama3.cu.
__device__ float turned(const real* __restrict__ head, int i, const float* __restrict__ turn) {
    if (!turn) return to_float(head[i]);
    float x = to_float(head[i & ~1]), y = to_float(head[i | 1]);
    float cosine = turn[i % HS & ~1], sine = turn[i % HS | 1];
    return i % 2 ? x * sine + y * cosine : x * cosine - y * sine;
}

// f(c) for each pack of n channels of a head that this lane has
template <class F>
__device__ void each_pack_of_head(F f) {
#pragma unroll
    for (int p = 0; p < PACKS; p++) {
        int c = n * (threadIdx.x % LANES + LANES * p);
        if (HS % (n * LANES) == 0 || c < HS) f(p, c);
    }
}

// qkv (B,NH+2NKV,HS) has the query, key and value of a token at each sequence's position (B), where
// key and value are written to keys and values (B,NKV,T,HS); rope (T,HS), unless null, turns query
// and key. out (B,NH,HS) = weights v with weights = softmax(scale * q k'), over all keys up to the
// position; with RELU, weights = max(0, scale * q k').
//
// A block has the heads of queries that share a head of keys, and CHUNK of the keys: blocks beyond
// the position end at once. If several have keys, each leaves its sum in parts, with the largest
// score and the sum of weights; the last of them to finish adds all up, in order. arrived counts
// them: it begins as zeros and is left as zeros. Bound by memory: keys and values are read once.
// Items: B*NKV heads along x; along y the positions, up to T, that queries may have.
BLOCK(256, 1, 256)
extern "C" __global__ void __launch_bounds__(256) token_attention(
    real* __restrict__ out, real* keys, real* values, float* parts, int* arrived,
    const real* __restrict__ qkv, const float* __restrict__ rope,
    const int* __restrict__ positions, float scale, int B, int T, int NH) {
    DYNAMIC_SHARED(float, q);              // (GROUP,HS)
    float* weights = q + GROUP * HS;       // (GROUP,CHUNK); scores at first
    float* of_warp = weights + GROUP * CHUNK;  // (8,AT_ONCE,HS)
    float* tops = of_warp + 8 * AT_ONCE * HS;  // (GROUP)
    float* sums = tops + GROUP;            // (GROUP)
    int NKV = NH / GROUP, b = blockIdx.x / NKV, kv = blockIdx.x % NKV, position = positions[b];
    int first = blockIdx.y * CHUNK, count = min(CHUNK, position + 1 - first);
    if (count <= 0) return;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, member = threadIdx.x / LANES;
    const real* row = qkv + (size_t)b * (NH + 2 * NKV) * HS;
    const float* turn = rope ? rope + (size_t)position * HS : nullptr;
    size_t start = (size_t)blockIdx.x * T * HS, newest = start + (size_t)position * HS;
    for (int i = threadIdx.x; i < GROUP * HS; i += blockDim.x)
        q[i] = scale * turned(row + (size_t)kv * GROUP * HS, i, turn);
    for (int i = threadIdx.x; first + count == position + 1 && i < HS; i += blockDim.x) {
        from_float(keys[newest + i], turned(row + (size_t)(NH + kv) * HS, i, turn));
        values[newest + i] = row[(size_t)(NH + NKV + kv) * HS + i];
    }
    __syncthreads();

    const real *k = keys + start + (size_t)first * HS, *v = values + start + (size_t)first * HS;
#pragma unroll
    for (int s = member; s < CHUNK; s += MEMBERS) {
        float score[GROUP] = {};
        if (s < count)
            each_pack_of_head([&](int p, int c) {
                Pack<n> key = load<n>(k + (size_t)s * HS + c);
                for (int g = 0; g < GROUP; g++)
                    for (int j = 0; j < n; j++) score[g] += q[g * HS + c + j] * key[j];
            });
        for (int g = 0; g < GROUP; g++) {
            for (int distance = LANES / 2; distance > 0; distance /= 2)
                score[g] += __shfl_xor_sync(FULL_WARP, score[g], distance);
            if (threadIdx.x % LANES == 0) weights[g * CHUNK + s] = score[g];
        }
    }
    __syncthreads();
    for (int g = warp; g < GROUP; g += 8) {
        float *weight = weights + g * CHUNK, top = LOWEST, sum = 0.0f;
        for (int s = lane; s < count; s += 32) top = fmaxf(top, weight[s]);
        top = warp_max(top);
        for (int s = lane; s < count; s += 32) {
            weight[s] = RELU ? fmaxf(0.0f, weight[s]) : exponential(weight[s], top);
            sum += weight[s];
        }
        sum = warp_sum(sum);
        if (lane == 0) tops[g] = top, sums[g] = sum;
    }
    __syncthreads();

    int chunks = position / CHUNK + 1;
    // a head's part: HS numbers, the largest score, the sum of weights
    float* part = parts + ((size_t)blockIdx.x * gridDim.y + blockIdx.y) * GROUP * (HS + 2);
    real* result = out + ((size_t)b * NH + (size_t)kv * GROUP) * HS;  // (GROUP,HS)
    for (int from = 0; from < GROUP; from += AT_ONCE) {
        Pack<n> sum[AT_ONCE][PACKS] = {};
#pragma unroll 4
        for (int s = member; s < count; s += MEMBERS)
            each_pack_of_head([&](int p, int c) {
                Pack<n> value = load<n>(v + (size_t)s * HS + c);
                for (int g = 0; g < AT_ONCE; g++) {
                    float weight = weights[min(from + g, GROUP - 1) * CHUNK + s];
                    for (int j = 0; j < n; j++) sum[g][p][j] += weight * value[j];
                }
            });
        for (int g = 0; g < AT_ONCE; g++)  // the members of a warp; all lanes must take part
            for (int p = 0; p < PACKS; p++)
                for (int j = 0; j < n; j++)
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
            for (int w = 0; w < 8; w++) x += of_warp[w * AT_ONCE * HS + i];
            if (chunks == 1) from_float(result[from * HS + i], RELU ? x : x / sums[g]);
            else part[g * (HS + 2) + i % HS] = x;
        }
        __syncthreads();
    }
    if (chunks == 1) return;

    for (int g = threadIdx.x; g < GROUP; g += blockDim.x) {
        part[g * (HS + 2) + HS] = tops[g];
        part[g * (HS + 2) + HS + 1] = sums[g];
    }
    __threadfence();  // others see the part before they see that it is counted
    __syncthreads();
    __shared__ int last;
    if (threadIdx.x == 0) {
        last = atomicAdd(arrived + blockIdx.x, 1) == chunks - 1;
        if (last) arrived[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    const float* all = parts + (size_t)blockIdx.x * gridDim.y * GROUP * (HS + 2);
    for (int i = threadIdx.x; i < GROUP * HS; i += blockDim.x) {
        int g = i / HS;
        float top = LOWEST, sum = 0.0f, x = 0.0f;
        for (int chunk = 0; chunk < chunks; chunk++)
            top = fmaxf(top, __ldcg(all + (chunk * GROUP + g) * (HS + 2) + HS));
        for (int chunk = 0; chunk < chunks; chunk++) {
            const float* head = all + (chunk * GROUP + g) * (HS + 2);
            float factor = RELU ? 1.0f : exponential(__ldcg(head + HS), top);
            sum += factor * __ldcg(head + HS + 1);
            x += factor * __ldcg(head + i % HS);
        }
        from_float(result[i], RELU ? x : x / sum);
    }
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

using Count = unsigned long long;

// Reals as unsigned numbers of the same order, of so many bits.
constexpr int KEY_BITS = 8 * sizeof(real);
__device__ unsigned key_of(real x) {
    unsigned bits = __float_as_uint(to_float(x));
    return (bits >> 31 ? ~bits : bits | 0x80000000) >> (32 - KEY_BITS);
}

// The sum over i < V of f(i), in all threads.
template <class F>
__device__ Count total(int V, F f) {
    __shared__ Count of_warp[32];
    Count sum = 0;
    for (int i = threadIdx.x; i < V; i += blockDim.x) sum += f(i);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : 0);
    __syncthreads();  // from here on of_warp may be written again
    return sum;
}

// The first i < V at which logits x are largest, in all threads.
__device__ int likeliest(int V, const real* x) {
    __shared__ Count of_warp[32];
    Count best = 0;  // the logit, and below it the index, from behind
    auto take = [&](Count other) { best = other > best ? other : best; };
    for (unsigned i = threadIdx.x; i < V; i += blockDim.x) take((Count)key_of(x[i]) << 32 | ~i);
    for (int distance = 16; distance > 0; distance /= 2)
        take(__shfl_xor_sync(FULL_WARP, best, distance));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) take(of_warp[warp]);
    return ~(unsigned)best;
}

// The first i < V at which f(0) + .. + f(i) exceeds a target; V - 1 if none does. A thread adds up
// neighbours; then one thread walks over warps, over the threads of a warp, over numbers.
template <class F>
__device__ int first_beyond(Count target, int V, F f) {
    __shared__ Count of_thread[1024], of_warp[32];
    __shared__ int found;
    int threads = blockDim.x, each = (V + threads - 1) / threads, from = each * threadIdx.x;
    Count sum = 0;
    for (int i = from; i < min(from + each, V); i++) sum += f(i);
    of_thread[threadIdx.x] = sum;
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        int warp = 0, thread = 0, i = 0;
        Count before = 0;
        while (warp < threads / 32 - 1 && before + of_warp[warp] <= target) before += of_warp[warp++];
        for (thread = 32 * warp; thread < 32 * warp + 31; before += of_thread[thread++])
            if (before + of_thread[thread] > target) break;
        for (i = each * thread; i < V - 1; i++) {
            before += f(i);
            if (before > target) break;
        }
        found = min(i, V - 1);
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
    const real* x = logits + (size_t)b * Vp;
    int token = likeliest(V, x);
    if (temperature != 0.0f) {
        float top = to_float(x[token]);
        unsigned least = 0;  // words above this are kept, and the first that equal it
        int last = V;
        auto key = [&](int i) { return key_of(x[i]); };
        auto weight = [&](int i) -> Count {
            if (key(i) < least || key(i) == least && i > last) return 0;
            return expf((to_float(x[i]) - top) / temperature) * 1099511627776.0f;
        };
        // Keep the fewest words, the likeliest first, of which f adds up to `wanted`.
        auto keep = [&](Count wanted, auto f) {
            unsigned found = 0;
            for (int bit = KEY_BITS - 1; bit >= 0; bit--) {
                unsigned tried = found | 1u << bit;
                if (total(V, [&](int i) -> Count { return key(i) >= tried ? f(i) : 0; }) >= wanted)
                    found = tried;
            }
            Count above = total(V, [&](int i) -> Count { return key(i) > found ? f(i) : 0; });
            int end = first_beyond(wanted - above - 1, V, [&](int i) -> Count {
                return key(i) == found ? f(i) : 0;
            });
            least = found, last = end;
        };
        if (0 < top_k && top_k < V) keep(top_k, [](int) -> Count { return 1; });
        if (top_p < 1.0f) {
            Count all = total(V, weight), wanted = ceil((double)top_p * all);
            keep(wanted > 0 ? wanted : 1, weight);
        }
        Count target = (double)coins[at[b] * stride + b] * total(V, weight);
        token = first_beyond(target, V, weight);
    }
    if (threadIdx.x > 0) return;
    tokens[b] = token;
    positions[b]++;
    drawn[at[b] * stride + b] = token;
    at[b]++;
}

}  // namespace kv_cache
