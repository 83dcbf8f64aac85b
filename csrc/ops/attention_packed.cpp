// torch.ops.transformer_fast_native.attention_packed_forward / attention_packed_backward on the CPU: every sequence of a
// packed batch is a problem of its own, and all share one list of tasks.
#include "attention_tensors.h"

#include <torch/library.h>

#include <numeric>
#include <tuple>

namespace transformer_fast {
namespace {

struct Options {
  bool causal;
  double scale, dropout_p;
  int64_t seed;
  bool zero_empty_rows;
};

// The sequences of a batch: rows starts[b] .. starts[b + 1] - 1 are those of sequence b.
struct Sequences {
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
                                  int64_t b, const Options& options) {
  AttentionProblem<T, A> problem{};
  problem.B = 1, problem.H = q.size(1), problem.Hkv = k.size(1), problem.D = q.size(2);
  problem.Lq = sequences.queries(b), problem.Lk = sequences.keys(b);
  problem.q = tokens<const T>(q, sequences.starts_q[b]);
  problem.k = tokens<const T>(k, sequences.starts_k[b]);
  problem.v = tokens<const T>(v, sequences.starts_k[b]);
  problem.causal = options.causal, problem.scale = static_cast<A>(options.scale);
  problem.dropout_p = options.dropout_p, problem.seed = options.seed, problem.zero_empty_rows = options.zero_empty_rows;
  problem.first_batch = b;
  return problem;
}

Options options_of(bool causal, double scale, double dropout_p, const OptionalTensor& seed, bool zero_empty_rows) {
  return {causal, scale, dropout_p, seed ? *seed->const_data_ptr<int64_t>() : 0, zero_empty_rows};
}

std::tuple<Tensor, Tensor> attention_packed_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, int64_t,
                                                    int64_t, bool causal, double scale, double dropout_p,
                                                    const OptionalTensor& seed, bool zero_empty_rows) {
  Tensor out = at::empty_like(q), logsumexp = empty_statistics(q, {q.size(1), q.size(0)});
  const Tensor starts_q = cu_seqlens_q.contiguous(), starts_k = cu_seqlens_k.contiguous();
  const Sequences sequences{starts_q.const_data_ptr<int32_t>(), starts_k.const_data_ptr<int32_t>(),
                            starts_q.size(0) - 1};
  const Options options = options_of(causal, scale, dropout_p, seed, zero_empty_rows);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_packed", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    std::vector<AttentionForward<T, A>> calls;
    calls.reserve(sequences.count);
    for (const int64_t b : sequences.by_work())
      calls.push_back({problem_of<T, A>(q, k, v, sequences, b, options), tokens<T>(out, sequences.starts_q[b]),
                       token_statistics<A>(logsumexp, sequences.starts_q[b])});
    kernels().of<T>().attention_forward(calls);
  });
  return {out, logsumexp};
}

std::tuple<Tensor, Tensor, Tensor> attention_packed_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& logsumexp, const OptionalTensor& grad_logsumexp, const Tensor& cu_seqlens_q,
    const Tensor& cu_seqlens_k, int64_t, int64_t, bool causal, double scale, double dropout_p,
    const OptionalTensor& seed, bool zero_empty_rows) {
  Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  if (q.numel() == 0 || k.numel() == 0) return {grad_q.zero_(), grad_k.zero_(), grad_v.zero_()};
  const Tensor starts_q = cu_seqlens_q.contiguous(), starts_k = cu_seqlens_k.contiguous();
  const Sequences sequences{starts_q.const_data_ptr<int32_t>(), starts_k.const_data_ptr<int32_t>(),
                            starts_q.size(0) - 1};
  const Options options = options_of(causal, scale, dropout_p, seed, zero_empty_rows);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_packed_backward", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    std::vector<AttentionBackward<T, A>> calls;
    calls.reserve(sequences.count);
    for (const int64_t b : sequences.by_work()) {
      const int64_t start_q = sequences.starts_q[b], start_k = sequences.starts_k[b];
      if (sequences.keys(b) == 0)  // no task will come by
        grad_q.narrow(0, start_q, sequences.queries(b)).zero_();
      else
        calls.push_back({problem_of<T, A>(q, k, v, sequences, b, options), tokens<const T>(grad_out, start_q),
                         tokens<const T>(out, start_q), token_statistics<const A>(logsumexp, start_q),
                         grad_logsumexp ? token_statistics<const A>(*grad_logsumexp, start_q) : View<const A>{},
                         tokens<T>(grad_q, start_q), tokens<T>(grad_k, start_k), tokens<T>(grad_v, start_k)});
    }
    kernels().of<T>().attention_backward(calls);
  });
  return {grad_q, grad_k, grad_v};
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "attention_packed_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_q, "
      "int max_k, bool causal, float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) "
      "-> (Tensor out, Tensor logsumexp)");
  m.def(
      "attention_packed_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, "
      "Tensor? grad_logsumexp, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_q, int max_k, bool causal, "
      "float scale, float dropout_p, Tensor? seed, bool zero_empty_rows) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("attention_packed_forward", &attention_packed_forward);
  m.impl("attention_packed_backward", &attention_packed_backward);
}

}  // namespace
}  // namespace transformer_fast
