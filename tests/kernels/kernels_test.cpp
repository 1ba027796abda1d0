// The kernels against plain loops in double, without Python and torch: `make kernels-test` and `make aarch64`.
//
//     kernels_test [--all] LIBRARY ISA...
//
// Each instruction set has a process of its own, because the library selects it when it is loaded. One that the CPU lacks is
// skipped, or an error with --all. Numbers of tensors are rounded to their type first, so that the loops see the same ones.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "arrays.h"

static long filled_blocks = 0;

// The memory that the library takes: filled with NaN, so that a read before a write shows in the result.
extern "C" int posix_memalign(void** memory, size_t alignment, size_t bytes) noexcept {
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
  *memory = aligned_alloc(alignment, size);
  if (!*memory) return 12;
  memset(*memory, 0xff, size);
  ++filled_blocks;
  return 0;
}

namespace {

struct Sizes {
  int64_t B, H, G, Q, K, D, E;
};
enum class Mask { none, window, random };

// One problem of attention with its inputs.
struct Attention : Sizes {
  Type type;
  Array q, k, v, k_scale, v_scale;
  std::vector<int32_t> start, stop;  // (B, H, Q)
  std::vector<double> sink;
  std::vector<float> single_sink;
  double softcap, temperature = 1.25;
  regard_dot problem{};

  Attention(Sizes n, Type type, Type kv, Mask mask, Order order, bool has_sink, double softcap, int threads)
      : Sizes(n), type(type), q(type, B, H, Q, D, order), k(kv, B, G, K, D, order), v(kv, B, G, K, E, order),
        softcap(softcap) {
    q.fill([] { return 2 * normal(); });
    const bool quantized = kv.id == REGARD_INT8;
    for (Array* x : {&k, &v}) x->fill([&] { return quantized ? double(integer(-127, 127)) : normal(); });
    if (quantized) k_scale = Array(float32, B, G, K, 1).fill([] { return uniform(0.01, 0.02); });
    if (quantized) v_scale = Array(float32, B, G, K, 1).fill([] { return uniform(0.01, 0.02); });
    for (int64_t row = 0; row < B * H * Q; ++row) {
      const int64_t last = row % Q + K - Q + 1, from = integer(0, K), to = integer(0, K);
      start.push_back(int32_t(mask == Mask::none ? 0 : mask == Mask::window ? std::max<int64_t>(0, last - 20) : from));
      stop.push_back(int32_t(mask == Mask::none ? K : mask == Mask::window ? std::max<int64_t>(0, last) : to));
    }
    for (int64_t b = 0; b < B && !quantized; ++b)
      for (int64_t j = 0; j < K; ++j)
        for (int64_t g = 0; g < G; ++g) hide(b, g, j);
    regard_dot& p = problem;
    p.B = B, p.H = H, p.G = G, p.Q = Q, p.K = K, p.D = D, p.E = E;
    p.dtype = type.id, p.kv_dtype = kv.id, p.threads = threads, p.has_sink = has_sink;
    p.scale = 1 / std::sqrt(double(D)), p.softcap = softcap, p.temperature = temperature;
    p.mask = mask == Mask::none ? REGARD_NO_MASK : REGARD_INTERVALS;
    if (mask != Mask::none) p.intervals = {start.data(), stop.data(), {H * Q, Q, 1}};
    p.q = q.tensor(), p.k = k.tensor(), p.v = v.tensor(), p.k_scale = k_scale.tensor(), p.v_scale = v_scale.tensor();
    for (int64_t h = 0; h < H && has_sink; ++h)
      sink.push_back(0.5 * double(h) - 1), single_sink.push_back(float(sink[h]));
    if (has_sink) p.sink = type.id == REGARD_FLOAT64 ? (const void*)sink.data() : (const void*)single_sink.data();
  }
  bool sees(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const size_t row = ((b * H + h) * Q + i);
    return j >= start[row] && j < stop[row];
  }
  // A key that no row sees is NaN.
  void hide(int64_t b, int64_t g, int64_t j) {
    for (int64_t h = g * (H / G); h < (g + 1) * (H / G); ++h)
      for (int64_t i = 0; i < Q; ++i)
        if (sees(b, h, i, j)) return;
    for (int64_t d = 0; d < D; ++d) k.put(b, g, j, d, nan);
    for (int64_t e = 0; e < E; ++e) v.put(b, g, j, e, nan);
  }
  double key(int64_t b, int64_t g, int64_t j, int64_t d) const {
    return k(b, g, j, d) * (k_scale.memory.empty() ? 1 : k_scale(b, g, j, 0));
  }
  double item(int64_t b, int64_t g, int64_t j, int64_t e) const {
    return v(b, g, j, e) * (v_scale.memory.empty() ? 1 : v_scale(b, g, j, 0));
  }

