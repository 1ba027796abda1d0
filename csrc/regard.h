// The C interface of the kernels: flat pointers, strides, sizes and tile tables. No exceptions, no C++ types.
//
// Axes: B batch, H query heads, G key/value heads (H a multiple of G), Q queries, K keys, D width of queries and keys,
// E width of values. Query head h reads key/value head h / (H / G). Strides count elements, never bytes, and may be 0
// (broadcast) or negative. "Real" is float, or double where dtype is REGARD_FLOAT64: what the arithmetic is done in.
#pragma once
#include <stdint.h>

#ifdef _WIN32
#define REGARD_EXPORT __declspec(dllexport)
#else
#define REGARD_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Changes whenever the meaning of a structure or a signature below does; the caller compares it before anything else.
// The layout of the structures is not a matter of this number: regard_layout describes it, and the caller reads that.
enum { REGARD_INTERFACE = 13 };

enum { REGARD_FLOAT32 = 0, REGARD_FLOAT64 = 1, REGARD_BFLOAT16 = 2, REGARD_FLOAT16 = 3 };
// Only for keys and values: 8-bit integers, times a scale for each key of a head.
enum { REGARD_INT8 = 4 };

enum {
  REGARD_OK = 0,
  REGARD_NO_MEMORY = -1,
  REGARD_BAD_ARGUMENT = -2,
  REGARD_TOO_LARGE = -3,
  REGARD_NO_DATA = -4,  // a tensor is present, but has no memory
};

// A flag, never the pointer, decides whether a tensor is present. A present tensor with elements and a null pointer is an
// error (REGARD_NO_DATA), and so is an absent tensor with a pointer. The exported functions check
// this, so that inside the kernels data is null exactly where the tensor is absent or empty.
typedef struct {
  void* data;
  int64_t stride[4];  // elements from one (batch, head, row, column) to the next
  int64_t present;    // 1, or 0 where the tensor is absent
} regard_tensor;

// Row (b, h, i) may attend to start <= j < stop.
typedef struct {
  const int32_t* start;  // null unless the mask is REGARD_INTERVALS
  const int32_t* stop;
  int64_t stride[3];  // of (batch, head, query)
} regard_intervals;

// Tiles of 64 queries x 64 keys. Row tile (b, h, t) has the runs pointer[r] .. pointer[r + 1) with
// r = b * stride[0] + h * stride[1] + t; a run covers the column tiles start .. stop in ascending order. A run is full
// where bits_index is negative; otherwise its tiles have 64 words each from bits + 64 * bits_index on, one word a row,
// bit c of it saying that the row may attend to column c of the tile.
typedef struct {
  const int64_t* pointer;  // null unless the mask is REGARD_TILES
  const int32_t* start;
  const int32_t* stop;
  const int64_t* bits_index;
  const uint64_t* bits;
  int64_t stride[2];
} regard_tiles;

enum { REGARD_TILE = 64 };

// Which keys a row may attend to: all, or those of the intervals or of the tiles.
enum { REGARD_NO_MASK = 0, REGARD_INTERVALS = 1, REGARD_TILES = 2 };

// How logits become weights. All but the softmax are functions of one logit, without a sink: 1 / (1 + e^-x), and max(x, 0)
// and its square.
enum { REGARD_SOFTMAX = 0, REGARD_SIGMOID = 1, REGARD_RELU_WEIGHTS = 2, REGARD_SQUARED_RELU_WEIGHTS = 3 };

// The features of linear attention: q and k as they are, or elu(x) + 1 of them.
enum { REGARD_FEATURES = 0, REGARD_ELU = 1 };

