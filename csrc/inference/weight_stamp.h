// Numbers that change if a weight is written to; transformer_fast/tensor_cache.py documents and defines them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace transformer_fast {

// Eight numbers for a large weight, one for a small one.
using WeightStamp = c10::SmallVector<int64_t, 8>;

// Stamp of a weight (out, in) of any strides, on the CPU.
WeightStamp stamp_of(const at::Tensor& weight);

}  // namespace transformer_fast
