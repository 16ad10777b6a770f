// right
template <int n> struct Index {
    int at[n];
    template <class F> __device__ void each(F f) { for (int k = 0; k < n; k++) f(at[k]); }
};
BLOCK(128, threads)
extern "C" __global__ void my_permute(real* out, const real* inp, int B, int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x, all = (size_t)B * T * 3 * NH * head;
    if (i >= all) return;
    Index<5> of;
    size_t rest = i;
    int sizes[5] = {head, T, NH, B, 3}, k = 0;
    of.each([&](int& x) { x = rest % sizes[k]; rest /= sizes[k++]; });
    auto [c, t, h, b, which] = of.at;
    out[i] = inp[((((size_t)b * T + t) * 3 + which) * NH + h) * head + c];
}
