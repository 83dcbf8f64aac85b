// Whole kernels, from the table that their library exports, against loops in double: a program that tools/arm_check.py
// builds for aarch64, runs in qemu, and links with the kernels alone.
#include "cpu/kernels.h"
#include "philox.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

using namespace transformer_fast;
using std::vector;
extern "C" const Kernels* transformer_fast_kernels();

namespace {

std::mt19937_64 generator(20260101);
const Kernels& table = *transformer_fast_kernels();

template <typename T>
constexpr int kBits = 8 * sizeof(T);

template <typename T>
vector<T> random(int64_t count) {
  std::normal_distribution<float> any;
  vector<T> values(count);
  for (T& value : values) value = static_cast<T>(any(generator));
  return values;
}

// Each element within some roundings of the greatest expected one.
template <typename T>
void check(const vector<T>& found, const vector<double>& expected, const char* what, double roundings = 8) {
  double greatest = 1e-3;
  for (const double e : expected) greatest = std::max(greatest, std::abs(e));
  const double tolerance = roundings * greatest * static_cast<double>(std::numeric_limits<T>::epsilon());
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(static_cast<double>(found[i]) - expected[i]);
    if (error <= tolerance) continue;
    std::printf("wrong: %s of %d bits: element %zu off by %g, where %g is right\n", what, kBits<T>, i, error,
                tolerance);
    std::exit(1);
  }
}

template <typename T>
void check_norm(NormKind kind, int64_t rows, int64_t d) {
  const bool rms = kind == NormKind::kRms;
  using A = Accumulate<T>;
  const vector<T> x = random<T>(rows * d), weight = random<T>(d), bias = random<T>(d), dy = random<T>(rows * d);
  vector<T> out(rows * d), grad_x(rows * d);
  vector<A> mean(rows), rstd(rows), grad_weight(d), grad_bias(d);
  NormForwardParams<T> forward{};
  forward.x = {x.data(), d}, forward.out = {out.data(), d};
  forward.weight.narrow = weight.data(), forward.bias.narrow = rms ? nullptr : bias.data();
  forward.mean = rms ? nullptr : mean.data(), forward.rstd = rstd.data();
  forward.rows = rows, forward.d = d, forward.eps = 1e-5, forward.kind = kind;
  table.of<T>().norm_forward(forward);
  NormBackwardParams<T> backward{};
  backward.dy = {dy.data(), d}, backward.x = {x.data(), d}, backward.weight = forward.weight;
  backward.mean = forward.mean, backward.rstd = rstd.data(), backward.grad_x = {grad_x.data(), d};
  backward.grad_weight = grad_weight.data(), backward.grad_bias = rms ? nullptr : grad_bias.data();
  backward.rows = rows, backward.d = d, backward.kind = kind;
  table.of<T>().norm_backward(backward);

  vector<double> y(rows * d), dx(rows * d), dw(d), db(d), normal(d);
  for (int64_t r = 0; r < rows; ++r) {
    double sum = 0, squares = 0, g_sum = 0, g_normal = 0;
    for (int64_t c = 0; c < d; ++c) sum += x[r * d + c];
    const double centre = rms ? 0 : sum / d;
    for (int64_t c = 0; c < d; ++c) squares += (x[r * d + c] - centre) * (x[r * d + c] - centre);
    const double scale = 1 / std::sqrt(squares / d + 1e-5);
    for (int64_t c = 0; c < d; ++c) {
      const double g = static_cast<double>(dy[r * d + c]) * weight[c];
      normal[c] = (x[r * d + c] - centre) * scale;
      y[r * d + c] = normal[c] * weight[c] + (rms ? 0.0 : static_cast<double>(bias[c]));
      g_sum += rms ? 0 : g, g_normal += g * normal[c];
      dw[c] += dy[r * d + c] * normal[c], db[c] += dy[r * d + c];
    }
    for (int64_t c = 0; c < d; ++c)
      dx[r * d + c] = scale * (static_cast<double>(dy[r * d + c]) * weight[c] - g_sum / d - normal[c] * g_normal / d);
  }
  check(out, y, "norm_forward");
  check(grad_x, dx, "norm_backward");
  check(grad_weight, dw, "norm_backward (weight)", 64);
  if (!rms) check(grad_bias, db, "norm_backward (bias)", 64);
}

