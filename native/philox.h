// Sampling noise from the counter-based generator Philox4x64-10 (Salmon et al., SC 2011), as numpy numbers its draws:
// key (seed, 0), counter (block, position, 0, 0), blocks counted from 1. A block of four words is the noise of eight
// tokens, the low half of a word first.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lorikeet {

#if defined(__AVX512F__)

// Eight 64-bit words.
struct Words {
  __m512i v;
  static Words splat(uint64_t x) { return {_mm512_set1_epi64((long long)x)}; }
  // x, x + 1, x + 2 ...
  static Words from(uint64_t x) { return splat(x) + Words{_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0)}; }
  friend Words operator+(Words a, Words b) { return {_mm512_add_epi64(a.v, b.v)}; }
  friend Words operator^(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
  // The products of the low halves.
  friend Words operator*(Words a, Words b) { return {_mm512_mul_epu32(a.v, b.v)}; }
  Words high() const { return {_mm512_srli_epi64(v, 32)}; }
  Words low() const { return {_mm512_and_si512(v, _mm512_set1_epi64(0xffffffff))}; }
  // The low halves of a below those of b.
  friend Words join(Words a, Words b) { return {_mm512_mask_shuffle_epi32(a.v, 0xaaaa, b.v, _MM_PERM_CCAA)}; }
};

struct Product {
  Words high, low;
};
inline Product multiply(Words x, uint64_t factor) {
  const Words low = Words::splat(factor), high = Words::splat(factor >> 32), upper = x.high();
  const Words bottom = x * low, middle = upper * low + bottom.high(), other = x * high + middle.low();
  return {upper * high + middle.high() + other.high(), join(bottom, other)};
}

// to[4 * i] = a[i], b[i], c[i], d[i].
inline void store_transposed(Words a, Words b, Words c, Words d, uint64_t* to) {
  const __m512i near = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), far = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const __m512i ab[2] = {_mm512_unpacklo_epi64(a.v, b.v), _mm512_unpackhi_epi64(a.v, b.v)};
  const __m512i cd[2] = {_mm512_unpacklo_epi64(c.v, d.v), _mm512_unpackhi_epi64(c.v, d.v)};
  for (const __m512i order : {near, far}) {
    const __m512i even = _mm512_permutex2var_epi64(ab[0], order, cd[0]);
    const __m512i odd = _mm512_permutex2var_epi64(ab[1], order, cd[1]);
    _mm512_storeu_si512(to, _mm512_shuffle_i64x2(even, odd, 0x44));
    _mm512_storeu_si512(to + 8, _mm512_shuffle_i64x2(even, odd, 0xee));
    to += 16;
  }
}

#endif

constexpr int64_t kBlockTokens = 8;
constexpr float kLargestNoise = 22.875f;  // of 32 random bits, rounded up

class Noise {
 public:
  static constexpr int kGroup = 8;

  Noise(uint64_t seed, int64_t position) : position_(uint64_t(position)) {
    for (int round = 0; round < kRounds; ++round) keys_[round] = seed + uint64_t(round) * 0x9E3779B97F4A7C15u;
  }

  // The random bits of the tokens of kGroup blocks from `block` on; those of blocks not wanted may be left out.
  void draw(int64_t block, const uint8_t wanted[kGroup], uint32_t* drawn) const {
    int count = 0;
    for (int i = 0; i < kGroup; ++i) count += wanted[i] != 0;
    if (!count) return;
#if defined(__AVX512F__)
    if (count > kGroup / 2) {
      uint64_t words[4 * kGroup];
      draw_group(block, words);
      std::memcpy(drawn, words, sizeof words);
      return;
    }
#endif
    for (int i = 0; i < kGroup; ++i) {
      if (!wanted[i]) continue;
      uint64_t words[4];
      draw_block(block + i, words);
      std::memcpy(drawn + i * kBlockTokens, words, kBlockTokens * 4);
    }
  }

  // Standard Gumbel noise of random bits.
  static float gumbel(uint32_t drawn) {
    return float(-std::log(-std::log((double(drawn) + 0.5) * 0x1p-32)));
  }

  float of(int64_t token) const {
    uint64_t words[4];
    draw_block(token / kBlockTokens, words);
    return gumbel(uint32_t(words[token % kBlockTokens / 2] >> (token % 2 * 32)));
  }

 private:
  static constexpr int kRounds = 10;
  static constexpr uint64_t kLeft = 0xD2E7470EE14C6C93u, kRight = 0xCA5A826395121157u, kStep = 0xBB67AE8584CAA73Bu;

  void draw_block(int64_t block, uint64_t words[4]) const {
    using Wide = unsigned __int128;
    uint64_t a = uint64_t(block) + 1, b = position_, c = 0, d = 0;
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      const Wide left = Wide(kLeft) * a, right = Wide(kRight) * c;
      a = uint64_t(right >> 64) ^ b ^ keys_[round];
      b = uint64_t(right);
      c = uint64_t(left >> 64) ^ d ^ uint64_t(round) * kStep;
      d = uint64_t(left);
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
  }

#if defined(__AVX512F__)
  // The same for kGroup blocks side by side; with half as many, AVX2 is no faster than multiplying words.
  void draw_group(int64_t block, uint64_t* words) const {
    Words a = Words::from(uint64_t(block) + 1), b = Words::splat(position_), c = Words::splat(0), d = c;
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      const Product left = multiply(a, kLeft), right = multiply(c, kRight);
      a = right.high ^ b ^ Words::splat(keys_[round]);
      b = right.low;
      c = left.high ^ d ^ Words::splat(uint64_t(round) * kStep);
      d = left.low;
    }
    store_transposed(a, b, c, d, words);
  }
#endif

  uint64_t position_;
  uint64_t keys_[kRounds];
};

}  // namespace lorikeet
