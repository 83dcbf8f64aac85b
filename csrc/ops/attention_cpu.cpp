// Attention on the CPU, from tensors to what the kernels take: forward, backward, gradient of the bias, and weights.
#include "attention.h"

#include "attention_tensors.h"

namespace transformer_fast {
namespace {

Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }
OptionalTensor or_none(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

// Whether a forward keeps the weights for its backward. To compute them again takes a product and the exponentials, and
// with an addend for each pair of query and key and nothing dropped, that is more than eager spends on keeping them. With
// a window most of them would be zeros.
bool keeps_weights(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  const OptionalTensor& bias = params.bias;
  if (!bias || params.window || bias->size(2) == 1 || bias->size(3) == 1 || params.dropout_p > 0 ||
      q.size(2) <= kFewQueries)
    return false;
  return q.numel() > 0 && q.size(0) * q.size(1) * q.size(2) * k.size(2) <= kMostStored;
}

}  // namespace

std::array<Tensor, AttentionParams::kTensors> AttentionParams::tensors() const {
  return {or_undefined(keep),
          or_undefined(key_keep),
          or_undefined(lengths),
          or_undefined(bias),
          or_undefined(seed),
          or_undefined(packed.cu_seqlens_q),
          or_undefined(packed.cu_seqlens_k)};
}

AttentionParams AttentionParams::without_tensors() const {
  const std::array<Tensor, kTensors> none;
  return with(none.data());
}

AttentionParams AttentionParams::with(const Tensor* saved) const {
  AttentionParams params = *this;
  params.keep = or_none(saved[0]), params.key_keep = or_none(saved[1]), params.lengths = or_none(saved[2]);
  params.bias = or_none(saved[3]), params.seed = or_none(saved[4]);
  params.packed.cu_seqlens_q = or_none(saved[5]), params.packed.cu_seqlens_k = or_none(saved[6]);
  return params;
}

AttentionResult attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                  bool training) {
  AttentionResult result{at::empty_like(q), empty_statistics(q, q.sizes().slice(0, 3)), {}, {}};
  with_problem(q, k, v, params, [&](const auto& problem) {
    using T = typename std::decay_t<decltype(problem)>::Element;
    using A = typename std::decay_t<decltype(problem)>::Arithmetic;
    if (training && keeps_weights(q, k, params)) {
      const int64_t vector = kernels().vector_bytes / static_cast<int64_t>(sizeof(A));
      const int64_t lanes = (problem.Lq + vector - 1) / vector * vector, tiles = KeptWeights<T, A>::tiles(problem.Lk);
      result.kept = at::empty({problem.B, problem.H, lanes, problem.Lk}, q.options());
      result.kept_factors = empty_statistics(q, {problem.B, problem.H, tiles, lanes});
    }
    kernels().of<T>().attention_forward(AttentionForward<T, A>{
        problem, view<T>(result.out), statistics_view<A>(result.logsumexp), kept_weights(problem, result)});
  });
  return result;
}

AttentionGradients attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                      const AttentionParams& params, bool bias) {
  AttentionGradients grads{at::empty_like(q), at::empty_like(k), at::empty_like(v), {}};
  const int64_t scores = q.size(0) * q.size(1) * q.size(2) * k.size(2);
  // The gradient of the bias sums those of the scores, which are stored where they are not too many.
  const bool stores = bias && q.size(2) > kFewQueries && scores > 0 && q.size(3) > 0 && scores <= kMostStored;
  if (bias && !stores) grads.bias = attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  if (q.numel() == 0 || k.numel() == 0) {
    for (Tensor* grad : {&grads.q, &grads.k, &grads.v}) grad->zero_();
    return grads;
  }
  const Tensor grad_scores = stores ? at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options()) : Tensor();
  with_problem(q, k, v, params, [&](const auto& problem) {
    using T = typename std::decay_t<decltype(problem)>::Element;
    using A = typename std::decay_t<decltype(problem)>::Arithmetic;
    kernels().of<T>().attention_backward(AttentionBackward<T, A>{
        problem, view<const T>(grad_out), view<const T>(result.out), statistics_view<const A>(result.logsumexp),
        statistics_view<const A>(grad_logsumexp), view<T>(grads.q), view<T>(grads.k), view<T>(grads.v),
        stores ? view<T>(grad_scores) : View<T>{}, kept_weights(problem, result)});
  });
  if (stores) grads.bias = grad_scores.sum_to_size(params.bias->sizes()).to(params.bias->scalar_type());
  return grads;
}

Tensor attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                           const AttentionParams& params) {
  const Tensor& bias = *params.bias;
  Tensor grad = empty_statistics(q, bias.sizes());
  if (q.numel() == 0 || k.numel() == 0) return grad.zero_().to(bias.scalar_type());
  with_problem(q, k, v, params, [&](const auto& problem) {
    using T = typename std::decay_t<decltype(problem)>::Element;
    using A = typename std::decay_t<decltype(problem)>::Arithmetic;
    const AttentionBackward<T, A> call{problem,
                                       view<const T>(grad_out),
                                       view<const T>(result.out),
                                       statistics_view<const A>(result.logsumexp),
                                       statistics_view<const A>(grad_logsumexp),
                                       {},
                                       {},
                                       {}};
    kernels().of<T>().attention_grad_bias(
        call, {grad.mutable_data_ptr<A>(), {bias.size(0), bias.size(1), bias.size(2), bias.size(3)}});
  });
  return grad.to(bias.scalar_type());
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  Tensor weights = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  if (weights.numel() == 0) return weights;
  with_problem(q, k, k, params, [&](const auto& problem) {
    using T = typename std::decay_t<decltype(problem)>::Element;
    kernels().of<T>().attention_weights(problem, weights.mutable_data_ptr<T>());
  });
  return weights;
}

}  // namespace transformer_fast
