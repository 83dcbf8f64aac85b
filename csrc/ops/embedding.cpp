// embed, add_positional and the positional table: the ops of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/embedding.py documents and checks what they take; csrc/cuda has their kernels for a GPU.
#include "../embedding.h"
#include "../cpu/kernels.h"
#include "eager.h"
#include "eager_call.h"
#include "node.h"
#include "operator.h"
#include "tensors.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add_cpu_dispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace transformer_fast {
namespace embedding_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined, eager::requires_grad;
using torch::autograd::variable_list;

constexpr const char* kEmbed =
    "embed(Tensor ids, Tensor weight, Tensor? table, float scale, SymInt offset, Tensor? offsets, int? padding_idx, "
    "float dropout_p, Tensor? seed, bool deterministic) -> Tensor";
constexpr const char* kEmbedBackward =
    "embed_backward(Tensor grad_out, Tensor ids, SymInt num_embeddings, float scale, int? padding_idx, "
    "float dropout_p, Tensor? seed, bool deterministic) -> Tensor";
constexpr const char* kAddPositional =
    "add_positional(Tensor x, Tensor? table, SymInt offset, Tensor? offsets, float dropout_p, Tensor? seed) -> Tensor";
constexpr const char* kPositionalTable = "fill_positional_table(Tensor(a!) table) -> ()";

// Of a contiguous tensor of int64 or int32; it must outlive them.
Integers integers(const Tensor& tensor) {
  if (tensor.scalar_type() == at::kLong) return {tensor.const_data_ptr<int64_t>(), nullptr};
  return {nullptr, tensor.const_data_ptr<int32_t>()};
}

// Says where the first id that is not in the vocabulary stands.
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

// Each sequence must find its positions in the table.
void check_offsets(const Integers& offsets, const OptionalTensor& table, const Rows& rows, int64_t offset) {
  if (!offsets || !table) return;
  for (int64_t i = 0; i < rows.count / rows.length; ++i) {
    const int64_t first = offset + offsets[i];
    TORCH_CHECK_INDEX(first >= 0 && first + rows.length <= table->size(0), "offset ", offsets[i], " of sequence ", i,
                      ": positions ", first, " to ", first + rows.length - 1, " are not all in the table of ",
                      table->size(0));
  }
}

// Fills `out` from the rows of `source`, of which ids choose if they are given. Returns whether all ids were in it.
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

Tensor embed(const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale, int64_t offset,
             const OptionalTensor& offsets, std::optional<int64_t> /* padding_idx */, double p,
             const OptionalTensor& seed, bool /* deterministic: always */) {
  const Rows rows = check_embed(ids, weight, table, offset, offsets, p, seed);
  auto shape = ids.sizes().vec();
  shape.push_back(rows.d);
  const Tensor out = at::cpu::empty(shape, weight.options());
  if (rows.empty()) return out;
  const Tensor dense = ids.contiguous();
  if (!encode(out, rows, weight, dense, scale, table, offset, offsets, p, seed))
    raise_invalid_id(dense, weight.size(0));
  return out;
}

// The gradient has the size of the weight, so a large one is fresh memory from the system on every step, and faulting
// it in by small pages costs several times what writing it does.
void prefer_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (end > begin + 8 * kPage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only a hint
#endif
}

