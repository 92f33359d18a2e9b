// Products of activations with weights that were laid out for them once.
//
// Weights lie in panels of kPanel outputs: [panel][inputs / pack][kPanel][pack], padded with zeros.
// A panel's vector meets one broadcast factor of each row: no shuffle, no horizontal sum. What is
// done with a finished row of a panel, its sums still in registers, is the caller's `emit`.
#pragma once

#include <type_traits>

#include "pool.h"
#include "tile.h"
#include "tiles.h"

namespace headrace {

constexpr int kPanel = kColumns * kLanes;
constexpr int kGroup = 64;  // inputs that share a scale when activations are quantised
constexpr int kQuantPack = 4;
constexpr int kLine = 64;   // bytes of a line of cache

#if defined(__AVX512F__)
constexpr int kQuantRows = 3;
#elif defined(__AVX2__)
constexpr int kQuantRows = 2;
#else
constexpr int kQuantRows = 1;
#endif

inline int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

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

// Rows in 8 bits: value = data * scale of its group. `sums` are those of a group's data.
struct QuantRows {
  const int8_t* data;
  const float* scales;
  const int32_t* sums;
  int64_t stride, groups, count;
};

// sums[r][...] = rows . panel. Each step fetches `Ahead` lines of what is read next. Every number of
// rows adds up in the same order, so that a row's result does not depend on which others there are.
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

// `count` rows at once, up to kRows, with `lines` lines fetched in each step, up to two.
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

// sum + the products of four unsigned weights and four signed factors in each lane.
inline Ints add_quads(Ints sum, Words weights, const int8_t* factors) {
#if defined(__AVX512VNNI__)
  const Words quad = splat_word(load_raw<uint32_t>(factors));
  return bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(weights),
                                            bit_cast<__m512i>(quad)));
#else
  for (int i = 0; i < kQuantPack; ++i)
    sum += bit_cast<Ints>((weights >> (8 * i)) & 0xffu) * int32_t(factors[i]);
  return sum;
#endif
}

constexpr int kQuantZero = 128;  // what stands for a weight of 0

