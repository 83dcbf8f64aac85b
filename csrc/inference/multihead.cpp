// nn.MultiheadAttention in evaluation, including projections and weights. For short sequences, Python code between the
// kernels would take as long as the computation.

#include "../ops/attention.h"
#include "../ops/eager_call.h"
#include "../ops/linear.h"

#include <ATen/autocast_mode.h>

#include <cmath>

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

}  // namespace

// Queries, keys, values (B, L, E) or (L, B, E), the module's weights and biases, the mask in normal form
// -> (out, weights or None). None if a gradient is needed.
py::object multihead_attention(py::handle query_, py::handle key_, py::handle value_, py::handle in_weight_,
                               py::handle in_bias_, py::handle out_weight_, py::handle out_bias_, py::handle heads_,
                               py::handle batch_first_, py::handle keep_, py::handle key_keep_, py::handle bias_,
                               py::handle causal_, py::handle need_weights_, py::handle average_) {
  Arguments arguments;
  const Tensor query = arguments.floating(query_), key = arguments.floating(key_), value = arguments.floating(value_);
  const Heads module{arguments.floating(in_weight_), arguments.optional_floating(in_bias_), arguments.integer(heads_),
                     arguments.boolean(batch_first_)};
  const Tensor out_weight = arguments.floating(out_weight_);
  const OptionalTensor out_bias = arguments.optional_floating(out_bias_);
  const OptionalTensor keep = arguments.optional_tensor(keep_), key_keep = arguments.optional_tensor(key_keep_);
  const OptionalTensor bias = arguments.optional_floating(bias_);
  const std::optional<int64_t> causal = arguments.optional_integer(causal_);
  const bool need_weights = arguments.boolean(need_weights_), average = arguments.boolean(average_);
  if (!arguments.ok() || at::autocast::is_autocast_enabled(at::kCPU)) return py::none();
  if (needs_gradient(query, key, value, module.in_weight, module.in_bias, out_weight, out_bias, bias))
    return py::none();
  for (const Tensor* t : {&query, &key, &value})
    arguments.require(t->dim() == 3 && t->size(2) == module.in_weight.size(1));
  for (const Tensor* t : {&key, &value, &module.in_weight, &out_weight})
    arguments.require(t->scalar_type() == query.scalar_type());
  if (!arguments.ok()) return py::none();
  const int batch = module.batch_first ? 0 : 1;
  if (key.sizes() != value.sizes() || key.size(batch) != query.size(batch) || query.numel() == 0) return py::none();

  Tensor out, weights;
  {
    const py::gil_scoped_release no_gil;
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto parts = module.project(query, key, value);
    const Tensor &q = parts[0], &k = parts[1];
    AttentionParams params;
    params.keep = keep, params.key_keep = key_keep, params.bias = bias, params.causal = causal;
    params.scale = 1 / std::sqrt(static_cast<double>(q.size(3))), params.zero_empty_rows = true;
    const Tensor heads = attention_forward(q, k, parts[2], params, false).out;
    const Tensor merged = module.batch_first ? heads.transpose(1, 2) : heads.permute({2, 0, 1, 3});
    out = linear_forward(merged.reshape(query.sizes()), out_weight, out_bias);
    if (need_weights) {
      weights = attention_weights(q, k, params);
      if (average) weights = weights.mean(1);
    }
  }
  return py::make_tuple(wrap(out), need_weights ? wrap(weights) : py::none());
}

PYTHON_MODULE_FRAGMENT(m) { m.def("multihead_attention", &multihead_attention); }

}  // namespace transformer_fast::eager
