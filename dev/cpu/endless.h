// Finds a thread that computes for ever. The threads of a block run by turns, so a loop in which one waits for what
// another writes, without a barrier, has no end here: the other never gets its turn. For cuda.h.
#pragma once

#ifndef PATIENCE
#define PATIENCE 60  // seconds of a thread's own computing; a thread of a kernel takes far less
#endif

namespace cuda_on_cpu {

#ifdef __linux__
// While it lives, a timer interrupts this OS thread after every PATIENCE seconds that it has computed, and has it leave
// a block in which the same thread still runs as at the last time, without having waited since.
class Watch {
    void (*look)(Watch*);  // that of this library: another one may have set the signal's handler
    Block* watched;
    size_t number = 0, turns = 0;
    unsigned thread = 0;
    int timer = -1;

    static void look_here(Watch* w) {
        Block& b = *w->watched;
        if (b.inside && b.number == w->number && b.turns == w->turns && thread_number() == w->thread)
            b.leave(" is stuck: thread " + std::to_string(w->thread) + " has computed for " + std::to_string(PATIENCE) +
                    " s without a wait; a loop until another thread of the block writes something never ends here, where "
                    "threads run by turns: expected a barrier");
        w->number = b.number, w->turns = b.turns, w->thread = thread_number();
    }
    static void on_signal(int, siginfo_t* info, void*) {
        Watch* w = static_cast<Watch*>(info->si_value.sival_ptr);
        w->look(w);
    }

public:
    explicit Watch(Block* b) : look(look_here), watched(b) {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER;  // leave() does not return from the handler
        sigaction(SIGVTALRM, &action, nullptr);
        sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event.sigev_signo = SIGVTALRM;
        event.sigev_value.sival_ptr = this;
        event._sigev_un._tid = int(syscall(SYS_gettid));
        // Older C libraries have the functions in a library of their own.
        if (syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, &timer)) return;
        const itimerspec every = {{PATIENCE, 0}, {PATIENCE, 0}};
        syscall(SYS_timer_settime, timer, 0, &every, nullptr);
    }
    ~Watch() {
        if (timer >= 0) syscall(SYS_timer_delete, timer);
    }
};
#else
struct Watch { explicit Watch(Block*) {} };
#endif

}  // namespace cuda_on_cpu
