// Causal attention over paged keys and values, for any mixture of prefills and decodes.
//
// The work is cut into items that threads take one after the other. An item of a prefill is a block of query rows
// with the heads that share one kv head, over all that they see. A sequence with few rows is cut along its context
// instead, all heads together as their keys lie side by side; whoever finishes the last of its pieces joins them, in
// order. How a sequence is cut depends on itself alone, so neither threads nor neighbours change a result.
#include <atomic>
#include <cstdlib>
#include <vector>

#include "attention_tiles.h"
#include "parallel.h"

namespace lorikeet {
namespace {

constexpr int64_t kItemRows = 96;     // of a prefill's item, heads counted
constexpr int64_t kFewRows = 8;       // a sequence with at most so many is cut along its context,
constexpr int64_t kPieceTokens = 64;  // into pieces of a multiple of this,
constexpr int64_t kPieces = 64;       // at most so many

// Memory that grows and is used again by the next call; new parts are zero.
template <class E>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  E* of(int64_t n) {
    if (n > size_) {
      std::free(data_);
      size_ = round_up(n, 64);
      data_ = (E*)std::aligned_alloc(64, size_ * sizeof(E));
      std::memset((void*)data_, 0, size_ * sizeof(E));
    }
    return data_;
  }

 private:
  E* data_ = nullptr;
  int64_t size_ = 0;
};

template <class T>
struct Call {
  const T* q;
  int64_t q_stride;
  const T* kv;
  int64_t block_stride;
  T* out;
  int64_t out_stride;
  const int64_t *row_starts, *contexts, *tables;
  int64_t table_stride, sequences, heads, kv_heads, head_dim, block_tokens;
  float scale;
  int64_t window;

