// A step of AdamW (Loshchilov and Hutter 2017, algorithm 2) for n fp32 numbers, params; in bf16 params are their upper
// halves, and low has the lower ones: see kernels.cu. Tensor i starts at starts[i], and has weight decay if decayed[i].
// The gradients are clipped by the norm of all. AdamW's settings are in device memory: rate = 1 - beta, and
// correction = 1 / (1 - beta^step).

namespace adamw_ {

// The tensor that holds number i, by bisection.
__device__ __forceinline__ int tensor_of(const size_t* starts, int tensors, size_t i) {
    int tensor = 0;
    for (int half = 16; half > 0; half /= 2)
        if (tensor + half < tensors && starts[tensor + half] <= i) tensor += half;
    return tensor;
}

__device__ __forceinline__ float clip_factor(AdamW a, float norm) {
    return a.clip > 0.0f && norm > a.clip ? a.clip / norm : 1.0f;
}

}  // namespace adamw_

// Five kernels, one for each line of the algorithm. A framework that does not fuse kernels runs it like this.
// Parameters, gradients and moments are read and written by several of them: nine reads and five writes of the arena,
// where four and three are enough.
BLOCK(256, threads)
extern "C" __global__ void adamw1_clip(float* __restrict__ clipped, const float* __restrict__ grads, size_t n,
                                       const AdamW* __restrict__ settings, const float* __restrict__ norm) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) clipped[i] = adamw_::clip_factor(*settings, norm[0]) * grads[i];
}

BLOCK(256, threads)
extern "C" __global__ void adamw1_decay(real* __restrict__ params, low_half* __restrict__ low,
                                        const size_t* __restrict__ starts, const int* __restrict__ decayed, int tensors,
                                        size_t n, const AdamW* __restrict__ settings) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || !decayed[adamw_::tensor_of(starts, tensors, i)]) return;
    Pack<1> p = load_master<1>(params, low, i);
    p[0] -= settings->learning_rate * settings->weight_decay * p[0];
    store_master(params, low, i, p);
}

BLOCK(256, threads)
extern "C" __global__ void adamw1_m(float* __restrict__ m, const float* __restrict__ grads, size_t n,
                                    const AdamW* __restrict__ settings) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] += settings->rate1 * (grads[i] - m[i]);
}

BLOCK(256, threads)
extern "C" __global__ void adamw1_v(float* __restrict__ v, const float* __restrict__ grads, size_t n,
                                    const AdamW* __restrict__ settings) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v[i] += settings->rate2 * (grads[i] * grads[i] - v[i]);
}

BLOCK(256, threads)
extern "C" __global__ void adamw1_step(real* __restrict__ params, low_half* __restrict__ low,
                                       const float* __restrict__ m, const float* __restrict__ v, size_t n,
                                       const AdamW* __restrict__ settings) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    AdamW a = *settings;
    Pack<1> p = load_master<1>(params, low, i);
    p[0] -= a.learning_rate * m[i] * a.correction1 / (sqrtf(v[i] * a.correction2) + a.eps);
    store_master(params, low, i, p);
}

// All of it in one kernel, one thread per number: each array is read and written once.
BLOCK(128, threads)
extern "C" __global__ void adamw2(real* __restrict__ params, low_half* __restrict__ low,
                                  const float* __restrict__ grads, float* __restrict__ m, float* __restrict__ v,
                                  const size_t* __restrict__ starts, const int* __restrict__ decayed, int tensors,
                                  size_t n, const AdamW* __restrict__ settings, const float* __restrict__ norm) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    AdamW a = *settings;
    int tensor = adamw_::tensor_of(starts, tensors, i);
    float g = adamw_::clip_factor(a, norm[0]) * grads[i];
    Pack<1> p = load_master<1>(params, low, i);
    m[i] += a.rate1 * (g - m[i]);
    v[i] += a.rate2 * (g * g - v[i]);
    float change = m[i] * a.correction1 / (sqrtf(v[i] * a.correction2) + a.eps);
    p[0] -= a.learning_rate * (change + (decayed[tensor] ? a.weight_decay : 0.0f) * p[0]);
    store_master(params, low, i, p);
}

// adamw in kernels.cu: 16 bytes per lane, one bisection for W numbers, and no step if a gradient is not finite.
