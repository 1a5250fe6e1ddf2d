// Loads queries, keys and values into the layouts of the attention products.
//
// T: element of queries, keys, values and outputs. S: element of keys and values as they are stored. K: element in
// which queries and packed keys are multiplied, bf16 where its dot() is one instruction, else float.
#pragma once

#include <type_traits>

#include "attention_plan.h"
#include "simd.h"

namespace lorikeet {
namespace {

constexpr int64_t kSpan = 2 * kLanes;

// Cache lines of the next tile to prefetch per transposed block of keys, and per kPause groups in the two products, or per
// vector of four unpacked keys: together somewhat more than there are, as even as possible over the time that a tile takes.
constexpr int64_t kPause = 8, kPackFetch = 6, kScoreFetch = 4, kAccumulateFetch = 9, kUnpackedFetch = 2;

// A tile of an item.
struct Step {
  const Item* item;
  int64_t tile;
  int64_t tokens() const { return std::min(kTile, item->end - tile); }
};

// Where the keys and values of a tile's tokens are. Places beyond the last token repeat it.
template <class S>
struct Rows {
  const S* keys[kTile];
  const S* values[kTile];
};

template <class T, class S>
void locate(const Call<T, S>& c, const Step& step, Rows<S>& rows) {
  const int64_t row = c.kv_heads * c.stored(), tokens = step.tokens();
  const int64_t* table = c.tables + step.item->sequence * c.table_stride + step.tile / c.block_tokens;
  int64_t offset = step.tile % c.block_tokens;
  for (int64_t t = 0; t < tokens; ++table, offset = 0) {
    const S* at = c.kv + *table * c.block_stride + offset * row;
    for (; offset < c.block_tokens && t < tokens; ++offset, ++t, at += row) {
      rows.keys[t] = at;
      rows.values[t] = at + c.block_tokens * row;
    }
  }
  const int64_t padded = round_up(tokens, kLanes);
  std::fill(rows.keys + tokens, rows.keys + padded, rows.keys[tokens - 1]);
  std::fill(rows.values + tokens, rows.values + padded, rows.values[tokens - 1]);
}

// Copies n elements of a span, 0 < n <= kSpan; zeros follow.
inline void copy_span(const bf16* from, int64_t n, bf16* to) {
  store_group(to, n == kSpan ? load_group(from) : load_group_n(from, int(n)));
}
inline void copy_span(const float* from, int64_t n, float* to) {
  const int64_t low = std::min<int64_t>(n, kLanes);
  store(to, load_n(from, int(low)));
  store(to + kLanes, load_n(from + low, int(n - low)));
}
inline void copy_span(const bf16* from, int64_t n, float* to) {
  const int64_t low = std::min<int64_t>(n, kLanes);
  store(to, load_n(from, int(low)));
  store(to + kLanes, load_n(from + low, int(n - low)));
}

template <class T, class K>
inline void copy_row(const T* from, int64_t n, K* to) {
  for (int64_t column = 0; column < n; column += kSpan)
    copy_span(from + column, std::min(kSpan, n - column), to + column);
}

// Copies one head's rows, `stride` elements each, to where zeros can follow them, so that whole spans can be read.
template <class T>
void stage(const T* const* rows, int64_t offset, int64_t tokens, int64_t head_dim, int64_t stride, T* to,
           const T** staged) {
  const int64_t padded = round_up(tokens, kLanes);
  for (int64_t t = 0; t < padded; ++t, to += stride) {
    copy_row(rows[t] + offset, head_dim, to);
    staged[t] = to;
  }
}

// The same from codes, which are multiplied by their scales.
template <class T>
void stage(const int8_t* const* rows, int64_t offset, int64_t tokens, int64_t head_dim, int64_t stride, T* to,
           const T** staged) {
  const int64_t padded = round_up(tokens, kLanes);
  for (int64_t t = 0; t < padded; ++t, to += stride) {
    const int8_t* codes = rows[t] + offset;
    bf16 kept;
    std::memcpy((void*)&kept, codes + head_dim, sizeof kept);
    const F32 scale = splat(to_float(kept));
    int64_t column = 0;
    for (; column + kLanes <= head_dim; column += kLanes) store(to + column, mul(load_codes(codes + column), scale));
    for (; column < stride; column += kLanes) {
      const int64_t left = std::max<int64_t>(0, head_dim - column);
      store(to + column, left ? mul(load_codes_n(codes + column, int(left)), scale) : zero());
    }
    staged[t] = to;
  }
}

// The queries of one kv head: [row, head of the group][column], with zeros up to `stride`.
template <class T, class S, class K>
void load_queries(const Call<T, S>& c, const Item& item, int64_t head, int64_t stride, K* queries) {
  const int64_t group = c.group();
  for (int64_t row = 0; row < item.rows; ++row)
    for (int64_t h = 0; h < group; ++h, queries += stride) {
      const T* from = c.q + (c.row_starts[item.sequence] + item.row + row) * c.q_stride +
                      (head * group + h) * c.head_dim;
      copy_row(from, c.head_dim, queries);
    }
}

// Prefetches the rows of the next tile, some lines at a time: with few query rows memory is the bottleneck. It
// prefetches into the second-level cache, which can have twice as many lines in flight as the first.
template <class S>
struct Ahead {
  const Rows<S>* rows;
  int64_t tokens, first, bytes;  // of each row: the first element and the number of bytes to read
  int64_t token = 0, byte = 0;
  void fetch(int64_t lines) {
    for (; lines > 0 && token < tokens; --lines) {
      __builtin_prefetch((const char*)(rows->keys[token] + first) + byte, 0, 2);
      __builtin_prefetch((const char*)(rows->values[token] + first) + byte, 0, 2);
      if ((byte += 64) >= bytes) byte = 0, ++token;
    }
  }
};

// keys[group][token]: groups of a head's columns, tokens side by side, of `tokens` rows (kTile places, a multiple of
// kLanes is written). So a product needs no sums across lanes.
template <class T, class K, class S>
void pack_keys(const T* const* rows, int64_t offset, int64_t tokens, int64_t words, K* keys, Ahead<S>& ahead) {
  for (int64_t token = 0; token < tokens; token += kLanes) {
    const float* lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = (const float*)(rows[token + i] + offset);
    for (int64_t word = 0; word < words; word += kLanes) {
      F32 columns[kLanes];
      ahead.fetch(kPackFetch);
      transpose(lanes, word, columns);
      for (int i = 0; i < kLanes; ++i) {
        if constexpr (std::is_same_v<T, K>) {
          store((float*)keys + (word + i) * kTile + token, columns[i]);
        } else {
          store(keys + 2 * (word + i) * kTile + token, even(as_pairs(columns[i])));
          store(keys + (2 * (word + i) + 1) * kTile + token, odd(as_pairs(columns[i])));
        }
      }
    }
  }
}

// values[pair of tokens][column]: groups of two tokens, columns in the order of spans.
inline void pack_values(const bf16* const* rows, int64_t offset, int64_t tokens, int64_t columns, bf16* values) {
  for (int64_t token = 0; token < tokens; token += 2)
    for (int64_t column = 0; column < columns; column += kSpan) {
      const bf16 *even = rows[token] + offset + column, *odd = rows[token + 1] + offset + column;
      const PairSpan groups = interleave(load_group(even), load_group(odd));
      bf16* to = values + token * columns + 2 * column;
      store_group(to, groups.low);
      store_group(to + kSpan, groups.high);
    }
}

}  // namespace
}  // namespace lorikeet
