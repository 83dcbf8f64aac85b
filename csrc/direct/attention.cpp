// The short ways of transformer_fast.ops.attention and .attention_packed: to the kernels of the CPU, and to the
// launchers of the Triton kernels. Either way the autograd rule is here.
#include "functions.h"

#include "attention_checks.h"
#include "attention_launchers.h"
#include "node.h"

#include <algorithm>
#include <cmath>

namespace transformer_fast::direct {
namespace {

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                           std::optional<int64_t>, double, double, const OptionalTensor&, bool);
using ForwardTraining = std::tuple<Tensor, Tensor, OptionalTensor, OptionalTensor>(
    const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
    const OptionalTensor&, std::optional<int64_t>, double, double, const OptionalTensor&, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                    std::optional<int64_t>, double, double, const OptionalTensor&, bool,
                                                    const OptionalTensor&, const OptionalTensor&,
                                                    const OptionalTensor&);
using PackedForward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                 const Tensor&, int64_t, int64_t, bool, double, double,
                                                 const OptionalTensor&, bool);
using PackedBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                          const Tensor&, const Tensor&, const OptionalTensor&,
                                                          const Tensor&, const Tensor&, int64_t, int64_t, bool, double,
                                                          double, const OptionalTensor&, bool);

std::tuple<Tensor, Tensor> packed_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
  static const Native<PackedForward> native("attention_packed_forward");
  const auto& [cu_seqlens_q, cu_seqlens_k, max_q, max_k] = m.packed;
  return native(q, k, v, *cu_seqlens_q, *cu_seqlens_k, max_q, max_k, m.causal.has_value(), m.scale, m.dropout_p, m.seed,
                m.zero_empty_rows);
}

using BackwardBias = std::tuple<Tensor, Tensor, Tensor, Tensor>(
    const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
    const OptionalTensor&, const OptionalTensor&, const Tensor&, std::optional<int64_t>, double, double,
    const OptionalTensor&, bool, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

// The output; in training with the logsumexp and what else the backward needs after it; and the gradients of q, k, v and,
// where it is asked for, of the bias. By the kernels of the CPU.
struct OnCpu {
  static constexpr size_t kFound = 4;
  using Found = std::array<Tensor, kFound>;

  static Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    static const Native<Forward> native("attention_forward");
    const py::gil_scoped_release no_gil;
    return std::get<0>(m.packed.cu_seqlens_q ? packed_forward(q, k, v, m)
                                             : native(q, k, v, m.keep, m.key_keep, m.lengths, m.bias, m.causal, m.scale,
                                                      m.dropout_p, m.seed, m.zero_empty_rows));
  }

  static Found forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    static const Native<ForwardTraining> native("attention_forward_training");
    const py::gil_scoped_release no_gil;
    if (m.packed.cu_seqlens_q) {
      auto [out, logsumexp] = packed_forward(q, k, v, m);
      return {out, logsumexp, Tensor(), Tensor()};
    }
    auto [out, logsumexp, kept, kept_factors] = native(q, k, v, m.keep, m.key_keep, m.lengths, m.bias, m.causal,
                                                       m.scale, m.dropout_p, m.seed, m.zero_empty_rows);
    return {out, logsumexp, or_undefined(kept), or_undefined(kept_factors)};
  }

  // `found` is what forward_training gave.
  static variable_list backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor* found, const Mask& m, bool needs_bias) {
    static const Native<Backward> native("attention_backward");
    static const Native<PackedBackward> packed("attention_packed_backward");
    static const Native<BackwardBias> with_bias("attention_backward_bias");
    if (needs_bias) {
      auto [grad_q, grad_k, grad_v, grad_bias] =
          with_bias(grad_out, q, k, v, found[0], found[1], m.keep, m.key_keep, m.lengths, *m.bias, m.causal, m.scale,
                    m.dropout_p, m.seed, m.zero_empty_rows, std::nullopt, or_none(found[2]), or_none(found[3]));
      return {grad_q, grad_k, grad_v, grad_bias};
    }
    const auto& [cu_seqlens_q, cu_seqlens_k, max_q, max_k] = m.packed;
    auto [grad_q, grad_k, grad_v] =
        cu_seqlens_q
            ? packed(grad_out, q, k, v, found[0], found[1], std::nullopt, *cu_seqlens_q, *cu_seqlens_k, max_q, max_k,
                     m.causal.has_value(), m.scale, m.dropout_p, m.seed, m.zero_empty_rows)
            : native(grad_out, q, k, v, found[0], found[1], m.keep, m.key_keep, m.lengths, m.bias, m.causal, m.scale,
                     m.dropout_p, m.seed, m.zero_empty_rows, std::nullopt, or_none(found[2]), or_none(found[3]));
    return {grad_q, grad_k, grad_v, Tensor()};
  }
};

