/*
Dropout, compiled after kernels.cu for --dropout P: out = inp / (1 - P) where a random number says so, and 0 elsewhere.

The random numbers are SplitMix64's (Steele, Lea and Flood 2014, as in Vigna's splitmix64.c), hashes of a counter. A
first one, of the seed, the step and the site, is the key of a launch. A second one, of the key and the index of a pair
of numbers among all tokens of the step, has 32 bits for each of the two. A number is dropped if its bits are below
threshold = P * 2^32. So a mask can be made again at any time, and needs no memory.
*/

namespace dropout {

// The i-th random number of a seed, 64 bits.
__device__ size_t random_number(size_t seed, size_t i) {
    size_t x = seed + (i + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// counter has the seed modulo 2^24 and the step: fp32 counts exactly up to 2^24. There are fewer than 2^16 sites.
__device__ size_t key_of(const float* counter, int site) {
    return random_number((size_t)counter[0], ((size_t)counter[1] << 16) + site);
}

// n numbers of x, of which the first has this index, an even one, in the step
template <int n>
__device__ void drop_numbers(Pack<n>& x, size_t key, size_t index, size_t threshold, float scale) {
    for (int k = 0; k < n; k += 2) {
        size_t bits = random_number(key, (index + k) / 2);
        x[k] = (bits & 0xffffffff) < threshold ? 0.0f : x[k] * scale;
        x[k + 1] = bits >> 32 < threshold ? 0.0f : x[k + 1] * scale;
    }
}

// out = inp with numbers dropped, n each, a multiple of 32; scale = 1 / (1 - P). They are part part[0] of the step's
// tokens. out may be inp. Bound by memory: a pair of numbers costs some thirty instructions. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void drop(real* out, const real* inp, const float* __restrict__ counter,
                                const size_t* __restrict__ part, int site, size_t threshold, float scale, size_t n) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> x = load<W>(inp + i);
    drop_numbers(x, key_of(counter, site), part[0] * n + i, threshold, scale);
    store(out + i, x);
}

// The same for the residual stream, which is fp32. Items: n numbers.
BLOCK(256, 4 * threads)
extern "C" __global__ void drop_stream(float* out, const float* inp, const float* __restrict__ counter,
                                       const size_t* __restrict__ part, int site, size_t threshold, float scale,
                                       size_t n) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    Pack<4> x = load<4>(inp + i);
    drop_numbers(x, key_of(counter, site), part[0] * n + i, threshold, scale);
    store(out + i, x);
}

}  // namespace dropout