// As multiply_panel, of 8-bit rows and weights; the weights' scales are the caller's.
template <int R>
inline void multiply_quant_panel(const QuantRows& rows, int64_t first, const uint8_t* panel,
                                 int64_t inputs, Sums* sums) {
  Floats found[R][kColumns] = {};
  const int8_t* data = rows.data + first * rows.stride;
  for (int64_t group = 0; group < rows.groups; ++group) {
    const int64_t begin = group * kGroup;
    const int64_t end = begin + kGroup < inputs ? begin + kGroup : inputs;
    Ints part[R][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
        part[r][c] = Ints{} - kQuantZero * rows.sums[(first + r) * rows.groups + group];
    for (int64_t k = begin; k < end; k += kQuantPack) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const Words weights = load_raw<Words>(panel + k * kPanel + c * kLanes * kQuantPack);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          part[r][c] = add_quads(part[r][c], weights, data + r * rows.stride + k);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
        found[r][c] += __builtin_convertvector(part[r][c], Floats) *
                       rows.scales[(first + r) * rows.groups + group];
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r].at[c] = found[r][c];
}

inline void multiply_quant_block(int count, const QuantRows& rows, int64_t first,
                                 const uint8_t* panel, int64_t inputs, Sums* sums) {
  switch (count) {
    case 1: return multiply_quant_panel<1>(rows, first, panel, inputs, sums);
    case 2: return multiply_quant_panel<2>(rows, first, panel, inputs, sums);
    case 3: return multiply_quant_panel<3>(rows, first, panel, inputs, sums);
  }
}

// Eight-bit values of a row and their scales: [-127, 127], a scale for each group of inputs.
template <class Element>
void quantize_row(const Element* row, int64_t inputs, int8_t* data, float* scales, int32_t* sums) {
  for (int64_t begin = 0, group = 0; begin < inputs; begin += kGroup, ++group) {
    const int64_t end = begin + kGroup < inputs ? begin + kGroup : inputs;
    Floats most{}, broken{};
    for (int64_t i = begin; i < end; i += kLanes) {
      const Floats x = load(row + i);
      most = maximum(maximum(x, -x), most);
      broken += x * 0.0f;
    }
    // NaN and infinity, which 8 bits cannot hold, go into the scale.
    const float bound = largest(most), scale = bound / 127 + sum(broken);
    const float inverse = bound > 0 ? 127 / bound : 0;
    Ints total{};
    for (int64_t i = begin; i < end; i += kLanes) {
      // Adding and taking away 1.5 * 2^23 rounds to the nearest whole number.
      const Floats magic = splat(12582912.0f);
      const Ints whole =
          __builtin_convertvector((load(row + i) * inverse + magic) - magic, Ints);
      total += whole;
      typedef int8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes bytes = __builtin_convertvector(whole, Bytes);
      std::memcpy(data + i, &bytes, sizeof(bytes));
    }
    int32_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += total[lane];
    scales[group] = scale;
    sums[group] = sum;
  }
}

// How a product is shared out: items of one panel for a chunk of rows each, all panels of a chunk
// before the next chunk, whose rows then stay in a core's cache. Items are small beside the product,
// as threads wait for each other at its end.
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

// Where the weights lie that a thread reads after those of `item`: in the same layer, or in the one
// that is applied next, `then`.
inline const char* weights_after(int64_t item, const Division& division, int threads,
                                 const void* weight, int64_t panel_bytes, const void* then) {
  const int64_t next = item + threads, beyond = next - division.items();
  if (beyond < 0 || !then)
    return static_cast<const char*>(weight) + division.panel(next) * panel_bytes;
  return static_cast<const char*>(then) + beyond * panel_bytes;
}

#if HEADRACE_TILES
// As `multiply` below, on AMX. Used for any number of rows, so that a row's result does not depend on
// which others there are.
template <class Emit>
void multiply_on_tiles(Pool& pool, const Rows<bfloat16>& rows, const bfloat16* weight,
                       int64_t inputs, int64_t outputs, const Emit& emit) {
  static_assert(kPanel == 4 * kTileOutputs, "a panel is four tiles wide");
  const Division division(rows.count, inputs * sizeof(bfloat16), panels_of(outputs),
                          pool.threads(), kTileBlock);
  pool.run(division.items(), [&](int64_t item, int) {
    const int64_t panel = division.panel(item), begin = division.begin(item);
    const int64_t end = division.end(item);
    int configured = 0;
    for (int64_t r = begin; r < end; r += kTileBlock) {
      const int count = end - r < kTileBlock ? int(end - r) : kTileBlock;
      if (count != configured) {
        const TileConfig config = tile_config(count);
        _tile_loadconfig(&config);
        configured = count;
      }
      Sums sums[kTileBlock];
      multiply_tiles(count, rows.data + r * rows.stride, rows.stride,
                     weight + panel * inputs * kPanel, inputs, reinterpret_cast<float*>(sums));
      for (int i = 0; i < count; ++i) emit(r + i, panel, sums[i]);
    }
    _tile_release();
  });
}
#endif

// emit(row, panel, sums) for every row and panel. `scratch` holds kRows * inputs factors for each
// thread, where factors are not what rows are made of. The first rows' products fetch what the
// thread reads next into the cache. A few rows take no longer than their weights take to arrive;
// there it gained nothing.
template <class Math, class Emit>
void multiply(Pool& pool, const Rows<typename Math::Element>& rows,
              const typename Math::Element* weight, int64_t inputs, int64_t outputs,
              const void* then, float* scratch, const Emit& emit) {
  using Factor = typename Math::Factor;
  using Element = typename Math::Element;
  constexpr bool kSame = std::is_same<Factor, Element>::value;
  if (rows.count == 0) return;
#if HEADRACE_TILES
  if constexpr (std::is_same<Math, DotProduct>::value)
    if (inputs % kTileInputs == 0)
      return multiply_on_tiles(pool, rows, weight, inputs, outputs, emit);
#endif
  const int64_t panel_bytes = inputs * kPanel * sizeof(Element);
  const Division division(rows.count, inputs * sizeof(Factor), panels_of(outputs), pool.threads(),
                          kRows);
  pool.run(division.items(), [&](int64_t item, int thread) {
    const int64_t panel = division.panel(item), begin = division.begin(item);
    const int64_t end = division.end(item);
    const Element* from = weight + panel * inputs * kPanel;
    const char* ahead = weights_after(item, division, pool.threads(), weight, panel_bytes, then);
    const char* const enough = ahead + panel_bytes;
    // The fewer blocks of rows there are, the more each fetches ahead.
    const int lines = end - begin <= kRows ? 0 : end - begin <= 3 * kRows ? 2 : 1;
    // Blocks are about equally high: one with a single row would wait for its own sums.
    int64_t blocks = (end - begin + kRows - 1) / kRows;
    for (int64_t r = begin, count; r < end; r += count, --blocks) {
      count = (end - r + blocks - 1) / blocks;
      const Factor* own;
      int64_t stride = inputs;
      if constexpr (kSame) {
        own = rows.data + r * rows.stride;
        stride = rows.stride;
      } else {
        Factor* packed = scratch + thread * kRows * inputs;
        for (int i = 0; i < count; ++i)
          Math::pack_row(packed + i * inputs, rows.data + (r + i) * rows.stride, int(inputs));
        own = packed;
      }
      Sums sums[kRows];
      const int fetched = ahead < enough ? lines : 0;
      multiply_block<Math>(fetched, count, own, stride, from, inputs, ahead, sums);
      ahead += fetched * inputs / Math::kPack * kLine;
      for (int i = 0; i < count; ++i) emit(r + i, panel, sums[i]);
    }
  });
}

template <class Emit>
void multiply_quant(Pool& pool, const QuantRows& rows, const uint8_t* weight, const float* scales,
                    int64_t inputs, int64_t outputs, const Emit& emit) {
  if (rows.count == 0) return;
  const Division division(rows.count, inputs, panels_of(outputs), pool.threads(), kQuantRows);
  pool.run(division.items(), [&](int64_t item, int) {
    const int64_t panel = division.panel(item), begin = division.begin(item);
    const int64_t end = division.end(item);
    Floats scale[kColumns];
    for (int c = 0; c < kColumns; ++c) scale[c] = load(scales + panel * kPanel + c * kLanes);
    for (int64_t r = begin; r < end; r += kQuantRows) {
      const int count = end - r < kQuantRows ? int(end - r) : kQuantRows;
      Sums sums[kQuantRows];
      multiply_quant_block(count, rows, r, weight + panel * inputs * kPanel, inputs, sums);
      for (int i = 0; i < count; ++i) {
        for (int c = 0; c < kColumns; ++c) sums[i].at[c] *= scale[c];
        emit(r + i, panel, sums[i]);
      }
    }
  });
}

}  // namespace headrace
