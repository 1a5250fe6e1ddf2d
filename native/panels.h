// The panels of a packed weight, as the products read them.
//
// A plain weight is stored in panels. A quantised one is stored as codes of 4 or 8 bits, and is unpacked one panel at a time
// into a buffer of the thread: the product that follows is that of a plain weight, to the same bits. The codes of a panel
// are pairs of inputs: for every pair those of all columns side by side, a byte (low nibble first) or two each. Those of 4
// bits for the tile unit are in another order (tile_codes.h). Scales and offsets lie by panel, then group, then column. See
// docs/decisions/quantised-weights.md.
#pragma once

#include "buffer.h"
#include "simd.h"
#include "tile_codes.h"
#include "tile_unit.h"
#include "weight.h"

namespace lorikeet {
namespace {

template <class T>
constexpr int64_t kPanel = kTileUnit<T> ? 2 * kTileWidth : 48;

inline int64_t groups_of(int64_t inputs, int group) { return (inputs + group - 1) / group; }

// code * scale + base, of a vector of columns.
template <bool Doubled>
struct Numbers {
  F32 scales, bases;
};
#if defined(__AVX512BF16__)
constexpr bool kDoublesColumns = true;
// With each column twice, as in pairs of bytes.
template <>
struct Numbers<true> {
  Numbers() = default;
  Numbers(F32 s, F32 b) : scales{low(s), high(s)}, bases{low(b), high(b)} {}
  Pairs of_bytes(const uint8_t* codes) const {
    return {(__m512i)_mm512_cvtne2ps_pbh(of_half(codes + kLanes, 1), of_half(codes, 0))};
  }

  F32 scales[2], bases[2];  // of the first columns and the last

 private:
  F32 of_half(const uint8_t* codes, int half) const {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    return fma(_mm512_cvtepi32_ps(wide), scales[half], bases[half]);
  }
  static F32 low(F32 x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x);
  }
  static F32 high(F32 x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15), x);
  }
};
#else
constexpr bool kDoublesColumns = false;
#endif

template <class T>
class Panels {
 public:
  explicit Panels(const Weight& weight) : weight_(weight) {}

  bool are_plain() const { return weight_.bits == 0; }

  int64_t elements() const { return groups_of(weight_.inputs, kGroup<T>) * kGroup<T> * kPanel<T>; }

  // One panel; of a quantised weight valid until the thread's next call.
  const T* at(int64_t index) const {
    if (are_plain()) return stored(index);
    static thread_local Buffer<T> room;
    if constexpr (kTileUnit<T>)
      if (weight_.bits == 4) return transposed(index, room);
    const int64_t pairs = groups_of(weight_.inputs, 2);
    T* to = room.of(2 * pairs * kPanel<T>);
    weight_.bits == 4 ? unpack<4>(index, 0, pairs, to) : unpack<8>(index, 0, pairs, to);
    return to;
  }

  // Unpacks some pairs of inputs of a panel in 8 bits.
  void unpack_pairs(int64_t index, int64_t begin, int64_t end, T* to) const { unpack<8>(index, begin, end, to); }

  // Of a plain weight: where a panel lies.
  const T* stored(int64_t index) const { return (const T*)weight_.packed + index * elements(); }

  const Weight& weight() const { return weight_; }

 private:
  static constexpr int kVectorsOfPanel = int(kPanel<T>) / kLanes;
  static constexpr int64_t kAheadBytes = 2048;  // of codes that are prefetched, in the next panel at the end of one

  F32 load_scales(const void* values, int64_t at) const {
    return weight_.scale_bytes == 2 ? load_halves((const uint16_t*)values + at) : load((const float*)values + at);
  }

  template <int Bits>
  void unpack(int64_t index, int64_t begin, int64_t end, T* to) const {
    constexpr int64_t kPairBytes = Bits / 4;  // of a column
    constexpr bool kDoubled = Bits == 8 && sizeof(T) == 2 && kDoublesColumns;
    const int64_t pairs = groups_of(weight_.inputs, 2), group_pairs = weight_.group / 2;
    const int64_t groups = (weight_.inputs + weight_.group - 1) / weight_.group;
    const uint8_t* codes = (const uint8_t*)weight_.packed + (index * pairs + begin) * kPanel<T> * kPairBytes;
    for (int64_t pair = begin; pair < end;) {
      const int64_t group = pair / group_pairs, stop = std::min(end, (group + 1) * group_pairs);
      Numbers<kDoubled> numbers[kVectorsOfPanel];
      for (int v = 0; v < kVectorsOfPanel; ++v) {
        const int64_t at = (index * groups + group) * kPanel<T> + v * kLanes;
        const F32 scales = load_scales(weight_.scales, at);
        numbers[v] = {scales, weight_.offsets ? load_scales(weight_.offsets, at) : mul(scales, splat(float(-weight_.zero)))};
      }
      for (; pair < stop; ++pair, to += 2 * kPanel<T>) {
        __builtin_prefetch(codes + kAheadBytes, 0, 3);
        for (int v = 0; v < kVectorsOfPanel; ++v, codes += kLanes * kPairBytes) {
          if constexpr (kDoubled) {
            store_group(to + v * kLanes * 2, numbers[v].of_bytes(codes));
          } else {
            const CodePairs read = Bits == 4 ? load_nibble_pairs(codes) : load_byte_pairs(codes);
            write(to, v, {fma(read.first, numbers[v].scales, numbers[v].bases), fma(read.second, numbers[v].scales, numbers[v].bases)});
          }
        }
      }
    }
  }

#if defined(__AMX_BF16__)
  // A panel of a quantised weight, from the tiles of its codes.
  bf16* transposed(int64_t index, Buffer<bf16>& room) const {
    static_assert(kPanel<bf16> == TileCodes::kOutputs);
    TileCodes codes(weight_);
    bf16* to = room.of(codes.steps() * kTileDepth * kPanel<bf16>);
    alignas(64) TileCodes::Tiles tiles;
    for (int64_t step = 0; step < codes.steps(); ++step, to += kTileDepth * kPanel<bf16>) {
      codes.unpack(index, step, tiles);
      for (int64_t half = 0; half < 2; ++half) {
        const float* rows[kTileHeight];
        F32 pairs[kTileHeight];
        for (int64_t i = 0; i < kTileHeight; ++i) rows[i] = (const float*)tiles[half * kTileHeight + i];
        transpose(rows, 0, pairs);
        for (int64_t i = 0; i < kTileHeight; ++i) store_group(to + (2 * i + half) * kTileDepth, as_pairs(pairs[i]));
      }
    }
    return room.of(0);
  }
#endif

  static void write(bf16* to, int vector, CodePairs x) { store_pairs(to + vector * kLanes * 2, x); }
  static void write(float* to, int vector, CodePairs x) {
    store(to + vector * kLanes, x.first);
    store(to + kPanel<T> + vector * kLanes, x.second);
  }

  const Weight& weight_;
};

}  // namespace
}  // namespace lorikeet
