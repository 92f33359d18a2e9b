// Attention over a ragged batch of decode rows and prefill chunks, divided into items of work.
//
// The rows of a sequence and KV head are its (token, grouped query head) pairs, token first. A
// work item is a block of them over a range of keys; free threads take items. Keys are always
// split into ranges of kSplit, each with its own softmax, and ranges are merged in order: for few
// rows over many keys, several items compute ranges that are merged afterwards; for many rows, one
// item merges as it proceeds. So a row's result depends neither on other rows nor on its chunk.
#pragma once

#include <cstdlib>

#include "attention.h"
#include "softmax.h"

namespace headrace {

constexpr int kChunk = 64;  // keys between two steps of online softmax
constexpr int kSplit = 512;
constexpr int kMaxWidth = 1024;

struct Item {
  int32_t sequence, head, row_begin, rows, key_begin, key_end;
  float* partial;  // [rows][maximum, total, width outputs]; null: the item is a whole result
};

struct Merge {
  int32_t sequence, head, row_begin, rows, parts;
  float* partial;
};

// Merges a range's softmax and outputs into those of the ranges before it. Not inlined, so that
// all callers round in the same way.
__attribute__((noinline)) inline void add_range(const RowState& range, const float* from, int width,
                                                float slope, RowState& whole, float* to) {
  if (range.total == 0) return;  // the row sees none of its keys
  if (whole.total == 0) {
    whole = range;
    std::memcpy(to, from, sizeof(float) * width);
    return;
  }
  const float best = range.maximum > whole.maximum ? range.maximum : whole.maximum;
  const float before = exp2(splat((whole.maximum - best) * slope))[0];
  const float now = exp2(splat((range.maximum - best) * slope))[0];
  whole.maximum = best;
  whole.total = whole.total * before + range.total * now;
  for (int d = 0; d < width; d += kLanes)
    store(to + d, load(to + d) * before + load(from + d) * now);
}

template <class Element>
struct WorkList {
  Element* output;  // [tokens][heads][width]
  const headrace_batch& batch;
  const headrace_layer& layer;
  ScoreScale scale;
  int width, group;
  int block_rows;  // the most rows of an item
  int few_rows;    // the most rows of a sequence and head whose keys several items share

  Item* items = nullptr;
  Merge* merges = nullptr;
  float* partials = nullptr;
  int64_t item_count = 0, merge_count = 0, partial_floats = 0;

  WorkList(Element* output, const headrace_batch& batch, const headrace_layer& layer, int64_t width,
           int block_rows, int few_rows)
      : output(output),
        batch(batch),
        layer(layer),
        scale(layer.scale, layer.softcap),
        width(int(width)),
        group(int(layer.num_heads / layer.num_kv_heads)),
        block_rows(block_rows),
        few_rows(few_rows) {}
  WorkList(const WorkList&) = delete;
  WorkList& operator=(const WorkList&) = delete;
  ~WorkList() {
    std::free(items);
    std::free(merges);
    std::free(partials);
  }

  // Makes the list of items. False if memory ran out.
  bool list_items() {
    count();
    items = static_cast<Item*>(std::malloc(sizeof(Item) * (item_count + 1)));
    merges = static_cast<Merge*>(std::malloc(sizeof(Merge) * (merge_count + 1)));
    partials = static_cast<float*>(std::malloc(sizeof(float) * (partial_floats + 1)));
    if (!items || !merges || !partials) return false;
    list();
    return true;
  }

  int query_tokens(int64_t s) const { return batch.query_start[s + 1] - batch.query_start[s]; }

  // Position of an item's row.
  int position(const Item& item, int row) const {
    const int before = batch.seq_lens[item.sequence] - query_tokens(item.sequence);
    return before + (item.row_begin + row) / group;
  }

  // First key that the token at `position` sees.
  int first_key(int position) const {
    const int window = int(layer.window);
    if (window < 0) return position - position % -window;
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
  }

  // Whether an item merges ranges of keys as it proceeds.
  static bool has_ranges(const Item& item) {
    return item.key_begin / kSplit != (item.key_end - 1) / kSplit;
  }

  int64_t output_offset(const Item& item, int row) const {
    const int token = (item.row_begin + row) / group, member = (item.row_begin + row) % group;
    return int64_t(batch.query_start[item.sequence] + token) * layer.num_heads * width +
           (int64_t(item.head) * group + member) * width;
  }

