// A description of the structures in regard.h, from which callers build their packing.
//
// Only names are repeated here; the compiler adds types, offsets and sizes. A table that lacks a field, or lists fields in
// another order than the structure, does not compile.
#include <stddef.h>
#include <stdio.h>

#include <type_traits>

#include "regard.h"

namespace {

struct Field {
  const char *name, *type;
  size_t count, offset, size;
};

template <class T>
struct Layout;

template <class T>
constexpr const char* type_of() {
  if constexpr (std::is_pointer_v<T>) return "P";
  else if constexpr (std::is_same_v<T, int64_t>) return "q";
  else if constexpr (std::is_same_v<T, uint64_t>) return "Q";
  else if constexpr (std::is_same_v<T, int32_t>) return "i";
  else if constexpr (std::is_same_v<T, uint32_t>) return "I";
  else if constexpr (std::is_same_v<T, double>) return "d";
  else return Layout<T>::name;
}

template <class T>
constexpr Field describe(const char* name, size_t offset) {
  using Element = std::remove_extent_t<T>;
  return {name, type_of<Element>(), sizeof(T) / sizeof(Element), offset, sizeof(T)};
}

// clang-format off
#define STRUCTURE(T)                        \
  template <>                               \
  struct Layout<T> {                        \
    using Self = T;                         \
    static constexpr const char* name = #T; \
    static constexpr Field fields[] = {
#define FIELD(name) describe<decltype(Self::name)>(#name, offsetof(Self, name))
#define END }; };

STRUCTURE(regard_tensor)
  FIELD(data), FIELD(stride), FIELD(present)
END
STRUCTURE(regard_intervals)
  FIELD(start), FIELD(stop), FIELD(stride)
END
STRUCTURE(regard_tiles)
  FIELD(pointer), FIELD(start), FIELD(stop), FIELD(bits_index), FIELD(bits), FIELD(stride)
END
STRUCTURE(regard_dot)
  FIELD(B), FIELD(H), FIELD(G), FIELD(Q), FIELD(K), FIELD(D), FIELD(E), FIELD(dtype), FIELD(threads), FIELD(mask),
  FIELD(has_sink), FIELD(scale), FIELD(softcap), FIELD(temperature), FIELD(q), FIELD(k), FIELD(v), FIELD(intervals),
  FIELD(tiles), FIELD(diagonal), FIELD(row_table), FIELD(bias), FIELD(bias_dtype), FIELD(wants_value_table),
  FIELD(radius), FIELD(offset), FIELD(sink), FIELD(seed), FIELD(dropout_threshold), FIELD(kv_dtype),
  FIELD(dropout_scale), FIELD(weight), FIELD(k_scale), FIELD(v_scale), FIELD(normalization), FIELD(reserved),
  FIELD(normalization_bias)
END
STRUCTURE(regard_dot_result)
  FIELD(out), FIELD(lse), FIELD(out_table), FIELD(max_logit)
END
STRUCTURE(regard_dot_gradient)
  FIELD(out), FIELD(lse), FIELD(out_table), FIELD(d_out), FIELD(d_lse), FIELD(d_out_table), FIELD(d_q), FIELD(d_k),
  FIELD(d_v), FIELD(d_diagonal), FIELD(d_row_table), FIELD(d_bias), FIELD(delta), FIELD(d_weight)
END
STRUCTURE(regard_dot_tangent)
  FIELD(d_q), FIELD(d_k), FIELD(d_v), FIELD(d_diagonal), FIELD(d_row_table), FIELD(d_bias), FIELD(d_out), FIELD(d_lse),
  FIELD(d_out_table), FIELD(d_sink), FIELD(has_d_sink)
END
STRUCTURE(regard_dot_statistics)
  FIELD(lse), FIELD(entropy), FIELD(max_logit), FIELD(distance), FIELD(top), FIELD(top_keys), FIELD(top_weights),
  FIELD(mass), FIELD(chosen_start), FIELD(chosen_stop), FIELD(chosen_count)
END
STRUCTURE(regard_dot_columns)
  FIELD(out), FIELD(columns), FIELD(count)
END
STRUCTURE(regard_dot_pool)
  FIELD(out), FIELD(rows), FIELD(columns)
END
STRUCTURE(regard_linear)
  FIELD(B), FIELD(H), FIELD(G), FIELD(N), FIELD(M), FIELD(E), FIELD(dtype), FIELD(threads), FIELD(map), FIELD(reserved),
  FIELD(q), FIELD(k), FIELD(v)
END
STRUCTURE(regard_linear_result)
  FIELD(out), FIELD(norm)
END
STRUCTURE(regard_linear_gradient)
  FIELD(out), FIELD(norm), FIELD(d_out), FIELD(d_q), FIELD(d_k), FIELD(d_v)
END
STRUCTURE(regard_recurrence)
  FIELD(B), FIELD(H), FIELD(N), FIELD(M), FIELD(E), FIELD(q_heads), FIELD(k_heads), FIELD(v_heads), FIELD(dtype),
  FIELD(threads), FIELD(per_channel), FIELD(reserved), FIELD(q), FIELD(k), FIELD(v), FIELD(decay), FIELD(beta),
  FIELD(state)
END
STRUCTURE(regard_recurrence_result)
  FIELD(out), FIELD(state), FIELD(checkpoints)
END
STRUCTURE(regard_recurrence_gradient)
  FIELD(checkpoints), FIELD(d_out), FIELD(d_final), FIELD(d_q), FIELD(d_k), FIELD(d_v), FIELD(d_decay), FIELD(d_beta),
  FIELD(d_state)
END
STRUCTURE(regard_packed_linear)
  FIELD(M), FIELD(N), FIELD(K), FIELD(x_row), FIELD(residual_row), FIELD(out_row), FIELD(x), FIELD(packed), FIELD(bias),
  FIELD(residual), FIELD(out), FIELD(factor), FIELD(format), FIELD(activation), FIELD(threads), FIELD(has_bias),
  FIELD(has_residual), FIELD(reserved)
END
STRUCTURE(regard_weight)
  FIELD(N), FIELD(K), FIELD(packed), FIELD(bias), FIELD(factor), FIELD(format), FIELD(has_bias)
END
STRUCTURE(regard_block)
  FIELD(qkv), FIELD(output), FIELD(up), FIELD(down), FIELD(gain), FIELD(shift), FIELD(attention)
END
STRUCTURE(regard_stack)
  FIELD(B), FIELD(N), FIELD(d_model), FIELD(H), FIELD(G), FIELD(D), FIELD(d_hidden), FIELD(layers), FIELD(attentions),
  FIELD(blocks), FIELD(attention), FIELD(keys), FIELD(values), FIELD(x), FIELD(y), FIELD(normed), FIELD(qkv), FIELD(attended), FIELD(hidden),
  FIELD(cos), FIELD(sin), FIELD(d_rotary), FIELD(table_batch), FIELD(eps), FIELD(interleaved), FIELD(cached), FIELD(post_norm),
  FIELD(rms_norm), FIELD(gated), FIELD(activation), FIELD(threads), FIELD(reserved)
END
    // clang-format on

    constexpr struct {
  const char* name;
  int value;
} numbers[] = {
#define NUMBER(name) {#name, name}
    NUMBER(REGARD_FLOAT32),
    NUMBER(REGARD_FLOAT64),
    NUMBER(REGARD_BFLOAT16),
    NUMBER(REGARD_FLOAT16),
    NUMBER(REGARD_NO_MEMORY),
    NUMBER(REGARD_BAD_ARGUMENT),
    NUMBER(REGARD_TOO_LARGE),
    NUMBER(REGARD_NO_DATA),
    NUMBER(REGARD_TILE),
    NUMBER(REGARD_NO_MASK),
    NUMBER(REGARD_INTERVALS),
    NUMBER(REGARD_TILES),
    NUMBER(REGARD_SOFTMAX),
    NUMBER(REGARD_SIGMOID),
    NUMBER(REGARD_RELU_WEIGHTS),
    NUMBER(REGARD_SQUARED_RELU_WEIGHTS),
    NUMBER(REGARD_FEATURES),
    NUMBER(REGARD_ELU),
    NUMBER(REGARD_PACKED_FLOAT32),
    NUMBER(REGARD_PACKED_BFLOAT16),
    NUMBER(REGARD_PACKED_INT8),
    NUMBER(REGARD_PACKED_INT4),
    NUMBER(REGARD_PACKED_INT4_MINIMUM),
    NUMBER(REGARD_GROUP),
    NUMBER(REGARD_RELU),
    NUMBER(REGARD_GELU),
    NUMBER(REGARD_GELU_TANH),
    NUMBER(REGARD_QUICK_GELU),
    NUMBER(REGARD_SILU),
    NUMBER(REGARD_TANH),
    NUMBER(REGARD_CHECKPOINT),
    NUMBER(REGARD_INT8),
};

// The text, written once when the library is loaded.
class Description {
 public:
  template <class... Structures>
  explicit Description(Layout<Structures>... layouts) {
    (write_structure(layouts), ...);
    for (const auto& number : numbers) write("number %s %d\n", number.name, number.value);
  }

  char text[1 << 15] = "";

 private:
  template <class T>
  void write_structure(Layout<T>) {
    static_assert(covers<T>(), "a table must list all fields of its structure, in their order");
    write("structure %s %zu\n", Layout<T>::name, sizeof(T));
    for (const Field& field : Layout<T>::fields)
      write("field %s %s %zu %zu %zu\n", field.name, field.type, field.count, field.offset, field.size);
  }

  template <class T>
  static constexpr bool covers() {
    size_t end = 0;
    for (const Field& field : Layout<T>::fields) {
      if (field.offset != end) return false;
      end += field.size;
    }
    return end == sizeof(T);
  }

  // Text that does not fit is cut, which callers notice as a structure or number that is missing.
  template <class... Values>
  void write(const char* format, Values... values) {
    const int length = snprintf(text + used, sizeof(text) - used, format, values...);
    if (length > 0 && used + size_t(length) < sizeof(text)) used += size_t(length);
  }

  size_t used = 0;
};

const Description description(Layout<regard_tensor>{}, Layout<regard_intervals>{}, Layout<regard_tiles>{},
                              Layout<regard_dot>{}, Layout<regard_dot_result>{}, Layout<regard_dot_gradient>{},
                              Layout<regard_dot_tangent>{}, Layout<regard_dot_statistics>{},
                              Layout<regard_dot_columns>{}, Layout<regard_dot_pool>{}, Layout<regard_linear>{},
                              Layout<regard_linear_result>{}, Layout<regard_linear_gradient>{},
                              Layout<regard_recurrence>{}, Layout<regard_recurrence_result>{},
                              Layout<regard_recurrence_gradient>{}, Layout<regard_packed_linear>{},
                              Layout<regard_weight>{}, Layout<regard_block>{}, Layout<regard_stack>{});

}  // namespace

extern "C" const char* regard_layout(void) { return description.text; }
