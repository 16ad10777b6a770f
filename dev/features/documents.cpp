// The kernels of documents.cu as plain loops, compiled after dev/cpu/kernels.cpp, whose loops of
// attention read what the first writes.

extern "C" {

// bounds (B,2,T) = where each token's document begins, and where it ends
void find_documents(int* bounds, const int* tokens, const int* targets, int N, int T, int eot) {
#pragma omp parallel for
    for (int start = 0; start < N; start += T) {
        const int *token = tokens + start, *target = targets + start;
        int *firsts = bounds + 2L * start, *ends = firsts + T, first = 0;
        for (int t = 1; t <= T; t++) {
            if (t < T && !(eot >= 0 && token[t] == eot && (target[t - 1] < 0 || target[t] >= 0)))
                continue;
            std::fill(firsts + first, firsts + t, first);
            std::fill(ends + first, ends + t, t);
            first = t;
        }
    }
}

// x (N,C) += wpe (maxT,C) at each token's place in its document
void add_positions(float* x, const real* wpe, const int* bounds, int N, int T, int C) {
#pragma omp parallel for
    for (long n = 0; n < N; n++) {
        long t = n % T, place = t - bounds[2 * n - t];
#pragma omp simd
        for (int c = 0; c < C; c++) x[n * C + c] += wpe[place * C + c];
    }
}

// dwpe (maxT,C)[place] = the sum of the rows of dout (B,T,C) at this place of a document; += with
// adds
void add_position_gradients(float* dwpe, const real* dout, const int* bounds, int B, int T,
                            int maxT, int C, int adds) {
#pragma omp parallel for
    for (long place = 0; place < maxT; place++) {
        float* d = dwpe + place * C;
        if (!adds) std::fill(d, d + C, 0.0f);
        for (long b = 0; b < B; b++) {
            const int* ends = bounds + (2 * b + 1) * T;
            for (long t = 0; t < T; t = ends[t]) {
                if (t + place >= ends[t]) continue;
                const real* from = dout + (b * T + t + place) * C;
#pragma omp simd
                for (int c = 0; c < C; c++) d[c] += from[c];
            }
        }
    }
}

}  // extern "C"
