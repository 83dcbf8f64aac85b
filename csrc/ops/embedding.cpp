// embed, add_positional and the positional table: the ops of torch.ops.transformer_fast, from schema to kernel.
// transformer_fast/ops/embedding.py documents the arguments. embedding_cpu.cpp calls the CPU kernels; the
// GPU kernels are in csrc/cuda.
#include "embedding.h"

#include "../embedding_checks.h"
#include "op.h"
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
  constexpr auto kCPU = c10::DispatchKey::CPU;
  define_op<"embed", check_embed, embed, embed_meta, recorded_embed, {}, kCPU>(
      m,
      "(Tensor ids, Tensor weight, Tensor? table, float scale, SymInt offset, Tensor? offsets, int? padding_idx, "
      "float dropout_p, Tensor? seed, bool deterministic) -> Tensor");
  define_backward<"embed_backward", check_embed_backward, embed_backward, embed_backward_meta, kCPU>(
      m,
      "(Tensor grad_out, Tensor ids, SymInt num_embeddings, float scale, int? padding_idx, float dropout_p, "
      "Tensor? seed, bool deterministic) -> Tensor");
  define_op<"add_positional", check_add_positional, add_positional, add_positional_meta, recorded_add_positional, {},
            kCPU>(m,
                  "(Tensor x, Tensor? table, SymInt offset, Tensor? offsets, float dropout_p, Tensor? seed) -> Tensor");
  m.def("fill_positional_table(Tensor(a!) table) -> ()");
  constexpr auto fill = Checked<check_positional_table, fill_positional_table>::call;
  m.impl("fill_positional_table", torch::dispatch(kCPU, TORCH_FN(fill)));
  m.impl("fill_positional_table", torch::dispatch(c10::DispatchKey::Meta, TORCH_FN(check_positional_table)));
}

}  // namespace embedding_op
}  // namespace transformer_fast
