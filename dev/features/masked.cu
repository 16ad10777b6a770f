/*
Targets that do not count, -1: see masked.py. Compiled after kernels.cu.

What does not count may be most of a batch. Its logits are computed all the same, since a row of logits is a row of a
matrix product, but nobody reads them.
*/

namespace masked {

// counted[0] = how many of the targets (N) are not -1; with adds that is added to it instead. There is one block. fp32
// counts to 2^24 exactly. Items: blocks.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) count_targets(
    float* counted, const int* __restrict__ targets, int N, int adds) {
    float count = 0.0f;
    for (int i = threadIdx.x; i < N; i += blockDim.x) count += targets[i] >= 0;
    count = block_reduce<warp_sum>(count, 0.0f);
    if (threadIdx.x == 0) counted[0] = (adds ? counted[0] : 0.0f) + count;
}

// Blocks of a multiprocessor: two where it has room for 2,048 threads
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000
constexpr int CLASSIFIERS = 2;
#else
constexpr int CLASSIFIERS = 1;
#endif

// As fused_classifier; but where a target is -1, its row's loss becomes 0 and, with_gradient, its row of logits (N,Vp),
// which is not read. Shared memory has room for `room` logits of a row. Where two blocks share a
// multiprocessor, one reads a row while the other computes. Items: N rows.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024, CLASSIFIERS) counted_classifier(
    real* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, int N, int V, int Vp,
    int with_gradient, int room) {
    int row = blockIdx.x;
    if (targets[row] >= 0) {
        classify_rows<false>(logits, losses, targets, dloss, N, V, Vp, with_gradient, room);
        return;
    }
    if (threadIdx.x == 0) losses[row] = 0.0f;
    if (with_gradient)
        for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) store(logits + (size_t)row * Vp + v, Pack<W>{});
}

// grads (n) and the loss *= tokens / counted[0]: they were divided by all tokens of the step. If nothing counts, they
// are zeros, and stay. One more read and write of all gradients. Items: n numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void scale_by_counted(float* grads, Verdict* verdict, const float* __restrict__ counted,
                                            float tokens, size_t n) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    float factor = counted[0] > 0.0f ? tokens / counted[0] : 1.0f;
    if (i == 0) verdict->loss *= factor;
    if (i >= n) return;
    Pack<4> g = load<4>(grads + i);
    for (int j = 0; j < 4; j++) g[j] *= factor;
    store(grads + i, g);
}

// A step in which nothing counts makes no update, and has no loss: NaN. Items: threads, one.
BLOCK(1, threads)
extern "C" __global__ void skip_uncounted(Verdict* verdict, const float* __restrict__ counted) {
    if (counted[0] == 0.0f) verdict->update = 0.0f, verdict->loss = nanf("");
}

}  // namespace masked
