/*
Sums of slots, and parameters from their owners: see slots.py. Compiled after kernels.cu.

Pieces of `piece` numbers go to the ranks in turn: piece k is rank k % ranks', and is piece k / ranks of its share. So
number i of rank's share is number (i / piece * ranks + rank) * piece + i % piece of all. Slots and shares are arrays
in the memory of several ranks, given by their addresses.
*/

namespace slots {

__device__ __forceinline__ size_t place_of(size_t i, size_t piece, int rank, int ranks) {
    return (i / piece * ranks + rank) * piece + i % piece;
}

}  // namespace slots

// gradients (n), a rank's share, = the sums of its parts of all ranks' slots, in the order of ranks. Bound by memory.
// Items: n numbers, a multiple of 4.
BLOCK(256, 4 * threads)
extern "C" __global__ void add_slots(float* __restrict__ gradients, const size_t* __restrict__ slots, size_t n,
                                     size_t piece, int rank, int ranks) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    size_t place = slots::place_of(i, piece, rank, ranks);
    Pack<4> sum = {};
#pragma unroll 4
    for (int r = 0; r < ranks; r++) {
        Pack<4> g = load<4>(reinterpret_cast<const float*>(slots[r]) + place);
        for (int j = 0; j < 4; j++) sum[j] = r ? sum[j] + g[j] : g[j];
    }
    store(gradients + i, sum);
}

// slot (n) = gradients (n), which may lie in other GPUs' memory. Bound by the way there. Items: n numbers, a multiple
// of 4.
BLOCK(256, 4 * threads)
extern "C" __global__ void fill_slot(float* __restrict__ slot, const float* __restrict__ gradients, size_t n) {
    size_t i = 4 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) store(slot + i, load<4>(gradients + i));
}

// Numbers `first` to first + n of all parameters = those in their owners' shares. Bound by the way from there. Items: n
// numbers, a multiple of W, as first is.
BLOCK(256, W * threads)
extern "C" __global__ void gather_shares(real* __restrict__ params, const size_t* __restrict__ shares, size_t first,
                                         size_t n, size_t piece, int ranks) {
    size_t i = first_number();
    if (i >= n) return;
    i += first;
    size_t turn = i / piece;
    store(params + i, load<W>(reinterpret_cast<const real*>(shares[turn % ranks]) + turn / ranks * piece + i % piece));
}
