// nn.MultiheadAttention in evaluation, including projections and weights. For short sequences, Python code between the
// kernels would take as long as the computation.

#include "../ops/attention.h"
#include "../ops/linear.h"
#include "../ops/op.h"

#include <cmath>
#include <tuple>
#include <vector>

namespace transformer_fast::eager {
namespace {

// A supported call; heads are (batch, heads, length, head_dim) views.
struct Heads {
  Tensor in_weight;  // (3 E, E)
  OptionalTensor in_bias;
  int64_t heads;
  bool batch_first;

  // Projects x, (B, L, E) or (L, B, E), to `count` of queries, keys and values, from number `first` on.
  std::vector<Tensor> project(const Tensor& x, int64_t first, int64_t count) const {
    const int64_t E = in_weight.size(1);
    const auto part = [&](const Tensor& t) { return count == 3 ? t : t.narrow(0, first * E, count * E); };
    const Tensor states = linear_forward(x, part(in_weight), in_bias ? OptionalTensor(part(*in_bias)) : std::nullopt)
                              .view({x.size(0), x.size(1), count, heads, E / heads});
    std::vector<Tensor> parts;
    for (int64_t i = 0; i < count; ++i) {
      const Tensor own = states.select(2, i);
      parts.push_back(batch_first ? own.transpose(1, 2) : own.permute({1, 2, 0, 3}));
    }
    return parts;
  }

  std::vector<Tensor> project(const Tensor& query, const Tensor& key, const Tensor& value) const {
    if (key.is_same(value) && query.is_same(key)) return project(query, 0, 3);
    std::vector<Tensor> parts = project(query, 0, 1);
    const auto append = [&](std::vector<Tensor> more) { parts.insert(parts.end(), more.begin(), more.end()); };
    if (key.is_same(value)) {
      append(project(key, 1, 2));
    } else {
      append(project(key, 1, 1));
      append(project(value, 2, 1));
    }
    return parts;
  }
};

// Queries, keys, values (B, L, E) or (L, B, E), the module's weights and biases, the mask in normal form
// -> (out, weights if needed). Undefined if a gradient is needed, and for what other ops must compute.
std::tuple<Tensor, Tensor> multihead_attention(bool, const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& in_weight, const OptionalTensor& in_bias,
                                               const Tensor& out_weight, const OptionalTensor& out_bias, int64_t heads,
                                               bool batch_first, const OptionalTensor& keep,
                                               const OptionalTensor& key_keep, const OptionalTensor& bias,
                                               std::optional<int64_t> causal, bool need_weights, bool average) {
  if (needs_gradient(query, key, value, in_weight, in_bias, out_weight, out_bias, bias)) return {};
  const auto is_wide_float = [](const Tensor& t) {
    return at::isFloatingType(t.scalar_type()) && t.element_size() >= 2;
  };
  for (const OptionalTensor* t : {&in_bias, &out_bias, &bias})
    if (*t && !is_wide_float(**t)) return {};
  for (const Tensor* t : {&query, &key, &value})
    if (t->dim() != 3 || in_weight.dim() != 2 || t->size(2) != in_weight.size(1)) return {};
  for (const Tensor* t : {&query, &key, &value, &in_weight, &out_weight})
    if (!is_wide_float(*t) || t->scalar_type() != query.scalar_type()) return {};
  const int batch = batch_first ? 0 : 1;
  if (key.sizes() != value.sizes() || key.size(batch) != query.size(batch) || query.numel() == 0) return {};

  const at::AutoDispatchBelowADInplaceOrView below;
  const Heads module{in_weight, in_bias, heads, batch_first};
  const auto parts = module.project(query, key, value);
  const Tensor &q = parts[0], &k = parts[1];
  AttentionParams params;
  params.keep = keep, params.key_keep = key_keep, params.bias = bias, params.causal = causal;
  params.scale = 1 / std::sqrt(static_cast<double>(q.size(3))), params.zero_empty_rows = true;
  const Tensor out_heads = attention_forward(q, k, parts[2], params, false).out;
  const Tensor merged = batch_first ? out_heads.transpose(1, 2) : out_heads.permute({2, 0, 1, 3});
  const Tensor out = linear_forward(merged.reshape(query.sizes()), out_weight, out_bias);
  if (!need_weights) return {out, Tensor()};
  const Tensor weights = attention_weights(q, k, params);
  return {out, average ? weights.mean(1) : weights};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_door<"multihead_attention", kNoCheck, multihead_attention, DoorOptions{.results = 2, .casts = kAllOfIt}>(
      "(Tensor query, Tensor key, Tensor value, Tensor in_weight, Tensor? in_bias, Tensor out_weight, "
      "Tensor? out_bias, int heads, bool batch_first, Tensor? keep, Tensor? key_keep, Tensor? bias, int? causal, "
      "bool need_weights, bool average)");
}

}  // namespace transformer_fast::eager
