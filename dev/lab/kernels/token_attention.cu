// Attention of one query for each sequence, at its position, to all keys up to it (Vaswani et al. 2017, section 3.2.1).
// qkv (B,NH+2NKV,HS) has the query, key and value of the newest token; the last two also go to keys and values
// (B,NKV,T,HS). out (B,NH,HS). Each key and value is read for one query, so memory is the bound.

namespace token_attention_of_lab {

struct Head {
    int position;
    const real *q, *new_key, *new_value;
    real *keys, *values;  // (T,HS)
};

// A head of queries, numbered b * NH + h, and its keys and values.
__device__ Head head_of(int head, real* keys, real* values, const real* qkv, const int* positions, int T, int NH,
                        int NKV) {
    int b = head / NH, h = head % NH, kv = h / (NH / NKV);
    const real* row = qkv + (size_t)b * (NH + 2 * NKV) * HS;
    size_t start = ((size_t)b * NKV + kv) * T * HS;
    return {positions[b], row + h * HS, row + (NH + kv) * HS, row + (NH + NKV + kv) * HS, keys + start, values + start};
}

// Key s. The newest is not in memory yet, or may not be, if another thread writes it.
__device__ const real* key_at(Head head, int s) {
    return s == head.position ? head.new_key : head.keys + (size_t)s * HS;
}
__device__ const real* value_at(Head head, int s) {
    return s == head.position ? head.new_value : head.values + (size_t)s * HS;
}

// One thread per query goes over all keys; when a larger score comes, the sum and the output are scaled down.
BLOCK(32, threads)
extern "C" __global__ void token_attention1(real* __restrict__ out, real* keys, real* values,
                                            const real* __restrict__ qkv, const int* __restrict__ positions,
                                            float scale, int B, int T, int NH, int NKV) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * NH) return;
    Head head = head_of(i, keys, values, qkv, positions, T, NH, NKV);
    float o[HS] = {}, top = LOWEST, sum = 0.0f;
    for (int s = 0; s <= head.position; s++) {
        const real *k = key_at(head, s), *v = value_at(head, s);
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(head.q[c]) * to_float(k[c]);
        score *= scale;
        float now = fmaxf(top, score), factor = expf(top - now), weight = expf(score - now);
        sum = sum * factor + weight, top = now;
        for (int c = 0; c < HS; c++) o[c] = o[c] * factor + weight * to_float(v[c]);
    }
    bool first = i % NH % (NH / NKV) == 0;  // of the queries that share a key
    for (int c = 0; c < HS; c++) {
        from_float(out[(size_t)i * HS + c], o[c] / sum);
        if (first) head.keys[(size_t)head.position * HS + c] = head.new_key[c];
        if (first) head.values[(size_t)head.position * HS + c] = head.new_value[c];
    }
}

// One block per query: a thread has every so many keys, and then a channel of the output. Scores are in shared memory.
BLOCK(128, 1)
extern "C" __global__ void token_attention2(real* __restrict__ out, real* keys, real* values,
                                            const real* __restrict__ qkv, const int* __restrict__ positions,
                                            float scale, int B, int T, int NH, int NKV) {
    DYNAMIC_SHARED(float, weights);
    Head head = head_of(blockIdx.x, keys, values, qkv, positions, T, NH, NKV);
    float top = LOWEST, sum = 0.0f;
    for (int s = threadIdx.x; s <= head.position; s += blockDim.x) {
        const real* k = key_at(head, s);
        float score = 0.0f;
        for (int c = 0; c < HS; c++) score += to_float(head.q[c]) * to_float(k[c]);
        weights[s] = scale * score;
        top = fmaxf(top, weights[s]);
    }
    top = block_reduce<warp_max>(top, LOWEST);
    for (int s = threadIdx.x; s <= head.position; s += blockDim.x) {
        weights[s] = expf(weights[s] - top);
        sum += weights[s];
    }
    sum = block_reduce<warp_sum>(sum, 0.0f);  // behind its barriers all weights are there
    bool first = blockIdx.x % NH % (NH / NKV) == 0;
    for (int c = threadIdx.x; c < HS; c += blockDim.x) {
        float o = 0.0f;
        for (int s = 0; s <= head.position; s++) o += weights[s] * to_float(value_at(head, s)[c]);
        from_float(out[(size_t)blockIdx.x * HS + c], o / sum);
        if (first) head.keys[(size_t)head.position * HS + c] = head.new_key[c];
        if (first) head.values[(size_t)head.position * HS + c] = head.new_value[c];
    }
}

}  // namespace token_attention_of_lab

// token_attention in dev/features/kv_cache.cu: eight lanes share a key, 16 bytes each; the queries of a group read it
// once; and a query has a block for every 256 keys, of which the last to finish adds up what the others left.