  // The weights of a row, the slopes of its logits, their log-sum-exp, and the relative error of a weight.
  struct Row {
    std::vector<int64_t> keys;
    std::vector<double> weight, slope;
    double lse, error;
  };
  Row row(int64_t b, int64_t h, int64_t i) const {
    Row r{{}, {}, {}, -infinity, 0};
    double largest = 0, total = 0, top = sink.empty() ? -infinity : sink[h];
    for (int64_t j = 0; j < K; ++j) {
      if (!sees(b, h, i, j)) continue;
      double score = 0, size = 0;
      for (int64_t d = 0; d < D; ++d) {
        const double product = q(b, h, i, d) * key(b, h / (H / G), j, d) * problem.scale;
        score += product, size += std::fabs(product);
      }
      const double tanh = softcap > 0 ? std::tanh(score / softcap) : 0;
      r.keys.push_back(j);
      r.slope.push_back((1 - tanh * tanh) * problem.scale / temperature);
      r.weight.push_back((softcap > 0 ? softcap * tanh : score) / temperature);
      largest = std::max(largest, size + softcap), top = std::max(top, r.weight.back());
    }
    if (top == -infinity) return r;
    for (const double x : r.weight) total += std::exp(x - top);
    if (!sink.empty()) total += std::exp(sink[h] - top);
    r.lse = top + std::log(total);
    for (double& x : r.weight) x = std::exp(x - r.lse);
    r.error = sum_unit(type) * (2 * double(D + E + K) + 64) * (1 + largest + std::fabs(r.lse));
    return r;
  }
};

std::string describe(const char* what, const Attention& a, Mask mask) {
  char text[200];
  snprintf(text, sizeof(text), "%s %s B=%ld H=%ld G=%ld Q=%ld K=%ld D=%ld E=%ld mask=%d softcap=%g sink=%d threads=%d",
           what, a.type.name, long(a.B), long(a.H), long(a.G), long(a.Q), long(a.K), long(a.D), long(a.E), int(mask),
           a.softcap, a.problem.has_sink, a.problem.threads);
  return text;
}

void test_forward(Attention& a, Mask mask, bool derivatives) {
  call_name = describe("attention", a, mask);
  const int64_t B = a.B, H = a.H, G = a.G, Q = a.Q, K = a.K, D = a.D, E = a.E;
  const Type real = real_of(a.type);
  const double once = operand_unit(a.type), h_unit = a.type.unit;
  Array out(a.type, B, H, Q, E), lse(real, B, H, Q, 1);
  regard_dot_result result{};
  result.out = out.tensor(), result.lse = lse.tensor();
  call([&] { return kernels.dot_forward(&a.problem, &result); });

  // Gradients of out and lse, which are tangents of q, k and v in forward mode.
  Array d_out(a.type, B, H, Q, E), d_lse(real, B, H, Q, 1);
  Array dq(a.type, B, H, Q, D), dk(a.type, B, G, K, D), dv(a.type, B, G, K, E), delta(real, B, H, Q, 1);
  Array tq(a.type, B, H, Q, D), tk(a.type, B, G, K, D), tv(a.type, B, G, K, E);
  Array t_out(a.type, B, H, Q, E), t_lse(real, B, H, Q, 1), again(a.type, B, H, Q, E), lse_again(real, B, H, Q, 1);
  for (Array* x : {&d_out, &d_lse, &tq, &tk, &tv}) x->fill(normal);
  Expected of_out(out), of_lse(lse), of_dq(dq), of_dk(dk), of_dv(dv), of_t_out(t_out), of_t_lse(t_lse);

  for (int64_t b = 0; b < B; ++b)
    for (int64_t h = 0; h < H; ++h)
      for (int64_t i = 0; i < Q; ++i) {
        const int64_t g = h / (H / G);
        const size_t n = ((b * H + h) * Q + i);
        const Attention::Row r = a.row(b, h, i);
        of_lse.add(n, r.lse, r.error);
        for (int64_t e = 0; e < E; ++e)
          for (size_t c = 0; c < r.keys.size(); ++c) {
            const double x = r.weight[c] * a.item(b, g, r.keys[c], e);
            of_out.add(n * E + e, x, std::fabs(x) * (r.error + 1.01 * once));
          }
        if (!derivatives) continue;
        double sum = -d_lse(b, h, i, 0), sum_size = std::fabs(sum), mean = 0, mean_size = 0;
        for (int64_t e = 0; e < E; ++e) {
          const double x = d_out(b, h, i, e) * of_out.value[n * E + e];
          sum += x, sum_size += std::fabs(x) + std::fabs(d_out(b, h, i, e)) * of_out.bound[n * E + e];
        }
        std::vector<double> tangent, tangent_size;
        for (size_t c = 0; c < r.keys.size(); ++c) {
          const int64_t j = r.keys[c];
          const size_t kv = ((b * G + g) * K + j);
          const double w = r.weight[c];
          double dp = 0, dp_size = 0, dl = 0, dl_size = 0;
          for (int64_t e = 0; e < E; ++e) {
            const double x = d_out(b, h, i, e) * a.v(b, g, j, e), y = w * d_out(b, h, i, e);
            dp += x, dp_size += std::fabs(x);
            of_dv.add(kv * E + e, y, std::fabs(y) * (2 * r.error + 1.01 * once + sum_unit(a.type) * double(Q * H)));
          }
          const double ds = w * (dp - sum) * r.slope[c], steepest = a.problem.scale / a.temperature;
          const double ds_error = w * steepest * (dp_size + sum_size) *
                                  (2 * r.error + 2 * h_unit + 1.01 * once + sum_unit(a.type) * double(Q * H));
          for (int64_t d = 0; d < D; ++d) {
            const double x = a.q(b, h, i, d), y = a.k(b, g, j, d);
            of_dq.add(n * D + d, ds * y, ds_error * std::fabs(y));
            of_dk.add(kv * D + d, ds * x, ds_error * std::fabs(x));
            const double left = tq(b, h, i, d) * y, right = x * tk(b, g, j, d);
            dl += (left + right) * r.slope[c], dl_size += (std::fabs(left) + std::fabs(right)) * steepest;
          }
          tangent.push_back(dl), tangent_size.push_back(dl_size);
          mean += w * dl, mean_size += w * dl_size;
        }
        of_t_lse.add(n, mean, mean_size * 2 * r.error);
        for (size_t c = 0; c < r.keys.size(); ++c)
          for (int64_t e = 0; e < E; ++e) {
            const double x = a.v(b, g, r.keys[c], e), y = tv(b, g, r.keys[c], e), w = r.weight[c];
            of_t_out.add(n * E + e, w * ((tangent[c] - mean) * x + y),
                         w * ((tangent_size[c] + mean_size) * std::fabs(x) + std::fabs(y)) * 3 * r.error);
          }
      }
  of_lse.compare("lse", lse);
  of_out.compare("out", out);
  if (!derivatives) return;

  regard_dot_gradient gradient{};
  gradient.out = out.tensor(), gradient.lse = lse.tensor(), gradient.d_out = d_out.tensor(),
  gradient.d_lse = d_lse.tensor();
  gradient.d_q = dq.tensor(), gradient.d_k = dk.tensor(), gradient.d_v = dv.tensor(), gradient.delta = delta.tensor();
  call([&] { return kernels.dot_backward(&a.problem, &gradient); });
  of_dq.compare("d_q", dq);
  of_dk.compare("d_k", dk);
  of_dv.compare("d_v", dv);

  regard_dot_tangent tangent{};
  tangent.d_q = tq.tensor(), tangent.d_k = tk.tensor(), tangent.d_v = tv.tensor();
  tangent.d_out = t_out.tensor(), tangent.d_lse = t_lse.tensor();
  result.out = again.tensor(), result.lse = lse_again.tensor();
  call([&] { return kernels.dot_jvp(&a.problem, &tangent, &result); });
  of_out.compare("out of forward mode", again);
  of_lse.compare("lse of forward mode", lse_again);
  of_t_out.compare("tangent of out", t_out);
  of_t_lse.compare("tangent of lse", t_lse);
}

void test_attention() {
  constexpr Sizes sizes[] = {{1, 1, 1, 1, 1, 1, 1},     {2, 2, 1, 3, 5, 3, 2},      {1, 6, 2, 37, 53, 17, 19},
                             {2, 4, 4, 13, 70, 16, 24}, {1, 2, 1, 129, 200, 33, 5}, {1, 1, 1, 130, 431, 32, 24},
                             {1, 1, 1, 20, 9, 72, 8},   {1, 2, 1, 21, 40, 130, 7},  {1, 1, 1, 700, 64, 8, 8},
                             {1, 1, 1, 30, 1300, 8, 8}, {1, 8, 2, 1, 300, 64, 40}};
  int count = 0;
  for (const Sizes& n : sizes)
    for (const Type& type : types)
      for (const Mask mask : {Mask::none, Mask::window, Mask::random}) {
        ++count;
        Attention a(n, type, type, mask, Order(count % 3), count % 2 == 0, count % 4 == 1 ? 5 : 0, 1 + count % 3);
        test_forward(a, mask, true);
      }
  // Caches of fewer bytes than the query: few queries are those of the decode kernel.
  for (const Type& kv : {bfloat16, float16, int8})
    for (const int64_t Q : {1, 2, 19})
      for (const Mask mask : {Mask::none, Mask::window}) {
        Attention a({1, 4, 2, Q, 331, 40, 24}, float32, kv, mask, Order::interleaved, Q == 2, 0, 2);
        test_forward(a, mask, false);
      }
}

// Sum of x * y, and of its absolute terms.
struct Sum {
  double value = 0, size = 0;
  void add(double x, double y) { value += x * y, size += std::fabs(x * y); }
};

// The gradients of a kernel along random directions: difference quotients of `loss` in double, which reads the inputs.
void expect_gradients(Type type, const std::vector<std::pair<Array*, Array*>>& inputs,
                      const std::function<double()>& loss) {
  for (const auto& [x, gradient] : inputs) {
    const Array before = *x;
    Array direction(float64, x->size[0], x->size[1], x->size[2], x->size[3]);
    direction.fill(normal);
    Sum sum;
    const int64_t shared = gradient->size[1] / x->size[1];
    gradient->each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
      sum.add((*gradient)(b, h, i, d), direction(b, h / shared, i, d));
    });
    double sides[2];
    for (const int side : {0, 1}) {
      *x = Array(float64, x->size[0], x->size[1], x->size[2], x->size[3]);
      before.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
        x->put(b, h, i, d, before(b, h, i, d) + (side ? 1e-5 : -1e-5) * direction(b, h, i, d));
      });
      sides[side] = loss();
    }
    *x = before;
    expect("gradient", sum.value, (sides[1] - sides[0]) / 2e-5, (8 * type.unit + 2e-5) * sum.size);
    gradient->expect_padding();
  }
}

