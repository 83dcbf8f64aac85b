// Two faults as a kernel might have them, which tools/sanitize.py makes to see that they would be reported. It is built as
// the kernels are, and is no part of the package.
#include <cstdint>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// One element past the end of the row.
EXPORTED float row_sum_past_the_end(const float* row, int64_t columns) {
  float sum = 0;
  for (int64_t c = 0; c <= columns; ++c) sum += row[c];
  return sum;
}

// 1 in the place of each of `count` lanes: shifted too far from 32 lanes on.
EXPORTED int32_t mask_of_too_many_lanes(int32_t count) {
  int32_t mask = 0;
  for (int32_t lane = 0; lane < count; ++lane) mask |= 1 << lane;
  return mask;
}