template <typename T>
void check_dropout(int64_t rows, int64_t d) {
  const vector<T> x = random<T>(rows * d);
  vector<T> out(rows * d);
  const DropoutRate rate(0.25);
  DropoutForwardParams<T> params{};
  params.x = x.data(), params.out = out.data(), params.rows = rows, params.d = d;
  params.dropout.p = 0.25, params.dropout.seed = (int64_t{1} << 41) + 7;
  table.of<T>().dropout_forward(params);
  vector<double> expected(rows * d);
  for (int64_t i = 0; i < rows * d; ++i) {
    const bool keep = philox_elementwise(params.dropout.seed, i / d, i % d / 8).bits(i % d % 8) >= rate.threshold;
    expected[i] = keep ? x[i] * rate.scale : 0;
    if ((static_cast<double>(out[i]) != 0) != keep) std::printf("wrong: the mask of dropout\n"), std::exit(1);
  }
  check(out, expected, "dropout_forward", 2);
}

template <typename T>
void check_cross_entropy(int64_t rows, int64_t vocabulary) {
  vector<T> logits = random<T>(rows * vocabulary);
  vector<int64_t> targets(rows);
  vector<Accumulate<T>> losses(rows);
  vector<double> expected(rows), gradient(rows * vocabulary);
  for (int64_t r = 0; r < rows; ++r) {
    double total = 0;
    const T* const row = logits.data() + r * vocabulary;
    targets[r] = (r * 7) % vocabulary;
    for (int64_t c = 0; c < vocabulary; ++c) total += std::exp(static_cast<double>(row[c]));
    for (int64_t c = 0; c < vocabulary; ++c)
      gradient[r * vocabulary + c] = std::exp(static_cast<double>(row[c])) / total - (c == targets[r]);
    expected[r] = std::log(total) - row[targets[r]];
  }
  table.of<T>().cross_entropy_rows({logits.data(), targets.data(), losses.data(), rows, vocabulary, 0, true});
  check(losses, expected, "cross_entropy_rows");
  check(logits, gradient, "cross_entropy_rows (gradient)");
}