Tensor embed_backward(const Tensor& grad_out, const Tensor& ids, int64_t vocabulary, double scale,
                      std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
                      bool /* deterministic: always */) {
  check_backward(grad_out, ids, vocabulary, p, seed);
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

// x + the table, again and again: nothing tells one row of a sequence from the next. Both are contiguous.
Tensor add_repeated(const Tensor& x, const Tensor& table) {
  if (x.element_size() >= 4) return at::cpu::add(x, table);
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  const bool narrow = table.scalar_type() == x.scalar_type();
  AT_DISPATCH_REDUCED_FLOATING_TYPES(x.scalar_type(), "add_positional", [&] {
    using T = scalar_t;
    kernels().of<T>().add_repeated({x.const_data_ptr<T>(), narrow ? table.const_data_ptr<T>() : nullptr,
                                    narrow ? nullptr : table.const_data_ptr<float>(), out.mutable_data_ptr<T>(),
                                    x.numel(), table.numel()});
  });
  return out;
}

Tensor add_positional(const Tensor& x, const OptionalTensor& table, int64_t offset, const OptionalTensor& offsets,
                      double p, const OptionalTensor& seed) {
  const Rows rows = check_add_positional(x, table, offset, offsets, p, seed);
  if (rows.empty()) return at::cpu::empty(x.sizes(), x.options());
  if (x.is_contiguous() && table && table->is_contiguous() && !offsets && p == 0)
    return add_repeated(x, table->narrow(0, offset, rows.length));
  const Tensor out = at::cpu::empty(x.sizes(), x.options());
  encode(out, rows, x.reshape({rows.count, rows.d}), Tensor(), 1.0, table, offset, offsets, p, seed);
  return out;
}

void fill_positional_table(const Tensor& table) {
  check_positional_table(table);
  if (table.numel() > 0) kernels().fill_positional_table(table.mutable_data_ptr<float>(), table.size(0), table.size(1));
}

Tensor embed_meta(const Tensor& ids, const Tensor& weight, const OptionalTensor& /* table */, double /* scale */,
                  c10::SymInt /* offset */, const OptionalTensor& /* offsets */,
                  std::optional<int64_t> /* padding_idx */, double /* p */, const OptionalTensor& /* seed */,
                  bool /* deterministic */) {
  auto sizes = ids.sym_sizes().vec();
  sizes.push_back(weight.sym_size(1));
  return meta_tensor(weight, sizes);
}

Tensor embed_backward_meta(const Tensor& grad_out, const Tensor& /* ids */, c10::SymInt vocabulary, double /* scale */,
                           std::optional<int64_t> /* padding_idx */, double /* p */, const OptionalTensor& /* seed */,
                           bool /* deterministic */) {
  return meta_tensor(grad_out, {vocabulary, grad_out.sym_size(-1)});
}

Tensor add_positional_meta(const Tensor& x, const OptionalTensor& /* table */, c10::SymInt /* offset */,
                           const OptionalTensor& /* offsets */, double /* p */, const OptionalTensor& /* seed */) {
  return meta_tensor(x, x.sym_sizes());
}

void fill_positional_table_meta(const Tensor& /* table */) {}

const auto& embed_op() {
  static const Operator<Tensor(const Tensor&, const Tensor&, const OptionalTensor&, double, c10::SymInt,
                               const OptionalTensor&, std::optional<int64_t>, double, const OptionalTensor&, bool)>
      op("embed");
  return op;
}

const auto& embed_backward_op() {
  static const Operator<Tensor(const Tensor&, const Tensor&, c10::SymInt, double, std::optional<int64_t>, double,
                               const OptionalTensor&, bool)>
      op("embed_backward");
  return op;
}

const auto& add_positional_op() {
  static const Operator<Tensor(const Tensor&, const OptionalTensor&, c10::SymInt, const OptionalTensor&, double,
                               const OptionalTensor&)>
      op("add_positional");
  return op;
}

// A table of positions that was read from `offset` on, or from `offset` + an offset for each sequence.
struct Table {
  c10::SymInt length, offset;
  at::ScalarType type;

  Table(const OptionalTensor& table, const c10::SymInt& first)
      : length(table ? table->sym_size(0) : c10::SymInt(0)), offset(first),
        type(table ? table->scalar_type() : at::kFloat) {}

  // Its gradient: of each position used, the sum over everything that stood there.
  Tensor gradient(const Tensor& grad, const OptionalTensor& offsets) const {
    const c10::SymInt rows = grad.sym_size(-2);
    if (offsets) {  // then positions are like the ids of a lookup
      const Tensor steps = at::arange(rows, at::TensorOptions(at::kLong).device(grad.device()));
      const Tensor positions = offsets->unsqueeze(-1).to(at::kLong) + steps;
      constexpr bool deterministic = true;
      return embed_backward_op()(grad, positions, length, 1.0, std::nullopt, 0.0, std::nullopt, deterministic).to(type);
    }
    const Tensor stacked = grad.dim() > 2 ? grad.flatten(0, -3) : grad.unsqueeze(0);
    const Tensor sum = stacked.sum(0, /*keepdim=*/false, arithmetic_type(grad));
    return at::constant_pad_nd_symint(sum, {0, 0, offset, length - offset - rows}).to(type);
  }
};

// The forward's mask applied to a gradient: the same op without a table.
Tensor dropped(const Tensor& grad, double p, const OptionalTensor& seed) {
  return p > 0 ? add_positional_op()(grad, std::nullopt, 0, std::nullopt, p, seed) : grad;
}

// In a backward: nothing is recorded, unless it is to be differentiated again.
class BelowAutogradUnlessNeeded {
 public:
  BelowAutogradUnlessNeeded() {
    if (!at::GradMode::is_enabled()) below_.emplace();
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

struct Embed {
  static constexpr const char* kName = "embed";
  static constexpr size_t kSaved = 3;
  static constexpr bool kDifferentiableBackward = true;  // that of the table

  struct Options {
    c10::SymInt vocabulary;
    double scale;
    std::optional<int64_t> padding_idx;
    double dropout_p;
    bool deterministic;
    Table table;
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const bool direct = eager::is_plain_eager(grads) && eager::is_plain_eager(saved);
    const BelowAutogradUnlessNeeded below;
    const auto& [vocabulary, scale, padding_idx, p, deterministic, table] = options;
    const OptionalTensor offsets = or_none(saved[1]), seed = or_none(saved[2]);
    variable_list gradients(2);
    if (needs[0] && direct)
      gradients[0] = embed_backward(grads[0], saved[0], vocabulary.expect_int(), scale, padding_idx, p, seed, true);
    else if (needs[0])
      gradients[0] = embed_backward_op()(grads[0], saved[0], vocabulary, scale, padding_idx, p, seed, deterministic);
    if (needs[1]) gradients[1] = table.gradient(dropped(grads[0], p, seed), offsets);
    return gradients;
  }
};

struct AddPositional {
  static constexpr const char* kName = "add_positional";
  static constexpr size_t kSaved = 2;
  static constexpr bool kDifferentiableBackward = true;

  struct Options {
    double dropout_p;
    Table table;
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const BelowAutogradUnlessNeeded below;
    const Tensor grad = dropped(grads[0], options.dropout_p, or_none(saved[1]));
    return {grad, needs[1] ? options.table.gradient(grad, or_none(saved[0])) : Tensor()};
  }
};

// `direct`: whether the kernel may be called without the dispatcher.
Tensor recorded_embed(bool direct, const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale,
                      const c10::SymInt& offset, const OptionalTensor& offsets, std::optional<int64_t> padding_idx,
                      double p, const OptionalTensor& seed, bool deterministic) {
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = direct ? embed(ids, weight, table, scale, offset.expect_int(), offsets, padding_idx, p, seed, deterministic)
                 : embed_op()(ids, weight, table, scale, offset, offsets, padding_idx, p, seed, deterministic);
  }
  if (needs_gradient(weight, table))
    eager::record<Embed>({out}, {ids, or_undefined(offsets), or_undefined(seed)},
                         {weight.sym_size(0), scale, padding_idx, p, deterministic, Table(table, offset)}, weight,
                         table);
  return out;
}

Tensor recorded_add_positional(bool direct, const Tensor& x, const OptionalTensor& table, const c10::SymInt& offset,
                               const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = direct ? add_positional(x, table, offset.expect_int(), offsets, p, seed)
                 : add_positional_op()(x, table, offset, offsets, p, seed);
  }
  if (needs_gradient(x, table))
    eager::record<AddPositional>({out}, {or_undefined(offsets), or_undefined(seed)}, {p, Table(table, offset)}, x,
                                 table);
  return out;
}

Tensor embed_autograd(const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale,
                      c10::SymInt offset, const OptionalTensor& offsets, std::optional<int64_t> padding_idx, double p,
                      const OptionalTensor& seed, bool deterministic) {
  return recorded_embed(false, ids, weight, table, scale, offset, offsets, padding_idx, p, seed, deterministic);
}

Tensor embed_backward_autograd(const Tensor& grad_out, const Tensor& ids, c10::SymInt vocabulary, double scale,
                               std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed,
                               bool deterministic) {
  std::tuple<Tensor> gradient;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    gradient = embed_backward_op()(grad_out, ids, vocabulary, scale, padding_idx, p, seed, deterministic);
  }
  return std::get<0>(eager::undifferentiable("embed", gradient, {grad_out}));
}

