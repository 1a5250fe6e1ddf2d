// out = x @ weightᵀ + bias, for any number of rows, and the LoRA delta.
//
// One parallel region: a thread computes its share of the product and meanwhile prefetches what it reads for LoRA.
#include "linear_amx.h"
#include "linear_tiles.h"
#include "lora_ahead.h"
#include "lora_tiles.h"
#include "calls.h"

namespace lorikeet {
namespace {

constexpr int64_t kRowBlock = 64;  // rows of one work item
constexpr int64_t kMostRowsAhead = 128;  // beyond, LoRA itself is bound by arithmetic

// The rows [begin, end) of one panel. Meanwhile `next`, the next panel if there is one, is fetched into the
// second-level cache, and what LoRA will read.
template <class T, class O, class E>
void panel(const Product<T, O>& p, const T* weights, int64_t index, int64_t begin, int64_t end, const T* next,
           LoraAhead<T, E>& lora) {
  const int64_t bytes = p.panels.elements() * int64_t(sizeof(T));
  const int64_t tiles = (end - begin + kTileRows - 1) / kTileRows, groups = groups_of(p.inputs, kGroup<T>);
  const int64_t step = (bytes / (tiles * groups * (kPanel<T> / kTileColumns)) + 63) & ~int64_t(63);
  const int64_t limit = std::min(p.outputs, (index + 1) * kPanel<T>);
  int64_t at = 0;
  for (int64_t i = 0; i < tiles; ++i) {  // spread evenly, as 30 rows are better served by 8 8 7 7 than 8 8 8 6
    Range rows = part_of(end - begin, i, tiles);
    for (int64_t column = index * kPanel<T>; column < limit; column += kTileColumns, at += groups * step) {
      const Lines ahead = next ? Lines{(const char*)next + std::min(at, bytes), step} : lora.take(groups, p.x);
      tile_of(rows.end - rows.begin, p, weights, begin + rows.begin, column, ahead, lora.take(groups, p.x));
    }
  }
}

// A thread's share of a product.
template <class T, class O, class E>
void multiply(const Product<T, O>& p, int64_t rows, LoraAhead<T, E>& lora, int64_t thread, int64_t threads) {
  const int64_t panels = (p.outputs + kPanel<T> - 1) / kPanel<T>, blocks = (rows + kRowBlock - 1) / kRowBlock;
  const Range items = part_of(panels * blocks, thread, threads);
  const T* weights = nullptr;
  for (int64_t item = items.begin; item < items.end; ++item) {
    const int64_t index = item / blocks, block = item % blocks;
    if (block == 0 || !weights) weights = p.panels.at(index);
    const bool fetches = p.panels.are_plain() && index < (items.end - 1) / blocks;
    const T* next = fetches ? p.panels.stored(index + 1) : nullptr;
    panel(p, weights, index, block * kRowBlock, std::min(rows, (block + 1) * kRowBlock), next, lora);
  }
}

#if defined(__AMX_BF16__)
// The same by the tile unit. LoRA's reads are not prefetched: with few rows memory is the bottleneck.
template <class O, class E>
void multiply(const Product<bf16, O>& p, int64_t rows, LoraAhead<bf16, E>&, int64_t thread, int64_t threads) {
  multiply_by_tiles(p, rows, thread, threads);
}
#endif

// `adapters` is null if there are none; E is the type of their stored elements.
template <class T, class E>
void linear(const Product<T>& p, int64_t rows, const Adapters* adapters, int64_t layer, const Targets* targets,
            int64_t threads) {
  static thread_local Lora<T, E> kept;  // with its memory: a call in the hot path allocates nothing
  Lora<T, E>& lora = kept;              // that of this thread, for all
  lora.begin(p.x, p.x_stride, p.out, p.out_stride, p.inputs);
  if (adapters) lora.plan(*adapters, layer, *targets);
  parallel(threads, [&](int64_t thread, int64_t count) {
    const bool fetches = !kTileUnit<T> && rows <= kMostRowsAhead;
    LoraAhead<T, E> ahead(lora, thread, count, fetches ? kNextCacheBytes / 64 : 0);
    multiply(p, rows, ahead, thread, count);
    if (!lora.parts.empty()) add_lora(lora, thread, count);
  });
}

template <class T>
void logits(const Product<T, float>& p, int64_t rows, int64_t threads) {
  const Lora<T, T> none{};
  parallel(threads, [&](int64_t thread, int64_t count) {
    LoraAhead<T, T> ahead(none, thread, count, 0);
    multiply(p, rows, ahead, thread, count);
  });
}

template <class T>
int64_t packed_elements(int64_t outputs, int64_t inputs) {
  return (outputs + kPanel<T> - 1) / kPanel<T> * kPanel<T> * groups_of(inputs, kGroup<T>) * kGroup<T>;
}

template <class T>
void pack(const T* weight, T* packed, int64_t outputs, int64_t inputs, int64_t threads) {
  constexpr int G = kGroup<T>;
  const int64_t groups = groups_of(inputs, G), panels = (outputs + kPanel<T> - 1) / kPanel<T>;
  parallel(threads, [&](int64_t thread, int64_t count) {
    Range mine = part_of(panels, thread, count);
    for (int64_t index = mine.begin; index < mine.end; ++index) {
      T* to = packed + index * groups * G * kPanel<T>;
      for (int64_t c = 0; c < kPanel<T>; ++c) {
        const int64_t column = index * kPanel<T> + c;
        for (int64_t k = 0; k < groups * G; ++k)
          to[(k / G * kPanel<T> + c) * G + k % G] = column < outputs && k < inputs ? weight[column * inputs + k] : T{};
      }
    }
  });
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// Elements of a packed weight [outputs, inputs] whose elements have `bytes` bytes.
LORIKEET_EXPORT int64_t lorikeet_packed_elements(int64_t outputs, int64_t inputs, int64_t bytes) {
  return bytes == 2 ? packed_elements<bf16>(outputs, inputs) : packed_elements<float>(outputs, inputs);
}

LORIKEET_EXPORT void lorikeet_pack(
    const void* weight, void* packed, int64_t outputs, int64_t inputs, int64_t bytes, int64_t threads) {
  if (bytes == 2)
    pack((const bf16*)weight, (bf16*)packed, outputs, inputs, threads);
  else
    pack((const float*)weight, (float*)packed, outputs, inputs, threads);
}

// out[rows, outputs] = x @ weightᵀ + bias and, for every segment, an adapter's rows [start, stop), and every target:
// out[start : stop, column : column + outputs] += x[start : stop] @ Aᵀ @ Bᵀ. Constants are in records that are
// passed by address, since every argument costs Python a tenth of a microsecond.
//
// x_stride: in elements; rows of `out` lie side by side.
// weight: as in panels.h.
// adapters: null, or address of the segments, their number; 0, or the rank that every adapter is computed (and read)
//   with in the modules that it changes; and 8 if A and B are codes of 8 bits (lora_plan.h), else 0.
// segments: in row order and disjoint: start, stop, addresses of the adapter's pieces and of its index.
// pieces: address of rows of A [rows, inputs], address of the same rows of Bᵀ [rows, outputs], rows.
// index: [layers * 7 + 1]: pieces of (layer, module) are index[layer * 7 + module] up to the next entry.
// targets: how many there are, then module, column and outputs of each.
LORIKEET_EXPORT void lorikeet_linear(
    const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t threads,
    const void* adapters, int64_t layer, const void* targets) {
  const Weight& w = *(const Weight*)weight;
  const auto *of = (const Adapters*)adapters;
  const auto *to = (const Targets*)targets;
  auto compute = [&](auto element) {
    using T = decltype(element);
    const Product<T> p{(const T*)x, x_stride, Panels<T>(w), (const T*)bias, (T*)out, w.outputs, w.inputs, w.outputs};
    if (of && of->bits == 8)
      linear<T, int8_t>(p, rows, of, layer, to, threads);
    else
      linear<T, T>(p, rows, of, layer, to, threads);
  };
  w.bytes == 2 ? compute(bf16{}) : compute(float{});
}

// The products of neighbouring groups of rows, such as the rows of each expert, to the same bits as one call for each:
// group i has the next groups[i].rows rows of x and out, and the next groups[i].segments segments, whose rows count from
// the first of the group. All weights have one shape.
LORIKEET_EXPORT void lorikeet_linear_groups(
    const void* x, int64_t x_stride, const void* groups, int64_t count, void* out, int64_t threads,
    const void* adapters, int64_t layer) {
  const auto* group = (const Group*)groups;
  const auto* of = (const Adapters*)adapters;
  const Segment* segments = of ? of->segments : nullptr;
  for (int64_t i = 0; i < count; ++i, ++group) {
    const Weight& w = *(const Weight*)group->weight;
    if (group->segments > 0) {
      const Adapters own{segments, group->segments, of->padded_rank, of->bits};
      lorikeet_linear(x, x_stride, group->weight, group->bias, out, group->rows, threads, &own, layer, group->targets);
      segments += group->segments;
    } else {
      lorikeet_linear(x, x_stride, group->weight, group->bias, out, group->rows, threads, nullptr, 0, nullptr);
    }
    x = (const char*)x + group->rows * x_stride * w.bytes;
    out = (char*)out + group->rows * w.outputs * w.bytes;
  }
}

// out[rows, outputs] = x @ weightᵀ as floats, whatever the elements of x and weight are.
LORIKEET_EXPORT void lorikeet_logits(
    const void* x, int64_t x_stride, const void* weight, float* out, int64_t rows, int64_t threads) {
  const Weight& w = *(const Weight*)weight;
  if (w.bytes == 2)
    logits<bf16>({(const bf16*)x, x_stride, Panels<bf16>(w), nullptr, out, w.outputs, w.inputs, w.outputs}, rows,
                 threads);
  else
    logits<float>({(const float*)x, x_stride, Panels<float>(w), nullptr, out, w.outputs, w.inputs, w.outputs}, rows,
                  threads);
}

// out[rows, outputs / 2] = SiLU(gate) * up, where [gate | up] = x @ weightᵀ + bias, to the same bits as the product and
// lorikeet_silu_mul(). Returns false, and does nothing, where separate calls are as fast or necessary.
LORIKEET_EXPORT bool lorikeet_linear_gated(
    const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t threads) {
#if defined(__AMX_BF16__)
  const Weight& w = *(const Weight*)weight;
  if (w.bytes != 2 || w.outputs % (2 * kPanel<bf16>) != 0) return false;
  const Product<bf16> p{(const bf16*)x, x_stride, Panels<bf16>(w), (const bf16*)bias, nullptr, 0, w.inputs, w.outputs};
  parallel(threads, [&](int64_t thread, int64_t count) {
    multiply_gated_by_tiles(p, rows, (bf16*)out, thread, count);
  });
  return true;
#else
  return false;
#endif
}
