// wrong: race
__device__ float frequency[HS / 2];  // computed by block 0
__device__ volatile int ready;

BLOCK(128, threads)
extern "C" __global__ void my_rope_table(
    float* table, float theta, int T) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, t = i / (HS / 2), pair = i % (HS / 2);
    if (i < HS / 2)
        frequency[i] = 1.0f / (float)pow((double)theta, (double)(2.0f * i / HS));  //!
    __syncthreads();
    if (i == 0) ready = 1;  // and no __threadfence before it  //!
    if (blockIdx.x > 0 && threadIdx.x == 0)
        while (ready == 0) {}  //!
    __syncthreads();
    if (t >= T) return;
    table[2 * (size_t)i] = cosf(t * frequency[pair]);  //!
    table[2 * (size_t)i + 1] = sinf(t * frequency[pair]);  //!
}
