// Faults as a kernel might have them: tools/sanitize.py runs them to see that they would be reported. These functions
// are built as the kernels are, and are no part of the package.
#include <omp.h>

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

// Every thread adds to the same sum.
EXPORTED void sum_by_threads_at_once(const float* row, int64_t columns, float* sum) {
#pragma omp parallel for
  for (int64_t c = 0; c < columns; ++c) *sum += row[c];
}

// No fault: the sums of the threads, added after the last of them. The sanitizers must report nothing.
EXPORTED float sum_by_threads(const float* row, int64_t columns) {
  float sums[256] = {}, sum = 0;
#pragma omp parallel for
  for (int64_t c = 0; c < columns; ++c) sums[omp_get_thread_num()] += row[c];
  for (const float one : sums) sum += one;
  return sum;
}
