// Paged attention over a ragged batch of decode rows and prefill chunks.
//
// The rows of a sequence and KV head are its (token, grouped query head) pairs, token first. A
// work item is up to kMaxRows of them over a range of keys; free threads take items. Keys are
// always split into ranges of kSplit, each with its own softmax, and ranges are merged in order:
// for few rows over many keys, several items compute ranges that are merged afterwards; for many
// rows, one item merges as it proceeds. So a row's result depends neither on other rows nor on its
// chunk.
#pragma once

#include <cstdlib>

#include "cache.h"
#include "softmax.h"

namespace headrace {

constexpr int kMaxRows = 48;
constexpr int kSplit = 512;

struct Item {
  int32_t sequence, head, row_begin, rows, key_begin, key_end;
  float* partial;  // [rows][maximum, total, dims outputs]; null: the item is a whole result
};

struct Merge {
  int32_t sequence, head, rows, parts;
  float* partial;
};

// Merges a range's softmax and outputs into those of the ranges before it. Not inlined, so that
// all callers round in the same way.
__attribute__((noinline)) inline void add_range(const RowState& range, const float* from, int dims,
                                                float slope, RowState& whole, float* to) {
  if (range.total == 0) return;  // the row sees none of its keys
  if (whole.total == 0) {
    whole = range;
    std::memcpy(to, from, sizeof(float) * dims);
    return;
  }
  const float best = range.maximum > whole.maximum ? range.maximum : whole.maximum;
  const float before = exp2(splat((whole.maximum - best) * slope))[0];
  const float now = exp2(splat((range.maximum - best) * slope))[0];
  whole.maximum = best;
  whole.total = whole.total * before + range.total * now;
  for (int d = 0; d < dims; d += kLanes)
    store(to + d, load(to + d) * before + load(from + d) * now);
}

template <class Math>
struct PagedAttention {
  using Element = typename Math::Element;
  using Factor = typename Math::Factor;

  Element* output;
  const Element* query;
  int64_t query_stride;
  Cache<Math> cache;
  const headrace_batch& batch;
  const headrace_layer& layer;
  ScoreScale scale;
  int dims, group;

  Item* items = nullptr;
  Merge* merges = nullptr;
  float* partials = nullptr;
  Element* gathered = nullptr;  // a copy of a chunk for each thread, if tiles are not read in place
  int64_t item_count = 0, merge_count = 0, partial_floats = 0;

  int64_t gather_size() const { return 2 * kChunk * dims; }

  int query_tokens(int64_t s) const { return batch.query_start[s + 1] - batch.query_start[s]; }

  // First key that the token at `position` sees.
  int first_key(int position) const {
    const int window = int(layer.window);
    if (window < 0) return position - position % -window;
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
  }

  // Calls emit(row_begin, rows, key_begin, key_end, parts, part) for each item of a sequence's head.
  template <class Emit>
  void divide(int64_t s, Emit emit) const {
    const int tokens = query_tokens(s), before = batch.seq_lens[s] - tokens;
    const int rows = tokens * group;
    if (rows > 0 && rows <= kMaxRows) {
      const int first = first_key(before) / kSplit, end = before + tokens;
      const int parts = (end - 1) / kSplit + 1 - first;
      for (int part = 0; part < parts; ++part) {
        const int begin = (first + part) * kSplit, low = first_key(before) / kChunk * kChunk;
        emit(0, rows, begin > low ? begin : low, begin + kSplit < end ? begin + kSplit : end, parts,
             part);
      }
      return;
    }
    for (int begin = (rows - 1) / kMaxRows * kMaxRows; begin >= 0 && rows > 0; begin -= kMaxRows) {
      const int count = rows - begin < kMaxRows ? rows - begin : kMaxRows;
      const int last = before + (begin + count - 1) / group;
      emit(begin, count, first_key(before + begin / group) / kChunk * kChunk, last + 1, 1, 0);
    }
  }

  void count() {
    for (int64_t s = 0; s < batch.num_seqs; ++s)
      divide(s, [&](int, int rows, int, int, int parts, int part) {
        item_count += layer.num_kv_heads;
        if (parts == 1) return;
        partial_floats += int64_t(rows) * (dims + 2) * layer.num_kv_heads;
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
            if (part == 0) *merge++ = {int32_t(s), head, rows, parts, partial};
            item->partial = partial;
            partial += int64_t(rows) * (dims + 2);
          }
          ++item;
        });
  }

  int64_t element_offset(const Item& item, int row) const {
    const int token = (item.row_begin + row) / group, member = (item.row_begin + row) % group;
    return int64_t(batch.query_start[item.sequence] + token) * layer.num_heads * dims +
           (int64_t(item.head) * group + member) * dims;
  }

  void load_queries(const Item& item, Factor* queries) const {
    for (int r = 0; r < item.rows; ++r) {
      const int token = (item.row_begin + r) / group, member = (item.row_begin + r) % group;
      const Element* from = query + (batch.query_start[item.sequence] + token) * query_stride +
                            (int64_t(item.head) * group + member) * dims;
      Math::pack_row(queries + r * dims, from, dims);
    }
  }

  // Tiles of the keys of `item` from `begin`, at most a chunk of them.
  Tiles<Math> find(const Item& item, int begin, Element* gathered) const {
    const int32_t* blocks = batch.block_tables + item.sequence * batch.table_stride;
    const int tokens = item.key_end - begin < kChunk ? item.key_end - begin : kChunk;
    return cache.find(blocks, item.head, begin, tokens, gathered);
  }

