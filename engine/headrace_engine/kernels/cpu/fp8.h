// 8-bit floats of a KV cache: e4m3 (without infinities, up to 448) and e5m2, a byte each.
#pragma once

#include "simd.h"

namespace headrace {

enum class Storage : int64_t { kOwn = 0, kE4M3 = 1, kE5M2 = 2 };

// Bits of mantissa, the float32 exponent field equal to field 0, the largest number.
struct E4M3 {
  static constexpr int kMantissa = 3, kBias = 120;
  static constexpr float kLargest = 448.0f;
  static constexpr uint32_t kFirstNaN = 0x7f;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kBias = 112;
  static constexpr float kLargest = 57344.0f;
  static constexpr uint32_t kFirstNaN = 0x7d;
};

// Exact. Infinities, which are never written, become other large numbers.
template <class Kind>
inline float widen_byte(uint8_t byte) {
  constexpr int kShift = 23 - Kind::kMantissa;
  const uint32_t magnitude = byte & 0x7fu;
  if (magnitude >= Kind::kFirstNaN) return __builtin_nanf("");
  const uint32_t lowest = uint32_t(Kind::kBias + 1) << 23;
  const bool is_small = magnitude >> Kind::kMantissa == 0;
  // A subnormal is a number with the lowest normal exponent, minus that power of two.
  const float found =
      is_small ? bit_cast<float>((magnitude << kShift) + lowest) - bit_cast<float>(lowest)
               : bit_cast<float>((magnitude << kShift) + (uint32_t(Kind::kBias) << 23));
  return byte & 0x80u ? -found : found;
}

// The nearest number, halves to even; larger numbers become the largest; NaN stays NaN.
template <class Kind>
inline uint8_t narrow_byte(float x) {
  constexpr int kShift = 23 - Kind::kMantissa;
  const uint8_t sign = uint8_t(bit_cast<uint32_t>(x) >> 24 & 0x80u);
  float magnitude = __builtin_fabsf(x);
  if (magnitude != magnitude) return 0x7f;
  if (magnitude > Kind::kLargest) magnitude = Kind::kLargest;
  if (magnitude < bit_cast<float>(uint32_t(Kind::kBias + 1) << 23)) {
    // The unit of the sum's last bit is the unit of subnormals.
    const float base = bit_cast<float>(uint32_t(Kind::kBias + 1 + kShift) << 23);
    return sign | uint8_t(bit_cast<uint32_t>(magnitude + base) - bit_cast<uint32_t>(base));
  }
  uint32_t bits = bit_cast<uint32_t>(magnitude);
  bits += (1u << (kShift - 1)) - 1 + (bits >> kShift & 1u);
  return sign | uint8_t((bits >> kShift) - (uint32_t(Kind::kBias) << Kind::kMantissa));
}

// The value of each byte, times a scale, as an Element.
template <class Element>
struct Table {
  alignas(64) Element of[256];

  template <class Kind>
  void fill(float scale) {
    for (int byte = 0; byte < 256; ++byte)
      of[byte] = narrow_to<Element>(widen_byte<Kind>(uint8_t(byte)) * scale);
  }

  // `count` is a multiple of 32.
  void look_up(Element* to, const uint8_t* from, int64_t count) const {
#if defined(__AVX512BW__)
    if constexpr (sizeof(Element) == 2) return permute(to, from, count);
#endif
    for (int64_t i = 0; i < count; ++i) to[i] = of[from[i]];
  }

#if defined(__AVX512BW__)
  // The table's first half in four registers; signs are added afterwards.
  void permute(void* to, const uint8_t* from, int64_t count) const {
    const __m512i first = _mm512_load_si512(of), second = _mm512_load_si512(of + 32),
                  third = _mm512_load_si512(of + 64), fourth = _mm512_load_si512(of + 96);
    for (int64_t i = 0; i < count; i += 32) {
      const __m512i bytes =
          _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
      const __m512i small = _mm512_permutex2var_epi16(first, bytes, second);
      const __m512i large = _mm512_permutex2var_epi16(third, bytes, fourth);
      const __mmask32 is_large = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(0x40));
      const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
      const __m512i found = _mm512_mask_blend_epi16(is_large, small, large);
      _mm512_storeu_si512(static_cast<uint16_t*>(to) + i, _mm512_or_si512(found, sign));
    }
  }
#endif
};

}  // namespace headrace
