// Attention, of padded and of packed batches: the ops of torch.ops.transformer_fast, from schema to kernel. The op of the
// weights is in attention_weights.cpp. transformer_fast/ops/attention.py and attention_packed.py document what they take.
#include "attention.h"

#include "attention_arguments.h"
#include "attention_op_checks.h"
#include "python_hooks.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
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
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;  // out, logsumexp, dropout_bits
using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Places of the inputs that have gradients.
enum : size_t { kQ, kK, kV, kBias, kDistanceBias, kSinks, kInputs };
using Gradients = std::array<bool, kInputs>;

// `dropout_words`: how many int32 keep bits of dropout for a backward; none: what the kernels keep for it is theirs.
AttentionResult compute_forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                                std::optional<int64_t> dropout_words) {
  return params.by_triton ? python_hooks().launch_attention(q, k, v, params, dropout_words)
                          : attention_forward(q, k, v, params, /*training=*/!dropout_words);
}

AttentionGradients compute_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q,
                                    const Tensor& k, const Tensor& v, const AttentionResult& result,
                                    const OptionalTensor& grad_logsumexp, GradientNeeds needs) {
  if (!params.by_triton) return attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs);
  AttentionGradients grads =
      python_hooks().launch_attention_backward(grad_out, q, k, v, result, grad_logsumexp, params, needs);
  if (needs.sinks) grads.sinks = sinks_gradient(grad_out, result, grad_logsumexp, params);
  return grads;
}

// The name of the public function in errors.
Checks checks(const AttentionParams& params) { return {params.is_packed() ? "attention_packed" : "attention"}; }

void check_forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                   const c10::SymInt& dropout_words) {
  check_arguments(checks(params), params, q, k, v);
  checks(params).require(holds(dropout_words.sym_ge(0)), "dropout_words must be at least 0, got ", dropout_words);
}

// The kernels that compute a call are known on every way into the op but that of shapes alone.
void check_words(const AttentionParams& params, const c10::SymInt& dropout_words) {
  checks(params).require(params.by_triton || dropout_words == 0,
                         "dropout_words must be 0 for kernels that keep none, got ", dropout_words);
}

void check_backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                    const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp,
                    const OptionalTensor& dropout_bits, const Gradients& needs) {
  constexpr Checks check{"attention_backward"};
  check_arguments(check, params, q, k, v);
  for (const auto& [name, tensor] : {std::pair("q", q), std::pair("k", k), std::pair("v", v)})
    check(name, tensor).unit_stride();
  check("v", v).sizes(k.sym_sizes());
  check("grad_out", grad_out).like(q).unit_stride();
  check("out", out).like(q).unit_stride();
  check_statistics(check, "logsumexp", logsumexp, q);
  check_statistics(check, "grad_logsumexp", grad_logsumexp, q);
  check("dropout_bits", dropout_bits).type({at::kInt}).on_device_of(q).rank(1, "(words,)");
  if (needs[kBias]) check("bias", params.bias).required("whose gradient to compute");
  if (needs[kDistanceBias]) check("distance_bias", params.distance_bias).required("whose gradient to compute");
  if (needs[kSinks]) check("sinks", params.sinks).required("whose gradient to compute");
}

// True if the kernels take these rows: without gaps, and as wide in the values as in the keys.
bool fits_kernels(const Tensor& q, const Tensor& k, const Tensor& v) {
  const bool equal = v.sym_size(-1).sym_eq(q.sym_size(-1)).guard_bool(__FILE__, __LINE__);
  return equal && is_dense(q) && is_dense(k) && is_dense(v);
}

// The results of compute(q, k, v) for rows that the kernels take. Zero columns change neither the scores nor the other
// columns of the output.
template <typename Compute>
ThreeTensors with_fitting_rows(const Tensor& q, const Tensor& k, const Tensor& v, const Compute& compute) {
  const c10::SymInt D = q.sym_size(-1), Dv = v.sym_size(-1), widest = D.max(Dv);
  check_head_dims({"attention"}, q, "k", k);  // before zero columns would hide a difference
  const auto fitting = [&](const Tensor& x) {
    const Tensor dense = is_dense(x) ? x : x.contiguous();
    const c10::SymInt missing = widest - x.sym_size(-1);
    return missing.sym_gt(0).guard_bool(__FILE__, __LINE__) ? at::constant_pad_nd_symint(dense, {0, missing}) : dense;
  };
  auto [out, logsumexp, dropout_bits] = compute(fitting(q), fitting(k), fitting(v));
  const bool narrower = Dv.sym_lt(D).guard_bool(__FILE__, __LINE__);
  return {narrower ? out.narrow_symint(-1, 0, Dv) : out, logsumexp, dropout_bits};
}

