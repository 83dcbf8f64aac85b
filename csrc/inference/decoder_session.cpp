// Decoding step by step, in one object that holds the weights of a decoder, its cache, and the rules for choosing
// tokens. One call runs the newest position of every open hypothesis through all layers; one call can run several steps
// of a search. Without a session, the code between the kernels of a step, in Python and the dispatcher, takes as long
// as several kernels, on one thread. The kernels are those of the ops. models/decoder.py, generation/greedy.py and
// generation/beam.py compute the same in Python.
#include "../cpu/kernels.h"
#include "../ops/embedding.h"
#include "../ops/linear.h"
#include "../ops/norm.h"
#include "prepacked_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <ATen/record_function.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace transformer_fast {
namespace {

// Number of rows whose logits are computed at a time, so that the logits stay in the CPU cache.
constexpr int64_t kLogitRows = 128;

// Parts of a layer, in the order of their weights and biases among its tensors; as `_Layer` in generation/session.py.
// The bias of an RMSNorm is empty.
enum Part { kNorm1, kNorm2, kNorm3, kOwnIn, kOwnOut, kCrossIn, kCrossOut, kFeedIn, kFeedOut, kParts };

// Runs a function below autograd and hidden from modes, like the kernel of an operator.
struct BelowDispatch {
  const c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::python_ks};
};

// Multiplies x (rows, in) by a weight in any layout of inference/prepacked.py -> (rows, outputs).
Tensor product(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, int64_t outputs, bool relu = false) {
  return weight.is_mkldnn() ? onednn_linear(x, weight, bias, relu)
                            : packed_linear(x, weight, bias, outputs, relu ? "relu" : "none");
}

// The most likely tokens per row, as choose_tokens returns them: (rows, k) twice, and (rows,).
struct Chosen {
  float* best;
  int64_t* token;
  float* normalizer;
};

// Choice of generation/topk.py, of several steps; and BeamSteps of generation/session.py.
using GreedySteps = std::tuple<Tensor, Tensor, Tensor>;
using BeamSteps = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

struct SessionCache {
  Tensor own;            // (layers, most slots, 2, H, capacity, D)
  Tensor cross;          // (layers, sentences, 2, H, S, D)
  Tensor positions;      // (at least length, d), positional table, added to embeddings
  int64_t length;        // number of positions in every slot
  OptionalTensor cells;  // int32 (slots, capacity), place per position, in units of D; none: in its own slot
  OptionalTensor source_lengths;
  OptionalTensor row_of_slot, slot_of_row;  // all sentences have equally many slots; none: a row is a slot
};

// A class and not an operator, which would take all weights at every step. A session exists during one call of
// `generate`, which is not traced or exported. No module holds it, so that models are copied and pickled without it.
class DecoderSession : public torch::CustomClassHolder {
 public:
  // norm, eps: kind and eps of all norms. activation: "relu", "swish" or "gelu", of the feed-forward layers.
  // suppressed: ascending tokens that are not chosen; with `renormalize` they have no probability either.
  DecoderSession(Tensor embedding, double scale, bool norm_first, const std::string& norm, double eps,
                 std::string activation, int64_t eos, std::vector<int64_t> suppressed, bool renormalize)
      : embedding_(std::move(embedding)), scale_(scale), norm_first_(norm_first), kind_(norm_kind(norm)), eps_(eps),
        activation_(std::move(activation)), eos_(eos), suppressed_(std::move(suppressed)), renormalize_(renormalize) {}

  // `kParts` pairs of weight and bias per layer; linear weights in any layout of inference/prepacked.py.
  void set_layers(std::vector<Tensor> tensors) { layers_ = std::move(tensors); }

  // The parts after the layers, by which tokens are chosen; the norm may be missing. Without these parts only step()
  // works.
  void set_end(OptionalTensor norm_weight, OptionalTensor norm_bias, Tensor out, OptionalTensor out_bias,
               int64_t vocabulary) {
    norm_weight_ = std::move(norm_weight), norm_bias_ = std::move(norm_bias);
    out_ = std::move(out), out_bias_ = std::move(out_bias), vocabulary_ = vocabulary;
  }

