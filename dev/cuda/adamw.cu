// AdamW (Loshchilov and Hutter 2017, algorithm 2) on n fp32 numbers, master, of which params is the copy in bf16, if
// there is one. Tensor i of them starts at starts[i], and has weight decay if decayed[i] is 1. rate = 1 - beta,
// correction = 1 / (1 - beta^step).

namespace adamw_ {

// What decays number i: the tensor is found by bisection.
__device__ __forceinline__ float decay_of(const size_t* starts, const float* decayed, int tensors, size_t i) {
    int tensor = 0;
    for (int half = 16; half > 0; half /= 2)
        if (tensor + half < tensors && starts[tensor + half] <= i) tensor += half;
    return decayed[tensor];
}

}  // namespace adamw_

// Four kernels, a line of the algorithm each, as a framework runs it that does not fuse: the parameters and the moments
// come and go between them. Eight reads and four writes of the arena, where four and three would do.
extern "C" __global__ void adamw1_decay(float* __restrict__ master, const size_t* __restrict__ starts,
                                        const float* __restrict__ decayed, int tensors, size_t n, float amount) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) master[i] -= amount * adamw_::decay_of(starts, decayed, tensors, i) * master[i];
}
extern "C" __global__ void adamw1_m(float* __restrict__ m, const float* __restrict__ grads, size_t n, float rate) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) m[i] += rate * (grads[i] - m[i]);
}
extern "C" __global__ void adamw1_v(float* __restrict__ v, const float* __restrict__ grads, size_t n, float rate) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) v[i] += rate * (grads[i] * grads[i] - v[i]);
}
extern "C" __global__ void adamw1_step(real* params, float* master, const float* __restrict__ m,
                                       const float* __restrict__ v, size_t n, float learning_rate, float correction1,
                                       float correction2, float eps) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    master[i] -= learning_rate * m[i] * correction1 / (sqrtf(v[i] * correction2) + eps);
    if (sizeof(real) < sizeof(float)) from_float(params[i], master[i]);
}

// All of it in one kernel, a thread a number: each array is read and written once.
extern "C" __global__ void adamw2(real* params, float* master, const float* __restrict__ grads, float* __restrict__ m,
                                  float* __restrict__ v, const size_t* __restrict__ starts,
                                  const float* __restrict__ decayed, int tensors, size_t n, float learning_rate,
                                  float rate1, float rate2, float correction1, float correction2, float eps,
                                  float weight_decay) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float g = grads[i], p = master[i];
    m[i] += rate1 * (g - m[i]);
    v[i] += rate2 * (g * g - v[i]);
    float change = m[i] * correction1 / (sqrtf(v[i] * correction2) + eps);
    p -= learning_rate * (change + weight_decay * adamw_::decay_of(starts, decayed, tensors, i) * p);
    master[i] = p;
    if (sizeof(real) < sizeof(float)) from_float(params[i], p);
}

// adamw in kernels.cu: 16 bytes a lane, and one bisection for W numbers.
