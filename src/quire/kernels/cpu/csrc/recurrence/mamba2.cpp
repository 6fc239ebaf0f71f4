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

inline float softplus(float x) {
  return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x));
}

template <typename T>
void prepare_token(const Mamba2& call, int64_t t, int64_t row, const Prepared& to) {
  const int64_t size = call.state_size;
  const T* b = static_cast<const T*>(call.b) + t * call.b_stride;
  const T* c = static_cast<const T*>(call.c) + t * call.c_stride;
  for (int64_t g = 0; g < call.num_groups; ++g) {
    float* out = to.vectors_of(g, row);
    widen_row(b + g * size, size, out);
    widen_row(c + g * size, size, out + size);
  }
  for (int64_t h = 0; h < call.num_heads; ++h) {
    float* out = to.gates_of(h, row);
    float dt = softplus(call.dt[t * call.num_heads + h] + (call.dt_bias ? call.dt_bias[h] : 0.0f));
    dt = dt < call.min_step ? call.min_step : dt > call.max_step ? call.max_step : dt;
    out[0] = __builtin_expf(dt * call.a[h]);
    out[1] = dt;
  }
}

// K tokens in one pass over V registers' worth of columns. The last pass fetches the next columns.
template <int K, int V>
struct Pass {
  const Columns<V>& columns;
  const float* bc;  // of the first token
  int64_t size;
  part decay[K];
  part input[K][V];  // dt x

  inline void row(int64_t i, part (*out)[V]) const {
    part x[V];
    for (int v = 0; v < V; ++v) x[v] = load_part(columns.s[v] + i * kLanes);
    for (int k = 0; k < K; ++k) {
      const part b = splat_part(bc[k * 2 * size + i]);
      const part c = splat_part(bc[(k * 2 + 1) * size + i]);
      for (int v = 0; v < V; ++v) {
        x[v] = fma(b, input[k][v], decay[k] * x[v]);
        out[k][v] = fma(x[v], c, out[k][v]);
      }
    }
    for (int v = 0; v < V; ++v) store(columns.s[v] + i * kLanes, x[v]);
  }

  template <bool kFetches>
  inline void run(part (*out)[V]) const {
    part even[K][V] = {}, odd[K][V] = {};
    int64_t i = 0;
    for (; i + 2 <= size; i += 2) {
      if (kFetches) columns.fetch_next(i);
      row(i, even);
      if (kFetches) columns.fetch_next(i + 1);
      row(i + 1, odd);
    }
    if (i < size) row(i, even);
    for (int k = 0; k < K; ++k)
      for (int v = 0; v < V; ++v) out[k][v] = even[k][v] + odd[k][v];
  }
};

template <int K, int V, typename T>
inline void move_tokens(const Columns<V>& columns, const HeadTokens<T>& tokens, int64_t t,
                        part d) {
  Pass<K, V> pass{columns, tokens.vectors + t * 2 * tokens.size, tokens.size, {}, {}};
  part raw[K][V], y[K][V];
  for (int k = 0; k < K; ++k) {
    pass.decay[k] = splat_part(tokens.gates[(t + k) * 2]);
    const part dt = splat_part(tokens.gates[(t + k) * 2 + 1]);
    for (int v = 0; v < V; ++v) {
      raw[k][v] = load_part(tokens.in + (t + k) * tokens.in_stride + v * kPartLanes);
      pass.input[k][v] = dt * raw[k][v];
    }
  }
  if (t + K == tokens.num_tokens)
    pass.template run<true>(y);
  else
    pass.template run<false>(y);
  for (int k = 0; k < K; ++k)
    for (int v = 0; v < V; ++v)
      store(tokens.out + (t + k) * tokens.out_stride + v * kPartLanes,
            fma(d, raw[k][v], y[k][v]));
}

template <int V, typename T>
void move_through(const Columns<V>& columns, const HeadTokens<T>& tokens, part d) {
  int64_t t = 0;
  for (; t + 2 <= tokens.num_tokens; t += 2) move_tokens<2>(columns, tokens, t, d);
  if (t < tokens.num_tokens) move_tokens<1>(columns, tokens, t, d);
}

template <typename T>
void mamba2_as(Pool& pool, const StateLayer& layer, const StateStep& step, const Mamba2& call) {
  const Heads<T> heads{call.num_heads,
                       call.num_groups,
                       call.state_size,
                       call.head_dim,
                       static_cast<const T*>(call.x),
                       call.x_stride,
                       static_cast<T*>(call.out)};
  move_states(
      pool, layer, step, heads,
      [&](int64_t t, int64_t row, const Prepared& to) { prepare_token<T>(call, t, row, to); },
      [&](const auto& columns, const HeadTokens<T>& tokens, int64_t h) {
        move_through(columns, tokens, splat_part(call.d ? call.d[h] : 0.0f));
      });
}

}  // namespace

void mamba2(Pool& pool, const StateLayer& layer, const StateStep& step, const Mamba2& call) {
  if (call.dtype == kBF16)
    mamba2_as<uint16_t>(pool, layer, step, call);
  else
    mamba2_as<float>(pool, layer, step, call);
}

}  // namespace quire::QUIRE_ISA
