// Masked attention on the CPU: what the forward and the backward kernel share.
//
// The unit of work is a tile of scores, up to kKeyTile keys by kQueryTile queries, kept TRANSPOSED: a row is a key and
// the vector lanes are neighbouring queries. So the softmax runs down the rows with no sum across lanes, a key's mask
// is one number a row, a query's limit one lane, and one Philox call of the dropout contract fills eight rows of it.
#pragma once

#include "draws.h"
#include "exponential.h"
#include "operands.h"

#include <ATen/Parallel.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <tuple>
#include <vector>

namespace transformer_fast {

constexpr int64_t kQueryTile = 64;
constexpr int64_t kKeyTile = 128;  // a multiple of 32, the keys of four Philox calls
constexpr int64_t kMostStored = int64_t{1} << 26;  // weights or gradients of scores in memory; past that, found again
constexpr int64_t kFewQueries = 2;  // up to here a call goes row by row (attention_rows.h) and makes no tile of scores

// A 4-D tensor (batch, head, row, column); a size of 1 has stride 0.
template <typename T>
struct View {
  T* data = nullptr;
  int64_t stride[4] = {0, 0, 0, 0};

  T* at(int64_t b, int64_t h, int64_t row) const { return data + b * stride[0] + h * stride[1] + row * stride[2]; }
  int64_t row_stride() const { return stride[2]; }
  int64_t column_stride() const { return stride[3]; }
};

// An additive bias: in the arithmetic's dtype, or in the tensors' own, then converted as it is read.
template <typename T, typename A>
struct Bias {
  View<const A> wide;
  View<const T> own;

  explicit operator bool() const { return wide.data != nullptr || own.data != nullptr; }
  int64_t row_stride() const { return own.data ? own.row_stride() : wide.row_stride(); }

  // The same seen from element (b, h, i, j).
  Bias from(int64_t b, int64_t h, int64_t i, int64_t j) const {
    Bias moved = *this;
    if (own.data) moved.own.data = own.at(b, h, i) + j * own.column_stride();
    if (wide.data) moved.wide.data = wide.at(b, h, i) + j * wide.column_stride();
    return moved;
  }

  A at(int64_t i, int64_t j) const {
    return own.data ? static_cast<A>(own.data[i * own.row_stride() + j * own.column_stride()])
                    : wide.data[i * wide.row_stride() + j * wide.column_stride()];
  }

  // Elements (i, j) .. (i, j + count - 1).
  Vector<A> load(int64_t i, int64_t j, int64_t count) const {
    if (own.data && own.column_stride() == 1) return load_some(own.data + i * own.row_stride() + j, count);
    if (wide.data && wide.column_stride() == 1) return load_some(wide.data + i * wide.row_stride() + j, count);
    Vector<A> v{};
    for (int64_t n = 0; n < count; ++n) v[n] = at(i, j + n);
    return v;
  }
};

// A call. T is the tensors' dtype, A that of the arithmetic.
template <typename T, typename A>
struct AttentionProblem {
  using Element = T;
  using Arithmetic = A;
  int64_t B, H, Hkv, Lq, Lk, D;
  View<const T> q, k, v;
  View<const bool> keep, key_keep;
  Bias<T, A> bias;
  View<const int32_t> lengths;  // (B, 1, Lq|1, 1)
  bool causal;
  int64_t causal_offset;
  A scale;
  double dropout_p;
  int64_t seed;
  bool zero_empty_rows;
  int64_t first_batch = 0;  // what dropout counts batches from
  // A paged cache: key j of batch entry b is row j % page_size of page pages[b * pages_stride + j / page_size], and the
  // first stride of k and v is that of a page. Forward of few queries only.
  const int32_t* pages = nullptr;
  int64_t pages_stride = 0, page_size = 0;
};

// Keys at or past this are blocked for query i of batch entry b by its length and the look-ahead.
template <typename T, typename A>
int64_t key_limit(const AttentionProblem<T, A>& problem, int64_t b, int64_t i) {
  int64_t limit = problem.Lk;
  if (problem.lengths.data) limit = std::min<int64_t>(limit, *problem.lengths.at(b, 0, i));
  if (problem.causal) limit = std::min(limit, std::max<int64_t>(0, i + 1 + problem.causal_offset));
  return limit;
}

// Weights that a forward keeps for its backward, in the tiles that both work on: for each block of queries and each key
// of it the lanes of the block, to be multiplied by a factor that each tile has for each query. Or nothing.
template <typename T, typename A>
struct KeptWeights {
  T* weights = nullptr;  // (B, H, lanes, Lk), `lanes` being Lq in whole vectors
  A* factors = nullptr;  // (B, H, key tiles, lanes)
  int64_t H = 0, lanes = 0, Lk = 0;

  explicit operator bool() const { return weights != nullptr; }

