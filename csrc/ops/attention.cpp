// Attention, of padded and of packed batches: the ops of torch.ops.transformer_fast, from schema to kernel, and their eager
// fast paths. transformer_fast/ops/attention.py and attention_packed.py document and check what they take.
#include "attention.h"

#include "../triton/attention.h"
#include "../triton/python_function.h"
#include "attention_checks.h"
#include "eager.h"
#include "node.h"
#include "operator.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
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

const std::string kPadded =
    "Tensor? keep, Tensor? key_keep, Tensor? lengths, Tensor? bias, int? causal, float scale, float dropout_p, "
    "Tensor? seed, bool zero_empty_rows, str backend";
const std::string kPacked =
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_q, SymInt max_k, bool causal, float scale, float dropout_p, "
    "Tensor? seed, bool zero_empty_rows, str backend";
const std::string kForwardInputs = "Tensor q, Tensor k, Tensor v, ";
const std::string kBackwardInputs =
    "Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? grad_logsumexp, ";
const std::string kWeightsInputs = "Tensor q, Tensor k, Tensor? logsumexp, ";
const std::string kForwardResults = " -> (Tensor out, Tensor logsumexp)";
const std::string kBackwardResults = " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)";

// The functions below take the schema's arguments after their inputs as one, first; these are they with flat arguments.
template <auto function>
struct Padded;
template <typename Result, typename... Inputs, Result (*function)(const AttentionParams&, Inputs...)>
struct Padded<function> {
  static Result call(Inputs... inputs, const OptionalTensor& keep, const OptionalTensor& key_keep,
                     const OptionalTensor& lengths, const OptionalTensor& bias, std::optional<int64_t> causal,
                     double scale, double dropout_p, const OptionalTensor& seed, bool zero_empty_rows,
                     std::string_view backend) {
    return function({keep,
                     key_keep,
                     lengths,
                     bias,
                     causal,
                     scale,
                     dropout_p,
                     seed,
                     std::nullopt,
                     zero_empty_rows,
                     std::string(backend),
                     {}},
                    inputs...);
  }
};

template <auto function>
struct Packed;
template <typename Result, typename... Inputs, Result (*function)(const AttentionParams&, Inputs...)>
struct Packed<function> {
  static Result call(Inputs... inputs, const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, c10::SymInt max_q,
                     c10::SymInt max_k, bool causal, double scale, double dropout_p, const OptionalTensor& seed,
                     bool zero_empty_rows, std::string_view backend) {
    AttentionParams params;
    if (causal) params.causal = 0;
    params.scale = scale, params.dropout_p = dropout_p, params.seed = seed, params.zero_empty_rows = zero_empty_rows;
    params.backend = backend;
    params.packed = {cu_seqlens_q, cu_seqlens_k, std::move(max_q), std::move(max_k)};
    return function(params, inputs...);
  }
};

TwoTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v);
ThreeTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                      const OptionalTensor& grad_logsumexp);

// Calls an op by the dispatcher.
template <auto function, typename... Inputs>
auto dispatch(const char* name, const AttentionParams& p, const Inputs&... inputs) {
  static const Operator<std::remove_pointer_t<decltype(&Padded<function>::call)>> op(name);
  return op(inputs..., p.keep, p.key_keep, p.lengths, p.bias, p.causal, p.scale, p.dropout_p, p.seed, p.zero_empty_rows,
            p.backend);
}

template <auto function, typename... Inputs>
auto dispatch_packed(const char* name, const AttentionParams& p, const Inputs&... inputs) {
  static const Operator<std::remove_pointer_t<decltype(&Packed<function>::call)>> op(name);
  return op(inputs..., *p.packed.cu_seqlens_q, *p.packed.cu_seqlens_k, p.packed.max_q, p.packed.max_k,
            p.causal.has_value(), p.scale, p.dropout_p, p.seed, p.zero_empty_rows, p.backend);
}

template <typename... Inputs>
auto dispatch_forward(const AttentionParams& params, const Inputs&... inputs) {
  return params.is_packed() ? dispatch_packed<forward>("attention_packed", params, inputs...)
                            : dispatch<forward>("attention", params, inputs...);
}

