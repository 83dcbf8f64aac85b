// Kernels of decoding besides the ops (topk.cpp, step_linear.cpp, quantized_linear.cpp), for float, on contiguous
// memory.
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

// Per row of logits (rows, columns): the k largest without the suppressed columns (ascending), and their columns, each
// (rows, k); and the normalizer log(sum(exp(row))) of all columns, or with `renormalize` of those that are not
// suppressed. The normalizer is NaN if the row has NaN or +inf.
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

// The best continuations per unit of a beam search. Inputs are the continuations of its rows, (rows, k) each: `rank` is
// the sort key, `total` the cumulative log-probability. Outputs are (units, candidates) each, best first: the total,
// the row that is continued, and the token. Missing continuations at the end are -inf, with row 0 and token 0.
struct BeamChoice {
  const float *rank, *total;
  const int64_t* token;
  const int64_t *unit, *slot;  // (rows,), below `units` and `width`
  int64_t rows, k, units, width, candidates;
  float* best;
  int64_t *parent, *chosen;
};

// Number of rows of words at the beginning of a panel of quantised weights: scales of the outputs (float), and sums of
// their weights (int32).
constexpr int64_t kPanelHeader = 2;

// For quantised weights.
struct QuantizedKernels {
  // Number of groups per output with `depth` inputs; a group is four inputs, in one word.
  int64_t (*groups)(int64_t depth);
  // Packs weights, as pack_step_weight does, to (panels, kPanelHeader + groups, panel) words, one group per word.
  void (*pack)(const float* const* rows, int64_t outputs, int64_t depth, void* packed);
  void (*linear)(const QuantizedLinearParams& params);
};

struct GenerationKernels {
  void (*choose_tokens)(const TokenChoice& params);
  void (*choose_continuations)(const BeamChoice& params);
  // Number of outputs in a panel of packed weights.
  int64_t panel;
  // Packs the weights of a linear layer, `outputs` rows of `depth` elements each, to (panels, depth, panel).
  void (*pack_step_weight)(const float* const* rows, int64_t outputs, int64_t depth, float* packed);
  void (*step_linear)(const StepLinearParams& params);
  QuantizedKernels int8;
};

}  // namespace transformer_fast
