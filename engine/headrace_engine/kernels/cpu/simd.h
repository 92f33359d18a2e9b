// Vectors of the instruction set for which this file is compiled, in GCC's vector extension: one
// source serves AVX-512, AVX2 and every other CPU. Intrinsics are used only for what it lacks.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headrace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

struct bfloat16 {
  uint16_t bits;
};

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <class Vector>
inline Vector load_raw(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(Vector));
  return vector;
}

// `x - zeros` and not `zeros + x`: the compiler may drop it, since it keeps the sign of zero.
inline Floats splat(float x) { return x - Floats{}; }
inline Words splat_word(uint32_t x) { return x - Words{}; }

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// The two bfloat16 of each word, widened: the even element, then the odd one.
inline Floats widen_even(Words words) { return bit_cast<Floats>(words << 16); }
inline Floats widen_odd(Words words) { return bit_cast<Floats>(words & 0xffff0000u); }

inline float widen(bfloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float widen(float x) { return x; }

// Rounds to the nearest bfloat16, ties to even; the result's low 16 bits of each word are 0.
inline Words rounded_words(Floats x) {
  Words bits = bit_cast<Words>(x);
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
}

inline Halves to_halves(Floats x) {
#if defined(__AVX512BF16__)
  return bit_cast<Halves>(_mm512_cvtneps_pbh(bit_cast<__m512>(x)));
#else
  return __builtin_convertvector(rounded_words(x) >> 16, Halves);
#endif
}

inline Floats load(const float* from) { return load_raw<Floats>(from); }
inline Floats load(const bfloat16* from) {
  return bit_cast<Floats>(__builtin_convertvector(load_raw<Halves>(from), Words) << 16);
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof(x)); }
inline void store(bfloat16* to, Floats x) {
  Halves halves = to_halves(x);
  std::memcpy(to, &halves, sizeof(halves));
}

inline float narrow(float x, float) { return x; }
inline bfloat16 narrow(float x, bfloat16) {
  uint32_t bits = bit_cast<uint32_t>(x);
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <class T>
inline T narrow_to(float x) {
  return narrow(x, T{});
}

// x as it would be after a store and a load in type T.
inline Floats rounded(Floats x, float) { return x; }
inline Floats rounded(Floats x, bfloat16) { return bit_cast<Floats>(rounded_words(x)); }

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(bit_cast<__m512>(x));
#else
  float lanes[kLanes], total = 0;
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  return total;
#endif
}

inline float largest(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(bit_cast<__m512>(x));
#else
  float lanes[kLanes];
  store(lanes, x);
  float best = lanes[0];
  for (int i = 1; i < kLanes; ++i) best = lanes[i] > best ? lanes[i] : best;
  return best;
#endif
}

inline Ints lane_numbers() {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// 2^x within 2e-7 of its value; 0 below -126, so that masked elements weigh exactly nothing; NaN
// stays NaN. The integer part goes into the exponent, a Taylor polynomial covers [-1/2, 1/2].
inline Floats exp2(Floats x) {
  const Floats magic = splat(12582912.0f);
  Ints vanishes = x < splat(-126.0f);
  Floats bounded = x > splat(127.0f) ? splat(127.0f) : x;
  bounded = vanishes ? splat(-126.0f) : bounded;
  Floats shifted = bounded + magic;
  Floats f = bounded - (shifted - magic);
  Floats p = splat(1.5403530e-4f);
  p = p * f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  Ints scaled = bit_cast<Ints>(p) + (bit_cast<Ints>(shifted) << 23);
  return vanishes ? Floats{} : bit_cast<Floats>(scaled);
}

#if defined(__AVX512F__)
// 2^x of x <= 0 within 5e-5 of its value, a hundredth of bfloat16's resolution; 0 far below, NaN
// for NaN.
inline Floats rough_exp2(Floats x) {
  const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), bit_cast<__m512>(x));
  const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Floats f = bit_cast<Floats>(_mm512_sub_ps(bounded, whole));
  Floats p = splat(9.6181291e-3f);
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return bit_cast<Floats>(_mm512_scalef_ps(bit_cast<__m512>(p), whole));
}
#endif

constexpr float kLog2e = 1.44269504f;

}  // namespace headrace
