#include "attention.h"

#include "../ops/eager.h"
#include "launch_cache.h"
#include "python_function.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace transformer_fast {
namespace {

namespace py = pybind11;
using eager::CachedLaunch, eager::rounded_up, eager::wrap;

int64_t longest_unordered = 0, delta_rows = 1;

py::object seed_of(const AttentionParams& params) {
  return params.seed_value ? py::object(py::int_(*params.seed_value)) : PythonFunction::object(params.seed);
}

}  // namespace

py::dict keywords_of(const AttentionParams& params) {
  py::dict keywords;
  if (params.is_packed()) {
    keywords["cu_seqlens_q"] = wrap(*params.packed.cu_seqlens_q),
    keywords["cu_seqlens_k"] = wrap(*params.packed.cu_seqlens_k);
    keywords["max_q"] = params.packed.max_q.expect_int(), keywords["max_k"] = params.packed.max_k.expect_int();
    keywords["causal"] = params.causal.has_value();
  } else {
    keywords["keep"] = PythonFunction::object(params.keep),
    keywords["key_keep"] = PythonFunction::object(params.key_keep);
    keywords["lengths"] = PythonFunction::object(params.lengths),
    keywords["bias"] = PythonFunction::object(params.bias);
    keywords["causal"] = params.causal;
  }
  keywords["scale"] = params.scale, keywords["dropout_p"] = params.dropout_p, keywords["seed"] = seed_of(params);
  keywords["zero_empty_rows"] = params.zero_empty_rows;
  return keywords;
}

namespace {

// The contents from which a call derives the order of its tiles: run_call of triton/attention/launches.py.
py::tuple sources_of(const Tensor& k, const AttentionParams& params) {
  if (params.keep || params.key_keep) {
    py::list parts;
    for (const OptionalTensor* part : {&params.keep, &params.key_keep, &params.lengths})
      if (*part) parts.append(wrap(**part));
    return py::tuple(parts);
  }
  if (params.packed.cu_seqlens_q)
    return params.packed.max_k.expect_int() > longest_unordered
               ? py::make_tuple(wrap(*params.packed.cu_seqlens_k), wrap(*params.packed.cu_seqlens_q))
               : py::tuple();
  if (params.lengths && params.lengths->dim() == 1 && k.size(2) > longest_unordered)
    return py::make_tuple(wrap(*params.lengths));
  return py::tuple();
}

py::tuple scalars_of(const char* name, const char* packed_name, const AttentionParams& params) {
  const py::object causal = py::cast(params.causal);
  if (params.packed.cu_seqlens_q)
    return py::make_tuple(packed_name, params.packed.max_q.expect_int(), params.packed.max_k.expect_int(), causal,
                          params.scale, params.dropout_p, params.zero_empty_rows);
  return py::make_tuple(name, causal, params.scale, params.dropout_p, params.zero_empty_rows);
}

void add_mask(CachedLaunch& call, const AttentionParams& params) {
  for (const OptionalTensor* part : {&params.keep, &params.key_keep, &params.lengths, &params.bias}) call.input(*part);
  if (params.seed_value)
    call.input(*params.seed_value);
  else
    call.input(params.seed);
  if (!params.packed.cu_seqlens_q) return;
  call.input(params.packed.cu_seqlens_q);
  call.input(params.packed.cu_seqlens_k);
}

// Whether the launchers have no more to do than to launch: nothing is empty, and q has not to change its sign.
bool only_launches(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  return q.numel() > 0 && k.numel() > 0 && params.scale > 0;
}

}  // namespace

