// right
BLOCK(128, threads)
extern "C" __global__ void my_permute(
    real* out, const real* inp, int B, int T, int NH, int head) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)3 * B * NH * T * head) return;
    int sizes[] = {head, T, NH, B, 3}, at[5], level = 0;
    size_t rest = i;
    while (level < 5) {
        at[level] = rest % sizes[level];
        rest /= sizes[level++];
    }
    size_t token = (size_t)at[3] * T + at[1];
    out[i] = inp[((token * 3 + at[4]) * NH + at[2]) * head + at[0]];
}
