// The short ways of transformer_fast.ops.attention: to the kernels of the CPU, and to the launchers of the Triton kernels,
// which are functions in Python. Either way the autograd rule is here.
#include "functions.h"

#include "call.h"

#include <ATen/autocast_mode.h>

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
                                                    std::optional<int64_t>, double, double, const OptionalTensor&,
                                                    bool, const OptionalTensor&, const OptionalTensor&,
                                                    const OptionalTensor&);

const Native<Forward>& kernel() {
  static const Native<Forward> native("attention_forward");
  return native;
}

// What is masked, scaled and dropped: the normal form that the kernels take. A launcher also takes the seed as a number.
struct Mask {
  OptionalTensor keep, key_keep, lengths, bias, seed;
  std::optional<int64_t> causal, seed_value;
  double scale, dropout_p;
  bool zero_empty_rows;
};

// The output; in training with the logsumexp and what else the backward needs after it; and the gradients. By the kernels
// of the CPU.
struct OnCpu {
  static constexpr const char* kName = "attention";

  static Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    const py::gil_scoped_release no_gil;
    return std::get<0>(kernel()(q, k, v, m.keep, m.key_keep, m.lengths, m.bias, m.causal, m.scale, m.dropout_p, m.seed,
                                m.zero_empty_rows));
  }

  static variable_list forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    static const Native<ForwardTraining> native("attention_forward_training");
    const py::gil_scoped_release no_gil;
    auto [out, logsumexp, kept, kept_factors] = native(q, k, v, m.keep, m.key_keep, m.lengths, m.bias, m.causal,
                                                       m.scale, m.dropout_p, m.seed, m.zero_empty_rows);
    return {out, logsumexp, or_undefined(kept), or_undefined(kept_factors)};
  }

  static variable_list backward(const Tensor& grad_out, const variable_list& saved, const Mask& m) {
    static const Native<Backward> native("attention_backward");
    auto [grad_q, grad_k, grad_v] =
        native(grad_out, saved[0], saved[1], saved[2], saved[3], saved[4], or_none(saved[5]), or_none(saved[6]),
               or_none(saved[7]), or_none(saved[8]), m.causal, m.scale, m.dropout_p, or_none(saved[9]),
               m.zero_empty_rows, std::nullopt, or_none(saved[10]), or_none(saved[11]));
    return {grad_q, grad_k, grad_v};
  }
};

// The same by launchers in Python. They live as long as the process: nothing is left to free when it ends.
struct ByLaunchers {
  static constexpr const char* kName = "attention";
  inline static PyObject *forward_launcher = nullptr, *backward_launcher = nullptr;

  static py::object object(const OptionalTensor& tensor) { return tensor ? wrap(*tensor) : py::none(); }
  static py::object object(const Tensor& tensor) { return tensor.defined() ? wrap(tensor) : py::none(); }

  static py::object seed(const Mask& m, const OptionalTensor& tensor) {
    return m.seed_value ? py::object(py::int_(*m.seed_value)) : object(tensor);
  }

  static Tensor forward(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    return forward_training(q, k, v, m)[0];
  }

  static variable_list forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    const py::tuple found = py::handle(forward_launcher)(
        wrap(q), wrap(k), wrap(v), object(m.keep), object(m.key_keep), object(m.lengths), object(m.bias),
        py::cast(m.causal), m.scale, m.dropout_p, seed(m, m.seed), m.zero_empty_rows);
    return {THPVariable_Unpack(found[0].ptr()), THPVariable_Unpack(found[1].ptr())};
  }

  static variable_list backward(const Tensor& grad_out, const variable_list& saved, const Mask& m) {
    const py::gil_scoped_acquire gil;
    const py::tuple found = py::handle(backward_launcher)(
        wrap(grad_out), wrap(saved[0]), wrap(saved[1]), wrap(saved[2]), wrap(saved[3]), wrap(saved[4]),
        object(saved[5]), object(saved[6]), object(saved[7]), object(saved[8]), py::cast(m.causal), m.scale,
        m.dropout_p, seed(m, or_none(saved[9])), m.zero_empty_rows);
    return {THPVariable_Unpack(found[0].ptr()), THPVariable_Unpack(found[1].ptr()),
            THPVariable_Unpack(found[2].ptr())};
  }
};