  // `next` is the item that this thread most likely takes afterwards.
  void attend(const Item& item, const Item& next, Element* gathered) const {
    alignas(64) Factor queries[kMaxRows * kMaxDims];
    alignas(64) float outputs[kMaxRows * kMaxDims], merged[kMaxRows * kMaxDims];
    RowState states[kMaxRows], whole[kMaxRows];
    load_queries(item, queries);
    std::memset(outputs, 0, sizeof(float) * item.rows * dims);
    const bool several = item.key_begin / kSplit != (item.key_end - 1) / kSplit;
    Tiles<Math> tiles = find(item, item.key_begin, gathered);
    for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
      const bool more = begin + kChunk < item.key_end;
      Tiles<Math> ahead = tiles;
      if (!gathered) ahead = more ? find(item, begin + kChunk, nullptr) : find(next, next.key_begin, nullptr);
      attend_chunk(item, begin, queries, tiles, ahead, states, outputs);
      tiles = gathered && more ? find(item, begin + kChunk, gathered) : ahead;
      if (several && (!more || (begin + kChunk) % kSplit == 0))
        end_range(item.rows, states, outputs, whole, merged);
    }
    if (item.partial)
      keep(item, states, outputs);
    else if (several)
      finish(item, whole, merged);
    else
      finish(item, states, outputs);
  }

  // Merges the result of a range, and begins the next one.
  void end_range(int rows, RowState* states, float* outputs, RowState* whole, float* merged) const {
    for (int r = 0; r < rows; ++r) {
      add_range(states[r], outputs + r * dims, dims, scale.slope, whole[r], merged + r * dims);
      states[r] = RowState{};
    }
    std::memset(outputs, 0, sizeof(float) * rows * dims);
  }

  void attend_chunk(const Item& item, int begin, const Factor* queries, const Tiles<Math>& tiles,
                    const Tiles<Math>& ahead, RowState* states, float* outputs) const {
    alignas(64) float scores[kMaxRows * kChunk];
    alignas(64) Factor weights[kMaxRows * kChunk];
    float decay[kMaxRows];
    score<Math>(item.rows, queries, tiles.keys, ahead.keys, tiles.count, dims, scores, kChunk);
    const int before = batch.seq_lens[item.sequence] - query_tokens(item.sequence);
    for (int r = 0; r < item.rows; ++r) {
      const int position = before + (item.row_begin + r) / group;
      const int first = first_key(position) - begin, last = position + 1 - begin;
      decay[r] = weigh<Math>(scores + r * kChunk, first > 0 ? first : 0,
                             last < tiles.tokens ? last : tiles.tokens, tiles.count * kTile, scale,
                             states[r], weights + r * kChunk);
    }
    accumulate<Math>(item.rows, weights, kChunk, tiles.values, ahead.values, tiles.tokens, dims,
                     decay, outputs);
  }

  void keep(const Item& item, const RowState* states, const float* outputs) const {
    for (int r = 0; r < item.rows; ++r) {
      float* row = item.partial + int64_t(r) * (dims + 2);
      row[0] = states[r].maximum;
      row[1] = states[r].total;
      std::memcpy(row + 2, outputs + r * dims, sizeof(float) * dims);
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
      Element* to = output + element_offset(item, r);
      const float factor = 1 / with_sink(item, r, states[r]);
      for (int d = 0; d < dims; d += kLanes) store(to + d, load(outputs + r * dims + d) * factor);
    }
  }

  void merge(const Merge& merge) const {
    const Item item = {merge.sequence, merge.head, 0, merge.rows, 0, 0, nullptr};
    const int64_t stride = int64_t(merge.rows) * (dims + 2);
    alignas(64) float outputs[kMaxDims];
    for (int r = 0; r < merge.rows; ++r) {
      const float* row = merge.partial + int64_t(r) * (dims + 2);
      RowState whole;
      for (int p = 0; p < merge.parts; ++p, row += stride)
        add_range(RowState{row[0], row[1]}, row + 2, dims, scale.slope, whole, outputs);
      Element* to = output + element_offset(item, r);
      const float factor = 1 / with_sink(item, r, whole);
      for (int d = 0; d < dims; d += kLanes) store(to + d, load(outputs + d) * factor);
    }
  }

  // Makes the list of items. False if memory ran out. `release` must follow in either case.
  bool prepare(int threads) {
    count();
    items = static_cast<Item*>(std::malloc(sizeof(Item) * (item_count + 1)));
    merges = static_cast<Merge*>(std::malloc(sizeof(Merge) * (merge_count + 1)));
    partials = static_cast<float*>(std::malloc(sizeof(float) * (partial_floats + 1)));
    if (!cache.is_read_in_place())
      gathered = static_cast<Element*>(std::malloc(sizeof(Element) * gather_size() * threads));
    if (!items || !merges || !partials || !(gathered || cache.is_read_in_place())) return false;
    list();
    return true;
  }

  void release() {
    std::free(items);
    std::free(merges);
    std::free(partials);
    std::free(gathered);
  }

  // Writes the heads of one token, which are adjacent.
  void write(int64_t token, const Element* key, const Element* value) const {
    for (int head = 0; head < layer.num_kv_heads; ++head)
      cache.write(batch.slots[token], head, key + head * dims, value + head * dims);
  }

  void compute(int64_t i, int thread, int threads) const {
    Element* own = gathered ? gathered + thread * gather_size() : nullptr;
    const int64_t next = i + threads;
    attend(items[i], items[next < item_count ? next : i], own);
  }
};

}  // namespace headrace
