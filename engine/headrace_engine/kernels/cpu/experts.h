// The experts of a mixture: each row goes through the gated MLPs that were chosen for it.
//
// Rows are sorted by expert, and the products of all experts are one loop. A row's result does not
// depend on other rows, as its parts are added in the order of its choices. A choice of no expert,
// a number from `count` on, adds nothing: the expert is in another process.
#pragma once

#include "layer.h"

namespace headrace {

// The slot of a choice that no expert here computes.
constexpr int32_t kElsewhere = -1;

// The experts of rows and their weights, [rows, per_token].
struct Choices {
  int32_t* experts = nullptr;
  float* weights = nullptr;
};

template <class Math>
class Experts {
 public:
  using Element = typename Math::Element;

  // `shape` may still be without layers.
  Experts(Pool& pool, const headrace_experts& shape, int64_t rows)
      : pool_(pool), shape_(shape), count_(shape.count), slots_(rows * shape.per_token) {}

  static int64_t bytes(const headrace_experts& shape, int64_t rows) {
    const int64_t slots = rows * shape.per_token;
    return Memory::bytes<int32_t>(2 * slots) + Memory::bytes<float>(slots) +
           Memory::bytes<int64_t>(3 * (shape.count + 1)) +
           Memory::bytes<Element>(slots * shape.hidden) +
           Memory::bytes<Element>(slots * padded(2 * shape.inner) / 2) +
           Memory::bytes<Element>(slots * unpaired(shape)) +
           Memory::bytes<float>(slots * padded(shape.hidden));
  }

  void take(Memory& memory) {
    choices_.experts = memory.take<int32_t>(2 * slots_);
    slot_of_ = choices_.experts + slots_;
    choices_.weights = memory.take<float>(slots_);
    first_ = memory.take<int64_t>(3 * (count_ + 1));
    items_before_ = first_ + count_ + 1;
    used_ = items_before_ + count_ + 1;
    gathered_ = memory.take<Element>(slots_ * shape_.hidden);
    gated_ = memory.take<Element>(slots_ * padded(2 * shape_.inner) / 2);
    unpaired_ = memory.take<Element>(slots_ * unpaired(shape_));
    computed_ = memory.take<float>(slots_ * padded(shape_.hidden));
  }

  // Where the choices of all rows are written before `compute`, which may change their weights.
  const Choices& choices() const { return choices_; }

  // Computes the experts of a layer for `rows` rows of x, which have choices.
  void compute(const headrace_linear* gate_up, const headrace_linear* down, const Element* x,
               int64_t rows, const Scratch& scratch) {
    sort(rows * shape_.per_token);
    gather(x, rows);
    compute_gated(gate_up, scratch);
    const int64_t width = padded(shape_.hidden);
    each_expert(down, {gated_, gated_stride(), sorted_}, scratch,
                [&](int64_t slot, int64_t panel, const Sums& sums) {
                  store_panel(computed_ + slot * width, panel, sums);
                });
  }

  // Adds the weighted sums of the results for `rows` rows to the residuals.
  void add(float* residual, int64_t rows, int64_t stride) const {
    mix(rows, [&](int64_t row, int64_t at, Floats sum) {
      float* to = residual + row * stride + at;
      store(to, load(to) + sum);
    });
  }

  // Writes the weighted sums to dense rows.
  void write(Element* output, int64_t rows) const {
    mix(rows, [&](int64_t row, int64_t at, Floats sum) {
      store(output + row * shape_.hidden + at, sum);
    });
  }

 private:
  // Elements of a row of gates and ups that are not interleaved.
  static int64_t unpaired(const headrace_experts& shape) {
    return shape.interleaved ? 0 : padded(shape.inner + ups_at(shape));
  }

  // Where the ups of such a row begin; without gates they are what is activated.
  static int64_t ups_at(const headrace_experts& shape) {
    return shape.activation.kind == kSquaredRelu ? 0 : shape.inner;
  }

  int64_t gated_stride() const { return padded(2 * shape_.inner) / 2; }

  bool is_here(int64_t choice) const { return choices_.experts[choice] < count_; }

  // Sorts choices by expert: first_[e] is the first slot of expert e, slot_of_[i] that of choice
  // i.
  void sort(int64_t choices) {
    std::memset(first_, 0, sizeof(int64_t) * (count_ + 1));
    for (int64_t i = 0; i < choices; ++i)
      if (is_here(i)) ++first_[choices_.experts[i] + 1];
    num_used_ = 0;
    for (int64_t e = 0; e < count_; ++e) {
      if (first_[e + 1] > 0) used_[num_used_++] = e;
      first_[e + 1] += first_[e];
    }
    sorted_ = first_[count_];
    for (int64_t i = 0; i < choices; ++i)
      slot_of_[i] = is_here(i) ? int32_t(first_[choices_.experts[i]]++) : kElsewhere;
    for (int64_t e = count_; e > 0; --e) first_[e] = first_[e - 1];
    first_[0] = 0;
  }

