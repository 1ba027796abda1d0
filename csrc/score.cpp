// The scores of a strip of queries and panels of keys, and the gradients of the additive score.
#include "kernels.h"
#include "gemm.h"
#include "score.h"

namespace regard::REGARD_ISA {

#if defined(__AMX_BF16__)

void PairScore::fill(int64_t, int rows, Panels panels, const Pair* strip, const Pair* transposed, float* scores,
                     int64_t stride) const {
  multiply_tiles<false>(rows, panels.count, depth / tile_rows, {strip, depth},
                        {transposed, NR<float>, NR<float> * depth}, scores, stride);
  for (int r = 0; scales && r < rows; ++r)
    for (int64_t c = 0; c < panels.count * NR<float>; c += lanes<float>)
      store(scores + r * stride + c, load(scores + r * stride + c) * scale);
}

void PairScore::fill_direct(int, Panels, const Pair*, int64_t, const Pair*, float*, int64_t) const {}  // never in place

#elif defined(REGARD_PAIR_PRODUCTS)

void PairScore::fill(int64_t, int rows, Panels panels, const Pair* strip, const Pair* transposed, float* scores,
                     int64_t stride) const {
  multiply_wanted<float, 1, MR, Into::scale>(rows, panels, depth, strip, transposed, NR<float> * depth, scores, stride,
                                             0, &scale);
}

void PairScore::fill_direct(int rows, Panels panels, const Pair* queries, int64_t row_stride, const Pair* transposed,
                            float* scores, int64_t stride) const {
  multiply_wanted<float, any_row, 1, Into::scale>(rows, panels, depth, queries, transposed, NR<float> * depth, scores,
                                                  stride, row_stride, &scale);
}

#else  // other problems are those of the instruction set that this one extends

namespace {

// Long sums are added up in parts, see DotScore::longest_sum.
template <int ARow, int AStep, Into into = Into::overwrite, class T>
void multiply_parts(const DotScore<T>& score, int rows, Panels panels, const T* queries, int64_t row_stride,
                    const T* transposed, T* scores, int64_t stride) {
  const int64_t D = score.D, part = score.part;
  multiply_wanted<T, ARow, AStep, into>(rows, panels, part, queries, transposed, NR<T> * D, scores, stride, row_stride);
  for (int64_t d = part; d < D; d += part)
    multiply_wanted<T, ARow, AStep, Into::add>(rows, panels, least(part, D - d), queries + d * AStep,
                                               transposed + d * NR<T>, NR<T> * D, scores, stride, row_stride);
}

template <AdditiveMode mode, class T>
void fill_in_mode(const AdditiveScore<T>& score, int64_t h, int rows, int64_t panels, const T* strip,
                  const T* transposed, T* scores, int64_t stride) {
  with_rows(rows, [&](auto m) __attribute__((always_inline)) {
    for (int64_t p = 0; p < panels; ++p)
      additive_scores<mode, T, decltype(m)::value>(score.weight(h), strip, transposed + p * NR<T> * score.D,
                                                   scores + p * NR<T>, stride, score.scale);
  });
}

template <int M, class T>
__attribute__((noinline)) void add_rows(const AdditiveScore<T>& score, int64_t keys, AdditiveRows<T> q,
                                        AdditiveRows<T> k, const T* ds, int64_t ds_row, T* dq, T* dk, T* sums) {
  const int64_t width = score.width;
  if (score.mode == AdditiveMode::small)
    additive_gradients<AdditiveMode::small, T, M>(width, keys, q, k, ds, ds_row, dq, dk, sums);
  else if (score.mode == AdditiveMode::direct)
    additive_gradients<AdditiveMode::direct, T, M>(width, keys, q, k, ds, ds_row, dq, dk, sums);
  else additive_gradients<AdditiveMode::single, T, M>(width, keys, q, k, ds, ds_row, dq, dk, sums);
}

}  // namespace

template <class T>
void DotScore<T>::fill(int64_t, int rows, Panels panels, const T* strip, const T* transposed, T* scores,
                       int64_t stride) const {
  multiply_parts<1, MR>(*this, rows, panels, strip, 0, transposed, scores, stride);
}

template <class T>
void DotScore<T>::add(int rows, Panels panels, const T* strip, const T* transposed, T* scores, int64_t stride) const {
  multiply_parts<1, MR, Into::add>(*this, rows, panels, strip, 0, transposed, scores, stride);
}

template <class T>
void DotScore<T>::fill_direct(int rows, Panels panels, const T* queries, int64_t row_stride, const T* transposed,
                              T* scores, int64_t stride) const {
  multiply_parts<any_row, 1>(*this, rows, panels, queries, row_stride, transposed, scores, stride);
}

template <class T>
void AdditiveScore<T>::fill(int64_t h, int rows, Panels wanted, const T* strip, const T* transposed, T* scores,
                            int64_t stride) const {
  const int64_t panels = wanted.count;
  if (mode == AdditiveMode::paired)
    fill_in_mode<AdditiveMode::paired>(*this, h, rows, panels, strip, transposed, scores, stride);
  else if (mode == AdditiveMode::small)
    fill_in_mode<AdditiveMode::small>(*this, h, rows, panels, strip, transposed, scores, stride);
  else if (mode == AdditiveMode::single)
    fill_in_mode<AdditiveMode::single>(*this, h, rows, panels, strip, transposed, scores, stride);
  else fill_in_mode<AdditiveMode::direct>(*this, h, rows, panels, strip, transposed, scores, stride);
}

template <class T>
void AdditiveScore<T>::add_gradients(int rows, int64_t keys, AdditiveRows<T> q, AdditiveRows<T> k, const T* ds,
                                     int64_t ds_row, T* dq, T* dk, T* sums) const {
  with_rows(rows, [&](auto m) __attribute__((always_inline)) {
    add_rows<decltype(m)::value>(*this, keys, q, k, ds, ds_row, dq, dk, sums);
  });
}

template struct DotScore<float>;
template struct DotScore<double>;
template struct AdditiveScore<float>;
template struct AdditiveScore<double>;

#endif

}  // namespace regard::REGARD_ISA