// One call of attention:
//   logits = (score + diagonal[j - i + Q - 1] + row_table[i, clip(j - p, -R, R) + R] + bias[i, j]) / temperature
//   score = cap(scale * q.k), cap(x) = softcap * tanh(x / softcap), or x where softcap is 0;   p = offset[b] + i
//   score = weight . tanh(q + k) where there is a weight; scale is 1 then and softcap 0
//   weights = softmax over the visible keys and the sink, or a function of each logit + normalization_bias
//   out = dropout(weights) v
typedef struct {
  int64_t B, H, G, Q, K, D, E;
  int32_t dtype;     // of q, out and their gradients
  int32_t threads;   // at most this many
  int32_t mask;      // which of intervals and tiles there is
  int32_t has_sink;  // 1, or 0
  double scale, softcap, temperature;

  regard_tensor q, k, v;
  regard_intervals intervals;
  regard_tiles tiles;

  regard_tensor diagonal;   // Real (B|1, H|1, 1, Q + K - 1), last stride 1; index (j - i) + (Q - 1)
  regard_tensor row_table;  // Real (B, H, Q, 2 * radius + 1), last stride 1
  regard_tensor bias;       // (B, H, Q, K) of type bias_dtype, any strides
  int32_t bias_dtype;
  int32_t wants_value_table;  // whether out_table is part of the result (and of the gradient)
  int64_t radius;
  const int64_t* offset;  // (B) positions of the first query; read with row_table, out_table and statistics only
  const void* sink;       // Real (H)

  uint64_t seed;               // of dropout
  uint32_t dropout_threshold;  // a weight is kept iff its hash is at least this; 0: no dropout
  int32_t kv_dtype;            // of k and v; other than dtype in regard_dot_forward only
  double dropout_scale;        // kept weights are multiplied by this

  regard_tensor weight;  // Real (1, H|1, 1, D) of the additive score, or absent; where heads differ in it, H equals G
  regard_tensor k_scale, v_scale;  // float (B, G, K), where kv_dtype is REGARD_INT8

  int32_t normalization;  // other than REGARD_SOFTMAX in forward and backward only
  int32_t reserved;
  double normalization_bias;
} regard_dot;

typedef struct {
  regard_tensor out;  // (B, H, Q, E)
  regard_tensor lse;  // Real (B, H, Q), natural logarithm; may be absent. Without a softmax 0, or NaN where out is
  regard_tensor out_table;  // Real (B, H, Q, 2 * radius + 1), last stride 1: dropped weights summed by clipped distance
  regard_tensor
      max_logit;  // Real (B, H, Q): the largest visible logit, -infinity without one, NaN where lse is; may be absent,
                  // and is without a softmax, and of tangents
} regard_dot_result;

// Inputs of the backward in addition to the problem, and where its results go. Absent results are not computed, except
// that q, k and v go together.
typedef struct {
  regard_tensor out, lse, out_table;        // of the forward
  regard_tensor d_out, d_lse, d_out_table;  // d_lse (Real) and d_out_table (Real) may be absent
  regard_tensor d_q, d_k, d_v;              // shapes and dtype of q, k, v
  regard_tensor d_diagonal;                 // Real, shape of diagonal
  regard_tensor d_row_table;                // Real, shape of row_table
  regard_tensor d_bias;    // Real, strides 0 where bias is broadcast (not over K), else those of close rows
  regard_tensor delta;     // Real (B, H, Q): sum over keys of weight times its gradient
  regard_tensor d_weight;  // Real (B, H, 1, D): of the additive score, for each head of each batch row
} regard_dot_gradient;

// The tangents of the inputs of a problem (absent: zero), and where those of its results go. The score is the product.
typedef struct {
  regard_tensor d_q, d_k, d_v;              // shapes and dtype of q, k, v
  regard_tensor d_diagonal, d_row_table;    // Real, shapes of diagonal and row_table, last stride 1
  regard_tensor d_bias;                     // of type bias_dtype, any strides
  regard_tensor d_out, d_lse, d_out_table;  // shapes of the results, and present where these are
  const void* d_sink;                       // Real (H)
  int64_t has_d_sink;                       // 1, or 0
} regard_dot_tangent;

// Of every row of the weights, before dropout. The problem has no values: E is 0 and v absent; offset is needed.
typedef struct {
  regard_tensor lse, entropy, max_logit, distance;  // Real (B, H, Q): entropy in nats, with the sink's; mean of |p - j|
  int64_t top;                                      // how many of the largest weights to return
  int64_t* top_keys;                                // (B, H, Q, top), largest weight first, -1 where there are no more
  void* top_weights;                                // Real, of the same shape
  regard_tensor mass;                         // Real (B, H, Q), may be absent: the sum of the weights of chosen keys,
  const int64_t *chosen_start, *chosen_stop;  // which are chosen_count runs of keys, ascending and apart
  int64_t chosen_count;
} regard_dot_statistics;

// Some columns of the weights, before dropout; E is 0 and v absent.
typedef struct {
  regard_tensor out;       // Real (B, H, Q, count), last stride 1
  const int64_t* columns;  // ascending, none twice
  int64_t count;
} regard_dot_columns;

// The weights averaged to rows x columns: bin n of N over length L is floor(n * L / N) .. ceil((n + 1) * L / N).
typedef struct {
  regard_tensor out;  // Real (B, H, rows, columns), last stride 1
  int64_t rows, columns;
} regard_dot_pool;

