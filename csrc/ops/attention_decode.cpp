// Attention of a few new queries to a contiguous or paged cache: the op of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/attention_decode.py documents and checks what it takes. It has no gradient.
#include "../triton/launch_cache.h"
#include "../triton/python_function.h"
#include "attention_checks.h"
#include "attention_tensors.h"
#include "eager.h"
#include "operator.h"

#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <cmath>
#include <string>
#include <tuple>

namespace transformer_fast {
namespace {

// How many keys each query sees, (B, 1, Lq | 1, 1): the look-ahead ends at the last query, which sees all keys.
Tensor visible_keys(const Tensor& lengths, int64_t Lq, bool causal) {
  const Tensor all = lengths.view({-1, 1, 1, 1});
  if (!causal || Lq == 1) return all;
  return (all + at::arange(1 - Lq, 1, lengths.options()).view({1, 1, -1, 1})).clamp_min_(0);
}

AttentionResult launch_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                              const OptionalTensor& page_table, bool causal, double scale) {
  static const PythonFunction launcher("transformer_fast.triton.attention.decode", "attention_decode");
  const pybind11::gil_scoped_acquire gil;
  pybind11::dict keywords;
  keywords["lengths"] = PythonFunction::object(lengths), keywords["page_table"] = PythonFunction::object(page_table);
  keywords["causal"] = causal, keywords["scale"] = scale;
  const auto [out, logsumexp] = PythonFunction::unpacked<2>(launcher.call(keywords, q, k_cache, v_cache));
  return {out, logsumexp, {}, {}};
}

}  // namespace

AttentionResult attention_decode(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                                 const OptionalTensor& page_table, bool causal, double scale) {
  const AttentionResult result{at::empty_like(q), empty_statistics(q, q.sizes().slice(0, 3)), {}, {}};
  if (q.numel() == 0) return result;
  const Tensor visible = visible_keys(lengths.contiguous(), q.size(2), causal);
  const Tensor pages = page_table ? page_table->contiguous() : Tensor();
  // Pages in front, heads next: a cache of either kind is indexed alike.
  const Tensor k = page_table ? k_cache.transpose(1, 2) : k_cache, v = page_table ? v_cache.transpose(1, 2) : v_cache;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention_decode", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    AttentionForward<T, A> call{{}, view<T>(result.out), statistics_view<A>(result.logsumexp)};
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
  return result;
}

namespace decode_op {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr const char* kSchema =
    "attention_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, bool causal, "
    "float scale, str backend) -> (Tensor out, Tensor logsumexp)";

TwoTensors forward(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                   const OptionalTensor& page_table, bool causal, double scale, std::string_view backend) {
  const auto compute = is_native(backend) ? attention_decode : launch_decode;
  const AttentionResult result = compute(q, k_cache, v_cache, lengths, page_table, causal, scale);
  return {result.out, result.logsumexp};
}

TwoTensors forward_meta(const Tensor& q, const Tensor& /* k_cache */, const Tensor& /* v_cache */,
                        const Tensor& /* lengths */, const OptionalTensor& /* page_table */, bool /* causal */,
                        double /* scale */, std::string_view /* backend */) {
  return {at::empty_like(q), meta_tensor(q, q.sym_sizes().slice(0, 3), arithmetic_type(q))};
}

TwoTensors forward_autograd(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                            const OptionalTensor& page_table, bool causal, double scale, std::string_view backend) {
  TORCH_CHECK(!eager::needs_gradient(q, k_cache, v_cache),
              "attention_decode has no gradient: call it under torch.no_grad(), or use transformer_fast.attention");
  return below_autograd<"attention_decode", forward>(false, q, k_cache, v_cache, lengths, page_table, causal, scale,
                                                     backend);
}

template <c10::DeviceType device>
TwoTensors forward_autocast(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& lengths,
                            const OptionalTensor& page_table, bool causal, double scale, std::string_view backend) {
  const NoAutocast<device> no_autocast;
  return op<"attention_decode", forward>()(autocast<device>(q), autocast<device>(k_cache), autocast<device>(v_cache),
                                           lengths, page_table, causal, scale, backend);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) { m.def(kSchema); }
TORCH_LIBRARY_IMPL(transformer_fast, CompositeExplicitAutograd, m) { m.impl("attention_decode", forward); }
TORCH_LIBRARY_IMPL(transformer_fast, Meta, m) { m.impl("attention_decode", forward_meta); }
TORCH_LIBRARY_IMPL(transformer_fast, Autograd, m) { m.impl("attention_decode", forward_autograd); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCPU, m) { m.impl("attention_decode", forward_autocast<at::kCPU>); }
TORCH_LIBRARY_IMPL(transformer_fast, AutocastCUDA, m) { m.impl("attention_decode", forward_autocast<at::kCUDA>); }

}  // namespace decode_op

// The eager fast path.
namespace eager {
namespace {

struct DecodeCall {
  Tensor q, k, v, lengths;  // the cache (B, Hkv, S, D), or with a page table (pages, page_size, Hkv, D)
  OptionalTensor page_table;
  bool causal;
  double scale;

