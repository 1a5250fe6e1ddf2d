// The arithmetic of LoRA: out[rows, columns] += x[rows] @ Aᵀ @ Bᵀ for many adapters at once, each on rows of its own,
// read in place.
//
// Two phases with one barrier between them: shrink makes inner = x @ Aᵀ, expand adds inner @ Bᵀ. With few rows per
// adapter the time is that of reading A and Bᵀ, so every thread reads an equal share of each, in memory order, and
// fetches the next rows while it computes. With many rows it is the arithmetic; the same loops then find their
// operands in registers and the first cache.
//
// Every sum has one order whatever the number of rows, segments and threads: A row by row over its lanes, Bᵀ rank by
// rank. So results do not depend on the rest of the batch.
#pragma once

#include "lora_amx.h"
#include "lora_plan.h"
#include "simd.h"

namespace lorikeet {
namespace {

constexpr int kShrinkRows = kLanes == 16 ? 6 : 2;  // of x that are multiplied by a tile of A together

// Rows of x times a tile of A; meanwhile the rows of `next` are fetched into the second-level cache.
template <class T, int Rows, class E>
void shrink_tile(const T* x, int64_t x_stride, const Step<T, E>& step, const Step<T, E>& next, int64_t inputs, T* inner,
                 int64_t inner_stride) {
  constexpr int64_t kWide = kLanes * kGroup<T>;
  F32 sums[Rows][kShrinkRanks<T>];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < kShrinkRanks<T>; ++j) sums[r][j] = zero();
  auto add_products = [&](int64_t k, auto load_at) __attribute__((always_inline)) {
    decltype(load_group(x)) a[kShrinkRanks<T>];
    for (int j = 0; j < kShrinkRanks<T>; ++j) a[j] = load_at(step.rows[j] + k);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      auto row = load_at(x + r * x_stride + k);
      for (int j = 0; j < kShrinkRanks<T>; ++j) sums[r][j] = dot(sums[r][j], row, a[j]);
    }
  };
  int64_t k = 0;
  for (; k + kWide <= inputs; k += kWide) {
    for (int j = 0; j < kShrinkRanks<T>; ++j) __builtin_prefetch(next.rows[j] + k, 0, 2);
    add_products(k, [](const auto* p) __attribute__((always_inline)) { return load_stored<T>(p); });
  }
  if (k < inputs)
    add_products(k, [&](const auto* p) __attribute__((always_inline)) { return load_stored_n<T>(p, int(inputs - k)); });
  alignas(16) float scales[kShrinkRanks<T>] = {1, 1, 1, 1};
  if constexpr (kAreCodes<E>) step.scale(scales);
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    Quad all = first_of(sum(sums[r][0], sums[r][1], sums[r][2], sums[r][3]), int(step.ranks));
    if constexpr (kAreCodes<E>) all = mul(all, scales);
    put4(inner + r * inner_stride, all);
  }
}

template <class T, class E>
void shrink_step(Lora<T, E>& call, const Step<T, E>& step, const Step<T, E>& next, Tiles&, Operands&) {
  const Part& part = *step.part;
  const int64_t tiles = (part.rows + kShrinkRows - 1) / kShrinkRows, stride = part.inner_stride;
  for (int64_t i = 0; i < tiles; ++i) {  // spread evenly, as 6 6 5 5 5 5 serve 32 rows better than 6 6 6 6 6 2
    const Range rows = part_of(part.rows, i, tiles);
    const T* x = call.x + (part.start + rows.begin) * call.x_stride;
    T* inner = call.inner.data() + part.inner + rows.begin * stride + step.rank;
    switch (rows.end - rows.begin) {
      case 1: shrink_tile<T, 1>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
      case 2: shrink_tile<T, 2>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
#if defined(__AVX512F__)
      case 3: shrink_tile<T, 3>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
      case 4: shrink_tile<T, 4>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
      case 5: shrink_tile<T, 5>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
      case 6: shrink_tile<T, 6>(x, call.x_stride, step, next, call.inputs, inner, stride); break;
#endif
    }
  }
}

