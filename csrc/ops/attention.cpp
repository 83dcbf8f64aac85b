// Attention, of padded and of packed batches: the ops of torch.ops.transformer_fast, from schema to kernel. The eager
// fast paths are in attention_eager.cpp, the op of the weights in attention_weights.cpp.
// transformer_fast/ops/attention.py and attention_packed.py document and check what they take.
#include "attention.h"

#include "../triton/launch_attention.h"
#include "attention_arguments.h"
#include "attention_op_checks.h"
#include "node.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <tuple>

namespace transformer_fast {
namespace attention_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

const std::string kForwardInputs = "(Tensor q, Tensor k, Tensor v, ";
const std::string kBackwardInputs =
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? grad_logsumexp, ";
const std::string kForwardResults = " -> (Tensor out, Tensor logsumexp)";
const std::string kBackwardResults = " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)";

AttentionGradients compute_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q,
                                    const Tensor& k, const Tensor& v, const AttentionResult& result,
                                    const OptionalTensor& grad_logsumexp, GradientNeeds needs) {
  if (!params.by_triton) return attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs);
  AttentionGradients grads = launch_attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs);
  if (needs.sinks) grads.sinks = sinks_gradient(grad_out, result, grad_logsumexp, params);
  return grads;
}

template <Name name>
void check_forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  check_arguments({name.text}, params, q, k, v);
}

template <Name name>
void check_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                    const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp) {
  const Checks check{name.text};
  check_arguments(check, params, q, k, v);
  check("grad_out", grad_out).like(q).unit_stride();
  check("out", out).like(q).unit_stride();
  check_statistics(check, "logsumexp", logsumexp, q);
  check_statistics(check, "grad_logsumexp", grad_logsumexp, q);
}

// The check of an op that computes the gradient of one argument.
template <Name name, Name argument, OptionalTensor AttentionParams::* field>
void check_gradient_of(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                       const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                       const OptionalTensor& grad_logsumexp) {
  check_backward<name>(params, grad_out, q, k, v, out, logsumexp, grad_logsumexp);
  Checks{name.text}(argument.text, params.*field).given("whose gradient to compute");
}

TwoTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const AttentionResult result =
      (params.by_triton ? launch_attention : attention_forward)(q, k, v, params, /*training=*/false);
  return {result.out, result.logsumexp};
}

ThreeTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                      const OptionalTensor& grad_logsumexp) {
  const auto grads = compute_backward(params, grad_out, q, k, v, {out, logsumexp, {}, {}, {}}, grad_logsumexp, {});
  return {grads.q, grads.k, grads.v};
}

Tensor grad_bias(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                 const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp) {
  const AttentionResult result{out, logsumexp, {}, {}, {}};
  if (!params.by_triton) return attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  const GradientNeeds needs{.bias = true, .keys = false};
  return launch_attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs).bias;
}

Tensor grad_distance_bias(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                          const OptionalTensor& grad_logsumexp) {
  const AttentionResult result{out, logsumexp, {}, {}, {}};
  const GradientNeeds needs{.distance_bias = true, .keys = false};
  return compute_backward(params, grad_out, q, k, v, result, grad_logsumexp, needs).distance_bias;
}

TwoTensors forward_meta(const AttentionParams&, const Tensor& q, const Tensor&, const Tensor&) {
  const at::ScalarType statistics = arithmetic_type(q);
  if (q.dim() == 3) return {at::empty_like(q), meta_tensor(q, {q.sym_size(1), q.sym_size(0)}, statistics)};
  return {at::empty_like(q), meta_tensor(q, q.sym_sizes().slice(0, 3), statistics)};
}

ThreeTensors backward_meta(const AttentionParams&, const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor&, const Tensor&, const OptionalTensor&) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

Tensor grad_bias_meta(const AttentionParams& params, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      const Tensor&, const Tensor&, const OptionalTensor&) {
  return meta_tensor(*params.bias, params.bias->sym_sizes());
}

Tensor grad_distance_bias_meta(const AttentionParams& params, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&) {
  return at::empty_like(*params.distance_bias);
}