  void gather(const Element* x, int64_t rows) {
    const int64_t hidden = shape_.hidden, per_token = shape_.per_token;
    each_row(pool_, rows, hidden * per_token, [&](int64_t r) {
      for (int64_t choice = r * per_token; choice < (r + 1) * per_token; ++choice) {
        if (slot_of_[choice] == kElsewhere) continue;
        Element* to = gathered_ + slot_of_[choice] * hidden;
        std::memcpy(to, x + r * hidden, sizeof(Element) * hidden);
        if (!shape_.scaled_inputs) continue;
        scale_row(to, hidden, choices_.weights[choice]);
        choices_.weights[choice] = 1;
      }
    });
  }

  void compute_gated(const headrace_linear* gate_up, const Scratch& scratch) {
    const Rows<Element> rows{gathered_, shape_.hidden, sorted_};
    if (shape_.interleaved) {
      each_expert(gate_up, rows, scratch, [&](int64_t slot, int64_t panel, const Sums& sums) {
        store_gated(gated_ + slot * gated_stride(), panel, sums, shape_.activation);
      });
      return;
    }
    const int64_t stride = unpaired(shape_);
    each_expert(gate_up, rows, scratch, [&](int64_t slot, int64_t panel, const Sums& sums) {
      store_panel(unpaired_ + slot * stride, panel, sums);
    });
    each_row(pool_, sorted_, 2 * shape_.inner, [&](int64_t slot) {
      const Element *gate = unpaired_ + slot * stride, *up = gate + ups_at(shape_);
      Element* to = gated_ + slot * gated_stride();
      for (int64_t i = 0; i < shape_.inner; i += kLanes)
        store(to + i, gated(load(gate + i), load(up + i), shape_.activation));
    });
  }

  // emit(slot, panel, sums) for the rows of every expert in use. The layers have
  // one shape.
  template <class Emit>
  void each_expert(const headrace_linear* linears, const Rows<Element>& rows,
                   const Scratch& scratch, const Emit& emit) {
    const headrace_linear& like = linears[0];
    const Inputs<Math> given(pool_, like, rows, scratch);
    const int64_t items = count_items(like);
    pool_.run(items, [&](int64_t item, int thread) {
      const int64_t use = expert_of(item), expert = used_[use], first = first_[expert];
      Piece piece = piece_of(divide_rows(like, use), item - items_before_[use]);
      piece.begin += first;
      piece.end += first;
      apply_piece<Math>(linears[expert], given.factors, given.quant, piece, nullptr, scratch, thread,
                        emit);
    });
  }

  Division divide_rows(const headrace_linear& like, int64_t use) const {
    const int64_t expert = used_[use];
    return divide<Math>(like, first_[expert + 1] - first_[expert], pool_.threads());
  }

  int64_t count_items(const headrace_linear& like) {
    items_before_[0] = 0;
    for (int64_t use = 0; use < num_used_; ++use)
      items_before_[use + 1] = items_before_[use] + divide_rows(like, use).items();
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

  // emit(row, at, sum) for a vector of sums, `at` elements into a row.
  template <class Emit>
  void mix(int64_t rows, const Emit& emit) const {
    const int64_t per_token = shape_.per_token, width = padded(shape_.hidden);
    each_row(pool_, rows, shape_.hidden * per_token, [&](int64_t row) {
      for (int64_t i = 0; i < shape_.hidden; i += kLanes) {
        Floats sum{};
        for (int64_t k = 0; k < per_token; ++k) {
          const int64_t choice = row * per_token + k, slot = slot_of_[choice];
          if (slot == kElsewhere) continue;
          sum += load(computed_ + slot * width + i) * choices_.weights[choice];
        }
        emit(row, i, sum);
      }
    });
  }

  Pool& pool_;
  const headrace_experts shape_;
  const int64_t count_, slots_;
  Choices choices_;
  float* computed_ = nullptr;
  int32_t* slot_of_ = nullptr;
  int64_t *first_ = nullptr, *items_before_ = nullptr, *used_ = nullptr;
  Element *gathered_ = nullptr, *gated_ = nullptr, *unpaired_ = nullptr;
  int64_t sorted_ = 0, num_used_ = 0;
};

}  // namespace headrace
