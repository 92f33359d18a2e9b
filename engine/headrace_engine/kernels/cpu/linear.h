// Products of activations with weights in a prepared layout.
//
// Weights are in panels of kPanel outputs: [panel][inputs / pack][kPanel][pack], padded with
// zeros. A vector of a panel is multiplied by one broadcast factor of each row: no shuffle, no
// horizontal sum. The caller's `emit` gets a finished row of a panel while its sums are in
// registers.
#pragma once

#include <type_traits>

#include "pool.h"
#include "tile.h"
#include "tiles.h"

namespace headrace {

constexpr int kPanel = kColumns * kLanes;
constexpr int kLine = 64;   // bytes of a line of cache

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
// The sums of one row over one panel.
struct Sums {
  Floats at[kColumns];
};

// `rows` rows of activations, `stride` elements apart.
template <class Element>
struct Rows {
  const Element* data;
  int64_t stride, count;
};

// sums[r][...] = rows . panel. Each step prefetches `Ahead` lines of what is read next. Every
// number of rows is summed in the same order, so a row's result does not depend on other rows.
template <class Math, int R, int Ahead>
inline void multiply_panel(const typename Math::Factor* rows, int64_t stride,
                           const typename Math::Element* panel, int64_t inputs, const char* ahead,
                           Sums* sums) {
  constexpr int kPack = Math::kPack;
  Floats found[R][kColumns] = {};
  for (int64_t k = 0; k < inputs; k += kPack) {
    typename Math::Operand operands[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c)
      operands[c] = Math::operand(panel + k * kPanel + c * kLanes * kPack);
    for (int line = 0; line < Ahead; ++line)
      prefetch(ahead + (k / kPack * Ahead + line) * kLine);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
        found[r][c] = Math::add_product(found[r][c], rows + r * stride + k, operands[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r].at[c] = found[r][c];
}

template <class Math, int Ahead>
inline void multiply_rows(int count, const typename Math::Factor* rows, int64_t stride,
                          const typename Math::Element* panel, int64_t inputs, const char* ahead,
                          Sums* sums) {
  switch (count) {
    case 1: return multiply_panel<Math, 1, Ahead>(rows, stride, panel, inputs, ahead, sums);
    case 2: return multiply_panel<Math, 2, Ahead>(rows, stride, panel, inputs, ahead, sums);
    case 3: return multiply_panel<Math, 3, Ahead>(rows, stride, panel, inputs, ahead, sums);
    case 4: return multiply_panel<Math, 4, Ahead>(rows, stride, panel, inputs, ahead, sums);
    case 5: return multiply_panel<Math, 5, Ahead>(rows, stride, panel, inputs, ahead, sums);
    case 6: return multiply_panel<Math, 6, Ahead>(rows, stride, panel, inputs, ahead, sums);
  }
}

// `count` rows at once, up to kRows; each step prefetches `lines` lines, at most two.
template <class Math>
inline void multiply_block(int lines, int count, const typename Math::Factor* rows, int64_t stride,
                           const typename Math::Element* panel, int64_t inputs, const char* ahead,
                           Sums* sums) {
  switch (lines) {
    case 0: return multiply_rows<Math, 0>(count, rows, stride, panel, inputs, ahead, sums);
    case 1: return multiply_rows<Math, 1>(count, rows, stride, panel, inputs, ahead, sums);
    case 2: return multiply_rows<Math, 2>(count, rows, stride, panel, inputs, ahead, sums);
  }
}

// How a product is divided into items: one panel for a chunk of rows each, all panels of a chunk
// before the next chunk, whose rows then stay in a core's cache. Items are small compared with the
// product, as threads wait for each other at its end.
struct Division {
  int64_t rows, panels, chunk;

  // `block` rows are multiplied at once.
  Division(int64_t rows, int64_t row_bytes, int64_t panels, int threads, int block)
      : rows(rows), panels(panels) {
    const int64_t blocks = (rows + block - 1) / block;
    const int64_t cached = kCachedBytes / row_bytes;
    int64_t chunks = rows / (cached > kFewest ? cached : kFewest);
    if (chunks * panels < kItems * threads) chunks = (kItems * threads + panels - 1) / panels;
    if (chunks < 1 || blocks < 2) chunks = 1;
    chunk = (blocks + chunks - 1) / chunks * block;
  }

  int64_t items() const { return panels * ((rows + chunk - 1) / chunk); }
  int64_t panel(int64_t item) const { return item % panels; }
  int64_t begin(int64_t item) const { return item / panels * chunk; }
  int64_t end(int64_t item) const {
    const int64_t last = begin(item) + chunk;
    return last < rows ? last : rows;
  }

 private:
  static constexpr int64_t kCachedBytes = 256 << 10, kFewest = 96, kItems = 8;
};

// One item of a product: rows [begin, end) times one panel.
struct Piece {
  int64_t begin, end, panel;
};

inline Piece piece_of(const Division& division, int64_t item) {
  return {division.begin(item), division.end(item), division.panel(item)};
}

// The weights that a thread reads after those of `item`: in the same layer, or in the next one,
// `then`.
inline const char* weights_after(int64_t item, const Division& division, int threads,
                                 const void* weight, int64_t panel_bytes, const void* then) {
  const int64_t next = item + threads, beyond = next - division.items();
  if (beyond < 0 || !then)
    return static_cast<const char*>(weight) + division.panel(next) * panel_bytes;
  return static_cast<const char*>(then) + beyond * panel_bytes;
}

#if HEADRACE_TILES
// Like `multiply_piece` below, on AMX. Used for every number of rows, so that a row's result does
// not depend on other rows.
template <class Emit>
void multiply_piece_on_tiles(const Rows<bfloat16>& rows, const bfloat16* weight, int64_t inputs,
                             const Piece& piece, const Emit& emit) {
  static_assert(kPanel == 4 * kTileOutputs, "a panel is four tiles wide");
  int configured = 0;
  for (int64_t r = piece.begin; r < piece.end; r += kTileBlock) {
    const int count = piece.end - r < kTileBlock ? int(piece.end - r) : kTileBlock;
    if (count != configured) {
      const TileConfig config = tile_config(count);
      _tile_loadconfig(&config);
      configured = count;
    }
    Sums sums[kTileBlock];
    multiply_tiles(count, rows.data + r * rows.stride, rows.stride,
                   weight + piece.panel * inputs * kPanel, inputs, reinterpret_cast<float*>(sums));
    for (int i = 0; i < count; ++i) emit(r + i, piece.panel, sums[i]);
  }
  _tile_release();
}
#endif

template <class Math>
inline bool on_tiles(int64_t inputs) {
#if HEADRACE_TILES
  return std::is_same<Math, DotProduct>::value && inputs % kTileInputs == 0;
#else
  (void)inputs;
  return false;
#endif
}

// Rows that are multiplied at once.
template <class Math>
inline int block_of(int64_t inputs) {
#if HEADRACE_TILES
  if (on_tiles<Math>(inputs)) return kTileBlock;
#endif
  (void)inputs;
  return kRows;
}

// emit(row, panel, sums) for the rows of a piece. The first rows' products prefetch `ahead`, what
// the thread reads next. A few rows take no longer than their weights take to arrive; prefetching
// gained nothing there.
template <class Math, class Emit>
void multiply_piece(const Rows<typename Math::Factor>& rows, const typename Math::Element* weight,
                    int64_t inputs, const Piece& piece, const char* ahead, const Emit& emit) {
  using Element = typename Math::Element;
#if HEADRACE_TILES
  if constexpr (std::is_same<Math, DotProduct>::value)
    if (on_tiles<Math>(inputs)) return multiply_piece_on_tiles(rows, weight, inputs, piece, emit);
#endif
  const Element* from = weight + piece.panel * inputs * kPanel;
  const int64_t count_all = piece.end - piece.begin;
  const char* const enough = ahead + inputs * kPanel * int64_t(sizeof(Element));
  // The fewer blocks of rows there are, the more each prefetches.
  const int lines = !ahead || count_all <= kRows ? 0 : count_all <= 3 * kRows ? 2 : 1;
  int count;
  for (int64_t r = piece.begin, blocks = blocks_of(count_all); r < piece.end; r += count, --blocks) {
    count = next_height(piece.end - r, blocks);
    Sums sums[kRows];
    const int fetched = ahead < enough ? lines : 0;
    multiply_block<Math>(fetched, count, rows.data + r * rows.stride, rows.stride, from, inputs,
                         ahead, sums);
    ahead += fetched * inputs / Math::kPack * kLine;
    for (int i = 0; i < count; ++i) emit(r + i, piece.panel, sums[i]);
  }
}

}  // namespace headrace
