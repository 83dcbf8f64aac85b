// The backward of a tile of scores whose weights the forward saved, so that they are not recomputed. Without dropout, and
// only for types whose products take pairs (kPaired): for the others, saving is less than 1.15 times as fast.
#pragma once

#include "../simd/operands.h"

#include <algorithm>

namespace transformer_fast {
namespace {

// A row belongs to a key and has one lane per query of a block, in whole vectors.
template <typename T, typename A>
struct SavedTile {
  static constexpr int64_t kW = kLanes<A>;

  const T* saved;      // rows of weights, not yet multiplied by the factors of the queries
  const A* factors;    // of each query
  const A* uniform;    // the weight on every key for a query without visible keys, else 0
  A* delta;            // per query, the sum over all keys of weight times weight gradient
  A *weights, *grads;  // memory for rows of weights, and of weight gradients, which become score gradients
  int64_t queries, lanes;

  void add_to_delta(int64_t keys) const {
    for (int64_t lane = 0; lane < lanes; lane += kW) {
      const Lanes own = lanes_at(lane);
      Vector<A> sum = own.delta;
      for (int64_t row = 0; row < keys; ++row) {
        const Vector<A> weight = load(own.saved + row * lanes) * own.factor;
        // Keeps a NaN or Inf value of a blocked key out.
        const Vector<A> grad = weight == A(0) ? Vector<A>{} : load(grads + row * lanes + lane);
        sum = fma(weight, grad, sum);
      }
      store(delta + lane, sum);
    }
  }

  // Fills `weights` and `grads` with operands of the products.
  void differentiate(int64_t keys) const {
    if constexpr (kPaired<T>) write_operands(keys);
  }

 private:
  // `weights` has one row per key, its weights and then the gradients of its scores
  // along the queries; `grads` has these gradients along the keys.
  void write_operands(int64_t keys) const {
    for (int64_t lane = 0; lane < lanes; lane += 2 * kW) {
      const bool two = lane + kW < lanes;
      const Lanes low = lanes_at(lane), high = lanes_at(two ? lane + kW : lane);
      const auto store_halves = [two](A* target, Vector<A> halves) {
        two ? store(target, halves) : store_half_bits(reinterpret_cast<T*>(target), halves, kW);
      };
      for (int64_t row = 0; row < keys; row += 2) {
        Vector<A> of_keys[2] = {};
        for (int64_t i = 0; i < std::min<int64_t>(2, keys - row); ++i) {
          const auto [weight, grad] = differentiated(low, row + i, lane);
          const auto [high_weight, high_grad] = two ? differentiated(high, row + i, lane + kW) : Differentiated{};
          A* const target = weights + (row + i) * lanes + lane / 2;
          store_halves(target, packed_halves(weight, high_weight));
          of_keys[i] = packed_halves(grad, high_grad);
          store_halves(target + lanes / 2, of_keys[i]);
        }
        store(grads + row * lanes + lane, halves_interleaved(of_keys[0], of_keys[1], 0));
        if (two) store(grads + row * lanes + lane + kW, halves_interleaved(of_keys[0], of_keys[1], 16));
      }
    }
    if (queries % 2 != 0)
      for (int64_t row = 0; row < keys; ++row)
        for (int64_t first : {int64_t{0}, lanes / 2}) clear_partner(weights + row * lanes + first, queries);
  }

  // Numbers of the queries in a vector of lanes.
  struct Lanes {
    const T* saved;
    Vector<A> factor, delta, uniform;
  };

  struct Differentiated {
    Vector<A> weight, grad;  // of the score
  };

  Lanes lanes_at(int64_t lane) const {
    return {saved + lane, load(factors + lane), load(delta + lane), load(uniform + lane)};
  }

  Differentiated differentiated(const Lanes& own, int64_t row, int64_t lane) const {
    const Vector<A> weight = load(own.saved + row * lanes) * own.factor;
    const auto blocked = weight == A(0);  // keeps a NaN or Inf value of the key out of its gradient
    return {weight + own.uniform, blocked ? Vector<A>{} : weight * (load(grads + row * lanes + lane) - own.delta)};
  }
};

}  // namespace
}  // namespace transformer_fast
