// Divides the LoRA part of a call into tiles and assigns them to threads.
//
// T is the element of the product, E that of A and Bᵀ as they are stored: T, or codes of 8 bits. Then every rank has
// one scale, the product of those of its row of A and of its row of Bᵀ; the scales of a piece lie before its A.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "extras.h"
#include "parallel.h"
#include "records.h"
#include "simd.h"
#include "tile_unit.h"

namespace lorikeet {

template <class T>
constexpr int kShrinkRanks = kTileUnit<T> ? 16 : 4;   // of a tile: rows of x times so many rows of A
template <class T>
constexpr int kExpandGroups = kTileUnit<T> ? 16 : 4;  // of rank rows of Bᵀ, a span wide
constexpr int64_t kSpan = 2 * kLanes;
template <class T>
constexpr int64_t kAhead = kTileUnit<T> ? 1 : 3;      // tiles between the one at hand and the one that is being fetched
constexpr int64_t kPartRows = 64;
constexpr int64_t kSums = 64 * kPartRows;         // floats that hold sums between rank tiles, in the first cache
constexpr int64_t kElementFetch = 12;             // reading an element from memory takes as long as so many rows' sums

// The zeros that a padded adapter reads for its missing ranks, in a ring larger than any cache. A padding kernel would
// read them from padded adapter slots, which would not be in the cache either.
class ZeroRing {
 public:
  // Place of the next `bytes` bytes.
  int64_t take(int64_t bytes) {
    if (!zeros_) {
      zeros_.reset(new (std::align_val_t(kHugePage)) char[kBytes + kSlack]);
      madvise(zeros_.get(), kBytes + kSlack, MADV_HUGEPAGE);  // like adapters
      std::memset(zeros_.get(), 0, kBytes + kSlack);          // so that there are pages of its own to read
    }
    const int64_t at = at_;
    at_ = (at_ + bytes) % kBytes;
    return at;
  }
  const char* row(int64_t at) const { return zeros_.get() + at % kBytes; }

 private:
  struct Free {
    void operator()(char* p) const { operator delete[](p, std::align_val_t(kHugePage)); }
  };
  static constexpr size_t kHugePage = size_t(2) << 20;
  static constexpr int64_t kBytes = int64_t(64) << 20, kSlack = int64_t(2) << 20;  // the slack holds the longest row
  std::unique_ptr<char[], Free> zeros_;
  int64_t at_ = 0;
};

constexpr int64_t kModules = 7;  // of a layer: LORA_MODULES

// One module of up to kPartRows rows of a segment.
struct Part {
  int64_t start, rows;
  const Piece* pieces;
  int64_t real_rank, rank;             // without and with padding
  int64_t padding_a, padding_b;        // places in the ring
  int64_t column, outputs;
  int64_t inner, inner_stride;         // where its inner rows begin
  int64_t rank_tiles;
  int64_t shrink_cost, shrink_before;  // of a rank tile; of all parts before this one
  int64_t expand_cost, expand_before;  // of a span; of all parts before this one
  int64_t spans() const { return (outputs + kSpan - 1) / kSpan; }
};

// Those of `count` units of `cost` each, lying on the line of all costs from `before` on, that begin in [begin, end).
inline Range units_in(Range line, int64_t before, int64_t cost, int64_t count) {
  auto at = [&](int64_t point) { return std::clamp<int64_t>((point - before + cost - 1) / cost, 0, count); };
  return {line.begin <= before ? 0 : at(line.begin), line.end <= before ? 0 : at(line.end)};
}

// One tile: rank rows [rank, rank + ranks) and columns [begin, end), of A or of Bᵀ.
template <class T, class E>
struct Step {
  const Part* part;
  int64_t rank, ranks, begin, end;
  const E* rows[kExpandGroups<T> * kGroup<T>];  // of either tile; those beyond `ranks` repeat the last
  const float* scales[kShrinkRanks<T>];         // of A's tile, if it is of codes

