// out (N,H) = up * silu(gate), with up and then gate the halves of each row of inp (N,2H), which one product has
// computed, and silu(x) = x / (1 + exp(-x)) (Shazeer 2020, section 2).

// One thread per number of out.
BLOCK(128, threads)
extern "C" __global__ void swiglu_forward1(real* __restrict__ out, const real* __restrict__ inp, int N, int H) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)N * H) return;
    const real* up = inp + i / H * 2 * H + i % H;
    float gate = to_float(up[H]);
    from_float(out[i], to_float(*up) * gate / (1.0f + expf(-gate)));
}

// swiglu_forward in llama3.cu: 16 bytes per lane of either half, one exponential of the hardware where results are
// rounded to bf16, and a division of 32 bits to find the row.
