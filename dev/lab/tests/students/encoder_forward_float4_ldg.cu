// right
BLOCK(256, 4 * threads)
extern "C" __global__ void my_encoder_forward(
    float* out, const int* tokens, const real* wte, const real* wpe, int N, int T, int C) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= (size_t)N * C) return;
    size_t row = i / C, c = i % C;
    const real *a = wte + (size_t)__ldg(tokens + row) * C + c, *b = wpe + row % T * C + c;
    float4 x = make_float4(to_float(a[0]), to_float(a[1]), to_float(a[2]), to_float(a[3]));
    x.x += to_float(b[0]);
    x.y += to_float(b[1]);
    x.z += to_float(b[2]);
    x.w += to_float(b[3]);
    *reinterpret_cast<float4*>(out + i) = x;
}
