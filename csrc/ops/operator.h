// Shared parts of the ops of torch.ops.transformer_fast. Each op is defined once, in csrc/ops/<op>.cpp: schema, shapes
// on the meta device, autograd node and choice of kernel. Python calls it by the dispatcher, for tracing, tensor
// subclasses and modes, or by its eager fast path, which calls the same functions.
#pragma once

#include "checks.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace transformer_fast {

// An op of the dispatcher, found once.
template <typename Signature>
class Operator;

template <typename Result, typename... Args>
class Operator<Result(Args...)> {
 public:
  explicit Operator(const char* name)
      : handle_(c10::Dispatcher::singleton()
                    .findSchemaOrThrow((std::string("transformer_fast::") + name).c_str(), "")
                    .template typed<Result(Args...)>()) {}

  Result operator()(Args... args) const { return handle_.call(std::forward<Args>(args)...); }

 private:
  c10::TypedOperatorHandle<Result(Args...)> handle_;
};

// An op's name as an argument of a template.
template <size_t size>
struct Name {
  char text[size];
  constexpr Name(const char (&characters)[size]) { std::copy_n(characters, size, text); }
};

// The op of this name, with the signature of its implementation.
template <Name name, auto implementation>
const auto& op() {
  static const Operator<std::remove_pointer_t<decltype(implementation)>> instance(name.text);
  return instance;
}

// Runs an op below autograd: with `direct` (nothing observes the call) its implementation, else by the dispatcher.
template <Name name, auto implementation, typename... Args>
auto below_autograd(bool direct, const Args&... args) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return direct ? implementation(args...) : op<name, implementation>()(args...);
}

// Wraps a function with an argument `direct` for the dispatcher, which passes false.
template <auto recorded>
struct Dispatched;
template <typename Result, typename... Args, Result (*recorded)(bool, Args...)>
struct Dispatched<recorded> {
  static Result call(Args... args) { return recorded(/*direct=*/false, args...); }
};

// A function behind a check of its arguments.
template <auto check, auto function>
struct Checked;
template <auto check, typename Result, typename... Args, Result (*function)(Args...)>
struct Checked<check, function> {
  static Result call(Args... args) {
    check(args...);
    return function(std::forward<Args>(args)...);
  }
};

// Declares an op: its schema, the check of its arguments, its implementation on every device or on one, on the meta
// device, and for autograd.
template <auto check, auto implementation, auto meta, auto autograd,
          c10::DispatchKey key = c10::DispatchKey::CompositeExplicitAutograd>
void define(torch::Library& m, const std::string& schema) {
  m.def(schema.c_str());
  const std::string name = schema.substr(0, schema.find('('));
  constexpr auto checked = Checked<check, implementation>::call, checked_meta = Checked<check, meta>::call;
  m.impl(name.c_str(), torch::dispatch(key, TORCH_FN(checked)));
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, TORCH_FN(checked_meta)));
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Autograd, TORCH_FN(autograd)));
}

// Casts a tensor argument, possibly missing, as autocast does; and a scope without autocast.
template <c10::DeviceType device, typename MaybeTensor>
MaybeTensor autocast(const MaybeTensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}
template <c10::DeviceType device>
struct NoAutocast {
  const c10::impl::ExcludeDispatchKeyGuard guard{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
};

// A contiguous result on the meta device.
inline at::Tensor meta_tensor(const at::Tensor& like, c10::SymIntArrayRef sizes,
                              std::optional<at::ScalarType> dtype = std::nullopt) {
  return at::empty_symint(sizes, dtype ? like.options().dtype(*dtype) : like.options());
}

}  // namespace transformer_fast
