/*
The kernels of llama3.cu as plain loops, for --device cpu; dev/cpu/kernels.cpp, which is compiled
before this file, has those of GPT-2, and says what a loop's arguments are. H: hidden channels of
the MLP.
*/

// ---- residual stream and RMSNorm (Zhang and Sennrich 2019, section 4) ----

extern "C" {

// x (N,C) += branch (N,C), unless branch is null; copy (N,C) = x. Then, for each row,
//   out = x * rstd * weight, with rstd = 1/sqrt(average of the squares + eps)
void residual_rmsnorm_forward(real* out, float* rstd, real* copy, float* x, const real* branch,
                              const real* weight, float eps, int N, int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        float* row = x + n * C;
        float squares = 0.0f;
        if (branch) {
#pragma omp simd
            for (int c = 0; c < C; c++) row[c] += branch[n * C + c];
        }
#pragma omp simd reduction(+ : squares)
        for (int c = 0; c < C; c++) {
            copy[n * C + c] = row[c];
            squares += row[c] * row[c];
        }
        float s = rstd[n] = 1.0f / sqrtf(squares / C + eps);
#pragma omp simd
        for (int c = 0; c < C; c++) out[n * C + c] = row[c] * s * weight[c];
    }
}

// out (N,C) again, from the copy that the forward pass left (in bf16 it is rounded, so that out may
// differ by a rounding)
void rmsnorm_again(real* out, const real* inp, const float* rstd, const real* weight, int N,
                   int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
#pragma omp simd
        for (int c = 0; c < C; c++) out[n * C + c] = inp[n * C + c] * rstd[n] * weight[c];
    }
}

// With norm = inp * rstd, and dnorm = dout * weight, for each row:
//   dresidual (N,C) += rstd * (dnorm - norm * average(dnorm * norm))
//   dweight (C) = the sum over rows of dout * norm
// Each of `blocks` shares of the rows makes a row of partials (blocks,C); add_partials adds them.
void rmsnorm_backward(real* dresidual, float* partials, const real* dout, const real* inp,
                      const real* weight, const float* rstd, int N, int C, int blocks) {
#pragma omp parallel for
    for (long block = 0; block < blocks; block++) {
        float* dweight = partials + block * C;
        std::fill(dweight, dweight + C, 0.0f);
        for (long n = block * N / blocks; n < (block + 1) * N / blocks; n++) {
            const real *x = inp + n * C, *dy = dout + n * C;
            real* dx = dresidual + n * C;
            float s = rstd[n], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int c = 0; c < C; c++) sum += dy[c] * weight[c] * x[c] * s;
            float average = sum / C;
#pragma omp simd
            for (int c = 0; c < C; c++) {
                float norm = x[c] * s;
                dx[c] = dx[c] + s * (dy[c] * weight[c] - norm * average);
                dweight[c] += dy[c] * norm;
            }
        }
    }
}

// ---- rotary position embedding (Su et al. 2021, section 3.2.2) ----

// table (T,HS) = the cosine, at 2i, and the sine, at 2i + 1, of t times pair i's frequency,
// theta^(-2i/HS). With a factor above 1, pairs that turn less than once in 8,192 tokens turn
// `factor` times slower, and those that turn less than four times somewhat slower. Numbers are
// rounded to fp32 where PyTorch rounds them.
void rope_table(float* table, float theta, float factor, int T, int HS) {
    for (int i = 0; i < HS / 2; i++) {
        float frequency = 1.0f / (float)pow((double)theta, (double)((float)(2 * i) / HS));
        float turns = 8192.0f * frequency / 6.283185307f;
        float kept = std::min(1.0f, std::max(0.0f, (turns - 1.0f) / (4.0f - 1.0f)));
        if (factor != 1.0f && kept < 1.0f)
            frequency = (1.0f - kept) * frequency / factor + kept * frequency;
        for (long t = 0; t < T; t++) {
            table[t * HS + 2 * i] = cosf((float)t * frequency);
            table[t * HS + 2 * i + 1] = sinf((float)t * frequency);
        }
    }
}

// Each pair of channels (x, y) of the first `heads` heads, queries and keys, becomes (x cos - y
// sin, x sin + y cos), in place; `sign` turns the other way. A pair is two neighbours of a head, or
// with `half` the channels i and i + HS/2. A row of qkv (N,row) is a token's.
static void turn_pairs(real* qkv, const float* table, int N, int T, int heads, int row, int half,
                       int HS, float sign) {
    int step = half ? 1 : 2, other = half ? HS / 2 : 1;
#pragma omp parallel for
    for (long n = 0; n < N; n++)
        for (int h = 0; h < heads; h++) {
            real* head = qkv + n * row + h * HS;
            const float* turn = table + n % T * HS;
#pragma omp simd
            for (int i = 0; i < HS / 2; i++) {
                float cosine = turn[2 * i], sine = sign * turn[2 * i + 1];
                float x = head[step * i], y = head[step * i + other];
                head[step * i] = x * cosine - y * sine;
                head[step * i + other] = x * sine + y * cosine;
            }
        }
}

void rope_forward(real* qkv, const float* table, int N, int T, int heads, int row, int half,
                  int HS) {
    turn_pairs(qkv, table, N, T, heads, row, half, HS, 1.0f);
}

// The transpose of a rotation is its inverse: the gradient turns back.
void rope_backward(real* dqkv, const float* table, int N, int T, int heads, int row, int half,
                   int HS) {
    turn_pairs(dqkv, table, N, T, heads, row, half, HS, -1.0f);
}

// ---- SwiGLU (Shazeer 2020, section 2) ----

// out (N,H) = up * gate * g, with g = 1/(1 + exp(-gate)). A row of inp (N,2H) is up, then gate.
void swiglu_forward(real* out, const real* inp, int N, int H) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        const real *up = inp + n * 2 * H, *gate = up + H;
#pragma omp simd
        for (int i = 0; i < H; i++)
            out[n * H + i] = up[i] * (gate[i] / (1.0f + exponential(-gate[i])));
    }
}

// dup = dout * gate * g        dgate = dout * up * g * (1 + gate * (1 - g))
// dinp (N,2H) has both, and may be inp.
void swiglu_backward(real* dinp, const real* dout, const real* inp, int N, int H) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        const real *up = inp + n * 2 * H, *gate = up + H;
        real *dup = dinp + n * 2 * H, *dgate = dup + H;
#pragma omp simd
        for (int i = 0; i < H; i++) {
            float u = up[i], x = gate[i], d = dout[n * H + i], g = 1.0f / (1.0f + exponential(-x));
            dup[i] = d * x * g;
            dgate[i] = d * u * g * (1.0f + x * (1.0f - g));
        }
    }
}

}  // extern "C"
