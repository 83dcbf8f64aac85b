// Attention, of padded and of packed batches: the ops of torch.ops.transformer_fast, from schema to kernel. Their eager fast
// paths are in attention_eager.cpp. transformer_fast/ops/attention.py and attention_packed.py document and check what they take.
#include "attention.h"

#include "../triton/attention.h"
#include "../triton/python_function.h"
#include "node.h"
#include "operator.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>

namespace transformer_fast {
namespace attention_op {
namespace {

namespace py = pybind11;
using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

const std::string kMask = "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, ";
const std::string kSequences = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, SymInt max_k, ";
const std::string kOptions =
    "int? causal, int? window, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows, str backend, "
    "Tensor? distance_bias=None, Tensor? query_ids=None, Tensor? key_ids=None, Tensor? sinks=None, "
    "float? softcap=None)";
const std::string kForwardInputs = "(Tensor q, Tensor k, Tensor v, ";
const std::string kBackwardInputs =
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? grad_logsumexp, ";
const std::string kWeightsInputs = "(Tensor q, Tensor k, Tensor? logsumexp, ";
const std::string kForwardResults = " -> (Tensor out, Tensor logsumexp)";
const std::string kBackwardResults = " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)";

// What an op of padded batches takes between its inputs and its options, and what one of packed batches takes there.
void set_keys(AttentionParams& params, const OptionalTensor& keep, const OptionalTensor& key_keep,
              const OptionalTensor& lengths, const OptionalTensor& bias) {
  params.keep = keep, params.key_keep = key_keep, params.lengths = lengths, params.bias = bias;
}
void set_keys(AttentionParams& params, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, c10::SymInt max_q,
              c10::SymInt max_k) {
  params.packed = {cu_seqlens_q, cu_seqlens_k, std::move(max_q), std::move(max_k)};
}

// The functions below take the schema's arguments after their inputs as one, first; these are they with flat arguments.
template <auto function, typename... Keys>
struct Flat;
template <typename Result, typename... Inputs, Result (*function)(const AttentionParams&, Inputs...), typename... Keys>
struct Flat<function, Keys...> {
  static Result call(Inputs... inputs, Keys... keys, std::optional<int64_t> causal, std::optional<int64_t> window,
                     double scale, double dropout_p, const OptionalTensor& seed, bool zero_empty_rows,
                     std::string_view backend, const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
                     const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap) {
    AttentionParams params;
    set_keys(params, std::move(keys)...);
    params.distance_bias = distance_bias, params.query_ids = query_ids, params.key_ids = key_ids, params.sinks = sinks;
    params.causal = causal, params.window = window, params.softcap = softcap;
    params.scale = scale, params.dropout_p = dropout_p;
    params.seed = seed, params.zero_empty_rows = zero_empty_rows, params.backend = backend;
    return function(params, inputs...);
  }
};
template <auto function>
using Padded =
    Flat<function, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&>;
template <auto function>
using Packed = Flat<function, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt>;

TwoTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v);
ThreeTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                      const OptionalTensor& grad_logsumexp);

// Calls an op by the dispatcher: the one of packed batches for such a batch.
template <auto function, typename... Inputs>
auto dispatch(const char* name, const char* packed_name, const AttentionParams& p, const Inputs&... inputs) {
  const auto call = [&](const auto& op, const auto&... keys) {
    return op(inputs..., keys..., p.causal, p.window, p.scale, p.dropout_p, p.seed, p.zero_empty_rows, p.backend,
              p.distance_bias, p.query_ids, p.key_ids, p.sinks, p.softcap);
  };
  if (p.is_packed()) {
    static const Operator<std::remove_pointer_t<decltype(&Packed<function>::call)>> op(packed_name);
    return call(op, *p.packed.cu_seqlens_q, *p.packed.cu_seqlens_k, p.packed.max_q, p.packed.max_k);
  }
  static const Operator<std::remove_pointer_t<decltype(&Padded<function>::call)>> op(name);
  return call(op, p.keep, p.key_keep, p.lengths, p.bias);
}

AttentionGradients compute_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q,
                                    const Tensor& k, const Tensor& v, const AttentionResult& result,
                                    const OptionalTensor& grad_logsumexp, BiasNeeds needs) {
  if (is_native(params.backend)) return attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs);
  AttentionGradients grads = launch_attention_backward(grad_out, q, k, v, result, grad_logsumexp, params);
  if (needs.bias) grads.bias = launch_attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  if (needs.sinks) grads.sinks = sinks_gradient(grad_out, result, grad_logsumexp, params);
  if (needs.distance_bias)
    grads.distance_bias = launch_attention_grad_distance_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  return grads;
}

TwoTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const AttentionResult result = is_native(params.backend) ? attention_forward(q, k, v, params, /*training=*/false)
                                                           : launch_attention(q, k, v, params);
  return {result.out, result.logsumexp};
}

ThreeTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                      const OptionalTensor& grad_logsumexp) {
  const auto grads = compute_backward(params, grad_out, q, k, v, {out, logsumexp, {}, {}}, grad_logsumexp, {});
  return {grads.q, grads.k, grads.v};
}

Tensor grad_bias(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                 const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp) {
  const AttentionResult result{out, logsumexp, {}, {}};
  return is_native(params.backend) ? attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params)
                                   : launch_attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
}

Tensor grad_distance_bias(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                          const OptionalTensor& grad_logsumexp) {
  const AttentionResult result{out, logsumexp, {}, {}};
  if (!is_native(params.backend))
    return launch_attention_grad_distance_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  const BiasNeeds needs{/*bias=*/false, /*distance_bias=*/true};
  return attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs).distance_bias;
}

Tensor weights(const AttentionParams& params, const Tensor& q, const Tensor& k, const OptionalTensor& logsumexp) {
  return is_native(params.backend) ? attention_weights(q, k, params)
                                   : launch_attention_weights(q, k, logsumexp, params);
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

Tensor weights_meta(const AttentionParams&, const Tensor& q, const Tensor& k, const OptionalTensor&) {
  return meta_tensor(q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)});
}

// Whether the kernels may be called without the dispatcher: for plain memory, with nothing that looks at the call.
template <typename Tensors>
bool is_direct(const AttentionParams& params, const Tensors& tensors) {
  return eager::is_plain_eager(tensors, /*any_device=*/!is_native(params.backend));
}

struct Attention {
  static constexpr const char* kName = "attention";
  static constexpr size_t kResult = 3 + AttentionParams::kTensors;  // where what the forward found is saved
  static constexpr size_t kSaved = kResult + 4;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    const AttentionParams params = options.with(&saved[3]);
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const AttentionResult result{saved[kResult], saved[kResult + 1], or_none(saved[kResult + 2]),
                                 or_none(saved[kResult + 3])};
    const OptionalTensor grad_logsumexp = grads.size() > 1 ? or_none(grads[1]) : std::nullopt;
    const bool direct = is_direct(params, grads) && is_direct(params, saved);
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor grad_out = grads[0].defined() ? grads[0] : at::zeros_like(result.out);
    if (grad_out.sym_stride(-1) != 1) grad_out = grad_out.contiguous();
    if (direct) {
      const auto gradients =
          compute_backward(params, grad_out, q, k, v, result, grad_logsumexp, {needs[3], needs[4], needs[5]});
      return {gradients.q, gradients.k, gradients.v, gradients.bias, gradients.distance_bias, gradients.sinks};
    }
    variable_list gradients(6);
    if (needs[0] || needs[1] || needs[2])
      std::tie(gradients[0], gradients[1], gradients[2]) =
          dispatch<attention_op::backward>("attention_backward", "attention_packed_backward", params, grad_out, q, k, v,
                                           result.out, result.logsumexp, grad_logsumexp);
    if (needs[3])
      gradients[3] = dispatch<grad_bias>("attention_grad_bias", nullptr, params, grad_out, q, k, v, result.out,
                                         result.logsumexp, grad_logsumexp);
    if (needs[4])
      gradients[4] =
          dispatch<grad_distance_bias>("attention_grad_distance_bias", "attention_packed_grad_distance_bias", params,
                                       grad_out, q, k, v, result.out, result.logsumexp, grad_logsumexp);
    if (needs[5]) gradients[5] = sinks_gradient(grad_out, result, grad_logsumexp, params);
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
      result = is_native(params.backend) ? attention_forward(q, k, v, params, /*training=*/records)
                                         : launch_attention(q, k, v, params);
    else
      std::tie(result.out, result.logsumexp) = dispatch<forward>("attention", "attention_packed", params, q, k, v);
  }
  if (!records) return result;
  eager::OpNode<Attention>::Saved saved = {q, k, v};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[3]);
  saved[Attention::kResult] = result.out, saved[Attention::kResult + 1] = result.logsumexp;
  saved[Attention::kResult + 2] = or_undefined(result.saved_probs);
  saved[Attention::kResult + 3] = or_undefined(result.saved_factors);
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
  const AttentionResult result = recorded(direct, 2, params, q, k, v);
  return {result.out, result.logsumexp};
}

// Rare: a loss on the weights. They are a function of q, k and the biases, and the reference knows it.
struct AttentionWeights {
  static constexpr const char* kName = "attention_weights";
  static constexpr size_t kSaved = 2 + AttentionParams::kTensors;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    static const PythonFunction function("transformer_fast.ops.attention", "weights_gradients");
    const AttentionParams p = options.with(&saved[2]);
    const py::gil_scoped_acquire gil;
    const py::object needed = py::make_tuple(needs[0], needs[1], needs[2], needs[3], needs[4]);
    const auto gradients = function.tensors<5>(grads[0], saved[0], saved[1], python_params(p), needed);
    return {gradients.begin(), gradients.end()};
  }
};

