// embed, add_positional and the positional table: the ops of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/embedding.py documents and checks the arguments. embedding_cpu.cpp calls the CPU kernels; the
// GPU kernels are in csrc/cuda.
#include "embedding.h"

#include "../embedding_checks.h"
#include "eager_call.h"
#include "node.h"
#include "operator.h"
#include "tensors.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace transformer_fast {
namespace embedding_op {
namespace {

using eager::needs_gradient, eager::Needs, eager::or_none, eager::or_undefined;
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

Tensor embed_meta(const Tensor& ids, const Tensor& weight, const OptionalTensor&, double, c10::SymInt,
                  const OptionalTensor&, std::optional<int64_t>, double, const OptionalTensor&, bool) {
  auto sizes = ids.sym_sizes().vec();
  sizes.push_back(weight.sym_size(1));
  return meta_tensor(weight, sizes);
}

Tensor embed_backward_meta(const Tensor& grad_out, const Tensor&, c10::SymInt vocabulary, double,
                           std::optional<int64_t>, double, const OptionalTensor&, bool) {
  return meta_tensor(grad_out, {vocabulary, grad_out.sym_size(-1)});
}

Tensor add_positional_meta(const Tensor& x, const OptionalTensor&, c10::SymInt, const OptionalTensor&, double,
                           const OptionalTensor&) {
  return meta_tensor(x, x.sym_sizes());
}

// A positional table that was read from `offset` on, or from `offset` plus one offset per sequence.
struct Table {
  c10::SymInt length, offset;
  at::ScalarType type;

  Table(const OptionalTensor& table, const c10::SymInt& first)
      : length(table ? table->sym_size(0) : c10::SymInt(0)), offset(first),
        type(table ? table->scalar_type() : at::kFloat) {}

  // The table's gradient: per position, the sum of the gradients of all tokens at that position.
  Tensor gradient(const Tensor& grad, const OptionalTensor& offsets) const {
    const c10::SymInt rows = grad.sym_size(-2);
    if (offsets) {  // positions then act as ids of a lookup
      const Tensor steps = at::arange(rows, at::TensorOptions(at::kLong).device(grad.device()));
      const Tensor positions = offsets->unsqueeze(-1).to(at::kLong) + steps;
      // The sum has the type of its terms, so the terms of a float32 table are float32.
      const Tensor terms = in_type(grad, at::promote_types(grad.scalar_type(), type));
      constexpr bool deterministic = true;
      return op<"embed_backward", embed_backward>()(terms, positions, length, 1.0, std::nullopt, 0.0, std::nullopt,
                                                    deterministic)
          .to(type);
    }
    const Tensor stacked = grad.dim() > 2 ? grad.flatten(0, -3) : grad.unsqueeze(0);
    const Tensor sum = stacked.sum(0, /*keepdim=*/false, arithmetic_type(grad));
    return at::constant_pad_nd_symint(sum, {0, 0, offset, length - offset - rows}).to(type);
  }
};

// The forward's mask applied to a gradient: the same op without a table.
Tensor dropped(const Tensor& grad, double p, const OptionalTensor& seed) {
  return p > 0 ? op<"add_positional", add_positional>()(grad, std::nullopt, 0, std::nullopt, p, seed) : grad;
}

struct Embed {
  static constexpr const char* kName = "embed";
  enum : size_t { kIds, kOffsets, kSeed, kSaved };       // what is saved
  static constexpr bool kDifferentiableBackward = true;  // gradient of the table

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
    const auto& [vocabulary, scale, padding_idx, p, deterministic, table] = options;
    const OptionalTensor offsets = or_none(saved[kOffsets]), seed = or_none(saved[kSeed]);
    variable_list gradients(2);
    if (needs[0])
      gradients[0] = below_autograd<"embed_backward", embed_backward>(direct, grads[0], saved[kIds], vocabulary, scale,
                                                                      padding_idx, p, seed, deterministic);
    if (needs[1]) gradients[1] = table.gradient(dropped(grads[0], p, seed), offsets);
    return gradients;
  }
};

struct AddPositional {
  static constexpr const char* kName = "add_positional";
  enum : size_t { kOffsets, kSeed, kSaved };  // what is saved
  static constexpr bool kDifferentiableBackward = true;

