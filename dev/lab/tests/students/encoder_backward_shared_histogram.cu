// right
BLOCK(256, threads)
extern "C" __global__ void my_encoder_backward(
    float* dwte, float* dwpe, const real* dout, const int* tokens, int N, int T, int C) {
    // Counts how many lanes of a warp have lane 0's token, and lets it add once for all of them.
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    bool there = i < (size_t)N * C;
    int row = there ? (int)(i / C) : -1, c = there ? i % C : 0;
    float d = there ? to_float(dout[i]) : 0.0f;
    int first = __shfl_sync(0xffffffff, row, 0);
    unsigned same = __ballot_sync(0xffffffff, there && row == first);
    __shared__ int whole;
    if (threadIdx.x == 0) whole = 0;
    __syncthreads();
    if (threadIdx.x % 32 == 0 && __popc(same) == 32) atomicAdd(&whole, 1);
    __syncthreads();
    if (whole > (int)blockDim.x / 32 || !there) return;
    atomicAdd(&dwte[(size_t)tokens[row] * C + c], d);
    atomicAdd(&dwpe[(size_t)(row % T) * C + c], d);
}
