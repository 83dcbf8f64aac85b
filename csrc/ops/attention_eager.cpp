// The eager fast paths of attention, of padded and of packed batches.
#include "attention_checks.h"
#include "attention_op.h"
#include "eager.h"
#include "operator.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace transformer_fast {
namespace eager {
namespace {

bool shapes_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 4 || k.dim() != 4 || v.sizes() != k.sizes()) return false;
  return q.size(0) == k.size(0) && q.size(3) == k.size(3) && q.size(3) > 0 && k.size(1) > 0 &&
         q.size(1) % k.size(1) == 0 && q.stride(3) == 1 && k.stride(3) == 1 && v.stride(3) == 1;
}

bool packed_shapes_fit(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.dim() != 3 || k.dim() != 3 || v.sizes() != k.sizes()) return false;
  return q.size(2) == k.size(2) && q.size(2) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0 && q.stride(2) == 1 &&
         k.stride(2) == 1 && v.stride(2) == 1;
}

// The length of the longest sequence, at most `most` where that is given; -1 unless cu_seqlens, int32 (B + 1,), rises
// from 0 to the number of tokens. On a GPU, where looking would wait for it, `most` is believed.
int64_t longest_sequence(const Tensor& cu_seqlens, const Tensor& tokens, std::optional<int64_t> most) {
  if (cu_seqlens.scalar_type() != at::kInt || cu_seqlens.dim() != 1 || cu_seqlens.numel() == 0 ||
      !cu_seqlens.is_contiguous() || cu_seqlens.device() != tokens.device())
    return -1;
  if (!cu_seqlens.is_cpu()) return most.value_or(-1);
  const int32_t* const starts = cu_seqlens.const_data_ptr<int32_t>();
  const int64_t last = cu_seqlens.numel() - 1;
  int64_t longest = 0;
  for (int64_t i = 0; i < last; ++i) {
    if (starts[i + 1] < starts[i]) return -1;
    longest = std::max<int64_t>(longest, starts[i + 1] - starts[i]);
  }
  if (starts[0] != 0 || starts[last] != tokens.size(0) || longest > most.value_or(longest)) return -1;
  return most.value_or(longest);
}

