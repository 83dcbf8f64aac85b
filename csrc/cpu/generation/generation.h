// What decoding needs besides the ops (topk.cpp, step_linear.cpp): kernels for float, on contiguous memory.
#pragma once

#include <cstdint>

namespace transformer_fast {

// out (rows, outputs) = x (rows, depth) by packed weights, plus a bias (outputs) unless it is null.
struct StepLinearParams {
  const float *x, *packed, *bias;
  float* out;
  int64_t rows, depth, outputs;
  bool relu;
};

struct GenerationKernels {
  // The k greatest of each row of logits (rows, columns), the greatest first, into (rows, k) each.
  void (*best_tokens)(const float* logits, int64_t rows, int64_t columns, int64_t k, float* best, int64_t* token);
  // log(sum(exp(row))) of each.
  void (*log_normalizer)(const float* logits, int64_t rows, int64_t columns, float* out);
  // How many outputs a panel of packed weights has.
  int64_t panel;
  // Weights of a linear layer, `outputs` rows of `depth` elements each, to (panels, depth, panel).
  void (*pack_step_weight)(const float* const* rows, int64_t outputs, int64_t depth, float* packed);
  void (*step_linear)(const StepLinearParams& params);
};

}  // namespace transformer_fast
