// inp (B,T,NH+2NKV,HS), the queries of NH heads and the keys and values of NKV, to out (B,T,3,NH,HS), with NH/NKV
// copies of each key and value head, so that plain attention can be used.

// One thread per number of out, which finds its source by divisions.
BLOCK(128, threads)
extern "C" __global__ void repeat_kv_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int NH,
                                              int NKV, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * 3 * NH * head) return;
    int c = i % head, h = i / head % NH, which = i / head / NH % 3;
    size_t row = i / head / NH / 3;
    int from = which == 0 ? h : NH + (which - 1) * NKV + h / (NH / NKV);
    out[i] = inp[(row * (NH + 2 * NKV) + from) * head + c];
}

// 16 bytes per lane, and the row from the grid. The copies are read from L2 or L1, so each head is read from device
// memory once.
BLOCK(128, W * threads)
extern "C" __global__ void repeat_kv_forward2(real* __restrict__ out, const real* __restrict__ inp, int N, int NH,
                                              int NKV, int head) {
    int i = first_number(), size = 3 * NH * head;
    if (i >= size) return;
    int c = i % head, h = i / head % NH, which = i / head / NH;
    int from = which == 0 ? h : NH + (which - 1) * NKV + h / (NH / NKV);
    size_t row = blockIdx.y;
    store(out + row * size + i, load<W>(inp + (row * (NH + 2 * NKV) + from) * head + c));
}
