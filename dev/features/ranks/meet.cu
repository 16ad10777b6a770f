/*
A meeting of all ranks' GPUs, in their own memory: see peers.py. Compiled after kernels.cu.
*/

// The ranks' next meeting. A letter is a value with the date of the meeting over it, and goes out in one store. A rank
// sends one to each, and waits for theirs. Whoever has a rank's letter sees all that the rank wrote in earlier kernels
// of its stream: they have ended when this one begins (it must not be launched as a programmatic dependent), and the
// fence orders their writes before the letter. A box has two rows, for even and odd dates: a fast rank may send the
// next letter while a slow one still reads this one. It cannot be two ahead. boxes: the addresses of all ranks' boxes
// (2, ranks); date: of the last meeting; values (ranks) = the values. Bound by latency. Items: threads.
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
