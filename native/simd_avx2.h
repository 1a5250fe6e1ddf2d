// simd.h with AVX2, FMA and F16C.
#pragma once  // included by simd.h alone, which says what each name means

#include <immintrin.h>

namespace lorikeet {

constexpr int kLanes = 8;
using F32 = __m256;
struct Pairs {
  __m256i bits;
};

struct Span {
  F32 low, high;
};
struct PairSpan {
  Pairs low, high;
};
struct CodePairs {
  F32 first, second;
};
using Quad = __m128;

inline F32 zero() { return _mm256_setzero_ps(); }
inline F32 splat(float x) { return _mm256_set1_ps(x); }
inline F32 load(const float* p) { return _mm256_loadu_ps(p); }
inline F32 widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline F32 load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x); }
inline __m128i narrow(F32 x) {
  __m256i wide = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(wide, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(wide, 16), _mm256_set1_epi32(0x40));
  __m256i unordered = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  __m256i kept = _mm256_blendv_epi8(rounded, quiet, unordered);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}
inline void store(bf16* p, F32 x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }

inline F32 load_n(const float* p, int n) {
  alignas(32) float lanes[8] = {};
  std::memcpy(lanes, p, size_t(n) * 4);
  return _mm256_load_ps(lanes);
}
inline F32 load_n(const bf16* p, int n) {
  alignas(16) uint16_t lanes[8] = {};
  std::memcpy(lanes, p, size_t(n) * 2);
  return widen(_mm_load_si128((const __m128i*)lanes));
}
inline void store_n(float* p, F32 x, int n) {
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, x);
  std::memcpy(p, lanes, size_t(n) * 4);
}
inline void store_n(bf16* p, F32 x, int n) {
  alignas(16) uint16_t lanes[8];
  _mm_store_si128((__m128i*)lanes, narrow(x));
  std::memcpy(p, lanes, size_t(n) * 2);
}

inline F32 with_lane(F32 x, int lane, float value) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(x, splat(value), _mm256_castsi256_ps(_mm256_cmpeq_epi32(lanes, _mm256_set1_epi32(lane))));
}

inline F32 add(F32 a, F32 b) { return _mm256_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm256_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm256_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm256_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm256_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm256_min_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
inline F32 round(F32 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F32 x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(F32 x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline F32 scale_by_power(F32 x, F32 n) {
  // In two halves, since no float is 2^130.
  __m256i whole = _mm256_cvtps_epi32(max(splat(-125.0f), n)), half = _mm256_srai_epi32(whole, 1);
  __m256i rest = _mm256_sub_epi32(whole, half), bias = _mm256_set1_epi32(127);
  F32 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
  F32 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
  return _mm256_and_ps(mul(mul(x, a), b), _mm256_cmp_ps(n, splat(-125.0f), _CMP_NLT_UQ));
}

inline Pairs load_group(const bf16* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
inline Pairs splat_group(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm256_set1_epi32(pair)};
}
inline Pairs load_group_n(const bf16* p, int n) {
  alignas(32) uint16_t lanes[16] = {};
  std::memcpy(lanes, p, size_t(n) * 2);
  return {_mm256_load_si256((const __m256i*)lanes)};
}
inline F32 even(Pairs a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a.bits, 16)); }
inline F32 odd(Pairs a) { return _mm256_castsi256_ps(_mm256_and_si256(a.bits, _mm256_set1_epi32(int(0xffff0000)))); }
inline F32 dot(F32 c, Pairs a, Pairs b) { return fma(even(a), even(b), fma(odd(a), odd(b), c)); }
inline Pairs as_pairs(F32 words) { return {_mm256_castps_si256(words)}; }

inline F32 load_quads(const float* const* rows, int64_t word) {
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + word)), _mm_loadu_ps(rows[4] + word), 1);
}
inline void transpose_quads(F32 a, F32 b, F32 c, F32 d, F32* out) {
  __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
  out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
  out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
  ab = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), cd = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
  out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd));
  out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd));
}

