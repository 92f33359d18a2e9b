// The plain C interface of recurrent layers. Python mirrors these structs field by field.
#pragma once

#include "export.h"

struct headrace_executor;

// The states of one layer in blocks of the KV cache, and the ragged batch that advances them
// (core/recurrent_state.py). A block's bytes are those of its pages, one after the other; unused
// pages have 0 bytes. A state's first tensor begins at byte 0, its second one at `second`.
// Sequence s has tokens [token_start[s], token_start[s + 1]) and runs [run_start[s],
// run_start[s + 1]). Run r ends before token run_end[r]; the state after it is written to the rows
// writes[write_start[r]] up to writes[write_start[r + 1]] of `targets`. Rows of `sources` and
// `targets` are `stride` elements apart.
struct headrace_states {
  void* pages[2];
  int64_t page_bytes[2];
  int64_t second;
  const int64_t* sources;
  const int64_t* targets;
  int64_t stride;
  const uint8_t* fresh;
  const int64_t* token_start;
  const int64_t* run_start;
  const int64_t* run_end;
  const int64_t* write_start;
  const int64_t* writes;
  int64_t num_seqs;
  int64_t num_tokens;
};

// Rows of a batch; they are `stride` elements apart.
struct headrace_rows {
  const void* data;
  int64_t stride;
};

// A convolution of each channel over `size` positions: weight [size][channels], bias [channels] or
// null. Its state is the first tensor [channels][size - 1], in the type of the rows.
struct headrace_convolution {
  const float* weight;
  const float* bias;
  int64_t channels;
  int64_t size;
};

// A gated delta net: channels are queries and keys [key_heads][key_dim], then values
// [value_heads][value_dim]. rates and dt_bias [value_heads], norm [value_dim]. Its state is the
// second tensor, float32 [value_heads][key_dim][value_dim].
struct headrace_delta {
  headrace_convolution convolution;
  const float* rates;
  const float* dt_bias;
  const float* norm;
  int64_t key_heads;
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  float epsilon;
};

// Writes output [tokens][value_heads * value_dim], dense, from the rows mixed (channels), gate
// (value_heads * value_dim), beta and decay (value_heads). The type of all is bfloat16, or else
// float32. Returns 0, or 1 if memory ran out.
HEADRACE_EXPORT int headrace_gated_delta(headrace_executor* executor, const headrace_delta* delta,
                                         const headrace_states* states, void* output,
                                         const headrace_rows* mixed, const headrace_rows* gate,
                                         const headrace_rows* beta, const headrace_rows* decay,
                                         int64_t is_bfloat16);

// A Mamba-2 layer: channels are values [heads][head_dim], then B and C [groups][state_size]. rates,
// dt_bias and skip [heads]; norm [heads * head_dim], over each group of heads, or null. The gate is
// applied after the norm, or before it unless norm_first. Its state is the second tensor, float32
// [heads][head_dim][state_size].
struct headrace_mamba2 {
  headrace_convolution convolution;
  const float* rates;
  const float* dt_bias;
  const float* skip;
  const float* norm;
  int64_t heads;
  int64_t head_dim;
  int64_t groups;
  int64_t state_size;
  int64_t norm_first;
  float epsilon;
};

// Writes output [tokens][heads * head_dim], dense, from the rows mixed (channels), gate
// (heads * head_dim) and steps (heads), like headrace_gated_delta.
HEADRACE_EXPORT int headrace_state_space(headrace_executor* executor, const headrace_mamba2* mamba,
                                         const headrace_states* states, void* output,
                                         const headrace_rows* mixed, const headrace_rows* gate,
                                         const headrace_rows* steps, int64_t is_bfloat16);

// Writes output [tokens][channels], dense: a convolution of x, or with gates of before * x, times
// the gate after; with `silu`, silu of it. `before` and `after` are null together.
HEADRACE_EXPORT int headrace_convolve(headrace_executor* executor,
                                      const headrace_convolution* convolution,
                                      const headrace_states* states, void* output,
                                      const headrace_rows* x, const headrace_rows* before,
                                      const headrace_rows* after, int64_t silu,
                                      int64_t is_bfloat16);

// The selective scan of a Mamba layer: rates [channels][stride], whose rows are padded with zeros
// to a multiple of 16 elements; skip [channels]. Its state is the second tensor, float32
// [channels][state_size].
struct headrace_mamba {
  const float* rates;
  const float* skip;
  int64_t channels;
  int64_t state_size;
  int64_t stride;
};

// Writes output [tokens][channels], dense, from the rows values, steps and gate (channels), and b
// and c (state_size), like headrace_gated_delta.
HEADRACE_EXPORT int headrace_selective_scan(headrace_executor* executor,
                                            const headrace_mamba* mamba,
                                            const headrace_states* states, void* output,
                                            const headrace_rows* values, const headrace_rows* steps,
                                            const headrace_rows* gate, const headrace_rows* b,
                                            const headrace_rows* c, int64_t is_bfloat16);
