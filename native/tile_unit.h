// The tile unit of x86-64 (AMX): registers of 16 rows of 64 bytes, and one instruction that multiplies two of bfloat16
// into one of floats. The left side holds rows of 32 elements, the right side 16 groups of two rows, 16 columns each.
// Intel's manual, volume 1, chapter 18: https://www.intel.com/sdm
#pragma once

#include <cstdint>

#include "simd.h"

namespace lorikeet {

// Whether the unit multiplies elements of type T.
#if defined(__AMX_BF16__)
template <class T>
constexpr bool kTileUnit = sizeof(T) == 2;
#else
template <class T>
constexpr bool kTileUnit = false;
#endif

constexpr int64_t kTileHeight = 16;  // rows at most
constexpr int64_t kTileWidth = 16;   // floats of a row, and columns of a product
constexpr int64_t kTileDepth = 32;   // elements that a multiplication adds up

#if defined(__AMX_BF16__)

// The tiles of a thread, until this ends: 0 to 6 have some number of rows, for sums and, in 6, a left side, 7 has 16, for a
// right side. Sums and the right side have some number of columns.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) _tile_release();
  }
  // Gives tiles so many rows and columns; where they have others, what is in any tile is lost.
  void shape(int64_t rows, int64_t columns = kTileWidth) {
    if (rows == rows_ && columns == columns_) return;
    rows_ = rows;
    columns_ = columns;
    struct alignas(64) Shapes {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; ++tile) {
      shapes.bytes[tile] = uint16_t(tile == 6 ? 64 : 4 * columns);
      shapes.rows[tile] = uint8_t(tile < 7 ? rows : kTileHeight);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));  // GCC's intrinsic does not say that it reads all of them
  }
  // Stores a tile that is not used, once in a few steps of a loop. The first store after a pause of less than a
  // microsecond stalls for as long as dozens of multiplications take (measured; not in Intel's manuals). Regular stores
  // avoid that stall at the end of a long loop.
  void keep_storing(int64_t step) {
    if (step % 4 == 0) asm volatile("tilestored %%tmm6, (%0,%1,1)" ::"r"(nowhere_), "r"(kTileWidth * 4) : "memory");
  }

 private:
  int64_t rows_ = 0, columns_ = 0;
  alignas(64) float nowhere_[kTileHeight][kTileWidth];
};

// Loads a tile whose rows lie `stride` bytes apart. (GCC's intrinsic does not say that it reads memory.)
template <int Tile>
inline void load_tile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}

// The same with a non-temporal hint, for rows that are not read again soon.
template <int Tile>
inline void load_passing_tile(const void* rows, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(Tile) : "memory");
}

// Tile `Sum` += tile 6 . tile 7. (GCC's intrinsic does not accept template arguments.)
template <int Sum>
inline void add_product() {
  asm volatile("tdpbf16ps %%tmm7, %%tmm6, %%tmm%c0" ::"i"(Sum));
}

// The same in whole numbers: both tiles hold groups of four signed bytes.
template <int Sum>
inline void add_whole_product() {
  asm volatile("tdpbssd %%tmm7, %%tmm6, %%tmm%c0" ::"i"(Sum));
}

// Tiles First, First + 1 ..., Count of them: sets them to zero, or stores their 16 rows one tile after the other.
template <int First, int Count>
inline void clear_tiles() {
  asm volatile("tilezero %%tmm%c0" ::"i"(First));
  if constexpr (Count > 1) clear_tiles<First + 1, Count - 1>();
}
template <int First, int Count>
inline void store_tiles(float (*to)[kTileHeight][kTileWidth]) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(kTileWidth * 4), "i"(First) : "memory");
  if constexpr (Count > 1) store_tiles<First + 1, Count - 1>(to + 1);
}

#else

struct Tiles {
  void shape(int64_t, int64_t = 0) {}
};

#endif

}  // namespace lorikeet
