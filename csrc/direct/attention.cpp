// The short way of transformer_fast.ops.attention.
#include "functions.h"

#include "call.h"

#include <ATen/autocast_mode.h>

#include <cmath>

namespace transformer_fast::direct {
namespace {

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                           std::optional<int64_t>, double, double, const OptionalTensor&, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                    std::optional<int64_t>, double, double, const OptionalTensor&,
                                                    bool, const OptionalTensor&);

const Native<Forward>& kernel() {
  static const Native<Forward> native("attention_forward");
  return native;
}

// What is masked, scaled and dropped: the normal form that the kernels take.
struct Mask {
  OptionalTensor keep, key_keep, lengths, bias, seed;
  std::optional<int64_t> causal;
  double scale, dropout_p;
  bool zero_empty_rows;
};

struct Attention : torch::autograd::Function<Attention> {
  static constexpr const char* kName = "attention";
  using Options = Mask;

  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    auto [out, logsumexp] = kernel()(q, k, v, m.keep, m.key_keep, m.lengths, m.bias, m.causal, m.scale, m.dropout_p,
                                     m.seed, m.zero_empty_rows);
    ctx->save_for_backward({q, k, v, out, logsumexp, or_undefined(m.keep), or_undefined(m.key_keep),
                            or_undefined(m.lengths), or_undefined(m.bias), or_undefined(m.seed)});
    // The tensors of the mask are kept above, where a change in place is noticed.
    keep(ctx, Mask{{}, {}, {}, {}, {}, m.causal, m.scale, m.dropout_p, m.zero_empty_rows});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list gradients = run_backward<Attention>(ctx, grads);
    gradients.resize(4);  // one for each argument of forward
    return gradients;
  }

  static variable_list backward_kernel(const variable_list& grads, const variable_list& saved, const Mask& m) {
    static const Native<Backward> native("attention_backward");
    const Tensor grad_out = grads[0].stride(-1) == 1 ? grads[0] : grads[0].contiguous();
    auto [grad_q, grad_k, grad_v] =
        native(grad_out, saved[0], saved[1], saved[2], saved[3], saved[4], or_none(saved[5]), or_none(saved[6]),
               or_none(saved[7]), or_none(saved[8]), m.causal, m.scale, m.dropout_p, or_none(saved[9]),
               m.zero_empty_rows, std::nullopt);
    return {grad_q, grad_k, grad_v};
  }
};

bool shapes_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.sizes() != k.sizes()) return false;
  return q.size(0) == k.size(0) && q.size(3) == k.size(3) && q.size(3) > 0 && k.size(1) > 0 &&
         q.size(1) % k.size(1) == 0 && q.stride(3) == 1 && k.stride(3) == 1 && v.stride(3) == 1;
}

bool broadcasts(const Tensor& mask, const Tensor& q, const Tensor& k) {
  const int64_t full[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  if (mask.dim() != 4) return false;
  for (int dim = 0; dim < 4; ++dim)
    if (mask.size(dim) != 1 && mask.size(dim) != full[dim]) return false;
  return true;
}

template <typename T>
bool all_within(const Tensor& lengths, int64_t most) {
  const T* values = lengths.const_data_ptr<T>();
  for (int64_t i = 0; i < lengths.numel(); ++i)
    if (values[i] < 0 || values[i] > most) return false;
  return true;
}

// int32 lengths (B,) or (B, Lq) in [0, Lk], or nothing.
OptionalTensor normal_lengths(const Tensor& lengths, int64_t B, int64_t Lq, int64_t Lk) {
  const bool wide = lengths.scalar_type() == at::kLong;
  if (!wide && lengths.scalar_type() != at::kInt) return std::nullopt;
  if (lengths.dim() < 1 || lengths.dim() > 2 || lengths.size(0) != B || (lengths.dim() == 2 && lengths.size(1) != Lq))
    return std::nullopt;
  if (!lengths.is_contiguous()) return std::nullopt;
  if (!(wide ? all_within<int64_t>(lengths, Lk) : all_within<int32_t>(lengths, Lk))) return std::nullopt;
  return wide ? lengths.to(at::kInt) : lengths;
}

}  // namespace

py::object attention(py::handle q_, py::handle k_, py::handle v_, py::handle keep_, py::handle key_keep_,
                     py::handle lengths_, py::handle bias_, py::handle causal_, py::handle scale_,
                     py::handle dropout_p_, py::handle seed_, py::handle empty_rows) {
  Arguments arguments;
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  Mask mask;
  mask.keep = arguments.optional_tensor(keep_);
  mask.key_keep = arguments.optional_tensor(key_keep_);
  mask.lengths = arguments.optional_tensor(lengths_);
  mask.bias = arguments.optional_floating(bias_);
  mask.causal = arguments.optional_integer(causal_);
  mask.dropout_p = arguments.probability(dropout_p_);
  mask.seed = arguments.optional_tensor(seed_);
  mask.zero_empty_rows = is_text(empty_rows, "zero");
  const bool default_scale = scale_.is_none();
  mask.scale = default_scale ? 0 : arguments.number(scale_);
  if (!arguments.ok() || !shapes_fit(q, k, v)) return py::none();
  arguments.require(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type());
  arguments.require(mask.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(mask.dropout_p == 0 || mask.seed);
  arguments.require(!at::autocast::is_autocast_enabled(at::kCPU));
  for (const OptionalTensor* part : {&mask.keep, &mask.key_keep, &mask.bias})
    if (*part) arguments.require(broadcasts(**part, q, k));
  if (mask.key_keep) arguments.require(mask.key_keep->size(2) == 1 && mask.key_keep->size(3) == k.size(2));
  if (mask.bias) arguments.require(!needs_gradient(*mask.bias));
  if (mask.lengths) {
    mask.lengths = normal_lengths(*mask.lengths, q.size(0), q.size(2), k.size(2));
    arguments.require(mask.lengths.has_value());
  }
  if (!arguments.ok()) return py::none();
  if (default_scale) mask.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));

  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    if (needs_gradient(q, k, v))
      out = Attention::apply(q, k, v, mask);
    else
      out = std::get<0>(kernel()(q, k, v, mask.keep, mask.key_keep, mask.lengths, mask.bias, mask.causal, mask.scale,
                                 mask.dropout_p, mask.seed, mask.zero_empty_rows));
  }
  return wrap(out);
}

}  // namespace transformer_fast::direct
