// wrong: race.*dwpe|dwpe.*race
BLOCK(256, threads)
extern "C" __global__ void my_encoder_backward(
    float* dwte, float* dwpe, const real* dout, const int* tokens, int N, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (i >= (size_t)N * C) return;
    int row = i / C, c = i % C;
    float d = to_float(dout[i]);
    atomicAdd(&dwte[(size_t)tokens[row] * C + c], d);
    dwpe[(size_t)(row % T) * C + c] += d;  //!
}
