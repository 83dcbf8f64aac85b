// The library of the ops, which needs no Python: torch.ops.load_library loads it, and transformer_fast/extension.py calls the
// functions whose names begin with transformer_fast_. The Python module (python/bindings.cpp) takes from it the doors of
// the ops and what else is here.
#pragma once

#include "../inference/kept_weight.h"
#include "../inference/weight_stamp.h"
#include "door.h"
#include "python_hooks.h"

#include <atomic>
#include <vector>

namespace transformer_fast {

struct Library {
  const std::vector<eager::Door>& doors;
  PythonHooks& hooks;
  std::atomic<bool>&launches_on_cpu, &triton_is_chosen;  // of by_triton.h
  decltype(&KeptWeight::copy_for) copy_for;
  decltype(&transformer_fast::kept_product) kept_product;
  decltype(&transformer_fast::stamp_of) stamp_of;
};

}  // namespace transformer_fast
