// The token of each row: the largest of logits / temperature + Gumbel noise among those that min-p, top-k and top-p
// keep; kernels/sampling.py is the reference in torch.
//
// Nothing is sorted: a filter's lowest value is found by gathering ever fewer values around it. And noise is drawn
// only for blocks of tokens that could still win, of which only those few get logarithms whose random bits say so.
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "lanes.h"
#include "parallel.h"
#include "philox.h"

namespace lorikeet {
namespace {

constexpr float kGreedyBelow = 1e-5f;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Parameters {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint64_t seed;
  int64_t position;
};

// Memory of one thread. After `vocab` values there are lanes of -inf, which are never chosen.
struct Scratch {
  std::vector<float> values, few[2];
  void reserve(int64_t vocab) {
    for (auto* buffer : {&values, &few[0], &few[1]})
      if (int64_t(buffer->size()) < vocab + 2 * kLanes) buffer->resize(size_t(vocab + 2 * kLanes));
  }
};

// NaN if there is one in it.
template <class T>
float largest_of(const T* x, int64_t n) {
  constexpr int kAtOnce = 4;
  F32 best[kAtOnce];
  Where ordered[kAtOnce];
  for (int j = 0; j < kAtOnce; ++j) best[j] = splat(-kInfinity), ordered[j] = equal(best[j], best[j]);
  int64_t i = 0;
  for (; i + kAtOnce * kLanes <= n; i += kAtOnce * kLanes)
    for (int j = 0; j < kAtOnce; ++j) {
      F32 v = load(x + i + j * kLanes);
      best[j] = max(v, best[j]);
      ordered[j] = both(ordered[j], equal(v, v));
    }
  float most = -kInfinity;
  uint32_t all = kAllLanes;
  for (int j = 0; j < kAtOnce; ++j) most = std::max(most, largest(best[j])), all &= bits(ordered[j]);
  bool is_number = all == kAllLanes;
  for (; i < n; ++i) {
    const float v = to_float(x[i]);
    most = std::max(most, v), is_number &= v == v;
  }
  return is_number ? most : std::numeric_limits<float>::quiet_NaN();
}

template <class T>
int64_t first_equal(const T* x, int64_t n, float value) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    if (uint32_t found = bits(equal(load(x + i), splat(value)))) return i + __builtin_ctz(found);
  while (i < n && to_float(x[i]) != value) ++i;
  return i;
}

// (x - largest) / temperature, rounded as the reference rounds it, and the lanes of -inf.
template <class T>
void scale(const T* x, int64_t n, float largest, float temperature, float* values) {
  int64_t i = 0;
  if (temperature == 1.0f)
    for (; i + kLanes <= n; i += kLanes) store(values + i, sub(load(x + i), splat(largest)));
  else
    for (; i + kLanes <= n; i += kLanes)
      store(values + i, div(sub(load(x + i), splat(largest)), splat(temperature)));
  for (; i < n; ++i) values[i] = (to_float(x[i]) - largest) / temperature;
  store(values + n, splat(-kInfinity));
}

// Copies the values for which test(vector) is true, in order, then lanes of -inf; returns how many.
template <class Test>
int64_t gather(const float* from, int64_t n, float* to, const Test& test) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    F32 v = load(from + i);
    Where where = test(v);
    store(to + found, pack_left(where, v));
    const uint32_t within = n - i < kLanes ? kAllLanes >> (kLanes - (n - i)) : kAllLanes;
    found += __builtin_popcount(bits(where) & within);
  }
  store(to + found, splat(-kInfinity));
  return found;
}

// The weight of a value in a filter: 1 (top-k), or its share of the probability (top-p).
struct Count {
  static double of(const float*, int64_t n) { return double(n); }
  static double of(float) { return 1; }
};
struct Mass {
  static double of(const float* values, int64_t n) {
    LongSum mass;
    for (int64_t i = 0; i < n; i += kLanes) mass.add(exp(load(values + i)));
    return mass.total();
  }
  static double of(float value) { return std::exp(double(value)); }
};

// An estimate of the lowest value that select() will return, from a sample of the values; on the side with most values,
// so that few are left.
template <class Weight>
float guess(const float* values, int64_t n, double excess) {
  constexpr int kSample = 64;
  float sample[kSample];
  for (int i = 0; i < kSample; ++i) sample[i] = values[n * i / kSample];
  std::sort(sample, sample + kSample);
  int i = 0;
  for (double below = 0; i < kSample; ++i) {
    below += Weight::of(sample[i]) * double(n) / kSample;
    if (below > excess) break;
  }
  return sample[i > kSample / 2 ? i - 2 : i + 1];
}

// The lowest value above which there is less than `limit` of the weight; 0, the largest value, if there is none.
// `total` is the weight of all values.
template <class Weight>
float select(const float* values, int64_t n, double total, double limit, Scratch& scratch) {
  constexpr int64_t kFew = 64;
  float lowest = 0;
  while (n > kFew) {
    const float pivot = guess<Weight>(values, n, total - limit);
    float* to = scratch.few[values == scratch.few[0].data()].data();
    int64_t found = gather(values, n, to, [=](F32 v) { return greater(v, splat(pivot)); });
    const double above = Weight::of(to, found);
    if (above >= limit) {
      total = above;
    } else {  // the pivot is kept, and the values below it are still to be searched
      lowest = pivot;
      const int64_t below = gather(values, n, to, [=](F32 v) { return greater(splat(pivot), v); });
      const double passed = above + double(n - found - below) * Weight::of(pivot);
      limit -= passed, total -= passed;
      if (limit <= 0) return lowest;
      found = below;
    }
    values = to, n = found;
  }
  float few[kFew];
  std::copy(values, values + n, few);
  std::sort(few, few + n, [](float a, float b) { return a > b; });
  double above = 0;
  for (int64_t i = 0; i < n && above < limit; ++i) lowest = few[i], above += Weight::of(few[i]);
  return lowest;
}

