// Attention of a packed batch on the CPU: every sequence is a problem of its own, and all share one list of tasks.
#include "attention_tensors.h"

#include <algorithm>
#include <vector>

namespace transformer_fast {
namespace {

// Tokens (T, heads, D) from row `start` on, as a batch of one.
template <typename T>
View<T> tokens(const Tensor& tensor, int64_t start) {
  return {static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(0), {0, tensor.stride(1), tensor.stride(0), 1}};
}

// Statistics (heads, T) likewise.
template <typename T>
View<T> token_statistics(const Tensor& tensor, int64_t start) {
  return {static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(1), {0, tensor.stride(0), tensor.stride(1), 0}};
}

// A sequence, and its first row of q and of k.
template <typename T, typename A>
struct Sequence {
  AttentionProblem<T, A> problem{};
  int64_t start_q = 0, start_k = 0;
};

// Calls body(sequences) with those of a batch.
template <typename Body>
void with_sequences(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params, Body body) {
  const Tensor cu_seqlens_q = params.packed.cu_seqlens_q->contiguous();
  const Tensor cu_seqlens_k = params.packed.cu_seqlens_k->contiguous();
  const int32_t* const starts_q = cu_seqlens_q.const_data_ptr<int32_t>();
  const int32_t* const starts_k = cu_seqlens_k.const_data_ptr<int32_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_packed", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    std::vector<Sequence<T, A>> sequences(cu_seqlens_q.size(0) - 1);
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      auto& [problem, start_q, start_k] = sequences[b];
      start_q = starts_q[b], start_k = starts_k[b];
      problem.B = 1, problem.H = q.size(1), problem.Hkv = k.size(1), problem.D = q.size(2);
      problem.Lq = starts_q[b + 1] - start_q, problem.Lk = starts_k[b + 1] - start_k;
      problem.q = tokens<const T>(q, start_q);
      problem.k = tokens<const T>(k, start_k), problem.v = tokens<const T>(v, start_k);
      set_options(problem, params);
      problem.first_batch = b;
    }
    // The longest first, so that no thread is left alone with one at the end.
    std::stable_sort(sequences.begin(), sequences.end(), [](const auto& a, const auto& b) {
      return a.problem.Lq * a.problem.Lk > b.problem.Lq * b.problem.Lk;
    });
    body(sequences);
  });
}

}  // namespace

AttentionResult attention_packed_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const AttentionParams& params) {
  const AttentionResult result{at::empty_like(q), empty_statistics(q, {q.size(1), q.size(0)}), {}, {}};
  with_sequences(q, k, v, params, [&]<typename T, typename A>(const std::vector<Sequence<T, A>>& sequences) {
    std::vector<AttentionForward<T, A>> calls;
    calls.reserve(sequences.size());
    for (const auto& [problem, start_q, start_k] : sequences)
      calls.push_back({problem, tokens<T>(result.out, start_q), token_statistics<A>(result.logsumexp, start_q)});
    kernels().of<T>().attention_forward(calls);
  });
  return result;
}

AttentionGradients attention_packed_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                             const AttentionResult& result, const OptionalTensor& grad_logsumexp,
                                             const AttentionParams& params) {
  AttentionGradients grads{at::empty_like(q), at::empty_like(k), at::empty_like(v), {}};
  if (q.numel() == 0 || k.numel() == 0) {
    for (Tensor* grad : {&grads.q, &grads.k, &grads.v}) grad->zero_();
    return grads;
  }
  with_sequences(q, k, v, params, [&]<typename T, typename A>(const std::vector<Sequence<T, A>>& sequences) {
    std::vector<AttentionBackward<T, A>> calls;
    calls.reserve(sequences.size());
    for (const auto& [problem, start_q, start_k] : sequences)
      if (problem.Lk == 0)  // no task will come by
        grads.q.narrow(0, start_q, problem.Lq).zero_();
      else
        calls.push_back({problem, tokens<const T>(grad_out, start_q), tokens<const T>(result.out, start_q),
                         token_statistics<const A>(result.logsumexp, start_q),
                         grad_logsumexp ? token_statistics<const A>(*grad_logsumexp, start_q) : View<const A>{},
                         tokens<T>(grads.q, start_q), tokens<T>(grads.k, start_k), tokens<T>(grads.v, start_k)});
    kernels().of<T>().attention_backward(calls);
  });
  return grads;
}

}  // namespace transformer_fast
