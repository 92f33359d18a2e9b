// A mixture of experts: each row goes through the gated MLPs with the largest weights of the
// router.
//
// Rows are sorted by expert, and the products of all experts are one loop. A row's result does not
// depend on other rows, as its parts are added in the order of its choices.
#pragma once

#include "layer.h"

namespace headrace {

template <class Math>
class Experts {
 public:
  using Element = typename Math::Element;

  Experts(Pool& pool, const headrace_decoder& decoder, int64_t rows)
      : pool_(pool),
        decoder_(decoder),
        rows_(rows),
        count_(decoder.num_experts),
        slots_(rows * decoder.experts_per_token) {}

  static int64_t bytes(const headrace_decoder& decoder, int64_t rows) {
    const int64_t slots = rows * decoder.experts_per_token;
    return Memory::bytes<float>(rows * padded(decoder.num_experts)) +
           Memory::bytes<int32_t>(2 * slots) + Memory::bytes<float>(slots) +
           Memory::bytes<int64_t>(3 * (decoder.num_experts + 1)) +
           Memory::bytes<Element>(slots * decoder.hidden) +
           Memory::bytes<Element>(slots * padded(2 * decoder.expert_inner) / 2) +
           Memory::bytes<float>(slots * padded(decoder.hidden));
  }

  void take(Memory& memory) {
    logits_ = memory.take<float>(rows_ * padded(count_));
    chosen_ = memory.take<int32_t>(2 * slots_);
    slot_of_ = chosen_ + slots_;
    weights_ = memory.take<float>(slots_);
    first_ = memory.take<int64_t>(3 * (count_ + 1));
    items_before_ = first_ + count_ + 1;
    used_ = items_before_ + count_ + 1;
    gathered_ = memory.take<Element>(slots_ * decoder_.hidden);
    gated_ = memory.take<Element>(slots_ * padded(2 * decoder_.expert_inner) / 2);
    computed_ = memory.take<float>(slots_ * padded(decoder_.hidden));
  }

  // Adds the results of the experts for `rows` rows of x to the residuals.
  void add(const headrace_decoder_layer& layer, const Element* x, int64_t rows,
           const Scratch& scratch, float* residual, int64_t residual_stride) {
    route(layer, x, rows, scratch);
    sort(rows * decoder_.experts_per_token);
    gather(x, rows);
    const headrace_linear &gate_up = layer.experts_gate_up[0], &down = layer.experts_down[0];
    const int64_t stride = gated_stride(gate_up), width = padded(decoder_.hidden);
    each_expert(layer.experts_gate_up, {gathered_, decoder_.hidden, sorted_}, gate_up, scratch,
                [&](int64_t slot, int64_t panel, const Sums& sums) {
                  store_gated(gated_ + slot * stride, panel, sums, decoder_);
                });
    each_expert(layer.experts_down, {gated_, stride, sorted_}, down, scratch,
                [&](int64_t slot, int64_t panel, const Sums& sums) {
                  store_panel(computed_ + slot * width, panel, sums);
                });
    each_row(pool_, rows, decoder_.hidden * decoder_.experts_per_token,
             [&](int64_t r) { mix(r, residual + r * residual_stride, width); });
  }

 private:
  void route(const headrace_decoder_layer& layer, const Element* x, int64_t rows,
             const Scratch& scratch) {
    const int64_t stride = padded(count_);
    apply_linear<Math>(pool_, layer.router, nullptr, {x, decoder_.hidden, rows}, scratch,
                       [&](int64_t row, int64_t panel, const Sums& sums) {
                         store_panel(logits_ + row * stride, panel, sums);
                       });
    each_row(pool_, rows, count_ * decoder_.experts_per_token,
             [&](int64_t r) {
               if (decoder_.plain_routing)
                 choose(r, logits_ + r * stride);
               else
                 choose_scored(r, logits_ + r * stride, layer.correction);
             });
  }

