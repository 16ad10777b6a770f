// right
BLOCK(128, threads)
extern "C" __global__ void my_rope_table(
    float* table, float theta, int T) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int t = i / (HS / 2), pair = i % (HS / 2);
    if (t >= T) return;
    float power = (float)pow((double)theta, (double)(2.0f * pair / HS));
    float2 turned;
    sincosf(t * (1.0f / power), &turned.y, &turned.x);
    reinterpret_cast<float2*>(table)[i] = turned;
}