inline PairSpan interleave(Pairs a, Pairs b) {
  return {{_mm256_unpacklo_epi16(a.bits, b.bits)}, {_mm256_unpackhi_epi16(a.bits, b.bits)}};
}
inline Span spread(Pairs a) {
  PairSpan wide = interleave({_mm256_setzero_si256()}, a);
  return {_mm256_castsi256_ps(wide.low.bits), _mm256_castsi256_ps(wide.high.bits)};
}
inline Pairs join(Span s) {
  __m256i halves = _mm256_inserti128_si256(_mm256_castsi128_si256(narrow(s.low)), narrow(s.high), 1);
  return {_mm256_permute4x64_epi64(halves, 0xd8)};
}
inline void store_group(bf16* p, Pairs a) { _mm256_storeu_si256((__m256i*)p, a.bits); }
inline Quad sum(F32 a, F32 b, F32 c, F32 d) {
  F32 ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  F32 cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  F32 quads = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
}

inline Quad first_of(Quad x, int n) {
  return _mm_and_ps(x, _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(n), _mm_setr_epi32(0, 1, 2, 3))));
}
inline Quad mul(Quad x, const float* p) { return _mm_mul_ps(x, _mm_loadu_ps(p)); }
inline void put4(float* p, Quad x) { _mm_storeu_ps(p, x); }
inline void put4(bf16* p, Quad x) {
  __m128i wide = _mm_castps_si128(x), odd = _mm_and_si128(_mm_srli_epi32(wide, 16), _mm_set1_epi32(1));
  __m128i rounded = _mm_srli_epi32(_mm_add_epi32(wide, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
  __m128i quiet = _mm_or_si128(_mm_srli_epi32(wide, 16), _mm_set1_epi32(0x40));
  __m128i kept = _mm_blendv_epi8(rounded, quiet, _mm_castps_si128(_mm_cmpunord_ps(x, x)));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi32(kept, kept));
}

inline CodePairs to_floats(__m256i pairs, int bits) {
  const __m256i mask = _mm256_set1_epi32((1 << bits) - 1);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(pairs, mask)), _mm256_cvtepi32_ps(_mm256_srli_epi32(pairs, bits))};
}
inline CodePairs load_nibble_pairs(const uint8_t* p) {
  return to_floats(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 4);
}
inline CodePairs load_byte_pairs(const uint8_t* p) {
  return to_floats(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 8);
}
inline F32 load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_pairs(bf16* p, CodePairs x) {
  __m256i first = _mm256_cvtepu16_epi32(narrow(x.first)), second = _mm256_cvtepu16_epi32(narrow(x.second));
  _mm256_storeu_si256((__m256i*)p, _mm256_or_si256(first, _mm256_slli_epi32(second, 16)));
}

inline F32 to_floats(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }  // the lower 8
inline F32 load_codes(const int8_t* p) { return to_floats(_mm_loadl_epi64((const __m128i*)p)); }
inline Pairs to_pairs(__m128i codes) {
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(to_floats(codes)), 16);
  const __m256i high = _mm256_srli_epi32(_mm256_castps_si256(to_floats(_mm_srli_si128(codes, 8))), 16);
  return {_mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8)};
}
inline Pairs load_code_pairs(const int8_t* p) { return to_pairs(_mm_loadu_si128((const __m128i*)p)); }
inline __m128i first_codes(const int8_t* p, int n) {
  alignas(16) int8_t codes[16] = {};
  std::memcpy(codes, p, size_t(n));
  return _mm_load_si128((const __m128i*)codes);
}
inline F32 load_codes_n(const int8_t* p, int n) { return to_floats(first_codes(p, n)); }
inline Pairs load_code_pairs_n(const int8_t* p, int n) { return to_pairs(first_codes(p, n)); }

inline void store_codes(int8_t* p, F32 x, int n) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  alignas(16) int8_t codes[16];
  _mm_store_si128((__m128i*)codes, _mm_packs_epi16(halves, halves));
  std::memcpy(p, codes, size_t(n));
}

}  // namespace lorikeet
