// The arithmetic of LoRA in bfloat16 by the tile unit.
//
// The unit's right operand consists of groups of two. In the shrink A is the left operand as it is, and rows of x are
// transposed; in the expand rows of Bᵀ are interleaved by twos. A part's rows go through tiles of up to 16, all of one
// height, so that the last may overlap the one before it.
#pragma once

#include <cstring>

#include "lora_plan.h"
#include "turned_rows.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

static_assert(kPartRows <= 4 * kTileHeight);

// Fetches what a step will read into the second-level cache, row by row, spread over `turns` calls.
template <class E>
class Fetcher {
 public:
  Fetcher(const Step<bf16, E>& step, int64_t turns)
      : step_(step), column_(step.begin), lines_((step.end - step.begin + kLine - 1) / kLine * step.ranks),
        lines_a_turn_((lines_ + turns - 1) / turns) {}
  void fetch() {
    for (int64_t i = std::min(lines_, lines_a_turn_); i > 0; --i, --lines_) {
      _mm_prefetch((const char*)(step_.rows[row_] + column_), _MM_HINT_T1);
      column_ += kLine;
      if (column_ >= step_.end) column_ = step_.begin, ++row_;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(E);
  const Step<bf16, E>& step_;
  int64_t row_ = 0, column_, lines_, lines_a_turn_;
};

// A rank tile of A, where it lies or from codes, times a part's rows in Count tiles; meanwhile the rows of `next` are fetched.
template <int Count, class E>
void shrink_tile(Lora<bf16, E>& call, const Step<bf16, E>& step, const Step<bf16, E>& next, const TurnedRows& turned,
                 const RowTiles& split) {
  const Part& part = *step.part;
  bool apart = kAreCodes<E>;  // a tile's rows must be equally far from each other, but a pool's pieces end where they do
  for (int64_t i = 1; i < step.ranks; ++i) apart |= step.rows[i] != step.rows[0] + i * call.inputs;
  const int64_t a_bytes = call.inputs * int64_t(sizeof(bf16)), pair_bytes = turned.pair_bytes();
  Fetcher ahead(next, (call.inputs + kTileDepth - 1) / kTileDepth);
  const char* x[Count];
  for (int t = 0; t < Count; ++t) x[t] = (const char*)turned.tile(t);
  alignas(64) bf16 copies[4][kTileHeight][kTileDepth];  // several, as a tile's load waits until it has been written
  clear_tiles<0, Count>();
  for (int64_t k = 0; k < call.inputs; k += kTileDepth) {
    ahead.fetch();
    if (!apart && k + kTileDepth <= call.inputs) {
      load_tile<6>(step.rows[0] + k, a_bytes);
    } else {
      auto& rows = copies[k / kTileDepth % 4];
      const int inputs = int(std::min(kTileDepth, call.inputs - k));
      if (inputs == kTileDepth)
        for (int64_t i = 0; i < step.ranks; ++i) store_group(rows[i], load_stored<bf16>(step.rows[i] + k));
      else
        for (int64_t i = 0; i < step.ranks; ++i) store_group(rows[i], load_stored_n<bf16>(step.rows[i] + k, inputs));
      load_tile<6>(rows, sizeof rows[0]);
    }
    load_tile<7>(x[0] + k / 2 * pair_bytes, pair_bytes);
    add_product<0>();
    if constexpr (Count > 1) {
      load_tile<7>(x[1] + k / 2 * pair_bytes, pair_bytes);
      add_product<1>();
    }
    if constexpr (Count > 2) {
      load_tile<7>(x[2] + k / 2 * pair_bytes, pair_bytes);
      add_product<2>();
    }
    if constexpr (Count > 3) {
      load_tile<7>(x[3] + k / 2 * pair_bytes, pair_bytes);
      add_product<3>();
    }
  }
  alignas(64) float sums[Count][kTileHeight][kTileWidth];
  store_tiles<0, Count>(sums);
  const bool last = step.rank + step.ranks == part.rank;
  F32 scales = splat(1.0f);
  if constexpr (kAreCodes<E>) {
    alignas(64) float of_ranks[kTileHeight];
    store(of_ranks, scales);
    step.scale(of_ranks);
    scales = load(of_ranks);
  }
  for (int64_t t = 0; t < Count; ++t) {
    const float* ranks[kTileHeight];
    F32 rows[kTileHeight];
    for (int64_t i = 0; i < kTileHeight; ++i) ranks[i] = sums[t][i < step.ranks ? i : 0];
    transpose(ranks, 0, rows);
    for (int64_t r = 0; r < split.height; ++r) {
      bf16* inner = call.inner.data() + part.inner + (split.begin(t) + r) * part.inner_stride + step.rank;
      store(inner, _mm512_maskz_mul_ps(first(int(step.ranks)), rows[r], scales));
      if (last && step.rank + kTileWidth < part.inner_stride) store(inner + kTileWidth, zero());
    }
  }
}

template <class E>
void shrink_step(Lora<bf16, E>& call, const Step<bf16, E>& step, const Step<bf16, E>& next, Tiles& tiles,
                 TurnedRows& turned) {
  const RowTiles split(step.part->rows);
  turned.turn(call.x + step.part->start * call.x_stride, call.x_stride, call.inputs, split);
  tiles.shape(step.ranks);
  switch (split.count) {
    case 1: return shrink_tile<1>(call, step, next, turned, split);
    case 2: return shrink_tile<2>(call, step, next, turned, split);
    case 3: return shrink_tile<3>(call, step, next, turned, split);
    case 4: return shrink_tile<4>(call, step, next, turned, split);
  }
}

// Adds a row's sums of a span to n columns of `out`.
inline void add_span(Span sum, bf16* out, int n) {
  const Span before = spread(load_group_n(out, n));
  const Pairs after = join({add(before.low, sum.low), add(before.high, sum.high)});
  _mm512_mask_storeu_epi16(out, __mmask32((uint64_t(1) << n) - 1), after.bits);
}

// Adds the products of a rank tile to the sums of the part's rows and columns [step.begin, step.end), which lie in
// `sums`, span by span and tile by tile, from the first rank tile to the last, when they are added to `out`.
template <class E>
void expand_step(const Lora<bf16, E>& call, const Step<bf16, E>& step, const Step<bf16, E>& next, float* sums,
                 Tiles& tiles) {
  const Part& part = *step.part;
  const RowTiles split(part.rows);
  const bf16* inner = call.inner.data() + part.inner + step.rank;
  const bool first = step.rank == 0, last = step.rank + step.ranks == part.rank;
  const int64_t bytes = kSpan * int64_t(sizeof(float));
  Fetcher ahead(next, (step.end - step.begin + kSpan - 1) / kSpan);
  // A pair of ranks: groups of a span's columns; zeros from `filled` on, which the thread keeps for its next step.
  alignas(64) static thread_local bf16 groups[2][kTileDepth / 2][2 * kSpan];
  static thread_local int64_t filled = 0;
  const int64_t pairs = (step.ranks + 1) / 2;
  if (pairs < filled)
    for (auto& into : groups) std::memset((void*)into[pairs], 0, size_t(filled - pairs) * sizeof into[0]);
  filled = pairs;
  tiles.shape(split.height);
  for (int64_t c = step.begin; c < step.end; c += kSpan) {
    auto& into = groups[(c - step.begin) / kSpan % 2];
    const int n = int(std::min(kSpan, part.outputs - c));
    for (int64_t i = 0; i < step.ranks; i += 2) {
      Pairs odd{_mm512_setzero_si512()};
      if (i + 1 < step.ranks) odd = load_stored_n<bf16>(step.rows[i + 1] + c, n);
      const PairSpan both = interleave(load_stored_n<bf16>(step.rows[i] + c, n), odd);
      store_group(into[i / 2], both.low);
      store_group(into[i / 2] + kSpan, both.high);
    }
    ahead.fetch();
    for (int64_t t = 0; t < split.count; ++t, sums += split.height * kSpan) {
      if (first) {
        clear_tiles<0, 2>();
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
      for (int64_t r = split.overlap(t); r < split.height; ++r)
        add_span({load(sums + r * kSpan), load(sums + r * kSpan + kLanes)},
                 call.out + (part.start + split.begin(t) + r) * call.out_stride + part.column + c, n);
    }
  }
}

}  // namespace
}  // namespace lorikeet

#else

namespace lorikeet {
struct TurnedRows {};
}  // namespace lorikeet

#endif
