// The kernels of a decoder, as Python and layers.cpp call them. Strides are in elements; `bytes` is 2 for bfloat16, 4 for
// float. Each function is documented at its definition.
#pragma once

#include "parallel.h"

LORIKEET_EXPORT void lorikeet_linear(
    const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t threads,
    const void* adapters, int64_t layer, const void* targets);

LORIKEET_EXPORT void lorikeet_linear_groups(
    const void* x, int64_t x_stride, const void* groups, int64_t count, void* out, int64_t threads,
    const void* adapters, int64_t layer);

LORIKEET_EXPORT bool lorikeet_linear_gated(
    const void* x, int64_t x_stride, const void* weight, const void* bias, void* out, int64_t rows, int64_t threads);

LORIKEET_EXPORT void lorikeet_add_norm(
    void* x, const void* delta, const void* weight, void* out, int64_t rows, int64_t hidden, double eps, double offset,
    int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_rotary_store(
    void* qkv, int64_t row_stride, int64_t heads, int64_t kv_heads, int64_t head_dim, const void* cos, const void* sin,
    const void* q_norm, const void* k_norm, double eps, double offset, int64_t whole, int64_t dims, int64_t neighbours,
    void* kv, int64_t kv_bytes, int64_t block_stride, int64_t block_tokens, const int64_t* slot_blocks,
    const int64_t* slot_offsets, int64_t rows, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_attention(
    const void* q, int64_t q_stride, const void* kv, int64_t kv_bytes, int64_t block_stride, void* out,
    int64_t out_stride, const int64_t* row_starts, const int64_t* contexts, const int64_t* tables, int64_t table_stride,
    int64_t sequences, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_tokens, double scale,
    int64_t window, double softcap, int64_t one_order, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_scale_and_shift(
    void* out, int64_t stride, const void* extras, int64_t first, const void* targets, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_silu_mul(
    const void* gate_up, void* out, int64_t rows, int64_t n, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_gelu_mul(
    const void* gate_up, void* out, int64_t rows, int64_t n, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_sigmoid_mul(
    const void* x, const void* gate, void* out, int64_t elements, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_recurrence_gates(
    const void* b, int64_t b_stride, const void* a, int64_t a_stride, const float* rates, const float* bias, double least,
    double most, float* decay, float* beta, int64_t rows, int64_t heads, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_recurrence(
    const void* queries, int64_t query_stride, const void* keys, int64_t key_stride, const void* values,
    int64_t value_stride, const float* decay, const float* beta, const float* skip, float* states, const int64_t* starts,
    const int64_t* resumed, const int64_t* offsets, int64_t sequences, int64_t heads, int64_t key_heads, int64_t key_dim,
    int64_t value_dim, void* out, int64_t is_delta, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_causal_conv(
    const void* x, int64_t stride, const void* weight, const void* bias, float* tails, void* out, const int64_t* starts,
    const int64_t* resumed, const int64_t* offsets, int64_t sequences, int64_t parts, int64_t channels, int64_t taps,
    int64_t has_silu, int64_t bytes, int64_t threads);

LORIKEET_EXPORT void lorikeet_gated_norm(
    const void* x, int64_t x_stride, const void* gate, int64_t gate_stride, const void* weight, int64_t weights, void* out,
    int64_t rows, int64_t columns, int64_t group, double eps, int64_t norm_first, int64_t bytes, int64_t threads);
