// What our own kernels for Hopper need beyond kernels.cu's section for it: mbarriers that count
// several arrivals, copies from shared memory that run by themselves, and registers that one
// warpgroup gives to another. It is compiled behind kernels.cu, in front of the files that use it.
// Each of those files may bring it, so it may be there twice. On a CPU dev/cpu/hopper.h has the
// same functions in C++.
#ifndef HOPPER_FUNCTIONS
#define HOPPER_FUNCTIONS
#if HOPPER

#ifdef __CUDACC__
// As kernels.cu's mbarrier_start, with this many arrivals per phase.
__device__ void mbarrier_start(unsigned long long& mbarrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.proxy.async.shared::cta;"
                 ::"r"(shared_address(&mbarrier)), "r"(arrivals) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma and the copy engine, once a barrier
// follows.
__device__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies from shared to device memory that this thread has started and committed: wait until they
// have read their source, which is then free again; or until the results are in device memory.
__device__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void stores_arrive() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// All threads of a warpgroup wait for each other.
__device__ void warpgroup_sync(int group) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}

// A warpgroup gives registers back, or takes those that another has given back.
template <int n>
__device__ void keep_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n)); }
template <int n>
__device__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n)); }

// The same value, but the compiler forgets what it knows about it. So it computes what depends on
// it here, and does not keep all of that in registers through a loop before.
__device__ unsigned forget(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
__device__ float forget(float x) {
    asm volatile("" : "+f"(x));
    return x;
}
__device__ const real* forget(const real* tile) {
    asm volatile("" : "+l"(tile));
    return tile;
}
#else
template <class T>
__device__ T forget(T x) { return x; }
#endif

// A warp counts as one arrival.
__device__ void warp_arrives(unsigned long long& mbarrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(mbarrier);
}

// attention's store_rows without __syncthreads, in which a warpgroup that loads has no part. Returns
// the sums of what this lane stored.
__device__ Pack<HEAD_PACK> store_own_rows(
    Output& array, Head head, const Own& own, real* tile, Result<HP>& x) {
    int in_block = own.warp_first - own.first, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < HP / 8; n++)
        each_row([&](Element e) {
            Pack<2> two = {x[{0, n, e.i}], x[{0, n, e.i + 1}]};
            store(tile + in_tile(in_block + e.row(), column_of(n, 0)), two);
        });
    __syncwarp();
    Pack<HEAD_PACK> sums = {};
    int c = lane % HEAD_LANES * HEAD_PACK;
#pragma unroll
    for (int r = 0; r < 16; r += 32 / HEAD_LANES) {
        int row = in_block + r + lane / HEAD_LANES, t = own.first + row;
        Pack<HEAD_PACK> pack = load<HEAD_PACK>(tile + in_tile(row, c));
        if (t >= head.T) continue;
        array.store(head.at(t) + c, pack);
        sums = sums + pack;
    }
    return sums;
}
#endif
#endif
