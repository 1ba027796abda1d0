// What tests of the kernels are made of: the library, tensors of each type, and comparisons within a bound.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/regard.h"

namespace {

#define FUNCTIONS(F) \
  F(isa)             \
  F(dot_forward) F(dot_backward) F(dot_jvp) F(recurrence_forward) F(recurrence_backward) F(packed_bytes) F(multiply)
struct Library {
#define POINTER(name) decltype(&regard_##name) name = nullptr;
  FUNCTIONS(POINTER)
#undef POINTER
} kernels;

struct Type {
  int32_t id;
  size_t bytes;
  double unit;       // unit roundoff
  double underflow;  // what a number may lose besides
  const char* name;
};
constexpr Type float32{REGARD_FLOAT32, 4, 0x1p-24, 0x1p-126, "float32"},
    float64{REGARD_FLOAT64, 8, 0x1p-53, 0x1p-126, "float64"},
    bfloat16{REGARD_BFLOAT16, 2, 0x1p-8, 0x1p-126, "bfloat16"}, float16{REGARD_FLOAT16, 2, 0x1p-11, 0x1p-25, "float16"},
    int8{REGARD_INT8, 1, 0, 0, "int8"};
constexpr Type types[] = {float32, float64, bfloat16, float16};
constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();

Type real_of(Type type) { return type.id == REGARD_FLOAT64 ? float64 : float32; }
double sum_unit(Type type) { return real_of(type).unit; }
// How far an operand of a product in bfloat16 may be rounded once more.
double operand_unit(Type type) { return type.id == REGARD_BFLOAT16 ? type.unit : 0; }

std::mt19937_64 bits;
double normal() { return std::normal_distribution<double>()(bits); }
double uniform(double low, double high) { return std::uniform_real_distribution<double>(low, high)(bits); }
int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(bits); }

std::string call_name;
long compared = 0, failures = 0;
double worst = 0;  // error, relative to its bound

void fail(const std::string& what) {
  if (++failures <= 5) printf("FAILED %s %s: %s\n", kernels.isa(), call_name.c_str(), what.c_str());
}
void expect(const char* what, double actual, double expected, double bound) {
  ++compared;
  if (actual == expected) return;
  const double error = std::fabs(actual - expected);
  if (error <= bound) {
    worst = std::max(worst, error / bound);
    return;
  }
  char text[200];
  snprintf(text, sizeof(text), "%s is %g, expected %g within %.2g", what, actual, expected, bound);
  fail(text);
}
// In a thread of its own, whose scratch memory is fresh.
void call(const std::function<int()>& kernel) {
  int status = 0;
  std::thread([&] { status = kernel(); }).join();
  if (status != REGARD_OK) fail("status " + std::to_string(status));
}

