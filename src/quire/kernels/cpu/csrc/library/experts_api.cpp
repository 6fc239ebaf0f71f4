// The functions of experts that the library exports.
#include "library/api.h"
#include "library/context.h"

using namespace quire;

extern "C" {

void quire_route(void* context, const RouterLayer* router, int32_t dtype, const void* logits,
                 int64_t ldx, int64_t M, RoutingWord* out, int64_t ldo) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->route(pool, *router, DType(dtype), logits, ldx, M, out, ldo);
}

void quire_experts(void* context, const ExpertsLayer* layer, int32_t dtype, const void* x,
                   int64_t ldx, const RoutingWord* routing, int64_t ldr, int64_t M, void* out,
                   int64_t ldo) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->experts(pool, *layer, DType(dtype), x, ldx, routing, ldr, M, out, ldo);
}

void quire_linears_by_head(void* context, const LinearsByHead* heads, int32_t dtype, const void* x,
                           int64_t ldx, int64_t head_ldx, int64_t M, void* out, int64_t ldo,
                           int64_t head_ldo) {
  auto& [kernels, pool] = *static_cast<Context*>(context);
  kernels->linears_by_head(pool, *heads, DType(dtype), x, ldx, head_ldx, M, out, ldo, head_ldo);
}

}  // extern "C"
