// The short way of transformer_fast.ops.attention_decode: to the kernel of the CPU, and to the launcher of the Triton
// kernels.
#include "functions.h"

#include "attention_checks.h"
#include "launching.h"

#include <cmath>

namespace transformer_fast::direct {
namespace {

using Decode = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                          const OptionalTensor&, bool, double);

// They live as long as the process: nothing is left to free when it ends.
PyObject *launcher = nullptr, *division = nullptr;

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
  KnownCall known;
  known.input(q);
  for (const Tensor& cache : {call.k, call.v}) known.input(call.page_table ? cache.transpose(1, 2) : cache);
  known.input(call.lengths);
  known.input(call.page_table);
  if (!known.find(py::make_tuple("attention decode", call.causal, call.scale), py::tuple(), q)) return {};
  const auto [out, logsumexp] = empty_outputs_of(q);
  known.output(out.const_data_ptr());
  known.output(logsumexp.const_data_ptr());
  const py::tuple divided = py::handle(division)(q.size(0), q.size(1), q.size(2), q.size(3), call.key_heads(),
                                                 call.capacity(), q.element_size());
  const auto parts = py::cast<int64_t>(divided[2]);
  // sums, peaks and totals: part_buffers of kernels/attention_decode.py.
  const int64_t rows = parts * logsumexp.numel(), peaks = rounded_up(rows * q.size(3)),
                totals = peaks + rounded_up(rows);
  const Tensor buffer = parts == 1 ? Tensor() : at::empty({totals + rows}, logsumexp.options());
  for (const int64_t place : {int64_t{0}, peaks, totals})
    known.output(parts == 1 ? nullptr : buffer.const_data_ptr<float>() + place);
  known.start();
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
    static const Native<Decode> native("attention_decode");
    Tensor out;
    {
      const py::gil_scoped_release no_gil;
      out = std::get<0>(native(q, call.k, call.v, call.lengths, call.page_table, call.causal, call.scale));
    }
    return wrap(out);
  }
  if (q.numel() > 0 && call.k.numel() > 0)
    if (const Tensor out = launched_again(call); out.defined()) return wrap(out);
  return py::handle(launcher)(q_, k_cache, v_cache, wrap(call.lengths), page_table, call.causal, call.scale);
}

void set_decode_launcher(py::object launcher_, py::object division_) {
  launcher = launcher_.release().ptr();
  division = division_.release().ptr();
}

}  // namespace transformer_fast::direct