uint16_t half_bits(double x) {
  if (std::isnan(x)) return 0x7e00;
  int exponent = 0;
  frexp(x, &exponent);
  exponent = std::max(exponent, -13);
  return uint16_t((std::signbit(x) << 15) | (((exponent + 13) << 10) + lrint(ldexp(std::fabs(x), 11 - exponent))));
}
double half_value(uint16_t half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const double size = exponent == 31 ? (mantissa ? nan : infinity)
                      : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                     : ldexp(mantissa, -24);
  return half >> 15 ? -size : size;
}
uint16_t bfloat16_bits(double x) {
  if (std::isnan(x)) return 0x7fc0;
  const float single = float(x);
  uint32_t word = 0;
  memcpy(&word, &single, 4);
  return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
double bfloat16_value(uint16_t half) {
  const uint32_t word = uint32_t(half) << 16;
  float single = 0;
  memcpy(&single, &word, 4);
  return single;
}

enum class Order { rows, interleaved, columns };  // (B, H, N, D), (B, N, H, D) or (B, H, D, N) in memory

// A tensor (batch, heads, rows, columns). What lies between its rows must not be written.
struct Array {
  Type type = float32;
  int64_t size[4] = {}, stride[4] = {};
  std::vector<uint8_t> memory;

  Array() = default;
  Array(Type type, int64_t B, int64_t H, int64_t N, int64_t D, Order order = Order::rows)
      : type(type), size{B, H, N, D} {
    const int axes[3][4] = {{3, 2, 1, 0}, {3, 1, 2, 0}, {2, 3, 1, 0}};  // innermost first
    int64_t step = 1;
    for (const int axis : axes[int(order)]) {
      stride[axis] = step;
      step = step * size[axis] + (step == 1 ? 2 : 0);
    }
    memory.assign(step * type.bytes, 0xff);
  }
  uint8_t* at(int64_t b, int64_t h, int64_t i, int64_t d) const {
    const int64_t place = b * stride[0] + h * stride[1] + i * stride[2] + d * stride[3];
    return const_cast<uint8_t*>(memory.data()) + place * int64_t(type.bytes);
  }
  template <class N> N number(const uint8_t* from) const {
    N x;
    memcpy(&x, from, sizeof(x));
    return x;
  }
  double operator()(int64_t b, int64_t h, int64_t i, int64_t d) const {
    const uint8_t* from = at(b, h, i, d);
    if (type.id == REGARD_FLOAT64) return number<double>(from);
    if (type.id == REGARD_BFLOAT16) return bfloat16_value(number<uint16_t>(from));
    if (type.id == REGARD_FLOAT16) return half_value(number<uint16_t>(from));
    return type.id == REGARD_INT8 ? number<int8_t>(from) : number<float>(from);
  }
  void put(int64_t b, int64_t h, int64_t i, int64_t d, double x) {
    const float single = float(x);
    const int8_t small = type.id == REGARD_INT8 ? int8_t(x) : int8_t(0);
    const uint16_t half = type.id == REGARD_BFLOAT16 ? bfloat16_bits(x) : type.id == REGARD_FLOAT16 ? half_bits(x) : 0;
    const void* from = type.id == REGARD_FLOAT64 ? (const void*)&x
                       : type.bytes == 4         ? (const void*)&single
                       : type.bytes == 2         ? (const void*)&half
                                                 : (const void*)&small;
    memcpy(at(b, h, i, d), from, type.bytes);
  }
  template <class F> void each(F&& f) const {
    for (int64_t b = 0; b < size[0]; ++b)
      for (int64_t h = 0; h < size[1]; ++h)
        for (int64_t i = 0; i < size[2]; ++i)
          for (int64_t d = 0; d < size[3]; ++d) f(b, h, i, d);
  }
  Array& fill(const std::function<double()>& random) {
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) { put(b, h, i, d, random()); });
    return *this;
  }
  regard_tensor tensor() {
    regard_tensor t{memory.empty() ? nullptr : memory.data(), {}, !memory.empty()};
    memcpy(t.stride, stride, sizeof(stride));
    return t;
  }
  void expect_padding() const {
    Array copy = *this;
    each([&](int64_t b, int64_t h, int64_t i, int64_t d) { memset(copy.at(b, h, i, d), 0xff, type.bytes); });
    for (const uint8_t byte : copy.memory)
      if (byte != 0xff) return fail("memory between the rows of a result was written");
  }
};

// Expected numbers and their bounds, rounded to the type of the result at the end.
struct Expected {
  std::vector<double> value, bound;
  explicit Expected(const Array& like)
      : value(like.size[0] * like.size[1] * like.size[2] * like.size[3]), bound(value.size()) {}
  void add(size_t n, double x, double e) { value[n] += x, bound[n] += e; }
  void compare(const char* what, const Array& actual) const {
    size_t n = 0;
    actual.each([&](int64_t b, int64_t h, int64_t i, int64_t d) {
      const double stored = actual.type.unit * std::fabs(value[n]) + actual.type.underflow;
      expect(what, actual(b, h, i, d), value[n], bound[n] + stored);
      ++n;
    });
    actual.expect_padding();
  }
};

}  // namespace
