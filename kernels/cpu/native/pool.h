// Threads that share out the pieces of one piece of work at a time.
#pragma once

#include <sched.h>
#include <unistd.h>
#if defined(__linux__) && !defined(QUIRE_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#define QUIRE_FUTEX
#else
#include <condition_variable>
#endif

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

// A counter that threads wait for.
class Ticket {
  public:
    uint32_t load() const { return value_.load(); }
    uint32_t glance() const { return value_.load(std::memory_order_relaxed); }
    void draw() { value_.fetch_add(1); }

#if defined(QUIRE_FUTEX)
    // may end too early
    void wait(uint32_t seen) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake(int threads) { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, threads, nullptr, nullptr, 0); }
#else  // macOS
    void wait(uint32_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return load() != seen; });
    }
    void wake(int) {
        { std::lock_guard<std::mutex> after_its_look(mutex_); }
        changed_.notify_all();
    }

  private:
    std::mutex& mutex_ = *new std::mutex;  // these two stay: at the process's end helpers still wait
    std::condition_variable& changed_ = *new std::condition_variable;
#endif

  private:
    std::atomic<uint32_t> value_{0};
};

// The caller works, too, and waits only for helpers that are at work: a helper that the system keeps from running
// delays nothing but the piece that it holds. So helpers offer their core to others now and then, between two pieces:
// else a busy process beside them would get it in the middle of one. Without work they spin for a moment, then sleep.
class Pool {
  public:
    std::atomic<int> threads{1};  // that may work together

    // work(i) for each i < count. Where another thread is in here already, all on the caller's.
    template <class Work> void run(int64_t count, const Work& work) {
        const int threads = this->threads.load(std::memory_order_relaxed);
        if (threads < 2 || count < 2 || !busy_.try_lock()) {
            for (int64_t i = 0; i < count; ++i) work(i);
            return;
        }
        std::lock_guard<std::mutex> unlock(busy_, std::adopt_lock);
        call_ = [](const void* w, int64_t i) { (*static_cast<const Work*>(w))(i); };
        work_ = &work, count_ = count, helpers_ = int(count < threads ? count : threads) - 1;
        next_.store(0, std::memory_order_relaxed);
        start(helpers_);
        door_.fetch_and(~CLOSED);
        ticket_.draw();
        if (sleeping_.load()) ticket_.wake(helpers_);
        while (take_piece()) {}
        door_.fetch_or(CLOSED);
        for (int spins = 0; door_.load(std::memory_order_acquire) != CLOSED; ++spins)
            spins < 4096 ? pause() : std::this_thread::yield();
    }

  private:
    static constexpr uint32_t CLOSED = 1u << 31;
    using Clock = std::chrono::steady_clock;
    static constexpr auto OFFER = std::chrono::milliseconds(1);  // less than any system's time slice
    static constexpr auto SPIN = std::chrono::microseconds(100);

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
    }

    bool take_piece() {
        const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
        if (i < count_) call_(work_, i);
        return i < count_;
    }

    void start(int helpers) {
        if (process_ != getpid()) {  // a fork has no helpers, nor those that were at the door
            started_ = 0, process_ = getpid();
            door_.store(CLOSED), sleeping_.store(0);
        }
        try {
            for (; started_ < helpers; ++started_) std::thread(&Pool::help, this, started_, ticket_.load()).detach();
        } catch (const std::system_error&) {  // no more threads are allowed: fewer helpers, or none
        }
    }

    void help(int index, uint32_t seen) {
        for (auto offer = Clock::now() + OFFER;;) {
            if (Clock::now() < offer) wait_for_ticket(seen);
            else sched_yield(), offer = Clock::now() + OFFER;
            seen = ticket_.load();
            if (!(door_.fetch_add(1, std::memory_order_acquire) & CLOSED) && index < helpers_)
                while (Clock::now() < offer && take_piece()) {}
            door_.fetch_sub(1, std::memory_order_release);
        }
    }

    void wait_for_ticket(uint32_t seen) {
        const auto end = Clock::now() + SPIN;
        do
            for (int i = 0; i < 32; ++i) {
                if (ticket_.glance() != seen) return;
                pause();
            }
        while (Clock::now() < end);
        sleeping_.fetch_add(1);
        while (ticket_.load() == seen) ticket_.wait(seen);
        sleeping_.fetch_sub(1);
    }

    std::mutex busy_;
    void (*call_)(const void*, int64_t) = nullptr;
    const void* work_ = nullptr;
    int64_t count_ = 0;
    int helpers_ = 0, started_ = 0;  // wanted now; there are
    pid_t process_ = 0;
    std::atomic<int64_t> next_{0};
    std::atomic<uint32_t> door_{CLOSED};  // helpers at work, and whether more may begin
    Ticket ticket_;                       // counts pieces of work
    std::atomic<int> sleeping_{0};
};

extern Pool pool;
