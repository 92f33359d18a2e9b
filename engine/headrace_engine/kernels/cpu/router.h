// The router of a mixture of experts: the experts of each row, and their weights.
#pragma once

#include "experts.h"

namespace headrace {

template <class Math>
class Router {
 public:
  using Element = typename Math::Element;

  Router(Pool& pool, const headrace_decoder& decoder, int64_t rows)
      : pool_(pool), decoder_(decoder), rows_(rows), count_(decoder.num_experts) {}

  static int64_t bytes(const headrace_decoder& decoder, int64_t rows) {
    return Memory::bytes<float>(rows * padded(decoder.num_experts));
  }

  void take(Memory& memory) { logits_ = memory.take<float>(rows_ * padded(count_)); }

  // Writes the choices of `rows` rows of x.
  void choose(const headrace_decoder_layer& layer, const Element* x, int64_t rows,
              const Scratch& scratch, const Choices& choices) {
    choices_ = choices;
    const int64_t stride = padded(count_);
    apply_linear<Math>(pool_, layer.router, nullptr, {x, decoder_.hidden, rows}, scratch,
                       [&](int64_t row, int64_t panel, const Sums& sums) {
                         store_panel(logits_ + row * stride, panel, sums);
                       });
    each_row(pool_, rows, count_ * decoder_.experts_per_token, [&](int64_t r) {
      if (decoder_.plain_routing)
        choose_plain(r, logits_ + r * stride);
      else
        choose_scored(r, logits_ + r * stride, layer.correction);
    });
  }

 private:
  // Chooses the largest logits of a row, one after the other, with their softmax over all experts.
  // A NaN logit is chosen, and makes the row NaN.
  void choose_plain(int64_t row, float* logits) {
    const int64_t per_token = decoder_.experts_per_token;
    int32_t* chosen = choices_.experts + row * per_token;
    float* weights = choices_.weights + row * per_token;
    const float best = logits[find_largest(logits, count_)];
    const float total = total_weight(logits, best);
    float kept = 0;
    for (int64_t k = 0; k < per_token; ++k) {
      chosen[k] = int32_t(find_largest(logits, count_));
      weights[k] = exp2(splat((logits[chosen[k]] - best) * kLog2e))[0];
      kept += weights[k];
      logits[chosen[k]] = -__builtin_inff();
    }
    const float scale = 1 / (decoder_.renormalize ? kept : total);
    for (int64_t k = 0; k < per_token; ++k) weights[k] *= scale;
  }

  // Chooses the best corrected scores, one after the other, of the best groups. Scores are not
  // negative: a negative one is that of an expert which must not be chosen. NaN is the best score,
  // and makes the row NaN.
  void choose_scored(int64_t row, float* scores, const float* correction) {
    const int64_t per_token = decoder_.experts_per_token;
    int32_t* chosen = choices_.experts + row * per_token;
    float* weights = choices_.weights + row * per_token;
    score(scores);
    if (decoder_.expert_groups > 1) drop_groups(scores, correction);
    float kept = 0;
    for (int64_t k = 0; k < per_token; ++k) {
      int64_t best = 0;
      float most = -__builtin_inff();
      for (int64_t i = 0; i < count_; ++i) {
        if (scores[i] < 0) continue;
        const float found = corrected(scores, correction, i);
        if (found <= most) continue;
        best = i;
        most = found;
      }
      chosen[k] = int32_t(best);
      weights[k] = scores[best];
      kept += weights[k];
      scores[best] = -1;
    }
    const float scale = decoder_.expert_factor / (decoder_.renormalize ? kept : 1);
    for (int64_t k = 0; k < per_token; ++k) weights[k] *= scale;
  }

  static float corrected(const float* scores, const float* correction, int64_t index) {
    return correction ? scores[index] + correction[index] : scores[index];
  }

  // Turns a row's logits into scores.
  void score(float* logits) const {
    if (decoder_.sigmoid) {
      for (int64_t i = 0; i < count_; ++i) logits[i] = 1 / (1 + exp2(splat(-logits[i] * kLog2e))[0]);
      return;
    }
    const float best = logits[find_largest(logits, count_)], total = total_weight(logits, best);
    for (int64_t i = 0; i < count_; ++i)
      logits[i] = exp2(splat((logits[i] - best) * kLog2e))[0] / total;
  }

  // Makes the scores of all experts outside the best groups negative; of equal groups the first is
  // better.
  void drop_groups(float* scores, const float* correction) const {
    const int64_t groups = decoder_.expert_groups, size = count_ / groups;
    float totals[64];
    for (int64_t g = 0; g < groups; ++g) {
      float first = -__builtin_inff(), second = first;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        const float found = corrected(scores, correction, i);
        if (found > first) {
          second = first;
          first = found;
        } else if (found > second) {
          second = found;
        }
      }
      totals[g] = decoder_.group_best > 1 ? first + second : first;
    }
    for (int64_t g = 0; g < groups; ++g) {
      int64_t better = 0;
      for (int64_t other = 0; other < groups; ++other)
        better += totals[other] > totals[g] || (totals[other] == totals[g] && other < g);
      if (better < decoder_.kept_groups) continue;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) scores[i] = -1;
    }
  }

  float total_weight(const float* logits, float best) const {
    Floats sums{};
    for (int64_t i = 0; i < whole(count_); i += kLanes)
      sums += exp2((load(logits + i) - best) * kLog2e);
    float total = sum(sums);
    for (int64_t i = whole(count_); i < count_; ++i)
      total += exp2(splat((logits[i] - best) * kLog2e))[0];
    return total;
  }

  Pool& pool_;
  const headrace_decoder& decoder_;
  const int64_t rows_, count_;
  float* logits_ = nullptr;
  Choices choices_{};
};

}  // namespace headrace
