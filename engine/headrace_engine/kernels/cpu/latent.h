// Paged attention over latents (MLA): one row of the cache is the key of all heads for a token, and
// its first elements are the value. The layout of the cache is [blocks][block size][D].
//
// The keys of a chunk are the rows of a product with the queries, which an item packs once; so
// they are read as they are stored, once for all heads and tokens of the item. Values are
// interleaved as tile.h needs them.
#pragma once

#include <type_traits>

#include "fp8.h"
#include "rows.h"
#include "work_list.h"
#include "workspace.h"

namespace headrace {

constexpr int kLatentRows = 96;   // of an item
constexpr int kSharedRows = 256;  // of a sequence whose keys several items share
constexpr int kDepthStep = 32;    // keys and queries are padded to multiples of it

template <class Math>
struct LatentAttention : WorkList<typename Math::Element> {
  using Element = typename Math::Element;
  using Factor = typename Math::Factor;
  using Work = WorkList<Element>;
  using Work::batch;
  using Work::layer;
  using Work::scale;
  using Work::width;

  // What a thread needs for an item and a chunk of its keys.
  struct Scratch {
    Factor *keys, *weights;
    Element *rows, *queries, *values;
    float *turned, *scores, *outputs, *merged;
  };

  const Element* query;
  int64_t query_stride;
  Element* own;
  uint8_t* bytes;
  int dims, depth;
  Table<Element> table;  // filled for 8-bit floats

  LatentAttention(Element* output, const Element* query, int64_t query_stride, void* cache,
                  int64_t rank, const headrace_batch& batch, const headrace_layer& layer)
      : Work(output, batch, layer, rank, kLatentRows, kSharedRows),
        query(query),
        query_stride(query_stride),
        own(static_cast<Element*>(cache)),
        bytes(static_cast<uint8_t*>(cache)),
        dims(int(layer.head_dim)),
        depth(int(depth_of(dims))) {
    if (storage() == Storage::kE4M3) table.template fill<E4M3>(layer.key_scale);
    if (storage() == Storage::kE5M2) table.template fill<E5M2>(layer.key_scale);
  }

  // Bytes of working memory for each thread, of keys with `dims` elements and `width` of values.
  static int64_t scratch_bytes(int64_t dims, int64_t width) {
    const int64_t depth = depth_of(dims);
    return Memory::bytes<Factor>(int64_t(kChunk) * depth) +
           Memory::bytes<Factor>(kLatentRows * kChunk) + Memory::bytes<Element>(kPack * depth) +
           Memory::bytes<Element>(int64_t(kLatentRows) * depth) +
           Memory::bytes<Element>(int64_t(kChunk) * width) +
           2 * Memory::bytes<float>(kLatentRows * kChunk) +
           2 * Memory::bytes<float>(int64_t(kLatentRows) * width);
  }

  // `memory` has room for all threads. False if memory ran out.
  bool prepare(char* memory) {
    scratch_ = memory;
    return this->list_items();
  }

  void write(int64_t token, const Element* latent) const {
    const int64_t place = batch.slots[token] * dims;
    if (storage() == Storage::kOwn)
      std::memcpy(own + place, latent, dims * sizeof(Element));
    else if (storage() == Storage::kE4M3)
      narrow_bytes<E4M3>(bytes + place, latent);
    else
      narrow_bytes<E5M2>(bytes + place, latent);
  }

  void compute(int64_t i, int thread) const {
    const Item& item = Work::items[i];
    const Scratch scratch = scratch_of(thread);
    RowState states[kLatentRows], all[kLatentRows];
    pack_queries(item, scratch.queries);
    std::memset(scratch.outputs, 0, sizeof(float) * padded_rows(item) * width);
    const bool several = Work::has_ranges(item);
    for (int begin = item.key_begin; begin < item.key_end; begin += kChunk) {
      const bool more = begin + kChunk < item.key_end;
      attend_chunk(item, begin, scratch, states);
      if (several && (!more || (begin + kChunk) % kSplit == 0))
        this->end_range(item.rows, states, scratch.outputs, all, scratch.merged);
    }
    if (item.partial)
      this->keep(item, states, scratch.outputs);
    else if (several)
      this->finish(item, all, scratch.merged);
    else
      this->finish(item, states, scratch.outputs);
  }

