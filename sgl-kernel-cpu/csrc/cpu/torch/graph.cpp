// Recording and replaying graphs: plain C functions that the Python package calls through ctypes.
//
// A KeyboardInterrupt can come between any two instructions of Python, so what must happen together
// happens in one of these calls: Python never holds a graph that nobody frees, and a thread records
// while one call is in progress, not from one call to another. For that they use three functions of
// Python's stable ABI, whose addresses Python passes in; nothing here is linked against Python.
#include <array>
#include <new>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "simd/int_math.h"
#include "torch/c_api.h"
#include "torch/common.h"
#include "torch/steps.h"

namespace sgl_kernel {

Recording& recording() {
  static thread_local Recording current;
  return current;
}

// Steps, and the memory that they use, which must stay what it was.
class RecordedGraph {
 public:
  StepGraph steps;

  void use(const Tensor& t) {
    const char* data = static_cast<const char*>(t.const_data_ptr());
    const int64_t offset = t.storage_offset() * static_cast<int64_t>(t.element_size());
    if (data == nullptr || !begins_.insert(data - offset).second) return;
    // A view: the tensor itself may be given other memory, and that is no concern of the graph.
    std::array<StableIValue, 1> stack{torch::stable::detail::from(t)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::alias", "", stack.data(), TORCH_ABI_VERSION));
    Tensor view = torch::stable::detail::to<Tensor>(stack[0]);
    const int64_t bytes = storage_bytes(view);
    memory_.push_back({std::move(view), data, bytes});
  }

  void check_memory(const Checker& check) const {
    for (const Memory& memory : memory_) {
      const void* data = memory.view.const_data_ptr();
      const int64_t bytes = storage_bytes(memory.view);
      if (data != memory.data || bytes < memory.bytes) {
        check.fail("graph", "the memory that it was recorded with",
                   "a storage that was resized since then, from ", memory.bytes, " to ", bytes,
                   " bytes");
      }
    }
  }

 private:
  struct Memory {
    Tensor view;
    const void* data;
    int64_t bytes;  // of the storage
  };

  static int64_t storage_bytes(const Tensor& t) {
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
    return bytes;
  }

  std::vector<Memory> memory_;
  std::unordered_set<const void*> begins_;  // of storages in memory_
};

void record_step(Step step) {
  recording().graph->steps.add(std::move(step));
}

void note_memory(const Tensor& t) {
  if (RecordedGraph* graph = recording().graph) graph->use(t);
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
  if (current.next_place == current.end_of_places) {
    try {
      Tensor out = torch::stable::new_empty(like, sizes, dtype);
      note_memory(out);
      return out;
    } catch (const std::exception&) {
      int64_t bytes = dtype_bytes(to_dtype(dtype));
      for (const int64_t size : sizes) {
        if (__builtin_mul_overflow(bytes, size, &bytes)) bytes = INT64_MAX;
      }
      throw OutOfMemory("the result", bytes);
    }
  }
  const Place place = *current.next_place++;
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

namespace {

// Of Python's stable ABI: PyObject_CallNoArgs, PyCapsule_New, PyCapsule_GetPointer.
using CallNoArgs = void* (*)(void*);
using CapsuleNew = void* (*)(void*, const char*, void (*)(void*));
using CapsuleGetPointer = void* (*)(void*, const char*);

struct PythonFunctions {
  CallNoArgs call = nullptr;
  CapsuleNew new_capsule = nullptr;
  CapsuleGetPointer capsule_pointer = nullptr;
};
PythonFunctions& python() {
  static PythonFunctions functions;
  return functions;
}

constexpr char kCapsule[] = "sgl_kernel.StepGraph";

sgl_kernel::RecordedGraph* graph_in(void* capsule) {
  return static_cast<sgl_kernel::RecordedGraph*>(python().capsule_pointer(capsule, kCapsule));
}

void free_graph(void* capsule) {
  delete graph_in(capsule);
}

// Restores what the thread recorded before.
class RecordingScope {
 public:
  explicit RecordingScope(const sgl_kernel::Recording& now)
      : before_(std::exchange(sgl_kernel::recording(), now)) {}
  ~RecordingScope() { sgl_kernel::recording() = before_; }
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

 private:
  const sgl_kernel::Recording before_;
};

}  // namespace

// Call this first.
SGL_EXPORT void sgl_kernel_graph_use_python(void* call, void* new_capsule, void* capsule_pointer) {
  python() = {reinterpret_cast<CallNoArgs>(call), reinterpret_cast<CapsuleNew>(new_capsule),
              reinterpret_cast<CapsuleGetPointer>(capsule_pointer)};
}

// With the GIL held, Python's errors set. An empty graph in a capsule, which frees it.
SGL_EXPORT void* sgl_kernel_graph_new() {
  auto* graph = new (std::nothrow) sgl_kernel::RecordedGraph();
  void* capsule = python().new_capsule(graph, kCapsule, free_graph);
  if (capsule == nullptr) delete graph;
  return capsule;
}

// The same. The graph in a capsule, or null.
SGL_EXPORT void* sgl_kernel_graph_pointer(void* capsule) {
  return graph_in(capsule);
}

// The same. Calls `body`, and records what the ops of this thread do meanwhile. The first `count`
// outputs that they make lie at `places`, the others in memory of their own. Returns what body
// returns.
SGL_EXPORT void* sgl_kernel_graph_record(void* capsule, const sgl_kernel::Place* places,
                                         int64_t count, void* body) {
  sgl_kernel::RecordedGraph* graph = graph_in(capsule);
  if (graph == nullptr) return nullptr;
  sgl_kernel::last_refused() = false;
  const RecordingScope scope({graph, places, places + count});
  return python().call(body);
}

SGL_EXPORT bool sgl_kernel_graph_recording() {
  return sgl_kernel::recording().graph != nullptr;
}

SGL_EXPORT int64_t sgl_kernel_graph_size(const void* graph) {
  return static_cast<const sgl_kernel::RecordedGraph*>(graph)->steps.size();
}

// Whether the failure that this thread has just seen says that something cannot be recorded.
SGL_EXPORT bool sgl_kernel_graph_refused() {
  return std::exchange(sgl_kernel::last_refused(), false);
}

// Runs all steps on Torch's threads, without the GIL. Returns null, or the error message, which is
// valid until the thread's next call.
SGL_EXPORT const char* sgl_kernel_graph_replay(const void* graph) {
  sgl_kernel::last_refused() = false;
  try {
    const sgl_kernel::Checker check("StepGraph.replay");
    sgl_kernel::refuse_recording(check);
    const auto& recorded = *static_cast<const sgl_kernel::RecordedGraph*>(graph);
    recorded.check_memory(check);
    recorded.steps.run(torch::stable::get_num_threads(), sgl_kernel::run_on_torch_threads);
    return nullptr;
  } catch (const std::exception& e) {
    return sgl_kernel::keep_text(e.what());
  }
}
