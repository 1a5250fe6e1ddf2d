// Residual and RMS norm, rotary embedding with the KV store, SiLU and GELU gating: one pass over memory each.
//
// Arithmetic is in float and rounded once, at the end. A row is computed by one thread in one order, so it does
// not depend on the rest of the batch.
#include <algorithm>

#include "buffer.h"
#include "calls.h"
#include "extras.h"
#include "simd.h"
#include "vectors.h"

namespace lorikeet {
namespace {

constexpr int64_t kWorthAThread = 1 << 13;  // fewer elements are not worth waking a thread

int64_t threads_for(int64_t elements, int64_t threads) { return elements < 2 * kWorthAThread ? 1 : threads; }

inline float inverse_root_mean(F32 squares, int64_t n, float eps) {
  return float(1.0 / std::sqrt(double(sum(squares)) / double(n) + double(eps)));
}

template <class T>
float inverse_root_mean_square(const T* x, int64_t n, float eps) {
  F32 squares = zero();
  each_vector(n, [&](int64_t i, auto lanes) {
    F32 v = get(x + i, lanes);
    squares = fma(v, v, squares);
  });
  return inverse_root_mean(squares, n, eps);
}

template <class T>
void add_only(T* x, const T* delta, int64_t elements, int64_t threads) {
  if (!delta) return;
  parallel(threads_for(elements, threads), [&](int64_t thread, int64_t count) {
    const Range mine = part_of(elements, thread, count);
    each_vector(mine.end - mine.begin, [&](int64_t i, auto n) {
      T* to = x + mine.begin + i;
      set(to, add(get(to, n), get(delta + mine.begin + i, n)), n);
    });
  });
}

template <class T>
void add_norm(T* x, const T* delta, const T* weight, T* out, int64_t rows, int64_t hidden, float eps, float offset,
              int64_t threads) {
  if (!weight) return add_only(x, delta, rows * hidden, threads);
  parallel(threads_for(rows * hidden, threads), [&](int64_t thread, int64_t count) {
    Range mine = part_of(rows, thread, count);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      T *xs = x + row * hidden, *to = out + row * hidden;
      F32 squares = zero();
      each_vector(hidden, [&](int64_t i, auto n) {
        F32 v = get(xs + i, n);
        if (delta) {
          set(xs + i, add(v, get(delta + row * hidden + i, n)), n);
          v = get(xs + i, n);  // as it was rounded
        }
        squares = fma(v, v, squares);
      });
      const F32 scale = splat(inverse_root_mean(squares, hidden, eps));
      each_vector(hidden, [&](int64_t i, auto n) {
        set(to + i, mul(mul(get(xs + i, n), scale), add(get(weight + i, n), splat(offset))), n);
      });
    }
  });
}

constexpr int64_t kScaleBytes = sizeof(bf16);

inline int lanes_of(All) { return kLanes; }
inline int lanes_of(First n) { return n.lanes; }

// The nearest codes from -127 to 127 of n numbers, and their scale in bfloat16, rounded up so that no code is larger. A
// number that is not finite makes the scale NaN, and so all that is computed with it.
template <class T>
void encode(const T* from, int64_t n, int8_t* to) {
  F32 most = zero(), finite = zero();
  each_vector(n, [&](int64_t i, auto lanes) {
    const F32 v = get(from + i, lanes);
    most = max(most, max(v, sub(zero(), v)));
    finite = fma(v, zero(), finite);
  });
  const float exact = largest(most) / 127.0f + sum(finite);
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  bf16 scale{uint16_t((bits + 0xffff) >> 16)};
  if (!(exact == exact)) scale.bits = 0x7fc0;
  if (exact < 1e-37f) scale.bits = 0;  // its inverse would not be finite
  const F32 inverse = splat(scale.bits == 0 || exact != exact ? 0.0f : 1.0f / to_float(scale));
  each_vector(n, [&](int64_t i, auto lanes) {
    store_codes(to + i, mul(get(from + i, lanes), inverse), lanes_of(lanes));
  });
  std::memcpy(to + n, &scale, sizeof scale);
}

template <class T>
struct Rotary {
  T* qkv;
  int64_t row_stride, heads, kv_heads, head_dim;
  const T *cos, *sin;        // [rows, head_dim]
  const T *q_norm, *k_norm;  // [head_dim], or null; if `whole` [heads * head_dim] and [kv_heads * head_dim]
  float eps, offset;
  bool whole;       // whether all heads of a row are normalised together
  int64_t dims;     // of a head that are rotated, the first ones
  bool neighbours;  // whether pairs of neighbours are rotated, and not a first half with a second
  void* kv;
  bool codes;  // whether kv is kept as codes, as in lorikeet_attention()
  int64_t block_stride, block_tokens;
  const int64_t *slot_blocks, *slot_offsets;

