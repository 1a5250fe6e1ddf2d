// A product of bfloat16 by the tile unit.
//
// A panel has the layout of the unit's right operand: a row of a tile is a k-group of 16 columns. The left operand is x
// itself, so nothing is copied.
//
// Rows go in blocks of up to 32, two tiles that share the panel's. All tiles of a call have one height, as a change
// of shapes costs more than rows computed twice: the second tile of a block ends with it and may overlap the first.
//
// Of a quantised weight that meets one block of rows, a few steps of inputs are unpacked at a time: so its numbers stay in the
// first cache. In 4 bits it is the left operand then (tile_codes.h); the sums are the same, with rows and columns exchanged.
//
// The bottleneck is the bandwidth from the second-level cache to the first. So a panel of a few hundred inputs stays in the
// first, rows are loaded with a non-temporal hint, and little is written.
#pragma once

#include <cstring>

#include "buffer.h"
#include "linear_tiles.h"
#include "parallel.h"
#include "tile_unit.h"
#include "transposed_rows.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

constexpr int64_t kBlockRows = 2 * kTileHeight;
constexpr int64_t kWidth = kPanel<bf16>;
constexpr int64_t kLine = 64;                                              // bytes of a cache line
constexpr int64_t kStepLines = kTileDepth * kWidth * sizeof(bf16) / kLine;  // of a panel
constexpr int64_t kFewestToFetch = 2;  // blocks of a run; one takes no longer than memory does
static_assert(kWidth == 2 * kTileWidth && kLanes == kTileWidth);

// Adds one step of inputs of one or two tiles of rows, x and y, times the panel's groups. Sums are tiles 0 and 1, 2 and 3.
template <bool Two>
inline void add_step(const bf16* x, const bf16* y, int64_t x_bytes, const bf16* groups, int64_t group_bytes) {
  const bf16 *left = groups, *right = left + 2 * kTileWidth;
  load_passing_tile<6>(x, x_bytes);
  load_tile<7>(left, group_bytes);
  add_product<0>();
  load_tile<7>(right, group_bytes);
  add_product<1>();
  if constexpr (Two) {  // backwards, as the right part is in its tile
    load_passing_tile<6>(y, x_bytes);
    add_product<3>();
    load_tile<7>(left, group_bytes);
    add_product<2>();
  }
}

// The same with the two left tiles of a step of a weight, and rows' pairs of inputs on the right. Sums are tiles 0 and 1 (the
// first tile of rows), 2 and 3.
template <bool Two>
inline void add_transposed_step(const bf16* first, const bf16* second, int64_t pair_bytes, const TileCodes::Tiles& weights) {
  load_tile<7>(first, pair_bytes);
  load_tile<6>(weights[0], sizeof weights[0]);
  add_product<0>();
  load_tile<6>(weights[kTileHeight], sizeof weights[0]);
  add_product<1>();
  if constexpr (Two) {
    load_tile<7>(second, pair_bytes);
    add_product<3>();
    load_tile<6>(weights[0], sizeof weights[0]);
    add_product<2>();
  }
}

// Adds the last inputs, with zeros up to a whole step, since other data follows them in memory.
template <bool Two>
inline void add_last(const bf16* x, const bf16* y, int64_t stride, const bf16* groups, int64_t height, int64_t inputs) {
  alignas(64) bf16 rows[2][kTileHeight][kTileDepth] = {}, whole[kTileDepth / 2][2 * kWidth] = {};
  for (int64_t r = 0; r < height; ++r) {
    std::memcpy(rows[0][r], x + r * stride, size_t(inputs) * sizeof(bf16));
    if (Two) std::memcpy(rows[1][r], y + r * stride, size_t(inputs) * sizeof(bf16));
  }
  std::memcpy(whole, groups, size_t(groups_of(inputs, 2)) * sizeof whole[0]);
  add_step<Two>(rows[0][0], rows[1][0], sizeof rows[0][0], whole[0], sizeof whole[0]);
}

inline F32 rounded(F32 x) { return widen(narrow(x)); }
inline void store_both(bf16* p, F32 low, F32 high) { _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }
inline void store_both(float* p, F32 low, F32 high) {
  store(p, low);
  store(p + kLanes, high);
}

// Where a panel's columns of some rows go.
template <class O>
struct Place {
  O* out;  // of the first row
  int64_t stride;
  const bf16* bias;   // or null
  int64_t columns;
  const bf16* gates;  // of each row kWidth side by side, whose SiLU they are multiplied by; or null
};

