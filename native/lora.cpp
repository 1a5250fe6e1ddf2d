// out[rows, columns] += x[rows] @ Aᵀ @ Bᵀ for many adapters at once, each on rows of its own, read where they lie.
//
// Two phases with one barrier between them: shrink makes inner = x @ Aᵀ, expand adds inner @ Bᵀ. With few rows per
// adapter the time is that of reading A and Bᵀ, so every thread reads an equal share of each, in memory order, and
// fetches the next rows while it computes. With many rows it is the arithmetic; the same loops then find their
// operands in registers and the first cache.
//
// Every sum has one order whatever the number of rows, segments and threads: A row by row over its lanes, Bᵀ rank by
// rank. So an answer does not depend on what else is in the batch.
#include <algorithm>
#include <memory>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace lorikeet {
namespace {

constexpr int kModules = 7;                       // of a layer: LORA_MODULES
constexpr int kShrinkRanks = 4;                   // of a tile: kShrinkRows rows of x times so many rows of A
constexpr int kShrinkRows = kLanes == 16 ? 6 : 2;
constexpr int kExpandGroups = kLanes == 16 ? 8 : 4;  // of rank rows of Bᵀ that are held in registers, a span wide
constexpr int64_t kSpan = 2 * kLanes;
constexpr int64_t kRowBlock = 64;
constexpr int64_t kSums = 64 * kRowBlock;         // floats that hold sums between rank tiles, in the first cache
constexpr int64_t kFetch = 12;                    // reading an element from memory takes as long as so many rows' sums

// What a padded adapter reads for the ranks that it lacks: zeros from a ring too large for any cache. Such a kernel
// would read them from the padded slots of its adapters, and they would not be in the cache there either.
class ZeroRing {
 public:
  // Place of the next `bytes` bytes.
  int64_t take(int64_t bytes) {
    if (!zeros_) {
      zeros_.reset(new (std::align_val_t(kAlign)) char[kBytes + kSlack]);
      std::memset(zeros_.get(), 0, kBytes + kSlack);  // so that there are pages of its own to read
    }
    const int64_t at = at_;
    at_ = (at_ + bytes) % kBytes;
    return at;
  }
  const char* row(int64_t at) const { return zeros_.get() + at % kBytes; }

 private:
  struct Free {
    void operator()(char* p) const { operator delete[](p, std::align_val_t(kAlign)); }
  };
  static constexpr size_t kAlign = 64;
  static constexpr int64_t kBytes = int64_t(64) << 20, kSlack = int64_t(1) << 20;  // the slack holds the longest row
  std::unique_ptr<char[], Free> zeros_;
  int64_t at_ = 0;
};

struct Piece {
  int64_t a, bt, rows;  // addresses
};

// One module of up to kRowBlock rows of a segment.
struct Part {
  int64_t start, rows;
  const Piece* pieces;
  int64_t real_rank, rank;     // with and without the padding
  int64_t padding_a, padding_b;
  int64_t column, outputs;
  int64_t inner, inner_stride;  // where its inner rows begin
  int64_t shrink_cost, shrink_before;  // of a rank tile; of all parts before this one
  int64_t expand_cost, expand_before;  // of a span
  int64_t rank_tiles() const { return (rank + kShrinkRanks - 1) / kShrinkRanks; }
  int64_t spans() const { return (outputs + kSpan - 1) / kSpan; }
};

// Those of `count` units of `cost` each, lying on the line of all costs from `before` on, that begin in [begin, end).
Range units_in(Range line, int64_t before, int64_t cost, int64_t count) {
  auto at = [&](int64_t point) { return std::clamp<int64_t>((point - before + cost - 1) / cost, 0, count); };
  return {line.begin <= before ? 0 : at(line.begin), line.end <= before ? 0 : at(line.end)};
}

// Part of a part: rank rows [rank, rank + ranks) and columns [begin, end).
template <class T>
struct Step {
  const Part* part;
  int64_t rank, ranks, begin, end;
  const T* rows[kExpandGroups * kGroup<T>];
};

template <class T>
struct Call {
  const T* x;
  int64_t x_stride;
  T* out;
  int64_t out_stride;
  int64_t inputs;
  std::vector<Part> parts;
  std::vector<T> inner;
  ZeroRing ring;
  int64_t shrink_total, expand_total;

