// Activations, gates and the soft cap.
#include "attention/attention_math.h"
#include "elementwise/activation_math.h"
#include "elementwise/rows.h"
#include "kernels_isa.h"

namespace quire::QUIRE_ISA {
namespace {

// f(T{}, act) with act the function on sixteen numbers, or on a register. Numbers are stored as T.
template <typename F>
inline void with_function(const Op& op, F&& f) {
  with_dtype(op.dtype, [&](auto zero) {
    switch (op.activation) {
      case kActSilu:
        f(zero, [](auto x) { return silu(x); });
        break;
      case kActGelu:
        f(zero, [](auto x) { return gelu(x); });
        break;
      case kActGeluTanh:
        f(zero, [](auto x) { return gelu_tanh(x); });
        break;
      case kActRelu:
        f(zero, [](auto x) { return relu(x); });
        break;
      case kActReluSquared:
        f(zero, [](auto x) { return relu(x) * relu(x); });
        break;
      case kActSigmoid:
        f(zero, [](auto x) { return sigmoid(x); });
        break;
      case kActIdentity:
        f(zero, [](auto x) { return x; });
        break;
    }
  });
}

// f(i, n) for each run of at most sixteen elements of a row, i the first of n that are left.
template <typename F>
inline void for_lanes(int64_t size, F&& f) {
  for (int64_t i = 0; i < size; i += kLanes) f(i, size - i);
}

// out = join(gate, up)
template <typename T, typename F>
inline void join_gates(Pool& pool, const Op& op, int64_t M, F&& join) {
  const auto rows = rows_of_in<T>(op);
  const auto outs = rows_of_out<T>(op);
  for_rows(pool, op, M, [=, size = op.size](int64_t t, int64_t h) {
    const T* x = rows.at(t, h);
    T* out = outs.at(t, h);
    for_lanes(size, [=](int64_t i, int64_t n) {
      store_up_to(out + i, join(load_up_to(x + i, n), load_up_to(x + size + i, n)), n);
    });
  });
}

}  // namespace

void gated(Pool& pool, const Op& op, int64_t M) {
  const Gating gating{op.limit, op.factor, op.up_offset};
  with_function(op, [&](auto zero, auto act) {
    using T = decltype(zero);
    if (is_plain(gating))
      join_gates<T>(pool, op, M, [=](vf gate, vf up) { return rounded<T>(act(gate)) * up; });
    else
      join_gates<T>(pool, op, M,
                    [=](vf gate, vf up) { return gated_product<T>(gate, up, gating, act); });
  });
}

void activate(Pool& pool, const Op& op, int64_t M) {
  with_function(op, [&](auto zero, auto act) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op);
    const auto outs = rows_of_out<T>(op);
    for_pieces(pool, op, M, [=](int64_t t, int64_t h, int64_t first, int64_t count) {
      const T* x = rows.at(t, h) + first;
      T* out = outs.at(t, h) + first;
      // GCC keeps values that are wider than a register in memory.
      int64_t whole = 0;
      for (; whole + kPartLanes <= count; whole += kPartLanes)
        store(out + whole, act(load_part(x + whole)));
      const int rest = int(count - whole);
      if (rest > 0) store_n(out + whole, act(load_part_n(x + whole, rest)), rest);
    });
  });
}

void gate(Pool& pool, const Op& op, int64_t M) {
  const bool is_one = op.second_size == 1;
  with_function(op, [&](auto zero, auto act) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op), gates = rows_of_second<T>(op);
    const auto outs = rows_of_out<T>(op);
    for_rows(pool, op, M, [=, size = op.size](int64_t t, int64_t h) {
      const T *x = rows.at(t, h), *by = gates.at(t, h);
      T* out = outs.at(t, h);
      float first[kLanes];
      store(first, rounded<T>(act(load_n(by, 1))));
      const vf one = splat(first[0]);
      for_lanes(size, [=](int64_t i, int64_t n) {
        const vf factor = is_one ? one : rounded<T>(act(load_up_to(by + i, n)));
        store_up_to(out + i, load_up_to(x + i, n) * factor, n);
      });
    });
  });
}

void soft_cap(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op);
    const auto outs = rows_of_out<T>(op);
    const float cap = op.factor;
    for_pieces(pool, op, M, [=](int64_t t, int64_t h, int64_t first, int64_t count) {
      const T* x = rows.at(t, h) + first;
      T* out = outs.at(t, h) + first;
      for_lanes(count, [=](int64_t i, int64_t n) {
        const vf share = rounded<T>(tanh(rounded<T>(load_up_to(x + i, n) / splat(cap))));
        store_up_to(out + i, share * splat(cap), n);
      });
    });
  });
}

}  // namespace quire::QUIRE_ISA
