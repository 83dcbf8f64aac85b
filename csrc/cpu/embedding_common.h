// What the embedding's forward and backward on the CPU share.
#pragma once

#include "../embedding.h"
#include "draws.h"

#include <string>

namespace transformer_fast {
namespace {

// Token ids of either width, contiguous, to be checked where they are used. A view: the tensor must outlive it.
class Ids {
 public:
  Ids(const at::Tensor& ids, int64_t vocabulary)
      : shape_(ids.sizes()),
        vocabulary_(vocabulary),
        wide_(ids.scalar_type() == at::kLong ? ids.const_data_ptr<int64_t>() : nullptr),
        narrow_(ids.scalar_type() == at::kInt ? ids.const_data_ptr<int32_t>() : nullptr) {}

  int64_t operator[](int64_t row) const {
    return wide_ ? wide_[row] : narrow_[row];
  }

  bool valid(int64_t id) const {
    return id >= 0 && id < vocabulary_;
  }

  [[noreturn]] void raise(int64_t row) const {
    std::string place;
    int64_t rest = row;
    for (size_t dim = shape_.size(); dim-- > 0; rest /= shape_[dim])
      place = std::to_string(rest % shape_[dim]) + (place.empty() ? "" : ", ") + place;
    TORCH_CHECK_INDEX(
        false, "ids[", place, "] is ", (*this)[row], ", but the vocabulary has ", vocabulary_,
        " rows: expected 0 <= id < ", vocabulary_);
  }

 private:
  at::IntArrayRef shape_;
  int64_t vocabulary_;
  const int64_t* wide_;
  const int32_t* narrow_;
};

// Rows of d elements that one thread should at least get: less is not worth waking it for.
inline int64_t grain(int64_t d) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, d));
}

}  // namespace
}  // namespace transformer_fast
