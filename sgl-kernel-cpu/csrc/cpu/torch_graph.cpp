// Recording and replaying graphs: plain C functions that the Python package calls through ctypes,
// which releases the GIL meanwhile. Errors are returned as messages, valid until the thread's next
// call.
#include <stdexcept>
#include <utility>

#include "c_api.h"
#include "torch_steps.h"

namespace sgl_kernel {

StepGraph*& recorded_graph() {
  static thread_local StepGraph* graph = nullptr;
  return graph;
}

namespace {

// Whether this thread's last failure says that something cannot be recorded.
bool& last_refused() {
  static thread_local bool refused = false;
  return refused;
}

void run_on_torch_threads(int64_t threads, const std::function<void()>& body) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
}

}  // namespace

void refuse_recording(const Checker& check) {
  if (recorded_graph() == nullptr) return;
  last_refused() = true;
  check.fail("graph", "no recording, because this work cannot be replayed", "one");
}

}  // namespace sgl_kernel

// Begins to record what the ops of this thread do. Returns the graph, or null if one is recorded
// already.
SGL_EXPORT void* sgl_kernel_graph_begin() {
  using sgl_kernel::recorded_graph;
  if (recorded_graph() != nullptr) return nullptr;
  return recorded_graph() = new sgl_kernel::StepGraph();
}

// Ends the recording of this thread.
SGL_EXPORT void sgl_kernel_graph_end() {
  sgl_kernel::recorded_graph() = nullptr;
}

SGL_EXPORT int64_t sgl_kernel_graph_size(const void* graph) {
  return static_cast<const sgl_kernel::StepGraph*>(graph)->size();
}

// Whether the failure that this thread has just seen says that something cannot be recorded.
SGL_EXPORT bool sgl_kernel_graph_refused() {
  return std::exchange(sgl_kernel::last_refused(), false);
}

// Runs all steps on Torch's threads. Returns null, or the error message.
SGL_EXPORT const char* sgl_kernel_graph_replay(const void* graph) {
  try {
    sgl_kernel::refuse_recording(sgl_kernel::Checker("StepGraph.replay"));
    static_cast<const sgl_kernel::StepGraph*>(graph)->run(torch::stable::get_num_threads(),
                                                          sgl_kernel::run_on_torch_threads);
    return nullptr;
  } catch (const std::exception& e) {
    return sgl_kernel::keep_text(e.what());
  }
}

SGL_EXPORT void sgl_kernel_graph_free(void* graph) {
  delete static_cast<sgl_kernel::StepGraph*>(graph);
}