  struct Options {
    double dropout_p;
    Table table;
  };

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs& needs) {
    const Tensor grad = dropped(grads[0], options.dropout_p, or_none(saved[kSeed]));
    return {grad, needs[1] ? options.table.gradient(grad, or_none(saved[kOffsets])) : Tensor()};
  }
};

// `direct`: true if the kernel may be called without the dispatcher.
Tensor recorded_embed(bool direct, const Tensor& ids, const Tensor& weight, const OptionalTensor& table, double scale,
                      c10::SymInt offset, const OptionalTensor& offsets, std::optional<int64_t> padding_idx, double p,
                      const OptionalTensor& seed, bool deterministic) {
  const Tensor out = below_autograd<"embed", embed>(direct, ids, weight, table, scale, offset, offsets, padding_idx, p,
                                                    seed, deterministic);
  if (needs_gradient(weight, table))
    eager::record<Embed>({out}, {ids, or_undefined(offsets), or_undefined(seed)},
                         {weight.sym_size(0), scale, padding_idx, p, deterministic, Table(table, offset)}, weight,
                         table);
  return out;
}

Tensor recorded_add_positional(bool direct, const Tensor& x, const OptionalTensor& table, c10::SymInt offset,
                               const OptionalTensor& offsets, double p, const OptionalTensor& seed) {
  const Tensor out = below_autograd<"add_positional", add_positional>(direct, x, table, offset, offsets, p, seed);
  if (needs_gradient(x, table))
    eager::record<AddPositional>({out}, {or_undefined(offsets), or_undefined(seed)}, {p, Table(table, offset)}, x,
                                 table);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  m.def(kEmbed);
  m.def(kEmbedBackward);
  m.def(kAddPositional);
  m.def(kPositionalTable);
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("embed", Checked<check_embed, embed>::call);
  m.impl("embed_backward", Checked<check_embed_backward, embed_backward>::call);
  m.impl("add_positional", Checked<check_add_positional, add_positional>::call);
  m.impl("fill_positional_table", Checked<check_positional_table, fill_positional_table>::call);
}

TORCH_LIBRARY_IMPL(transformer_fast, Meta, m) {
  m.impl("embed", Checked<check_embed, embed_meta>::call);
  m.impl("embed_backward", Checked<check_embed_backward, embed_backward_meta>::call);
  m.impl("add_positional", Checked<check_add_positional, add_positional_meta>::call);
  m.impl("fill_positional_table", check_positional_table);
}

TORCH_LIBRARY_IMPL(transformer_fast, Autograd, m) {
  m.impl("embed", Dispatched<recorded_embed>::call);
  m.impl("embed_backward", eager::Undifferentiable<"embed_backward", embed_backward>::call);
  m.impl("add_positional", Dispatched<recorded_add_positional>::call);
}

}  // namespace embedding_op

// The eager fast paths.
namespace eager {
namespace {

bool table_fits(const Tensor& table, const Tensor& x, int64_t offset, int64_t length) {
  return (table.scalar_type() == at::kFloat || table.scalar_type() == x.scalar_type()) && table.dim() == 2 &&
         table.size(1) == x.size(-1) && offset >= 0 && table.size(0) - offset >= length;
}

// First positions of sequences: one number for all of them, or one per sequence.
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

  return computed([&] {
    return embedding_op::recorded_embed(true, ids, weight, table, scale, offset.common, offset.each, padding_idx,
                                        dropout_p, seed, /*deterministic=*/true);
  });
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

  return computed([&] {
    return embedding_op::recorded_add_positional(true, x, table, offset.common, offset.each, dropout_p, seed);
  });
}

PYTHON_MODULE_FRAGMENT(m) {
  m.def("embed", &embed);
  m.def("add_positional", &add_positional);
}

}  // namespace eager
}  // namespace transformer_fast
