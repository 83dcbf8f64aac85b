// Kernels of linear layers with weights in a layout of their own, on contiguous memory: in float (step_linear.cpp), int8
// (quantized_linear.cpp) and bfloat16 (narrow_linear.cpp).
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace transformer_fast {

// out (rows, outputs) = x (rows, depth) by packed weights, plus a bias (outputs) unless it is null.
struct StepLinearParams {
  const float *x, *packed, *bias;
  float* out;
  int64_t rows, depth, outputs;
  bool relu;
};

enum class Activation { kNone, kRelu, kGelu, kGeluTanh };

// out (rows, outputs) = activation(x (rows, depth) by quantised weights, plus a bias (outputs) unless it is null).
struct QuantizedLinearParams {
  const float* x;
  const void* packed;
  const float* bias;
  float* out;
  int64_t rows, depth, outputs;
  Activation activation;
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

// out (rows, outputs) = x (rows, depth) by packed weights, plus a bias (outputs) unless it is null.
struct NarrowLinearParams {
  const c10::BFloat16* x;
  const void* packed;
  const c10::BFloat16* bias;
  c10::BFloat16* out;
  int64_t rows, depth, outputs;
};

// For weights in bfloat16; null where the vector unit has no such products.
struct NarrowKernels {
  // Packs weights to (panels, groups, panel) words; a group is two inputs, in one word.
  void (*pack)(const c10::BFloat16* const* rows, int64_t outputs, int64_t depth, void* packed);
  void (*linear)(const NarrowLinearParams& params);
};

struct LinearKernels {
  // Number of outputs in a panel of packed weights.
  int64_t panel;
  // Packs the weights of a linear layer, `outputs` rows of `depth` elements each, to (panels, depth, panel).
  void (*pack_step_weight)(const float* const* rows, int64_t outputs, int64_t depth, float* packed);
  void (*step_linear)(const StepLinearParams& params);
  QuantizedKernels int8;
  NarrowKernels narrow;
};

}  // namespace transformer_fast
