// Checks that the eager fast paths of attention share.
#pragma once

#include "eager_call.h"

#include <ATen/autocast_mode.h>

namespace transformer_fast::eager {

// Of one device, on which autocast changes nothing, and of one type.
inline bool alike(const Tensor& q, const Tensor& k, const Tensor& v) {
  return k.device() == q.device() && v.device() == q.device() && k.scalar_type() == q.scalar_type() &&
         v.scalar_type() == q.scalar_type() && !at::autocast::is_autocast_enabled(q.device().type());
}

// What the Triton kernels take.
inline bool launchable(const Tensor& q) {
  constexpr int64_t kLargestHeadDim = 256;
  return q.size(-1) <= kLargestHeadDim && q.scalar_type() != at::kDouble;
}

template <typename T>
bool all_within(const Tensor& lengths, int64_t most) {
  const T* values = lengths.const_data_ptr<T>();
  for (int64_t i = 0; i < lengths.numel(); ++i)
    if (values[i] < 0 || values[i] > most) return false;
  return true;
}

// Contiguous lengths as int32, or nothing where one is outside [0, most], which is looked at on the CPU only.
inline OptionalTensor int_lengths(const Tensor& lengths, int64_t most) {
  const bool wide = lengths.scalar_type() == at::kLong;
  if (!wide && lengths.scalar_type() != at::kInt) return std::nullopt;
  if (!lengths.is_contiguous()) return std::nullopt;
  if (lengths.is_cpu() && !(wide ? all_within<int64_t>(lengths, most) : all_within<int32_t>(lengths, most)))
    return std::nullopt;
  return wide ? lengths.to(at::kInt) : lengths;
}

}  // namespace transformer_fast::eager
