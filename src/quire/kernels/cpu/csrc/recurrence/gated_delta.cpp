// The gated delta rule (Yang et al., "Gated Delta Networks", 2024), token by token.
//
// Per unit S [dk][16], which stays in the first cache for all tokens of a piece:
//
//     read = S^T k;  delta = beta (v - exp(g) read);  S = exp(g) S + k delta^T;  o = S^T q
//
// The pass that updates S with token t also sums what token t + 1 reads, so that a token costs one
// pass: 1 load, 1 store, 4 multiplications for each row. The chunked form needs as many on these
// processors, and its result depends on where chunks begin. Legend: see state_abi.h.
#include "recurrence/states.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kNormEps = 1e-6f;

template <typename T>
inline void prepare_vector(const T* x, int64_t size, bool normalizes, float factor, float* out) {
  widen_row(x, size, out);
  if (normalizes) {
    vf sum{};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) sum = fma(load(out + i), load(out + i), sum);
    if (i < size) {
      const vf rest = load_n(out + i, int(size - i));
      sum = fma(rest, rest, sum);
    }
    factor *= 1.0f / __builtin_sqrtf(reduce_add(sum) + kNormEps);
  }
  for (int64_t i = 0; i < size; ++i) out[i] *= factor;
}

template <typename T>
void prepare_token(const GatedDelta& call, int64_t t, int64_t row, const Prepared& to) {
  const int64_t dk = call.key_dim;
  const T* q = static_cast<const T*>(call.q) + t * call.q_stride;
  const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
  const float scale = 1.0f / __builtin_sqrtf(float(dk));
  for (int64_t h = 0; h < call.num_k_heads; ++h) {
    float* out = to.vectors_of(h, row);
    prepare_vector(q + h * dk, dk, call.normalizes, scale, out);
    prepare_vector(k + h * dk, dk, call.normalizes, 1.0f, out + dk);
  }
  for (int64_t h = 0; h < call.num_v_heads; ++h) {
    float* out = to.gates_of(h, row);
    out[0] = __builtin_expf(call.g[t * call.num_v_heads + h]);
    out[1] = call.beta[t * call.num_v_heads + h];
  }
}

template <int V>
inline void read_row(const Columns<V>& columns, const float* k, int64_t row, part* sums) {
  const part factor = splat_part(k[row]);
  for (int v = 0; v < V; ++v)
    sums[v] = fma(load_part(columns.s[v] + row * kLanes), factor, sums[v]);
}

// sums of S^T k, even and odd rows apart. Fetches the even rows of the next columns.
template <int V>
inline void read_columns(const Columns<V>& columns, const float* k, int64_t dk, part* read) {
  part even[V] = {}, odd[V] = {};
  int64_t row = 0;
  for (; row + 2 <= dk; row += 2) {
    columns.fetch_next(row);
    read_row(columns, k, row, even);
    read_row(columns, k, row + 1, odd);
  }
  if (row < dk) read_row(columns, k, row, even);
  for (int v = 0; v < V; ++v) read[v] = even[v] + odd[v];
}

// The update by one token: S = decay S + k delta^T, o = S^T q, and S^T next_k for the next token,
// if there is one. The last token prefetches the odd rows of the next columns.
template <int V>
struct Update {
  const Columns<V>& columns;
  const float* q;
  const float* k;
  const float* next_k;  // after the last token: not read
  part decay;
  part delta[V];

  template <bool kHasNext>
  inline void row(int64_t i, part* out, part* read) const {
    const part key = splat_part(k[i]), query = splat_part(q[i]);
    const part next = splat_part(kHasNext ? next_k[i] : 0.0f);
    for (int v = 0; v < V; ++v) {
      float* s = columns.s[v] + i * kLanes;
      const part x = fma(key, delta[v], decay * load_part(s));
      store(s, x);
      out[v] = fma(x, query, out[v]);
      if (kHasNext) read[v] = fma(x, next, read[v]);
    }
  }

  template <bool kHasNext>
  inline void run(int64_t dk, part* out, part* read) const {
    part out_even[V] = {}, out_odd[V] = {}, even[V] = {}, odd[V] = {};
    int64_t i = 0;
    for (; i + 2 <= dk; i += 2) {
      if (!kHasNext) columns.fetch_next(i + 1);
      row<kHasNext>(i, out_even, even);
      row<kHasNext>(i + 1, out_odd, odd);
    }
    if (i < dk) row<kHasNext>(i, out_even, even);
    for (int v = 0; v < V; ++v) out[v] = out_even[v] + out_odd[v];
    for (int v = 0; v < V; ++v) read[v] = even[v] + odd[v];
  }
};

template <int V, typename T>
void move_through(const Columns<V>& columns, const HeadTokens<T>& tokens) {
  const int64_t dk = tokens.size;
  part read[V], result[V];
  read_columns(columns, tokens.vectors + dk, dk, read);
  for (int64_t t = 0; t < tokens.num_tokens; ++t) {
    const float* q = tokens.vectors + t * 2 * dk;
    Update<V> update{columns, q, q + dk, q + 3 * dk, splat_part(tokens.gates[t * 2]), {}};
    const part beta = splat_part(tokens.gates[t * 2 + 1]);
    for (int v = 0; v < V; ++v) {
      const part value = load_part(tokens.in + t * tokens.in_stride + v * kPartLanes);
      update.delta[v] = beta * (value - update.decay * read[v]);
    }
    if (t + 1 < tokens.num_tokens)
      update.template run<true>(dk, result, read);
    else
      update.template run<false>(dk, result, read);
    for (int v = 0; v < V; ++v)
      store(tokens.out + t * tokens.out_stride + v * kPartLanes, result[v]);
  }
}

template <typename T>
void gated_delta_as(Pool& pool, const StateLayer& layer, const StateStep& step,
                    const GatedDelta& call) {
  const Heads<T> heads{call.num_v_heads,
                       call.num_k_heads,
                       call.key_dim,
                       call.value_dim,
                       static_cast<const T*>(call.v),
                       call.v_stride,
                       static_cast<T*>(call.out)};
  move_states(
      pool, layer, step, heads,
      [&](int64_t t, int64_t row, const Prepared& to) { prepare_token<T>(call, t, row, to); },
      [](const auto& columns, const HeadTokens<T>& tokens, int64_t) {
        move_through(columns, tokens);
      });
}

}  // namespace

void gated_delta(Pool& pool, const StateLayer& layer, const StateStep& step,
                 const GatedDelta& call) {
  if (call.dtype == kBF16)
    gated_delta_as<uint16_t>(pool, layer, step, call);
  else
    gated_delta_as<float>(pool, layer, step, call);
}

}  // namespace quire::QUIRE_ISA
