// Embedding, RMSNorm, scales, GELU gate, and rotary with KV write.
//
// These are the operators between the linears and attention.
//
// Every stored intermediate is rounded to the model's dtype where torch, operator by operator,
// would store it; products and sums are rounded one by one (no fused multiply-add), so that all
// instruction sets compute the same bits. Legend: see abi.h.
#include "kernels_isa.h"
#include "attention/compact/compact_page.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// Elements that one thread handles sooner than a second one has begun: about 2 us of work.
constexpr int64_t kSerialElements = 8192;
constexpr int64_t kSerialCopyBytes = 65536;
// Consecutive tokens of a prompt share the cache lines of their KV unit, so one thread takes all.
constexpr int64_t kUnitTokens = 16;

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// f(first, end) over all of [0, count) in chunks, in parallel.
template <typename F>
void for_chunks(Pool& pool, int64_t count, int64_t chunk, F&& f) {
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

// 1 / sqrt(mean(x^2) + eps), from sums that are the same whatever the registers: of each sixteenth
// element in runs of 64, run after run, and of what is left behind the last one.
template <typename T>
inline float inverse_rms(const T* x, int64_t size, float eps) {
  vf sums[4] = {}, rest{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int part = 0; part < 4; ++part) {
      const vf v = load(x + i + part * kLanes);
      sums[part] += v * v;
    }
  for (; i < size; i += kLanes) {
    const vf v = load_up_to(x + i, size - i);
    rest += v * v;
  }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]) + rest);
  return 1.0f / __builtin_sqrtf(sum / float(size) + eps);
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

// f(m) for each of M rows of `size` elements, in parallel.
template <typename F>
void for_rows(Pool& pool, int64_t M, int64_t size, F&& f) {
  const int64_t chunk = kSerialElements / (2 * size) + 1;
  for_chunks(pool, M, M * size <= kSerialElements ? M : chunk,
             [=](int64_t first, int64_t end, int) {
               for (int64_t m = first; m < end; ++m) f(m);
             });
}

template <typename T>
void rms_norm_as(Pool& pool, const T* x, int64_t ldx, const T* weight, float eps,
                 const float* offset, T* out, int64_t ldo, int64_t M, int64_t size) {
  if (offset == nullptr)
    for_rows(pool, M, size,
             [=](int64_t m) { norm_row(x + m * ldx, weight, eps, out + m * ldo, size); });
  else
    for_rows(pool, M, size, [=, offset = *offset](int64_t m) {
      offset_norm_row(x + m * ldx, weight, eps, offset, out + m * ldo, size);
    });
}

template <typename T>
inline void scale_row(const T* x, float factor, bool adds, T* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    vf y = load_up_to(x + i, n) * splat(factor);
    if (adds) y = load_up_to(out + i, n) + rounded<T>(y);
    store_up_to(out + i, y, n);
  }
}

// x / 2 (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u).
inline vf gelu(vf x) {
  const vf u = splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x);
  return x / (splat(1.0f) + exp(splat(-2.0f) * u));
}

template <typename T>
inline void gelu_mul_row(const T* x, T* out, int64_t size) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int64_t n = size - i;
    const vf gate = rounded<T>(gelu(load_up_to(x + i, n)));
    store_up_to(out + i, gate * load_up_to(x + size + i, n), n);
  }
}

// One head, normalised where `norm` is not null, then its first R elements rotated, in place.
//   out[:R/2] = x[:R/2] * cos - x[R/2:R] * sin,  out[R/2:R] = x[R/2:R] * cos + x[:R/2] * sin
template <typename T>
inline void rotate_head(T* x, const T* norm, float eps, const float* cos, const float* sin,
                        int rotary_dim, int head_dim) {
  const int half = rotary_dim / 2;
  const vf scale = splat(norm != nullptr ? inverse_rms(x, head_dim, eps) : 1.0f);
  for (int d = 0; d < half; d += kLanes) {
    const int n = half - d;
    vf low = load_up_to(x + d, n), high = load_up_to(x + half + d, n);
    if (norm != nullptr) {
      low = rounded<T>(rounded<T>(low * scale) * load_up_to(norm + d, n));
      high = rounded<T>(rounded<T>(high * scale) * load_up_to(norm + half + d, n));
    }
    const vf c = load_up_to(cos + d, n), s = load_up_to(sin + d, n);
    store_up_to(x + d, rounded<T>(low * c) - rounded<T>(high * s), n);
    store_up_to(x + half + d, rounded<T>(high * c) + rounded<T>(low * s), n);
  }
  if (norm == nullptr) return;
  for (int d = rotary_dim; d < head_dim; d += kLanes) {
    const int n = head_dim - d;
    store_up_to(x + d, rounded<T>(load_up_to(x + d, n) * scale) * load_up_to(norm + d, n), n);
  }
}

template <typename T, typename Stored>
struct Rotation {
  const AttentionLayer& layer;
  const Rotary& rotary;
  const Step& step;
  KVPages<Stored> pages;
  T* qkv;
  int64_t ld;

