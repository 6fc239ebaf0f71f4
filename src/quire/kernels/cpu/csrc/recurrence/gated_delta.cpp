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

template <int U>
inline void read_row(const Units<U>& units, const float* k, int64_t row, vf* sums) {
  const vf factor = splat(k[row]);
  for (int u = 0; u < U; ++u) sums[u] = fma(load(units.s[u] + row * kLanes), factor, sums[u]);
}

// sums of S^T k, even and odd rows apart. Fetches the even rows of the next units.
template <int U>
inline void read_units(const Units<U>& units, const float* k, int64_t dk, vf* read) {
  vf even[U] = {}, odd[U] = {};
  int64_t row = 0;
  for (; row + 2 <= dk; row += 2) {
    units.fetch_next(row);
    read_row(units, k, row, even);
    read_row(units, k, row + 1, odd);
  }
  if (row < dk) read_row(units, k, row, even);
  for (int u = 0; u < U; ++u) read[u] = even[u] + odd[u];
}

// Of one token: S = decay S + k delta^T, o = S^T q; and what the next token reads, if there is one.
// The last token fetches the odd rows of the next units.
template <int U>
struct Update {
  const Units<U>& units;
  const float* q;
  const float* k;
  const float* next_k;  // behind the last token: not read
  vf decay;
  vf delta[U];

  template <bool kHasNext>
  inline void row(int64_t i, vf* out, vf* read) const {
    const vf key = splat(k[i]), query = splat(q[i]), next = splat(kHasNext ? next_k[i] : 0.0f);
    for (int u = 0; u < U; ++u) {
      float* s = units.s[u] + i * kLanes;
      const vf x = fma(key, delta[u], decay * load(s));
      store(s, x);
      out[u] = fma(x, query, out[u]);
      if (kHasNext) read[u] = fma(x, next, read[u]);
    }
  }

  template <bool kHasNext>
  inline void run(int64_t dk, vf* out, vf* read) const {
    vf out_even[U] = {}, out_odd[U] = {}, even[U] = {}, odd[U] = {};
    int64_t i = 0;
    for (; i + 2 <= dk; i += 2) {
      if (!kHasNext) units.fetch_next(i + 1);
      row<kHasNext>(i, out_even, even);
      row<kHasNext>(i + 1, out_odd, odd);
    }
    if (i < dk) row<kHasNext>(i, out_even, even);
    for (int u = 0; u < U; ++u) out[u] = out_even[u] + out_odd[u];
    for (int u = 0; u < U; ++u) read[u] = even[u] + odd[u];
  }
};

template <int U, typename T>
void move_units(const Units<U>& units, const HeadTokens<T>& tokens) {
  const int64_t dk = tokens.size;
  vf read[U], result[U];
  read_units(units, tokens.vectors + dk, dk, read);
  for (int64_t t = 0; t < tokens.num_tokens; ++t) {
    const float* q = tokens.vectors + t * 2 * dk;
    Update<U> update{units, q, q + dk, q + 3 * dk, splat(tokens.gates[t * 2]), {}};
    const vf beta = splat(tokens.gates[t * 2 + 1]);
    for (int u = 0; u < U; ++u) {
      const vf v = load(tokens.in + t * tokens.in_stride + u * kLanes);
      update.delta[u] = beta * (v - update.decay * read[u]);
    }
    if (t + 1 < tokens.num_tokens)
      update.template run<true>(dk, result, read);
    else
      update.template run<false>(dk, result, read);
    for (int u = 0; u < U; ++u)
      store(tokens.out + t * tokens.out_stride + u * kLanes, result[u]);
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
      [](const auto& units, const HeadTokens<T>& tokens, int64_t) { move_units(units, tokens); });
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
