// Attention on the CPU, from tensors to what the kernels take: forward, backward, gradient of the bias, and weights.
#include "attention.h"

#include "attention_tensors.h"
#include "eager_call.h"

namespace transformer_fast {
namespace {

// Whether a forward keeps the weights for its backward. To compute them again takes a product and the exponentials, and
// with an addend for each pair of query and key and nothing dropped, that is more than eager spends on keeping them. With
// a window most of them would be zeros.
bool saves_probs(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  const OptionalTensor& bias = params.bias;
  if (!bias || params.window || bias->size(2) == 1 || bias->size(3) == 1 || params.dropout_p > 0 ||
      q.size(2) <= kFewQueries)
    return false;
  return q.numel() > 0 && q.size(0) * q.size(1) * q.size(2) * k.size(2) <= kMaxSavedScores;
}

}  // namespace

std::array<Tensor, AttentionParams::kTensors> AttentionParams::tensors() const {
  std::array<Tensor, kTensors> saved;
  for (size_t i = 0; i < kTensors; ++i) saved[i] = eager::or_undefined(*tensor_fields(*this)[i]);
  return saved;
}

AttentionParams AttentionParams::without_tensors() const {
  const std::array<Tensor, kTensors> none;
  return with(none.data());
}

AttentionParams AttentionParams::with(const Tensor* saved) const {
  AttentionParams params = *this;
  for (size_t i = 0; i < kTensors; ++i) *tensor_fields(params)[i] = eager::or_none(saved[i]);
  return params;
}

AttentionResult attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params,
                                  bool training) {
  AttentionResult result{at::empty_like(q), empty_statistics(q, q.sizes().slice(0, 3)), {}, {}};
  with_kernel_params(q, k, v, params, [&]<typename T, typename A>(const AttentionKernelParams<T, A>& p) {
    if (training && saves_probs(q, k, params)) {
      const int64_t vector = kernels().vector_bytes / static_cast<int64_t>(sizeof(A));
      const int64_t lanes = (p.Lq + vector - 1) / vector * vector, tiles = SavedProbs<T, A>::tiles(p.Lk);
      result.saved_probs = at::empty({p.B, p.H, lanes, p.Lk}, q.options());
      result.saved_factors = empty_statistics(q, {p.B, p.H, tiles, lanes});
    }
    kernels().of<T>().attention_forward(AttentionForward<T, A>{
        p, view<T>(result.out), statistics_view<A>(result.logsumexp), saved_probs_view(p, result)});
  });
  return result;
}

AttentionGradients attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                      const AttentionParams& params, bool bias) {
  AttentionGradients grads{at::empty_like(q), at::empty_like(k), at::empty_like(v), {}};
  const int64_t scores = q.size(0) * q.size(1) * q.size(2) * k.size(2);
  // The gradient of the bias sums those of the scores, which are saved where they are not too many.
  const bool saves_scores = bias && q.size(2) > kFewQueries && scores > 0 && q.size(3) > 0 && scores <= kMaxSavedScores;
  if (bias && !saves_scores) grads.bias = attention_grad_bias(grad_out, q, k, v, result, grad_logsumexp, params);
  if (q.numel() == 0 || k.numel() == 0) {
    for (Tensor* grad : {&grads.q, &grads.k, &grads.v}) grad->zero_();
    return grads;
  }
  const Tensor grad_scores =
      saves_scores ? at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options()) : Tensor();
  with_kernel_params(q, k, v, params, [&]<typename T, typename A>(const AttentionKernelParams<T, A>& p) {
    kernels().of<T>().attention_backward(AttentionBackward<T, A>{
        p, view<const T>(grad_out), view<const T>(result.out), statistics_view<const A>(result.logsumexp),
        statistics_view<const A>(grad_logsumexp), view<T>(grads.q), view<T>(grads.k), view<T>(grads.v),
        saves_scores ? view<T>(grad_scores) : View<T>{}, saved_probs_view(p, result)});
  });
  if (saves_scores) grads.bias = grad_scores.sum_to_size(params.bias->sizes()).to(params.bias->scalar_type());
  return grads;
}

Tensor attention_grad_bias(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                           const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                           const AttentionParams& params) {
  const Tensor& bias = *params.bias;
  Tensor grad = empty_statistics(q, bias.sizes());
  if (q.numel() == 0 || k.numel() == 0) return grad.zero_().to(bias.scalar_type());
  with_kernel_params(q, k, v, params, [&]<typename T, typename A>(const AttentionKernelParams<T, A>& p) {
    const AttentionBackward<T, A> call{p, view<const T>(grad_out), view<const T>(result.out),
                                       statistics_view<const A>(result.logsumexp),
                                       statistics_view<const A>(grad_logsumexp)};
    kernels().of<T>().attention_grad_bias(
        call, {grad.mutable_data_ptr<A>(), {bias.size(0), bias.size(1), bias.size(2), bias.size(3)}});
  });
  return grad.to(bias.scalar_type());
}

Tensor attention_weights(const Tensor& q, const Tensor& k, const AttentionParams& params) {
  Tensor weights = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
  if (weights.numel() == 0) return weights;
  with_kernel_params(q, k, k, params, [&]<typename T, typename A>(const AttentionKernelParams<T, A>& p) {
    kernels().of<T>().attention_weights(p, weights.mutable_data_ptr<T>());
  });
  return weights;
}

}  // namespace transformer_fast
