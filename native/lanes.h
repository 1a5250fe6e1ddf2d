// Comparing the lanes of vectors, and compacting the lanes that match.
#pragma once

#include "simd.h"

namespace lorikeet {

#if !defined(__AVX512F__)
// For each set of lanes, which lane goes to the first place, the second and so on: a byte each.
struct PackingOrders {
  uint64_t of[256];
  constexpr PackingOrders() : of() {
    for (int set = 0; set < 256; ++set) {
      int place = 0;
      for (int lane = 0; lane < 8; ++lane)
        if (set >> lane & 1) of[set] |= uint64_t(lane) << (8 * place++);
    }
  }
};
constexpr PackingOrders kPackingOrders;
#endif

#if defined(__AVX512F__)

using Where = __mmask16;  // one bit per lane

inline Where greater(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Where at_least(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Where equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Where both(Where a, Where b) { return a & b; }
// Lane i is bit i.
inline uint32_t bits(Where where) { return where; }
// The true lanes side by side from the first on; the others hold anything. (Straight to memory this is slow on Zen 4.)
inline F32 pack_left(Where where, F32 x) { return _mm512_maskz_compress_ps(where, x); }
// The floats whose bits are the whole numbers x; of numbers too large or too low, -0.
inline F32 with_bits(F32 x) { return _mm512_castsi512_ps(_mm512_cvtps_epi32(x)); }
// (2^32 - 1 - p[i]) / 2, rounded down to a whole number and then to a float.
inline F32 halved_complement(const uint32_t* p) {
  __m512i inverted = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-1));
  return _mm512_cvtepi32_ps(_mm512_srli_epi32(inverted, 1));
}

#elif defined(__AVX2__)

using Where = __m256;

inline Where greater(F32 a, F32 b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
inline Where at_least(F32 a, F32 b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
inline Where equal(F32 a, F32 b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
inline Where both(Where a, Where b) { return _mm256_and_ps(a, b); }
inline uint32_t bits(Where where) { return uint32_t(_mm256_movemask_ps(where)); }

inline F32 pack_left(Where where, F32 x) {
  __m128i order = _mm_cvtsi64_si128((long long)kPackingOrders.of[bits(where)]);
  return _mm256_permutevar8x32_ps(x, _mm256_cvtepu8_epi32(order));
}
inline F32 with_bits(F32 x) { return _mm256_castsi256_ps(_mm256_cvtps_epi32(x)); }
inline F32 halved_complement(const uint32_t* p) {
  __m256i inverted = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(-1));
  return _mm256_cvtepi32_ps(_mm256_srli_epi32(inverted, 1));
}

#else  // NEON

struct Where {  // all bits of a true lane
  uint32x4_t low, high;
};

inline Where greater(F32 a, F32 b) { return {vcgtq_f32(a.low, b.low), vcgtq_f32(a.high, b.high)}; }
inline Where at_least(F32 a, F32 b) { return {vcgeq_f32(a.low, b.low), vcgeq_f32(a.high, b.high)}; }
inline Where equal(F32 a, F32 b) { return {vceqq_f32(a.low, b.low), vceqq_f32(a.high, b.high)}; }
inline Where both(Where a, Where b) { return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)}; }
inline uint32_t bits(Where where) {
  const uint32_t lanes[8] = {1, 2, 4, 8, 16, 32, 64, 128};
  return vaddvq_u32(vorrq_u32(vandq_u32(where.low, vld1q_u32(lanes)), vandq_u32(where.high, vld1q_u32(lanes + 4))));
}
inline F32 pack_left(Where where, F32 x) {
  const uint8x16_t lanes = vcombine_u8(vcreate_u8(kPackingOrders.of[bits(where)]), vdup_n_u8(0));
  const uint8x16_t bytes = vreinterpretq_u8_u32(vdupq_n_u32(0x03020100));  // of a lane
  const uint8_t places[32] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};
  auto packed = [&](const uint8_t* place) {
    const uint8x16_t from = vaddq_u8(vshlq_n_u8(vqtbl1q_u8(lanes, vld1q_u8(place)), 2), bytes);
    return vreinterpretq_f32_u8(vqtbl2q_u8({vreinterpretq_u8_f32(x.low), vreinterpretq_u8_f32(x.high)}, from));
  };
  return {packed(places), packed(places + 16)};
}
inline Quad with_bits(Quad x) {
  const uint32x4_t fits = vcltq_f32(vabsq_f32(x), vdupq_n_f32(0x1p31f));
  return vreinterpretq_f32_u32(vbslq_u32(fits, vreinterpretq_u32_s32(vcvtnq_s32_f32(x)), vdupq_n_u32(0x80000000)));
}
inline F32 with_bits(F32 x) { return {with_bits(x.low), with_bits(x.high)}; }
inline F32 halved_complement(const uint32_t* p) {
  return {vcvtq_f32_u32(vshrq_n_u32(vmvnq_u32(vld1q_u32(p)), 1)), vcvtq_f32_u32(vshrq_n_u32(vmvnq_u32(vld1q_u32(p + 4)), 1))};
}

#endif

constexpr uint32_t kAllLanes = (1u << kLanes) - 1;

// A long float sum as a sum of short ones, to limit rounding errors.
class LongSum {
 public:
  void add(F32 x) {
    part_ = lorikeet::add(part_, x);
    if (++added_ % 64 == 0) flush();
  }
  double total() {
    flush();
    return total_;
  }

 private:
  void flush() {
    total_ += double(sum(part_));
    part_ = zero();
  }
  F32 part_ = zero();
  double total_ = 0;
  int64_t added_ = 0;
};

}  // namespace lorikeet
