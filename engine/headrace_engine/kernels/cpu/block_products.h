// Products with matrices in the block types of GGUF files.
//
// Rows in bfloat16 are rounded to 8 bits and multiplied by the codes, where the CPU has
// instructions for products of bytes. In float32, on AMX and on other CPUs a panel is unpacked, and
// multiplied as one that is not quantised.
#pragma once

#include "blocks.h"
#include "decoder.h"

namespace headrace {

#if defined(__AVX512F__)
constexpr int kBlockRows = 3;
#else
constexpr int kBlockRows = 2;
#endif

// Whether rows are rounded to 8 bits for blocks.
template <class Math>
constexpr bool rounds_rows() {
#if defined(__AVX2__) && !HEADRACE_TILES
  return std::is_same<typename Math::Element, bfloat16>::value;
#else
  return false;
#endif
}

// Like multiply_bytes, for a panel of blocks.
template <class Type, int R>
inline void multiply_blocks(const QuantRows& rows, int64_t first, const uint8_t* panel,
                            int64_t inputs, Sums* sums) {
  constexpr int kEach = kQuads / Type::kParts;  // words of a scale
  Floats found[R][kColumns] = {};
  for (int64_t block = 0; block < inputs / kBlock; ++block) {
    const uint8_t *from = panel + Type::place(block), *factors = panel + Type::factors_place(block);
    const int8_t* data = rows.data + first * rows.stride + block * kBlock;
    float row_scales[R];
    for (int r = 0; r < R; ++r)
      row_scales[r] = rows.scales[(first + r) * rows.groups + block * kBlock / kGroup];
    const auto add = [&](int r, int c, int part, Ints exact, const typename Type::Scales& scales) {
      found[r][c] += __builtin_convertvector(exact, Floats) * (scales.scale[part] * row_scales[r]);
    };
    const auto begin = [&](int r, int part) {
      return first_sum<Type::kMost, Type::kZero>(
          Type::kParts == 2 ? rows.half_sum(first + r, 2 * block + part) : rows.block_sum(first + r, block));
    };
    const auto add_offset = [&](int r, int c, const typename Type::Scales& scales) {
      if constexpr (Type::kOffset)
        found[r][c] += scales.offset * (row_scales[r] * float(rows.block_sum(first + r, block)));
    };
#if defined(__AVX512VNNI__)
    // Words in the order in which they lie in memory.
#pragma GCC unroll 2
    for (int part = 0; part < Type::kParts; ++part) {
      Ints exact[R][kColumns];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) exact[r][c] = begin(r, part);
#pragma GCC unroll 4
      for (int j = part * kEach / 2; j < (part + 1) * kEach / 2; ++j) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          Words words[2];
          Type::unpack_pair(from, c * kLanes, j, words);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            exact[r][c] = add_quads<2, Type::kMost>(exact[r][c], words,
                                                    data + r * rows.stride + 2 * j * kQuantPack);
        }
      }
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const typename Type::Scales scales = Type::scales(factors, from, c * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          add(r, c, part, exact[r][c], scales);
          if (part == Type::kParts - 1) add_offset(r, c, scales);
        }
      }
    }
#else
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      Words words[kQuads];
      Type::unpack(from, c * kLanes, words);
      const typename Type::Scales scales = Type::scales(factors, from, c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int part = 0; part < Type::kParts; ++part)
          add(r, c, part,
              add_quads<kEach, Type::kMost>(begin(r, part), words + part * kEach,
                                            data + r * rows.stride + part * kEach * kQuantPack),
              scales);
        add_offset(r, c, scales);
      }
    }
#endif
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r].at[c] = found[r][c];
}

// `count` rows at once, up to kBlockRows.
__attribute__((noinline)) inline void multiply_block_rows(const headrace_packed_panel& panel, int count,
                                                          const QuantRows& rows, int64_t first,
                                                          int64_t inputs, Sums* sums) {
  const auto* data = static_cast<const uint8_t*>(panel.data);
  with_type(panel.kind, [&](auto type) {
    using Type = decltype(type);
    switch (count) {
      case 1: return multiply_blocks<Type, 1>(rows, first, data, inputs, sums);
      case 2: return multiply_blocks<Type, 2>(rows, first, data, inputs, sums);
      case 3: return multiply_blocks<Type, 3>(rows, first, data, inputs, sums);
    }
  });
}

// Like multiply_piece, for panels of any kinds. `quant` are the rows in 8 bits, if rows are
// rounded. `unpacked` holds a panel of floats.
template <class Math, class Emit>
void multiply_block_piece(const headrace_packed_panel* panels,
                          const Rows<typename Math::Factor>& rows, const QuantRows& quant,
                          int64_t inputs, const Piece& piece, typename Math::Element* unpacked,
                          const Emit& emit) {
  const headrace_packed_panel& panel = panels[piece.panel];
  if (rounds_rows<Math>() && panel.kind != kFloats) {
    for (int64_t r = piece.begin; r < piece.end; r += kBlockRows) {
      const int count = piece.end - r < kBlockRows ? int(piece.end - r) : kBlockRows;
      Sums sums[kBlockRows];
      multiply_block_rows(panel, count, quant, r, inputs, sums);
      for (int i = 0; i < count; ++i) emit(r + i, piece.panel, sums[i]);
    }
    return;
  }
  const auto* floats = static_cast<const typename Math::Element*>(panel.data);
  if (panel.kind != kFloats) {
    unpack_panel<Math>(panel, inputs, unpacked);
    floats = unpacked;
  }
  multiply_piece<Math>(rows, floats, inputs, {piece.begin, piece.end, 0}, nullptr,
                       [&](int64_t row, int64_t, Sums& sums) { emit(row, piece.panel, sums); });
}

}  // namespace headrace
