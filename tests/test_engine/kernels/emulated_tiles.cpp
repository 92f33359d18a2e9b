// Every number of rows through AMX's products, their instructions emulated, against plain loops.
#define HEADRACE_EMULATE_TILES
#include "tiles.h"

using namespace headrace;

int main() {
  constexpr int kOutputs = 64, kInputs = 96, kStride = kInputs + 8;
  static bfloat16 rows[kTileBlock * kStride], panel[kInputs * kOutputs];
  uint32_t state = 1;
  // Small whole numbers: every order of additions gives the same sum.
  auto draw = [&] { return narrow_to<bfloat16>(float(int((state = state * 1664525 + 1013904223) >> 28) - 8)); };
  for (auto& x : rows) x = draw();
  for (auto& x : panel) x = draw();
  int wrong = 0;
  for (int inputs = kTileInputs; inputs <= kInputs; inputs += 64)
    for (int count = 1; count <= kTileBlock; ++count) {
      float sums[(kTileBlock + 1) * kOutputs];
      for (auto& sum : sums) sum = -1;
      const TileConfig config = tile_config(count);
      _tile_loadconfig(&config);
      multiply_tiles(count, rows, kStride, panel, inputs, sums);
      for (int r = 0; r < count; ++r)
        for (int c = 0; c < kOutputs; ++c) {
          float expected = 0;
          for (int k = 0; k < inputs; ++k)
            expected += widen(rows[r * kStride + k]) * widen(panel[(k / 2 * kOutputs + c) * 2 + k % 2]);
          wrong += sums[r * kOutputs + c] != expected;
        }
      for (int c = 0; c < kOutputs; ++c) wrong += sums[count * kOutputs + c] != -1;
    }
  return wrong > 100 ? 100 : wrong;
}