  void set_cache(Tensor own, Tensor cross, Tensor positions, int64_t length, OptionalTensor cells,
                 OptionalTensor source_lengths, OptionalTensor row_of_slot, OptionalTensor slot_of_row) {
    cache_ = {own, cross, positions, length, cells, source_lengths, row_of_slot, slot_of_row};
  }

  // Runs the layers on ids (rows,), the newest per row -> output of the last layer, (rows, d), before the last norm.
  Tensor step(const Tensor& ids) const {
    RECORD_USER_SCOPE("DecoderSession.step");
    const BelowDispatch below;
    return through_layers(ids, cache_);
  }

  // Runs at most `most` greedy steps, and at most as many as the cache has room for. Stops after a step in which a row
  // ends: it chooses EOS, has no possible token, or has a NaN.
  GreedySteps greedy(const Tensor& newest, int64_t most) const {
    RECORD_USER_SCOPE("DecoderSession.greedy");
    const BelowDispatch below;
    SessionCache cache = cache_;
    most = std::min(most, room());
    const int64_t rows = newest.size(0);
    const Tensor token = at::cpu::empty({most, rows}, newest.options().dtype(at::kLong));
    const Tensor best = at::cpu::empty({most, rows}, embedding_.options()), normalizer = at::empty_like(best);
    Tensor ids = newest;
    int64_t steps = 0;
    for (bool open = true; open && steps < most; ++cache.length) {
      const int64_t at = steps * rows;
      const Chosen to{best.mutable_data_ptr<float>() + at, token.mutable_data_ptr<int64_t>() + at,
                      normalizer.mutable_data_ptr<float>() + at};
      choose(ids, cache, 1, to);
      for (int64_t r = 0; r < rows; ++r)
        open = open && to.token[r] != eos_ && std::isfinite(to.best[r]) && !std::isnan(to.normalizer[r]);
      ids = token.select(0, steps++);
    }
    const auto by_row = [steps](const Tensor& of_steps) { return of_steps.narrow(0, 0, steps).t().contiguous(); };
    return {by_row(best), by_row(token), by_row(normalizer)};
  }

