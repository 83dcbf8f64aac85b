// The sinusoidal table of positional encodings on the CPU.
#include "embedding_params.h"

#include "../parallel.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace transformer_fast {

// table[r] = the encoding of position r. Sines and cosines are taken only of every kStep-th position and of the
// steps 0 .. kStep - 1; the rest follow by the addition theorem in fp64, whose error (a few 1e-16) vanishes in fp32.
void fill_positional_table(float* out, int64_t length, int64_t d) {
  constexpr int64_t kStep = 32;
  const int64_t pairs = (d + 1) / 2;

  std::vector<double> frequency(pairs), step_sin(kStep * pairs), step_cos(kStep * pairs);
  for (int64_t i = 0; i < pairs; ++i)
    frequency[i] = std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(d));
  for (int64_t s = 0; s < std::min(kStep, length); ++s)
    for (int64_t i = 0; i < pairs; ++i) {
      step_sin[s * pairs + i] = std::sin(static_cast<double>(s) * frequency[i]);
      step_cos[s * pairs + i] = std::cos(static_cast<double>(s) * frequency[i]);
    }
  parallel_for(0, (length + kStep - 1) / kStep, grain(kStep * d), [&](int64_t begin, int64_t end) {
    std::vector<double> base_sin(pairs), base_cos(pairs);
    for (int64_t block = begin; block < end; ++block) {
      for (int64_t i = 0; i < pairs; ++i) {
        const double angle = static_cast<double>(block * kStep) * frequency[i];
        base_sin[i] = std::sin(angle);
        base_cos[i] = std::cos(angle);
      }
      for (int64_t s = 0; s < std::min(kStep, length - block * kStep); ++s) {
        float* row = out + (block * kStep + s) * d;
        const double *sin_s = &step_sin[s * pairs], *cos_s = &step_cos[s * pairs];
        for (int64_t i = 0; i < pairs; ++i)
          row[2 * i] = static_cast<float>(base_sin[i] * cos_s[i] + base_cos[i] * sin_s[i]);
        for (int64_t i = 0; i < d / 2; ++i)
          row[2 * i + 1] = static_cast<float>(base_cos[i] * cos_s[i] - base_sin[i] * sin_s[i]);
      }
    }
  });
}

}  // namespace transformer_fast
