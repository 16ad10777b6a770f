// The kernels of muon.cu as plain loops, compiled after dev/cpu/kernels.cpp. `blocks` is the number of matrices.

struct Muon { float learning_rate, momentum, rate; };

inline size_t place_of(int j, int per, size_t stride, size_t size) { return j / per * stride + j % per * size; }

extern "C" {

// m += rate (g - m), x = g + momentum (m - g), and the sum of the squares of each matrix of x
void muon_momentum(real* x, double* squares, float* m, const float* grads, int first, int per, size_t stride,
                   size_t size, int shares, const AdamW* adamw, const Muon* muon, const Verdict* verdict, int blocks) {
    Muon a = *muon;
    float scale = adamw->clip > 0.0f && verdict->norm > adamw->clip ? adamw->clip / verdict->norm : 1.0f;
    bool update = verdict->update;
#pragma omp parallel for
    for (long matrix = 0; matrix < blocks; matrix++) {
        size_t start = place_of(first + matrix, per, stride, size);
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (size_t i = 0; i < size; i++) {
            float g = scale * grads[start + i], before = m[start + i], after = before + a.rate * (g - before);
            g += a.momentum * (after - g);
            sum += (double)g * g;
            x[matrix * size + i] = g;
            m[start + i] = update ? after : before;
        }
        std::fill(squares + matrix * shares, squares + (matrix + 1) * shares, 0.0);
        squares[matrix * shares] = sum;  // a GPU's blocks each have a share of it
    }
}

// x = x / its Frobenius norm. No product of a CPU scales, so scales are 1.
void muon_normalize(real* x, float* scales, const double* squares, size_t size, int shares, int lazy,
                    int blocks) {
#pragma omp parallel for
    for (long matrix = 0; matrix < blocks; matrix++) {
        double sum = 0.0;
        for (int i = 0; i < shares; i++) sum += squares[matrix * shares + i];
        double factor = sum > 0.0 ? 1.0 / sqrt(sum) : 0.0;
        scales[matrix] = 1.0f;
        for (size_t i = matrix * size; i < (matrix + 1) * size; i++) x[i] = (float)(x[i] * factor);
    }
}

// p -= learning_rate (scale x + weight_decay p)
void muon_update(real* params, int16_t* low, const real* x, int first, int per, size_t stride, size_t size,
                 float scale, const AdamW* adamw, const Muon* muon, const Verdict* verdict, int blocks) {
    if (!verdict->update) return;
    float rate = muon->learning_rate, decay = adamw->weight_decay;
#pragma omp parallel for
    for (long matrix = 0; matrix < blocks; matrix++) {
        size_t start = place_of(first + matrix, per, stride, size);
        for (size_t i = 0; i < size; i++) {
            float p = master(params, low, start + i);
            store_master(params, low, start + i, p - rate * (scale * x[matrix * size + i] + decay * p));
        }
    }
}

}  // extern "C"
