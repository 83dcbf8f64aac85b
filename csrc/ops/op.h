// An op in one statement: define_op registers it with the dispatcher, and makes its eager door from the same signature.
//
// A call of PyTorch's dispatcher from Python takes some microseconds, a kernel on a small tensor about one. So a public
// function of transformer_fast/ops first calls the door of its op: a function of the Python module with the op's name,
// and the op's arguments by position behind `launches`. The door converts them by the types of the signature, runs the
// op's check, which raises for a wrong call, and the op without the dispatcher.
//
// The door gives way for a call that is not plain: it returns None where a mode, a transform or a tracer observes calls,
// and for tensor subclasses, proxies and numbers of other classes. Python then calls the op by the dispatcher, as it does
// where there is no Python module.
//
// `launches`: true to use the Triton kernels, on any device, instead of the CPU kernels.
#pragma once

#include "by_triton.h"
#include "door.h"
#include "eager_call.h"
#include "node.h"
#include "operator.h"

#include <string>
#include <tuple>
#include <utility>

namespace transformer_fast {
namespace eager {

// The first `count` results of a function.
template <size_t count>
void store(at::Tensor result, at::Tensor* results) {
  results[0] = std::move(result);
}
template <size_t count, typename... Tensors>
void store(std::tuple<Tensors...> tensors, at::Tensor* results) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    ((results[i] = std::move(std::get<i>(tensors))), ...);
  }(std::make_index_sequence<count>());
}

template <auto check, auto recorded, DoorOptions options>
struct DoorOf;
template <auto check, typename Result, typename... Args, Result (*recorded)(bool, Args...), DoorOptions options>
struct DoorOf<check, recorded, options> {
  using Places = std::index_sequence_for<Args...>;
  static_assert(sizeof...(Args) <= kMostParameters && options.results <= kMostResults);

  static void add(const char* name, const std::string& arguments) {
    doors().push_back({name, arguments, {parameter<std::decay_t<Args>>()...}, options, &check_alone, &call});
  }

 private:
  template <typename Function, size_t... i>
  static auto apply(const Function& function, const Value* values, std::index_sequence<i...>) {
    return function(eager::kept<Kept<Args>>(values[i])...);
  }

  static void check_alone(const Value* values) {
    apply([](const Args&... args) { check(args...); }, values, Places());
  }

  static void call(bool launches, const Value* values, at::Tensor* results) {
    const KernelsOfForward same(launches);
    const auto compute = [](const auto&... args) {
      if constexpr (options.checks) check(args...);
      return recorded(/*direct=*/true, args...);
    };
    store<options.results>(apply(compute, values, Places()), results);
  }
};

constexpr auto kNoCheck = [](const auto&...) {};

// Adds a door without an op.
template <Name name, auto check, auto recorded, DoorOptions options = {}>
void define_door(const std::string& arguments) {
  DoorOf<check, recorded, options>::add(name.text, arguments);
}

}  // namespace eager

// Defines an op: `arguments` is its schema without the name. `check` checks its arguments on every way into it,
// `implementation` computes it below autograd, `meta` is its shape on the meta device; `recorded` calls the
// implementation and records the call for autograd, directly (its first argument) or by the dispatcher. `key`: CPU for an
// op whose GPU kernels are registered elsewhere.
constexpr auto kEveryDevice = c10::DispatchKey::CompositeExplicitAutograd;
template <Name name, auto check, auto implementation, auto meta, auto recorded, eager::DoorOptions options = {},
          c10::DispatchKey key = kEveryDevice>
void define_op(torch::Library& m, const std::string& arguments) {
  define<check, implementation, meta, Dispatched<recorded>::call, key>(m, name.text + arguments);
  eager::define_door<name, check, recorded, options>(arguments);
}

// Defines an op that computes the gradients of another, and that has none itself.
template <Name name, auto check, auto implementation, auto meta, c10::DispatchKey key = kEveryDevice>
void define_backward(torch::Library& m, const std::string& arguments) {
  define<check, implementation, meta, eager::Undifferentiable<name, implementation>::call, key>(m,
                                                                                                name.text + arguments);
}

}  // namespace transformer_fast
