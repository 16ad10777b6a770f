// wrong: double|fp32|float|table
BLOCK(128, threads)
extern "C" __global__ void my_rope_table(
    float* table, float theta, int T) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / (HS / 2), pair = i % (HS / 2);
    if (t >= T) return;
    float angle = t * expf(-2.0f * pair / HS * logf(theta));
    table[2 * (size_t)i] = cosf(angle);
    table[2 * (size_t)i + 1] = sinf(angle);
}