// True if the kernels may be called without the dispatcher: all tensors are plain, and no mode observes the call.
template <typename Tensors>
bool is_direct(const AttentionParams& params, const Tensors& tensors) {
  return eager::is_plain_eager(tensors, /*any_device=*/params.by_triton);
}

struct Attention {
  static constexpr const char* kName = "attention";
  // Indices of the inputs; and of the saved tensors: q, k and v, the tensors of the arguments, and the forward's
  // results.
  enum : size_t { kQ, kK, kV, kBias, kDistanceBias, kSinks, kInputs };
  enum : size_t {
    kParams = kV + 1,
    kOut = kParams + AttentionParams::kTensors,
    kLogsumexp,
    kProbs,
    kFactors,
    kKeptBits,
    kSaved
  };
  static constexpr size_t kValues = kParams;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    const AttentionParams params = options.with(&saved[kParams]);
    const Tensor &q = saved[kQ], &k = saved[kK], &v = saved[kV];
    const AttentionResult result{saved[kOut], saved[kLogsumexp], or_none(saved[kProbs]), or_none(saved[kFactors]),
                                 or_none(saved[kKeptBits])};
    const OptionalTensor grad_logsumexp = grads.size() > 1 ? or_none(grads[1]) : std::nullopt;
    const bool direct = is_direct(params, grads) && is_direct(params, saved);
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(result.out);
    if (grad_out.sym_stride(-1) != 1) grad_out = grad_out.contiguous();
    if (direct) {
      const auto gradients = compute_backward(params, grad_out, q, k, v, result, grad_logsumexp,
                                              {needs[kBias], needs[kDistanceBias], needs[kSinks],
                                               /*keys=*/needs[kK] || needs[kV]});
      return {gradients.q, gradients.k, gradients.v, gradients.bias, gradients.distance_bias, gradients.sinks};
    }
    const KernelsOfForward same(params.by_triton);
    variable_list gradients(kInputs);
    if (needs[kQ] || needs[kK] || needs[kV])
      std::tie(gradients[kQ], gradients[kK], gradients[kV]) =
          dispatch<attention_op::backward>("attention_backward", "attention_packed_backward", params, grad_out, q, k, v,
                                           result.out, result.logsumexp, grad_logsumexp);
    if (needs[kBias])
      gradients[kBias] = dispatch<grad_bias>("attention_grad_bias", "attention_packed_grad_bias", params, grad_out, q,
                                             k, v, result.out, result.logsumexp, grad_logsumexp);
    if (needs[kDistanceBias])
      gradients[kDistanceBias] =
          dispatch<grad_distance_bias>("attention_grad_distance_bias", "attention_packed_grad_distance_bias", params,
                                       grad_out, q, k, v, result.out, result.logsumexp, grad_logsumexp);
    if (needs[kSinks]) gradients[kSinks] = sinks_gradient(grad_out, result, grad_logsumexp, params);
    return gradients;
  }
};

}  // namespace

AttentionResult recorded(bool direct, size_t outputs, const AttentionParams& params, const Tensor& q, const Tensor& k,
                         const Tensor& v) {
  const bool records = needs_gradient(q, k, v, params.bias, params.distance_bias, params.sinks);
  AttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (direct)
      result = (params.by_triton ? launch_attention : attention_forward)(q, k, v, params, /*training=*/records);
    else
      std::tie(result.out, result.logsumexp) = dispatch<forward>("attention", "attention_packed", params, q, k, v);
  }
  if (!records) return result;
  eager::OpNode<Attention>::Saved saved = {q, k, v};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[Attention::kParams]);
  saved[Attention::kOut] = result.out, saved[Attention::kLogsumexp] = result.logsumexp;
  saved[Attention::kProbs] = or_undefined(result.saved_probs);
  saved[Attention::kFactors] = or_undefined(result.saved_factors);
  saved[Attention::kKeptBits] = or_undefined(result.kept_bits);
  variable_list returned = {result.out, result.logsumexp};
  returned.resize(outputs);
  eager::record<Attention>(returned, saved, params.without_tensors(), q, k, v, params.bias, params.distance_bias,
                           params.sinks);
  return result;
}

