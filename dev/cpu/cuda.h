// Runs kernels.cu without a GPU. CUDA's language is in language.h, its functions in words.h and atomics.h; the threads
// of a block are in fibers.h and blocks.h, and their barriers and shuffles in warps.h; C++ in place of PTX is in ptx.h
// and, for Hopper, in hopper.h; races.h finds races, and traffic.h counts. A student's cuda_bf16.h is
// halves.h. Given
//
//     #include "cuda.h"
//     #include "kernels.cu"
//     CPU_KERNEL(gelu_forward)  // const char* launch_gelu_forward(grid, block, shared_bytes, args): see its definition
//
// a C++17 compiler makes, with launch.h's object, a shared library with one function for each kernel. OpenMP spreads the blocks of a grid over OS
// threads; a block stays on one, so __shared__ is thread_local. The threads of a block run one after another, as plain
// calls in a loop, as long as none has to wait for another. So an element-wise kernel costs no more than that loop, which
// the compiler even vectorises, and no kernel has to declare that it synchronises. A thread that waits, at a barrier or
// in a shuffle, leaves its frames where they are, and another thread runs on another stack. The switch takes some 25 ns,
// which is what a shuffle costs each lane.
//
// If no thread is left to run and some still wait, the block is stuck, and is reported. Threads run in a fixed order, and
// never two of a block at a time, so no bit of a result depends on the number of cores.
//
// For the same reason one order may hide a forgotten barrier, which is a race on a GPU. So set_order chooses another:
// set_order(0) is forward, -1 is reverse, and a number from 1 on shuffles the warps, and the lanes of a warp anew after
// each wait. A kernel without races gives the same bits in every order. What must not be read is poison, bytes of 0xff,
// which are NaN: shared memory until it is written, and the target of a copy until a thread has waited for it.
//
// -DHOPPER makes kernels.cu take its path for Hopper GPUs, wgmma and TMA. Results of products and boxes that TMA brings
// are poison until they are waited for; so is a product, if a tile that it reads changes before it is waited for.
//
// Flags: -fopenmp (else all runs on one core), -fno-math-errno (makes sqrtf an instruction), and -U_FORTIFY_SOURCE
// (fortified, longjmp refuses to change stacks). With -fsanitize=address,undefined, AddressSanitizer checks indices in
// global memory and in DYNAMIC_SHARED. In a __shared__ array UBSan checks an index of the array itself, and
// AddressSanitizer also one through a pointer, except with g++ in inline functions and templates. With g++'s
// -fsanitize=thread races.h looks at every access, and one OS thread runs all blocks.
#pragma once
#ifdef __APPLE__
#define _XOPEN_SOURCE 600  // or there is no <ucontext.h>
#define _DARWIN_C_SOURCE   // or there is no MAP_ANON
#endif
#include <dlfcn.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#ifdef __SANITIZE_THREAD__
#include <link.h>
#include <signal.h>

#include <unordered_map>
#include <unordered_set>
#if __has_attribute(no_sanitize_coverage)
#define QUIET __attribute__((no_sanitize("thread"), no_sanitize_coverage))  // its accesses are none of a kernel's
#else
#define QUIET __attribute__((no_sanitize("thread")))
#endif
#else
#define QUIET
#endif
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#define OPENMP(...) _Pragma(#__VA_ARGS__)
#else
#define OPENMP(...)
#endif

#if defined(__has_feature) && !defined(__SANITIZE_ADDRESS__)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__  // as g++ says it
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
inline void __asan_unpoison_memory_region(const volatile void*, size_t) {}
inline void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
inline void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

// Up to the end of kernels.cu: two builds of it in one process must not share static variables. What the four headers
// include of the C++ library stands above, so that it stays visible.
#pragma GCC visibility push(hidden)

#include "language.h"
#include "words.h"
#include "races.h"
#include "atomics.h"
#include "fibers.h"
#include "blocks.h"
#include "warps.h"
#include "ptx.h"
#if HOPPER  // it takes g++ a tenth of the time that a small kernel takes
#include "hopper.h"
#endif