// Causal attention with padded keys and two query heads for each key head.
template <typename T>
void check_attention(int64_t Lq, int64_t Lk, int64_t D) {
  using A = Accumulate<T>;
  constexpr int64_t B = 2, H = 4, Hkv = 2;
  const vector<T> q = random<T>(B * H * Lq * D), k = random<T>(B * Hkv * Lk * D), v = random<T>(B * Hkv * Lk * D);
  const vector<T> grad = random<T>(B * H * Lq * D);
  vector<T> out(q.size()), grad_q(q.size()), grad_k(k.size()), grad_v(k.size());
  vector<A> logsumexp(B * H * Lq);
  bool keep[B][1024];
  for (int64_t j = 0; j < Lk; ++j) keep[0][j] = j % 5 != 3, keep[1][j] = j < Lk - 4;
  const auto view = [&](auto* data, int64_t heads, int64_t rows) {
    return View<std::remove_pointer_t<decltype(data)>>{data, {heads * rows * D, rows * D, D, 1}};
  };
  AttentionForward<T, A> forward{};
  AttentionKernelParams<T, A>& params = forward.params;
  params.B = B, params.H = H, params.Hkv = Hkv, params.Lq = Lq, params.Lk = Lk, params.D = D;
  params.q = view(q.data(), H, Lq), params.k = view(k.data(), Hkv, Lk), params.v = view(v.data(), Hkv, Lk);
  params.key_keep = {keep[0], {1024, 0, 0, 1}};
  params.upper = Lk - Lq, params.scale = A(0.25);
  forward.out = view(out.data(), H, Lq), forward.logsumexp = {logsumexp.data(), {H * Lq, Lq, 1, 0}};
  table.of<T>().attention_forward({&forward, 1});
  AttentionBackward<T, A> backward{};
  backward.params = params, backward.grad_out = view(grad.data(), H, Lq);
  backward.out = view(static_cast<const T*>(out.data()), H, Lq);
  backward.logsumexp = {logsumexp.data(), {H * Lq, Lq, 1, 0}};
  backward.grad_q = view(grad_q.data(), H, Lq), backward.grad_k = view(grad_k.data(), Hkv, Lk);
  backward.grad_v = view(grad_v.data(), Hkv, Lk);
  table.of<T>().attention_backward({&backward, 1});

  vector<double> o(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
  for (int64_t head = 0; head < B * H; ++head)
    for (int64_t i = 0; i < Lq; ++i) {
      const int64_t row = (head * Lq + i) * D, kv = head / H * Hkv + head % H / (H / Hkv);
      const auto dot = [&](const T* a, const T* b) {
        double sum = 0;
        for (int64_t d = 0; d < D; ++d) sum += static_cast<double>(a[d]) * b[d];
        return sum;
      };
      vector<double> p(Lk);
      double total = 0, delta = 0;
      for (int64_t j = 0; j < Lk; ++j)
        if (keep[head / H][j] && j <= i + Lk - Lq) total += p[j] = std::exp(0.25 * dot(&q[row], &k[(kv * Lk + j) * D]));
      for (int64_t j = 0; j < Lk; ++j) delta += (p[j] /= total) * dot(&grad[row], &v[(kv * Lk + j) * D]);
      for (int64_t j = 0; j < Lk; ++j) {
        const int64_t key = (kv * Lk + j) * D;
        const double ds = 0.25 * p[j] * (dot(&grad[row], &v[key]) - delta);
        for (int64_t d = 0; d < D; ++d) {
          o[row + d] += p[j] * v[key + d], dv[key + d] += p[j] * grad[row + d];
          dq[row + d] += ds * k[key + d], dk[key + d] += ds * q[row + d];
        }
      }
    }
  check(out, o, "attention_forward", 16);
  check(grad_q, dq, "attention_backward (q)", 64);
  check(grad_k, dk, "attention_backward (k)", 64);
  check(grad_v, dv, "attention_backward (v)", 64);
}

template <typename T>
void check_type() {
  for (const int64_t d : {5, 17, 40, 130, 512}) {
    check_norm<T>(NormKind::kLayer, 33, d), check_norm<T>(NormKind::kRms, 33, d);
    check_dropout<T>(33, d);
  }
  check_cross_entropy<T>(9, 1003);
  check_attention<T>(1, 37, 20);
  check_attention<T>(37, 133, 40);
  check_attention<T>(129, 260, 64);
}

void check_step_linear(int64_t rows, int64_t depth, int64_t outputs) {
  const vector<float> x = random<float>(rows * depth), weight = random<float>(outputs * depth);
  const LinearKernels& kernels = table.linear;
  vector<const float*> of_output(outputs);
  for (int64_t n = 0; n < outputs; ++n) of_output[n] = &weight[n * depth];
  vector<float> packed((outputs + kernels.panel - 1) / kernels.panel * kernels.panel * depth), out(rows * outputs);
  kernels.step.pack(of_output.data(), outputs, depth, packed.data());
  kernels.step.linear({x.data(), packed.data(), nullptr, out.data(), rows, depth, outputs, Activation::kNone});
  vector<double> expected(rows * outputs);
  for (int64_t i = 0; i < rows * outputs; ++i)
    for (int64_t c = 0; c < depth; ++c)
      expected[i] += static_cast<double>(x[i / outputs * depth + c]) * weight[i % outputs * depth + c];
  check(out, expected, "step_linear", 64);
}

// Factors are rounded to steps of a 127th of their greatest magnitude, of about 4 here.
void check_quantized_linear(int64_t rows, int64_t depth, int64_t outputs) {
  const vector<float> x = random<float>(rows * depth), weight = random<float>(outputs * depth);
  const LinearKernels& kernels = table.linear;
  vector<const float*> of_output(outputs);
  for (int64_t n = 0; n < outputs; ++n) of_output[n] = &weight[n * depth];
  const int64_t panels = (outputs + kernels.panel - 1) / kernels.panel, groups = kernels.int8_groups(depth);
  vector<int32_t> packed(panels * (kPanelHeader + groups) * kernels.panel);
  vector<float> out(rows * outputs), again(outputs);
  kernels.int8.pack(of_output.data(), outputs, depth, packed.data());
  kernels.int8.linear({x.data(), packed.data(), nullptr, out.data(), rows, depth, outputs, Activation::kNone});
  const float* const last = &x[(rows - 1) * depth];
  kernels.int8.linear({last, packed.data(), nullptr, again.data(), 1, depth, outputs, Activation::kNone});
  bool right = std::equal(again.begin(), again.end(), &out[(rows - 1) * outputs]);
  for (int64_t i = 0; i < rows * outputs; ++i) {
    double expected = 0;
    for (int64_t c = 0; c < depth; ++c)
      expected += static_cast<double>(x[i / outputs * depth + c]) * weight[i % outputs * depth + c];
    right = right && std::abs(out[i] - expected) <= 4.0 / 127 * std::sqrt(static_cast<double>(depth)) * 3;
  }
  if (!right) std::printf("wrong: quantized_linear\n"), std::exit(1);
}

}  // namespace

int main() {
  check_type<float>();
  check_type<double>();
  check_type<c10::Half>();
  check_type<c10::BFloat16>();
  check_step_linear(3, 65, 37);
  check_quantized_linear(3, 65, 37);
  check_quantized_linear(29, 130, 70);
  std::printf("kernels right with vectors of %d bytes\n", static_cast<int>(table.vector_bytes));
}
