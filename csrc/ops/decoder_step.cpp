// The newest position of every open hypothesis through all layers of a decoder, in one call: what runs between the
// kernels of a decoding step, in Python and the dispatcher, is as long as several of them and runs on one thread.
// The kernels are those of the ops; models/decoder.py says the same in Python.
#include "decoder_step.h"

#include "../cpu/kernels.h"
#include "generation.h"
#include "linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace transformer_fast {
namespace {

// Where the weight and the bias of each part of a layer stand among its tensors; `_Layer` in generation/fused.py. The
// bias of an RMSNorm is empty.
enum Part { kNorm1, kNorm2, kNorm3, kOwnIn, kOwnOut, kCrossIn, kCrossOut, kFeedIn, kFeedOut, kParts };

struct Layers : DecoderStep {
  explicit Layers(const DecoderStep& step) : DecoderStep(step) {}

  // A layer's x (rows, d) -> (rows, d).
  Tensor through(int64_t layer, Tensor x) const {
    const Tensor* const at = weights.data() + 2 * kParts * layer;
    const auto linear = [at](Part part, const Tensor& input, bool relu = false) {
      const Tensor& bias = at[2 * part + 1];
      return step_product(input, at[2 * part], bias, bias.size(0), relu);
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

  // Self-attention of states (rows, 3 d), whose keys and values join the cache. The rows of a slot are the queries of one
  // batch entry.
  Tensor of_own(int64_t layer, const Tensor& states) const {
    const int64_t rows = states.size(0), H = own.size(3), capacity = own.size(4), D = own.size(5), d = H * D;
    const int64_t head = capacity * D, slot = 2 * H * head, span = lengths ? lengths->size(1) : 1;
    const float* const from = states.const_data_ptr<float>();
    float* const to = own.mutable_data_ptr<float>() + layer * own.stride(0);
    const int32_t* const keys = lengths ? lengths->const_data_ptr<int32_t>() : nullptr;
    int32_t* const places = cells ? cells->mutable_data_ptr<int32_t>() : nullptr;
    at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t position = keys ? keys[r] - 1 : length, s = r / span;
        for (int64_t h = 0; h < 2 * H; ++h)
          std::copy_n(from + r * 3 * d + d + h * D, D, to + s * slot + h * head + position * D);
        if (places) places[s * capacity + position] = static_cast<int32_t>(s * 2 * H * capacity + position);
      }
    });
    AttentionKernelParams<float, float> p;
    p.B = rows / span, p.H = p.Hkv = H, p.Lq = span, p.Lk = length + span, p.D = D;
    p.q = {from, {span * 3 * d, D, 3 * d, 1}};
    p.k = {to, {slot, head, D, 1}}, p.v = {to + H * head, {slot, head, D, 1}};
    p.lengths = {keys, {span, 0, 1, 0}}, p.cells = {places, {capacity, 0, 0, 1}};
    return attend(p);
  }

  // Attention of queries (rows, d) to the source. The hypotheses of a sentence are the queries of one batch entry.
  Tensor of_source(int64_t layer, const Tensor& queries) const {
    const int64_t sentences = cross.size(1), H = cross.size(3), S = cross.size(4), D = cross.size(5), d = H * D;
    const Tensor q = row_of_slot ? queries.index_select(0, *row_of_slot) : queries;
    const float* const known = cross.const_data_ptr<float>() + layer * cross.stride(0);
    AttentionKernelParams<float, float> p;
    p.B = sentences, p.H = p.Hkv = H, p.Lq = sentences ? q.size(0) / sentences : 0, p.Lk = S, p.D = D;
    p.q = {q.const_data_ptr<float>(), {p.Lq * d, D, d, 1}};
    p.k = {known, {2 * d * S, S * D, D, 1}}, p.v = {known + d * S, {2 * d * S, S * D, D, 1}};
    if (source_lengths) p.lengths = {source_lengths->const_data_ptr<int32_t>(), {1, 0, 0, 0}};
    const Tensor out = attend(p);
    return slot_of_row ? out.index_select(0, *slot_of_row) : out;
  }

  // -> (B * Lq, H * D)
  Tensor attend(AttentionKernelParams<float, float>& p) const {
    const int64_t d = p.H * p.D;
    const Tensor out = at::cpu::empty({p.B * p.Lq, d}, own.options());
    const Tensor logsumexp = at::cpu::empty({p.B * p.H * p.Lq}, own.options());
    p.scale = 1 / std::sqrt(static_cast<float>(p.D));
    const AttentionForward<float, float> call{p,
                                              {out.mutable_data_ptr<float>(), {p.Lq * d, p.D, d, 1}},
                                              {logsumexp.mutable_data_ptr<float>(), {p.H * p.Lq, p.Lq, 1, 1}}};
    kernels().of<float>().attention_forward({&call, 1});
    return out;
  }
};

Tensor decoder_step(const Tensor& x, at::TensorList weights, const Tensor& own, const Tensor& cross, int64_t length,
                    const OptionalTensor& lengths, const OptionalTensor& cells, const OptionalTensor& source_lengths,
                    const OptionalTensor& row_of_slot, const OptionalTensor& slot_of_row, bool norm_first,
                    std::string_view norm, double eps, std::string_view activation) {
  const DecoderStep step{weights,     own,         cross,      length,          lengths, cells,     source_lengths,
                         row_of_slot, slot_of_row, norm_first, norm_kind(norm), eps,     activation};
  return step(x);
}

}  // namespace

Tensor DecoderStep::operator()(Tensor x) const {
  const Layers layers(*this);
  for (int64_t layer = 0; layer < own.size(0); ++layer) x = layers.through(layer, x);
  return x;
}

Tensor step_product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t outputs, bool relu) {
  if (weight.is_mkldnn()) return onednn_linear(x, weight, bias, relu);
  const auto product = weight.scalar_type() == at::kFloat ? step_linear : quantized_linear;
  return product(x, weight, bias, outputs, relu);
}

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(("decoder_step(Tensor x, " + std::string(kDecoderStepSchema) + ") -> Tensor").c_str());
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) { m.impl("decoder_step", decoder_step); }
TORCH_LIBRARY_IMPL(transformer_fast, MkldnnCPU, m) { m.impl("decoder_step", decoder_step); }  // by its weights

}  // namespace transformer_fast