  // The lanes of `key`, of which there are `block_lanes`; those of the next key follow.
  T* at(int64_t b, int64_t h, int64_t first_query, int64_t block_lanes, int64_t key) const {
    return weights + ((b * H + h) * lanes + first_query) * Lk + key * block_lanes;
  }

  A* factors_at(int64_t b, int64_t h, int64_t first_query, int64_t key) const {
    return factors + ((b * H + h) * tiles(Lk) + key / kKeyTile) * lanes + first_query;
  }

  static int64_t tiles(int64_t Lk) { return (Lk + kKeyTile - 1) / kKeyTile; }
};

// A padded batch is one of these, a packed one has one for each sequence. Statistics are (batch, head, query).
template <typename T, typename A>
struct AttentionForward {
  using Element = T;
  using Arithmetic = A;
  AttentionProblem<T, A> problem;
  View<T> out;
  View<A> logsumexp;
  KeptWeights<T, A> kept = {};  // not with dropout, not for few queries
};

template <typename T, typename A>
struct AttentionBackward {
  using Element = T;
  using Arithmetic = A;
  AttentionProblem<T, A> problem;
  View<const T> grad_out, out;
  View<const A> logsumexp, grad_logsumexp;
  View<T> grad_q, grad_k, grad_v;
  View<T> grad_scores = {};  // (B, H, Lq, Lk), or nothing; not for few queries
  KeptWeights<T, A> kept = {};
};

template <typename T, typename A>
void attention_forward_cpu(c10::ArrayRef<AttentionForward<T, A>> calls);

template <typename T, typename A>
void attention_backward_cpu(c10::ArrayRef<AttentionBackward<T, A>> calls);

namespace {

template <typename A>
constexpr A kBlocked = -std::numeric_limits<A>::infinity();

// Memory of one thread, kept from call to call and only ever grown.
template <typename A>
class Workspace {
 public:
  // `sizes` buffers, each on its own cache lines.
  template <std::size_t n>
  void divide(const int64_t (&sizes)[n], A* (&buffers)[n]) {
    int64_t total = 0;
    for (const int64_t size : sizes) total += round_up(size, kAlign);
    if (total > size_) {
      storage_.reset(new (std::align_val_t(64)) A[total]);
      size_ = total;
    }
    A* next = storage_.get();
    for (std::size_t i = 0; i < n; next += round_up(sizes[i], kAlign), ++i) buffers[i] = next;
  }

  static Workspace& of_this_thread() {
    static thread_local Workspace workspace;
    return workspace;
  }

 private:
  static constexpr int64_t kAlign = 64 / sizeof(A);
  struct Free {
    void operator()(A* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<A[], Free> storage_;
  int64_t size_ = 0;
};

// Runs task(i) for every i, each once, on whichever thread is free: ragged batches make tasks of very different sizes.
// `work` counts the multiplications of one product of scores; too few are not worth waking a thread for.
template <typename Task>
void for_tasks(int64_t tasks, double work, Task task) {
  constexpr double kWorthAThread = 2.5e5;  // about 10 us
  const int64_t threads = std::min<int64_t>({tasks, at::get_num_threads(), static_cast<int64_t>(work / kWorthAThread)});
  if (threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  });
}

// The same for several calls: task(call, i) for i < tasks_of(call).
template <typename TasksOf, typename Task>
void for_tasks(int64_t calls, TasksOf tasks_of, double work, Task task) {
  if (calls == 1) return for_tasks(tasks_of(0), work, [&](int64_t i) { task(0, i); });
  std::vector<int64_t> ends(calls);
  int64_t total = 0;
  for (int64_t call = 0; call < calls; ++call) ends[call] = total += tasks_of(call);
  for_tasks(total, work, [&](int64_t i) {
    const int64_t call = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    task(call, i - (call > 0 ? ends[call - 1] : 0));
  });
}

constexpr int64_t kKeysDrawn = 8 * kCounters;  // by one vector of Philox calls, for one query

// Ranges of keys of one (batch, key head), by shapes alone: more than one only where there are too few heads to keep
// threads busy.
struct KeyRanges {
  static constexpr int64_t kEnoughTasks = 16;

  KeyRanges(int64_t heads, int64_t Lk) {
    const int64_t tiles = std::max<int64_t>(1, (Lk + kKeyTile - 1) / kKeyTile);
    const int64_t wanted = std::min(tiles, (kEnoughTasks + heads - 1) / std::max<int64_t>(1, heads));
    length = (tiles + wanted - 1) / wanted * kKeyTile;
    count = std::max<int64_t>(1, (Lk + length - 1) / length);
  }

  int64_t length, count;
};

template <typename Call>
int64_t key_heads(c10::ArrayRef<Call> calls) {
  int64_t heads = 0;
  for (const Call& call : calls) heads += call.problem.B * call.problem.Hkv;
  return heads;
}

// Which weights of a tile dropout keeps, eight rows at a time (the contract is in reference/dropout.py).
template <typename A>
struct TileDropout {
  Dropout dropout;
  uint32_t head, batch;

