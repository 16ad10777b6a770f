// The kernels of dropout.cu as plain loops, compiled after dev/cpu/kernels.cpp.

namespace dropout {

// The i-th random number of a seed, SplitMix64's, 64 bits
inline uint64_t random_number(uint64_t seed, uint64_t i) {
    uint64_t x = seed + (i + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

// out = inp * scale, or 0 where a number's 32 random bits are below the threshold. A hash serves
// two numbers.
template <class number>
inline void drop_numbers(number* out, const number* inp, const float* counter,
                         const size_t* part, int site, size_t threshold, float scale, size_t n) {
    uint64_t key = random_number((uint64_t)counter[0], ((uint64_t)counter[1] << 16) + site);
    uint64_t first = part[0] * n / 2;
#pragma omp parallel for simd
    for (long pair = 0; pair < (long)(n / 2); pair++) {
        uint64_t bits = random_number(key, first + pair);
        long i = 2 * pair;
        out[i] = (bits & 0xffffffff) < threshold ? 0.0f : inp[i] * scale;
        out[i + 1] = bits >> 32 < threshold ? 0.0f : inp[i + 1] * scale;
    }
}

}  // namespace dropout

extern "C" {

// out = inp with numbers dropped, n each; out may be inp
void drop(real* out, const real* inp, const float* counter, const size_t* part, int site,
          size_t threshold, float scale, size_t n) {
    dropout::drop_numbers(out, inp, counter, part, site, threshold, scale, n);
}

// The same for the residual stream, which is fp32
void drop_stream(float* out, const float* inp, const float* counter, const size_t* part, int site,
                 size_t threshold, float scale, size_t n) {
    dropout::drop_numbers(out, inp, counter, part, site, threshold, scale, n);
}

}  // extern "C"
