/*
Outliers: steps whose loss or norm lies far above those of the steps before. With --loss-limit or --norm-limit this file
is compiled behind kernels.cu, and such a step does not update the parameters.
*/

constexpr int WINDOW = 128;  // steps; one is judged if so many came before it (as in llm.c)

// Put a value in its window, over the oldest one; `seen` values came before it. Returns how many standard deviations it
// lies above the mean of the window, or NaN if fewer than WINDOW came before it. A warp calls this.
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

// Runs behind judge, and takes back verdict->update if the z-score of the loss or of the norm is above its limit; 0 is
// no limit. windows (2,WINDOW) are the losses and norms of the last steps, in float64 as in llm.c, and *seen counts all
// that were put there, which a step that is not finite never is. z_scores (WINDOW,2) are those of the last steps, of loss
// and norm, step s at s % WINDOW, so the host still finds them when later steps are done. Items: threads; one warp.
BLOCK(32, threads)
extern "C" __global__ void skip_outliers(
    Verdict* verdict, double* windows, int* seen, float* __restrict__ z_scores, float loss_limit, float norm_limit,
    const float* __restrict__ step) {
    if (!verdict->update) return;
    int count = *seen;
    double loss_z = z_score(windows, count, verdict->loss), norm_z = z_score(windows + WINDOW, count, verdict->norm);
    bool skips = (loss_limit > 0.0f && loss_z > loss_limit) || (norm_limit > 0.0f && norm_z > norm_limit);
    __syncwarp();  // all lanes have read *verdict and *seen
    if (threadIdx.x > 0) return;
    float* z = z_scores + 2 * ((int)*step % WINDOW);
    z[0] = loss_z, z[1] = norm_z;
    if (skips) verdict->update = 0.0f;
    *seen = count + 1;
}
