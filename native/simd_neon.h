// simd.h with NEON (Armv8), with or without BF16: vectors of two registers, so that tiles are those of AVX2.
#pragma once  // included by simd.h alone, which says what each name means

#include <arm_neon.h>

namespace lorikeet {

constexpr int kLanes = 8;
struct F32 {
  float32x4_t low, high;
};
struct Pairs {
  uint32x4_t low, high;
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
using Quad = float32x4_t;

inline F32 zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
inline F32 splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F32 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline F32 widen(uint16x8_t half) {
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(half), 16)), vreinterpretq_f32_u32(vshll_high_n_u16(half, 16))};
}
inline F32 load(const bf16* p) { return widen(vld1q_u16((const uint16_t*)p)); }
inline void store(float* p, F32 x) {
  vst1q_f32(p, x.low);
  vst1q_f32(p + 4, x.high);
}
inline uint16x4_t narrow(Quad x) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t wide = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(wide, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(wide, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(wide, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
#endif
}
inline uint16x8_t narrow(F32 x) { return vcombine_u16(narrow(x.low), narrow(x.high)); }
inline void store(bf16* p, F32 x) { vst1q_u16((uint16_t*)p, narrow(x)); }

inline F32 load_n(const float* p, int n) {
  float lanes[8] = {};
  std::memcpy(lanes, p, size_t(n) * 4);
  return load(lanes);
}
inline F32 load_n(const bf16* p, int n) {
  bf16 lanes[8] = {};
  std::memcpy(lanes, p, size_t(n) * 2);
  return load(lanes);
}
inline void store_n(float* p, F32 x, int n) {
  float lanes[8];
  store(lanes, x);
  std::memcpy(p, lanes, size_t(n) * 4);
}
inline void store_n(bf16* p, F32 x, int n) {
  bf16 lanes[8];
  store(lanes, x);
  std::memcpy(p, lanes, size_t(n) * 2);
}

inline F32 with_lane(F32 x, int lane, float value) {
  float lanes[8];
  store(lanes, x);
  lanes[lane] = value;
  return load(lanes);
}

inline F32 add(F32 a, F32 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F32 sub(F32 a, F32 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F32 mul(F32 a, F32 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F32 div(F32 a, F32 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline Quad max(Quad a, Quad b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline Quad min(Quad a, Quad b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
inline F32 max(F32 a, F32 b) { return {max(a.low, b.low), max(a.high, b.high)}; }
inline F32 min(F32 a, F32 b) { return {min(a.low, b.low), min(a.high, b.high)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
inline F32 round(F32 x) { return {vrndnq_f32(x.low), vrndnq_f32(x.high)}; }
inline float sum(F32 x) {  // in AVX2's order
  const float32x4_t quad = vaddq_f32(x.low, x.high);
  const float32x2_t two = vadd_f32(vget_low_f32(quad), vget_high_f32(quad));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
inline float largest(F32 x) { return vmaxvq_f32(max(x.low, x.high)); }
inline Quad scale_by_power(Quad x, Quad n) {
  // In two halves, since no float is 2^130.
  const int32x4_t whole = vcvtnq_s32_f32(max(vdupq_n_f32(-125), n)), half = vshrq_n_s32(whole, 1);
  const int32x4_t rest = vsubq_s32(whole, half), bias = vdupq_n_s32(127);
  const Quad a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
  const Quad b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
  const uint32x4_t scaled = vreinterpretq_u32_f32(vmulq_f32(vmulq_f32(x, a), b));
  return vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(n, vdupq_n_f32(-125))));  // a NaN is not less
}
inline F32 scale_by_power(F32 x, F32 n) { return {scale_by_power(x.low, n.low), scale_by_power(x.high, n.high)}; }

inline Pairs load_group(const bf16* p) { return {vld1q_u32((const uint32_t*)p), vld1q_u32((const uint32_t*)p + 4)}; }
inline void store_group(bf16* p, Pairs a) {
  vst1q_u32((uint32_t*)p, a.low);
  vst1q_u32((uint32_t*)p + 4, a.high);
}
inline Pairs splat_group(const bf16* p) {
  uint32_t pair;
  std::memcpy(&pair, p, 4);
  return {vdupq_n_u32(pair), vdupq_n_u32(pair)};
}
inline Pairs load_group_n(const bf16* p, int n) {
  bf16 lanes[16] = {};
  std::memcpy(lanes, p, size_t(n) * 2);
  return load_group(lanes);
}
inline F32 even(Pairs a) {
  return {vreinterpretq_f32_u32(vshlq_n_u32(a.low, 16)), vreinterpretq_f32_u32(vshlq_n_u32(a.high, 16))};
}
inline F32 odd(Pairs a) {
  const uint32x4_t upper = vdupq_n_u32(0xffff0000);
  return {vreinterpretq_f32_u32(vandq_u32(a.low, upper)), vreinterpretq_f32_u32(vandq_u32(a.high, upper))};
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
inline Quad dot(Quad c, uint32x4_t a, uint32x4_t b) {
  return vbfdotq_f32(c, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
}
inline F32 dot(F32 c, Pairs a, Pairs b) { return {dot(c.low, a.low, b.low), dot(c.high, a.high, b.high)}; }
#else
inline F32 dot(F32 c, Pairs a, Pairs b) { return fma(even(a), even(b), fma(odd(a), odd(b), c)); }
#endif
inline Pairs as_pairs(F32 words) { return {vreinterpretq_u32_f32(words.low), vreinterpretq_u32_f32(words.high)}; }

inline F32 load_quads(const float* const* rows, int64_t word) { return {vld1q_f32(rows[0] + word), vld1q_f32(rows[4] + word)}; }
inline void transpose_quads(Quad a, Quad b, Quad c, Quad d, Quad* out) {
  const float64x2_t ab[2] = {vreinterpretq_f64_f32(vzip1q_f32(a, b)), vreinterpretq_f64_f32(vzip2q_f32(a, b))};
  const float64x2_t cd[2] = {vreinterpretq_f64_f32(vzip1q_f32(c, d)), vreinterpretq_f64_f32(vzip2q_f32(c, d))};
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = vreinterpretq_f32_f64(vzip1q_f64(ab[i], cd[i]));
    out[2 * i + 1] = vreinterpretq_f32_f64(vzip2q_f64(ab[i], cd[i]));
  }
}
inline void transpose_quads(F32 a, F32 b, F32 c, F32 d, F32* out) {
  Quad low[4], high[4];
  transpose_quads(a.low, b.low, c.low, d.low, low);
  transpose_quads(a.high, b.high, c.high, d.high, high);
  for (int i = 0; i < 4; ++i) out[i] = {low[i], high[i]};
}

// The pairs (a, b) of eight elements, in order.
inline Pairs zip(uint16x8_t a, uint16x8_t b) {
  return {vreinterpretq_u32_u16(vzip1q_u16(a, b)), vreinterpretq_u32_u16(vzip2q_u16(a, b))};
}
inline PairSpan interleave(Pairs a, Pairs b) {
  return {zip(vreinterpretq_u16_u32(a.low), vreinterpretq_u16_u32(b.low)),
          zip(vreinterpretq_u16_u32(a.high), vreinterpretq_u16_u32(b.high))};
}
inline Span spread(Pairs a) { return {widen(vreinterpretq_u16_u32(a.low)), widen(vreinterpretq_u16_u32(a.high))}; }
inline Pairs join(Span s) { return {vreinterpretq_u32_u16(narrow(s.low)), vreinterpretq_u32_u16(narrow(s.high))}; }

inline Quad sum(F32 a, F32 b, F32 c, F32 d) {
  Quad quads[4];
  transpose_quads(vaddq_f32(a.low, a.high), vaddq_f32(b.low, b.high), vaddq_f32(c.low, c.high), vaddq_f32(d.low, d.high), quads);
  return vaddq_f32(vaddq_f32(quads[0], quads[1]), vaddq_f32(quads[2], quads[3]));
}
inline Quad first_of(Quad x, int n) {
  const uint32_t lanes[4] = {0, 1, 2, 3};
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vcltq_u32(vld1q_u32(lanes), vdupq_n_u32(uint32_t(n)))));
}
inline Quad mul(Quad x, const float* p) { return vmulq_f32(x, vld1q_f32(p)); }
inline void put4(float* p, Quad x) { vst1q_f32(p, x); }
inline void put4(bf16* p, Quad x) { vst1_u16((uint16_t*)p, narrow(x)); }

inline F32 to_floats(uint16x8_t codes) {
  return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(codes))), vcvtq_f32_u32(vmovl_high_u16(codes))};
}
inline CodePairs load_nibble_pairs(const uint8_t* p) {
  const uint16x8_t pairs = vmovl_u8(vld1_u8(p));
  return {to_floats(vandq_u16(pairs, vdupq_n_u16(15))), to_floats(vshrq_n_u16(pairs, 4))};
}
inline CodePairs load_byte_pairs(const uint8_t* p) {
  const uint16x8_t pairs = vreinterpretq_u16_u8(vld1q_u8(p));
  return {to_floats(vandq_u16(pairs, vdupq_n_u16(255))), to_floats(vshrq_n_u16(pairs, 8))};
}
inline F32 load_halves(const uint16_t* p) {
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline void store_pairs(bf16* p, CodePairs x) { store_group(p, zip(narrow(x.first), narrow(x.second))); }

inline F32 to_floats(int8x8_t codes) {
  const int16x8_t wide = vmovl_s8(codes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_high_s16(wide))};
}
inline F32 load_codes(const int8_t* p) { return to_floats(vld1_s8(p)); }
// The upper halves of floats, whose other half is 0.
inline uint32x4_t upper_halves(F32 x) {
  return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(x.low), vreinterpretq_u16_f32(x.high)));
}
inline Pairs load_code_pairs(const int8_t* p) { return {upper_halves(load_codes(p)), upper_halves(load_codes(p + 8))}; }
inline F32 load_codes_n(const int8_t* p, int n) {
  int8_t codes[8] = {};
  std::memcpy(codes, p, size_t(n));
  return load_codes(codes);
}
inline Pairs load_code_pairs_n(const int8_t* p, int n) {
  int8_t codes[16] = {};
  std::memcpy(codes, p, size_t(n));
  return load_code_pairs(codes);
}
inline void store_codes(int8_t* p, F32 x, int n) {
  const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(x.low)), high = vqmovn_s32(vcvtnq_s32_f32(x.high));
  int8_t codes[8];
  vst1_s8(codes, vqmovn_s16(vcombine_s16(low, high)));
  std::memcpy(p, codes, size_t(n));
}

}  // namespace lorikeet
