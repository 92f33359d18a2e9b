// Attention to latents as a separate operator, on the threads of torch's OpenMP runtime.
#include "latent.h"

#include <omp.h>

namespace headrace {
namespace {

// Kept between calls: larger memory would be returned to the system, and cleared by it, each time.
thread_local Memory scratch;

template <class Math>
int run(void* output, const void* query, const void* latents, void* cache, int64_t query_stride,
        int64_t latent_stride, int64_t rank, const headrace_batch& batch,
        const headrace_layer& layer) {
  using Element = typename Math::Element;
  const Element* rows = static_cast<const Element*>(latents);
  LatentAttention<Math> attention(static_cast<Element*>(output), static_cast<const Element*>(query),
                                  query_stride, cache, rank, batch, layer);
  const int64_t bytes = LatentAttention<Math>::scratch_bytes(layer.head_dim, rank) * omp_get_max_threads();
  if (!scratch.reserve(bytes) || !attention.prepare(scratch.take<char>(bytes))) return 1;
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < batch.num_tokens; ++t) attention.write(t, rows + t * latent_stride);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < attention.item_count; ++i) attention.compute(i, omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < attention.merge_count; ++i) attention.merge(attention.merges[i]);
  }
  return 0;
}

}  // namespace
}  // namespace headrace

int headrace_latent_attention(void* output, const void* query, const void* latents, void* cache,
                              int64_t query_stride, int64_t latent_stride, int64_t rank,
                              const headrace_batch* batch, const headrace_layer* layer) {
  auto* chosen = layer->is_bfloat16 ? &headrace::run<headrace::BFloat16>
                                    : &headrace::run<headrace::Float32>;
  return chosen(output, query, latents, cache, query_stride, latent_stride, rank, *batch, *layer);
}
