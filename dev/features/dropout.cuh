// The Output for dropout.py on a GPU, in place of kernels.cu's: fused_biases.cuh's, which also drops
// numbers of a branch where a norm's kernel adds it to the stream; and, where such a kernel makes the
// stream's gradient, writes the branch's. dropout.cu has the functions.
#define Output SummedOutput
#include "fused_biases.cuh"
#undef Output

namespace dropout {  // none is inline: start.py compiles calls without the bodies
__device__ size_t key_of(const float* counter, int site);
template <int n>
__device__ void drop_numbers(Pack<n>& x, size_t key, size_t index, size_t threshold, float scale);
}  // namespace dropout

struct Output : SummedOutput {
    const float* counter;  // as for the kernel `drop`; null: nothing is dropped
    const size_t* part;
    size_t threshold;
    size_t n;
    real* branch;  // the branch's gradient, or null
    int site;
    float scale;
    size_t key, first;  // for begin

    __device__ void begin() {
        if (!counter) return;
        key = dropout::key_of(counter, site);
        first = part[0] * n;
    }
    template <int n>
    __device__ void store(size_t i, Pack<n> x) { SummedOutput::store(i, x); }
    template <int n>
    __device__ void store(size_t i, Pack<n> x, Pack<n> dropped) {
        store(i, x);
        if (branch) ::store(branch + i, dropped);
    }
    // As `drop`, which reads what is stored, and stores what it drops.
    template <int n>
    __device__ Pack<n> drop(size_t i, Pack<n> x) {
        round(x);
        dropout::drop_numbers(x, key, first + i, threshold, scale);
        round(x);
        return x;
    }
    template <int n>
    __device__ void round(Pack<n>& x) {
        for (int j = 0; j < n; j++) {
            real stored;
            from_float(stored, x[j]);
            x[j] = to_float(stored);
        }
    }
};
