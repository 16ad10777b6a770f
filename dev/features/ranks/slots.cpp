// The kernels of slots.cu as plain loops, compiled after dev/cpu/kernels.cpp.

extern "C" {

// gradients (n), a rank's share, = the sums of its parts of all ranks' slots, in the order of ranks
void add_slots(float* gradients, const size_t* slots, size_t n, size_t piece, int rank, int ranks) {
#pragma omp parallel for
    for (long i = 0; i < (long)n; i++) {
        size_t place = (i / piece * ranks + rank) * piece + i % piece;
        float sum = reinterpret_cast<const float*>(slots[0])[place];
        for (int r = 1; r < ranks; r++) sum += reinterpret_cast<const float*>(slots[r])[place];
        gradients[i] = sum;
    }
}

// slot (n) = gradients (n)
void fill_slot(float* slot, const float* gradients, size_t n) { std::copy(gradients, gradients + n, slot); }

// Numbers `first` to first + n of all parameters = those in their owners' shares
void gather_shares(real* params, const size_t* shares, size_t first, size_t n, size_t piece, int ranks) {
#pragma omp parallel for
    for (long i = first; i < (long)(first + n); i++) {
        size_t turn = i / piece;
        params[i] = reinterpret_cast<const real*>(shares[turn % ranks])[turn / ranks * piece + i % piece];
    }
}

}  // extern "C"
