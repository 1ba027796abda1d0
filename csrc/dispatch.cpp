// The exported functions: check the arguments, pick the instruction set once, call its kernel.
#include <stdlib.h>
#include <string.h>

#ifdef REGARD_HAS_NEONBF16
#include <sys/auxv.h>
#endif

#include "kernels.h"
#include "regard.h"

#include "runtime.h"

// Widest first: do(isa) for every instruction set that was compiled.
#ifdef REGARD_HAS_AMX
#define REGARD_DO_AMX(do) \
  do (amx)
#else
#define REGARD_DO_AMX(do)
#endif
#ifdef REGARD_HAS_AVX512BF16
#define REGARD_DO_AVX512BF16(do) \
  do (avx512bf16)
#else
#define REGARD_DO_AVX512BF16(do)
#endif
#ifdef REGARD_HAS_AVX512
#define REGARD_DO_AVX512(do) \
  do (avx512)
#else
#define REGARD_DO_AVX512(do)
#endif
#ifdef REGARD_HAS_AVX2
#define REGARD_DO_AVX2(do) \
  do (avx2)
#else
#define REGARD_DO_AVX2(do)
#endif
#ifdef REGARD_HAS_NEONBF16
#define REGARD_DO_NEONBF16(do) \
  do (neonbf16)
#else
#define REGARD_DO_NEONBF16(do)
#endif
#ifdef REGARD_HAS_NEON
#define REGARD_DO_NEON(do) \
  do (neon)
#else
#define REGARD_DO_NEON(do)
#endif
#ifdef REGARD_HAS_BASELINE
#define REGARD_DO_BASELINE(do) \
  do (baseline)
#else
#define REGARD_DO_BASELINE(do)
#endif
#define REGARD_ISAS(do)    \
  REGARD_DO_AMX(do)        \
  REGARD_DO_AVX512BF16(do) \
  REGARD_DO_AVX512(do) REGARD_DO_AVX2(do) REGARD_DO_NEONBF16(do) REGARD_DO_NEON(do) REGARD_DO_BASELINE(do)