template <typename Kernels>
struct Attention : torch::autograd::Function<Attention<Kernels>> {
  static constexpr const char* kName = Kernels::kName;
  using Options = Mask;

  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    const variable_list found = Kernels::forward_training(q, k, v, m);
    variable_list saved{q, k, v, found[0], found[1], or_undefined(m.keep), or_undefined(m.key_keep),
                        or_undefined(m.lengths), or_undefined(m.bias), or_undefined(m.seed)};
    saved.insert(saved.end(), found.begin() + 2, found.end());
    ctx->save_for_backward(std::move(saved));
    // The tensors of the mask are kept above, where a change in place is noticed.
    keep(ctx, Mask{{}, {}, {}, {}, {}, m.causal, m.seed_value, m.scale, m.dropout_p, m.zero_empty_rows});
    return found[0];
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list gradients = run_backward<Attention>(ctx, grads);
    gradients.resize(4);  // one for each argument of forward
    return gradients;
  }

  static variable_list backward_kernel(const variable_list& grads, const variable_list& saved, const Mask& m) {
    return Kernels::backward(grads[0].stride(-1) == 1 ? grads[0] : grads[0].contiguous(), saved, m);
  }

  static py::object call(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
    return wrap(needs_gradient(q, k, v) ? Attention::apply(q, k, v, m) : Kernels::forward(q, k, v, m));
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

Call read(Arguments& arguments, py::handle q_, py::handle k_, py::handle v_, py::handle keep_, py::handle key_keep_,
          py::handle lengths_, py::handle bias_, py::handle causal_, py::handle scale_, py::handle dropout_p_,
          py::handle seed_, py::handle empty_rows) {
  Call call{arguments.floating(q_), arguments.floating(k_), arguments.floating(v_), {}};
  auto& [q, k, v, mask] = call;
  mask.keep = arguments.optional_tensor(keep_);
  mask.key_keep = arguments.optional_tensor(key_keep_);
  mask.lengths = arguments.optional_tensor(lengths_);
  mask.bias = arguments.optional_floating(bias_);
  mask.causal = arguments.optional_integer(causal_);
  mask.dropout_p = arguments.probability(dropout_p_);
  if (PyLong_CheckExact(seed_.ptr()))
    mask.seed_value = arguments.integer(seed_);
  else
    mask.seed = arguments.optional_tensor(seed_);
  mask.zero_empty_rows = is_text(empty_rows, "zero");
  const bool default_scale = scale_.is_none();
  mask.scale = default_scale ? 0 : arguments.number(scale_);
  if (!arguments.ok() || !shapes_fit(q, k, v)) return {};
  const at::Device device = q.device();
  arguments.require(k.device() == device && v.device() == device);
  arguments.require(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type());
  arguments.require(mask.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(mask.dropout_p == 0 || mask.seed || mask.seed_value);
  arguments.require(!at::autocast::is_autocast_enabled(device.type()));
  for (const OptionalTensor* part : {&mask.keep, &mask.key_keep, &mask.bias})
    if (*part) arguments.require(broadcasts(**part, q, k) && (*part)->device() == device);
  if (mask.key_keep) arguments.require(mask.key_keep->size(2) == 1 && mask.key_keep->size(3) == k.size(2));
  if (mask.bias) arguments.require(!needs_gradient(*mask.bias));
  if (mask.lengths) arguments.require(mask.lengths->device() == device);
  if (!arguments.ok()) return {};
  if (default_scale) mask.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
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

void set_attention_launchers(py::object forward, py::object backward) {
  ByLaunchers::forward_launcher = forward.release().ptr();
  ByLaunchers::backward_launcher = backward.release().ptr();
}

py::object attention_launched(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep,
                              py::handle lengths, py::handle bias, py::handle causal, py::handle scale,
                              py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  constexpr int64_t kLargestHeadDim = 256;
  Arguments arguments(true);
  const Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || call.q.size(3) > kLargestHeadDim || call.q.scalar_type() == at::kDouble) return py::none();
  if (call.mask.lengths && !are_normal(*call.mask.lengths, call.q.size(0), call.q.size(2))) return py::none();
  return Attention<ByLaunchers>::call(call.q, call.k, call.v, call.mask);
}

}  // namespace transformer_fast::direct
