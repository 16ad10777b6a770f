/*
Outliers: steps whose loss or norm is far above those of the last steps do not update the parameters. Compiled after
kernels.cu for --loss-limit and --norm-limit.
*/

namespace outliers {

constexpr int WINDOW = 128;  // steps, as in llm.c; the first WINDOW steps are not judged

// Put a value in its window, in place of the oldest; `seen` values came before it. Returns how many standard deviations
// it is above the mean of the window, or NaN if fewer than WINDOW came before it. Called by a warp.
__device__ double z_score(double* window, int seen, double value) {
    if (threadIdx.x == 0) window[seen % WINDOW] = value;
    __syncwarp();
    double sum = 0.0, squares = 0.0;
    for (int i = threadIdx.x; i < WINDOW; i += 32) sum += window[i];
    double mean = warp_sum(sum) / WINDOW;
    for (int i = threadIdx.x; i < WINDOW; i += 32) squares += (window[i] - mean) * (window[i] - mean);
    double deviation = sqrt(warp_sum(squares) / WINDOW);
    if (seen < WINDOW) return nan("");
    return deviation > 0.0 ? (value - mean) / deviation : 0.0;
}

// Runs after judge, and revokes verdict->update if the z-score of the loss or the norm is above its limit; 0 means no
// limit. windows (2,WINDOW) has the last losses and norms, in float64 as in llm.c; *seen counts all steps so far,
// except those that were not finite. z_scores (WINDOW,2) has those of the last steps, for loss and norm, step s at s %
// WINDOW, so that the host still finds them after later steps. Items: threads; one warp.
BLOCK(32, threads)
extern "C" __global__ void skip_outliers(
    Verdict* verdict, double* windows, int* seen, float* __restrict__ z_scores, float loss_limit, float norm_limit,
    const float* __restrict__ step) {
    if (!verdict->update) return;
    int count = *seen;
    double loss_z = z_score(windows, count, verdict->loss), norm_z = z_score(windows + WINDOW, count, verdict->norm);
    bool skips = (loss_limit > 0.0f && loss_z > loss_limit) || (norm_limit > 0.0f && norm_z > norm_limit);
    // No __syncwarp is needed: all lanes read *verdict and *seen before the one in the second z_score.
    if (threadIdx.x > 0) return;
    float* z = z_scores + 2 * ((int)*step % WINDOW);
    z[0] = loss_z, z[1] = norm_z;
    if (skips) verdict->update = 0.0f;
    *seen = count + 1;
}

}  // namespace outliers
