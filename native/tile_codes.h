// Unpacks codes of 4 bits into tiles of bfloat16, for the left side of the tile unit.
//
// A tile is 16 outputs of 32 inputs. Four rows share 32 words of 16 bits, one row in each nibble, the first lowest: so the 16
// numbers that a code may mean in a row are computed once, and one instruction looks 32 of them up (as bytes, since one that
// looks up words takes twice as long). Tiles lie by panel (two of them), then step of inputs; inputs that are no whole step
// are padded. Scales and offsets lie by panel, then group, then output.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"
#include "tile_unit.h"
#include "weight.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

class TileCodes {
 public:
  static constexpr int64_t kOutputs = 2 * kTileHeight;  // of a panel
  using Tiles = bf16[kOutputs][kTileDepth];             // the two of a step

  explicit TileCodes(const Weight& weight)
      : weight_(weight), steps_((weight.inputs + kTileDepth - 1) / kTileDepth),
        groups_((weight.inputs + weight.group - 1) / weight.group) {}

  int64_t steps() const { return steps_; }

  // Steps of a panel are unpacked in their order, from the first one on.
  void unpack(int64_t panel, int64_t step, Tiles& to) {
    if (step % kSteps == 0) read(panel, step);
    const uint8_t* codes = (const uint8_t*)weight_.packed + (panel * steps_ + step) * kBytes;
    const Numbers* of = numbers_[step % kSteps];
    if (weight_.group % kHalf)
      unpack_any(codes, panel, step, to);
    else if (weight_.group % kTileDepth)
      unpack<true>(codes, of[0], of[1], to);
    else
      unpack<false>(codes, of[0], of[0], to);
  }

 private:
  static constexpr int64_t kHalf = kTileDepth / 2;
  static constexpr int64_t kBytes = kOutputs * kHalf;  // of a step
  static constexpr int64_t kAheadBytes = 4096;  // of codes that are prefetched
  static constexpr int64_t kSteps = 8;  // whose scales are read at once, since just written ones are slow to read again
  // code * scale + base, by output.
  struct alignas(64) Numbers {
    float scales[kOutputs], bases[kOutputs];
  };

  int64_t group_of(int64_t input) const { return std::min(input / weight_.group, groups_ - 1); }

  F32 load_scales(const void* values, int64_t at) const {
    return weight_.scale_bytes == 2 ? load_halves((const uint16_t*)values + at) : load((const float*)values + at);
  }

  // The numbers of the next steps, and of their halves if these may be of two groups.
  void read(int64_t panel, int64_t step) {
    if (weight_.group % kHalf) return;
    const int64_t halves = weight_.group % kTileDepth ? 2 : 1;
    for (int64_t s = 0; s < std::min(kSteps, steps_ - step); ++s)
      for (int64_t half = 0; half < halves; ++half)
        read(panel, group_of((step + s) * kTileDepth + half * kHalf), numbers_[s][half]);
  }

  void read(int64_t panel, int64_t group, Numbers& to) const {
    const int64_t at = (panel * groups_ + group) * kOutputs;
    __builtin_prefetch((const char*)weight_.scales + (at + 2 * kSteps * kOutputs) * weight_.scale_bytes, 0, 3);
    for (int64_t i = 0; i < kOutputs; i += kLanes) {
      const F32 scales = load_scales(weight_.scales, at + i);
      store(to.scales + i, scales);
      store(to.bases + i,
            weight_.offsets ? load_scales(weight_.offsets, at + i) : mul(scales, splat(float(-weight_.zero))));
    }
  }

  // Of one group, or of the halves of a step that are of two.
  template <bool Two>
  static void unpack(const uint8_t* codes, const Numbers& low, const Numbers& high, Tiles& to) {
    const F32 all = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i code = _mm512_set1_epi16(0x1e1e), lower = _mm512_set1_epi16(0x0100), upper = _mm512_set1_epi16(0x2120);
    const __m512i last = _mm512_inserti64x4(lower, _mm512_castsi512_si256(upper), 1);
    // For each of four rows, where the bytes of a code begin: one bit below it, as its number has two bytes.
    const __m512i begins[4] = {_mm512_set1_epi64(0x2f2f1f1f0f0f3f3f), _mm512_set1_epi64(0x3333232313130303),
                               _mm512_set1_epi64(0x3737272717170707), _mm512_set1_epi64(0x3b3b2b2b1b1b0b0b)};
    for (int64_t row = 0; row < kOutputs; row += 4, codes += 64) {
      __builtin_prefetch(codes + kAheadBytes, 0, 3);
      const __m512i words = _mm512_loadu_si512(codes);
      auto look_up = [&](int64_t i, const Pairs& table, __m512i part) {  // part: of the table
        const __m512i places = _mm512_ternarylogic_epi32(_mm512_multishift_epi64_epi8(begins[i], words), code, part, 0xea);
        store_group(to[row + i], {_mm512_permutexvar_epi8(places, table.bits)});
      };
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; i += 2) {
        const F32 one = numbers(all, low, row + i), other = numbers(all, low, row + i + 1);
        if (Two) {
          look_up(i, both(one, numbers(all, high, row + i)), last);
          look_up(i + 1, both(other, numbers(all, high, row + i + 1)), last);
        } else {
          const Pairs table = both(one, other);
          look_up(i, table, lower);
          look_up(i + 1, table, upper);
        }
      }
    }
  }

  static F32 numbers(F32 levels, const Numbers& of, int64_t row) {
    return fma(levels, splat(of.scales[row]), splat(of.bases[row]));
  }
  static Pairs both(F32 low, F32 high) { return {(__m512i)_mm512_cvtne2ps_pbh(high, low)}; }

  // With groups that end within a half of a step.
  void unpack_any(const uint8_t* codes, int64_t panel, int64_t step, Tiles& to) const {
    Numbers of[kTileDepth];
    for (int64_t k = 0; k < kTileDepth; ++k) read(panel, group_of(step * kTileDepth + k), of[k]);
    for (int64_t row = 0; row < kOutputs; ++row) {
      alignas(64) float values[kTileDepth];
      for (int64_t k = 0; k < kTileDepth; ++k) {
        uint16_t word;
        std::memcpy(&word, codes + (row / 4 * kTileDepth + k) * 2, 2);
        values[k] = std::fma(float(word >> row % 4 * 4 & 15), of[k].scales[row], of[k].bases[row]);
      }
      store_group(to[row], both(load(values), load(values + kHalf)));
    }
  }

  const Weight& weight_;
  const int64_t steps_, groups_;
  Numbers numbers_[kSteps][2];
};

}  // namespace
}  // namespace lorikeet

#endif
