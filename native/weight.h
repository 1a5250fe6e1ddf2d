#pragma once

#include <cstdint>

namespace lorikeet {

// A packed weight, as passed by Python. Of a plain one, everything from `bits` on is 0.
struct Weight {
  const void* packed;
  int64_t inputs, outputs, bytes;  // of an element: 2 for bfloat16, 4 for float
  int64_t bits, group, zero;
  const void *scales, *offsets;  // offsets may be null
  int64_t scale_bytes;           // 2 for float16, 4 for float
};

}  // namespace lorikeet
