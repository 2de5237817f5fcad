#include "runtime/step_graph.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <thread>

#include "simd/int_math.h"

namespace sgl_kernel {
namespace {

constexpr int kStepBits = 16;
constexpr int kTaskBits = 24;
constexpr uint64_t kMaxTasks = (uint64_t{1} << kTaskBits) - 1;
constexpr uint64_t kMaxSteps = (uint64_t{1} << kStepBits) - 2;
constexpr uint64_t kStepMask = (uint64_t{1} << kStepBits) - 1;
constexpr uint64_t kEnd = ~uint64_t{0};

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A step takes microseconds, so whoever waits keeps looking, and does something useful between two
// looks while there is something. After some 100 us something else has the processor that is waited
// for, and may have this one.
template <typename Done, typename Useful>
void wait_until(const Done& done, const Useful& do_some) {
  constexpr int kLooks = 2000;
  for (int looks = 0; !done(); ++looks) {
    if (do_some()) continue;
    looks < kLooks ? pause_briefly() : std::this_thread::yield();
  }
}

// Fetches into the thread's cache, while the thread waits, the beginning of its part of the next
// stream. Memory would stand idle meanwhile, and the step would begin with a thread waiting for its
// first lines.
class Prefetcher {
 public:
  Prefetcher(const std::vector<Step>& steps, int64_t part, int64_t parts)
      : steps_(steps), part_(part), parts_(parts) {}

  // Looks for the first stream from step `index` on.
  void go_to(size_t index) {
    if (index <= index_) return;  // it has not begun yet
    while (index < steps_.size() && steps_[index].stream.data == nullptr) ++index;
    index_ = index;
    next_ = end_ = nullptr;
    if (index == steps_.size()) return;
    const Stream& stream = steps_[index].stream;
    next_ = stream.data + stream.bytes * part_ / parts_;
    end_ = stream.data + stream.bytes * (part_ + 1) / parts_;
    if (end_ - next_ > kMostBytes) end_ = next_ + kMostBytes;
  }

  // Fetches a few lines; false if there are none.
  bool fetch_some() {
    if (next_ >= end_) return false;
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(next_ + line * 64, 0, 2);
    next_ += kLines * 64;
    return true;
  }

 private:
  static constexpr int kLines = 8;
  static constexpr int64_t kMostBytes = 256 << 10;  // a part of any second-level cache

  const std::vector<Step>& steps_;
  const int64_t part_;
  const int64_t parts_;
  size_t index_ = 0;  // the step whose stream is fetched
  const char* next_ = nullptr;
  const char* end_ = nullptr;
};

// The tasks of a step that one thread begins with, and from which others take when they have done
// theirs: packed into one number, step << 48 | begin << 24 | end, so that one compare-and-swap
// takes some. A thread that comes late, when the queue belongs to another step, takes nothing. On a
// cache line of its own.
struct alignas(64) WorkQueue {
  std::atomic<uint64_t> left{0};
};

uint64_t pack(uint64_t step, uint64_t begin, uint64_t end) {
  return step << (2 * kTaskBits) | begin << kTaskBits | end;
}

// One run of a graph. The first thread to come is the leader, which prepares steps, fills the work
// queues and says which step is current; the others are workers. Nobody waits for threads that have
// not come, so any number of threads will do.
class Run {
 public:
  Run(const std::vector<Step>& steps, int64_t threads)
      : steps_(steps), queues_(static_cast<size_t>(threads)) {}

