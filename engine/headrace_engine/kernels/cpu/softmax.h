// One row's step of online softmax, as in FlashAttention: running maximum, running sum, and the
// factor by which the accumulated values decay.
#pragma once

#include "tile.h"

namespace headrace {

struct RowState {
  float maximum = -__builtin_inff();
  float total = 0;
};

// Converts scores to exponents of 2: weight = 2^((score - maximum) * slope).
struct ScoreScale {
  float slope;
  float softcap;        // 0: none
  float inner;          // scale / softcap * 2 log2(e), for tanh

  ScoreScale(float scale, float cap)
      : slope(cap > 0 ? kLog2e : scale * kLog2e),
        softcap(cap),
        inner(cap > 0 ? 2 * kLog2e * scale / cap : 0) {}

  // softcap * tanh(score * scale / softcap), by tanh(x) = 1 - 2 / (1 + e^2x)
  Floats capped(Floats score) const {
    return softcap * (1.0f - 2.0f / (1.0f + exp2(score * inner)));
  }
};

// Scores of tokens outside [first, last) count as -inf; `padded` is a multiple of 16. Weights are
// written for all of `padded`. Returns the decay.
template <class Math>
inline float weigh(float* scores, int first, int last, int padded, const ScoreScale& scale,
                   RowState& state, typename Math::Factor* weights) {
  if (last <= first) {
    for (int i = 0; i < padded; i += kLanes) Math::pack_weights(weights, i, Floats{});
    return 1;
  }
  Floats best = splat(-__builtin_inff());
  if (scale.softcap > 0)
    for (int i = 0; i < padded; i += kLanes) store(scores + i, scale.capped(load(scores + i)));
  if (first > 0 || last < padded) {
    const Ints lanes = lane_numbers();
    for (int i = 0; i < padded; i += kLanes) {
      Ints token = lanes + i;
      Ints visible = (token >= first) & (token < last);
      Floats masked = visible ? load(scores + i) : splat(-__builtin_inff());
      store(scores + i, masked);
      best = maximum(masked, best);
    }
  } else {
    for (int i = 0; i < padded; i += kLanes) best = maximum(load(scores + i), best);
  }
  const float before = state.maximum, found = largest(best);
  const float now = found > before ? found : before;
  const float decay = now == before ? 1 : exp2(splat((before - now) * scale.slope))[0];
  Floats total{};
  for (int i = 0; i < padded; i += kLanes) {
    Floats weight = Math::exponential((load(scores + i) - now) * scale.slope);
    total += weight;
    Math::pack_weights(weights, i, weight);
  }
  state.maximum = now;
  state.total = state.total * decay + sum(total);
  return decay;
}

}  // namespace headrace
