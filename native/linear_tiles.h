// The arithmetic of a product with a weight packed in panels.
//
// A panel holds kPanel output columns: for every k-group (two bfloat16, or one float) the groups of all its
// columns side by side. So a tile streams the panel once from front to back at any number of rows, one row
// included, and a product needs no shuffles. Columns beyond the last are zero.
#pragma once

#include <algorithm>

#include "panels.h"

namespace lorikeet {
namespace {

constexpr int kVectors = kLanes == 16 ? 3 : 2;    // of a tile's columns
constexpr int kTileRows = kLanes == 16 ? 8 : 4;   // so that sums, weights and one input fit the registers
constexpr int64_t kTileColumns = kVectors * kLanes;
constexpr int64_t kNextCacheBytes = 768 << 10;  // most of a second-level cache

// Cache lines to prefetch: one every `step` bytes, for each k-group of a tile.
struct Lines {
  const char* at;
  int64_t step;
};

// O is the element of the output: T, or float.
template <class T, class O = T>
struct Product {
  const T* x;
  int64_t x_stride;
  Panels<T> panels;
  const T* bias;  // or null
  O* out;
  int64_t out_stride;
  int64_t inputs, outputs;
};

// Rows x kTileColumns of the product; `panel` has these columns, `ahead` and `also` are memory to prefetch.
template <int Rows, class T, class O>
inline void tile(const Product<T, O>& p, const T* panel, int64_t row, int64_t column, Lines ahead, Lines also) {
  constexpr int G = kGroup<T>;
  F32 sums[Rows][kVectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  const T* weights = panel + (column % kPanel<T>) * G;
  const T* x = p.x + row * p.x_stride;
  const int64_t whole = p.inputs / G;
  // Long float sums are sums of short ones, to limit rounding errors; for a bfloat16 result, whose own rounding is larger,
  // that is not needed.
  constexpr int64_t kShort = sizeof(T) == 4 ? 16 : int64_t(1) << 62;
  F32 totals[Rows][kVectors];
  for (int64_t k = 0, stop = 0; k < whole;) {
    for (stop = whole - k > kShort ? k + kShort : whole; k < stop; ++k) {
      decltype(load_group(weights)) w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = load_group(weights + k * kPanel<T> * G + v * kLanes * G);
      __builtin_prefetch(ahead.at + k * ahead.step, 0, 2);
      __builtin_prefetch(also.at + k * also.step, 0, 2);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        auto input = splat_group(x + r * p.x_stride + k * G);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = dot(sums[r][v], input, w[v]);
      }
    }
    if (sizeof(T) == 4) {
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kVectors; ++v) {
          totals[r][v] = stop <= kShort ? sums[r][v] : add(totals[r][v], sums[r][v]);
          sums[r][v] = k < whole ? zero() : totals[r][v];
        }
    }
  }
  if (whole * G < p.inputs) {  // an odd number of bfloat16
    for (int r = 0; r < Rows; ++r) {
      T last[2] = {x[r * p.x_stride + whole * G], T{}};
      for (int v = 0; v < kVectors; ++v)
        sums[r][v] = dot(sums[r][v], splat_group(last), load_group(weights + whole * kPanel<T> * G + v * kLanes * G));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = column + v * kLanes;
    const int n = int(std::min<int64_t>(kLanes, p.outputs - first));
    if (n <= 0) break;
    F32 bias = p.bias ? load_n(p.bias + first, n) : zero();
    for (int r = 0; r < Rows; ++r) {
      O* out = p.out + (row + r) * p.out_stride + first;
      F32 y = add(sums[r][v], bias);
      if (n == kLanes)
        store(out, y);
      else
        store_n(out, y, n);
    }
  }
}

template <class T, class O>
void tile_of(int64_t rows, const Product<T, O>& p, const T* panel, int64_t row, int64_t column, Lines ahead, Lines also) {
  switch (rows) {
    case 1: return tile<1>(p, panel, row, column, ahead, also);
    case 2: return tile<2>(p, panel, row, column, ahead, also);
    case 3: return tile<3>(p, panel, row, column, ahead, also);
    case 4: return tile<4>(p, panel, row, column, ahead, also);
#if defined(__AVX512F__)
    case 5: return tile<5>(p, panel, row, column, ahead, also);
    case 6: return tile<6>(p, panel, row, column, ahead, also);
    case 7: return tile<7>(p, panel, row, column, ahead, also);
    case 8: return tile<8>(p, panel, row, column, ahead, also);
#endif
  }
}

}  // namespace
}  // namespace lorikeet
