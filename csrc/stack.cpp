// A stack of transformer blocks with packed weights, in one call: products, attention, norms, rotation and activations.
//
// Between the products of a few tokens, the time of a call from Python would exceed that of the arithmetic.
#include "activation.h"
#include "kernels.h"
#include "memory.h"
#include "regard.h"

namespace regard::REGARD_ISA {
namespace {

constexpr int64_t serial_numbers = 1 << 14;  // fewer are processed before another thread has started

// (x - mean) / sqrt(variance + eps) * gain + shift, or x / sqrt(mean square + eps) * gain.
void normalize_row(const float* x, float* out, int64_t n, const float* gain, const float* shift, float eps) {
  constexpr int L = lanes<float>;
  float mean = 0;
  if (shift) {
    VecF sum{};
    for (int64_t i = 0; i < n; i += L) sum += load_some(x + i, 1, n - i);
    mean = reduce_add<float>(sum) / float(n);
  }
  VecF squares{};
  int64_t whole = n / L * L;
  for (int64_t i = 0; i < whole; i += L) {
    const VecF d = load(x + i) - mean;
    squares += d * d;
  }
  float square = reduce_add<float>(squares);
  for (int64_t i = whole; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  const float scale = 1 / __builtin_sqrtf(square / float(n) + eps);
  for (int64_t i = 0; i < n; i += L) {
    VecF y = (load_some(x + i, 1, n - i) - mean) * scale * load_some(gain + i, 1, n - i);
    if (shift) y += load_some(shift + i, 1, n - i);
    store_some(out + i, 1, n - i, y);
  }
}

struct Stack {
  const regard_stack& s;
  const int64_t M;

  explicit Stack(const regard_stack& s) : s(s), M(s.B * s.N) {}

  int run() const {
    for (int64_t n = 0; n < s.layers; ++n)
      if (const int status = run_block(n)) return status;
    return REGARD_OK;
  }

  int run_block(int64_t layer) const {
    const regard_block& block = s.blocks[layer];
    const int64_t d = s.d_model, width = (s.H + 2 * s.G) * s.D, up = s.gated ? 2 * s.d_hidden : s.d_hidden;
    const float* input = s.x;
    if (!s.post_norm) normalize(input, s.normed, block, 0), input = s.normed;
    if (const int status = multiply(block.qkv, input, d, s.qkv, width)) return status;
    if (const int status = attend(layer)) return status;
    if (const int status = multiply(block.output, s.attended, s.H * s.D, s.y, d, s.x)) return status;
    normalize(s.y, s.post_norm ? s.y : s.normed, block, 0 + !s.post_norm);
    input = s.post_norm ? s.y : s.normed;
    const int32_t activation = s.gated ? int32_t(REGARD_NO_ACTIVATION) : s.activation;
    if (const int status = multiply(block.up, input, d, s.hidden, up, nullptr, activation)) return status;
    if (s.gated)
      each_row(up, [&](int64_t m) {
        activate_row(s.activation, s.hidden + m * up, s.hidden + m * up + s.d_hidden, s.d_hidden);
      });
    if (const int status = multiply(block.down, s.hidden, up, s.x, d, s.y)) return status;
    if (s.post_norm) normalize(s.x, s.x, block, 1);
    return REGARD_OK;
  }

  int multiply(const regard_weight& weight, const float* x, int64_t x_row, float* out, int64_t out_row,
               const float* residual = nullptr, int32_t activation = REGARD_NO_ACTIVATION) const {
    const regard_packed_linear p{M,
                                 weight.N,
                                 weight.K,
                                 x_row,
                                 out_row,
                                 out_row,
                                 x,
                                 weight.packed,
                                 weight.bias,
                                 residual,
                                 out,
                                 weight.factor,
                                 weight.format,
                                 activation,
                                 s.threads,
                                 weight.has_bias,
                                 residual != nullptr,
                                 0};
    return regard_multiply(&p);
  }

  void normalize(const float* from, float* to, const regard_block& block, int which) const {
    const int64_t d = s.d_model;
    const float* shift = s.rms_norm ? nullptr : block.shift[which];
    each_row(d, [&](int64_t m) { normalize_row(from + m * d, to + m * d, d, block.gain[which], shift, float(s.eps)); });
  }

  int attend(int64_t layer) const {
    regard_dot problem = s.attention[s.blocks[layer].attention];
    const int64_t width = (s.H + 2 * s.G) * s.D, heads = s.H * s.D, start = problem.K - s.N;
    each_row(width, [&](int64_t m) {
      float *q = s.qkv + m * width, *k = q + heads, *v = k + s.G * s.D;
      const int64_t b = m / s.N, n = m % s.N;
      if (s.d_rotary)
        for (int64_t h = 0; h < s.H + s.G; ++h) rotate(q + h * s.D, (b * s.table_batch + n) * s.d_rotary);
      if (!s.cached) return;
      for (int64_t g = 0; g < s.G; ++g) {
        put(k + g * s.D, s.keys[layer], b, g, start + n);
        put(v + g * s.D, s.values[layer], b, g, start + n);
      }
    });
    problem.q.data = s.qkv, problem.k.data = s.qkv + heads, problem.v.data = s.qkv + heads + s.G * s.D;
    if (s.cached) problem.k = s.keys[layer], problem.v = s.values[layer];
    regard_dot_result result{};
    result.out = {s.attended, {s.N * heads, s.D, heads, 1}, 1};
    return regard_dot_forward(&problem, &result);
  }

  void put(const float* from, const regard_tensor& to, int64_t b, int64_t g, int64_t n) const {
    float* place = (float*)to.data + b * to.stride[0] + g * to.stride[1] + n * to.stride[2];
    __builtin_memcpy(place, from, size_t(s.D) * sizeof(float));
  }

  // x cos + swapped sin: the halves are swapped, or the numbers of each pair.
  void rotate(float* x, int64_t at) const {
    const int64_t half = s.d_rotary / 2;
    const float *cos = s.cos + at, *sin = s.sin + at;
    for (int64_t i = 0; i < half; ++i) {
      const int64_t one = s.interleaved ? 2 * i : i, other = s.interleaved ? 2 * i + 1 : i + half;
      const float a = x[one], b = x[other];
      x[one] = a * cos[one] + b * sin[one];
      x[other] = b * cos[other] + a * sin[other];
    }
  }

  template <class F> void each_row(int64_t numbers, F f) const {
    auto body = [&](int thread, int threads) {
      for (int64_t m = M * thread / threads; m < M * (thread + 1) / threads; ++m) f(m);
      return int(REGARD_OK);
    };
    if (M * numbers < serial_numbers) body(0, 1);
    else parallel(int(least<int64_t>(s.threads, M)), body);
  }
};

}  // namespace

int run_stack(const regard_stack& s) { return Stack(s).run(); }

}  // namespace regard::REGARD_ISA
