// RMSNorm and LayerNorm.
#include "kernels_isa.h"
#include "elementwise/row_sums.h"

namespace quire::QUIRE_ISA {
namespace {

template <typename T>
inline void plain_norm_row(const T* x, float eps, T* out, int64_t size) {
  const vf scale = splat(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    store_up_to(out + i, load_up_to(x + i, n) * scale, n);
  }
}

template <typename T>
inline void norm_row(const T* x, const T* weight, float eps, T* out, int64_t size) {
  const vf scale = splat(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf y = rounded<T>(load_up_to(x + i, n) * scale) * load_up_to(weight + i, n);
    store_up_to(out + i, y, n);
  }
}

template <typename T>
inline void offset_norm_row(const T* x, const T* weight, float eps, float offset, T* out,
                            int64_t size) {
  const vf scale = splat(inverse_rms(x, size, eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf factor = load_up_to(weight + i, n) + splat(offset);
    store_up_to(out + i, load_up_to(x + i, n) * scale * factor, n);
  }
}

// weight * (x - mean) / sqrt(mean((x - mean)^2) + eps) + bias
template <typename T>
inline void layer_norm_row(const T* x, const T* weight, const T* bias, float eps, T* out,
                           int64_t size) {
  const vf mean = splat(sum_row(x, size, [](vf v) { return v; }) / float(size));
  const float squares = sum_row(x, size, [=](vf v) { return (v - mean) * (v - mean); });
  const vf scale = splat(1.0f / __builtin_sqrtf(squares / float(size) + eps));
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    vf y = (load_up_to(x + i, n) - mean) * scale * load_up_to(weight + i, n);
    if (bias != nullptr) y = y + load_up_to(bias + i, n);
    store_up_to(out + i, y, n);
  }
}

}  // namespace

void rms_norm(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = rows_of_in<T>(op);
    const auto out = rows_of_out<T>(op);
    const auto* weight = static_cast<const T*>(op.weight);
    const float eps = op.eps, offset = op.factor;
    const int64_t size = op.size;
    if (weight == nullptr)
      for_rows(pool, op, M,
               [=](int64_t t, int64_t h) { plain_norm_row(x.at(t, h), eps, out.at(t, h), size); });
    else if (op.kind == kOpRmsNorm)
      for_rows(pool, op, M, [=](int64_t t, int64_t h) {
        norm_row(x.at(t, h), weight, eps, out.at(t, h), size);
      });
    else
      for_rows(pool, op, M, [=](int64_t t, int64_t h) {
        offset_norm_row(x.at(t, h), weight, eps, offset, out.at(t, h), size);
      });
  });
}

void layer_norm(Pool& pool, const Op& op, int64_t M) {
  with_dtype(op.dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto x = rows_of_in<T>(op);
    const auto out = rows_of_out<T>(op);
    const auto *weight = static_cast<const T*>(op.weight), *bias = static_cast<const T*>(op.bias);
    for_rows(pool, op, M, [=, eps = op.eps, size = op.size](int64_t t, int64_t h) {
      layer_norm_row(x.at(t, h), weight, bias, eps, out.at(t, h), size);
    });
  });
}

}  // namespace quire::QUIRE_ISA
