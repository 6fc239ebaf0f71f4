// Fills the table of kernels; compiled once for each instruction set.
#include "library/kernels.h"
#include "kernels_isa.h"

namespace quire {

#define QUIRE_JOIN_(a, b) a##b
#define QUIRE_JOIN(a, b) QUIRE_JOIN_(a, b)
#define QUIRE_TEXT_(a) #a
#define QUIRE_TEXT(a) QUIRE_TEXT_(a)

extern const Kernels QUIRE_JOIN(kernels_, QUIRE_ISA);
const Kernels QUIRE_JOIN(kernels_, QUIRE_ISA) = {
    QUIRE_TEXT(QUIRE_ISA),
    QUIRE_ISA::linear,
    QUIRE_ISA::round_int8,
    QUIRE_ISA::round_int4,
    QUIRE_ISA::compensate_int8,
    QUIRE_ISA::attention,
    QUIRE_ISA::write_kv,
    QUIRE_ISA::rotate_and_write_kv,
    QUIRE_ISA::rms_norm,
    QUIRE_ISA::layer_norm,
    QUIRE_ISA::scale,
    QUIRE_ISA::embed,
    QUIRE_ISA::gated,
    QUIRE_ISA::activate,
    QUIRE_ISA::gate,
    QUIRE_ISA::soft_cap,
    QUIRE_ISA::join_turned,
    QUIRE_ISA::gated_rms_norm,
    QUIRE_ISA::delta_decay,
    QUIRE_ISA::delta_step,
    QUIRE_ISA::widen,
    QUIRE_ISA::scale_columns,
    QUIRE_ISA::argmax,
    QUIRE_ISA::sample,
    QUIRE_ISA::sample_allowed,
    QUIRE_ISA::forbid,
    QUIRE_ISA::token_logprobs,
    QUIRE_ISA::gated_delta,
    QUIRE_ISA::mamba2,
    QUIRE_ISA::short_conv,
    QUIRE_ISA::xxh3_128,
    QUIRE_ISA::route,
    QUIRE_ISA::experts,
    QUIRE_ISA::linears_by_head,
};

}  // namespace quire
