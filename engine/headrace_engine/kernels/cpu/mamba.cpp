// Mamba's selective scan, and convolutions alone.
#include "convolution.h"
#include "executor.h"

namespace headrace {
namespace {

// Channels whose states are advanced together.
constexpr int64_t kChannels = 64;

template <class T>
class SelectiveScan {
 public:
  SelectiveScan(const headrace_mamba& mamba, const States& states, const headrace_rows& values,
                const headrace_rows& steps, const headrace_rows& gate)
      : mamba_(mamba), states_(states), values_(values), steps_(steps), gate_(gate) {}

  bool run(headrace_executor& executor, T* output, const headrace_rows& b,
           const headrace_rows& c) {
    Pool& pool = executor.pool;
    const int64_t stride = mamba_.stride, tile = kChannels * stride;
    const int64_t inputs = states_.tokens() * 2 * stride, tiles = pool.threads() * tile;
    if (!executor.memory.reserve(Memory::bytes<float>(inputs) + Memory::bytes<float>(tiles)))
      return false;
    inputs_ = executor.memory.take<float>(inputs);
    float* tile_memory = executor.memory.take<float>(tiles);
    each_row(pool, states_.tokens(), stride, [&](int64_t t) {
      pad(inputs_ + t * 2 * stride, at<T>(b, t));
      pad(inputs_ + (t * 2 + 1) * stride, at<T>(c, t));
    });
    const int64_t sequences = states_.sequences();
    const int64_t parts = (mamba_.channels + kChannels - 1) / kChannels;
    pool.run(sequences * parts, [&](int64_t item, int thread) {
      advance(item % sequences, item / sequences * kChannels, tile_memory + thread * tile, output);
    });
    return true;
  }

 private:
  void pad(float* to, const T* from) const {
    for (int64_t n = 0; n < mamba_.stride; ++n) to[n] = n < mamba_.state_size ? widen(from[n]) : 0;
  }

  void advance(int64_t sequence, int64_t channel, float* tile, T* output) const {
    const int64_t rest = mamba_.channels - channel, size = mamba_.state_size;
    const Tile shape{smaller(rest, kChannels), size, size, mamba_.stride};
    const int64_t offset = states_.second() + channel * size * int64_t(sizeof(float));
    states_.advance(shape, sequence, offset, tile, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t r = 0; r < shape.rows; ++r)
          output[t * mamba_.channels + channel + r] =
              narrow_to<T>(update(tile + r * mamba_.stride, t, channel + r));
    });
  }

  // Advances a channel's state, and returns its gated output.
  float update(float* state, int64_t token, int64_t channel) const {
    const float* b = inputs_ + token * 2 * mamba_.stride;
    const float *c = b + mamba_.stride, *rates = mamba_.rates + channel * mamba_.stride;
    const float value = widen(at<T>(values_, token)[channel]);
    const float step = softplus(widen(at<T>(steps_, token)[channel]));
    const Floats exponent = splat(step * kLog2e);
    Floats total{};
    for (int64_t n = 0; n < mamba_.stride; n += kLanes) {
      const Floats now = load(state + n) * exp2(load(rates + n) * exponent) +
                         load(b + n) * (step * value);
      store(state + n, now);
      total += now * load(c + n);
    }
    return (value * mamba_.skip[channel] + sum(total)) * silu(widen(at<T>(gate_, token)[channel]));
  }

  const headrace_mamba& mamba_;
  const States& states_;
  const headrace_rows &values_, &steps_, &gate_;
  float* inputs_ = nullptr;
};

template <class T>
bool selective_scan(headrace_executor& executor, const headrace_mamba& mamba,
                    const headrace_states& states, void* output, const headrace_rows& values,
                    const headrace_rows& steps, const headrace_rows& gate, const headrace_rows& b,
                    const headrace_rows& c) {
  const States batch(states);
  SelectiveScan<T> scan(mamba, batch, values, steps, gate);
  return scan.run(executor, static_cast<T*>(output), b, c);
}

template <class T>
struct StoreGated {
  T* output;
  const T* gate;
  void operator()(int64_t channel, Floats sum) const {
    store(output + channel, sum * load(gate + channel));
  }
  void operator()(int64_t channel, float sum) const {
    output[channel] = narrow_to<T>(sum * widen(gate[channel]));
  }
};

template <class T>
struct StorePlain {
  T* output;
  bool activate;
  void operator()(int64_t channel, Floats sum) const {
    store(output + channel, activate ? silu(sum) : sum);
  }
  void operator()(int64_t channel, float sum) const {
    output[channel] = narrow_to<T>(activate ? silu(sum) : sum);
  }
};

template <class T>
bool convolve(headrace_executor& executor, const headrace_convolution& shape,
              const headrace_states& states, void* output, const headrace_rows& x,
              const headrace_rows* before, const headrace_rows* after, bool activate) {
  Pool& pool = executor.pool;
  const States batch(states);
  const int64_t channels = shape.channels, products = before ? batch.tokens() * channels : 0;
  headrace_rows rows = x;
  Convolution<T> convolution(shape, batch, rows);
  if (!executor.memory.reserve(Memory::bytes<T>(products) + convolution.bytes(pool.threads())))
    return false;
  if (before) {
    T* product = executor.memory.take<T>(products);
    each_row(pool, batch.tokens(), channels, [&](int64_t t) {
      const T *one = at<T>(*before, t), *other = at<T>(x, t);
      T* to = product + t * channels;
      for (int64_t c = 0; c < whole(channels); c += kLanes)
        store(to + c, load(one + c) * load(other + c));
      for (int64_t c = whole(channels); c < channels; ++c)
        to[c] = narrow_to<T>(widen(one[c]) * widen(other[c]));
    });
    rows = {product, channels};
  }
  convolution.take(executor.memory, pool.threads());
  pool.run(batch.sequences(), [&](int64_t s, int thread) { convolution.read_window(s, thread); });
  each_row(pool, batch.tokens(), channels, [&](int64_t t) {
    T* to = static_cast<T*>(output) + t * channels;
    if (after)
      convolution.row(t, StoreGated<T>{to, at<T>(*after, t)});
    else
      convolution.row(t, StorePlain<T>{to, activate});
  });
  pool.run(batch.sequences(), [&](int64_t s, int thread) { convolution.write_windows(s, thread); });
  return true;
}

}  // namespace
}  // namespace headrace

int headrace_convolve(headrace_executor* executor, const headrace_convolution* convolution,
                      const headrace_states* states, void* output, const headrace_rows* x,
                      const headrace_rows* before, const headrace_rows* after, int64_t silu,
                      int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::convolve<headrace::bfloat16> : &headrace::convolve<float>;
  return chosen(*executor, *convolution, *states, output, *x, before, after, silu) ? 0 : 1;
}

int headrace_selective_scan(headrace_executor* executor, const headrace_mamba* mamba,
                            const headrace_states* states, void* output,
                            const headrace_rows* values, const headrace_rows* steps,
                            const headrace_rows* gate, const headrace_rows* b,
                            const headrace_rows* c, int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::selective_scan<headrace::bfloat16>
                             : &headrace::selective_scan<float>;
  return chosen(*executor, *mamba, *states, output, *values, *steps, *gate, *b, *c) ? 0 : 1;
}