Tensor add_positional_autograd(const Tensor& x, const OptionalTensor& table, c10::SymInt offset,
                               const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  return recorded_add_positional(false, x, table, offset, offsets, p, seed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(kEmbed);
  m.def(kEmbedBackward);
  m.def(kAddPositional);
  m.def(kPositionalTable);
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("embed", TORCH_FN(embed));
  m.impl("embed_backward", TORCH_FN(embed_backward));
  m.impl("add_positional", TORCH_FN(add_positional));
  m.impl("fill_positional_table", TORCH_FN(fill_positional_table));
}

TORCH_LIBRARY_IMPL(transformer_fast, Meta, m) {
  m.impl("embed", TORCH_FN(embed_meta));
  m.impl("embed_backward", TORCH_FN(embed_backward_meta));
  m.impl("add_positional", TORCH_FN(add_positional_meta));
  m.impl("fill_positional_table", TORCH_FN(fill_positional_table_meta));
}

TORCH_LIBRARY_IMPL(transformer_fast, Autograd, m) {
  m.impl("embed", TORCH_FN(embed_autograd));
  m.impl("embed_backward", TORCH_FN(embed_backward_autograd));
  m.impl("add_positional", TORCH_FN(add_positional_autograd));
}

}  // namespace embedding_op

// The eager fast paths.
namespace eager {
namespace {

bool table_fits(const Tensor& table, const Tensor& x, int64_t offset, int64_t length) {
  return (table.scalar_type() == at::kFloat || table.scalar_type() == x.scalar_type()) && table.dim() == 2 &&
         table.size(1) == x.size(-1) && offset >= 0 && table.size(0) - offset >= length;
}

// Where sequences begin: one number for all of them, or one each.
struct Offset {
  int64_t common = 0;
  OptionalTensor each;

