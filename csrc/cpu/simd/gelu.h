// GELU for the vectors of vec.h, x times the normal distribution's cumulative function, to about two ulps of x.
//
// Products and sums are rounded one by one, in the order of transformer_fast/reference/quantized_linear.py, which has
// the same numbers and the sources of the two rational functions.
#pragma once

#include "vec.h"

#include <cstddef>

namespace transformer_fast {
namespace {

template <size_t kTerms>
inline Vector<float> polynomial(Vector<float> x, const float (&terms)[kTerms]) {
  Vector<float> p = broadcast(terms[0]);
  for (size_t i = 1; i < kTerms; ++i) p = p * x + terms[i];
  return p;
}

// x (1 + f(u)) / 2 for an odd rational function f, constant beyond `most`.
template <size_t kOver, size_t kUnder>
inline Vector<float> gate(Vector<float> x, Vector<float> u, float most, const float (&over)[kOver],
                          const float (&under)[kUnder]) {
  u = u > most ? broadcast(most) : u;
  u = u < -most ? broadcast(-most) : u;
  const Vector<float> square = u * u;
  return x * (u * polynomial(square, over) / polynomial(square, under) * 0.5f + 0.5f);
}

inline Vector<float> gelu(Vector<float> x) {
  constexpr float over[] = {-2.72614225801306e-10f, 2.77068142495902e-08f,  -2.10102402082508e-06f,
                            -5.69250639462346e-05f, -7.34990630326855e-04f, -2.95459980854025e-03f,
                            -1.60960333262415e-02f};
  constexpr float under[] = {-1.45660718464996e-05f, -2.13374055278905e-04f, -1.68282697438203e-03f,
                             -7.37332916720468e-03f, -1.42647390514189e-02f};
  return gate(x, x * 0.707106781f, 4.0f, over, under);
}

// With tanh(sqrt(2 / pi) (x + 0.044715 x^3)) in place of erf(x / sqrt(2)).
inline Vector<float> gelu_tanh(Vector<float> x) {
  constexpr float over[] = {-2.76076847742355e-16f, 2.00018790482477e-13f, -8.60467152213735e-11f,
                            5.12229709037114e-08f,  1.48572235717979e-05f, 6.37261928875436e-04f,
                            4.89352455891786e-03f};
  constexpr float under[] = {1.19825839466702e-06f, 1.18534705686654e-04f, 2.26843463243900e-03f,
                             4.89352518554385e-03f};
  return gate(x, (x * x * 0.044715f * x + x) * 0.797884561f, 9.0f, over, under);
}

}  // namespace
}  // namespace transformer_fast