ThreeTensors forward(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                     const c10::SymInt& dropout_words) {
  if (!fits_kernels(q, k, v)) {
    const auto [out, logsumexp, dropout_bits] =
        with_fitting_rows(q, k, v, [&](const Tensor& q, const Tensor& k, const Tensor& v) {
          return forward(params, q, k, v, dropout_words);
        });
    return {q.size(-1) == v.size(-1) ? out : out.contiguous(), logsumexp, dropout_bits};
  }
  check_words(params, dropout_words);
  const AttentionResult result = compute_forward(readable(params, q, k), q, k, v, dropout_words.expect_int());
  return {result.out, result.logsumexp,
          result.dropout_bits ? *result.dropout_bits : at::empty({0}, q.options().dtype(at::kInt))};
}

SixTensors backward(const AttentionParams& params, const Tensor& grad_out, const Tensor& q, const Tensor& k,
                    const Tensor& v, const Tensor& out, const Tensor& logsumexp, const OptionalTensor& grad_logsumexp,
                    const OptionalTensor& dropout_bits, Gradients needs) {
  const AttentionParams read = readable(params, q, k);
  const AttentionResult result{out, logsumexp, {}, {}, dropout_bits};
  AttentionGradients grads;
  if (needs == Gradients{false, false, false, true, false, false} && !params.by_triton)
    grads.bias = attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, read);  // by a kernel of its own
  else
    grads = compute_backward(read, grad_out, q, k, v, result, grad_logsumexp,
                             {needs[kBias], needs[kDistanceBias], needs[kSinks], /*keys=*/needs[kK] || needs[kV]});
  const auto requested = [&](size_t place, const Tensor& gradient, const OptionalTensor& input) {
    return needs[place] ? gradient : at::empty({0}, (input ? *input : q).options());
  };
  return {requested(kQ, grads.q, q),
          requested(kK, grads.k, k),
          requested(kV, grads.v, v),
          requested(kBias, grads.bias, params.bias),
          requested(kDistanceBias, grads.distance_bias, params.distance_bias),
          requested(kSinks, grads.sinks, params.sinks)};
}

ThreeTensors forward_meta(const AttentionParams&, const Tensor& q, const Tensor&, const Tensor& v,
                          const c10::SymInt& dropout_words) {
  const auto rows = q.sym_sizes().slice(0, q.dim() - 1);
  const at::ScalarType statistics = arithmetic_type(q);
  const Tensor logsumexp =
      q.dim() == 3 ? meta_tensor(q, {rows[1], rows[0]}, statistics) : meta_tensor(q, rows, statistics);
  const Tensor dropout_bits = meta_tensor(q, {dropout_words}, at::kInt);
  const bool equal = v.sym_size(-1).sym_eq(q.sym_size(-1)).guard_bool(__FILE__, __LINE__);
  if (equal && is_dense(q)) return {at::empty_like(q), logsumexp, dropout_bits};
  c10::SymDimVector sizes(rows);
  sizes.push_back(v.sym_size(-1));
  return {meta_tensor(q, sizes), logsumexp, dropout_bits};
}

SixTensors backward_meta(const AttentionParams& params, const Tensor&, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                         Gradients needs) {
  const auto requested = [&](size_t place, const OptionalTensor& input) {
    return needs[place] ? at::empty_like(*input) : meta_tensor(input ? *input : q, {0});
  };
  return {requested(kQ, q),
          requested(kK, k),
          requested(kV, v),
          needs[kBias] ? meta_tensor(*params.bias, params.bias->sym_sizes()) : requested(kBias, params.bias),
          requested(kDistanceBias, params.distance_bias),
          requested(kSinks, params.sinks)};
}

// True if the kernels may be called without the dispatcher: all tensors are plain, and no mode observes the call.
template <typename Tensors>
bool is_direct(const AttentionParams& params, const Tensors& tensors) {
  return eager::is_plain_eager(tensors, /*any_device=*/params.by_triton);
}

struct Attention {
  static constexpr const char* kName = "attention";
  // Indices of the saved tensors: q, k and v, the tensors of the arguments, and the forward's results.
  enum : size_t {
    kParams = kV + 1,
    kOut = kParams + AttentionParams::kTensors,
    kLogsumexp,
    kProbs,
    kFactors,
    kDropoutBits,
    kSaved
  };
  static constexpr size_t kValues = kParams;
  using Options = AttentionParams;

  static variable_list backward(const variable_list& grads, const variable_list& saved, const AttentionParams& options,
                                const Needs& needs) {
    const AttentionParams params = options.with(&saved[kParams]);
    const Tensor &q = saved[kQ], &k = saved[kK], &v = saved[kV];
    const AttentionResult result{saved[kOut], saved[kLogsumexp], or_none(saved[kProbs]), or_none(saved[kFactors]),
                                 or_none(saved[kDropoutBits])};
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
    Gradients requested;
    for (size_t place = 0; place < kInputs; ++place) requested[place] = needs[place];
    const auto all = dispatch<"attention_backward", attention_op::backward>(
        params, grad_out, q, k, v, result.out, result.logsumexp, grad_logsumexp, result.dropout_bits, requested);
    variable_list gradients;
    eager::append(gradients, all);
    for (size_t place = 0; place < kInputs; ++place)
      if (!requested[place]) gradients[place] = Tensor();
    return gradients;
  }
};