template <typename... Inputs>
auto dispatch_backward(const AttentionParams& params, const Inputs&... inputs) {
  return params.is_packed() ? dispatch_packed<backward>("attention_packed_backward", params, inputs...)
                            : dispatch<backward>("attention_backward", params, inputs...);
}

AttentionResult compute(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                        bool training) {
  if (!is_native(params.backend)) return launch_attention(q, k, v, params);
  return params.is_packed() ? attention_packed_forward(q, k, v, params) : attention_forward(q, k, v, params, training);
}

AttentionGradients compute_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q,
                                    const Tensor& k, const Tensor& v, const AttentionResult& result,
                                    const OptionalTensor& grad_logsumexp, bool bias) {
  if (is_native(params.backend))
    return params.is_packed() ? attention_packed_backward(grad_out, q, k, v, result, grad_logsumexp, params)
                              : attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, bias);
  AttentionGradients grads = launch_attention_backward(grad_out, q, k, v, result, grad_logsumexp, params);
  if (bias) grads.bias = launch_attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  return grads;
}

TwoTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const AttentionResult result = compute(params, q, k, v, false);
  return {result.out, result.logsumexp};
}

ThreeTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                      const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                      const OptionalTensor& grad_logsumexp) {
  const auto grads = compute_backward(params, grad_out, q, k, v, {out, logsumexp, {}, {}}, grad_logsumexp, false);
  return {grads.q, grads.k, grads.v};
}

Tensor grad_bias(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                 const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp) {
  const AttentionResult result{out, logsumexp, {}, {}};
  return is_native(params.backend) ? attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params)
                                   : launch_attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
}

Tensor weights(const AttentionParams& params, const Tensor& q, const Tensor& k, const OptionalTensor& logsumexp) {
  return is_native(params.backend) ? attention_weights(q, k, params)
                                   : launch_attention_weights(q, k, logsumexp, params);
}

TwoTensors forward_meta(const AttentionParams& /* params */, const Tensor& q, const Tensor& /* k */,
                        const Tensor& /* v */) {
  const at::ScalarType statistics = arithmetic_type(q);
  if (q.dim() == 3) return {at::empty_like(q), meta_tensor(q, {q.sym_size(1), q.sym_size(0)}, statistics)};
  return {at::empty_like(q), meta_tensor(q, q.sym_sizes().slice(0, 3), statistics)};
}

ThreeTensors backward_meta(const AttentionParams& /* params */, const Tensor& /* grad_out */, const Tensor& q,
                           const Tensor& k, const Tensor& v, const Tensor& /* out */, const Tensor& /* logsumexp */,
                           const OptionalTensor& /* grad_logsumexp */) {
  return {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
}

Tensor grad_bias_meta(const AttentionParams& params, const Tensor& /* grad_out */, const Tensor& /* q */,
                      const Tensor& /* k */, const Tensor& /* v */, const Tensor& /* out */,
                      const Tensor& /* logsumexp */, const OptionalTensor& /* grad_logsumexp */) {
  return meta_tensor(*params.bias, params.bias->sym_sizes());
}

Tensor weights_meta(const AttentionParams& /* params */, const Tensor& q, const Tensor& k,
                    const OptionalTensor& /* logsumexp */) {
  return meta_tensor(q, {q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)});
}

// Whether the kernels may be called without the dispatcher: for plain memory, with nothing that looks at the call.
template <typename Tensors>
bool is_direct(const AttentionParams& params, const Tensors& tensors) {
  if (is_native(params.backend)) return eager::is_plain_eager(tensors);
  const auto plain = [](const Tensor& t) { return !t.defined() || eager::is_plain(t) || eager::is_plain_cuda(t); };
  return !eager::has_active_modes() && std::all_of(tensors.begin(), tensors.end(), plain);
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
      const auto gradients = compute_backward(params, grad_out, q, k, v, result, grad_logsumexp, needs[3]);
      return {gradients.q, gradients.k, gradients.v, gradients.bias};
    }
    variable_list gradients(4);
    if (needs[0] || needs[1] || needs[2])
      std::tie(gradients[0], gradients[1], gradients[2]) =
          dispatch_backward(params, grad_out, q, k, v, result.out, result.logsumexp, grad_logsumexp);
    if (needs[3])
      gradients[3] = dispatch<grad_bias>("attention_grad_bias", params, grad_out, q, k, v, result.out, result.logsumexp,
                                         grad_logsumexp);
    return gradients;
  }
};