  // Runs beam steps for beams whose `width` hypotheses are all open: newest (units * width,), those of a unit adjacent,
  // all with equally many positions. Row r is at places[r] among the rows of a step. Stops after the first step in
  // which one of the best `width` continuations ends, and returns that step's best `candidates` continuations, or all
  // if there are fewer; the caller records finished hypotheses and continues. The table of cells follows the chosen
  // continuations.
  BeamSteps beam(const Tensor& newest, const Tensor& log_prob, const Tensor& places, int64_t width, int64_t candidates,
                 int64_t most) const {
    RECORD_USER_SCOPE("DecoderSession.beam");
    const BelowDispatch below;
    SessionCache cache = cache_;
    TORCH_CHECK(cache.cells, "DecoderSession.beam: expected a cache with cells");
    most = std::min(most, room());
    const int64_t rows = newest.size(0), units = rows / width, k = std::min(candidates, vocabulary_);
    const int64_t considered = std::min(candidates, width * k);
    const auto whole = newest.options().dtype(at::kLong), real = embedding_.options();
    const Tensor given = newest.contiguous(), at_first = log_prob.contiguous(), placed = places.contiguous();
    const int64_t* const place = placed.const_data_ptr<int64_t>();
    // Per place: newest token and log-probability, unit and rank in it, place before all steps, and tokens since then;
    // and the best tokens of a step.
    const Tensor ids = at::cpu::empty({rows}, whole), token = at::cpu::empty({rows, k}, whole);
    const Tensor best = at::cpu::empty({rows, k}, real), normalizer = at::cpu::empty({rows}, real);
    const Chosen step{best.mutable_data_ptr<float>(), token.mutable_data_ptr<int64_t>(),
                      normalizer.mutable_data_ptr<float>()};
    int64_t* const newest_id = ids.mutable_data_ptr<int64_t>();
    std::vector<float> known(rows);
    std::vector<int64_t> row_at(rows), unit(rows), rank(rows), origin(rows), next_origin(rows);
    std::vector<std::vector<int64_t>> history(rows), next_history(rows);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = place[r];
      row_at[at] = r, unit[at] = r / width, rank[at] = r % width, origin[at] = at;
      known[at] = at_first.const_data_ptr<float>()[r], newest_id[at] = given.const_data_ptr<int64_t>()[r];
    }
    // Per unit: its continuations.
    const Tensor total = at::cpu::empty({units, considered}, real);
    const Tensor parent = at::cpu::empty({units, considered}, whole),
                 chosen = at::cpu::empty({units, considered}, whole);
    float* const totals = total.mutable_data_ptr<float>();
    int64_t *const parents = parent.mutable_data_ptr<int64_t>(), *const tokens = chosen.mutable_data_ptr<int64_t>();
    const auto found = [&](int64_t r) { return r / width * considered + r % width; };  // index of row r's continuation
    int32_t* const table = cache.cells->mutable_data_ptr<int32_t>();
    const int64_t capacity = cache.cells->size(1);
    std::vector<int32_t> earlier(rows * capacity);
    for (int64_t steps = 1;; ++steps) {
      choose(ids, cache, k, step);
      ++cache.length;
      bool open = steps < most;
      for (int64_t at = 0; at < rows; ++at) {
        open = open && !std::isnan(step.normalizer[at]);
        for (int64_t i = 0; i < k; ++i) step.best[at * k + i] += known[at] - step.normalizer[at];
      }
      kernels().generation.choose_continuations({step.best, step.token, unit.data(), rank.data(), rows, k, units, width,
                                                 considered, totals, parents, tokens});
      for (int64_t r = 0; r < rows; ++r) open = open && tokens[found(r)] != eos_ && totals[found(r)] > -INFINITY;
      if (!open) break;
      std::copy_n(table, rows * capacity, earlier.data());
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = place[r], of = found(r), old = parents[of];
        std::copy_n(earlier.data() + old * capacity, cache.length, table + at * capacity);
        known[at] = totals[of], newest_id[at] = tokens[of];
        next_origin[at] = origin[old], next_history[at] = history[old];
        next_history[at].push_back(tokens[of]);
      }
      origin.swap(next_origin), history.swap(next_history);
    }
    const int64_t steps = static_cast<int64_t>(history[0].size());
    const Tensor histories = at::cpu::empty({rows, steps}, whole), origins = at::cpu::empty({rows}, whole);
    const Tensor reached = at::cpu::empty({rows}, real);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at = place[r];
      std::copy(history[at].begin(), history[at].end(), histories.mutable_data_ptr<int64_t>() + r * steps);
      origins.mutable_data_ptr<int64_t>()[r] = row_at[origin[at]], reached.mutable_data_ptr<float>()[r] = known[at];
    }
    for (int64_t i = 0; i < units * considered; ++i) parents[i] = row_at[parents[i]];
    return {histories, origins, reached, total, parent, chosen, normalizer};
  }

 private:
  int64_t room() const { return cache_.own.size(4) - cache_.length; }

  // Runs a step on ids (rows,), the newest per row -> the k best next tokens, (rows, k).
  void choose(const Tensor& ids, const SessionCache& cache, int64_t k, const Chosen& to) const {
    Tensor x = through_layers(ids, cache);
    if (norm_weight_) x = norm(x, {}, *norm_weight_, *norm_bias_).out;
    for (int64_t first = 0; first < ids.size(0); first += kLogitRows) {
      const int64_t count = std::min(kLogitRows, ids.size(0) - first);
      const Tensor logits = product(x.narrow(0, first, count), out_, out_bias_, vocabulary_);
      kernels().generation.choose_tokens({logits.const_data_ptr<float>(), count, vocabulary_, k, suppressed_.data(),
                                          static_cast<int64_t>(suppressed_.size()), renormalize_, to.best + first * k,
                                          to.token + first * k, to.normalizer + first});
    }
  }

  Tensor through_layers(const Tensor& ids, const SessionCache& cache) const {
    const Tensor entering = embedding_op::embed(ids.unsqueeze(1), embedding_, cache.positions, scale_, cache.length,
                                                std::nullopt, std::nullopt, 0, {}, false);
    Tensor x = entering.squeeze(1);
    for (int64_t layer = 0; layer < cache.own.size(0); ++layer) x = through(layer, x, cache);
    return x;
  }

  // Runs one layer: x (rows, d) -> (rows, d).
  Tensor through(int64_t layer, Tensor x, const SessionCache& cache) const {
    const Tensor* const at = layers_.data() + 2 * kParts * layer;
    const auto linear = [at](Part part, const Tensor& input, bool relu = false) {
      const Tensor& bias = at[2 * part + 1];
      return product(input, at[2 * part], bias, bias.size(0), relu);
    };
    const auto norm = [&](Part part, const Tensor& input, const OptionalTensor& residual) {
      return this->norm(input, residual, at[2 * part], at[2 * part + 1]);
    };
    const bool relu = activation_ == "relu";  // which a linear layer does along with its product
    if (norm_first_) {
      const Tensor first = norm(kNorm1, x, {}).out;
      const auto second = norm(kNorm2, linear(kOwnOut, of_own(layer, linear(kOwnIn, first), cache)), x);
      const Tensor read = of_source(layer, linear(kCrossIn, second.out), cache);
      const auto third = norm(kNorm3, linear(kCrossOut, read), second.summed);
      return linear(kFeedOut, activated(linear(kFeedIn, third.out, relu))).add_(third.summed);
    }
    x = norm(kNorm1, linear(kOwnOut, of_own(layer, linear(kOwnIn, x), cache)), x).out;
    x = norm(kNorm2, linear(kCrossOut, of_source(layer, linear(kCrossIn, x), cache)), x).out;
    return norm(kNorm3, linear(kFeedOut, activated(linear(kFeedIn, x, relu))), x).out;
  }

  NormResult norm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, const Tensor& bias) const {
    const OptionalTensor added = kind_ == NormKind::kRms ? OptionalTensor() : bias;
    return norm_forward(x, residual, weight, added, eps_, kind_, 0, {}, nullptr, nullptr);
  }

  Tensor activated(const Tensor& inner) const {
    if (activation_ == "relu") return inner;
    return activation_ == "swish" ? at::silu(inner) : at::gelu(inner);
  }

  // Self-attention of states (rows, 3 d); their keys and values are stored in the cache.
  static Tensor of_own(int64_t layer, const Tensor& states, const SessionCache& cache) {
    const Tensor& own = cache.own;
    const int64_t rows = states.size(0), H = own.size(3), capacity = own.size(4), D = own.size(5), d = H * D;
    const int64_t head = capacity * D, slot = 2 * H * head, position = cache.length;
    const float* const from = states.const_data_ptr<float>();
    float* const to = own.mutable_data_ptr<float>() + layer * own.stride(0);
    int32_t* const places = cache.cells ? cache.cells->mutable_data_ptr<int32_t>() : nullptr;
    at::parallel_for(0, rows, std::max<int64_t>(1, 16384 / d), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t h = 0; h < 2 * H; ++h)
          std::copy_n(from + r * 3 * d + d + h * D, D, to + r * slot + h * head + position * D);
        if (places) places[r * capacity + position] = static_cast<int32_t>(r * 2 * H * capacity + position);
      }
    });
    AttentionKernelParams<float, float> p;
    p.B = rows, p.H = p.Hkv = H, p.Lq = 1, p.Lk = position + 1, p.D = D;
    p.q = {from, {3 * d, D, 3 * d, 1}};
    p.k = {to, {slot, head, D, 1}}, p.v = {to + H * head, {slot, head, D, 1}};
    p.cells = {places, {capacity, 0, 0, 1}};
    return attend(p, states);
  }

  // Attention of queries (rows, d) to the source. The hypotheses of a sentence are the queries of one batch entry.
  static Tensor of_source(int64_t layer, const Tensor& queries, const SessionCache& cache) {
    const Tensor& cross = cache.cross;
    const int64_t sentences = cross.size(1), H = cross.size(3), S = cross.size(4), D = cross.size(5), d = H * D;
    const Tensor q = cache.row_of_slot ? queries.index_select(0, *cache.row_of_slot) : queries;
    const float* const known = cross.const_data_ptr<float>() + layer * cross.stride(0);
    AttentionKernelParams<float, float> p;
    p.B = sentences, p.H = p.Hkv = H, p.Lq = sentences ? q.size(0) / sentences : 0, p.Lk = S, p.D = D;
    p.q = {q.const_data_ptr<float>(), {p.Lq * d, D, d, 1}};
    p.k = {known, {2 * d * S, S * D, D, 1}}, p.v = {known + d * S, {2 * d * S, S * D, D, 1}};
    if (cache.source_lengths) p.lengths = {cache.source_lengths->const_data_ptr<int32_t>(), {1, 0, 0, 0}};
    const Tensor out = attend(p, queries);
    return cache.slot_of_row ? out.index_select(0, *cache.slot_of_row) : out;
  }

  // -> (B * Lq, H * D), of the type of `like`
  static Tensor attend(AttentionKernelParams<float, float>& p, const Tensor& like) {
    const int64_t d = p.H * p.D;
    const Tensor out = at::cpu::empty({p.B * p.Lq, d}, like.options());
    const Tensor logsumexp = at::cpu::empty({p.B * p.H * p.Lq}, like.options());
    p.scale = 1 / std::sqrt(static_cast<float>(p.D));
    const AttentionForward<float, float> call{p,
                                              {out.mutable_data_ptr<float>(), {p.Lq * d, p.D, d, 1}},
                                              {logsumexp.mutable_data_ptr<float>(), {p.H * p.Lq, p.Lq, 1, 1}}};
    kernels().of<float>().attention_forward({&call, 1});
    return out;
  }

  Tensor embedding_;
  double scale_;
  bool norm_first_;
  NormKind kind_;
  double eps_;
  std::string activation_;
  int64_t eos_;
  std::vector<int64_t> suppressed_;
  bool renormalize_;
  std::vector<Tensor> layers_;
  OptionalTensor norm_weight_, norm_bias_, out_bias_;
  Tensor out_;
  int64_t vocabulary_ = 0;
  SessionCache cache_;
};

TORCH_LIBRARY_FRAGMENT(transformer_fast, m) {
  using torch::arg;
  m.class_<DecoderSession>("DecoderSession")
      .def(torch::init<Tensor, double, bool, std::string, double, std::string, int64_t, std::vector<int64_t>, bool>(),
           "",
           {arg("embedding"), arg("scale"), arg("norm_first"), arg("norm"), arg("eps"), arg("activation"), arg("eos"),
            arg("suppressed"), arg("renormalize")})
      .def("set_layers", &DecoderSession::set_layers)
      .def("set_end", &DecoderSession::set_end, "",
           {arg("norm_weight"), arg("norm_bias"), arg("out"), arg("out_bias"), arg("vocabulary")})
      .def("set_cache", &DecoderSession::set_cache, "",
           {arg("own"), arg("cross"), arg("positions"), arg("length"), arg("cells"), arg("source_lengths"),
            arg("row_of_slot"), arg("slot_of_row")})
      .def("step", &DecoderSession::step)
      .def("greedy", &DecoderSession::greedy)
      .def("beam", &DecoderSession::beam);
}

}  // namespace

}  // namespace transformer_fast
