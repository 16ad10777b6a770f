// wrong: bf16.*(16 bytes|align)|(16 bytes|align).*bf16
BLOCK(256, 4 * threads)
extern "C" __global__ void my_encoder_forward(
    float* out, const int* tokens, const real* wte, const real* wpe, int N, int T, int C) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    i *= 4;
    if (i >= (size_t)N * C) return;
    size_t row = i / C, c = i % C;
    const uint4* word = (const uint4*)(wte + tokens[row] * (size_t)C + c);
    uint4 bits = *word;  //!
    const real* four = (const real*)&bits;
    for (int j = 0; j < 4; j++) out[i + j] = to_float(four[j]) + to_float(wpe[row % T * C + c + j]);
}
