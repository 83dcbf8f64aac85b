// torch.ops.transformer_fast_native.attention_decode on the CPU: a few new queries against a contiguous or paged cache.
#include "attention_tensors.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <tuple>

namespace transformer_fast {
namespace {

// How many keys each query sees, (B, 1, Lq | 1, 1): the look-ahead ends at the last query, which sees all keys.
Tensor visible_keys(const Tensor& lengths, int64_t Lq, bool causal) {
  const Tensor all = lengths.view({-1, 1, 1, 1});
  if (!causal || Lq == 1) return all;
  return (all + at::arange(1 - Lq, 1, lengths.options()).view({1, 1, -1, 1})).clamp_min_(0);
}

std::tuple<Tensor, Tensor> attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                            const Tensor& lengths, const OptionalTensor& page_table, bool causal,
                                            double scale) {
  Tensor out = at::empty_like(q), logsumexp = empty_statistics(q, q.sizes().slice(0, 3));
  if (q.numel() == 0) return {out, logsumexp};
  const Tensor visible = visible_keys(lengths.contiguous(), q.size(2), causal);
  const Tensor pages = page_table ? page_table->contiguous() : Tensor();
  // Pages in front, heads next: a cache of either kind is indexed alike.
  const Tensor k = page_table ? k_cache.transpose(1, 2) : k_cache, v = page_table ? v_cache.transpose(1, 2) : v_cache;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_decode", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    AttentionForward<T, A> call{{}, view<T>(out), statistics_view<A>(logsumexp)};
    auto& problem = call.problem;
    problem.B = q.size(0), problem.H = q.size(1), problem.Hkv = k.size(1), problem.Lq = q.size(2);
    problem.D = q.size(3), problem.Lk = lengths.max().item<int32_t>();
    problem.q = view<const T>(q), problem.k = view<const T>(k), problem.v = view<const T>(v);
    problem.lengths = view<const int32_t>(visible);
    problem.scale = static_cast<A>(scale), problem.zero_empty_rows = true;
    if (page_table) {
      problem.pages = pages.const_data_ptr<int32_t>();
      problem.pages_stride = pages.size(1), problem.page_size = k_cache.size(1);
    }
    kernels().of<T>().attention_forward(call);
  });
  return {out, logsumexp};
}

TORCH_LIBRARY_FRAGMENT(transformer_fast_native, m) {
  m.def(
      "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, bool causal, "
      "float scale) -> (Tensor out, Tensor logsumexp)");
}

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) { m.impl("attention_decode", &attention_decode); }

}  // namespace
}  // namespace transformer_fast