  template <typename T>
  TileDropout(const AttentionProblem<T, A>& problem, int64_t b, int64_t h)
      : dropout(problem.dropout_p, problem.seed), head(static_cast<uint32_t>(h)),
        batch(static_cast<uint32_t>(problem.first_batch + b)) {}

  // Draws of query i for kKeysDrawn keys from first_key, a multiple of kKeysDrawn.
  void draw_row(int64_t first_key, int64_t i, uint16_t* draws) const {
    CounterVector c[4][1] = {{},
                             {CounterVector{} + static_cast<uint64_t>(i)},
                             {CounterVector{} + static_cast<uint64_t>(head)},
                             {CounterVector{} + static_cast<uint64_t>(batch)}};
    for (int64_t lane = 0; lane < kCounters; ++lane) c[0][0][lane] = static_cast<uint64_t>(first_key / 8 + lane);
    rounds(c);
    uint32_t words[4 * kCounters];
    for (int64_t lane = 0; lane < kCounters; ++lane)  // lane % 4: which pair of keys in each eighth of a group of 32
      for (int w = 0; w < 4; ++w) words[lane / 4 * 16 + 4 * w + lane % 4] = static_cast<uint32_t>(c[w][0][lane]);
    std::memcpy(draws, words, sizeof(words));
  }

  // Philox of `parts` vectors of counters at once, in place.
  template <int parts>
  void rounds(CounterVector (&c)[4][parts]) const {
    uint32_t key0 = static_cast<uint32_t>(dropout.seed), key1 = static_cast<uint32_t>(dropout.seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int u = 0; u < parts; ++u) {
        const CounterVector product0 = multiply(c[0][u], kPhiloxM0), product1 = multiply(c[2][u], kPhiloxM1);
        c[0][u] = (product1 >> 32) ^ c[1][u] ^ static_cast<uint64_t>(key0);
        c[1][u] = product1;
        c[2][u] = (product0 >> 32) ^ c[3][u] ^ static_cast<uint64_t>(key1);
        c[3][u] = product0;
      }
      key0 += kPhiloxW0;
      key1 += kPhiloxW1;
    }
  }

  // Words of the call for the lanes of queries first .. first + kLanes - 1.
  void draw(int64_t call, int64_t first, IntegerVector<A> (&words)[4]) const {
    constexpr int parts = sizeof(CounterVector) / (8 * kLanes<A>) == 1 ? 1 : 2;  // counters have 64-bit lanes
    CounterVector c[4][parts];
    for (int u = 0; u < parts; ++u) {
      c[0][u] = CounterVector{} + static_cast<uint64_t>(call);
      c[1][u] = CounterVector{};
      for (int64_t lane = 0; lane < kCounters; ++lane) c[1][u][lane] = static_cast<uint64_t>(first + lane * parts + u);
      c[2][u] = CounterVector{} + static_cast<uint64_t>(head);
      c[3][u] = CounterVector{} + static_cast<uint64_t>(batch);
    }
    rounds(c);
    for (int w = 0; w < 4; ++w)
      words[w] = reinterpret_cast<IntegerVector<A>>(
          parts == 1 ? c[w][0] : (c[w][0] & 0xffffffff) | (c[w][parts - 1] << 32));
  }

  // body(row, kept) over the rows of a tile whose first key is first_key, a multiple of 32; kept: all ones or zeros.
  template <typename Body>
  void for_rows(int64_t rows, int64_t first_key, int64_t first_query, Body body) const {
    const IntegerLane<A> threshold = dropout.rate.threshold;
    IntegerVector<A> words[4];
    for (int64_t group = 0; group < rows; group += 32)
      for (int64_t pair = 0; pair < 4 && group + 2 * pair < rows; ++pair) {
        draw((first_key + group) / 32 * 4 + pair, first_query, words);
        for (int w = 0; w < 4; ++w)
          for (int half = 0; half < 2; ++half) {
            const int64_t row = group + 8 * w + 2 * pair + half;
            if (row < rows) body(row, ((words[w] >> (16 * half)) & 0xffff) >= threshold);
          }
      }
  }
};

// What stands in for `kept` where nothing is dropped.
struct AllKept {};

template <typename A>
inline Vector<A> where_kept(AllKept, Vector<A> v, Vector<A> = Vector<A>{}) {
  return v;
}

template <typename A>
inline Vector<A> where_kept(IntegerVector<A> kept, Vector<A> v, Vector<A> otherwise = Vector<A>{}) {
  return kept ? v : otherwise;
}

template <typename A, typename Body>
inline void for_rows(const TileDropout<A>* dropout, int64_t rows, int64_t first_key, int64_t first_query, Body body) {
  if (dropout != nullptr)
    dropout->for_rows(rows, first_key, first_query, body);
  else
    for (int64_t row = 0; row < rows; ++row) body(row, AllKept{});
}

}  // namespace
}  // namespace transformer_fast
