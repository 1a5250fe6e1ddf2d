// One vector of floats, as wide as the instruction set of this build allows.
//
// Every kernel is written once against this header and compiled once per instruction set (see setup.py):
// AVX2 with FMA, AVX-512 (F, BW, DQ, VL), AVX-512 with BF16. Each build is a library of its own, so no
// inline function of one can end up in another.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lorikeet {

// bfloat16 as storage. Arithmetic is done on floats, or by dot().
struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t wide = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &wide, 4);
  return f;
}

#if defined(__AVX512F__)

constexpr int kLanes = 16;
using F32 = __m512;

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

// The first n of a vector's lanes, 0 <= n <= kLanes; lanes beyond are read as 0 and not written.
inline __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
inline F32 load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline F32 load_n(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store_n(float* p, F32 x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
inline void store_n(bf16* p, F32 x, int n) { _mm256_mask_storeu_epi16(p, first(n), narrow(x)); }

// x with a lane of its own value.
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
// x * 2^n for whole n; 0 where n is below -125, since denormal results are slow.
inline F32 scale_by_power(F32 x, F32 n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, splat(-125.0f), _CMP_NLT_UQ), x, n);  // a NaN is not less
}

// A register of k-groups: kLanes times (two bfloat16 | one float). dot(c, a, b) adds to every lane of c the
// products of its group.
struct Pairs {
  __m512i bits;
};
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

// Four 32-bit words at each of rows[0], rows[4], rows[8] ..., side by side; see transpose().
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

#else  // AVX2 with FMA

constexpr int kLanes = 8;
using F32 = __m256;

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

struct Pairs {
  __m256i bits;
};
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

#endif

// The same names for float: a group is one element.
inline F32 load_group(const float* p) { return load(p); }
inline F32 load_group_n(const float* p, int n) { return load_n(p, n); }
inline F32 splat_group(const float* p) { return splat(*p); }
inline F32 dot(F32 c, F32 a, F32 b) { return fma(a, b, c); }

// A span: 2 * kLanes columns in two registers. Those of bfloat16 lie in the order that interleaving two rows gives,
// which spread() of one row shares and join() undoes; those of float lie as in memory.
struct Span {
  F32 low, high;
};
struct PairSpan {
  Pairs low, high;
};
#if defined(__AVX512F__)
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
// The sums of four vectors.
inline __m128 sum(F32 a, F32 b, F32 c, F32 d) {
  F32 ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  F32 cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  F32 quads = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#else
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
inline __m128 sum(F32 a, F32 b, F32 c, F32 d) {
  F32 ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  F32 cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  F32 quads = add(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1));
}
#endif
inline Span load_span(const bf16* p) { return spread(load_group(p)); }
inline Span load_span(const float* p) { return {load(p), load(p + kLanes)}; }
inline void store_span(bf16* p, Span s) { store_group(p, join(s)); }
inline void store_span(float* p, Span s) {
  store(p, s.low);
  store(p + kLanes, s.high);
}