void test_recurrence(Type type, int64_t N, bool per_channel, bool delta_rule) {
  call_name =
      std::string("recurrence ") + type.name + " N=" + std::to_string(N) + (delta_rule ? " with the delta rule" : "");
  const int64_t B = 1, H = 4, M = 9, E = 11, checkpoints = (N + REGARD_CHECKPOINT - 1) / REGARD_CHECKPOINT;
  const Type real = real_of(type);
  Array q(type, B, 2, N, M), k(type, B, 4, N, M), v(type, B, 4, N, E), decay(real, B, H, N, per_channel ? M : 1);
  Array beta(real, B, H, N, 1), state(real, B, H, M, E), out(type, B, H, N, E), final(real, B, H, M, E);
  Array stored(real, B, H, checkpoints, M * E), d_out(type, B, H, N, E), d_final(real, B, H, M, E);
  Array dq(type, B, H, N, M), dk(type, B, H, N, M), dv(type, B, H, N, E), d_decay = decay, d_beta = beta,
                                                                          d_state = state;
  for (Array* x : {&q, &v, &state, &d_out, &d_final}) x->fill(normal);
  k.fill([] { return 0.3 * normal(); });
  decay.fill([] { return -uniform(0, 0.5); });
  beta.fill([] { return uniform(0, 1); });
  regard_recurrence p{};
  p.B = B, p.H = H, p.N = N, p.M = M, p.E = E, p.q_heads = 2, p.k_heads = 4, p.v_heads = 4;
  p.dtype = type.id, p.threads = 3, p.per_channel = per_channel;
  p.q = q.tensor(), p.k = k.tensor(), p.v = v.tensor(), p.decay = decay.tensor(), p.state = state.tensor();
  if (delta_rule) p.beta = beta.tensor();
  const regard_recurrence_result result{out.tensor(), final.tensor(), stored.tensor()};
  call([&] { return kernels.recurrence_forward(&p, &result); });
  // `use` gets the array of a result, its index, its number and the sum of its absolute terms.
  const auto compute = [&](const std::function<void(bool, int64_t, int64_t, int64_t, double, double)>& use) {
    for (int64_t h = 0; h < H; ++h) {
      std::vector<double> S(M * E);
      for (int64_t n = 0; n < M * E; ++n) S[n] = state(0, h, n / E, n % E);
      for (int64_t t = 0; t < N; ++t)
        for (int64_t e = 0; e < E; ++e) {
          double u = v(0, h, t, e), x = 0, size = 0;
          for (int64_t m = 0; m < M; ++m) S[m * E + e] *= std::exp(decay(0, h, t, per_channel ? m : 0));
          for (int64_t m = 0; m < M && delta_rule; ++m) u -= S[m * E + e] * k(0, h, t, m);
          if (delta_rule) u *= beta(0, h, t, 0);
          for (int64_t m = 0; m < M; ++m) {
            double& s = S[m * E + e];
            s += k(0, h, t, m) * u;
            x += s * q(0, h / 2, t, m), size += (std::fabs(s) + 1) * std::fabs(q(0, h / 2, t, m));
          }
          use(false, h, t, e, x, size);
        }
      for (int64_t n = 0; n < M * E; ++n) use(true, h, n / E, n % E, S[n], std::fabs(S[n]) + 1);
    }
  };
  const auto tolerance = sum_unit(type) * 2000;
  compute([&](bool last, int64_t h, int64_t i, int64_t e, double x, double size) {
    const Array& actual = last ? final : out;
    expect(last ? "state" : "out", actual(0, h, i, e), x, tolerance * size + actual.type.unit * std::fabs(x));
  });
  out.expect_padding();
  regard_recurrence_gradient gradient{};
  gradient.checkpoints = stored.tensor(), gradient.d_out = d_out.tensor(), gradient.d_final = d_final.tensor();
  gradient.d_q = dq.tensor(), gradient.d_k = dk.tensor(), gradient.d_v = dv.tensor(),
  gradient.d_decay = d_decay.tensor();
  if (delta_rule) gradient.d_beta = d_beta.tensor();
  gradient.d_state = d_state.tensor();
  call([&] { return kernels.recurrence_backward(&p, &gradient); });
  std::vector<std::pair<Array*, Array*>> inputs = {
      {&q, &dq}, {&k, &dk}, {&v, &dv}, {&decay, &d_decay}, {&state, &d_state}};
  if (delta_rule) inputs.push_back({&beta, &d_beta});
  expect_gradients(type, inputs, [&] {
    double loss = 0;
    compute([&](bool last, int64_t h, int64_t i, int64_t e, double x, double) {
      loss += x * (last ? d_final : d_out)(0, h, i, e);
    });
    return loss;
  });
}