  // turns: [R], a place for the position's cosines and sines, rounded as the model's dtype stores
  // them.
  void token(int64_t t, float* turns) const {
    const int D = layer.head_dim, R = rotary.rotary_dim;
    const float* row = rotary.table + step.positions[t] * R;
    for (int d = 0; d < R; d += kLanes)
      store_up_to(turns + d, rounded<T>(load_up_to(row + d, R - d)), R - d);
    const float *cos = turns, *sin = turns + R / 2;
    const int64_t slot = step.groups[layer.group].slot_mapping[t];
    T* head = qkv + t * ld;
    for (int h = 0; h < layer.num_heads; ++h, head += D)
      rotate_head(head, static_cast<const T*>(rotary.q_norm), rotary.norm_eps, cos, sin, R, D);
    for (int h = 0; h < layer.num_kv_heads; ++h, head += D) {
      rotate_head(head, static_cast<const T*>(rotary.k_norm), rotary.norm_eps, cos, sin, R, D);
      store_k(pages, slot, h, head);
    }
    for (int h = 0; h < layer.num_kv_heads; ++h, head += D) store_v(pages, slot, h, head);
  }
};

template <typename Stored, typename T>
void rotate_and_write_kv_as(Pool& pool, const AttentionLayer& layer, const Rotary& rotary,
                            const Step& step, T* qkv, int64_t ld) {
  const Rotation<T, Stored> rotation{layer, rotary, step, KVPages<Stored>(layer), qkv, ld};
  const int64_t T_ = step.num_tokens;
  const int64_t width = int64_t(layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
  int64_t chunk = min_of(kUnitTokens, T_ / 8 + 1);
  if (T_ * width <= kSerialElements / 2) chunk = T_;
  for_chunks(pool, T_, chunk, [&](int64_t first, int64_t end, int thread) {
    auto* turns = static_cast<float*>(pool.scratch(thread, rotary.rotary_dim * sizeof(float)));
    for (int64_t t = first; t < end; ++t) rotation.token(t, turns);
  });
}

}  // namespace

void rms_norm(Pool& pool, DType dtype, const void* x, int64_t ldx, const void* weight, float eps,
              const float* offset, void* out, int64_t ldo, int64_t M, int64_t size) {
  if (dtype == kBF16)
    rms_norm_as(pool, static_cast<const uint16_t*>(x), ldx, static_cast<const uint16_t*>(weight),
                eps, offset, static_cast<uint16_t*>(out), ldo, M, size);
  else
    rms_norm_as(pool, static_cast<const float*>(x), ldx, static_cast<const float*>(weight), eps,
                offset, static_cast<float*>(out), ldo, M, size);
}

void scale(Pool& pool, DType dtype, const void* x, int64_t ldx, float factor, bool adds, void* out,
           int64_t ldo, int64_t M, int64_t size) {
  const auto run = [&](auto* from, auto* to) {
    for_rows(pool, M, size,
             [=](int64_t m) { scale_row(from + m * ldx, factor, adds, to + m * ldo, size); });
  };
  if (dtype == kBF16)
    run(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out));
  else
    run(static_cast<const float*>(x), static_cast<float*>(out));
}

void gelu_mul(Pool& pool, DType dtype, const void* x, int64_t ldx, void* out, int64_t ldo,
              int64_t M, int64_t size) {
  const auto run = [&](auto* from, auto* to) {
    for_rows(pool, M, size, [=](int64_t m) { gelu_mul_row(from + m * ldx, to + m * ldo, size); });
  };
  if (dtype == kBF16)
    run(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(out));
  else
    run(static_cast<const float*>(x), static_cast<float*>(out));
}

void rotate_and_write_kv(Pool& pool, const AttentionLayer& layer, const Rotary& rotary,
                         const Step& step, void* qkv, int64_t ld) {
  const bool is_compact = layer.kv_format == kInt8KV;
  if (layer.dtype == kBF16) {
    const auto run = is_compact ? rotate_and_write_kv_as<uint8_t, uint16_t>
                                : rotate_and_write_kv_as<uint16_t, uint16_t>;
    run(pool, layer, rotary, step, static_cast<uint16_t*>(qkv), ld);
  } else {
    const auto run =
        is_compact ? rotate_and_write_kv_as<uint8_t, float> : rotate_and_write_kv_as<float, float>;
    run(pool, layer, rotary, step, static_cast<float*>(qkv), ld);
  }
}

void embed(Pool& pool, DType dtype, const void* table, const int64_t* token_ids, void* out,
           int64_t T, int64_t size) {
  const int64_t row_bytes = size * (dtype == kBF16 ? 2 : 4);
  const auto* rows = static_cast<const uint8_t*>(table);
  auto* to = static_cast<uint8_t*>(out);
  const int64_t chunk = kSerialCopyBytes / row_bytes + 1;
  for_chunks(pool, T, chunk, [=](int64_t first, int64_t end, int) {
    for (int64_t t = first; t < end; ++t)
      std::memcpy(to + t * row_bytes, rows + token_ids[t] * row_bytes, row_bytes);
  });
}

}  // namespace quire::QUIRE_ISA
