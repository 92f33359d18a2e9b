// Register-blocked products of attention over tiles of 16 tokens, for each kind of arithmetic.
//
// Keys of a tile:   [D / pack][16 tokens][pack dimensions]
// Values of a tile: [16 / pack][D dimensions][pack tokens]
// With bfloat16 `pack` is 2, with float32 it is 1: a vector of the cache is multiplied by one
// broadcast factor of the other side, and no step needs a shuffle or a horizontal sum.
#pragma once

#include "simd.h"

namespace headrace {

constexpr int kTile = 16;

// Sums of kRows x kColumns vectors hide the time that one addition takes, and fit into registers
// beside their operands.
#if defined(__AVX512F__)
constexpr int kRows = 6, kColumns = 4;
#elif defined(__aarch64__)
constexpr int kRows = 4, kColumns = 4;
#else
constexpr int kRows = 5, kColumns = 2;
#endif

// The height of the next of `blocks` blocks of `rows` rows, which are of nearly equal height: a
// block of a single row would wait for its own sums.
inline int next_height(int64_t rows, int64_t blocks) { return int((rows + blocks - 1) / blocks); }
inline int64_t blocks_of(int64_t rows) { return (rows + kRows - 1) / kRows; }

// Element: the cache's type. Factor: the type of queries and softmax weights. exponential: 2^x of
// softmax weights, x <= 0, as exact as a Factor can be.
struct Float32 {
  using Element = float;
  using Factor = float;
  using Operand = Floats;
  static constexpr int kPack = 1;
  static Operand operand(const Element* from) { return load(from); }
  static Operand first_of_pair(const Element* from) { return load(from); }
  static Floats add_product(Floats sum, const Factor* factors, Operand x) {
    return sum + factors[0] * x;
  }
  static void pack_row(Factor* to, const Element* from, int count) {
    std::memcpy(to, from, count * sizeof(float));
  }
  static void pack_weights(Factor* to, int at, Floats weights) { store(to + at, weights); }
  static Floats exponential(Floats x) { return exp2(x); }
};

// bfloat16 in memory, float32 arithmetic: for CPUs without bfloat16 dot products.
struct Widened {
  using Element = bfloat16;
  using Factor = float;
  struct Operand {
    Floats even, odd;
  };
  static constexpr int kPack = 2;
  static Operand operand(const Element* from) {
    Words words = load_raw<Words>(from);
    return {widen_even(words), widen_odd(words)};
  }
  static Operand first_of_pair(const Element* from) {
    return {widen_even(load_raw<Words>(from)), Floats{}};
  }
  static Floats add_product(Floats sum, const Factor* factors, Operand x) {
    return (sum + factors[0] * x.even) + factors[1] * x.odd;
  }
  static void pack_row(Factor* to, const Element* from, int count) {
    for (int i = 0; i < count; i += kLanes) store(to + i, load(from + i));
  }
  static void pack_weights(Factor* to, int at, Floats weights) { store(to + at, weights); }
  static Floats exponential(Floats x) { return exp2(x); }
};

#if defined(__AVX512BF16__)
// bfloat16 pairs through the dot-product instruction, summed in float32.
struct DotProduct {
  using Element = bfloat16;
  using Factor = bfloat16;
  using Operand = Words;
  static constexpr int kPack = 2;
  static Operand operand(const Element* from) { return load_raw<Words>(from); }
  static Operand first_of_pair(const Element* from) { return load_raw<Words>(from) & 0xffffu; }
  static Floats add_product(Floats sum, const Factor* factors, Operand x) {
    Words pair = splat_word(load_raw<uint32_t>(factors));
    return bit_cast<Floats>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(pair),
                                             bit_cast<__m512bh>(x)));
  }
  static void pack_row(Factor* to, const Element* from, int count) {
    std::memcpy(to, from, count * sizeof(bfloat16));
  }
  static void pack_weights(Factor* to, int at, Floats weights) { store(to + at, weights); }
  static Floats exponential(Floats x) { return rough_exp2(x); }
};
using BFloat16 = DotProduct;
#else
using BFloat16 = Widened;
#endif

