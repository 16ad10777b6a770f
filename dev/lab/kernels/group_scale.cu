// out (n) = inp / the largest |inp| of its group. A group is 32 numbers next to each other; the last may have fewer.
// Formats of 8 or 4 bits store such groups: each number as a part of the largest, and the largest beside them.

// One thread per number, which looks at all numbers of its group. The 32 threads of a group are a warp, and want the same
// number at the same time, so one load brings it to all of them. But these are 32 loads, one after the other, where one
// load could bring all 32 numbers.
BLOCK(256, threads)
extern "C" __global__ void group_scale1(real* __restrict__ out, const real* __restrict__ inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float largest = 0.0f;
    for (size_t j = i / 32 * 32; j < i / 32 * 32 + 32 && j < n; j++) largest = fmaxf(largest, fabsf(to_float(inp[j])));
    from_float(out[i], to_float(inp[i]) / largest);
}

// A group is a warp, and each lane loads its own number only. Then lanes exchange numbers by a butterfly: each with the
// lane 16 further or back, then 8, 4, 2 and 1, and each time keeps the larger of the two. So after 5 shuffles every lane
// knows the largest of 32. warp_max in kernels.cu is these five. A lane without a number must not return before, since
// all 32 lanes of FULL_WARP have to call a shuffle: it takes part with 0.
BLOCK(256, threads)
extern "C" __global__ void group_scale2(real* __restrict__ out, const real* __restrict__ inp, int n) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    float x = i < n ? to_float(inp[i]) : 0.0f, largest = fabsf(x);
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL_WARP, largest, step));
    if (i < n) from_float(out[i], x / largest);
}