namespace {

TwoTensors forward_autograd(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto tensors = params.tensors();
  const bool direct = is_direct(params, variable_list{q, k, v}) && is_direct(params, tensors);
  if (direct)
    params.is_packed() ? check_forward<"attention_packed">(params, q, k, v)
                       : check_forward<"attention">(params, q, k, v);
  const AttentionResult result = recorded(direct, 2, params, q, k, v);
  return {result.out, result.logsumexp};
}

template <c10::DeviceType device>
TwoTensors forward_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const NoAutocast<device> no_autocast;
  return dispatch<forward>("attention", "attention_packed", params, autocast<device>(q), autocast<device>(k),
                           autocast<device>(v));
}

// Defines an op of the backward: `arguments` is its schema without the name. Keys: Padded or Packed.
template <template <auto> typename Keys, Name name, auto check, auto implementation, auto meta>
void define_backward(torch::Library& m, const std::string& arguments) {
  define<Keys<check>::call, Keys<implementation>::call, Keys<meta>::call,
         eager::Undifferentiable<name, Keys<implementation>::call>::call>(m, name.text + arguments);
}

// Defines the ops of the backward of padded or of packed batches.
template <template <auto> typename Keys, Name gradients, Name of_bias, Name of_distance_bias>
void define_backwards(torch::Library& m, const std::string& arguments) {
  define_backward<Keys, gradients, check_backward<gradients>, backward, backward_meta>(m, arguments + kBackwardResults);
  define_backward<Keys, of_bias, check_gradient_of<of_bias, "bias", &AttentionParams::bias>, grad_bias, grad_bias_meta>(
      m, arguments + " -> Tensor");
  define_backward<Keys, of_distance_bias,
                  check_gradient_of<of_distance_bias, "distance_bias", &AttentionParams::distance_bias>,
                  grad_distance_bias, grad_distance_bias_meta>(m, arguments + " -> Tensor");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  const std::string padded = kMask + kOptions, packed = kSequences + kOptions;
  define<Padded<check_forward<"attention">>::call, Padded<forward>::call, Padded<forward_meta>::call,
         Padded<forward_autograd>::call>(m, "attention" + kForwardInputs + padded + kForwardResults);
  define<Packed<check_forward<"attention_packed">>::call, Packed<forward>::call, Packed<forward_meta>::call,
         Packed<forward_autograd>::call>(m, "attention_packed" + kForwardInputs + packed + kForwardResults);
  define_backwards<Padded, "attention_backward", "attention_grad_bias", "attention_grad_distance_bias">(
      m, kBackwardInputs + padded);
  define_backwards<Packed, "attention_packed_backward", "attention_packed_grad_bias",
                   "attention_packed_grad_distance_bias">(m, kBackwardInputs + packed);
}

TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) {
  m.impl("attention", Padded<forward_autocast<at::kCPU>>::call);
  m.impl("attention_packed", Packed<forward_autocast<at::kCPU>>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) {
  m.impl("attention", Padded<forward_autocast<at::kCUDA>>::call);
  m.impl("attention_packed", Packed<forward_autocast<at::kCUDA>>::call);
}

}  // namespace attention_op

Tensor sinks_gradient(const Tensor& grad_out, const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                      const AttentionParams& params) {
  const at::ScalarType type = result.logsumexp.scalar_type();
  Tensor grad = (grad_out.to(type) * result.out.to(type)).sum(-1);  // (B, H, Lq); packed (T, H)
  if (grad.dim() == 2) grad = grad.t();
  if (grad_logsumexp) grad = grad - *grad_logsumexp;
  const Tensor weights = (params.sinks->unsqueeze(-1) - result.logsumexp).exp();
  // Without a key, a sink of -inf has weight 0; -inf - -inf is NaN.
  grad = -(weights * grad).masked_fill(result.logsumexp == -std::numeric_limits<double>::infinity(), 0);
  return grad.dim() == 2 ? grad.sum(at::IntArrayRef{1}) : grad.sum(at::IntArrayRef{0, 2});
}

}  // namespace transformer_fast
