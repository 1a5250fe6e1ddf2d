// Loops over the elements of a row, a vector at a time.
#pragma once

#include "simd.h"

namespace lorikeet {
namespace {

// The lanes of a vector that are meant: all of them, known when the loop is compiled, or the first few.
struct All {};
struct First {
  int lanes;
};
template <class T>
inline F32 get(const T* p, All) { return load(p); }
template <class T>
inline F32 get(const T* p, First n) { return load_n(p, n.lanes); }
template <class T>
inline void set(T* p, F32 x, All) { store(p, x); }
template <class T>
inline void set(T* p, F32 x, First n) { store_n(p, x, n.lanes); }

// f(position, lanes) for every vector of n elements.
template <class F>
inline void each_vector(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, All{});
  if (i < n) f(i, First{int(n - i)});
}

}  // namespace
}  // namespace lorikeet
