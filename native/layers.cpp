// All layers of a decoder, one kernel after the other. Calls from Python take much longer: while kernels run, weights and
// keys evict the interpreter from the caches, and a call takes tens of microseconds instead of a few.
#include <cstring>

#include "calls.h"
#include "extras.h"
#include "records.h"

namespace lorikeet {
namespace {

constexpr int64_t kLayerModules = 7;  // of a layer: LORA_MODULES

// The real numbers of a model.
struct Reals {
  double eps, scale, norm_offset, softcap;
};

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
  const int64_t mixed = m.heads * m.head_dim, qkv = mixed + 2 * m.kv_heads * m.head_dim;
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
    auto product = [&](const char* x, int64_t inputs, const void* weight, const void* bias, char* out, const void* to,
                       const void* all, int64_t outputs) {
      lorikeet_linear(x, inputs, weight, bias, out, rows, threads, to ? adapters : nullptr, index, to);
      const int64_t first = index * kLayerModules;
      if (any(extras, first, all)) lorikeet_scale_and_shift(out, outputs, extras, first, all, m.bytes, threads);
    };
    char* kv = s.kv + index * s.layer_stride * s.kv_bytes;
    const char* in = norm(index ? s.delta : nullptr, layer.input_norm, 2 * index);
    product(in, m.hidden, layer.qkv, layer.qkv_bias, s.qkv, s.targets.qkv, s.all_targets.qkv, qkv);
    const int64_t angles = layer.rotation * s.rows * m.head_dim * m.bytes;
    lorikeet_rotary_store(s.qkv, qkv, m.heads, m.kv_heads, m.head_dim, s.cos + angles, s.sin + angles, layer.q_norm,
                          layer.k_norm, reals.eps, reals.norm_offset, m.whole_norms, m.rotary_dims,
                          m.rotates_neighbours, kv, s.kv_bytes, s.block_stride, s.block_tokens, s.slot_blocks,
                          s.slot_offsets, rows, m.bytes, threads);
    lorikeet_attention(s.qkv, qkv, kv, s.kv_bytes, s.block_stride, s.mixed, mixed, s.row_starts, s.contexts, s.tables,
                       s.table_stride, s.sequences, m.heads, m.kv_heads, m.head_dim, s.block_tokens, reals.scale,
                       layer.window, reals.softcap, m.one_order, m.bytes, threads);
    if (index == m.count - 1 && s.samples < rows) {
      keep(s.x, m.hidden * m.bytes, s.sample_rows, s.samples, s.normed);
      keep(s.mixed, mixed * m.bytes, s.sample_rows, s.samples, s.qkv);
      rows = s.samples;
      adapters = s.sample_adapters;
      extras = s.sample_extras;
    }
    product(s.mixed, mixed, layer.o, layer.o_bias, s.delta, s.targets.o, s.all_targets.o, m.hidden);
    norm_output(layer.attention_norm);
    in = norm(s.delta, layer.post_norm, 2 * index + 1);
    const bool is_gelu = m.activation == Activation::kGeluTanh;
    if (s.targets.gate_up || any(extras, index * kLayerModules, s.all_targets.gate_up) || is_gelu ||
        !lorikeet_linear_gated(in, m.hidden, layer.gate_up, layer.gate_up_bias, s.gated, rows, threads)) {
      product(in, m.hidden, layer.gate_up, layer.gate_up_bias, s.gate_up, s.targets.gate_up, s.all_targets.gate_up,
              2 * m.inner);
      (is_gelu ? lorikeet_gelu_mul : lorikeet_silu_mul)(s.gate_up, s.gated, rows, m.inner, m.bytes, threads);
    }
    product(s.gated, m.inner, layer.down, layer.down_bias, s.delta, s.targets.down, s.all_targets.down, m.hidden);
    norm_output(layer.mlp_norm);
  }
}

}  // namespace
}  // namespace lorikeet

LORIKEET_EXPORT void lorikeet_layers(
    const lorikeet::Model* model, const lorikeet::LayersStep* step, double eps, double scale, double norm_offset,
    double softcap, int64_t threads) {
  const lorikeet::Reals reals{eps, scale, norm_offset, softcap};
  lorikeet::layers(*model, *step, reals, threads);
}
