// Layers with a state per sequence: the recurrence of linear attention (gated delta rule, Mamba-2), and the short causal
// convolution before it.
//
// A state is updated in place, token by token, in the same order however a prompt is cut into steps, so states and outputs
// of a sequence depend neither on the cuts nor on the batch. Columns of a state do not depend on each other: threads share
// heads and blocks of columns, whose part of the state stays in the cache for all tokens of a sequence.
#include <algorithm>
#include <cmath>

#include "buffer.h"
#include "calls.h"
#include "simd.h"
#include "vectors.h"

namespace lorikeet {
namespace {

constexpr int64_t kWorthAThread = 1 << 13;  // fewer elements are not worth waking a thread

// The sequences of a batch: rows [starts[i], starts[i + 1]) are of sequence i, part p of whose state begins at offset
// [i, p]; if it is not resumed, it starts from zeros. A negative first offset marks padding, which is skipped.
struct Sequences {
  const int64_t *starts, *resumed, *offsets;
  int64_t count, parts;
  bool is_skipped(int64_t i) const { return starts[i] == starts[i + 1] || offsets[i * parts] < 0; }
};

struct Recurrence {
  const void *queries, *keys, *values;        // rows of heads, at strides
  int64_t query_stride, key_stride, value_stride;
  const float *decay, *beta, *skip;           // [rows, heads], [rows, heads], [heads] or null
  float* states;                              // parts of [key_dim, value_dim]
  Sequences sequences;
  int64_t key_heads, heads, key_dim, value_dim;
  void* out;                                  // [rows, heads, value_dim]
  const float* prepared;                      // [key_heads, rows, 2 * key_dim + 1], see prepare()
  int64_t rows;
};

// The key, the query and their product of each row of a key head, as floats; with the delta rule both are normalised and the
// query is scaled.
template <class T>
void prepare(const Recurrence& c, float* to, bool is_delta, int64_t row) {
  const int64_t width = 2 * c.key_dim + 1;
  for (int64_t head = 0; head < c.key_heads; ++head) {
    const T* sides[] = {(const T*)c.keys + row * c.key_stride + head * c.key_dim,
                        (const T*)c.queries + row * c.query_stride + head * c.key_dim};
    float* at = to + (head * c.rows + row) * width;
    for (int side = 0; side < 2; ++side) {
      float factor = 1.0f;
      if (is_delta) {
        F32 squares = zero();
        each_vector(c.key_dim, [&](int64_t i, auto n) {
          const F32 x = get(sides[side] + i, n);
          squares = fma(x, x, squares);
        });
        factor = float(1.0 / std::sqrt(double(sum(squares)) + 1e-6));
        if (side) factor *= float(1.0 / std::sqrt(double(c.key_dim)));
      }
      each_vector(c.key_dim, [&](int64_t i, auto n) {
        set(at + side * c.key_dim + i, mul(get(sides[side] + i, n), splat(factor)), n);
      });
    }
    F32 product = zero();
    each_vector(c.key_dim, [&](int64_t i, auto n) { product = fma(get(at + i, n), get(at + c.key_dim + i, n), product); });
    at[2 * c.key_dim] = sum(product);
  }
}

// What the rows of a state need of a token: its key and query, and what it adds to the state.
template <int N>
struct Token {
  const float* key;
  F32 added[N];
  F32 fade;
};

// One pass over N vectors of columns of a state: S = fade * S + key ⊗ added if it Updates (S is not read if it is new), then
// the sums key' S and query' S of the next token if it Reads.
template <int N, bool Updates, bool Reads, bool IsDelta, class L>
inline void pass(float* state, int64_t stride, int64_t key_dim, bool is_new, const Token<N>& last, const float* key,
                 const float* query, F32* by_key, F32* by_query, L lanes) {
  if constexpr (Reads)
    for (int i = 0; i < N; ++i) by_key[i] = by_query[i] = zero();
  for (int64_t row = 0; row < key_dim; ++row, state += stride) {
    F32 s[N];
    for (int i = 0; i < N; ++i) {
      if (Updates && is_new)
        s[i] = mul(splat(last.key[row]), last.added[i]);
      else {
        s[i] = get(state + i * kLanes, lanes);
        if constexpr (Updates) s[i] = fma(splat(last.key[row]), last.added[i], mul(last.fade, s[i]));
      }
      if constexpr (Updates) set(state + i * kLanes, s[i], lanes);
      if constexpr (Reads) {
        if constexpr (IsDelta) by_key[i] = fma(splat(key[row]), s[i], by_key[i]);
        by_query[i] = fma(splat(query[row]), s[i], by_query[i]);
      }
    }
  }
}

template <class T, int N, bool IsDelta, class L>
void scan(const Recurrence& c, int64_t sequence, int64_t head, int64_t column, L lanes) {
  const int64_t begin = c.sequences.starts[sequence], end = c.sequences.starts[sequence + 1];
  if (c.sequences.is_skipped(sequence)) return;
  const int64_t width = 2 * c.key_dim + 1;
  float* state = c.states + c.sequences.offsets[sequence * c.heads + head] + column;
  const float* prepared = c.prepared + head / (c.heads / c.key_heads) * c.rows * width;
  bool is_new = !c.sequences.resumed[sequence];
  Token<N> last{};
  F32 by_key[N], by_query[N];
  for (int64_t row = begin; row < end; ++row) {
    const float *key = prepared + row * width, *query = key + c.key_dim;
    const F32 inner = splat(query[c.key_dim]), beta = splat(c.beta[row * c.heads + head]);
    const F32 fade = splat(std::exp(c.decay[row * c.heads + head]));
    if (row == begin && is_new)
      for (int i = 0; i < N; ++i) by_key[i] = by_query[i] = zero();
    else if (row == begin)
      pass<N, false, true, IsDelta>(state, c.value_dim, c.key_dim, false, last, key, query, by_key, by_query, lanes);
    else {
      pass<N, true, true, IsDelta>(state, c.value_dim, c.key_dim, is_new, last, key, query, by_key, by_query, lanes);
      is_new = false;
    }
    const T* value = (const T*)c.values + row * c.value_stride + head * c.value_dim + column;
    T* out = (T*)c.out + (row * c.heads + head) * c.value_dim + column;
    last.key = key;
    last.fade = fade;
    for (int i = 0; i < N; ++i) {
      const F32 v = get(value + i * kLanes, lanes);
      last.added[i] = mul(beta, IsDelta ? sub(v, mul(fade, by_key[i])) : v);
      F32 found = fma(fade, by_query[i], mul(inner, last.added[i]));
      if (c.skip) found = fma(splat(c.skip[head]), v, found);
      set(out + i * kLanes, found, lanes);
    }
  }
  pass<N, true, false, IsDelta>(state, c.value_dim, c.key_dim, is_new, last, nullptr, nullptr, by_key, by_query, lanes);
}

constexpr int kColumns = 4;  // vectors of a block of columns: as many chains of sums as hide the latency

template <class T, bool IsDelta>
void recur(Recurrence& c, int64_t threads) {
  static thread_local Buffer<float> room;
  float* prepared = room.of(c.key_heads * c.rows * (2 * c.key_dim + 1));
  c.prepared = prepared;
  const int64_t block = kColumns * kLanes, blocks = (c.value_dim + block - 1) / block;
  const int64_t work = c.rows * c.heads * c.key_dim * c.value_dim;
  parallel(work < 2 * kWorthAThread ? 1 : threads, [&](int64_t thread, int64_t count) {
    const Range rows = part_of(c.rows, thread, count);
    for (int64_t row = rows.begin; row < rows.end; ++row) prepare<T>(c, prepared, IsDelta, row);
    if (count > 1) barrier();
    const Range mine = part_of(c.heads * blocks, thread, count);
    for (int64_t head = mine.begin / blocks; head * blocks < mine.end; ++head)
      for (int64_t sequence = 0; sequence < c.sequences.count; ++sequence)
        for (int64_t i = std::max(mine.begin, head * blocks); i < std::min(mine.end, (head + 1) * blocks); ++i) {
          int64_t column = i % blocks * block;
          const int64_t end = std::min(column + block, c.value_dim);
          if (end - column == block) {
            scan<T, kColumns, IsDelta>(c, sequence, head, column, All{});
            continue;
          }
          for (; column + kLanes <= end; column += kLanes) scan<T, 1, IsDelta>(c, sequence, head, column, All{});
          if (column < end) scan<T, 1, IsDelta>(c, sequence, head, column, First{int(end - column)});
        }
  });
}

constexpr int64_t kChannels = 1024;  // of a block: their weights and last rows fit the first-level cache

// A causal convolution: out[row] = bias + sum over taps of weight[tap] * x[row - taps + 1 + tap], with SiLU if it has it. A
// part of a tail is [taps - 1, channels of the part].
template <class T>
struct Convolution {
  const T* x;
  int64_t stride;
  const T *weight, *bias;
  float* tails;
  T* out;
  Sequences sequences;
  int64_t channels, taps;
  bool has_silu;