  Offset(Arguments& arguments, py::handle given) {
    if (THPVariable_Check(given.ptr()))
      each = arguments.tensor(given);
    else
      common = arguments.integer(given);
  }

  bool fits(at::IntArrayRef sequences) const {
    return !each ||
           ((each->scalar_type() == at::kLong || each->scalar_type() == at::kInt) && each->sizes() == sequences);
  }
};

}  // namespace

py::object embed(py::handle ids_, py::handle weight_, py::handle table_, py::handle scale_, py::handle offset_,
                 py::handle padding_idx_, py::handle dropout_p_, py::handle seed_) {
  Arguments arguments;
  const Tensor ids = arguments.tensor(ids_), weight = arguments.floating(weight_);
  const OptionalTensor table = arguments.optional_floating(table_), seed = arguments.optional_tensor(seed_);
  const double scale = arguments.number(scale_), dropout_p = arguments.probability(dropout_p_);
  const Offset offset(arguments, offset_);
  std::optional<int64_t> padding_idx = arguments.optional_integer(padding_idx_);
  if (!arguments.ok() || ids.dim() == 0 || weight.dim() != 2) return py::none();
  const int64_t vocabulary = weight.size(0);
  arguments.require(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt);
  arguments.require(offset.common >= 0 && (dropout_p == 0 || seed));
  arguments.require(offset.fits(ids.sizes().slice(0, ids.dim() - 1)));
  if (table) arguments.require(table_fits(*table, weight, offset.common, ids.size(-1)));
  if (padding_idx) {
    arguments.require(-vocabulary <= *padding_idx && *padding_idx < vocabulary);
    if (*padding_idx < 0) *padding_idx += vocabulary;
  }
  if (!arguments.ok()) return py::none();

  HANDLE_TH_ERRORS
  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    out = embedding_op::recorded_embed(true, ids, weight, table, scale, offset.common, offset.each, padding_idx,
                                       dropout_p, seed, /*deterministic=*/true);
  }
  return wrap(out);
  END_HANDLE_TH_ERRORS_PYBIND
}

py::object add_positional(py::handle x_, py::handle table_, py::handle offset_, py::handle dropout_p_,
                          py::handle seed_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_), table = arguments.floating(table_);
  const OptionalTensor seed = arguments.optional_tensor(seed_);
  const Offset offset(arguments, offset_);
  const double dropout_p = arguments.probability(dropout_p_);
  if (!arguments.ok() || x.dim() < 2 || !table_fits(table, x, offset.common, x.size(-2)) || (dropout_p > 0 && !seed) ||
      !offset.fits(x.sizes().slice(0, x.dim() - 2)))
    return py::none();

  HANDLE_TH_ERRORS
  Tensor out;
  {
    const py::gil_scoped_release no_gil;
    out = embedding_op::recorded_add_positional(true, x, table, offset.common, offset.each, dropout_p, seed);
  }
  return wrap(out);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace eager
}  // namespace transformer_fast
