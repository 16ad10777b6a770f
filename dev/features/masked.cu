/*
Targets that do not count, -1: see masked.py. Compiled after kernels.cu.

The classifier computes all rows, with word 0 for -1, and clear_rows puts zeros where nothing counts. What does not
count may be most of a batch, and its logits are computed all the same: a row of logits is a row of a matrix product.
*/

namespace masked {

// known (N) = the targets (N), or 0 where one is -1. counted[0] = how many are not; with adds that is added to it
// instead. There is one block. fp32 counts to 2^24 exactly. Items: blocks.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) count_targets(
    int* __restrict__ known, float* counted, const int* __restrict__ targets, int N, int adds) {
    float count = 0.0f;
    for (int i = threadIdx.x; i < N; i += blockDim.x) {
        int target = targets[i];
        known[i] = max(target, 0);
        count += target >= 0;
    }
    count = block_reduce<warp_sum>(count, 0.0f);
    if (threadIdx.x == 0) counted[0] = (adds ? counted[0] : 0.0f) + count;
}

// Where a target is -1, its row's loss becomes 0, and with_gradient its row of logits (N,Vp). The other rows stay.
// Items: N rows.
BLOCK(256, 1)
extern "C" __global__ void clear_rows(real* logits, float* losses, const int* __restrict__ targets, int N, int Vp,
                                      int with_gradient) {
    int row = blockIdx.x;
    if (targets[row] >= 0) return;
    if (threadIdx.x == 0) losses[row] = 0.0f;
    real* x = logits + (size_t)row * Vp;
    if (with_gradient)
        for (int v = threadIdx.x; v < Vp; v += blockDim.x) from_float(x[v], 0.0f);
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
