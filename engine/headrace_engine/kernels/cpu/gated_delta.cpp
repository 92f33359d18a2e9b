// Gated delta nets between their products. Tiles of a head's state are read from their blocks,
// advanced token by token, and written back: chunks of a prompt give the same bits as the whole.
#include "recurrence.h"

#include "convolution.h"
#include "executor.h"

namespace headrace {
namespace {

// Columns of a matrix that are advanced together: few enough that a tile stays in the first cache.
constexpr int kTileVectors = 4;
constexpr int64_t kTileColumns = kTileVectors * kLanes;

struct TileRow {
  Floats part[kTileVectors];

  static TileRow of(const float* from) {
    TileRow row;
    for (int i = 0; i < kTileVectors; ++i) row.part[i] = load(from + i * kLanes);
    return row;
  }

  // The first `count` elements, and zeros.
  static TileRow of(const float* from, int64_t count) {
    if (count == kTileColumns) return of(from);
    float padded[kTileColumns] = {};
    std::memcpy(padded, from, count * sizeof(float));
    return of(padded);
  }

  void put(float* to, int64_t count) const {
    float padded[kTileColumns];
    for (int i = 0; i < kTileVectors; ++i) store(padded + i * kLanes, part[i]);
    std::memcpy(to, padded, count * sizeof(float));
  }
};

template <class T>
class GatedDelta {
 public:
  GatedDelta(const headrace_delta& delta, const States& states, const headrace_rows& mixed)
      : delta_(delta), states_(states), convolution_(delta.convolution, states, mixed) {}

  bool run(headrace_executor& executor, T* output, const headrace_rows& gate,
           const headrace_rows& beta, const headrace_rows& decay) {
    Pool& pool = executor.pool;
    const int64_t sequences = states_.sequences(), heads = delta_.value_heads;
    const int64_t channels = delta_.convolution.channels;
    if (!allocate(executor.memory, pool.threads())) return false;
    pool.run(sequences, [&](int64_t s, int thread) { convolution_.read_window(s, thread); });
    each_row(pool, states_.tokens(), channels, [&](int64_t t) {
      float* row = rows_ + t * channels;
      convolution_.row(t, StoreSilu{row});
      for (int64_t h = 0; h < delta_.key_heads; ++h) {
        normalize(row + h * delta_.key_dim, 1 / std::sqrt(float(delta_.key_dim)));
        normalize(row + (delta_.key_heads + h) * delta_.key_dim, 1);
      }
      weigh(t, at<T>(beta, t), at<T>(decay, t));
    });
    const int64_t tiles = (delta_.value_dim + kTileColumns - 1) / kTileColumns;
    pool.run(sequences * (heads * tiles + 1), [&](int64_t item, int thread) {
      const int64_t part = item / sequences, s = item % sequences;
      if (part == heads * tiles)
        convolution_.write_windows(s, thread);
      else
        advance(s, part / tiles, part % tiles * kTileColumns, thread);
    });
    const int64_t width = heads * delta_.value_dim;
    each_row(pool, states_.tokens(), width, [&](int64_t t) {
      for (int64_t h = 0; h < heads; ++h)
        gate_head(output + t * width + h * delta_.value_dim, value(t, h),
                  at<T>(gate, t) + h * delta_.value_dim);
    });
    return true;
  }

 private:
  bool allocate(Memory& memory, int threads) {
    const int64_t rows = states_.tokens() * delta_.convolution.channels;
    const int64_t factors = states_.tokens() * 2 * delta_.value_heads;
    const int64_t tiles = threads * delta_.key_dim * kTileColumns;
    if (!memory.reserve(Memory::bytes<float>(rows) + Memory::bytes<float>(factors) +
                        Memory::bytes<float>(tiles) + convolution_.bytes(threads)))
      return false;
    rows_ = memory.take<float>(rows);
    factors_ = memory.take<float>(factors);
    tiles_ = memory.take<float>(tiles);
    convolution_.take(memory, threads);
    return true;
  }

  const float* query(int64_t token, int64_t head) const {
    const int64_t shared = delta_.value_heads / delta_.key_heads;
    return rows_ + token * delta_.convolution.channels + head / shared * delta_.key_dim;
  }
  const float* key(int64_t token, int64_t head) const {
    return query(token, head) + delta_.key_heads * delta_.key_dim;
  }
  // Values; the outputs replace them.
  float* value(int64_t token, int64_t head) const {
    return rows_ + token * delta_.convolution.channels + 2 * delta_.key_heads * delta_.key_dim +
           head * delta_.value_dim;
  }

  // Scales a head to a length.
  void normalize(float* head, float length) const {
    const float squares = mean_square(head, delta_.key_dim) * float(delta_.key_dim);
    scale_row(head, delta_.key_dim, length / std::sqrt(squares + 1e-6f));
  }

