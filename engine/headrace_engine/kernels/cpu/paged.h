// Paged attention over keys and values of each KV head (work_list.h).
#pragma once

#include "cache.h"
#include "work_list.h"

namespace headrace {

constexpr int kMaxRows = 48;

template <class Math>
struct PagedAttention : WorkList<typename Math::Element> {
  using Element = typename Math::Element;
  using Factor = typename Math::Factor;
  using Work = WorkList<Element>;
  using Work::batch;
  using Work::group;
  using Work::item_count;
  using Work::items;
  using Work::layer;
  using Work::scale;

  const Element* query;
  int64_t query_stride;
  Cache<Math> cache;
  int dims;
  Element* gathered = nullptr;  // a copy of a chunk for each thread, if tiles are not read in place

  PagedAttention(Element* output, const Element* query, int64_t query_stride, void* memory,
                 const headrace_batch& batch, const headrace_layer& layer)
      : Work(output, batch, layer, layer.head_dim, kMaxRows, kMaxRows),
        query(query),
        query_stride(query_stride),
        cache(memory, layer),
        dims(int(layer.head_dim)) {}
  ~PagedAttention() { std::free(gathered); }

  int64_t gather_size() const { return 2 * kChunk * dims; }

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
    const bool several = Work::has_ranges(item);
    Tiles<Math> tiles = find(item, item.key_begin, gathered);
    for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
      const bool more = begin + kChunk < item.key_end;
      Tiles<Math> ahead = tiles;
      if (!gathered) ahead = more ? find(item, begin + kChunk, nullptr) : find(next, next.key_begin, nullptr);
      attend_chunk(item, begin, queries, tiles, ahead, states, outputs);
      tiles = gathered && more ? find(item, begin + kChunk, gathered) : ahead;
      if (several && (!more || (begin + kChunk) % kSplit == 0))
        this->end_range(item.rows, states, outputs, whole, merged);
    }
    if (item.partial)
      this->keep(item, states, outputs);
    else if (several)
      this->finish(item, whole, merged);
    else
      this->finish(item, states, outputs);
  }

  void attend_chunk(const Item& item, int begin, const Factor* queries, const Tiles<Math>& tiles,
                    const Tiles<Math>& ahead, RowState* states, float* outputs) const {
    alignas(64) float scores[kMaxRows * kChunk];
    alignas(64) Factor weights[kMaxRows * kChunk];
    float decay[kMaxRows];
    score<Math>(item.rows, queries, tiles.keys, ahead.keys, tiles.count, dims, scores, kChunk);
    for (int r = 0; r < item.rows; ++r) {
      const int position = this->position(item, r);
      const int first = this->first_key(position) - begin, last = position + 1 - begin;
      decay[r] = weigh<Math>(scores + r * kChunk, first > 0 ? first : 0,
                             last < tiles.tokens ? last : tiles.tokens, tiles.count * kTile, scale,
                             states[r], weights + r * kChunk);
    }
    accumulate<Math>(item.rows, weights, kChunk, tiles.values, ahead.values, tiles.tokens, dims,
                     decay, outputs);
  }

  // Makes the list of items. False if memory ran out.
  bool prepare(int threads) {
    if (!cache.is_read_in_place()) {
      gathered = static_cast<Element*>(std::malloc(sizeof(Element) * gather_size() * threads));
      if (!gathered) return false;
    }
    return this->list_items();
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
