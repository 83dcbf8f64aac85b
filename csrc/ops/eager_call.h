// What makes a call plain: nothing observes it, and its tensors are those of PyTorch itself. In the library of the ops
// and in the Python module.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>

namespace transformer_fast::eager {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// True if a torch function mode that is not transformer_fast.functional() is active in this thread. Only Python knows the
// class of a mode: the library asks the Python module.
bool has_other_function_mode();

// True if a mode, a transform or a tracer of this thread observes dispatched calls, or if autograd is excluded.
inline bool has_active_modes() {
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet usual = c10::default_included_set | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet without_autograd = local.excluded_ & c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return !usual.has_all(local.included_) || (!c10::InferenceMode::is_enabled() && !without_autograd.empty()) ||
         has_other_function_mode();
}

// True for a plain CPU tensor (or with `any_device` a GPU tensor): no subclass, no wrapper, no lazy negation, not
// sparse.
inline bool is_plain(const Tensor& tensor, bool any_device = false) {
  static const c10::DispatchKeySet on_cpu = [] {
    const c10::InferenceMode outside(false);  // tensors made in inference mode have fewer keys
    return at::detail::empty_cpu({0}, at::kFloat).key_set();
  }();
  constexpr auto cuda = c10::BackendComponent::CUDABit;
  static const c10::DispatchKeySet on_cuda = c10::DispatchKeySet(c10::DispatchKey::CUDA) |
                                             c10::getAutogradRelatedKeySetFromBackend(cuda) |
                                             c10::getAutocastRelatedKeySetFromBackend(cuda);
  return on_cpu.has_all(tensor.key_set()) || (any_device && on_cuda.has_all(tensor.key_set()));
}

// True if all defined tensors are plain and nothing observes calls on them.
template <typename Tensors>
bool is_plain_eager(const Tensors& tensors, bool any_device = false) {
  const auto plain = [&](const Tensor& tensor) { return !tensor.defined() || is_plain(tensor, any_device); };
  return !has_active_modes() && std::all_of(tensors.begin(), tensors.end(), plain);
}

// True if the tensor has a forward-mode tangent.
inline bool has_tangent(const Tensor& tensor) { return tensor._fw_grad(/*level=*/0).defined(); }

inline bool requires_grad(const Tensor& tensor) { return tensor.requires_grad(); }
inline bool requires_grad(const OptionalTensor& tensor) { return tensor && tensor->requires_grad(); }

template <typename... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Conversion between optional arguments and saved tensors, which may be undefined.
inline Tensor or_undefined(const OptionalTensor& tensor) { return tensor ? *tensor : Tensor(); }
inline OptionalTensor or_none(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }

}  // namespace transformer_fast::eager
