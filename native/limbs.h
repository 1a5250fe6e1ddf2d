// Rows of bfloat16 as whole numbers of 16 bits, in two limbs of 8 bits, which the tile unit multiplies with codes of 8 bits.
//
// A row has one scale, so that its largest element is 127 * 256: every element is off by at most a 65,000th part of that,
// bfloat16's own rounding of it would be a 512th. Products and sums are exact then, so their order does not count.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "tile_unit.h"

#if defined(__AMX_BF16__)

namespace lorikeet {
namespace {

class Limbs {
 public:
  static constexpr int64_t kBase = 256;  // what the first limb counts

  // Makes row() those of some rows; false if they were the last that were taken.
  bool take(const bf16* x, int64_t stride, int64_t rows, int64_t width) {
    if (x == x_) return false;
    x_ = x, rows_ = rows;
    stride_ = (width + kLine - 1) / kLine * kLine;
    if (int64_t(bytes_.size()) < (2 * rows + 1) * stride_) bytes_.resize(size_t((2 * rows + 1) * stride_));
    if (int64_t(scales_.size()) < rows) scales_.resize(size_t(rows));
    for (int64_t r = 0; r < rows; ++r) scales_[size_t(r)] = split(x + r * stride, width, bytes_.data() + 2 * r * stride_);
    return true;
  }

  int64_t rows() const { return rows_; }
  const int8_t* row(int64_t r) const { return bytes_.data() + 2 * r * stride_; }  // its first limb; the other follows
  int64_t stride() const { return stride_; }  // bytes from a limb to the next, whose rest is zero
  float scale(int64_t r) const { return scales_[size_t(r)]; }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr float kLargest = 127 * kBase, kLeast = 1e-33f;  // below, rows count as zero

  float split(const bf16* x, int64_t width, int8_t* to) const {
    const __m512 magnitude = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff));
    F32 most = zero(), odd = zero();  // odd: not zero if an element is not finite
    for (int64_t k = 0; k < width; k += kLanes) {
      const F32 values = load_n(x + k, int(std::min<int64_t>(kLanes, width - k)));
      most = max(most, _mm512_and_ps(values, magnitude));
      odd = fma(values, zero(), odd);
    }
    const float whole = largest(most);
    const F32 factor = splat(whole > kLeast ? kLargest / whole : 0.0f);
    for (int64_t k = 0; k < stride_; k += kLanes) {
      const int n = int(std::clamp<int64_t>(width - k, 0, kLanes));
      const __m512i number = _mm512_cvtps_epi32(mul(load_n(x + k, n), factor));
      const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(kBase / 2)), 8);
      const __m512i low = _mm512_sub_epi32(number, _mm512_slli_epi32(high, 8));
      _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(high));
      _mm_storeu_si128((__m128i*)(to + stride_ + k), _mm512_cvtepi32_epi8(low));
    }
    const float sum_of_odd = sum(odd);
    if (sum_of_odd != 0) return std::numeric_limits<float>::quiet_NaN();
    return whole > kLeast ? whole / kLargest : 0.0f;
  }

  const bf16* x_ = nullptr;
  int64_t rows_ = 0, stride_ = 0;
  // A thread keeps the memory: a call in the hot path allocates nothing.
  static std::vector<int8_t>& kept_bytes() {
    static thread_local std::vector<int8_t> kept;
    return kept;
  }
  static std::vector<float>& kept_scales() {
    static thread_local std::vector<float> kept;
    return kept;
  }
  std::vector<int8_t>& bytes_ = kept_bytes();
  std::vector<float>& scales_ = kept_scales();
};

}  // namespace
}  // namespace lorikeet

#endif
