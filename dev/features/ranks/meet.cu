/*
A meeting of all ranks' GPUs, in their own memory: see peers.py. Compiled after kernels.cu.
*/

// The ranks' next meeting. A letter is a value with the date of the meeting over it, and goes out in one store. A rank
// sends one to each, and waits for theirs. What it has written before, by this kernel or earlier ones of its stream,
// can be seen by who has its letter: they have ended, unless this one is launched as their programmatic dependent, and
// a fence holds for all that its thread knows of. Each box has
// two rows of letters, for even and odd dates: a rank may be at the next meeting while others still read. boxes: the
// addresses of all ranks' boxes (2, ranks); date: of the last meeting; values (ranks) = the values. Bound by latency.
// Items: threads.
BLOCK(32, threads)
extern "C" __global__ void meet(const size_t* __restrict__ boxes, unsigned* date, float* __restrict__ values,
                                const float* __restrict__ value, int rank, int ranks) {
    typedef unsigned long long letter;
    unsigned now = *date + 1;
    __syncwarp();
    __threadfence_system();
    letter own = (letter)now << 32 | __float_as_uint(*value);
    for (int other = threadIdx.x; other < ranks; other += blockDim.x)
        reinterpret_cast<volatile letter*>(boxes[other])[now % 2 * ranks + rank] = own;
    volatile letter* box = reinterpret_cast<volatile letter*>(boxes[rank]) + now % 2 * ranks;
    for (int other = threadIdx.x; other < ranks; other += blockDim.x) {
        letter came = box[other];
        while ((unsigned)(came >> 32) != now) came = box[other];
        values[other] = __uint_as_float((unsigned)came);
    }
    __threadfence_system();
    __syncwarp();
    if (threadIdx.x == 0) *date = now;
}