namespace regard {

#define REGARD_DECLARE(isa)     \
  namespace isa {               \
  extern const Kernels kernels; \
  }
REGARD_ISAS(REGARD_DECLARE)
#undef REGARD_DECLARE

namespace {

const Kernels* const compiled[] = {
#define REGARD_ENTRY(isa) &isa::kernels,
    REGARD_ISAS(REGARD_ENTRY)
#undef REGARD_ENTRY
};
constexpr int compiled_count = int(sizeof(compiled) / sizeof(compiled[0]));

bool cpu_has(const char* isa) {
#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__)
  __builtin_cpu_init();
  if (!strcmp(isa, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (!strcmp(isa, "amx")) return cpu_has("avx512bf16") && enable_tile_registers();
  if (!strcmp(isa, "avx512bf16"))
    return cpu_has("avx512") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi");
  if (!strcmp(isa, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#elif defined(REGARD_HAS_NEONBF16)
  constexpr unsigned long bfloat16_products = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  if (!strcmp(isa, "neonbf16")) return getauxval(AT_HWCAP2) & bfloat16_products;
#endif
  return !strcmp(isa, "baseline") || !strcmp(isa, "neon");
}

// Intel's cores execute VDPBF16PS at half the rate of multiply-adds: there float32 products are faster, unless AMX is available.
bool is_slow(const char* isa) {
#if defined(__x86_64__) || defined(_M_X64) || defined(__i386__)
  return !strcmp(isa, "avx512bf16") && __builtin_cpu_is("intel");
#else
  (void)isa;
  return false;
#endif
}

// REGARD_ISA in the environment selects a narrower instruction set; one that the CPU does not support is ignored.
const Kernels& choose() {
  const char* requested = getenv("REGARD_ISA");
  for (const Kernels* k : compiled)
    if (requested && !strcmp(requested, k->name) && cpu_has(k->name)) return *k;
  for (const Kernels* k : compiled)
    if (cpu_has(k->name) && !is_slow(k->name)) return *k;
  return *compiled[compiled_count - 1];
}

const Kernels& chosen = choose();

int check_presence(const regard_tensor& t) {
  if (t.present != 0 && t.present != 1) return REGARD_BAD_ARGUMENT;
  if (t.present && !t.data) return REGARD_NO_DATA;
  return !t.present && t.data ? REGARD_BAD_ARGUMENT : REGARD_OK;
}

// The first error of these tensors, none of which is empty.
template <class... Tensors>
int check_presence(const regard_tensor& first, const Tensors&... others) {
  const int status = check_presence(first);
  return status != REGARD_OK ? status : check_presence(others...);
}

int check_presence(int32_t flag, const void* data) {
  if (flag != 0 && flag != 1) return REGARD_BAD_ARGUMENT;
  if (flag && !data) return REGARD_NO_DATA;
  return !flag && data ? REGARD_BAD_ARGUMENT : REGARD_OK;
}

int check_mask(const regard_dot& p) {
  if (p.mask < REGARD_NO_MASK || p.mask > REGARD_TILES) return REGARD_BAD_ARGUMENT;
  const bool intervals = p.mask == REGARD_INTERVALS, tiles = p.mask == REGARD_TILES;
  if (const int status = check_presence(intervals, p.intervals.start)) return status;
  if (const int status = check_presence(intervals, p.intervals.stop)) return status;
  return check_presence(tiles, p.tiles.pointer);
}

// Empty tensors may have no memory.
int check_inputs(const regard_dot& p) {
  if (!p.B || !p.H || !p.Q) return REGARD_OK;
  int status = check_presence(p.row_table);
  if (status == REGARD_OK) status = check_presence(p.has_sink, p.sink);
  if (status == REGARD_OK) status = check_mask(p);
  if (status != REGARD_OK || !p.K) return status;
  if ((p.D && !(p.q.present && p.k.present)) || (p.E && !p.v.present)) return REGARD_BAD_ARGUMENT;
  status = check_presence(p.diagonal, p.bias);
  if (status == REGARD_OK && p.D) status = check_presence(p.q, p.k, p.weight);
  if (status == REGARD_OK && p.E) status = check_presence(p.v);
  return status;
}

// The dtype of keys and values, and their scales if they are int8. `mixed`: whether the kernel reads other dtypes than p.dtype.
int check_kv_dtype(const regard_dot& p, bool mixed) {
  const bool scaled = p.kv_dtype == REGARD_INT8;
  if (p.k_scale.present != scaled || p.v_scale.present != scaled) return REGARD_BAD_ARGUMENT;
  if (p.kv_dtype == p.dtype) return REGARD_OK;
  if (!mixed || p.weight.data || p.dtype == REGARD_FLOAT64 || p.kv_dtype == REGARD_FLOAT64) return REGARD_BAD_ARGUMENT;
  return scaled && p.B && p.G && p.K ? check_presence(p.k_scale, p.v_scale) : REGARD_OK;
}

// Reject sizes whose products overflow, so that kernels need not check them again. `elementwise`: whether the kernel takes
// normalisations other than the softmax.
int check(const regard_dot& p, bool elementwise = false, bool mixed = false) {
  const int64_t sizes[] = {p.B, p.H, p.G, p.Q, p.K, p.D, p.E};
  for (int64_t n : sizes)
    if (n < 0) return REGARD_BAD_ARGUMENT;
  const int64_t largest = INT32_MAX - 1024;  // positions of keys and queries are 32-bit numbers
  for (int64_t n : sizes)
    if (n > largest) return REGARD_TOO_LARGE;
  int64_t rows = 0, cells = 0;
  if (__builtin_mul_overflow(p.B, p.H, &rows) || __builtin_mul_overflow(rows, p.Q > p.K ? p.Q : p.K, &rows) ||
      __builtin_mul_overflow(rows, int64_t(8) * ((p.D > p.E ? p.D : p.E) + 64), &cells))
    return REGARD_TOO_LARGE;
  if (p.radius < 0) return REGARD_BAD_ARGUMENT;
  if (p.radius > largest || __builtin_mul_overflow(rows, 16 * (p.radius + 1), &cells)) return REGARD_TOO_LARGE;
  if (p.G == 0 ? p.H != 0 : p.H % p.G != 0) return REGARD_BAD_ARGUMENT;
  if (const int status = check_inputs(p)) return status;
  if (p.dtype < REGARD_FLOAT32 || p.dtype > REGARD_FLOAT16 || p.threads < 1) return REGARD_BAD_ARGUMENT;
  if (p.kv_dtype < REGARD_FLOAT32 || p.kv_dtype > REGARD_INT8) return REGARD_BAD_ARGUMENT;
  if (const int status = check_kv_dtype(p, mixed)) return status;
  if (p.diagonal.data && p.diagonal.stride[3] != 1) return REGARD_BAD_ARGUMENT;
  if (p.row_table.data && (p.row_table.stride[3] != 1 || !p.offset)) return REGARD_BAD_ARGUMENT;
  if (p.bias.data && (p.bias_dtype < REGARD_FLOAT32 || p.bias_dtype > REGARD_FLOAT16)) return REGARD_BAD_ARGUMENT;
  if (p.bias.data && p.bias_dtype == REGARD_FLOAT64 && p.dtype != REGARD_FLOAT64) return REGARD_BAD_ARGUMENT;
  if (!(p.temperature > 0) || !(p.softcap >= 0)) return REGARD_BAD_ARGUMENT;
  if (p.weight.data && (p.scale != 1 || p.softcap != 0)) return REGARD_BAD_ARGUMENT;
  if (p.normalization < REGARD_SOFTMAX || p.normalization > REGARD_SQUARED_RELU_WEIGHTS) return REGARD_BAD_ARGUMENT;
  if (p.normalization != REGARD_SOFTMAX && (!elementwise || p.sink)) return REGARD_BAD_ARGUMENT;
  // The heads of a group share strips of rows, so they must share the weight.
  if (p.weight.data && p.weight.stride[1] != 0 && p.H != p.G) return REGARD_BAD_ARGUMENT;
  return REGARD_OK;
}

int check(const regard_linear& x) {
  if (x.map != REGARD_FEATURES && x.map != REGARD_ELU) return REGARD_BAD_ARGUMENT;
  regard_dot same{};
  same.B = x.B, same.H = x.H, same.G = x.G, same.Q = same.K = x.N, same.D = x.M, same.E = x.E;
  same.q = x.q, same.k = x.k, same.v = x.v;
  same.dtype = same.kv_dtype = x.dtype, same.threads = x.threads, same.temperature = 1;
  return check(same);
}

int check(const regard_recurrence& x) {
  regard_dot same{};
  same.B = x.B, same.H = same.G = x.H, same.Q = same.K = x.N, same.D = x.M, same.E = x.E;
  same.q = x.q, same.k = x.k, same.v = x.v;
  same.dtype = same.kv_dtype = x.dtype, same.threads = x.threads, same.temperature = 1;
  if (const int status = check(same)) return status;
  if (!x.B || !x.H || !x.N) return REGARD_OK;
  if (!x.M || !x.E || (x.per_channel != 0 && x.per_channel != 1)) return REGARD_BAD_ARGUMENT;
  int64_t cells = 0;
  if (__builtin_mul_overflow(x.B * x.H, (x.M + 64) * 16, &cells) || __builtin_mul_overflow(cells, x.E + 64, &cells) ||
      __builtin_mul_overflow(cells, x.N / REGARD_CHECKPOINT + 2, &cells))
    return REGARD_TOO_LARGE;
  const int64_t all_heads[] = {x.q_heads, x.k_heads, x.v_heads};
  for (const int64_t heads : all_heads)
    if (heads < 1 || x.H % heads) return REGARD_BAD_ARGUMENT;
  if (x.per_channel && !x.decay.present) return REGARD_BAD_ARGUMENT;
  return check_presence(x.decay, x.beta, x.state);
}

// Whether start[n] .. stop[n], or single keys if stop is null, are ascending ranges of `keys` keys without overlap.
bool are_key_ranges(const int64_t* start, const int64_t* stop, int64_t count, int64_t keys) {
  if (count < 0 || (count > 0 && !start)) return false;
  int64_t last = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t end = stop ? stop[n] : start[n] + 1;
    if (start[n] < last || start[n] >= keys || end <= start[n] || end > keys) return false;
    last = end;
  }
  return true;
}

// Replace the stride of axes of size one, which is arbitrary: address arithmetic with it could overflow.
void normalize_strides(regard_tensor& t, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {batch, heads, rows, columns};
  for (int axis = 0; axis < 4; ++axis)
    if (sizes[axis] == 1) t.stride[axis] = axis == 3;
}

constexpr int32_t most_threads = 1024;  // OpenMP ends the process if it cannot start the requested number

// Waking a thread takes longer than a million multiply-adds, so small problems use fewer threads.
regard_dot normalize(const regard_dot& p) {
  regard_dot copy = p;
  copy.threads = p.threads < most_threads ? p.threads : most_threads;
  normalize_strides(copy.q, p.B, p.H, p.Q, p.D);
  normalize_strides(copy.k, p.B, p.G, p.K, p.D);
  normalize_strides(copy.v, p.B, p.G, p.K, p.E);
  const double per_pair = double(p.D) * (p.weight.data ? 8 : 1) + double(p.E);
  const double work = double(p.B) * double(p.H) * double(p.Q) * double(p.K) * per_pair;
  const double useful = 1 + work / 1e6;
  if (useful < copy.threads) copy.threads = int(useful);
  return copy;
}

regard_linear normalize(const regard_linear& x) {
  regard_linear copy = x;
  copy.threads = x.threads < most_threads ? x.threads : most_threads;
  normalize_strides(copy.q, x.B, x.H, x.N, x.M);
  normalize_strides(copy.k, x.B, x.G, x.N, x.M);
  normalize_strides(copy.v, x.B, x.G, x.N, x.E);
  const double useful = 1 + 4 * double(x.B) * double(x.H) * double(x.N) * double(x.M) * double(x.E) / 1e6;
  if (useful < copy.threads) copy.threads = int(useful);
  return copy;
}

regard_recurrence normalize(const regard_recurrence& x) {
  regard_recurrence copy = x;
  copy.threads = x.threads < most_threads ? x.threads : most_threads;
  normalize_strides(copy.q, x.B, x.q_heads, x.N, x.M);
  normalize_strides(copy.k, x.B, x.k_heads, x.N, x.M);
  normalize_strides(copy.v, x.B, x.v_heads, x.N, x.E);
  normalize_strides(copy.state, x.B, x.H, x.M, x.E);
  const double useful = 1 + 4 * double(x.B) * double(x.H) * double(x.N) * double(x.M) * double(x.E) / 1e6;
  if (useful < copy.threads) copy.threads = int(useful);
  return copy;
}

}  // namespace
}  // namespace regard

extern "C" {

int regard_interface(void) { return REGARD_INTERFACE; }

const char* regard_version(void) { return REGARD_VERSION; }

const char* regard_isa(void) { return regard::chosen.name; }

const char* regard_isas_compiled(void) {
#define REGARD_NAME(isa) " " #isa
  return REGARD_ISAS(REGARD_NAME) + 1;
#undef REGARD_NAME
}

int regard_dot_forward(const regard_dot* problem, const regard_dot_result* result) {
  if (!problem || !result) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem, true, true);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->Q == 0) return REGARD_OK;
  if (problem->E && !result->out.present) return REGARD_BAD_ARGUMENT;
  if (result->max_logit.present && problem->normalization != REGARD_SOFTMAX) return REGARD_BAD_ARGUMENT;
  if (const int absent = regard::check_presence(result->lse, result->out_table, result->max_logit)) return absent;
  if (const int absent = problem->E ? regard::check_presence(result->out) : REGARD_OK) return absent;
  if (result->out_table.data && (!problem->offset || result->out_table.stride[3] != 1)) return REGARD_BAD_ARGUMENT;
  return regard::chosen.dot_forward(regard::normalize(*problem), *result);
}

int regard_dot_backward(const regard_dot* problem, const regard_dot_gradient* gradient) {
  if (!problem || !gradient) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem, true);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0) return REGARD_OK;
  const regard_dot_gradient& g = *gradient;
  const bool rows = problem->Q != 0, keys = problem->K != 0;
  if (rows && (!g.lse.present || (problem->D && !g.d_q.present))) return REGARD_BAD_ARGUMENT;
  if (rows && problem->E && !(g.out.present && g.d_out.present)) return REGARD_BAD_ARGUMENT;
  if (keys && ((problem->D && !g.d_k.present) || (problem->E && !g.d_v.present))) return REGARD_BAD_ARGUMENT;
  int absent = REGARD_OK;
  if (rows) absent = regard::check_presence(g.lse, g.out_table, g.d_lse, g.d_out_table, g.d_row_table, g.delta);
  if (rows && problem->E && absent == REGARD_OK) absent = regard::check_presence(g.out, g.d_out);
  if (rows && problem->D && absent == REGARD_OK) absent = regard::check_presence(g.d_q);
  if (keys && problem->D && absent == REGARD_OK) absent = regard::check_presence(g.d_k);
  if (keys && problem->E && absent == REGARD_OK) absent = regard::check_presence(g.d_v);
  if (rows && keys && absent == REGARD_OK) absent = regard::check_presence(g.d_diagonal, g.d_bias);
  if (problem->D && absent == REGARD_OK) absent = regard::check_presence(g.d_weight);
  if (absent != REGARD_OK) return absent;
  if (g.d_out_table.data && (!problem->offset || !g.out_table.data || g.d_out_table.stride[3] != 1))
    return REGARD_BAD_ARGUMENT;
  if ((g.d_diagonal.data && !problem->diagonal.data) || (g.d_row_table.data && !problem->row_table.data))
    return REGARD_BAD_ARGUMENT;
  return regard::chosen.dot_backward(regard::normalize(*problem), *gradient);
}

