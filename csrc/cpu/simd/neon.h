// Operations for which the compiler's code from generic.h is slow on aarch64. A vector is a pair of NEON registers.
#pragma once

#include "generic.h"

namespace transformer_fast {
namespace {

// By halves, because the compiler turns a loop over lanes into one instruction per lane.
inline Vector<float> fma(Vector<float> a, Vector<float> b, Vector<float> c) {
  const auto x = halves_of(a), y = halves_of(b);
  auto z = halves_of(c);
  z.low = vfmaq_f32(z.low, x.low, y.low), z.high = vfmaq_f32(z.high, x.high, y.high);
  std::memcpy(&c, &z, sizeof(c));
  return c;
}

inline Vector<double> fma(Vector<double> a, Vector<double> b, Vector<double> c) {
  const auto x = halves_of(a), y = halves_of(b);
  auto z = halves_of(c);
  z.low = vfmaq_f64(z.low, x.low, y.low), z.high = vfmaq_f64(z.high, x.high, y.high);
  std::memcpy(&c, &z, sizeof(c));
  return c;
}

}  // namespace
}  // namespace transformer_fast
