// The arithmetic of LoRA in bfloat16 by the tile unit.
//
// Codes of 8 bits are multiplied as they are, with rows in two limbs of 8 bits each (limbs.h), in whole numbers.
//
// The unit's right operand consists of groups of two. In the shrink A is the left operand as it is, and rows of x are
// transposed; in the expand rows of Bᵀ are interleaved by twos. A part's rows go through tiles of up to 16, all of one
// height, so that the last may overlap the one before it.
#pragma once

#include <cstring>

#include "limbs.h"
#include "lora_plan.h"
#include "transposed_rows.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

static_assert(kPartRows <= 4 * kTileHeight);

// Fetches the rows of a step into the second-level cache, one by one, spread over `turns` calls.
template <class E>
class Fetcher {
 public:
  Fetcher(const Step<bf16, E>& step, int64_t turns)
      : step_(step), column_(step.begin), lines_((step.end - step.begin + kLine - 1) / kLine * step.ranks),
        lines_a_turn_((lines_ + turns - 1) / turns) {}
  void fetch() {
    for (int64_t i = std::min(lines_, lines_a_turn_); i > 0; --i, --lines_) {
      __builtin_prefetch(step_.rows[row_] + column_, 0, 2);
      column_ += kLine;
      if (column_ >= step_.end) column_ = step_.begin, ++row_;
    }
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(E);
  const Step<bf16, E>& step_;
  int64_t row_ = 0, column_, lines_, lines_a_turn_;
};

// The operands that a thread makes of rows and keeps from step to step of a call.
struct Operands {
  TransposedRows transposed;
  Limbs limbs;  // of the rows of x, then of inner rows
};

// Whether a tile cannot be loaded from rows as they lie: they must be equally far from each other, but a pool's pieces end
// where they do.
template <class E>
bool lie_apart(const Step<bf16, E>& step, int64_t inputs) {
  bool apart = false;
  for (int64_t i = 1; i < step.ranks; ++i) apart |= step.rows[i] != step.rows[0] + i * inputs;
  return apart;
}

// A rank tile of A times a part's rows in Count tiles; meanwhile the rows of `next` are fetched.
template <int Count>
void shrink_tile(Lora<bf16, bf16>& call, const Step<bf16, bf16>& step, const Step<bf16, bf16>& next,
                 const TransposedRows& transposed, const RowTiles& split) {
  const Part& part = *step.part;
  const bool apart = lie_apart(step, call.inputs);
  const int64_t a_bytes = call.inputs * int64_t(sizeof(bf16)), pair_bytes = transposed.pair_bytes();
  Fetcher ahead(next, (call.inputs + kTileDepth - 1) / kTileDepth);
  const char* x[Count];
  for (int t = 0; t < Count; ++t) x[t] = (const char*)transposed.tile(t);
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
        for (int64_t i = 0; i < step.ranks; ++i) store_group(rows[i], load_group(step.rows[i] + k));
      else
        for (int64_t i = 0; i < step.ranks; ++i) store_group(rows[i], load_group_n(step.rows[i] + k, inputs));
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
  for (int64_t t = 0; t < Count; ++t) {
    const float* ranks[kTileHeight];
    F32 rows[kTileHeight];
    for (int64_t i = 0; i < kTileHeight; ++i) ranks[i] = sums[t][i < step.ranks ? i : 0];
    transpose(ranks, 0, rows);
    for (int64_t r = 0; r < split.height; ++r) {
      bf16* inner = call.inner.data() + part.inner + (split.begin(t) + r) * part.inner_stride + step.rank;
      store(inner, _mm512_maskz_mov_ps(first(int(step.ranks)), rows[r]));
      if (last && step.rank + kTileWidth < part.inner_stride) store(inner + kTileWidth, zero());
    }
  }
}

inline void shrink_step(Lora<bf16, bf16>& call, const Step<bf16, bf16>& step, const Step<bf16, bf16>& next,
                        Tiles& tiles, Operands& operands) {
  TransposedRows& transposed = operands.transposed;
  const RowTiles split(step.part->rows);
  transposed.load(call.x + step.part->start * call.x_stride, call.x_stride, call.inputs, split);
  tiles.shape(step.ranks);
  switch (split.count) {
    case 1: return shrink_tile<1>(call, step, next, transposed, split);
    case 2: return shrink_tile<2>(call, step, next, transposed, split);
    case 3: return shrink_tile<3>(call, step, next, transposed, split);
    case 4: return shrink_tile<4>(call, step, next, transposed, split);
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
inline void expand_step(const Lora<bf16, bf16>& call, const Step<bf16, bf16>& step, const Step<bf16, bf16>& next,
                        float* sums, Tiles& tiles, Operands&) {
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
      if (i + 1 < step.ranks) odd = load_group_n(step.rows[i + 1] + c, n);
      const PairSpan both = interleave(load_group_n(step.rows[i] + c, n), odd);
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

// The same two steps of codes. A row of x or of inner is two of the unit's rows, its limbs, which are added at the end.
constexpr int64_t kCodesDepth = 2 * kTileDepth;  // inputs or ranks that a multiplication adds up
constexpr int64_t kLimbRows = kTileHeight / 2;   // rows of a tile

inline F32 limb_sums(const float* high, const float* low) {  // whole numbers in the place of floats
  const F32 wide = _mm512_cvtepi32_ps(_mm512_loadu_si512(high));
  return fma(wide, splat(float(Limbs::kBase)), _mm512_cvtepi32_ps(_mm512_loadu_si512(low)));
}

// A rank tile of A times the rows of Count tiles from a first one on.
template <int Count>
void shrink_codes(Lora<bf16, int8_t>& call, const Step<bf16, int8_t>& step, const Operands& operands,
                  const RowTiles& split, int64_t first_tile, Fetcher<int8_t>* ahead) {
  const Part& part = *step.part;
  const bool apart = lie_apart(step, call.inputs);
  const int64_t group_bytes = operands.transposed.pair_bytes();
  const char* x[Count];
  for (int t = 0; t < Count; ++t) x[t] = (const char*)operands.transposed.tile(first_tile + t);
  alignas(64) int8_t copies[4][kTileHeight][kCodesDepth];  // several, as a tile's load waits until it has been written
  clear_tiles<0, Count>();
  for (int64_t k = 0; k < call.inputs; k += kCodesDepth) {
    if (ahead) ahead->fetch();
    if (!apart && k + kCodesDepth <= call.inputs) {
      load_tile<6>(step.rows[0] + k, call.inputs);
    } else {
      auto& rows = copies[k / kCodesDepth % 4];
      const __mmask64 real = ~uint64_t(0) >> (kCodesDepth - std::min(kCodesDepth, call.inputs - k));
      for (int64_t i = 0; i < step.ranks; ++i)
        _mm512_store_si512(rows[i], _mm512_maskz_loadu_epi8(real, step.rows[i] + k));
      load_tile<6>(rows, sizeof rows[0]);
    }
    load_tile<7>(x[0] + k / 4 * group_bytes, group_bytes);
    add_whole_product<0>();
    if constexpr (Count > 1) {
      load_tile<7>(x[1] + k / 4 * group_bytes, group_bytes);
      add_whole_product<1>();
    }
    if constexpr (Count > 2) {
      load_tile<7>(x[2] + k / 4 * group_bytes, group_bytes);
      add_whole_product<2>();
    }
    if constexpr (Count > 3) {
      load_tile<7>(x[3] + k / 4 * group_bytes, group_bytes);
      add_whole_product<3>();
    }
  }
  alignas(64) float sums[Count][kTileHeight][kTileWidth], scales[kTileHeight];
  store_tiles<0, Count>(sums);
  const bool last = step.rank + step.ranks == part.rank;
  store(scales, splat(1.0f));
  step.scale(scales);
  for (int64_t t = 0; t < Count; ++t) {
    const float* ranks[kTileHeight];
    alignas(64) F32 limbs[kTileHeight];
    for (int64_t i = 0; i < kTileHeight; ++i) ranks[i] = sums[t][i < step.ranks ? i : 0];
    transpose(ranks, 0, limbs);
    for (int64_t r = 0; r < split.height; ++r) {
      const int64_t row = split.begin(first_tile + t) + r;
      bf16* inner = call.inner.data() + part.inner + row * part.inner_stride + step.rank;
      const F32 sum = mul(limb_sums((float*)&limbs[2 * r], (float*)&limbs[2 * r + 1]), splat(operands.limbs.scale(row)));
      store(inner, _mm512_maskz_mul_ps(first(int(step.ranks)), sum, load(scales)));
      if (last && step.rank + kTileWidth < part.inner_stride) store(inner + kTileWidth, zero());
    }
  }
}

inline void shrink_step(Lora<bf16, int8_t>& call, const Step<bf16, int8_t>& step, const Step<bf16, int8_t>& next,
                        Tiles& tiles, Operands& operands) {
  const Part& part = *step.part;
  const RowTiles split(part.rows, kLimbRows);
  Limbs& limbs = operands.limbs;
  if (limbs.take(call.x + part.start * call.x_stride, call.x_stride, part.rows, call.inputs))
    operands.transposed.load(limbs);
  tiles.shape(step.ranks);
  Fetcher ahead(next, (call.inputs + kCodesDepth - 1) / kCodesDepth);
  for (int64_t tile = 0; tile < split.count; tile += 4) {
    Fetcher<int8_t>* fetcher = tile ? nullptr : &ahead;
    switch (std::min<int64_t>(4, split.count - tile)) {
      case 1: shrink_codes<1>(call, step, operands, split, tile, fetcher); break;
      case 2: shrink_codes<2>(call, step, operands, split, tile, fetcher); break;
      case 3: shrink_codes<3>(call, step, operands, split, tile, fetcher); break;
      case 4: shrink_codes<4>(call, step, operands, split, tile, fetcher); break;
    }
  }
}

// Interleaves a span of four rows of codes: `to` are 16 columns' groups of four, `to` + 64 those of the next 16.
inline void store_code_groups(int8_t* to, const __m256i* rows) {
  const __m256i low = _mm256_unpacklo_epi8(rows[0], rows[1]), high = _mm256_unpackhi_epi8(rows[0], rows[1]);
  const __m256i other_low = _mm256_unpacklo_epi8(rows[2], rows[3]), other_high = _mm256_unpackhi_epi8(rows[2], rows[3]);
  const __m256i groups[4] = {_mm256_unpacklo_epi16(low, other_low), _mm256_unpackhi_epi16(low, other_low),
                             _mm256_unpacklo_epi16(high, other_high), _mm256_unpackhi_epi16(high, other_high)};
  for (int64_t i = 0; i < 4; ++i) {
    _mm_store_si128((__m128i*)(to + 16 * i), _mm256_castsi256_si128(groups[i]));
    _mm_store_si128((__m128i*)(to + 64 + 16 * i), _mm256_extracti128_si256(groups[i], 1));
  }
}

inline void expand_step(const Lora<bf16, int8_t>& call, const Step<bf16, int8_t>& step, const Step<bf16, int8_t>& next,
                        float* sums, Tiles& tiles, Operands& operands) {
  const Part& part = *step.part;
  const RowTiles split(part.rows, kLimbRows);
  Limbs& limbs = operands.limbs;
  limbs.take(call.inner.data() + part.inner, part.inner_stride, part.rows, part.rank);
  const bool first = step.rank == 0, last = step.rank + step.ranks == part.rank;
  const int64_t bytes = kSpan * int64_t(sizeof(float)), height = 2 * split.height;
  Fetcher ahead(next, (step.end - step.begin + kSpan - 1) / kSpan);
  // Groups of four ranks; zeros from `filled` on, which the thread keeps for its next step.
  alignas(64) static thread_local int8_t groups[2][kTileHeight][4 * kSpan];
  static thread_local int64_t filled = 0;
  const int64_t count = (step.ranks + 3) / 4;
  if (count < filled)
    for (auto& into : groups) std::memset(into[count], 0, size_t(filled - count) * sizeof into[0]);
  filled = count;
  tiles.shape(height);
  for (int64_t c = step.begin; c < step.end; c += kSpan) {
    auto& into = groups[(c - step.begin) / kSpan % 2];
    const int n = int(std::min(kSpan, part.outputs - c));
    const __mmask32 real = __mmask32(~uint32_t(0) >> (kSpan - n));
    for (int64_t i = 0; i < step.ranks; i += 4) {
      __m256i rows[4];
      for (int64_t j = 0; j < 4; ++j)
        rows[j] = i + j < step.ranks ? _mm256_maskz_loadu_epi8(real, step.rows[i + j] + c) : _mm256_setzero_si256();
      store_code_groups(into[i / 4], rows);
    }
    ahead.fetch();
    for (int64_t t = 0; t < split.count; ++t, sums += height * kSpan) {
      if (first) {
        clear_tiles<0, 2>();
      } else {
        load_tile<0>(sums, bytes);
        load_tile<1>(sums + kLanes, bytes);
      }
      load_tile<6>(limbs.row(split.begin(t)) + step.rank, limbs.stride());
      load_tile<7>(into[0], sizeof into[0]);
      add_whole_product<0>();
      load_tile<7>(into[0] + 64, sizeof into[0]);
      add_whole_product<1>();
      _tile_stored(0, sums, bytes);
      _tile_stored(1, sums + kLanes, bytes);
      if (!last) continue;
      for (int64_t r = split.overlap(t); r < split.height; ++r) {
        const float *high = sums + 2 * r * kSpan, *low = high + kSpan;
        const F32 scale = splat(limbs.scale(split.begin(t) + r));
        bf16* out = call.out + (part.start + split.begin(t) + r) * call.out_stride + part.column + c;
        for (int v = 0; v < 2; ++v) {
          const int columns = std::clamp(n - v * kLanes, 0, kLanes);
          const F32 sum = mul(limb_sums(high + v * kLanes, low + v * kLanes), scale);
          store_n(out + v * kLanes, add(load_n(out + v * kLanes, columns), sum), columns);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lorikeet

#else

namespace lorikeet {
struct Operands {};
}  // namespace lorikeet

#endif
