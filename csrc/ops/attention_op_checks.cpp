#include "attention_op_checks.h"

#include <ATen/TensorOperators.h>

#include <algorithm>
#include <string>
#include <utility>

namespace transformer_fast::attention_op {
namespace {

using c10::SymInt;

constexpr int64_t kLargestHeadDim = 256;  // of the Triton kernels

void check_padded(const Checks& check, const AttentionParams& params, const Tensor& q, const Sizes& sizes) {
  const std::array<SymInt, 4> scores = {sizes.B, sizes.H, sizes.Lq, sizes.Lk};
  if (params.keep) check("keep", params.keep).type({at::kBool}).on_device_of(q).broadcasts_to(scores);
  if (params.bias) check("bias", params.bias).floating().on_device_of(q).broadcasts_to(scores);
  if (params.key_keep)
    check("key_keep", params.key_keep).type({at::kBool}).on_device_of(q).broadcasts_to({sizes.B, sizes.H, 1, sizes.Lk});
  if (const OptionalTensor& lengths = params.lengths) {
    check("lengths", lengths).type({at::kLong, at::kInt, at::kShort, at::kChar, at::kByte}).on_device_of(q);
    if (lengths->dim() == 2)
      check("lengths", lengths).broadcasts_to({sizes.B, sizes.Lq});
    else
      check("lengths", lengths).broadcasts_to({sizes.B});
    if (lengths->is_cpu())
      check_lengths(check, *lengths, sizes.Lk.expect_int(), "Lk = ", "",
                    sizes.Lq == sizes.Lk ? sizes.H.expect_int() : 0);
  }
}

// The values of a contiguous tensor.
template <typename T>
at::ArrayRef<T> values(const Tensor& tensor) {
  return {tensor.const_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

// Raises unless the sequences cover the tokens: from 0 on and rising to their number, at most `longest` each.
void check_boundaries(const Checks& check, const char* name, at::ArrayRef<int32_t> starts, int64_t tokens,
                      int64_t longest) {
  const at::ArrayRef<int32_t> shown = starts.slice(0, std::min<size_t>(starts.size(), 16));
  const char* more = starts.size() > shown.size() ? " ..." : "";
  check.require(starts.front() == 0 && starts.back() == tokens && std::is_sorted(starts.begin(), starts.end()), name,
                " must rise from 0 to the ", tokens, " tokens, got ", shown, more);
  for (size_t b = 0; b + 1 < starts.size(); ++b)
    check.require(starts[b + 1] - starts[b] <= longest, name, " must have sequences of at most ", longest,
                  " tokens, as max_seqlen_", name + std::string_view("cu_seqlens_").size(), " says, got ",
                  starts[b + 1] - starts[b]);
}

void check_packed(const Checks& check, const AttentionParams& params, const Tensor& q, const Tensor& k,
                  const Sizes& sizes) {
  const PackedBatch& packed = params.packed;
  check("cu_seqlens_k", packed.cu_seqlens_k).required("with cu_seqlens_q");
  for (const auto& [name, part] :
       {std::pair("keep", params.keep), std::pair("key_keep", params.key_keep), std::pair("lengths", params.lengths)})
    check.require(!part, name, " must be None for a packed batch");
  const Tensor &starts_q = *packed.cu_seqlens_q, &starts_k = *packed.cu_seqlens_k;
  for (const auto& [name, starts] : {std::pair("cu_seqlens_q", starts_q), std::pair("cu_seqlens_k", starts_k)})
    check(name, starts).type({at::kInt}).on_device_of(q).sizes({sizes.B + 1});
  check.require(holds(sizes.Lq.sym_ge(0)), "max_seqlen_q must be at least 0, got ", sizes.Lq);
  check.require(holds(sizes.Lk.sym_ge(0)), "max_seqlen_k must be at least 0, got ", sizes.Lk);
  check("seqused_k", packed.seqused_k).type({at::kInt}).on_device_of(q).sizes({sizes.B});
  check.require(params.bias.has_value() == packed.bias_starts.has_value(),
                "bias and bias_starts must both be tensors, or both None");
  check("bias_starts", packed.bias_starts).type({at::kLong}).on_device_of(q).sizes({sizes.B + 1});
  if (const OptionalTensor& bias = params.bias) {
    check("bias", bias).floating().on_device_of(q).rank(2, "(heads, pairs)");
    check("bias", bias).broadcasts_to({sizes.H, bias->sym_size(1)}).require(bias->is_contiguous(), "contiguous");
  }
  if (!starts_q.is_cpu()) return;

  const Tensor dense_q = starts_q.contiguous(), dense_k = starts_k.contiguous();
  const auto queries = values<int32_t>(dense_q), keys = values<int32_t>(dense_k);
  check_boundaries(check, "cu_seqlens_q", queries, q.size(0), sizes.Lq.expect_int());
  check_boundaries(check, "cu_seqlens_k", keys, k.size(0), sizes.Lk.expect_int());
  const Tensor used = packed.seqused_k ? packed.seqused_k->contiguous() : Tensor();
  const Tensor pairs = packed.bias_starts ? packed.bias_starts->contiguous() : Tensor();
  for (size_t b = 0; (used.defined() || pairs.defined()) && b + 1 < queries.size(); ++b) {
    const int64_t Lq = queries[b + 1] - queries[b], Lk = keys[b + 1] - keys[b];
    if (used.defined()) {
      const int64_t count = values<int32_t>(used)[b];
      check.require(count >= 0 && count <= Lk, "seqused_k must lie in [0, ", Lk, "], the keys of sequence ", b,
                    ", got ", count);
    }
    if (pairs.defined()) {
      const int64_t start = values<int64_t>(pairs)[b], own = Lq * Lk, all = params.bias->size(1);
      check.require(start >= 0 && own <= all && start <= all - own, "bias_starts must keep the ", own,
                    " pairs of sequence ", b, " in the ", all, " of bias, got ", start);
    }
  }
}

}  // namespace

void check_head_dims(const Checks& check, const Tensor& q, const char* keys, const Tensor& k) {
  const SymInt D = q.sym_size(-1);
  check("q", q).require(holds(D.sym_ge(1)), "of a head_dim of at least 1");
  check(keys, k).require(holds(k.sym_size(-1).sym_eq(D)), "of the head_dim of q, ", D);
}

void check_heads(const Checks& check, const Tensor& q, const char* keys, const Tensor& k, const char* values,
                 const OptionalTensor& v, int64_t key_heads) {
  const SymInt H = q.sym_size(1), Hkv = k.sym_size(key_heads);
  check(keys, k).type_of(q).on_device_of(q);
  check_head_dims(check, q, keys, k);
  check(keys, k).require(holds(Hkv.sym_ge(1)), "of one head or more");
  check("q", q).require(holds((H % Hkv).sym_eq(0)), "of heads that are a multiple of those of k and v, ", Hkv);
  check(values, v).type_of(q).on_device_of(q);
}

void check_special(const Checks& check, const Tensor& q, const Sizes& sizes, c10::SymIntArrayRef queries,
                   c10::SymIntArrayRef keys, const OptionalTensor& distance_bias, const OptionalTensor& query_ids,
                   const OptionalTensor& key_ids, const OptionalTensor& sinks, std::optional<double> softcap) {
  const at::ScalarType wide = arithmetic_type(q);
  if (distance_bias) {
    const SymInt batches = q.dim() == 3 ? SymInt(1) : sizes.B, distances = sizes.Lq + sizes.Lk - 1;
    check("distance_bias", distance_bias).type({wide}).on_device_of(q).rank(3, "(B, H, distances)").unit_stride();
    check("distance_bias", distance_bias).broadcasts_to({batches, sizes.H, distance_bias->sym_size(2)});
    check("distance_bias", distance_bias)
        .require(holds(distance_bias->sym_size(2).sym_ge(distances)), "of ", distances, " distances");
  }
  check.require(query_ids.has_value() == key_ids.has_value(),
                "query_ids and key_ids must both be tensors, or both None");
  if (query_ids) {
    check("query_ids", query_ids).type({at::kInt}).on_device_of(q).broadcasts_to(queries).unit_stride();
    check("key_ids", key_ids).type({at::kInt}).on_device_of(q).broadcasts_to(keys).unit_stride();
    check("query_ids", query_ids).require(holds(query_ids->sym_size(-1).sym_eq(queries.back())), "an id per query");
    check("key_ids", key_ids).require(holds(key_ids->sym_size(-1).sym_eq(keys.back())), "an id per key");
  }
  if (sinks) check("sinks", sinks).type({wide}).on_device_of(q).sizes({sizes.H}).unit_stride();
  check.require(!softcap || *softcap > 0, "softcap must be above 0 or None, got ", softcap.value_or(0));
}

void check_arguments(const Checks& check, const AttentionParams& params, const Tensor& q, const Tensor& k,
                     const OptionalTensor& v) {
  const bool packed = params.is_packed();
  const int64_t rank = packed ? 3 : 4;
  check("q", q).floating().rank(rank, packed ? "(Tq, H, D)" : "(B, H, Lq, D)");
  check("k", k).rank(rank, packed ? "(Tk, Hkv, D)" : "(B, Hkv, Lk, D)");
  check_heads(check, q, "k", k, "v", v, 1);
  if (v) {
    c10::SymDimVector sizes(k.sym_sizes());
    sizes.back() = v->sym_size(-1);
    check("v", v).rank(rank, packed ? "(Tk, Hkv, Dv)" : "(B, Hkv, Lk, Dv)").sizes(sizes);
  }
  if (params.by_triton) {
    check_head_dim(check, "q", q);
    if (v) check_head_dim(check, "v", *v);
  }
  check.dropout(q, params.dropout_p, params.seed, "dropout_p", /*on_host=*/true);
  if (packed) {
    check("cu_seqlens_q", params.packed.cu_seqlens_q).rank(1, "(sequences + 1,)");
    const SymInt boundaries = params.packed.cu_seqlens_q->sym_size(0);
    check("cu_seqlens_q", params.packed.cu_seqlens_q).require(holds(boundaries.sym_ge(1)), "(sequences + 1,)");
    const Sizes sizes{boundaries - 1, q.sym_size(1), params.packed.max_seqlen_q, params.packed.max_seqlen_k};
    check_packed(check, params, q, k, sizes);
    check_special(check, q, sizes, {q.sym_size(0)}, {k.sym_size(0)}, params.distance_bias, params.query_ids,
                  params.key_ids, params.sinks, params.softcap);
  } else {
    const Sizes sizes{q.sym_size(0), q.sym_size(1), q.sym_size(2), k.sym_size(2)};
    check("k", k).require(holds(k.sym_size(0).sym_eq(sizes.B)), "of the batch size of q, ", sizes.B);
    for (const OptionalTensor* part :
         {&params.packed.cu_seqlens_k, &params.packed.seqused_k, &params.packed.bias_starts})
      check.require(!*part, "cu_seqlens_k, seqused_k and bias_starts must be None without cu_seqlens_q");
    check_padded(check, params, q, sizes);
    check_special(check, q, sizes, {sizes.B, sizes.Lq}, {sizes.B, sizes.Lk}, params.distance_bias, params.query_ids,
                  params.key_ids, params.sinks, params.softcap);
  }
}

void check_statistics(const Checks& check, const char* name, const OptionalTensor& statistics, const Tensor& q) {
  check(name, statistics).type({arithmetic_type(q)}).on_device_of(q);
  if (q.dim() == 3)
    check(name, statistics).sizes({q.sym_size(1), q.sym_size(0)});
  else
    check(name, statistics).sizes(q.sym_sizes().slice(0, 3));
}

void check_lengths(const Checks& check, const Tensor& lengths, int64_t most, const char* before, const char* behind,
                   int64_t heads) {
  if (lengths.numel() == 0) return;
  const bool narrow = at::elementSize(lengths.scalar_type()) < 4;
  const Tensor dense = (narrow ? lengths.to(at::kInt) : lengths).contiguous();
  const auto range = [&]<typename T>(const T* first) {
    const auto [least, largest] = std::minmax_element(first, first + dense.numel());
    return std::pair<int64_t, int64_t>(*least, *largest);
  };
  const auto [low, high] = dense.scalar_type() == at::kLong ? range(dense.const_data_ptr<int64_t>())
                                                            : range(dense.const_data_ptr<int32_t>());
  if (low >= 0 && high <= most) return;
  const std::string hint = c10::str("; q with ", heads, " heads looks like (B, L, H, D), expected (B, H, L, D)");
  check.require(false, "lengths must lie in [0, ", before, most, "]", behind, ", got ", low, " to ", high,
                low >= 0 && high <= heads ? hint : "");
}

void check_head_dim(const Checks& check, const char* name, const Tensor& x) {
  check(name, x).require(holds(x.sym_size(-1).sym_le(kLargestHeadDim)), "of a head_dim up to ", kLargestHeadDim,
                         " for the Triton kernels (backend(\"reference\") takes any)");
}

}  // namespace transformer_fast::attention_op
