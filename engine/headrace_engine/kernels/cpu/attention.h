// The plain C interface of paged attention. Python mirrors these structs field by field.
#pragma once

#include "export.h"

// A ragged batch; AttentionMetadata (core/attention_backend.py) describes each array.
struct headrace_batch {
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_tables;
  const int64_t* slots;
  int64_t num_seqs;
  int64_t num_tokens;
  int64_t table_stride;
};

// softcap 0 and window 0 mean none. A window below 0 is a chunk: a position sees the positions since
// the last multiple of -window. The type is bfloat16, or else float32. The cache stores it; with
// storage 1 and 2 the cache stores 8-bit floats (fp8.h): keys divided by key_scale and values
// divided by value_scale. `sinks` has a logit of each head that is part of its softmax but has no
// value, or is null.
struct headrace_layer {
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t block_size;
  int64_t window;
  int64_t is_bfloat16;
  int64_t storage;
  float scale;
  float softcap;
  float key_scale;
  float value_scale;
  const float* sinks;
};

// Rows of query, key and value are `*_stride` elements apart, their heads adjacent. Returns 0, or
// 1 if memory ran out.
HEADRACE_EXPORT int headrace_paged_attention(void* output, const void* query, const void* key,
                                             const void* value, void* cache, int64_t query_stride,
                                             int64_t key_stride, int64_t value_stride,
                                             const headrace_batch* batch,
                                             const headrace_layer* layer);

// Attention to latents [tokens][head_dim], the keys of all heads, whose first `rank` elements are
// the values: output [tokens][num_heads][rank], dense. The cache is [blocks][block_size][head_dim]
// of keys divided by key_scale. `num_kv_heads` is 1, head_dim a multiple of 2, rank one of 16, at
// most 1024. Returns 0, or 1 if memory ran out.
HEADRACE_EXPORT int headrace_latent_attention(void* output, const void* query, const void* latents,
                                              void* cache, int64_t query_stride,
                                              int64_t latent_stride, int64_t rank,
                                              const headrace_batch* batch,
                                              const headrace_layer* layer);
