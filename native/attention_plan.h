// Divides a call of attention into work items that threads take in order.
//
// An item of a prefill is a block of query rows with the heads that share one kv head, over all that they see. A
// sequence with few rows is divided along its context instead, all heads together as their keys are adjacent. The
// division of a sequence depends on that sequence only, so results depend neither on threads nor on the batch.
//
// In one order a row's result depends on its position only, not on how many rows its sequence has: every row goes through
// its context from the front to the back in the tiles of a prefill, which begin at multiples of kTile.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"
#include "tile_unit.h"

namespace lorikeet {
namespace {

template <class T>
constexpr int64_t kItemRows = kTileUnit<T> ? 192 : 96;  // of a prefill's item, heads counted; each packs what it reads
constexpr int64_t kFewRows = 8;        // a sequence with at most so many is cut along its context,
constexpr int64_t kPieceTokens = 128;  // into even pieces of at most so many, or of a multiple of it if they would be
constexpr int64_t kPieces = 32;        // more than this,
constexpr int64_t kPieceUnit = 16;     // of a multiple of that
constexpr int64_t kTile = 128;         // tokens of a tile

inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// T is the element of queries and outputs, S that of keys and values as they are stored: T, or codes of 8 bits. A head of
// a token then is head_dim codes and their scale in bfloat16.
template <class T, class S>
struct Call {
  const T* q;
  int64_t q_stride;
  const S* kv;
  int64_t block_stride;
  T* out;
  int64_t out_stride;
  const int64_t *row_starts, *contexts, *tables;
  int64_t table_stride, sequences, heads, kv_heads, head_dim, block_tokens;
  float scale;
  int64_t window;
  float softcap;  // 0: none
  bool one_order;

  int64_t group() const { return heads / kv_heads; }
  int64_t stored() const { return head_dim + (sizeof(S) == 1 ? 2 : 0); }  // elements of a head of a token
  int64_t rows(int64_t sequence) const { return row_starts[sequence + 1] - row_starts[sequence]; }
  // The first position that a row at `position` sees.
  int64_t seen_from(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

// A block of query rows, or a piece of a context.
struct Item {
  int64_t sequence, row, rows;  // rows [row, row + rows) of the sequence
  int64_t position;             // of the first of them
  int64_t begin, end;           // tokens
  int64_t head;                 // kv head, if it is a block
  int64_t cut, piece;           // if it is a piece
};

// A sequence cut along its context. Its states begin at row `first` of all; they are [piece][kv head][row].
struct Cut {
  int64_t sequence, pieces, first;
};

// Fills items and cuts; returns how many states the pieces need.
template <class T, class S>
int64_t plan(const Call<T, S>& c, std::vector<Item>& items, std::vector<Cut>& cuts) {
  items.clear();
  cuts.clear();
  static thread_local std::vector<int64_t> prefills;
  prefills.clear();
  const int64_t few = c.one_order ? 0 : kFewRows;
  for (int64_t s = 0; s < c.sequences; ++s)
    if (c.rows(s) > few) prefills.push_back(s);
  // From the largest sequence to the smallest, and from late rows, which see most, to early ones, so that no thread has
  // much work left at the end, and neighbours in the list share keys and values.
  std::sort(prefills.begin(), prefills.end(), [&](int64_t a, int64_t b) {
    return c.rows(a) * c.contexts[a] > c.rows(b) * c.contexts[b];
  });
  const int64_t most_rows = std::max<int64_t>(1, kItemRows<T> / c.group());
  for (int64_t s : prefills) {
    const int64_t rows = c.rows(s), start = c.contexts[s] - rows;
    const int64_t blocks = std::max(std::min<int64_t>(2, rows), (rows + most_rows - 1) / most_rows);
    for (int64_t block = blocks - 1; block >= 0; --block) {
      const Range part = part_of(rows, block, blocks);
      const int64_t position = start + part.begin, end = start + part.end;
      const int64_t seen = c.seen_from(position), begin = c.one_order ? seen / kTile * kTile : seen;
      for (int64_t head = 0; head < c.kv_heads; ++head)
        items.push_back({s, part.begin, part.end - part.begin, position, begin, end, head, -1, -1});
    }
  }
  int64_t states = 0;
  for (int64_t s = 0; s < c.sequences; ++s) {
    const int64_t rows = c.rows(s), position = c.contexts[s] - rows, end = c.contexts[s];
    if (rows == 0 || rows > few) continue;
    const int64_t begin = c.seen_from(position);
    const int64_t wanted = std::min(kPieces, (end - begin + kPieceTokens - 1) / kPieceTokens);
    const int64_t even = (end - begin + wanted - 1) / wanted;
    const int64_t length = round_up(even, even > kPieceTokens ? kPieceTokens : kPieceUnit);
    const int64_t pieces = (end - begin + length - 1) / length;
    for (int64_t p = 0; p < pieces; ++p)
      items.push_back({s, 0, rows, position, begin + p * length, std::min(end, begin + (p + 1) * length), -1,
                       int64_t(cuts.size()), p});
    cuts.push_back({s, pieces, states});
    states += pieces * rows * c.heads;
  }
  return states;
}

}  // namespace
}  // namespace lorikeet
