#include "attention_launchers.h"

#include "functions.h"
#include "launching.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

namespace transformer_fast::direct {
namespace {

// They live as long as the process: nothing is left to free when it ends.
PyObject *forward_launcher = nullptr, *backward_launcher = nullptr;
int64_t longest_unordered = 0, delta_rows = 1;

py::object as_object(const OptionalTensor& tensor) { return tensor ? wrap(*tensor) : py::none(); }

py::object seed_of(const Mask& m) { return m.seed_value ? py::object(py::int_(*m.seed_value)) : as_object(m.seed); }

// The contents from which a call derives the order of its tiles: run_call of kernels/attention_launches.py.
py::tuple sources_of(const Tensor& k, const Mask& m) {
  if (m.keep || m.key_keep) {
    py::list parts;
    for (const OptionalTensor* part : {&m.keep, &m.key_keep, &m.lengths})
      if (*part) parts.append(wrap(**part));
    return py::tuple(parts);
  }
  if (m.packed.cu_seqlens_q)
    return m.packed.max_k > longest_unordered
               ? py::make_tuple(wrap(*m.packed.cu_seqlens_k), wrap(*m.packed.cu_seqlens_q))
               : py::tuple();
  if (m.lengths && m.lengths->dim() == 1 && k.size(2) > longest_unordered) return py::make_tuple(wrap(*m.lengths));
  return py::tuple();
}

py::tuple scalars_of(const char* name, const char* packed_name, const Mask& m) {
  const py::object causal = py::cast(m.causal);
  if (m.packed.cu_seqlens_q)
    return py::make_tuple(packed_name, m.packed.max_q, m.packed.max_k, causal, m.scale, m.dropout_p, m.zero_empty_rows);
  return py::make_tuple(name, causal, m.scale, m.dropout_p, m.zero_empty_rows);
}

void add_mask(KnownCall& call, const Mask& m) {
  for (const OptionalTensor* part : {&m.keep, &m.key_keep, &m.lengths, &m.bias}) call.input(*part);
  if (m.seed_value)
    call.input(*m.seed_value);
  else
    call.input(m.seed);
  if (!m.packed.cu_seqlens_q) return;
  call.input(m.packed.cu_seqlens_q);
  call.input(m.packed.cu_seqlens_k);
}

// Whether the launchers have no more to do than to launch: nothing is empty, and q has not to change its sign.
bool only_launches(const Tensor& q, const Tensor& k, const Mask& m) {
  return q.numel() > 0 && k.numel() > 0 && m.scale > 0;
}

}  // namespace

MaskTensors Mask::tensors() const {
  return {or_undefined(keep),
          or_undefined(key_keep),
          or_undefined(lengths),
          or_undefined(bias),
          or_undefined(seed),
          or_undefined(packed.cu_seqlens_q),
          or_undefined(packed.cu_seqlens_k)};
}

Mask Mask::with(const Tensor* saved) const {
  return {or_none(saved[0]),
          or_none(saved[1]),
          or_none(saved[2]),
          or_none(saved[3]),
          or_none(saved[4]),
          causal,
          seed_value,
          scale,
          dropout_p,
          zero_empty_rows,
          {or_none(saved[5]), or_none(saved[6]), packed.max_q, packed.max_k}};
}

ByLaunchers::Found ByLaunchers::forward_training(const Tensor& q, const Tensor& k, const Tensor& v, const Mask& m) {
  if (only_launches(q, k, m)) {
    KnownCall call;
    for (const Tensor* tensor : {&q, &k, &v}) call.input(*tensor);
    add_mask(call, m);
    if (call.find(scalars_of("attention forward", "attention packed forward", m), sources_of(k, m), q)) {
      auto [out, logsumexp] = empty_outputs_of(q);
      call.output(out.const_data_ptr());
      call.output(logsumexp.const_data_ptr());
      call.start();
      return {out, logsumexp};
    }
  }
  const py::tuple results = py::handle(forward_launcher)(
      wrap(q), wrap(k), wrap(v), as_object(m.keep), as_object(m.key_keep), as_object(m.lengths), as_object(m.bias),
      py::cast(m.causal), m.scale, m.dropout_p, seed_of(m), m.zero_empty_rows, as_object(m.packed.cu_seqlens_q),
      as_object(m.packed.cu_seqlens_k), m.packed.max_q, m.packed.max_k);
  return {THPVariable_Unpack(results[0].ptr()), THPVariable_Unpack(results[1].ptr())};
}

variable_list ByLaunchers::backward(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                                    const Tensor* found, const Mask& m, bool /* needs_bias */) {
  const Tensor &out = found[0], &logsumexp = found[1];
  const py::gil_scoped_acquire gil;
  if (only_launches(q, k, m)) {
    KnownCall call;
    for (const Tensor* tensor : {&grad_out, &q, &k, &v, &out, &logsumexp}) call.input(*tensor);
    call.input(OptionalTensor());  // no gradient of the logsumexp
    add_mask(call, m);
    if (call.find(scalars_of("attention backward", "attention packed backward", m), sources_of(k, m), grad_out)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const variable_list gradients = {at::empty_like(q), at::empty_like(k), at::empty_like(v), Tensor()};
      for (int i = 0; i < 3; ++i) call.output(gradients[i].const_data_ptr());
      // delta, which tiles of rows have empty ones, and sums of weights: row_buffers of kernels/attention_backward.py.
      const int64_t rows = logsumexp.numel(), queries = logsumexp.size(-1);
      const int64_t tiles = rows / queries * ((queries + delta_rows - 1) / delta_rows);
      const bool summed = q.scalar_type() == at::kFloat || m.bias;
      const Tensor buffer = at::empty({rounded_up(rows) * (summed ? 2 : 1) + tiles}, logsumexp.options());
      const float* const delta = buffer.const_data_ptr<float>();
      const float* const sums = delta + rounded_up(rows);
      call.output(delta);
      call.output(sums + (summed ? rounded_up(rows) : 0));
      call.output(summed ? sums : nullptr);
      call.start();
      return gradients;
    }
  }
  const py::tuple results = py::handle(backward_launcher)(
      wrap(grad_out), wrap(q), wrap(k), wrap(v), wrap(out), wrap(logsumexp), as_object(m.keep), as_object(m.key_keep),
      as_object(m.lengths), as_object(m.bias), py::cast(m.causal), m.scale, m.dropout_p, seed_of(m), m.zero_empty_rows,
      as_object(m.packed.cu_seqlens_q), as_object(m.packed.cu_seqlens_k), m.packed.max_q, m.packed.max_k);
  return {THPVariable_Unpack(results[0].ptr()), THPVariable_Unpack(results[1].ptr()),
          THPVariable_Unpack(results[2].ptr()), Tensor()};
}

void set_attention_launchers(py::object forward, py::object backward, py::object find, int64_t longest_unordered_,
                             int64_t delta_rows_) {
  forward_launcher = forward.release().ptr();
  backward_launcher = backward.release().ptr();
  set_finder(std::move(find));
  longest_unordered = longest_unordered_;
  delta_rows = delta_rows_;
}

}  // namespace transformer_fast::direct