  // Multiplies sums, of a rank each, by the scales.
  void scale(float* sums) const {
    for (int64_t i = 0; i < ranks; ++i) {
      float scale;
      std::memcpy(&scale, scales[i], sizeof scale);
      sums[i] *= scale;
    }
  }
};

template <class E>
constexpr bool kAreCodes = sizeof(E) == 1;

template <class T, class E>
struct Lora {
  const T* x;
  int64_t x_stride;
  T* out;
  int64_t out_stride;
  int64_t inputs;
  std::vector<Part> parts;
  std::vector<T> inner;
  ZeroRing ring;
  int64_t shrink_total = 0, expand_total = 0;

  void begin(const T* input, int64_t input_stride, T* output, int64_t output_stride, int64_t columns) {
    x = input, x_stride = input_stride, out = output, out_stride = output_stride, inputs = columns;
    parts.clear();
    shrink_total = expand_total = 0;
  }

  void plan(const Adapters& adapters, int64_t layer, const Targets& targets) {
    int64_t inner_size = 0;
    for (int64_t s = 0; s < adapters.count; ++s) {
      const Segment& segment = adapters.segments[s];
      const int64_t* index = segment.index + layer * kModules;
      for (int64_t start = segment.start; start < segment.stop; start += kPartRows)  // what reads the same rows follows
        for (int64_t t = 0; t < targets.count; ++t) {                                // one on the other
          const Target& target = targets.each[t];
          inner_size = add(start, std::min(segment.stop, start + kPartRows), segment.pieces + index[target.module],
                           segment.pieces + index[target.module + 1], target.column, target.outputs,
                           adapters.padded_rank, inner_size);
        }
    }
    if (int64_t(inner.size()) < inner_size) inner.resize(inner_size);
  }

  // Adds a module of a segment's rows [start, stop) and returns the new size of `inner`.
  int64_t add(int64_t start, int64_t stop, const Piece* pieces, const Piece* pieces_end, int64_t column,
              int64_t outputs, int64_t padded_rank, int64_t inner_size) {
    Part part{};
    for (const Piece* piece = pieces; piece < pieces_end; ++piece) part.real_rank += piece->rows;
    if (part.real_rank == 0) return inner_size;
    part.start = start;
    part.rows = stop - start;
    part.pieces = pieces;
    part.rank = std::max(part.real_rank, padded_rank);
    const int64_t lacking = (part.rank - part.real_rank) * int64_t(sizeof(E));
    if (lacking) {
      part.padding_a = ring.take(lacking * inputs);
      part.padding_b = ring.take(lacking * outputs);
    }
    part.column = column;
    part.outputs = outputs;
    part.rank_tiles = (part.rank + kShrinkRanks<T> - 1) / kShrinkRanks<T>;
    const int64_t unit = std::max(kShrinkRanks<T>, kTileUnit<T> ? int(kTileDepth) : 1);
    part.inner_stride = (part.rank + unit - 1) / unit * unit;
    part.inner = inner_size;
    // The tile unit takes as long for any number of rows and ranks that a tile holds; next to memory it is fast.
    const int64_t sums = kTileUnit<T> ? (part.rows + kTileHeight - 1) / kTileHeight * kElementFetch / 4 : part.rows;
    constexpr int64_t kFetch = kElementFetch * int64_t(sizeof(E)) / int64_t(sizeof(T));
    part.shrink_cost = inputs * (part.rank * kFetch / part.rank_tiles + kShrinkRanks<T> * sums);
    part.shrink_before = shrink_total;
    shrink_total += part.shrink_cost * part.rank_tiles;
    part.expand_cost = kSpan * (part.rank * kFetch + (kTileUnit<T> ? part.inner_stride : part.rank) * sums);
    part.expand_before = expand_total;
    expand_total += part.expand_cost * part.spans();
    parts.push_back(part);
    return inner_size + part.rows * part.inner_stride;
  }

  // A row of a padded adapter's missing ranks.
  const E* padding(const Part& part, bool expand, int64_t rank, int64_t width) const {
    const int64_t at = expand ? part.padding_b : part.padding_a;
    return (const E*)ring.row(at + (rank - part.real_rank) * width * int64_t(sizeof(E)));
  }

