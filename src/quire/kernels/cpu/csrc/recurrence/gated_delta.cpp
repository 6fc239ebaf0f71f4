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

// What the tokens of a chunk bring, in fp32. qk: [Hk][tokens][2][dk], q then k.
// gates: [Hv][tokens][2], decay then beta.
struct Prepared {
  float* qk;
  float* gates;
  int64_t num_tokens;
};

// One head's part of it, for the tokens of a piece.
struct HeadTokens {
  const float* qk;
  const float* gates;
  int64_t num_tokens;
  int64_t key_dim;
};

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
void prepare_token(const GatedDelta& call, int64_t t, int64_t first, const Prepared& to) {
  const int64_t dk = call.key_dim;
  const T* q = static_cast<const T*>(call.q) + t * call.q_stride;
  const T* k = static_cast<const T*>(call.k) + t * call.k_stride;
  const float scale = 1.0f / __builtin_sqrtf(float(dk));
  for (int64_t h = 0; h < call.num_k_heads; ++h) {
    float* out = to.qk + (h * to.num_tokens + t - first) * 2 * dk;
    prepare_vector(q + h * dk, dk, call.normalizes, scale, out);
    prepare_vector(k + h * dk, dk, call.normalizes, 1.0f, out + dk);
  }
  for (int64_t h = 0; h < call.num_v_heads; ++h) {
    float* out = to.gates + (h * to.num_tokens + t - first) * 2;
    out[0] = __builtin_expf(call.g[t * call.num_v_heads + h]);
    out[1] = call.beta[t * call.num_v_heads + h];
  }
}

template <int U>
inline void read_row(float* const* s, const float* k, int64_t row, vf* sums) {
  const vf factor = splat(k[row]);
  for (int u = 0; u < U; ++u) sums[u] = fma(load(s[u] + row * kLanes), factor, sums[u]);
}

// sums of S^T k, even and odd rows apart.
template <int U>
inline void read_units(float* const* s, const float* k, int64_t dk, vf* read) {
  vf even[U] = {}, odd[U] = {};
  int64_t row = 0;
  for (; row + 2 <= dk; row += 2) {
    read_row<U>(s, k, row, even);
    read_row<U>(s, k, row + 1, odd);
  }
  if (row < dk) read_row<U>(s, k, row, even);
  for (int u = 0; u < U; ++u) read[u] = even[u] + odd[u];
}

// Of one token: S = decay S + k delta^T, o = S^T q; and what the next token reads, if there is one.
template <int U>
struct Update {
  float* const* s;
  const float* q;
  const float* k;
  const float* next_k;  // behind the last token: not read
  vf decay;
  vf delta[U];

  template <bool kHasNext>
  inline void row(int64_t i, vf* out, vf* read) const {
    const vf key = splat(k[i]), query = splat(q[i]), next = splat(kHasNext ? next_k[i] : 0.0f);
    for (int u = 0; u < U; ++u) {
      const vf x = fma(key, delta[u], decay * load(s[u] + i * kLanes));
      store(s[u] + i * kLanes, x);
      out[u] = fma(x, query, out[u]);
      if (kHasNext) read[u] = fma(x, next, read[u]);
    }
  }

  template <bool kHasNext>
  inline void run(int64_t dk, vf* out, vf* read) const {
    vf out_even[U] = {}, out_odd[U] = {}, even[U] = {}, odd[U] = {};
    int64_t i = 0;
    for (; i + 2 <= dk; i += 2) {
      row<kHasNext>(i, out_even, even);
      row<kHasNext>(i + 1, out_odd, odd);
    }
    if (i < dk) row<kHasNext>(i, out_even, even);
    for (int u = 0; u < U; ++u) out[u] = out_even[u] + out_odd[u];
    for (int u = 0; u < U; ++u) read[u] = even[u] + odd[u];
  }
};

// U units, side by side, through all tokens of a piece. v and out: their first columns.
template <int U, typename T>
void move_units(float* const* s, const HeadTokens& head, const T* v, int64_t ldv, T* out,
                int64_t ldo) {
  const int64_t dk = head.key_dim;
  vf read[U], result[U];
  read_units<U>(s, head.qk + dk, dk, read);
  for (int64_t t = 0; t < head.num_tokens; ++t) {
    const float* q = head.qk + t * 2 * dk;
    Update<U> update{s, q, q + dk, q + 3 * dk, splat(head.gates[t * 2]), {}};
    const vf beta = splat(head.gates[t * 2 + 1]);
    for (int u = 0; u < U; ++u)
      update.delta[u] = beta * (load(v + t * ldv + u * kLanes) - update.decay * read[u]);
    if (t + 1 < head.num_tokens)
      update.template run<true>(dk, result, read);
    else
      update.template run<false>(dk, result, read);
    for (int u = 0; u < U; ++u) store(out + t * ldo + u * kLanes, result[u]);
  }
}

template <typename T>
void move_head(const StateLayer& layer, const GatedDelta& call, const Piece& piece, int64_t first,
               const Prepared& from, int64_t h) {
  const int64_t dv = call.value_dim, dk = call.key_dim, num_units = dv / kLanes;
  const int64_t key_head = h * call.num_k_heads / call.num_v_heads, t = piece.first - first;
  const HeadTokens head{from.qk + (key_head * from.num_tokens + t) * 2 * dk,
                        from.gates + (h * from.num_tokens + t) * 2, piece.end - piece.first, dk};
  const int64_t ldo = call.num_v_heads * dv;
  const T* v = static_cast<const T*>(call.v) + piece.first * call.v_stride + h * dv;
  T* out = static_cast<T*>(call.out) + piece.first * ldo + h * dv;
  for (int64_t unit = 0; unit < num_units;) {
    const int count = int(smaller(kPairedUnits, num_units - unit));
    float* s[kPairedUnits];
    for (int u = 0; u < count; ++u) {
      s[u] = unit_at(layer, piece.blocks, h * num_units + unit + u);
      if (piece.is_fresh) std::memset(s[u], 0, dk * kLanes * sizeof(float));
    }
    const int64_t column = unit * kLanes;
    if (count == kPairedUnits)
      move_units<kPairedUnits>(s, head, v + column, call.v_stride, out + column, ldo);
    else
      move_units<1>(s, head, v + column, call.v_stride, out + column, ldo);
    unit += count;
  }
}

template <typename T>
void gated_delta_as(Pool& pool, const StateLayer& layer, const StateStep& step,
                    const GatedDelta& call) {
  const int64_t num_tokens = step.query_start[step.num_sequences];
  const int64_t longest = smaller(num_tokens, kChunkTokens);
  auto* pieces = static_cast<Piece*>(pool.shared(0, longest * sizeof(Piece)));
  const int64_t qk_size = longest * call.num_k_heads * 2 * call.key_dim;
  const int64_t gates_size = longest * call.num_v_heads * 2;
  auto* memory = static_cast<float*>(pool.shared(1, (qk_size + gates_size) * sizeof(float)));
  for (int64_t first = 0; first < num_tokens; first += kChunkTokens) {
    const int64_t end = smaller(num_tokens, first + kChunkTokens);
    const Prepared prepared{memory, memory + qk_size, end - first};
    for_tokens(pool, first, end, 8,
               [&](int64_t t) { prepare_token<T>(call, t, first, prepared); });
    const int64_t count = find_pieces(layer, step, first, end, pieces);
    pool.parallel(count * call.num_v_heads, [&](int64_t task, int) {
      move_head<T>(layer, call, pieces[task / call.num_v_heads], first, prepared,
                   task % call.num_v_heads);
    });
  }
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
