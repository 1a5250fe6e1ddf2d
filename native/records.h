// The records that Python fills in. kernels/native_records.py has the same fields in the same order; their sizes are compared
// when a library is loaded.
#pragma once

#include <cstdint>

#include "extras.h"
#include "weight.h"

namespace lorikeet {

// Some rows of an adapter's A and Bᵀ, which lie together.
struct Piece {
  int64_t a, bt, rows;  // addresses
  const float* scale(int64_t row) const { return (const float*)a - rows + row; }  // of codes; not aligned
};

// The rows [start, stop) of an adapter; `index` has the first piece of each module of each layer.
struct Segment {
  int64_t start, stop;
  const Piece* pieces;
  const int64_t* index;
};

// The adapters of a batch. `padded_rank` is 0 if none is padded; `bits` of a stored element, 0 if it is like the product's.
struct Adapters {
  const Segment* segments;
  int64_t count, padded_rank, bits;
};

// Neighbouring rows with a weight of their own. `targets` may be null if there are no segments.
struct Group {
  const void *weight, *bias, *targets;
  int64_t rows, segments;
};

// The function that gates an MLP.
enum class Activation : int64_t { kSilu, kGeluTanh };

// A layer. Weights are those of lorikeet_linear(). A missing tensor is null, a window 0 if there is none. With a `conv` the
// layer has a recurrence, else attention; `place` is its number among the layers of its kind.
struct Layer {
  const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias, *attention_norm, *post_norm, *gate_up,
      *gate_up_bias, *down, *down_bias, *mlp_norm;
  const void *conv, *conv_bias;
  const float *rates, *gate_bias, *skip;
  const void* gated_norm;
  int64_t window, rotation, place;
};

// Layers with a recurrence: by the gated delta rule, or a state space. `parts` of the state of a convolution, `group` columns
// that are normalised together.
struct Recurrences {
  int64_t is_delta, key_heads, heads, key_dim, value_dim, taps, parts, group;
  int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
  int64_t columns() const { return channels() + heads * value_dim + (is_delta ? 2 : 1) * heads; }
};

struct Model {
  const Layer* layers;
  int64_t count, hidden, heads, kv_heads, head_dim, inner, bytes, slots;
  int64_t rotary_dims, rotates_neighbours, whole_norms, one_order, gated_attention;
  Activation activation;
  Recurrences recurrences;
};

// The targets of each product of a layer; null for products that no adapter changes.
struct ProductTargets {
  const void *qkv, *o, *gate_up, *down;
};

// A step of all layers.
struct LayersStep {
  int64_t rows, samples;       // all rows, and rows that need an output
  const int64_t* sample_rows;  // indices of the rows that need an output
  char* x;                     // [rows, hidden]; comes out as it is before the last MLP is added
  const char *cos, *sin;       // [rotations, rows, head_dim]
  char* kv;
  int64_t kv_bytes, layer_stride, block_stride, block_tokens;
  const int64_t *slot_blocks, *slot_offsets, *row_starts, *contexts, *tables;
  int64_t table_stride, sequences;
  const Adapters *adapters, *sample_adapters;  // null if no row has one
  ProductTargets targets;                      // that an adapter changes
  const Extras *extras, *sample_extras;        // null if no adapter has extras
  ProductTargets all_targets, recurrence_targets, all_recurrence_targets;
  float* states;
  const int64_t *resumed, *conv_offsets, *state_offsets;  // offsets: [layers, sequences, parts]
  char *normed, *qkv, *mixed, *delta, *gate_up, *gated;   // room for [rows, ...]; delta comes out too
  char *ordered, *gates, *convolved;  // room for [rows, ...]: columns in another order; gates; outputs of a convolution
  float *decay, *beta;                // room for [rows, heads]
};

}  // namespace lorikeet
