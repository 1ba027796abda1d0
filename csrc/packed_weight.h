// The formats of a packed weight, and how each is read as float32.
//
// A weight (N, K) is a sequence of panels of NR of its rows; regard.h describes their bytes. A reader is opened at a
// column that is a multiple of its span, and then returns vectors of one column, half a panel each.
#pragma once
#include "gemm.h"
#include "regard.h"

namespace regard::REGARD_ISA {

constexpr int panel_rows = NR<float>;
using Words = WordVec<float>;

REGARD_INLINE Words load_words(const char* from) {
  Words words;
  __builtin_memcpy(&words, from, sizeof(words));
  return words;
}

struct Float32Reader {
  static constexpr int64_t span = 256;  // columns from one scale to the next
  static constexpr int unit = 4;        // columns read together
  static int64_t panel_bytes(int64_t K) { return K * panel_rows * int64_t(sizeof(float)); }

  const float* panel;
  const float* data = nullptr;
  Float32Reader(const char* panel, float) : panel((const float*)panel) {}
  REGARD_INLINE void open(int64_t k) { data = panel + k * panel_rows; }
  // Half `v` of column u + i, where u is a multiple of `unit`.
  REGARD_INLINE VecF get(int64_t u, int i, int v) const { return load(data + (u + i) * panel_rows + v * lanes<float>); }
};

// Two columns to a word, the first one in its low half.
struct BFloat16Reader {
  static constexpr int64_t span = 256;
  static constexpr int unit = 4;
  static int64_t panel_bytes(int64_t K) { return (K + 1) / 2 * panel_rows * int64_t(sizeof(uint32_t)); }

  const char* panel;
  const char* data = nullptr;
  BFloat16Reader(const char* panel, float) : panel(panel) {}
  REGARD_INLINE void open(int64_t k) { data = panel + panel_bytes(k); }
  REGARD_INLINE VecF get(int64_t u, int i, int v) const {
    const Words pair = load_words(data + (u + i) / 2 * (panel_rows * 4) + v * vector_bytes);
    return bits_as<VecF>(i % 2 ? pair & 0xffff0000u : pair << 16);
  }
};

// The scales of a group of columns, and what follows them.
struct GroupReader {
  static constexpr int64_t span = REGARD_GROUP;
  static constexpr int64_t scales_bytes = panel_rows * int64_t(sizeof(float16));

  const char* panel;
  const char* data = nullptr;
  float factor;
  VecF scale[2];
  GroupReader(const char* panel, float factor) : panel(panel), factor(factor) {}
  REGARD_INLINE static VecF load_half(const char* from, int v) {
    return load_as((const float16*)from + v * lanes<float>);
  }
  REGARD_INLINE void open_group(int64_t k, int64_t group_bytes) {
    data = panel + k / span * group_bytes;
    scale[0] = load_half(data, 0) * factor;
    scale[1] = load_half(data, 1) * factor;
    data += scales_bytes;
  }
};

struct Int8Reader : GroupReader {
  static constexpr int unit = 4;
  static constexpr int64_t group_bytes = scales_bytes + span * panel_rows;
  static int64_t panel_bytes(int64_t K) { return (K + span - 1) / span * group_bytes; }

  using GroupReader::GroupReader;
  REGARD_INLINE void open(int64_t k) { open_group(k, group_bytes); }
  REGARD_INLINE VecF get(int64_t u, int i, int v) const {
    typedef int8_t Bytes __attribute__((vector_size(vector_bytes / 4)));
    Bytes bytes;
    __builtin_memcpy(&bytes, data + (u + i) * panel_rows + v * lanes<float>, sizeof(bytes));
#if defined(__AVX512F__)
    const VecF numbers = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits_as<__m128i>(bytes)));
#else
    const VecF numbers = __builtin_convertvector(__builtin_convertvector(bytes, IntVec<float>), VecF);
#endif
    return numbers * scale[v];
  }
};

// Eight columns to a word, the first one in its lowest bits, each as a number from 0 to 15. It means the number less 8
// times the scale, or, with a minimum, the number times the scale plus the minimum.
template <bool has_minimum> struct Int4Reader : GroupReader {
  static constexpr int unit = 8;
  static constexpr int64_t group_bytes = (has_minimum ? 2 : 1) * scales_bytes + span * panel_rows / 2;
  static int64_t panel_bytes(int64_t K) { return (K + span - 1) / span * group_bytes; }

  VecF minimum[2];
  using GroupReader::GroupReader;
  REGARD_INLINE void open(int64_t k) {
    open_group(k, group_bytes);
    if constexpr (has_minimum) {
      minimum[0] = load_half(data, 0) * factor;
      minimum[1] = load_half(data, 1) * factor;
      data += scales_bytes;
    }
  }
  REGARD_INLINE VecF get(int64_t u, int i, int v) const {
    const Words word = load_words(data + u / 8 * (panel_rows * 4) + v * vector_bytes) >> (4 * i);
#if defined(__AVX512F__)  // the low four bits of every lane select one of sixteen numbers
    constexpr float least = has_minimum ? 0 : -8;
    const VecF table = lane_numbers<VecF>() + least;
    const VecF number = _mm512_permutexvar_ps(bits_as<__m512i>(word), table);
#else
    const IntVec<float> small = bits_as<IntVec<float>>(word & 15) - (has_minimum ? 0 : 8);
    const VecF number = __builtin_convertvector(small, VecF);
#endif
    if constexpr (has_minimum) return number * scale[v] + minimum[v];
    else return number * scale[v];
  }
};

template <class R> struct Format {
  using Reader = R;
};

// Calls f with the Format of a number.
template <class F> REGARD_INLINE auto with_format(int32_t format, F&& f) {
  switch (format) {
    case REGARD_PACKED_BFLOAT16:
      return f(Format<BFloat16Reader>{});
    case REGARD_PACKED_INT8:
      return f(Format<Int8Reader>{});
    case REGARD_PACKED_INT4:
      return f(Format<Int4Reader<false>>{});
    case REGARD_PACKED_INT4_MINIMUM:
      return f(Format<Int4Reader<true>>{});
    default:
      return f(Format<Float32Reader>{});
  }
}

}  // namespace regard::REGARD_ISA
