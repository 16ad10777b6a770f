// wrong: params|decay
BLOCK(128, threads)
extern "C" __global__ void my_adamw(
    real* params, low_half* low, const float* grads, float* m, float* v, const size_t* starts,
    const int* decayed, int tensors, size_t n, const AdamW* settings, const float* norm) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    AdamW a = *settings;
    int tensor = 0;
    while (starts[tensor + 1] <= i) tensor++;
    float clip = a.clip > 0.0f && norm[0] > a.clip ? a.clip / norm[0] : 1.0f;
    float g = grads[i] * clip;
    Pack<1> p = load_master<1>(params, low, i);
    m[i] += a.rate1 * (g - m[i]);
    v[i] += a.rate2 * (g * g - v[i]);
    float step = m[i] * a.correction1 / (sqrtf(v[i] * a.correction2) + a.eps);
    step += a.weight_decay * p[0];
    p[0] -= a.learning_rate * step;
    store_master(params, low, i, p);
}
