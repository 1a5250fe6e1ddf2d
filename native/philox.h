// Sampling noise from the counter-based generator Philox4x64-10 (Salmon et al., SC 2011), as numpy numbers its draws:
// key (seed, 0), counter (block, position, 0, 0), blocks counted from 1. A block of four words is the noise of eight
// tokens, the low half of a word first.
#pragma once

#include <cmath>
#include <cstdint>

namespace lorikeet {

constexpr int64_t kBlockTokens = 8;
constexpr float kLargestNoise = 22.875f;  // of 32 random bits, rounded up

class Noise {
 public:
  Noise(uint64_t seed, int64_t position) : position_(uint64_t(position)) {
    for (int round = 0; round < kRounds; ++round) keys_[round] = seed + uint64_t(round) * 0x9E3779B97F4A7C15u;
  }

  // The random bits of the tokens [8 * block, 8 * block + 8).
  void draw(int64_t block, uint64_t words[4]) const {
    uint64_t a = uint64_t(block) + 1, b = position_, c = 0, d = 0;
#pragma GCC unroll 10
    for (int round = 0; round < kRounds; ++round) {
      const Wide left = Wide(0xD2E7470EE14C6C93u) * a, right = Wide(0xCA5A826395121157u) * c;
      a = uint64_t(right >> 64) ^ b ^ keys_[round];
      b = uint64_t(right);
      c = uint64_t(left >> 64) ^ d ^ uint64_t(round) * 0xBB67AE8584CAA73Bu;
      d = uint64_t(left);
    }
    words[0] = a, words[1] = b, words[2] = c, words[3] = d;
  }

  // Standard Gumbel noise of random bits.
  static float gumbel(uint32_t drawn) {
    return float(-std::log(-std::log((double(drawn) + 0.5) * 0x1p-32)));
  }

  float of(int64_t token) const {
    uint64_t words[4];
    draw(token / kBlockTokens, words);
    return gumbel(uint32_t(words[token % kBlockTokens / 2] >> (token % 2 * 32)));
  }

 private:
  using Wide = unsigned __int128;
  static constexpr int kRounds = 10;
  uint64_t position_;
  uint64_t keys_[kRounds];
};

}  // namespace lorikeet
