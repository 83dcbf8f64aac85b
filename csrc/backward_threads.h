// The backend that a thread has chosen, for the threads that compute its gradients: PyTorch hands them what
// ThreadLocalPythonObjects holds. transformer_fast/backends.py says why they need it.
#pragma once

#include <pybind11/pybind11.h>

namespace transformer_fast {

// Keeps a backend's name, or None, for backward passes that begin in this thread.
void keep_for_backward(pybind11::object backend);

// The backend that was kept, in this thread or in the one whose backward pass this thread computes; else None.
pybind11::object kept_for_backward();

}  // namespace transformer_fast
