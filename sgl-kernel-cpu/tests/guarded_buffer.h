// Memory that ends at an unmapped page: a read or write past the end crashes the test.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

template <typename T>
class GuardedBuffer {
 public:
  // Filled with 0xFF bytes: NaN in every float type used here, so an unwritten output shows.
  explicit GuardedBuffer(int64_t count) : count_(count) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const size_t usable = (bytes + page - 1) / page * page;
    size_ = usable + page;
    base_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) std::abort();
    char* guard = static_cast<char*>(base_) + usable;
    if (mprotect(guard, page, PROT_NONE) != 0) std::abort();
    data_ = reinterpret_cast<T*>(guard - bytes);
#if defined(__SANITIZE_ADDRESS__)
    // The pages may have been another buffer's, between whose arrays a ScratchLayout left bytes
    // that nobody may touch.
    __asan_unpoison_memory_region(base_, usable);
#endif
    std::memset(static_cast<void*>(data_), 0xFF, bytes);
  }
  ~GuardedBuffer() { munmap(base_, size_); }
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return count_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  void* base_ = nullptr;
  size_t size_ = 0;
  T* data_ = nullptr;
  int64_t count_ = 0;
};
