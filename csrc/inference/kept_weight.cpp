#include "kept_weight.h"

#include "../ops/linear.h"
#include "prepacked_linear.h"

#include <ATen/Context.h>

#include <optional>
#include <utility>

namespace transformer_fast {
namespace {

using OnednnWeight = Tensor(const Tensor&, std::optional<c10::SymInt>);

bool onednn_takes(at::ScalarType type) {
  static const bool narrow = [] {
    const auto asked = onednn_op<bool()>("mkldnn::_is_mkldnn_bf16_supported");
    return asked && asked->call();
  }();
  return type == at::kFloat || (type == at::kBFloat16 && narrow);
}

// Copy of a weight in oneDNN's layout for about this many rows; undefined in a build without oneDNN.
Tensor blocked(const Tensor& weight, int64_t rows) {
  static const auto reorder = onednn_op<OnednnWeight>("mkldnn::_reorder_linear_weight");
  if (!reorder || !at::globalContext().userEnabledMkldnn() || !onednn_takes(weight.scalar_type())) return {};
  const c10::InferenceMode outside(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  return reorder->call(weight.detach().contiguous(), c10::SymInt(rows));
}

}  // namespace

KeptWeight::Source::Source(const Tensor& weight)
    : data(weight.const_data_ptr()), version(weight._version()), type(weight.scalar_type()),
      geometry(weight.sizes().begin(), weight.sizes().end()), stamp(stamp_of(weight)) {
  geometry.append(weight.strides().begin(), weight.strides().end());
}

Tensor KeptWeight::copy_for(const Tensor& weight, int64_t rows) {
  const bool narrow = weight.scalar_type() == at::kBFloat16;
  const bool native =
      narrow ? has_narrow_linear() && rows <= narrow_rows_ : weight.scalar_type() == at::kFloat && rows <= native_rows_;
  const bool wide = weight.scalar_type() != at::kFloat || rows <= blocked_rows_ ||
                    onednn_is_faster(rows, weight.size(1), weight.size(0));
  if (!native && !wide) return {};
  Source source(weight);
  if (!source_ || !(*source_ == source)) {
    native_ = blocked_ = Tensor();
    source_ = std::move(source);
  }
  if (native) {
    if (!native_.defined()) native_ = pack_weight(weight.detach(), /*int8=*/false);
    return native_;
  }
  if (!blocked_.defined()) blocked_ = blocked(weight, blocked_rows_);
  return blocked_;
}

Tensor kept_product(const Tensor& x, const Tensor& copy, const OptionalTensor& bias, int64_t outputs) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return copy.is_mkldnn() ? onednn_linear(x, copy, bias) : packed_linear(x, copy, bias, outputs, "none");
}

}  // namespace transformer_fast