 private:
  static constexpr int kPack = Math::kPack;
#if HEADRACE_TILES
  static constexpr bool kOnTiles = std::is_same<Math, DotProduct>::value;
#else
  static constexpr bool kOnTiles = false;
#endif

  static int64_t depth_of(int64_t dims) {
    return (dims + kDepthStep - 1) / kDepthStep * kDepthStep;
  }

  Storage storage() const { return Storage(layer.storage); }

  static int row_tiles(const Item& item) { return (item.rows + kTile - 1) / kTile; }
  static int padded_rows(const Item& item) { return row_tiles(item) * kTile; }

  template <class T>
  static T* take(char*& at, int64_t count) {
    T* taken = reinterpret_cast<T*>(at);
    at += Memory::bytes<T>(count);
    return taken;
  }

  Scratch scratch_of(int thread) const {
    char* at = scratch_ + thread * scratch_bytes(dims, width);
    Scratch made;
    made.keys = take<Factor>(at, int64_t(kChunk) * depth);
    made.weights = take<Factor>(at, kLatentRows * kChunk);
    made.rows = take<Element>(at, kPack * depth);
    made.queries = take<Element>(at, int64_t(kLatentRows) * depth);
    made.values = take<Element>(at, int64_t(kChunk) * width);
    made.turned = take<float>(at, kLatentRows * kChunk);
    made.scores = take<float>(at, kLatentRows * kChunk);
    made.outputs = take<float>(at, int64_t(kLatentRows) * width);
    made.merged = take<float>(at, int64_t(kLatentRows) * width);
    return made;
  }

  template <class Kind>
  void narrow_bytes(uint8_t* to, const Element* latent) const {
    const float factor = 1 / layer.key_scale;
    for (int d = 0; d < dims; ++d) to[d] = narrow_byte<Kind>(widen(latent[d]) * factor);
  }

  // Tiles of 16 queries: [depth / pack][16][pack].
  void pack_queries(const Item& item, Element* queries) const {
    for (int r = 0; r < item.rows; ++r) {
      const int token = (item.row_begin + r) / Work::group;
      const int member = (item.row_begin + r) % Work::group;
      const Element* from = query + (batch.query_start[item.sequence] + token) * query_stride +
                            int64_t(member) * dims;
      Element* to = queries + r / kTile * kTile * depth + r % kTile * kPack;
      for (int d = 0; d < dims; d += kPack)
        std::memcpy(to + d * kTile, from + d, kPack * sizeof(Element));
      for (int d = dims; d < depth; d += kPack) std::memset(to + d * kTile, 0, kPack * sizeof(Element));
    }
  }

  // The row of a token of the cache; `row` takes a copy of 8-bit floats.
  const Element* find_row(const int32_t* blocks, int token, Element* row) const {
    const int64_t block = blocks[token / layer.block_size];
    const int64_t place = (block * layer.block_size + token % layer.block_size) * dims;
    if (storage() == Storage::kOwn) return own + place;
    const int vectors = dims / kDepthStep * kDepthStep;
    table.look_up(row, bytes + place, vectors);
    for (int d = vectors; d < dims; ++d) row[d] = table.of[bytes[place + d]];
    return row;
  }

  // A key, padded with zeros.
  void put_key(Factor* to, const Element* from) const {
    if constexpr (std::is_same<Factor, Element>::value) {
      std::memcpy(to, from, dims * sizeof(Element));
    } else {
      for (int64_t i = 0; i < whole(dims); i += kLanes) store(to + i, load(from + i));
      for (int64_t i = whole(dims); i < dims; ++i) to[i] = widen(from[i]);
    }
    std::memset(to + dims, 0, (depth - dims) * sizeof(Factor));
  }

