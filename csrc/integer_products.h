// Products with weights of small integers by the CPU's integer instructions (VNNI): rows of x are rounded to 8 bits, with a
// scale per group of columns, and the groups' exact integer sums are added up in float. Groups with a number far above
// the others of its row, whose steps would be coarse, get 8 more bits.
//
// The instruction multiplies four unsigned bytes by four signed ones. A word of a weight holds four columns of one row of
// a panel as unsigned bytes; what they are too large by is subtracted from the sum at its start.
#pragma once
#include "memory.h"
#include "packed_weight.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define REGARD_INTEGER_PRODUCTS

namespace regard::REGARD_ISA {

constexpr int64_t group_words = REGARD_GROUP / 4;
constexpr int64_t largest_digit = 127;  // of a rounded number of x

constexpr float second_step = 1.0f / (2 * largest_digit);  // of a second digit, relative to that of the first
constexpr float outlier = 4;     // times the root mean square of its row: a group with such a number has second digits
constexpr int integer_rows = 6;  // of a strip: an integer and a float sum for each half of a panel

// A group of a row of x: scale * (digit + second_step * second digit).
struct RoundedGroup {
  int8_t digits[2][REGARD_GROUP];
  int32_t sum[2];  // of the digits
  float scale;
  int32_t is_fine;  // whether there are second digits; if not, they are zero
};

// Rows of x as integers, (rows, groups).
struct RoundedRows {
  int64_t groups;
  RoundedGroup* data = nullptr;

