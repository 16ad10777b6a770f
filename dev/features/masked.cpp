// The kernels of masked.cu as plain loops, compiled after dev/cpu/kernels.cpp.

extern "C" {

// counted[0] = how many of the targets (N) are not -1, or += with adds
void count_targets(float* counted, const int* targets, int N, int adds) {
    int count = 0;
    for (int i = 0; i < N; i++) count += targets[i] >= 0;
    counted[0] = (adds ? counted[0] : 0.0f) + count;
}

// As fused_classifier; where a target is -1, the row's loss becomes 0, and with_gradient its row of
// logits (N,Vp)
void counted_classifier(real* logits, float* losses, const int* targets, float dloss, int N, int V,
                        int Vp, int with_gradient, int room) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        real* x = logits + n * Vp;
        losses[n] = 0.0f;
        if (targets[n] >= 0)
            fused_classifier(x, losses + n, targets + n, dloss, 1, V, Vp, with_gradient, room);
        else if (with_gradient) std::fill(x, x + Vp, 0.0f);
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
