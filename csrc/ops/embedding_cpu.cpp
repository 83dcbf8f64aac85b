// The ops of embedding.cpp on the CPU, from tensors to kernel parameters.
#include "../cpu/kernels.h"
#include "../embedding_checks.h"
#include "embedding.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/empty.h>

#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace transformer_fast::embedding_op {
namespace {

// Integers of a contiguous int64 or int32 tensor, which must outlive them.
Integers integers(const Tensor& tensor) {
  if (tensor.scalar_type() == at::kLong) return {tensor.const_data_ptr<int64_t>(), nullptr};
  return {nullptr, tensor.const_data_ptr<int32_t>()};
}

// Raises for the first id outside the vocabulary, with its place.
[[noreturn]] void raise_invalid_id(const Tensor& tensor, int64_t vocabulary) {
  const Integers ids = integers(tensor);
  int64_t row = 0;
  while (ids[row] >= 0 && ids[row] < vocabulary) ++row;
  std::string place;
  int64_t rest = row;
  for (int64_t dim = tensor.dim(); dim-- > 0; rest /= tensor.size(dim))
    place = std::to_string(rest % tensor.size(dim)) + (place.empty() ? "" : ", ") + place;
  TORCH_CHECK_INDEX(false, "ids[", place, "] is ", ids[row], ", but the vocabulary has ", vocabulary,
                    " rows: expected 0 <= id < ", vocabulary);
}

// Raises unless the table holds the positions of all sequences.
void check_offsets(const Integers& offsets, const OptionalTensor& table, const Rows& rows, int64_t offset) {
  if (!offsets || !table) return;
  for (int64_t i = 0; i < rows.count / rows.length; ++i) {
    const int64_t first = offset + offsets[i];
    TORCH_CHECK_INDEX(first >= 0 && first + rows.length <= table->size(0), "offset ", offsets[i], " of sequence ", i,
                      ": positions ", first, " to ", first + rows.length - 1, " are not all in the table of ",
                      table->size(0));
  }
}

// Fills `out` from the rows of `source`, selected by ids if given. Returns true if all ids were valid.
bool encode(const Tensor& out, const Rows& rows, const Tensor& source, const Tensor& ids, double scale,
            const OptionalTensor& table, int64_t offset, const OptionalTensor& offsets, double p,
            const OptionalTensor& seed) {
  const Tensor starts = offsets ? offsets->contiguous() : Tensor();
  const Integers first_positions = offsets && table ? integers(starts) : Integers{};
  check_offsets(first_positions, table, rows, offset);
  bool all_valid = true;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, out.scalar_type(), "embed", [&] {
    using T = scalar_t;
    using A = Accumulate<T>;
    EncodeParams<T> params{out.mutable_data_ptr<T>(), rows.count, rows.length, rows.d};
    params.source = {source.const_data_ptr<T>(), source.stride(0), source.stride(1)};
    if (ids.defined()) params.ids = integers(ids), params.vocabulary = source.size(0);
    params.scale = scale, params.first_positions = first_positions, params.dropout = dropout_params(p, seed);
    const bool narrow = table && table->scalar_type() == out.scalar_type() && !std::is_same_v<T, A>;
    const Tensor typed =
        table && !narrow ? in_type(*table, c10::CppTypeToScalarType<A>::value) : table.value_or(Tensor());
    if (narrow)
      params.narrow_table = {typed.const_data_ptr<T>() + offset * typed.stride(0), typed.stride(0), typed.stride(1)};
    else if (table)
      params.wide_table = {typed.const_data_ptr<A>() + offset * typed.stride(0), typed.stride(0), typed.stride(1)};
    all_valid = kernels().of<T>().encode(params);
  });
  return all_valid;
}

// The gradient has the size of the weight. A large gradient is new memory from the system in each step, and page faults
// of small pages take several times as long as the writes.
void prefer_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (end > begin + 8 * kPage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only a hint
#endif
}

}  // namespace

Tensor embed(const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale, c10::SymInt first,
             const OptionalTensor& offsets, std::optional<int64_t> /* padding_idx */, double p,
             const OptionalTensor& seed, bool /* deterministic: always */) {
  const int64_t offset = first.expect_int();
  const Rows rows(ids.sizes(), weight.size(1));
  auto shape = ids.sizes().vec();
  shape.push_back(rows.d);
  const Tensor out = at::cpu::empty(shape, weight.options());
  if (rows.empty()) return out;
  const Tensor dense = ids.contiguous();
  if (!encode(out, rows, weight, dense, scale, table, offset, offsets, p, seed))
    raise_invalid_id(dense, weight.size(0));
  return out;
}

Tensor embed_backward(const Tensor& grad_out, const Tensor& ids, c10::SymInt num_embeddings, double scale,
                      std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
                      bool /* deterministic: always */) {
  const int64_t vocabulary = num_embeddings.expect_int();
  const Tensor grad = grad_out.contiguous(), dense = ids.contiguous();
  const int64_t d = grad.size(-1);
  const Tensor out = at::empty({vocabulary, d}, grad.options());
  if (out.numel() == 0) return out;
  prefer_huge_pages(out.mutable_data_ptr(), out.nbytes());
  bool all_valid = true;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "embed_backward", [&] {
    using T = scalar_t;
    all_valid = kernels().of<T>().embed_backward({grad.const_data_ptr<T>(), integers(dense), out.mutable_data_ptr<T>(),
                                                  dense.numel(), d, vocabulary, padding_idx.value_or(-1), scale,
                                                  dropout_params(p, seed)});
  });
  if (!all_valid) raise_invalid_id(dense, vocabulary);
  return out;
}

Tensor add_positional(const Tensor& x, const OptionalTensor& table, c10::SymInt first, const OptionalTensor& offsets,
                      double p, const OptionalTensor& seed) {
  const int64_t offset = first.expect_int();
  const Rows rows(x.sizes().slice(0, x.dim() - 1), x.size(-1));
  const bool repeated = x.is_contiguous() && table && table->is_contiguous() && !offsets && p == 0;
  if (repeated && x.element_size() >= 4) return at::cpu::add(x, table->narrow(0, offset, rows.length));
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  if (rows.empty()) return out;
  if (repeated) {  // without ids and dropout, a whole sequence is one row, and the table is its bias
    const int64_t d = rows.length * rows.d;
    AT_DISPATCH_REDUCED_FLOATING_TYPES(x.scalar_type(), "add_positional", [&] {
      const ParameterTensor<scalar_t> bias(table->narrow(0, offset, rows.length).view({d}));
      kernels().of<scalar_t>().dropout_forward({x.const_data_ptr<scalar_t>(),
                                                nullptr,
                                                bias.parameter(),
                                                out.mutable_data_ptr<scalar_t>(),
                                                x.numel() / d,
                                                d,
                                                false,
                                                {}});
    });
    return out;
  }
  encode(out, rows, x.reshape({rows.count, rows.d}), Tensor(), 1.0, table, offset, offsets, p, seed);
  return out;
}

void fill_positional_table(const Tensor& table) {
  if (table.numel() > 0) kernels().fill_positional_table(table.mutable_data_ptr<float>(), table.size(0), table.size(1));
}

}  // namespace transformer_fast::embedding_op
