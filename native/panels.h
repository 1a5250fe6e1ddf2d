// The panels of a packed weight, as the products read them.
//
// A plain weight is stored in panels. A quantised one is stored as codes of 4 or 8 bits, and is unpacked one panel at a time
// into a buffer of the thread: the product that follows is that of a plain weight, to the same bits. The codes of a panel
// are pairs of inputs: for every pair those of all columns side by side, a byte (low nibble first) or two each. Those for
// the tile unit are in another order (tile_codes.h). Scales and offsets lie by panel, then group, then column. See
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
    if constexpr (kTileUnit<T>) return transposed(index, room);
    T* to = room.of((weight_.inputs + 1) * kPanel<T>);
    weight_.bits == 4 ? unpack<4>(index, to) : unpack<8>(index, to);
    return to;
  }

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
  void unpack(int64_t index, T* to) const {
    constexpr int64_t kPairBytes = Bits / 4;  // of a column
    const int64_t pairs = (weight_.inputs + 1) / 2, group_pairs = weight_.group / 2;
    const int64_t groups = (weight_.inputs + weight_.group - 1) / weight_.group;
    const uint8_t* codes = (const uint8_t*)weight_.packed + index * pairs * kPanel<T> * kPairBytes;
    for (int64_t group = 0; group < groups; ++group) {
      F32 scales[kVectorsOfPanel], bases[kVectorsOfPanel];
      for (int v = 0; v < kVectorsOfPanel; ++v) {
        const int64_t at = (index * groups + group) * kPanel<T> + v * kLanes;
        scales[v] = load_scales(weight_.scales, at);
        bases[v] = weight_.offsets ? load_scales(weight_.offsets, at) : mul(scales[v], splat(float(-weight_.zero)));
      }
      const int64_t stop = std::min(pairs, (group + 1) * group_pairs);
      for (int64_t pair = group * group_pairs; pair < stop; ++pair) {
        _mm_prefetch((const char*)codes + kAheadBytes, _MM_HINT_T0);
        for (int v = 0; v < kVectorsOfPanel; ++v, codes += kLanes * kPairBytes) {
          const CodePairs read = Bits == 4 ? load_nibble_pairs(codes) : load_byte_pairs(codes);
          write(to, pair, v, {fma(read.first, scales[v], bases[v]), fma(read.second, scales[v], bases[v])});
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

  static void write(bf16* to, int64_t pair, int vector, CodePairs x) {
    store_pairs(to + (pair * kPanel<T> + vector * kLanes) * 2, x);
  }
  static void write(float* to, int64_t pair, int vector, CodePairs x) {
    store(to + 2 * pair * kPanel<T> + vector * kLanes, x.first);
    store(to + (2 * pair + 1) * kPanel<T> + vector * kLanes, x.second);
  }

  const Weight& weight_;
};

}  // namespace
}  // namespace lorikeet
