// The newest position of every open hypothesis through all layers of a decoder, in one call: what runs between the
// kernels of a decoding step, in Python and the dispatcher, is as long as several of them and runs on one thread.
// The kernels are those of the ops; models/decoder.py says the same in Python.
#include "attention.h"
#include "generation.h"
#include "linear.h"
#include "norm.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string_view>

namespace transformer_fast {
namespace {

// Where the weight and the bias of each part of a layer stand among its tensors; `_Layer` in generation/fused.py. The
// bias of an RMSNorm is empty.
enum Part { kNorm1, kNorm2, kNorm3, kOwnIn, kOwnOut, kCrossIn, kCrossOut, kFeedIn, kFeedOut, kParts };

// Attention of q (B, H, Lq, D) -> (B * Lq, H * D).
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& lengths) {
  AttentionParams params;
  params.lengths = lengths, params.scale = 1 / std::sqrt(static_cast<float>(q.size(3)));
  const Tensor out = attention_forward(q, k, v, params, /*training=*/false).out;
  return out.transpose(1, 2).reshape({-1, q.size(1) * q.size(3)});
}

struct Step {
  Tensor own;              // (layers, most rows, 2, H, capacity, D)
  Tensor cross;            // (layers, sentences, 2, H, S, D)
  int64_t length;          // positions that the longest row holds
  OptionalTensor lengths;  // int32 (rows,), keys of each row with the newest one; none: length + 1 of every row
  OptionalTensor source_lengths;
  OptionalTensor row_of_slot, slot_of_row;  // each sentence has as many slots as the widest; none: a row is a slot
  bool norm_first;
  NormKind kind;  // of the norms
  double eps;
  std::string_view activation;  // of the feed-forward layer: "relu", "swish" or "gelu"

  // A layer's x (rows, d) -> (rows, d); at: its tensors, two for each part.
  Tensor through(int64_t layer, const Tensor* at, Tensor x) const {
    const auto linear = [at](Part part, const Tensor& input, bool relu = false) {
      const Tensor &weight = at[2 * part], &bias = at[2 * part + 1];
      if (weight.is_mkldnn()) return onednn_linear(input, weight, bias, relu);
      const auto product = weight.scalar_type() == at::kFloat ? step_linear : quantized_linear;
      return product(input, weight, bias, bias.size(0), relu);
    };
    const auto norm = [&](Part part, const Tensor& input, const OptionalTensor& residual) {
      const OptionalTensor bias = kind == NormKind::kRms ? OptionalTensor() : at[2 * part + 1];
      return norm_forward(input, residual, at[2 * part], bias, eps, kind, 0, {}, nullptr, nullptr);
    };
    if (norm_first) {
      const Tensor first = norm(kNorm1, x, {}).out;
      const auto second = norm(kNorm2, linear(kOwnOut, of_own(layer, linear(kOwnIn, first))), x);
      const auto third = norm(kNorm3, linear(kCrossOut, of_source(layer, linear(kCrossIn, second.out))), second.summed);
      return linear(kFeedOut, activated(linear(kFeedIn, third.out, relu()))).add_(third.summed);
    }
    x = norm(kNorm1, linear(kOwnOut, of_own(layer, linear(kOwnIn, x))), x).out;
    x = norm(kNorm2, linear(kCrossOut, of_source(layer, linear(kCrossIn, x))), x).out;
    return norm(kNorm3, linear(kFeedOut, activated(linear(kFeedIn, x, relu()))), x).out;
  }

 private:
  // Whether the activation is one that a linear layer does along with its product.
  bool relu() const { return activation == "relu"; }

  Tensor activated(const Tensor& inner) const {
    if (relu()) return inner;
    return activation == "swish" ? at::silu(inner) : at::gelu(inner);
  }

  // Self-attention of states (rows, 3 d), whose keys and values join the cache.
  Tensor of_own(int64_t layer, const Tensor& states) const {
    const int64_t rows = states.size(0), H = own.size(3), capacity = own.size(4), D = own.size(5), d = H * D;
    const Tensor cache = own.select(0, layer).narrow(0, 0, rows);
    const float* from = states.const_data_ptr<float>();
    float* to = cache.mutable_data_ptr<float>();
    const int32_t* keys = lengths ? lengths->const_data_ptr<int32_t>() : nullptr;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = keys ? keys[row] - 1 : length;
      for (int64_t head = 0; head < 2 * H; ++head)
        std::copy_n(from + row * 3 * d + d + head * D, D, to + ((row * 2 * H + head) * capacity + position) * D);
    }
    const Tensor known = cache.narrow(3, 0, length + 1);
    const Tensor q = states.view({rows, 3, H, 1, D}).select(1, 0);
    return attend(q, known.select(1, 0), known.select(1, 1), lengths);
  }

  // Attention of queries (rows, d) to the source. The hypotheses of a sentence are the queries of one batch entry.
  Tensor of_source(int64_t layer, const Tensor& queries) const {
    const Tensor known = cross.select(0, layer);
    const int64_t sentences = known.size(0), H = known.size(2), D = known.size(4);
    const Tensor q = row_of_slot ? queries.index_select(0, *row_of_slot) : queries;
    const Tensor out =
        attend(q.view({sentences, -1, H, D}).transpose(1, 2), known.select(1, 0), known.select(1, 1), source_lengths);
    return slot_of_row ? out.index_select(0, *slot_of_row) : out;
  }
};

Tensor decoder_step(Tensor x, at::TensorList weights, const Tensor& own, const Tensor& cross, int64_t length,
                    const OptionalTensor& lengths, const OptionalTensor& source_lengths,
                    const OptionalTensor& row_of_slot, const OptionalTensor& slot_of_row, bool norm_first,
                    std::string_view norm, double eps, std::string_view activation) {
  const Step step{own,         cross,      length,          lengths, source_lengths, row_of_slot,
                  slot_of_row, norm_first, norm_kind(norm), eps,     activation};
  for (int64_t layer = 0; layer < own.size(0); ++layer) x = step.through(layer, weights.data() + 2 * kParts * layer, x);
  return x;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(
      "decoder_step(Tensor x, Tensor[] weights, Tensor(a!) own, Tensor cross, int length, Tensor? lengths, "
      "Tensor? source_lengths, Tensor? row_of_slot, Tensor? slot_of_row, bool norm_first, str norm, float eps, str "
      "activation) -> Tensor");
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("decoder_step", decoder_step); }
TORCH_LIBRARY_IMPL(transformer_fast, MkldnnCPU, m) { m.impl("decoder_step", decoder_step); }  // by its weights

}  // namespace transformer_fast
