// How the ops run their work: on Torch's threads, and into a graph while one is recorded.
#pragma once

#include <deque>
#include <functional>

#include "step_graph.h"
#include "torch_checks.h"

namespace sgl_kernel {

// Memory for an output.
struct Place {
  void* data = nullptr;
  int64_t bytes = 0;
};

// What a thread records, if it does, and where the next outputs are to lie.
struct Recording {
  StepGraph* graph = nullptr;
  std::deque<Place> places;
};
Recording& recording();

// A new contiguous tensor for an op's result. Throws if it is not as large as its place.
Tensor new_output(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                  ScalarType dtype);

// For ops whose work would not be the same when it is run again.
void refuse_recording(const Checker& check);

// Runs a step on Torch's threads, which take its tasks as they are free: equal parts, which a loop
// of Torch's would have, all take as long as the thread that something else disturbs.
void share_step(const Step& step);

// Runs tasks [0, count), at least `grain` for a thread. `run` takes a TaskRange; where a graph is
// recorded it is kept and run again, and so must hold all that it needs but the memory of tensors.
// `prepare` gives count anew and looks at whatever may have changed since.
template <typename Prepare, typename Run>
void run_step(int64_t count, int64_t grain, const Prepare& prepare, const Run& run,
              Stream stream = {}) {
  if (count > grain && torch::stable::get_num_threads() > 1) {
    share_step({[count] { return count; }, grain, std::cref(run), {}});
  } else if (count > 0) {
    run(TaskRange{0, count});
  }
  if (StepGraph* graph = recording().graph) graph->add({prepare, grain, run, stream});
}

// The same for work that depends on shapes alone.
template <typename Run>
void run_step(int64_t count, int64_t grain, const Run& run, Stream stream = {}) {
  run_step(count, grain, [count] { return count; }, run, stream);
}

}  // namespace sgl_kernel