  void join() {
    const int64_t me = arrivals_.fetch_add(1);
    me == 0 ? run_leader() : run_worker(me);
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  void run_leader() {
    Prefetcher prefetcher(steps_, 0, static_cast<int64_t>(queues_.size()));
    for (size_t i = 0; i < steps_.size() && !failed_.load(std::memory_order_acquire); ++i) {
      guard([&] { leader_turns(i, &prefetcher); });
    }
    current_.store(kEnd, std::memory_order_release);
  }

  void leader_turns(size_t index, Prefetcher* prefetcher) {
    const Step& step = steps_[index];
    leader_step(index, step.prepare(), prefetcher);
    if (step.again == nullptr) return;
    for (int64_t count; !failed_.load(std::memory_order_acquire) && (count = step.again()) >= 0;) {
      leader_step(index - 1, count, prefetcher);
      if (failed_.load(std::memory_order_acquire)) return;
      leader_step(index, step.prepare(), prefetcher);
    }
  }

  void leader_step(size_t index, int64_t tasks, Prefetcher* prefetcher) {
    const Step& step = steps_[index];
    const uint64_t count = static_cast<uint64_t>(tasks);
    // More tasks than a queue can count run in one piece.
    const uint64_t parts =
        count > kMaxTasks
            ? 1
            : std::min<uint64_t>(queues_.size(), static_cast<uint64_t>(div_up(tasks, step.grain)));
    if (parts <= 1) {
      if (count > 0) step.run({0, static_cast<int64_t>(count)});
      return;
    }
    const uint64_t number = index + 1;
    done_.store(0, std::memory_order_relaxed);
    for (uint64_t p = 0; p < parts; ++p) {
      queues_[p].left.store(pack(number, count * p / parts, count * (p + 1) / parts),
                            std::memory_order_release);
    }
    current_.store(++calls_ << 48 | number << 32 | parts, std::memory_order_release);
    work(0, number, parts);
    prefetcher->go_to(index + 1);
    wait_until([&] { return done_.load(std::memory_order_acquire) == count; },
               [&] { return prefetcher->fetch_some(); });
  }

  void run_worker(int64_t me) {
    Prefetcher prefetcher(steps_, me, static_cast<int64_t>(queues_.size()));
    uint64_t seen = 0;
    for (;;) {
      uint64_t now = seen;
      prefetcher.go_to(seen >> 32 & kStepMask);
      wait_until([&] { return (now = current_.load(std::memory_order_acquire)) != seen; },
                 [&] { return prefetcher.fetch_some(); });
      if (now == kEnd) return;
      seen = now;
      work(static_cast<uint64_t>(me), now >> 32 & kStepMask, now & 0xFFFFFFFFu);
    }
  }

  // Own tasks first, then what others have left.
  void work(uint64_t me, uint64_t number, uint64_t parts) {
    for (uint64_t p = 0; p < parts; ++p) take_from(queues_[(me + p) % parts], number);
  }

  // Takes half of what is left, again and again: few calls while there is much, small ones at the
  // end, where threads wait for each other.
  void take_from(WorkQueue& queue, uint64_t number) {
    const uint64_t grain = static_cast<uint64_t>(steps_[number - 1].grain);
    uint64_t left = queue.left.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t begin = left >> kTaskBits & kMaxTasks;
      const uint64_t end = left & kMaxTasks;
      if (left >> (2 * kTaskBits) != number || begin == end) return;
      const uint64_t until = end - begin < 2 * grain ? end : end - (end - begin) / 2;
      if (!queue.left.compare_exchange_weak(left, pack(number, until, end),
                                            std::memory_order_acq_rel)) {
        continue;
      }
      guard([&] {
        steps_[number - 1].run({static_cast<int64_t>(begin), static_cast<int64_t>(until)});
      });
      done_.fetch_add(until - begin, std::memory_order_release);
      left = queue.left.load(std::memory_order_acquire);
    }
  }

  template <typename Body>
  void guard(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!claimed_.test_and_set()) {
        error_ = std::current_exception();
        failed_.store(true, std::memory_order_release);
      }
    }
  }

  const std::vector<Step>& steps_;
  std::vector<WorkQueue> queues_;
  alignas(64) std::atomic<int64_t> arrivals_{0};
  // Counts calls, so that a step that runs again is a new one, << 48 | number of the step << 32 |
  // its work queues.
  alignas(64) std::atomic<uint64_t> current_{0};
  uint64_t calls_ = 0;                         // of the leader
  alignas(64) std::atomic<uint64_t> done_{0};  // tasks of the current step
  std::atomic<bool> failed_{false};
  std::atomic_flag claimed_ = ATOMIC_FLAG_INIT;
  std::exception_ptr error_;
};

}  // namespace

void StepGraph::add(Step step) {
  if (steps_.size() >= kMaxSteps) throw std::length_error("a graph holds at most 65534 steps");
  steps_.push_back(std::move(step));
}

void StepGraph::run(int64_t threads, const Team& team) const {
  Run run(steps_, std::max<int64_t>(1, threads));
  team(threads, [&run] { run.join(); });
  run.rethrow();
}

}  // namespace sgl_kernel