// Causal linear attention: out_i = sum over j <= i of (f(q_i) . f(k_j)) v_j / norm_i, norm_i = sum of f(q_i) . f(k_j).
typedef struct {
  int64_t B, H, G, N, M, E;
  int32_t dtype;    // of q, k, v, out and their gradients
  int32_t threads;  // at most this many
  int32_t map;      // what makes features of q and k
  int32_t reserved;
  regard_tensor q;  // (B, H, N, M)
  regard_tensor k;  // (B, G, N, M)
  regard_tensor v;  // (B, G, N, E)
} regard_linear;

typedef struct {
  regard_tensor out;   // (B, H, N, E); zero where the norm is
  regard_tensor norm;  // Real (B, H, N)
} regard_linear_result;

typedef struct {
  regard_tensor out, norm;      // of the forward
  regard_tensor d_out;          // (B, H, N, E)
  regard_tensor d_q, d_k, d_v;  // shapes of q, k, v
} regard_linear_gradient;

// The recurrence of linear attention, with a state S (M, E) for each of H heads. Of token t:
//   S = exp(decay_t) S;   u = v_t, or beta_t (v_t - S^T k_t) where there is a beta;   S += k_t u^T;   out_t = S^T q_t
typedef struct {
  int64_t B, H, N, M, E;              // none of M and E is 0
  int64_t q_heads, k_heads, v_heads;  // head h reads head h / (H / heads) of each
  int32_t dtype;                      // of q, k, v, out and their gradients
  int32_t threads;                    // at most this many
  int32_t per_channel;                // 1 where every channel has its own decay, or 0
  int32_t reserved;
  regard_tensor q, k;   // (B, heads, N, M)
  regard_tensor v;      // (B, heads, N, E)
  regard_tensor decay;  // Real (B, H, N) or (B, H, N, M), at most 0; may be absent
  regard_tensor beta;   // Real (B, H, N); may be absent
  regard_tensor state;  // Real (B, H, M, E): S before the first token; absent: zero
} regard_recurrence;

enum { REGARD_CHECKPOINT = 512 };  // tokens from one checkpoint to the next

typedef struct {
  regard_tensor out;          // (B, H, N, E)
  regard_tensor state;        // Real (B, H, M, E): S after the last token
  regard_tensor checkpoints;  // Real (B, H, N / REGARD_CHECKPOINT rounded up, M * E), last stride 1; may be absent
} regard_recurrence_result;

typedef struct {
  regard_tensor checkpoints;      // of the forward
  regard_tensor d_out, d_final;   // of out and of the state after the last token; absent: zero
  regard_tensor d_q, d_k, d_v;    // (B, H, N, M or E): for each head, also where heads share a tensor
  regard_tensor d_decay, d_beta;  // Real, present where decay and beta are
  regard_tensor d_state;          // Real (B, H, M, E); may be absent
} regard_recurrence_gradient;

// A packed weight (N, K) holds panels of R rows, R = regard_packed_bytes(1, 1, REGARD_PACKED_FLOAT32) / 4, the last one
// filled up with zeros. What a panel holds, with [R] the innermost axis:
//   FLOAT32       float[K][R]
//   BFLOAT16      for every two columns uint32[R]: the first column is in the low half of the word
//   INT8          for every group of REGARD_GROUP columns float16 scale[R], int8[REGARD_GROUP][R]
//   INT4          for every group float16 scale[R], uint32[REGARD_GROUP / 8][R]: eight columns to a word, the first one in
//                 its low bits. A number is (bits - 8) * scale
//   INT4_MINIMUM  for every group float16 scale[R], float16 minimum[R], and words as in INT4: bits * scale + minimum
// Scales and minimums are multiplied by the factor of the product. Columns after the K-th are not read.
enum {
  REGARD_PACKED_FLOAT32 = 0,
  REGARD_PACKED_BFLOAT16 = 1,
  REGARD_PACKED_INT8 = 2,
  REGARD_PACKED_INT4 = 3,
  REGARD_PACKED_INT4_MINIMUM = 4,
};
enum { REGARD_GROUP = 32 };

enum {
  REGARD_NO_ACTIVATION = 0,
  REGARD_RELU = 1,
  REGARD_GELU = 2,
  REGARD_GELU_TANH = 3,
  REGARD_QUICK_GELU = 4,  // x sigmoid(1.702 x)
  REGARD_SILU = 5,
  REGARD_TANH = 6,
};

// out = activation(x W' + b), or x W' + b + residual, in float32; x, residual and out have rows of unit stride, and out
// overlaps neither of the others.
typedef struct {
  int64_t M, N, K;                       // x (M, K), W (N, K), out (M, N)
  int64_t x_row, residual_row, out_row;  // elements from one row to the next
  const float* x;
  const void* packed;
  const float* bias;      // (N)
  const float* residual;  // (M, N)
  float* out;
  double factor;
  int32_t format;
  int32_t activation;
  int32_t threads;
  int32_t has_bias;      // 1, or 0
  int32_t has_residual;  // 1, or 0
  int32_t reserved;
} regard_packed_linear;

