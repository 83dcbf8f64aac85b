// The short ways of transformer_fast.ops.embed and add_positional.
#include "functions.h"

#include "call.h"
#include "node.h"

#include <torch/csrc/Exceptions.h>

namespace transformer_fast::direct {
namespace {

using EmbedForward = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, double, int64_t, const OptionalTensor&,
                            double, const OptionalTensor&);
using EmbedBackward = Tensor(const Tensor&, const Tensor&, int64_t, double, std::optional<int64_t>, double,
                             const OptionalTensor&, bool);
using AddPositionalForward = Tensor(const Tensor&, const OptionalTensor&, int64_t, const OptionalTensor&, double,
                                    const OptionalTensor&);

const Native<EmbedForward>& embed_kernel() {
  static const Native<EmbedForward> native("embed");
  return native;
}

const Native<AddPositionalForward>& add_positional_kernel() {
  static const Native<AddPositionalForward> native("add_positional");
  return native;
}

struct Embed {
  static constexpr const char* kName = "embed";
  static constexpr size_t kSaved = 2;

  struct Options {
    int64_t vocabulary;
    double scale;
    std::optional<int64_t> padding_idx;
    double dropout_p;
  };

  static Tensor forward(const Tensor& weight, const Tensor& ids, const OptionalTensor& table,
                        const OptionalTensor& offsets, const OptionalTensor& seed, double scale, int64_t offset,
                        std::optional<int64_t> padding_idx, double dropout_p) {
    const Tensor out = embed_kernel()(ids, weight, table, scale, offset, offsets, dropout_p, seed);
    record<Embed>({out}, {ids, or_undefined(seed)}, {weight.size(0), scale, padding_idx, dropout_p}, weight);
    return out;
  }

  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs&) {
    static const Native<EmbedBackward> native("embed_backward");
    constexpr bool deterministic = true;  // the same seed then gives the same training run
    return {native(grads[0], saved[0], options.vocabulary, options.scale, options.padding_idx, options.dropout_p,
                   or_none(saved[1]), deterministic)};
  }
};

struct AddPositional {
  static constexpr const char* kName = "add_positional";
  static constexpr size_t kSaved = 1;

  struct Options {
    double dropout_p;
  };

  static Tensor forward(const Tensor& x, const Tensor& table, const OptionalTensor& offsets, const OptionalTensor& seed,
                        int64_t offset, double dropout_p) {
    const Tensor out = add_positional_kernel()(x, table, offset, offsets, dropout_p, seed);
    record<AddPositional>({out}, {or_undefined(seed)}, {dropout_p}, x);
    return out;
  }

  // The forward's mask applied to the gradient: the same op without a table.
  static variable_list backward(const variable_list& grads, const variable_list& saved, const Options& options,
                                const Needs&) {
    if (options.dropout_p == 0) return {grads[0]};
    return {add_positional_kernel()(grads[0], std::nullopt, 0, std::nullopt, options.dropout_p, saved[0])};
  }
};

bool table_fits(const Tensor& table, const Tensor& x, int64_t offset, int64_t length) {
  return (table.scalar_type() == at::kFloat || table.scalar_type() == x.scalar_type()) && table.dim() == 2 &&
         table.size(1) == x.size(-1) && offset >= 0 && table.size(0) - offset >= length && !table.requires_grad();
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
    out = needs_gradient(weight)
              ? Embed::forward(weight, ids, table, offset.each, seed, scale, offset.common, padding_idx, dropout_p)
              : embed_kernel()(ids, weight, table, scale, offset.common, offset.each, dropout_p, seed);
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
    out = needs_gradient(x) ? AddPositional::forward(x, table, offset.each, seed, offset.common, dropout_p)
                            : add_positional_kernel()(x, table, offset.common, offset.each, dropout_p, seed);
  }
  return wrap(out);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace transformer_fast::direct