  // Chooses the largest logits of a row, one after the other, with their softmax over all experts.
  // A NaN logit is chosen, and makes the row NaN.
  void choose(int64_t row, float* logits) {
    const int64_t per_token = decoder_.experts_per_token;
    int32_t* chosen = chosen_ + row * per_token;
    float* weights = weights_ + row * per_token;
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
    int32_t* chosen = chosen_ + row * per_token;
    float* weights = weights_ + row * per_token;
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

  // Sorts choices by expert: first_[e] is the first slot of expert e, slot_of_[i] that of choice
  // i.
  void sort(int64_t choices) {
    sorted_ = choices;
    std::memset(first_, 0, sizeof(int64_t) * (count_ + 1));
    for (int64_t i = 0; i < choices; ++i) ++first_[chosen_[i] + 1];
    num_used_ = 0;
    for (int64_t e = 0; e < count_; ++e) {
      if (first_[e + 1] > 0) used_[num_used_++] = e;
      first_[e + 1] += first_[e];
    }
    for (int64_t i = 0; i < choices; ++i) slot_of_[i] = int32_t(first_[chosen_[i]]++);
    for (int64_t e = count_; e > 0; --e) first_[e] = first_[e - 1];
    first_[0] = 0;
  }

  void gather(const Element* x, int64_t rows) {
    const int64_t hidden = decoder_.hidden, per_token = decoder_.experts_per_token;
    each_row(pool_, rows, hidden * per_token, [&](int64_t r) {
      for (int64_t choice = r * per_token; choice < (r + 1) * per_token; ++choice) {
        Element* to = gathered_ + slot_of_[choice] * hidden;
        std::memcpy(to, x + r * hidden, sizeof(Element) * hidden);
        if (!decoder_.scaled_inputs) continue;
        scale_row(to, hidden, weights_[choice]);
        weights_[choice] = 1;
      }
    });
  }

  // emit(slot, panel, sums) for the rows of every expert in use. `like` has the shape of each of
  // the layers.
  template <class Emit>
  void each_expert(const headrace_linear* linears, const Rows<Element>& rows,
                   const headrace_linear& like, const Scratch& scratch, const Emit& emit) {
    QuantRows quant{};
    if (like.scales) quant = scratch.quantize(pool_, rows, like.inputs);
    const int64_t items = count_items(like);
    pool_.run(items, [&](int64_t item, int thread) {
      const int64_t use = expert_of(item), expert = used_[use], first = first_[expert];
      const headrace_linear& linear = linears[expert];
      const Division division = divide(like, use);
      Piece piece = piece_of(division, item - items_before_[use]);
      piece.begin += first;
      piece.end += first;
      const auto biased = [&](int64_t slot, int64_t panel, Sums& sums) {
        add_bias(linear, panel, sums);
        emit(slot, panel, sums);
      };
      if (like.scales)
        multiply_quant_piece(quant, quant_weights(linear), linear.inputs, piece, biased);
      else
        multiply_piece<Math>(rows, static_cast<const Element*>(linear.weight), linear.inputs, piece,
                             nullptr, factors(scratch, thread, linear.inputs), biased);
    });
  }

  static typename Math::Factor* factors(const Scratch& scratch, int thread, int64_t inputs) {
    return reinterpret_cast<typename Math::Factor*>(scratch.factors) + thread * kRows * inputs;
  }

  Division divide(const headrace_linear& like, int64_t use) const {
    const int64_t expert = used_[use], rows = first_[expert + 1] - first_[expert];
    const bool quant = like.scales;
    return Division(rows, like.inputs * (quant ? 1 : int64_t(sizeof(typename Math::Factor))),
                    panels_of(like.outputs), pool_.threads(),
                    quant ? kQuantRows : block_of<Math>(like.inputs));
  }

  int64_t count_items(const headrace_linear& like) {
    items_before_[0] = 0;
    for (int64_t use = 0; use < num_used_; ++use)
      items_before_[use + 1] = items_before_[use] + divide(like, use).items();
    return items_before_[num_used_];
  }

  // The index, among the experts in use, of an item's expert.
  int64_t expert_of(int64_t item) const {
    int64_t low = 0, high = num_used_;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (items_before_[middle] <= item ? low : high) = middle;
    }
    return low;
  }

  void mix(int64_t row, float* residual, int64_t width) const {
    const int64_t per_token = decoder_.experts_per_token;
    for (int64_t i = 0; i < decoder_.hidden; i += kLanes) {
      Floats sum{};
      for (int64_t k = 0; k < per_token; ++k) {
        const int64_t choice = row * per_token + k;
        sum += load(computed_ + slot_of_[choice] * width + i) * weights_[choice];
      }
      store(residual + i, load(residual + i) + sum);
    }
  }

  Pool& pool_;
  const headrace_decoder& decoder_;
  const int64_t rows_, count_, slots_;
  float *logits_ = nullptr, *weights_ = nullptr, *computed_ = nullptr;
  int32_t *chosen_ = nullptr, *slot_of_ = nullptr;
  int64_t *first_ = nullptr, *items_before_ = nullptr, *used_ = nullptr;
  Element *gathered_ = nullptr, *gated_ = nullptr;
  int64_t sorted_ = 0, num_used_ = 0;
};

}  // namespace headrace
