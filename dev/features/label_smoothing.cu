/*
Label smoothing: fused_classifier for --label-smoothing E, compiled after kernels.cu. The loss of a row of logits is
-sum over v of t[v] * log(softmax(logits)[v]), where the target distribution t is (1 - E) at the right word plus E / V
at each of the V words (Szegedy et al. 2016, section 7). Since the t[v] add up to 1, the loss is

    log(sum(exp(logits - top))) - (1 - E) * (logits[target] - top) - E * average(logits - top)

where top is the row's largest logit. Its gradient is softmax - t.
*/

// losses (N) = the smoothed loss of each row of logits (N,Vp), which become its gradient times dloss, with zeros in the
// padding. A row whose target is -1 (see masked.py) has no loss, and a gradient of zeros. A block reads its row three
// times: for top, for the two sums, and for the gradient. Meanwhile the rows of two blocks per multiprocessor stay in
// L2. fused_classifier shows how to read a row from memory only once. Items: N rows.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) smoothed_classifier(
    real* logits, float* __restrict__ losses, const int* __restrict__ targets, float dloss, float smoothing, int N,
    int V, int Vp) {
    int row = blockIdx.x, target = targets[row];
    if (target < 0) V = 0;  // no word is read
    real* x = logits + (size_t)row * Vp;
    float top = LOWEST, exponentials = 0.0f, differences = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        float difference = to_float(x[v]) - top;
        exponentials += exponential(difference);
        differences += difference;
    }
    exponentials = block_reduce<warp_sum>(exponentials, 0.0f);
    differences = block_reduce<warp_sum>(differences, 0.0f);
    float right = 1.0f - smoothing, each = smoothing / V;  // the right word gets both
    if (threadIdx.x == 0) {
        float loss = logf(exponentials) - each * differences;
        losses[row] = V ? loss - right * (to_float(x[target]) - top) : 0.0f;
    }
    __syncthreads();  // the logit of the target has been read
    for (int v = threadIdx.x; v < Vp; v += blockDim.x) {
        float gradient = 0.0f;
        if (v < V) gradient = exponential(to_float(x[v]) - top) / exponentials - (v == target ? right : 0.0f) - each;
        from_float(x[v], dloss * gradient);
    }
}