// A packed weight (N, K) of random numbers, as regard.h describes it, and these numbers.
struct Weight {
  std::vector<uint8_t> packed;
  std::vector<double> exact;

  Weight(int64_t N, int64_t K, int32_t format) {
    const int64_t R = kernels.packed_bytes(1, 1, REGARD_PACKED_FLOAT32) / 4, panels = (N + R - 1) / R;
    const int64_t bytes = kernels.packed_bytes(N, K, format) / panels, G = REGARD_GROUP;
    packed.resize(bytes * panels);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < K; ++k) {
        uint8_t* const panel = packed.data() + n / R * bytes;
        const int64_t r = n % R, c = k % G, scales = format == REGARD_PACKED_INT4_MINIMUM ? 4 * R : 2 * R;
        uint8_t* const group = panel + k / G * (scales + (format == REGARD_PACKED_INT8 ? G : G / 2) * R);
        double x = normal();
        const float single = float(x);
        if (format == REGARD_PACKED_FLOAT32) {
          memcpy(panel + (k * R + r) * 4, &single, 4);
          x = single;
        } else if (format == REGARD_PACKED_BFLOAT16) {
          const uint16_t half = bfloat16_bits(x);
          memcpy(panel + (k / 2 * R + r) * 4 + k % 2 * 2, &half, 2);
          x = bfloat16_value(half);
        } else {
          uint16_t halves[2] = {half_bits(uniform(0.01, 0.1)), half_bits(uniform(-0.5, 0.5))};  // scale and minimum
          for (int64_t i = 0; i < scales / (2 * R); ++i)
            memcpy(c ? (uint8_t*)&halves[i] : group + (i * R + r) * 2,
                   c ? group + (i * R + r) * 2 : (uint8_t*)&halves[i], 2);
          const double scale = half_value(halves[0]);
          if (format == REGARD_PACKED_INT8) {
            const int64_t number = integer(-127, 127);
            group[scales + c * R + r] = uint8_t(number);
            x = double(number) * scale;
          } else {
            const uint32_t number = uint32_t(integer(0, 15));
            uint8_t* const at = group + scales + (c / 8 * R + r) * 4;
            uint32_t word = 0;
            memcpy(&word, at, 4);
            word |= number << (c % 8 * 4);
            memcpy(at, &word, 4);
            x = format == REGARD_PACKED_INT4 ? (number - 8.0) * scale : number * scale + half_value(halves[1]);
          }
        }
        exact.push_back(x);
      }
  }
};