  // Merges the result of a range, and begins the next one.
  void end_range(int rows, RowState* states, float* outputs, RowState* whole, float* merged) const {
    for (int r = 0; r < rows; ++r) {
      add_range(states[r], outputs + r * width, width, scale.slope, whole[r], merged + r * width);
      states[r] = RowState{};
    }
    std::memset(outputs, 0, sizeof(float) * rows * width);
  }

  void keep(const Item& item, const RowState* states, const float* outputs) const {
    for (int r = 0; r < item.rows; ++r) {
      float* row = item.partial + int64_t(r) * (width + 2);
      row[0] = states[r].maximum;
      row[1] = states[r].total;
      std::memcpy(row + 2, outputs + r * width, sizeof(float) * width);
    }
  }

  // A row's total weight, which includes its head's sink. Weights are relative to the largest
  // score of a key, so the weight of a sink could overflow exp2, whose largest result is 2^127.
  float with_sink(const Item& item, int row, const RowState& state) const {
    if (!layer.sinks) return state.total;
    const float sink = layer.sinks[item.head * group + (item.row_begin + row) % group];
    const float power = sink * kLog2e - state.maximum * scale.slope;
    return state.total + exp2(splat(power > 126 ? 126 : power))[0];
  }

  void finish(const Item& item, const RowState* states, const float* outputs) const {
    for (int r = 0; r < item.rows; ++r) {
      Element* to = output + output_offset(item, r);
      const float factor = 1 / with_sink(item, r, states[r]);
      for (int d = 0; d < width; d += kLanes) store(to + d, load(outputs + r * width + d) * factor);
    }
  }

  void merge(const Merge& merge) const {
    const Item item = {merge.sequence, merge.head, merge.row_begin, merge.rows, 0, 0, nullptr};
    const int64_t stride = int64_t(merge.rows) * (width + 2);
    alignas(64) float outputs[kMaxWidth];
    for (int r = 0; r < merge.rows; ++r) {
      const float* row = merge.partial + int64_t(r) * (width + 2);
      RowState whole;
      for (int p = 0; p < merge.parts; ++p, row += stride)
        add_range(RowState{row[0], row[1]}, row + 2, width, scale.slope, whole, outputs);
      Element* to = output + output_offset(item, r);
      const float factor = 1 / with_sink(item, r, whole);
      for (int d = 0; d < width; d += kLanes) store(to + d, load(outputs + d) * factor);
    }
  }

 private:
  // Calls emit(row_begin, rows, key_begin, key_end, parts, part) for each item of a sequence's
  // head.
  template <class Emit>
  void divide(int64_t s, Emit emit) const {
    const int tokens = query_tokens(s), before = batch.seq_lens[s] - tokens;
    const int rows = tokens * group;
    for (int begin = (rows - 1) / block_rows * block_rows; begin >= 0 && rows > 0;
         begin -= block_rows) {
      const int count = rows - begin < block_rows ? rows - begin : block_rows;
      const int end = before + (begin + count - 1) / group + 1;
      const int low = first_key(before + begin / group), first = low / kSplit;
      const int parts = rows <= few_rows ? (end - 1) / kSplit + 1 - first : 1;
      for (int part = 0; part < parts; ++part) {
        const int own = part == 0 ? low / kChunk * kChunk : (first + part) * kSplit;
        emit(begin, count, own, part + 1 < parts ? (first + part + 1) * kSplit : end, parts, part);
      }
    }
  }

  void count() {
    for (int64_t s = 0; s < batch.num_seqs; ++s)
      divide(s, [&](int, int rows, int, int, int parts, int part) {
        item_count += layer.num_kv_heads;
        if (parts == 1) return;
        partial_floats += int64_t(rows) * (width + 2) * layer.num_kv_heads;
        if (part == 0) merge_count += layer.num_kv_heads;
      });
  }

  // Long work first: a batch has prefill chunks after decodes, so iterate backwards.
  void list() {
    Item* item = items;
    Merge* merge = merges;
    float* partial = partials;
    for (int64_t s = batch.num_seqs - 1; s >= 0; --s)
      for (int head = 0; head < layer.num_kv_heads; ++head)
        divide(s, [&](int begin, int rows, int key_begin, int key_end, int parts, int part) {
          *item = {int32_t(s), head, begin, rows, key_begin, key_end, nullptr};
          if (parts > 1) {
            if (part == 0) *merge++ = {int32_t(s), head, begin, rows, parts, partial};
            item->partial = partial;
            partial += int64_t(rows) * (width + 2);
          }
          ++item;
        });
  }
};

}  // namespace headrace
