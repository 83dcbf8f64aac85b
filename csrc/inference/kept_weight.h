// A copy of a linear layer's weight that is kept for later calls, in the layout that the product reads fastest.
// transformer_fast/inference/prepacked.py decides which layers have one, and says which layout is the fastest for how many
// rows.
#pragma once

#include "../ops/tensors.h"
#include "weight_stamp.h"

#include <optional>

namespace transformer_fast {

class KeptWeight {
 public:
  // The most rows for a layout of this package, in float32 and in bfloat16, and for oneDNN's.
  KeptWeight(int64_t native_rows, int64_t narrow_rows, int64_t blocked_rows)
      : native_rows_(native_rows), narrow_rows_(narrow_rows), blocked_rows_(blocked_rows) {}

  // The copy of a weight (out, in) for this many rows, a new one if the weight was written to; undefined if no layout is
  // faster than the weight's own. For one thread at a time: the caller holds the GIL.
  Tensor copy_for(const Tensor& weight, int64_t rows);

  int64_t bytes() const {
    const auto of = [](const Tensor& copy) { return copy.defined() ? copy.numel() * copy.element_size() : int64_t{0}; };
    return of(native_) + of(blocked_);
  }

 private:
  // What a copy was made of.
  struct Source {
    const void* data;
    uint32_t version;
    at::ScalarType type;
    c10::SmallVector<int64_t, 4> geometry;
    WeightStamp stamp;

    explicit Source(const Tensor& weight);
    bool operator==(const Source&) const = default;
  };

  int64_t native_rows_, narrow_rows_, blocked_rows_;
  std::optional<Source> source_;
  Tensor native_, blocked_;
};

// Linear layer by a copy of its weight (outputs, in), on x (..., in) of the weight's type.
Tensor kept_product(const Tensor& x, const Tensor& copy, const OptionalTensor& bias, int64_t outputs);

}  // namespace transformer_fast
