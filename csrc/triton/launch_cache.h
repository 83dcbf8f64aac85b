// Launches of Triton kernels, which transformer_fast.triton.launch_cache keeps: a call that an earlier one resembles repeats them
// with other addresses. Used with the GIL held.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace transformer_fast::eager {

// Which layouts the inputs of a call have.
class LayoutKey {
 public:
  LayoutKey() { bytes_.reserve(1024); }
  void add(const at::Tensor& tensor);
  void add_none() { add(int64_t{-1}); }
  void add_integer() { add(int64_t{-2}); }
  pybind11::bytes bytes() const { return pybind11::bytes(bytes_); }

 private:
  void add(int64_t number) { bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  std::string bytes_;
};

class __attribute__((visibility("hidden"))) CachedLaunch {  // as its fields are
 public:
  // The next input of the call, in the launcher's order; undefined counts as None.
  void input(const at::Tensor& tensor);
  void input(const std::optional<at::Tensor>& tensor) { input(tensor ? *tensor : at::Tensor()); }
  void input(int64_t number);
  // The next output: memory whose layout follows from the inputs, nullptr for None.
  void output(const void* memory);

  // Whether there was such a call, which replay() then repeats. Arguments as triton/launch_cache.py has them.
  bool lookup(const pybind11::tuple& scalars, const pybind11::tuple& sources, const at::Tensor& first);
  void replay() const;

 private:
  LayoutKey key_;
  std::vector<pybind11::object> addresses_;
  uintptr_t bits_ = 0;
  pybind11::object found_;
};

// How many floats of a buffer so many take, for what follows them to be aligned.
inline int64_t rounded_up(int64_t count) { return (count + 15) / 16 * 16; }

// Where CachedLaunch::find asks: find of triton/launch_cache.py.
void set_finder(pybind11::object find);

// What attention returns for q, (B, H, Lq, D) or packed (T, H, D), uninitialised: out like q, and logsumexp (B, H, Lq)
// or (H, T) in fp32.
std::tuple<at::Tensor, at::Tensor> empty_outputs_of(const at::Tensor& q);

}  // namespace transformer_fast::eager