  // Interleaves two values; the second one may be null, for zeros.
  void place_pair(Element* to, const Element* first, const Element* second) const {
    for (int d = 0; d < width; d += kLanes) {
      const Words low = __builtin_convertvector(load_raw<Halves>(first + d), Words);
      const Words high =
          second ? __builtin_convertvector(load_raw<Halves>(second + d), Words) : Words{};
      const Words both = low | high << 16;
      std::memcpy(to + d * kPack, &both, sizeof(both));
    }
  }

  // Keys and values of `tokens` tokens from `begin`. Values up to `padded` are zeros.
  void read_chunk(const Item& item, int begin, int tokens, int padded, const Scratch& to) const {
    const int32_t* blocks = batch.block_tables + item.sequence * batch.table_stride;
    Element *even = to.rows, *odd = to.rows + depth;
    for (int t = 0; t < tokens; t += kPack) {
      const Element* first = find_row(blocks, begin + t, even);
      put_key(to.keys + t * depth, first);
      Element* values = to.values + t * width;
      if constexpr (kPack == 1) {
        std::memcpy(values, first, width * sizeof(Element));
      } else {
        const bool two = t + 1 < tokens;
        const Element* second = two ? find_row(blocks, begin + t + 1, odd) : nullptr;
        if (two) put_key(to.keys + (t + 1) * depth, second);
        place_pair(values, first, second);
      }
    }
    const int filled = (tokens + kPack - 1) / kPack * kPack;
    std::memset(to.values + filled * width, 0, (padded - filled) * width * sizeof(Element));
  }

  void attend_chunk(const Item& item, int begin, const Scratch& s, RowState* states) const {
    const int tokens = item.key_end - begin < kChunk ? item.key_end - begin : kChunk;
    const int padded = (tokens + 2 * kTile - 1) / (2 * kTile) * 2 * kTile;
    float decay[kLatentRows];
    read_chunk(item, begin, tokens, padded, s);
    score_keys(row_tiles(item), tokens, padded, s);
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < item.rows; ++r) s.scores[r * kChunk + t] = s.turned[t * kLatentRows + r];
    for (int r = 0; r < item.rows; ++r) {
      const int position = this->position(item, r);
      const int first = this->first_key(position) - begin, last = position + 1 - begin;
      decay[r] = weigh<Math>(s.scores + r * kChunk, first > 0 ? first : 0,
                             last < tokens ? last : tokens, padded, scale, states[r],
                             s.weights + r * kChunk);
    }
    add_values(item, tokens, padded, decay, s);
  }

  // turned[token][row] = key . query
  void score_keys(int tiles, int tokens, int padded, const Scratch& s) const {
#if HEADRACE_TILES
    if constexpr (kOnTiles) return score_on_tiles(tiles, padded, s);
#endif
    (void)padded;
    for (int first = 0; first < tiles; first += kColumns) {
      const int count = tiles - first < kColumns ? tiles - first : kColumns;
      const Element* queries[kColumns];
      for (int i = 0; i < count; ++i) queries[i] = s.queries + (first + i) * kTile * depth;
      score<Math>(tokens, s.keys, queries, queries, count, depth, s.turned + first * kTile,
                  kLatentRows);
    }
  }

  void add_values(const Item& item, int tokens, int padded, const float* decay,
                  const Scratch& s) const {
#if HEADRACE_TILES
    if constexpr (kOnTiles) return add_on_tiles(item, padded, decay, s);
#endif
    (void)padded;
    const Element* values[kChunk / kTile];
    for (int i = 0; i < kChunk / kTile; ++i) values[i] = s.values + i * kTile * width;
    accumulate<Math>(item.rows, s.weights, kChunk, values, values, tokens, width, decay, s.outputs);
  }

#if HEADRACE_TILES
  static void configure() {
    const TileConfig config = tile_config(kTileBlock);
    _tile_loadconfig(&config);
  }