  RoundedGroup* row(int64_t r) const { return data + r * groups; }
};

using Bytes = uint8_t __attribute__((vector_size(64)));

// How the integers of a format are read as words of four unsigned bytes, and what these are too large by.
template <class Reader> struct IntegerWords;
template <class Reader> constexpr bool is_integer = __is_base_of(GroupReader, Reader);

// Four columns of 32 rows are two vectors; a word takes a byte of each column.
template <> struct IntegerWords<Int8Reader> {
  static constexpr int64_t words = group_words;
  static constexpr int32_t surplus = 128;
  static constexpr bool pairs = false, has_minimum = false;

  template <int v, int... I> REGARD_INLINE static Words weave(Bytes a, Bytes b, detail::Indices<I...>) {
    return bits_as<Words>(__builtin_shufflevector(a, b, (I % 4 * panel_rows + I / 4 + v * lanes<float>)...));
  }
  REGARD_INLINE static void read(const char* data, int64_t word, Words (&out)[1][2]) {
    Bytes a, b;
    __builtin_memcpy(&a, data + word * 4 * panel_rows, 64);
    __builtin_memcpy(&b, data + word * 4 * panel_rows + 64, 64);
    using All = typename detail::Count<64>::type;
    out[0][0] = weave<0>(a, b, All{}) ^ 0x80808080u;
    out[0][1] = weave<1>(a, b, All{}) ^ 0x80808080u;
  }
};

// The low and the high halves of the bytes are two words: of the even and of the odd columns.
template <bool minimum> struct IntegerWords<Int4Reader<minimum>> {
  static constexpr int64_t words = group_words / 2;
  static constexpr int32_t surplus = minimum ? 0 : 8;
  static constexpr bool pairs = true, has_minimum = minimum;

  REGARD_INLINE static void read(const char* data, int64_t word, Words (&out)[2][2]) {
    REGARD_UNROLL
    for (int v = 0; v < 2; ++v) {
      const Words bits = load_words(data + word * 4 * panel_rows + v * vector_bytes);
      out[0][v] = bits & 0x0f0f0f0fu;
      out[1][v] = bits >> 4 & 0x0f0f0f0fu;
    }
  }
};

REGARD_INLINE __m512i multiply_bytes(__m512i sum, Words weights, int32_t x) {
  return _mm512_dpbusd_epi32(sum, bits_as<__m512i>(weights), _mm512_set1_epi32(x));
}

REGARD_INLINE bool has_infinity(VecF x) {
  constexpr int not_finite = 0x99;  // quiet and signaling NaN, both infinities
  return _mm512_fpclass_ps_mask(x, not_finite) != 0;
}

inline bool is_finite(const float* x, int64_t K) {
  for (int64_t k = 0; k < K; k += lanes<float>)
    if (has_infinity(load_some(x + k, 1, K - k))) return false;
  return true;
}

// Round 32 numbers to digits and return their sum. `pairs`: of eight columns the even ones come first.
template <bool pairs> REGARD_INLINE int32_t put_digits(__m512i left, __m512i right, int8_t* to) {
  __m256i digits = _mm256_set_m128i(_mm512_cvtepi32_epi8(right), _mm512_cvtepi32_epi8(left));
  if constexpr (pairs)
    digits = _mm256_shuffle_epi8(
        digits, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
  _mm256_storeu_si256((__m256i*)to, digits);
  return _mm512_reduce_add_epi32(_mm512_add_epi32(left, right));
}

// Round a row of x. If it has NaN or an infinity, return true and set all to zero.
template <bool pairs> bool round_row(const float* x, int64_t K, RoundedGroup* to) {
  constexpr int L = lanes<float>;
  bool bad = false;
  VecF squares{};
  for (int64_t k = 0; k < K; k += L) {
    const VecF y = load_some(x + k, 1, K - k);
    bad |= has_infinity(y);
    squares += y * y;
  }
  if (bad) {  // such a number has no digits, and their sum could overflow
    __builtin_memset((void*)to, 0, size_t((K + REGARD_GROUP - 1) / REGARD_GROUP) * sizeof(*to));
    return true;
  }
  // Rows whose squares overflow or vanish have second digits everywhere.
  const float mean_square = _mm512_reduce_add_ps(squares) / float(K);
  const float usual = mean_square < infinity ? outlier * __builtin_sqrtf(mean_square) : 0;
  for (int64_t k = 0; k < K; k += REGARD_GROUP, ++to) {
    const int64_t left = K - k;
    const bool whole = left >= REGARD_GROUP;
    const VecF a = whole ? load(x + k) : load_some(x + k, 1, left);
    const VecF b = whole ? load(x + k + L) : left > L ? load_some(x + k + L, 1, left - L) : VecF{};
    const float largest = _mm512_reduce_max_ps(max(absolute(a), absolute(b)));
    const float inverse = largest > 1e-30f ? float(largest_digit) / largest : 0;
    const VecF y = a * inverse, z = b * inverse;
    const __m512i first = _mm512_cvtps_epi32(y), second = _mm512_cvtps_epi32(z);
    to->scale = inverse > 0 ? largest / float(largest_digit) : 0;
    to->sum[0] = put_digits<pairs>(first, second, to->digits[0]);
    to->is_fine = largest > usual;
    const float finer = to->is_fine ? 1 / second_step : 0;
    to->sum[1] = put_digits<pairs>(_mm512_cvtps_epi32((y - _mm512_cvtepi32_ps(first)) * finer),
                                   _mm512_cvtps_epi32((z - _mm512_cvtepi32_ps(second)) * finer), to->digits[1]);
  }
  return false;
}

// The words of a panel, for several strips of rows: [group][word][half][row].
template <class Reader> void unpack_words(const char* panel, int64_t groups, char* to) {
  using Integers = IntegerWords<Reader>;
  for (int64_t g = 0; g < groups; ++g) {
    const char* data = panel + (g + 1) * Reader::group_bytes - Integers::words * 4 * panel_rows;
    for (int64_t w = 0; w < Integers::words; ++w) {
      Words words[Integers::pairs ? 2 : 1][2];
      Integers::read(data, w, words);
      for (auto& part : words) {
        __builtin_memcpy(to, part, sizeof(part));
        to += sizeof(part);
      }
    }
  }
}

// M rows from `x` on times a panel, whose words are unpacked where `unpacked`.
template <class Reader, int M, bool unpacked>
REGARD_INLINE void multiply_integers(const RoundedGroup* x, int64_t groups, const char* panel, const char* words,
                                     float factor, VecF (&sums)[M][2]) {
  using Integers = IntegerWords<Reader>;
  constexpr int parts = Integers::pairs ? 2 : 1;
  REGARD_UNROLL
  for (int r = 0; r < M; ++r) sums[r][0] = sums[r][1] = VecF{};
  for (int64_t g = 0; g < groups; ++g, ++x) {
    const char* head = panel + g * Reader::group_bytes;
    const char* data = head + Reader::group_bytes - Integers::words * 4 * panel_rows;
    const auto add = [&](int digit, float step) __attribute__((always_inline)) {
      __m512i dots[M][2];
      REGARD_UNROLL
      for (int r = 0; r < M; ++r)
        dots[r][0] = dots[r][1] = _mm512_set1_epi32(-Integers::surplus * x[r * groups].sum[digit]);
      REGARD_UNROLL
      for (int64_t w = 0; w < Integers::words; ++w) {
        Words read[parts][2];
        if constexpr (unpacked) __builtin_memcpy(read, words + (g * Integers::words + w) * sizeof(read), sizeof(read));
        else Integers::read(data, w, read);
        REGARD_UNROLL
        for (int part = 0; part < parts; ++part) {
          REGARD_UNROLL
          for (int r = 0; r < M; ++r) {
            int32_t four;
            __builtin_memcpy(&four, x[r * groups].digits[digit] + (w * parts + part) * 4, 4);
            dots[r][0] = multiply_bytes(dots[r][0], read[part][0], four);
            dots[r][1] = multiply_bytes(dots[r][1], read[part][1], four);
          }
        }
      }
      REGARD_UNROLL
      for (int v = 0; v < 2; ++v) {
        const VecF scale = GroupReader::load_half(head, v) * factor;
        VecF minimum{};
        if constexpr (Integers::has_minimum)
          minimum = GroupReader::load_half(head + GroupReader::scales_bytes, v) * factor;
        REGARD_UNROLL
        for (int r = 0; r < M; ++r) {
          VecF part = _mm512_cvtepi32_ps(dots[r][v]) * scale;
          if constexpr (Integers::has_minimum) part += minimum * float(x[r * groups].sum[digit]);
          sums[r][v] += part * (x[r * groups].scale * step);
        }
      }
    };
    add(0, 1);
    int32_t is_fine = 0;
    REGARD_UNROLL
    for (int r = 0; r < M; ++r) is_fine |= x[r * groups].is_fine;
    if (__builtin_expect(is_fine, 0)) add(1, second_step);
  }
}

}  // namespace regard::REGARD_ISA

#endif