AttentionResult launch_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params) {
  static const PythonFunction padded("transformer_fast.triton.attention.forward", "attention_forward");
  static const PythonFunction packed("transformer_fast.triton.attention.forward", "attention_packed_forward");
  const py::gil_scoped_acquire gil;
  if (only_launches(q, k, params)) {
    CachedLaunch call;
    for (const Tensor* tensor : {&q, &k, &v}) call.input(*tensor);
    add_mask(call, params);
    if (call.lookup(scalars_of("attention forward", "attention packed forward", params), sources_of(k, params), q)) {
      auto [out, logsumexp] = eager::empty_outputs_of(q);
      call.output(out.const_data_ptr());
      call.output(logsumexp.const_data_ptr());
      call.replay();
      return {out, logsumexp, {}, {}};
    }
  }
  const auto& launcher = params.is_packed() ? packed : padded;
  const auto [out, logsumexp] = PythonFunction::unpacked<2>(launcher.call(keywords_of(params), q, k, v));
  return {out, logsumexp, {}, {}};
}

AttentionGradients launch_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                             const AttentionParams& params) {
  static const PythonFunction padded("transformer_fast.triton.attention.backward", "attention_backward");
  static const PythonFunction packed("transformer_fast.triton.attention.backward", "attention_packed_backward");
  const Tensor &out = result.out, &logsumexp = result.logsumexp;
  const py::gil_scoped_acquire gil;
  if (only_launches(q, k, params) && !grad_logsumexp) {
    CachedLaunch call;
    for (const Tensor* tensor : {&grad_out, &q, &k, &v, &out, &logsumexp}) call.input(*tensor);
    call.input(OptionalTensor());  // no gradient of the logsumexp
    add_mask(call, params);
    if (call.lookup(scalars_of("attention backward", "attention packed backward", params), sources_of(k, params),
                    grad_out)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const AttentionGradients grads{at::empty_like(q), at::empty_like(k), at::empty_like(v), {}};
      for (const Tensor* grad : {&grads.q, &grads.k, &grads.v}) call.output(grad->const_data_ptr());
      // delta, which tiles of rows have empty ones, and sums of weights: row_buffers of triton/attention/backward.py.
      const int64_t rows = logsumexp.numel(), queries = logsumexp.size(-1);
      const int64_t tiles = rows / queries * ((queries + delta_rows - 1) / delta_rows);
      const bool summed = q.scalar_type() == at::kFloat || params.bias;
      const Tensor buffer = at::empty({rounded_up(rows) * (summed ? 2 : 1) + tiles}, logsumexp.options());
      const float* const delta = buffer.const_data_ptr<float>();
      const float* const sums = delta + rounded_up(rows);
      call.output(delta);
      call.output(sums + (summed ? rounded_up(rows) : 0));
      call.output(summed ? sums : nullptr);
      call.replay();
      return grads;
    }
  }
  py::dict keywords = keywords_of(params);
  keywords["grad_logsumexp"] = PythonFunction::object(grad_logsumexp);
  const auto& launcher = params.is_packed() ? packed : padded;
  const auto [grad_q, grad_k, grad_v] =
      PythonFunction::unpacked<3>(launcher.call(keywords, grad_out, q, k, v, out, logsumexp));
  return {grad_q, grad_k, grad_v, {}};
}

Tensor launch_attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                  const AttentionParams& params) {
  static const PythonFunction launcher("transformer_fast.triton.attention.grad_bias", "attention_grad_bias");
  const py::gil_scoped_acquire gil;
  py::dict keywords = keywords_of(params);
  keywords["grad_logsumexp"] = PythonFunction::object(grad_logsumexp);
  return THPVariable_Unpack(launcher.call(keywords, grad_out, q, k, v, result.out, result.logsumexp).ptr());
}

Tensor launch_attention_weights(const Tensor& q, const Tensor& k, const OptionalTensor& logsumexp,
                                const AttentionParams& params) {
  static const PythonFunction launcher("transformer_fast.triton.attention.weights", "attention_weights");
  const py::gil_scoped_acquire gil;
  return THPVariable_Unpack(launcher.call(keywords_of(params), q, k, logsumexp).ptr());
}

void eager::set_launch_cache(py::object find, int64_t longest_unordered_, int64_t delta_rows_) {
  set_finder(std::move(find));
  longest_unordered = longest_unordered_;
  delta_rows = delta_rows_;
}

}  // namespace transformer_fast