  int64_t group() const { return heads / kv_heads; }
  int64_t rows(int64_t sequence) const { return row_starts[sequence + 1] - row_starts[sequence]; }
  // The first position that a row at `position` sees.
  int64_t seen_from(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// A block of query rows, or a piece of a context.
struct Item {
  int64_t sequence, row, rows;  // rows [row, row + rows) of the sequence
  int64_t position;             // of the first of them
  int64_t begin, end;           // tokens
  int64_t head;                 // kv head, if it is a block
  int64_t cut, piece;           // if it is a piece
  int64_t cost() const { return rows * (end - begin); }
};

// A sequence cut along its context. Its states begin at row `first` of all; they are [piece][kv head][row].
struct Cut {
  int64_t sequence, pieces, first;
};

// The queries of one kv head: [row, head of the group][column], with zeros up to `stride`.
template <class T, class K>
void load_queries(const Call<T>& c, const Item& item, int64_t head, int64_t stride, K* queries) {
  const int64_t group = c.group();
  for (int64_t row = 0; row < item.rows; ++row)
    for (int64_t h = 0; h < group; ++h, queries += stride) {
      const T* from = c.q + (c.row_starts[item.sequence] + item.row + row) * c.q_stride +
                      (head * group + h) * c.head_dim;
      if constexpr (std::is_same_v<T, K>)
        std::memcpy(queries, from, size_t(c.head_dim) * sizeof(T));
      else
        for (int64_t i = 0; i < c.head_dim; ++i) queries[i] = to_float(from[i]);
      std::fill(queries + c.head_dim, queries + stride, K{});
    }
}

// Where the keys and values of `tokens` tokens are, one head's. Places beyond, up to kTile, repeat the last token.
template <class T>
void locate(const Call<T>& c, int64_t sequence, int64_t head, int64_t from, int64_t tokens, const T** keys,
            const T** values) {
  const int64_t row = c.kv_heads * c.head_dim;
  const int64_t* table = c.tables + sequence * c.table_stride + from / c.block_tokens;
  int64_t offset = from % c.block_tokens;
  for (int64_t t = 0; t < tokens; ++table, offset = 0) {
    const T* at = c.kv + *table * c.block_stride + offset * row + head * c.head_dim;
    for (; offset < c.block_tokens && t < tokens; ++offset, ++t, at += row) {
      keys[t] = at;
      values[t] = at + c.block_tokens * row;
    }
  }
  std::fill(keys + tokens, keys + kTile, keys[tokens - 1]);
  std::fill(values + tokens, values + kTile, values[tokens - 1]);
}

// Copies rows to where zeros can follow them, so that whole spans can be read.
template <class T>
void stage(const T** rows, int64_t head_dim, int64_t stride, T* to) {
  for (int64_t t = 0; t < kTile; ++t, to += stride) {
    std::memcpy(to, rows[t], size_t(head_dim) * sizeof(T));
    std::fill(to + head_dim, to + stride, T{});
    rows[t] = to;
  }
}

// Computes the states of an item's rows with the heads of one kv head.
template <class T, class K, class P>
void attend(const Call<T>& c, const Item& item, int64_t head, const State& state) {
  static thread_local Buffer<K> query_buffer, key_buffer;
  static thread_local Buffer<T> staged_buffer;
  static thread_local Buffer<bf16> value_buffer;
  alignas(64) float scores[kRows * kTile];
  alignas(64) P weights[kRows * kTile];
  alignas(64) const T* rows_of_keys[kTile];
  alignas(64) const T* rows_of_values[kTile];
  const int64_t group = c.group(), rows = item.rows * group, stride = state.columns;
  K* queries = query_buffer.of(rows * stride);
  K* keys = key_buffer.of(kTile * stride);
  load_queries(c, item, head, stride, queries);
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(state.sums(r), state.sums(r) + state.stride(), 0.0f);
    state.largest(r) = kLowest;
  }
  const F32 scale = splat(c.scale * 1.44269504088896341f);  // weights are powers of 2
  const int64_t blocks = (rows + kRows - 1) / kRows;
  for (int64_t tile = item.begin; tile < item.end; tile += kTile) {
    const int64_t tokens = std::min(kTile, item.end - tile);
    locate(c, item.sequence, head, tile, tokens, rows_of_keys, rows_of_values);
    if (c.head_dim != stride) {
      T* staged = staged_buffer.of(2 * kTile * stride);
      stage(rows_of_keys, c.head_dim, stride, staged);
      stage(rows_of_values, c.head_dim, stride, staged + kTile * stride);
    }
    pack_keys(rows_of_keys, tokens, stride / kGroup<T>, keys);
    bf16* packed = nullptr;
    if constexpr (sizeof(P) == 2) {
      packed = value_buffer.of(kTile * stride);
      pack_values(rows_of_values, tokens, stride, packed);
    }
    for (int64_t block = 0; block < blocks; ++block) {
      const Range part = part_of(rows, block, blocks);
      const int64_t row = part.begin, count = part.end - part.begin;
      Seen seen[kRows];
      int64_t end = 0;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t position = item.position + (row + r) / group;
        seen[r] = {std::max<int64_t>(0, c.seen_from(position) - tile), std::clamp<int64_t>(position + 1 - tile, 0, tokens)};
        if (seen[r].begin < seen[r].end) end = std::max(end, seen[r].end);
      }
      if (end == 0) continue;
      const int64_t width = round_up(end, kLanes);
      for (int64_t token = 0; token < width; token += kVectors * kLanes)
        with_constant<kRows>(count, [&](auto r) {
          with_constant<kVectors>((width - token) / kLanes, [&](auto v) {
            score<r(), v()>(queries + row * stride, stride, keys + token * kGroup<K>,
                            (c.head_dim + kGroup<K> - 1) / kGroup<K>, scale, scores + token);
          });
        });
      float factors[kRows];
      weigh(scores, weights, count, width, seen, state, row, factors);
      const auto values = [&] {
        if constexpr (sizeof(P) == 2)
          return PackedValues{packed, stride};
        else
          return PlainValues<T>{rows_of_values};
      }();
      for (int64_t column = 0; column < stride; column += kVectors * kLanes)
        with_constant<kRows>(count, [&](auto r) {
          with_constant<kVectors / 2>((stride - column) / kSpan, [&](auto s) {
            accumulate<r(), s()>(weights, values, (end + kGroup<P> - 1) / kGroup<P>, factors, state, row, column);
          });
        });
    }
  }
}

// Writes one row's output.
template <class T>
void finish(const State& state, int64_t row, int64_t head_dim, T* out) {
  const F32 share = splat(1.0f / sum(load(state.totals(row))));
  const float* sums = state.sums(row);
  for (int64_t column = 0; column < head_dim; column += kSpan) {
    const Span y = {mul(load(sums + column), share), mul(load(sums + column + kLanes), share)};
    if (column + kSpan <= head_dim) {
      store_span(out + column, y);
    } else {
      T last[kSpan];
      store_span(last, y);
      std::memcpy(out + column, last, size_t(head_dim - column) * sizeof(T));
    }
  }
}

template <class T>
T* output(const Call<T>& c, int64_t sequence, int64_t row, int64_t head) {
  return c.out + (c.row_starts[sequence] + row) * c.out_stride + head * c.head_dim;
}

// Adds up the states of a cut sequence's pieces, in order, and writes its rows.
template <class T>
void join_pieces(const Call<T>& c, const Cut& cut, const State& states) {
  const int64_t group = c.group(), rows = c.rows(cut.sequence) * group;
  for (int64_t head = 0; head < c.kv_heads; ++head)
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = cut.first + head * rows + row, step = c.kv_heads * rows;
      float most = kLowest;
      for (int64_t p = 0; p < cut.pieces; ++p) most = std::max(most, states.largest(first + p * step));
      for (int64_t p = 0; p < cut.pieces; ++p) {
        const F32 factor = exp2(splat(states.largest(first + p * step) - most));
        const float* from = states.sums(first + p * step);
        float* to = states.sums(first);
        for (int64_t i = 0; i < states.columns + kLanes; i += kLanes)  // the totals too
          store(to + i, p ? fma(load(from + i), factor, load(to + i)) : mul(load(from + i), factor));
      }
      finish(states, first, c.head_dim, output(c, cut.sequence, row / group, head * group + row % group));
    }
}