int regard_dot_jvp(const regard_dot* problem, const regard_dot_tangent* tangent, const regard_dot_result* result) {
  if (!problem || !tangent || !result) return REGARD_BAD_ARGUMENT;
  const regard_dot& p = *problem;
  regard_dot_tangent t = *tangent;
  int status = regard::check(p);
  if (status != REGARD_OK) return status;
  if (p.B == 0 || p.H == 0 || p.Q == 0) return REGARD_OK;
  if (p.weight.present || result->max_logit.present || !result->lse.present || !t.d_lse.present ||
      (p.E && !(result->out.present && t.d_out.present)))
    return REGARD_BAD_ARGUMENT;
  if (result->out_table.present != t.d_out_table.present) return REGARD_BAD_ARGUMENT;
  status = regard::check_presence(result->lse, result->out_table, t.d_lse, t.d_out_table, t.d_row_table);
  if (status == REGARD_OK) status = regard::check_presence(int32_t(t.has_d_sink), t.d_sink);
  if (status == REGARD_OK && p.E) status = regard::check_presence(result->out, t.d_out);
  if (status == REGARD_OK && p.D) status = regard::check_presence(t.d_q);
  if (status == REGARD_OK && p.K && p.D) status = regard::check_presence(t.d_k);
  if (status == REGARD_OK && p.K && p.E) status = regard::check_presence(t.d_v);
  if (status == REGARD_OK && p.K) status = regard::check_presence(t.d_diagonal, t.d_bias);
  if (status != REGARD_OK) return status;
  if ((t.d_diagonal.data && !p.diagonal.data) || (t.d_row_table.data && !p.row_table.data) ||
      (t.d_bias.data && !p.bias.data) || (t.d_sink && !p.sink))
    return REGARD_BAD_ARGUMENT;
  if ((t.d_diagonal.data && t.d_diagonal.stride[3] != 1) || (t.d_row_table.data && t.d_row_table.stride[3] != 1))
    return REGARD_BAD_ARGUMENT;
  if (result->out_table.data && (!p.offset || result->out_table.stride[3] != 1 || t.d_out_table.stride[3] != 1))
    return REGARD_BAD_ARGUMENT;
  regard::normalize_strides(t.d_q, p.B, p.H, p.Q, p.D);
  regard::normalize_strides(t.d_k, p.B, p.G, p.K, p.D);
  regard::normalize_strides(t.d_v, p.B, p.G, p.K, p.E);
  return regard::chosen.dot_jvp(regard::normalize(p), t, *result);
}

