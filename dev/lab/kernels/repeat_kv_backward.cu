// The gradient dinp (B,T,NH+2NKV,HS) of repeat_kv_forward from dout (B,T,3,NH,HS): for a key or value head, the sum
// over its NH/NKV copies.

// One thread per number of dout, added by an atomic to the place that it was copied from. But dinp must be fp32 and
// zero at first, is written more than once, and the order of a sum varies.
BLOCK(128, threads)
extern "C" __global__ void repeat_kv_backward1(float* dinp, const real* __restrict__ dout, int N, int NH, int NKV,
                                               int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * 3 * NH * head) return;
    int c = i % head, h = i / head % NH, which = i / head / NH % 3;
    size_t row = i / head / NH / 3;
    int to = which == 0 ? h : NH + (which - 1) * NKV + h / (NH / NKV);
    atomicAdd(dinp + (row * (NH + 2 * NKV) + to) * head + c, to_float(dout[i]));
}

// One thread per number of dinp, which reads all copies: each place is written once, by one thread, and the order is
// fixed.
BLOCK(128, threads)
extern "C" __global__ void repeat_kv_backward2(real* __restrict__ dinp, const real* __restrict__ dout, int N, int NH,
                                               int NKV, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * (NH + 2 * NKV) * head) return;
    int c = i % head, h = i / head % (NH + 2 * NKV), copies = h < NH ? 1 : NH / NKV;
    size_t row = i / head / (NH + 2 * NKV);
    int first = h < NH ? h : NH * (1 + (h - NH) / NKV) + (h - NH) % NKV * copies;
    float sum = 0.0f;
    for (int j = 0; j < copies; j++) sum += to_float(dout[(row * 3 * NH + first + j) * head + c]);
    from_float(dinp[i], sum);
}

// 16 bytes per lane, and the row from the grid.
BLOCK(128, W * threads)
extern "C" __global__ void repeat_kv_backward3(real* __restrict__ dinp, const real* __restrict__ dout, int N, int NH,
                                               int NKV, int head) {
    int i = first_number(), size = (NH + 2 * NKV) * head;
    if (i >= size) return;
    int c = i % head, h = i / head, copies = h < NH ? 1 : NH / NKV;
    size_t row = blockIdx.y;
    int first = h < NH ? h : NH * (1 + (h - NH) / NKV) + (h - NH) % NKV * copies;
    const real* d = dout + (row * 3 * NH + first) * head + c;
    Pack<W> sum = load<W>(d);
#pragma unroll 4
    for (int j = 1; j < copies; j++) sum = sum + load<W>(d + j * head);
    store(dinp + row * size + i, sum);
}
