// The doors of the ops as functions of the Python module.
#pragma once

#include "../ops/door.h"

#include <pybind11/pybind11.h>

#include <vector>

namespace transformer_fast::eager {

// The class of the modes of transformer_fast.functional(). Such a mode passes the ops on, so it observes nothing.
extern PyTypeObject* functional_mode;

// Adds each door to the module, and the op's check alone as "<op>_check", for calls that the reference computes.
void add_doors(pybind11::module_& m, const std::vector<Door>& doors);

}  // namespace transformer_fast::eager
