// The arithmetic of LoRA in bfloat16 by the tile unit.
//
// The unit wants groups of two on its right side. Rows of A, whose groups lie one after the other, are transposed; rows
// of Bᵀ are interleaved by twos. The left side, rows of x or of the inner sums, is read where it lies: up to 16 rows a
// tile, all tiles of a part of one height, so that the last may overlap the one before it.
#pragma once

#include <cstring>

#include "lora_plan.h"
#include "tile_unit.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

// How a part's rows go through tiles.
struct RowTiles {
  explicit RowTiles(int64_t rows)
      : rows(rows), count((rows + kTileHeight - 1) / kTileHeight), height((rows + count - 1) / count) {}
  int64_t begin(int64_t tile) const { return std::min(tile * height, rows - height); }
  int64_t overlap(int64_t tile) const { return tile * height - begin(tile); }  // rows that the tile before had
  int64_t rows, count, height;
};
static_assert(kPartRows <= 4 * kTileHeight);

// x times a rank tile of A, for all rows of the part; meanwhile the rows of `next` are fetched into the second-level
// cache.
inline void shrink_step(Lora<bf16>& call, const Step<bf16>& step, const Step<bf16>& next, Tiles& tiles) {
  const Part& part = *step.part;
  const RowTiles split(part.rows);
  const bf16* x = call.x + part.start * call.x_stride;
  alignas(64) F32 groups[2][kTileDepth / 2];
  tiles.shape(split.height);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  // One step of inputs: of x, and of A, which begins `words` pairs into its rows.
  auto add_inputs = [&](const bf16* from, int64_t stride, const float* const* a, int64_t words, F32* into) {
    transpose(a, words, into);
    load_tile<7>(into, sizeof into[0]);
    for (int64_t t = 0; t < split.count; ++t) {
      load_tile<6>(from + split.begin(t) * stride, stride * int64_t(sizeof(bf16)));
      switch (t) {
        case 0: add_product<0>(); break;
        case 1: add_product<1>(); break;
        case 2: add_product<2>(); break;
        case 3: add_product<3>(); break;
      }
    }
  };
  const float* a[kTileHeight];
  for (int i = 0; i < kTileHeight; ++i) a[i] = (const float*)step.rows[i];
  int64_t k = 0;
  for (; k + kTileDepth <= call.inputs; k += kTileDepth) {
    for (int i = 0; i < kTileHeight; ++i) _mm_prefetch((const char*)(next.rows[i] + k), _MM_HINT_T1);
    add_inputs(x + k, call.x_stride, a, k / 2, groups[k / kTileDepth % 2]);
  }
  if (const int64_t rest = call.inputs - k) {  // with zeros up to a whole step: what follows in memory is not theirs
    alignas(64) bf16 xs[kPartRows][kTileDepth] = {}, as[kTileHeight][kTileDepth] = {};
    for (int64_t r = 0; r < part.rows; ++r) std::memcpy(xs[r], x + r * call.x_stride + k, size_t(rest) * sizeof(bf16));
    for (int64_t i = 0; i < kTileHeight; ++i) {
      std::memcpy(as[i], step.rows[i] + k, size_t(rest) * sizeof(bf16));
      a[i] = (const float*)as[i];
    }
    add_inputs(xs[0], kTileDepth, a, 0, groups[0]);
  }
  alignas(64) float sums[4][kTileHeight][kTileWidth];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  const bool last = step.rank + step.ranks == part.rank;
  for (int64_t t = 0; t < split.count; ++t)
    for (int64_t r = 0; r < split.height; ++r) {
      bf16* inner = call.inner.data() + part.inner + (split.begin(t) + r) * part.inner_stride + step.rank;
      store(inner, _mm512_maskz_mov_ps(first(int(step.ranks)), load(sums[t][r])));
      if (last && step.rank + kTileWidth < part.inner_stride) store(inner + kTileWidth, zero());
    }
}

// Adds the products of a rank tile to the sums of the part's rows and columns [step.begin, step.end), which lie in
// `sums`, span by span and tile by tile, from the first rank tile to the last, when they are added to `out`.
inline void expand_step(const Lora<bf16>& call, const Step<bf16>& step, const Step<bf16>& next, float* sums,
                        Tiles& tiles) {
  const Part& part = *step.part;
  const RowTiles split(part.rows);
  const bf16* inner = call.inner.data() + part.inner + step.rank;
  const bool first = step.rank == 0, last = step.rank + step.ranks == part.rank;
  const int64_t ahead = next.begin - step.begin, bytes = kSpan * int64_t(sizeof(float));
  alignas(64) bf16 groups[2][kTileDepth / 2][2 * kSpan];  // a pair of ranks: groups of a span's columns
  std::memset((void*)groups, 0, sizeof groups);
  tiles.shape(split.height);
  for (int64_t c = step.begin; c < step.end; c += kSpan) {
    auto& into = groups[(c - step.begin) / kSpan % 2];
    const int n = int(std::min(kSpan, part.outputs - c));
    for (int64_t i = 0; i < step.ranks; i += 2) {
      Pairs odd{_mm512_setzero_si512()};
      if (i + 1 < step.ranks) odd = load_group_n(step.rows[i + 1] + c, n);
      const PairSpan pairs = interleave(load_group_n(step.rows[i] + c, n), odd);
      store_group(into[i / 2], pairs.low);
      store_group(into[i / 2] + kSpan, pairs.high);
    }
    for (const bf16* row : next.rows) _mm_prefetch((const char*)(row + c + ahead), _MM_HINT_T1);
    for (int64_t t = 0; t < split.count; ++t, sums += split.height * kSpan) {
      if (first) {
        _tile_zero(0);
        _tile_zero(1);
      } else {
        load_tile<0>(sums, bytes);
        load_tile<1>(sums + kLanes, bytes);
      }
      load_tile<6>(inner + split.begin(t) * part.inner_stride, part.inner_stride * int64_t(sizeof(bf16)));
      load_tile<7>(into[0], sizeof into[0]);
      add_product<0>();
      load_tile<7>(into[0] + kSpan, sizeof into[0]);
      add_product<1>();
      _tile_stored(0, sums, bytes);
      _tile_stored(1, sums + kLanes, bytes);
      if (!last) continue;
      for (int64_t r = split.overlap(t); r < split.height; ++r) {
        bf16* to = call.out + (part.start + split.begin(t) + r) * call.out_stride + part.column + c;
        const Span before = spread(load_group_n(to, n)), sum = {load(sums + r * kSpan), load(sums + r * kSpan + kLanes)};
        const Pairs after = join({add(before.low, sum.low), add(before.high, sum.high)});
        _mm512_mask_storeu_epi16(to, __mmask32((uint64_t(1) << n) - 1), after.bits);
      }
    }
  }
}

}  // namespace
}  // namespace lorikeet

#endif
