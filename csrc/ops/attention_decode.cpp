// Attention of a few new queries to a contiguous or paged cache: the op of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/attention_decode.py documents the arguments. The op has no gradient.
#include "attention_decode.h"

#include "attention_arguments.h"
#include "attention_op_checks.h"
#include "attention_tensors.h"
#include "op.h"
#include "python_hooks.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <tuple>

namespace transformer_fast {
namespace decode_op {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr Checks kChecks{"attention_decode"};

// A sequence and one of its pages.
struct Page {
  int64_t sequence, number;
};

// The first page in use that does not exist, of a page table on the CPU.
std::optional<Page> missing_page(const DecodeParams& call) {
  const Tensor table = call.page_table->contiguous(), lengths = call.lengths.contiguous();
  const int64_t pages = call.k.size(0), page_size = call.k.size(1), columns = table.size(1);
  const int32_t *const numbers = table.const_data_ptr<int32_t>(), *const held = lengths.const_data_ptr<int32_t>();
  for (int64_t b = 0; b < lengths.numel(); ++b)
    for (int64_t page = 0; page * page_size < held[b]; ++page)
      if (const int32_t number = numbers[b * columns + page]; number < 0 || number >= pages) return Page{b, number};
  return std::nullopt;
}

void check(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
           const OptionalTensor& page_table, const OptionalSymInt& causal, const OptionalSymInt& window,
           std::optional<double>, const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
           const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap) {
  const char* layout = page_table ? "(pages, page_size, Hkv, D) with a page table" : "(B, Hkv, S, D)";
  kChecks("q", q).floating().rank(4, "(B, H, Lq, D)");
  kChecks("k_cache", k_cache).rank(4, layout);
  attention_op::check_heads(kChecks, q, "k_cache", k_cache, "v_cache", v_cache, page_table ? 2 : 1);
  kChecks("v_cache", v_cache).sizes(k_cache.sym_sizes());
  if (runs_on_triton(q)) attention_op::check_head_dim(kChecks, "q", q);
  const c10::SymInt B = q.sym_size(0);
  kChecks("page_table", page_table).type({at::kInt}).on_device_of(q).rank(2, "(B, pages)");
  kChecks("lengths", lengths).integer().on_device_of(q).sizes({B});
  c10::SymInt capacity = k_cache.sym_size(2);
  if (page_table) {
    kChecks("page_table", page_table).sizes({B, page_table->sym_size(1)});
    capacity = page_table->sym_size(1) * k_cache.sym_size(1);
  } else {
    kChecks("k_cache", k_cache).sizes({B, k_cache.sym_size(1), k_cache.sym_size(2), k_cache.sym_size(3)});
  }
  attention_op::check_special(kChecks, q, {B, q.sym_size(1), q.sym_size(2), capacity}, {B, q.sym_size(2)},
                              {B, capacity}, distance_bias, query_ids, key_ids, sinks, softcap);
  if (!lengths.is_cpu()) return;
  attention_op::check_lengths(kChecks, lengths, capacity.expect_int(), "", ", the keys that the cache can hold");
  if (!page_table) return;
  const auto missing = missing_page({q, k_cache, v_cache, lengths.to(at::kInt), page_table, causal, window, 1.0});
  kChecks.require(!missing, "page_table must name pages in [0, ", k_cache.size(0), ") of k_cache, got ",
                  missing ? missing->number : 0, " for sequence ", missing ? missing->sequence : 0);
}

TwoTensors compute(const DecodeParams& params) {
  const Tensor &q = params.q, k = params.heads_first(params.k), v = params.heads_first(params.v);
  const Tensor out = empty_like_on_cpu(q), logsumexp = empty_statistics(q, q.sizes().slice(0, 3));
  if (q.numel() == 0) return {out, logsumexp};
  const Tensor lengths = params.lengths.contiguous(),
               pages = params.page_table ? params.page_table->contiguous() : Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_decode", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    AttentionForward<T, A> call{{}, view<T>(out), statistics_view<A>(logsumexp)};
    auto& p = call.params;
    set_tensors(p, q, k, v);
    p.Lk = lengths.max().item<int32_t>();
    p.lengths = lengths_view(lengths), p.bottom_right = true;
    set_diagonals(p, known(params.causal), known(params.window));
    p.distance_bias = distance_view<const A>(params.distance_bias, params.capacity() - 1);
    if (params.sinks) p.sinks = params.sinks->const_data_ptr<A>();
    p.query_ids = ids_view(params.query_ids), p.key_ids = ids_view(params.key_ids);
    p.softcap = static_cast<A>(params.softcap.value_or(0));
    p.scale = static_cast<A>(params.scale), p.zero_empty_rows = true;
    if (pages.defined()) {
      p.pages = pages.const_data_ptr<int32_t>();
      p.pages_stride = pages.size(1), p.page_size = params.k.size(1);
    }
    kernels().of<T>().attention_forward({&call, 1});
  });
  return {out, logsumexp};
}

TwoTensors forward(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                   const OptionalTensor& page_table, OptionalSymInt causal, OptionalSymInt window,
                   std::optional<double> scale, const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
                   const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap) {
  const auto dense = [](const Tensor& x) { return attention_op::is_dense(x) ? x : x.contiguous(); };
  const Tensor counts = attention_op::in_int32(lengths);
  const DecodeParams params{
      dense(q),      dense(k_cache), dense(v_cache), counts,
      page_table,    causal,         window,         scale ? *scale : attention_op::default_scale(q),
      distance_bias, query_ids,      key_ids,        sinks,
      softcap};
  return runs_on_triton(q) ? python_hooks().launch_decode(params) : compute(params);
}

template <typename Signature>
struct Layers;
template <typename... Rest>
struct Layers<TwoTensors(const Tensor&, const Tensor&, const Tensor&, Rest...)> {
  static TwoTensors meta(const Tensor& q, const Tensor&, const Tensor&, Rest...) {
    return {attention_op::is_dense(q) ? at::empty_like(q) : meta_tensor(q, q.sym_sizes()),
            meta_tensor(q, q.sym_sizes().slice(0, 3), arithmetic_type(q))};
  }

  static TwoTensors recorded(bool direct, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Rest... rest) {
    TORCH_CHECK(!eager::needs_gradient(q, k_cache, v_cache),
                "attention_decode has no gradient: call it under torch.no_grad(), or use transformer_fast.attention");
    return below_autograd<"attention_decode", forward>(direct, q, k_cache, v_cache, rest...);
  }

  template <c10::DeviceType device>
  static TwoTensors autocast(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, Rest... rest) {
    const NoAutocast<device> no_autocast;
    const auto cast = [](const Tensor& tensor) { return transformer_fast::autocast<device>(tensor); };
    return op<"attention_decode", forward>()(cast(q), cast(k_cache), cast(v_cache), rest...);
  }
};
using Decode = Layers<decltype(forward)>;

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  define_op<"attention_decode", check, forward, Decode::meta, Decode::recorded, eager::DoorOptions{.casts = 3}>(
      m,
      "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, SymInt? causal, SymInt? window, "
      "float? scale=None, Tensor? distance_bias=None, Tensor? query_ids=None, Tensor? key_ids=None, "
      "Tensor? sinks=None, float? softcap=None) -> (Tensor out, Tensor logsumexp)");
}
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) { m.impl("attention_decode", Decode::autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) { m.impl("attention_decode", Decode::autocast<at::kCUDA>); }

}  // namespace decode_op
}  // namespace transformer_fast
