// out (N,Vp) = softmax(inp[row, 0..V-1]), zeros in the padding. A row is 50,304 numbers: 200 KB in fp32.

// One thread per row, three passes: the maximum, the sum of exponentials, the quotients. There are only N threads, the
// lanes of a warp read 32 different rows, and each pass reads device memory again.
BLOCK(32, threads)
extern "C" __global__ void softmax_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int V,
                                            int Vp) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = 0; v < V; v++) top = fmaxf(top, to_float(x[v]));
    for (int v = 0; v < V; v++) sum += expf(to_float(x[v]) - top);
    for (int v = 0; v < Vp; v++) from_float(out[(size_t)row * Vp + v], v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}

// One block per row: whole lines, and enough threads. Still three passes; the second and third find the row in L2, if
// the rows of all running blocks fit there.
BLOCK(256, 1)
extern "C" __global__ void softmax_forward2(real* __restrict__ out, const real* __restrict__ inp, int N, int V,
                                            int Vp) {
    const real* x = inp + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) top = fmaxf(top, to_float(x[v]));
    top = block_reduce<warp_max>(top, LOWEST);
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(to_float(x[v]) - top);
    sum = block_reduce<warp_sum>(sum, 0.0f);
    for (int v = threadIdx.x; v < Vp; v += blockDim.x)
        from_float(out[(size_t)blockIdx.x * Vp + v], v < V ? expf(to_float(x[v]) - top) / sum : 0.0f);
}

namespace softmax_forward_ {

// W numbers of a row from v on; beyond V they are LOWEST.
__device__ __forceinline__ Pack<W> load_logits(const real* x, int v, int V) {
    Pack<W> l = load<W>(x + v);
    if (v + W > V)
        for (int i = 0; i < W; i++)
            if (v + i >= V) l[i] = LOWEST;
    return l;
}

// Adds W numbers to the maximum and the sum of a thread.
__device__ __forceinline__ void add(float& top, float& sum, Pack<W> l) {
    float before = top;
    for (int i = 0; i < W; i++) top = fmaxf(top, l[i]);
    if (top > before) sum *= exponential(before - top);
    for (int i = 0; i < W; i++) sum += exponential(l[i] - top);
}

}  // namespace softmax_forward_

// Online softmax (Milakov and Gimelshein 2018, algorithm 3), by one warp per row: each lane sums exponentials relative
// to the largest number so far, and scales the sum when that grows, which is rare. So the maximum and the sum take one
// pass, and with the quotients there are two. Lanes read 16 bytes at a time, and meet only at the end of the first
// pass, by shuffles, without a barrier. But a row has 50,304 numbers, which take a warp long. To keep the memory busy,
// nearly all rows are read at the same time, and L2 cannot hold them until their second pass.
BLOCK(256, threads / 32)
extern "C" __global__ void softmax_forward3(real* __restrict__ out, const real* __restrict__ inp, int N, int V,
                                            int Vp) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= N) return;
    const real* x = inp + (size_t)row * Vp;
    float top = LOWEST, sum = 0.0f;
#pragma unroll 4
    for (int v = W * lane; v < V; v += W * 32)
        softmax_forward_::add(top, sum, softmax_forward_::load_logits(x, v, V));
    float largest = warp_max(top);
    float factor = 1.0f / warp_sum(sum * exponential(top - largest));
#pragma unroll 4
    for (int v = W * lane; v < Vp; v += W * 32) {
        Pack<W> l = {};
        if (v < V) l = softmax_forward_::load_logits(x, v, V);
        for (int i = 0; i < W; i++) l[i] = v + i < V ? exponential(l[i] - largest) * factor : 0.0f;
        store(out + (size_t)row * Vp + v, l);
    }
}

// The same by one block per row: fewer rows are read at the same time. In bf16 these are 27 MB, and the second pass
// finds some of them in L2. In fp32 they are 53 MB, of which L2 keeps nothing, and the time is that of version 3.
BLOCK(1024, 1)
extern "C" __global__ void softmax_forward4(real* __restrict__ out, const real* __restrict__ inp, int N, int V,
                                            int Vp) {
    const real* x = inp + (size_t)blockIdx.x * Vp;
    float top = LOWEST, sum = 0.0f;
#pragma unroll 4
    for (int v = W * threadIdx.x; v < V; v += W * blockDim.x)
        softmax_forward_::add(top, sum, softmax_forward_::load_logits(x, v, V));
    float largest = block_reduce<warp_max>(top, LOWEST);
    float factor = 1.0f / block_reduce<warp_sum>(sum * exponential(top - largest), 0.0f);
#pragma unroll 4
    for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
        Pack<W> l = {};
        if (v < V) l = softmax_forward_::load_logits(x, v, V);
        for (int i = 0; i < W; i++) l[i] = v + i < V ? exponential(l[i] - largest) * factor : 0.0f;
        store(out + (size_t)blockIdx.x * Vp + v, l);
    }
}

// The row stays in shared memory for the second pass, so it is read from device memory once, whatever the caches do. As
// many blocks as fit go through all rows. When a thread has used 16 bytes of its row, it starts the copy of the next
// row's 16 bytes to the same place. So the memory is busy in both directions while results are stored, and idle only
// during the sums, which need shared memory alone. A thread reads only what it copied itself, so there are no barriers
// except those of the sums.
BLOCK(1024, 1)
extern "C" __global__ void __launch_bounds__(1024) softmax_forward5(real* __restrict__ out,
                                                                    const real* __restrict__ inp, int N, int V,
                                                                    int Vp) {
    DYNAMIC_SHARED(real, x);  // (Vp)
    for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) copy16(x + v, inp + (size_t)blockIdx.x * Vp + v, true);
    for (int row = blockIdx.x; row < N; row += gridDim.x) {
        copies_end();
        wait_for_copies<0>();
        float top = LOWEST, sum = 0.0f;
#pragma unroll 4
        for (int v = W * threadIdx.x; v < V; v += W * blockDim.x)
            softmax_forward_::add(top, sum, softmax_forward_::load_logits(x, v, V));
        float largest = block_reduce<warp_max>(top, LOWEST);
        float factor = 1.0f / block_reduce<warp_sum>(sum * exponential(top - largest), 0.0f);
        for (int v = W * threadIdx.x; v < Vp; v += W * blockDim.x) {
            Pack<W> l = load<W>(x + v);
            for (int i = 0; i < W; i++) l[i] = v + i < V ? exponential(l[i] - largest) * factor : 0.0f;
            store(out + (size_t)row * Vp + v, l);
            asm volatile("" ::: "memory");  // l has been read before it is overwritten
            if (row + gridDim.x < (unsigned)N) copy16(x + v, inp + ((size_t)row + gridDim.x) * Vp + v, true);
        }
    }
}
