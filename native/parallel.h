// Work over the threads of torch's OpenMP runtime.
//
// The libraries are linked without an OpenMP runtime: the symbols resolve to the runtime that torch has loaded, so that a
// process has one thread team.
#pragma once

#include <omp.h>

#include <cstdint>

namespace lorikeet {

struct Range {
  int64_t begin, end;
};

// Part `index` of `parts` nearly equal parts of [0, n).
inline Range part_of(int64_t n, int64_t index, int64_t parts) { return {n * index / parts, n * (index + 1) / parts}; }

// The index of the part that has an item, of `parts` nearly equal parts of n items; there are at least as many items.
inline Range part_with(int64_t item, int64_t n, int64_t parts) { return part_of(n, ((item + 1) * parts - 1) / n, parts); }

// Calls f(thread, threads) on every thread and returns when all are done.
template <class F>
inline void parallel(int64_t threads, const F& f) {
  if (threads <= 1) {
    f(int64_t(0), int64_t(1));
    return;
  }
#pragma omp parallel num_threads(int(threads))
  f(int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
}

// Inside parallel(): waits for the other threads.
inline void barrier() {
#pragma omp barrier
}

}  // namespace lorikeet

// The functions that Python calls. Every function takes 64-bit integers, doubles and addresses only.
#define LORIKEET_EXPORT extern "C" __attribute__((visibility("default")))