int regard_dot_row_statistics(const regard_dot* problem, const regard_dot_statistics* statistics) {
  if (!problem || !statistics) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  const regard_dot_statistics& s = *statistics;
  if (problem->B == 0 || problem->H == 0 || problem->Q == 0) return REGARD_OK;
  if (!problem->offset || !(s.lse.present && s.entropy.present && s.max_logit.present && s.distance.present))
    return REGARD_BAD_ARGUMENT;
  if (const int absent = regard::check_presence(s.lse, s.entropy, s.max_logit, s.distance, s.mass)) return absent;
  int64_t kept = 0;
  if (__builtin_mul_overflow(problem->B * problem->H * problem->Q, s.top, &kept)) return REGARD_TOO_LARGE;
  if (problem->E != 0 || s.top < 0 || (s.top > 0 && (!s.top_keys || !s.top_weights))) return REGARD_BAD_ARGUMENT;
  if (s.mass.data && !regard::are_key_ranges(s.chosen_start, s.chosen_stop, s.chosen_count, problem->K))
    return REGARD_BAD_ARGUMENT;
  return regard::chosen.dot_statistics(regard::normalize(*problem), s);
}

int64_t regard_packed_bytes(int64_t N, int64_t K, int32_t format) {
  if (N < 0 || K < 0 || format < REGARD_PACKED_FLOAT32 || format > REGARD_PACKED_INT4_MINIMUM)
    return REGARD_BAD_ARGUMENT;
  int64_t numbers = 0;
  if (N > INT64_MAX / 2 || K > INT64_MAX / 2 || __builtin_mul_overflow(N + 64, K + 64, &numbers) ||
      numbers > INT64_MAX / 8)
    return REGARD_TOO_LARGE;
  return regard::chosen.packed_bytes(N, K, format);
}

