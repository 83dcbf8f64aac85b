// The doors of the ops, by which Python calls them in eager mode without PyTorch's dispatcher (op.h makes them). A door
// is known by its types alone: the Python module (python/doors.cpp) converts the arguments, for all doors alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace transformer_fast::eager {

enum class Kind : uint8_t { kTensor, kNumber, kInteger, kBoolean, kBooleans, kText };

// What a door takes in one place.
struct Parameter {
  Kind kind;
  bool optional;
  uint8_t size = 0;  // of booleans
};

// A converted argument.
struct Value {
  static constexpr size_t kAbsent = -1;

  union {
    const at::Tensor* tensor;
    double number;
    int64_t integer;  // of booleans, a bit for each
    const char* text;
  };
  size_t size;  // of the text, or kAbsent for None
};

constexpr size_t kMostParameters = 40, kMostResults = 2;
constexpr size_t kAllOfIt = -1;  // autocast changes the results too

// What the door of an op needs to know beside its signature.
struct DoorOptions {
  size_t results = 1;  // number of results that the caller gets
  size_t casts = 0;    // number of first arguments that autocast casts; where it would, the door gives way
  bool checks = true;  // false if `recorded` runs the check itself
  bool plain = true;   // false to take a call that a mode, a transform or a tracer observes
};

struct Door {
  const char* name;
  std::string arguments;  // the schema without the name, for messages
  std::vector<Parameter> parameters;
  DoorOptions options;
  void (*check)(const Value* arguments);
  // Checks and computes a call, on the Triton kernels if `launches`. Results are undefined if missing; the first is for a
  // call that the door does not take.
  void (*call)(bool launches, const Value* arguments, at::Tensor* results);
};

// The doors of all files.
inline std::vector<Door>& doors() {
  static std::vector<Door> all;
  return all;
}

template <typename T>
constexpr bool is_optional = false;
template <typename T>
constexpr bool is_optional<std::optional<T>> = true;

template <typename T>
constexpr Parameter parameter() {
  if constexpr (is_optional<T>) {
    return {parameter<typename T::value_type>().kind, true};
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    return {Kind::kTensor, false};
  } else if constexpr (std::is_same_v<T, double>) {
    return {Kind::kNumber, false};
  } else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, c10::SymInt>) {
    return {Kind::kInteger, false};
  } else if constexpr (std::is_same_v<T, bool>) {
    return {Kind::kBoolean, false};
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return {Kind::kText, false};
  } else {
    return {Kind::kBooleans, false, std::tuple_size_v<T>};
  }
}

// An argument as a function takes it: a reference to the caller's tensor, or a value.
template <typename Arg>
using Kept = std::conditional_t<std::is_same_v<Arg, const at::Tensor&>, const at::Tensor&, std::decay_t<Arg>>;

template <typename T>
T kept(const Value& value) {
  using Plain = std::decay_t<T>;
  if constexpr (is_optional<Plain>) {
    if (value.size == Value::kAbsent) return std::nullopt;
    return Plain(kept<typename Plain::value_type>(value));
  } else if constexpr (std::is_same_v<Plain, at::Tensor>) {
    return *value.tensor;
  } else if constexpr (std::is_same_v<Plain, double>) {
    return value.number;
  } else if constexpr (std::is_same_v<Plain, std::string_view>) {
    return {value.text, value.size};
  } else if constexpr (parameter<Plain>().kind == Kind::kBooleans) {
    Plain booleans;
    for (size_t i = 0; i < booleans.size(); ++i) booleans[i] = (value.integer >> i & 1) != 0;
    return booleans;
  } else {
    return Plain(value.integer);
  }
}

}  // namespace transformer_fast::eager
