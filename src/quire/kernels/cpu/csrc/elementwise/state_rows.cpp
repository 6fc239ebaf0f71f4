// The operations of layers with states or latents between their linears.
//
// Rounds as kernels/gated_rms_norm.py, delta_gates.py and join_turned.py; see also rows.h. Legend:
// see abi.h.
#include <cstring>

#include "kernels_isa.h"

#include "elementwise/activation_math.h"
#include "elementwise/rotate_head.h"

namespace quire::QUIRE_ISA {
namespace {

// weight * round(x / rms(x)) * silu(gate); the product with the weight is rounded, too.
template <typename T>
inline void norm_then_gate(const T* x, const T* gate, const T* weight, float eps, T* out,
                           int64_t size) {
  const vf scale = splat(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf normed = rounded<T>(load_up_to(x + i, n) * scale) * load_up_to(weight + i, n);
    store_up_to(out + i, rounded<T>(normed) * silu(load_up_to(gate + i, n)), n);
  }
}

// weight * z / rms(z), z = x * silu(gate); rounded once.
template <typename T>
inline void gate_then_norm(const T* x, const T* gate, const T* weight, float eps, T* out,
                           int64_t size) {
  vf squares{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf z = load_up_to(x + i, n) * silu(load_up_to(gate + i, n));
    squares += n >= kLanes ? z * z : keep_lanes(z * z, 0, int(n), 0.0f);
  }
  const vf scale = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / float(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf z = load_up_to(x + i, n) * silu(load_up_to(gate + i, n));
    store_up_to(out + i, load_up_to(weight + i, n) * (z * scale), n);
  }
}

inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

inline float as_float(float x) { return x; }
inline float as_float(uint16_t x) { return to_float(x); }

template <typename T>
class TurnedTail {
 public:
  TurnedTail(const Op& op, const Step& step)
      : op_(op), step_(step), x_(rows_of_in<T>(op)), tail_(rows_of_second<T>(op)),
        out_(rows_of_out<T>(op)) {}

  int64_t scratch_bytes() const { return op_.second_size * sizeof(float); }

  // turns: scratch memory; the caller knows its size.
  void token(int64_t t, float* turns) const {
    const int R = int(op_.second_size);
    round_turns<T>(op_.rotary->table + step_.positions[t] * R, R, turns);
    const HeadNorm<T> none{};
    for (int64_t h = 0; h < op_.num_heads; ++h) {
      T* out = out_.at(t, h);
      std::memcpy(out, x_.at(t, h), op_.size * sizeof(T));
      rotate_head(tail_.at(t, h), none, turns, turns + R / 2, R, R, out + op_.size);
    }
  }

 private:
  const Op& op_;
  const Step& step_;
  const Rows<const T> x_, tail_;
  const Rows<T> out_;
};

// f(t, i, out) for each element of M tokens' rows of fp32.
template <typename F>
void for_elements(Pool& pool, const Op& op, int64_t M, F&& f) {
  const auto outs = rows_of_out<float>(op);
  for_rows(pool, op, M, [=](int64_t t, int64_t h) {
    float* out = outs.at(t, h);
    for (int64_t i = 0; i < op.size; ++i) f(t, i, out + i);
  });
}

}  // namespace

void join_turned(Pool& pool, const Op& op, const Step& step) {
  with_dtype(op.dtype, [&](auto zero) {
    const TurnedTail<decltype(zero)> joined(op, step);
    const int64_t M = step.num_tokens, width = op.num_heads * (op.size + op.second_size);
    for_chunks(pool, M, chunk_of(M, width), [&](int64_t first, int64_t end, int thread) {
      auto* scratch = static_cast<float*>(pool.scratch(thread, joined.scratch_bytes()));
      for (int64_t t = first; t < end; ++t) joined.token(t, scratch);
    });
  });
}

void gated_rms_norm(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op), gates = rows_of_second<T>(op);
    const auto outs = rows_of_out<T>(op);
    const auto* weight = static_cast<const T*>(op.weight);
    const auto norm = op.gates_first ? gate_then_norm<T> : norm_then_gate<T>;
    for_rows(pool, op, M, [=](int64_t t, int64_t h) {
      norm(rows.at(t, h), gates.at(t, h), weight + h * op.second_size, op.eps, outs.at(t, h),
           op.size);
    });
  });
}

void delta_decay(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    const auto rows = rows_of_in<decltype(zero)>(op);
    const auto *rate = static_cast<const float*>(op.weight),
               *bias = static_cast<const float*>(op.bias);
    for_elements(pool, op, M, [=](int64_t t, int64_t i, float* out) {
      *out = rate[i] * softplus(as_float(rows.at(t, 0)[i]) + bias[i]);
    });
  });
}

void delta_step(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op);
    const auto outs = rows_of_out<float>(op);
    for_rows(pool, op, M, [=, size = op.size](int64_t t, int64_t h) {
      const T* x = rows.at(t, h);
      float* out = outs.at(t, h);
      for (int64_t i = 0; i < size; i += kLanes)
        store_up_to(out + i, rounded<T>(sigmoid(load_up_to(x + i, size - i))), size - i);
    });
  });
}

void widen(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    const auto rows = rows_of_in<decltype(zero)>(op);
    for_elements(pool, op, M,
                 [=](int64_t t, int64_t i, float* out) { *out = as_float(rows.at(t, 0)[i]); });
  });
}

void scale_columns(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto rows = rows_of_in<T>(op);
    const auto outs = rows_of_out<T>(op);
    const auto* factors = static_cast<const T*>(op.weight);
    for_rows(pool, op, M, [=, size = op.size](int64_t t, int64_t h) {
      const T* x = rows.at(t, h);
      T* out = outs.at(t, h);
      for (int64_t i = 0; i < size; i += kLanes)
        store_up_to(out + i, load_up_to(x + i, size - i) * load_up_to(factors + i, size - i),
                    size - i);
    });
  });
}

}  // namespace quire::QUIRE_ISA