  // What each head keeps of its state, and its beta.
  void weigh(int64_t token, const T* beta, const T* decay) const {
    float* factors = factors_ + token * 2 * delta_.value_heads;
    for (int64_t h = 0; h < delta_.value_heads; ++h) {
      factors[2 * h] = std::exp(delta_.rates[h] * softplus(widen(decay[h]) + delta_.dt_bias[h]));
      factors[2 * h + 1] = 1 / (1 + std::exp(-widen(beta[h])));
    }
  }

  // Advances some columns of a head's state through a sequence's tokens.
  void advance(int64_t sequence, int64_t head, int64_t column, int thread) const {
    const int64_t rest = delta_.value_dim - column;
    const Tile shape{delta_.key_dim, smaller(rest, kTileColumns), delta_.value_dim,
                     kTileColumns};
    const int64_t first = head * delta_.key_dim * delta_.value_dim + column;
    const int64_t offset = states_.second() + first * int64_t(sizeof(float));
    float* tile = tiles_ + thread * delta_.key_dim * kTileColumns;
    states_.advance(shape, sequence, offset, tile, [&](int64_t begin, int64_t end) {
      scan(tile, head, column, shape.columns, begin, end);
    });
  }

  // One pass over the tile for each token: it finds the token's output and what the state knows of
  // the next key.
  void scan(float* tile, int64_t head, int64_t column, int64_t count, int64_t begin,
            int64_t end) const {
    if (begin == end) return;
    TileRow known = look_up(tile, key(begin, head));
    for (int64_t t = begin; t < end; ++t) {
      const float* factors = factors_ + (t * delta_.value_heads + head) * 2;
      const float* next_key = key(t + 1 < end ? t + 1 : t, head);
      float* values = value(t, head) + column;
      TileRow change = TileRow::of(values, count);
      for (int i = 0; i < kTileVectors; ++i)
        change.part[i] = (change.part[i] - known.part[i] * factors[0]) * factors[1];
      update(tile, factors[0], change, key(t, head), query(t, head), next_key, known)
          .put(values, count);
    }
  }

  TileRow look_up(const float* tile, const float* key) const {
    TileRow known{};
    for (int64_t k = 0; k < delta_.key_dim; ++k, tile += kTileColumns)
      for (int i = 0; i < kTileVectors; ++i) known.part[i] += load(tile + i * kLanes) * key[k];
    return known;
  }

  // Returns the output, and in `known` the look-up of the next key.
  TileRow update(float* tile, float keep, const TileRow& change, const float* key,
                 const float* query, const float* next_key, TileRow& known) const {
    TileRow output{}, next{};
    for (int64_t k = 0; k < delta_.key_dim; ++k, tile += kTileColumns)
      for (int i = 0; i < kTileVectors; ++i) {
        const Floats state = load(tile + i * kLanes) * keep + change.part[i] * key[k];
        store(tile + i * kLanes, state);
        output.part[i] += state * query[k];
        next.part[i] += state * next_key[k];
      }
    known = next;
    return output;
  }

  // The RMS norm of a head's output, times silu of its gate.
  void gate_head(T* to, const float* x, const T* gate) const {
    const int64_t width = delta_.value_dim;
    const float factor = 1 / std::sqrt(mean_square(x, width) + delta_.epsilon);
    for (int64_t i = 0; i < whole(width); i += kLanes)
      store(to + i, load(x + i) * factor * load(delta_.norm + i) * silu(load(gate + i)));
    for (int64_t i = whole(width); i < width; ++i)
      to[i] = narrow_to<T>(x[i] * factor * delta_.norm[i] * silu(widen(gate[i])));
  }

  const headrace_delta& delta_;
  const States& states_;
  Convolution<T> convolution_;
  float *rows_ = nullptr, *factors_ = nullptr, *tiles_ = nullptr;
};

template <class T>
bool gated_delta(headrace_executor& executor, const headrace_delta& delta,
                 const headrace_states& states, void* output, const headrace_rows& mixed,
                 const headrace_rows& gate, const headrace_rows& beta,
                 const headrace_rows& decay) {
  const States batch(states);
  return GatedDelta<T>(delta, batch, mixed).run(executor, static_cast<T*>(output), gate, beta, decay);
}

}  // namespace
}  // namespace headrace

int headrace_gated_delta(headrace_executor* executor, const headrace_delta* delta,
                         const headrace_states* states, void* output, const headrace_rows* mixed,
                         const headrace_rows* gate, const headrace_rows* beta,
                         const headrace_rows* decay, int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::gated_delta<headrace::bfloat16>
                             : &headrace::gated_delta<float>;
  return chosen(*executor, *delta, *states, output, *mixed, *gate, *beta, *decay) ? 0 : 1;
}
