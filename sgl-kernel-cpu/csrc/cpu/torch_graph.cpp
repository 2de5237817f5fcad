// Recording and replaying graphs: plain C functions that the Python package calls through ctypes,
// which releases the GIL meanwhile. Errors are returned as messages, valid until the thread's next
// call.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c_api.h"
#include "packing.h"
#include "torch_steps.h"

namespace sgl_kernel {

Recording& recording() {
  static thread_local Recording current;
  return current;
}

namespace {

// Whether this thread's last failure says that something cannot be recorded.
bool& last_refused() {
  static thread_local bool refused = false;
  return refused;
}

[[noreturn]] void refuse(const Checker& check, const std::string& expected,
                         const std::string& got) {
  last_refused() = true;
  check.fail("graph", expected, got);
}

void run_on_torch_threads(int64_t threads, const std::function<void()>& body) {
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(); });
}

}  // namespace

void share_step(const Step& step) {
  StepGraph graph;
  graph.add(step);
  graph.run(torch::stable::get_num_threads(), run_on_torch_threads);
}

Tensor new_output(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                  ScalarType dtype) {
  Recording& current = recording();
  if (current.places.empty()) return torch::stable::new_empty(like, sizes, dtype);
  const Place place = current.places.front();
  current.places.pop_front();
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i > 1; --i) {
    strides[i - 2] = strides[i - 1] * max_i64(1, sizes[i - 1]);
  }
  Tensor out = torch::stable::from_blob(place.data, sizes, {strides.data(), strides.size()},
                                        like.device(), dtype);
  const int64_t bytes = out.numel() * static_cast<int64_t>(out.element_size());
  if (bytes != place.bytes) {
    refuse(Checker("record"), "the same tensors at both calls",
           std::to_string(bytes) + " bytes instead of " + std::to_string(place.bytes));
  }
  return out;
}

void refuse_recording(const Checker& check) {
  if (recording().graph == nullptr) return;
  refuse(check, "no recording, because this work cannot be replayed", "one");
}

}  // namespace sgl_kernel

// Begins to record what the ops of this thread do. The first `count` outputs that they make have
// `bytes` and lie at `places`, the others in memory of their own. Returns the graph, or null if one
// is recorded already.
SGL_EXPORT void* sgl_kernel_graph_begin(void* const* places, const int64_t* bytes, int64_t count) {
  sgl_kernel::Recording& current = sgl_kernel::recording();
  if (current.graph != nullptr) return nullptr;
  for (int64_t i = 0; i < count; ++i) current.places.push_back({places[i], bytes[i]});
  return current.graph = new sgl_kernel::StepGraph();
}

// Ends the recording of this thread.
SGL_EXPORT void sgl_kernel_graph_end() {
  sgl_kernel::recording() = {};
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
