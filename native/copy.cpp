// Copies blocks between two arenas while other threads compute.
//
// The data is not read again soon, so it must not evict other data from the caches: loads are non-temporal, and stores
// go to memory directly, which also saves reading the target lines.
#if defined(__AVX2__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "parallel.h"

namespace {

#if defined(__AVX512F__)
using Wide = __m512i;
inline Wide load(const char* p) { return _mm512_loadu_si512(p); }
inline void stream(char* p, Wide x) { _mm512_stream_si512((__m512i*)p, x); }
#elif defined(__AVX2__)
using Wide = __m256i;
inline Wide load(const char* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void stream(char* p, Wide x) { _mm256_stream_si256((__m256i*)p, x); }
#else
using Wide = uint8x16_t;  // compilers offer no stores past the caches; processors write whole lines without reading them
inline Wide load(const char* p) { return vld1q_u8((const uint8_t*)p); }
inline void stream(char* p, Wide x) { vst1q_u8((uint8_t*)p, x); }
#endif

// Makes the stores visible before their end is signalled.
inline void finish_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

constexpr int64_t kWidth = sizeof(Wide), kLine = 64, kStride = 256;
constexpr int64_t kAhead = 1024;  // prefetch distance in bytes
constexpr int64_t kTurn = 64 * 1024;  // bytes between two yields of the core

void copy(const char* source, char* target, int64_t bytes) {
  int64_t done = std::min(bytes, int64_t(-uintptr_t(target) % kWidth));  // up to where vectors may be streamed
  std::memcpy(target, source, done);
  for (; done + kStride <= bytes; done += kStride) {
    for (int64_t line = 0; line < kStride; line += kLine) __builtin_prefetch(source + done + kAhead + line, 0, 0);
    for (int64_t at = done; at < done + kStride; at += kWidth) stream(target + at, load(source + at));
  }
  std::memcpy(target + done, source + done, bytes - done);
}

// As Python's time.monotonic().
double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

// source, target: arenas of blocks of `bytes` bytes, which do not overlap.
// blocks [2, count]: numbers of the source's blocks, and of the target's.
// until_s: time of the monotonic clock until which the core is offered to other threads regularly: a team of compute
// threads loses more than the time for which one of its threads is delayed.
LORIKEET_EXPORT void lorikeet_copy(const char* source, char* target, int64_t bytes, const int64_t* blocks,
                                   int64_t count, double until_s) {
  bool gives_way = seconds() < until_s;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t done = 0; done < bytes; done += kTurn) {
      const int64_t begin = blocks[i] * bytes + done, to = blocks[count + i] * bytes + done;
      copy(source + begin, target + to, std::min(bytes - done, kTurn));
      if (gives_way) {
        std::this_thread::yield();
        gives_way = seconds() < until_s;
      }
    }
  }
  finish_stores();
}
