// A whole linear layer, in any storage of its weights, and helpers around layers.
#pragma once

#include "block_products.h"
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

// Whether a product needs its rows in 8 bits.
template <class Math>
inline bool needs_quant(const headrace_linear& linear) {
  return linear.scales || (linear.panels && rounds_rows<Math>());
}

// Rows that a product computes at once.
template <class Math>
inline int rows_at_once(const headrace_linear& linear) {
  if (!needs_quant<Math>(linear)) return block_of<Math>(linear.inputs);
  return linear.panels ? kBlockRows : kQuantRows;
}

template <class Math>
inline Division divide(const headrace_linear& linear, int64_t rows, int threads) {
  const int64_t bytes = needs_quant<Math>(linear) ? 1 : sizeof(typename Math::Factor);
  return Division(rows, linear.inputs * bytes, panels_of(linear.outputs), threads,
                  rows_at_once<Math>(linear));
}

// The rows of a product in the types in which it needs them.
template <class Math>
struct Inputs {
  Rows<typename Math::Factor> factors{};
  QuantRows quant{};

  Inputs(Pool& pool, const headrace_linear& linear, const Rows<typename Math::Element>& rows,
         const Scratch& scratch) {
    if (!linear.scales) factors = scratch.factors_of<Math>(pool, rows, linear.inputs);
    if (needs_quant<Math>(linear)) quant = scratch.quantize(pool, rows, linear.inputs);
  }
};

// emit(row, panel, sums) for one item of a product, its bias added. The first rows' products
// prefetch `ahead`, which may be null.
template <class Math, class Emit>
void apply_piece(const headrace_linear& linear, const Rows<typename Math::Factor>& factors,
                 const QuantRows& quant, const Piece& piece, const char* ahead,
                 const Scratch& scratch, int thread, const Emit& emit) {
  using Element = typename Math::Element;
  const auto biased = [&](int64_t row, int64_t panel, Sums& sums) {
    add_bias(linear, panel, sums);
    emit(row, panel, sums);
  };
  if (linear.panels) {
    auto* unpacked = reinterpret_cast<Element*>(scratch.unpacked + thread * kPanel * linear.inputs);
    multiply_block_piece<Math>(linear.panels, factors, quant, linear.inputs, piece, unpacked,
                               biased);
  } else if (linear.scales) {
    multiply_quant_piece(quant, quant_weights(linear), linear.inputs, piece, biased);
  } else {
    multiply_piece<Math>(factors, static_cast<const Element*>(linear.weight), linear.inputs, piece,
                         ahead, biased);
  }
}

// emit(row, panel, sums) for the product of rows with a layer's weights, its bias added. `then` is
// computed next: its first weights are prefetched.
template <class Math, class Emit>
void apply_linear(Pool& pool, const headrace_linear& linear, const headrace_linear* then,
                  const Rows<typename Math::Element>& rows, const Scratch& scratch,
                  const Emit& emit) {
  if (rows.count == 0) return;
  const Inputs<Math> given(pool, linear, rows, scratch);
  const Division division = divide<Math>(linear, rows.count, pool.threads());
  const int64_t panel_bytes = linear.inputs * kPanel * sizeof(typename Math::Element);
  pool.run(division.items(), [&](int64_t item, int thread) {
    const char* ahead = weights_after(item, division, pool.threads(), linear.weight, panel_bytes,
                                      then ? then->weight : nullptr);
    apply_piece<Math>(linear, given.factors, given.quant, piece_of(division, item), ahead, scratch,
                      thread, emit);
  });
}

// Writes a panel's sums to their place in a row.
template <class T>
inline void store_panel(T* row, int64_t panel, const Sums& sums) {
  for (int c = 0; c < kColumns; ++c) store(row + panel * kPanel + c * kLanes, sums.at[c]);
}

// Like store_panel, in rows of `outputs` elements, a multiple of a vector.
template <class T>
inline void store_outputs(T* row, int64_t panel, int64_t outputs, const Sums& sums) {
  for (int c = 0; c < kColumns && panel * kPanel + c * kLanes < outputs; ++c)
    store(row + panel * kPanel + c * kLanes, sums.at[c]);
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
