// A decoder's step on a pool of threads: embedding, layers, norm and logits without a return to
// Python. Pre-norm residual blocks with a gated MLP; the residual stream is always float32.
#include "decoder.h"

#include <new>

#include "executor.h"
#include "latent.h"
#include "packing.h"
#include "paged.h"
#include "router.h"

namespace headrace {
namespace {

// The shape of the experts of all layers.
headrace_experts experts_of(const headrace_decoder& decoder) {
  return {nullptr,
          nullptr,
          decoder.num_experts,
          decoder.experts_per_token,
          decoder.hidden,
          decoder.expert_inner,
          true,
          decoder.scaled_inputs,
          decoder.activation};
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
        qkv_stride_(padded(decoder.layers[0].qkv.outputs)),
        attended_width_(decoder.layers[0].o.inputs),
        router_(pool, decoder, step.batch.num_tokens),
        experts_(pool, experts_of(decoder), step.batch.num_tokens) {}

  bool run(Memory& memory) {
    if (!allocate(memory)) return false;
    embed();
    int64_t taps = 0;
    for (int64_t i = 0; i < decoder_.num_layers; ++i) {
      if (taps < step_.num_taps && step_.taps[taps] == i) tap(taps++);
      const headrace_batch& batch = step_.layers ? *step_.layers[i] : step_.batch;
      if (!run_layer(decoder_.layers[i], step_.caches[i], batch, i + 1 == decoder_.num_layers)) return false;
    }
    write_logits();
    return true;
  }

 private:
  bool allocate(Memory& memory) {
    const LatentSizes latent = latent_sizes();
    const int64_t widest = larger(larger(larger(hidden_, larger(query_, qkv_stride_)), decoder_.inner),
                                  larger(decoder_.expert_inner, latent.widest));
    const int64_t residuals = tokens_ + step_.num_logits;
    const int64_t scratch_rows = tokens_ * larger(decoder_.experts_per_token, 1);
    const int64_t outputs = has_output_norms() ? tokens_ * residual_stride() : 0;
    if (!memory.reserve(Memory::bytes<float>(residuals * residual_stride()) +
                        Memory::bytes<float>(outputs) + Memory::bytes<float>(tokens_) +
                        Memory::bytes<Element>(tokens_ * hidden_) +
                        Memory::bytes<Element>(tokens_ * qkv_stride_) +
                        Memory::bytes<Element>(2 * tokens_ * attended_width_) +
                        Memory::bytes<Element>(latent.queries) + Memory::bytes<Element>(latent.absorbed) +
                        Memory::bytes<Element>(latent.found) + Memory::bytes<char>(latent.scratch) +
                        Memory::bytes<Element>(tokens_ * padded(2 * decoder_.inner) / 2) +
                        Router<Math>::bytes(decoder_, tokens_) +
                        Experts<Math>::bytes(experts_of(decoder_), tokens_) +
                        Scratch::bytes(pool_.threads(), scratch_rows, widest)))
      return false;
    residual_ = memory.take<float>(residuals * residual_stride());
    output_ = memory.take<float>(outputs);
    shares_ = memory.take<float>(tokens_);
    normed_ = memory.take<Element>(tokens_ * hidden_);
    qkv_ = memory.take<Element>(tokens_ * qkv_stride_);
    attended_ = memory.take<Element>(2 * tokens_ * attended_width_);
    queries_ = memory.take<Element>(latent.queries);
    absorbed_ = memory.take<Element>(latent.absorbed);
    found_ = memory.take<Element>(latent.found);
    latent_scratch_ = memory.take<char>(latent.scratch);
    gated_ = memory.take<Element>(tokens_ * padded(2 * decoder_.inner) / 2);
    router_.take(memory);
    experts_.take(memory);
    scratch_.take(memory, pool_.threads(), scratch_rows, widest);
    return true;
  }

  // Elements that attention over latents needs, bytes of its working memory, and the elements of the
  // widest rows that its products read.
  struct LatentSizes {
    int64_t queries, absorbed, found, scratch, widest;
  };

  LatentSizes latent_sizes() const {
    const headrace_latent_layer* latent = decoder_.layers[0].latent;
    if (!latent) return {};
    const int64_t rank = latent->keys->outputs;
    return {latent->query.weight ? tokens_ * padded(latent->query.outputs) : 0, tokens_ * query_,
            tokens_ * decoder_.num_heads * rank,
            pool_.threads() * LatentAttention<Math>::scratch_bytes(decoder_.head_dim, rank),
            decoder_.num_heads * larger(latent->keys->inputs + decoder_.rotated, rank)};
  }

  // A model has them in all its layers, or in none.
  bool has_output_norms() const {
    const headrace_decoder_layer& layer = decoder_.layers[0];
    return layer.attention_output_norm || layer.mlp_output_norm;
  }

  int64_t residual_stride() const { return padded(hidden_); }

  template <class Body>
  void each_row(int64_t rows, int64_t width, const Body& body) {
    headrace::each_row(pool_, rows, width, body);
  }

  template <class Emit>
  void apply(const headrace_linear& linear, const headrace_linear* then, const Element* data,
             int64_t stride, int64_t rows, const Emit& emit) {
    apply_linear<Math>(pool_, linear, then, Rows<Element>{data, stride, rows}, scratch_, emit);
  }

  void embed() {
    const Element* table = static_cast<const Element*>(decoder_.embedding);
    each_row(tokens_, hidden_, [&](int64_t r) {
      float* to = residual_ + r * residual_stride();
      if (decoder_.embedding_panels)
        return unpack_output<Math>(decoder_.embedding_panels, step_.input_ids[r], hidden_,
                                   decoder_.embedding_scale, to);
      const Element* from = table + step_.input_ids[r] * hidden_;
      for (int64_t i = 0; i < hidden_; i += kLanes)
        store(to + i, load(from + i) * decoder_.embedding_scale);
    });
  }

  void tap(int64_t index) {
    each_row(tokens_, hidden_, [&](int64_t r) {
      std::memcpy(step_.tapped + (r * step_.num_taps + index) * hidden_, residual_ + r * residual_stride(),
                  sizeof(float) * hidden_);
    });
  }

  // Without a norm, the rounded residuals themselves.
  void normalize(int64_t rows, const float* weight) {
    each_row(rows, hidden_, [&](int64_t r) {
      const float* from = residual_ + r * residual_stride();
      Element* to = normed_ + r * hidden_;
      if (weight)
        normalize_row(to, from, weight, hidden_, decoder_.epsilon);
      else
        for (int64_t i = 0; i < hidden_; i += kLanes) store(to + i, load(from + i));
    });
  }

  bool run_layer(const headrace_decoder_layer& layer, void* cache, const headrace_batch& batch,
                 bool last) {
    normalize(tokens_, layer.input_norm);
    apply(layer.qkv, &layer.o, normed_, hidden_, tokens_, [&](int64_t row, int64_t panel, const Sums& sums) {
      store_panel(qkv_ + row * qkv_stride_, panel, sums);
    });
    const bool attends = layer.latent ? attend_to_latents(layer, cache, batch) : attend(layer, cache, batch);
    if (!attends) return false;
    const Element* attended = attended_;
    int64_t rows = tokens_;
    if (last) {
      attended = select_rows();
      rows = step_.num_logits;
    }
    add_output(layer.o, &layer.gate_up, attended, attended_width_, rows, layer.attention_output_norm,
               nullptr);
    normalize(rows, layer.mlp_norm);
    if (layer.experts_gate_up) run_experts(layer, rows);
    if (layer.gate_up.weight) run_mlp(layer, rows, last ? &decoder_.lm_head : &(&layer)[1].qkv);
    return true;
  }

  void run_experts(const headrace_decoder_layer& layer, int64_t rows) {
    router_.choose(layer, normed_, rows, scratch_, experts_.choices());
    experts_.compute(layer.experts_gate_up, layer.experts_down, normed_, rows, scratch_);
    experts_.add(residual_, rows, residual_stride());
  }

  void run_mlp(const headrace_decoder_layer& layer, int64_t rows, const headrace_linear* then) {
    const int64_t stride = gated_stride(layer.gate_up);
    apply(layer.gate_up, &layer.down, normed_, hidden_, rows, [&](int64_t row, int64_t panel, const Sums& sums) {
      store_gated(gated_ + row * stride, panel, sums, decoder_.activation);
    });
    if (layer.shared_gate)
      each_row(rows, hidden_, [&](int64_t r) {
        const float logit = dot(normed_ + r * hidden_, layer.shared_gate, hidden_);
        shares_[r] = 1 / (1 + exp2(splat(-logit * kLog2e))[0]);
      });
    add_output(layer.down, then, gated_, stride, rows, layer.mlp_output_norm,
               layer.shared_gate ? shares_ : nullptr);
  }

  // Adds a layer's output to the residuals: through a norm, or with each row times its share, if
  // these are not null.
  void add_output(const headrace_linear& linear, const headrace_linear* then, const Element* data,
                  int64_t stride, int64_t rows, const float* norm, const float* shares) {
    const int64_t width = residual_stride();
    float* to = norm ? output_ : residual_;
    if (!norm) {
      apply(linear, then, data, stride, rows, [&](int64_t row, int64_t panel, const Sums& sums) {
        add_panel(to + row * width, panel, sums, shares ? shares[row] : 1.0f);
      });
      return;
    }
    apply(linear, then, data, stride, rows, [&](int64_t row, int64_t panel, const Sums& sums) {
      store_panel(to + row * width, panel, sums);
    });
    each_row(rows, hidden_, [&](int64_t r) {
      add_normalized(residual_ + r * width, output_ + r * width, norm, hidden_, decoder_.epsilon);
    });
  }

  headrace_layer shape_of(const headrace_decoder_layer& layer) const {
    return {decoder_.num_heads,  decoder_.num_kv_heads, decoder_.head_dim,
            decoder_.block_size, layer.window,          decoder_.is_bfloat16,
            decoder_.kv_storage, decoder_.scale,        decoder_.attention_softcap,
            layer.key_scale,     layer.value_scale,     layer.sinks};
  }

  bool attend(const headrace_decoder_layer& layer, void* cache, const headrace_batch& batch) {
    const headrace_layer shape = shape_of(layer);
    PagedAttention<Math> attention(attended_, qkv_, qkv_stride_, cache, batch, shape);
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
    return prepared;
  }

  // By absorbed products, as models/decoder/latent.py explains.
  bool attend_to_latents(const headrace_decoder_layer& layer, void* cache, const headrace_batch& batch) {
    const headrace_latent_layer& latent = *layer.latent;
    const int64_t heads = decoder_.num_heads, dims = decoder_.head_dim, rotated = decoder_.rotated;
    const int64_t plain = latent.keys->inputs, rank = latent.keys->outputs, each = plain + rotated;
    const int64_t first = layer.qkv.outputs - dims, result = latent.values->outputs;
    const Element* queries = qkv_;
    int64_t stride = qkv_stride_;
    if (latent.query.weight) {
      each_row(tokens_, first, [&](int64_t r) {
        Element* row = qkv_ + r * qkv_stride_;
        normalize_row(row, row, latent.query_norm, first, decoder_.latent_epsilon);
      });
      stride = padded(latent.query.outputs);
      apply(latent.query, nullptr, qkv_, qkv_stride_, tokens_, [&](int64_t row, int64_t panel, const Sums& sums) {
        store_panel(queries_ + row * stride, panel, sums);
      });
      queries = queries_;
    }
    apply_heads(latent.keys, queries, each, stride, [&](int64_t head, int64_t row, int64_t panel, const Sums& sums) {
      store_outputs(absorbed_ + (row * heads + head) * dims, panel, rank, sums);
    });
    const headrace_layer shape = shape_of(layer);
    LatentAttention<Math> attention(found_, absorbed_, heads * dims, cache, rank, batch, shape);
    if (!attention.prepare(latent_scratch_)) return false;
    each_row(tokens_, heads * rotated + dims, [&](int64_t r) {
      const int64_t at = step_.positions[r] * rotated / 2;
      for (int64_t h = 0; h < heads; ++h) {
        Element* to = absorbed_ + (r * heads + h) * dims + rank;
        std::memcpy(to, queries + r * stride + h * each + plain, sizeof(Element) * rotated);
        if (layer.cos) turn(to, layer.cos + at, layer.sin + at);
      }
      Element* key = qkv_ + r * qkv_stride_ + first;
      normalize_row(key, key, latent.norm, rank, decoder_.latent_epsilon);
      if (layer.cos) turn(key + rank, layer.cos + at, layer.sin + at);
      attention.write(r, key);
    });
    pool_.run(attention.item_count, [&](int64_t item, int thread) { attention.compute(item, thread); });
    pool_.run(attention.merge_count,
              [&](int64_t item, int) { attention.merge(attention.merges[item]); });
    apply_heads(latent.values, found_, rank, heads * rank, [&](int64_t head, int64_t row, int64_t panel, const Sums& sums) {
      store_outputs(attended_ + row * attended_width_ + head * result, panel, result, sums);
    });
    return true;
  }

  // emit(head, row, panel, sums) for the products of heads, `each` elements of a row, with their own
  // layers of one shape.
  template <class Emit>
  void apply_heads(const headrace_linear* linears, const Element* data, int64_t each, int64_t stride,
                   const Emit& emit) {
    const Division division = divide<Math>(*linears, tokens_, pool_.threads());
    const auto all = scratch_.factors_of<Math>(pool_, Rows<Element>{data, stride, tokens_},
                                               each * decoder_.num_heads);
    pool_.run(division.items() * decoder_.num_heads, [&](int64_t item, int thread) {
      const int64_t head = item / division.items();
      const Rows<typename Math::Factor> rows{all.data + head * each, all.stride, tokens_};
      apply_piece<Math>(linears[head], rows, QuantRows{}, piece_of(division, item % division.items()),
                        nullptr, scratch_, thread,
                        [&](int64_t row, int64_t panel, const Sums& sums) { emit(head, row, panel, sums); });
    });
  }

  void rotate_heads(const headrace_decoder_layer& layer, int64_t row) {
    const int64_t dims = decoder_.head_dim, at = step_.positions[row] * (decoder_.rotated / 2);
    Element* head = qkv_ + row * qkv_stride_;
    if (decoder_.wide_qk_norm) {
      normalize_row(head, head, layer.query_norm, query_, decoder_.epsilon);
      normalize_row(head + query_, head + query_, layer.key_norm, key_value_, decoder_.epsilon);
    }
    if (layer.query_scales) scale_row(head, query_, layer.query_scales[step_.positions[row]]);
    for (int64_t h = 0; h < decoder_.num_heads + decoder_.num_kv_heads; ++h, head += dims) {
      const float* norm = h < decoder_.num_heads ? layer.query_norm : layer.key_norm;
      if (norm && !decoder_.wide_qk_norm) normalize_row(head, head, norm, dims, decoder_.epsilon);
      if (layer.cos) turn(head, layer.cos + at, layer.sin + at);
    }
  }

  void turn(Element* head, const float* cos, const float* sin) const {
    if (decoder_.interleaved)
      rotate_pairs(head, cos, sin, decoder_.rotated / 2);
    else
      rotate(head, cos, sin, decoder_.rotated / 2);
  }

  // Moves the attended rows and the residuals of the tokens that have logits after all other rows.
  const Element* select_rows() {
    const int64_t width = attended_width_;
    Element* chosen = attended_ + tokens_ * width;
    float* residual = residual_ + tokens_ * residual_stride();
    each_row(step_.num_logits, width + hidden_, [&](int64_t r) {
      const int64_t from = step_.logits_rows[r];
      std::memcpy(chosen + r * width, attended_ + from * width, sizeof(Element) * width);
      std::memcpy(residual + r * residual_stride(), residual_ + from * residual_stride(),
                  sizeof(float) * hidden_);
    });
    residual_ = residual;
    return chosen;
  }

  void write_logits() {
    normalize(step_.num_logits, decoder_.norm);
    const float cap = decoder_.logits_softcap;
    apply(decoder_.lm_head, &decoder_.layers[0].qkv, normed_, hidden_, step_.num_logits,
          [&](int64_t row, int64_t panel, const Sums& sums) {
            float* to = step_.logits + row * step_.logits_stride;
            store_panel(to, panel, cap > 0 ? capped(sums, cap) : sums);
          });
  }

  Pool& pool_;
  const headrace_decoder& decoder_;
  const headrace_step& step_;
  const int64_t tokens_, hidden_, query_, key_value_, qkv_stride_, attended_width_;
  float *residual_ = nullptr, *output_ = nullptr, *shares_ = nullptr;
  Element *normed_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *gated_ = nullptr;
  Element *queries_ = nullptr, *absorbed_ = nullptr, *found_ = nullptr;
  char* latent_scratch_ = nullptr;
  Router<Math> router_;
  Experts<Math> experts_;
  Scratch scratch_;
};

template <class Math, class Output>
bool run_linear(Pool& pool, Memory& memory, const headrace_linear& linear, void* output,
                int64_t stride, const void* rows, int64_t count) {
  if (!memory.reserve(Scratch::bytes(pool.threads(), count, linear.inputs))) return false;
  Scratch scratch;
  scratch.take(memory, pool.threads(), count, linear.inputs);
  const auto* data = static_cast<const typename Math::Element*>(rows);
  auto* to = static_cast<Output*>(output);
  apply_linear<Math>(pool, linear, nullptr, Rows<typename Math::Element>{data, linear.inputs, count},
                     scratch, [&](int64_t row, int64_t panel, const Sums& sums) {
                       store_outputs(to + row * stride, panel, stride, sums);
                     });
  return true;
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
                            void* output, int64_t stride, const void* rows, int64_t count,
                            int64_t is_bfloat16, int64_t rounded) {
  using namespace headrace;
  auto* chosen = &run_linear<Float32, float>;
  if (is_bfloat16) chosen = rounded ? &run_linear<BFloat16, bfloat16> : &run_linear<BFloat16, float>;
  return chosen(executor->pool, executor->memory, *linear, output, stride, rows, count) ? 0 : 1;
}

int64_t headrace_panel() { return headrace::kPanel; }

void headrace_pack_weight(headrace_executor* executor, void* packed, float* scales,
                          const void* const* rows, int64_t outputs, int64_t inputs,
                          int64_t is_bfloat16) {
  auto* chosen = is_bfloat16 ? &headrace::pack<headrace::BFloat16> : &headrace::pack<headrace::Float32>;
  chosen(executor->pool, packed, scales, rows, outputs, inputs);
}

void headrace_pack_int4(headrace_executor* executor, void* packed, const void* const* rows,
                         int64_t outputs, int64_t inputs) {
  using namespace headrace;
  const auto* from = reinterpret_cast<const uint8_t* const*>(rows);
  executor->pool.run(panels_of(outputs), [&](int64_t panel, int) {
    const int64_t at = panel * kPanel;
    pack_nibbles_panel(static_cast<uint8_t*>(packed) + at * inputs / 2, from + at, inputs);
  });
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
