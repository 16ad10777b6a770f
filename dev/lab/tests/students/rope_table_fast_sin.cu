// wrong: table
BLOCK(128, threads)
extern "C" __global__ void my_rope_table(float* table, float theta, int T) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)T * (HS / 2)) return;
    int t = i / (HS / 2), p = i % (HS / 2);
    float power = (float)pow((double)theta, 2.0 * p / HS);
    float angle = t * (1.0f / power);
    table[2 * i] = __cosf(angle);
    table[2 * i + 1] = __sinf(angle);
}
