// Attention of a packed batch on the CPU: every sequence is a problem of its own, and all share one list of tasks.
#include "attention_tensors.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace transformer_fast {
namespace {

// The sequences of a batch: rows starts[b] .. starts[b + 1] - 1 are those of sequence b.
struct Sequences {
  explicit Sequences(const PackedBatch& batch)
      : cu_seqlens_q(batch.cu_seqlens_q->contiguous()), cu_seqlens_k(batch.cu_seqlens_k->contiguous()),
        starts_q(cu_seqlens_q.const_data_ptr<int32_t>()), starts_k(cu_seqlens_k.const_data_ptr<int32_t>()),
        count(cu_seqlens_q.size(0) - 1) {}

  Tensor cu_seqlens_q, cu_seqlens_k;
  const int32_t *starts_q, *starts_k;
  int64_t count;

  int64_t queries(int64_t b) const { return starts_q[b + 1] - starts_q[b]; }
  int64_t keys(int64_t b) const { return starts_k[b + 1] - starts_k[b]; }

  // The longest first, so that no thread is left alone with one at the end.
  std::vector<int64_t> by_work() const {
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return queries(a) * keys(a) > queries(b) * keys(b); });
    return order;
  }
};

// Tokens (T, heads, D) from row `start` on, as a batch of one.
template <typename T>
View<T> tokens(const Tensor& tensor, int64_t start) {
  View<T> result;
  result.data = static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(0);
  result.stride[1] = tensor.stride(1), result.stride[2] = tensor.stride(0), result.stride[3] = 1;
  return result;
}

// Statistics (heads, T) likewise.
template <typename T>
View<T> token_statistics(const Tensor& tensor, int64_t start) {
  View<T> result;
  result.data = static_cast<T*>(tensor.data_ptr()) + start * tensor.stride(1);
  result.stride[1] = tensor.stride(0), result.stride[2] = tensor.stride(1);
  return result;
}

template <typename T, typename A>
AttentionProblem<T, A> problem_of(const Tensor& q, const Tensor& k, const Tensor& v, const Sequences& sequences,
                                  int64_t b, const AttentionParams& params) {
  AttentionProblem<T, A> problem{};
  problem.B = 1, problem.H = q.size(1), problem.Hkv = k.size(1), problem.D = q.size(2);
  problem.Lq = sequences.queries(b), problem.Lk = sequences.keys(b);
  problem.q = tokens<const T>(q, sequences.starts_q[b]);
  problem.k = tokens<const T>(k, sequences.starts_k[b]);
  problem.v = tokens<const T>(v, sequences.starts_k[b]);
  problem.upper = diagonal(params.causal, kNoDiagonal), problem.scale = static_cast<A>(params.scale);
  problem.dropout_p = params.dropout_p, problem.seed = params.seed ? *params.seed->const_data_ptr<int64_t>() : 0;
  problem.zero_empty_rows = params.zero_empty_rows;
  problem.first_batch = b;
  return problem;
}

}  // namespace

AttentionResult attention_packed_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const AttentionParams& params) {
  const AttentionResult result{at::empty_like(q), empty_statistics(q, {q.size(1), q.size(0)}), {}, {}};
  const Sequences sequences(params.packed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_packed", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    std::vector<AttentionForward<T, A>> calls;
    calls.reserve(sequences.count);
    for (const int64_t b : sequences.by_work())
      calls.push_back({problem_of<T, A>(q, k, v, sequences, b, params), tokens<T>(result.out, sequences.starts_q[b]),
                       token_statistics<A>(result.logsumexp, sequences.starts_q[b])});
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
  const Sequences sequences(params.packed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_packed_backward", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    std::vector<AttentionBackward<T, A>> calls;
    calls.reserve(sequences.count);
    for (const int64_t b : sequences.by_work()) {
      const int64_t start_q = sequences.starts_q[b], start_k = sequences.starts_k[b];
      if (sequences.keys(b) == 0)  // no task will come by
        grads.q.narrow(0, start_q, sequences.queries(b)).zero_();
      else
        calls.push_back({problem_of<T, A>(q, k, v, sequences, b, params), tokens<const T>(grad_out, start_q),
                         tokens<const T>(result.out, start_q), token_statistics<const A>(result.logsumexp, start_q),
                         grad_logsumexp ? token_statistics<const A>(*grad_logsumexp, start_q) : View<const A>{},
                         tokens<T>(grads.q, start_q), tokens<T>(grads.k, start_k), tokens<T>(grads.v, start_k)});
    }
    kernels().of<T>().attention_backward(calls);
  });
  return grads;
}

}  // namespace transformer_fast