Tensor weights_autograd(const AttentionParams& params, const Tensor& q, const Tensor& k,
                        const OptionalTensor& logsumexp) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = dispatch<weights>("attention_weights", nullptr, params, q, k, logsumexp);
  }
  if (!needs_gradient(q, k, params.bias, params.distance_bias, params.sinks)) return result;
  eager::OpNode<AttentionWeights>::Saved saved = {q, k};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[2]);
  eager::record<AttentionWeights>({result}, saved, params.without_tensors(), q, k, params.bias, params.distance_bias,
                                  params.sinks);
  return result;
}

template <c10::DeviceType device>
TwoTensors forward_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const NoAutocast<device> no_autocast;
  return dispatch<forward>("attention", "attention_packed", params, autocast<device>(q), autocast<device>(k),
                           autocast<device>(v));
}

template <c10::DeviceType device>
Tensor weights_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k,
                        const OptionalTensor& logsumexp) {
  const NoAutocast<device> no_autocast;
  return dispatch<weights>("attention_weights", nullptr, params, autocast<device>(q), autocast<device>(k), logsumexp);
}

// The functions that serve the forwards of both kinds of batches, and the weights; and those that serve the backwards.
template <auto forward, auto weights>
void implement_forward(torch::Library& m) {
  m.impl("attention", Padded<forward>::call);
  m.impl("attention_packed", Packed<forward>::call);
  m.impl("attention_weights", Padded<weights>::call);
}

template <auto backward, auto grad_bias, auto grad_distance_bias>
void implement_backward(torch::Library& m) {
  m.impl("attention_backward", Padded<backward>::call);
  m.impl("attention_packed_backward", Packed<backward>::call);
  m.impl("attention_grad_bias", Padded<grad_bias>::call);
  m.impl("attention_grad_distance_bias", Padded<grad_distance_bias>::call);
  m.impl("attention_packed_grad_distance_bias", Packed<grad_distance_bias>::call);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  const std::string padded = kMask + kOptions, packed = kSequences + kOptions;
  m.def(("attention" + kForwardInputs + padded + kForwardResults).c_str());
  m.def(("attention_packed" + kForwardInputs + packed + kForwardResults).c_str());
  m.def(("attention_backward" + kBackwardInputs + padded + kBackwardResults).c_str());
  m.def(("attention_packed_backward" + kBackwardInputs + packed + kBackwardResults).c_str());
  m.def(("attention_grad_bias" + kBackwardInputs + padded + " -> Tensor").c_str());
  m.def(("attention_grad_distance_bias" + kBackwardInputs + padded + " -> Tensor").c_str());
  m.def(("attention_packed_grad_distance_bias" + kBackwardInputs + packed + " -> Tensor").c_str());
  m.def(("attention_weights" + kWeightsInputs + padded + " -> Tensor").c_str());
}

TORCH_LIBRARY_IMPL(transformer_fast, CompositeExplicitAutograd, m) {
  implement_forward<forward, weights>(m);
  implement_backward<backward, grad_bias, grad_distance_bias>(m);
}

TORCH_LIBRARY_IMPL(transformer_fast, Meta, m) {
  implement_forward<forward_meta, weights_meta>(m);
  implement_backward<backward_meta, grad_bias_meta, grad_distance_bias_meta>(m);
}

TORCH_LIBRARY_IMPL(transformer_fast, Autograd, m) {
  using eager::Undifferentiable;
  implement_forward<forward_autograd, weights_autograd>(m);
  m.impl("attention_backward", Undifferentiable<"attention_backward", Padded<backward>::call>::call);
  m.impl("attention_packed_backward", Undifferentiable<"attention_packed_backward", Packed<backward>::call>::call);
  m.impl("attention_grad_bias", Undifferentiable<"attention_grad_bias", Padded<grad_bias>::call>::call);
  m.impl("attention_grad_distance_bias",
         Undifferentiable<"attention_grad_distance_bias", Padded<grad_distance_bias>::call>::call);
  m.impl("attention_packed_grad_distance_bias",
         Undifferentiable<"attention_packed_grad_distance_bias", Packed<grad_distance_bias>::call>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) {
  implement_forward<forward_autocast<at::kCPU>, weights_autocast<at::kCPU>>(m);
}

TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) {
  implement_forward<forward_autocast<at::kCUDA>, weights_autocast<at::kCUDA>>(m);
}

}  // namespace attention_op

Tensor sinks_gradient(const Tensor& grad_out, const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                      const AttentionParams& params) {
  const at::ScalarType type = result.logsumexp.scalar_type();
  Tensor grad = (grad_out.to(type) * result.out.to(type)).sum(-1);  // (B, H, Lq); packed (T, H)
  if (grad.dim() == 2) grad = grad.t();
  if (grad_logsumexp) grad = grad - *grad_logsumexp;
  const Tensor weights = (params.sinks->unsqueeze(-1) - result.logsumexp).exp();
  grad = -(weights * grad);
  return grad.dim() == 2 ? grad.sum(at::IntArrayRef{1}) : grad.sum(at::IntArrayRef{0, 2});
}

}  // namespace transformer_fast