// Four floats, rounded as store() does.
inline void put4(float* p, __m128 x) { _mm_storeu_ps(p, x); }
inline void put4(bf16* p, __m128 x) {
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

// Elements of a group.
template <class T>
constexpr int kGroup = 4 / int(sizeof(T));

// Whether dot() of bfloat16 is one instruction; elsewhere long products are better made of floats.
#if defined(__AVX512BF16__)
constexpr bool kNativePairs = true;
#else
constexpr bool kNativePairs = false;
#endif

// out[i] = the 32-bit words at rows[0] + word + i, rows[1] + word + i ..., for i < kLanes. There are kLanes rows.
inline void transpose(const float* const* rows, int64_t word, F32* out) {
  for (int i = 0; i < kLanes; i += 4)
    transpose_quads(load_quads(rows, word + i), load_quads(rows + 1, word + i), load_quads(rows + 2, word + i),
                    load_quads(rows + 3, word + i), out + i);
}

// kLanes pairs of unsigned codes, as floats: the first of each pair, and the second.
struct CodePairs {
  F32 first, second;
};
#if defined(__AVX512F__)
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
// Stores the pairs (first, second) of kLanes columns side by side.
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
#else
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
#endif

// Signed codes of 8 bits, exactly: kLanes of them as floats, or 2 * kLanes as bfloat16. Of the forms with n, those beyond
// the first n are read as 0.
#if defined(__AVX512F__)
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
#else
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
#endif

#if defined(__AVX512F__)
inline void store_codes(int8_t* p, F32 x, int n) {  // the nearest whole numbers of the first n
  _mm512_mask_cvtsepi32_storeu_epi8(p, first(n), _mm512_cvtps_epi32(x));
}
#else
inline void store_codes(int8_t* p, F32 x, int n) {
  const __m256i wide = _mm256_cvtps_epi32(x);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  alignas(16) int8_t codes[16];
  _mm_store_si128((__m128i*)codes, _mm_packs_epi16(halves, halves));
  std::memcpy(p, codes, size_t(n));
}
#endif

// k-groups of T from what is stored: T, or codes.
template <class T, class E>
inline auto load_stored(const E* p) {
  if constexpr (sizeof(E) == sizeof(T))
    return load_group(p);
  else if constexpr (sizeof(T) == 2)
    return load_code_pairs(p);
  else
    return load_codes(p);
}
template <class T, class E>
inline auto load_stored_n(const E* p, int n) {
  if constexpr (sizeof(E) == sizeof(T))
    return load_group_n(p, n);
  else if constexpr (sizeof(T) == 2)
    return load_code_pairs_n(p, n);
  else
    return load_codes_n(p, n);
}

// 2^x to about 1 ulp of float for x <= 127; 0 below -125.5, exactly 1 at 0. (A minimax polynomial of degree 5.)
inline F32 exp2(F32 x) {
  x = max(splat(-160.0f), x);  // in this order of operands a NaN passes
  F32 n = round(x), r = sub(x, n);
  F32 p = splat(1.326472707e-3f);
  p = fma(p, r, splat(9.671512649e-3f));
  p = fma(p, r, splat(5.550733744e-2f));
  p = fma(p, r, splat(2.402224209e-1f));
  p = fma(p, r, splat(6.931469776e-1f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, n);
}

#if defined(__AVX512BF16__)
// 2^x for x <= 127 to one part in 2^13, for what is rounded to bfloat16 then; 0 below -125, exactly 1 at 0, and as large on
// both sides of a whole number. (A minimax polynomial of degree 3 of the fraction.)
inline F32 coarse_exp2(F32 x) {
  F32 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  F32 p = splat(7.826797e-2f);
  p = fma(p, r, splat(2.2630768e-1f));
  p = fma(p, r, splat(6.9542435e-1f));
  p = fma(p, r, splat(1.0f));
  return scale_by_power(p, x);  // to a power that is rounded down
}
#else
inline F32 coarse_exp2(F32 x) { return exp2(x); }
#endif

// exp(x) to about 1 ulp of float; 0 below -87, inf above 88.7, NaN of NaN. (Cephes' reduction and a polynomial of degree 6.)
inline F32 exp(F32 x) {
  x = min(splat(90.0f), max(splat(-110.0f), x));  // in this order of operands a NaN passes
  F32 n = round(mul(x, splat(1.44269504088896341f)));
  F32 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.0f)));
  return scale_by_power(p, n);
}

// x * sigmoid(x)
inline F32 silu(F32 x) { return div(x, add(splat(1.0f), exp(sub(zero(), x)))); }

// GELU, approximated by tanh: x * sigmoid(sqrt(8 / pi) * (x + 0.044715 x^3))
inline F32 gelu(F32 x) {
  F32 inner = mul(mul(x, splat(-1.5957691216057308f)), fma(mul(x, x), splat(0.044715f), splat(1.0f)));
  return div(x, add(splat(1.0f), exp(inner)));
}

inline F32 tanh(F32 x) {
  return sub(splat(1.0f), div(splat(2.0f), add(splat(1.0f), exp(add(x, x)))));
}

}  // namespace lorikeet
