// What decoding needs besides the ops (topk.cpp, step_linear.cpp, quantized_linear.cpp): kernels for float, on
// contiguous memory.
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

// out (rows, outputs) = x (rows, depth) by quantised weights, plus a bias (outputs) unless it is null.
struct QuantizedLinearParams {
  const float* x;
  const void* packed;
  const float* bias;
  float* out;
  int64_t rows, depth, outputs;
  bool relu;
};

// Of each row of logits (rows, columns), into (rows, k) each: the k greatest without the suppressed columns, which rise;
// and log(sum(exp(row))) of all columns, or with `renormalize` of those that are not suppressed, which is NaN where the
// row has one, or +inf.
struct TokenChoice {
  const float* logits;
  int64_t rows, columns, k;
  const int64_t* suppressed;
  int64_t suppressed_count;
  bool renormalize;
  float* best;
  int64_t* token;
  float* normalizer;
};

// The best continuations of each unit of a beam search, of those that its rows have, (rows, k) each: `rank` decides, and
// `total` is the cumulative log-probability. Into (units, candidates) each, the best first: the total, the row that is
// continued, and the token. What is missing at the end is -inf, of row 0 and token 0.
struct BeamChoice {
  const float *rank, *total;
  const int64_t* token;
  const int64_t *unit, *slot;  // (rows,), of `units` and `width`
  int64_t rows, k, units, width, candidates;
  float* best;
  int64_t *parent, *chosen;
};

// Panels of quantised weights begin with so many rows of words: their outputs' scales (float), and the sums of their
// weights (int32).
constexpr int64_t kPanelHeader = 2;

// For quantised weights.
struct QuantizedKernels {
  // Number of groups that an output with so many inputs has: four inputs each, one word.
  int64_t (*groups)(int64_t depth);
  // Weights as for pack_step_weight, to (panels, kPanelHeader + groups, panel) words, a group of inputs in each.
  void (*pack)(const float* const* rows, int64_t outputs, int64_t depth, void* packed);
  void (*linear)(const QuantizedLinearParams& params);
};

struct GenerationKernels {
  void (*choose_tokens)(const TokenChoice& params);
  void (*choose_continuations)(const BeamChoice& params);
  // Number of outputs in a panel of packed weights.
  int64_t panel;
  // Weights of a linear layer, `outputs` rows of `depth` elements each, to (panels, depth, panel).
  void (*pack_step_weight)(const float* const* rows, int64_t outputs, int64_t depth, float* packed);
  void (*step_linear)(const StepLinearParams& params);
  QuantizedKernels int8;
};

}  // namespace transformer_fast