bool broadcasts(const Tensor& mask, const Tensor& q, const Tensor& k) {
  const int64_t full[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  if (mask.dim() != 4) return false;
  for (int dim = 0; dim < 4; ++dim)
    if (mask.size(dim) != 1 && mask.size(dim) != full[dim]) return false;
  return true;
}

// int32 lengths (B,) or (B, Lq) in [0, Lk], or nothing.
OptionalTensor normal_lengths(const Tensor& lengths, int64_t B, int64_t Lq, int64_t Lk) {
  if (lengths.dim() < 1 || lengths.dim() > 2 || lengths.size(0) != B || (lengths.dim() == 2 && lengths.size(1) != Lq))
    return std::nullopt;
  return int_lengths(lengths, Lk);
}

// Whether lengths are what `normal_lengths` makes of them, but for their values, which may be on a GPU.
bool are_normal(const Tensor& lengths, int64_t B, int64_t Lq) {
  return lengths.scalar_type() == at::kInt && lengths.dim() >= 1 && lengths.dim() <= 2 && lengths.size(0) == B &&
         (lengths.dim() == 1 || lengths.size(1) == Lq);
}

// What the public function was given; q is undefined where the call must go by the dispatcher.
struct Call {
  Tensor q, k, v;
  AttentionParams params;
};

// The scale (0 for the default, which needs q), the dropout with its seed, and the empty rows.
void read_options(Arguments& arguments, AttentionParams& params, py::handle scale, py::handle dropout_p,
                  py::handle seed, py::handle empty_rows) {
  params.scale = scale.is_none() ? 0 : arguments.number(scale);
  params.dropout_p = arguments.probability(dropout_p);
  if (PyLong_CheckExact(seed.ptr()))
    params.seed_value = arguments.integer(seed);
  else
    params.seed = arguments.optional_tensor(seed);
  params.zero_empty_rows = is_text(empty_rows, "zero");
  arguments.require(params.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(params.dropout_p == 0 || params.seed || params.seed_value);
}

Call read(Arguments& arguments, py::handle q_, py::handle k_, py::handle v_, py::handle keep_, py::handle key_keep_,
          py::handle lengths_, py::handle bias_, py::handle causal_, py::handle scale, py::handle dropout_p,
          py::handle seed, py::handle empty_rows) {
  Call call{arguments.floating(q_), arguments.floating(k_), arguments.floating(v_), {}};
  auto& [q, k, v, params] = call;
  params.keep = arguments.optional_tensor(keep_);
  params.key_keep = arguments.optional_tensor(key_keep_);
  params.lengths = arguments.optional_tensor(lengths_);
  params.bias = arguments.optional_floating(bias_);
  params.causal = arguments.optional_integer(causal_);
  read_options(arguments, params, scale, dropout_p, seed, empty_rows);
  if (!arguments.ok() || !shapes_fit(q, k, v) || !alike(q, k, v)) return {};
  const at::Device device = q.device();
  for (const OptionalTensor* part : {&params.keep, &params.key_keep, &params.bias})
    if (*part) arguments.require(broadcasts(**part, q, k) && (*part)->device() == device);
  if (params.key_keep) arguments.require(params.key_keep->size(2) == 1 && params.key_keep->size(3) == k.size(2));
  if (params.lengths) arguments.require(params.lengths->device() == device);
  if (!arguments.ok()) return {};
  if (scale.is_none()) params.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
  return call;
}

Tensor run(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionParams& params) {
  std::optional<py::gil_scoped_release> no_gil;
  if (is_native(params.backend)) no_gil.emplace();
  return attention_op::recorded(true, 1, params, q, k, v).out;
}

}  // namespace

py::object attention(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep, py::handle lengths,
                     py::handle bias, py::handle causal, py::handle scale, py::handle dropout_p, py::handle seed,
                     py::handle empty_rows) {
  Arguments arguments;
  Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || (call.params.dropout_p > 0 && !call.params.seed)) return py::none();
  if (call.params.lengths) {
    call.params.lengths = normal_lengths(*call.params.lengths, call.q.size(0), call.q.size(2), call.k.size(2));
    if (!call.params.lengths) return py::none();
  }
  return wrap(run(call.q, call.k, call.v, call.params));
}

py::object attention_launched(py::handle q, py::handle k, py::handle v, py::handle keep, py::handle key_keep,
                              py::handle lengths, py::handle bias, py::handle causal, py::handle scale,
                              py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(true);
  Call call = read(arguments, q, k, v, keep, key_keep, lengths, bias, causal, scale, dropout_p, seed, empty_rows);
  if (!call.q.defined() || !launchable(call.q)) return py::none();
  if (needs_gradient(call.params.bias)) return py::none();
  if (call.params.lengths && !are_normal(*call.params.lengths, call.q.size(0), call.q.size(2))) return py::none();
  call.params.backend = "triton";
  return wrap(run(call.q, call.k, call.v, call.params));
}

py::object attention_packed(bool launched, py::handle q_, py::handle k_, py::handle v_, py::handle cu_seqlens_q,
                            py::handle cu_seqlens_k, py::handle max_q, py::handle max_k, py::handle causal,
                            py::handle scale, py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(launched);
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  const Tensor starts_q = arguments.tensor(cu_seqlens_q), starts_k = arguments.tensor(cu_seqlens_k);
  AttentionParams params;
  if (arguments.boolean(causal)) params.causal = 0;
  read_options(arguments, params, scale, dropout_p, seed, empty_rows);
  const std::optional<int64_t> most_q = arguments.optional_integer(max_q), most_k = arguments.optional_integer(max_k);
  if (!arguments.ok() || !packed_shapes_fit(q, k, v) || !alike(q, k, v)) return py::none();
  if (launched ? !launchable(q) : params.dropout_p > 0 && !params.seed) return py::none();
  const int64_t longest_q = longest_sequence(starts_q, q, most_q), longest_k = longest_sequence(starts_k, k, most_k);
  if (longest_q < 0 || longest_k < 0 || starts_q.sizes() != starts_k.sizes()) return py::none();
  params.packed = {starts_q, starts_k, longest_q, longest_k};
  if (scale.is_none()) params.scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
  if (launched) params.backend = "triton";
  return wrap(run(q, k, v, params));
}

}  // namespace eager
}  // namespace transformer_fast