// Fills items and cuts; returns how many states the pieces need.
template <class T>
int64_t plan(const Call<T>& c, std::vector<Item>& items, std::vector<Cut>& cuts) {
  items.clear();
  cuts.clear();
  const int64_t block_rows = std::max<int64_t>(1, kItemRows / c.group());
  for (int64_t s = 0; s < c.sequences; ++s) {
    const int64_t rows = c.rows(s), start = c.contexts[s] - rows;
    if (rows <= kFewRows) continue;
    for (int64_t row = 0; row < rows; row += block_rows) {
      const int64_t count = std::min(block_rows, rows - row), position = start + row;
      for (int64_t head = 0; head < c.kv_heads; ++head)
        items.push_back({s, row, count, position, c.seen_from(position), position + count, head, -1, -1});
    }
  }
  // The longest first, so that no thread is left with one at the end; the short pieces fill the gaps.
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost() > b.cost(); });
  int64_t states = 0;
  for (int64_t s = 0; s < c.sequences; ++s) {
    const int64_t rows = c.rows(s), position = c.contexts[s] - rows, end = c.contexts[s];
    if (rows == 0 || rows > kFewRows) continue;
    const int64_t begin = c.seen_from(position);
    const int64_t length = round_up(end - begin, kPieces * kPieceTokens) / kPieces;
    const int64_t pieces = (end - begin + length - 1) / length;
    for (int64_t p = 0; p < pieces; ++p)
      items.push_back({s, 0, rows, position, begin + p * length, std::min(end, begin + (p + 1) * length), -1,
                       int64_t(cuts.size()), p});
    cuts.push_back({s, pieces, states});
    states += pieces * rows * c.heads;
  }
  return states;
}

template <class T>
void attention(const Call<T>& c, int64_t threads) {
  using K = std::conditional_t<kNativePairs, T, float>;
  static thread_local std::vector<Item> items;
  static thread_local std::vector<Cut> cuts;
  static thread_local Buffer<float> piece_buffer;
  static thread_local Buffer<std::atomic<int32_t>> left_buffer;
  State states{nullptr, round_up(c.head_dim, kSpan)};
  states.records = piece_buffer.of(plan(c, items, cuts) * states.stride());
  std::atomic<int32_t>* left = left_buffer.of(int64_t(cuts.size()));
  for (size_t i = 0; i < cuts.size(); ++i) left[i].store(int32_t(cuts[i].pieces), std::memory_order_relaxed);
  std::atomic<int64_t> next{0};
  const std::vector<Item>& all = items;
  const std::vector<Cut>& all_cuts = cuts;
  parallel(std::min<int64_t>(threads, int64_t(all.size())), [&](int64_t, int64_t) {
    static thread_local Buffer<float> state_buffer;
    const int64_t group = c.group();
    while (true) {
      const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
      if (index >= int64_t(all.size())) break;
      const Item& item = all[size_t(index)];
      const int64_t rows = item.rows * group;
      if (item.cut < 0) {
        const State state{state_buffer.of(rows * states.stride()), states.columns};
        attend<T, K, K>(c, item, item.head, state);
        for (int64_t r = 0; r < rows; ++r)
          finish(state, r, c.head_dim, output(c, item.sequence, item.row + r / group, item.head * group + r % group));
      } else {
        const Cut& cut = all_cuts[size_t(item.cut)];
        for (int64_t head = 0; head < c.kv_heads; ++head) {
          const int64_t first = cut.first + (item.piece * c.kv_heads + head) * rows;
          attend<T, K, float>(c, item, head, {states.sums(first), states.columns});
        }
        if (left[item.cut].fetch_sub(1, std::memory_order_acq_rel) == 1) join_pieces(c, cut, states);
      }
    }
  });
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// Strides are in elements; `bytes` is 2 for bfloat16, 4 for float.
//
// Rows row_starts[s] to row_starts[s + 1] of q are the last of the contexts[s] tokens of sequence s, whose keys and
// values lie in the blocks of its table: block b is [2 (k, v), block_tokens, kv_heads, head_dim] at kv + b *
// block_stride. A row sees its own and earlier positions, with a window the latest `window` only.
LORIKEET_EXPORT void lorikeet_attention(
    const void* q, int64_t q_stride, const void* kv, int64_t block_stride, void* out, int64_t out_stride,
    const int64_t* row_starts, const int64_t* contexts, const int64_t* tables, int64_t table_stride, int64_t sequences,
    int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_tokens, double scale, int64_t window,
    int64_t bytes, int64_t threads) {
  if (bytes == 2)
    attention<bf16>({(const bf16*)q, q_stride, (const bf16*)kv, block_stride, (bf16*)out, out_stride, row_starts,
                     contexts, tables, table_stride, sequences, heads, kv_heads, head_dim, block_tokens, float(scale),
                     window}, threads);
  else
    attention<float>({(const float*)q, q_stride, (const float*)kv, block_stride, (float*)out, out_stride, row_starts,
                      contexts, tables, table_stride, sequences, heads, kv_heads, head_dim, block_tokens, float(scale),
                      window}, threads);
}