  int64_t key_heads() const { return k.size(page_table ? 2 : 1); }
  int64_t capacity() const { return page_table ? page_table->size(1) * k.size(1) : k.size(2); }
};

bool shapes_fit(const DecodeCall& call) {
  const Tensor &q = call.q, &k = call.k, &v = call.v, &lengths = call.lengths;
  if (q.dim() != 4 || k.dim() != 4 || v.sizes() != k.sizes() || k.size(3) != q.size(3)) return false;
  if (q.stride(3) != 1 || k.stride(3) != 1 || v.stride(3) != 1) return false;
  if (call.key_heads() == 0 || q.size(1) % call.key_heads() != 0) return false;
  const int64_t B = q.size(0);
  if (lengths.dim() != 1 || lengths.size(0) != B || lengths.device() != q.device()) return false;
  if (!call.page_table) return k.size(0) == B;
  const Tensor& pages = *call.page_table;
  return pages.dim() == 2 && pages.size(0) == B && pages.scalar_type() == at::kInt && pages.stride(1) == 1 &&
         pages.device() == q.device();
}

// Whether the pages that hold keys are there, which is looked at on the CPU only.
bool pages_exist(const DecodeCall& call) {
  if (!call.page_table || !call.page_table->is_cpu()) return true;
  const int64_t pages = call.k.size(0), page_size = call.k.size(1), stride = call.page_table->stride(0);
  const int32_t* const lengths = call.lengths.const_data_ptr<int32_t>();
  const int32_t* const table = call.page_table->const_data_ptr<int32_t>();
  for (int64_t b = 0; b < call.lengths.numel(); ++b)
    for (int64_t page = 0; page * page_size < lengths[b]; ++page)
      if (table[b * stride + page] < 0 || table[b * stride + page] >= pages) return false;
  return true;
}

// By the launches of an earlier call like this one; undefined where there was none.
Tensor launched_again(const DecodeCall& call) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor& q = call.q;
  CachedLaunch cached;
  cached.input(q);
  for (const Tensor& cache : {call.k, call.v}) cached.input(call.page_table ? cache.transpose(1, 2) : cache);
  cached.input(call.lengths);
  cached.input(call.page_table);
  if (!cached.lookup(py::make_tuple("attention decode", call.causal, call.scale), py::tuple(), q)) return {};
  const auto [out, logsumexp] = empty_outputs_of(q);
  cached.output(out.const_data_ptr());
  cached.output(logsumexp.const_data_ptr());
  static const PythonFunction division("transformer_fast.triton.attention.decode", "division");
  const py::tuple divided = division.call(py::dict(), q.size(0), q.size(1), q.size(2), q.size(3), call.key_heads(),
                                          call.capacity(), q.element_size());
  const auto parts = py::cast<int64_t>(divided[2]);
  // sums, peaks and totals: part_buffers of triton/attention/decode.py.
  const int64_t rows = parts * logsumexp.numel(), peaks = rounded_up(rows * q.size(3)),
                totals = peaks + rounded_up(rows);
  const Tensor buffer = parts == 1 ? Tensor() : at::empty({totals + rows}, logsumexp.options());
  for (const int64_t place : {int64_t{0}, peaks, totals})
    cached.output(parts == 1 ? nullptr : buffer.const_data_ptr<float>() + place);
  cached.replay();
  return out;
}

}  // namespace

py::object attention_decode(bool launched, py::handle q_, py::handle k_cache, py::handle v_cache, py::handle lengths,
                            py::handle page_table, py::handle causal, py::handle scale) {
  Arguments arguments(launched);
  DecodeCall call{arguments.floating(q_),
                  arguments.floating(k_cache),
                  arguments.floating(v_cache),
                  arguments.tensor(lengths),
                  arguments.optional_tensor(page_table),
                  arguments.boolean(causal),
                  scale.is_none() ? 0 : arguments.number(scale)};
  const Tensor& q = call.q;
  if (!arguments.ok() || !shapes_fit(call) || !alike(q, call.k, call.v)) return py::none();
  if (needs_gradient(q, call.k, call.v) || (launched && !launchable(q))) return py::none();
  const OptionalTensor narrow = int_lengths(call.lengths, call.capacity());
  if (!narrow) return py::none();
  call.lengths = *narrow;
  if (!pages_exist(call)) return py::none();
  if (scale.is_none()) call.scale = 1 / std::sqrt(static_cast<double>(q.size(3)));

  if (!launched) {
    Tensor out;
    {
      const py::gil_scoped_release no_gil;
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto& [_, k, v, lengths, page_table, causal, scale] = call;
      out = transformer_fast::attention_decode(q, k, v, lengths, page_table, causal, scale).out;
    }
    return wrap(out);
  }
  if (q.numel() > 0 && call.k.numel() > 0)
    if (const Tensor out = launched_again(call); out.defined()) return wrap(out);
  return wrap(launch_decode(q, call.k, call.v, call.lengths, call.page_table, call.causal, call.scale).out);
}

}  // namespace eager
}  // namespace transformer_fast