// The sums of a block that are being written out while the unit computes the next block, so that stores and the unit work
// in parallel.
template <class O>
class Writer {
 public:
  Writer() = default;
  Writer(const Writer&) = delete;
  ~Writer() { write(waiting_); }

  int64_t waiting() const { return waiting_; }  // rows

  // Writes up to `rows` rows.
  void write(int64_t rows) {
    rows = std::min(rows, waiting_);
    waiting_ -= rows;
    for (; rows > 0; --rows, from_ += kWidth, to_.out += to_.stride) {
      F32 low = add(load(from_), bias_[0]), high = add(load(from_ + kLanes), bias_[1]);
      if (to_.gates) {
        low = mul(silu(load(to_.gates)), rounded(low));
        high = mul(silu(load(to_.gates + kLanes)), rounded(high));
        to_.gates += kWidth;
      }
      if (to_.columns == kWidth) {
        store_both(to_.out, low, high);
      } else {
        store_n(to_.out, low, lanes(0));
        store_n(to_.out + kLanes, high, lanes(1));
      }
    }
  }

  // Takes the sums of a block of some rows out of the tiles.
  template <bool Two>
  void take(const Place<O>& to, int64_t rows, int64_t height) {
    write(waiting_);
    constexpr int64_t kBytes = sizeof sums_[0];
    _tile_stored(0, sums_[0], kBytes);
    _tile_stored(1, sums_[0] + kTileWidth, kBytes);
    if constexpr (Two) {  // rows that both have are the same
      float* second = sums_[rows - height];
      _tile_stored(2, second, kBytes);
      _tile_stored(3, second + kTileWidth, kBytes);
    }
    start(to, rows);
  }

  // The same of transposed sums, of split.rows rows.
  template <bool Two>
  void take_transposed(const Place<O>& to, const RowTiles& split) {
    write(waiting_);
    if (split.rows == 1) {  // a column
      _tile_stored(0, sums_[0], sizeof(float));
      _tile_stored(1, sums_[0] + kTileWidth, sizeof(float));
      return start(to, 1);
    }
    alignas(64) float transposed[Two ? 4 : 2][kTileHeight][kTileWidth];
    store_tiles<0, Two ? 4 : 2>(transposed);
    for (int64_t tile = 0; tile < (Two ? 4 : 2); ++tile) {
      float* at = sums_[split.begin(tile / 2)] + tile % 2 * kTileWidth;
      const float* columns[kTileWidth];
      F32 rows[kTileHeight];
      for (int64_t c = 0; c < kTileWidth; ++c) columns[c] = transposed[tile][c];
      transpose(columns, 0, rows);
      for (int64_t r = 0; r < split.height; ++r) store(at + r * kWidth, rows[r]);
    }
    start(to, split.rows);
  }

 private:
  void start(const Place<O>& to, int64_t rows) {
    to_ = to;
    for (int v = 0; v < 2; ++v) bias_[v] = to.bias ? load_n(to.bias + v * kLanes, lanes(v)) : zero();
    from_ = sums_[0];
    waiting_ = rows;
  }

  // Of the columns, those in one of two vectors.
  int lanes(int vector) const { return int(std::clamp<int64_t>(to_.columns - vector * kLanes, 0, kLanes)); }

  alignas(64) float sums_[kBlockRows][kWidth];
  Place<O> to_;
  F32 bias_[2];
  const float* from_;
  int64_t waiting_ = 0;
};

// A thread's share of a product.
template <class O>
class TileProduct {
 public:
  TileProduct(const Product<bf16, O>& p, int64_t rows)
      : p_(p), rows_(rows), blocks_((rows + kBlockRows - 1) / kBlockRows),
        most_((rows + blocks_ - 1) / blocks_), height_(most_ > kTileHeight ? (most_ + 1) / 2 : most_) {
    is_transposed_ = blocks_ == 1 && p.panels.weight().bits == 4;
    is_transposed_ ? tiles_.shape(kTileHeight, rows == 1 ? 1 : kTileWidth) : tiles_.shape(height_);
  }

  // Calls f(panel, blocks, their run) for the thread's part of so many panels and all blocks of rows. Rows are processed in
  // runs: short enough to stay in the second-level cache for all panels, long enough that panels which do not fit are
  // read rarely.
  template <class F>
  void each(int64_t panels, int64_t thread, int64_t threads, const F& f) const {
    const int64_t bytes = blocks_ * kBlockRows * p_.inputs * int64_t(sizeof(bf16));
    const int64_t runs = std::min(blocks_, (bytes + kNextCacheBytes - 1) / kNextCacheBytes);
    const Range items = part_of(panels * blocks_, thread, threads);
    for (int64_t item = items.begin; item < items.end;) {
      const Range run = part_with(item / panels, blocks_, runs);
      const int64_t count = run.end - run.begin, nth = item - run.begin * panels;
      const int64_t begin = run.begin + nth % count, end = std::min(run.end, begin + items.end - item);
      f(nth / count, Range{begin, end}, run);
      item += end - begin;
    }
  }

