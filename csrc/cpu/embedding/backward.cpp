// The gradient of the embedding's weight on the CPU.
//
// One thread sums each row, or the row is summed in segments that depend on the batch only. So the result has the same
// bits on every run and for every number of threads.
#include "embedding_params.h"

#include "../parallel.h"
#include "../simd/philox_dropout.h"
#include "../simd/vec.h"

#include <vector>

namespace transformer_fast {
namespace {

// The rows of grad in order of their ids (a counting sort, stable): rows of id v are order[starts[v]] up to, but not
// including, order[starts[v + 1]]. padding_idx has no rows.
struct RowsById {
  std::vector<int64_t> starts, order;
  bool all_valid = true;  // else there is nothing else here

  RowsById(const Integers& ids, int64_t count, int64_t vocabulary, int64_t padding_idx)
      : starts(vocabulary + 1), order(count) {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t id = ids[r];
      all_valid = id >= 0 && id < vocabulary;
      if (!all_valid) return;
      if (id != padding_idx) ++starts[id + 1];
    }
    for (int64_t v = 0; v < vocabulary; ++v) starts[v + 1] += starts[v];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t r = 0; r < count; ++r)
      if (ids[r] != padding_idx) order[next[ids[r]]++] = r;
  }
};

// A row of the weight's gradient is the sum of at most kSegment rows of grad, or the sum of such segments. So an id
// that fills the batch still occupies all threads, and the order of summation depends on the batch only.
constexpr int64_t kSegment = 256;

template <typename T>
struct WeightGradient {
  using A = Accumulate<T>;
  const EmbedBackwardParams<T>& call;
  const RowsById& by_id;
  Dropout dropout{call.dropout};
  bool drop = call.dropout.p > 0;
  A scale = static_cast<A>(call.scale);
  int64_t d = call.d;

  void write() const {
    T* const out = call.grad_weight;
    const int64_t vocabulary = call.vocabulary;
    // On this axis an id has length 1 + its number of rows, so equal parts are about equal work.
    const auto& starts = by_id.starts;
    const int64_t length = vocabulary + starts.back();
    parallel_for(0, length, grain(d), [&](int64_t begin, int64_t end) {
      for (int64_t v = id_at(begin); v < vocabulary && starts[v] + v < end; ++v) {
        const int64_t count = starts[v + 1] - starts[v];
        if (count == 0)
          std::fill_n(out + v * d, d, T(0));
        else if (count <= kSegment)
          sum_rows(out + v * d, starts[v], count, scale);
      }
    });
    for (const auto v : heavy_ids(vocabulary)) write_heavy(out + v * d, starts[v], starts[v + 1] - starts[v]);
  }

 private:
  // The first id that begins at or after a position on the axis of write().
  int64_t id_at(int64_t place) const {
    int64_t low = 0, high = static_cast<int64_t>(by_id.starts.size()) - 1;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (by_id.starts[middle] + middle < place)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }

  std::vector<int64_t> heavy_ids(int64_t vocabulary) const {
    std::vector<int64_t> ids;
    if (by_id.starts.back() > kSegment)
      for (int64_t v = 0; v < vocabulary; ++v)
        if (by_id.starts[v + 1] - by_id.starts[v] > kSegment) ids.push_back(v);
    return ids;
  }

  void write_heavy(T* out, int64_t first, int64_t count) const {
    const int64_t segments = (count + kSegment - 1) / kSegment;
    std::vector<A> partial(segments * d);
    parallel_for(0, segments, 1, [&](int64_t begin, int64_t end) {
      for (int64_t s = begin; s < end; ++s)
        sum_rows(&partial[s * d], first + s * kSegment, std::min(kSegment, count - s * kSegment), A(1));
    });
    parallel_for(0, d, std::max(grain(segments), kLanes<A>), [&](int64_t begin, int64_t end) {
      for_columns<A>(begin, end, [&](int64_t c, auto lanes, int) {
        Vector<A> total{};
        for (int64_t s = 0; s < segments; ++s) total += load(&partial[s * d + c], lanes);
        store(out + c, total * scale, lanes);
      });
    });
  }

  // out = scale * sum of dropout'(grad row) over by_id.order[first .. first + count)
  template <typename Out>
  void sum_rows(Out* out, int64_t first, int64_t count, A scale) const {
    alignas(64) A total[kChunkColumns];
    alignas(64) uint16_t bits[kBitsRoom];
    for (int64_t start = 0; start < d; start += kChunkColumns) {
      const int64_t columns = std::min(kChunkColumns, d - start);
      std::fill_n(total, columns, A(0));
      for (int64_t i = first; i < first + count; ++i) {
        const int64_t row = by_id.order[i];
        const T* g = call.grad + row * d + start;
        if (drop) dropout.random_bits(row, start, columns, bits);
        for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
          Vector<A> v = load(g + c, lanes);
          if (drop) v = dropout.template apply<A>(v, bits + c);
          store(total + c, load(total + c, lanes) + v, lanes);
        });
      }
      for_columns<A>(0, columns, [&](int64_t c, auto lanes, int) {
        store(out + start + c, load(total + c, lanes) * scale, lanes);
      });
    }
  }
};

}  // namespace

template <typename T>
bool embed_backward(const EmbedBackwardParams<T>& p) {
  const RowsById by_id(p.ids, p.rows, p.vocabulary, p.padding_idx);
  if (by_id.all_valid) WeightGradient<T>{p, by_id}.write();
  return by_id.all_valid;
}

TRANSFORMER_FAST_FOR_EACH_TYPE(bool, embed_backward, EmbedBackwardParams)

}  // namespace transformer_fast