template <typename Kernels>
struct Attention {
  static constexpr const char* kName = "attention";
  static constexpr size_t kFirstFound = 3 + kMaskTensors;
  static constexpr size_t kSaved = kFirstFound + Kernels::kFound;
  using Options = Mask;

  static Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    typename OpNode<Attention>::Saved saved = {q, k, v};
    const MaskTensors mask = m.tensors();
    std::copy(mask.begin(), mask.end(), &saved[3]);
    {
      const at::NoGradGuard no_grad;
      const auto found = Kernels::forward_training(q, k, v, m);
      std::copy(found.begin(), found.end(), &saved[kFirstFound]);
    }
    const Tensor& out = saved[kFirstFound];
    record<Attention>({out}, saved, m.options(), q, k, v, m.bias);
    return out;
  }

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Mask& m,
                                const Needs& needs) {
    const Tensor grad_out = grads[0].stride(-1) == 1 ? grads[0] : grads[0].contiguous();
    return Kernels::backward(grad_out, saved[0], saved[1], saved[2], &saved[kFirstFound], m.with(&saved[3]), needs[3]);
  }

  static py::object call(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    return wrap(needs_gradient(q, k, v, m.bias) ? forward(q, k, v, m) : Kernels::forward(q, k, v, m));
  }
};

bool shapes_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.sizes() != k.sizes()) return false;
  return q.size(0) == k.size(0) && q.size(3) == k.size(3) && q.size(3) > 0 && k.size(1) > 0 &&
         q.size(1) % k.size(1) == 0 && q.stride(3) == 1 && k.stride(3) == 1 && v.stride(3) == 1;
}

bool packed_shapes_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 3 || k.dim() != 3 || v.sizes() != k.sizes()) return false;
  return q.size(2) == k.size(2) && q.size(2) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0 && q.stride(2) == 1 &&
         k.stride(2) == 1 && v.stride(2) == 1;
}

// The length of the longest sequence, at most `most` where that is given; -1 unless cu_seqlens, int32 (B + 1,), rises
// from 0 to the number of tokens. On a GPU, where looking would wait for it, `most` is believed.
int64_t longest_sequence(const Tensor& cu_seqlens, const Tensor& tokens, std::optional<int64_t> most) {
  if (cu_seqlens.scalar_type() != at::kInt || cu_seqlens.dim() != 1 || cu_seqlens.numel() == 0 ||
      !cu_seqlens.is_contiguous() || cu_seqlens.device() != tokens.device())
    return -1;
  if (!cu_seqlens.is_cpu()) return most.value_or(-1);
  const int32_t* const starts = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t last = cu_seqlens.numel() - 1;
  int64_t longest = 0;
  for (int64_t i = 0; i < last; ++i) {
    if (starts[i + 1] < starts[i]) return -1;
    longest = std::max<int64_t>(longest, starts[i + 1] - starts[i]);
  }
  if (starts[0] != 0 || starts[last] != tokens.size(0) || longest > most.value_or(longest)) return -1;
  return most.value_or(longest);
}

