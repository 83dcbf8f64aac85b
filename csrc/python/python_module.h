// What the Python module has besides the doors of the ops. Each file adds its own functions and classes, as
// TORCH_LIBRARY_FRAGMENT adds ops:
//
//   PYTHON_MODULE_FRAGMENT(m) { m.def("name", &function); }
#pragma once

#include "../ops/door.h"

#include <c10/macros/Macros.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace transformer_fast {

struct Library;

// The library of the ops that the module was connected to.
const Library& library();

namespace eager {

// The class of the modes of transformer_fast.functional(). Such a mode passes the ops on, so it observes nothing.
extern PyTypeObject* functional_mode;

// Adds each door to the module, and the op's check alone as "<op>_check", for calls that the reference computes.
void add_doors(pybind11::module_& m, const std::vector<Door>& doors);

}  // namespace eager

using Fragment = void (*)(pybind11::module_&);

// The fragments of all files; bindings.cpp runs them when Python imports the module.
inline std::vector<Fragment>& fragments() {
  static std::vector<Fragment> all;
  return all;
}

struct AddFragment {
  explicit AddFragment(Fragment fragment) { fragments().push_back(fragment); }
};

}  // namespace transformer_fast

#define PYTHON_MODULE_FRAGMENT(m) TRANSFORMER_FAST_FRAGMENT(m, C10_UID)
#define TRANSFORMER_FAST_FRAGMENT(m, number) TRANSFORMER_FAST_FRAGMENT_OF(m, number)
#define TRANSFORMER_FAST_FRAGMENT_OF(m, number)                                                  \
  static void python_fragment_##number(pybind11::module_&);                                      \
  static const ::transformer_fast::AddFragment add_fragment_##number(&python_fragment_##number); \
  static void python_fragment_##number(pybind11::module_& m)
