// Products of 8-bit activations with weights of 8 or 4 bits. Sums over a group of inputs are exact
// integers.
//
// Weights of 8 bits have the layout of unquantised ones, in packs of four inputs. Weights of 4
// bits share bytes: the low half is of one pack of four inputs, the high half of the next. They
// are integers, or codes of 4-bit floats (e2m1), whose doubles are integers.
#pragma once

#include "linear.h"

namespace headrace {

constexpr int kGroup = 64;  // inputs that share a scale when activations are quantised
constexpr int kBlock = 32;  // inputs that share a scale if weights are 4-bit floats
constexpr int kHalves = 2 * kGroup / kBlock;  // halves of blocks in a group
constexpr int kQuantPack = 4;
constexpr int kQuantZero = 128;  // represents an 8-bit weight of 0
constexpr int kFloatZero = 12;   // represents a 4-bit float of 0

#if defined(__AVX512F__)
constexpr int kQuantRows = 3;
#elif defined(__AVX2__)
constexpr int kQuantRows = 2;
#else
constexpr int kQuantRows = 1;
#endif

inline int64_t groups_of(int64_t inputs) { return (inputs + kGroup - 1) / kGroup; }

// Rows in 8 bits: value = data * scale of its group. `sums` are the sums of the data in each half of
// a block.
struct QuantRows {
  const int8_t* data;
  const float* scales;
  const int32_t* sums;
  int64_t stride, groups, count;