  // Norm and rotate one head; `from` may be `to`. scale: by which it is multiplied before the norm's weights are.
  void rotate(const T* from, T* to, const T* norm, F32 scale, const T* cos_row, const T* sin_row) const {
    const int64_t half = dims / 2, again = head_dim / 2;
    auto head = [&](int64_t i, auto n) {
      F32 v = get(from + i, n);
      return norm ? mul(mul(v, scale), add(get(norm + i, n), splat(offset))) : v;
    };
    each_vector(half, [&](int64_t i, auto n) {
      F32 a = head(i, n), b = head(half + i, n);
      F32 rotated_a = fma(a, get(cos_row + i, n), mul(sub(zero(), b), get(sin_row + i, n)));
      F32 rotated_b = fma(b, get(cos_row + again + i, n), mul(a, get(sin_row + again + i, n)));
      set(to + i, rotated_a, n);
      set(to + half + i, rotated_b, n);
    });
    if (from != to || norm) each_vector(head_dim - dims, [&](int64_t i, auto n) { set(to + dims + i, head(dims + i, n), n); });
  }

  // The same where pairs of neighbours are rotated, which are brought into halves for that.
  void rotate_neighbours(const T* from, T* to, const T* norm, F32 scale, const T* cos_row, const T* sin_row) const {
    static thread_local Buffer<T> buffer;
    T *halves = buffer.of(2 * head_dim), *normed = halves + head_dim;
    if (norm) {
      each_vector(head_dim, [&](int64_t i, auto n) {
        set(normed + i, mul(mul(get(from + i, n), scale), add(get(norm + i, n), splat(offset))), n);
      });
      from = normed;
    }
    const int64_t half = dims / 2;
    for (int64_t i = 0; i < half; ++i) halves[i] = from[2 * i], halves[half + i] = from[2 * i + 1];
    std::memcpy((void*)(halves + dims), from + dims, size_t(head_dim - dims) * sizeof(T));
    rotate(halves, halves, nullptr, zero(), cos_row, sin_row);
    for (int64_t i = 0; i < half; ++i) to[2 * i] = halves[i], to[2 * i + 1] = halves[half + i];
    std::memcpy((void*)(to + dims), halves + dims, size_t(head_dim - dims) * sizeof(T));
  }

  // Norm and rotate the heads of a row.
  void heads_of(const T* from, T* to, int64_t count, const T* norm, const T* cos_row, const T* sin_row) const {
    F32 scale = norm && whole ? splat(inverse_root_mean_square(from, count * head_dim, eps)) : zero();
    for (int64_t h = 0; h < count; ++h, from += head_dim, to += head_dim) {
      if (norm && !whole) scale = splat(inverse_root_mean_square(from, head_dim, eps));
      if (neighbours)
        rotate_neighbours(from, to, norm, scale, cos_row, sin_row);
      else
        rotate(from, to, norm, scale, cos_row, sin_row);
      if (norm && whole) norm += head_dim;
    }
  }

  void row(int64_t r) const {
    T* q = qkv + r * row_stride;
    const T *k = q + heads * head_dim, *v = k + kv_heads * head_dim;
    const T *c = cos + r * head_dim, *s = sin + r * head_dim;
    heads_of(q, q, heads, q_norm, c, s);
    const int64_t token = kv_heads * head_dim, kept = kv_heads * (head_dim + kScaleBytes);
    if (codes) {
      static thread_local Buffer<T> buffer;
      T* rotated = buffer.of(token);
      heads_of(k, rotated, kv_heads, k_norm, c, s);
      int8_t* keys = (int8_t*)kv + slot_blocks[r] * block_stride + slot_offsets[r] * kept;
      encode_heads(rotated, keys);
      encode_heads(v, keys + block_tokens * kept);
      return;
    }
    T* keys = (T*)kv + slot_blocks[r] * block_stride + slot_offsets[r] * token;
    heads_of(k, keys, kv_heads, k_norm, c, s);
    std::memcpy((void*)(keys + block_tokens * token), v, size_t(token) * sizeof(T));
  }

