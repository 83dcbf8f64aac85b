// Kernels of linear layers with weights in a layout of their own, on contiguous memory: in float (step_linear.cpp), int8
// (quantized_linear.cpp) and bfloat16 (narrow_linear.cpp).
#pragma once

#include <torch/headeronly/util/BFloat16.h>

#include <cstdint>

namespace transformer_fast {

enum class Activation { kNone, kRelu, kGelu, kGeluTanh };

// out (rows, outputs) = activation(x (rows, depth) by packed weights, plus a bias (outputs) unless it is null). T is the
// type of the elements.
template <typename T>
struct PackedLinearParams {
  const T* x;
  const void* packed;
  const T* bias;
  T* out;
  int64_t rows, depth, outputs;
  Activation activation;  // float weights know none and ReLU, those in bfloat16 none
};

template <typename T>
struct PackedKernels {
  // Packs the weights of a linear layer, `outputs` rows of `depth` elements each, to panels of words (panels, words of
  // an output, panel): a word is a float, or a group of four inputs in int8 behind kPanelHeader, or two in bfloat16.
  void (*pack)(const T* const* rows, int64_t outputs, int64_t depth, void* packed);
  void (*linear)(const PackedLinearParams<T>& params);
};

// Number of rows of words at the beginning of a panel of quantised weights: scales of the outputs (float), and sums of
// their weights (int32).
constexpr int64_t kPanelHeader = 2;

struct LinearKernels {
  // Number of outputs in a panel of packed weights.
  int64_t panel;
  // Number of groups per output of quantised weights with `depth` inputs.
  int64_t (*int8_groups)(int64_t depth);
  PackedKernels<float> step, int8;
  PackedKernels<c10::BFloat16> narrow;  // null where the vector unit has no such products
};

}  // namespace transformer_fast
