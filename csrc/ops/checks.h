// Checks of an op's arguments, before a kernel sees them: rank, sizes, dtype and device of tensors, and numbers. An op
// checks on every way into it: eager, compiled, exported. While a graph is made, sizes are symbolic, and a check becomes
// a condition of the graph. Each error names the op and the argument.
//
// Values of tensors are read on the CPU only, where the op runs. On a GPU, reading would wait for the device; there the
// kernels keep within their tensors for all values.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/SymBool.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace transformer_fast {

inline bool holds(const c10::SymBool& condition) {
  const std::optional<bool> known = condition.maybe_as_bool();
  return known ? *known : condition.expect_true(__FILE__, __LINE__);
}

// The name of a type in Python.
inline std::string dtype_name(at::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

// A tensor argument of an op, which outlives this object. All checks of a missing tensor hold.
class Argument {
 public:
  Argument(const char* op, const char* name, const at::Tensor& tensor) : op_(op), name_(name), tensor_(tensor) {}

  // Raises ValueError: "<op>: <name> must be <expected>, got ...".
  template <typename... Expected>
  const Argument& require(bool condition, const Expected&... expected) const {
    TORCH_CHECK_VALUE(condition, op_, ": ", name_, " must be ", expected..., ", got shape ", tensor_.sym_sizes());
    return *this;
  }

  const Argument& required(const char* when) const {
    TORCH_CHECK_VALUE(tensor_.defined(), op_, ": ", name_, " must be a tensor ", when, ", got None");
    return *this;
  }

  const Argument& type(std::initializer_list<at::ScalarType> types) const {
    if (!tensor_.defined()) return *this;
    const at::ScalarType type = tensor_.scalar_type();
    if (std::find(types.begin(), types.end(), type) != types.end()) return *this;
    std::string expected;
    for (const at::ScalarType other : std::set<at::ScalarType>(types))
      expected += (expected.empty() ? "" : " or ") + dtype_name(other);
    TORCH_CHECK_TYPE(false, op_, ": ", name_, " must be a tensor of ", expected, ", got ", dtype_name(type));
  }
  const Argument& type_of(const at::Tensor& other) const { return type({other.scalar_type()}); }
  // float64, float32, float16 or bfloat16.
  const Argument& floating() const {
    if (!tensor_.defined()) return *this;
    const at::ScalarType type = tensor_.scalar_type();
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16, op_, ": ",
                     name_, " must be a float tensor, got ", dtype_name(type));
    return *this;
  }
  const Argument& integer() const { return type({at::kLong, at::kInt}); }

  const Argument& on_device_of(const at::Tensor& other) const {
    TORCH_CHECK_VALUE(!tensor_.defined() || tensor_.device() == other.device(), op_, ": ", name_, " must be on ",
                      other.device(), ", got ", tensor_.device());
    return *this;
  }

  const Argument& rank(int64_t dimensions, const char* layout) const {
    return require(!tensor_.defined() || tensor_.dim() == dimensions, layout);
  }
  const Argument& rank_at_least(int64_t dimensions, const char* layout) const {
    return require(!tensor_.defined() || tensor_.dim() >= dimensions, layout);
  }

  const Argument& sizes(c10::SymIntArrayRef expected) const { return fits(expected, /*broadcasts=*/false); }
  // Each size is 1 or as expected.
  const Argument& broadcasts_to(c10::SymIntArrayRef expected) const { return fits(expected, /*broadcasts=*/true); }

  // Sizes, dtype and device of another tensor.
  const Argument& like(const at::Tensor& other) const {
    return type_of(other).on_device_of(other).sizes(other.sym_sizes());
  }

  // Rows that kernels read without gaps.
  const Argument& unit_stride() const {
    return require(!tensor_.defined() || tensor_.dim() == 0 ||
                       holds(tensor_.sym_size(-1).sym_le(1).sym_or(tensor_.sym_stride(-1).sym_eq(1))),
                   "contiguous along its last dimension");
  }

 private:
  const Argument& fits(c10::SymIntArrayRef expected, bool broadcasts) const {
    if (!tensor_.defined()) return *this;
    bool fitting = tensor_.dim() == static_cast<int64_t>(expected.size());
    for (size_t dim = 0; fitting && dim < expected.size(); ++dim) {
      const c10::SymInt& size = tensor_.sym_sizes()[dim];
      const c10::SymBool equal = size.sym_eq(expected[dim]);
      fitting = holds(broadcasts ? equal.sym_or(size.sym_eq(1)) : equal);
    }
    return require(fitting, broadcasts ? "broadcastable to " : "of shape ", expected);
  }

  const char *op_, *name_;
  const at::Tensor& tensor_;
};

// The arguments of one call of an op.
struct Checks {
  const char* op;

  Argument operator()(const char* name, const at::Tensor& tensor) const { return {op, name, tensor}; }
  Argument operator()(const char* name, const std::optional<at::Tensor>& tensor) const {
    static const at::Tensor missing;
    return {op, name, tensor ? *tensor : missing};
  }

  // Raises ValueError: "<op>: <message>".
  template <typename... Message>
  void require(bool condition, const Message&... message) const {
    TORCH_CHECK_VALUE(condition, op, ": ", message...);
  }

  void probability(const char* name, double p) const {
    require(p >= 0 && p <= 1, name, " must lie in [0, 1], got ", p);
  }

  // Dropout of x; the seed is read where p is above 0. `on_host`: it may be on the host, whatever the device of x.
  void dropout(const at::Tensor& x, double p, const std::optional<at::Tensor>& seed, const char* name = "dropout_p",
               bool on_host = false) const {
    probability(name, p);
    if (p == 0) return;
    const Argument argument = (*this)("seed", seed);
    argument.required("with dropout").type({at::kLong}).sizes({1});
    if (!(on_host && seed->is_cpu())) argument.on_device_of(x);
  }
};

}  // namespace transformer_fast
