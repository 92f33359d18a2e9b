// The decoder's small operators, for one row.
#pragma once

#include "simd.h"

namespace headrace {

// The `width` elements after the last whole vector are passed one by one.
inline int64_t whole(int64_t width) { return width - width % kLanes; }

template <class T>
float mean_square(const T* x, int64_t width) {
  Floats squares{};
  for (int64_t i = 0; i < whole(width); i += kLanes) {
    Floats v = load(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (int64_t i = whole(width); i < width; ++i) total += widen(x[i]) * widen(x[i]);
  return total / float(width);
}

// Weights of type T are applied after rounding, as in transformers; with wider weights the result
// is rounded once.
template <class T, class X, class Weight>
void normalize_row(T* output, const X* x, const Weight* weight, int64_t width, float epsilon) {
  const float factor = 1 / __builtin_sqrtf(mean_square(x, width) + epsilon);
  for (int64_t i = 0; i < whole(width); i += kLanes)
    store(output + i, load(weight + i) * rounded(load(x + i) * factor, Weight{}));
  for (int64_t i = whole(width); i < width; ++i) {
    const float normal = widen(narrow_to<Weight>(widen(x[i]) * factor));
    output[i] = narrow_to<T>(widen(weight[i]) * normal);
  }
}

// residual += the RMS norm of x
inline void add_normalized(float* residual, const float* x, const float* weight, int64_t width,
                           float epsilon) {
  const float factor = 1 / __builtin_sqrtf(mean_square(x, width) + epsilon);
  for (int64_t i = 0; i < whole(width); i += kLanes)
    store(residual + i, load(residual + i) + load(weight + i) * (load(x + i) * factor));
  for (int64_t i = whole(width); i < width; ++i) residual[i] += weight[i] * (x[i] * factor);
}

template <class T>
void rotate(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < whole(half); i += kLanes) {
    const Floats c = load(cos + i), s = load(sin + i);
    const Floats first = load(head + i), second = load(head + half + i);
    store(head + i, first * c - second * s);
    store(head + half + i, second * c + first * s);
  }
  for (int64_t i = whole(half); i < half; ++i) {
    const float first = widen(head[i]), second = widen(head[half + i]);
    head[i] = narrow_to<T>(first * cos[i] - second * sin[i]);
    head[half + i] = narrow_to<T>(second * cos[i] + first * sin[i]);
  }
}

// Like `rotate`, for elements that are rotated with their neighbours.
template <class T>
void rotate_pairs(T* head, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float first = widen(head[2 * i]), second = widen(head[2 * i + 1]);
    head[2 * i] = narrow_to<T>(first * cos[i] - second * sin[i]);
    head[2 * i + 1] = narrow_to<T>(second * cos[i] + first * sin[i]);
  }
}

template <class T>
void scale_row(T* row, int64_t width, float factor) {
  for (int64_t i = 0; i < whole(width); i += kLanes) store(row + i, load(row + i) * factor);
  for (int64_t i = whole(width); i < width; ++i) row[i] = narrow_to<T>(widen(row[i]) * factor);
}

// Below -128 it is 0 in float32; the quotient would not be, since exp2 ends at 2^127.
inline Floats silu(Floats x) {
  const Floats bounded = x < splat(-128.0f) ? splat(-128.0f) : x;
  return bounded / (1.0f + exp2(bounded * -kLog2e));
}
inline float silu(float x) { return silu(splat(x))[0]; }

// (up + 1) * gate * sigmoid(alpha * gate), with gates at most `limit` and ups within +-`limit`.
// NaN stays NaN.
inline Floats clamped_swiglu(Floats gate, Floats up, float alpha, float limit) {
  const Floats most = splat(limit), least = splat(-limit);
  const Floats bounded = gate > most ? most : gate;
  const Floats raised = 1.0f + (up > most ? most : (up < least ? least : up));
  return raised * (silu(bounded * alpha) * (1 / alpha));
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), by tanh(u) = 2 / (1 + e^-2u) - 1
inline Floats gelu_tanh(Floats x) {
  const Floats inner = x * (0.79788456f + 0.035677408f * x * x);
  return x / (1.0f + exp2(inner * (-2 * kLog2e)));
}

// NaN stays NaN.
inline Floats squared_relu(Floats x) {
  const Floats bounded = x < splat(0.0f) ? splat(0.0f) : x;
  return bounded * bounded;
}

// cap * tanh(x / cap), by tanh(u) = 1 - 2 / (1 + e^2u)
inline Floats soft_cap(Floats x, float cap) {
  return cap * (1.0f - 2.0f / (1.0f + exp2(x * (2 * kLog2e / cap))));
}

template <class T>
float dot(const T* x, const float* weight, int64_t width) {
  Floats sums{};
  for (int64_t i = 0; i < whole(width); i += kLanes) sums += load(x + i) * load(weight + i);
  float total = sum(sums);
  for (int64_t i = whole(width); i < width; ++i) total += widen(x[i]) * weight[i];
  return total;
}

// NaN is larger than every number, and stays the largest once it is found.
inline bool is_larger(float x, float best) { return x > best || x != x; }

template <class T>
int64_t find_largest(const T* x, int64_t width) {
  Floats best = splat(-__builtin_inff());
  Ints numbers = lane_numbers(), found = numbers;
  for (int64_t i = 0; i < whole(width); i += kLanes) {
    const Floats v = load(x + i);
    const Ints larger = (v > best) | (v != v);
    best = larger ? v : best;
    found = larger ? numbers : found;
    numbers += kLanes;
  }
  float value = -__builtin_inff();
  int64_t index = 0;
  for (int lane = 0; lane < kLanes && width >= kLanes; ++lane)
    if (is_larger(best[lane], value) || (best[lane] == value && found[lane] < index)) {
      value = best[lane];
      index = found[lane];
    }
  for (int64_t i = whole(width); i < width; ++i)
    if (is_larger(widen(x[i]), value)) {
      value = widen(x[i]);
      index = i;
    }
  return index;
}

}  // namespace headrace
