// The newest position of every open hypothesis through all layers of a decoder.
#pragma once

#include "norm.h"
#include "tensors.h"

#include <string_view>

namespace transformer_fast {

struct DecoderStep {
  at::TensorList weights;  // of all layers, `kParts` pairs each
  Tensor own;              // (layers, most slots, 2, H, capacity, D); a slot has `span` rows, its newest positions
  Tensor cross;            // (layers, sentences, 2, H, S, D)
  int64_t length;          // positions that the longest slot holds
  OptionalTensor lengths;  // int32 (slots, span), keys of each row with its own; none: length + 1 of every row, span 1
  OptionalTensor cells;    // int32 (slots, capacity), where each position of a slot lies, counted in D; none: in it
  OptionalTensor source_lengths;
  OptionalTensor row_of_slot, slot_of_row;  // each sentence has as many slots as the widest; none: a row is a slot
  bool norm_first;
  NormKind kind;  // of the norms
  double eps;
  std::string_view activation;  // of the feed-forward layer: "relu", "swish" or "gelu"

  // x (rows, d), what enters the first layer -> what leaves the last.
  Tensor operator()(Tensor x) const;
};

// Its arguments in a schema.
constexpr char kDecoderStepSchema[] =
    "Tensor[] weights, Tensor(a!) own, Tensor cross, int length, Tensor? lengths, Tensor(b!)? cells, "
    "Tensor? source_lengths, Tensor? row_of_slot, Tensor? slot_of_row, bool norm_first, str norm, float eps, "
    "str activation";

// x (rows, in) -> (rows, outputs), by a weight in any layout that generation/weights.py makes.
Tensor step_product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t outputs,
                    bool relu = false);

}  // namespace transformer_fast
