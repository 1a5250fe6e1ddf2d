// simd.h with AVX-512 (F, BW, DQ, VL), with or without BF16.
#pragma once  // included by simd.h alone, which says what each name means

#include <immintrin.h>

namespace lorikeet {

constexpr int kLanes = 16;
using F32 = __m512;
struct Pairs {
  __m512i bits;
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

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 splat(float x) { return _mm512_set1_ps(x); }
inline F32 load(const float* p) { return _mm512_loadu_ps(p); }
inline F32 widen(__m256i half) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)); }
inline F32 load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
inline __m256i narrow(F32 x) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(x);
#else
  __m512i wide = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(wide, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(wide, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet));
#endif
}
inline void store(bf16* p, F32 x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }

inline __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
inline F32 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline F32 load_n(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store_n(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void store_n(bf16* p, F32 x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

inline F32 with_lane(F32 x, int lane, float value) {
  return _mm512_mask_broadcastss_ps(x, __mmask16(1u << lane), _mm_set_ss(value));
}

inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
inline F32 round(F32 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline float sum(F32 x) { return _mm512_reduce_add_ps(x); }
inline float largest(F32 x) { return _mm512_reduce_max_ps(x); }
inline F32 scale_by_power(F32 x, F32 n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, splat(-125.0f), _CMP_NLT_UQ), x, n);  // a NaN is not less
}

inline Pairs load_group(const bf16* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs splat_group(const bf16* p) {
  int32_t pair;
  std::memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
inline Pairs load_group_n(const bf16* p, int n) {  // n bfloat16, at most 2 * kLanes
  return {_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << n) - 1), p)};
}
inline F32 even(Pairs a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a.bits, 16)); }
inline F32 odd(Pairs a) { return _mm512_castsi512_ps(_mm512_and_si512(a.bits, _mm512_set1_epi32(int(0xffff0000)))); }
#if defined(__AVX512BF16__)
inline F32 dot(F32 c, Pairs a, Pairs b) { return _mm512_dpbf16_ps(c, (__m512bh)a.bits, (__m512bh)b.bits); }
#else
inline F32 dot(F32 c, Pairs a, Pairs b) { return fma(even(a), even(b), fma(odd(a), odd(b), c)); }
#endif
inline Pairs as_pairs(F32 words) { return {_mm512_castps_si512(words)}; }

inline F32 load_quads(const float* const* rows, int64_t word) {
  __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + word));
  x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps(rows[4] + word));
  x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps(rows[8] + word));
  return _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps(rows[12] + word));
}
inline void transpose_quads(F32 a, F32 b, F32 c, F32 d, F32* out) {
  __m512d ab = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
  ab = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), cd = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
}

inline PairSpan interleave(Pairs a, Pairs b) {
  return {{_mm512_unpacklo_epi16(a.bits, b.bits)}, {_mm512_unpackhi_epi16(a.bits, b.bits)}};
}
inline Span spread(Pairs a) {
  PairSpan wide = interleave({_mm512_setzero_si512()}, a);
  return {_mm512_castsi512_ps(wide.low.bits), _mm512_castsi512_ps(wide.high.bits)};
}
inline Pairs join(Span s) {
  __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(s.low)), narrow(s.high), 1);
  return {_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), halves)};
}
inline void store_group(bf16* p, Pairs a) { _mm512_storeu_si512(p, a.bits); }
inline Quad sum(F32 a, F32 b, F32 c, F32 d) {
  F32 ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  F32 cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  F32 quads = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

inline Quad first_of(Quad x, int n) {
  return _mm_and_ps(x, _mm_castsi128_ps(_mm_cmpgt_epi32(_mm_set1_epi32(n), _mm_setr_epi32(0, 1, 2, 3))));
}
inline Quad mul(Quad x, const float* p) { return _mm_mul_ps(x, _mm_loadu_ps(p)); }
inline void put4(float* p, Quad x) { _mm_storeu_ps(p, x); }
inline void put4(bf16* p, Quad x) {
#if defined(__AVX512BF16__)
  _mm_storel_epi64((__m128i*)p, (__m128i)_mm_cvtneps_pbh(x));
#else
  __m128i wide = _mm_castps_si128(x), odd = _mm_and_si128(_mm_srli_epi32(wide, 16), _mm_set1_epi32(1));
  __m128i rounded = _mm_srli_epi32(_mm_add_epi32(wide, _mm_add_epi32(odd, _mm_set1_epi32(0x7fff))), 16);
  __m128i quiet = _mm_or_si128(_mm_srli_epi32(wide, 16), _mm_set1_epi32(0x40));
  __m128i kept = _mm_blendv_epi8(rounded, quiet, _mm_castps_si128(_mm_cmpunord_ps(x, x)));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi32(kept, kept));
#endif
}

inline CodePairs to_floats(__m512i pairs, int bits) {  // in 32-bit words, the first lowest
  const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
  return {_mm512_cvtepi32_ps(_mm512_and_si512(pairs, mask)), _mm512_cvtepi32_ps(_mm512_srli_epi32(pairs, bits))};
}
inline CodePairs load_nibble_pairs(const uint8_t* p) {
  return to_floats(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 4);
}
inline CodePairs load_byte_pairs(const uint8_t* p) {
  return to_floats(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 8);
}
inline F32 load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_pairs(bf16* p, CodePairs x) {
#if defined(__AVX512BF16__)
  __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(x.second, x.first);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(order, halves));
#else
  __m512i first = _mm512_cvtepu16_epi32(narrow(x.first)), second = _mm512_cvtepu16_epi32(narrow(x.second));
  _mm512_storeu_si512(p, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
#endif
}

inline F32 to_floats(__m128i codes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)); }
inline F32 load_codes(const int8_t* p) { return to_floats(_mm_loadu_si128((const __m128i*)p)); }
inline F32 load_codes_n(const int8_t* p, int n) { return to_floats(_mm_maskz_loadu_epi8(first(n), p)); }
inline Pairs to_pairs(__m128i low, __m128i high) {
#if defined(__AVX512BF16__)
  return {(__m512i)_mm512_cvtne2ps_pbh(to_floats(high), to_floats(low))};
#else  // the other half of each float is 0
  const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,
                                                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return {_mm512_permutex2var_epi16(_mm512_castps_si512(to_floats(low)), upper_halves,
                                    _mm512_castps_si512(to_floats(high)))};
#endif
}
inline Pairs load_code_pairs(const int8_t* p) {
  return to_pairs(_mm_loadu_si128((const __m128i*)p), _mm_loadu_si128((const __m128i*)(p + 16)));
}
inline Pairs load_code_pairs_n(const int8_t* p, int n) {
  const __m256i codes = _mm256_maskz_loadu_epi8(__mmask32((uint64_t(1) << n) - 1), p);
  return to_pairs(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
}

inline void store_codes(int8_t* p, F32 x, int n) {  // the nearest whole numbers of the first n
  _mm512_mask_cvtsepi32_storeu_epi8(p, first(n), _mm512_cvtps_epi32(x));
}

}  // namespace lorikeet
