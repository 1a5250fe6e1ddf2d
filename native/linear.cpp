// out = x @ weightᵀ + bias, for any number of rows, over weights packed in panels.
//
// A panel holds kPanel output columns: for every k-group (two bfloat16, or one float) the groups of all its
// columns side by side. So a tile streams the panel once from front to back at any number of rows, one row
// included, and a product needs no shuffles. Columns beyond the last are zero.
#include <algorithm>

#include "lora_ahead.h"
#include "parallel.h"
#include "simd.h"

namespace lorikeet {
namespace {

constexpr int64_t kPanel = 48;
constexpr int kVectors = kLanes == 16 ? 3 : 2;    // of a tile's columns
constexpr int kTileRows = kLanes == 16 ? 8 : 4;   // so that sums, weights and one input fit the registers
constexpr int64_t kTileColumns = kVectors * kLanes;
constexpr int64_t kRowBlock = 64;                 // rows of one work item
constexpr int64_t kMostRowsAhead = 128;           // beyond, LoRA itself is bound by arithmetic

int64_t groups_of(int64_t inputs, int group) { return (inputs + group - 1) / group; }

template <class T>
struct Product {
  const T* x;
  int64_t x_stride;
  const T* packed;
  const T* bias;  // or null
  T* out;
  int64_t out_stride;
  int64_t inputs, outputs;
  int64_t panel_elements() const { return groups_of(inputs, kGroup<T>) * kGroup<T> * kPanel; }
};

// Rows x kTileColumns of the product; `ahead` and `also` are memory that will be wanted soon.
template <class T, int Rows>
inline void tile(const Product<T>& p, int64_t row, int64_t column, Lines ahead, Lines also) {
  constexpr int G = kGroup<T>;
  F32 sums[Rows][kVectors];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = zero();
  const T* weights = p.packed + (column / kPanel) * p.panel_elements() + (column % kPanel) * G;
  const T* x = p.x + row * p.x_stride;
  const int64_t whole = p.inputs / G;
  // Long sums of floats are made of short ones, or their rounding errors would pile up; next to the rounding of a
  // bfloat16 result they do not count.
  constexpr int64_t kShort = sizeof(T) == 4 ? 16 : int64_t(1) << 62;
  F32 totals[Rows][kVectors];
  for (int64_t k = 0, stop = 0; k < whole;) {
    for (stop = whole - k > kShort ? k + kShort : whole; k < stop; ++k) {
      decltype(load_group(weights)) w[kVectors];
      for (int v = 0; v < kVectors; ++v) w[v] = load_group(weights + k * kPanel * G + v * kLanes * G);
      _mm_prefetch(ahead.at + k * ahead.step, _MM_HINT_T1);
      _mm_prefetch(also.at + k * also.step, _MM_HINT_T1);
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
        sums[r][v] = dot(sums[r][v], splat_group(last), load_group(weights + whole * kPanel * G + v * kLanes * G));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = column + v * kLanes;
    const int n = int(std::min<int64_t>(kLanes, p.outputs - first));
    if (n <= 0) break;
    F32 bias = p.bias ? load_n(p.bias + first, n) : zero();
    for (int r = 0; r < Rows; ++r) {
      T* out = p.out + (row + r) * p.out_stride + first;
      F32 y = add(sums[r][v], bias);
      if (n == kLanes)
        store(out, y);
      else
        store_n(out, y, n);
    }
  }
}

template <class T>
void tile_of(int64_t rows, const Product<T>& p, int64_t row, int64_t column, Lines ahead, Lines also) {
  switch (rows) {
    case 1: return tile<T, 1>(p, row, column, ahead, also);
    case 2: return tile<T, 2>(p, row, column, ahead, also);
    case 3: return tile<T, 3>(p, row, column, ahead, also);
    case 4: return tile<T, 4>(p, row, column, ahead, also);
#if defined(__AVX512F__)
    case 5: return tile<T, 5>(p, row, column, ahead, also);
    case 6: return tile<T, 6>(p, row, column, ahead, also);
    case 7: return tile<T, 7>(p, row, column, ahead, also);
    case 8: return tile<T, 8>(p, row, column, ahead, also);
#endif
  }
}

// The rows [begin, end) of one panel. Meanwhile the next panel is fetched into the second-level cache, and `lora`.
template <class T>
void panel(const Product<T>& p, int64_t index, int64_t begin, int64_t end, LoraAhead::Part& lora) {
  const int64_t bytes = p.panel_elements() * int64_t(sizeof(T));
  const int64_t tiles = (end - begin + kTileRows - 1) / kTileRows, groups = groups_of(p.inputs, kGroup<T>);
  const char* next = (const char*)(p.packed + (index + 1) * p.panel_elements());
  const int64_t step = (bytes / (tiles * groups * (kPanel / kTileColumns)) + 63) & ~int64_t(63);
  const int64_t limit = std::min(p.outputs, (index + 1) * kPanel);
  int64_t at = 0;
  for (int64_t i = 0; i < tiles; ++i) {  // spread evenly, as 30 rows are better served by 8 8 7 7 than 8 8 8 6
    Range rows = part_of(end - begin, i, tiles);
    for (int64_t column = index * kPanel; column < limit; column += kTileColumns, at += groups * step)
      tile_of<T>(rows.end - rows.begin, p, begin + rows.begin, column, {next + std::min(at, bytes), step},
                 lora.take(groups, p.x));
  }
}

template <class T>
void multiply(const Product<T>& p, int64_t rows, const LoraAhead& lora, int64_t threads) {
  const int64_t panels = (p.outputs + kPanel - 1) / kPanel, blocks = (rows + kRowBlock - 1) / kRowBlock;
  parallel(threads, [&](int64_t thread, int64_t count) {
    Range items = part_of(panels * blocks, thread, count);
    LoraAhead::Part lora_part(lora, thread, count);
    for (int64_t item = items.begin; item < items.end; ++item) {
      const int64_t block = item % blocks;
      panel(p, item / blocks, block * kRowBlock, std::min(rows, (block + 1) * kRowBlock),
            lora_part);
    }
  });
}

template <class T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs, int64_t threads) {
  constexpr int G = kGroup<T>;
  const int64_t groups = groups_of(inputs, G), panels = (outputs + kPanel - 1) / kPanel;
  parallel(threads, [&](int64_t thread, int64_t count) {
    Range mine = part_of(panels, thread, count);
    for (int64_t index = mine.begin; index < mine.end; ++index) {
      T* to = packed + index * groups * G * kPanel;
      for (int64_t c = 0; c < kPanel; ++c) {
        const int64_t column = index * kPanel + c;
        for (int64_t k = 0; k < groups * G; ++k)
          to[(k / G * kPanel + c) * G + k % G] = column < outputs && k < inputs ? weight[column * inputs + k] : T{};
      }
    }
  });
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// Elements of a packed weight [outputs, inputs] whose elements have `bytes` bytes.
LORIKEET_EXPORT int64_t lorikeet_packed_elements(int64_t outputs, int64_t inputs, int64_t bytes) {
  const int group = int(4 / bytes);
  return (outputs + kPanel - 1) / kPanel * kPanel * groups_of(inputs, group) * group;
}

LORIKEET_EXPORT void lorikeet_pack(
    const void* weight, void* packed, int64_t outputs, int64_t inputs, int64_t bytes, int64_t threads) {
  if (bytes == 2)
    pack((const bf16*)weight, (bf16*)packed, outputs, inputs, threads);
  else
    pack((const float*)weight, (float*)packed, outputs, inputs, threads);
}

// Strides are in elements; `bytes` is 2 for bfloat16, 4 for float. The arguments from `segments` on are those of the
// lorikeet_lora call that follows, if one does; else `lora_segments` is 0.
LORIKEET_EXPORT void lorikeet_linear(
    const void* x, int64_t x_stride, const void* packed, const void* bias, void* out, int64_t out_stride, int64_t rows,
    int64_t inputs, int64_t outputs, int64_t bytes, int64_t threads, const int64_t* segments, int64_t lora_segments,
    int64_t layer, const int64_t* modules, const int64_t* module_outputs, int64_t module_count) {
  const bool ahead = rows >= kTileRows && rows <= kMostRowsAhead;
  const LoraAhead lora(segments, ahead ? lora_segments : 0, layer, modules, module_outputs, module_count, inputs, bytes);
  if (bytes == 2)
    multiply<bf16>({(const bf16*)x, x_stride, (const bf16*)packed, (const bf16*)bias, (bf16*)out, out_stride, inputs,
                    outputs}, rows, lora, threads);
  else
    multiply<float>({(const float*)x, x_stride, (const float*)packed, (const float*)bias, (float*)out, out_stride,
                     inputs, outputs}, rows, lora, threads);
}
