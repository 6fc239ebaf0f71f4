// The structures of mixtures of experts that cross the C ABI; mirrored in experts_abi.py.
//
// Legend: T tokens, E experts, K experts of a token, H hidden size, F an expert's intermediate size.
#pragma once
#include "library/abi.h"

namespace quire {

// The function that turns logits into scores; kernels/routing.py has the formulas.
enum Scoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxOfChosen = 2 };

struct RouterLayer {
  int32_t num_experts;
  int32_t top_k;
  int32_t scoring;  // Scoring
  int32_t renormalizes;
  int32_t num_groups;
  int32_t top_groups;
  int32_t sums_best;
  int32_t rounds;  // weights are rounded to bf16
  float scale;
  int32_t reserved;
  const float* bias;    // [E], added to the scores for the choice; or null
  const float* scales;  // [E], multiply the weights at last; or null
};

// The choice for a token: its K experts, then as many weights.
union RoutingWord {
  int32_t expert;
  float weight;
};

// A layer's experts: gated MLPs of one size and format, whose gate and up are interleaved.
struct ExpertsLayer {
  int32_t num_experts;
  int32_t top_k;
  int32_t is_plain;    // silu(gate) * up, which their linear computes; else as kOpGated
  int32_t activation;  // ActivationKind
  float limit;
  float factor;
  float up_offset;
  int32_t reserved;
  const Weights* const* gate_up;  // [E], [2 F, H] each
  const Weights* const* down;     // [E], [H, F] each
};

// Linears that read different columns of the same rows, side by side.
struct LinearsByHead {
  int32_t num_heads;
  int32_t reserved;
  const Weights* const* linears;  // [num_heads], all of one format and size
};

}  // namespace quire
