// The sinusoidal table of positional encodings on the CPU.
#include "embedding_common.h"

#include <ATen/Parallel.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace transformer_fast {
namespace {

// table[r] = the encoding of position r. Sines and cosines are taken only of every kStep-th position and of the
// steps 0 .. kStep - 1; the rest follow by the addition theorem in fp64, whose error (a few 1e-16) vanishes in fp32.
void fill_positional_table(const at::Tensor& table) {
  check_positional_table(table);
  constexpr int64_t kStep = 32;
  const int64_t length = table.size(0), d = table.size(1), pairs = (d + 1) / 2;
  float* out = table.mutable_data_ptr<float>();
  if (table.numel() == 0) return;

  std::vector<double> frequency(pairs), step_sin(kStep * pairs), step_cos(kStep * pairs);
  for (const auto i : c10::irange(pairs))
    frequency[i] = std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(d));
  for (const auto s : c10::irange(std::min(kStep, length)))
    for (const auto i : c10::irange(pairs)) {
      step_sin[s * pairs + i] = std::sin(static_cast<double>(s) * frequency[i]);
      step_cos[s * pairs + i] = std::cos(static_cast<double>(s) * frequency[i]);
    }
  at::parallel_for(0, (length + kStep - 1) / kStep, grain(kStep * d), [&](int64_t begin, int64_t end) {
    std::vector<double> base_sin(pairs), base_cos(pairs);
    for (const auto block : c10::irange(begin, end)) {
      for (const auto i : c10::irange(pairs)) {
        const double angle = static_cast<double>(block * kStep) * frequency[i];
        base_sin[i] = std::sin(angle);
        base_cos[i] = std::cos(angle);
      }
      for (const auto s : c10::irange(std::min(kStep, length - block * kStep))) {
        float* row = out + (block * kStep + s) * d;
        const double *sin_s = &step_sin[s * pairs], *cos_s = &step_cos[s * pairs];
        for (const auto i : c10::irange(pairs))
          row[2 * i] = static_cast<float>(base_sin[i] * cos_s[i] + base_cos[i] * sin_s[i]);
        for (const auto i : c10::irange(d / 2))
          row[2 * i + 1] = static_cast<float>(base_cos[i] * cos_s[i] - base_sin[i] * sin_s[i]);
      }
    }
  });
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("fill_positional_table", TORCH_FN(transformer_fast::fill_positional_table));
}