// Decoding reads each byte of the cache once, from memory, in pieces too short for the hardware's
// own prefetching: so each load prefetches the same place of the tile that is read next (`ahead`).
inline void prefetch(const void* place) { __builtin_prefetch(place, 0, 2); }

// scores[r][c * kLanes ...] = queries[r] . keys, for R rows and C vectors of tokens of one tile row.
template <class Math, int R, int C, bool Ahead>
inline void multiply_keys(const typename Math::Factor* queries, int query_stride,
                          const typename Math::Element* const* keys,
                          const typename Math::Element* const* ahead, int dims, float* scores,
                          int score_stride) {
  Floats sums[R][C] = {};
  for (int d = 0; d < dims; d += Math::kPack) {
    typename Math::Operand operands[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      operands[c] = Math::operand(keys[c] + d * kTile);
      if (Ahead) prefetch(ahead[c] + d * kTile);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c)
        sums[r][c] = Math::add_product(sums[r][c], queries + r * query_stride + d, operands[c]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(scores + r * score_stride + c * kLanes, sums[r][c]);
}

// outputs[r] = outputs[r] * decay[r] + weights[r] . values over `tokens` tokens, for R rows and
// the C vectors of dimensions that begin at `values[...] + offset`. A last odd token is computed
// alone.
template <class Math, int R, int C, bool Ahead>
inline void multiply_values(const typename Math::Factor* weights, int weight_stride,
                            const typename Math::Element* const* values,
                            const typename Math::Element* const* ahead, int offset, int tokens,
                            int dims, const float* decay, float* outputs, int output_stride) {
  Floats sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sums[r][c] = load(outputs + r * output_stride + c * kLanes) * decay[r];
  for (int begin = 0; begin < tokens; begin += kTile) {
    const typename Math::Element* from = values[begin / kTile] + offset * Math::kPack;
    const typename Math::Element* next = ahead[begin / kTile] + offset * Math::kPack;
    const int count = tokens - begin < kTile ? tokens - begin : kTile;
    const int whole = count - count % Math::kPack;
    for (int t = 0; t < whole; t += Math::kPack) {
      typename Math::Operand operands[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int place = t * dims + c * kLanes * Math::kPack;
        operands[c] = Math::operand(from + place);
        if (Ahead) prefetch(next + place);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
          sums[r][c] =
              Math::add_product(sums[r][c], weights + r * weight_stride + begin + t, operands[c]);
    }
    if (whole < count)
      for (int c = 0; c < C; ++c) {
        typename Math::Operand operand =
            Math::first_of_pair(from + whole * dims + c * kLanes * Math::kPack);
        for (int r = 0; r < R; ++r)
          sums[r][c] =
              Math::add_product(sums[r][c], weights + r * weight_stride + begin + whole, operand);
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(outputs + r * output_stride + c * kLanes, sums[r][c]);
}

template <class Math, int C, bool Ahead>
inline void score_columns(int rows, const typename Math::Factor* q, int q_stride,
                          const typename Math::Element* const* keys,
                          const typename Math::Element* const* ahead, int dims, float* s,
                          int s_stride) {
  switch (rows) {
    case 1: return multiply_keys<Math, 1, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
    case 2: return multiply_keys<Math, 2, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
    case 3: return multiply_keys<Math, 3, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
    case 4: return multiply_keys<Math, 4, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
    case 5: return multiply_keys<Math, 5, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
    case 6: return multiply_keys<Math, 6, C, Ahead>(q, q_stride, keys, ahead, dims, s, s_stride);
  }
}

template <class Math, int C, bool Ahead>
inline void accumulate_columns(int rows, const typename Math::Factor* w, int w_stride,
                               const typename Math::Element* const* values,
                               const typename Math::Element* const* ahead, int at, int tokens,
                               int dims, const float* decay, float* o) {
  switch (rows) {
    case 1: return multiply_values<Math, 1, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
    case 2: return multiply_values<Math, 2, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
    case 3: return multiply_values<Math, 3, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
    case 4: return multiply_values<Math, 4, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
    case 5: return multiply_values<Math, 5, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
    case 6: return multiply_values<Math, 6, C, Ahead>(w, w_stride, values, ahead, at, tokens, dims, decay, o, dims);
  }
}

// Vectors that the next call takes, of `left`: as many as there are registers for.
inline int vectors_at_once(int left) { return left >= kColumns ? kColumns : left >= 2 ? 2 : 1; }

template <class Math, bool Ahead>
void score_rows(int rows, const typename Math::Factor* queries,
                const typename Math::Element* const* tiles,
                const typename Math::Element* const* ahead, int tile_count, int dims,
                float* scores, int score_stride) {
  constexpr int kVectors = kTile / kLanes;
  const int vectors = tile_count * kVectors;
  for (int v = 0, width; v < vectors; v += width) {
    width = vectors_at_once(vectors - v);
    const typename Math::Element *keys[kColumns], *next[kColumns];
    for (int c = 0; c < width; ++c) {
      const int inside = (v + c) % kVectors * kLanes * Math::kPack;
      keys[c] = tiles[(v + c) / kVectors] + inside;
      next[c] = ahead[(v + c) / kVectors] + inside;
    }
    float* to = scores + v * kLanes;
    if (width == kColumns)
      score_columns<Math, kColumns, Ahead>(rows, queries, dims, keys, next, dims, to, score_stride);
    else if (width == 2)
      score_columns<Math, 2, Ahead>(rows, queries, dims, keys, next, dims, to, score_stride);
    else
      score_columns<Math, 1, Ahead>(rows, queries, dims, keys, next, dims, to, score_stride);
  }
}

template <class Math, bool Ahead>
void accumulate_rows(int rows, const typename Math::Factor* weights, int weight_stride,
                     const typename Math::Element* const* tiles,
                     const typename Math::Element* const* ahead, int tokens, int dims,
                     const float* decay, float* outputs) {
  const int vectors = dims / kLanes;
  for (int v = 0, width; v < vectors; v += width) {
    width = vectors_at_once(vectors - v);
    const int at = v * kLanes;
    if (width == kColumns)
      accumulate_columns<Math, kColumns, Ahead>(rows, weights, weight_stride, tiles, ahead, at,
                                                tokens, dims, decay, outputs + at);
    else if (width == 2)
      accumulate_columns<Math, 2, Ahead>(rows, weights, weight_stride, tiles, ahead, at, tokens,
                                         dims, decay, outputs + at);
    else
      accumulate_columns<Math, 1, Ahead>(rows, weights, weight_stride, tiles, ahead, at, tokens,
                                         dims, decay, outputs + at);
  }
}

// scores [rows][score_stride] of `rows` queries [rows][dims] against whole tiles of keys.
template <class Math>
void score(int rows, const typename Math::Factor* queries,
           const typename Math::Element* const* tiles, const typename Math::Element* const* ahead,
           int tile_count, int dims, float* scores, int score_stride) {
  for (int r = 0, blocks = int(blocks_of(rows)), count; r < rows; r += count, --blocks) {
    count = next_height(rows - r, blocks);
    auto* chosen = r == 0 ? &score_rows<Math, true> : &score_rows<Math, false>;
    chosen(count, queries + r * dims, tiles, ahead, tile_count, dims, scores + r * score_stride,
           score_stride);
  }
}

// outputs [rows][dims] = outputs * decay + weights [rows][tokens] . values
template <class Math>
void accumulate(int rows, const typename Math::Factor* weights, int weight_stride,
                const typename Math::Element* const* tiles,
                const typename Math::Element* const* ahead, int tokens, int dims,
                const float* decay, float* outputs) {
  for (int r = 0, blocks = int(blocks_of(rows)), count; r < rows; r += count, --blocks) {
    count = next_height(rows - r, blocks);
    auto* chosen = r == 0 ? &accumulate_rows<Math, true> : &accumulate_rows<Math, false>;
    chosen(count, weights + r * weight_stride, weight_stride, tiles, ahead, tokens, dims,
           decay + r, outputs + r * dims);
  }
}

}  // namespace headrace
