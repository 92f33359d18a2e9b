// Mamba-2 layers between their products, in the way of gated delta nets.
#include "convolution.h"
#include "executor.h"

namespace headrace {
namespace {

// Elements of a state that are advanced together: few enough that they stay in the first cache.
constexpr int64_t kTileElements = 6144;

template <class T>
class Mamba2 {
 public:
  Mamba2(const headrace_mamba2& mamba, const States& states, const headrace_rows& mixed)
      : mamba_(mamba),
        states_(states),
        convolution_(mamba.convolution, states, mixed),
        width_(mamba.heads * mamba.head_dim),
        stride_(whole(mamba.state_size + kLanes - 1)),
        tile_rows_(smaller(mamba.head_dim, larger(kTileElements / stride_, 1))) {}

  bool run(headrace_executor& executor, T* output, const headrace_rows& gate,
           const headrace_rows& steps) {
    Pool& pool = executor.pool;
    const int64_t sequences = states_.sequences(), channels = mamba_.convolution.channels;
    if (!allocate(executor.memory, pool.threads())) return false;
    pool.run(sequences, [&](int64_t s, int thread) { convolution_.read_window(s, thread); });
    each_row(pool, states_.tokens(), channels, [&](int64_t t) {
      float* row = rows_ + t * channels;
      convolution_.row(t, StoreSilu{row});
      const int64_t size = mamba_.state_size;
      for (int64_t g = 0; g < 2 * mamba_.groups; ++g) {
        float* padded = inputs_ + (t * 2 * mamba_.groups + g) * stride_;
        std::memcpy(padded, row + width_ + g * size, size * sizeof(float));
        std::memset(padded + size, 0, (stride_ - size) * sizeof(float));
      }
      weigh(t, at<T>(steps, t));
    });
    const int64_t tiles = (mamba_.head_dim + tile_rows_ - 1) / tile_rows_;
    pool.run(sequences * (mamba_.heads * tiles + 1), [&](int64_t item, int thread) {
      const int64_t part = item / sequences, s = item % sequences;
      if (part == mamba_.heads * tiles)
        convolution_.write_windows(s, thread);
      else
        advance(s, part / tiles, part % tiles * tile_rows_, thread);
    });
    each_row(pool, states_.tokens(), width_,
             [&](int64_t t) { finish(output + t * width_, rows_ + t * channels, at<T>(gate, t)); });
    return true;
  }

 private:
  bool allocate(Memory& memory, int threads) {
    const int64_t tokens = states_.tokens(), rows = tokens * mamba_.convolution.channels;
    const int64_t inputs = tokens * 2 * mamba_.groups * stride_;
    const int64_t factors = tokens * 2 * mamba_.heads, tiles = threads * tile_rows_ * stride_;
    if (!memory.reserve(Memory::bytes<float>(rows) + Memory::bytes<float>(inputs) +
                        Memory::bytes<float>(factors) + Memory::bytes<float>(tiles) +
                        convolution_.bytes(threads)))
      return false;
    rows_ = memory.take<float>(rows);
    inputs_ = memory.take<float>(inputs);
    factors_ = memory.take<float>(factors);
    tiles_ = memory.take<float>(tiles);
    convolution_.take(memory, threads);
    return true;
  }

  // What each head keeps of its state, and its time step.
  void weigh(int64_t token, const T* steps) const {
    float* factors = factors_ + token * 2 * mamba_.heads;
    for (int64_t h = 0; h < mamba_.heads; ++h) {
      factors[2 * h + 1] = softplus(widen(steps[h]) + mamba_.dt_bias[h]);
      factors[2 * h] = std::exp(factors[2 * h + 1] * mamba_.rates[h]);
    }
  }

  // Advances some rows of a head's state through a sequence's tokens; outputs replace the values.
  void advance(int64_t sequence, int64_t head, int64_t row, int thread) const {
    const int64_t rows = smaller(tile_rows_, mamba_.head_dim - row), size = mamba_.state_size;
    const Tile shape{rows, size, size, stride_};
    const int64_t first = head * mamba_.head_dim + row, group = head / (mamba_.heads / mamba_.groups);
    float* tile = tiles_ + thread * tile_rows_ * stride_;
    const int64_t offset = states_.second() + first * size * int64_t(sizeof(float));
    states_.advance(shape, sequence, offset, tile, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* factors = factors_ + (t * mamba_.heads + head) * 2;
        const float* b = inputs_ + (t * 2 * mamba_.groups + group) * stride_;
        const float* c = b + mamba_.groups * stride_;
        float* values = rows_ + t * mamba_.convolution.channels + first;
        for (int64_t r = 0; r < rows; ++r)
          values[r] = values[r] * mamba_.skip[head] +
                      update(tile + r * stride_, factors[0], factors[1] * values[r], b, c);
      }
    });
  }

  float update(float* state, float keep, float value, const float* b, const float* c) const {
    Floats total{};
    for (int64_t n = 0; n < stride_; n += kLanes) {
      const Floats now = load(state + n) * keep + load(b + n) * value;
      store(state + n, now);
      total += now * load(c + n);
    }
    return sum(total);
  }

  // Gate and norm of a token.
  void finish(T* to, float* x, const T* gate) const {
    if (!mamba_.norm_first) multiply(x, gate);
    if (mamba_.norm) {
      const int64_t group = width_ / mamba_.groups;
      for (int64_t i = 0; i < width_; i += group)
        normalize_row(x + i, x + i, mamba_.norm + i, group, mamba_.epsilon);
    }
    if (mamba_.norm_first) multiply(x, gate);
    for (int64_t i = 0; i < whole(width_); i += kLanes) store(to + i, load(x + i));
    for (int64_t i = whole(width_); i < width_; ++i) to[i] = narrow_to<T>(x[i]);
  }

  // Multiplies x by silu of its gate.
  void multiply(float* x, const T* gate) const {
    for (int64_t i = 0; i < whole(width_); i += kLanes)
      store(x + i, load(x + i) * silu(load(gate + i)));
    for (int64_t i = whole(width_); i < width_; ++i) x[i] *= silu(widen(gate[i]));
  }

  const headrace_mamba2& mamba_;
  const States& states_;
  Convolution<T> convolution_;
  int64_t width_, stride_, tile_rows_;
  float *rows_ = nullptr, *inputs_ = nullptr, *factors_ = nullptr, *tiles_ = nullptr;
};

template <class T>
bool mamba2(headrace_executor& executor, const headrace_mamba2& mamba,
            const headrace_states& states, void* output, const headrace_rows& mixed,
            const headrace_rows& gate, const headrace_rows& steps) {
  const States batch(states);
  return Mamba2<T>(mamba, batch, mixed).run(executor, static_cast<T*>(output), gate, steps);
}

}  // namespace
}  // namespace headrace

int headrace_state_space(headrace_executor* executor, const headrace_mamba2* mamba,
                         const headrace_states* states, void* output, const headrace_rows* mixed,
                         const headrace_rows* gate, const headrace_rows* steps,
                         int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::mamba2<headrace::bfloat16> : &headrace::mamba2<float>;
  return chosen(*executor, *mamba, *states, output, *mixed, *gate, *steps) ? 0 : 1;
}
