// Matrices in the block types of GGUF files, kept in the bits that the file has.
//
// A number is scale * code + offset or scale * (code - zero). Codes have 4, 5, 6 or 8 bits, scales
// and offsets are of kBlock inputs of an output, or scales of half a block. K-quants store them in
// 8 bits, as multiples of float16 factors of kSuper inputs.
//
// A panel is a run of blocks for kPanel outputs:
//   [scales][offsets][4 words of low bits][words of high bits], each for all outputs
// Words are of one output, so that a vector of them has the lanes of a panel: word j has the codes
// 8j + i in the low halves of its bytes i and 8j + 4 + i in the high halves. Codes of 8 bits have
// eight words, of four codes each. Types with factors have those of kSuper inputs before the first
// of their blocks.
#pragma once

#include "decoder.h"
#include "quant.h"

namespace headrace {

constexpr int kSuper = 256;
constexpr int kQuads = kBlock / kQuantPack;  // words of a block whose codes have been unpacked

// The values of headrace_packed_panel's `kind`. Floats are in the layout of headrace_pack_weight.
enum Kind : int64_t { kFloats, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K, kIQ4_NL, kIQ4_XS };

// The numbers of codes of IQ4, above a zero point of 128.
alignas(16) constexpr uint8_t kIQ4[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                          129, 141, 153, 166, 181, 197, 217, 241};

typedef int8_t Bytes __attribute__((vector_size(kLanes)));

inline float widen_half(uint16_t half) {
  const uint32_t magnitude = half & 0x7fffu, sign = uint32_t(half & 0x8000u) << 16;
  // The exponent's bias differs by 112; the product also makes subnormal numbers normal.
  float value = bit_cast<float>(magnitude << 13) * bit_cast<float>(uint32_t(254 - 15) << 23);
  if (magnitude >= 0x7c00u) value = bit_cast<float>(0x7f800000u | magnitude << 13);
  return bit_cast<float>(bit_cast<uint32_t>(value) | sign);
}

inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return bit_cast<Floats>(_mm512_cvtph_ps(load_raw<__m256i>(from)));
#elif defined(__AVX2__)
  return bit_cast<Floats>(_mm256_cvtph_ps(load_raw<__m128i>(from)));
#else
  Floats found;
  for (int i = 0; i < kLanes; ++i) found[i] = widen_half(from[i]);
  return found;
#endif
}

inline Floats load_bytes(const int8_t* from) {
#if defined(__AVX512F__)
  const Ints whole = bit_cast<Ints>(_mm512_cvtepi8_epi32(load_raw<__m128i>(from)));
#elif defined(__AVX2__)
  const Ints whole = bit_cast<Ints>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_raw<int64_t>(from))));
#else
  const Ints whole = __builtin_convertvector(load_raw<Bytes>(from), Ints);
#endif
  return __builtin_convertvector(whole, Floats);
}

// table[byte] of each byte, below 16.
inline Words look_up(const uint8_t* table, Words bytes) {
#if defined(__AVX512F__)
  const __m512i wide = _mm512_broadcast_i32x4(load_raw<__m128i>(table));
  return bit_cast<Words>(_mm512_shuffle_epi8(wide, bit_cast<__m512i>(bytes)));
#elif defined(__AVX2__)
  const __m256i wide = _mm256_broadcastsi128_si256(load_raw<__m128i>(table));
  return bit_cast<Words>(_mm256_shuffle_epi8(wide, bit_cast<__m256i>(bytes)));
#else
  uint8_t found[sizeof(Words)];
  std::memcpy(found, &bytes, sizeof(found));
  for (uint8_t& byte : found) byte = table[byte];
  return load_raw<Words>(found);
#endif
}

// One type of blocks. `Parts` scales have a block; `Super` types have factors.
template <int Bits, int Zero, bool Offset, bool Super, int Parts, bool Table>
struct BlockType {
  static constexpr int kBits = Bits, kZero = Zero, kParts = Parts;
  static constexpr bool kOffset = Offset, kFactors = Super, kTable = Table;
  static constexpr int kMost = Table ? 241 : (1 << Bits) - 1;  // the largest unpacked code
  static constexpr int kLow = Bits == 8 ? 8 : 4;               // words of a block
  static constexpr int kHigh = Bits == 8 ? 0 : Bits - 4;

