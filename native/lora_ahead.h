// Prefetches the adapters that LoRA will read, while the base product is computed.
#pragma once

#include "linear_tiles.h"
#include "lora_plan.h"

namespace lorikeet {
namespace {

// The lines that a thread reads for LoRA, in the order in which it does, up to `most` of them. A product of a few dozen
// rows is bound by arithmetic and LoRA on as many by memory, so most of LoRA's reading is done during the product, into
// the second-level cache.
template <class T, class E>
class LoraAhead {
  // Neighbouring bytes.
  struct Run {
    const char* begin;
    int64_t bytes;
    int64_t lines() const { return (bytes + kLine - 1) / kLine; }
  };

 public:
  LoraAhead(const Lora<T, E>& lora, int64_t thread, int64_t threads, int64_t most)
      : lora_(lora), runs_(kept()), left_(most) {
    runs_.clear();
    const Range shrink = part_of(lora.shrink_total, thread, threads);
    const Range expand = part_of(lora.expand_total, thread, threads);
    for (const Part& part : lora.parts) {
      const Range tiles = units_in(shrink, part.shrink_before, part.shrink_cost, part.rank_tiles);
      add_a(part, tiles.begin * kShrinkRanks<T>, tiles.end * kShrinkRanks<T>, lora.inputs);
    }
    for (const Part& part : lora.parts) {
      const Range spans = units_in(expand, part.expand_before, part.expand_cost, part.spans());
      add_bt(part, spans.begin * kSpan, std::min(spans.end * kSpan, part.outputs));
    }
  }

  // Up to `wanted` adjacent lines; if none is left, a line that is in the cache already.
  Lines take(int64_t wanted, const void* cached) {
    if (left_ <= 0 || run_ == runs_.size()) return {(const char*)cached, 0};
    const Run& run = runs_[run_];
    const Lines lines{run.begin + skip_ * kLine, kLine};
    const int64_t taken = std::min(wanted, run.lines() - skip_);
    left_ -= taken;
    skip_ += taken;
    if (skip_ == run.lines()) ++run_, skip_ = 0;
    return lines;
  }

 private:
  // The rank rows [begin, end) of A.
  void add_a(const Part& part, int64_t begin, int64_t end, int64_t inputs) {
    int64_t first = 0;
    for (const Piece* piece = part.pieces; first < std::min(end, part.real_rank); first += (piece++)->rows) {
      const int64_t from = std::max(begin, first), to = std::min(end, first + piece->rows);
      if (from < to) add((const E*)piece->a + (from - first) * inputs, (to - from) * inputs);
    }
    for (int64_t rank = std::max(begin, part.real_rank); rank < std::min(end, part.rank); ++rank)
      add(lora_.padding(part, false, rank, inputs), inputs);
  }
  // The columns [begin, end) of Bᵀ.
  void add_bt(const Part& part, int64_t begin, int64_t end) {
    int64_t first = 0;
    if (begin >= end) return;
    for (const Piece* piece = part.pieces; first < part.real_rank; first += (piece++)->rows)
      for (int64_t row = 0; row < piece->rows; ++row)
        add((const E*)piece->bt + row * part.outputs + begin, end - begin);
    for (int64_t rank = part.real_rank; rank < part.rank; ++rank)
      add(lora_.padding(part, true, rank, part.outputs) + begin, end - begin);
  }
  void add(const E* begin, int64_t elements) {
    if (added_ >= left_) return;
    const int64_t bytes = elements * int64_t(sizeof(E));
    if (!runs_.empty() && runs_.back().begin + runs_.back().bytes == (const char*)begin) {
      runs_.back().bytes += bytes;
    } else {
      runs_.push_back({(const char*)begin, bytes});
    }
    added_ += bytes / kLine;
  }
  // A thread keeps the memory: a call in the hot path allocates nothing.
  static std::vector<Run>& kept() {
    static thread_local std::vector<Run> runs;
    return runs;
  }
  static constexpr int64_t kLine = 64;  // bytes of a cache line
  const Lora<T, E>& lora_;
  std::vector<Run>& runs_;
  size_t run_ = 0;
  int64_t skip_ = 0, left_, added_ = 0;
};

}  // namespace
}  // namespace lorikeet
