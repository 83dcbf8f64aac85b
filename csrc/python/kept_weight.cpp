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

// A tensor of float64, float32, float16 or bfloat16 that is plain; undefined for any other argument.
Tensor plain_floats(py::handle argument) {
  if (!THPVariable_CheckExact(argument.ptr())) return {};
  const Tensor& tensor = THPVariable_Unpack(argument.ptr());
  const bool takes = at::isFloatingType(tensor.scalar_type()) && tensor.element_size() >= 2;
  return takes && is_plain(tensor) && !has_tangent(tensor) ? tensor : Tensor();
}

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
  if (has_active_modes() || at::autocast::is_autocast_enabled(at::kCPU)) return py::none();
  const Tensor x = plain_floats(x_), weight = plain_floats(weight_);
  const OptionalTensor bias = bias_.is_none() ? std::nullopt : std::optional(plain_floats(bias_));
  if (!x.defined() || !weight.defined() || (bias && !bias->defined())) return py::none();
  if (x.dim() < 2 || weight.dim() != 2 || x.numel() == 0 || weight.size(0) == 0) return py::none();
  const int64_t in = weight.size(1), out = weight.size(0);
  const auto has_type = [&](const Tensor& t) { return t.scalar_type() == weight.scalar_type(); };
  if (x.size(-1) != in || !has_type(x) || (bias && (bias->sizes() != weight.sizes().slice(0, 1) || !has_type(*bias))))
    return py::none();
  if (weight.is_inference() || needs_gradient(x, weight, bias)) return py::none();
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
