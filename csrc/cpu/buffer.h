// Memory of a call, aligned to cache lines and not initialised.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace transformer_fast {
namespace {

template <typename A>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) { resize(size); }

  // The contents are lost.
  void resize(int64_t size) { storage_.reset(size > 0 ? new (std::align_val_t(64)) A[size] : nullptr); }

  A* data() const { return storage_.get(); }

 private:
  struct Free {
    void operator()(A* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<A[], Free> storage_;
};

// A buffer that is reused from call to call and only ever grows.
template <typename A>
class GrowingBuffer {
 public:
  A* reserve(int64_t size) {
    if (size > size_) buffer_.resize(size), size_ = size;
    return buffer_.data();
  }

 private:
  Buffer<A> buffer_;
  int64_t size_ = 0;
};

}  // namespace
}  // namespace transformer_fast
