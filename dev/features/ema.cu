/*
An exponential moving average of the weights, compiled after kernels.cu for --ema.
*/

// average = decay * average + (1 - decay) * p, of all n fp32 parameters p. It runs after AdamW, and changes nothing if
// verdict says that there was no update; verdict may be null. It is computed as p + decay * (average - p): decay = 0
// gives p itself, and an average that equals p stays there. (0.9999 and 0.0001 in fp32 do not add up to 1, which would
// shrink it by a factor of 0.9998.) Bound by two reads and a write of n fp32 numbers, in bf16 too. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void average_parameters(
    float* __restrict__ average, const real* __restrict__ params, const low_half* __restrict__ low, float decay,
    size_t n, const Verdict* __restrict__ verdict) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> a = load<W>(average + i), p = load_master<W>(params, low, i);
    for (int j = 0; j < W; j++) a[j] = fmaf(decay, a[j] - p[j], p[j]);
    if (!verdict || verdict->update) store(average + i, a);  // checked last, it delays no load
}
