// Paged attention as a separate operator, on the threads of torch's OpenMP runtime.
#include "attention.h"

#include <omp.h>

#include "paged.h"

namespace headrace {
namespace {

template <class Math>
int run(void* output, const void* query, const void* key, const void* value, void* cache,
        int64_t query_stride, int64_t key_stride, int64_t value_stride,
        const headrace_batch& batch, const headrace_layer& layer) {
  using Element = typename Math::Element;
  const Element *keys = static_cast<const Element*>(key), *values = static_cast<const Element*>(value);
  PagedAttention<Math> attention(static_cast<Element*>(output), static_cast<const Element*>(query),
                                 query_stride, cache, batch, layer);
  const bool prepared = attention.prepare(omp_get_max_threads());
  if (prepared) {
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t t = 0; t < batch.num_tokens; ++t)
        attention.write(t, keys + t * key_stride, values + t * value_stride);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < attention.item_count; ++i)
        attention.compute(i, omp_get_thread_num(), omp_get_num_threads());
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < attention.merge_count; ++i) attention.merge(attention.merges[i]);
    }
  }
  return prepared ? 0 : 1;
}

}  // namespace
}  // namespace headrace

int headrace_paged_attention(void* output, const void* query, const void* key, const void* value,
                             void* cache, int64_t query_stride, int64_t key_stride,
                             int64_t value_stride, const headrace_batch* batch,
                             const headrace_layer* layer) {
  auto* chosen = layer->is_bfloat16 ? &headrace::run<headrace::BFloat16>
                                    : &headrace::run<headrace::Float32>;
  return chosen(output, query, key, value, cache, query_stride, key_stride, value_stride, *batch,
                *layer);
}
