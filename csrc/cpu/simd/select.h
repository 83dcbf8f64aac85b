// The vector unit that these kernels are compiled for, chosen here and nowhere else. generic.h works on each; a file of
// a unit's own overloads the functions that its instructions do better.
#pragma once

#include <cstdint>

namespace transformer_fast {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#else
constexpr int64_t kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#endif

}  // namespace
}  // namespace transformer_fast

#include "generic.h"

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#elif defined(__aarch64__)
#include "neon.h"
#endif

#if defined(__AVX512BF16__)
#include "avx512_bf16.h"
#endif
