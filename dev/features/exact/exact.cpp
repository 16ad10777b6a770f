// The loops of --exact, behind those of dev/cpu/kernels.cpp, whose names they have but for exact_: sums have the order
// that they have in kernels.cu in fp32. Loops without one, or with helpers of exact.cuh, serve as they are.

extern "C" {

void exact_fused_classifier(real* logits, float* losses, const int* targets, float dloss, int N, int V, int Vp,
                            int with_gradient, int room) {
    constexpr float LOWEST = -3.402823466e38f;
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        real* x = logits + n * Vp;
        float largest[1024], sums[1024] = {}, top = LOWEST;
        const int taken = std::min(1024, (V + 3) / 4);  // threads with numbers: the others add 0
        std::fill(largest, largest + taken, LOWEST);
        for (int first = 0; first < V; first += 4096) {
            int there = std::min(1024, (V - first + 3) / 4);
#pragma omp simd
            for (int t = 0; t < there; t++) {
                float l[4], before = largest[t];
                for (int i = 0; i < 4; i++) {
                    int v = first + 4 * t + i;
                    l[i] = v < V ? x[v] : LOWEST;
                    largest[t] = l[i] > largest[t] ? l[i] : largest[t];
                }
                float sum = largest[t] > before ? sums[t] * exponential(before - largest[t]) : sums[t];
                for (int i = 0; i < 4; i++) sum += exponential(l[i] - largest[t]);
                sums[t] = sum;
            }
        }
        for (int t = 0; t < taken; t++) top = largest[t] > top ? largest[t] : top;
#pragma omp simd
        for (int t = 0; t < taken; t++) sums[t] *= exponential(largest[t] - top);
        float sum = exact::block_sum(sums, 1024), shift = top + exact::log(sum / dloss);
        losses[n] = exact::log(sum) + top - x[targets[n]];
        if (!with_gradient) continue;
#pragma omp simd
        for (int v = 0; v < V; v++) x[v] = exponential(x[v] - shift);
        x[targets[n]] = x[targets[n]] - dloss;
        std::fill(x + V, x + Vp, 0.0f);
    }
}

void exact_add_loss(Verdict* verdict, const float* losses, float factor, int N, int adds) {
    float sums[1024] = {};
    for (int i = 0; i < N; i++) sums[i % 1024] += losses[i];
    verdict->loss = (adds ? verdict->loss : 0.0f) + factor * exact::block_sum(sums, 1024);
}

void exact_global_norm(float* gradient_norm, const float* grads, size_t n, int blocks) {
    constexpr long THREADS = 512, STEP = 4 * THREADS;
#pragma omp parallel for
    for (long block = 0; block < blocks; block++) {
        float sums[THREADS] = {};
        for (size_t first = STEP * block; first < n; first += STEP * blocks) {
            const float* g = grads + first;
            exact::add_slots(sums, THREADS, std::min<size_t>(n - first, STEP), [&](int c) { return g[c] * g[c]; });
        }
        gradient_norm[2 + block] = exact::block_sum(sums, THREADS);
    }
    float sums[THREADS] = {};
    for (long block = 0; block < blocks; block++) sums[block % THREADS] += gradient_norm[2 + block];
    gradient_norm[0] = sqrtf(exact::block_sum(sums, THREADS));
    gradient_norm[1] = 0.0f;
}

// A tile of keys at a time. Each row's sum is kept by four lanes, whose columns are 2q and 2q + 1 of 8.
void exact_attention_forward(real* out, float* lse, const real* qkv, float scale, int T, int NH, int HS, int GROUP,
                             int heads) {
    const long TILE = HS > 64 ? 32 : 64;
    const float scale2 = scale * LOG2_E;
#pragma omp parallel for
    for (long head = 0; head < heads; head++) {
        long b = head / NH, h = head % NH, kv = h / GROUP, NKV = NH / GROUP, width = (NH + 2 * NKV) * HS;
        const real* sequence = qkv + b * T * width;
        Matrix q = head_of(sequence + h * HS, width, T, HS);
        Matrix k_transposed = transposed_head_of(sequence + (NH + kv) * HS, width, T, HS);
        Matrix v = head_of(sequence + (NH + NKV + kv) * HS, width, T, HS);
        Matrix scores(BLOCK, T), y(T, HS);
        for (long first = 0; first < T; first += BLOCK) {
            long rows = std::min(BLOCK, T - first);
            multiply_block(scores, q, k_transposed, first, rows, 0, first + rows, HS);
            float largest[BLOCK], totals[BLOCK][4] = {};
            std::fill(largest, largest + rows, -3.402823466e38f);
            for (long key = 0; key < first + rows; key += TILE) {
                long keys = std::min(TILE, first + rows - key);
                for (long i = 0; i < rows; i++) {
                    float *weight = scores[i] + key, top = largest[i], sums[4] = {};
                    std::fill(weight + std::clamp(first + i + 1 - key, 0L, keys), weight + keys, -3.402823466e38f);
#pragma omp simd reduction(max : top)
                    for (long s = 0; s < keys; s++) top = weight[s] > top ? weight[s] : top;
                    float correction = power_of_2(scale2 * (largest[i] - top));
#pragma omp simd
                    for (long s = 0; s < keys; s++) weight[s] = power_of_2(scale2 * weight[s] - scale2 * top);
                    for (long s = 0; s < keys; s++) sums[s % 8 / 2] += weight[s];
                    for (int lane = 0; lane < 4; lane++) totals[i][lane] = totals[i][lane] * correction + sums[lane];
                    for (int c = 0; c < HS; c++) y[first + i][c] *= correction;
                    largest[i] = top;
                }
                multiply_tiles(y[first], y.columns, scores[0] + key, scores.columns, 1, v[key], v.columns, rows, HS,
                               keys, true);
            }
            for (long i = 0; i < rows; i++) {
                float sum = (totals[i][0] + totals[i][1]) + (totals[i][2] + totals[i][3]), inverse = 1.0f / sum;
                lse[head * T + first + i] = scale2 * largest[i] + exact::log2(sum);
                for (int c = 0; c < HS; c++) y[first + i][c] *= inverse;
            }
        }
        store_head(out + (b * T * NH + h) * HS, (long)NH * HS, T, HS, 1.0f, y);
    }
}

}  // extern "C"
