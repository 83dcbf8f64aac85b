// The doors of the ops (ops/door.h) as functions of the Python module: one converter for all.
#include "../ops/door.h"
#include "../ops/eager_call.h"
#include "python_module.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace transformer_fast::eager {

namespace py = pybind11;

PyTypeObject* functional_mode = nullptr;

bool has_other_function_mode() {
  using Modes = at::impl::PythonTorchFunctionTLS;
  if (!at::impl::torch_function_mode_enabled()) return false;
  for (int64_t place = 0; place < Modes::stack_len(); ++place)
    if (Py_TYPE(Modes::get_stack_at(place)->ptr(getPyInterpreter())) != functional_mode) return true;
  return false;
}

namespace {

// The arguments of one call of a door.
class Arguments {
 public:
  // `without_values`: true to allow tensors on the meta device, where nothing is computed.
  Arguments(const Door& door, bool any_device, bool without_values)
      : door_(door), any_device_(any_device), without_values_(without_values),
        gives_way_(door.options.plain && has_active_modes()) {}

  // True for a call that is not plain.
  bool convert(PyObject* const* arguments) {
    for (size_t place = 0; place < door_.parameters.size(); ++place) {
      const Parameter parameter = door_.parameters[place];
      Value& value = values_[place];
      place_ = place, argument_ = arguments[place], value.size = 0;
      if (argument_ == Py_None && parameter.optional) {
        value.size = Value::kAbsent;
        continue;
      }
      switch (parameter.kind) {
        case Kind::kTensor:
          value.tensor = &tensor();
          break;
        case Kind::kNumber:
          value.number = number();
          break;
        case Kind::kInteger:
          value.integer = integer();
          break;
        case Kind::kBoolean:
          value.integer = boolean(argument_);
          break;
        case Kind::kBooleans:
          value.integer = booleans(parameter.size);
          break;
        case Kind::kText:
          value.text = text(value.size);
          break;
      }
    }
    return !gives_way_;
  }

  const Value* values() const { return values_.data(); }

  // True if autocast would change the call. `guard` then is to keep autocast out of a call that it would not change.
  bool is_cast(std::optional<c10::impl::ExcludeDispatchKeyGuard>& guard) const {
    const size_t casts = door_.options.casts;
    if (casts == 0) return false;
    const Tensor& first = *values_[0].tensor;
    const c10::DeviceType device = first.defined() ? first.device().type() : at::kCPU;
    if (!at::autocast::is_autocast_enabled(device)) return false;
    if (casts == kAllOfIt) return true;
    const at::ScalarType type = at::autocast::get_autocast_dtype(device);
    for (size_t place = 0; place < casts; ++place)
      if (const Tensor& tensor = *values_[place].tensor; tensor.defined() && tensor.scalar_type() != type) return true;
    guard.emplace(c10::autocast_dispatch_keyset);
    return false;
  }

  // Raises TypeError if an argument is of a wrong Python type: "<op>: <name> must be <expected>, got <value>".
  void check() const {
    if (!wrong_) return;
    std::string_view arguments = door_.arguments;
    for (size_t i = 0; i < wrong_place_; ++i) arguments.remove_prefix(arguments.find(',') + 1);
    arguments = arguments.substr(0, arguments.find_first_of(",=)"));
    arguments.remove_prefix(arguments.rfind(' ') + 1);
    const py::handle value(wrong_);
    const bool of_tensor = door_.parameters[wrong_place_].kind == Kind::kTensor;
    const std::string shown = of_tensor ? py::str(py::type::of(value).attr("__name__")) : py::str(py::repr(value));
    TORCH_CHECK_TYPE(false, door_.name, ": ", arguments, " must be ", expected_, ", got ", shown);
  }

 private:
  const Tensor& tensor() {
    static const Tensor missing;
    if (!THPVariable_CheckExact(argument_)) return other("a tensor"), missing;
    const Tensor& tensor = THPVariable_Unpack(argument_);
    const bool plain = is_plain(tensor, any_device_) || (without_values_ && tensor.is_meta());
    if (!plain || has_tangent(tensor)) gives_way_ = true;
    return tensor;
  }

  double number() {
    if (PyFloat_Check(argument_)) return PyFloat_AS_DOUBLE(argument_);
    if (!PyLong_CheckExact(argument_)) return other("a number", Stands::kNumbers), 0;
    const double value = PyLong_AsDouble(argument_);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }

  int64_t integer() {
    if (!PyLong_Check(argument_) || PyBool_Check(argument_)) return other("an int", Stands::kInts), 0;
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(argument_, &overflow);
    if (overflow != 0) set_wrong("an int of 64 bits");
    return value;
  }

  bool boolean(PyObject* argument) {
    if (!PyBool_Check(argument)) argument_ = argument, other("True or False");
    return argument == Py_True;
  }

