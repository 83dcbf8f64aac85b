// The eager fast paths of attention, of padded and of packed batches.
#include "attention.h"
#include "attention_checks.h"
#include "operator.h"

#include <algorithm>
#include <string>

namespace transformer_fast {
namespace eager {
namespace {

// The length of the longest sequence; -1 if it exceeds a given `most`, or if cu_seqlens, int32 (B + 1,), does not rise
// from 0 to the number of tokens. On a GPU, where reading would wait for the device, the result is `most`, unchecked.
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

// Arguments of every call; scale 0 means the default, which run() computes.
AttentionParams read_options(Arguments& arguments, bool by_triton, py::handle causal, py::handle window,
                             py::handle scale, py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  AttentionParams params;
  params.causal = arguments.optional_integer(causal), params.window = arguments.optional_integer(window);
  params.scale = scale.is_none() ? 0 : arguments.number(scale);
  params.dropout_p = arguments.probability(dropout_p);
  params.seed = arguments.optional_tensor(seed);
  params.zero_empty_rows = is_text(empty_rows, "zero");
  arguments.require(params.zero_empty_rows || is_text(empty_rows, "uniform"));
  arguments.require(params.dropout_p == 0 || params.seed);
  params.by_triton = by_triton;
  return params;
}

py::object run(const Tensor& q, const Tensor& k, const Tensor& v, AttentionParams params, py::handle scale) {
  if (scale.is_none()) params.scale = default_scale(q);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      at::autocast::get_autocast_dispatch_key_from_device_type(q.device().type()));
  Tensor out;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (!params.by_triton) no_gil.emplace();
    out = attention_op::recorded(true, 1, params, q, k, v).out;
  }
  return wrap(out);
}

}  // namespace

py::object attention(bool by_triton, py::handle q_, py::handle k_, py::handle v_, py::handle keep, py::handle key_keep,
                     py::handle lengths, py::handle bias, py::handle causal, py::handle window, py::handle scale,
                     py::handle dropout_p, py::handle seed, py::handle empty_rows) {
  Arguments arguments(by_triton);
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  AttentionParams params = read_options(arguments, by_triton, causal, window, scale, dropout_p, seed, empty_rows);
  params.keep = arguments.optional_tensor(keep), params.key_keep = arguments.optional_tensor(key_keep);
  params.lengths = arguments.optional_tensor(lengths), params.bias = arguments.optional_floating(bias);
  if (!arguments.ok() || q.dim() != 4 || k.dim() != 4 || v.dim() != 4) return py::none();
  const int64_t B = q.size(0), Lq = q.size(2), Lk = k.size(2);
  if (k.size(0) != B || !inputs_fit(q, k, v, k.size(1))) return py::none();
  if (by_triton && (!triton_takes(q) || needs_gradient(params.bias))) return py::none();
  for (const OptionalTensor* part : {&params.keep, &params.key_keep, &params.bias})
    if (*part && !(broadcasts(**part, q, k) && (*part)->device() == q.device())) return py::none();
  if (params.key_keep && (params.key_keep->size(2) != 1 || params.key_keep->size(3) != Lk)) return py::none();
  if (OptionalTensor& given = params.lengths) {  // (B,) or (B, Lq)
    if (given->dim() < 1 || given->dim() > 2 || given->size(0) != B || (given->dim() == 2 && given->size(1) != Lq))
      return py::none();
    if (given->device() != q.device() || (by_triton && given->scalar_type() != at::kInt)) return py::none();
    if (!by_triton) given = int_lengths(*given, Lk);
    if (!given) return py::none();
  }
  return run(q, k, v, std::move(params), scale);
}

py::object attention_packed(bool by_triton, py::handle q_, py::handle k_, py::handle v_, py::handle cu_seqlens_q,
                            py::handle cu_seqlens_k, py::handle max_seqlen_q, py::handle max_seqlen_k,
                            py::handle causal, py::handle window, py::handle scale, py::handle dropout_p,
                            py::handle seed, py::handle empty_rows) {
  Arguments arguments(by_triton);
  const Tensor q = arguments.floating(q_), k = arguments.floating(k_), v = arguments.floating(v_);
  const Tensor starts_q = arguments.tensor(cu_seqlens_q), starts_k = arguments.tensor(cu_seqlens_k);
  AttentionParams params = read_options(arguments, by_triton, causal, window, scale, dropout_p, seed, empty_rows);
  const std::optional<int64_t> most_q = arguments.optional_integer(max_seqlen_q),
                               most_k = arguments.optional_integer(max_seqlen_k);
  if (!arguments.ok() || q.dim() != 3 || k.dim() != 3 || v.dim() != 3) return py::none();
  if (!inputs_fit(q, k, v, k.size(1)) || (by_triton && !triton_takes(q))) return py::none();
  const int64_t longest_q = longest_sequence(starts_q, q, most_q), longest_k = longest_sequence(starts_k, k, most_k);
  if (longest_q < 0 || longest_k < 0 || starts_q.sizes() != starts_k.sizes()) return py::none();
  params.packed = {starts_q, starts_k, longest_q, longest_k, {}, {}};
  return run(q, k, v, std::move(params), scale);
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def("attention", &attention);
  m.def("attention_packed", &attention_packed);
}

}  // namespace eager
}  // namespace transformer_fast
