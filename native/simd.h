// One vector of floats, as wide as the instruction set of this build allows.
//
// Every kernel is written once against this header and compiled once per instruction set (see setup.py): AVX2 with FMA,
// AVX-512 (F, BW, DQ, VL), AVX-512 with BF16, NEON, NEON with BF16. Each build is a library of its own, so no inline
// function of one can end up in another.
#pragma once

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

}  // namespace lorikeet

// A header for each instruction set defines, for a vector F32 of kLanes floats:
//
// zero, splat; load and store of floats and of bfloat16, rounded to the nearest; load_n and store_n of the first n of a
//   vector's lanes, 0 <= n <= kLanes: lanes beyond are read as 0 and not written; with_lane(x, lane, value): x with a lane
//   of its own value.
// add, sub, mul, div, fma, round (to whole numbers), sum, largest; max and min return the second operand if one is NaN.
// scale_by_power(x, n): x * 2^n for whole n; 0 where n is below -125, since denormal results are slow.
// Pairs: a register of kLanes pairs of bfloat16. load_group, load_group_n (of at most 2 * kLanes elements), store_group;
//   splat_group: the first pair for every lane; as_pairs: the bits of floats; even, odd: the first and the second of each
//   pair; dot(c, a, b) adds to every lane of c the products of its pair.
// load_quads: four 32-bit words at each of rows[0], rows[4], rows[8] ..., side by side. transpose_quads: see transpose().
// Span: 2 * kLanes columns in two registers. Those of bfloat16 lie in the order that interleave() of two rows gives, which
//   spread() of one row shares and join() undoes; those of float lie as in memory.
// Quad: four floats. sum(a, b, c, d): the sums of four vectors; first_of(x, n): with 0 beyond the first n; mul(x, p): times
//   p[0] ... p[3]; put4: stores them, rounded as by store().
// CodePairs: kLanes pairs of unsigned codes as floats, the first of each pair and the second. load_nibble_pairs (the low
//   nibble first), load_byte_pairs; store_pairs: stores the pairs of kLanes columns as bfloat16 side by side.
// load_codes, load_code_pairs: signed codes of 8 bits, exactly: kLanes of them as floats, or 2 * kLanes as bfloat16. Of the
//   forms with n, those beyond the first n are read as 0. store_codes: the nearest whole numbers of the first n lanes.
// load_halves: kLanes numbers of float16.
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

namespace lorikeet {

// The same names for float: a group is one element.
inline F32 load_group(const float* p) { return load(p); }
inline F32 load_group_n(const float* p, int n) { return load_n(p, n); }
inline F32 splat_group(const float* p) { return splat(*p); }
inline F32 dot(F32 c, F32 a, F32 b) { return fma(a, b, c); }

inline Span load_span(const bf16* p) { return spread(load_group(p)); }
inline Span load_span(const float* p) { return {load(p), load(p + kLanes)}; }
inline void store_span(bf16* p, Span s) { store_group(p, join(s)); }
inline void store_span(float* p, Span s) {
  store(p, s.low);
  store(p + kLanes, s.high);
}

// Elements of a group.
template <class T>
constexpr int kGroup = 4 / int(sizeof(T));

// Whether dot() of bfloat16 is one instruction; elsewhere long products are better made of floats.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
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
