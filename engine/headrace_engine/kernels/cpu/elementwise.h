// The plain C interface of the element-wise operators. `rows` rows are `*_stride` elements apart;
// the type is bfloat16, or else float32. operators/base.py says what each one computes.
#pragma once

#include "export.h"

// Raised with every change of this interface, so that a library of another build is refused.
HEADRACE_EXPORT int headrace_interface();

// Asks the system for what the library's instructions need. Returns 0, or 1 if it refuses.
HEADRACE_EXPORT int headrace_prepare();

HEADRACE_EXPORT void headrace_rms_norm(void* output, const void* x, const void* weight,
                                       int64_t rows, int64_t width, int64_t x_stride, float epsilon,
                                       int64_t is_bfloat16);

// Adds x to residual in place, then normalises the sum.
HEADRACE_EXPORT void headrace_add_rms_norm(void* output, void* residual, const void* x,
                                           const void* weight, int64_t rows, int64_t width,
                                           float epsilon, int64_t is_bfloat16);

// Rotates the queries and keys of qkv [rows][(num_heads + 2 num_kv_heads) * dims] in place, after
// an RMS norm of each head unless the norms' weights are null.
HEADRACE_EXPORT void headrace_rotate_qkv(void* qkv, const float* cos, const float* sin,
                                         const void* query_norm, const void* key_norm, int64_t rows,
                                         int64_t stride, int64_t num_heads, int64_t num_kv_heads,
                                         int64_t dims, float epsilon, int64_t is_bfloat16);

HEADRACE_EXPORT void headrace_silu_mul(void* output, const void* gate_up, int64_t rows,
                                       int64_t width, int64_t stride, int64_t is_bfloat16);
