// The gradient of the embedding's weight on the CPU.
//
// Every row is summed by one thread, or in segments that the batch alone decides, so the result is the same bit for bit
// on every run and for every number of threads.
#include "embedding_common.h"
#include "vec.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <c10/util/irange.h>
#include <torch/library.h>

#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace transformer_fast {
namespace {

// The rows of grad in order of their ids (a counting sort, stable): those of id v are order[starts[v]] up to, but not
// including, order[starts[v + 1]]. padding_idx has none.
struct RowsById {
  std::vector<int64_t> starts, order;

  RowsById(const Ids& ids, int64_t count, int64_t vocabulary, int64_t padding_idx)
      : starts(vocabulary + 1), order(count) {
    for (const auto r : c10::irange(count)) {
      const int64_t id = ids[r];
      if (!ids.valid(id)) ids.raise(r);
      if (id != padding_idx) ++starts[id + 1];
    }
    for (const auto v : c10::irange(vocabulary)) starts[v + 1] += starts[v];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (const auto r : c10::irange(count))
      if (ids[r] != padding_idx) order[next[ids[r]]++] = r;
  }
};

// A row of the weight's gradient is the sum of at most kSegment rows of grad, or else of the sums of such segments: one
// id that fills the batch then still occupies every thread, and the order of summation depends on the batch alone.
constexpr int64_t kSegment = 256;

template <typename T>
class WeightGradient {
  using A = Accumulate<T>;

 public:
  WeightGradient(const T* grad, int64_t d, const RowsById& by_id, double scale, double p, const Dropout& dropout)
      : grad_(grad), d_(d), by_id_(by_id), scale_(static_cast<A>(scale)), p_(p), dropout_(dropout) {}

  void write(T* out, int64_t vocabulary) const {
    // Along this axis each id has length 1 + its number of rows, so equal stretches are about equal work.
    const auto& starts = by_id_.starts;
    const int64_t length = vocabulary + starts.back();
    at::parallel_for(0, length, grain(d_), [&](int64_t begin, int64_t end) {
      for (int64_t v = id_at(begin); v < vocabulary && starts[v] + v < end; ++v) {
        const int64_t count = starts[v + 1] - starts[v];
        if (count == 0)
          std::fill_n(out + v * d_, d_, T(0));
        else if (count <= kSegment)
          sum_rows(out + v * d_, starts[v], count, scale_);
      }
    });
    for (const auto v : heavy_ids(vocabulary)) write_heavy(out + v * d_, starts[v], starts[v + 1] - starts[v]);
  }

 private:
  // The first id that begins at or after a place on the axis of write().
  int64_t id_at(int64_t place) const {
    int64_t low = 0, high = static_cast<int64_t>(by_id_.starts.size()) - 1;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (by_id_.starts[middle] + middle < place)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  std::vector<int64_t> heavy_ids(int64_t vocabulary) const {
    std::vector<int64_t> ids;
    if (by_id_.starts.back() > kSegment)
      for (const auto v : c10::irange(vocabulary))
        if (by_id_.starts[v + 1] - by_id_.starts[v] > kSegment) ids.push_back(v);
    return ids;
  }

  void write_heavy(T* out, int64_t first, int64_t count) const {
    const int64_t segments = (count + kSegment - 1) / kSegment;
    std::vector<A> partial(segments * d_);
    at::parallel_for(0, segments, 1, [&](int64_t begin, int64_t end) {
      for (const auto s : c10::irange(begin, end))
        sum_rows(&partial[s * d_], first + s * kSegment, std::min(kSegment, count - s * kSegment), A(1));
    });
    at::parallel_for(0, d_, std::max(grain(segments), kLanes<A>), [&](int64_t begin, int64_t end) {
      for_columns<A>(begin, end, [&](int64_t c, auto lanes, int) {
        Vector<A> total{};
        for (const auto s : c10::irange(segments)) total += load(&partial[s * d_ + c], lanes);
        store(out + c, total * scale_, lanes);
      });
    });
  }

  // out = scale * sum of dropout'(grad row) over by_id.order[first .. first + count)
  template <typename Out>
  void sum_rows(Out* out, int64_t first, int64_t count, A scale) const {
    alignas(64) A total[kDrawColumns];
    alignas(64) uint16_t draws[kDrawRoom];
    for (int64_t start = 0; start < d_; start += kDrawColumns) {
      const int64_t columns = std::min(kDrawColumns, d_ - start);
      std::fill_n(total, columns, A(0));
      for (const auto i : c10::irange(first, first + count)) {
        const int64_t row = by_id_.order[i];
        const T* g = grad_ + row * d_ + start;
        if (p_ > 0) dropout_.draw(row, start, columns, draws);
        for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
          Vector<A> v = load(g + c, lanes);
          if (p_ > 0) v = dropout_.template apply<A>(v, draws + c);
          store(total + c, load(total + c, lanes) + v, lanes);
        });
      }
      for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
        store(out + start + c, load(total + c, lanes) * scale, lanes);
      });
    }
  }

  const T* grad_;
  int64_t d_;
  const RowsById& by_id_;
  A scale_;
  double p_;
  const Dropout& dropout_;
};

// The gradient has the size of the weight, so a large one is fresh memory from the system on every step, and faulting
// it in by small pages costs several times what writing it does.
void prefer_huge_pages(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 2 << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
  if (end > begin + 8 * kPage) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only a hint
#endif
}

at::Tensor embed_backward(
    const at::Tensor& grad_out, const at::Tensor& ids, int64_t vocabulary, double scale,
    std::optional<int64_t> padding_idx, double p, const OptionalTensor& seed, bool /* deterministic: always */) {
  check_backward(grad_out, ids, vocabulary, p, seed);
  const at::Tensor grad = grad_out.contiguous(), dense = ids.contiguous();
  const int64_t d = grad.size(-1);
  at::Tensor out = at::empty({vocabulary, d}, grad.options());
  if (out.numel() == 0) return out;
  prefer_huge_pages(out.mutable_data_ptr(), out.nbytes());

  const RowsById by_id(Ids(dense, vocabulary), dense.numel(), vocabulary, padding_idx.value_or(-1));
  const Dropout dropout = dropout_of(p, seed);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "embed_backward", [&] {
    const WeightGradient<scalar_t> gradient(grad.const_data_ptr<scalar_t>(), d, by_id, scale, p, dropout);
    gradient.write(out.mutable_data_ptr<scalar_t>(), vocabulary);
  });
  return out;
}

}  // namespace
}  // namespace transformer_fast

TORCH_LIBRARY_IMPL(transformer_fast_native, CPU, m) {
  m.impl("embed_backward", TORCH_FN(transformer_fast::embed_backward));
}
