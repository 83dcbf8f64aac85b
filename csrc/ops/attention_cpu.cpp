// Attention on the CPU, from tensors to kernel parameters: forward, backward, gradient of the bias, and weights.
#include "attention.h"

#include "attention_tensors.h"
#include "eager_call.h"

#include <ATen/ops/zeros_like.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

namespace transformer_fast {
namespace {

// True if a forward keeps the weights for its backward. Recomputing the weights takes a product and the exponentials.
// With a bias per (query, key), without dropout and in bfloat16, keeping them is 1.25 to 1.3 times as fast (8 sentences
// of 128 tokens, 8 heads of 64), but not in float32: 0.92 to 1.12. With a window or documents most weights would be
// zeros, so they are not kept.
bool saves_probs(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  const OptionalTensor& bias = params.bias;
  if (!bias || params.is_packed() || params.window || params.query_ids || params.distance_bias || params.softcap ||
      bias->size(2) == 1 || bias->size(3) == 1 || params.dropout_p > 0 || q.size(2) <= kFewQueries ||
      q.scalar_type() != at::kBFloat16 || !kernels().of<c10::BFloat16>().saves_weights)
    return false;
  return q.numel() > 0 && q.size(0) * q.size(1) * q.size(2) * k.size(2) <= kMaxSavedScores;
}

// The bias in one of the two dtypes; broadcast dimensions are not expanded.
template <typename T, typename A>
OptionalTensor readable_bias(const OptionalTensor& bias) {
  if (!bias || bias->scalar_type() == c10::CppTypeToScalarType<A>::value ||
      bias->scalar_type() == c10::CppTypeToScalarType<T>::value)
    return bias;
  Tensor small = *bias;
  for (int64_t dim = 0; dim < small.dim(); ++dim)
    if (small.stride(dim) == 0 && small.size(dim) > 1) small = small.narrow(dim, 0, 1);
  return small.to(c10::CppTypeToScalarType<A>::value);
}

// The bias as a kernel parameter, from (B | 1, H | 1, Lq | 1, Lk | 1).
template <typename T, typename A>
Bias<T, A> bias_view(const Tensor& bias) {
  if (bias.scalar_type() == c10::CppTypeToScalarType<A>::value) return {view<const A>(bias), {}};
  return {{}, view<const T>(bias)};
}

// The bias (1, H | 1, Lq, Lk) of one sequence of a packed batch.
Tensor bias_of_sequence(const Tensor& bias, int64_t start, int64_t queries, int64_t keys) {
  return bias.narrow(1, start, queries * keys).view({1, bias.size(0), queries, keys});
}

// One call of the kernels: its first row in q and in k, and its part of a packed batch's bias.
template <typename T, typename A>
struct Sequence {
  AttentionKernelParams<T, A> params;
  int64_t start_q = 0, start_k = 0;
  int64_t bias_start = 0, stored_keys = 0;
};

template <typename T, typename A>
using Sequences = c10::SmallVector<Sequence<T, A>, 1>;

// The index of distance 0 in a distance bias.
int64_t distance_0(const AttentionParams& params, int64_t queries) {
  if (!params.is_packed()) return queries - 1;
  return (params.packed.bottom_right ? params.packed.max_seqlen_k : params.packed.max_seqlen_q).expect_int() - 1;
}

// One entry for a padded batch, or one entry per sequence of a packed batch. The entries point into the bias.
template <typename T, typename A>
Sequences<T, A> sequences_of(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                             const OptionalTensor& bias) {
  AttentionKernelParams<T, A> common;
  set_diagonals(common, known(params.causal), known(params.window));
  if (params.sinks) common.sinks = params.sinks->const_data_ptr<A>();
  common.scale = static_cast<A>(*params.scale), common.softcap = static_cast<A>(params.softcap.value_or(0));
  common.zero_empty_rows = params.zero_empty_rows, common.bottom_right = params.packed.bottom_right;
  common.dropout = dropout_params(params.dropout_p, params.seed);
  if (!params.is_packed()) {
    set_tensors(common, q, k, v);
    common.keep = view<const bool>(params.keep), common.key_keep = view<const bool>(params.key_keep);
    if (bias) common.bias = bias_view<T, A>(*bias);
    common.distance_bias = distance_view<const A>(params.distance_bias, q.size(2) - 1);
    common.query_ids = ids_view(params.query_ids), common.key_ids = ids_view(params.key_ids);
    common.lengths = lengths_view(params.lengths);
    return Sequences<T, A>{{common}};
  }
  const Tensor cu_seqlens_q = params.packed.cu_seqlens_q->contiguous();
  const Tensor cu_seqlens_k = params.packed.cu_seqlens_k->contiguous();
  const int32_t* const starts_q = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* const starts_k = cu_seqlens_k.const_data_ptr<int32_t>();
  OptionalTensor used = params.packed.seqused_k;
  if (used) used = used->contiguous();
  OptionalTensor bias_starts = params.packed.bias_starts;
  if (bias_starts) bias_starts = bias_starts->contiguous();
  Sequences<T, A> sequences(cu_seqlens_q.size(0) - 1, {common});
  for (size_t b = 0; b < sequences.size(); ++b) {
    auto& [p, start_q, start_k, bias_start, stored_keys] = sequences[b];
    start_q = starts_q[b], start_k = starts_k[b];
    p.B = 1, p.H = q.size(1), p.Hkv = k.size(1), p.D = q.size(2), p.first_batch = b;
    p.Lq = starts_q[b + 1] - start_q, p.Lk = stored_keys = starts_k[b + 1] - start_k;
    if (used) p.Lk = used->const_data_ptr<int32_t>()[b];
    if (bias) {
      bias_start = bias_starts->const_data_ptr<int64_t>()[b];
      p.bias = bias_view<T, A>(bias_of_sequence(*bias, bias_start, p.Lq, stored_keys));
    }
    p.distance_bias = distance_view<const A>(params.distance_bias, distance_0(params, p.Lq));
    p.query_ids = ids_view(params.query_ids, start_q), p.key_ids = ids_view(params.key_ids, start_k);
    p.q = rows_view<const T>(q, start_q);
    p.k = rows_view<const T>(k, start_k), p.v = rows_view<const T>(v, start_k);
  }
  // Longest first, so that no thread runs a long sequence alone at the end.
  std::stable_sort(sequences.begin(), sequences.end(),
                   [](const auto& a, const auto& b) { return a.params.Lq * a.params.Lk > b.params.Lq * b.params.Lk; });
  return sequences;
}

// Calls body(sequences).
template <typename Body>
void with_sequences(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params, Body body) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    using A = Accumulate<scalar_t>;
    const OptionalTensor bias = readable_bias<scalar_t, A>(params.bias);
    body(sequences_of<scalar_t, A>(q, k, v, params, bias));
  });
}