void test_packed_linear(int32_t format, int64_t M, int64_t N, int64_t K, bool relu) {
  call_name = "packed linear format=" + std::to_string(format) + " M=" + std::to_string(M) + " N=" + std::to_string(N) +
              " K=" + std::to_string(K);
  const Weight weight(N, K, format);
  Array x(float32, 1, 1, M, K), residual(float32, 1, 1, M, N), out(float32, 1, 1, M, N);
  std::vector<float> bias;
  for (int64_t n = 0; n < N; ++n) bias.push_back(float(normal()));
  x.fill([] { return normal() * (integer(0, 200) ? 1 : 40); });
  residual.fill(normal);
  regard_packed_linear p{};
  p.M = M, p.N = N, p.K = K, p.x_row = x.stride[2], p.residual_row = residual.stride[2], p.out_row = out.stride[2];
  p.x = (const float*)x.memory.data(), p.packed = weight.packed.data(), p.bias = bias.data(),
  p.out = (float*)out.memory.data();
  p.factor = 0.75, p.format = format, p.threads = 2, p.has_bias = 1, p.has_residual = !relu;
  p.activation = relu ? REGARD_RELU : REGARD_NO_ACTIVATION;
  if (!relu) p.residual = (const float*)residual.memory.data();
  call([&] { return kernels.multiply(&p); });
  const double factor = format >= REGARD_PACKED_INT8 ? p.factor : 1;  // of scales: other formats have none
  // Integer products round x to 8 bits, relative to the largest number of each group.
  const std::string isa = kernels.isa();
  const bool integers = format >= REGARD_PACKED_INT8 && (isa == "amx" || isa == "avx512bf16");
  Expected expected(out);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double sum = bias[n] + (relu ? 0 : residual(0, 0, m, n)), size = std::fabs(bias[n]) + 1, steps = 0;
      for (int64_t k = 0; k < K; ++k) {
        const double w = factor * weight.exact[n * K + k];
        double largest = 0;
        for (int64_t c = k / REGARD_GROUP * REGARD_GROUP;
             integers && c < std::min(K, (k / REGARD_GROUP + 1) * REGARD_GROUP); ++c)
          largest = std::max(largest, std::fabs(x(0, 0, m, c)));
        sum += w * x(0, 0, m, k), size += std::fabs(w * x(0, 0, m, k)), steps += std::fabs(w) * largest / 254;
      }
      expected.add(m * N + n, relu ? std::max(sum, 0.0) : sum, 0x1p-24 * double(K + 16) * size + 1.01 * steps);
    }
  expected.compare("out", out);
}

