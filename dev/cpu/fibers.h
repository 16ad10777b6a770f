// The stacks on which a block's threads run by turns. For cuda.h.
#pragma once

namespace cuda_on_cpu {

// No powers of two, or the tops of all stacks would compete for a few sets of the caches.
#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_bytes = 260 << 10;
#else
constexpr size_t stack_bytes = 68 << 10;
#endif
constexpr size_t guard_bytes = 64 << 10;  // below each stack; a whole number of pages, whatever the page size

// g++'s own is faster, and libasan replaces _longjmp by one that makes a system call.
#ifndef __clang__
#define MARK_PLACE(context) __builtin_setjmp(reinterpret_cast<void**>(context))
#define GO_TO_PLACE(context) __builtin_longjmp(reinterpret_cast<void**>(context), 1)
#else
#define MARK_PLACE(context) _setjmp(context)
#define GO_TO_PLACE(context) _longjmp(context, 1)
#endif

// A function of a warp or a block that does not touch a kernel's memory. The race finder's hooks in it would cost ten
// times as much as the function, so there it is not inlined into a kernel; CALLER is where the kernel goes on.
#ifdef __SANITIZE_THREAD__
#define UNWATCHED QUIET inline __attribute__((noinline))
#define CALLER __builtin_return_address(0)
#else
#define UNWATCHED __device__
#define CALLER nullptr
#endif

void fiber_main();

// A stack and, while no thread runs on it, the place where it goes on.
struct Fiber {
    jmp_buf context;
    bool started = true;
    const char* what;              // the function in which its thread waits, if it does,
    int line;                      // and the line of that call,
    unsigned mask;                 // the lanes that it waits for, or 0
    const void* pc;                // and the place in the code
    char* mapping = nullptr;       // guard and stack; null for an OS thread's own stack
    const void* bottom = nullptr;  // AddressSanitizer wants to know a stack's bounds, and keeps a second stack for each
    size_t size = 0;
    void* fake_stack = nullptr;

    Fiber() = default;
    explicit Fiber(size_t number) : started(false) {
        void* memory = mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        // A stack that overflows must crash, and not write into the next one. All threads of a kernel need about the
        // same, so it is enough to guard the stacks that a launch uses first. Guards on 1,024 stacks for each core would
        // exceed the 65,530 mappings that Linux allows a process.
        if (number < 32) mprotect(memory, guard_bytes, PROT_NONE);
        mapping = static_cast<char*>(memory);
        bottom = mapping + guard_bytes;
        size = stack_bytes - number % 16 * 256;  // nor are tops a whole number of pages apart
    }
    ~Fiber() {
        if (!mapping) return;
        __asan_unpoison_memory_region(mapping, guard_bytes + stack_bytes);
        munmap(mapping, guard_bytes + stack_bytes);
    }
    __attribute__((noinline, no_sanitize("address"))) void start() {
        started = true;
        ucontext_t fresh;
        getcontext(&fresh);
        fresh.uc_stack.ss_sp = mapping + guard_bytes;
        fresh.uc_stack.ss_size = size;
        fresh.uc_link = nullptr;
        makecontext(&fresh, fiber_main, 0);
        setcontext(&fresh);
    }
};

}  // namespace cuda_on_cpu
