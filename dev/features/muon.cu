/*
Muon: what happens to a hidden matrix before and after its orthogonalization, which is matrix products alone (see
muon.py). Compiled after kernels.cu for --optimizer muon.

All matrices of a launch have the same shape, `size` numbers. In memory they lie in a tensor of several layers: `per`
of them one after another in each layer, and `stride` numbers from a layer to the next. The arrays begin at the first
layer's first matrix. A launch begins with matrix `first`, and leaves them one after another in x.
*/

namespace muon {

constexpr int SHARE = 8192;  // numbers of a matrix whose squares one block adds up: muon.py has it too

// The settings of a step, in device memory because a recorded graph cannot change its arguments. rate is 1 - momentum.
struct Muon { float learning_rate, momentum, rate; };

// Where matrix j begins in its tensor.
__device__ size_t place_of(int j, int per, size_t stride, size_t size) { return j / per * stride + j % per * size; }

// The sum over a block; all threads get it.
__device__ double block_sum(double x) {
    __shared__ double of_warp[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) of_warp[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? of_warp[lane] : 0.0);
}

// m += rate (g - m) and x = g + momentum (m - g), with g the gradient, scaled as AdamW's is: Nesterov's momentum as in
// torch.optim.Muon. squares (matrices,shares) = the sums of squares of x, in double, where no square of an fp32
// overflows or vanishes. It reads two fp32 numbers a parameter, and writes one and a real. Items: numbers of a matrix
// along x, matrices along y.
BLOCK(256, 8192, 1)
extern "C" __global__ void muon_momentum(
    real* __restrict__ x, double* __restrict__ squares, float* __restrict__ m, const float* __restrict__ grads,
    int first, int per, size_t stride, size_t size, int shares, const AdamW* __restrict__ adamw,
    const Muon* __restrict__ muon, const Verdict* __restrict__ verdict) {
    size_t start = place_of(first + blockIdx.y, per, stride, size), begin = (size_t)blockIdx.x * SHARE;
    Muon a = *muon;
    float clip = adamw->clip, norm = verdict->norm, scale = clip > 0.0f && norm > clip ? clip / norm : 1.0f;
    bool update = verdict->update;
    double sum = 0.0;
#pragma unroll 4
    for (int k = W * threadIdx.x; k < SHARE; k += W * (int)blockDim.x) {
        size_t i = begin + k;
        if (i >= size) break;
        Pack<W> g = load<W>(grads + start + i), m1 = load<W>(m + start + i);
        for (int j = 0; j < W; j++) {
            g[j] *= scale;
            m1[j] += a.rate * (g[j] - m1[j]);
            g[j] += a.momentum * (m1[j] - g[j]);
            sum += (double)g[j] * g[j];
        }
        store(x + blockIdx.y * size + i, g);
        if (update) store(m + start + i, m1);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) squares[(size_t)blockIdx.y * shares + blockIdx.x] = sum;
}

// x = x / the square root of the sum of its squares, its Frobenius norm; a matrix of zeros stays as it is. The quotient
// is computed in double, which has a reciprocal for every norm of fp32 numbers. scales (matrices) = 1. If the products
// can scale, as `lazy` says, most matrices stay as they are, and 1 / the norm goes to scales: but not those whose
// products fp32 might not hold. Items: as above, or fewer blocks.
BLOCK(256, 8192, 1)
extern "C" __global__ void muon_normalize(
    real* __restrict__ x, float* __restrict__ scales, const double* __restrict__ squares, size_t size, int shares,
    int lazy) {
    double sum = 0.0;
    for (int i = threadIdx.x; i < shares; i += (int)blockDim.x) sum += squares[(size_t)blockIdx.y * shares + i];
    sum = block_sum(sum);
    double factor = sum > 0.0 ? 1.0 / sqrt(sum) : 0.0;
    bool stays = lazy && factor > 1e-9 && factor < 1e9;
    if (blockIdx.x == 0 && threadIdx.x == 0) scales[blockIdx.y] = stays ? (float)factor : 1.0f;
    if (stays) return;
    real* matrix = x + blockIdx.y * size;
    for (size_t begin = (size_t)blockIdx.x * SHARE; begin < size; begin += (size_t)gridDim.x * SHARE) {
#pragma unroll 4
        for (int k = W * threadIdx.x; k < SHARE; k += W * (int)blockDim.x) {
            size_t i = begin + k;
            if (i >= size) break;
            Pack<W> p = load<W>(matrix + i);
            for (int j = 0; j < W; j++) p[j] = (float)(p[j] * factor);
            store(matrix + i, p);
        }
    }
}

// p -= learning_rate (scale x + weight_decay p), with x the orthogonalized matrices: the last one first, which may
// still be in L2. Items: numbers of a matrix along x, matrices along y.
BLOCK(256, W * threads, 1)
extern "C" __global__ void muon_update(
    real* __restrict__ params, low_half* __restrict__ low, const real* __restrict__ x, int first, int per,
    size_t stride, size_t size, float scale, const AdamW* __restrict__ adamw, const Muon* __restrict__ muon,
    const Verdict* __restrict__ verdict) {
    size_t i = first_number();
    if (i >= size) return;
    int j = gridDim.y - 1 - blockIdx.y;
    size_t at = place_of(first + j, per, stride, size) + i;
    Pack<W> p = load_master<W>(params, low, at), change = load<W>(x + j * size + i);
    float rate = muon->learning_rate, decay = adamw->weight_decay;
    for (int j = 0; j < W; j++) p[j] -= rate * (scale * change[j] + decay * p[j]);
    if (verdict->update) store_master(params, low, at, p);
}

}  // namespace muon
