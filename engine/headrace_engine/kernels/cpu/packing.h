// Lays weights out in the order in which products read them.
#pragma once

#include "quant.h"

namespace headrace {

// One panel of weights in the kernels' layout.
template <class Element, int kPack>
void pack_panel(Element* to, const Element* const* rows, int64_t inputs) {
  for (int column = 0; column < kPanel; ++column)
    for (int64_t k = 0; k < inputs; k += kPack)
      for (int i = 0; i < kPack; ++i)
        to[(k * kPanel) + column * kPack + i] = rows[column] ? rows[column][k + i] : Element{};
}

// Like pack_panel, in 8 bits: the largest weight of an output becomes 127.
template <class Element>
void pack_quant_panel(uint8_t* to, float* scales, const Element* const* rows, int64_t inputs) {
  for (int column = 0; column < kPanel; ++column) {
    float bound = 0;
    for (int64_t k = 0; rows[column] && k < inputs; ++k) {
      const float x = __builtin_fabsf(widen(rows[column][k]));
      bound = x > bound ? x : bound;
    }
    scales[column] = bound / 127;
    const float inverse = bound > 0 ? 127 / bound : 0;
    for (int64_t k = 0; k < inputs; ++k) {
      const float x = rows[column] ? widen(rows[column][k]) * inverse : 0;
      to[k / kQuantPack * kPanel * kQuantPack + column * kQuantPack + k % kQuantPack] =
          uint8_t(int(__builtin_rintf(x)) + kQuantZero);
    }
  }
}

// One panel of weights in 4 bits, given as integers up to 15.
inline void pack_nibbles_panel(uint8_t* to, const uint8_t* const* rows, int64_t inputs) {
  for (int column = 0; column < kPanel; ++column)
    for (int64_t k = 0; k < inputs; k += 2 * kQuantPack)
      for (int i = 0; i < kQuantPack; ++i) {
        const uint8_t* row = rows[column];
        to[k / 2 * kPanel + column * kQuantPack + i] =
            row ? uint8_t(row[k + i] | row[k + kQuantPack + i] << 4) : 0;
      }
}

template <class Math>
void pack(Pool& pool, void* packed, float* scales, const void* const* rows, int64_t outputs,
          int64_t inputs) {
  using Element = typename Math::Element;
  const Element* const* from = reinterpret_cast<const Element* const*>(rows);
  pool.run(panels_of(outputs), [&](int64_t panel, int) {
    const int64_t at = panel * kPanel;
    if (scales)
      pack_quant_panel(static_cast<uint8_t*>(packed) + at * inputs, scales + at, from + at, inputs);
    else
      pack_panel<Element, Math::kPack>(static_cast<Element*>(packed) + at * inputs, from + at,
                                       inputs);
  });
}

}  // namespace headrace
