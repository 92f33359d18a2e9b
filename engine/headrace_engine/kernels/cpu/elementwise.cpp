// The small operators of a decoder, one pass over memory each, threaded over rows.
#include "elementwise.h"

#include "rows.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {
namespace {

// Fewer elements than this are not worth waking another thread.
constexpr int64_t kSerial = 16384;

template <class T>
void rms_norm(T* output, const T* x, const T* weight, int64_t rows, int64_t width, int64_t stride,
              float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t r = 0; r < rows; ++r)
    normalize_row(output + r * width, x + r * stride, weight, width, epsilon);
}

template <class T>
void add(T* residual, const T* x, int64_t width) {
  for (int64_t i = 0; i < whole(width); i += kLanes)
    store(residual + i, load(residual + i) + load(x + i));
  for (int64_t i = whole(width); i < width; ++i)
    residual[i] = narrow_to<T>(widen(residual[i]) + widen(x[i]));
}

template <class T>
void add_rms_norm(T* output, T* residual, const T* x, const T* weight, int64_t rows, int64_t width,
                  float epsilon) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    add(residual + r * width, x + r * width, width);
    normalize_row(output + r * width, residual + r * width, weight, width, epsilon);
  }
}

template <class T>
void rotate_qkv(T* qkv, const float* cos, const float* sin, const T* query_norm, const T* key_norm,
                int64_t rows, int64_t stride, int64_t num_heads, int64_t num_kv_heads, int64_t dims,
                float epsilon) {
  const int64_t heads = num_heads + num_kv_heads, half = dims / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dims > kSerial)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      T* head = qkv + r * stride + h * dims;
      const T* norm = h < num_heads ? query_norm : key_norm;
      if (norm) normalize_row(head, head, norm, dims, epsilon);
      rotate(head, cos + r * half, sin + r * half, half);
    }
}

template <class T>
void silu_mul(T* output, const T* gate_up, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for schedule(static) if (rows * width > kSerial)
  for (int64_t r = 0; r < rows; ++r) {
    const T *gate = gate_up + r * stride, *up = gate + width;
    T* to = output + r * width;
    for (int64_t i = 0; i < whole(width); i += kLanes)
      store(to + i, rounded(silu(load(gate + i)), T{}) * load(up + i));
    for (int64_t i = whole(width); i < width; ++i)
      to[i] = narrow_to<T>(widen(narrow_to<T>(silu(widen(gate[i])))) * widen(up[i]));
  }
}

template <class T>
T* as(void* memory) {
  return static_cast<T*>(memory);
}
template <class T>
const T* as(const void* memory) {
  return static_cast<const T*>(memory);
}

}  // namespace
}  // namespace headrace

using headrace::as;
using headrace::bfloat16;

int headrace_interface() { return 15; }

int headrace_prepare() {
#if defined(__AMX_BF16__)
  // Linux gives the tile registers' memory only to processes that request it.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : 1;
#else
  return 0;
#endif
}

void headrace_rms_norm(void* output, const void* x, const void* weight, int64_t rows, int64_t width,
                       int64_t x_stride, float epsilon, int64_t is_bfloat16) {
  if (is_bfloat16)
    headrace::rms_norm(as<bfloat16>(output), as<bfloat16>(x), as<bfloat16>(weight), rows, width,
                       x_stride, epsilon);
  else
    headrace::rms_norm(as<float>(output), as<float>(x), as<float>(weight), rows, width, x_stride,
                       epsilon);
}

void headrace_add_rms_norm(void* output, void* residual, const void* x, const void* weight,
                           int64_t rows, int64_t width, float epsilon, int64_t is_bfloat16) {
  if (is_bfloat16)
    headrace::add_rms_norm(as<bfloat16>(output), as<bfloat16>(residual), as<bfloat16>(x),
                           as<bfloat16>(weight), rows, width, epsilon);
  else
    headrace::add_rms_norm(as<float>(output), as<float>(residual), as<float>(x), as<float>(weight),
                           rows, width, epsilon);
}

void headrace_rotate_qkv(void* qkv, const float* cos, const float* sin, const void* query_norm,
                         const void* key_norm, int64_t rows, int64_t stride, int64_t num_heads,
                         int64_t num_kv_heads, int64_t dims, float epsilon, int64_t is_bfloat16) {
  if (is_bfloat16)
    headrace::rotate_qkv(as<bfloat16>(qkv), cos, sin, as<bfloat16>(query_norm),
                         as<bfloat16>(key_norm), rows, stride, num_heads, num_kv_heads, dims,
                         epsilon);
  else
    headrace::rotate_qkv(as<float>(qkv), cos, sin, as<float>(query_norm), as<float>(key_norm), rows,
                         stride, num_heads, num_kv_heads, dims, epsilon);
}

void headrace_silu_mul(void* output, const void* gate_up, int64_t rows, int64_t width,
                       int64_t stride, int64_t is_bfloat16) {
  if (is_bfloat16)
    headrace::silu_mul(as<bfloat16>(output), as<bfloat16>(gate_up), rows, width, stride);
  else
    headrace::silu_mul(as<float>(output), as<float>(gate_up), rows, width, stride);
}
