// Copies of a linear layer's weight that are kept for later calls, as the Python class KeptWeight.
#pragma once

#include <pybind11/pybind11.h>

namespace transformer_fast {

void bind_kept_weight(pybind11::module_& m);

}  // namespace transformer_fast
