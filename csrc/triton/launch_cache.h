// Launches of Triton kernels, kept by the layouts and scalars of their call: an equal call repeats them with its own
// addresses, without Python. triton/launch_cache.py prepares new calls. The GIL must be held for every function here.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace transformer_fast {

// One launch of a compiled kernel.
struct __attribute__((visibility("hidden"))) CachedLaunch {  // pybind11 types have hidden visibility
  pybind11::object run;                                      // the launcher of the compiled kernel
  pybind11::tuple arguments;                      // all that `run` takes, the stream and the kernel's own among them
  std::vector<std::pair<size_t, size_t>> places;  // number of an argument, and place of its value in the call
  pybind11::object kernel;                        // the jitted function
  pybind11::object kept;                          // the compiled kernel, and tensors whose addresses are arguments
};

// A call of a launcher: scalars and layouts of inputs, which determine every launch except addresses; and the
// addresses, each at a place of its own. The order of the places is nowhere but here: a launch finds its tensors by
// their addresses, and which inputs have the same address is part of the key.
class __attribute__((visibility("hidden"))) LaunchCall {
 public:
  LaunchCall() { key_.reserve(1024), values_.reserve(32); }

  void scalar(const char* text);
  void scalar(bool flag) { add('b', flag); }
  void scalar(int64_t number) { add('i', number); }
  void scalar(double number) { add('d', number); }
  template <typename T>
  void scalar(std::optional<T> number) {
    number ? scalar(*number) : add('n', int64_t{0});
  }

  // The next input. An int is the seed, which changes from call to call like an address.
  void input(const at::Tensor& tensor);
  void input(const std::optional<at::Tensor>& tensor) { input(tensor ? *tensor : at::Tensor()); }
  void input(int64_t seed);
  // Adds an input from whose contents other arguments of the launches are derived.
  void source(const at::Tensor& tensor) { sources_.push_back(tensor); }
  // Adds an output or a temporary, made by the launcher.
  void output(const std::optional<at::Tensor>& tensor);
  // The place of each address, and of "seed".
  pybind11::dict places() const;

 private:
  friend class LaunchCache;

  template <typename T>
  void add(char kind, T value) {
    key_.push_back(kind);
    key_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  int64_t add_address(const void* memory);

  std::string key_;
  std::vector<int64_t> values_;  // addresses of inputs and outputs, 0 for None, and the seed
  std::optional<size_t> seed_;   // place of the seed
  int64_t address_bits_ = 0;     // bitwise or of all addresses, for their alignment
  std::vector<at::Tensor> sources_, outputs_;
  at::Device device_ = at::kCPU;  // of the first input
};

// Record of one call.
struct __attribute__((visibility("hidden"))) CachedCall {
  struct Source {
    c10::weak_intrusive_ptr<c10::TensorImpl> base;  // the tensor that owns the memory
    int64_t version;                                // how often it had been written to
  };

  struct Output {
    std::vector<int64_t> sizes, strides;
    at::ScalarType dtype = at::kFloat;
    int64_t bytes = 0;  // 0 for None too
  };

  std::vector<CachedLaunch> launches;
  std::vector<Source> sources;
  std::vector<Output> outputs;
};

// Calls by their keys.
struct __attribute__((visibility("hidden"))) CachedCalls {
  std::unordered_map<std::string, std::shared_ptr<const CachedCall>> by_key;
  int64_t table_changes = 0;  // changes of tile tables before the first of them
};

class __attribute__((visibility("hidden"))) LaunchCache {
 public:
  // The only instance. The instance is never destroyed, because Python may end before the process does.
  static LaunchCache& instance();

  // Objects that are read before each replay: `driver` and `knobs.runtime` of Triton, and Table of triton/configs.py.
  void connect(pybind11::object driver, pybind11::object runtime, pybind11::object table);

  // True if launches may be replayed: no hooks on launches or compilations, and no debugging checks in kernels.
  bool can_replay() const;

  // Allocates the outputs of a call and repeats the launches of an earlier equal one; returns the first `results`
  // outputs (undefined for None), or nothing if there is none, or if launches may not be replayed.
  std::vector<at::Tensor> replay(LaunchCall& call, size_t results);
  // Adds these outputs to the call and repeats the launches on them; false if it cannot.
  bool replay_into(LaunchCall& call, const std::vector<std::optional<at::Tensor>>& outputs);
  // Keeps the launches that this call made.
  void store(const LaunchCall& call, std::vector<CachedLaunch> launches);

  void clear() { calls_.by_key.clear(); }
  size_t size() const { return calls_.by_key.size(); }

  bool enabled = false;      // whether compiled kernels of this version of Triton are known to be called like this
  int64_t long_keys = 0;     // LONG of triton/configs.py: attention derives an order from the lengths of more keys
  size_t most_calls = 4096;  // kept at once; past that all are forgotten: lengths that change with every batch

 private:
  struct Place {
    int64_t device;
    pybind11::object stream;
  };
  Place current_place() const;
  int64_t table_changes() const;
  CachedCalls* calls_like(const LaunchCall& call, bool make);
  static std::string key_of(const LaunchCall& call, const Place& place);
  // The launches of an earlier equal call, nullptr if there are none or they may not be replayed; and where to.
  std::pair<std::shared_ptr<const CachedCall>, Place> lookup(const LaunchCall& call);
  static void start(const CachedCall& cached, const LaunchCall& call, const Place& place);

  CachedCalls calls_;  // those without sources; others are kept on their first source
  pybind11::object driver_, runtime_, table_;
};

// The key of a call for its launcher in Python, which keeps its launches with it.
inline pybind11::object object_of(LaunchCall call) { return pybind11::cast(std::move(call)); }

// Results of a call by the launches of an earlier equal one, or of the launcher; a result that is None is undefined.
template <size_t count, typename Launcher>
std::array<at::Tensor, count> replayed_or(LaunchCall call, const Launcher& launcher) {
  std::array<at::Tensor, count> tensors;
  auto found = LaunchCache::instance().replay(call, count);
  if (found.empty()) return launcher(object_of(std::move(call)));
  std::move(found.begin(), found.end(), tensors.begin());
  return tensors;
}

}  // namespace transformer_fast