int regard_multiply(const regard_packed_linear* problem) {
  if (!problem || problem->M < 0 || problem->threads < 1) return REGARD_BAD_ARGUMENT;
  regard_packed_linear p = *problem;
  const int64_t bytes = regard_packed_bytes(p.N, p.K, p.format);
  if (bytes < 0) return int(bytes);
  if (p.M == 0 || p.N == 0) return REGARD_OK;
  if (const int absent = regard::check_presence(p.has_bias, p.bias)) return absent;
  if (const int absent = regard::check_presence(p.has_residual, p.residual)) return absent;
  if (!p.out || (bytes && (!p.x || !p.packed))) return REGARD_BAD_ARGUMENT;
  if (p.activation < REGARD_NO_ACTIVATION || p.activation > REGARD_TANH || (p.activation && p.residual))
    return REGARD_BAD_ARGUMENT;
  if (p.threads > regard::most_threads) p.threads = regard::most_threads;
  // A weight that is read for few rows takes as long as its bytes do.
  const double useful = 1 + double(p.M) * double(p.N) * double(p.K) / 1e6 + double(bytes) / 2e5;
  if (useful < p.threads) p.threads = int(useful);
  return regard::chosen.packed_linear(p);
}

int regard_run_stack(const regard_stack* stack) {
  if (!stack) return REGARD_BAD_ARGUMENT;
  const regard_stack& s = *stack;
  const int64_t sizes[] = {s.B, s.N, s.d_model, s.H, s.G, s.D, s.d_hidden};
  int64_t numbers = 64;
  for (int64_t n : sizes) {
    if (n < 1) return REGARD_BAD_ARGUMENT;
    if (n > INT32_MAX || __builtin_mul_overflow(numbers, n, &numbers)) return REGARD_TOO_LARGE;
  }
  if (s.layers < 0 || s.threads < 1 || s.activation < REGARD_NO_ACTIVATION || s.activation > REGARD_TANH ||
      s.d_rotary < 0 || s.d_rotary > s.D || s.d_rotary % 2 || (s.d_rotary && !(s.cos && s.sin)) ||
      (s.table_batch && s.table_batch != s.N))
    return REGARD_BAD_ARGUMENT;
  if (!(s.x && s.y && s.normed && s.qkv && s.attended && s.hidden)) return REGARD_BAD_ARGUMENT;
  if (s.layers && !(s.blocks && s.attention)) return REGARD_BAD_ARGUMENT;
  if (s.layers && s.cached && !(s.keys && s.values)) return REGARD_BAD_ARGUMENT;
  for (int64_t n = 0; n < s.layers; ++n) {
    const regard_block& block = s.blocks[n];
    const auto is = [](const regard_weight& weight, int64_t N, int64_t K) { return weight.N == N && weight.K == K; };
    if (!is(block.qkv, (s.H + 2 * s.G) * s.D, s.d_model) || !is(block.output, s.d_model, s.H * s.D) ||
        !is(block.up, s.gated ? 2 * s.d_hidden : s.d_hidden, s.d_model) || !is(block.down, s.d_model, s.d_hidden))
      return REGARD_BAD_ARGUMENT;
    for (int which = 0; which < 2; ++which)
      if (!block.gain[which] || (!s.rms_norm && !block.shift[which])) return REGARD_BAD_ARGUMENT;
    if (block.attention < 0 || block.attention >= s.attentions) return REGARD_BAD_ARGUMENT;
    const regard_dot& p = s.attention[block.attention];
    if (p.B != s.B || p.H != s.H || p.G != s.G || p.Q != s.N || p.K < s.N || p.D != s.D || p.E != s.D ||
        p.dtype != REGARD_FLOAT32 || p.wants_value_table)
      return REGARD_BAD_ARGUMENT;
    const regard_tensor* caches[] = {s.keys, s.values};
    for (const regard_tensor* cache : caches)
      if (s.cached && (!cache[n].present || !cache[n].data || cache[n].stride[3] != 1)) return REGARD_BAD_ARGUMENT;
  }
  return regard::chosen.run_stack(s);
}

