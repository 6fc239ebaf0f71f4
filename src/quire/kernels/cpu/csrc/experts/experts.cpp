// Experts of a layer, and linears of heads: products of many linears at once.
//
// The rows of all tokens' experts ("pairs", T K of them) are sorted by expert; each expert is a
// group of two grouped products (linear.h), between which there is one barrier instead of one for
// each expert. A token's results are then added in ascending order of its experts, with the
// roundings of kernels/experts.py:
//
//   out[t] = round(.. round(0 + round(w y)) .. + round(w y))
#include "elementwise/rows.h"
#include "kernels_isa.h"
#include "linear/linear.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

// The pool's shared memory; slots 0 to 3 are the linears'.
enum Slot { kPairs = 4, kInner = 5, kGateUp = 6, kOutputs = 7 };

// Rows that lie side by side in memory, `ld` elements apart.
struct Buffer {
  void* data;
  int64_t ld;
};

// Rows apart by a multiple of 4 KiB would meet in few sets of the L1 cache.
template <typename T>
Buffer make_buffer(Pool& pool, Slot slot, int64_t count, int64_t width) {
  const int64_t line = 64 / int64_t(sizeof(T));
  int64_t ld = divide_up(width, line) * line;
  if (ld * int64_t(sizeof(T)) % 4096 == 0) ld += line;
  return {pool.shared(slot, count * ld * int64_t(sizeof(T))), ld};
}

// Pairs of a token and one of its experts, sorted by expert, then by token.
struct Pairs {
  int64_t count;
  int64_t* offsets;        // [pairs] of the token's row, in elements
  float* weights;          // [pairs]
  int32_t* of_token;       // [T, K] a token's pairs in ascending order of experts
  LinearGroup* groups;     // one for each expert that a token has
  int32_t* experts;        // [groups] which it is
  int64_t* firsts;         // [groups] its first pair
  int64_t num_groups;
};

Pairs sort_pairs(Pool& pool, const ExpertsLayer& layer, const RoutingWord* routing, int64_t ldr,
                 int64_t ldx, int64_t T) {
  const int64_t K = layer.top_k, E = layer.num_experts, count = T * K;
  const int64_t num_bytes = count * int64_t(sizeof(int64_t) + sizeof(float) + 2 * sizeof(int32_t)) +
                            E * int64_t(sizeof(LinearGroup) + 2 * sizeof(int64_t) + sizeof(int32_t)) +
                            T * int64_t(sizeof(int32_t));
  auto* offsets = static_cast<int64_t*>(pool.shared(kPairs, num_bytes));
  auto* next = offsets + count;  // [E] where the next pair of an expert goes
  auto* firsts = next + E;
  auto* groups = reinterpret_cast<LinearGroup*>(firsts + E);
  auto* weights = reinterpret_cast<float*>(groups + E);
  auto* of_token = reinterpret_cast<int32_t*>(weights + count);
  auto* tokens = of_token + count;  // [pairs]
  auto* filled = tokens + count;    // [T]
  auto* experts = filled + T;
  std::memset(next, 0, E * sizeof(int64_t));
  for (int64_t t = 0; t < T; ++t)
    for (int64_t k = 0; k < K; ++k) ++next[routing[t * ldr + k].expert];
  int64_t num_groups = 0, first = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int64_t size = next[e];
    next[e] = first;
    if (size == 0) continue;
    groups[num_groups] = {layer.gate_up[e], first, size, nullptr};
    experts[num_groups] = int32_t(e);
    firsts[num_groups++] = first;
    first += size;
  }
  for (int64_t t = 0; t < T; ++t)
    for (int64_t k = 0; k < K; ++k) {
      const int64_t pair = next[routing[t * ldr + k].expert]++;
      offsets[pair] = t * ldx;
      weights[pair] = routing[t * ldr + K + k].weight;
      tokens[pair] = int32_t(t);
    }
  std::memset(filled, 0, T * sizeof(int32_t));
  for (int64_t pair = 0; pair < count; ++pair) {
    const int64_t t = tokens[pair];
    of_token[t * K + filled[t]++] = int32_t(pair);
  }
  return {count, offsets, weights, of_token, groups, experts, firsts, num_groups};
}

template <typename T>
class LayerRun {
 public:
  LayerRun(Pool& pool, const ExpertsLayer& layer, DType dtype, const void* x, int64_t ldx,
           int64_t num_tokens, Pairs pairs)
      : pool_(pool), layer_(layer), dtype_(dtype), x_(x), ldx_(ldx), num_tokens_(num_tokens),
        pairs_(pairs), F_(layer.gate_up[0]->interleave), H_(layer.down[0]->num_outputs) {}

