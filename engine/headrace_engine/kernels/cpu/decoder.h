// The plain C interface of a whole decoder step: everything from token ids to logits in one call.
// Python mirrors these structs field by field.
#pragma once

#include "attention.h"

// A panel of weights: floats in the layout of headrace_pack_weight, or blocks as in a GGUF file, if
// `kind` is one of blocks.h.
struct headrace_packed_panel {
  const void* data;
  int64_t kind;
};

// Weights in the layout of headrace_pack_weight; `scales` is null if they are not quantised. With
// `zeros` they have the layout of headrace_pack_int4, and both are [inputs / group, outputs
// padded]. Weights with a group of 32 and no zeros have it too: they are 4-bit floats (e2m1), with
// scales for twice their values. With `panels`, one for each headrace_panel() outputs, there are no
// scales, and `weight` is where the first one is.
struct headrace_linear {
  const void* weight;
  const headrace_packed_panel* panels;  // or null
  const float* scales;  // [outputs, padded]
  const float* zeros;
  const float* bias;    // [outputs, padded], or null
  int64_t group;
  int64_t inputs;
  int64_t outputs;
};

// `kind` is 0 for SiLU, 1 for the tanh GELU, 2 for gpt-oss's clamped SwiGLU, with alpha and limit,
// each times the ups; 3 for the square of ReLU, without gates.
struct headrace_activation {
  int64_t kind;
  float alpha;
  float limit;
};

// The experts of one layer: `count` layers of one shape each. Outputs of gate_up are gates, then
// ups; with `interleaved` headrace_panel() of them at a time, gates before their ups. With
// `scaled_inputs` weights multiply the experts' rows, not their results.
struct headrace_experts {
  const headrace_linear* gate_up;
  const headrace_linear* down;
  int64_t count;
  int64_t per_token;
  int64_t hidden;
  int64_t inner;
  int64_t interleaved;
  int64_t scaled_inputs;
  headrace_activation activation;
};

// A layer's attention over latents (MLA), by products with each head's own layer: `keys` make latents
// of queries, `values` the head's result of attended latents. The layer's first product makes rows of
// queries, latent and rotated key. If `query` has weights, it makes the queries of the first part,
// which query_norm normalises; otherwise that is null. `norm` is the latents'.
struct headrace_latent_layer {
  const headrace_linear* keys;
  const headrace_linear* values;
  headrace_linear query;
  const float* query_norm;
  const float* norm;
};

// Norms are float32, and null if the model has none there: output norms come before the residual
// sums; query and key norms are of each head, or with wide_qk_norm of all heads together. cos and
// sin [positions, rotated / 2] are the layer's own, and null if it is not rotated. query_scales
// [positions] multiplies queries; it may be null.
//
// gate_up and down are the MLP, or the expert that computes every row. Its result is multiplied by
// the sigmoid of the row times shared_gate [hidden], or by 1 if that is null; without weights
// there is none. experts_gate_up and experts_down have num_experts layers of one shape, or are
// null. correction [num_experts] is added to the scores that choose experts; it may be null.
// `latent` is null if attention has keys and values.
struct headrace_decoder_layer {
  const float* input_norm;
  const float* attention_output_norm;
  const float* mlp_norm;
  const float* mlp_output_norm;
  const float* query_norm;
  const float* key_norm;
  const float* query_scales;
  const float* cos;
  const float* sin;
  const float* shared_gate;
  const float* correction;
  const headrace_linear* experts_gate_up;
  const headrace_linear* experts_down;
  headrace_linear qkv;
  headrace_linear o;
  headrace_linear gate_up;  // headrace_panel() outputs at a time, gates before their ups
  headrace_linear down;
  headrace_linear router;  // not quantised
  int64_t window;
  float key_scale;  // for caches in 8-bit floats
  float value_scale;
  const float* sinks;  // as in headrace_layer
  const headrace_latent_layer* latent;
};

// With latents there is one KV head, and head_dim is a latent with the rotated key. `inner` is the largest inner size of an MLP or of an expert that computes every row. Softcaps
// are 0 if there are none. `activation` has gates. With plain_routing experts are chosen by the
// softmax of their logits; otherwise scores are that softmax or with `sigmoid` the logistic
// function. A group of adjacent experts counts by the sum of its group_best (1 or 2) best corrected
// scores; only those of the kept_groups best of at most 64 groups are chosen. Weights are the
// scores, times expert_factor.
struct headrace_decoder {
  const headrace_decoder_layer* layers;
  const void* embedding;  // [vocab, hidden], bfloat16 or else float32
  const headrace_packed_panel* embedding_panels;  // or null; used instead
  const float* norm;
  headrace_linear lm_head;
  int64_t num_layers;
  int64_t hidden;
  int64_t inner;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t rotated;  // leading elements of a head that are rotated
  int64_t interleaved;  // whether neighbours are rotated together, else halves of `rotated`
  int64_t wide_qk_norm;
  int64_t num_experts;
  int64_t experts_per_token;
  int64_t expert_inner;
  int64_t renormalize;  // whether the chosen experts' weights are scaled to a sum of 1
  int64_t plain_routing;
  int64_t sigmoid;
  int64_t expert_groups;
  int64_t kept_groups;
  int64_t group_best;
  int64_t scaled_inputs;  // whether weights multiply the experts' rows, not their results
  headrace_activation activation;
  int64_t block_size;
  int64_t is_bfloat16;
  int64_t kv_storage;  // as in headrace_layer
  float epsilon;
  float scale;  // of attention scores
  float latent_epsilon;  // of the norms of headrace_latent_layer
  float attention_softcap;
  float logits_softcap;
  float embedding_scale;
  float expert_factor;
};

