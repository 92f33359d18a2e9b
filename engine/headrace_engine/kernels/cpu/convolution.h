// The causal convolutions of recurrent layers, whose states are windows of past inputs.
#pragma once

#include "rows.h"
#include "states.h"
#include "workspace.h"

namespace headrace {

// The longest convolution, in positions.
constexpr int64_t kLongest = 16;

template <class T>
class Convolution {
 public:
  Convolution(const headrace_convolution& shape, const States& states, const headrace_rows& rows)
      : shape_(shape),
        states_(states),
        rows_(rows),
        past_(shape.size - 1) {}

  int64_t bytes(int threads) const {
    const int64_t window = past_ * shape_.channels;
    return Memory::bytes<T>(window * states_.sequences()) + Memory::bytes<T>(window * threads);
  }

  void take(Memory& memory, int threads) {
    const int64_t window = past_ * shape_.channels;
    before_ = memory.take<T>(window * states_.sequences());
    stored_ = memory.take<T>(window * threads);
  }

  // Reads the window before a sequence's first token. `row` and `write_windows` need it.
  void read_window(int64_t sequence, int thread) const {
    const int64_t channels = shape_.channels, window = past_ * channels;
    T *stored = stored_ + thread * window, *before = before_ + sequence * window;
    if (states_.fresh(sequence)) {
      std::memset(before, 0, window * sizeof(T));
      return;
    }
    states_.source(sequence, 0).read(stored, window * sizeof(T));
    switch (past_) {
      case 2: return split<2>(stored, before);
      case 3: return split<3>(stored, before);
      default: return split<0>(stored, before);
    }
  }

  // Writes the windows after the runs of a sequence.
  void write_windows(int64_t sequence, int thread) const {
    const int64_t window = past_ * shape_.channels;
    T* stored = stored_ + thread * window;
    states_.each_run(
        sequence, 0,
        [&](int64_t, int64_t end) {
          const T* rows[kLongest];
          inputs(sequence, end, past_, rows);
          switch (past_) {
            case 2: return join<2>(rows, stored);
            case 3: return join<3>(rows, stored);
            default: return join<0>(rows, stored);
          }
        },
        [&](Cursor cursor) { cursor.write(stored, window * sizeof(T)); });
  }

  // finish(channel, sum) is called with vectors, and with floats for the last channels.
  template <class Finish>
  void row(int64_t token, const Finish& finish) const {
    const T* rows[kLongest];
    inputs(states_.sequence_of(token), token + 1, shape_.size, rows);
    switch (shape_.size) {
      case 3: return convolve<3>(rows, finish);
      case 4: return convolve<4>(rows, finish);
      default: return convolve<0>(rows, finish);
    }
  }

 private:
  // The `count` rows that end before token `end`.
  void inputs(int64_t sequence, int64_t end, int64_t count, const T** rows) const {
    const int64_t begin = states_.begin(sequence);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = end - count + i;
      rows[i] = token >= begin
                    ? at<T>(rows_, token)
                    : before_ + (sequence * past_ + past_ + token - begin) * shape_.channels;
    }
  }

  // `Size` and `Past` 0: as many as the shape says.
  template <int Size, class Finish>
  void convolve(const T* const* rows, const Finish& finish) const {
    const int64_t channels = shape_.channels, size = Size ? Size : shape_.size;
    const float *weight = shape_.weight, *bias = shape_.bias;
    for (int64_t c = 0; c < whole(channels); c += kLanes) {
      Floats total = load(rows[0] + c) * load(weight + c);
      for (int64_t i = 1; i < size; ++i) total += load(rows[i] + c) * load(weight + i * channels + c);
      finish(c, bias ? total + load(bias + c) : total);
    }
    for (int64_t c = whole(channels); c < channels; ++c) {
      float total = widen(rows[0][c]) * weight[c];
      for (int64_t i = 1; i < size; ++i) total += widen(rows[i][c]) * weight[i * channels + c];
      finish(c, bias ? total + bias[c] : total);
    }
  }

  template <int Past>
  void split(const T* stored, T* before) const {
    const int64_t channels = shape_.channels, past = Past ? Past : past_;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t i = 0; i < past; ++i) before[i * channels + c] = stored[c * past + i];
  }

  template <int Past>
  void join(const T* const* rows, T* stored) const {
    const int64_t channels = shape_.channels, past = Past ? Past : past_;
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t i = 0; i < past; ++i) stored[c * past + i] = rows[i][c];
  }

  const headrace_convolution& shape_;
  const States& states_;
  const headrace_rows& rows_;
  int64_t past_;
  T *before_ = nullptr, *stored_ = nullptr;
};

// Stores silu of a convolution's sums.
struct StoreSilu {
  float* output;
  void operator()(int64_t channel, Floats sum) const { store(output + channel, silu(sum)); }
  void operator()(int64_t channel, float sum) const { output[channel] = silu(sum); }
};

}  // namespace headrace
