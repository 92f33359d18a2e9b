// Working memory of a step, and loops over rows that are too short for many threads.
#pragma once

#include <cstdlib>

#include "pool.h"
#include "quant.h"

namespace headrace {

// Rows with fewer elements than this are not worth waking a helper.
constexpr int64_t kSerialElements = 4096;
constexpr int64_t kAlignment = 64;

// Memory that grows to the largest size that a step has needed so far.
class Memory {
 public:
  ~Memory() { std::free(begin_); }

  bool reserve(int64_t bytes) {
    used_ = 0;
    if (bytes <= size_) return true;
    std::free(begin_);
    size_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    begin_ = static_cast<char*>(std::aligned_alloc(kAlignment, size_));
    if (!begin_) size_ = 0;
    return begin_ != nullptr;
  }

  // The next `count` elements; `reserve` has made room for them.
  template <class T>
  T* take(int64_t count) {
    T* taken = reinterpret_cast<T*>(begin_ + used_);
    used_ += bytes<T>(count);
    return taken;
  }

  template <class T>
  static int64_t bytes(int64_t count) {
    return (count * int64_t(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  char* begin_ = nullptr;
  int64_t size_ = 0, used_ = 0;
};

inline int64_t padded(int64_t outputs) { return panels_of(outputs) * kPanel; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(row) for each row, on the pool if that is worthwhile.
template <class Body>
void each_row(Pool& pool, int64_t rows, int64_t width, const Body& body) {
  const int64_t block = kSerialElements / width + 1, blocks = (rows + block - 1) / block;
  pool.run(blocks, [&](int64_t item, int) {
    const int64_t end = (item + 1) * block < rows ? (item + 1) * block : rows;
    for (int64_t r = item * block; r < end; ++r) body(r);
  });
}

// Buffers that products need besides rows and weights.
struct Scratch {
  float *factors = nullptr, *scales = nullptr;
  int8_t* data = nullptr;
  int32_t* sums = nullptr;
  float* unpacked = nullptr;  // a panel of floats for each thread

  static int64_t bytes(int threads, int64_t rows, int64_t widest) {
    return Memory::bytes<float>(rows * padded(widest)) + Memory::bytes<int8_t>(rows * widest) +
           Memory::bytes<float>(rows * groups_of(widest)) +
           Memory::bytes<int32_t>(rows * kHalves * groups_of(widest)) +
           Memory::bytes<float>(threads * kPanel * widest);
  }

  void take(Memory& memory, int threads, int64_t rows, int64_t widest) {
    factors = memory.take<float>(rows * padded(widest));
    data = memory.take<int8_t>(rows * widest);
    scales = memory.take<float>(rows * groups_of(widest));
    sums = memory.take<int32_t>(rows * kHalves * groups_of(widest));
    unpacked = memory.take<float>(threads * kPanel * widest);  // pages that are not used are free
  }

  // Rows of the type that products multiply, stored in this scratch if they have another one.
  template <class Math>
  Rows<typename Math::Factor> factors_of(Pool& pool, const Rows<typename Math::Element>& rows,
                                         int64_t inputs) const {
    if constexpr (std::is_same<typename Math::Factor, typename Math::Element>::value) {
      return rows;
    } else {
      const int64_t stride = padded(inputs);
      each_row(pool, rows.count, inputs, [&](int64_t r) {
        Math::pack_row(factors + r * stride, rows.data + r * rows.stride, int(inputs));
      });
      return {factors, stride, rows.count};
    }
  }

  // Rows rounded to 8 bits, stored in this scratch.
  template <class Element>
  QuantRows quantize(Pool& pool, const Rows<Element>& rows, int64_t inputs) const {
    const int64_t groups = groups_of(inputs);
    each_row(pool, rows.count, inputs, [&](int64_t r) {
      quantize_row(rows.data + r * rows.stride, inputs, data + r * inputs, scales + r * groups,
                   sums + r * kHalves * groups);
    });
    return {data, scales, sums, inputs, groups, rows.count};
  }
};

}  // namespace headrace