  // Calls each(begin, end, tail) for the pieces of the channels [begin, end) that are of one part.
  template <class F>
  void each_part(int64_t sequence, int64_t begin, int64_t end, const F& each) const {
    for (const int64_t own = channels / sequences.parts; begin < end;) {
      const int64_t part = begin / own, stop = std::min(end, (part + 1) * own);
      each(begin, stop, tails + sequences.offsets[sequence * sequences.parts + part] + begin % own);
      begin = stop;
    }
  }

  // One row of the channels [begin, end). `input` loads what a tap reads.
  template <class F>
  void compute(int64_t row, int64_t begin, int64_t end, const F& input) const {
    each_vector(end - begin, [&](int64_t i, auto n) {
      F32 found = bias ? get(bias + begin + i, n) : zero();
      for (int64_t tap = 0; tap < taps; ++tap) found = fma(get(weight + tap * channels + begin + i, n), input(tap, i, n), found);
      set(out + row * channels + begin + i, has_silu ? silu(found) : found, n);
    });
  }

  // The channels [begin, end) of one sequence. Its tail becomes its last rows.
  void run(int64_t sequence, int64_t begin, int64_t end) const {
    const int64_t history = taps - 1, own = channels / sequences.parts;
    const int64_t first = sequences.starts[sequence], last = sequences.starts[sequence + 1];
    each_part(sequence, begin, end, [&](int64_t at, int64_t stop, float* tail) {
      if (!sequences.resumed[sequence])
        for (int64_t i = 0; i < history; ++i) std::fill_n(tail + i * own, stop - at, 0.0f);
      for (int64_t row = first; row < std::min(last, first + history); ++row)
        compute(row, at, stop, [&](int64_t tap, int64_t i, auto n) {
          const int64_t from = row - history + tap;
          return from < first ? get(tail + (from - first + history) * own + i, n) : get(x + from * stride + at + i, n);
        });
    });
    for (int64_t row = first + history; row < last; ++row) {
      const T* from = x + (row - history) * stride + begin;
      compute(row, begin, end, [&](int64_t tap, int64_t i, auto n) { return get(from + tap * stride + i, n); });
    }
    each_part(sequence, begin, end, [&](int64_t at, int64_t stop, float* tail) {
      for (int64_t row = last - history; row < last; ++row)
        each_vector(stop - at, [&](int64_t i, auto n) {
          const F32 kept = row < first ? get(tail + (row - first + history) * own + i, n) : get(x + row * stride + at + i, n);
          set(tail + (row - last + history) * own + i, kept, n);
        });
    });
  }

