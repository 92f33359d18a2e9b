// The layout of a layer's cache: where a token's key and value are.
//
// [blocks][tiles of a block][KV heads][keys, values][16 * D], a tile as tile.h describes it. If a
// block's size is not a multiple of 16, the rest of its last tile is unused, and its tokens are
// gathered into full tiles before they are read. Tiles of 8-bit floats have the same layout; they
// are converted to Elements a chunk at a time.
#pragma once

#include "attention.h"
#include "fp8.h"
#include "work_list.h"

namespace headrace {

constexpr int kMaxDims = 256;
constexpr int kChunkTiles = kChunk / kTile;

// The tiles of at most a chunk of one head's tokens.
template <class Math>
struct Tiles {
  const typename Math::Element *keys[kChunkTiles], *values[kChunkTiles];
  int count, tokens;
};

template <class Math>
class Cache {
 public:
  using Element = typename Math::Element;

  Cache(void* memory, const headrace_layer& layer)
      : memory_(static_cast<Element*>(memory)),
        bytes_(static_cast<uint8_t*>(memory)),
        storage_(Storage(layer.storage)),
        key_scale_(layer.key_scale),
        value_scale_(layer.value_scale),
        heads_(layer.num_kv_heads),
        dims_(layer.head_dim),
        block_(layer.block_size),
        tiles_((layer.block_size + kTile - 1) / kTile) {
    if (storage_ == Storage::kE4M3) fill_tables<E4M3>();
    if (storage_ == Storage::kE5M2) fill_tables<E5M2>();
  }

  // Whether its tiles can be read in place.
  bool is_read_in_place() const { return block_ % kTile == 0 && storage_ == Storage::kOwn; }

  void write(int64_t slot, int head, const Element* key, const Element* value) const {
    if (storage_ == Storage::kE4M3) return write_bytes<E4M3>(slot, head, key, value);
    if (storage_ == Storage::kE5M2) return write_bytes<E5M2>(slot, head, key, value);
    put(memory_, slot, head, key, value);
  }

  // The tiles of `tokens` tokens from `begin`, a multiple of 16. `gathered` takes copies if the
  // cache's own tiles cannot be read in place; tiles after the last token repeat it.
  Tiles<Math> find(const int32_t* blocks, int head, int begin, int tokens, Element* gathered) const {
    Tiles<Math> tiles;
    tiles.tokens = tokens;
    tiles.count = (tokens + kTile - 1) / kTile;
    for (int i = 0; i < kChunkTiles; ++i) {
      const int t = i < tiles.count ? i : tiles.count - 1;
      Element* tile = gathered ? gathered + t * 2 * kTile * dims_
                               : tile_of_token(memory_, blocks, begin + t * kTile, head);
      tiles.keys[i] = tile;
      tiles.values[i] = tile + kTile * dims_;
    }
    if (gathered && storage_ != Storage::kOwn)
      widen_tokens(blocks, head, begin, tokens, gathered);
    else if (gathered)
      gather(memory_, blocks, head, begin, tokens, gathered);
    return tiles;
  }

 private:
  static constexpr int kPack = Math::kPack;

  int64_t tile_size() const { return 2 * kTile * dims_; }

  template <class T>
  T* find_tile(T* memory, int64_t block, int64_t tile, int head) const {
    return memory + ((block * tiles_ + tile) * heads_ + head) * 2 * kTile * dims_;
  }

  template <class T>
  T* tile_of_token(T* memory, const int32_t* blocks, int64_t token, int head) const {
    return find_tile(memory, blocks[token / block_], token % block_ / kTile, head);
  }

  template <class T>
  T* key_at(T* tile, int lane) const {
    return tile + lane * kPack;
  }

  template <class T>
  T* value_at(T* tile, int lane) const {
    return tile + kTile * dims_ + lane / kPack * dims_ * kPack + lane % kPack;
  }

  template <class T>
  void put(T* memory, int64_t slot, int head, const T* key, const T* value) const {
    const int64_t offset = slot % block_;
    T* tile = find_tile(memory, slot / block_, offset / kTile, head);
    const int lane = int(offset % kTile);
    T* keys = key_at(tile, lane);
    for (int64_t d = 0; d < dims_; d += kPack)
      std::memcpy(keys + d * kTile, key + d, kPack * sizeof(T));
    T* values = value_at(tile, lane);
    for (int64_t d = 0; d < dims_; ++d) values[d * kPack] = value[d];
  }

  template <class Kind>
  void write_bytes(int64_t slot, int head, const Element* key, const Element* value) const {
    uint8_t keys[kMaxDims], values[kMaxDims];
    const float key_factor = 1 / key_scale_, value_factor = 1 / value_scale_;
    for (int64_t d = 0; d < dims_; ++d) {
      keys[d] = narrow_byte<Kind>(widen(key[d]) * key_factor);
      values[d] = narrow_byte<Kind>(widen(value[d]) * value_factor);
    }
    put(bytes_, slot, head, keys, values);
  }

  template <class Kind>
  void fill_tables() {
    keys_.template fill<Kind>(key_scale_);
    values_.template fill<Kind>(value_scale_);
  }

  // Tiles converted to Elements: full tiles directly, others are gathered first.
  void widen_tokens(const int32_t* blocks, int head, int begin, int tokens, Element* to) const {
    uint8_t own[2 * kTile * kMaxDims];
    const int64_t half = kTile * dims_;
    for (int t = 0; t < tokens; t += kTile, to += 2 * half) {
      const uint8_t* from = own;
      if (block_ % kTile == 0)
        from = tile_of_token(bytes_, blocks, begin + t, head);
      else
        gather(bytes_, blocks, head, begin + t, tokens - t < kTile ? tokens - t : kTile, own);
      keys_.look_up(to, from, half);
      values_.look_up(to + half, from + half, half);
    }
  }

  // Copies tokens into successive tiles.
  template <class T>
  void gather(T* memory, const int32_t* blocks, int head, int64_t begin, int tokens, T* to) const {
    for (int t = 0; t < tokens; ++t)
      copy(memory, blocks, head, begin + t, to + t / kTile * tile_size(), t % kTile);
  }

  template <class T>
  void copy(T* memory, const int32_t* blocks, int head, int64_t token, T* to, int to_lane) const {
    T* from = tile_of_token(memory, blocks, token, head);
    const int lane = int(token % block_ % kTile);
    for (int64_t d = 0; d < dims_; d += kPack)
      std::memcpy(key_at(to, to_lane) + d * kTile, key_at(from, lane) + d * kTile,
                  kPack * sizeof(T));
    for (int64_t d = 0; d < dims_; ++d)
      value_at(to, to_lane)[d * kPack] = value_at(from, lane)[d * kPack];
  }

  Element* memory_;
  uint8_t* bytes_;
  Storage storage_;
  float key_scale_, value_scale_;
  Table<Element> keys_, values_;  // filled for 8-bit floats
  int64_t heads_, dims_, block_, tiles_;
};

}  // namespace headrace