// `caches` has one pointer a layer. So has `layers` if layers have different block tables and
// slots; otherwise it is null, and `batch` serves all. `logits` [num_logits, logits_stride] are
// float32, of the tokens that logits_rows names; the stride covers the padded vocabulary. `tapped`
// [tokens, num_taps, hidden] gets the residuals that the layers `taps`, ascending, read.
struct headrace_step {
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* logits_rows;
  void* const* caches;
  float* logits;
  int64_t num_logits;
  int64_t logits_stride;
  headrace_batch batch;
  const headrace_batch* const* layers;
  const int64_t* taps;
  float* tapped;
  int64_t num_taps;
};

struct headrace_executor;

// Threads and working memory of one decoder, for one call at a time. Null if memory ran out.
HEADRACE_EXPORT headrace_executor* headrace_executor_create(int64_t threads);
HEADRACE_EXPORT void headrace_executor_destroy(headrace_executor* executor);

// Returns 0, or 1 if memory ran out.
HEADRACE_EXPORT int headrace_forward(headrace_executor* executor, const headrace_decoder* decoder,
                                     const headrace_step* step);

// Computes one layer alone: output [count, stride] of dense rows [count, inputs], in float32, or if
// `rounded` in the rows' type. The stride is a multiple of 16 that covers the outputs and not more
// than their panels. Returns 0, or 1 if memory ran out.
HEADRACE_EXPORT int headrace_linear_forward(headrace_executor* executor,
                                            const headrace_linear* linear, void* output,
                                            int64_t stride, const void* rows, int64_t count,
                                            int64_t is_bfloat16, int64_t rounded);

// Computes the experts of one layer: output [rows, hidden] of x [rows, hidden], both dense, and of
// each row's experts and their weights, [rows, per_token]. Experts from `count` on add nothing.
// Returns 0, or 1 if memory ran out.
HEADRACE_EXPORT int headrace_experts_forward(headrace_executor* executor,
                                             const headrace_experts* experts, void* output,
                                             const void* x, const int64_t* chosen,
                                             const float* weights, int64_t rows,
                                             int64_t is_bfloat16);

// Outputs of a panel: weights, scales and biases are padded to a multiple of it.
HEADRACE_EXPORT int64_t headrace_panel();

// Lays out `outputs` (padded) rows of weights, of `inputs` elements each; a null row is zeros.
// `scales` null keeps the type; otherwise weights are rounded to 8 bits and the scales are
// written.
HEADRACE_EXPORT void headrace_pack_weight(headrace_executor* executor, void* packed, float* scales,
                                          const void* const* rows, int64_t outputs, int64_t inputs,
                                          int64_t is_bfloat16);

// Lays out `outputs` (padded) rows of `inputs` 4-bit integers, a byte each; a null row is zeros.
HEADRACE_EXPORT void headrace_pack_int4(headrace_executor* executor, void* packed,
                                         const void* const* rows, int64_t outputs,
                                         int64_t inputs);

// Bytes of a panel of this kind.
HEADRACE_EXPORT int64_t headrace_panel_bytes(int64_t kind, int64_t inputs, int64_t is_bfloat16);

// Lays out rows of weights, headrace_panel() for each of `count` panels, as stored in a GGUF file;
// those of a panel of floats are bfloat16 or else float32. A null row is zeros.
HEADRACE_EXPORT void headrace_pack_panels(headrace_executor* executor, const headrace_packed_panel* panels,
                                          int64_t count, const void* const* rows, int64_t inputs,
                                          int64_t is_bfloat16);

// Writes `count` outputs of panels as rows [count, inputs] of float32.
HEADRACE_EXPORT void headrace_unpack_outputs(headrace_executor* executor,
                                             const headrace_packed_panel* panels, float* rows,
                                             const int64_t* outputs, int64_t count, int64_t inputs,
                                             int64_t is_bfloat16);

// Index and value of each row's first largest element. NaN is larger than every number.
HEADRACE_EXPORT void headrace_argmax(headrace_executor* executor, int64_t* indices, float* values,
                                     const void* x, int64_t rows, int64_t width, int64_t stride,
                                     int64_t is_bfloat16);
