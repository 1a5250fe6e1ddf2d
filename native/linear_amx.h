// A product of bfloat16 by the tile unit.
//
// A panel is what the unit wants on its right side: a row of a tile is a k-group of 16 columns. The left side is x
// itself. So nothing is copied, and one format of weights serves every instruction set.
//
// Rows go in blocks of up to 32, two tiles that share the panel's. All tiles of a call have one height, as a change
// of shapes costs more than rows computed twice: the second tile of a block ends with it and may overlap the first.
#pragma once

#include <cstring>

#include "linear_tiles.h"
#include "tile_unit.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

constexpr int64_t kBlockRows = 2 * kTileHeight;
constexpr int64_t kLine = 64;                                              // bytes of a cache line
constexpr int64_t kStepLines = kTileDepth * kPanel * sizeof(bf16) / kLine;  // of a panel
static_assert(kPanel == 3 * kTileWidth);

// Adds one step of inputs of one or two tiles of rows, x and y, times the panel's groups. Sums are tiles 0 to 2 and 3
// to 5.
template <bool Two>
inline void add_step(const bf16* x, const bf16* y, int64_t x_bytes, const bf16* groups, int64_t group_bytes) {
  const bf16 *left = groups, *middle = left + 2 * kTileWidth, *right = middle + 2 * kTileWidth;
  load_tile<6>(x, x_bytes);
  load_tile<7>(left, group_bytes);
  add_product<0>();
  load_tile<7>(middle, group_bytes);
  add_product<1>();
  load_tile<7>(right, group_bytes);
  add_product<2>();
  if constexpr (Two) {  // backwards, as the right part is in its tile
    load_tile<6>(y, x_bytes);
    add_product<5>();
    load_tile<7>(middle, group_bytes);
    add_product<4>();
    load_tile<7>(left, group_bytes);
    add_product<3>();
  }
}

// Adds the last inputs, with zeros up to a whole step: what follows them in memory is not theirs.
template <bool Two>
inline void add_last(const bf16* x, const bf16* y, int64_t stride, const bf16* groups, int64_t height, int64_t inputs) {
  alignas(64) bf16 rows[2][kTileHeight][kTileDepth] = {}, whole[kTileDepth / 2][2 * kPanel] = {};
  for (int64_t r = 0; r < height; ++r) {
    std::memcpy(rows[0][r], x + r * stride, size_t(inputs) * sizeof(bf16));
    if (Two) std::memcpy(rows[1][r], y + r * stride, size_t(inputs) * sizeof(bf16));
  }
  std::memcpy(whole, groups, size_t(groups_of(inputs, 2)) * sizeof whole[0]);
  add_step<Two>(rows[0][0], rows[1][0], sizeof rows[0][0], whole[0], sizeof whole[0]);
}

// Writes rows of sums, and adds the bias.
inline void write_rows(const Product<bf16>& p, const float (*sums)[kPanel], int64_t row, int64_t rows, int64_t column) {
  constexpr int kParts = kPanel / kLanes;
  int lanes[kParts];
  F32 bias[kParts];
  for (int v = 0; v < kParts; ++v) {
    lanes[v] = int(std::clamp<int64_t>(p.outputs - column - v * kLanes, 0, kLanes));
    bias[v] = p.bias ? load_n(p.bias + column + v * kLanes, lanes[v]) : zero();
  }
  bf16* out = p.out + row * p.out_stride + column;
  for (int64_t r = 0; r < rows; ++r, out += p.out_stride)
    for (int v = 0; v < kParts; ++v) {
      const F32 y = add(load(&sums[r][v * kLanes]), bias[v]);
      if (lanes[v] == kLanes)
        store(out + v * kLanes, y);
      else
        store_n(out + v * kLanes, y, lanes[v]);
    }
}

// The rows [begin, end), a block, of one panel, by one or two tiles of `height` rows. Meanwhile `lines` lines of memory
// from `ahead` on are fetched with every step.
template <bool Two>
inline void tile_block(const Product<bf16>& p, int64_t index, int64_t begin, int64_t end, int64_t height,
                       const char* ahead, int64_t lines) {
  const bf16* groups = p.packed + index * p.panel_elements();
  const bf16 *x = p.x + begin * p.x_stride, *y = Two ? p.x + (end - height) * p.x_stride : x;
  const int64_t x_bytes = p.x_stride * int64_t(sizeof(bf16)), group_bytes = 2 * kPanel * int64_t(sizeof(bf16));
  clear_tiles<0, Two ? 6 : 3>();
  int64_t k = 0;
  for (; k + kTileDepth <= p.inputs; k += kTileDepth, x += kTileDepth, y += kTileDepth, groups += kTileDepth * kPanel) {
    for (int64_t i = 0; i < lines; ++i, ahead += kLine) _mm_prefetch(ahead, _MM_HINT_T1);
    add_step<Two>(x, y, x_bytes, groups, group_bytes);
  }
  if (k < p.inputs) add_last<Two>(x, y, p.x_stride, groups, height, p.inputs - k);
  alignas(64) float sums[2][kTileHeight][kPanel];
  constexpr int64_t kBytes = sizeof sums[0][0];
  _tile_stored(0, &sums[0][0][0], kBytes);
  _tile_stored(1, &sums[0][0][kTileWidth], kBytes);
  _tile_stored(2, &sums[0][0][2 * kTileWidth], kBytes);
  if constexpr (Two) {
    _tile_stored(3, &sums[1][0][0], kBytes);
    _tile_stored(4, &sums[1][0][kTileWidth], kBytes);
    _tile_stored(5, &sums[1][0][2 * kTileWidth], kBytes);
  }
  write_rows(p, sums[0], begin, height, index * kPanel);
  if (Two) write_rows(p, sums[1], end - height, height, index * kPanel);
}

}  // namespace
}  // namespace lorikeet

#endif
