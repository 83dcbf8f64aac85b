// An op in one statement: define_op registers it with the dispatcher, and makes its eager door from the same signature.
//
// A call of PyTorch's dispatcher from Python takes some microseconds, a kernel on a small tensor about one. So a public
// function of transformer_fast/ops first calls the door of its op: a function of the Python module with the op's name,
// and the op's arguments by position behind `launches`. The door converts them by the types of the signature, runs the
// op's check, which raises for a wrong call, and the op without the dispatcher.
//
// The door gives way for a call that is not plain: it returns None where a mode, a transform or a tracer observes calls,
// and for tensor subclasses, proxies and numbers of other classes. Python then calls the op by the dispatcher.
//
// `launches`: true to use the Triton kernels, on any device, instead of the CPU kernels.
#pragma once

#include "by_triton.h"
#include "eager_call.h"
#include "node.h"
#include "operator.h"

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace transformer_fast {
namespace eager {

// The arguments of one call of a door.
class Given {
 public:
  // `without_values`: true to allow tensors on the meta device, where nothing is computed.
  explicit Given(bool any_device, bool without_values = false)
      : any_device_(any_device), without_values_(without_values), gives_way_(has_active_modes()) {}

  bool gives_way() const { return gives_way_; }

  // Raises TypeError if an argument is of a wrong Python type: "<op>: <name> must be <expected>, got <value>".
  // `arguments`: the op's schema.
  void check(const char* op, std::string_view arguments) const {
    if (!wrong_) return;
    for (size_t i = 0; i < place_; ++i) arguments.remove_prefix(arguments.find(',') + 1);
    arguments = arguments.substr(0, arguments.find_first_of(",=)"));
    arguments.remove_prefix(arguments.rfind(' ') + 1);
    const py::handle value(wrong_);
    const std::string shown = of_tensor_ ? py::str(py::type::of(value).attr("__name__")) : py::str(py::repr(value));
    TORCH_CHECK_TYPE(false, op, ": ", arguments, " must be ", expected_, ", got ", shown);
  }

  const Tensor& tensor(size_t place, PyObject* argument) {
    static const Tensor missing;
    if (!THPVariable_CheckExact(argument)) return other(place, argument, "a tensor", Stands::kNothing, true), missing;
    const Tensor& tensor = THPVariable_Unpack(argument);
    const bool plain = is_plain(tensor, any_device_) || (without_values_ && tensor.is_meta());
    if (!plain || has_tangent(tensor)) gives_way_ = true;
    return tensor;
  }

  double number(size_t place, PyObject* argument) {
    if (PyFloat_Check(argument)) return PyFloat_AS_DOUBLE(argument);
    if (!PyLong_CheckExact(argument)) return other(place, argument, "a number", Stands::kNumbers), 0;
    const double value = PyLong_AsDouble(argument);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }

  int64_t integer(size_t place, PyObject* argument) {
    if (!PyLong_Check(argument) || PyBool_Check(argument)) return other(place, argument, "an int", Stands::kInts), 0;
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(argument, &overflow);
    if (overflow != 0) set_wrong(place, argument, "an int of 64 bits");
    return value;
  }

  template <size_t size>
  std::array<bool, size> booleans(size_t place, PyObject* argument) {
    std::array<bool, size> values{};
    if (!PyTuple_Check(argument) || PyTuple_GET_SIZE(argument) != size)
      return other(place, argument, "a tuple"), values;
    for (size_t i = 0; i < size; ++i) values[i] = boolean(place, PyTuple_GET_ITEM(argument, i));
    return values;
  }

  bool boolean(size_t place, PyObject* argument) {
    if (!PyBool_Check(argument)) other(place, argument, "True or False");
    return argument == Py_True;
  }

  std::string_view text(size_t place, PyObject* argument) {
    if (!PyUnicode_Check(argument)) return other(place, argument, "a string"), std::string_view();
    Py_ssize_t size = 0;
    const char* const characters = PyUnicode_AsUTF8AndSize(argument, &size);
    if (!characters) throw python_error();
    return {characters, static_cast<size_t>(size)};
  }

 private:
  void set_wrong(size_t place, PyObject* argument, const char* expected, bool of_tensor = false) {
    if (!wrong_) place_ = place, wrong_ = argument, expected_ = expected, of_tensor_ = of_tensor;
  }

  // Which numbers of other classes may stand for an argument: those of NumPy, and symbols.
  enum class Stands { kNothing, kInts, kNumbers };

  // An argument of another class: the dispatcher may know what to do with it, or it is wrong.
  void other(size_t place, PyObject* argument, const char* expected, Stands stands = Stands::kNothing,
             bool of_tensor = false) {
    const PyNumberMethods* const numbers = Py_TYPE(argument)->tp_as_number;
    const bool is_int = numbers && numbers->nb_index, is_number = is_int || (numbers && numbers->nb_float);
    bool known = (stands == Stands::kInts && is_int) || (stands == Stands::kNumbers && is_number);
    if (THPVariable_Check(argument))
      known = stands != Stands::kInts || !at::isFloatingType(THPVariable_Unpack(argument).scalar_type());
    else if (PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(argument)), "__torch_function__"))
      known = true;
    if (known && !PyBool_Check(argument))
      gives_way_ = true;
    else
      set_wrong(place, argument, expected, of_tensor);
  }

  bool any_device_, without_values_, gives_way_, of_tensor_ = false;
  PyObject* wrong_ = nullptr;  // the first argument of a wrong type
  size_t place_ = 0;
  const char* expected_ = nullptr;
};

