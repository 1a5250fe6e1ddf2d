// Fetching what the LoRA kernel will read while a product is computed.
#pragma once

#include <algorithm>
#include <vector>

#include "parallel.h"

namespace lorikeet {

constexpr int64_t kLine = 64;  // bytes of a cache line

// Lines of memory that will be wanted soon: one every `step` bytes, for each k-group of a tile.
struct Lines {
  const char* at;
  int64_t step;
};

// What the LoRA kernel will read right after a product of few rows. The product is bound by arithmetic and LoRA by
// memory, so most of LoRA's reading is done meanwhile, into the second-level caches.
class LoraAhead {
  // Neighbouring bytes.
  struct Run {
    const char* begin;
    int64_t bytes, lines;
  };

 public:
  // The pieces of some modules of a layer, as lorikeet_lora is given them. Their inputs are the product's.
  LoraAhead(const int64_t* segments, int64_t count, int64_t layer, const int64_t* modules, const int64_t* outputs,
            int64_t module_count, int64_t inputs, int64_t bytes) {
    for (int64_t s = 0; s < count; ++s) {
      const int64_t *pieces = (const int64_t*)segments[4 * s + 2], *index = (const int64_t*)segments[4 * s + 3];
      for (int64_t m = 0; m < module_count; ++m)
        for (int64_t i = index[layer * kModules + modules[m]]; i < index[layer * kModules + modules[m] + 1]; ++i) {
          const int64_t* piece = pieces + 3 * i;
          add((const char*)piece[0], piece[2] * inputs * bytes);
          add((const char*)piece[1], piece[2] * outputs[m] * bytes);
        }
    }
  }

  // The part of one thread: as LoRA deals its work, neighbours together.
  class Part {
   public:
    Part(const LoraAhead& all, int64_t thread, int64_t count) : runs_(all.runs_) {
      Range mine = part_of(all.lines_, thread, count);
      left_ = std::min(mine.end - mine.begin, kMostLines);
      for (skip_ = mine.begin; run_ < runs_.size() && skip_ >= runs_[run_].lines; ++run_) skip_ -= runs_[run_].lines;
    }
    // Up to `wanted` lines side by side; without any left a line that is in the cache anyway.
    Lines take(int64_t wanted, const void* cached) {
      if (left_ <= 0 || run_ == runs_.size()) return {(const char*)cached, 0};
      const Lines lines{runs_[run_].begin + skip_ * kLine, kLine};
      const int64_t taken = std::min(wanted, runs_[run_].lines - skip_);
      left_ -= taken;
      skip_ += taken;
      if (skip_ == runs_[run_].lines) ++run_, skip_ = 0;
      return lines;
    }

   private:
    static constexpr int64_t kMostLines = (768 << 10) / kLine;  // most of a second-level cache
    const std::vector<Run>& runs_;
    size_t run_ = 0;
    int64_t skip_ = 0, left_ = 0;
  };

 private:
  static constexpr int64_t kModules = 7;
  void add(const char* begin, int64_t bytes) {
    const int64_t lines = (bytes + kLine - 1) / kLine;
    if (!runs_.empty() && runs_.back().begin + runs_.back().bytes == begin) {
      lines_ -= runs_.back().lines;
      runs_.back().bytes += bytes;
      runs_.back().lines = (runs_.back().bytes + kLine - 1) / kLine;
      lines_ += runs_.back().lines;
      return;
    }
    runs_.push_back({begin, bytes, lines});
    lines_ += lines;
  }
  std::vector<Run> runs_;
  int64_t lines_ = 0;
};

}  // namespace lorikeet
