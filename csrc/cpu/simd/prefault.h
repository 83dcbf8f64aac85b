// Page faults of new memory for large results, taken ahead of the writes.
//
// The system maps memory page by page, at the first write to a page. An allocator such as glibc's returns large blocks
// to the system at each free. The page faults then take most of the time of a memory-bound op. One call for many pages
// is cheaper.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23  // Linux 5.14; an older kernel refuses it, and pages are mapped one by one
#endif
#endif

namespace transformer_fast {
namespace {

constexpr intptr_t kPageBytes = 4096;
constexpr intptr_t kAheadBytes = 262144;  // fits in a core's cache beside the inputs
constexpr intptr_t kLeastBytes = 524288;  // minimum size of a part; for less, the call costs more than it saves

// The part of a result that one thread writes, in order.
class Pages {
 public:
  Pages() = default;  // of an absent result

  template <typename T>
  Pages(T* begin, T* end)
      : next_(reinterpret_cast<intptr_t>(begin) / kPageBytes * kPageBytes), end_(reinterpret_cast<intptr_t>(end)) {
    // A page in the middle, because the ends of a block hold allocator data, which is mapped already.
    const intptr_t pages = (end_ - next_) / kPageBytes;
    if (end_ - next_ < kLeastBytes || !fresh(next_ + pages / 2 * kPageBytes)) end_ = next_;
  }

  // To be called before anything up to `place` is written.
  template <typename T>
  void prefault(const T* place) {
    while (next_ < end_ && next_ < reinterpret_cast<intptr_t>(place)) populate();
  }

 private:
#if defined(__linux__)
  static bool fresh(intptr_t page) {
    unsigned char resident = 1;
    return mincore(reinterpret_cast<void*>(page), kPageBytes, &resident) == 0 && !(resident & 1);
  }

  void populate() {
    const intptr_t bytes = end_ - next_ < kAheadBytes ? end_ - next_ : kAheadBytes;
    madvise(reinterpret_cast<void*>(next_), bytes, MADV_POPULATE_WRITE);
    next_ += kAheadBytes;
  }
#else
  static bool fresh(intptr_t) { return false; }
  void populate() {}
#endif

  intptr_t next_ = 0, end_ = 0;
};

// Calls body(first row, last row) over the rows [begin, end) of a result in steps, after mapping the pages of a step.
template <typename T, typename Body>
void for_blocks(T* result, int64_t d, int64_t begin, int64_t end, int64_t rows, Pages& pages, const Body& body) {
  for (int64_t first = begin, last; first < end; first = last) {
    last = first + rows < end ? first + rows : end;
    pages.prefault(result + last * d);
    body(first, last);
  }
}

}  // namespace
}  // namespace transformer_fast
