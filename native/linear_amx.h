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

// The sums of a block on their way to `out`. They are written while the unit computes the next block: what writes them
// has nothing to do then, and the unit would have nothing to do meanwhile.
class Writer {
 public:
  explicit Writer(const Product<bf16>& p) : p_(p) {}
  Writer(const Writer&) = delete;
  ~Writer() { write(waiting_); }

  int64_t waiting() const { return waiting_; }  // rows

  // Writes up to so many rows, and adds the bias.
  void write(int64_t rows) {
    rows = std::min(rows, waiting_);
    waiting_ -= rows;
    for (; rows > 0; --rows, from_ += kPanel, to_ += p_.out_stride)
      for (int v = 0; v < kParts; ++v) {
        const F32 y = add(load(from_ + v * kLanes), bias_[v]);
        if (lanes_[v] == kLanes)
          store(to_ + v * kLanes, y);
        else
          store_n(to_ + v * kLanes, y, lanes_[v]);
      }
  }

  // Takes the sums of the rows [begin, end) of a panel out of the tiles.
  template <bool Two>
  void take(int64_t index, int64_t begin, int64_t end, int64_t height) {
    write(waiting_);
    auto& sums = sums_[turn_ ^= 1];
    constexpr int64_t kBytes = sizeof sums[0];
    _tile_stored(0, &sums[0][0], kBytes);
    _tile_stored(1, &sums[0][kTileWidth], kBytes);
    _tile_stored(2, &sums[0][2 * kTileWidth], kBytes);
    if constexpr (Two) {  // rows that both have are the same
      float* second = sums[end - begin - height];
      _tile_stored(3, second, kBytes);
      _tile_stored(4, second + kTileWidth, kBytes);
      _tile_stored(5, second + 2 * kTileWidth, kBytes);
    }
    const int64_t column = index * kPanel;
    for (int v = 0; v < kParts; ++v) {
      lanes_[v] = int(std::clamp<int64_t>(p_.outputs - column - v * kLanes, 0, kLanes));
      bias_[v] = p_.bias ? load_n(p_.bias + column + v * kLanes, lanes_[v]) : zero();
    }
    from_ = sums[0];
    to_ = p_.out + begin * p_.out_stride + column;
    waiting_ = end - begin;
  }

 private:
  static constexpr int kParts = kPanel / kLanes;
  const Product<bf16>& p_;
  alignas(64) float sums_[2][kBlockRows][kPanel];  // of the block at hand, and of the one before
  int turn_ = 0, lanes_[kParts];
  F32 bias_[kParts];
  const float* from_;
  bf16* to_;
  int64_t waiting_ = 0;
};

// The rows [begin, end), a block, of one panel, by one or two tiles of `height` rows, whose sums the writer gets.
// Meanwhile `lines` lines of memory from `ahead` on are fetched with every step.
template <bool Two>
inline void tile_block(const Product<bf16>& p, int64_t index, int64_t begin, int64_t end, int64_t height,
                       const char* ahead, int64_t lines, Tiles& tiles, Writer& writer) {
  const bf16* groups = p.packed + index * p.panel_elements();
  const bf16 *x = p.x + begin * p.x_stride, *y = Two ? p.x + (end - height) * p.x_stride : x;
  const int64_t x_bytes = p.x_stride * int64_t(sizeof(bf16)), group_bytes = 2 * kPanel * int64_t(sizeof(bf16));
  const int64_t steps = p.inputs / kTileDepth, written = (writer.waiting() + steps - 1) / std::max<int64_t>(steps, 1);
  clear_tiles<0, Two ? 6 : 3>();
  for (int64_t s = 0; s < steps; ++s, x += kTileDepth, y += kTileDepth, groups += kTileDepth * kPanel) {
    for (int64_t i = 0; i < lines; ++i, ahead += kLine) _mm_prefetch(ahead, _MM_HINT_T1);
    add_step<Two>(x, y, x_bytes, groups, group_bytes);
    tiles.keep_storing(s);
    writer.write(written);
  }
  if (const int64_t rest = p.inputs % kTileDepth) add_last<Two>(x, y, p.x_stride, groups, height, rest);
  writer.take<Two>(index, begin, end, height);
}

}  // namespace
}  // namespace lorikeet

#endif
