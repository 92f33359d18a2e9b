// Reads and writes recurrent states, whose bytes are scattered over blocks of the KV cache.
#pragma once

#include <cmath>
#include <cstring>

#include "recurrence.h"

namespace headrace {

// A token's row.
template <class T>
const T* at(const headrace_rows& rows, int64_t token) {
  return static_cast<const T*>(rows.data) + token * rows.stride;
}

// A place in one state.
class Cursor {
 public:
  Cursor(const headrace_states& states, const int64_t* blocks, int64_t offset) : states_(states) {
    const int64_t bytes = states.page_bytes[0] + states.page_bytes[1];
    block_ = blocks + offset / bytes;
    skip(offset % bytes);
  }

  void skip(int64_t bytes) {
    within_ += bytes;
    while (within_ >= states_.page_bytes[page_]) {
      within_ -= states_.page_bytes[page_];
      block_ += page_;
      page_ = 1 - page_;
    }
  }

  void read(void* to, int64_t bytes) {
    char* next = static_cast<char*>(to);
    move(bytes, [&](const char* piece, int64_t count) {
      std::memcpy(next, piece, count);
      next += count;
    });
  }

  void write(const void* from, int64_t bytes) {
    const char* next = static_cast<const char*>(from);
    move(bytes, [&](char* piece, int64_t count) {
      std::memcpy(piece, next, count);
      next += count;
    });
  }

 private:
  // Calls body(piece, bytes) for the pieces of the next `bytes`.
  template <class Body>
  void move(int64_t bytes, const Body& body) {
    while (bytes > 0) {
      const int64_t rest = states_.page_bytes[page_] - within_, count = bytes < rest ? bytes : rest;
      body(static_cast<char*>(states_.pages[page_]) + *block_ * states_.page_bytes[page_] + within_,
           count);
      bytes -= count;
      skip(count);
    }
  }

  const headrace_states& states_;
  const int64_t* block_;
  int64_t within_ = 0;
  int page_ = 0;
};

// Part of a float32 matrix with `width` columns. Its rows are copied `stride` elements apart, with
// zeros after the columns.
struct Tile {
  int64_t rows, columns, width, stride;

  int64_t elements() const { return rows * stride; }

  void read(Cursor cursor, float* tile) const {
    if (columns == stride && columns == width) return cursor.read(tile, elements() * sizeof(float));
    for (int64_t r = 0; r < rows; ++r, tile += stride) {
      cursor.read(tile, columns * sizeof(float));
      std::memset(tile + columns, 0, (stride - columns) * sizeof(float));
      cursor.skip((width - columns) * sizeof(float));
    }
  }

  void write(Cursor cursor, const float* tile) const {
    if (columns == stride && columns == width) return cursor.write(tile, elements() * sizeof(float));
    for (int64_t r = 0; r < rows; ++r, tile += stride) {
      cursor.write(tile, columns * sizeof(float));
      cursor.skip((width - columns) * sizeof(float));
    }
  }
};

// The states of a batch.
class States {
 public:
  explicit States(const headrace_states& states) : states_(states) {}

  int64_t sequences() const { return states_.num_seqs; }
  int64_t tokens() const { return states_.num_tokens; }
  int64_t begin(int64_t sequence) const { return states_.token_start[sequence]; }
  int64_t second() const { return states_.second; }
  bool fresh(int64_t sequence) const { return states_.fresh[sequence]; }

  int64_t sequence_of(int64_t token) const {
    int64_t low = 0, high = states_.num_seqs;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (begin(middle) <= token ? low : high) = middle;
    }
    return low;
  }

  // The state of a sequence before the batch.
  Cursor source(int64_t sequence, int64_t offset) const {
    return {states_, states_.sources + sequence * states_.stride, offset};
  }

  // Reads a tile of a sequence's state, calls scan(begin, end) for each run, and writes the tile
  // after it.
  template <class Scan>
  void advance(const Tile& shape, int64_t sequence, int64_t offset, float* tile,
               const Scan& scan) const {
    if (fresh(sequence))
      std::memset(tile, 0, shape.elements() * sizeof(float));
    else
      shape.read(source(sequence, offset), tile);
    each_run(sequence, offset, scan, [&](Cursor cursor) { shape.write(cursor, tile); });
  }

  // Calls advance(begin, end) for each run of a sequence, then write(cursor) for each place of the
  // state after it.
  template <class Advance, class Write>
  void each_run(int64_t sequence, int64_t offset, const Advance& advance,
                const Write& write) const {
    int64_t at = begin(sequence);
    for (int64_t r = states_.run_start[sequence]; r < states_.run_start[sequence + 1]; ++r) {
      advance(at, states_.run_end[r]);
      at = states_.run_end[r];
      for (int64_t w = states_.write_start[r]; w < states_.write_start[r + 1]; ++w)
        write(Cursor(states_, states_.targets + states_.writes[w] * states_.stride, offset));
    }
  }

 private:
  const headrace_states& states_;
};

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

}  // namespace headrace
