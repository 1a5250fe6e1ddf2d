#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace lorikeet {
namespace {

// A buffer that grows and is reused by the next call; new memory is zero.
template <class E>
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  E* of(int64_t n) {
    if (n > size_) {
      std::free(data_);
      size_ = (n + 63) / 64 * 64;
      data_ = (E*)std::aligned_alloc(64, size_ * sizeof(E));
      std::memset((void*)data_, 0, size_ * sizeof(E));
    }
    return data_;
  }

 private:
  E* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace
}  // namespace lorikeet
