// Several steps of a search in one call, while no hypothesis ends: what runs between steps, in Python and the dispatcher,
// runs on one thread, and those that wait meanwhile fall asleep. generation/greedy.py and generation/beam.py say the same
// in Python.
#include "../cpu/kernels.h"
#include "decoder_step.h"
#include "embedding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace transformer_fast {
namespace {

// Rows of which the logits are there at a time. Those of hundreds would be written to memory and read from there.
constexpr int64_t kLogitRows = 128;

// What stands before the first layer and behind the last, and how tokens are chosen there.
struct Ends {
  Tensor embedding, positions;
  double scale;
  OptionalTensor norm_weight, norm_bias;  // none: there is no norm
  Tensor out_weight;
  OptionalTensor out_bias;
  int64_t vocabulary;
  at::IntArrayRef suppressed;
  bool renormalize;

  // ids (rows,), the newest of each row -> the k best tokens behind them, as choose_tokens gives them.
  void choose(const DecoderStep& step, const Tensor& ids, int64_t k, float* best, int64_t* token,
              float* normalizer) const {
    const OptionalTensor at = step.lengths ? OptionalTensor(step.lengths->squeeze(1).sub(1)) : step.lengths;
    const Tensor entering = embedding_op::embed(ids.unsqueeze(1), embedding, positions, scale, at ? 0 : step.length, at,
                                                std::nullopt, 0, {}, false);
    Tensor x = step(entering.squeeze(1));
    const OptionalTensor bias = step.kind == NormKind::kRms ? OptionalTensor() : norm_bias;
    if (norm_weight) x = norm_forward(x, {}, norm_weight, bias, step.eps, step.kind, 0, {}, nullptr, nullptr).out;
    const int64_t rows = x.size(0);
    for (int64_t first = 0; first < rows; first += kLogitRows) {
      const int64_t count = std::min(kLogitRows, rows - first);
      const Tensor logits = step_product(x.narrow(0, first, count), out_weight, out_bias, vocabulary);
      kernels().generation.choose_tokens({logits.const_data_ptr<float>(), count, vocabulary, k, suppressed.data(),
                                          static_cast<int64_t>(suppressed.size()), renormalize, best + first * k,
                                          token + first * k, normalizer + first});
    }
  }
};

// As many steps as `most`, or as come before one in which a row ends: chooses EOS, has nothing to choose, or shows a NaN.
// newest (rows,) are the ids that stand at `length`, or at the last of `lengths`. -> what choose_tokens gives of each
// step, (rows, steps) each.
std::tuple<Tensor, Tensor, Tensor> greedy_steps(
    const Tensor& newest, int64_t most, int64_t eos, at::IntArrayRef suppressed, bool renormalize,
    const Tensor& embedding, const Tensor& positions, double scale, const OptionalTensor& last_norm_weight,
    const OptionalTensor& last_norm_bias, const Tensor& out_weight, const OptionalTensor& out_bias, int64_t vocabulary,
    at::TensorList weights, const Tensor& own, const Tensor& cross, int64_t length, const OptionalTensor& lengths,
    const OptionalTensor& cells, const OptionalTensor& source_lengths, const OptionalTensor& row_of_slot,
    const OptionalTensor& slot_of_row, bool norm_first, std::string_view norm, double eps,
    std::string_view activation) {
  const OptionalTensor keys = lengths ? OptionalTensor(lengths->clone()) : lengths;
  DecoderStep step{weights,     own,         cross,      length,          keys, cells,     source_lengths,
                   row_of_slot, slot_of_row, norm_first, norm_kind(norm), eps,  activation};
  const Ends ends{embedding,  positions, scale,      last_norm_weight, last_norm_bias,
                  out_weight, out_bias,  vocabulary, suppressed,       renormalize};
  const int64_t rows = newest.size(0);
  const Tensor token = at::cpu::empty({most, rows}, newest.options().dtype(at::kLong));
  const Tensor best = at::cpu::empty({most, rows}, embedding.options()), normalizer = at::empty_like(best);
  Tensor ids = newest;
  int64_t steps = 0;
  for (bool open = true; open && steps < most; ++step.length) {
    float* const highest = best.mutable_data_ptr<float>() + steps * rows;
    float* const sums = normalizer.mutable_data_ptr<float>() + steps * rows;
    int64_t* const chosen = token.mutable_data_ptr<int64_t>() + steps * rows;
    ends.choose(step, ids, 1, highest, chosen, sums);
    for (int64_t row = 0; row < rows; ++row)
      open = open && chosen[row] != eos && std::isfinite(highest[row]) && !std::isnan(sums[row]);
    ids = token.select(0, steps++);
    if (keys) keys->add_(1);
  }
  const auto done = [steps](const Tensor& of_each) { return of_each.narrow(0, 0, steps).t().contiguous(); };
  return {done(token), done(best), done(normalizer)};
}

// As many steps of beams, of which all `width` hypotheses are open: (units * width,) rows, those of a unit side by side, and
// all in one position. The last step is left to the caller, who may have something to record: it is the one in which one
// of the best `width` continuations ends, or `most`. Row r stands at places[r] among the rows of the step. `cells` follow
// who continues whom. -> of the other steps the tokens (rows, steps), which row each row was before them, and the
// log-probability; of the last one the best `candidates` continuations of each unit, or all where there are fewer, as
// choose_continuations gives them, and the normalizers in no order.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> beam_steps(
    const Tensor& newest, int64_t most, int64_t eos, at::IntArrayRef suppressed, bool renormalize,
    const Tensor& embedding, const Tensor& positions, double scale, const OptionalTensor& last_norm_weight,
    const OptionalTensor& last_norm_bias, const Tensor& out_weight, const OptionalTensor& out_bias, int64_t vocabulary,
    const Tensor& log_prob, const Tensor& places, int64_t width, int64_t candidates, at::TensorList weights,
    const Tensor& own, const Tensor& cross, int64_t length, const OptionalTensor& lengths, const OptionalTensor& cells,
    const OptionalTensor& source_lengths, const OptionalTensor& row_of_slot, const OptionalTensor& slot_of_row,
    bool norm_first, std::string_view norm, double eps, std::string_view activation) {
  TORCH_CHECK(cells && !lengths, "beam_steps needs a table of cells, and rows of one length");
  DecoderStep step{weights,     own,         cross,      length,          lengths, cells,     source_lengths,
                   row_of_slot, slot_of_row, norm_first, norm_kind(norm), eps,     activation};
  const Ends ends{embedding,  positions, scale,      last_norm_weight, last_norm_bias,
                  out_weight, out_bias,  vocabulary, suppressed,       renormalize};
  const int64_t rows = newest.size(0), units = rows / width, k = std::min(candidates, vocabulary);
  const int64_t looked_at = std::min(candidates, width * k);
  const auto whole = newest.options().dtype(at::kLong), real = embedding.options();
  const Tensor given = newest.contiguous(), at_first = log_prob.contiguous(), placed = places.contiguous();
  const int64_t* const place = placed.const_data_ptr<int64_t>();
  // By place: what each row has, and of which unit it is the how many-th.
  const Tensor ids = at::cpu::empty({rows}, whole), token = at::cpu::empty({rows, k}, whole);
  const Tensor best = at::cpu::empty({rows, k}, real), normalizer = at::cpu::empty({rows}, real);
  std::vector<int64_t> row_at(rows), unit(rows), rank(rows), before(rows), from(rows);
  std::vector<float> known(rows);
  std::vector<std::vector<int64_t>> said(rows), longer(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = place[r];
    row_at[at] = r, unit[at] = r / width, rank[at] = r % width, before[at] = at;
    known[at] = at_first.const_data_ptr<float>()[r];
    ids.mutable_data_ptr<int64_t>()[at] = given.const_data_ptr<int64_t>()[r];
  }
  // By row: the continuations of the last step.
  const Tensor total = at::cpu::empty({units, looked_at}, real);
  const Tensor parent = at::cpu::empty({units, looked_at}, whole), chosen = at::cpu::empty({units, looked_at}, whole);
  float *const totals = total.mutable_data_ptr<float>(), *const of_row = best.mutable_data_ptr<float>();
  int64_t *const parents = parent.mutable_data_ptr<int64_t>(), *const tokens = chosen.mutable_data_ptr<int64_t>();
  float* const sums = normalizer.mutable_data_ptr<float>();
  int32_t* const table = cells->mutable_data_ptr<int32_t>();
  const int64_t capacity = cells->size(1);
  std::vector<int32_t> earlier(rows * capacity);
  for (int64_t steps = 1;; ++steps) {
    ends.choose(step, ids, k, of_row, token.mutable_data_ptr<int64_t>(), sums);
    ++step.length;
    bool open = steps < most;
    for (int64_t at = 0; at < rows; ++at) {
      open = open && !std::isnan(sums[at]);
      for (int64_t i = 0; i < k; ++i) of_row[at * k + i] += known[at] - sums[at];
    }
    kernels().generation.choose_continuations({of_row, of_row, token.const_data_ptr<int64_t>(), unit.data(),
                                               rank.data(), rows, k, units, width, looked_at, totals, parents, tokens});
    const auto found = [&](int64_t r) { return r / width * looked_at + r % width; };  // where row r's continuation is
    for (int64_t r = 0; r < rows; ++r) open = open && tokens[found(r)] != eos && totals[found(r)] > -INFINITY;
    if (!open) break;
    std::copy_n(table, rows * capacity, earlier.data());
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = place[r], of = found(r), old = parents[of];
      std::copy_n(earlier.data() + old * capacity, step.length, table + at * capacity);
      known[at] = totals[of], from[at] = before[old], longer[at] = said[old];
      longer[at].push_back(tokens[of]);
      ids.mutable_data_ptr<int64_t>()[at] = tokens[of];
    }
    before.swap(from), said.swap(longer);
  }
  const int64_t steps = static_cast<int64_t>(said[0].size());
  const Tensor history = at::cpu::empty({rows, steps}, whole), origin = at::cpu::empty({rows}, whole);
  const Tensor reached = at::cpu::empty({rows}, real);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = place[r];
    std::copy(said[at].begin(), said[at].end(), history.mutable_data_ptr<int64_t>() + r * steps);
    origin.mutable_data_ptr<int64_t>()[r] = row_at[before[at]], reached.mutable_data_ptr<float>()[r] = known[at];
  }
  for (int64_t i = 0; i < units * looked_at; ++i) parents[i] = row_at[parents[i]];
  return {history, origin, reached, total, parent, chosen, normalizer};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  const std::string ends =
      "Tensor newest, int most, int eos, int[] suppressed, bool renormalize, Tensor embedding, Tensor positions, "
      "float scale, Tensor? last_norm_weight, Tensor? last_norm_bias, Tensor out_weight, Tensor? out_bias, "
      "int vocabulary, ";
  const std::string greedy = ends + kDecoderStepSchema;
  const std::string beam = ends + "Tensor log_prob, Tensor places, int width, int candidates, " + kDecoderStepSchema;
  m.def(("greedy_steps(" + greedy + ") -> (Tensor token, Tensor best, Tensor normalizer)").c_str());
  m.def(("beam_steps(" + beam +
         ") -> (Tensor history, Tensor origin, Tensor reached, Tensor total, Tensor parent, Tensor chosen, "
         "Tensor normalizer)")
            .c_str());
}

TORCH_LIBRARY_IMPL(transformer_fast, CPU, m) {
  m.impl("greedy_steps", greedy_steps);
  m.impl("beam_steps", beam_steps);
}

TORCH_LIBRARY_IMPL(transformer_fast, MkldnnCPU, m) {  // by their weights
  m.impl("greedy_steps", greedy_steps);
  m.impl("beam_steps", beam_steps);
}

}  // namespace transformer_fast