int regard_dot_weights(const regard_dot* problem, const regard_dot_columns* columns) {
  if (!problem || !columns) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->Q == 0 || columns->count == 0) return REGARD_OK;
  if (problem->E != 0 || !columns->out.present || columns->out.stride[3] != 1) return REGARD_BAD_ARGUMENT;
  if (const int absent = regard::check_presence(columns->out)) return absent;
  if (!regard::are_key_ranges(columns->columns, nullptr, columns->count, problem->K)) return REGARD_BAD_ARGUMENT;
  return regard::chosen.dot_weights(regard::normalize(*problem), *columns);
}

int regard_dot_map(const regard_dot* problem, const regard_dot_pool* pool) {
  if (!problem || !pool) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0) return REGARD_OK;
  if (pool->rows < 1 || pool->columns < 1 || !pool->out.present || pool->out.stride[3] != 1) return REGARD_BAD_ARGUMENT;
  if (const int absent = regard::check_presence(pool->out)) return absent;
  if (problem->E != 0 || problem->Q == 0 || problem->K == 0) return REGARD_BAD_ARGUMENT;
  if (pool->rows > INT32_MAX || pool->columns > INT32_MAX) return REGARD_TOO_LARGE;
  return regard::chosen.dot_map(regard::normalize(*problem), *pool);
}