  void encode_heads(const T* from, int8_t* to) const {
    for (int64_t h = 0; h < kv_heads; ++h) encode(from + h * head_dim, head_dim, to + h * (head_dim + kScaleBytes));
  }
};

template <class T>
void rotary_store(const Rotary<T>& rotary, int64_t rows, int64_t threads) {
  parallel(threads_for(rows * rotary.row_stride, threads), [&](int64_t thread, int64_t count) {
    Range mine = part_of(rows, thread, count);
    for (int64_t r = mine.begin; r < mine.end; ++r) rotary.row(r);
  });
}

// out = gate(first half of a row) * second half
template <class T, class G>
void gated(const T* gate_up, T* out, int64_t rows, int64_t n, int64_t threads, const G& gate) {
  parallel(threads_for(rows * n, threads), [&](int64_t thread, int64_t count) {
    Range mine = part_of(rows, thread, count);
    for (int64_t r = mine.begin; r < mine.end; ++r) {
      const T *gates = gate_up + r * 2 * n, *up = gates + n;
      each_vector(n, [&](int64_t i, auto lanes) {
        set(out + r * n + i, mul(gate(get(gates + i, lanes)), get(up + i, lanes)), lanes);
      });
    }
  });
}

template <class T>
void scale_and_shift(
    T* out, int64_t stride, const Extras& extras, int64_t first, const Targets& targets, int64_t threads) {
  int64_t rows = 0, outputs = 0;
  for (int64_t s = 0; s < extras.count; ++s) rows += extras.segments[s].stop - extras.segments[s].start;
  for (int64_t t = 0; t < targets.count; ++t) outputs += targets.each[t].outputs;
  parallel(threads_for(rows * outputs, threads), [&](int64_t thread, int64_t count) {
    const Range mine = part_of(rows, thread, count);
    int64_t before = 0;  // rows of the segments before
    for (int64_t s = 0; s < extras.count; ++s) {
      const ExtrasSegment& segment = extras.segments[s];
      const int64_t begin = segment.start + std::max(int64_t(0), mine.begin - before);
      const int64_t end = std::min(segment.stop, segment.start + mine.end - before);
      before += segment.stop - segment.start;
      for (int64_t t = 0; t < targets.count && begin < end; ++t) {
        const Target& target = targets.each[t];
        const Affine& affine = segment.affines[first + target.module];
        if (!affine.scale && !affine.shift) continue;
        const T *scale = (const T*)affine.scale, *shift = (const T*)affine.shift;
        for (int64_t r = begin; r < end; ++r) {
          T* to = out + r * stride + target.column;
          each_vector(target.outputs, [&](int64_t i, auto lanes) {
            F32 v = get(to + i, lanes);
            if (scale) v = mul(v, get(scale + i, lanes));
            if (shift) v = add(v, get(shift + i, lanes));
            set(to + i, v, lanes);
          });
        }
      }
    }
  });
}

template <class T>
Rotary<T> rotary_of(
    void* qkv, int64_t row_stride, int64_t heads, int64_t kv_heads, int64_t head_dim, const void* cos, const void* sin,
    const void* q_norm, const void* k_norm, double eps, double offset, int64_t whole, int64_t dims, int64_t neighbours,
    void* kv, int64_t kv_bytes, int64_t block_stride, int64_t block_tokens, const int64_t* slot_blocks,
    const int64_t* slot_offsets) {
  return {(T*)qkv, row_stride, heads, kv_heads, head_dim, (const T*)cos, (const T*)sin, (const T*)q_norm,
          (const T*)k_norm, float(eps), float(offset), whole != 0, dims, neighbours != 0, kv, kv_bytes == 1,
          block_stride, block_tokens, slot_blocks, slot_offsets};
}

}  // namespace
}  // namespace lorikeet

using namespace lorikeet;

// Strides are in elements; `bytes` is 2 for bfloat16, 4 for float.

