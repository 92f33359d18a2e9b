// The experts of one layer alone, for models whose steps are not one call.
#include "experts.h"

#include "executor.h"

namespace headrace {
namespace {

template <class Math>
bool run(Pool& pool, Memory& memory, const headrace_experts& shape, void* output, const void* x,
         const int64_t* chosen, const float* weights, int64_t rows) {
  using Element = typename Math::Element;
  const int64_t slots = rows * shape.per_token, widest = larger(shape.hidden, shape.inner);
  if (!memory.reserve(Experts<Math>::bytes(shape, rows) +
                      Scratch::bytes(pool.threads(), slots, widest)))
    return false;
  Experts<Math> experts(pool, shape, rows);
  experts.take(memory);
  Scratch scratch;
  scratch.take(memory, pool.threads(), slots, widest);
  const Choices& choices = experts.choices();
  for (int64_t i = 0; i < slots; ++i) choices.experts[i] = int32_t(chosen[i]);
  std::memcpy(choices.weights, weights, sizeof(float) * slots);
  experts.compute(shape.gate_up, shape.down, static_cast<const Element*>(x), rows, scratch);
  experts.write(static_cast<Element*>(output), rows);
  return true;
}

}  // namespace
}  // namespace headrace

int headrace_experts_forward(headrace_executor* executor, const headrace_experts* experts,
                             void* output, const void* x, const int64_t* chosen,
                             const float* weights, int64_t rows, int64_t is_bfloat16) {
  using namespace headrace;
  auto* forward = is_bfloat16 ? &run<BFloat16> : &run<Float32>;
  return forward(executor->pool, executor->memory, *experts, output, x, chosen, weights, rows) ? 0 : 1;
}
