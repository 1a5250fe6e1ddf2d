// The products of attention by the tile unit: 16 query rows at once.
//
// Packed keys and values have the layout of the unit's right operand: groups of two columns or of two tokens. Rows
// beyond the last are computed from undefined data and not used.
#pragma once

#include "attention_tiles.h"
#include "tile_unit.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

constexpr int64_t kSlice = 4 * kTileWidth;  // columns of a product: as many tiles of sums

// products[row][column] = rows . groups, of Parts * kTileWidth columns over `depth` elements, a multiple of kTileDepth.
// Strides are in bytes. Fetches `lines` ahead per step.
template <int Parts, class T>
inline void multiply(const bf16* rows, int64_t row_stride, const bf16* groups, int64_t group_stride, int64_t depth,
                     float* products, int64_t product_stride, Ahead<T>& ahead, int64_t lines) {
  clear_tiles<0, Parts>();
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    ahead.fetch(lines);
    load_tile<6>(rows + k, row_stride);
    load_tile<7>(groups, group_stride);
    add_product<0>();
    load_tile<7>(groups + 2 * kTileWidth, group_stride);
    add_product<1>();
    if constexpr (Parts > 2) {
      load_tile<7>(groups + 4 * kTileWidth, group_stride);
      add_product<2>();
      load_tile<7>(groups + 6 * kTileWidth, group_stride);
      add_product<3>();
    }
    groups += kTileDepth / 2 * group_stride / int64_t(sizeof(bf16));
  }
  _tile_stored(0, products, product_stride);
  _tile_stored(1, products + kTileWidth, product_stride);
  if constexpr (Parts > 2) {
    _tile_stored(2, products + 2 * kTileWidth, product_stride);
    _tile_stored(3, products + 3 * kTileWidth, product_stride);
  }
}

// scores[row][token] = queries[row] . keys[token]; `columns` of a query and `width` tokens, multiples of kTileDepth.
template <class T>
void score_by_tiles(const bf16* queries, int64_t columns, const bf16* keys, int64_t width, float* scores,
                    Ahead<T>& ahead) {
  const int64_t row = columns * int64_t(sizeof(bf16)), group = 2 * kTile * int64_t(sizeof(bf16));
  const int64_t scored = kTile * int64_t(sizeof(float));
  for (int64_t token = 0; token < width; token += kSlice) {
    const bf16* from = keys + 2 * token;
    if (token + kSlice <= width)
      multiply<4>(queries, row, from, group, columns, scores + token, scored, ahead, kScoreFetch);
    else
      multiply<2>(queries, row, from, group, columns, scores + token, scored, ahead, kScoreFetch);
  }
}

// sums = factor * sums + weights . values, of `rows` rows from `row`, over `width` tokens, a multiple of kTileDepth.
// Without factors there are no sums yet.
template <class T>
void accumulate_by_tiles(const bf16* weights, const bf16* values, int64_t width, const float* factors,
                         const State& state, int64_t row, int64_t rows, Ahead<T>& ahead) {
  const int64_t weight = kTile * int64_t(sizeof(bf16)), group = 2 * state.columns * int64_t(sizeof(bf16));
  alignas(64) float products[kTileHeight][kSlice];
  for (int64_t column = 0; column < state.columns; column += kSlice) {
    const bf16* from = values + 2 * column;
    const int64_t columns = std::min(kSlice, state.columns - column);
    if (columns == kSlice)
      multiply<4>(weights, weight, from, group, width, products[0], sizeof products[0], ahead, kAccumulateFetch);
    else
      multiply<2>(weights, weight, from, group, width, products[0], sizeof products[0], ahead, kAccumulateFetch);
    for (int64_t r = 0; r < rows; ++r) {
      float* sums = state.sums(row + r) + column;
      for (int64_t i = 0; i < columns; i += kLanes) {
        const F32 product = load(products[r] + i);
        store(sums + i, factors ? fma(load(sums + i), splat(factors[r]), product) : product);
      }
    }
  }
}

}  // namespace
}  // namespace lorikeet

#endif
