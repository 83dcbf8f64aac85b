// The libraries of CPU kernels, one per instruction set; the package chooses one on import.
#pragma once

#include <string>
#include <vector>

namespace transformer_fast {

// The instruction sets with kernels that this processor runs, the best first; setup.py has their compiler flags.
std::vector<std::string> supported_instruction_sets();

// Loads a library of kernels, which must come from the same sources. From then on, every op uses that
// library.
void load_kernels(const std::string& path);

}  // namespace transformer_fast