bool broadcasts(const Tensor& mask, const Tensor& q, const Tensor& k) {
  const int64_t full[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  if (mask.dim() != 4) return false;
  for (int dim = 0; dim < 4; ++dim)
    if (mask.size(dim) != 1 && mask.size(dim) != full[dim]) return false;
  return true;
}

// int32 lengths (B,) or (B, Lq) in [0, Lk], or nothing.
OptionalTensor normal_lengths(const Tensor& lengths, int64_t B, int64_t Lq, int64_t Lk) {
  if (lengths.dim() < 1 || lengths.dim() > 2 || lengths.size(0) != B || (lengths.dim() == 2 && lengths.size(1) != Lq))
    return std::nullopt;
  return int_lengths(lengths, Lk);
}

// Whether lengths are what `normal_lengths` makes of them, but for their values, which may be on a GPU.
bool are_normal(const Tensor& lengths, int64_t B, int64_t Lq) {
  return lengths.scalar_type() == at::kInt && lengths.dim() >= 1 && lengths.dim() <= 2 && lengths.size(0) == B &&
         (lengths.dim() == 1 || lengths.size(1) == Lq);
}

// What the door was given; q is undefined where the call is declined.
struct Call {
  Tensor q, k, v;
  Mask mask;
};

// The scale (0 for the default, which needs q), the dropout with its seed, and the empty rows.
void read_options(Arguments& arguments, Mask& mask, py::handle scale, py::handle dropout_p, py::handle seed,
                  py::handle empty_rows) {
  mask.scale = scale.is_none() ? 0 : arguments.number(scale);
  mask.dropout_p = arguments.probability(dropout_p);
  if (PyLong_CheckExact(seed.ptr()))
    mask.seed_value = arguments.integer(seed);
  else
    mask.seed = arguments.optional_tensor(seed);
  mask.zero_empty_rows = is_text(empty_rows, "zero");
  arguments.require(mask.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(mask.dropout_p == 0 || mask.seed || mask.seed_value);
}

Call read(Arguments& arguments, py::handle q_, py::handle k_, py::handle v_, py::handle keep_, py::handle key_keep_,
          py::handle lengths_, py::handle bias_, py::handle causal_, py::handle scale, py::handle dropout_p,
          py::handle seed, py::handle empty_rows) {
  Call call{arguments.floating(q_), arguments.floating(k_), arguments.floating(v_), {}};
  auto& [q, k, v, mask] = call;
  mask.keep = arguments.optional_tensor(keep_);
  mask.key_keep = arguments.optional_tensor(key_keep_);
  mask.lengths = arguments.optional_tensor(lengths_);
  mask.bias = arguments.optional_floating(bias_);
  mask.causal = arguments.optional_integer(causal_);
  read_options(arguments, mask, scale, dropout_p, seed, empty_rows);
  if (!arguments.ok() || !shapes_fit(q, k, v) || !alike(q, k, v)) return {};
  const at::Device device = q.device();
  for (const OptionalTensor* part : {&mask.keep, &mask.key_keep, &mask.bias})
    if (*part) arguments.require(broadcasts(**part, q, k) && (*part)->device() == device);
  if (mask.key_keep) arguments.require(mask.key_keep->size(2) == 1 && mask.key_keep->size(3) == k.size(2));
  if (mask.lengths) arguments.require(mask.lengths->device() == device);
  if (!arguments.ok()) return {};
  if (scale.is_none()) mask.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  return call;
}

}  // namespace

py::object attention(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep, py::handle lengths,
                     py::handle bias, py::handle causal, py::handle scale, py::handle dropout_p, py::handle seed,
                     py::handle empty_rows) {
  Arguments arguments;
  Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || (call.mask.dropout_p > 0 && !call.mask.seed)) return py::none();
  if (call.mask.lengths) {
    call.mask.lengths = normal_lengths(*call.mask.lengths, call.q.size(0), call.q.size(2), call.k.size(2));
    if (!call.mask.lengths) return py::none();
  }
  return Attention<OnCpu>::call(call.q, call.k, call.v, call.mask);
}

py::object attention_launched(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep,
                              py::handle lengths, py::handle bias, py::handle causal, py::handle scale,
                              py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(true);
  const Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || !launchable(call.q)) return py::none();
  if (needs_gradient(call.mask.bias)) return py::none();
  if (call.mask.lengths && !are_normal(*call.mask.lengths, call.q.size(0), call.q.size(2))) return py::none();
  return Attention<ByLaunchers>::call(call.q, call.k, call.v, call.mask);
}

py::object attention_packed(bool launched, py::handle q_, py::handle k_, py::handle v_, py::handle cu_seqlens_q,
                            py::handle cu_seqlens_k, py::handle max_q, py::handle max_k, py::handle causal,
                            py::handle scale, py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(launched);
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  const Tensor starts_q = arguments.tensor(cu_seqlens_q), starts_k = arguments.tensor(cu_seqlens_k);
  Mask mask{};
  if (arguments.boolean(causal)) mask.causal = 0;
  read_options(arguments, mask, scale, dropout_p, seed, empty_rows);
  const std::optional<int64_t> most_q = arguments.optional_integer(max_q), most_k = arguments.optional_integer(max_k);
  if (!arguments.ok() || !packed_shapes_fit(q, k, v) || !alike(q, k, v)) return py::none();
  if (launched ? !launchable(q) : mask.dropout_p > 0 && !mask.seed) return py::none();
  const int64_t longest_q = longest_sequence(starts_q, q, most_q), longest_k = longest_sequence(starts_k, k, most_k);
  if (longest_q < 0 || longest_k < 0 || starts_q.sizes() != starts_k.sizes()) return py::none();
  mask.packed = {starts_q, starts_k, longest_q, longest_k};
  if (scale.is_none()) mask.scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
  return launched ? Attention<ByLaunchers>::call(q, k, v, mask) : Attention<OnCpu>::call(q, k, v, mask);
}

}  // namespace transformer_fast::direct
