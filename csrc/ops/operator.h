// What the ops of torch.ops.transformer_fast share. Each op stands once, in csrc/ops/<op>.cpp: its schema, its shapes on
// the meta device, its autograd node and its choice of kernel. From Python it is reached by the dispatcher, which serves
// tracing, tensor subclasses and modes, or by its eager fast path, which calls the same functions.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <string>
#include <string_view>
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

// What an op computes, recorded by nobody: by its implementation where `direct` says that nothing looks at the call,
// else by the dispatcher.
template <typename Result, typename... Args, typename... Given>
Result below_autograd(Result (*implementation)(Args...), const Operator<Result(Args...)>& op, bool direct,
                      const Given&... args) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return direct ? implementation(args...) : op(args...);
}

// What autocast makes of an op's tensor, or of one that may be missing; and the scope in which it is off.
template <c10::DeviceType device, typename MaybeTensor>
MaybeTensor autocast(const MaybeTensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}
template <c10::DeviceType device>
struct NoAutocast {
  const c10::impl::ExcludeDispatchKeyGuard guard{at::autocast::get_autocast_dispatch_key_from_device_type(device)};
};

// Whether an op's argument `backend` asks for the kernels of csrc, and not for those in Triton.
inline bool is_native(std::string_view backend) { return backend == "native"; }

// A contiguous result on the meta device.
inline at::Tensor meta_tensor(const at::Tensor& like, c10::SymIntArrayRef sizes,
                              std::optional<at::ScalarType> dtype = std::nullopt) {
  return at::empty_symint(sizes, dtype ? like.options().dtype(*dtype) : like.options());
}

}  // namespace transformer_fast