// The lowest value that min-p, top-k and top-p keep, applied in this order.
float lowest_kept(const float* values, int64_t n, const Parameters& p, Scratch& scratch) {
  float lowest = -kInfinity;
  if (p.min_p > 0) lowest = float(std::log(double(p.min_p)));
  if (0 < p.top_k && p.top_k < n)
    lowest = std::max(lowest, select<Count>(values, n, double(n), double(p.top_k), scratch));
  if (p.top_p < 1) {
    if (lowest > -kInfinity) {
      float* to = scratch.few[0].data();
      n = gather(values, n, to, [=](F32 v) { return at_least(v, splat(lowest)); });
      values = to;
    }
    const double mass = Mass::of(values, n);
    lowest = std::max(lowest, select<Mass>(values, n, mass, double(p.top_p) * mass, scratch));
  }
  return lowest;
}

struct Best {
  float value;
  int64_t token;
  void see(float other, int64_t index) {
    if (other > value || (other == value && index < token)) value = other, token = index;
  }
};

// The bound that the random bits of a token must exceed for it to win.
//
// With u = (bits + 0.5) / 2^32, noise = -log(-log u) <= -log(1 - u), so value + noise > best needs
// 1 - u < exp(value - best). Both sides are compared as floats; the right one is the float with the bits
// (log2(right) + 127) * 2^23, which is never less than it. Of all tokens, few pass and do not win.
class Hurdle {
 public:
  explicit Hurdle(float best) {
    constexpr float kSlack = 1e-3f;  // more than all roundings together
    base_ = splat(float(0x1p23 * (127 + 31 + (kSlack - double(best)) * kLog2E)));
  }
  uint32_t passed(F32 values, const uint32_t* drawn) const {
    return bits(greater(with_bits(fma(values, splat(float(0x1p23 * kLog2E)), base_)), halved_complement(drawn)));
  }

 private:
  static constexpr double kLog2E = 1.4426950408889634;
  F32 base_;
};

// The largest of value + noise among the values that are at least `lowest`; `most_likely` is the token with value 0.
int64_t draw(const float* values, int64_t n, float lowest, int64_t most_likely, const Noise& noise) {
  constexpr int64_t kChunk = 256;
  alignas(64) uint32_t drawn[kChunk];
  uint8_t wanted[kChunk / kBlockTokens];  // a bit per token
  Best best{noise.of(most_likely), most_likely};
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t size = std::min(kChunk, (n - start + kLanes - 1) / kLanes * kLanes);
    if (size < kChunk) std::memset(wanted, 0, sizeof wanted);
    const F32 bound = splat(std::max(lowest, best.value - kLargestNoise - 1e-3f));
    for (int64_t i = 0; i < size; i += kLanes) {
      const uint32_t found = bits(at_least(load(values + start + i), bound));
      std::memcpy(wanted + i / kBlockTokens, &found, kLanes / 8);
    }
    for (int64_t block = 0; block < kChunk / kBlockTokens; block += Noise::kGroup)
      noise.draw(start / kBlockTokens + block, wanted + block, drawn + block * kBlockTokens);
    Hurdle hurdle(best.value);
    for (int64_t i = 0; i < size; i += kLanes) {
      uint32_t found = 0;
      std::memcpy(&found, wanted + i / kBlockTokens, kLanes / 8);
      if (!found) continue;
      for (found &= hurdle.passed(load(values + start + i), drawn + i); found; found &= found - 1) {
        const int64_t at = i + __builtin_ctz(found);
        best.see(values[start + at] + Noise::gumbel(drawn[at]), start + at);
        hurdle = Hurdle(best.value);
      }
    }
  }
  return best.token;
}

template <class T>
int64_t choose(const T* logits, int64_t vocab, const Parameters& p, Scratch& scratch) {
  const float largest = largest_of(logits, vocab);
  if (!std::isfinite(largest)) return -1;
  const int64_t most_likely = first_equal(logits, vocab, largest);
  if (p.temperature < kGreedyBelow) return most_likely;
  scratch.reserve(vocab);
  float* values = scratch.values.data();
  scale(logits, vocab, largest, p.temperature, values);
  const float lowest = lowest_kept(values, vocab, p, scratch);
  return draw(values, vocab, lowest, most_likely, Noise(p.seed, p.position));
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// `bytes` is 2 for bfloat16 logits, 4 for float; row_stride is in elements. A temperature below 1e-5 takes the first
// of the largest logits; a row whose largest logit is not finite gets -1.
LORIKEET_EXPORT void lorikeet_choose(
    const void* logits, int64_t row_stride, int64_t rows, int64_t vocab, int64_t bytes, const float* temperature,
    const int64_t* top_k, const float* top_p, const float* min_p, const uint64_t* seed, const int64_t* position,
    int64_t* token_ids, int64_t threads) {
  std::atomic<int64_t> next{0};
  parallel(std::min(threads, rows), [&](int64_t, int64_t) {
    static thread_local Scratch scratch;
    for (int64_t row; (row = next++) < rows;) {
      const Parameters p{temperature[row], top_p[row], min_p[row], top_k[row], seed[row], position[row]};
      token_ids[row] = bytes == 2 ? choose((const bf16*)logits + row * row_stride, vocab, p, scratch)
                                  : choose((const float*)logits + row * row_stride, vocab, p, scratch);
    }
  });
}
