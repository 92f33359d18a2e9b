// A whole linear layer, in any storage of its weights, and helpers around layers.
#pragma once

#include "decoder.h"
#include "rows.h"
#include "workspace.h"

namespace headrace {

inline void add_bias(const headrace_linear& linear, int64_t panel, Sums& sums) {
  if (!linear.bias) return;
  for (int c = 0; c < kColumns; ++c) sums.at[c] += load(linear.bias + panel * kPanel + c * kLanes);
}

inline QuantWeights quant_weights(const headrace_linear& linear) {
  return {static_cast<const uint8_t*>(linear.weight), linear.scales, linear.zeros, linear.group,
          padded(linear.outputs)};
}

// emit(row, panel, sums) for the product of rows with a layer's weights, its bias added. `then` is
// computed next: its first weights are prefetched.
template <class Math, class Emit>
void apply_linear(Pool& pool, const headrace_linear& linear, const headrace_linear* then,
                  const Rows<typename Math::Element>& rows, const Scratch& scratch,
                  const Emit& emit) {
  using Element = typename Math::Element;
  const auto biased = [&](int64_t row, int64_t panel, Sums& sums) {
    add_bias(linear, panel, sums);
    emit(row, panel, sums);
  };
  if (!linear.scales) {
    multiply<Math>(pool, rows, static_cast<const Element*>(linear.weight), linear.inputs,
                   linear.outputs, then ? then->weight : nullptr, scratch.factors, biased);
    return;
  }
  multiply_quant(pool, scratch.quantize(pool, rows, linear.inputs), quant_weights(linear),
                 linear.inputs, linear.outputs, biased);
}

// Writes a panel's sums to their place in a row.
template <class T>
inline void store_panel(T* row, int64_t panel, const Sums& sums) {
  for (int c = 0; c < kColumns; ++c) store(row + panel * kPanel + c * kLanes, sums.at[c]);
}

inline void add_panel(float* row, int64_t panel, const Sums& sums, float factor) {
  float* to = row + panel * kPanel;
  for (int c = 0; c < kColumns; ++c)
    store(to + c * kLanes, load(to + c * kLanes) + sums.at[c] * factor);
}

inline Sums capped(const Sums& sums, float cap) {
  Sums found;
  for (int c = 0; c < kColumns; ++c) found.at[c] = soft_cap(sums.at[c], cap);
  return found;
}

// The kind of an activation without gates.
constexpr int64_t kSquaredRelu = 3;

inline Floats gated(Floats gate, Floats up, const headrace_activation& activation) {
  switch (activation.kind) {
    case 1: return gelu_tanh(gate) * up;
    case 2: return clamped_swiglu(gate, up, activation.alpha, activation.limit);
    case kSquaredRelu: return squared_relu(up);
    default: return silu(gate) * up;
  }
}

// Half a panel of gates and half a panel of ups, which are interleaved, as one activated half.
template <class T>
inline void store_gated(T* row, int64_t panel, const Sums& sums,
                        const headrace_activation& activation) {
  T* to = row + panel * (kPanel / 2);
  for (int c = 0; c < kColumns / 2; ++c)
    store(to + c * kLanes, gated(sums.at[c], sums.at[c + kColumns / 2], activation));
}

// Elements between the rows that `store_gated` writes.
inline int64_t gated_stride(const headrace_linear& gate_up) { return padded(gate_up.outputs) / 2; }

}  // namespace headrace