  void add(int64_t start, int64_t stop, const Piece* pieces, const Piece* pieces_end, int64_t column, int64_t outputs,
           int64_t padded_rank, int64_t& inner_size);
  void find_rows(Step<T>& step, bool expand);
  void shrink(Range line);
  void expand(Range line);
};

template <class T>
void Call<T>::add(int64_t start, int64_t stop, const Piece* pieces, const Piece* pieces_end, int64_t column,
                  int64_t outputs, int64_t padded_rank, int64_t& inner_size) {
  Part part{};
  for (const Piece* piece = pieces; piece < pieces_end; ++piece) part.real_rank += piece->rows;
  if (part.real_rank == 0 || outputs == 0) return;
  part.pieces = pieces;
  part.rank = std::max(part.real_rank, padded_rank);
  const int64_t lacking = (part.rank - part.real_rank) * int64_t(sizeof(T));
  if (lacking) {
    part.padding_a = ring.take(lacking * inputs);
    part.padding_b = ring.take(lacking * outputs);
  }
  part.column = column;
  part.outputs = outputs;
  part.inner_stride = part.rank_tiles() * kShrinkRanks;
  for (part.start = start; part.start < stop; part.start += part.rows) {
    part.rows = std::min(stop - part.start, kRowBlock);
    part.inner = inner_size;
    inner_size += part.rows * part.inner_stride;
    part.shrink_cost = kShrinkRanks * inputs * (kFetch + part.rows);
    part.shrink_before = shrink_total;
    shrink_total += part.shrink_cost * part.rank_tiles();
    part.expand_cost = kSpan * part.rank * (kFetch + part.rows);
    part.expand_before = expand_total;
    expand_total += part.expand_cost * part.spans();
    parts.push_back(part);
  }
}

// Sets step.rows to the rows of A, or of Bᵀ. Those that a tile is wide but the adapter is not repeat the last.
template <class T>
void Call<T>::find_rows(Step<T>& step, bool expand) {
  const Part& part = *step.part;
  const Piece* piece = part.pieces;
  int64_t first = 0;  // of the piece
  const int64_t width = expand ? part.outputs : inputs;
  for (int64_t i = 0; i < step.ranks; ++i) {
    const int64_t rank = step.rank + i;
    if (rank >= part.real_rank) {
      step.rows[i] = (const T*)ring.row((expand ? part.padding_b : part.padding_a) +
                                        (rank - part.real_rank) * width * int64_t(sizeof(T)));
      continue;
    }
    while (rank >= first + piece->rows) first += (piece++)->rows;
    step.rows[i] = (const T*)(expand ? piece->bt : piece->a) + (rank - first) * width;
  }
  const int64_t multiple = expand ? kGroup<T> : kShrinkRanks;
  for (int64_t i = step.ranks; i % multiple; ++i) step.rows[i] = step.rows[i - 1];
}

template <class T, int Rows>
void shrink_tile(const T* x, int64_t x_stride, const Step<T>& step, const Step<T>& next, int64_t inputs, T* inner,
                 int64_t inner_stride) {
  constexpr int64_t kWide = kLanes * kGroup<T>;
  F32 sums[Rows][kShrinkRanks];
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < kShrinkRanks; ++j) sums[r][j] = zero();
  auto add_products = [&](int64_t k, auto load_at) __attribute__((always_inline)) {
    decltype(load_group(x)) a[kShrinkRanks];
    for (int j = 0; j < kShrinkRanks; ++j) a[j] = load_at(step.rows[j] + k);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      auto row = load_at(x + r * x_stride + k);
      for (int j = 0; j < kShrinkRanks; ++j) sums[r][j] = dot(sums[r][j], row, a[j]);
    }
  };
  int64_t k = 0;
  for (; k + kWide <= inputs; k += kWide) {
    for (int j = 0; j < kShrinkRanks; ++j) _mm_prefetch((const char*)(next.rows[j] + k), _MM_HINT_T1);
    add_products(k, [](const T* p) __attribute__((always_inline)) { return load_group(p); });
  }
  if (k < inputs)
    add_products(k, [&](const T* p) __attribute__((always_inline)) { return load_group_n(p, int(inputs - k)); });
  for (int r = 0; r < Rows; ++r) {
    float wide[kShrinkRanks];
    _mm_storeu_ps(wide, sum(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    for (int j = 0; j < kShrinkRanks; ++j) put(inner + r * inner_stride + j, j < step.ranks ? wide[j] : 0.0f);
  }
}

template <class T>
void Call<T>::shrink(Range line) {
  Step<T> steps[2];
  auto run = [&](const Step<T>& step, const Step<T>& next) {
    const Part& part = *step.part;
    const int64_t tiles = (part.rows + kShrinkRows - 1) / kShrinkRows;
    for (int64_t i = 0; i < tiles; ++i) {
      const Range rows = part_of(part.rows, i, tiles);
      const T* from = x + (part.start + rows.begin) * x_stride;
      T* to = inner.data() + part.inner + rows.begin * part.inner_stride + step.rank;
      switch (rows.end - rows.begin) {
        case 1: shrink_tile<T, 1>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
        case 2: shrink_tile<T, 2>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
#if defined(__AVX512F__)
        case 3: shrink_tile<T, 3>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
        case 4: shrink_tile<T, 4>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
        case 5: shrink_tile<T, 5>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
        case 6: shrink_tile<T, 6>(from, x_stride, step, next, inputs, to, part.inner_stride); break;
#endif
      }
    }
  };
  bool begun = false;
  int now = 0;
  for (const Part& part : parts) {
    const Range tiles = units_in(line, part.shrink_before, part.shrink_cost, part.rank_tiles());
    for (int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
      const int64_t rank = tile * kShrinkRanks;
      steps[1 - now] = {&part, rank, std::min<int64_t>(kShrinkRanks, part.rank - rank), 0, 0, {}};
      find_rows(steps[1 - now], false);
      if (begun) run(steps[now], steps[1 - now]);
      begun = true;
      now = 1 - now;
    }
  }
  if (begun) run(steps[now], steps[now]);
}

// A group of rank rows, a span wide.
inline PairSpan load_groups(const bf16* const* rows, int64_t column) {
  return interleave(load_group(rows[0] + column), load_group(rows[1] + column));
}
inline PairSpan load_groups_n(const bf16* const* rows, int64_t column, int n) {
  return interleave(load_group_n(rows[0] + column, n), load_group_n(rows[1] + column, n));
}
inline Span load_groups(const float* const* rows, int64_t column) { return load_span(rows[0] + column); }
inline Span load_groups_n(const float* const* rows, int64_t column, int n) {
  return {load_n(rows[0] + column, std::min(n, kLanes)),
          n > kLanes ? load_n(rows[0] + column + kLanes, n - kLanes) : zero()};
}

// Adds the products of a rank tile to the sums of the part's rows and columns [step.begin, step.end), which lie in
// `sums` from the first rank tile to the last, when they are added to `out`.
template <class T, int Groups>
void expand_tile(const Step<T>& step, const Step<T>& next, const T* inner, float* sums, T* out, int64_t out_stride) {
  const int64_t inner_stride = step.part->inner_stride, rows = step.part->rows;
  const bool first = step.rank == 0, last = step.rank + step.ranks == step.part->rank;
  const int64_t ahead = next.begin - step.begin;
  for (int64_t c = step.begin; c < step.end; c += kSpan, sums += rows * kSpan) {
    const int n = int(std::min(kSpan, step.part->outputs - c));
    decltype(load_groups(step.rows, c)) b[Groups];
    for (int g = 0; g < Groups; ++g)
      b[g] = n == kSpan ? load_groups(step.rows + g * kGroup<T>, c) : load_groups_n(step.rows + g * kGroup<T>, c, n);
    for (int g = 0; g < Groups * kGroup<T>; ++g)
      _mm_prefetch((const char*)(next.rows[g] + c + ahead), _MM_HINT_T1);
    for (int64_t r = 0; r < rows; ++r) {
      Span sum = {zero(), zero()};
      if (!first) sum = {load(sums + r * kSpan), load(sums + r * kSpan + kLanes)};
#pragma GCC unroll 8
      for (int g = 0; g < Groups; ++g) {
        auto value = splat_group(inner + r * inner_stride + g * kGroup<T>);
        sum = {dot(sum.low, value, b[g].low), dot(sum.high, value, b[g].high)};
      }
      if (!last) {
        store(sums + r * kSpan, sum.low);
        store(sums + r * kSpan + kLanes, sum.high);
        continue;
      }
      T* to = out + r * out_stride + c;
      T edge[kSpan];
      if (n < kSpan) to = (T*)std::memcpy(edge, to, size_t(n) * sizeof(T));
      const Span before = load_span(to);
      store_span(to, {add(before.low, sum.low), add(before.high, sum.high)});
      if (n < kSpan) std::memcpy(out + r * out_stride + c, edge, size_t(n) * sizeof(T));
    }
  }
}

template <class T>
void Call<T>::expand(Range line) {
  alignas(64) float sums[kSums];
  Step<T> steps[2];
  auto run = [&](const Step<T>& step, const Step<T>& next) {
    const Part& part = *step.part;
    const T* from = inner.data() + part.inner + step.rank;
    T* to = out + part.start * out_stride + part.column;
    switch ((step.ranks + kGroup<T> - 1) / kGroup<T>) {
      case 1: return expand_tile<T, 1>(step, next, from, sums, to, out_stride);
      case 2: return expand_tile<T, 2>(step, next, from, sums, to, out_stride);
      case 3: return expand_tile<T, 3>(step, next, from, sums, to, out_stride);
      case 4: return expand_tile<T, 4>(step, next, from, sums, to, out_stride);
#if defined(__AVX512F__)
      case 5: return expand_tile<T, 5>(step, next, from, sums, to, out_stride);
      case 6: return expand_tile<T, 6>(step, next, from, sums, to, out_stride);
      case 7: return expand_tile<T, 7>(step, next, from, sums, to, out_stride);
      case 8: return expand_tile<T, 8>(step, next, from, sums, to, out_stride);
#endif
    }
  };
  bool begun = false;
  int now = 0;
  for (const Part& part : parts) {
    const Range spans = units_in(line, part.expand_before, part.expand_cost, part.spans());
    const int64_t stop = std::min(spans.end * kSpan, part.outputs), block = kSums / part.rows / kSpan * kSpan;
    for (int64_t column = spans.begin * kSpan; column < stop; column += block)
      for (int64_t rank = 0; rank < part.rank; rank += kExpandGroups * kGroup<T>) {
        Step<T>& next = steps[1 - now];
        next = {&part, rank, std::min<int64_t>(kExpandGroups * kGroup<T>, part.rank - rank), column,
                std::min(column + block, stop), {}};
        find_rows(next, true);
        for (int64_t i = next.ranks; i < kExpandGroups * kGroup<T>; ++i) next.rows[i] = next.rows[i - 1];
        if (begun) run(steps[now], next);
        begun = true;
        now = 1 - now;
      }
  }
  if (begun) run(steps[now], steps[now]);
}

template <class T>
void lora(const T* x, int64_t x_stride, T* out, int64_t out_stride, int64_t inputs, const int64_t* segments,
          int64_t count, int64_t layer, const int64_t* modules, const int64_t* columns, const int64_t* outputs,
          int64_t module_count, int64_t padded_rank, int64_t threads) {
  static thread_local Call<T> call;  // keeps its memory
  call.x = x;
  call.x_stride = x_stride;
  call.out = out;
  call.out_stride = out_stride;
  call.inputs = inputs;
  call.parts.clear();
  call.shrink_total = call.expand_total = 0;
  int64_t inner_size = 0;
  for (int64_t s = 0; s < count; ++s) {
    const int64_t* segment = segments + s * 4;
    const auto* pieces = (const Piece*)segment[2];
    const int64_t* index = (const int64_t*)segment[3] + layer * kModules;
    for (int64_t m = 0; m < module_count; ++m)
      call.add(segment[0], segment[1], pieces + index[modules[m]], pieces + index[modules[m] + 1], columns[m],
               outputs[m], padded_rank, inner_size);
  }
  if (call.parts.empty()) return;
  if (int64_t(call.inner.size()) < inner_size) call.inner.resize(inner_size);
  Call<T>& shared = call;
  parallel(threads, [&](int64_t thread, int64_t of) {
    shared.shrink(part_of(shared.shrink_total, thread, of));
    if (of > 1) barrier();
    shared.expand(part_of(shared.expand_total, thread, of));
  });
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// For every segment, an adapter's rows [start, stop), and every module: out[rows, column : column + outputs] +=
// x[rows] @ Aᵀ @ Bᵀ. Strides are in elements; `bytes` is 2 for bfloat16, 4 for float.
//
// segments: [count, 4], in row order and disjoint: start, stop, addresses of the adapter's pieces and of its index.
// pieces: [pieces, 3]: address of rows of A [rows, in_features], address of the same rows of Bᵀ [rows, outputs], rows.
// index: [layers * 7 + 1]: pieces of (layer, module) are index[layer * 7 + module] up to the next entry.
// modules, columns, outputs: [module_count], the modules that read this x.
// padded_rank: 0, or compute (and read) as if every adapter had this rank in the modules that it touches.
LORIKEET_EXPORT void lorikeet_lora(
    const void* x, int64_t x_stride, void* out, int64_t out_stride, int64_t in_features, const int64_t* segments,
    int64_t count, int64_t layer, const int64_t* modules, const int64_t* columns, const int64_t* outputs,
    int64_t module_count, int64_t padded_rank, int64_t bytes, int64_t threads) {
  if (bytes == 2)
    lora((const bf16*)x, x_stride, (bf16*)out, out_stride, in_features, segments, count, layer, modules, columns,
         outputs, module_count, padded_rank, threads);
  else
    lora((const float*)x, x_stride, (float*)out, out_stride, in_features, segments, count, layer, modules, columns,
         outputs, module_count, padded_rank, threads);
}