  Range rows_of(int64_t block) const { return part_of(rows_, block, blocks_); }

  // A panel of some blocks of a run, whose first row goes to the place. Meanwhile their part of the next panel is fetched;
  // of a quantised weight the hardware does that, since codes are read from front to back.
  void multiply(int64_t panel, int64_t next, Range blocks, Range run, Place<O> to) {
    if (is_transposed_) return most_ > kTileHeight ? multiply_transposed<true>(panel, to) : multiply_transposed<false>(panel, to);
    const bool plain = p_.panels.are_plain();
    if (blocks_ == 1 && !plain) return most_ > kTileHeight ? multiply_unpacking<true>(panel, to) : multiply_unpacking<false>(panel, to);
    const int64_t count = run.end - run.begin;
    const int64_t lines = !plain || count < kFewestToFetch ? 0 : (kStepLines + count - 1) / count;
    const bf16* groups = p_.panels.at(panel);
    const char* ahead = (const char*)(plain ? p_.panels.stored(next) : groups);
    ahead += (blocks.begin - run.begin) * lines * kLine * (p_.inputs / kTileDepth);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      const Range rows = rows_of(block);
      const int64_t height = rows.end - rows.begin;
      most_ > kTileHeight ? multiply<true>(groups, rows, ahead, lines, to) : multiply<false>(groups, rows, ahead, lines, to);
      to.out += height * to.stride;
      if (to.gates) to.gates += height * kWidth;
    }
  }

 private:
  // A panel of the rows of a block, by one or two tiles. Fetches so many lines with every step, and leaves `ahead` behind
  // them.
  template <bool Two>
  void multiply(const bf16* groups, Range rows, const char*& ahead, int64_t lines, const Place<O>& to) {
    const bf16 *x = p_.x + rows.begin * p_.x_stride, *y = Two ? p_.x + (rows.end - height_) * p_.x_stride : x;
    const int64_t x_bytes = p_.x_stride * int64_t(sizeof(bf16)), group_bytes = 2 * kWidth * int64_t(sizeof(bf16));
    const int64_t steps = p_.inputs / kTileDepth, written = (writer_.waiting() + steps - 1) / std::max<int64_t>(steps, 1);
    clear_tiles<0, Two ? 4 : 2>();
    for (int64_t s = 0; s < steps; ++s, x += kTileDepth, y += kTileDepth, groups += kTileDepth * kWidth) {
      for (int64_t i = 0; i < lines; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, 2);
      add_step<Two>(x, y, x_bytes, groups, group_bytes);
      tiles_.keep_storing(s);
      writer_.write(written);
    }
    if (const int64_t rest = p_.inputs % kTileDepth) add_last<Two>(x, y, p_.x_stride, groups, height_, rest);
    writer_.template take<Two>(to, rows.end - rows.begin, height_);
  }

  // A panel of a weight in 8 bits and all rows, at most a block: two steps are unpacked while the unit multiplies those before.
  template <bool Two>
  void multiply_unpacking(int64_t panel, const Place<O>& to) {
    constexpr int64_t kPairs = kTileDepth / 2, kStep = kTileDepth * kWidth;
    static thread_local Buffer<bf16> room;
    bf16* unpacked = room.of(kUnpacked * kStep);
    const bf16 *x = p_.x, *y = Two ? p_.x + (rows_ - height_) * p_.x_stride : x;
    const int64_t x_bytes = p_.x_stride * int64_t(sizeof(bf16)), pairs = groups_of(p_.inputs, 2);
    const int64_t steps = p_.inputs / kTileDepth, written = (writer_.waiting() + steps - 1) / std::max<int64_t>(steps, 1);
    auto unpack = [&](int64_t step) {
      for (int64_t s = step; s < step + 2; ++s)
        p_.panels.unpack_pairs(panel, s * kPairs, std::min(pairs, (s + 1) * kPairs), unpacked + s % kUnpacked * kStep);
    };
    clear_tiles<0, Two ? 4 : 2>();
    unpack(0);
    for (int64_t s = 0; s < steps; ++s, x += kTileDepth, y += kTileDepth) {
      if (s % 2 == 0) unpack(s + 2);
      add_step<Two>(x, y, x_bytes, unpacked + s % kUnpacked * kStep, 2 * kWidth * int64_t(sizeof(bf16)));
      if (rows_ > 1) tiles_.keep_storing(s);
      writer_.write(written);
    }
    if (const int64_t rest = p_.inputs % kTileDepth)
      add_last<Two>(x, y, p_.x_stride, unpacked + steps % kUnpacked * kStep, height_, rest);
    writer_.template take<Two>(to, rows_, height_);
  }

  // A panel of a weight in 4 bits and all rows, at most a block: a step is unpacked while the unit multiplies the one before;
  // with one row two steps, as the unit is slow to begin.
  template <bool Two>
  void multiply_transposed(int64_t panel, const Place<O>& to) {
    const RowTiles split(rows_);
    transposed_.load(p_.x, p_.x_stride, p_.inputs, split);
    TileCodes codes(p_.panels.weight());
    static thread_local Buffer<TileCodes::Tiles> room;
    TileCodes::Tiles* unpacked = room.of(kUnpacked);
    const int64_t pair_bytes = transposed_.pair_bytes(), step_bytes = kTileDepth / 2 * pair_bytes;
    const char *first = (const char*)transposed_.tile(0), *second = Two ? (const char*)transposed_.tile(1) : first;
    const int64_t steps = codes.steps(), written = (writer_.waiting() + steps - 1) / steps;
    const int64_t together = rows_ == 1 ? 2 : 1;
    auto unpack = [&](int64_t begin) {
      for (int64_t s = begin; s < std::min(begin + together, steps); ++s) codes.unpack(panel, s, unpacked[s % kUnpacked]);
    };
    clear_tiles<0, Two ? 4 : 2>();
    unpack(0);
    for (int64_t s = 0; s < steps; ++s, first += step_bytes, second += step_bytes) {
      if ((s & (together - 1)) == 0) unpack(s + together);
      add_transposed_step<Two>((const bf16*)first, (const bf16*)second, pair_bytes, unpacked[s % kUnpacked]);
      if (rows_ > 1) tiles_.keep_storing(s);
      writer_.write(written);
    }
    writer_.template take_transposed<Two>(to, split);
  }

  static constexpr int64_t kUnpacked = 4;  // steps, as a tile's load waits until what it reads has been written

  const Product<bf16, O>& p_;
  const int64_t rows_, blocks_;
  const int64_t most_, height_;  // rows of the largest block, and of a tile
  bool is_transposed_ = false;       // with the weight on the left
  Tiles tiles_;
  TransposedRows transposed_;
  Writer<O> writer_;
};

