// Reads the blocks of GGUF files and lays them out in panels.
#pragma once

#include "blocks.h"
#include "packing.h"

namespace headrace {

// kBlock inputs of one row, whatever their type. Scales and factors are as stored: float16, or
// whole numbers beside float16 factors.
struct StoredBlock {
  uint8_t codes[kBlock];
  uint16_t scale, offset;  // or the factors
  int8_t scales[2], least;
};

inline uint16_t read_half(const uint8_t* from) { return load_raw<uint16_t>(from); }
inline uint16_t negated(uint16_t half) { return half ^ 0x8000u; }

inline void read_nibbles(StoredBlock& block, const uint8_t* from) {
  for (int i = 0; i < 16; ++i) {
    block.codes[i] = from[i] & 15;
    block.codes[i + 16] = from[i] >> 4;
  }
}

inline void add_fifth_bits(StoredBlock& block, const uint8_t* from) {
  const uint32_t bits = load_raw<uint32_t>(from);
  for (int i = 0; i < kBlock; ++i) block.codes[i] |= (bits >> i & 1) << 4;
}

// Types with blocks of 32: `at` is the block of the row.
inline void read_small(StoredBlock& block, int64_t kind, const uint8_t* row, int64_t at) {
  const int sizes[] = {0, 18, 20, 22, 24, 34};
  const uint8_t* from = row + at * (kind == kIQ4_NL ? 18 : sizes[kind]);
  block.scale = read_half(from);
  from += 2;
  if (kind == kQ4_1 || kind == kQ5_1) {
    block.offset = read_half(from);
    from += 2;
  }
  if (kind == kQ8_0) {
    for (int i = 0; i < kBlock; ++i) block.codes[i] = from[i] ^ 0x80;
    return;
  }
  const bool five = kind == kQ5_0 || kind == kQ5_1;
  read_nibbles(block, from + (five ? 4 : 0));
  if (five) add_fifth_bits(block, from);
}

// Scale and minimum of six bits each, of the eight of a Q4_K or Q5_K block.
inline void read_six_bits(StoredBlock& block, const uint8_t* packed, int part) {
  if (part < 4) {
    block.scales[0] = packed[part] & 63;
    block.least = packed[part + 4] & 63;
    return;
  }
  block.scales[0] = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
  block.least = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4;
}

inline void read_q4_k(StoredBlock& block, bool five, const uint8_t* from, int part) {
  block.scale = read_half(from);
  block.offset = negated(read_half(from + 2));
  read_six_bits(block, from + 4, part);
  const uint8_t* high = from + 16;
  const uint8_t* low = high + (five ? 32 : 0) + part / 2 * 32;
  for (int i = 0; i < kBlock; ++i) {
    block.codes[i] = low[i] >> (part % 2 * 4) & 15;
    if (five) block.codes[i] |= (high[i] >> part & 1) << 4;
  }
}

inline void read_q6_k(StoredBlock& block, const uint8_t* from, int part) {
  const int half = part / 4, quarter = part % 4;
  const uint8_t* low = from + half * 64 + quarter % 2 * 32;
  const uint8_t* high = from + 128 + half * 32;
  for (int i = 0; i < kBlock; ++i)
    block.codes[i] = (low[i] >> (quarter / 2 * 4) & 15) | (high[i] >> (quarter * 2) & 3) << 4;
  std::memcpy(block.scales, from + 192 + 2 * part, 2);
  block.scale = read_half(from + 208);
}

inline void read_iq4_xs(StoredBlock& block, const uint8_t* from, int part) {
  block.scale = read_half(from);
  const int high = read_half(from + 2) >> (2 * part) & 3;
  block.scales[0] = int8_t(((from[4 + part / 2] >> (part % 2 * 4) & 15) | high << 4) - 32);
  read_nibbles(block, from + 8 + 16 * part);
}

inline StoredBlock read_block(int64_t kind, const uint8_t* row, int64_t at) {
  StoredBlock block{};
  const int64_t super = at / (kSuper / kBlock);
  const int part = int(at % (kSuper / kBlock));
  switch (kind) {
    case kQ4_K: read_q4_k(block, false, row + super * 144, part); break;
    case kQ5_K: read_q4_k(block, true, row + super * 176, part); break;
    case kQ6_K: read_q6_k(block, row + super * 210, part); break;
    case kIQ4_XS: read_iq4_xs(block, row + super * 136, part); break;
    default: read_small(block, kind, row, at);
  }
  return block;
}

// Places a block in a panel that is zeros.
template <class Type>
void place_block(uint8_t* panel, int64_t at, int output, const StoredBlock& block) {
  uint8_t* to = panel + Type::place(at);
  auto* halves = reinterpret_cast<uint16_t*>(Type::kFactors ? panel + Type::factors_place(at) : to);
  halves[output] = block.scale;
  if (Type::kOffset) halves[kPanel + output] = block.offset;
  if (Type::kFactors) {
    for (int part = 0; part < Type::kParts; ++part)
      to[part * kPanel + output] = uint8_t(block.scales[part]);
    if (Type::kOffset) to[Type::kParts * kPanel + output] = uint8_t(block.least);
  }
  uint8_t* words = to + Type::kScaleBytes + output * 4;
  for (int k = 0; k < kBlock; ++k) {
    const int quad = k / 4, byte = k % 4, code = block.codes[k];
    if (Type::kBits == 8) {
      words[quad * kPanel * 4 + byte] = uint8_t(code);
      continue;
    }
    words[quad / 2 * kPanel * 4 + byte] |= uint8_t((code & 15) << (quad % 2 * 4));
    uint8_t* high = words + 4 * kPanel * 4 + byte;
    if (Type::kBits == 5) *high |= uint8_t((code >> 4) << quad);
    if (Type::kBits == 6) high[quad / 4 * kPanel * 4] |= uint8_t((code >> 4) << (quad % 4 * 2));
  }
}

// `kPanel` rows of one type; a null row is zeros.
template <class Type>
void pack_blocks_panel(uint8_t* panel, int64_t kind, const void* const* rows, int64_t inputs) {
  std::memset(panel, 0, Type::panel_bytes(inputs));
  for (int output = 0; output < kPanel; ++output)
    for (int64_t at = 0; rows[output] && at < inputs / kBlock; ++at)
      place_block<Type>(panel, at, output,
                        read_block(kind, static_cast<const uint8_t*>(rows[output]), at));
}

}  // namespace headrace
