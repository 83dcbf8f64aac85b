// Products with kept weights in evaluation: arguments from Python, and the result for it.
#include "../inference/kept_weight.h"

#include "../ops/eager_call.h"
#include "../ops/library.h"
#include "python_function.h"
#include "python_module.h"

#include <ATen/autocast_mode.h>

namespace transformer_fast::eager {
namespace {

namespace py = pybind11;

// Reads the arguments of a call one by one. After the last argument, ok() returns true if all arguments were valid.
class Arguments {
 public:
  Arguments() : ok_(!has_active_modes()) {}

  bool ok() const { return ok_; }
  void require(bool condition) { ok_ = ok_ && condition; }

  // float64, float32, float16 or bfloat16.
  Tensor floating(py::handle argument) {
    require(ok_ && THPVariable_CheckExact(argument.ptr()));
    if (!ok_) return {};
    const Tensor& tensor = THPVariable_Unpack(argument.ptr());
    require(is_plain(tensor) && !has_tangent(tensor));
    require(at::isFloatingType(tensor.scalar_type()) && at::elementSize(tensor.scalar_type()) >= 2);
    return tensor;
  }

  OptionalTensor optional_floating(py::handle argument) {
    return argument.is_none() ? std::nullopt : OptionalTensor(floating(argument));
  }

 private:
  bool ok_;
};

py::object computed(const Tensor& x, const Tensor& copy, const OptionalTensor& bias, int64_t outputs) {
  HANDLE_TH_ERRORS
  Tensor result;
  {
    const py::gil_scoped_release no_gil;
    result = library().kept_product(x, copy, bias, outputs);
  }
  return wrap(result);
  END_HANDLE_TH_ERRORS_PYBIND
}

// x weight^T + bias, or None for a call that another product must compute.
py::object kept_linear(KeptWeight& kept, py::handle x_, py::handle weight_, py::handle bias_) {
  Arguments arguments;
  const Tensor x = arguments.floating(x_), weight = arguments.floating(weight_);
  const OptionalTensor bias = arguments.optional_floating(bias_);
  if (!arguments.ok() || at::autocast::is_autocast_enabled(at::kCPU) || x.dim() < 2 || weight.dim() != 2)
    return py::none();
  const int64_t in = weight.size(1), out = weight.size(0);
  arguments.require(x.size(-1) == in && x.scalar_type() == weight.scalar_type() && x.numel() > 0 && out > 0);
  if (bias) arguments.require(bias->sizes() == weight.sizes().slice(0, 1) && bias->scalar_type() == x.scalar_type());
  arguments.require(!weight.is_inference() && !needs_gradient(x, weight, bias));
  if (!arguments.ok()) return py::none();
  const Tensor copy = (kept.*library().copy_for)(weight, x.numel() / in);
  return copy.defined() ? computed(x, copy, bias, out) : py::none();
}

PYTHON_MODULE_FRAGMENT(m) {
  py::class_<KeptWeight>(m, "KeptWeight")
      .def(py::init<int64_t, int64_t, int64_t>(), py::kw_only(), py::arg("native_rows"), py::arg("narrow_rows"),
           py::arg("blocked_rows"))
      .def("linear", &kept_linear)
      .def_property_readonly("bytes", &KeptWeight::bytes);
}

}  // namespace
}  // namespace transformer_fast::eager
