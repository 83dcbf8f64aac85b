#include "launch_attention.h"

#include "../ops/eager_call.h"
#include "../ops/seed.h"
#include "../python/python_function.h"
#include "launch_cache.h"

#include <pybind11/stl.h>

#include <array>
#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace transformer_fast {

namespace py = pybind11;

namespace {

// Key of a launcher call: name, scalars and inputs.
LaunchCall call_of(const char* name, const AttentionParams& params, const Tensor& k,
                   std::initializer_list<OptionalTensor> inputs) {
  LaunchCall call;
  call.scalar(name);
  const bool packed = params.is_packed();
  for (const OptionalTensor& input : inputs) call.input(input);
  AttentionParams::visit(params, [&]<typename T>(const Field<T>& field) {
    if (field.of_packed && !packed) return;
    if constexpr (std::is_same_v<T, const OptionalTensor>) {
      if (&field.value != &params.seed) call.input(field.value);
    } else if constexpr (std::is_same_v<T, const OptionalSymInt>) {
      call.scalar(known(field.value));
    } else if constexpr (std::is_same_v<T, const c10::SymInt>) {
      call.scalar(field.value.expect_int());
    } else {
      call.scalar(field.value);
    }
  });
  const Seed seed(params.seed);
  seed.number ? call.input(*seed.number) : call.input(seed.tensor);

  // The map of tiles and their order are derived from the contents of these.
  const int64_t long_keys = LaunchCache::instance().long_keys;
  if (!packed && (params.keep || params.key_keep || params.query_ids)) {
    for (const OptionalTensor* part :
         {&params.keep, &params.key_keep, &params.lengths, &params.query_ids, &params.key_ids})
      if (*part) call.source(**part);
  } else if (packed && params.packed.max_seqlen_k.expect_int() > long_keys) {
    call.source(*params.packed.cu_seqlens_k);
    call.source(*params.packed.cu_seqlens_q);
  } else if (!packed && params.lengths && params.lengths->dim() == 1 && k.size(2) > long_keys) {
    call.source(*params.lengths);
  }
  return call;
}

// Conversion to transformer_fast.attention_params.AttentionParams. The GIL must be held.
py::object python_params(const AttentionParams& params) {
  static const PythonFunction make("transformer_fast.attention_params", "AttentionParams");
  static const PythonFunction make_packed("transformer_fast.attention_params", "PackedBatch");
  py::dict fields, packed;
  AttentionParams::visit(params, [&](const auto& field) {
    (field.of_packed ? packed : fields)[field.name] = PythonFunction::object(field.value);
  });
  const Seed seed(params.seed);
  if (seed.number) fields["seed"] = *seed.number;
  if (params.is_packed()) fields["packed"] = make_packed.call(packed);
  return make.call(fields);
}

}  // namespace

AttentionResult launch_attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                 std::optional<int64_t> dropout_words) {
  static const PythonFunction launcher("transformer_fast.triton.attention.forward", "attention_forward");
  const py::gil_scoped_acquire gil;
  LaunchCall call = call_of("attention forward", params, k, {q, k, v});
  call.scalar(dropout_words);
  const auto [out, logsumexp, dropout_bits] = replayed_or<3>(std::move(call), [&](const py::object& call) {
    return launcher.tensors<3>(q, k, v, python_params(params), dropout_words, call);
  });
  return {out, logsumexp, {}, {}, eager::or_none(dropout_bits)};
}

c10::SymInt dropout_words(const Tensor& q, const Tensor& k, AttentionParams params) {
  static const PythonFunction function("transformer_fast.triton.attention.dropout_bits", "dropout_words");
  const py::gil_scoped_acquire gil;
  params.seed = std::nullopt;  // its number does not matter, and a graph that is made has none
  return function.call({}, q, k, python_params(params)).cast<c10::SymInt>();
}

AttentionGradients launch_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                             const AttentionParams& params, GradientNeeds needs) {
  static const PythonFunction launcher("transformer_fast.triton.attention.backward", "attention_backward");
  const Tensor &out = result.out, &logsumexp = result.logsumexp;
  const py::gil_scoped_acquire gil;
  auto call = call_of("attention backward", params, k,
                      {grad_out, q, k, v, out, logsumexp, grad_logsumexp, result.dropout_bits});
  const std::array needed = {needs.keys, needs.bias, needs.distance_bias};
  for (const bool need : needed) call.scalar(need);
  const auto launch = [&](const py::object& call) {
    return launcher.tensors<5>(grad_out, q, k, v, out, logsumexp, python_params(params), grad_logsumexp,
                               result.dropout_bits, needed, call);
  };
  // Python adds up the parts of the gradients of biases.
  const bool in_parts = needs.bias || needs.distance_bias;
  const auto [grad_q, grad_k, grad_v, bias, distance_bias] =
      in_parts ? launch(object_of(std::move(call))) : replayed_or<5>(std::move(call), launch);
  return {grad_q, grad_k, grad_v, bias, distance_bias};
}

std::tuple<Tensor, Tensor> launch_decode(const DecodeParams& params) {
  static const PythonFunction launcher("transformer_fast.triton.attention.decode", "attention_decode");
  const std::optional<int64_t> causal = known(params.causal), window = known(params.window);
  const py::gil_scoped_acquire gil;
  py::object kept = py::none();
  if (params.q.numel() > 0 && params.k.numel() > 0) {
    LaunchCall call;  // inputs in the launcher's order
    call.scalar("attention decode");
    call.scalar(causal);
    call.scalar(window);
    call.scalar(params.softcap);
    call.scalar(params.scale);
    call.input(params.q);
    call.input(params.heads_first(params.k));
    call.input(params.heads_first(params.v));
    call.input(params.lengths);
    call.input(params.page_table);
    call.input(params.distance_bias);
    call.input(params.query_ids);
    call.input(params.key_ids);
    call.input(params.sinks);
    if (const auto results = LaunchCache::instance().replay(call, 2); !results.empty()) return {results[0], results[1]};
    kept = py::cast(std::move(call));
  }
  const auto [out, logsumexp] = launcher.tensors<2>(params.q, params.k, params.v, params.lengths, params.page_table,
                                                    params.distance_bias, params.query_ids, params.key_ids,
                                                    params.sinks, causal, window, params.softcap, params.scale, kept);
  return {out, logsumexp};
}

Tensor weights_by_torch(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  static const PythonFunction function("transformer_fast.ops.attention", "weights_by_torch");
  const py::gil_scoped_acquire gil;
  return function.tensor(q, k, python_params(params));
}

std::array<Tensor, 5> weights_gradients(const Tensor& grad_weights, const Tensor& q, const Tensor& k,
                                        const AttentionParams& params, const std::array<bool, 5>& needed) {
  static const PythonFunction function("transformer_fast.ops.attention", "weights_gradients");
  const py::gil_scoped_acquire gil;
  const auto [on_q, on_k, on_bias, on_distance, on_sinks] = needed;
  const py::object needs = py::make_tuple(on_q, on_k, on_bias, on_distance, on_sinks);
  return function.tensors<5>(grad_weights, q, k, python_params(params), needs);
}

}  // namespace transformer_fast
