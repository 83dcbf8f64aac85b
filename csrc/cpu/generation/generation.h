// What decoding needs besides the ops (topk.cpp, step_linear.cpp, int8_linear.cpp): kernels for float, on contiguous memory.
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

// out (rows, outputs) = x (rows, depth) by int8 weights, plus a bias (outputs) unless it is null.
struct Int8LinearParams {
  const float* x;
  const int8_t* packed;
  const float* bias;
  float* out;
  int64_t rows, depth, outputs;
  bool relu;
};

// Weights of which four inputs are packed side by side, and as many rows of a panel before them: its outputs' scales
// (float), and the sums of their weights (int32).
constexpr int64_t kInt8Group = 4, kInt8Header = 2;

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
  // The same weights in int8, each output's by a scale of its own, to (panels, kInt8Header + groups, panel, kInt8Group).
  void (*pack_int8_weight)(const float* const* rows, int64_t outputs, int64_t depth, int8_t* packed);
  void (*int8_linear)(const Int8LinearParams& params);
};

}  // namespace transformer_fast
