#include "runtime.h"

#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif
#ifndef _WIN32
#include <pthread.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "regard.h"

namespace regard {
namespace {

constexpr size_t cache_line = 64;
constexpr size_t kept_bytes = size_t(96) << 20;

struct Scratch {
  void* data = nullptr;
  size_t size = 0;
  ~Scratch() { release(data); }
};
thread_local Scratch scratch;

// The threads of an OpenMP pool do not survive a fork, and waiting for them would hang: a child uses one thread only.
volatile bool forked = false;

#ifndef _WIN32
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

}  // namespace

int run_parallel(int threads, int (*body)(void*, int, int), void* context) {
#ifdef _OPENMP
  if (threads > 1 && !forked) {
    int status = REGARD_OK, failed = threads;
#pragma omp parallel num_threads(threads)
    {
      const int thread = omp_get_thread_num();
      const int mine = body(context, thread, omp_get_num_threads());
      if (mine != REGARD_OK) {
#pragma omp critical(regard_status)
        if (thread < failed) {
          failed = thread;
          status = mine;
        }
      }
    }
    return status;
  }
#endif
  return body(context, 0, 1);
}

bool enable_tile_registers() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr unsigned bfloat16_products = 1u << 22, tiles = 1u << 24;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & bfloat16_products) == 0 || (edx & tiles) == 0) return false;
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, the state component
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

void* allocate(size_t bytes) {
  void* data = nullptr;
#ifdef _WIN32
  data = _aligned_malloc(bytes ? bytes : cache_line, cache_line);
#else
  if (posix_memalign(&data, cache_line, bytes ? bytes : cache_line) != 0) data = nullptr;
#endif
#ifdef REGARD_SANITIZE
  if (data) memset(data, 0xff, bytes);  // NaN: memory that is read before it is written shows in the result
#endif
  return data;
}

void release(void* memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  free(memory);
#endif
}

void* thread_scratch(size_t bytes) {
#ifdef REGARD_SANITIZE
  const bool fits = false;  // allocate exactly this size, so that sanitizers detect an overrun by one byte
#else
  const bool fits = bytes <= scratch.size;
#endif
  if (!fits) {
    release(scratch.data);
    scratch.size = 0;
    scratch.data = allocate(bytes);
    if (scratch.data) scratch.size = bytes;
  }
  return scratch.data;
}

void trim_thread_scratch() {
  if (scratch.size <= kept_bytes) return;
  release(scratch.data);
  scratch.data = nullptr;
  scratch.size = 0;
}

}  // namespace regard

extern "C" int regard_has_threads(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}

extern "C" void regard_prefer_large_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t page = 1 << 16;  // the largest ordinary page size of any system
  const uintptr_t first = (uintptr_t(memory) + page - 1) / page * page,
                  last = (uintptr_t(memory) + uintptr_t(bytes)) / page * page;
  if (bytes > 0 && first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}