  // Sets step.rows to rows of `width` elements: of Bᵀ (expand) or of A, with their scales.
  void find_rows(Step<T, E>& step, bool expand, int64_t width) const {
    const Part& part = *step.part;
    const Piece* piece = part.pieces;
    int64_t first = 0;  // of the piece
    for (int64_t i = 0; i < kExpandGroups<T> * kGroup<T>; ++i) {
      const int64_t rank = step.rank + i;
      if (i >= step.ranks) {
        step.rows[i] = step.rows[i - 1];
      } else if (rank < part.real_rank) {
        while (rank >= first + piece->rows) first += (piece++)->rows;
        step.rows[i] = (const E*)(expand ? piece->bt : piece->a) + (rank - first) * width;
        if (kAreCodes<E> && !expand && i < kShrinkRanks<T>) {
          step.scales[i] = piece->scale(rank - first);
          __builtin_prefetch(step.scales[i], 0, 3);
        }
      } else {
        step.rows[i] = padding(part, expand, rank, width);
        if (kAreCodes<E> && !expand && i < kShrinkRanks<T>) step.scales[i] = (const float*)step.rows[i];  // 0 as well
      }
    }
  }
};

// The rank tiles of A in a thread's share of the shrink.
template <class T, class E>
struct ShrinkWalk {
  const Lora<T, E>& call;
  Range line;
  size_t part = 0;
  int64_t tile = -1;

  bool next(Step<T, E>& step) {
    for (; part < call.parts.size(); ++part, tile = -1) {
      const Part& p = call.parts[part];
      const Range tiles = units_in(line, p.shrink_before, p.shrink_cost, p.rank_tiles);
      tile = std::max(tile + 1, tiles.begin);
      if (tile >= tiles.end) continue;
      const int64_t rank = tile * kShrinkRanks<T>;
      step = {&p, rank, std::min<int64_t>(kShrinkRanks<T>, p.rank - rank), 0, call.inputs, {}, {}};
      call.find_rows(step, false, call.inputs);
      return true;
    }
    return false;
  }
};

// The rank tiles of Bᵀ in a thread's share of the expand: blocks of columns, from the first rank to the last.
template <class T, class E>
struct ExpandWalk {
  const Lora<T, E>& call;
  Range line;
  size_t part = 0;
  int64_t column = -1, rank = 0;

  bool next(Step<T, E>& step) {
    for (; part < call.parts.size(); ++part, column = -1) {
      const Part& p = call.parts[part];
      const Range spans = units_in(line, p.expand_before, p.expand_cost, p.spans());
      const int64_t stop = std::min(spans.end * kSpan, p.outputs), block = kSums / p.rows / kSpan * kSpan;
      if (column < 0) column = spans.begin * kSpan;
      if (column >= stop) continue;
      const int64_t tile = kExpandGroups<T> * kGroup<T>;
      step = {&p, rank, std::min(tile, p.rank - rank), column, std::min(column + block, stop), {}, {}};
      call.find_rows(step, true, p.outputs);
      rank += tile;
      if (rank >= p.rank) {
        rank = 0;
        column += block;
      }
      return true;
    }
    return false;
  }
};

// Steps of a walk, each with the one that lies kAhead steps further on, whose rows are to be fetched meanwhile.
template <class T, class E, class Walk>
class Pipeline {
 public:
  Pipeline(const Lora<T, E>& call, Range line) : walk_{call, line} {
    for (; made_ < kAhead<T> && walk_.next(steps_[made_]); ++made_) fetch(steps_[made_]);
  }
  template <class F>
  void run(const F& f) {
    for (int64_t done = 0;; ++done) {
      if (walk_.next(steps_[made_ % kSteps])) ++made_;
      if (done == made_) return;
      f(steps_[done % kSteps], steps_[(made_ - 1) % kSteps]);
    }
  }

 private:
  // The part that no earlier step prefetches.
  static void fetch(const Step<T, E>& step) {
    for (int64_t i = 0; i < step.ranks; ++i)
      for (int64_t k = step.begin; k < step.end; k += 64 / int64_t(sizeof(E)))
        __builtin_prefetch(step.rows[i] + k, 0, 2);
  }
  static constexpr int64_t kSteps = kAhead<T> + 1;
  Walk walk_;
  Step<T, E> steps_[kSteps];
  int64_t made_ = 0;
};

}  // namespace lorikeet