// A thread's share of p.
template <class O>
void multiply_by_tiles(const Product<bf16, O>& p, int64_t rows, int64_t thread, int64_t threads) {
  if (rows == 0) return;
  const int64_t panels = (p.outputs + kWidth - 1) / kWidth;
  TileProduct product(p, rows);
  product.each(panels, thread, threads, [&](int64_t panel, Range blocks, Range run) {
    const int64_t column = panel * kWidth;
    const Place<O> to{p.out + product.rows_of(blocks.begin).begin * p.out_stride + column, p.out_stride,
                   p.bias ? p.bias + column : nullptr, std::min(kWidth, p.outputs - column), nullptr};
    product.multiply(panel, (panel + 1) % panels, blocks, run, to);
  });
}

// A thread's share of SiLU(gate) * up, [rows, p.outputs / 2], which are the halves of p, of whole panels each. A panel of
// gates stays in the second-level cache for its panel of ups; neither is written to memory.
inline void multiply_gated_by_tiles(const Product<bf16>& p, int64_t rows, bf16* out, int64_t thread, int64_t threads) {
  if (rows == 0) return;
  const int64_t columns = p.outputs / 2, panels = columns / kWidth;
  static thread_local Buffer<bf16> kept;
  bf16* gates = kept.of(rows * kWidth);
  TileProduct product(p, rows);
  product.each(panels, thread, threads, [&](int64_t panel, Range blocks, Range run) {
    const int64_t column = panel * kWidth, row = product.rows_of(blocks.begin).begin;
    const bf16 *bias = p.bias ? p.bias + column : nullptr, *up_bias = p.bias ? bias + columns : nullptr;
    product.multiply(panel, panels + panel, blocks, run, {gates, kWidth, bias, kWidth, nullptr});
    product.multiply(panels + panel, (panel + 1) % panels, blocks, run,
                     {out + row * columns + column, columns, up_bias, kWidth, gates});
  });
}

}  // namespace
}  // namespace lorikeet

#endif