// The conversion of an argument of type T.
template <typename T>
auto convert(Given& given, size_t place, PyObject* argument) {
  if constexpr (std::is_same_v<T, double>) {
    return given.number(place, argument);
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return given.integer(place, argument);
  } else if constexpr (std::is_same_v<T, c10::SymInt>) {
    return c10::SymInt(given.integer(place, argument));
  } else if constexpr (std::is_same_v<T, bool>) {
    return given.boolean(place, argument);
  } else if constexpr (std::is_same_v<T, std::string_view>) {
    return given.text(place, argument);
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    return given.booleans<std::tuple_size_v<T>>(place, argument);
  } else {  // optional
    if (argument == Py_None) return T();
    return T(convert<typename T::value_type>(given, place, argument));
  }
}
template <>
inline auto convert<Tensor>(Given& given, size_t place, PyObject* argument) {
  return given.tensor(place, argument);
}

// What a converted argument is kept in: a reference to the caller's tensor, or a value.
template <typename Arg>
using Kept = std::conditional_t<std::is_same_v<Arg, const Tensor&>, const Tensor&, std::decay_t<Arg>>;

template <typename Arg>
Kept<Arg> read(Given& given, size_t place, PyObject* argument) {
  if constexpr (std::is_same_v<Arg, const Tensor&>)
    return given.tensor(place, argument);
  else
    return convert<std::decay_t<Arg>>(given, place, argument);
}

// The first `count` results for Python; undefined ones are left out. A single one is returned as it is.
inline PyObject* wrapped(const Tensor& result) { return THPVariable_Wrap(result); }
template <size_t count, typename... Tensors>
PyObject* wrapped(const std::tuple<Tensors...>& results) {
  std::array<const Tensor*, count> defined{};
  size_t size = 0;
  [&]<size_t... i>(std::index_sequence<i...>) {
    ((std::get<i>(results).defined() ? defined[size++] = &std::get<i>(results) : nullptr), ...);
  }(std::make_index_sequence<count>());
  if (size == 1) return THPVariable_Wrap(*defined[0]);
  PyObject* const tuple = PyTuple_New(static_cast<Py_ssize_t>(size));
  for (size_t i = 0; i < size; ++i) PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), THPVariable_Wrap(*defined[i]));
  return tuple;
}

// True if autocast to a type would change the argument.
inline bool differs(const Tensor& tensor, at::ScalarType type) {
  return tensor.defined() && tensor.scalar_type() != type;
}
inline bool differs(const OptionalTensor& tensor, at::ScalarType type) { return tensor && differs(*tensor, type); }
template <typename Other>
bool differs(const Other&, at::ScalarType) {
  return false;
}

