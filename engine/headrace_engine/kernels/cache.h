// Where a token's key and value lie in the cache of one layer.
//
// [blocks][tiles of a block][KV heads][keys, values][16 * D], a tile as tile.h describes it. A block
// whose size is no multiple of 16 leaves the rest of its last tile unused; its tokens are gathered
// into full tiles before they are read.
#pragma once

#include "attention.h"
#include "tile.h"

namespace headrace {

constexpr int kChunk = 64;  // keys between two steps of online softmax
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

  Cache(Element* memory, const headrace_layer& layer)
      : memory_(memory),
        heads_(layer.num_kv_heads),
        dims_(layer.head_dim),
        block_(layer.block_size),
        tiles_((layer.block_size + kTile - 1) / kTile) {}

  bool is_tiled() const { return block_ % kTile == 0; }

  void write(int64_t slot, int head, const Element* key, const Element* value) const {
    const int64_t offset = slot % block_;
    Element* tile = find_tile(slot / block_, offset / kTile, head);
    const int lane = int(offset % kTile);
    Element* keys = key_at(tile, lane);
    for (int64_t d = 0; d < dims_; d += kPack)
      std::memcpy(keys + d * kTile, key + d, kPack * sizeof(Element));
    Element* values = value_at(tile, lane);
    for (int64_t d = 0; d < dims_; ++d) values[d * kPack] = value[d];
  }

  // Where `tokens` tokens from `begin`, a multiple of 16, lie. `gathered` takes copies where the
  // cache's own tiles are not full; tiles beyond the last token repeat it.
  Tiles<Math> find(const int32_t* blocks, int head, int begin, int tokens, Element* gathered) const {
    Tiles<Math> tiles;
    tiles.tokens = tokens;
    tiles.count = (tokens + kTile - 1) / kTile;
    for (int i = 0; i < kChunkTiles; ++i) {
      const int t = i < tiles.count ? i : tiles.count - 1;
      Element* tile = gathered ? gathered + t * 2 * kTile * dims_
                               : tile_of_token(blocks, begin + t * kTile, head);
      tiles.keys[i] = tile;
      tiles.values[i] = tile + kTile * dims_;
    }
    for (int t = 0; gathered && t < tokens; ++t)
      copy(blocks, head, begin + t, gathered + t / kTile * 2 * kTile * dims_, t % kTile);
    return tiles;
  }

 private:
  static constexpr int kPack = Math::kPack;

  Element* find_tile(int64_t block, int64_t tile, int head) const {
    return memory_ + ((block * tiles_ + tile) * heads_ + head) * 2 * kTile * dims_;
  }

  Element* tile_of_token(const int32_t* blocks, int64_t token, int head) const {
    return find_tile(blocks[token / block_], token % block_ / kTile, head);
  }

  Element* key_at(Element* tile, int lane) const { return tile + lane * kPack; }

  Element* value_at(Element* tile, int lane) const {
    return tile + kTile * dims_ + lane / kPack * dims_ * kPack + lane % kPack;
  }

  void copy(const int32_t* blocks, int head, int64_t token, Element* to, int to_lane) const {
    Element* from = tile_of_token(blocks, token, head);
    const int lane = int(token % block_ % kTile);
    for (int64_t d = 0; d < dims_; d += kPack)
      std::memcpy(key_at(to, to_lane) + d * kTile, key_at(from, lane) + d * kTile,
                  kPack * sizeof(Element));
    for (int64_t d = 0; d < dims_; ++d)
      value_at(to, to_lane)[d * kPack] = value_at(from, lane)[d * kPack];
  }

  Element* memory_;
  int64_t heads_, dims_, block_, tiles_;
};

}  // namespace headrace