// `outputs`: how many of (out, logsumexp) the caller gets.
AttentionResult recorded(bool direct, size_t outputs, const AttentionParams& params, const Tensor& q, const Tensor& k,
                         const Tensor& v) {
  const bool records = needs_gradient(q, k, v, params.bias);
  AttentionResult result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (direct)
      result = compute(params, q, k, v, records);
    else
      std::tie(result.out, result.logsumexp) = dispatch_forward(params, q, k, v);
  }
  if (!records) return result;
  eager::OpNode<Attention>::Saved saved = {q, k, v};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[3]);
  saved[Attention::kResult] = result.out, saved[Attention::kResult + 1] = result.logsumexp;
  saved[Attention::kResult + 2] = or_undefined(result.kept);
  saved[Attention::kResult + 3] = or_undefined(result.kept_factors);
  variable_list returned = {result.out, result.logsumexp};
  returned.resize(outputs);
  eager::record<Attention>(returned, saved, params.without_tensors(), q, k, v, params.bias);
  return result;
}

TwoTensors forward_autograd(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto tensors = params.tensors();
  const bool direct = is_direct(params, variable_list{q, k, v}) && is_direct(params, tensors);
  const AttentionResult result = recorded(direct, 2, params, q, k, v);
  return {result.out, result.logsumexp};
}

// Of the ops of the backward, called by themselves: what they return cannot be differentiated.
ThreeTensors backward_autograd(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                               const OptionalTensor& grad_logsumexp) {
  ThreeTensors grads;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grads = dispatch_backward(params, grad_out, q, k, v, out, logsumexp, grad_logsumexp);
  }
  return eager::undifferentiable("attention", grads, {grad_out, q, k, v, out, logsumexp});
}

Tensor grad_bias_autograd(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                          const Tensor& v, const Tensor& out, const Tensor& logsumexp,
                          const OptionalTensor& grad_logsumexp) {
  std::tuple<Tensor> grad;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    grad = dispatch<grad_bias>("attention_grad_bias", params, grad_out, q, k, v, out, logsumexp, grad_logsumexp);
  }
  return std::get<0>(eager::undifferentiable("attention", grad, {grad_out, q, k, v, out, logsumexp}));
}

// Rare: a loss on the weights. They are a function of q, k and the bias, and the reference knows it.
struct AttentionWeights {
  static constexpr const char* kName = "attention_weights";
  static constexpr size_t kSaved = 2 + AttentionParams::kTensors;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    static const PythonFunction function("transformer_fast.ops.attention", "weights_gradients");
    const AttentionParams p = options.with(&saved[2]);
    const py::gil_scoped_acquire gil;
    py::dict mask;
    mask["keep"] = PythonFunction::object(p.keep), mask["key_keep"] = PythonFunction::object(p.key_keep);
    mask["lengths"] = PythonFunction::object(p.lengths), mask["bias"] = PythonFunction::object(p.bias);
    mask["causal"] = p.causal, mask["scale"] = p.scale;
    py::dict keywords;
    keywords["dropout_p"] = p.dropout_p, keywords["seed"] = PythonFunction::object(p.seed);
    keywords["needed"] = py::make_tuple(needs[0], needs[1], needs[2]);
    keywords["empty_rows"] = p.zero_empty_rows ? "zero" : "uniform";
    keywords["mask"] = mask;
    const auto gradients = PythonFunction::unpacked<3>(function.call(keywords, grads[0], saved[0], saved[1]));
    return {gradients.begin(), gradients.end()};
  }
};

Tensor weights_autograd(const AttentionParams& params, const Tensor& q, const Tensor& k,
                        const OptionalTensor& logsumexp) {
  Tensor result;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = dispatch<weights>("attention_weights", params, q, k, logsumexp);
  }
  if (!needs_gradient(q, k, params.bias)) return result;
  eager::OpNode<AttentionWeights>::Saved saved = {q, k};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[2]);
  eager::record<AttentionWeights>({result}, saved, params.without_tensors(), q, k, params.bias);
  return result;
}

