// Chooses the experts of each token.
//
// Formulas: kernels/routing.py. A token's choice depends on its logits alone. Of equal scores the
// lower id is chosen.
#include <cmath>

#include "elementwise/activation_math.h"
#include "kernels_isa.h"
#include "simd.h"

namespace quire::QUIRE_ISA {
namespace {

constexpr float kRenormalizationEps = 1e-20f;
// About 10 us of work.
constexpr int64_t kTokensPerTask = 8;

// x[0, n) with n a multiple of kLanes; the entries after the last number must be minus infinity.
void softmax(float* x, int64_t n) {
  float largest = x[0];
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  vf sums{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const vf e = exp(load(x + i) - splat(largest));
    store(x + i, e);
    sums += e;
  }
  const vf total = splat(reduce_add(sums));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) / total);
}

void sigmoids(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, sigmoid(load(x + i)));
}

// The first index of the largest of x[0, n) that is not taken; NaN is never larger than another.
int32_t take_largest(const float* x, int64_t n, uint8_t* taken) {
  int32_t best = -1;
  for (int64_t i = 0; i < n; ++i)
    if (!taken[i] && (best < 0 || x[i] > x[best])) best = int32_t(i);
  taken[best] = 1;
  return best;
}

// One token's arrays. Each has room for whole registers.
struct TokenChoice {
  const RouterLayer& router;
  float* scores;   // [E]
  float* choice;   // [E] scores for the choice, where there is a bias
  float* groups;   // [groups]
  float* weights;  // [K]
  uint8_t* taken;  // [E], then [groups]

  static int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

  static int64_t num_bytes(const RouterLayer& router) {
    return (3 * padded(router.num_experts) + padded(router.top_k)) * int64_t(sizeof(float)) +
           2 * padded(router.num_experts);
  }

  TokenChoice(const RouterLayer& r, void* memory) : router(r) {
    const int64_t size = padded(r.num_experts);
    scores = static_cast<float*>(memory);
    choice = scores + size;
    groups = choice + size;
    weights = groups + size;
    taken = reinterpret_cast<uint8_t*>(weights + padded(r.top_k));
  }

  template <typename T>
  void run(const T* logits, RoutingWord* to) const {
    const int64_t E = router.num_experts, K = router.top_k, size = padded(E);
    for (int64_t e = 0; e < size; e += kLanes) {
      const int64_t n = E - e < kLanes ? E - e : kLanes;
      store(scores + e, n == kLanes ? load(logits + e) : load_n(logits + e, int(n)));
    }
    for (int64_t e = E; e < size; ++e) scores[e] = -INFINITY;
    if (router.scoring == kSoftmax) softmax(scores, size);
    if (router.scoring == kSigmoid) sigmoids(scores, size);
    const float* by = scores;
    if (router.bias != nullptr) {
      for (int64_t e = 0; e < E; ++e) choice[e] = scores[e] + router.bias[e];
      by = choice;
    }
    std::memset(taken, 0, 2 * size);
    if (router.top_groups < router.num_groups) leave_out_groups(by);
    for (int64_t k = 0; k < K; ++k) {
      to[k].expert = take_largest(by, E, taken);
      weights[k] = scores[to[k].expert];
    }
    weigh();
    if (router.scales != nullptr)
      for (int64_t k = 0; k < K; ++k) weights[k] *= router.scales[to[k].expert];
    for (int64_t k = 0; k < K; ++k)
      to[K + k].weight = router.rounds ? to_float(to_bf16(weights[k])) : weights[k];
  }

 private:
  // Experts of groups that are not among the best count as taken.
  void leave_out_groups(const float* by) const {
    const int64_t size = router.num_experts / router.num_groups;
    uint8_t* chosen = taken + padded(router.num_experts);
    for (int64_t g = 0; g < router.num_groups; ++g) {
      float first = -INFINITY, second = -INFINITY;
      for (int64_t i = g * size; i < (g + 1) * size; ++i) {
        if (by[i] > first) {
          second = first;
          first = by[i];
        } else if (by[i] > second) {
          second = by[i];
        }
      }
      groups[g] = router.sums_best ? first + second : first;
    }
    for (int64_t i = 0; i < router.top_groups; ++i) take_largest(groups, router.num_groups, chosen);
    for (int64_t g = 0; g < router.num_groups; ++g)
      std::memset(taken + g * size, !chosen[g], size);
  }

  void weigh() const {
    const int64_t K = router.top_k;
    if (router.scoring == kSoftmaxOfChosen) {
      for (int64_t k = K; k < padded(K); ++k) weights[k] = -INFINITY;
      softmax(weights, padded(K));
    }
    if (router.renormalizes) {
      float total = 0;
      for (int64_t k = 0; k < K; ++k) total += weights[k];
      if (router.scoring == kSigmoid) total += kRenormalizationEps;
      for (int64_t k = 0; k < K; ++k) weights[k] /= total;
    }
    if (router.scale != 1.0f)
      for (int64_t k = 0; k < K; ++k) weights[k] *= router.scale;
  }
};

template <typename T>
void route_as(Pool& pool, const RouterLayer& router, const T* logits, int64_t ldx, int64_t M,
              RoutingWord* out, int64_t ldo) {
  pool.parallel((M + kTokensPerTask - 1) / kTokensPerTask, [&](int64_t task, int thread) {
    const TokenChoice token(router, pool.scratch(thread, TokenChoice::num_bytes(router)));
    const int64_t end = (task + 1) * kTokensPerTask < M ? (task + 1) * kTokensPerTask : M;
    for (int64_t m = task * kTokensPerTask; m < end; ++m) token.run(logits + m * ldx, out + m * ldo);
  });
}

}  // namespace

void route(Pool& pool, const RouterLayer& router, DType dtype, const void* logits, int64_t ldx,
           int64_t M, RoutingWord* out, int64_t ldo) {
  if (dtype == kBF16)
    route_as(pool, router, static_cast<const uint16_t*>(logits), ldx, M, out, ldo);
  else
    route_as(pool, router, static_cast<const float*>(logits), ldx, M, out, ldo);
}

}  // namespace quire::QUIRE_ISA
