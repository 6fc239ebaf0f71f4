// Rows of an operation between linears and attention, and loops over them.
//
// Every stored intermediate is rounded to the model's dtype where torch, operator by operator,
// would store it; products and sums are rounded one by one (no fused multiply-add) but within
// exponentials and their like, so that all instruction sets compute the same bits of the rest. A
// row is computed by one thread, from its own elements alone. Legend: see abi.h.
#pragma once
#include "library/program.h"
#include "simd.h"

namespace quire::QUIRE_ISA {

// Elements that one thread handles sooner than a second one has begun: about 2 us of work.
constexpr int64_t kSerialElements = 8192;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// f(first, end, thread) over all of [0, count) in chunks, in parallel. chunk: 0 where count is.
template <typename F>
inline void for_chunks(Pool& pool, int64_t count, int64_t chunk, F&& f) {
  if (count == 0) return;
  pool.parallel((count + chunk - 1) / chunk, [&](int64_t task, int thread) {
    f(task * chunk, min_of(count, (task + 1) * chunk), thread);
  });
}

template <typename T>
inline vf load_up_to(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load_n(p, int(n));
}

template <typename T>
inline void store_up_to(T* p, vf x, int64_t n) {
  if (n >= kLanes)
    store(p, x);
  else
    store_n(p, x, int(n));
}

// One operand: row h of token t begins at first + t * stride + h * head_stride.
template <typename T>
struct Rows {
  T* first;
  int64_t stride, head_stride;
  T* at(int64_t t, int64_t h) const { return first + t * stride + h * head_stride; }
};

template <typename T>
inline Rows<const T> rows_of_in(const Op& op) {
  return {static_cast<const T*>(op.in), op.in_stride, op.in_head_stride};
}

template <typename T>
inline Rows<const T> rows_of_second(const Op& op) {
  return {static_cast<const T*>(op.second), op.second_stride, op.second_head_stride};
}

template <typename T>
inline Rows<const T> rows_of_third(const Op& op) {
  return {static_cast<const T*>(op.third), op.third_stride, op.third_head_stride};
}

template <typename T>
inline Rows<T> rows_of_out(const Op& op) {
  return {static_cast<T*>(op.out), op.out_stride, op.out_head_stride};
}

// Number of tokens in a thread's chunk, of M tokens with `width` elements each.
inline int64_t chunk_of(int64_t M, int64_t width) {
  return M * width <= kSerialElements ? M : kSerialElements / (2 * width) + 1;
}

// f(t, h) for each row of M tokens, in parallel.
template <typename F>
inline void for_rows(Pool& pool, const Op& op, int64_t M, F&& f) {
  for_chunks(pool, M, chunk_of(M, op.num_heads * op.size), [&](int64_t first, int64_t end, int) {
    for (int64_t t = first; t < end; ++t)
      for (int64_t h = 0; h < op.num_heads; ++h) f(t, h);
  });
}

// f(t, h, first, count): elements [first, first + count) of each row of M tokens, in parallel, for
// operations whose elements don't depend on each other: a row of logits is divided.
template <typename F>
inline void for_pieces(Pool& pool, const Op& op, int64_t M, F&& f) {
  if (op.size <= 2 * kSerialElements || op.num_heads > 1) {
    for_rows(pool, op, M, [&](int64_t t, int64_t h) { f(t, h, 0, op.size); });
    return;
  }
  const int64_t num_pieces = (op.size + kSerialElements - 1) / kSerialElements;
  pool.parallel(M * num_pieces, [&](int64_t task, int) {
    const int64_t first = task % num_pieces * kSerialElements;
    f(task / num_pieces, 0, first, min_of(kSerialElements, op.size - first));
  });
}

// f(T{}), T what numbers of the dtype are stored as.
template <typename F>
inline void with_dtype(int32_t dtype, F&& f) {
  if (dtype == kBF16)
    f(uint16_t{});
  else
    f(float{});
}

}  // namespace quire::QUIRE_ISA