// The weights that the forward saved, if any, as kernel parameters.
template <typename T, typename A>
SavedProbs<T, A> saved_probs_view(const AttentionKernelParams<T, A>& p, const AttentionResult& result) {
  if (!result.saved_probs) return {};
  return {static_cast<T*>(result.saved_probs->data_ptr()), static_cast<A*>(result.saved_factors->data_ptr()), p.H,
          result.saved_probs->size(2), p.Lk};
}

}  // namespace

std::array<Tensor, AttentionParams::kTensors> AttentionParams::tensors() const {
  std::array<Tensor, kTensors> saved;
  Tensor* next = saved.data();
  visit(*this, [&]<typename T>(const Field<T>& field) {
    if constexpr (std::is_same_v<T, const OptionalTensor>) *next++ = eager::or_undefined(field.value);
  });
  return saved;
}

AttentionParams AttentionParams::without_tensors() const {
  const std::array<Tensor, kTensors> none;
  return with(none.data());
}

AttentionParams AttentionParams::with(const Tensor* saved) const {
  AttentionParams params = *this;
  visit(params, [&]<typename T>(const Field<T>& field) {
    if constexpr (std::is_same_v<T, OptionalTensor>) field.value = eager::or_none(*saved++);
  });
  return params;
}

AttentionResult attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                  bool training) {
  AttentionResult result{empty_like_on_cpu(q), {}, {}, {}};
  result.logsumexp =
      params.is_packed() ? empty_statistics(q, {q.size(1), q.size(0)}) : empty_statistics(q, q.sizes().slice(0, 3));
  if (training && saves_probs(q, k, params)) {
    const int64_t B = q.size(0), H = q.size(1), Lq = q.size(2), Lk = k.size(2);
    const int64_t vector = kernels().vector_bytes / result.logsumexp.element_size();
    const int64_t lanes = (Lq + vector - 1) / vector * vector;
    result.saved_probs = at::empty({B, H, lanes, Lk}, q.options());
    result.saved_factors = empty_statistics(q, {B, H, (Lk + kKeyTile - 1) / kKeyTile, lanes});
  }
  with_sequences(q, k, v, params, [&]<typename T, typename A>(const Sequences<T, A>& sequences) {
    c10::SmallVector<AttentionForward<T, A>, 1> calls;
    for (const auto& [p, start_q, start_k, bias_start, stored_keys] : sequences)
      calls.push_back({p, rows_view<T>(result.out, start_q), statistics_view<A>(result.logsumexp, start_q),
                       saved_probs_view(p, result)});
    kernels().of<T>().attention_forward(calls);
  });
  return result;
}