int regard_linear_forward(const regard_linear* problem, const regard_linear_result* result) {
  if (!problem || !result || !result->out.present || !result->norm.present) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->N == 0) return REGARD_OK;
  if (const int absent = regard::check_presence(result->norm)) return absent;
  if (const int absent = problem->E ? regard::check_presence(result->out) : REGARD_OK) return absent;
  return regard::chosen.linear_forward(regard::normalize(*problem), *result);
}

int regard_linear_backward(const regard_linear* problem, const regard_linear_gradient* gradient) {
  if (!problem || !gradient) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->N == 0) return REGARD_OK;
  const regard_linear_gradient& g = *gradient;
  if (!(g.out.present && g.norm.present && g.d_out.present && g.d_q.present && g.d_k.present && g.d_v.present))
    return REGARD_BAD_ARGUMENT;
  int absent = regard::check_presence(g.norm);
  if (problem->E && absent == REGARD_OK) absent = regard::check_presence(g.out, g.d_out, g.d_v);
  if (problem->M && absent == REGARD_OK) absent = regard::check_presence(g.d_q, g.d_k);
  if (absent != REGARD_OK) return absent;
  return regard::chosen.linear_backward(regard::normalize(*problem), *gradient);
}

int regard_recurrence_forward(const regard_recurrence* problem, const regard_recurrence_result* result) {
  if (!problem || !result) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->N == 0) return REGARD_OK;
  if (!(result->out.present && result->state.present)) return REGARD_BAD_ARGUMENT;
  if (const int absent = regard::check_presence(result->out, result->state, result->checkpoints)) return absent;
  if (result->checkpoints.data && result->checkpoints.stride[3] != 1) return REGARD_BAD_ARGUMENT;
  return regard::chosen.recurrence_forward(regard::normalize(*problem), *result);
}

int regard_recurrence_backward(const regard_recurrence* problem, const regard_recurrence_gradient* gradient) {
  if (!problem || !gradient) return REGARD_BAD_ARGUMENT;
  const int status = regard::check(*problem);
  if (status != REGARD_OK) return status;
  if (problem->B == 0 || problem->H == 0 || problem->N == 0) return REGARD_OK;
  const regard_recurrence_gradient& g = *gradient;
  if (!(g.checkpoints.present && g.d_q.present && g.d_k.present && g.d_v.present)) return REGARD_BAD_ARGUMENT;
  if (g.d_decay.present != problem->decay.present || g.d_beta.present != problem->beta.present)
    return REGARD_BAD_ARGUMENT;
  const int absent =
      regard::check_presence(g.checkpoints, g.d_out, g.d_final, g.d_q, g.d_k, g.d_v, g.d_decay, g.d_beta, g.d_state);
  if (absent != REGARD_OK) return absent;
  if (g.checkpoints.stride[3] != 1) return REGARD_BAD_ARGUMENT;
  return regard::chosen.recurrence_backward(regard::normalize(*problem), *gradient);
}

}  // extern "C"