  int32_t half_sum(int64_t row, int64_t half) const { return sums[row * kHalves * groups + half]; }
  int32_t block_sum(int64_t row, int64_t block) const {
    return half_sum(row, 2 * block) + half_sum(row, 2 * block + 1);
  }
  int32_t group_sum(int64_t row, int64_t group) const {
    return block_sum(row, 2 * group) + block_sum(row, 2 * group + 1);
  }
};

// Weights of 8 bits have a scale for each output: (data - kQuantZero) * scale. Weights of 4 bits
// also have zeros, and both for each group of `group` inputs and each of `outputs` (padded): (data
// - zero) * scale. 4-bit floats have a group and no zeros; their scales are for doubled numbers.
struct QuantWeights {
  const uint8_t* data;
  const float* scales;
  const float* zeros;  // null: 8 bits, or 4-bit floats
  int64_t group, outputs;
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

// Sums of two adjacent products of bytes, with four factors for each lane. Each sum must fit 16
// bits.
inline Shorts multiply_unsigned(Words weights, const int8_t* factors) {
  const Words quad = splat_word(load_raw<uint32_t>(factors));
#if defined(__AVX512F__)
  return bit_cast<Shorts>(
      _mm512_maddubs_epi16(bit_cast<__m512i>(weights), bit_cast<__m512i>(quad)));
#else
  return bit_cast<Shorts>(
      _mm256_maddubs_epi16(bit_cast<__m256i>(weights), bit_cast<__m256i>(quad)));
#endif
}

// Like multiply_unsigned, for signed weights: their signs move to the factors.
inline Shorts multiply_signed(Words weights, const int8_t* factors) {
  const Words quad = splat_word(load_raw<uint32_t>(factors));
#if defined(__AVX512F__)
  const __m512i signed_weights = bit_cast<__m512i>(weights), given = bit_cast<__m512i>(quad);
  const __m512i turned = _mm512_mask_sub_epi8(given, _mm512_movepi8_mask(signed_weights),
                                              _mm512_setzero_si512(), given);
  return bit_cast<Shorts>(_mm512_maddubs_epi16(_mm512_abs_epi8(signed_weights), turned));
#else
  const __m256i signed_weights = bit_cast<__m256i>(weights);
  const __m256i turned = _mm256_sign_epi8(bit_cast<__m256i>(quad), signed_weights);
  return bit_cast<Shorts>(_mm256_maddubs_epi16(_mm256_abs_epi8(signed_weights), turned));
#endif
}

// The sums of two adjacent numbers.
inline Ints add_pairs(Shorts pairs) {
#if defined(__AVX512F__)
  return bit_cast<Ints>(_mm512_madd_epi16(bit_cast<__m512i>(pairs), _mm512_set1_epi16(1)));
#else
  return bit_cast<Ints>(_mm256_madd_epi16(bit_cast<__m256i>(pairs), _mm256_set1_epi16(1)));
#endif
}
#endif

// What `add_quads` adds to for the sum of (weight - kZero) * factor: weights are at most kMost, and
// `total` is the sum of all factors.
template <int kMost, int kZero>
inline Ints first_sum(int32_t total) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  if (kMost > kQuantZero) return Ints{};  // add_quads computes with signed weights
#endif
  return Ints{} - kZero * total;
}

// sum + the products of `kCount` words of four unsigned weights in each lane, at most kMost, and
// four times as many signed factors. Weights above kQuantZero have this zero point.
template <int kCount, int kMost>
inline Ints add_quads(Ints sum, const Words* weights, const int8_t* factors) {
#if defined(__AVX512VNNI__)
#pragma GCC unroll 8
  for (int q = 0; q < kCount; ++q) {
    const Words quad = splat_word(load_raw<uint32_t>(factors + q * kQuantPack));
    sum = bit_cast<Ints>(_mm512_dpbusd_epi32(bit_cast<__m512i>(sum), bit_cast<__m512i>(weights[q]),
                                             bit_cast<__m512i>(quad)));
  }
#elif defined(__AVX2__)
  // Sums of two products have 16 bits.
  if constexpr (kMost > kQuantZero) {
#pragma GCC unroll 8
    for (int q = 0; q < kCount; ++q)
      sum += add_pairs(multiply_signed(weights[q] ^ 0x80808080u, factors + q * kQuantPack));
  } else {
    constexpr int kFitting = 32767 / (2 * 127 * kMost), kTogether = kFitting < kCount ? kFitting : kCount;
    static_assert(kCount % kTogether == 0, "all sums have the same number of products");
#pragma GCC unroll 8
    for (int q = 0; q < kCount; q += kTogether) {
      Shorts pairs{};
      for (int i = q; i < q + kTogether; ++i)
        pairs += multiply_unsigned(weights[i], factors + i * kQuantPack);
      sum += add_pairs(pairs);
    }
  }
#else
  for (int q = 0; q < kCount; ++q)
    for (int i = 0; i < kQuantPack; ++i)
      sum += bit_cast<Ints>((weights[q] >> (8 * i)) & 0xffu) * int32_t(factors[q * kQuantPack + i]);
#endif
  return sum;
}

// Like multiply_panel, for 8-bit rows and weights.
template <int R>
inline void multiply_bytes(const QuantRows& rows, int64_t first, const QuantWeights& weights,
                           int64_t at, int64_t inputs, Sums* sums) {
  const uint8_t* panel = weights.data + at * inputs * kPanel;
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
        part[r][c] = first_sum<255, kQuantZero>(rows.group_sum(first + r, group));
    for (int64_t k = begin; k < end; k += kQuantPack) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const Words words = load_raw<Words>(panel + k * kPanel + c * kLanes * kQuantPack);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          part[r][c] = add_quads<1, 255>(part[r][c], &words, data + r * rows.stride + k);
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
    for (int c = 0; c < kColumns; ++c)
      sums[r].at[c] = found[r][c] * load(weights.scales + at * kPanel + c * kLanes);
}

// Like multiply_bytes, for weights in 4 bits: each byte contains two.
template <int R>
inline void multiply_nibbles(const QuantRows& rows, int64_t first, const QuantWeights& weights,
                             int64_t at, int64_t inputs, Sums* sums) {
  const uint8_t* panel = weights.data + at * inputs * kPanel / 2;
  const int64_t width = weights.outputs;
  Floats found[R][kColumns] = {};
  const int8_t* data = rows.data + first * rows.stride;
  for (int64_t group = 0; group < rows.groups; ++group) {
    const int64_t begin = group * kGroup;
    const int64_t end = begin + kGroup < inputs ? begin + kGroup : inputs;
    Ints part[R][kColumns] = {};
    for (int64_t k = begin; k < end; k += 2 * kQuantPack) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const Words words = load_raw<Words>(panel + (k * kPanel) / 2 + c * kLanes * kQuantPack);
        const Words both[] = {words & 0x0f0f0f0fu, (words >> 4) & 0x0f0f0f0fu};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          part[r][c] = add_quads<2, 15>(part[r][c], both, data + r * rows.stride + k);
      }
    }
    const int64_t place = begin / weights.group * width + at * kPanel;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const Floats scale = load(weights.scales + place + c * kLanes);
      const Floats zero = load(weights.zeros + place + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const int64_t of = (first + r) * rows.groups + group;
        const Floats exact =
            __builtin_convertvector(part[r][c], Floats) - zero * float(rows.group_sum(first + r, group));
        found[r][c] += exact * (scale * rows.scales[of]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r].at[c] = found[r][c];
}

// kFloatZero plus twice the value of each byte's code, below 16.
inline Words doubled_floats(Words codes) {
#if defined(__AVX2__)
  const __m128i table =
      _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#if defined(__AVX512F__)
  return bit_cast<Words>(
      _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), bit_cast<__m512i>(codes)));
