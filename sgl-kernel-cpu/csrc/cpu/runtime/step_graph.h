// Recorded work: what the operators of a forward pass did, to be done again without their callers.
//
// A decode pass is some hundred operators of a few microseconds each. Run one by one, each pays for
// Python, the dispatcher, its checks, and for waking threads and waiting for the slowest. A graph
// runs all of them in one parallel region: threads take tasks of the current step as they are free,
// and wait for each other by looking at a counter.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/task_range.h"

namespace sgl_kernel {

// Memory that the tasks of a step read, the first task from its beginning, the last up to its end.
struct Stream {
  const char* data = nullptr;
  int64_t bytes = 0;
};

// One operator, or a part of it: tasks that threads may do in any order.
struct Step {
  // How many tasks there are this time. Looks at lengths and indices, which may have changed; may
  // throw.
  std::function<int64_t()> prepare;
  int64_t grain = 1;  // tasks that are worth a thread of their own, or a call
  std::function<void(TaskRange)> run;
  Stream stream;  // what a thread that waits may fetch into its cache before the step begins
  // For work that goes by in turns, so that it needs less memory: called after the step, says how
  // many tasks of the step before it there are in a further turn, after which this one runs again;
  // or -1: that was all.
  std::function<int64_t()> again = nullptr;
};

// Calls `body` up to `threads` times, at best on as many threads, and returns when all calls have.
using Team = std::function<void(int64_t threads, const std::function<void()>& body)>;

class StepGraph {
 public:
  // Throws std::length_error beyond 65534 steps.
  void add(Step step);
  int64_t size() const { return static_cast<int64_t>(steps_.size()); }

  // Runs the steps in order; every task of a step sees what the steps before it wrote. What a step
  // throws ends the run, and is thrown on.
  void run(int64_t threads, const Team& team) const;

 private:
  std::vector<Step> steps_;
};

}  // namespace sgl_kernel
