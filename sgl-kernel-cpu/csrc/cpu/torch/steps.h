// How the ops run their work: on Torch's threads, and into a graph while one is recorded.
#pragma once

#include <functional>

#include "runtime/step_graph.h"
#include "torch/checks.h"

namespace sgl_kernel {

// Memory for an output.
struct Place {
  void* data = nullptr;
  int64_t bytes = 0;
};

class RecordedGraph;

// What a thread records, if it does, and where the next outputs are to lie.
struct Recording {
  RecordedGraph* graph = nullptr;
  const Place* next_place = nullptr;
  const Place* end_of_places = nullptr;
};
Recording& recording();

// Adds a step to the graph that this thread records.
void record_step(Step step);

// A new contiguous tensor for an op's result. Throws if it is not as large as its place, and
// OutOfMemory.
Tensor new_output(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                  ScalarType dtype);

// For ops whose work would not be the same when it is run again.
void refuse_recording(const Checker& check);

// Runs a step on Torch's threads, which take its tasks as they are free: equal parts, which a loop
// of Torch's would have, all take as long as the thread that something else disturbs.
void share_step(const Step& step);

// Runs tasks [0, count), at least `grain` for a thread.
template <typename Run>
void run_tasks(int64_t count, int64_t grain, const Run& run) {
  if (count > grain && torch::stable::get_num_threads() > 1) {
    share_step({[count] { return count; }, grain, std::cref(run), {}});
  } else if (count > 0) {
    run(TaskRange{0, count});
  }
}

// The same. `run` takes a TaskRange; where a graph is recorded it is kept and run again, and so
// must hold all that it needs but the memory of tensors. `prepare` gives count anew and looks at
// whatever may have changed since.
template <typename Prepare, typename Run>
void run_step(int64_t count, int64_t grain, const Prepare& prepare, const Run& run,
              Stream stream = {}) {
  run_tasks(count, grain, run);
  if (recording().graph != nullptr) record_step({prepare, grain, run, stream});
}

// The same for work that depends on shapes alone.
template <typename Run>
void run_step(int64_t count, int64_t grain, const Run& run, Stream stream = {}) {
  run_step(count, grain, [count] { return count; }, run, stream);
}

}  // namespace sgl_kernel
