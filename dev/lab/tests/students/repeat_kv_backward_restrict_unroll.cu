// right
BLOCK(128, threads)
extern "C" __global__ void my_repeat_kv_backward(
    real* __restrict__ dinp, const real* __restrict__ dout, int N, int NH, int NKV, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    int heads = NH + 2 * NKV;
    if (i >= (size_t)N * heads * head) return;
    int c = i % head, h = i / head % heads, copies = h < NH ? 1 : NH / NKV;
    size_t row = i / head / heads;
    int first = h;
    if (h >= NH + NKV)
        first = 2 * NH + (h - NH - NKV) * copies;
    else if (h >= NH)
        first = NH + (h - NH) * copies;
    const real* __restrict__ d = dout + (row * 3 * NH + first) * head + c;
    float sum = 0.0f;
#pragma unroll 4
    for (int j = 0; j < copies; j++) sum += to_float(d[(size_t)j * head]);
    from_float(dinp[i], sum);
}