  void run(T* out, int64_t ldo) {
    const Buffer inner = layer_.is_plain ? multiply_up(kInner, F_, kSiluMul) : gate_up();
    const Buffer outputs = make_buffer<T>(pool_, kOutputs, pairs_.count, H_);
    for (int64_t g = 0; g < pairs_.num_groups; ++g)
      pairs_.groups[g] = {layer_.down[pairs_.experts[g]], pairs_.firsts[g], pairs_.groups[g].count,
                          row(outputs, pairs_.firsts[g])};
    multiply_groups(pool_, {pairs_.groups, pairs_.num_groups, dtype_, inner.data, inner.ld, nullptr,
                            pairs_.count, dtype_, outputs.ld, kStore});
    const int64_t chunk = chunk_of(num_tokens_, H_ * layer_.top_k);
    for_chunks(pool_, num_tokens_, chunk, [&](int64_t first, int64_t end, int) {
      for (int64_t t = first; t < end; ++t) add_experts(outputs, t, out + t * ldo);
    });
  }

 private:
  static void* row(const Buffer& rows, int64_t i) { return static_cast<T*>(rows.data) + i * rows.ld; }

  Buffer multiply_up(Slot slot, int64_t width, Epilogue epilogue) {
    const Buffer to = make_buffer<T>(pool_, slot, pairs_.count, width);
    for (int64_t g = 0; g < pairs_.num_groups; ++g)
      pairs_.groups[g].out = row(to, pairs_.firsts[g]);
    LinearCall call{pairs_.groups, pairs_.num_groups, dtype_, x_, ldx_, pairs_.offsets,
                    pairs_.count, dtype_, to.ld, epilogue};
    if (num_tokens_ == 1) {  // all experts read the only row as it is
      for (int64_t g = 0; g < pairs_.num_groups; ++g) pairs_.groups[g].first = 0;
      call.offsets = nullptr;
      call.M = 1;
    }
    multiply_groups(pool_, call);
    return to;
  }

  Buffer gate_up() {
    const Buffer both = multiply_up(kGateUp, 2 * F_, kStore);
    const Buffer inner = make_buffer<T>(pool_, kInner, pairs_.count, F_);
    Op op{};
    op.dtype = op.out_dtype = dtype_;
    op.activation = layer_.activation;
    op.limit = layer_.limit;
    op.factor = layer_.factor;
    op.up_offset = layer_.up_offset;
    op.num_heads = 1;
    op.size = F_;
    op.in = both.data;
    op.in_stride = both.ld;
    op.out = inner.data;
    op.out_stride = inner.ld;
    gated(pool_, op, pairs_.count);
    return inner;
  }

  void add_experts(const Buffer& outputs, int64_t t, T* out) const {
    const int32_t* pairs = pairs_.of_token + t * layer_.top_k;
    for (int64_t i = 0; i < H_; i += kLanes) {
      const int64_t n = H_ - i;
      vf sum{};
      for (int64_t k = 0; k < layer_.top_k; ++k) {
        const T* y = static_cast<const T*>(row(outputs, pairs[k]));
        sum = rounded<T>(sum + rounded<T>(load_up_to(y + i, n) * splat(pairs_.weights[pairs[k]])));
      }
      store_up_to(out + i, sum, n);
    }
  }

  Pool& pool_;
  const ExpertsLayer& layer_;
  DType dtype_;
  const void* x_;
  int64_t ldx_, num_tokens_;
  Pairs pairs_;
  int64_t F_, H_;
};

}  // namespace

void experts(Pool& pool, const ExpertsLayer& layer, DType dtype, const void* x, int64_t ldx,
             const RoutingWord* routing, int64_t ldr, int64_t M, void* out, int64_t ldo) {
  if (M == 0) return;
  const Pairs pairs = sort_pairs(pool, layer, routing, ldr, ldx, M);
  if (dtype == kBF16)
    LayerRun<uint16_t>(pool, layer, dtype, x, ldx, M, pairs).run(static_cast<uint16_t*>(out), ldo);
  else
    LayerRun<float>(pool, layer, dtype, x, ldx, M, pairs).run(static_cast<float*>(out), ldo);
}

void linears_by_head(Pool& pool, const LinearsByHead& heads, DType dtype, const void* x,
                     int64_t ldx, int64_t head_ldx, int64_t M, void* out, int64_t ldo,
                     int64_t head_ldo) {
  if (M == 0) return;
  const int64_t count = heads.num_heads * M;
  const int64_t num_bytes = count * int64_t(sizeof(int64_t)) +
                            heads.num_heads * int64_t(sizeof(LinearGroup));
  auto* offsets = static_cast<int64_t*>(pool.shared(kPairs, num_bytes));
  auto* groups = reinterpret_cast<LinearGroup*>(offsets + count);
  const int64_t out_bytes = head_ldo * (dtype == kBF16 ? 2 : 4);
  for (int64_t h = 0; h < heads.num_heads; ++h) {
    groups[h] = {heads.linears[h], h * M, M, static_cast<char*>(out) + h * out_bytes};
    for (int64_t m = 0; m < M; ++m) offsets[h * M + m] = m * ldx + h * head_ldx;
  }
  multiply_groups(pool, {groups, heads.num_heads, dtype, x, ldx, offsets, count, dtype, ldo,
                         kStore});
}

}  // namespace quire::QUIRE_ISA
