/*
AdamW with its moments in bf16, which halves their memory. Compiled after kernels.cu for --moments bf16.

A bf16 has 7 bits of mantissa, so half of its last bit is 1/512 to 1/256 of a number. With beta2 = 0.999 a step lowers
the second moment by at most 1/1000: rounded to nearest, it would never fall. So it is rounded stochastically (Gupta et
al. 2015, section 3.1): a number that is a quarter of the way up is rounded up in a quarter of the cases, and the mean
over many steps is right. The update of a parameter uses the moments before they are rounded.

The random numbers are SplitMix64's (Steele, Lea and Flood 2014, as in Vigna's splitmix64.c). It hashes a counter, so a
number does not depend on earlier ones. The counter is made of the seed, the step, and the parameter's index in the
model. So the bits are the same on a GPU, on a CPU, and on any number of ranks.
*/

namespace moments {

struct bf16_moment { unsigned short bits; };  // the upper half of an fp32, truncated after noise was added
__device__ __forceinline__ float to_float(bf16_moment x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ __forceinline__ void from_float(bf16_moment& to, float x) { to.bits = __float_as_uint(x) >> 16; }

// x plus parts/65,536 of the last bit of its upper half. With random parts, truncating this rounds x stochastically.
__device__ __forceinline__ float plus_noise(float x, unsigned parts) {
    return __uint_as_float(__float_as_uint(x) + parts);
}

// The i-th random number of a seed, 64 bits.
__device__ __forceinline__ size_t random_number(size_t seed, size_t i) {
    size_t x = seed + (i + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// adamw with moments in bf16. With --zero a tensor here is a rank's pieces, one of each layer. So number j of tensor i
// is number first[i] + j / piece[i] * stride[i] + j % piece[i] of all parameters, of which there are fewer than 2^40.
// places (3, tensors) has first, piece and stride; noise has the seed and the step. Items: n numbers.
BLOCK(256, W * threads)
extern "C" __global__ void adamw_bf16(
    real* __restrict__ params, low_half* __restrict__ low, const float* __restrict__ grads,
    bf16_moment* __restrict__ m, bf16_moment* __restrict__ v, const size_t* __restrict__ starts,
    const int* __restrict__ decayed, int tensors, size_t n, const AdamW* __restrict__ settings,
    const Verdict* __restrict__ verdict, const size_t* __restrict__ places, const float* __restrict__ noise) {
    size_t i = first_number();
    if (i >= n) return;
    Pack<W> g = load<W>(grads + i), p = load_master<W>(params, low, i);
    Pack<W> m1 = load<W>(m + i), m2 = load<W>(v + i);
    AdamW a = *settings;
    int tensor = tensor_at(i, starts, tensors);
    adamw_step(p, m1, m2, g, a, decayed[tensor], verdict->norm);
    if (!verdict->update) return;
    store_master(params, low, i, p);
    size_t first = places[tensor], piece = places[tensors + tensor], stride = places[2 * tensors + tensor];
    size_t j = i - starts[tensor], in_piece = j % piece, number = first + j / piece * stride + in_piece;
    for (int k = 0; k < W; k++, number++, in_piece++) {
        if (in_piece == piece) in_piece = 0, number += stride - piece;
        size_t bits = random_number((size_t)noise[0], ((size_t)noise[1] << 40) + number);
        m1[k] = plus_noise(m1[k], bits & 0xffff);
        m2[k] = plus_noise(m2[k], bits >> 16 & 0xffff);
    }
    store(m + i, m1);
    store(v + i, m2);
}

}  // namespace moments
