// The products of attention over one tile of keys and values, and its softmax.
//
// K is the element of the first product (queries by keys) where keys are packed, P that of the second (weights by
// values).
#pragma once

#include "attention_load.h"

namespace lorikeet {
namespace {

constexpr int kRows = 6;                        // query rows of a product of vectors, and
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // its columns, so that the sums fit the registers
constexpr int kUnpackedRows = kLanes == 16 ? 6 : 3;  // at most so many for which keys are not packed
static_assert(kUnpackedRows <= kRows);
constexpr float kLowest = -1e30f;               // less than any score; finite, as inf - inf is no number
constexpr float kUnseen = 2 * kLowest;

// Calls f with n, 1 <= n <= Max, as a constant.
template <int Max, class F>
inline void with_constant(int64_t n, const F& f) {
  if constexpr (Max > 1)
    if (n < Max) return with_constant<Max - 1>(n, f);
  f(std::integral_constant<int, Max>());
}

// scores[row][token] = queries[row] . keys[token], of Rows rows by Vectors * kLanes tokens.
template <int Rows, int Vectors, class K, class T>
void score(const K* queries, int64_t stride, const K* keys, int64_t groups, float* scores, Ahead<T>& ahead) {
  constexpr int G = kGroup<K>;
  // Long float sums are sums of short ones, to limit rounding errors.
  constexpr int64_t kShort = G == 1 ? 32 : int64_t(1) << 60;
  for (int64_t g = 0, first = 1; g < groups; first = 0) {
    F32 sums[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) sums[r][v] = zero();
    for (const int64_t stop = std::min(groups, g + kShort); g < stop;) {
      ahead.fetch(kScoreFetch);
      for (const int64_t pause = std::min(stop, g + kPause); g < pause; ++g) {
        decltype(load_group(keys)) k[Vectors];
        for (int v = 0; v < Vectors; ++v) k[v] = load_group(keys + (g * kTile + v * kLanes) * G);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          auto query = splat_group(queries + r * stride + g * G);
          for (int v = 0; v < Vectors; ++v) sums[r][v] = dot(sums[r][v], query, k[v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* to = scores + r * kTile + v * kLanes;
        store(to, first ? sums[r][v] : add(sums[r][v], load(to)));
      }
  }
}

// The same for rows too few to justify packing keys: sums are taken across lanes, for four tokens at a time. The
// columns after a head, up to `stride`, are zero.
template <int Rows, class T, class S>
void score_unpacked(const T* queries, int64_t stride, const T* const* keys, int64_t offset, int64_t tokens,
                    float* scores, Ahead<S>& ahead) {
  constexpr int kTokens = 4;
  for (int64_t token = 0; token < tokens; token += kTokens) {
    F32 sums[Rows][kTokens];
    for (int r = 0; r < Rows; ++r)
      for (int t = 0; t < kTokens; ++t) sums[r][t] = zero();
    for (int64_t column = 0; column < stride; column += kLanes * kGroup<T>) {
      ahead.fetch(kUnpackedFetch);
      decltype(load_group(queries)) k[kTokens];
      for (int t = 0; t < kTokens; ++t) k[t] = load_group(keys[token + t] + offset + column);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        auto query = load_group(queries + r * stride + column);
        for (int t = 0; t < kTokens; ++t) sums[r][t] = dot(sums[r][t], query, k[t]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
      put4(scores + r * kTile + token, sum(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
  }
}

// Values for weights of type P: packed pairs of tokens, or the rows themselves. Columns are in the order of spans.
struct PackedValues {
  const bf16* values;
  int64_t columns;
  PairSpan load(int64_t pair, int64_t column) const {
    const bf16* at = values + 2 * (pair * columns + column);
    return {load_group(at), load_group(at + kSpan)};
  }
};
template <class T>
struct PlainValues {
  const T* const* rows;
  int64_t offset;  // of the head
  Span load(int64_t token, int64_t column) const { return load_span(rows[token] + offset + column); }
};

// State of a query row: a record of floats, starting with the weighted sum of values.
struct State {
  float* records;
  int64_t columns;
  int64_t stride() const { return columns + 2 * kLanes; }
  float* sums(int64_t row) const { return records + row * stride(); }
  float* totals(int64_t row) const { return sums(row) + columns; }  // of weights, kLanes of them to be added
  float& largest(int64_t row) const { return sums(row)[columns + kLanes]; }  // score
  void clear(int64_t rows) const {  // but for the sums
    for (int64_t row = 0; row < rows; ++row) {
      store(totals(row), zero());
      largest(row) = kLowest;
    }
  }
  void clear_sums(Range rows) const {
    for (int64_t row = rows.begin; row < rows.end; ++row)
      for (int64_t i = 0; i < columns; i += kLanes) store(sums(row) + i, zero());
  }
};

// sums = factor * sums + weights . values, of Rows rows from `row` and Spans spans from `column`, over `groups`
// groups of tokens. Without factors there are no sums yet. (Zeros would do, but the sums of pieces are not in the cache.)
template <int Rows, int Spans, class P, class V, class T>
void accumulate(const P* weights, const V& values, int64_t groups, const float* factors, const State& state,
                int64_t row, int64_t column, Ahead<T>& ahead) {
  constexpr int G = kGroup<P>;
  F32 low[Rows][Spans], high[Rows][Spans];
  for (int r = 0; r < Rows; ++r)
    for (int s = 0; s < Spans; ++s) low[r][s] = high[r][s] = zero();
  for (int64_t g = 0; g < groups;) {
    ahead.fetch(kAccumulateFetch);
    for (const int64_t pause = std::min(groups, g + kPause); g < pause; ++g) {
      decltype(values.load(g, column)) x[Spans];
      for (int s = 0; s < Spans; ++s) x[s] = values.load(g, column + s * kSpan);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        auto weight = splat_group(weights + r * kTile + g * G);
        for (int s = 0; s < Spans; ++s) {
          low[r][s] = dot(low[r][s], weight, x[s].low);
          high[r][s] = dot(high[r][s], weight, x[s].high);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int s = 0; s < Spans; ++s) {
      float* sum = state.sums(row + r) + column + s * kSpan;
      if (!factors) {
        store(sum, low[r][s]);
        store(sum + kLanes, high[r][s]);
      } else {
        store(sum, fma(load(sum), splat(factors[r]), low[r][s]));
        store(sum + kLanes, fma(load(sum + kLanes), splat(factors[r]), high[r][s]));
      }
    }
}

// The tokens of a tile that a row sees: [begin, end), possibly empty.
struct Seen {
  int64_t begin, end;
};

// Overwrites the scores [begin, end), seldom many.
inline void hide(float* scores, int64_t begin, int64_t end, F32 unseen) {
  for (int64_t t = begin; t < end; t += kLanes) store_n(scores + t, unseen, int(std::min<int64_t>(kLanes, end - t)));
}

// weights[r][token] = 2^(scale * score - m), m the largest such exponent so far of row `row + r`; 0 outside of what it
// sees. At most Rows rows, `width` tokens, a multiple of kLanes. Writes by what each row's earlier sums must be
// multiplied. softcap: of scale * score; 0 for none.
template <int Rows, class P>
void weigh(float* scores, P* weights, int64_t rows, int64_t width, const Seen* seen, float scale, float softcap,
           const State& state, int64_t row, float* factors) {
  if (softcap != 0) {
    const F32 inner = splat(scale / softcap), cap = splat(softcap / scale);
    for (int64_t r = 0; r < rows; ++r)
      for (float *s = scores + r * kTile, *end = s + width; s < end; s += kLanes)
        store(s, mul(cap, tanh(mul(load(s), inner))));
  }
  float now[Rows];
  F32 changes = zero();
  const F32 unseen = splat(kUnseen / scale);
  static_assert(Rows <= kLanes);
  for (int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * kTile;
    hide(s, 0, std::min(seen[r].begin, width), unseen);
    hide(s, std::min(seen[r].end, width), width, unseen);
    F32 most = load(s);
    for (int64_t t = kLanes; t < width; t += kLanes) most = max(most, load(s + t));
    const float before = state.largest(row + r);
    now[r] = state.largest(row + r) = std::max(before, scale * largest(most));
    changes = with_lane(changes, int(r), before - now[r]);
  }
  store_n(factors, exp2(changes), int(rows));
  for (int64_t r = 0; r < rows; ++r) {
    const float* s = scores + r * kTile;
    P* w = weights + r * kTile;
    F32 total = mul(load(state.totals(row + r)), splat(factors[r]));
    for (int64_t t = 0; t < width; t += kLanes) {
      const F32 power = fma(load(s + t), splat(scale), splat(-now[r]));
      F32 weight = sizeof(P) == 2 ? coarse_exp2(power) : exp2(power);
      total = add(total, weight);
      store(w + t, weight);
    }
    store(state.totals(row + r), total);
  }
}

}  // namespace
}  // namespace lorikeet
