// The kernels of kv_cache.cu as loops: the pass of one token per sequence, B rows, whose keys and
// values are kept. At the end of a loop's arguments stand C, HS and GROUP, as in kernels.cpp.

extern "C" {

// x (B,C) = wte (Vp,C)[tokens (B)] + wpe (maxT,C)[positions (B)], the latter unless wpe is null
void token_embedding(float* x, const int* tokens, const int* positions, const real* wte,
                     const real* wpe, int B, int C) {
    for (long b = 0; b < B; b++) {
        const real* token = wte + (long)tokens[b] * C;
        const real* position = wpe ? wpe + (long)positions[b] * C : nullptr;
        for (int c = 0; c < C; c++) x[b * C + c] = token[c] + (position ? (float)position[c] : 0.0f);
    }
}

// y (B,OC) = rows (B,C) weight' + bias, the latter unless null. The rows are inp (B,C), or unless
// x is null the norm of x (B,C), without normb an RMSNorm. Then stream (B,OC) += y, unless null;
// else out (B,OC) = y, GELU(y) with activation 1, y * silu(gate) with 2: weight (2*OC,C) then has
// rows for y, and below them for the gate.
void token_linear(real* out, float* stream, const real* inp, const float* x, const real* normw,
                  const real* normb, const real* weight, const real* bias, float eps,
                  int activation, int B, int C, int OC) {
    std::vector<float> rows((long)B * C);
    for (long b = 0; b < B; b++) {
        float* row = &rows[b * C];
        if (!x) {
            for (int c = 0; c < C; c++) row[c] = inp[b * C + c];
            continue;
        }
        const float* from = x + b * C;
        float sum = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += from[c];
        float mean = normb ? sum / C : 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < C; c++) squares += (from[c] - mean) * (from[c] - mean);
        float rstd = 1.0f / sqrtf(squares / C + eps);
        for (int c = 0; c < C; c++)
            row[c] = real((from[c] - mean) * rstd * normw[c] + (normb ? (float)normb[c] : 0.0f));
    }
    auto product = [&](long o, long b) {
        const real* w = weight + o * C;
        const float* row = &rows[b * C];
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int c = 0; c < C; c++) sum += w[c] * row[c];
        return sum;
    };
#pragma omp parallel for
    for (long o = 0; o < OC; o++)
        for (long b = 0; b < B; b++) {
            float y = product(o, b) + (bias ? (float)bias[o] : 0.0f);
            if (activation == 1) y = gelu(y);
            if (activation == 2) {
                float gate = product(OC + o, b);
                y *= gate / (1.0f + exponential(-gate));
            }
            if (stream) stream[b * OC + o] += y;
            else out[b * OC + o] = y;
        }
}

// qkv (B,NH+2NKV,HS) has the query, key and value of the token at each sequence's position (B): key
// and value are written to keys and values (B,NKV,T,HS) there; rope (T,HS), unless null, turns query
// and key. out (B,NH,HS) = softmax(scale * q k') v, over all keys up to the position. kept: the B
// tokens are neighbours in a text, keys and values (NKV,T,HS) have theirs, too, and rope is null.
// parts and arrived are for a GPU.
void token_attention(real* out, real* keys, real* values, float* parts, int* arrived,
                     const real* qkv, const float* rope, const int* positions, float scale, int B,
                     int T, int NH, int kept, int HS, int GROUP) {
    long NKV = NH / GROUP;
    if (kept) {  // by blocks, as attention_forward
        long start = positions[0], end = start + B;
#pragma omp parallel for
        for (long h = 0; h < NH; h++) {
            long begin = h / GROUP * T * HS;
            Matrix q = head_of(qkv + h * HS, (NH + 2 * NKV) * HS, B, HS);
            Matrix k_transposed = transposed_head_of(keys + begin, HS, end, HS);
            Matrix v = head_of(values + begin, HS, end, HS), scores(BLOCK, end), y(B, HS);
            for (long first = 0; first < B; first += BLOCK)
                attend_block(y, nullptr, scores, q, k_transposed, v, scale, first,
                             std::min(BLOCK, B - first), start + first, HS, nullptr, 0, T);
            store_head(out + h * HS, (long)NH * HS, B, HS, 1.0f, y);
        }
        return;
    }
#pragma omp parallel for
    for (long head = 0; head < B * NKV; head++) {
        long b = head / NKV, kv = head % NKV, position = positions[b];
        const real* row = qkv + b * (NH + 2 * NKV) * HS;
        auto turned = [&](const real* from, int c) -> float {  // channel c of a head
            if (!rope) return from[c];
            float x = from[c & ~1], y = from[c | 1];
            const float* turn = rope + position * HS + (c & ~1);  // cosine, sine
            return c % 2 ? x * turn[1] + y * turn[0] : x * turn[0] - y * turn[1];
        };
        long begin = head * T * HS;
        real *k = keys + begin, *v = values + begin;
        for (int c = 0; c < HS; c++) {
            k[position * HS + c] = turned(row + (NH + kv) * HS, c);
            v[position * HS + c] = row[(NH + NKV + kv) * HS + c];
        }
        std::vector<float> q(HS), sum(HS), weights(position + 1);
        for (long h = kv * GROUP; h < (kv + 1) * GROUP; h++) {
            for (int c = 0; c < HS; c++) q[c] = scale * turned(row + h * HS, c);
            float top = -INFINITY, total = 0.0f;
            for (long s = 0; s <= position; s++) {
                float score = 0.0f;
#pragma omp simd reduction(+ : score)
                for (int c = 0; c < HS; c++) score += q[c] * k[s * HS + c];
                weights[s] = score;
                top = std::max(top, score);
            }
#pragma omp simd reduction(+ : total)
            for (long s = 0; s <= position; s++) total += weights[s] = exponential(weights[s] - top);
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (long s = 0; s <= position; s++)
#pragma omp simd
                for (int c = 0; c < HS; c++) sum[c] += weights[s] * v[s * HS + c];
            for (int c = 0; c < HS; c++) out[(b * NH + h) * HS + c] = sum[c] / total;
        }
    }
}

// keys and values (NKV,T,HS) of tokens 0..N-1 = those of qkv (N,NH+2NKV,HS)
void keep_keys(real* keys, real* values, const real* qkv, int N, int T, int NH, int HS,
               int GROUP) {
    long NKV = NH / GROUP;
#pragma omp parallel for
    for (long head = 0; head < NKV; head++)
        for (long t = 0; t < N; t++) {
            const real* k = qkv + (t * (NH + 2 * NKV) + NH + head) * HS;
            std::copy(k, k + HS, keys + (head * T + t) * HS);
            std::copy(k + NKV * HS, k + NKV * HS + HS, values + (head * T + t) * HS);
        }
}

}  // extern "C"