  // Fetches the tail of one sequence into the caches.
  void fetch(int64_t sequence, int64_t begin, int64_t end) const {
    if (sequence >= sequences.count || sequences.is_skipped(sequence) || !sequences.resumed[sequence]) return;
    const int64_t own = channels / sequences.parts;
    each_part(sequence, begin, end, [&](int64_t at, int64_t stop, const float* tail) {
      for (int64_t i = 0; i < taps - 1; ++i)
        for (int64_t column = 0; column < stop - at; column += 64 / sizeof(float))
          __builtin_prefetch(tail + i * own + column, 1, 2);
    });
  }

  void operator()(int64_t threads) const {
    const int64_t work = sequences.starts[sequences.count] * channels * taps;
    parallel(work < 2 * kWorthAThread ? 1 : threads, [&](int64_t thread, int64_t count) {
      const Range mine = part_of((channels + kLanes - 1) / kLanes, thread, count);
      const int64_t last = std::min(mine.end * kLanes, channels);
      for (int64_t begin = mine.begin * kLanes; begin < last; begin += kChannels) {
        const int64_t end = std::min(last, begin + kChannels);
        fetch(0, begin, end);
        for (int64_t sequence = 0; sequence < sequences.count; ++sequence) {
          fetch(sequence + 1, begin, end);
          if (!sequences.is_skipped(sequence)) run(sequence, begin, end);
        }
      }
    });
  }
};

// Groups of columns: norm(x) * weight * silu(gate), or norm(x * silu(gate)) * weight. The weight repeats.
template <class T>
void gated_norm(const T* x, int64_t x_stride, const T* gate, int64_t gate_stride, const T* weight, int64_t weights, T* out,
                int64_t rows, int64_t columns, int64_t group, float eps, bool norm_first, int64_t threads) {
  const int64_t groups = columns / group;
  parallel(rows * columns < 2 * kWorthAThread ? 1 : threads, [&](int64_t thread, int64_t count) {
    const Range mine = part_of(rows * groups, thread, count);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t row = item / groups, column = item % groups * group;
      const T *xs = x + row * x_stride + column, *gates = gate + row * gate_stride + column;
      const T* factors = weight + column % weights;
      T* to = out + row * columns + column;
      F32 squares = zero();
      each_vector(group, [&](int64_t i, auto n) {
        F32 v = get(xs + i, n);
        if (!norm_first) v = mul(v, silu(get(gates + i, n)));
        squares = fma(v, v, squares);
      });
      const F32 scale = splat(float(1.0 / std::sqrt(double(sum(squares)) / double(group) + double(eps))));
      each_vector(group, [&](int64_t i, auto n) {
        set(to + i, mul(mul(mul(get(xs + i, n), silu(get(gates + i, n))), scale), get(factors + i, n)), n);
      });
    }
  });
}

// The gates of a recurrence: decay = rate * step with step = softplus(a + bias), within limits, and beta = sigmoid(b), or the
// step itself if b is null.
template <class T>
struct Gates {
  const T* b;
  int64_t b_stride;
  const T* a;
  int64_t a_stride;
  const float *rates, *bias;
  float least, most;
  float *decay, *beta;