  int64_t booleans(size_t size) {
    PyObject* const tuple = argument_;
    if (!PyTuple_Check(tuple) || static_cast<size_t>(PyTuple_GET_SIZE(tuple)) != size) return other("a tuple"), 0;
    int64_t bits = 0;
    for (size_t i = 0; i < size; ++i) bits |= int64_t{boolean(PyTuple_GET_ITEM(tuple, i))} << i;
    return bits;
  }

  const char* text(size_t& size) {
    if (!PyUnicode_Check(argument_)) return other("a string"), nullptr;
    Py_ssize_t length = 0;
    const char* const characters = PyUnicode_AsUTF8AndSize(argument_, &length);
    if (!characters) throw python_error();
    size = static_cast<size_t>(length);
    return characters;
  }

  void set_wrong(const char* expected) {
    if (!wrong_) wrong_place_ = place_, wrong_ = argument_, expected_ = expected;
  }

  // Which numbers of other classes may stand for an argument: those of NumPy, and symbols.
  enum class Stands { kNothing, kInts, kNumbers };

  // An argument of another class: the dispatcher may know what to do with it, or it is wrong.
  void other(const char* expected, Stands stands = Stands::kNothing) {
    const PyNumberMethods* const numbers = Py_TYPE(argument_)->tp_as_number;
    const bool is_int = numbers && numbers->nb_index, is_number = is_int || (numbers && numbers->nb_float);
    bool known = (stands == Stands::kInts && is_int) || (stands == Stands::kNumbers && is_number);
    if (THPVariable_Check(argument_))
      known = stands != Stands::kInts || !at::isFloatingType(THPVariable_Unpack(argument_).scalar_type());
    else if (PyObject_HasAttrString(reinterpret_cast<PyObject*>(Py_TYPE(argument_)), "__torch_function__"))
      known = true;
    if (known && !PyBool_Check(argument_))
      gives_way_ = true;
    else
      set_wrong(expected);
  }

  const Door& door_;
  bool any_device_, without_values_, gives_way_;
  std::array<Value, kMostParameters> values_;
  size_t place_ = 0;  // of the argument that is being converted
  PyObject* argument_ = nullptr;
  PyObject* wrong_ = nullptr;  // the first argument of a wrong type
  size_t wrong_place_ = 0;
  const char* expected_ = nullptr;
};

// Results for Python; undefined ones are left out. A single one is returned as it is, none as None.
PyObject* wrapped(const std::array<Tensor, kMostResults>& results) {
  Py_ssize_t size = 0;
  std::array<const Tensor*, kMostResults> defined;
  for (const Tensor& result : results)
    if (result.defined()) defined[size++] = &result;
  if (size == 0) Py_RETURN_NONE;
  if (size == 1) return THPVariable_Wrap(*defined[0]);
  PyObject* const tuple = PyTuple_New(size);
  for (Py_ssize_t i = 0; i < size; ++i) PyTuple_SET_ITEM(tuple, i, THPVariable_Wrap(*defined[i]));
  return tuple;
}

PyObject* run_check(const Door& door, PyObject* const* passed) {
  Arguments arguments(door, /*any_device=*/true, /*without_values=*/true);
  if (!arguments.convert(passed + 1)) Py_RETURN_NONE;
  arguments.check();
  door.check(arguments.values());
  Py_RETURN_NONE;
}

PyObject* run(const Door& door, PyObject* const* passed) {
  const bool launches = passed[0] == Py_True;
  Arguments arguments(door, /*any_device=*/launches, /*without_values=*/false);
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_autocast;
  if (!arguments.convert(passed + 1) || arguments.is_cast(no_autocast)) Py_RETURN_NONE;
  arguments.check();
  std::array<Tensor, kMostResults> results;
  {
    std::optional<py::gil_scoped_release> no_gil;
    if (!launches) no_gil.emplace();
    door.call(launches, arguments.values(), results.data());
  }
  return wrapped(results);
}

// A function of the module, which has the address of its door as its `self`.
template <auto function>
PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  const Door& door = *static_cast<const Door*>(PyCapsule_GetPointer(self, nullptr));
  try {
    const size_t expected = door.parameters.size() + 1;
    TORCH_CHECK_TYPE(static_cast<size_t>(count) == expected, door.name, ": the door takes ", expected,
                     " arguments, got ", count);
    return function(door, arguments);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

void add_function(py::module_& m, const Door& door, const std::string& name,
                  PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  const auto method = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
  const py::capsule self(&door, static_cast<const char*>(nullptr));
  auto* const definition = new PyMethodDef{(new std::string(name))->c_str(), method, METH_FASTCALL, nullptr};
  m.attr(name.c_str()) = py::reinterpret_steal<py::object>(PyCFunction_New(definition, self.ptr()));
}

}  // namespace

void add_doors(py::module_& m, const std::vector<Door>& doors) {
  for (const Door& door : doors) {
    add_function(m, door, door.name, &call<&run>);
    add_function(m, door, std::string(door.name) + "_check", &call<&run_check>);
  }
}

}  // namespace transformer_fast::eager