// x += delta, if there is one; out = x / sqrt(mean(x^2) + eps) * (weight + offset), row by row; without a weight only the
// first. `out` may be `x`.
LORIKEET_EXPORT void lorikeet_add_norm(
    void* x, const void* delta, const void* weight, void* out, int64_t rows, int64_t hidden, double eps, double offset,
    int64_t bytes, int64_t threads) {
  if (bytes == 2)
    add_norm((bf16*)x, (const bf16*)delta, (const bf16*)weight, (bf16*)out, rows, hidden, float(eps), float(offset),
             threads);
  else
    add_norm((float*)x, (const float*)delta, (const float*)weight, (float*)out, rows, hidden, float(eps),
             float(offset), threads);
}

LORIKEET_EXPORT void lorikeet_rotary_store(
    void* qkv, int64_t row_stride, int64_t heads, int64_t kv_heads, int64_t head_dim, const void* cos, const void* sin,
    const void* q_norm, const void* k_norm, double eps, double offset, int64_t whole, int64_t dims, int64_t neighbours,
    void* kv, int64_t kv_bytes, int64_t block_stride, int64_t block_tokens, const int64_t* slot_blocks,
    const int64_t* slot_offsets, int64_t rows, int64_t bytes, int64_t threads) {
  if (bytes == 2)
    rotary_store(rotary_of<bf16>(qkv, row_stride, heads, kv_heads, head_dim, cos, sin, q_norm, k_norm, eps, offset,
                                 whole, dims, neighbours, kv, kv_bytes, block_stride, block_tokens, slot_blocks,
                                 slot_offsets),
                 rows, threads);
  else
    rotary_store(rotary_of<float>(qkv, row_stride, heads, kv_heads, head_dim, cos, sin, q_norm, k_norm, eps, offset,
                                  whole, dims, neighbours, kv, kv_bytes, block_stride, block_tokens, slot_blocks,
                                 slot_offsets),
                 rows, threads);
}

// out = out * scale + shift in the rows and columns of every segment and target, where there are any.
//
// extras, targets: as in extras.h. first: the first entry of the layer in `affines`.
LORIKEET_EXPORT void lorikeet_scale_and_shift(
    void* out, int64_t stride, const void* extras, int64_t first, const void* targets, int64_t bytes, int64_t threads) {
  const auto& of = *(const Extras*)extras;
  const auto& to = *(const Targets*)targets;
  if (bytes == 2)
    scale_and_shift((bf16*)out, stride, of, first, to, threads);
  else
    scale_and_shift((float*)out, stride, of, first, to, threads);
}

LORIKEET_EXPORT void lorikeet_silu_mul(
    const void* gate_up, void* out, int64_t rows, int64_t n, int64_t bytes, int64_t threads) {
  auto gate = [](F32 x) { return silu(x); };
  if (bytes == 2)
    gated((const bf16*)gate_up, (bf16*)out, rows, n, threads, gate);
  else
    gated((const float*)gate_up, (float*)out, rows, n, threads, gate);
}

// out = x * sigmoid(gate); may be in place.
LORIKEET_EXPORT void lorikeet_sigmoid_mul(
    const void* x, const void* gate, void* out, int64_t elements, int64_t bytes, int64_t threads) {
  using namespace lorikeet;
  const auto run = [&](auto zero) {
    using T = decltype(zero);
    parallel(threads_for(elements, threads), [&](int64_t thread, int64_t count) {
      const Range mine = part_of(elements, thread, count);
      each_vector(mine.end - mine.begin, [&](int64_t i, auto n) {
        const int64_t at = mine.begin + i;
        const F32 opened = add(splat(1.0f), exp(sub(lorikeet::zero(), get((const T*)gate + at, n))));
        set((T*)out + at, div(get((const T*)x + at, n), opened), n);
      });
    });
  };
  bytes == 2 ? run(bf16{}) : run(float{});
}

LORIKEET_EXPORT void lorikeet_gelu_mul(
    const void* gate_up, void* out, int64_t rows, int64_t n, int64_t bytes, int64_t threads) {
  auto gate = [](F32 x) { return gelu(x); };
  if (bytes == 2)
    gated((const bf16*)gate_up, (bf16*)out, rows, n, threads, gate);
  else
    gated((const float*)gate_up, (float*)out, rows, n, threads, gate);
}