  void operator()(int64_t rows, int64_t heads, int64_t threads) const {
    parallel(rows * heads < kWorthAThread / 4 ? 1 : threads, [&](int64_t thread, int64_t count) {
      const Range mine = part_of(rows, thread, count);
      for (int64_t row = mine.begin; row < mine.end; ++row)
        for (int64_t head = 0; head < heads; ++head) {
          const float x = to_float(a[row * a_stride + head]) + bias[head];
          const float step = std::min(most, std::max(least, x > 20.0f ? x : std::log1p(std::exp(x))));
          decay[row * heads + head] = rates[head] * step;
          beta[row * heads + head] = b ? 1.0f / (1.0f + std::exp(-to_float(b[row * b_stride + head]))) : step;
        }
    });
  }
};

}  // namespace
}  // namespace lorikeet

LORIKEET_EXPORT void lorikeet_recurrence_gates(
    const void* b, int64_t b_stride, const void* a, int64_t a_stride, const float* rates, const float* bias, double least,
    double most, float* decay, float* beta, int64_t rows, int64_t heads, int64_t bytes, int64_t threads) {
  using namespace lorikeet;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    Gates<T>{(const T*)b, b_stride, (const T*)a, a_stride, rates, bias, float(least), float(most), decay, beta}(rows, heads,
                                                                                                             threads);
  };
  bytes == 2 ? run(bf16{}) : run(float{});
}

LORIKEET_EXPORT void lorikeet_recurrence(
    const void* queries, int64_t query_stride, const void* keys, int64_t key_stride, const void* values,
    int64_t value_stride, const float* decay, const float* beta, const float* skip, float* states, const int64_t* starts,
    const int64_t* resumed, const int64_t* offsets, int64_t sequences, int64_t heads, int64_t key_heads, int64_t key_dim,
    int64_t value_dim, void* out, int64_t is_delta, int64_t bytes, int64_t threads) {
  using namespace lorikeet;
  Recurrence c{queries, keys, values, query_stride, key_stride, value_stride, decay, beta, skip, states,
               {starts, resumed, offsets, sequences, heads}, key_heads, heads, key_dim, value_dim, out, nullptr,
               starts[sequences]};
  if (bytes == 2)
    (is_delta ? recur<bf16, true> : recur<bf16, false>)(c, threads);
  else
    (is_delta ? recur<float, true> : recur<float, false>)(c, threads);
}

LORIKEET_EXPORT void lorikeet_causal_conv(
    const void* x, int64_t stride, const void* weight, const void* bias, float* tails, void* out, const int64_t* starts,
    const int64_t* resumed, const int64_t* offsets, int64_t sequences, int64_t parts, int64_t channels, int64_t taps,
    int64_t has_silu, int64_t bytes, int64_t threads) {
  using namespace lorikeet;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    Convolution<T>{(const T*)x, stride, (const T*)weight, (const T*)bias, tails, (T*)out,
                   {starts, resumed, offsets, sequences, parts}, channels, taps, has_silu != 0}(threads);
  };
  bytes == 2 ? run(bf16{}) : run(float{});
}

LORIKEET_EXPORT void lorikeet_gated_norm(
    const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const void* weight, int64_t weights, void* out,
    int64_t rows, int64_t columns, int64_t group, double eps, int64_t norm_first, int64_t bytes, int64_t threads) {
  using namespace lorikeet;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    gated_norm((const T*)x, x_stride, (const T*)gate, gate_stride, (const T*)weight, weights, (T*)out, rows, columns,
               group, float(eps), norm_first != 0, threads);
  };
  bytes == 2 ? run(bf16{}) : run(float{});
}
