// Products on Intel's AMX: sixteen rows times sixteen outputs over 32 inputs in one instruction.
//
// A tile of weights is 16 steps over a pack by 16 outputs, the layout of panels in memory. With
// HEADRACE_EMULATE_TILES plain C++ replaces the instructions, so that every machine can test this.
#pragma once

#include "tile.h"

#if defined(__AMX_BF16__) || defined(HEADRACE_EMULATE_TILES)
#define HEADRACE_TILES 1
#else
#define HEADRACE_TILES 0
#endif

#if HEADRACE_TILES

namespace headrace {

constexpr int kTileRows = 16, kTileInputs = 32, kTileOutputs = 16;
constexpr int kTileBlock = 2 * kTileRows;  // rows of one call

// The operand of `ldtilecfg`: palette 1, bytes of a row and rows of each tile register.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int count) {
    row_bytes[tile] = 64;
    rows[tile] = uint8_t(count);
  }
};

}  // namespace headrace

#if defined(HEADRACE_EMULATE_TILES)

namespace headrace {

struct EmulatedTiles {
  TileConfig config;
  uint8_t bytes[8][16][64];
};
inline thread_local EmulatedTiles emulated;

inline void emulate_zero(int tile) { std::memset(emulated.bytes[tile], 0, sizeof(emulated.bytes[0])); }

inline void emulate_load(int tile, const void* from, int64_t stride) {
  emulate_zero(tile);
  for (int r = 0; r < emulated.config.rows[tile]; ++r)
    std::memcpy(emulated.bytes[tile][r], static_cast<const char*>(from) + r * stride,
                emulated.config.row_bytes[tile]);
}

inline void emulate_store(int tile, void* to, int64_t stride) {
  for (int r = 0; r < emulated.config.rows[tile]; ++r)
    std::memcpy(static_cast<char*>(to) + r * stride, emulated.bytes[tile][r],
                emulated.config.row_bytes[tile]);
}

inline void emulate_product(int sums, int left, int right) {
  auto* to = reinterpret_cast<float(*)[16]>(emulated.bytes[sums]);
  auto* a = reinterpret_cast<bfloat16(*)[32]>(emulated.bytes[left]);
  auto* b = reinterpret_cast<bfloat16(*)[32]>(emulated.bytes[right]);
  for (int r = 0; r < emulated.config.rows[sums]; ++r)
    for (int k = 0; k < emulated.config.rows[right]; ++k)
      for (int c = 0; c < 16; ++c)
        to[r][c] += widen(a[r][2 * k]) * widen(b[k][2 * c]) +
                    widen(a[r][2 * k + 1]) * widen(b[k][2 * c + 1]);
}

}  // namespace headrace

#define _tile_loadconfig(from) (headrace::emulated.config = *static_cast<const headrace::TileConfig*>(from))
#define _tile_release() ((void)0)
#define _tile_zero(tile) headrace::emulate_zero(tile)
#define _tile_loadd(tile, from, stride) headrace::emulate_load(tile, from, stride)
#define _tile_stored(tile, to, stride) headrace::emulate_store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) headrace::emulate_product(sums, left, right)

#endif  // HEADRACE_EMULATE_TILES

namespace headrace {

// Registers 0-3: sums. Up to 16 rows: 4 is their data, 5 and 6 are weights. Up to 32 rows: 0, 1
// and 4 are of the first 16 rows, 2, 3 and 5 of the others, 6 and 7 are weights.
inline TileConfig tile_config(int rows) {
  TileConfig config;
  const int first = rows < kTileRows ? rows : kTileRows, others = rows - first;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, kTileRows);
  if (others == 0) {
    for (int tile = 0; tile <= 4; ++tile) config.set(tile, first);
  } else {
    config.set(2, others);
    config.set(3, others);
    config.set(5, others);
  }
  return config;
}

// sums[r][0 .. 63] of at most 32 rows and a panel of 64 outputs; `inputs` is a multiple of 32. The
// registers are configured for this number of rows.
inline void multiply_tiles(int count, const bfloat16* rows, int64_t stride, const bfloat16* panel,
                           int64_t inputs, float* sums) {
  constexpr int kOutputs = 4 * kTileOutputs;
  constexpr int64_t kSumBytes = kOutputs * sizeof(float);
  constexpr int64_t kWeightBytes = kOutputs * 2 * sizeof(bfloat16);
  const int64_t row_bytes = stride * int64_t(sizeof(bfloat16));
  if (count <= kTileRows) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += kTileInputs) {
      const bfloat16* weights = panel + k * kOutputs;
      _tile_loadd(4, rows + k, row_bytes);
      _tile_loadd(5, weights, kWeightBytes);
      _tile_loadd(6, weights + 2 * kTileOutputs, kWeightBytes);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, weights + 4 * kTileOutputs, kWeightBytes);
      _tile_loadd(6, weights + 6 * kTileOutputs, kWeightBytes);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, sums, kSumBytes);
    _tile_stored(1, sums + kTileOutputs, kSumBytes);
    _tile_stored(2, sums + 2 * kTileOutputs, kSumBytes);
    _tile_stored(3, sums + 3 * kTileOutputs, kSumBytes);
    return;
  }
  for (int half = 0; half < 2; ++half) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inputs; k += kTileInputs) {
      const bfloat16* weights = panel + k * kOutputs + half * 4 * kTileOutputs;
      _tile_loadd(4, rows + k, row_bytes);
      _tile_loadd(5, rows + kTileRows * stride + k, row_bytes);
      _tile_loadd(6, weights, kWeightBytes);
      _tile_loadd(7, weights + 2 * kTileOutputs, kWeightBytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* to = sums + half * 2 * kTileOutputs;
    _tile_stored(0, to, kSumBytes);
    _tile_stored(1, to + kTileOutputs, kSumBytes);
    _tile_stored(2, to + kTileRows * kOutputs, kSumBytes);
    _tile_stored(3, to + kTileRows * kOutputs + kTileOutputs, kSumBytes);
  }
}

}  // namespace headrace

#endif  // HEADRACE_TILES
