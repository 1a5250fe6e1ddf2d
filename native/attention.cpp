// Causal attention over paged keys and values, for any mixture of prefills and decodes.
//
// Softmax is computed online, tile after tile: each row keeps its largest score so far, and the sums of weights
// and of weighted values relative to it.
#include <atomic>

#include "attention_amx.h"
#include "attention_tiles.h"
#include "buffer.h"
#include "calls.h"

namespace lorikeet {
namespace {

// Query rows that go through a tile together; P is the element of the weights.
template <class P>
constexpr int kBlock = kTileUnit<P> ? int(kTileHeight) : kRows;
constexpr int kMostRows = std::max(kBlock<bf16>, kBlock<float>);

// The buffers of one thread.
template <class T, class S, class K>
struct Workspace {
  Buffer<K> queries, keys;
  Buffer<T> plain_queries;
  Buffer<bf16> values;
  Buffer<T> staged;
  Buffer<float> states;
  Rows<S> rows[2];
  Rows<T> staged_rows;
  alignas(64) float scores[kMostRows * kTile];
  alignas(64) bf16 weights[kMostRows * kTile];
};

// The type as which queries are loaded.
template <class T, class K, bool Unpacked>
using Query = std::conditional_t<Unpacked, T, K>;

// Sets the tokens of a tile that the rows [part.begin, part.end) of an item see; returns the end of all of these.
template <class T, class S>
int64_t see(const Call<T, S>& c, const Step& step, Range part, Seen* seen) {
  const int64_t group = c.group();
  int64_t end = 0, position = step.item->position + part.begin / group, head = part.begin % group;
  for (int64_t row = part.begin; row < part.end; ++row, ++seen) {
    *seen = {std::max<int64_t>(0, c.seen_from(position) - step.tile),
             std::clamp<int64_t>(position + 1 - step.tile, 0, step.tokens())};
    if (seen->begin < seen->end) end = std::max(end, seen->end);
    if (++head == group) head = 0, ++position;
  }
  return end;
}

// Adds a tile to the states of an item's rows with the heads of one kv head. Unpacked: by keys as they lie.
template <class T, class K, class P, bool Unpacked, class S>
void attend(const Call<T, S>& c, const Step& step, int64_t head, const Rows<S>& located,
            const Query<T, K, Unpacked>* queries, const State& state, Workspace<T, S, K>& work, Ahead<S>& ahead) {
  const int64_t rows = step.item->rows * c.group(), stride = state.columns, tokens = step.tokens();
  const Rows<T>* from = nullptr;
  int64_t offset = head * c.stored();
  if constexpr (std::is_same_v<S, T>) from = &located;
  if (!from || c.head_dim != stride) {
    T* staged = work.staged.of(2 * kTile * stride);
    stage(located.keys, offset, tokens, c.head_dim, stride, staged, work.staged_rows.keys);
    stage(located.values, offset, tokens, c.head_dim, stride, staged + kTile * stride, work.staged_rows.values);
    from = &work.staged_rows;
    offset = 0;
  }
  K* keys = work.keys.of(kTile * stride);
  if constexpr (!Unpacked) pack_keys(from->keys, offset, tokens, stride / kGroup<T>, keys, ahead);
  P* weights;
  auto values = [&] {
    if constexpr (sizeof(P) == 2) {
      weights = work.weights;
      bf16* packed = work.values.of(kTile * stride);
      pack_values(from->values, offset, tokens, stride, packed);
      return PackedValues{packed, stride};
    } else {
      weights = work.scores;  // in place
      return PlainValues<T>{from->values, offset};
    }
  }();
  if constexpr (kTileUnit<P>)  // whole steps of tokens; those that are none have a weight of 0
    std::memset((void*)(values.values + round_up(tokens, 2) * stride), 0,
                size_t((round_up(tokens, kTileDepth) - round_up(tokens, 2)) * stride) * sizeof(bf16));
  const float scale = c.scale * 1.44269504088896341f, softcap = c.softcap * 1.44269504088896341f;  // powers of 2
  const int64_t blocks = (rows + kBlock<P> - 1) / kBlock<P>;
  for (int64_t block = 0; block < blocks; ++block) {
    const Range part = part_of(rows, block, blocks);
    const int64_t row = part.begin, count = part.end - part.begin;
    Seen seen[kBlock<P>];
    float factors[kBlock<P>];
    const int64_t end = see(c, step, part, seen);
    const bool first = step.tile == step.item->begin;
    if (end == 0) {
      if (first) state.clear_sums(part);
      continue;
    }
    const int64_t width = round_up(end, kTileUnit<P> ? kTileDepth : kLanes);
    if constexpr (kTileUnit<P>) {
      score_by_tiles(queries + row * stride, stride, keys, width, work.scores, ahead);
      weigh<kBlock<P>>(work.scores, weights, count, width, seen, scale, softcap, state, row, factors);
      accumulate_by_tiles(weights, values.values, width, first ? nullptr : factors, state, row, count, ahead);
    } else {
      const int64_t groups = (c.head_dim + kGroup<K> - 1) / kGroup<K>, pairs = (end + kGroup<P> - 1) / kGroup<P>;
      if constexpr (Unpacked)
        with_constant<kUnpackedRows>(count, [&](auto r) {
          score_unpacked<r()>(queries, stride, from->keys, offset, end, work.scores, ahead);
        });
      else
        for (int64_t token = 0; token < width; token += kVectors * kLanes)
          with_constant<kRows>(count, [&](auto r) {
            with_constant<kVectors>((width - token) / kLanes, [&](auto v) {
              score<r(), v()>(queries + row * stride, stride, keys + token * kGroup<K>, groups, work.scores + token,
                              ahead);
            });
          });
      weigh<kBlock<P>>(work.scores, weights, count, width, seen, scale, softcap, state, row, factors);
      for (int64_t column = 0; column < stride; column += kVectors * kLanes)
        with_constant<kRows>(count, [&](auto r) {
          with_constant<kVectors / 2>((stride - column) / kSpan, [&](auto s) {
            accumulate<r(), s()>(weights, values, pairs, first ? nullptr : factors, state, row, column, ahead);
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

template <class T, class S>
T* output(const Call<T, S>& c, int64_t sequence, int64_t row, int64_t head) {
  return c.out + (c.row_starts[sequence] + row) * c.out_stride + head * c.head_dim;
}

// Adds up the states of a cut sequence's pieces, in order, and writes its rows.
template <class T, class S>
void join_pieces(const Call<T, S>& c, const Cut& cut, const State& states) {
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

// The state that threads share.
template <class T, class S>
struct Work {
  const Call<T, S>& c;
  const std::vector<Item>& items;
  const std::vector<Cut>& cuts;
  State states;                // of pieces
  std::atomic<int32_t>* left;  // pieces of each cut
  std::atomic<int64_t> next{0};

  // Takes the next item; false if there is none.
  bool take(Step& step) {
    const int64_t index = next.fetch_add(1, std::memory_order_relaxed);
    if (index >= int64_t(items.size())) return false;
    const Item& item = items[size_t(index)];
    step = {&item, item.begin};
    return true;
  }
  bool advance(Step& step) {
    return (step.tile += kTile) < step.item->end || take(step);
  }
};

template <class T, class S, class K>
void work_off(Work<T, S>& all, Workspace<T, S, K>& work) {
  const Call<T, S>& c = all.c;
  const int64_t group = c.group(), columns = all.states.columns;
  Step step;
  if (!all.take(step)) return;
  Tiles tiles;
  tiles.shape(kTileHeight);
  locate(c, step, work.rows[0]);
  for (int now = 0;; now = 1 - now) {
    const Item& item = *step.item;
    const bool cut = item.cut >= 0;
    const int64_t rows = item.rows * group, first_head = cut ? 0 : item.head, heads = cut ? c.kv_heads : 1;
    Step next = step;
    const bool more = all.advance(next);
    Ahead<S> ahead{&work.rows[1 - now], 0, 0, 0};
    if (more) {
      locate(c, next, work.rows[1 - now]);
      ahead.tokens = next.tokens();
      ahead.bytes = (next.item->cut >= 0 ? c.kv_heads : 1) * c.stored() * int64_t(sizeof(S));
      ahead.first = next.item->cut >= 0 ? 0 : next.item->head * c.stored();
    }
    K* queries = work.queries.of((heads * rows + kMostRows) * columns);  // a block is read whole
    State state{cut ? all.states.sums(all.cuts[size_t(item.cut)].first + item.piece * c.kv_heads * rows)
                    : work.states.of(rows * all.states.stride()),
                columns};
    const bool unpacked = cut && rows <= kUnpackedRows;
    T* plain_queries = work.plain_queries.of(heads * kUnpackedRows * columns);
    for (int64_t head = first_head; head < first_head + heads; ++head) {
      if (step.tile == item.begin) {
        if (unpacked)
          load_queries(c, item, head, columns, plain_queries);
        else
          load_queries(c, item, head, columns, queries);
        state.clear(rows);
      }
      if (unpacked)
        attend<T, K, float, true>(c, step, head, work.rows[now], plain_queries, state, work, ahead);
      else if (cut)
        attend<T, K, float, false>(c, step, head, work.rows[now], queries, state, work, ahead);
      else
        attend<T, K, K, false>(c, step, head, work.rows[now], queries, state, work, ahead);
      if (!cut && step.tile + kTile >= item.end)
        for (int64_t r = 0; r < rows; ++r)
          finish(state, r, c.head_dim, output(c, item.sequence, item.row + r / group, head * group + r % group));
      queries += rows * columns;
      plain_queries += rows * columns;
      state.records = state.sums(rows);
    }
    if (cut && step.tile + kTile >= item.end && all.left[item.cut].fetch_sub(1, std::memory_order_acq_rel) == 1)
      join_pieces(c, all.cuts[size_t(item.cut)], all.states);
    if (!more) break;
    step = next;
  }
}

template <class T, class S>
void attention(const Call<T, S>& c, int64_t threads) {
  using K = std::conditional_t<kNativePairs, T, float>;
  static thread_local std::vector<Item> items;
  static thread_local std::vector<Cut> cuts;
  static thread_local Buffer<float> piece_buffer;
  static thread_local Buffer<std::atomic<int32_t>> left_buffer;
  State states{nullptr, round_up(c.head_dim, kSpan)};
  states.records = piece_buffer.of(plan(c, items, cuts) * states.stride());
  std::atomic<int32_t>* left = left_buffer.of(int64_t(cuts.size()));
  for (size_t i = 0; i < cuts.size(); ++i) left[i].store(int32_t(cuts[i].pieces), std::memory_order_relaxed);
  Work<T, S> all{c, items, cuts, states, left};
  parallel(std::min<int64_t>(threads, int64_t(items.size())), [&](int64_t, int64_t) {
    static thread_local Workspace<T, S, K> work;
    work_off(all, work);
  });
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// Strides are in elements; `bytes` is 2 for bfloat16, 4 for float; those of kv, or 1 where it is codes of 8 bits.
//
// Rows row_starts[s] to row_starts[s + 1] of q are the last of the contexts[s] tokens of sequence s, whose keys and
// values lie in the blocks of its table: block b is [2 (k, v), block_tokens, kv_heads, head_dim] at kv + b *
// block_stride; with codes [2, block_tokens, kv_heads, head_dim + 2], of which the last two are a scale in bfloat16. A
// row sees its own and earlier positions, with a window the latest `window` only. With a softcap, scores are
// softcap * tanh(scale * score / softcap). With one_order a row's bits do not depend on the number of its sequence's rows.
LORIKEET_EXPORT void lorikeet_attention(
    const void* q, int64_t q_stride, const void* kv, int64_t kv_bytes, int64_t block_stride, void* out,
    int64_t out_stride, const int64_t* row_starts, const int64_t* contexts, const int64_t* tables, int64_t table_stride,
    int64_t sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_tokens, double scale,
    int64_t window, double softcap, int64_t one_order, int64_t bytes, int64_t threads) {
  auto compute = [&](auto element, auto stored) {
    using T = decltype(element);
    using S = decltype(stored);
    attention<T, S>({(const T*)q, q_stride, (const S*)kv, block_stride, (T*)out, out_stride, row_starts, contexts, tables,
                     table_stride, sequences, heads, kv_heads, head_dim, block_tokens, float(scale), window,
                     float(softcap), one_order != 0}, threads);
  };
  if (bytes == 2)
    kv_bytes == 1 ? compute(bf16{}, int8_t{}) : compute(bf16{}, bf16{});
  else
    kv_bytes == 1 ? compute(float{}, int8_t{}) : compute(float{}, float{});
}