  static constexpr int64_t kFactorBytes = Super ? kPanel * 2 * (1 + Offset) : 0;
  static constexpr int64_t kScaleBytes = Super ? kPanel * (Parts + Offset) : kPanel * 2 * (1 + Offset);
  static constexpr int64_t kBlockBytes = kScaleBytes + kPanel * 4 * (kLow + kHigh);
  static constexpr int64_t kPanelBytesOfSuper = kSuper / kBlock * kBlockBytes + kFactorBytes;

  static int64_t panel_bytes(int64_t inputs) {
    return inputs / kBlock * kBlockBytes + (Super ? inputs / kSuper * kFactorBytes : 0);
  }

  // The place of a block in a panel.
  static int64_t place(int64_t block) {
    return block * kBlockBytes + (Super ? (block / (kSuper / kBlock) + 1) * kFactorBytes : 0);
  }

  // The factors of a panel's block; they are nowhere if the type has none.
  static int64_t factors_place(int64_t block) {
    const int64_t super = block / (kSuper / kBlock);
    return super * kPanelBytesOfSuper;
  }

  struct Scales {
    Floats scale[Parts], offset;
  };

  // Scales of the outputs from `column` on.
  static Scales scales(const uint8_t* factors, const uint8_t* block, int column) {
    Scales found;
    found.offset = Floats{};
    if constexpr (Super) {
      const auto* wide = reinterpret_cast<const uint16_t*>(factors) + column;
      const auto* narrow = reinterpret_cast<const int8_t*>(block) + column;
      const Floats factor = load_halves(wide);
      for (int part = 0; part < Parts; ++part)
        found.scale[part] = factor * load_bytes(narrow + part * kPanel);
      if constexpr (Offset)
        found.offset = load_halves(wide + kPanel) * load_bytes(narrow + Parts * kPanel);
    } else {
      const auto* wide = reinterpret_cast<const uint16_t*>(block) + column;
      found.scale[0] = load_halves(wide);
      if constexpr (Offset) found.offset = load_halves(wide + kPanel);
    }
    return found;
  }

  // The codes of the outputs from `column` on: byte i of word q is of input 4q + i.
  static void unpack(const uint8_t* block, int column, Words* words) {
    const uint8_t* low = block + kScaleBytes + column * 4;
    if constexpr (Bits == 8) {
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) words[q] = load_raw<Words>(low + q * kPanel * 4);
      return;
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const Words both = load_raw<Words>(low + j * kPanel * 4);
      words[2 * j] = both & 0x0f0f0f0fu;
      words[2 * j + 1] = (both >> 4) & 0x0f0f0f0fu;
    }
    const uint8_t* high = low + 4 * kPanel * 4;
    if constexpr (Bits == 5) {
      const Words bits = load_raw<Words>(high);
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q)
        words[q] |= (q < 4 ? bits << (4 - q) : bits >> (q - 4)) & 0x10101010u;
    }
    if constexpr (Bits == 6) {
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) {
        const Words bits = load_raw<Words>(high + q / 4 * kPanel * 4);
        const int shift = 4 - q % 4 * 2;
        words[q] |= (shift > 0 ? bits << shift : bits >> -shift) & 0x30303030u;
      }
    }
    if constexpr (Table) {
#pragma GCC unroll 8
      for (int q = 0; q < kQuads; ++q) words[q] = look_up(kIQ4, words[q]);
    }
  }
};

