// Decoding on the CPU, as the Python class DecoderSession.
#pragma once

#include <pybind11/pybind11.h>

namespace transformer_fast {

void bind_decoder_session(pybind11::module_& m);

}  // namespace transformer_fast