constexpr size_t kAllOfIt = -1;  // autocast changes the results too

// What the door of an op needs to know beside its signature.
struct DoorOptions {
  size_t results = 1;  // number of results that the caller gets
  size_t casts = 0;    // number of first arguments that autocast casts; where it would, the door gives way
  bool checks = true;  // false if `recorded` runs the check itself
};

template <Name name, auto check, auto recorded, DoorOptions options>
struct Door;
template <Name name, auto check, typename Result, typename... Args, Result (*recorded)(bool, Args...),
          DoorOptions options>
struct Door<name, check, recorded, options> {
  template <bool checks_alone>
  static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    try {
      TORCH_CHECK_TYPE(count == sizeof...(Args) + 1, name.text, ": the door takes ", sizeof...(Args) + 1,
                       " arguments, got ", count);
      return run<checks_alone>(arguments[0] == Py_True, arguments + 1, std::index_sequence_for<Args...>());
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    } catch (...) {
      torch::translate_exception_to_python(std::current_exception());
      return nullptr;
    }
  }

  // Adds the door to the Python module, and the op's check alone as "<op>_check", for calls that the reference computes.
  // `arguments`: the schema without the name, for messages.
  static void add(const std::string& arguments) {
    schema() = arguments;
    static const std::string check_name = std::string(name.text) + "_check";
    const auto method = [](PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
      return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
    };
    static PyMethodDef methods[] = {{name.text, method(&call<false>), METH_FASTCALL, nullptr},
                                    {check_name.c_str(), method(&call<true>), METH_FASTCALL, nullptr},
                                    {nullptr, nullptr, 0, nullptr}};
    fragments().push_back([](py::module_& m) { PyModule_AddFunctions(m.ptr(), methods); });
  }

 private:
  static std::string& schema() {
    static std::string text;
    return text;
  }

  template <bool checks_alone, size_t... place>
  static PyObject* run(bool launches, PyObject* const* arguments, std::index_sequence<place...>) {
    Given given(/*any_device=*/launches || checks_alone, /*without_values=*/checks_alone);
    // Braces convert in the order of the arguments.
    const std::tuple<Kept<Args>...> kept{read<Args>(given, place, arguments[place])...};
    if (given.gives_way()) Py_RETURN_NONE;
    if constexpr (checks_alone) {
      given.check(name.text, schema());
      check(std::get<place>(kept)...);
      Py_RETURN_NONE;
    }
    std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
    if constexpr (options.casts > 0) {
      const c10::DeviceType device = std::get<0>(kept).defined() ? std::get<0>(kept).device().type() : at::kCPU;
      if (at::autocast::is_autocast_enabled(device)) {
        const at::ScalarType type = at::autocast::get_autocast_dtype(device);
        const bool changes = ((place < options.casts && differs(std::get<place>(kept), type)) || ...);
        if (options.casts == kAllOfIt || changes) Py_RETURN_NONE;
        no_autocast.emplace(c10::autocast_dispatch_keyset);
      }
    }
    given.check(name.text, schema());
    const Result result = [&] {
      std::optional<py::gil_scoped_release> no_gil;
      if (!launches) no_gil.emplace();
      const KernelsOfForward same(launches);
      if constexpr (options.checks) check(std::get<place>(kept)...);
      return recorded(/*direct=*/true, std::get<place>(kept)...);
    }();
    if constexpr (std::is_same_v<Result, Tensor>)
      return wrapped(result);
    else
      return wrapped<options.results>(result);
  }
};

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
  eager::Door<name, check, recorded, options>::add(arguments);
}

// Defines an op that computes the gradients of another, and that has none itself.
template <Name name, auto check, auto implementation, auto meta, c10::DispatchKey key = kEveryDevice>
void define_backward(torch::Library& m, const std::string& arguments) {
  define<check, implementation, meta, eager::Undifferentiable<name, implementation>::call, key>(m,
                                                                                                name.text + arguments);
}

}  // namespace transformer_fast
