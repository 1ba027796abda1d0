// The runtime as types for the kernels: inline code, so it is inside the namespace of the instruction set.
#pragma once
#include "runtime.h"
#include "simd.h"

namespace regard::REGARD_ISA {

template <class F> int parallel(int threads, F& body) {
  return run_parallel(
      threads, [](void* context, int thread, int count) -> int { return (*static_cast<F*>(context))(thread, count); },
      &body);
}

// A buffer that is shared between threads during one call.
struct Buffer {
  void* data = nullptr;
  bool reserve(size_t bytes) { return bytes == 0 || (data = allocate(bytes)) != nullptr; }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { release(data); }
};

// Adds up the parts of one allocation, in bytes, each on its own cache line. `ok` is false once a size overflowed.
struct Layout {
  size_t bytes = 0;
  bool ok = true;

  // Where a part of count * width numbers of the given size begins.
  size_t add(int64_t count, int64_t width, size_t size) {
    size_t part = 0, total = 0;
    const size_t at = bytes;
    if (count < 0 || width < 0 || __builtin_mul_overflow(size_t(count), size_t(width), &part) ||
        __builtin_mul_overflow(part, size, &part) || __builtin_add_overflow(part, size_t(127), &part) ||
        __builtin_add_overflow(bytes, part / 64 * 64, &total) || total > PTRDIFF_MAX) {
      ok = false;
      return 0;
    }
    bytes = total;
    return at;
  }
};

}  // namespace regard::REGARD_ISA