#else
  return bit_cast<Words>(
      _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), bit_cast<__m256i>(codes)));
#endif
#else
  static const uint8_t table[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  uint8_t bytes[sizeof(Words)];
  std::memcpy(bytes, &codes, sizeof(codes));
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_raw<Words>(bytes);
#endif
}

// Like multiply_nibbles, for 4-bit floats with a scale for each block.
template <int R>
inline void multiply_floats(const QuantRows& rows, int64_t first, const QuantWeights& weights,
                            int64_t at, int64_t inputs, Sums* sums) {
  const uint8_t* panel = weights.data + at * inputs * kPanel / 2;
  Floats found[R][kColumns] = {};
  const int8_t* data = rows.data + first * rows.stride;
  for (int64_t begin = 0, block = 0; begin < inputs; begin += kBlock, ++block) {
    Ints part[R][kColumns];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c)
        part[r][c] = Ints{} - kFloatZero * rows.block_sum(first + r, block);
    for (int64_t k = begin; k < begin + kBlock; k += 2 * kQuantPack) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const Words words = load_raw<Words>(panel + (k * kPanel) / 2 + c * kLanes * kQuantPack);
        const Words both[] = {doubled_floats(words & 0x0f0f0f0fu),
                              doubled_floats((words >> 4) & 0x0f0f0f0fu)};
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          part[r][c] = add_quads<2, 2 * kFloatZero>(part[r][c], both, data + r * rows.stride + k);
      }
    }
    const float* scales = weights.scales + block * weights.outputs + at * kPanel;
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
      const Floats scale = load(scales + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
        found[r][c] += __builtin_convertvector(part[r][c], Floats) *
                       (scale * rows.scales[(first + r) * rows.groups + begin / kGroup]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) sums[r].at[c] = found[r][c];
}

template <int R>
inline void multiply_quant_panel(const QuantRows& rows, int64_t first, const QuantWeights& weights,
                                 int64_t at, int64_t inputs, Sums* sums) {
  if (weights.zeros)
    multiply_nibbles<R>(rows, first, weights, at, inputs, sums);
  else if (weights.group)
    multiply_floats<R>(rows, first, weights, at, inputs, sums);
  else
    multiply_bytes<R>(rows, first, weights, at, inputs, sums);
}

inline void multiply_quant_block(int count, const QuantRows& rows, int64_t first,
                                 const QuantWeights& weights, int64_t at, int64_t inputs,
                                 Sums* sums) {
  switch (count) {
    case 1: return multiply_quant_panel<1>(rows, first, weights, at, inputs, sums);
    case 2: return multiply_quant_panel<2>(rows, first, weights, at, inputs, sums);
    case 3: return multiply_quant_panel<3>(rows, first, weights, at, inputs, sums);
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
    // 8 bits cannot represent NaN and infinity, so the scale does.
    const float bound = largest(most), scale = bound / 127 + sum(broken);
    const float inverse = bound > 0 ? 127 / bound : 0;
    scales[group] = scale;
    for (int64_t half = begin; half < begin + kGroup; half += kBlock / 2) {
      Ints total{};
      for (int64_t i = half; i < half + kBlock / 2 && i < end; i += kLanes) {
        // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
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
      *sums++ = sum;
    }
  }
}

// Like multiply_piece, for 8-bit rows and quantised weights.
template <class Emit>
void multiply_quant_piece(const QuantRows& rows, const QuantWeights& weights, int64_t inputs,
                          const Piece& piece, const Emit& emit) {
  for (int64_t r = piece.begin; r < piece.end; r += kQuantRows) {
    const int count = piece.end - r < kQuantRows ? int(piece.end - r) : kQuantRows;
    Sums sums[kQuantRows];
    multiply_quant_block(count, rows, r, weights, piece.panel, inputs, sums);
    for (int i = 0; i < count; ++i) emit(r + i, piece.panel, sums[i]);
  }
}

}  // namespace headrace
