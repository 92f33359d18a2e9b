// The plain C interface of a whole decoder step: everything from token ids to logits in one call.
// Python mirrors these structs field by field.
#pragma once

#include "attention.h"

// Weights as headrace_pack_weight lays them out; `scales` is null where they are not quantised.
struct headrace_linear {
  const void* weight;
  const float* scales;  // [outputs, padded]
  const float* bias;    // [outputs, padded], or null
  int64_t inputs;
  int64_t outputs;
};

// Norms are float32. query_norm and key_norm are null where heads are not normalised.
struct headrace_decoder_layer {
  const float* input_norm;
  const float* post_attention_norm;
  const float* query_norm;
  const float* key_norm;
  headrace_linear qkv;
  headrace_linear o;
  headrace_linear gate_up;  // headrace_panel() outputs at a time, gates before their ups
  headrace_linear down;
  int64_t window;
};

struct headrace_decoder {
  const headrace_decoder_layer* layers;
  const void* embedding;  // [vocab, hidden], bfloat16 or else float32
  const float* cos;       // [positions, head_dim / 2]
  const float* sin;
  const float* norm;
  headrace_linear lm_head;
  int64_t num_layers;
  int64_t hidden;
  int64_t inner;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t is_bfloat16;
  float epsilon;
};

// `caches` has one pointer a layer. `logits` [num_logits, logits_stride] are float32, of the tokens
// that logits_rows names; the stride covers the padded vocabulary.
struct headrace_step {
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* logits_rows;
  void* const* caches;
  float* logits;
  int64_t num_logits;
  int64_t logits_stride;
  headrace_batch batch;
};

struct headrace_executor;

// Threads and working memory of one decoder, for one call at a time. Null where memory ran out.
HEADRACE_EXPORT headrace_executor* headrace_executor_create(int64_t threads);
HEADRACE_EXPORT void headrace_executor_destroy(headrace_executor* executor);

// Returns 0, or 1 where memory ran out.
HEADRACE_EXPORT int headrace_forward(headrace_executor* executor, const headrace_decoder* decoder,
                                     const headrace_step* step);

// One layer by itself: output [count, outputs padded] in float32 of dense rows [count, inputs].
// Returns 0, or 1 where memory ran out.
HEADRACE_EXPORT int headrace_linear_forward(headrace_executor* executor,
                                            const headrace_linear* linear, float* output,
                                            const void* rows, int64_t count, int64_t is_bfloat16);

// Outputs of a panel: weights, scales and biases are padded to a multiple of it.
HEADRACE_EXPORT int64_t headrace_panel();

// Lays out `outputs` (padded) rows of weights, of `inputs` elements each; a null row is zeros.
// `scales` null keeps the type, else the weights become 8 bits wide and the scales are written.
HEADRACE_EXPORT void headrace_pack_weight(headrace_executor* executor, void* packed, float* scales,
                                          const void* const* rows, int64_t outputs, int64_t inputs,
                                          int64_t is_bfloat16);

// Index and value of each row's first largest element. NaN counts as larger than every number.
HEADRACE_EXPORT void headrace_argmax(headrace_executor* executor, int64_t* indices, float* values,
                                     const void* x, int64_t rows, int64_t width, int64_t stride,
                                     int64_t is_bfloat16);
