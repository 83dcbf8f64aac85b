// Loops that are divided among the threads of OpenMP, as at::parallel_for divides them. The runtime is the one that
// PyTorch has loaded; csrc/instruction_set.cpp passes the number of torch.set_num_threads() to it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace transformer_fast {

// Smallest number of rows of d elements per thread: fewer rows are not worth waking a thread.
inline int64_t grain(int64_t d) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, d)); }

inline int64_t thread_count() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// Calls part(first, last) on ranges that cover [begin, end), each but the last with at least `least` indices. Inside a
// parallel loop there is one range. The first exception of a part is thrown again after all parts have ended.
template <typename Part>
void parallel_for(int64_t begin, int64_t end, int64_t least, const Part& part) {
  if (begin >= end) return;
#ifdef _OPENMP
  const int64_t count = end - begin;
  if (count > least && count > 1 && !omp_in_parallel() && thread_count() > 1) {
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;
    // No num_threads clause: GNU's runtime would end the other threads, and start new ones for the next loop.
#pragma omp parallel
    {
      const auto divided_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
      int64_t threads = omp_get_num_threads();
      if (least > 0) threads = std::min(threads, divided_up(count, least));
      const int64_t size = divided_up(count, threads), first = begin + omp_get_thread_num() * size;
      if (first < end) {
        try {
          part(first, std::min(end, first + size));
        } catch (...) {
          if (!failed.test_and_set()) error = std::current_exception();
        }
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  part(begin, end);
}

}  // namespace transformer_fast
