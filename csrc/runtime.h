// Threads and memory for the kernels. Compiled once, for the baseline: nothing of the standard library or of OpenMP
// enters the units that are compiled per instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace regard {

// Calls body(context, thread, threads) on up to `threads` threads and returns the first status that is not 0, in thread
// order. The threads are OpenMP's, which torch uses too, so that the two do not compete for the cores.
int run_parallel(int threads, int (*body)(void* context, int thread, int threads), void* context);

// Memory of the calling thread, aligned to a cache line, valid until its next call; null when there is none left. It is
// kept between calls, since fresh pages cost more than a small problem does.
void* thread_scratch(size_t bytes);
// Releases the memory if it is large. Called at the end of a body.
void trim_thread_scratch();

// Whether the CPU has AMX with products of bfloat16 numbers and the system lets this process use its registers. They are
// large, and Linux saves them only for processes that asked for it.
bool enable_tile_registers();

void* allocate(size_t bytes);
void release(void* memory);

}  // namespace regard
