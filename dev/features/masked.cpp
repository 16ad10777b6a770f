// The kernels of masked.cu as plain loops, compiled after dev/cpu/kernels.cpp.

extern "C" {

// known (N) = the targets (N), or 0 where one is -1. counted[0] = how many are not, or += with adds
void count_targets(int* known, float* counted, const int* targets, int N, int adds) {
    int count = 0;
    for (int i = 0; i < N; i++) {
        known[i] = targets[i] < 0 ? 0 : targets[i];
        count += targets[i] >= 0;
    }
    counted[0] = (adds ? counted[0] : 0.0f) + count;
}

// Where a target is -1, the row's loss becomes 0, and with_gradient its row of logits (N,Vp)
void clear_rows(real* logits, float* losses, const int* targets, int N, int Vp,
                int with_gradient) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        if (targets[n] >= 0) continue;
        losses[n] = 0.0f;
        if (with_gradient) std::fill(logits + n * Vp, logits + (n + 1) * Vp, 0.0f);
    }
}

// grads (n) and the loss *= tokens / counted[0], unless nothing counts
void scale_by_counted(float* grads, Verdict* verdict, const float* counted, float tokens,
                      size_t n) {
    float factor = counted[0] > 0.0f ? tokens / counted[0] : 1.0f;
    verdict->loss *= factor;
#pragma omp parallel for simd
    for (long i = 0; i < (long)n; i++) grads[i] *= factor;
}

// A step in which nothing counts makes no update, and has no loss: NaN
void skip_uncounted(Verdict* verdict, const float* counted) {
    if (counted[0] == 0.0f) verdict->update = 0.0f, verdict->loss = nanf("");
}

}  // extern "C"
