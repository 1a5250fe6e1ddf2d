// All layers of a decoder, one kernel after the other. Calls from Python take much longer: while kernels run, weights and
// keys evict the interpreter from the caches, and a call takes tens of microseconds instead of a few.
#include <cstring>

#include "calls.h"
#include "extras.h"
#include "records.h"

namespace lorikeet {
namespace {

constexpr int64_t kLayerModules = 7;  // lorikeet_linear() counts layers of so many modules

// The real numbers of a model.
struct Reals {
  double eps, scale, norm_offset, softcap, gated_eps, least_step, most_step;
};

// Copies pieces of each row: `each` gets a function that copies bytes from a place in the row to a place in the new row.
template <class F>
void copy_pieces(const char* from, int64_t from_bytes, char* to, int64_t to_bytes, int64_t rows, int64_t threads, const F& each) {
  parallel(rows * to_bytes < (1 << 16) ? 1 : threads, [&](int64_t thread, int64_t count) {
    const Range mine = part_of(rows, thread, count);
    for (int64_t row = mine.begin; row < mine.end; ++row)
      each([&](int64_t source, int64_t target, int64_t bytes) {
        std::memcpy(to + row * to_bytes + target, from + row * from_bytes + source, size_t(bytes));
      });
  });
}

// Computes a recurrence from the product of its input; the result is in s.mixed.
void recur(const Model& m, const Layer& layer, const LayersStep& s, const Reals& reals, int64_t threads) {
  const Recurrences& r = m.recurrences;
  const int64_t keys = r.key_heads * r.key_dim, values = r.heads * r.value_dim, columns = r.columns(), item = m.bytes;
  const char *z = s.qkv + r.channels() * item, *gates = z + values * item;
  lorikeet_recurrence_gates(r.is_delta ? gates : nullptr, columns, r.is_delta ? gates + r.heads * item : gates, columns,
                            layer.rates, layer.gate_bias, reals.least_step, reals.most_step, s.decay, s.beta, s.rows, r.heads,
                            item, threads);
  lorikeet_causal_conv(s.qkv, columns, layer.conv, layer.conv_bias, s.states, s.convolved, s.row_starts, s.resumed,
                       s.conv_offsets + layer.place * s.sequences * r.parts, s.sequences, r.parts, r.channels(), r.taps, true,
                       item, threads);
  const char* q = s.convolved;
  lorikeet_recurrence(q, r.channels(), q + keys * item, r.channels(), q + 2 * keys * item, r.channels(), s.decay, s.beta,
                      layer.skip, s.states, s.row_starts, s.resumed, s.state_offsets + layer.place * s.sequences * r.heads,
                      s.sequences, r.heads, r.key_heads, r.key_dim, r.value_dim, s.mixed, r.is_delta, item, threads);
  lorikeet_gated_norm(s.mixed, values, z, columns, layer.gated_norm, r.is_delta ? r.value_dim : values, s.mixed, s.rows, values,
                      r.group, reals.gated_eps, r.is_delta, item, threads);
}

// Computes attention from the product of its input; the result is in s.mixed.
void attend(const Model& m, const Layer& layer, const LayersStep& s, const Reals& reals, int64_t threads) {
  const int64_t mixed = m.heads * m.head_dim, kv_columns = 2 * m.kv_heads * m.head_dim, head = m.head_dim * m.bytes;
  char* qkv = s.qkv;
  if (m.gated_attention) {
    const int64_t from = (2 * mixed + kv_columns) * m.bytes, to = (mixed + kv_columns) * m.bytes;
    copy_pieces(s.qkv, from, s.ordered, to, s.rows, threads, [&](auto copy) {
      for (int64_t i = 0; i < m.heads; ++i) copy(2 * i * head, i * head, head);
      copy(2 * m.heads * head, m.heads * head, kv_columns * m.bytes);
    });
    copy_pieces(s.qkv, from, s.gates, mixed * m.bytes, s.rows, threads, [&](auto copy) {
      for (int64_t i = 0; i < m.heads; ++i) copy((2 * i + 1) * head, i * head, head);
    });
    qkv = s.ordered;
  }
  char* kv = s.kv + layer.place * s.layer_stride * s.kv_bytes;
  const int64_t angles = layer.rotation * s.rows * head;
  lorikeet_rotary_store(qkv, mixed + kv_columns, m.heads, m.kv_heads, m.head_dim, s.cos + angles, s.sin + angles, layer.q_norm,
                        layer.k_norm, reals.eps, reals.norm_offset, m.whole_norms, m.rotary_dims, m.rotates_neighbours, kv,
                        s.kv_bytes, s.block_stride, s.block_tokens, s.slot_blocks, s.slot_offsets, s.rows, m.bytes, threads);
  lorikeet_attention(qkv, mixed + kv_columns, kv, s.kv_bytes, s.block_stride, s.mixed, mixed, s.row_starts, s.contexts,
                     s.tables, s.table_stride, s.sequences, m.heads, m.kv_heads, m.head_dim, s.block_tokens, reals.scale,
                     layer.window, reals.softcap, m.one_order, m.bytes, threads);
  if (m.gated_attention) lorikeet_sigmoid_mul(s.mixed, s.gates, s.mixed, s.rows * mixed, m.bytes, threads);
}

// Keeps only the chosen rows, in their order; `room` is a buffer of their size.
void keep(char* rows, int64_t row_bytes, const int64_t* chosen, int64_t count, char* room) {
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(room + i * row_bytes, rows + chosen[i] * row_bytes, size_t(row_bytes));
  std::memcpy(rows, room, size_t(count * row_bytes));
}

// Whether an adapter changes outputs of a product on a layer by more than LoRA.
bool any(const Extras* extras, int64_t first, const void* targets) {
  const auto& to = *(const Targets*)targets;
  for (int64_t i = 0; extras && i < extras->count; ++i)
    for (int64_t t = 0; t < to.count; ++t) {
      const Affine& affine = extras->segments[i].affines[first + to.each[t].module];
      if (affine.scale || affine.shift) return true;
    }
  return false;
}

void layers(const Model& m, const LayersStep& s, const Reals& reals, int64_t threads) {
  const int64_t queries = m.heads * m.head_dim;
  const int64_t qkv = (m.gated_attention ? 2 : 1) * queries + 2 * m.kv_heads * m.head_dim;
  const void* adapters = s.adapters;
  const Extras* extras = s.extras;
  int64_t rows = s.rows;
  // Adds to x, and returns the input of the next product: the norm, or x itself if there is no norm.
  auto norm = [&](const void* delta, const void* weight, int64_t index) {
    lorikeet_add_norm(s.x, delta, weight, s.normed, rows, m.hidden, reals.eps, reals.norm_offset, m.bytes, threads);
    for (int64_t i = 0; extras && i < extras->count; ++i) {
      const ExtrasSegment& segment = extras->segments[i];
      const void* own = segment.norms ? segment.norms[index] : nullptr;
      const int64_t at = segment.start * m.hidden * m.bytes;
      if (own)
        lorikeet_add_norm(s.x + at, nullptr, own, s.normed + at, segment.stop - segment.start, m.hidden, reals.eps,
                          reals.norm_offset, m.bytes, threads);
    }
    return weight ? s.normed : s.x;
  };
  auto norm_output = [&](const void* weight) {
    if (weight)
      lorikeet_add_norm(s.delta, nullptr, weight, s.delta, rows, m.hidden, reals.eps, reals.norm_offset, m.bytes, threads);
  };
  for (int64_t index = 0; index < m.count; ++index) {
    const Layer& layer = m.layers[index];
    const bool recurs = layer.conv;
    const int64_t mixed = recurs ? m.recurrences.heads * m.recurrences.value_dim : queries;
    const ProductTargets& changed = recurs ? s.recurrence_targets : s.targets;
    const ProductTargets& every = recurs ? s.all_recurrence_targets : s.all_targets;
    const int64_t first = index * m.slots;
    auto product = [&](const char* x, int64_t inputs, const void* weight, const void* bias, char* out, const void* to,
                       const void* all, int64_t outputs) {
      lorikeet_linear(x, inputs, weight, bias, out, rows, threads, to ? adapters : nullptr, first / kLayerModules, to);
      if (any(extras, first, all)) lorikeet_scale_and_shift(out, outputs, extras, first, all, m.bytes, threads);
    };
    const char* in = norm(index ? s.delta : nullptr, layer.input_norm, 2 * index);
    product(in, m.hidden, layer.qkv, layer.qkv_bias, s.qkv, changed.qkv, every.qkv, recurs ? m.recurrences.columns() : qkv);
    (recurs ? recur : attend)(m, layer, s, reals, threads);
    if (index == m.count - 1 && s.samples < rows) {
      keep(s.x, m.hidden * m.bytes, s.sample_rows, s.samples, s.normed);
      keep(s.mixed, mixed * m.bytes, s.sample_rows, s.samples, s.qkv);
      rows = s.samples;
      adapters = s.sample_adapters;
      extras = s.sample_extras;
    }
    product(s.mixed, mixed, layer.o, layer.o_bias, s.delta, changed.o, every.o, m.hidden);
    norm_output(layer.attention_norm);
    in = norm(s.delta, layer.post_norm, 2 * index + 1);
    const bool is_gelu = m.activation == Activation::kGeluTanh;
    if (changed.gate_up || any(extras, first, every.gate_up) || is_gelu ||
        !lorikeet_linear_gated(in, m.hidden, layer.gate_up, layer.gate_up_bias, s.gated, rows, threads)) {
      product(in, m.hidden, layer.gate_up, layer.gate_up_bias, s.gate_up, changed.gate_up, every.gate_up,
              2 * m.inner);
      (is_gelu ? lorikeet_gelu_mul : lorikeet_silu_mul)(s.gate_up, s.gated, rows, m.inner, m.bytes, threads);
    }
    product(s.gated, m.inner, layer.down, layer.down_bias, s.delta, changed.down, every.down, m.hidden);
    norm_output(layer.mlp_norm);
  }
}

}  // namespace
}  // namespace lorikeet

LORIKEET_EXPORT void lorikeet_layers(
    const lorikeet::Model* model, const lorikeet::LayersStep* step, double eps, double scale, double norm_offset,
    double softcap, double gated_eps, double least_step, double most_step, int64_t threads) {
  const lorikeet::Reals reals{eps, scale, norm_offset, softcap, gated_eps, least_step, most_step};
  lorikeet::layers(*model, *step, reals, threads);
}