int run(const char* library, const char* isa, bool all) {
  setenv("REGARD_ISA", isa, 1);
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle) return printf("%s\n", dlerror()), 1;
#define LOAD(name) kernels.name = (decltype(kernels.name))dlsym(handle, "regard_" #name);
  FUNCTIONS(LOAD)
#undef LOAD
  if (strcmp(kernels.isa(), isa) != 0)
    return printf("%s: %s, this CPU lacks it\n", isa, all ? "FAILED" : "skipped"), all;
  test_attention();
  for (const Type& type : types) {
    for (const int64_t N : {1, 33, 530})
      for (const int form : {0, 1, 2, 3}) test_recurrence(type, N, form & 1, form & 2);
  }
  for (const int32_t format : {REGARD_PACKED_FLOAT32, REGARD_PACKED_BFLOAT16, REGARD_PACKED_INT8, REGARD_PACKED_INT4,
                               REGARD_PACKED_INT4_MINIMUM})
    for (const int64_t M : {1, 2, 5, 13, 140})
      for (const int64_t K : {1, 31, 77, 300}) test_packed_linear(format, M, K == 77 ? 33 : 70, K, M % 2);
  if (filled_blocks == 0) fail("no memory was filled with NaN");
  printf("%s: %ld numbers compared, largest error %.2f of its bound, %ld failures\n", isa, compared, worst, failures);
  return failures != 0;
}

}  // namespace

int main(int count, char** arguments) {
  const bool all = count > 1 && strcmp(arguments[1], "--all") == 0;
  if (count < 3 + all) return printf("usage: %s [--all] LIBRARY ISA...\n", arguments[0]), 2;
  int result = 0;
  for (int n = 2 + all; n < count; ++n) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      const int status = run(arguments[1 + all], arguments[n], all);
      fflush(stdout);
      _exit(status);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) result = 1;
    if (WIFSIGNALED(status)) printf("%s: FAILED with signal %d\n", arguments[n], WTERMSIG(status));
  }
  return result;
}