  // Registers 0-3: sums of two tiles of tokens and two of queries; 4 and 5 are tokens, 6 and 7
  // queries.
  void score_on_tiles(int tiles, int padded, const Scratch& s) const {
    constexpr int64_t kSumBytes = kLatentRows * sizeof(float), kQueryBytes = kTile * 2 * sizeof(Element);
    const int64_t key_bytes = depth * int64_t(sizeof(Element));
    configure();
    for (int first = 0; first < tiles; first += 2) {
      const bool two = first + 1 < tiles;
      const Element* queries = s.queries + first * kTile * depth;
      const Element* others = two ? queries + kTile * depth : queries;
      for (int t = 0; t < padded; t += 2 * kTile) {
        const Element *keys = reinterpret_cast<const Element*>(s.keys) + t * depth,
                      *next = keys + kTile * depth;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < depth; d += kTileInputs) {
          _tile_loadd(4, keys + d, key_bytes);
          _tile_loadd(5, next + d, key_bytes);
          _tile_loadd(6, queries + d * kTile, kQueryBytes);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(2, 5, 6);
          if (!two) continue;
          _tile_loadd(7, others + d * kTile, kQueryBytes);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
        float* to = s.turned + t * kLatentRows + first * kTile;
        _tile_stored(0, to, kSumBytes);
        _tile_stored(2, to + kTile * kLatentRows, kSumBytes);
        if (!two) continue;
        _tile_stored(1, to + kTile, kSumBytes);
        _tile_stored(3, to + kTile * kLatentRows + kTile, kSumBytes);
      }
    }
    _tile_release();
  }

  // Registers 0-3: sums of two tiles of rows and two of elements; 4 and 5 are weights, 6 and 7
  // values.
  void add_on_tiles(const Item& item, int padded, const float* decay, const Scratch& s) const {
    for (int r = 0; r < item.rows; ++r)
      if (decay[r] != 1) scale_outputs(s.outputs + r * width, decay[r]);
    constexpr int64_t kWeightBytes = kChunk * sizeof(Element);
    const int64_t sum_bytes = width * int64_t(sizeof(float)),
                  value_bytes = width * 2 * int64_t(sizeof(Element));
    const Element* all = reinterpret_cast<const Element*>(s.weights);
    configure();
    for (int r = 0; r < padded_rows(item); r += 2 * kTile) {
      const bool two_rows = r + kTile < padded_rows(item);
      for (int c = 0; c < width; c += 2 * kTile) {
        const bool two_columns = c + kTile < width;
        float *to = s.outputs + r * width + c, *below = to + kTile * width;
        _tile_loadd(0, to, sum_bytes);
        if (two_columns) _tile_loadd(1, to + kTile, sum_bytes);
        if (two_rows) _tile_loadd(2, below, sum_bytes);
        if (two_rows && two_columns) _tile_loadd(3, below + kTile, sum_bytes);
        for (int t = 0; t < padded; t += kTileInputs) {
          const Element *weights = all + r * kChunk + t, *values = s.values + t * width + c * 2;
          _tile_loadd(4, weights, kWeightBytes);
          _tile_loadd(6, values, value_bytes);
          _tile_dpbf16ps(0, 4, 6);
          if (two_columns) {
            _tile_loadd(7, values + 2 * kTile, value_bytes);
            _tile_dpbf16ps(1, 4, 7);
          }
          if (!two_rows) continue;
          _tile_loadd(5, weights + kTile * kChunk, kWeightBytes);
          _tile_dpbf16ps(2, 5, 6);
          if (two_columns) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to, sum_bytes);
        if (two_columns) _tile_stored(1, to + kTile, sum_bytes);
        if (two_rows) _tile_stored(2, below, sum_bytes);
        if (two_rows && two_columns) _tile_stored(3, below + kTile, sum_bytes);
      }
    }
    _tile_release();
  }

  void scale_outputs(float* row, float factor) const {
    for (int d = 0; d < width; d += kLanes) store(row + d, load(row + d) * factor);
  }
#endif

  char* scratch_ = nullptr;
};

}  // namespace headrace