typedef struct {
  int64_t N, K;
  const void* packed;
  const float* bias;  // (N)
  double factor;
  int32_t format;
  int32_t has_bias;  // 1, or 0
} regard_weight;

// One block of a stack. The rows of qkv are query, key and value heads; those of up are gates and numbers if gated.
typedef struct {
  regard_weight qkv, output, up, down;
  const float* gain[2];   // (d_model): of the norms of attention and feed-forward
  const float* shift[2];  // (d_model); not read if the norms are RMS norms
  int64_t attention;      // index of its problem
} regard_block;

// Blocks that are applied to B sequences of N tokens. The problems read q, k and v in `qkv`, or k and v in the caches.
typedef struct {
  int64_t B, N, d_model, H, G, D, d_hidden;
  int64_t layers, attentions;
  const regard_block* blocks;
  const regard_dot* attention;
  const regard_tensor*
      keys;  // caches (B, G, K, D), one per layer, which receive those of the last N tokens; last stride 1
  const regard_tensor* values;
  float* x;          // (B, N, d_model), input and output
  float* y;          // (B, N, d_model); this and the following are overwritten
  float* normed;     // (B, N, d_model)
  float* qkv;        // (B, N, H + 2 G, D)
  float* attended;   // (B, N, H, D)
  float* hidden;     // (B, N, d_hidden), twice as wide if gated
  const float* cos;  // (B|1, N, d_rotary): cosines and signed sines
  const float* sin;
  int64_t d_rotary;     // 0: no rotation
  int64_t table_batch;  // N, or 0 if all sequences share the table
  double eps;
  int32_t interleaved;  // rotation of pairs rather than halves
  int32_t cached;       // whether there are keys and values
  int32_t post_norm, rms_norm, gated, activation, threads, reserved;
} regard_stack;

REGARD_EXPORT int regard_interface(void);
// The structures and numbers of this file as text, one to a line: "structure NAME SIZE", then for each of its fields
// "field NAME TYPE COUNT OFFSET SIZE" (TYPE as in Python's struct module, or the name of a structure; COUNT elements),
// and "number NAME VALUE". Callers build their packing from this description, so the layout is defined here only.
REGARD_EXPORT const char* regard_layout(void);
// A hint that all of this memory will be written soon: use large pages where the system has them.
REGARD_EXPORT void regard_prefer_large_pages(void* memory, int64_t bytes);
// The instruction set in use, and all that were compiled, separated by spaces, widest first.
REGARD_EXPORT const char* regard_isa(void);
REGARD_EXPORT const char* regard_isas_compiled(void);
REGARD_EXPORT const char* regard_version(void);
// 1 if the library can use more than one thread.
REGARD_EXPORT int regard_has_threads(void);

REGARD_EXPORT int regard_dot_forward(const regard_dot* problem, const regard_dot_result* result);
REGARD_EXPORT int regard_dot_backward(const regard_dot* problem, const regard_dot_gradient* gradient);
// Results and their tangents in one pass; out and lse are needed.
REGARD_EXPORT int regard_dot_jvp(const regard_dot* problem, const regard_dot_tangent* tangent,
                                 const regard_dot_result* result);
REGARD_EXPORT int regard_dot_row_statistics(const regard_dot* problem, const regard_dot_statistics* statistics);
REGARD_EXPORT int regard_dot_weights(const regard_dot* problem, const regard_dot_columns* columns);
REGARD_EXPORT int regard_dot_map(const regard_dot* problem, const regard_dot_pool* pool);
REGARD_EXPORT int regard_linear_forward(const regard_linear* problem, const regard_linear_result* result);
REGARD_EXPORT int regard_linear_backward(const regard_linear* problem, const regard_linear_gradient* gradient);
REGARD_EXPORT int regard_recurrence_forward(const regard_recurrence* problem, const regard_recurrence_result* result);
REGARD_EXPORT int regard_recurrence_backward(const regard_recurrence* problem,
                                             const regard_recurrence_gradient* gradient);

// How many bytes a packed weight (N, K) takes, or a negative status. It holds for the instruction set in use.
REGARD_EXPORT int64_t regard_packed_bytes(int64_t N, int64_t K, int32_t format);
REGARD_EXPORT int regard_multiply(const regard_packed_linear* problem);
REGARD_EXPORT int regard_run_stack(const regard_stack* stack);

#ifdef __cplusplus
}
#endif
