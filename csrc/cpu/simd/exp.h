// exp and tanh for the vectors of vec.h.
#pragma once

#include "vec.h"

#include <cmath>

namespace transformer_fast {
namespace {

// exp(x) to about one ulp for x <= 0 and a little above; 0 where the true value is below the smallest normal number.
// exp(x) = 2^n exp(r), |r| <= ln(2) / 2. Adding `shift` leaves n in the low bits of the sum.
inline Vector<float> exponential(Vector<float> x) {
  constexpr float shift = 12582912.0f;  // 1.5 * 2^23
  x = x < -88.0f ? broadcast(-88.0f) : x;
  const Vector<float> shifted = fma(x, 1.44269504f, shift), n = shifted - shift;
  const Vector<float> r = fma(n, 2.12194440e-4f, fma(n, -0.693359375f, x));  // ln(2), its high part exact
  // Minimax for the relative error (4e-9), with the terms 1 + r exact.
  Vector<float> p = fma(r, 0x1.6a2352p-10f, 0x1.123a6cp-7f);
  p = fma(p, r, 0x1.5558f4p-5f);
  p = fma(p, r, 0x1.555490p-3f);
  p = fma(p, r, 0x1.fffffcp-2f);
  p = fma(p, r * r, r) + 1.0f;
  return p * reinterpret_cast<Vector<float>>((reinterpret_cast<IntegerVector<float>>(shifted) << 23) + (127 << 23));
}

inline Vector<double> exponential(Vector<double> x) {
  constexpr double shift = 6755399441055744.0;  // 1.5 * 2^52
  x = x < -709.4 ? broadcast(-709.4) : x;
  const Vector<double> shifted = fma(x, 1.4426950408889634, shift), n = shifted - shift;
  const Vector<double> r = fma(n, -0x1.a39ef35793c76p-33, fma(n, -0x1.62e42fee00000p-1, x));
  constexpr double factorial[] = {1,     1,      2,       6,        24,        120,        720,
                                  5040., 40320., 362880., 3628800., 39916800., 479001600., 6227020800.};
  Vector<double> p = broadcast(1 / factorial[13]);
  for (int i = 12; i >= 0; --i) p = fma(p, r, 1 / factorial[i]);
  const auto exponent = (reinterpret_cast<IntegerVector<double>>(shifted) << 52) + (int64_t{1023} << 52);
  return p * reinterpret_cast<Vector<double>>(exponent);
}

// tanh(x) to about two ulps.
inline Vector<float> hyperbolic_tangent(Vector<float> x) {
  const Vector<float> size = x < 0 ? -x : x, square = x * x;
  // Near 0 minimax for the relative error (5e-9), with the term x exact; elsewhere nothing cancels in the exponentials.
  Vector<float> p = fma(square, -0x1.72fc46p-8f, 0x1.518b14p-6f);
  p = fma(p, square, -0x1.b8265cp-5f);
  p = fma(p, square, 0x1.11068ep-3f);
  p = fma(p, square, -0x1.55553p-2f);
  const Vector<float> near = fma(p * square, x, x);
  const Vector<float> decay = exponential(size * -2.0f), far = (1.0f - decay) / (1.0f + decay);
  return size < 0.625f ? near : (x < 0 ? -far : far);
}

inline Vector<double> hyperbolic_tangent(Vector<double> x) {
  for (int64_t lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::tanh(x[lane]);
  return x;
}

}  // namespace
}  // namespace transformer_fast
