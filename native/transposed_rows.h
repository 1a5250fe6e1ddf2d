// Rows of inputs as the right side of the tile unit, whose rows are pairs of inputs.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "limbs.h"
#include "simd.h"
#include "tile_unit.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

// Divides rows among tiles of one height; the last tile may overlap the previous one.
struct RowTiles {
  explicit RowTiles(int64_t rows, int64_t most = kTileHeight)
      : rows(rows), count((rows + most - 1) / most), height((rows + count - 1) / count) {}
  int64_t begin(int64_t tile) const { return std::min(tile * height, rows - height); }
  int64_t overlap(int64_t tile) const { return tile * height - begin(tile); }  // rows that the tile before had
  int64_t rows, count, height;
};

// Rows of inputs as right operand: for every tile of rows and pair of inputs, 16 rows' pairs side by side. A single row is
// used as it is: what follows a pair counts as other rows, whose products are not used. Neighbouring parts of LoRA have the
// same rows, so these are kept until others are requested; inputs beyond the last are zero.
class TransposedRows {
 public:
  // Makes tile() those of split.rows rows from x on.
  void load(const bf16* x, int64_t stride, int64_t inputs, const RowTiles& split) {
    if (x == x_) return;
    x_ = x;
    const int64_t steps = (inputs + kTileDepth - 1) / kTileDepth;
    lines_ = steps * kTileHeight;
    pair_bytes_ = split.rows == 1 ? 4 : 64;
    if (int64_t(kept_.size()) < split.count * lines_) kept_.resize(size_t(split.count * lines_));
    if (split.rows == 1) {
      kept_[size_t(steps - 1)] = {};
      kept_[size_t(steps)] = {};
      std::memcpy(kept_[0].pairs, x, size_t(inputs) * sizeof(bf16));
      return;
    }
    for (int64_t t = 0; t < split.count; ++t) {
      const float* rows[kTileHeight];  // beyond the last it is repeated
      for (int64_t r = 0; r < kTileHeight; ++r)
        rows[r] = (const float*)(x + (split.begin(t) + std::min(r, split.height - 1)) * stride);
      F32* to = (F32*)kept_[size_t(t * lines_)].pairs;
      int64_t pair = 0;
      for (; 2 * pair + kTileDepth <= inputs; pair += kLanes) transpose(rows, pair, to + pair);
      if (const int64_t rest = inputs - 2 * pair) {
        alignas(64) bf16 last[kTileHeight][kTileDepth] = {};
        for (int64_t r = 0; r < kTileHeight; ++r) {
          std::memcpy(last[r], (const bf16*)rows[r] + 2 * pair, size_t(rest) * sizeof(bf16));
          rows[r] = (const float*)last[r];
        }
        transpose(rows, 0, to + pair);
      }
    }
  }
  // Makes tile() those of rows in limbs, whose groups are four bytes: a row is two, one after the other. Of a single row, too,
  // what follows its groups counts as others.
  void load(const Limbs& limbs) {
    const RowTiles of_rows(limbs.rows(), kTileHeight / 2);
    const int64_t steps = limbs.stride() / int64_t(sizeof(Line));
    lines_ = steps * kTileHeight;
    pair_bytes_ = limbs.rows() == 1 ? 8 : 64;
    if (int64_t(kept_.size()) < of_rows.count * lines_) kept_.resize(size_t(of_rows.count * lines_));
    if (limbs.rows() == 1) {
      const __m512i low_half = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      const __m512i high_half = _mm512_add_epi32(low_half, _mm512_set1_epi32(8));
      const int8_t *high = limbs.row(0), *low = high + limbs.stride();
      for (int64_t s = 0; s < steps; ++s) {
        const __m512i a = _mm512_loadu_si512(high + s * 64), b = _mm512_loadu_si512(low + s * 64);
        _mm512_storeu_si512(kept_[size_t(2 * s)].pairs, _mm512_permutex2var_epi32(a, low_half, b));
        _mm512_storeu_si512(kept_[size_t(2 * s + 1)].pairs, _mm512_permutex2var_epi32(a, high_half, b));
      }
      return;
    }
    for (int64_t t = 0; t < of_rows.count; ++t) {
      const float* rows[kTileHeight];  // beyond the last it is repeated
      for (int64_t r = 0; r < kTileHeight; ++r)
        rows[r] = (const float*)(limbs.row(of_rows.begin(t)) + std::min(r, 2 * of_rows.height - 1) * limbs.stride());
      F32* to = (F32*)kept_[size_t(t * lines_)].pairs;
      for (int64_t group = 0; group < lines_; group += kLanes) transpose(rows, group, to + group);
    }
  }

  const bf16* tile(int64_t t) const { return kept_[size_t(t * lines_)].pairs; }
  int64_t pair_bytes() const { return pair_bytes_; }  // from one pair to the next

 private:
  struct alignas(64) Line {
    bf16 pairs[kTileDepth];
  };
  // A thread keeps the memory: a call in the hot path allocates nothing.
  static std::vector<Line>& kept() {
    static thread_local std::vector<Line> lines;
    return lines;
  }
  std::vector<Line>& kept_ = kept();
  const bf16* x_ = nullptr;
  int64_t lines_ = 0, pair_bytes_ = 0;
};

}  // namespace
}  // namespace lorikeet

#endif
