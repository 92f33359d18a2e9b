// The functions of decoder.h that lay out the block types of GGUF files.
#include "block_packing.h"
#include "executor.h"

namespace headrace {
namespace {

template <class Math>
void pack_panel_of(const headrace_packed_panel& panel, const void* const* rows, int64_t inputs) {
  using Element = typename Math::Element;
  void* to = const_cast<void*>(panel.data);
  if (panel.kind == kFloats)
    return pack_panel<Element, Math::kPack>(static_cast<Element*>(to),
                                            reinterpret_cast<const Element* const*>(rows), inputs);
  with_type(panel.kind, [&](auto type) {
    pack_blocks_panel<decltype(type)>(static_cast<uint8_t*>(to), panel.kind, rows, inputs);
  });
}

}  // namespace
}  // namespace headrace

int64_t headrace_panel_bytes(int64_t kind, int64_t inputs, int64_t is_bfloat16) {
  using namespace headrace;
  if (kind == kFloats)
    return inputs * kPanel * int64_t(is_bfloat16 ? sizeof(bfloat16) : sizeof(float));
  return with_type(kind, [&](auto type) { return decltype(type)::panel_bytes(inputs); });
}

void headrace_pack_panels(headrace_executor* executor, const headrace_packed_panel* panels, int64_t count,
                          const void* const* rows, int64_t inputs, int64_t is_bfloat16) {
  using namespace headrace;
  auto* chosen = is_bfloat16 ? &pack_panel_of<BFloat16> : &pack_panel_of<Float32>;
  executor->pool.run(count, [&](int64_t panel, int) {
    chosen(panels[panel], rows + panel * kPanel, inputs);
  });
}

void headrace_unpack_outputs(headrace_executor* executor, const headrace_packed_panel* panels,
                             float* rows, const int64_t* outputs, int64_t count, int64_t inputs,
                             int64_t is_bfloat16) {
  using namespace headrace;
  auto* chosen = is_bfloat16 ? &unpack_output<BFloat16> : &unpack_output<Float32>;
  each_row(executor->pool, count, inputs, [&](int64_t r) {
    chosen(panels, outputs[r], inputs, 1.0f, rows + r * inputs);
  });
}