AttentionGradients attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                      const AttentionParams& params, GradientNeeds needs) {
  AttentionGradients grads{empty_like_on_cpu(q), empty_like_on_cpu(k), empty_like_on_cpu(v), {}, {}, {}};
  if (params.packed.seqused_k) grads.k.zero_(), grads.v.zero_();  // a kernel writes only the keys in use
  if (needs.sinks) grads.sinks = sinks_gradient(grad_out, result, grad_logsumexp, params);
  if (needs.distance_bias) grads.distance_bias = at::zeros_like(*params.distance_bias);
  // The gradient of the bias sums the score gradients, which are saved if they are not too many.
  Tensor grad_scores;
  if (needs.bias) {
    const std::array<int64_t, 4> sizes = {q.size(0), q.size(1), q.size(2), k.size(2)};
    const int64_t scores = c10::multiply_integers(sizes);
    if (!params.is_packed() && scores > 0 && q.size(3) > 0 && scores <= kMaxSavedScores && !params.softcap)
      grad_scores = at::empty(sizes, q.options());
    else
      grads.bias = attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  }
  if (q.numel() == 0 || k.numel() == 0) {
    for (Tensor* grad : {&grads.q, &grads.k, &grads.v}) grad->zero_();
    return grads;
  }
  with_sequences(q, k, v, params, [&]<typename T, typename A>(const Sequences<T, A>& sequences) {
    c10::SmallVector<AttentionBackward<T, A>, 1> calls;
    for (const auto& [p, start_q, start_k, bias_start, stored_keys] : sequences) {
      View<A> grad_distances;
      if (needs.distance_bias) grad_distances = distance_view<A>(grads.distance_bias, distance_0(params, p.Lq));
      if (p.Lk == 0)  // no task will write the result
        grads.q.narrow(0, start_q, p.Lq).zero_();
      else
        calls.push_back(
            {p, rows_view<const T>(grad_out, start_q), rows_view<const T>(result.out, start_q),
             statistics_view<const A>(result.logsumexp, start_q), statistics_view<const A>(grad_logsumexp, start_q),
             rows_view<T>(grads.q, start_q), rows_view<T>(grads.k, start_k), rows_view<T>(grads.v, start_k),
             grad_scores.defined() ? view<T>(grad_scores) : View<T>{}, saved_probs_view(p, result), grad_distances});
    }
    kernels().of<T>().attention_backward(calls);
  });
  if (grad_scores.defined()) grads.bias = grad_scores.sum_to_size(params.bias->sizes()).to(params.bias->scalar_type());
  return grads;
}

Tensor attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                           const AttentionParams& params) {
  const Tensor& bias = *params.bias;
  Tensor grad = empty_statistics(q, bias.sizes());
  if (q.numel() == 0 || k.numel() == 0) return grad.zero_().to(bias.scalar_type());
  if (params.packed.seqused_k) grad.zero_();
  with_sequences(q, k, v, params, [&]<typename T, typename A>(const Sequences<T, A>& sequences) {
    for (const auto& [p, start_q, start_k, bias_start, stored_keys] : sequences) {
      if (p.Lq == 0 || p.Lk == 0) continue;
      const AttentionBackward<T, A> call{
          p, rows_view<const T>(grad_out, start_q), rows_view<const T>(result.out, start_q),
          statistics_view<const A>(result.logsumexp, start_q), statistics_view<const A>(grad_logsumexp, start_q)};
      if (params.is_packed()) {
        const Tensor own = empty_statistics(q, {1, bias.size(0), p.Lq, p.Lk});
        kernels().of<T>().attention_grad_bias(call, {own.mutable_data_ptr<A>(), {1, bias.size(0), p.Lq, p.Lk}});
        bias_of_sequence(grad, bias_start, p.Lq, stored_keys).narrow(3, 0, p.Lk).copy_(own);
      } else {
        kernels().of<T>().attention_grad_bias(
            call, {grad.mutable_data_ptr<A>(), {bias.size(0), bias.size(1), bias.size(2), bias.size(3)}});
      }
    }
  });
  return grad.to(bias.scalar_type());
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  Tensor weights = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  if (weights.numel() == 0) return weights;
  with_sequences(q, k, k, params, [&]<typename T, typename A>(const Sequences<T, A>& sequences) {
    kernels().of<T>().attention_weights(sequences[0].params, weights.mutable_data_ptr<T>());
  });
  return weights;
}

}  // namespace transformer_fast