// A group of rank rows, a span wide.
template <class T, class E>
inline auto load_groups(const E* const* rows, int64_t column) {
  const E* row = rows[0] + column;
  if constexpr (sizeof(T) == 2)
    return interleave(load_stored<T>(row), load_stored<T>(rows[1] + column));
  else
    return Span{load_stored<T>(row), load_stored<T>(row + kLanes)};
}
template <class T, class E>
inline auto load_groups_n(const E* const* rows, int64_t column, int n) {
  const E* row = rows[0] + column;
  if constexpr (sizeof(T) == 2)
    return interleave(load_stored_n<T>(row, n), load_stored_n<T>(rows[1] + column, n));
  else
    return Span{load_stored_n<T>(row, std::min(n, kLanes)),
                n > kLanes ? load_stored_n<T>(row + kLanes, n - kLanes) : zero()};
}

// Adds the products of a rank tile to the sums of the part's rows and columns [step.begin, step.end), which lie in
// `sums` from the first rank tile to the last, when they are added to `out`.
template <class T, int Groups, class E>
void expand_tile(const Step<T, E>& step, const Step<T, E>& next, const T* inner, float* sums, T* out, int64_t out_stride) {
  const int64_t inner_stride = step.part->inner_stride, rows = step.part->rows;
  const bool first = step.rank == 0, last = step.rank + step.ranks == step.part->rank;
  const int64_t ahead = next.begin - step.begin;
  for (int64_t c = step.begin; c < step.end; c += kSpan, sums += rows * kSpan) {
    const int n = int(std::min(kSpan, step.part->outputs - c));
    decltype(load_groups<T>(step.rows, c)) b[Groups];
    for (int g = 0; g < Groups; ++g)
      b[g] = n == kSpan ? load_groups<T>(step.rows + g * kGroup<T>, c)
                        : load_groups_n<T>(step.rows + g * kGroup<T>, c, n);
    for (int g = 0; g < Groups * kGroup<T>; ++g)
      __builtin_prefetch(next.rows[g] + c + ahead, 0, 2);
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

template <class T, class E>
void expand_step(const Lora<T, E>& call, const Step<T, E>& step, const Step<T, E>& next, float* sums, Tiles&, Operands&) {
  const Part& part = *step.part;
  const T* inner = call.inner.data() + part.inner + step.rank;
  T* out = call.out + part.start * call.out_stride + part.column;
  switch ((step.ranks + kGroup<T> - 1) / kGroup<T>) {
    case 1: return expand_tile<T, 1>(step, next, inner, sums, out, call.out_stride);
    case 2: return expand_tile<T, 2>(step, next, inner, sums, out, call.out_stride);
    case 3: return expand_tile<T, 3>(step, next, inner, sums, out, call.out_stride);
    case 4: return expand_tile<T, 4>(step, next, inner, sums, out, call.out_stride);
  }
}

// A thread's share of a call, after its share of the product: `out` is whole when all threads have come to the barrier.
template <class T, class E>
void add_lora(Lora<T, E>& call, int64_t thread, int64_t threads) {
  constexpr int64_t kOfRow = kTileUnit<T> && kAreCodes<E> ? 2 : 1;
  alignas(64) float sums[kOfRow * (kSums + kSums / 4)];  // more where tiles of rows overlap
  Tiles tiles;
  Operands operands;
  Pipeline<T, E, ShrinkWalk<T, E>> shrink(call, part_of(call.shrink_total, thread, threads));
  shrink.run([&](const Step<T, E>& step, const Step<T, E>& next) { shrink_step(call, step, next, tiles, operands); });
  Pipeline<T, E, ExpandWalk<T, E>> expand(call, part_of(call.expand_total, thread, threads));
  if (threads > 1) barrier();
  expand.run([&](const Step<T, E>& step, const Step<T, E>& next) { expand_step(call, step, next, sums, tiles, operands); });
}

}  // namespace
}  // namespace lorikeet
