// wrong: wpe.*T|T.*wpe|row|reads
BLOCK(256, threads)
extern "C" __global__ void my_encoder_forward(
    float* out, const int* tokens, const real* wte, const real* wpe, int N, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * C) return;
    size_t row = i / C, c = i % C;
    out[i] = to_float(wte[(size_t)tokens[row] * C + c]) + to_float(wpe[row * C + c]);  //!
}
