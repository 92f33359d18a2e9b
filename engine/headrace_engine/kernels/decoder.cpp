// A decoder's step on a pool of threads: embedding, layers, norm and logits without a return to
// Python. Pre-norm residual blocks with a gated MLP; the residual stream is float32 throughout.
#include "decoder.h"

#include <cstdlib>
#include <new>

#include "linear.h"
#include "paged.h"
#include "pool.h"
#include "rows.h"

namespace headrace {
namespace {

// Rows with fewer elements than this are not worth waking a helper for.
constexpr int64_t kSerialElements = 4096;
constexpr int64_t kAlignment = 64;

// Memory that grows to what the largest step so far has needed.
class Memory {
 public:
  ~Memory() { std::free(begin_); }

  bool reserve(int64_t bytes) {
    used_ = 0;
    if (bytes <= size_) return true;
    std::free(begin_);
    size_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    begin_ = static_cast<char*>(std::aligned_alloc(kAlignment, size_));
    if (!begin_) size_ = 0;
    return begin_ != nullptr;
  }

  // The next `count` elements; `reserve` has seen to it that there are so many.
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(begin_ + used_);
    used_ += bytes<T>(count);
    return taken;
  }

  template <class T>
  static int64_t bytes(int64_t count) {
    return (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  char* begin_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

inline int64_t padded(int64_t outputs) { return panels_of(outputs) * kPanel; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Calls body(row) for each row, on the pool where that is worth it.
template <class Body>
void each_row(Pool& pool, int64_t rows, int64_t width, const Body& body) {
  const int64_t block = kSerialElements / width + 1, blocks = (rows + block - 1) / block;
  pool.run(blocks, [&](int64_t item, int) {
    const int64_t end = (item + 1) * block < rows ? (item + 1) * block : rows;
    for (int64_t r = item * block; r < end; ++r) body(r);
  });
}

// What products need beside rows and weights.
struct Scratch {
  float *factors = nullptr, *scales = nullptr;
  int8_t* data = nullptr;
  int32_t* sums = nullptr;

  static int64_t bytes(int threads, int64_t rows, int64_t widest) {
    return Memory::bytes<float>(threads * kRows * widest) + Memory::bytes<int8_t>(rows * widest) +
           Memory::bytes<float>(rows * groups_of(widest)) +
           Memory::bytes<int32_t>(rows * groups_of(widest));
  }

  void take(Memory& memory, int threads, int64_t rows, int64_t widest) {
    factors = memory.take<float>(threads * kRows * widest);
    data = memory.take<int8_t>(rows * widest);
    scales = memory.take<float>(rows * groups_of(widest));
    sums = memory.take<int32_t>(rows * groups_of(widest));
  }
};

template <class Math, class Emit>
void apply_linear(Pool& pool, const headrace_linear& linear, const headrace_linear* then,
                  const Rows<typename Math::Element>& rows, const Scratch& scratch,
                  const Emit& emit) {
  using Element = typename Math::Element;
  const auto biased = [&](int64_t row, int64_t panel, Sums& sums) {
    if (linear.bias)
      for (int c = 0; c < kColumns; ++c) sums.at[c] += load(linear.bias + panel * kPanel + c * kLanes);
    emit(row, panel, sums);
  };
  const int64_t inputs = linear.inputs, groups = groups_of(inputs);
  if (!linear.scales) {
    multiply<Math>(pool, rows, static_cast<const Element*>(linear.weight), inputs, linear.outputs,
                   then ? then->weight : nullptr, scratch.factors, biased);
    return;
  }
  each_row(pool, rows.count, inputs, [&](int64_t r) {
    quantize_row(rows.data + r * rows.stride, inputs, scratch.data + r * inputs,
                 scratch.scales + r * groups, scratch.sums + r * groups);
  });
  multiply_quant(pool, QuantRows{scratch.data, scratch.scales, scratch.sums, inputs, groups, rows.count},
                 static_cast<const uint8_t*>(linear.weight), linear.scales, inputs, linear.outputs,
                 biased);
}

template <class Math>
class Step {
 public:
  using Element = typename Math::Element;

  Step(Pool& pool, const headrace_decoder& decoder, const headrace_step& step)
      : pool_(pool),
        decoder_(decoder),
        step_(step),
        tokens_(step.batch.num_tokens),
        hidden_(decoder.hidden),
        query_(decoder.num_heads * decoder.head_dim),
        key_value_(decoder.num_kv_heads * decoder.head_dim),
        qkv_stride_(padded(query_ + 2 * key_value_)) {}

  bool run(Memory& memory) {
    if (!allocate(memory)) return false;
    embed();
    for (int64_t i = 0; i < decoder_.num_layers; ++i)
      if (!run_layer(decoder_.layers[i], step_.caches[i], i + 1 == decoder_.num_layers)) return false;
    write_logits();
    return true;
  }

 private:
  bool allocate(Memory& memory) {
    const int64_t widest = larger(larger(hidden_, query_), decoder_.inner);
    const int64_t residuals = tokens_ + step_.num_logits;
    if (!memory.reserve(Memory::bytes<float>(residuals * padded(hidden_)) +
                        Memory::bytes<Element>(tokens_ * hidden_) +
                        Memory::bytes<Element>(tokens_ * qkv_stride_) +
                        Memory::bytes<Element>(2 * tokens_ * query_) +
                        Memory::bytes<Element>(tokens_ * gated_stride()) +
                        Scratch::bytes(pool_.threads(), tokens_, widest)))
      return false;
    residual_ = memory.take<float>(residuals * padded(hidden_));
    normed_ = memory.take<Element>(tokens_ * hidden_);
    qkv_ = memory.take<Element>(tokens_ * qkv_stride_);
    attended_ = memory.take<Element>(2 * tokens_ * query_);
    gated_ = memory.take<Element>(tokens_ * gated_stride());
    scratch_.take(memory, pool_.threads(), tokens_, widest);
    return true;
  }

  int64_t gated_stride() const { return padded(2 * decoder_.inner) / 2; }
  int64_t residual_stride() const { return padded(hidden_); }

  template <class Body>
  void each_row(int64_t rows, int64_t width, const Body& body) {
    headrace::each_row(pool_, rows, width, body);
  }

  // emit(row, panel, sums) for the product of rows with a layer's weights, its bias added. `then` is
  // applied next: its first weights are fetched ahead.
  template <class Emit>
  void apply(const headrace_linear& linear, const headrace_linear* then, const Element* data,
             int64_t stride, int64_t rows, const Emit& emit) {
    apply_linear<Math>(pool_, linear, then, Rows<Element>{data, stride, rows}, scratch_, emit);
  }

  void embed() {
    const Element* table = static_cast<const Element*>(decoder_.embedding);
    each_row(tokens_, hidden_, [&](int64_t r) {
      const Element* from = table + step_.input_ids[r] * hidden_;
      float* to = residual_ + r * residual_stride();
      for (int64_t i = 0; i < hidden_; i += kLanes) store(to + i, load(from + i));
    });
  }

  void normalize(int64_t rows, const float* weight) {
    each_row(rows, hidden_, [&](int64_t r) {
      normalize_row(normed_ + r * hidden_, residual_ + r * residual_stride(), weight, hidden_,
                    decoder_.epsilon);
    });
  }

  bool run_layer(const headrace_decoder_layer& layer, void* cache, bool last) {
    normalize(tokens_, layer.input_norm);
    apply(layer.qkv, &layer.o, normed_, hidden_, tokens_, [&](int64_t row, int64_t panel, const Sums& sums) {
      Element* to = qkv_ + row * qkv_stride_ + panel * kPanel;
      for (int c = 0; c < kColumns; ++c) store(to + c * kLanes, sums.at[c]);
    });
    if (!attend(layer, cache)) return false;
    const Element* attended = attended_;
    int64_t rows = tokens_;
    if (last) {
      attended = select_rows();
      rows = step_.num_logits;
    }
    apply(layer.o, &layer.gate_up, attended, query_, rows, [&](int64_t row, int64_t panel, const Sums& sums) {
      add_residual(row, panel, sums);
    });
    normalize(rows, layer.post_attention_norm);
    apply(layer.gate_up, &layer.down, normed_, hidden_, rows, [&](int64_t row, int64_t panel, const Sums& sums) {
      Element* to = gated_ + row * gated_stride() + panel * (kPanel / 2);
      for (int c = 0; c < kColumns / 2; ++c)
        store(to + c * kLanes, silu(sums.at[c]) * sums.at[c + kColumns / 2]);
    });
    apply(layer.down, last ? &decoder_.lm_head : &(&layer)[1].qkv, gated_, gated_stride(), rows,
          [&](int64_t row, int64_t panel, const Sums& sums) { add_residual(row, panel, sums); });
    return true;
  }

  void add_residual(int64_t row, int64_t panel, const Sums& sums) {
    float* to = residual_ + row * residual_stride() + panel * kPanel;
    for (int c = 0; c < kColumns; ++c)
      store(to + c * kLanes, load(to + c * kLanes) + sums.at[c]);
  }

  bool attend(const headrace_decoder_layer& layer, void* cache) {
    const headrace_layer shape = {decoder_.num_heads,  decoder_.num_kv_heads, decoder_.head_dim,
                                  decoder_.block_size, layer.window,          decoder_.is_bfloat16,
                                  1 / __builtin_sqrtf(float(decoder_.head_dim)), 0};
    PagedAttention<Math> attention{attended_,
                                   qkv_,
                                   qkv_stride_,
                                   Cache<Math>(static_cast<Element*>(cache), shape),
                                   step_.batch,
                                   shape,
                                   ScoreScale(shape.scale, 0),
                                   int(decoder_.head_dim),
                                   int(decoder_.num_heads / decoder_.num_kv_heads)};
    const bool prepared = attention.prepare(pool_.threads());
    if (prepared) {
      each_row(tokens_, query_ + 2 * key_value_, [&](int64_t r) {
        rotate_heads(layer, r);
        const Element* key = qkv_ + r * qkv_stride_ + query_;
        attention.write(r, key, key + key_value_);
      });
      pool_.run(attention.item_count, [&](int64_t item, int thread) {
        attention.compute(item, thread, pool_.threads());
      });
      pool_.run(attention.merge_count,
                [&](int64_t item, int) { attention.merge(attention.merges[item]); });
    }
    attention.release();
    return prepared;
  }

  void rotate_heads(const headrace_decoder_layer& layer, int64_t row) {
    const int64_t dims = decoder_.head_dim, half = dims / 2;
    const float *cos = decoder_.cos + step_.positions[row] * half,
                *sin = decoder_.sin + step_.positions[row] * half;
    Element* head = qkv_ + row * qkv_stride_;
    for (int64_t h = 0; h < decoder_.num_heads + decoder_.num_kv_heads; ++h, head += dims) {
      const float* norm = h < decoder_.num_heads ? layer.query_norm : layer.key_norm;
      if (norm) normalize_row(head, head, norm, dims, decoder_.epsilon);
      rotate(head, cos, sin, half);
    }
  }

  // Moves the attended rows and the residuals of the tokens that have logits behind all the others.
  const Element* select_rows() {
    Element* chosen = attended_ + tokens_ * query_;
    float* residual = residual_ + tokens_ * residual_stride();
    each_row(step_.num_logits, query_ + hidden_, [&](int64_t r) {
      const int64_t from = step_.logits_rows[r];
      std::memcpy(chosen + r * query_, attended_ + from * query_, sizeof(Element) * query_);
      std::memcpy(residual + r * residual_stride(), residual_ + from * residual_stride(),
                  sizeof(float) * hidden_);
    });
    residual_ = residual;
    return chosen;
  }

  void write_logits() {
    normalize(step_.num_logits, decoder_.norm);
    apply(decoder_.lm_head, &decoder_.layers[0].qkv, normed_, hidden_, step_.num_logits,
          [&](int64_t row, int64_t panel, const Sums& sums) {
            float* to = step_.logits + row * step_.logits_stride + panel * kPanel;
            for (int c = 0; c < kColumns; ++c) store(to + c * kLanes, sums.at[c]);
          });
  }

  Pool& pool_;
  const headrace_decoder& decoder_;
  const headrace_step& step_;
  const int64_t tokens_, hidden_, query_, key_value_, qkv_stride_;
  float* residual_ = nullptr;
  Element *normed_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *gated_ = nullptr;
  Scratch scratch_;
};

template <class Math>
bool run_linear(Pool& pool, Memory& memory, const headrace_linear& linear, float* output,
                const void* rows, int64_t count) {
  if (!memory.reserve(Scratch::bytes(pool.threads(), count, linear.inputs))) return false;
  Scratch scratch;
  scratch.take(memory, pool.threads(), count, linear.inputs);
  const auto* data = static_cast<const typename Math::Element*>(rows);
  const int64_t stride = padded(linear.outputs);
  apply_linear<Math>(pool, linear, nullptr, Rows<typename Math::Element>{data, linear.inputs, count},
                     scratch, [&](int64_t row, int64_t panel, const Sums& sums) {
                       float* to = output + row * stride + panel * kPanel;
                       for (int c = 0; c < kColumns; ++c) store(to + c * kLanes, sums.at[c]);
                     });
  return true;
}

// One panel of weights in the kernels' layout.
template <class Element, int kPack>
void pack_panel(Element* to, const Element* const* rows, int64_t inputs) {
  for (int column = 0; column < kPanel; ++column)
    for (int64_t k = 0; k < inputs; k += kPack)
      for (int i = 0; i < kPack; ++i)
        to[(k * kPanel) + column * kPack + i] = rows[column] ? rows[column][k + i] : Element{};
}

// As pack_panel, in 8 bits: the largest weight of an output becomes 127.
template <class Element>
void pack_quant_panel(uint8_t* to, float* scales, const Element* const* rows, int64_t inputs) {
  for (int column = 0; column < kPanel; ++column) {
    float bound = 0;
    for (int64_t k = 0; rows[column] && k < inputs; ++k) {
      const float x = __builtin_fabsf(widen(rows[column][k]));
      bound = x > bound ? x : bound;
    }
    scales[column] = bound / 127;
    const float inverse = bound > 0 ? 127 / bound : 0;
    for (int64_t k = 0; k < inputs; ++k) {
      const float x = rows[column] ? widen(rows[column][k]) * inverse : 0;
      to[k / kQuantPack * kPanel * kQuantPack + column * kQuantPack + k % kQuantPack] =
          uint8_t(int(__builtin_rintf(x)) + kQuantZero);
    }
  }
}

template <class Math>
void pack(Pool& pool, void* packed, float* scales, const void* const* rows, int64_t outputs,
          int64_t inputs) {
  using Element = typename Math::Element;
  const Element* const* from = reinterpret_cast<const Element* const*>(rows);
  pool.run(panels_of(outputs), [&](int64_t panel, int) {
    const int64_t at = panel * kPanel;
    if (scales)
      pack_quant_panel(static_cast<uint8_t*>(packed) + at * inputs, scales + at, from + at, inputs);
    else
      pack_panel<Element, Math::kPack>(static_cast<Element*>(packed) + at * inputs, from + at,
                                       inputs);
  });
}

template <class T>
void argmax(Pool& pool, int64_t* indices, float* values, const T* x, int64_t rows, int64_t width,
            int64_t stride) {
  pool.run(rows, [&](int64_t r, int) {
    indices[r] = find_largest(x + r * stride, width);
    values[r] = widen(x[r * stride + indices[r]]);
  });
}

}  // namespace
}  // namespace headrace

struct headrace_executor {
  headrace::Pool pool;
  headrace::Memory memory;
  explicit headrace_executor(int threads) : pool(threads) {}
};

headrace_executor* headrace_executor_create(int64_t threads) {
  return new (std::nothrow) headrace_executor(int(threads));
}

void headrace_executor_destroy(headrace_executor* executor) { delete executor; }

int headrace_forward(headrace_executor* executor, const headrace_decoder* decoder,
                     const headrace_step* step) {
  using namespace headrace;
  const bool done = decoder->is_bfloat16
                        ? Step<BFloat16>(executor->pool, *decoder, *step).run(executor->memory)
                        : Step<Float32>(executor->pool, *decoder, *step).run(executor->memory);
  return done ? 0 : 1;
}

int headrace_linear_forward(headrace_executor* executor, const headrace_linear* linear,
                            float* output, const void* rows, int64_t count, int64_t is_bfloat16) {
  using namespace headrace;
  auto* chosen = is_bfloat16 ? &run_linear<BFloat16> : &run_linear<Float32>;
  return chosen(executor->pool, executor->memory, *linear, output, rows, count) ? 0 : 1;
}

int64_t headrace_panel() { return headrace::kPanel; }

void headrace_pack_weight(headrace_executor* executor, void* packed, float* scales,
                          const void* const* rows, int64_t outputs, int64_t inputs,
                          int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::pack<headrace::BFloat16> : &headrace::pack<headrace::Float32>;
  chosen(executor->pool, packed, scales, rows, outputs, inputs);
}

void headrace_argmax(headrace_executor* executor, int64_t* indices, float* values, const void* x,
                     int64_t rows, int64_t width, int64_t stride, int64_t is_bfloat16) {
  using headrace::bfloat16;
  if (is_bfloat16)
    headrace::argmax(executor->pool, indices, values, static_cast<const bfloat16*>(x), rows, width,
                     stride);
  else
    headrace::argmax(executor->pool, indices, values, static_cast<const float*>(x), rows, width,
                     stride);
}