// What autocast casts.
template <c10::DeviceType device>
auto autocast(const Tensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

template <c10::DeviceType device, c10::DispatchKey key>
TwoTensors forward_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  return dispatch_forward(params, autocast<device>(q), autocast<device>(k), autocast<device>(v));
}

template <c10::DeviceType device, c10::DispatchKey key>
Tensor weights_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k,
                        const OptionalTensor& logsumexp) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
  return dispatch<weights>("attention_weights", params, autocast<device>(q), autocast<device>(k), logsumexp);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(("attention(" + kForwardInputs + kPadded + ")" + kForwardResults).c_str());
  m.def(("attention_packed(" + kForwardInputs + kPacked + ")" + kForwardResults).c_str());
  m.def(("attention_backward(" + kBackwardInputs + kPadded + ")" + kBackwardResults).c_str());
  m.def(("attention_packed_backward(" + kBackwardInputs + kPacked + ")" + kBackwardResults).c_str());
  m.def(("attention_grad_bias(" + kBackwardInputs + kPadded + ") -> Tensor").c_str());
  m.def(("attention_weights(" + kWeightsInputs + kPadded + ") -> Tensor").c_str());
}

TORCH_LIBRARY_IMPL(transformer_fast, CompositeExplicitAutograd, m) {
  m.impl("attention", Padded<forward>::call);
  m.impl("attention_packed", Packed<forward>::call);
  m.impl("attention_backward", Padded<backward>::call);
  m.impl("attention_packed_backward", Packed<backward>::call);
  m.impl("attention_grad_bias", Padded<grad_bias>::call);
  m.impl("attention_weights", Padded<weights>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, Meta, m) {
  m.impl("attention", Padded<forward_meta>::call);
  m.impl("attention_packed", Packed<forward_meta>::call);
  m.impl("attention_backward", Padded<backward_meta>::call);
  m.impl("attention_packed_backward", Packed<backward_meta>::call);
  m.impl("attention_grad_bias", Padded<grad_bias_meta>::call);
  m.impl("attention_weights", Padded<weights_meta>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, Autograd, m) {
  m.impl("attention", Padded<forward_autograd>::call);
  m.impl("attention_packed", Packed<forward_autograd>::call);
  m.impl("attention_backward", Padded<backward_autograd>::call);
  m.impl("attention_packed_backward", Packed<backward_autograd>::call);
  m.impl("attention_grad_bias", Padded<grad_bias_autograd>::call);
  m.impl("attention_weights", Padded<weights_autograd>::call);
}

template <c10::DeviceType device, c10::DispatchKey key>
void register_autocast(torch::Library& m) {
  m.impl("attention", Padded<forward_autocast<device, key>>::call);
  m.impl("attention_packed", Packed<forward_autocast<device, key>>::call);
  m.impl("attention_weights", Padded<weights_autocast<device, key>>::call);
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) { register_autocast<at::kCPU, c10::DispatchKey::AutocastCPU>(m); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) {
  register_autocast<at::kCUDA, c10::DispatchKey::AutocastCUDA>(m);
}

}  // namespace attention_op

// The eager fast paths.
namespace eager {
namespace {

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

// What the public function was given; q is undefined where the call must go by the dispatcher.
struct Call {
  Tensor q, k, v;
  AttentionParams params;
};

// The scale (0 for the default, which needs q), the dropout with its seed, and the empty rows.
void read_options(Arguments& arguments, AttentionParams& params, py::handle scale, py::handle dropout_p,
                  py::handle seed, py::handle empty_rows) {
  params.scale = scale.is_none() ? 0 : arguments.number(scale);
  params.dropout_p = arguments.probability(dropout_p);
  if (PyLong_CheckExact(seed.ptr()))
    params.seed_value = arguments.integer(seed);
  else
    params.seed = arguments.optional_tensor(seed);
  params.zero_empty_rows = is_text(empty_rows, "zero");
  arguments.require(params.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(params.dropout_p == 0 || params.seed || params.seed_value);
}

Call read(Arguments& arguments, py::handle q_, py::handle k_, py::handle v_, py::handle keep_, py::handle key_keep_,
          py::handle lengths_, py::handle bias_, py::handle causal_, py::handle scale, py::handle dropout_p,
          py::handle seed, py::handle empty_rows) {
  Call call{arguments.floating(q_), arguments.floating(k_), arguments.floating(v_), {}};
  auto& [q, k, v, params] = call;
  params.keep = arguments.optional_tensor(keep_);
  params.key_keep = arguments.optional_tensor(key_keep_);
  params.lengths = arguments.optional_tensor(lengths_);
  params.bias = arguments.optional_floating(bias_);
  params.causal = arguments.optional_integer(causal_);
  read_options(arguments, params, scale, dropout_p, seed, empty_rows);
  if (!arguments.ok() || !shapes_fit(q, k, v) || !alike(q, k, v)) return {};
  const at::Device device = q.device();
  for (const OptionalTensor* part : {&params.keep, &params.key_keep, &params.bias})
    if (*part) arguments.require(broadcasts(**part, q, k) && (*part)->device() == device);
  if (params.key_keep) arguments.require(params.key_keep->size(2) == 1 && params.key_keep->size(3) == k.size(2));
  if (params.lengths) arguments.require(params.lengths->device() == device);
  if (!arguments.ok()) return {};
  if (scale.is_none()) params.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  return call;
}

Tensor run(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params) {
  std::optional<py::gil_scoped_release> no_gil;
  if (is_native(params.backend)) no_gil.emplace();
  return attention_op::recorded(true, 1, params, q, k, v).out;
}

}  // namespace

py::object attention(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep, py::handle lengths,
                     py::handle bias, py::handle causal, py::handle scale, py::handle dropout_p, py::handle seed,
                     py::handle empty_rows) {
  Arguments arguments;
  Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || (call.params.dropout_p > 0 && !call.params.seed)) return py::none();
  if (call.params.lengths) {
    call.params.lengths = normal_lengths(*call.params.lengths, call.q.size(0), call.q.size(2), call.k.size(2));
    if (!call.params.lengths) return py::none();
  }
  return wrap(run(call.q, call.k, call.v, call.params));
}

py::object attention_launched(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep,
                              py::handle lengths, py::handle bias, py::handle causal, py::handle scale,
                              py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(true);
  Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || !launchable(call.q)) return py::none();
  if (needs_gradient(call.params.bias)) return py::none();
  if (call.params.lengths && !are_normal(*call.params.lengths, call.q.size(0), call.q.size(2))) return py::none();
  call.params.backend = "triton";
  return wrap(run(call.q, call.k, call.v, call.params));
}

py::object attention_packed(bool launched, py::handle q_, py::handle k_, py::handle v_, py::handle cu_seqlens_q,
                            py::handle cu_seqlens_k, py::handle max_q, py::handle max_k, py::handle causal,
                            py::handle scale, py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(launched);
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  const Tensor starts_q = arguments.tensor(cu_seqlens_q), starts_k = arguments.tensor(cu_seqlens_k);
  AttentionParams params;
  if (arguments.boolean(causal)) params.causal = 0;
  read_options(arguments, params, scale, dropout_p, seed, empty_rows);
  const std::optional<int64_t> most_q = arguments.optional_integer(max_q), most_k = arguments.optional_integer(max_k);
  if (!arguments.ok() || !packed_shapes_fit(q, k, v) || !alike(q, k, v)) return py::none();
  if (launched ? !launchable(q) : params.dropout_p > 0 && !params.seed) return py::none();
  const int64_t longest_q = longest_sequence(starts_q, q, most_q), longest_k = longest_sequence(starts_k, k, most_k);
  if (longest_q < 0 || longest_k < 0 || starts_q.sizes() != starts_k.sizes()) return py::none();
  params.packed = {starts_q, starts_k, longest_q, longest_k};
  if (scale.is_none()) params.scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
  if (launched) params.backend = "triton";
  return wrap(run(q, k, v, params));
}

}  // namespace eager
}  // namespace transformer_fast