// Calls body(type) with the type of a kind other than kFloats.
template <class Body>
inline auto with_type(int64_t kind, const Body& body) {
  switch (kind) {
    case kQ4_0: return body(BlockType<4, 8, false, false, 1, false>{});
    case kQ4_1: return body(BlockType<4, 0, true, false, 1, false>{});
    case kQ5_0: return body(BlockType<5, 16, false, false, 1, false>{});
    case kQ5_1: return body(BlockType<5, 0, true, false, 1, false>{});
    case kQ4_K: return body(BlockType<4, 0, true, true, 1, false>{});
    case kQ5_K: return body(BlockType<5, 0, true, true, 1, false>{});
    case kQ6_K: return body(BlockType<6, 32, false, true, 2, false>{});
    case kIQ4_NL: return body(BlockType<4, 128, false, false, 1, true>{});
    case kIQ4_XS: return body(BlockType<4, 128, false, true, 1, true>{});
    default: return body(BlockType<8, 128, false, false, 1, false>{});
  }
}

// Numbers of unpacked codes: the inputs 4q + i of a block's outputs, for q in its words.
template <class Type>
inline Floats number(const typename Type::Scales& scales, const Words* words, int q, int i) {
  const Ints code = bit_cast<Ints>((words[q] >> (8 * i)) & 0xffu) - Type::kZero;
  const Floats whole = __builtin_convertvector(code, Floats);
  return whole * scales.scale[q * Type::kParts / kQuads] + scales.offset;
}

inline void store_numbers(float* to, Floats first, Floats second) {
  store(to, first);
  store(to + kPanel, second);
}
inline void store_numbers(bfloat16* to, Floats first, Floats second) {
  const Words both = rounded_words(first) >> 16 | rounded_words(second);
  std::memcpy(to, &both, sizeof(both));
}

// Writes a panel of blocks as floats, in the layout of headrace_pack_weight.
template <class Math>
__attribute__((noinline)) void unpack_panel(const headrace_packed_panel& panel, int64_t inputs,
                                            typename Math::Element* to) {
  const auto* data = static_cast<const uint8_t*>(panel.data);
  with_type(panel.kind, [&](auto type) {
    using Type = decltype(type);
    for (int64_t block = 0; block < inputs / kBlock; ++block) {
      const uint8_t *from = data + Type::place(block), *factors = data + Type::factors_place(block);
      for (int column = 0; column < kPanel; column += kLanes) {
        Words words[kQuads];
        Type::unpack(from, column, words);
        const typename Type::Scales scales = Type::scales(factors, from, column);
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; ++q)
#pragma GCC unroll 2
          for (int i = 0; i < kQuantPack; i += 2)
            store_numbers(
                to + (block * kBlock + q * kQuantPack + i) * kPanel + column * Math::kPack,
                number<Type>(scales, words, q, i), number<Type>(scales, words, q, i + 1));
      }
    }
  });
}

// Writes one output of panels, times `factor`. Floats are Elements of the Math.
template <class Math>
__attribute__((noinline)) void unpack_output(const headrace_packed_panel* panels, int64_t output,
                                             int64_t inputs, float factor, float* to) {
  const headrace_packed_panel& panel = panels[output / kPanel];
  const int column = int(output % kPanel);
  if (panel.kind == kFloats) {
    const auto* from = static_cast<const typename Math::Element*>(panel.data);
    for (int64_t k = 0; k < inputs; ++k)
      to[k] = factor * widen(from[k / Math::kPack * kPanel * Math::kPack + column * Math::kPack + k % Math::kPack]);
    return;
  }
  const auto* data = static_cast<const uint8_t*>(panel.data);
  const int lane = column % kLanes;
  with_type(panel.kind, [&](auto type) {
    using Type = decltype(type);
    for (int64_t block = 0; block < inputs / kBlock; ++block) {
      const uint8_t* from = data + Type::place(block);
      Words words[kQuads];
      Type::unpack(from, column - lane, words);
      const typename Type::Scales scales =
          Type::scales(data + Type::factors_place(block), from, column - lane);
      for (int i = 0; i < kBlock; ++i) {
        const int quad = i / kQuantPack;
        const int code = int(words[quad][lane] >> (8 * (i % kQuantPack)) & 0xffu) - Type::kZero;
        const float scale = scales.scale[quad * Type::kParts / kQuads][lane];
        to[block * kBlock + i] = factor * (float(code) * scale + scales.offset[lane]);
      }
    }
  });
}

}  // namespace headrace
