// The state space of Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024), token by token.
//
// Per unit S [N][16], which stays in the first cache for all tokens of a piece:
//
//     S = exp(dt A) S + B (dt x)^T;  y = S^T C + D x
//
// Two tokens take one pass over S where there are two: each element goes through the same
// operations in the same order. Legend: see state_abi.h.
#include "recurrence/states.h"

namespace quire::QUIRE_ISA {
namespace {

// What the tokens of a chunk bring, in fp32. bc: [G][tokens][2][N], B then C.
// gates: [H][tokens][2], decay then dt.
struct Prepared {
  float* bc;
  float* gates;
  int64_t num_tokens;
};

// One head's part of it, for the tokens of a piece.
struct HeadTokens {
  const float* bc;
  const float* gates;
  int64_t num_tokens;
  int64_t state_size;
  float d;
};

inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

template <typename T>
void prepare_token(const Mamba2& call, int64_t t, int64_t first, const Prepared& to) {
  const int64_t size = call.state_size;
  const T* b = static_cast<const T*>(call.b) + t * call.b_stride;
  const T* c = static_cast<const T*>(call.c) + t * call.c_stride;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    float* out = to.bc + (g * to.num_tokens + t - first) * 2 * size;
    widen_row(b + g * size, size, out);
    widen_row(c + g * size, size, out + size);
  }
  for (int64_t h = 0; h < call.num_heads; ++h) {
    float* out = to.gates + (h * to.num_tokens + t - first) * 2;
    float dt = softplus(call.dt[t * call.num_heads + h] + call.dt_bias[h]);
    dt = dt < call.min_step ? call.min_step : dt > call.max_step ? call.max_step : dt;
    out[0] = __builtin_expf(dt * call.a[h]);
    out[1] = dt;
  }
}

// K tokens in one pass over U units.
template <int K, int U>
struct Pass {
  float* const* s;
  const float* bc;  // of the first token
  int64_t size;
  vf decay[K];
  vf input[K][U];  // dt x

  inline void row(int64_t i, vf (*out)[U]) const {
    vf x[U];
    for (int u = 0; u < U; ++u) x[u] = load(s[u] + i * kLanes);
    for (int k = 0; k < K; ++k) {
      const vf b = splat(bc[k * 2 * size + i]), c = splat(bc[(k * 2 + 1) * size + i]);
      for (int u = 0; u < U; ++u) {
        x[u] = fma(b, input[k][u], decay[k] * x[u]);
        out[k][u] = fma(x[u], c, out[k][u]);
      }
    }
    for (int u = 0; u < U; ++u) store(s[u] + i * kLanes, x[u]);
  }

  inline void run(vf (*out)[U]) const {
    vf even[K][U] = {}, odd[K][U] = {};
    int64_t i = 0;
    for (; i + 2 <= size; i += 2) {
      row(i, even);
      row(i + 1, odd);
    }
    if (i < size) row(i, even);
    for (int k = 0; k < K; ++k)
      for (int u = 0; u < U; ++u) out[k][u] = even[k][u] + odd[k][u];
  }
};

template <int K, int U, typename T>
inline void move_tokens(float* const* s, const HeadTokens& head, int64_t t, const T* x,
                        int64_t ldx, T* out, int64_t ldo) {
  Pass<K, U> pass{s, head.bc + t * 2 * head.state_size, head.state_size, {}, {}};
  vf raw[K][U], y[K][U];
  for (int k = 0; k < K; ++k) {
    pass.decay[k] = splat(head.gates[(t + k) * 2]);
    const vf dt = splat(head.gates[(t + k) * 2 + 1]);
    for (int u = 0; u < U; ++u) {
      raw[k][u] = load(x + (t + k) * ldx + u * kLanes);
      pass.input[k][u] = dt * raw[k][u];
    }
  }
  pass.run(y);
  for (int k = 0; k < K; ++k)
    for (int u = 0; u < U; ++u)
      store(out + (t + k) * ldo + u * kLanes, fma(splat(head.d), raw[k][u], y[k][u]));
}

template <int U, typename T>
void move_units(float* const* s, const HeadTokens& head, const T* x, int64_t ldx, T* out,
                int64_t ldo) {
  int64_t t = 0;
  for (; t + 2 <= head.num_tokens; t += 2) move_tokens<2, U>(s, head, t, x, ldx, out, ldo);
  if (t < head.num_tokens) move_tokens<1, U>(s, head, t, x, ldx, out, ldo);
}

template <typename T>
void move_head(const StateLayer& layer, const Mamba2& call, const Piece& piece, int64_t first,
               const Prepared& from, int64_t h) {
  const int64_t size = call.state_size, num_units = call.head_dim / kLanes;
  const int64_t group = h * call.num_groups / call.num_heads, t = piece.first - first;
  const HeadTokens head{from.bc + (group * from.num_tokens + t) * 2 * size,
                        from.gates + (h * from.num_tokens + t) * 2, piece.end - piece.first, size,
                        call.d[h]};
  const int64_t ldo = call.num_heads * call.head_dim;
  const T* x = static_cast<const T*>(call.x) + piece.first * call.x_stride + h * call.head_dim;
  T* out = static_cast<T*>(call.out) + piece.first * ldo + h * call.head_dim;
  for (int64_t unit = 0; unit < num_units;) {
    const int count = int(smaller(kPairedUnits, num_units - unit));
    float* s[kPairedUnits];
    for (int u = 0; u < count; ++u) {
      s[u] = unit_at(layer, piece.blocks, h * num_units + unit + u);
      if (piece.is_fresh) std::memset(s[u], 0, size * kLanes * sizeof(float));
    }
    const int64_t column = unit * kLanes;
    if (count == kPairedUnits)
      move_units<kPairedUnits>(s, head, x + column, call.x_stride, out + column, ldo);
    else
      move_units<1>(s, head, x + column, call.x_stride, out + column, ldo);
    unit += count;
  }
}

template <typename T>
void mamba2_as(Pool& pool, const StateLayer& layer, const StateStep& step, const Mamba2& call) {
  const int64_t num_tokens = step.query_start[step.num_sequences];
  const int64_t longest = smaller(num_tokens, kChunkTokens);
  auto* pieces = static_cast<Piece*>(pool.shared(0, longest * sizeof(Piece)));
  const int64_t bc_size = longest * call.num_groups * 2 * call.state_size;
  const int64_t gates_size = longest * call.num_heads * 2;
  auto* memory = static_cast<float*>(pool.shared(1, (bc_size + gates_size) * sizeof(float)));
  for (int64_t first = 0; first < num_tokens; first += kChunkTokens) {
    const int64_t end = smaller(num_tokens, first + kChunkTokens);
    const Prepared prepared{memory, memory + bc_size, end - first};
    for_tokens(pool, first, end, 8,
               [&](int64_t t) { prepare_token<T>(call, t, first, prepared); });
    const int64_t count = find_pieces(layer, step, first, end, pieces);
    pool.parallel(count * call.num_heads, [&](int64_t task, int) {
      move_head<T>(layer, call, pieces[task / call.num_heads], first, prepared,
                   task % call.num_heads);
    });
  }
}

}  // namespace

void mamba2(Pool& pool, const StateLayer& layer, const StateStep& step, const Mamba2& call) {
  if (call.dtype == kBF16)
    mamba2_as<uint16_t>(pool, layer, step, call);
  else
    mamba2_as<float>(pool, layer, step, call);
}

}  // namespace quire::QUIRE_ISA