// The op with its autograd node, for rows that the kernels take. `direct`: true if the kernels may be called without the
// dispatcher. `outputs`: number of results of (out, logsumexp) that the caller gets. Bits of dropout that the caller did
// not ask for are the backward's alone.
ThreeTensors recorded_rows(const AttentionParams& params, bool direct, size_t outputs, const Tensor& q, const Tensor& k,
                           const Tensor& v, const c10::SymInt& dropout_words) {
  const bool records = needs_gradient(q, k, v, params.bias, params.distance_bias, params.sinks);
  const bool returns_bits = dropout_words.maybe_as_int() != 0;
  AttentionResult result;
  if (direct) {
    const at::AutoDispatchBelowADInplaceOrView below;
    result = compute_forward(params, q, k, v, records ? std::nullopt : std::optional<int64_t>(0));
  } else {
    const bool chooses = !returns_bits && records && params.by_triton && params.dropout_p > 0;
    const c10::SymInt words = chooses ? python_hooks().dropout_words(q, k, params) : dropout_words;
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor bits;
    std::tie(result.out, result.logsumexp, bits) = dispatch<"attention", forward>(params, q, k, v, words);
    if (words > 0) result.dropout_bits = bits;
  }
  ThreeTensors results = {result.out, result.logsumexp, returns_bits ? or_undefined(result.dropout_bits) : Tensor()};
  if (!records) return results;
  eager::OpNode<Attention>::Saved saved = {q, k, v};
  const auto tensors = params.tensors();
  std::copy(tensors.begin(), tensors.end(), &saved[Attention::kParams]);
  saved[Attention::kOut] = result.out, saved[Attention::kLogsumexp] = result.logsumexp;
  saved[Attention::kProbs] = or_undefined(result.saved_probs);
  saved[Attention::kFactors] = or_undefined(result.saved_factors);
  saved[Attention::kDropoutBits] = or_undefined(result.dropout_bits);
  variable_list returned = {result.out, result.logsumexp};
  returned.resize(outputs);
  eager::record<Attention>(returned, saved, params.without_tensors(), q, k, v, params.bias, params.distance_bias,
                           params.sinks);
  return results;
}

// `by_door`: the caller gets the output alone, and all tensors are plain.
ThreeTensors recorded(AttentionParams params, bool by_door, const Tensor& q, const Tensor& k, const Tensor& v,
                      const c10::SymInt& dropout_words) {
  check_words(params, dropout_words);
  const bool direct = by_door || (dropout_words.maybe_as_int() == 0 && is_direct(params, variable_list{q, k, v}) &&
                                  is_direct(params, params.tensors()));
  if (direct) {
    PackedBatch& packed = params.packed;
    if (packed.cu_seqlens_q && packed.max_seqlen_q == kUnknown)
      packed.max_seqlen_q = longest_sequence(*packed.cu_seqlens_q);
    if (packed.cu_seqlens_k && packed.max_seqlen_k == kUnknown)
      packed.max_seqlen_k = longest_sequence(*packed.cu_seqlens_k);
    check_forward(params, q, k, v, dropout_words);
    make_readable(params, q, k);
  }
  const size_t outputs = by_door ? 1 : 2;
  const auto compute = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    return recorded_rows(params, direct, outputs, q, k, v, dropout_words);
  };
  ThreeTensors results = fits_kernels(q, k, v) ? compute(q, k, v) : with_fitting_rows(q, k, v, compute);
  Tensor& dropout_bits = std::get<2>(results);
  if (!by_door && !dropout_bits.defined()) dropout_bits = at::empty({0}, q.options().dtype(at::kInt));
  return results;
}

template <c10::DeviceType device>
ThreeTensors forward_autocast(const AttentionParams& params, const Tensor& q, const Tensor& k, const Tensor& v,
                              const c10::SymInt& dropout_words) {
  const NoAutocast<device> no_autocast;
  return dispatch<"attention", forward>(params, autocast<device>(q), autocast<device>(k), autocast<device>(v),
                                        dropout_words);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  // `dropout_bits` are `dropout_words` numbers of int32 for the backward, 0 or those of the kernels; words of tiles
  // without visible keys are arbitrary. With 0 the autograd rule chooses their number, and keeps them to itself.
  define_op<"attention", Flat<check_forward>::call, Flat<forward>::call, Flat<forward_meta>::call, Flat<recorded>::call,
            eager::DoorOptions{.casts = 3, .checks = false}>(
      m, "(Tensor q, Tensor k, Tensor v, SymInt dropout_words=0, " + kArguments +
             " -> (Tensor out, Tensor logsumexp, Tensor dropout_bits)");
  // The gradients of the inputs in `needs`; (0,) for the others.
  define_backward<"attention_backward", Flat<check_backward>::call, Flat<backward>::call, Flat<backward_meta>::call>(
      m,
      "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, Tensor? grad_logsumexp, "
      "Tensor? dropout_bits, bool[6] needs, " +
          kArguments +
          " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_distance_bias, "
          "Tensor grad_sinks)");
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) { m.impl("attention", Flat<forward_autocast<at::kCPU>>::call); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) { m.impl("attention", Flat<forward_autocast<at::kCUDA>>::call); }

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
